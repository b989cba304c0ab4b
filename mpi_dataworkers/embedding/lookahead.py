"""Batches some steps ahead of the training loop, so that their rows are here when it comes to them."""

from __future__ import annotations

import collections
import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from hetstream.base.errors import ConfigError
from hetstream.mpi_dataworkers.embedding.modules import IdsOf, Lookup, TableModule
from hetstream.mpi_dataworkers.embedding.ranks import ranks_of_program
from hetstream.mpi_dataworkers.errors import EmbeddingError

_BATCH, _LOOKUPS = "hetstream_batch", "hetstream_lookups"
DEFAULT_STEPS = 16


def with_lookups(collate_fn: Callable[[Any], Any], *lookups: IdsOf) -> Callable[[Any], Any]:
    """Return a `collate_fn` that also finds each batch's unique ids, so that data workers do that and not the trainer.

    The loader's batches are for `lookahead` alone.

    Args:
        collate_fn: from samples to a batch.
        lookups: `module.ids_of(...)` of the modules of `lookahead`, in its order.
    """
    return functools.partial(_collated, collate_fn, lookups)


def _collated(collate_fn: Callable[[Any], Any], lookups: Sequence[IdsOf], samples: Any) -> dict[str, Any]:
    batch = collate_fn(samples)
    return {_BATCH: batch, _LOOKUPS: [tuple(lookup(batch)) for lookup in lookups]}


class lookahead:
    """Goes through a loader's batches, some steps ahead of the loop that iterates it.

    Args:
        batches: a loader, whose batches are the same on all ranks in number.
        modules: for each module, from a batch to what its `forward` gets of it.
        steps: how far ahead.

    Raises:
        ConfigError: `steps` or `modules` is not possible.
        EmbeddingError: while it is iterated: ranks have different numbers of batches.
    """

    def __init__(
        self, batches: Iterable[Any], modules: Mapping[Any, Callable[[Any], Any]], steps: int = DEFAULT_STEPS
    ) -> None:
        if not (isinstance(steps, int) and steps >= 1):
            raise ConfigError(f"steps={steps!r}: a whole number from 1 on")
        for module in modules:
            if not isinstance(module, TableModule):
                raise ConfigError(
                    f"modules={type(module).__name__}: look-ahead is for hetstream.EmbeddingBag, Embedding and "
                    "EmbeddingBagCollection"
                )
        self._batches, self._steps = batches, steps
        self._modules: list[tuple[TableModule, IdsOf]] = [
            (module, module.ids_of(given)) for module, given in modules.items()
        ]
        self._state: Any = None

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        """The loader's own: `set_epoch`, `stats`, `dataset`."""
        if name == "_batches":
            raise AttributeError(name)
        return getattr(self._batches, name)

    def state_dict(self) -> Any:
        """Return the loader's state where the loop is, not where this has come to."""
        return copy.deepcopy(self._batches.state_dict() if self._state is None else self._state)  # type: ignore[attr-defined]

    def load_state_dict(self, state: Any) -> None:
        """Let the loader go on from a state."""
        self._state = None
        self._batches.load_state_dict(state)  # type: ignore[attr-defined]

    def __iter__(self) -> Iterator[Any]:
        loop = object()
        try:
            yield from self._steps_of(loop)
        finally:  # also where the loop is left
            for module, _ in self._modules:
                module.end_steps(loop)

    def _steps_of(self, loop: object) -> Iterator[Any]:
        coming: collections.deque[tuple[Any, list[Lookup], Any]] = collections.deque()
        batches = iter(self._batches)
        ranks = ranks_of_program()
        has_more = True
        while True:
            for index, (module, _) in enumerate(self._modules):
                module.begin_steps(loop, [lookups[index] for _, lookups, _ in coming])
            while has_more and len(coming) < self._steps:
                batch = next(batches, self)
                has_more = batch is not self
                if not ranks.all_agree(has_more):
                    if has_more and ranks.size > 1:
                        raise EmbeddingError(
                            "another rank has no batches any more, and this one has: give all ranks as many, such "
                            "as by drop_last=True"
                        )
                    break
                coming.append(self._announced(batch))
            if not coming:
                self._state = None
                return
            batch, lookups, self._state = coming.popleft()
            for (module, _), lookup in zip(self._modules, lookups, strict=True):
                module.begin_step(lookup)
            yield batch

    def _announced(self, batch: Any) -> tuple[Any, list[Lookup], Any]:
        if isinstance(batch, dict) and batch.keys() == {_BATCH, _LOOKUPS}:
            batch, lookups = batch[_BATCH], [Lookup(*lookup) for lookup in batch[_LOOKUPS]]
        else:
            lookups = [find(batch) for _, find in self._modules]
        for (module, _), lookup in zip(self._modules, lookups, strict=True):
            module.announce(lookup)
        take_state = getattr(self._batches, "state_dict", None)
        return batch, lookups, None if take_state is None else copy.deepcopy(take_state())
