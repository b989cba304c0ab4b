"""Weighted mixtures of loaders (a batch from one of them at each step) and of datasets (a sample from one of them).

`mixer.Mixer` chooses; here are the things that are mixed.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch.utils.data

from hetstream.base.errors import ConfigError
from hetstream.mpi_dataworkers.errors import StateError
from hetstream.mpi_dataworkers.order.data_state import MAX_EPOCH
from hetstream.mpi_dataworkers.order.interleave import Mixer, Stop, check_mixture, choices_of

_STATE_VERSION = 1
# Passes of a part within one epoch of the mixture get epochs of their own, far from those of other epochs.
_RESTART_EPOCHS = 1 << 20
# Elements between two known positions within the parts; those between are counted.
_BLOCK = 1024


def mix(
    parts: Sequence[Any], weights: Sequence[float] | None = None, seed: int = 0, stop: Stop = "all_exhausted"
) -> MixedLoader | MixedDataset | MixedStream:
    """Mix loaders or datasets by weight.

    The part of step k is a function of (seed, epoch, k). Mixed loaders give whole batches of each; they can have
    different batch sizes and services, and `state_dict` holds the state of each. Mixed datasets are one dataset, for a
    DataLoader, and give samples of each within a batch.

    Args:
        parts: DataLoaders, or datasets with indices, or IterableDatasets; of one kind.
        weights: how often each is chosen, positive; only their ratios matter. Default: equally often.
        seed: base of the choices.
        stop: when the mixture ends: `first_exhausted`: when a part is asked that has nothing left; `all_exhausted`: a
            part that has nothing left is left out until all have, so each element comes once; `cycle_until_all`: it is
            started again until every part has been exhausted once.

    Raises:
        ConfigError: naming every problem.
    """
    parts = list(parts)
    chosen = check_mixture(len(parts), weights, seed, stop)
    if all(isinstance(part, torch.utils.data.DataLoader | MixedLoader) for part in parts):
        return MixedLoader(parts, chosen, seed, stop)
    iterable = [isinstance(part, torch.utils.data.IterableDataset) for part in parts]
    if all(iterable):
        return MixedStream(parts, chosen, seed, stop)
    indexed = [hasattr(part, "__getitem__") and hasattr(part, "__len__") for part in parts]
    if not any(iterable) and all(indexed):
        return MixedDataset(parts, chosen, seed, stop)
    names = ", ".join(type(part).__name__ for part in parts)
    raise ConfigError(f"this mixture cannot be: {names} must all be loaders, all datasets with indices, or all streams")


class MixedDataset(torch.utils.data.Dataset[Any]):
    """Datasets with indices as one: element k is the next of the part that is chosen at k; the same in each epoch."""

    def __init__(self, parts: Sequence[Any], weights: Sequence[float], seed: int, stop: Stop) -> None:
        self.parts = list(parts)
        self._weights, self._seed, self._stop = list(weights), seed, stop

    @functools.cached_property
    def _choices(self) -> npt.NDArray[np.uint16]:
        return choices_of([len(part) for part in self.parts], self._weights, self._seed, self._stop)

    @functools.cached_property
    def _counts(self) -> npt.NDArray[np.int64]:
        """Elements of each part before each block."""
        starts = range(0, len(self._choices), _BLOCK)
        each = [np.bincount(self._choices[start : start + _BLOCK], minlength=len(self.parts)) for start in starts]
        counts: npt.NDArray[np.int64] = np.cumsum([np.zeros(len(self.parts), dtype=np.int64), *each], axis=0)
        return counts

    def __getstate__(self) -> dict[str, Any]:
        # A data worker computes them again, faster than they travel.
        return {key: value for key, value in vars(self).items() if key not in ("_choices", "_counts")}

    def __len__(self) -> int:
        return len(self._choices)

    def part_of(self, index: int) -> tuple[int, int]:
        """The part that element `index` comes from, and its index there."""
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index %= len(self)
        part, block = int(self._choices[index]), index // _BLOCK
        before = int(np.count_nonzero(self._choices[block * _BLOCK : index] == part))
        return part, (int(self._counts[block, part]) + before) % len(self.parts[part])

    def __getitem__(self, index: int) -> Any:
        part, place = self.part_of(index)
        return self.parts[part][place]


class MixedStream(torch.utils.data.IterableDataset[Any]):
    """IterableDatasets as one. Each divides itself among shards, by `get_worker_info()`; each shard mixes its parts."""

    def __init__(self, parts: Sequence[Any], weights: Sequence[float], seed: int, stop: Stop) -> None:
        self.parts = list(parts)
        self._weights, self._seed, self._stop = list(weights), seed, stop

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        # Its seed is that of the epoch and the shard, as is what is drawn without it; its id is for the parts to ask.
        drawn = int(torch.randint(2**62, ()).item()) if info is None else info.seed
        mixer = Mixer(self._weights, self._seed, drawn, self._stop)
        iterators = [iter(part) for part in self.parts]
        while (part := mixer.choose()) is not None:
            try:
                element = next(iterators[part])
            except StopIteration:
                if mixer.exhausted(part):
                    iterators[part] = iter(self.parts[part])
                continue
            mixer.taken()
            yield element


class MixedLoader:
    """Loaders as one: at each step a batch of the loader that is chosen."""

    def __init__(self, parts: Sequence[Any], weights: Sequence[float], seed: int, stop: Stop) -> None:
        self.parts = list(parts)
        self._weights, self._seed, self._stop = list(weights), seed, stop
        self._epoch = 0
        self._resume: dict[str, Any] | None = None
        self._running: _MixedIterator | None = None

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration; keeps the position when a loaded state is inside that epoch."""
        if epoch != self._epoch:
            self._epoch, self._resume = epoch, None

    def __iter__(self) -> Iterator[Any]:
        """Begin a pass over the current epoch; the next call begins the next epoch."""
        resume, self._resume = self._resume, None
        self._running = _MixedIterator(self, self._epoch, resume)
        self._epoch += 1
        return self._running

    def mixer(self, epoch: int) -> Mixer:
        """The choices of an epoch."""
        return Mixer(self._weights, self._seed, epoch, self._stop)

    def state_dict(self) -> dict[str, Any]:
        """Position in the mixture and in each part: plain values.

        Raises:
            StateError: a part has no state.
        """
        stateless = [type(part).__name__ for part in self.parts if not hasattr(part, "state_dict")]
        if stateless:
            raise StateError(f"parts of this mixture have no state_dict: {', '.join(stateless)}")
        running = self._running
        at = running.position() if running is not None else {"epoch": self._epoch, "begun": []}
        parts = [part.state_dict() for part in self.parts]
        return {"version": _STATE_VERSION, "mixture": self._description()} | at | {"parts": parts}

    def _description(self) -> dict[str, Any]:
        return {"weights": list(self._weights), "seed": self._seed, "stop": self._stop}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved position.

        Raises:
            StateError: it is of another mixture, or damaged.
        """
        try:
            version, epoch, begun, parts = state["version"], int(state["epoch"]), dict(state["begun"]), state["parts"]
            theirs = state["mixture"]
        except (KeyError, TypeError, ValueError) as error:
            raise StateError(f"this is no state of a mixture: {error!r}") from error
        if version != _STATE_VERSION:
            raise StateError(
                f"the state of the mixture has version {version!r}, this release reads version {_STATE_VERSION}: go on "
                "with the release of hetstream that saved it, or begin anew without it (docs/upgrade.md)"
            )
        if theirs != self._description() or len(parts) != len(self.parts):
            raise StateError(f"the state is of another mixture: {theirs}, and not {self._description()}")
        if begun:
            self.mixer(epoch).load(state["mixer"])
        for part, theirs in zip(self.parts, parts, strict=True):
            part.load_state_dict(theirs)
        self._epoch, self._running, self._resume = epoch, None, state if begun else None

    def __len__(self) -> int:
        """Steps of an epoch.

        Raises:
            TypeError: it is not known before it ends.
        """
        if self._stop != "all_exhausted":
            raise TypeError(f"a mixture with stop={self._stop!r} has no length that is known before it ends")
        return sum(len(part) for part in self.parts)


class _MixedIterator(Iterator[Any]):
    def __init__(self, loader: MixedLoader, epoch: int, resume: dict[str, Any] | None) -> None:
        self._loader, self._epoch = loader, epoch
        self._mixer = loader.mixer(epoch)
        # How often each part was begun, of those that were.
        self._begun: dict[int, int] = {}
        self._ended = False
        if resume is not None:
            self._mixer.load(resume["mixer"])
            self._begun = {int(part): int(times) for part, times in resume["begun"].items()}
            for part, times in self._begun.items():
                # One that is at its end stays there: the mixer decides what follows.
                self._set_epoch(part, times - 1)
        self._iterators: dict[int, Iterator[Any]] = {}

    def __next__(self) -> Any:
        while not self._ended and (part := self._mixer.choose()) is not None:
            if part not in self._iterators:
                if part not in self._begun:
                    self._begin(part)
                self._iterators[part] = iter(self._loader.parts[part])
            try:
                batch = next(self._iterators[part])
            except StopIteration:
                del self._iterators[part]
                if self._mixer.exhausted(part):
                    self._begin(part)
                continue
            except Exception:
                self._mixer.taken()
                raise
            self._mixer.taken()
            return batch
        self._ended = True
        self._iterators.clear()
        raise StopIteration

    def _begin(self, part: int) -> None:
        times = self._begun.get(part, 0)
        self._begun[part] = times + 1
        self._set_epoch(part, times)

    def _set_epoch(self, part: int, times: int) -> None:
        loader = self._loader.parts[part]
        if hasattr(loader, "set_epoch"):
            loader.set_epoch((self._epoch + times * _RESTART_EPOCHS) % (MAX_EPOCH + 1))

    def position(self) -> dict[str, Any]:
        """Where the mixture is, as plain values; after its end, the next epoch."""
        if self._ended:
            return {"epoch": self._epoch + 1, "begun": {}}
        begun = {str(part): times for part, times in self._begun.items()}
        return {"epoch": self._epoch, "begun": begun, "mixer": self._mixer.state()}
