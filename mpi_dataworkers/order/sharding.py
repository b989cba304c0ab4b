"""Which samples belong to which step: pure functions of (seed, epoch, step, rank). Reads no data, keeps no state.

Called by data workers and by the loader when it works in process. Nothing here is stored: the order of an epoch is a
keyed bijection of the index space, so step k of ten million samples costs the same as step 0, and a resume is a number.

Words: a *round* is one global batch, that is one step of every rank; global step k = round * world_size + rank.
"""

from __future__ import annotations

import functools
import json
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle
import numpy as np
import numpy.typing as npt

from hetstream.mpi_dataworkers.errors import PipelineError

Indices = npt.NDArray[np.int64]

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
# Four rounds make a Feistel network a pseudo-random permutation (Luby and Rackoff, 1988); six leave a margin for
# the short halves of small datasets.
_FEISTEL_ROUNDS = 6


def mix64(value: int) -> int:
    """Scramble a 64-bit integer (the finaliser of SplitMix64, Steele et al., OOPSLA 2014)."""
    value &= _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def derive_seed(seed: int, *parts: int) -> int:
    """Derive a 64-bit seed from a base seed and what it is for, for example (seed, epoch, sample index)."""
    value = mix64(seed + _GOLDEN)
    for part in parts:
        value = _extend_seed(value, part)
    return value


_epoch_seed = functools.lru_cache(maxsize=16)(derive_seed)


def _extend_seed(value: int, part: int) -> int:
    return mix64(value ^ mix64(part + _GOLDEN))


def derive_seeds(base: int, parts: Indices) -> npt.NDArray[np.uint64]:
    """`derive_seed` continued from the seed `base` with each of many parts: uint64 array of their length."""
    mixed = _mix64_array(parts.astype(np.uint64) + np.uint64(_GOLDEN))
    return _mix64_array(np.uint64(base) ^ mixed)


# From so many samples on NumPy is faster for all than Python for one after the other: four times for 64.
_AT_ONCE = 16


class SampleSeeds(Sequence[int]):
    """Seeds of the random state of a step's samples, each computed when it is asked for.

    In a planned order from (seed, epoch, sample index), so that a sample is augmented alike in any batch and at any
    world size. In a listed order from (seed, epoch, step, place in the step), because a program's sampler may draw an
    index more than once in an epoch, and each time is to be augmented differently.

    Args:
        indices: int64 array of the step.
        seed: the loader's seed.
        epoch: the epoch.
        listed_step: the step, in a listed order.
    """

    def __init__(self, indices: Indices, seed: int, epoch: int, listed_step: int | None = None) -> None:
        self._indices = indices if listed_step is None else None
        self._length = len(indices)
        self._base = _epoch_seed(seed, epoch) if listed_step is None else derive_seed(seed, epoch, listed_step)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, place: Any) -> Any:
        if not 0 <= place < self._length:
            raise IndexError(place)
        return _extend_seed(self._base, place if self._indices is None else int(self._indices[place]))

    def __iter__(self) -> Iterator[int]:
        if self._length < _AT_ONCE:
            return iter([self[place] for place in range(self._length)])
        parts = np.arange(self._length) if self._indices is None else self._indices
        return iter(derive_seeds(self._base, parts).tolist())


def _mix64_array(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: npt.NDArray[np.uint64] = values ^ (values >> np.uint64(31))
    return mixed


@functools.lru_cache(maxsize=64)
def _round_keys(seed: int, epoch: int) -> tuple[np.uint64, ...]:
    return tuple(np.uint64(derive_seed(seed, epoch, number)) for number in range(_FEISTEL_ROUNDS))


def permute(positions: Indices, num_samples: int, seed: int, epoch: int) -> Indices:
    """Map positions of the epoch's order to sample indices: a bijection of [0, num_samples).

    A Feistel network permutes the next power of four; positions that land outside the range walk on along their
    cycle until they are inside (at most four tries on average).

    Args:
        positions: int64 array of any length, each in [0, num_samples).
        num_samples: size of the index space.
        seed: the loader's seed.
        epoch: the epoch.

    Returns:
        int64 array of the same length.
    """
    half_bits = np.uint64(max(1, ((num_samples - 1).bit_length() + 1) // 2))
    half_mask = np.uint64((1 << int(half_bits)) - 1)
    keys = _round_keys(seed, epoch)
    limit = np.uint64(num_samples)

    def scramble(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        left, right = values >> half_bits, values & half_mask
        for key in keys:
            left, right = right, left ^ (_mix64_array(right ^ key) & half_mask)
        joined: npt.NDArray[np.uint64] = (left << half_bits) | right
        return joined

    values = scramble(positions.astype(np.uint64))
    outside = values >= limit
    while outside.any():
        values[outside] = scramble(values[outside])
        outside = values >= limit
    return values.astype(np.int64)


@dataclass(frozen=True)
class EpochPlan:
    """The order of one epoch for all ranks.

    Every rank gets the same number of steps. A round holds `batch_size * world_size` samples, and rank r takes the
    r-th slice of it. When the samples do not fill the last round and `drop_last` is off, its samples are divided
    evenly over the ranks, and with fewer samples than ranks the last two rounds are divided together, so that no rank
    is ever short of a batch and no batch is larger than `batch_size`.

    With `global_batch_size` the rounds depend on nothing but that: the same samples make the same global steps at any
    world size. The ranks' shares of a round differ by one sample at most, and a last round of less than half is
    divided together with the one before.

    Attributes:
        num_samples: length of the dataset.
        batch_size: samples in a full step of one rank; not used with `global_batch_size`.
        world_size: number of ranks.
        drop_last: leave out an incomplete last round.
        shuffle: permute the samples, by (seed, epoch).
        seed: the loader's seed.
        epoch: the epoch.
        shard, num_shards: the samples are those of a larger dataset whose indices are `shard` modulo `num_shards`.
        global_batch_size: samples in a round, or None for `batch_size * world_size`.

    Raises:
        PipelineError: no division gives every rank the same number of non-empty steps.
    """

    num_samples: int
    batch_size: int
    world_size: int = 1
    drop_last: bool = False
    shuffle: bool = False
    seed: int = 0
    epoch: int = 0
    shard: int = 0
    num_shards: int = 1
    global_batch_size: int | None = None

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.world_size < 1 or self.num_samples < 0:
            raise PipelineError(f"{self}: batch_size and world_size must be at least 1, num_samples at least 0")
        if self._round_samples < self.world_size:
            raise PipelineError(
                f"global_batch_size={self.global_batch_size} with {self.world_size} ranks: each rank needs a sample"
            )
        if self.num_samples and self.num_steps and self._smallest_round < self.world_size:
            size = "batch_size" if self.global_batch_size is None else "global_batch_size"
            value = self.batch_size if self.global_batch_size is None else self.global_batch_size
            raise PipelineError(
                f"{self.num_samples} samples with {size}={value} cannot give each of {self.world_size} "
                "ranks the same number of steps without repeating a sample. Set drop_last=True, use fewer ranks, "
                f"or a larger {size}."
            )

    # Kept, because each step asks for them.
    @functools.cached_property
    def _round_samples(self) -> int:
        return self.batch_size * self.world_size if self.global_batch_size is None else self.global_batch_size

    @functools.cached_property
    def _shares_tail(self) -> bool:
        """Whether the last two rounds are divided together."""
        full, left_over = divmod(self.num_samples, self._round_samples)
        least = self.world_size if self.global_batch_size is None else (self.global_batch_size + 1) // 2
        return full > 0 and 0 < left_over < least and not self.drop_last

    @functools.cached_property
    def _num_plain_rounds(self) -> int:
        """Full rounds, which are not divided together with the last one."""
        return self.num_samples // self._round_samples - self._shares_tail

    @property
    def _smallest_round(self) -> int:
        left_over = self.num_samples % self._round_samples
        if self._shares_tail:
            return (self._round_samples + left_over) // 2
        return self._round_samples if self.drop_last or left_over == 0 else left_over

    @functools.cached_property
    def num_steps(self) -> int:
        """Steps of each rank in this epoch."""
        full, left_over = divmod(self.num_samples, self._round_samples)
        return full if self.drop_last or left_over == 0 else full + 1

    def _round_bounds(self, step: int) -> tuple[int, int]:
        start = step * self._round_samples
        if step < self._num_plain_rounds:
            return start, start + self._round_samples
        full, left_over = divmod(self.num_samples, self._round_samples)
        if self._shares_tail and step >= full - 1:
            start = (full - 1) * self._round_samples
            middle = start + (self._round_samples + left_over + 1) // 2
            return (start, middle) if step == full - 1 else (middle, self.num_samples)
        return start, min(start + self._round_samples, self.num_samples)

    def indices(self, step: int, rank: int = 0) -> Indices:
        """Sample indices of one step of one rank, int64, at least one and at most a full step's.

        Raises:
            IndexError: the step or the rank is outside the plan.
        """
        if not (0 <= step < self.num_steps and 0 <= rank < self.world_size):
            raise IndexError(f"step {step} of rank {rank} is outside {self.num_steps} steps, {self.world_size} ranks")
        start, stop = self._round_bounds(step)
        share, extra = divmod(stop - start, self.world_size)
        first = start + rank * share + min(rank, extra)
        positions = np.arange(first, first + share + (rank < extra), dtype=np.int64)
        if self.shuffle:
            positions = permute(positions, self.num_samples, self.seed, self.epoch)
        return positions if self.num_shards == 1 else positions * self.num_shards + self.shard


# Where the reader of a shard was, as bytes that travel with batches and leases: JSON, or a pickle.
#
# JSON where it gives the same value back; a state of the dataset that holds tensors, say, or keys that are no text, is
# pickled. Those bytes come from processes that hold the job's key, and from a state that the program loads.


def pack(value: dict[str, Any]) -> bytes:
    """Return a snapshot as bytes.

    Raises:
        Exception: whatever pickling the user's objects raises.
    """
    try:
        text = json.dumps(value)
        if json.loads(text) == value:  # a tuple, or a key that is a number, would come back as something else
            return text.encode()
    except (TypeError, ValueError):
        pass
    packed: bytes = cloudpickle.dumps(value)  # classes of the program's `__main__` by value
    return packed


def is_text(packed: bytes) -> bool:
    """Return whether a snapshot is JSON: an object, and nothing before it, as `pack` writes it.

    Of what is not, pickle may run anything. So whoever lets text in asks this, and whoever reads it asks this, too.
    """
    return packed.startswith(b"{")


def unpack(packed: bytes) -> dict[str, Any]:
    """Return the snapshot that `pack` was given."""
    value: dict[str, Any] = json.loads(packed) if is_text(packed) else pickle.loads(packed)
    return value
