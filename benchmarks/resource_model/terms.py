"""What the time of a training step is made of: terms as columns over configurations. Pure.

The first four are DLRover-RM's equations 2 to 5, for jobs with parameter servers; each has one slope. Their four
constants together are one column of ones, which is all that measurements can tell. A job on GPUs has terms of its own.
Loading is done by data workers beside the trainers, so its terms are another side of a maximum, not of the sum: a sum
cannot describe a pipeline.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]
Indices = NDArray[np.intp]


class ModelError(Exception):
    """There is nothing to be fitted to, or a library is missing."""


@dataclass(frozen=True)
class Configurations:
    """Amounts of resources, each an array of shape (n,); broadcast against one another where they are made.

    Attributes:
        trainers: processes that take part in a step (DLRover-RM's workers).
        trainer_cpus: CPUs of each.
        servers: parameter servers; 1 where there are none.
        server_cpus: CPUs of each.
        data_workers: data workers of the job.
        data_worker_cpus: CPUs of each.
    """

    trainers: Array
    trainer_cpus: Array
    servers: Array
    server_cpus: Array
    data_workers: Array
    data_worker_cpus: Array

    @classmethod
    def of(cls, **amounts: object) -> Configurations:
        """From numbers and sequences; what is not named is 1.

        Raises:
            ValueError: an amount that is not positive, or lengths that do not fit together.
        """
        names = list(cls.__dataclass_fields__)
        unknown = amounts.keys() - set(names)
        if unknown:
            raise ValueError(f"no amounts: {', '.join(sorted(unknown))}; there are {', '.join(names)}")
        given = [np.asarray(amounts.get(name, 1.0), dtype=np.float64) for name in names]
        arrays = [np.atleast_1d(array) for array in np.broadcast_arrays(*given)]
        for name, array in zip(names, arrays, strict=True):
            if not np.all(np.isfinite(array) & (array > 0)):
                raise ValueError(f"{name} must be positive everywhere")
        return cls(*(np.array(array, dtype=np.float64).ravel() for array in arrays))

    def __len__(self) -> int:
        return len(self.trainers)

    def __getitem__(self, index: object) -> Configurations:
        return Configurations(*(np.atleast_1d(getattr(self, name)[index]) for name in self.__dataclass_fields__))

    def joined(self, other: Configurations) -> Configurations:
        """These, then the others."""
        return Configurations(
            *(np.concatenate([getattr(self, name), getattr(other, name)]) for name in self.__dataclass_fields__)
        )

    @property
    def cpus(self) -> Array:
        """CPUs in all, of trainers, servers and data workers."""
        return (
            self.trainers * self.trainer_cpus
            + self.servers * self.server_cpus
            + self.data_workers * self.data_worker_cpus
        )


@dataclass(frozen=True)
class Workload:
    """What does not change while a job runs.

    Attributes:
        batch: samples of one trainer in a step.
        model_bytes: of the dense parameters.
        embedding_dim: dimension of the embedding table.
        bytes_per_s: of the network between the parts of the job.
    """

    batch: float = 1.0
    model_bytes: float = 0.0
    embedding_dim: float = 0.0
    bytes_per_s: float = 1.0


@dataclass(frozen=True)
class Term:
    """One term: its slope times its column is a time in seconds.

    Attributes:
        name: for people.
        column: configurations of length n, workload -> shape (n,).
        belongs_to: whether a job of this workload has it. A job without embeddings has no term for them: one of zeros
            would be a slope that nothing can tell.
    """

    name: str
    column: Callable[[Configurations, Workload], Array]
    belongs_to: Callable[[Workload], bool] = lambda _: True


@dataclass(frozen=True)
class Family:
    """Jobs whose steps are made of the same terms.

    Attributes:
        name: for people.
        compute: terms whose sum is the time of a step that waits for no data.
        loading: terms whose sum is the time in which data workers make the data of one step; empty where trainers read
            their data themselves.
    """

    name: str
    compute: tuple[Term, ...]
    loading: tuple[Term, ...] = ()

    def of(self, workload: Workload) -> Family:
        """With the terms only that jobs of this workload have."""
        compute = tuple(term for term in self.compute if term.belongs_to(workload))
        return Family(self.name, compute, tuple(term for term in self.loading if term.belongs_to(workload)))

    def columns(self, terms: tuple[Term, ...], configurations: Configurations, workload: Workload) -> Array:
        """The terms' columns, shape (n, number of terms)."""
        found = [np.broadcast_to(term.column(configurations, workload), (len(configurations),)) for term in terms]
        return np.stack(found, axis=1) if found else np.zeros((len(configurations), 0))


_CONSTANT = Term("constant", lambda have, _: np.ones(len(have)))
_GRADIENT = Term("gradient", lambda have, of: of.batch / have.trainer_cpus)
_UPDATE = Term("update", lambda have, _: have.trainers / (have.servers * have.server_cpus))
_SYNCHRONISATION = Term(
    "synchronisation", lambda have, of: of.model_bytes / have.servers * have.trainers / of.bytes_per_s
)
_EMBEDDING = Term(
    "embedding", lambda have, of: of.batch * of.embedding_dim / have.servers, lambda of: of.embedding_dim > 0
)
# Of the ring algorithms each trainer sends and receives this share of the gradients twice.
_ALL_REDUCE = Term(
    "all-reduce", lambda have, of: 2 * of.model_bytes * (have.trainers - 1) / have.trainers / of.bytes_per_s
)
_LOADING = Term("loading", lambda have, of: have.trainers * of.batch / (have.data_workers * have.data_worker_cpus))

PARAMETER_SERVERS = Family("parameter servers", (_GRADIENT, _UPDATE, _SYNCHRONISATION, _EMBEDDING, _CONSTANT))
GPU_TRAINERS = Family("GPU trainers", (_ALL_REDUCE, _CONSTANT), (_LOADING, _CONSTANT))
FED_PARAMETER_SERVERS = Family("parameter servers with data workers", PARAMETER_SERVERS.compute, (_LOADING, _CONSTANT))
