"""A loader's position as plain values: what a `state_dict` holds, and when it fits a loader. No torch, no I/O."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from hetstream.mpi_dataworkers.errors import StateError
from hetstream.mpi_dataworkers.order.interleave import gather
from hetstream.mpi_dataworkers.order.sharding import is_text, pack, unpack

VERSION = 4
# Epoch and pass travel together as one signed 64-bit number.
MAX_EPOCH = 2**31 - 1


@dataclass(frozen=True)
class DataState:
    """How far a training loop is in its data. Its size does not depend on the dataset's.

    Attributes:
        epoch: the epoch.
        pass_index: which of its passes, with `repeat`.
        step: steps of that pass that the training loop has taken.
        shards: position in each of its shards, where a pass is divided; None elsewhere.
        world_size: ranks that shared the order; 0 in what `merge_states` gives.
        is_global: the order does not depend on the world size, because `global_batch_size` was given.
        pipeline: dataset and order in words; equal where the samples and their order are.
        sampler: how the program's own sampler began the epoch (see `loader.sampler_state`), else "".
        drawn: digest of the sample indices that it gave up to this place, else "".
        quarantined: samples that `on_error` has put aside.
        ranks_differ: each rank had random numbers of its own; states that do not say it are of releases in which all
            ranks of a sampler's order had the same.

    The snapshots in `shards` are as `snapshots.pack` gives them. In the plain values they are text; those that are no
    text are under `dataset_states`, as the objects that they are.
    """

    epoch: int
    pass_index: int
    step: int
    shards: dict[str, Any] | None
    world_size: int
    is_global: bool
    pipeline: dict[str, str]
    sampler: str = ""
    drawn: str = ""
    quarantined: list[int] = field(default_factory=list)
    ranks_differ: bool = True

    def as_dict(self) -> dict[str, Any]:
        """Plain values, the same keys at any time: JSON and torch.distributed.checkpoint can hold all but what is
        in `dataset_states`."""
        # The streams as text: their number changes, and a checkpoint wants the same keys when it is loaded. What the
        # dataset's own state holds may be no text.
        shards, objects = _divided(self.shards)
        plain = asdict(replace(self, shards=None))
        return {"version": VERSION, **plain, "shards": json.dumps(shards), "dataset_states": objects}

    @staticmethod
    def read(state: Any) -> DataState:
        """Read what `as_dict` gave.

        Raises:
            StateError: it is something else, damaged, or of another version; every problem is named.
        """
        if not isinstance(state, Mapping) or "version" not in state:
            raise StateError(f"this is no state of a hetstream DataLoader: {_short(state)}")
        if state["version"] != VERSION:
            raise StateError(
                f"the state has version {state['version']!r}, this release reads version {VERSION}: go on with the "
                "release of hetstream that saved it, or begin the epoch anew without it (docs/upgrade.md)"
            )
        problems = list(_problems(state))
        if problems:
            raise StateError(f"the state of a hetstream DataLoader is damaged: {'; '.join(problems)}")
        values = {name: state.get(name, False) for name in _FORMS if name != "dataset_states"}
        return DataState(**values | {"shards": _joined(json.loads(state["shards"]), state.get("dataset_states") or {})})

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
        is_merged = self.world_size == 0 and _is_dealt(here.pipeline)
        if self.world_size != here.world_size and not is_merged and not (self.is_global and here.is_global):
            way = "when both loaders have global_batch_size= instead of batch_size="
            if _is_dealt(self.pipeline):
                way = "as one of merge_states(), which puts the states of all ranks together"
            differences.append(
                f"world_size: {self.world_size} in the state, {here.world_size} here (a state can change its world "
                f"size {way})"
            )
        if not differences and num_steps is not None and self.step > num_steps:
            differences.append(f"step {self.step} of epoch {self.epoch}, but an epoch here has {num_steps} steps")
        if differences:
            raise StateError(f"the state belongs to another run of the data: {'; '.join(differences)}")


def merge_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Put the states of all ranks together into one, from which any number of ranks can continue.

    For loaders of an IterableDataset, whose shards are dealt out among the ranks; `num_shards` must be the same before
    and after. Each shard goes on at its step, in one of the ranks.

    Args:
        states: what `state_dict()` gave in each rank at the same moment, in any order.

    Raises:
        StateError: they are not of all ranks of one run at one moment, or of another kind of loader.
    """
    read = [DataState.read(state) for state in states]
    if not read:
        raise StateError("merge_states needs the state of each rank, and has none")
    first = min(read, key=lambda state: (state.epoch, state.pass_index))
    if not _is_dealt(first.pipeline):
        raise StateError(
            "merge_states is for an IterableDataset whose shards are dealt out among the ranks, without length_of and "
            "sharding=OFF; other loaders change their world size by global_batch_size="
        )
    for state in read:
        if (state.pipeline, state.world_size) != (first.pipeline, first.world_size):
            raise StateError("the states are of different data, orders or world sizes: merge those of one run's ranks")
    if len(read) != first.world_size:
        raise StateError(f"{len(read)} states of a run with {first.world_size} ranks: merge_states needs that of each")
    now = [state for state in read if (state.epoch, state.pass_index) == (first.epoch, first.pass_index)]
    if any(state.shards is not None for state in read if state not in now):
        raise StateError("the states are of different epochs: save them in all ranks at the same moment")
    whole = replace(first, world_size=0, shards=None, step=0)
    if any(state.shards is not None for state in now):
        shards = _merge_shards(first, [state.shards for state in now], len(read))
        whole = replace(whole, shards=shards, step=max(state.step for state in now))
    return whole.as_dict()


def _is_dealt(pipeline: Mapping[str, str]) -> bool:
    return pipeline.get("length") == "-1" and pipeline.get("sharding") != "OFF" and "buckets" not in pipeline


def _merge_shards(first: DataState, positions: Sequence[Mapping[str, Any] | None], num_ranks: int) -> dict[str, Any]:
    """All ranks' positions as one: of a rank that is missing all is read, of one without a position none has begun."""
    by_rank: dict[int, Any] = {}
    snapshots: dict[str, bytes] = {}
    try:
        num_shards = int(first.pipeline["num_shards"])
        for position in positions:
            if position is not None:
                by_rank[int(position["rank"])] = position
                snapshots |= position["snapshots"]
    except (KeyError, TypeError, ValueError) as error:
        raise StateError(f"the states have no position in the shards of a loader: {error!r}") from error
    not_begun = positions.count(None)
    if len(by_rank) + not_begun < len(positions):
        raise StateError("two of the states are of one rank: merge_states needs that of each rank once")
    if not_begun and len(positions) < num_ranks:
        raise StateError("some ranks have not begun and some have ended: save the states inside the loop, or after it")
    unbegun = [[[rank, num_shards, num_ranks]] if not_begun and rank < num_shards else [] for rank in range(num_ranks)]
    ranks = [by_rank.get(rank, {"slots": [], "next_slot": 0, "left": unbegun[rank]}) for rank in range(num_ranks)]
    step = max(position["step"] for position in by_rank.values())
    whole = {"rank": None, "step": step, "copies": 1, "taken_out_of_order": [], "snapshots": snapshots}
    return gather(ranks, num_shards) | whole


# The form of each field: a check, and the rule in words.
_FORMS: dict[str, tuple[Any, str]] = {
    "epoch": (lambda value: _is_count(value) and value <= MAX_EPOCH, "a whole number of at least 0"),
    "pass_index": (lambda value: _is_count(value) and value <= MAX_EPOCH, "a whole number of at least 0"),
    "step": (lambda value: _is_count(value), "a whole number of at least 0"),
    "shards": (lambda value: _is_json(value), "JSON text of a mapping or null"),
    "dataset_states": (lambda value: isinstance(value, Mapping), "a mapping"),
    "world_size": (lambda value: _is_count(value), "a whole number of at least 0"),
    "is_global": (lambda value: isinstance(value, bool), "true or false"),
    "pipeline": (lambda value: _is_text_mapping(value), "a mapping of text to text"),
    "sampler": (lambda value: isinstance(value, str), "text"),
    "drawn": (lambda value: isinstance(value, str), "text"),
    # Looked at more closely by `loader.skipped`, which knows how many there may be.
    "quarantined": (lambda value: isinstance(value, list | str), "a list of sample indices"),
    "ranks_differ": (lambda value: isinstance(value, bool), "true or false"),
}


def _problems(state: Mapping[str, Any]) -> Iterator[str]:
    for name, (is_right, rule) in _FORMS.items():
        if name in ("dataset_states", "ranks_differ") and name not in state:
            continue  # saved before there was any
        if name not in state:
            yield f"{name} is missing"
        elif not is_right(state[name]):
            yield f"{name}={_short(state[name])}: must be {rule}"
    yield from (f"{name!r} is unknown" for name in state if name not in _FORMS and name != "version")


def _divided(shards: dict[str, Any] | None) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """The position in the shards with the snapshots that are text, and the other snapshots, by shard."""
    if not shards or "snapshots" not in shards:
        return shards, {}
    texts = {shard: packed.decode() for shard, packed in shards["snapshots"].items() if is_text(packed)}
    objects = {shard: unpack(packed) for shard, packed in shards["snapshots"].items() if shard not in texts}
    return {**shards, "snapshots": texts}, objects


def _joined(shards: Any, objects: Mapping[str, Any]) -> Any:
    """What `_divided` has divided.

    Raises:
        StateError: a snapshot that is text is not JSON. It must not pass for one that is no text, which is unpickled.
    """
    if not shards or not isinstance(shards.get("snapshots"), Mapping):
        return shards  # of another form, which is told by who uses it
    damaged = [shard for shard, text in shards["snapshots"].items() if not (isinstance(text, str) and _is_object(text))]
    if damaged:
        raise StateError(f"the state has a damaged position in the shards of this loader: {', '.join(damaged)}")
    packed = {shard: text.encode() for shard, text in shards["snapshots"].items()}
    return {**shards, "snapshots": packed | {shard: pack(value) for shard, value in objects.items()}}


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_json(value: Any) -> bool:
    try:
        return isinstance(json.loads(value), dict | None)
    except (TypeError, ValueError, RecursionError):
        return False


def _is_object(text: str) -> bool:
    """Whether a snapshot is a JSON object, also for who reads it later: he would give anything else to pickle."""
    try:
        return is_text(text.encode()) and isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _is_text_mapping(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(text, str) for item in value.items() for text in item)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
