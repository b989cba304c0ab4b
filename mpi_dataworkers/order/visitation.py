"""What a loader promises about how often each element comes, and how the data is divided. Pure; knows no torch.

The names and their meaning are those of tf.data service
(https://www.tensorflow.org/api_docs/python/tf/data/experimental/service/ShardingPolicy), with stronger promises where
a batch can be made twice without being delivered twice.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal, get_args

from hetstream.base.errors import ConfigError

Visitation = Literal["exactly_once", "at_most_once", "zero_once_or_more"]

# Shards that a pass is cut into unless `num_shards` says otherwise, or under HINT the program's `num_workers`. Never
# the number of data workers: the batches must be the same for any. It bounds how many of them can work on one pass.
DEFAULT_NUM_SHARDS = 8
# They are read in turn, and each of them is a session with the dispatcher.
MAX_NUM_SHARDS = 4096


class ShardingPolicy(str, enum.Enum):
    """How the elements of a dataset are divided among data workers.

    OFF: not at all; every data worker goes over the whole dataset.
    DYNAMIC: handed out piece by piece to whoever is free: ranges of indices, or files.
    FILE: shard s of n has the files s, s + n, s + 2n, ...
    DATA: shard s of n has the elements s, s + n, s + 2n, ...; an IterableDataset is read whole for each shard.
    FILE_OR_DATA: FILE where the dataset has files, else DATA.
    HINT: the dataset divides itself, by `torch.utils.data.get_worker_info()`: `id` of `num_workers` is the shard. One
        that does not ask is read once.
    """

    OFF = "off"
    DYNAMIC = "dynamic"
    FILE = "file"
    DATA = "data"
    FILE_OR_DATA = "file_or_data"
    HINT = "hint"


class Cut(str, enum.Enum):
    """How one pass is divided into streams of steps, once policy and dataset are known."""

    STEPS = "steps"  # a single stream, whose steps any data worker makes in any order
    COPIES = "copies"  # a stream for each data worker, each of the whole dataset
    INDICES = "indices"  # indices modulo the number of shards
    ELEMENTS = "elements"  # elements modulo the number of shards
    FILES = "files"  # files modulo the number of shards
    EACH_FILE = "each_file"  # every file a shard, some at a time
    WHOLE = "whole"  # one stream, and get_worker_info() is None, as in the program's own process
    ITSELF = "itself"  # the dataset asks get_worker_info(); where it does not, the first stream has all of it
    ITSELF_FOR_RANKS = "itself_for_ranks"  # the same for several ranks; one that does not ask is refused


# What HINT is.
_ITSELF = (Cut.WHOLE, Cut.ITSELF, Cut.ITSELF_FOR_RANKS)


@dataclass(frozen=True)
class Traits:
    """What decides which policies a dataset can have.

    Attributes:
        dataset: its class's name, for messages.
        iterable: it is an IterableDataset.
        num_files: length of its `files`, -1 when it has none.
        listed: the order comes from the program's own sampler or generator.
        shuffle: the loader is asked to shuffle.
        in_order: the loader is asked to give steps in order.
        world_size: number of ranks.
        num_workers: the program's argument, worker processes in each rank.
    """

    dataset: str
    iterable: bool = False
    num_files: int = -1
    listed: bool = False
    shuffle: bool = False
    in_order: bool = True
    world_size: int = 1
    num_workers: int = 0


@dataclass(frozen=True)
class ShardingPlan:
    """How a loader divides its data and what it promises, checked against its dataset.

    Attributes:
        policy: the policy.
        visitation: how often each element comes.
        cut: how a pass is divided.
        num_shards: number of shards; 1 for `Cut.STEPS`, 0 for `Cut.COPIES`, where the data workers are counted.
        width: how many of them are read at a time.
    """

    policy: ShardingPolicy
    visitation: Visitation
    cut: Cut
    num_shards: int
    width: int

    def description(self) -> dict[str, str]:
        """Return what programs of one job name, and a state and its loader, must agree on."""
        named = {"sharding": self.policy.name, "visitation": self.visitation}
        if self.cut is Cut.STEPS:
            return named  # nothing else, so that a state can go to another world size
        return named | {"num_shards": str(self.num_shards), "shards_at_a_time": str(self.width)}


def decide(sharding: str | None, visitation: str | None, num_shards: int | None, traits: Traits) -> ShardingPlan:
    """Check the keywords against the dataset.

    Args:
        sharding: a `ShardingPolicy` or its value; None for the default: DYNAMIC for indices, HINT for IterableDataset.
        visitation: a `Visitation`; None for the default: zero_once_or_more under OFF, else exactly_once.
        num_shards: number of shards, for DYNAMIC of files how many are read at a time; None for the default: under
            HINT what torch would have, `num_workers` in each rank and at least one; else `DEFAULT_NUM_SHARDS`.
        traits: what the dataset is.

    Raises:
        ConfigError: naming every keyword that breaks its rule.
    """
    problems: list[str] = []
    default = ShardingPolicy.HINT if traits.iterable else ShardingPolicy.DYNAMIC
    policy = default
    if sharding is not None:
        try:
            policy = ShardingPolicy(sharding)
        except ValueError:
            choices = ", ".join(policy.value for policy in ShardingPolicy)
            problems.append(f"sharding={sharding!r}: must be one of {choices}")
    off = policy is ShardingPolicy.OFF
    promise = visitation if visitation is not None else "zero_once_or_more" if off else "exactly_once"
    if promise not in get_args(Visitation):
        problems.append(f"visitation={visitation!r}: must be one of {', '.join(get_args(Visitation))}")
    elif off != (promise == "zero_once_or_more"):
        problems.append(
            f"sharding={policy.name} with visitation={promise!r}: OFF gives zero_once_or_more, every other policy "
            "exactly_once or at_most_once"
        )
    cut = _cut(policy, num_shards, traits, problems)
    if num_shards is not None:
        whole = isinstance(num_shards, int) and not isinstance(num_shards, bool)
        if not whole or not 1 <= num_shards <= MAX_NUM_SHARDS:
            problems.append(f"num_shards={num_shards!r}: must be a whole number from 1 to {MAX_NUM_SHARDS}")
        elif cut in (Cut.STEPS, Cut.COPIES):
            problems.append(f"num_shards={num_shards}: sharding={policy.name} has no fixed number of shards here")
        elif num_shards < traits.world_size and traits.iterable:
            problems.append(f"num_shards={num_shards}: {traits.world_size} ranks need at least one shard each")
    if not traits.in_order and (traits.listed or promise == "at_most_once"):
        problems.append("in_order=False: needs exactly_once, and no sampler, batch_sampler, generator")
    if traits.listed and promise == "at_most_once":
        problems.append(f"visitation={promise!r} with a sampler, batch_sampler or generator: they give exactly_once")
    if problems:
        raise ConfigError("; ".join(problems))
    # A multiple of the ranks, so that each has as many shards.
    by_rank = max(1, traits.num_workers) if cut in _ITSELF else -(-DEFAULT_NUM_SHARDS // traits.world_size)
    wanted = num_shards or by_rank * traits.world_size
    shards = {Cut.STEPS: 1, Cut.COPIES: 0, Cut.EACH_FILE: traits.num_files}.get(cut, wanted)
    return ShardingPlan(policy, promise, cut, shards, wanted)  # type: ignore[arg-type]  # checked above


def _cut(policy: ShardingPolicy, num_shards: int | None, traits: Traits, problems: list[str]) -> Cut:
    has_files = traits.num_files >= 0
    if policy is ShardingPolicy.FILE_OR_DATA:
        policy = ShardingPolicy.FILE if has_files and traits.iterable else ShardingPolicy.DATA
    if traits.shuffle and traits.iterable and not (has_files and policy.name in ("FILE", "DYNAMIC")):
        problems.append("shuffle=True: an IterableDataset has no indices to shuffle, only FILE and DYNAMIC have files")
    if traits.listed and policy is not ShardingPolicy.DYNAMIC:
        problems.append(f"sharding={policy.name} with a sampler, batch_sampler or generator: their order is one stream")
    if policy is ShardingPolicy.OFF:
        return Cut.COPIES
    if not traits.iterable:
        if policy in (ShardingPolicy.FILE, ShardingPolicy.HINT):
            problems.append(f"sharding={policy.name}: {traits.dataset} is read by index; use DYNAMIC, DATA or OFF")
        return Cut.INDICES if policy is ShardingPolicy.DATA else Cut.STEPS
    if policy in (ShardingPolicy.FILE, ShardingPolicy.DYNAMIC) and not has_files:
        problems.append(
            f"sharding={policy.name}: {traits.dataset} has no attribute `files`, a sequence of what it reads; add one, "
            "or use HINT or DATA"
        )
    cuts = {ShardingPolicy.DYNAMIC: Cut.EACH_FILE, ShardingPolicy.FILE: Cut.FILES, ShardingPolicy.DATA: Cut.ELEMENTS}
    if policy in cuts:
        return cuts[policy]
    if traits.world_size > 1:
        return Cut.ITSELF_FOR_RANKS
    return Cut.WHOLE if num_shards is None and traits.num_workers == 0 else Cut.ITSELF
