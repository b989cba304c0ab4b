"""What a forward does beside its tensors: what is seen while one is watched."""

from __future__ import annotations

import gc
import time
from typing import Any

from hetstream.mpi_dataworkers.partitioner.side_effects import watch


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
