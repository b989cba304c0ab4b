"""Where a training loop is: the epoch, its pass over the data with `repeat`, and the step. Kept by `DataLoader`.

An epoch is what `set_epoch` names, an iteration is one `iter()` of the loader and reads one epoch, and a pass goes over
the data once: an epoch has `repeat` of them, so mostly one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec.structs import replace

from hetstream.mpi_dataworkers.errors import PipelineError
from hetstream.mpi_dataworkers.loader.pass_iterator import PassIterator


class Position(msgspec.Struct, frozen=True):
    """What the training loop has taken.

    Attributes:
        epoch: which epoch.
        pass_index: which of its passes.
        step: steps taken of that pass.
        shards: position in each of its shards, where it is divided.
        beginning: how the program's sampler began the pass, of `sampler_state`; None while it has not, or without one.
        drawn: digest of what the program's sampler gave for the steps taken.
        is_loaded: it was loaded, and nobody has named its epoch: at the end of that epoch, the next one begins.
    """

    epoch: int
    pass_index: int = 0
    step: int = 0
    shards: dict[str, Any] | None = None
    beginning: str | None = None
    drawn: str = ""
    is_loaded: bool = False

    def order_epoch(self, repeat: int | None) -> int:
        """The epoch whose order and augmentation the pass has, of `repeat` passes: no two passes have the same."""
        return self.epoch * (repeat or 1) + self.pass_index


class LoaderPosition:
    """Where one loader is.

    Attributes:
        next: where the next iteration begins.
        taken: what the training loop has taken.
    """

    def __init__(self) -> None:
        self.next = self.taken = Position(0)

    def begin_iteration(self) -> Position:
        """Where the iteration begins that begins now; the one after it begins with the next epoch."""
        begun, self.next = self.next, Position(self.next.epoch + 1)
        return begun

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration; keeps a loaded position inside that epoch."""
        self.next = replace(self.next, is_loaded=False) if epoch == self.next.epoch else Position(epoch)

    def load(self, loaded: Position) -> None:
        """Continue from a saved position."""
        self.next = self.taken = loaded

    def began_after(self, epoch: int) -> None:
        """An iteration that was to continue an epoch has begun the one after it."""
        if self.next == Position(epoch + 1):
            self.next = Position(epoch + 2)


@dataclass(frozen=True)
class LoaderPasses:
    """What a `PositionTracker` asks of its loader, which lives for as long as it is iterated.

    Attributes:
        begin: begins a pass, from a position on.
        num_steps: gives the number of steps of an iteration.
        repeat: passes of an epoch; None for an endless stream.
        dataset_name: what an error calls the dataset.
    """

    begin: Callable[[Position], PassIterator]
    num_steps: Callable[[], int]
    repeat: int | None
    dataset_name: str


class PositionTracker(Iterator[Any]):
    """One iteration: reads the passes of an epoch, and keeps the loader's position up to date.

    Args:
        passes: the loader's.
        position: the loader's.
        is_prefetched: its batches are fetched before the training loop asks: what was taken here is only in `taken`.

    Attributes:
        taken: position behind the batch that was given last.
    """

    def __init__(self, passes: LoaderPasses, position: LoaderPosition, is_prefetched: bool = False) -> None:
        self._passes = passes
        self._position = position
        self._is_prefetched = is_prefetched
        self._pass: PassIterator | None = None
        begun = position.begin_iteration()
        self._may_go_on = begun.is_loaded  # with the next epoch, as long as this one gave nothing
        self._begin(begun)
        position.taken = self.taken

    def _move_to(self, taken: Position) -> None:
        self.taken = taken
        if not self._is_prefetched:
            self._position.taken = taken

    def _begin(self, at: Position) -> None:
        self._pass = begun = self._passes.begin(at)
        self._at = replace(at, beginning=begun.shards.beginning(), drawn=begun.shards.drawn())
        self._gave = at.step > 0 or at.shards is not None  # a pass that is continued may be at its end
        self._move_to(self._at)

    def __next__(self) -> Any:
        while self._pass is not None:
            try:
                batch = next(self._pass)
            except StopIteration:
                self._end_pass(self._pass)
                continue
            except Exception:
                self._may_go_on = False
                self._note(self._pass)
                raise
            self._note(self._pass)
            self._gave, self._may_go_on = True, False
            return batch
        raise StopIteration

    def _end_pass(self, ended: PassIterator) -> None:
        """Begin the next pass, if there is one."""
        repeat, num_steps, at = self._passes.repeat, ended.shards.position, self._at
        self._pass = None
        if repeat is None and num_steps > 0 and not self._gave:
            raise PipelineError(
                f"{self._passes.dataset_name} gave no batch from its beginning to its end, because every sample was "
                "left out: an endless stream of it would never give one. stats() and the log say why."
            )
        # An endless stream of nothing ends.
        last = at.pass_index + 1 == repeat or (repeat is None and num_steps == 0)
        if last and self._may_go_on and self._gave:
            self._may_go_on = False
            self._position.began_after(at.epoch)
            self._begin(Position(at.epoch + 1))
        elif last:
            self._move_to(Position(at.epoch + 1))
        else:
            self._begin(Position(at.epoch, at.pass_index + 1))

    def _note(self, begun: PassIterator) -> None:
        at, shards = self._at, begun.shards
        state, drawn = begun.shard_state(), shards.drawn()
        self._move_to(Position(at.epoch, at.pass_index, shards.position, state, at.beginning, drawn))

    def __len__(self) -> int:
        return self._passes.num_steps()
