"""Where a training loop is: the iteration, its pass over the data with `repeat`, and the step. Kept by `DataLoader`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hetstream.mpi_dataworkers.errors import PipelineError
from hetstream.mpi_dataworkers.loader.indexed import LocalIterator, RemoteIterator
from hetstream.mpi_dataworkers.loader.order import ListedSteps, Order
from hetstream.mpi_dataworkers.loader.shards import LocalShardedIterator, ShardedIterator
from hetstream.mpi_dataworkers.order.data_state import DataState

if TYPE_CHECKING:
    from hetstream.mpi_dataworkers.loader.data_loader import DataLoader

EpochIterator = RemoteIterator | LocalIterator | ShardedIterator | LocalShardedIterator


@dataclass(frozen=True)
class Position:
    """What the training loop has taken.

    Attributes:
        epoch: which iteration.
        turn: which of its passes, with `repeat`.
        step: steps taken of that pass.
        shards: position in each of its streams, where it is divided.
        source: what knows how the program's sampler began: the pass's order, or the state that it continues.
        drawn: digest of what the program's sampler gave for the steps taken.
        is_loaded: it was loaded, and nobody has named its epoch: at the end of that epoch, the next one begins.
    """

    epoch: int
    turn: int = 0
    step: int = 0
    shards: dict[str, Any] | None = None
    source: Order | DataState | None = None
    drawn: str = ""
    is_loaded: bool = False


def _drawn_before(order: Order | None, step: int) -> str:
    return order.drawn(step) if isinstance(order, ListedSteps) else ""


class PositionTracker(Iterator[Any]):
    """Goes over the data as often as `repeat` says, and keeps the loader's position: what the training loop has taken,
    and the next epoch at the end. When it is read ahead of the training loop, the position is only in `taken`."""

    def __init__(self, loader: DataLoader[Any], at: Position, is_ahead: bool = False) -> None:
        self._loader = loader
        self._is_ahead = is_ahead
        self._passing: EpochIterator | None = None
        self._may_go_on = at.is_loaded  # with the next epoch, as long as this one gave nothing
        self._begin(at)
        loader._take(self.taken)

    def _move_to(self, taken: Position) -> None:
        self.taken = taken
        if not self._is_ahead:
            self._loader._take(taken)

    def _begin(self, at: Position) -> None:
        self._passing, self._order = self._loader._begin_pass(at)
        self._at = replace(at, source=self._order, drawn=_drawn_before(self._order, at.step))
        self._gave = at.step > 0 or at.shards is not None  # a pass that is continued may be at its end
        self._move_to(self._at)

    def __next__(self) -> Any:
        while self._passing is not None:
            try:
                batch = next(self._passing)
            except StopIteration:
                self._next_turn()
                continue
            except Exception:
                self._may_go_on = False
                self._note(self._passing)
                raise
            self._note(self._passing)
            self._gave, self._may_go_on = True, False
            return batch
        raise StopIteration

    def _next_turn(self) -> None:
        assert self._passing is not None
        repeat, ended = self._loader._repeat, self._passing
        self._passing = None
        if repeat is None and ended.position > 0 and not self._gave:
            raise PipelineError(
                f"a whole pass over {type(self._loader.dataset).__name__} gave no batch, because every sample was left "
                "out: an endless stream of it would never give one. stats() and the log say why samples were left out."
            )
        # An endless stream of nothing ends.
        last = self._at.turn + 1 == repeat or (repeat is None and ended.position == 0)
        if last and self._may_go_on and self._gave:
            self._may_go_on = False
            self._loader._begin_after(self._at.epoch)
            self._begin(Position(self._at.epoch + 1))
        elif last:
            self._move_to(Position(self._at.epoch + 1))
        else:
            self._begin(Position(self._at.epoch, self._at.turn + 1))

    def _note(self, passing: EpochIterator) -> None:
        shards = passing.shard_state() if isinstance(passing, ShardedIterator | LocalShardedIterator) else None
        drawn = _drawn_before(self._order, passing.position)
        self._move_to(Position(self._at.epoch, self._at.turn, passing.position, shards, self._order, drawn))

    def __len__(self) -> int:
        return len(self._loader)
