"""Measure a model's layers with probes on the GPU: `Probing` for `capacity.capacities`.

    with GpuProbing(model, train_step) as device:
        layers = capacities(device)

Nobody else may use the GPU meanwhile. A step of training is run some hundred times for each layer, so it must bear to
be repeated, on one batch: parameters change.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hetstream.mpi_dataworkers.errors import FeatureError
from hetstream.mpi_dataworkers.features.compiled_cache import prepare_triton
from hetstream.mpi_dataworkers.gpu_features.capacity import LayerTime, Probe, Resource
from hetstream.mpi_dataworkers.gpu_features.checks import check_callable
from hetstream.mpi_dataworkers.gpu_features.layer_hooks import CudaClock, LayerHooks, LayerTimes
from hetstream.mpi_dataworkers.gpu_features.streams import CudaStreams, Stream

# Steps of which the median counts.
_STEPS = 7
# Four times the largest cache of a GPU (50 MB on an H100).
_SOURCE_BYTES = 1 << 28


class GpuProbing:
    """A model that is trained on a GPU, with probes beside it; in its context training comes first, as in `CoRun`'s.

    Args:
        model: The model.
        train_step: A whole step: forward, backward, optimizer.
        layers, optimizer: As in `CoRun`.
        device: The GPU.

    Raises:
        FeatureError: there is no GPU, no Triton, or something is of another type.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        train_step: Callable[[], object],
        *,
        layers: Mapping[str, torch.nn.Module] | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        device: str = "cuda",
    ) -> None:
        check_callable("train_step", train_step, "a function that trains on one batch")
        if why := prepare_triton():
            raise FeatureError(f"probes on a GPU are compiled by Triton: {why}")
        try:
            from hetstream.mpi_dataworkers.gpu_features import probes
        except ImportError as exc:
            raise FeatureError("probes on a GPU need Triton: pip install 'hetstream[triton]'") from exc
        self._probes: Any = probes
        self._streams = CudaStreams(device)
        self.num_multiprocessors = self._streams.num_multiprocessors
        self._train_step = train_step
        self._probe: Probe | None = None
        self._source = torch.zeros(_SOURCE_BYTES // 4, device=self._streams.device)
        most_values = self.num_multiprocessors * max(probes.MEMORY_BLOCK, probes.ARITHMETIC_BLOCK)
        self._made = torch.empty(most_values, device=self._streams.device)
        self._times = LayerTimes(CudaClock(), self._layer_begins)
        self._context = contextlib.ExitStack()
        hooks = LayerHooks(model, self._times.layer_begins, layers=layers, optimizer=optimizer)
        self._context.callback(hooks.close)

    def step(self, probe: Probe | None) -> Sequence[LayerTime]:
        """As `Probing`."""
        self._streams.follow()
        self._probe = probe
        self._times.of(self._one_step, 1)
        return self._times.of(self._one_step, _STEPS)

    def alone_s(self, resource: Resource, num_programs: int, num_rounds: int) -> float:
        """As `Probing`."""
        clock, seconds = CudaClock(), []
        for _ in range(_STEPS):
            first = clock.mark()
            self._launch(Probe(resource, "", num_programs, num_rounds))
            seconds.append(clock.seconds(first, clock.mark()))
        return statistics.median(seconds[1:])

    def close(self) -> None:
        """Take the hooks off the model; safe to call twice."""
        self._context.close()

    def __enter__(self) -> GpuProbing:
        self._context.enter_context(self._streams.first())
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _one_step(self) -> None:
        """A step, and the end of a probe that outlasts it: the next step begins with nothing beside it."""
        self._train_step()
        self._streams.wait(Stream.TRAINING, self._streams.record(Stream.PREPROCESSING))

    def _layer_begins(self, name: str) -> None:
        probe = self._probe
        if probe is None or probe.layer != name:
            return
        self._streams.wait(Stream.PREPROCESSING, self._streams.record(Stream.TRAINING))
        self._streams.launch(lambda: self._launch(probe), [], [])

    def _launch(self, probe: Probe) -> None:
        if probe.resource is Resource.MEMORY:
            self._probes.launch_memory(self._source, self._made, probe.num_programs, probe.num_rounds)
        else:
            self._probes.launch_arithmetic(self._made, probe.num_programs, probe.num_rounds)
