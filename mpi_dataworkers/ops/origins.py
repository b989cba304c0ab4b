"""What random numbers of a pass follow from: hetstream's seeds, or the generators of torch's worker processes.

hetstream's own loader seeds the generators for each sample from its seed and epoch. In a program that only knows torch,
the numbers have to differ and to agree where they do with torch: by the rank that `worker_init_fn` adds, by the seed
that the program gives to the dataset's own generator, and not by how often a loader was iterated. There torch starts
worker process w with generators seeded by its base seed and w, runs `worker_init_fn`, and has copies of the generators
that the dataset holds. Each of these generators has an *origin*: a digest of its state at that moment. A sample's seed
is made from the origin, the step and the place in it, so that it does not matter who makes the sample.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hetstream.mpi_dataworkers.order.sharding import Indices, SampleSeeds
from hetstream.mpi_dataworkers.wire.messages import WorkerSeeds


@dataclass(frozen=True)
class PassSeeds:
    """What the random numbers of one pass follow from.

    Attributes:
        seed, epoch: of hetstream's own loader.
        workers: of torch's worker processes, in whose place data workers make the pass; the seed then says nothing, and
            the epoch is only a number for people.
    """

    seed: int
    epoch: int
    workers: WorkerSeeds | None = None

    def of_step(self, indices: Indices, listed_step: int | None = None, epoch: int | None = None) -> SampleSeeds:
        """Seeds of a step's samples; see `SampleSeeds`. Those of torch's worker processes go with `Origins`.

        Args:
            indices: of the step.
            listed_step: the step, in a listed order.
            epoch: of the step, where the pass goes on with later ones.
        """
        if self.workers is None:
            return SampleSeeds(indices, self.seed, self.epoch if epoch is None else epoch, listed_step)
        return SampleSeeds(indices, 0, self.workers.passes_before, listed_step)


@dataclass(frozen=True)
class Origins:
    """The origins of generators, 64 bits each, which are put into each sample's seed by exclusive or.

    Attributes:
        python, numpy, torch: of the global generators.
        own: of those that the dataset and its companions hold, in the order in which they are found; None: their seeds
            are told apart by that order alone.
    """

    python: int = 0
    numpy: int = 0
    torch: int = 0
    own: Sequence[int] | None = None

    @classmethod
    def here(cls, own: Sequence[int]) -> Origins:
        """Those of the global generators as they are in this process now."""
        python, numpy, torchs = random.getstate(), np.random.get_state(), torch.get_rng_state()
        return cls(digest_of_state(python), digest_of_state(numpy), digest_of_state(torchs), own)


# Of hetstream's own loader: the samples' seeds as they are.
PLAIN = Origins()


def digest_of_state(state: Any) -> int:
    """64 bits of a generator's state: the same in every process, and other bits for another state."""
    digest = hashlib.blake2b(digest_size=8)
    _feed(digest, state)
    return int.from_bytes(digest.digest(), "little")


def _feed(digest: Any, state: Any) -> None:
    if isinstance(state, torch.Tensor):
        state = state.cpu().numpy()
    if isinstance(state, np.ndarray):
        digest.update(state.tobytes())
    elif isinstance(state, Mapping):
        for name in sorted(state):
            _feed(digest, (name, state[name]))
    elif isinstance(state, tuple | list) and not all(type(part) is int for part in state):
        for part in state:
            _feed(digest, part)
    else:
        digest.update(repr(state).encode() + b"\0")
