"""What a forward does beside its tensors: what is seen while one is watched."""

from __future__ import annotations

import functools
import gc
import time
from typing import Any

import torch

from hetstream.mpi_dataworkers.loader.embedding_lookups import EmbeddingTimer
from hetstream.mpi_dataworkers.partitioner.side_effects import ModelState, watch


def test_what_a_collection_of_garbage_calls_is_none_of_the_forwards() -> None:
    def look_at_the_clock(_phase: str, _info: Any) -> None:
        called.append(time.perf_counter())

    def forward() -> int:
        return len([[] for _ in range(1000)])

    called: list[float] = []
    before = gc.get_threshold()
    gc.callbacks.append(look_at_the_clock)
    gc.set_threshold(10)
    try:
        result, effects = watch(forward)
        called.clear()
        forward()
        assert called, "garbage is collected again afterwards"
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(look_at_the_clock)
    assert (result, effects.reasons) == (1000, [])


def test_what_times_lookups_of_embeddings_is_none_of_the_forwards() -> None:
    """It is there in one step a second, so it may be in the step in which a forward is watched, and later."""
    model = torch.nn.Sequential(torch.nn.Embedding(10, 2), torch.nn.Linear(2, 1))
    timer = EmbeddingTimer(draw=lambda: 0.0)
    timer.step_ended()
    try:
        _, effects = watch(functools.partial(model, torch.arange(4)))
        state = ModelState(model, [])
        assert (effects.reasons, state.hooked(), state.change()) == ([], "", "")
        handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
        try:
            assert state.change().startswith("torch.nn.Module has a hook (test_side_effects.py:")
        finally:
            handle.remove()
        assert state.change() == ""
    finally:
        timer.pause()
