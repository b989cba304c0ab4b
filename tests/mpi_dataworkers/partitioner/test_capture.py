"""What runs beside a program while its forward is traced is no part of the forward."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import pytest
import sample_models as models
import torch
from torch._dynamo import eval_frame
from torch.nn.modules import module as torch_module
from torch.utils.data import default_collate

from hetstream.mpi_dataworkers.loader.step_times import EmbeddingTimer
from hetstream.mpi_dataworkers.partitioner.partition import Partition, partition

LOADER_OPTIONS: dict[str, Any] = {"batch_size": 8}
STEPS = 12


def trained(loaders: Callable[..., Any], before: Callable[[int], None] = lambda _: None) -> Partition:
    """A partition after some steps, of which each gave what the forward as it is written gives."""
    dataset, model = models.Rows(8 * STEPS), models.Jagged()
    loader = loaders(dataset)
    example = default_collate([dataset[number] for number in range(8)])
    done = partition(model, example, loader=loader, offload="all")
    for number, (values, _) in enumerate(loader):
        before(number)
        assert torch.equal(model(values), models.Jagged.forward(model, values))
    return done


def test_what_a_collection_of_garbage_calls_is_none_of_the_forwards(loaders: Callable[..., Any]) -> None:
    def look_at_the_clock(_phase: str, _info: Any) -> None:
        called.append(time.perf_counter())

    called: list[float] = []
    before = gc.get_threshold()
    gc.callbacks.append(look_at_the_clock)
    gc.set_threshold(10)
    try:
        done = trained(loaders)
        assert called
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(look_at_the_clock)
    assert done.analysis is not None
    assert done.analysis.why_not_all == ""
    assert (done.counts.partitioned, done.counts.original) == (STEPS - 3, 0)


def test_what_times_lookups_of_embeddings_is_none_of_the_forwards(
    loaders: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is there in one step a second, so it may be in the step in which a forward is traced, and later."""
    monkeypatch.setattr(eval_frame, "cached_backends", {})  # other tests have compiled
    timer = EmbeddingTimer(draw=lambda: 0.0)
    timer.step_ended()
    assert torch_module._has_any_global_hook()
    handles: list[Any] = []

    def before(number: int) -> None:
        if number == 5:
            assert not torch_module._has_any_global_hook(), "a step in which a forward is traced is not timed"
            eval_frame.cached_backends.clear()
            timer._next_s = 0.0
            timer.step_ended()
            assert torch_module._has_any_global_hook()
        if number == 9:
            handles.append(torch_module.register_module_forward_hook(lambda *_: None))

    try:
        done = trained(loaders, before)
    finally:
        timer.pause()
        for handle in handles:
            handle.remove()
    assert done.analysis is not None
    assert done.analysis.why_not_all == ""
    assert (done.counts.partitioned, done.counts.reasons) == (6, {"there are hooks of all modules": 3})
