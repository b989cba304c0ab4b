"""A GPU with a law of contention, on which capacities are measured in no time: `Probing` for tests and dry runs.

A layer takes a share of each resource while it runs, and so does a probe. Where the shares of a resource are more than
all of it, everybody who uses it is slower by as much. A probe of few programs cannot take all of the memory's traffic:
it grows with their number up to a part of them all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hetstream.mpi_dataworkers.gpu_features.capacity import LayerTime, Probe, Resource

# A round of one program on a multiprocessor of its own.
_ROUND_S = {Resource.MEMORY: 2e-7, Resource.ARITHMETIC: 1e-7}


@dataclass(frozen=True)
class FakeLayer:
    """A layer of a model that is not there.

    Attributes:
        seconds: with nothing beside it.
        memory, arithmetic: the share of the GPU's that it takes.
    """

    name: str
    seconds: float
    memory: float
    arithmetic: float


class FakeGpu:
    """A GPU that is not there.

    Args:
        layers: of the training step.
        num_multiprocessors: of the GPU.
        saturated_by: the part of its multiprocessors that take all of the memory's traffic.
        noise: called for a factor of each layer's time.
        cold_steps: as long its clocks rise, from the half: it was idle before.
    """

    def __init__(
        self,
        layers: Sequence[FakeLayer],
        num_multiprocessors: int = 132,
        saturated_by: float = 0.5,
        noise: Callable[[], float] = lambda: 1.0,
        cold_steps: int = 0,
    ) -> None:
        self._cold_steps = cold_steps
        self.num_multiprocessors = num_multiprocessors
        self.num_steps = 0
        self._layers = layers
        self._saturated_by = saturated_by
        self._noise = noise

    def share(self, resource: Resource, num_programs: int) -> float:
        """What a probe takes of a resource."""
        part = num_programs / self.num_multiprocessors
        return min(1.0, part / self._saturated_by) if resource is Resource.MEMORY else part

    def step(self, probe: Probe | None) -> Sequence[LayerTime]:
        """As `Probing`."""
        self.num_steps += 1
        clock = min(1.0, 0.5 + 0.5 * self.num_steps / self._cold_steps) if self._cold_steps else 1.0
        return [LayerTime(layer.name, self._seconds(layer, probe) * self._noise() / clock) for layer in self._layers]

    def alone_s(self, resource: Resource, num_programs: int, num_rounds: int) -> float:
        """As `Probing`."""
        part = num_programs / self.num_multiprocessors
        return num_rounds * _ROUND_S[resource] * part / self.share(resource, num_programs)

    def _seconds(self, layer: FakeLayer, probe: Probe | None) -> float:
        if probe is None or probe.layer != layer.name or not probe.num_programs:
            return layer.seconds
        needs = layer.memory if probe.resource is Resource.MEMORY else layer.arithmetic
        return layer.seconds * max(1.0, needs + self.share(probe.resource, probe.num_programs))
