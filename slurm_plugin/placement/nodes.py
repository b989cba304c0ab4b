"""What nodes have free, as arrays, and what a job asks of one node. Only `Nodes` changes anything: by `take`,
`give_back` and, for books that are kept elsewhere, `set_free`.

Amounts are whole numbers, in thousandths of a CPU and of a GPU, so that what was taken and given back is what it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.int64]
Mask = NDArray[np.bool_]

WHOLE = 1000


@dataclass(frozen=True, slots=True)
class Shape:
    """What one node must give.

    Attributes:
        cpus: in thousandths.
        memory_mb: in MB.
        gpus: how many devices; 0 for none.
        share: of each device, in thousandths: 1000 but for a part of one.
        gpu_types: codes of the types that will do; empty: any.
    """

    cpus: int
    memory_mb: int = 0
    gpus: int = 0
    share: int = WHOLE
    gpu_types: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if min(self.cpus, self.memory_mb, self.gpus) < 0 or not 0 < self.share <= WHOLE:
            raise ValueError(f"{self}: amounts are not negative, a share is between 1 and {WHOLE}")
        if self.gpus != 1 and self.share != WHOLE:
            raise ValueError(f"{self}: a part of a GPU is a part of one")

    @property
    def gpu_total(self) -> int:
        """Thousandths of GPUs in all."""
        return self.gpus * self.share


@dataclass(frozen=True, slots=True)
class Spot:
    """Where a job goes.

    Attributes:
        node: index.
        devices: indices of its GPUs.
    """

    node: int
    devices: tuple[int, ...] = ()


class Nodes:
    """A cluster.

    Args:
        cpus: of each node, in thousandths, shape (n,).
        memory_mb: shape (n,).
        num_gpus: devices of each node, shape (n,).
        gpu_type: code of their type, shape (n,); any number where there are none.

    Attributes:
        cpus, memory_mb, num_gpus, gpu_type: as given.
        cpus_free, memory_free_mb: shape (n,).
        gpus_free: thousandths of each device, shape (n, d); 0 also where a node has fewer devices.
        version: grows with each change of a node, shape (n,): who keeps figures of nodes sees which are old.
    """

    def __init__(
        self,
        cpus: Sequence[int] | Counts,
        memory_mb: Sequence[int] | Counts,
        num_gpus: Sequence[int] | Counts,
        gpu_type: Sequence[int] | Counts | None = None,
    ) -> None:
        self.cpus = np.array(cpus, dtype=np.int64)
        self.memory_mb = np.array(memory_mb, dtype=np.int64)
        self.num_gpus = np.array(num_gpus, dtype=np.int64)
        self.gpu_type = np.zeros(len(self.cpus), np.int64) if gpu_type is None else np.array(gpu_type, dtype=np.int64)
        self.cpus_free, self.memory_free_mb = self.cpus.copy(), self.memory_mb.copy()
        devices = np.arange(max(1, int(self.num_gpus.max(initial=0))))
        self.gpus_free: Counts = np.where(devices < self.num_gpus[:, None], WHOLE, 0).astype(np.int64)
        self.version = np.zeros(len(self.cpus), np.int64)
        self._clock = 0

    def __len__(self) -> int:
        return len(self.cpus)

    def fits(self, shape: Shape) -> Mask:
        """Which nodes have room, shape (n,)."""
        found: Mask = (self.cpus_free >= shape.cpus) & (self.memory_free_mb >= shape.memory_mb)
        if shape.gpus:
            found &= (self.gpus_free >= shape.share).sum(axis=1) >= shape.gpus
            if shape.gpu_types:
                found &= np.isin(self.gpu_type, list(shape.gpu_types))
        return found

    def devices(self, node: int, shape: Shape) -> tuple[int, ...]:
        """Which devices of a node with room a job would get: of a part the fullest that fits, else the first whole."""
        if not shape.gpus:
            return ()
        free = self.gpus_free[node]
        able = np.flatnonzero(free >= shape.share)
        if shape.share < WHOLE:
            able = able[np.argsort(free[able], kind="stable")]
        return tuple(int(device) for device in able[: shape.gpus])

    def take(self, spot: Spot, shape: Shape) -> None:
        """Give a job what it asks for.

        Raises:
            ValueError: there is no room; nothing is changed.
        """
        free = self.gpus_free[spot.node, list(spot.devices)]
        fits = self.cpus_free[spot.node] >= shape.cpus and self.memory_free_mb[spot.node] >= shape.memory_mb
        if not fits or len(spot.devices) != shape.gpus or (free < shape.share).any():
            raise ValueError(f"node {spot.node} has no room for {shape}")
        self._change(spot, shape, 1)

    def give_back(self, spot: Spot, shape: Shape) -> None:
        """Take from a job what it had.

        Raises:
            ValueError: the node would have more than it has; nothing is changed.
        """
        free = self.gpus_free[spot.node, list(spot.devices)]
        too_much = (
            self.cpus_free[spot.node] + shape.cpus > self.cpus[spot.node]
            or self.memory_free_mb[spot.node] + shape.memory_mb > self.memory_mb[spot.node]
            or (free + shape.share > WHOLE).any()
        )
        if too_much:
            raise ValueError(f"node {spot.node} did not give {shape}")
        self._change(spot, shape, -1)

    def set_free(self, node: int, cpus: int, memory_mb: int, num_gpus: int) -> None:
        """What a node has free, where somebody else keeps the books, of whole GPUs alone.

        Args:
            node: index.
            cpus: in thousandths; negative for a node that is away.
            memory_mb: in MB.
            num_gpus: devices that are free.
        """
        self.cpus_free[node], self.memory_free_mb[node] = cpus, memory_mb
        self.gpus_free[node] = np.where(np.arange(self.gpus_free.shape[1]) < num_gpus, WHOLE, 0)
        self._touch(node)

    def _change(self, spot: Spot, shape: Shape, sign: int) -> None:
        self.cpus_free[spot.node] -= sign * shape.cpus
        self.memory_free_mb[spot.node] -= sign * shape.memory_mb
        self.gpus_free[spot.node, list(spot.devices)] -= sign * shape.share
        self._touch(spot.node)

    def _touch(self, node: int) -> None:
        self._clock += 1
        self.version[node] = self._clock

    @property
    def gpu_allocation(self) -> float:
        """Share of all GPUs that is given out, parts counted as parts; 0 without GPUs."""
        total = int(self.num_gpus.sum()) * WHOLE
        return 1 - float(self.gpus_free.sum()) / total if total else 0.0

    def indicator(self) -> NDArray[np.float64]:
        """GoldMiner's indicator of each node with GPUs: share of free CPUs less share of free GPUs."""
        here = self.num_gpus > 0
        gpus = self.gpus_free[here].sum(axis=1) / (WHOLE * self.num_gpus[here])
        found: NDArray[np.float64] = self.cpus_free[here] / np.maximum(1, self.cpus[here]) - gpus
        return found
