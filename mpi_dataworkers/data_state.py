"""A loader's position as plain values: what a `state_dict` holds, and when it fits a loader. No torch, no I/O."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from mpi_dataworkers.errors import StateError

VERSION = 2
# Epoch and turn travel together as one signed 64-bit number.
MAX_EPOCH = 2**31 - 1


@dataclass(frozen=True)
class DataState:
    """How far a training loop is in its data. Its size does not depend on the dataset's.

    Attributes:
        epoch: the epoch.
        turn: which of its passes, with `repeat`.
        step: steps of that pass that the training loop has taken.
        shards: place in each of its streams, where a pass is divided; None elsewhere.
        world_size: ranks that shared the order.
        is_global: the order does not depend on the world size, because `global_batch_size` was given.
        pipeline: dataset and order in words; equal where the samples and their order are.
        sampler: how the program's own sampler began the epoch (see `loader.sampler_state`), else "".
        drawn: digest of the sample indices that it gave up to this place, else "".
        quarantined: samples that `on_error` has put aside.
    """

    epoch: int
    turn: int
    step: int
    shards: dict[str, Any] | None
    world_size: int
    is_global: bool
    pipeline: dict[str, str]
    sampler: str = ""
    drawn: str = ""
    quarantined: list[int] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, the same keys at any time: JSON and torch.distributed.checkpoint can hold them."""
        # The streams as text: their number changes, and a checkpoint wants the same keys when it is loaded.
        return {"version": VERSION, **asdict(self), "shards": json.dumps(self.shards)}

    @staticmethod
    def read(state: Any) -> DataState:
        """Read what `as_dict` gave.

        Raises:
            StateError: it is something else, damaged, or of another version; every problem is named.
        """
        if not isinstance(state, Mapping) or "version" not in state:
            raise StateError(f"this is no state of a hetstream DataLoader: {_short(state)}")
        if state["version"] != VERSION:
            raise StateError(f"the state has version {state['version']!r}, this release reads version {VERSION}")
        problems = list(_problems(state))
        if problems:
            raise StateError(f"the state of a hetstream DataLoader is damaged: {'; '.join(problems)}")
        return DataState(**{name: state[name] for name in _FORMS} | {"shards": json.loads(state["shards"])})

    def check_fits(self, here: DataState, num_steps: int | None) -> None:
        """Refuse a state of another dataset, another order or another place in it.

        Args:
            here: the state of the loader that is to continue.
            num_steps: steps of an epoch here; None where only the sampler knows.

        Raises:
            StateError: every difference is named.
        """
        differences = [
            f"{key}: {self.pipeline.get(key)} in the state, {here.pipeline.get(key)} here"
            for key in sorted({*self.pipeline, *here.pipeline})
            if self.pipeline.get(key) != here.pipeline.get(key)
        ]
        if self.world_size != here.world_size and not (self.is_global and here.is_global):
            differences.append(
                f"world_size: {self.world_size} in the state, {here.world_size} here (a state can change its world "
                "size when both loaders have global_batch_size= instead of batch_size=)"
            )
        if not differences and num_steps is not None and self.step > num_steps:
            differences.append(f"step {self.step} of epoch {self.epoch}, but an epoch here has {num_steps} steps")
        if differences:
            raise StateError(f"the state belongs to another run of the data: {'; '.join(differences)}")


# The form of each field: a check, and the rule in words.
_FORMS: dict[str, tuple[Any, str]] = {
    "epoch": (lambda value: _is_count(value) and value <= MAX_EPOCH, "a whole number of at least 0"),
    "turn": (lambda value: _is_count(value) and value <= MAX_EPOCH, "a whole number of at least 0"),
    "step": (lambda value: _is_count(value), "a whole number of at least 0"),
    "shards": (lambda value: _is_json(value), "JSON text of a mapping or null"),
    "world_size": (lambda value: _is_count(value) and value > 0, "a whole number of at least 1"),
    "is_global": (lambda value: isinstance(value, bool), "true or false"),
    "pipeline": (lambda value: _is_text_mapping(value), "a mapping of text to text"),
    "sampler": (lambda value: isinstance(value, str), "text"),
    "drawn": (lambda value: isinstance(value, str), "text"),
    # Looked at more closely by `loader.skipped`, which knows how many there may be.
    "quarantined": (lambda value: isinstance(value, list | str), "a list of sample indices"),
}


def _problems(state: Mapping[str, Any]) -> Iterator[str]:
    for name, (is_right, rule) in _FORMS.items():
        if name not in state:
            yield f"{name} is missing"
        elif not is_right(state[name]):
            yield f"{name}={_short(state[name])}: must be {rule}"
    yield from (f"{name!r} is unknown" for name in state if name not in _FORMS and name != "version")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_json(value: Any) -> bool:
    try:
        return isinstance(json.loads(value), dict | None)
    except (TypeError, ValueError):
        return False


def _is_text_mapping(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(one, str) for item in value.items() for one in item)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
