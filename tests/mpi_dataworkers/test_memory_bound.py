"""A loader's memory stays within `buffer_bytes`, however slow the training loop and however large the batches."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from typing import Any

import pytest

RunProgram = Callable[..., "subprocess.CompletedProcess[str]"]
BATCH_BYTES, BUFFER_BYTES = 4 << 20, 32 << 20
# Beyond the buffer: the batches that the loop has and that are on their way, and what the allocator keeps of them.
ALLOWANCE_BYTES = 6 * BATCH_BYTES

PROGRAM = f"""
import time
import torch
from hetstream import DataLoader
from sample_datasets import Augmented

class Big(Augmented):
    def __getitem__(self, index):
        return torch.full(({BATCH_BYTES},), index % 251, dtype=torch.uint8)

def resident():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096

loader = DataLoader(Big(200), batch_size=1, shuffle=False, buffer_bytes={BUFFER_BYTES})
passing = iter(loader)
before = resident()
most, fullest = 0, 0
for number, batch in enumerate(passing):
    deadline = time.monotonic() + 10
    # Slow: each batch is taken when as many wait as may, or nearly.
    while number < 40 and loader.stats()["batches_waiting"] < 5 and time.monotonic() < deadline:
        time.sleep(0.002)
    assert batch[0, 0] == number % 251
    fullest = max(fullest, loader.stats()["batches_waiting"])
    most = max(most, resident() - before)
    if number == 60:
        break
print(most, fullest)
"""


@pytest.mark.shows("`buffer_bytes` bounds the loader's memory, `HETSTREAM_CACHE_BYTES` the data worker's")
@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_slow_training_loop_holds_no_more_than_its_buffer(
    service: Any, run_program: RunProgram, transport: str
) -> None:
    service.start_workers(2)
    result = run_program(PROGRAM, service.directory, HETSTREAM_SERVICE=service.name, HETSTREAM_TRANSPORT=transport)
    assert result.returncode == 0, result.stderr
    most, fullest = map(int, result.stdout.split())
    assert fullest >= 5, "the buffer was not full: nothing was tested"
    print(f"{transport}: {most / BUFFER_BYTES:.2f} of the buffer")
    assert most <= BUFFER_BYTES + ALLOWANCE_BYTES, f"{most >> 20} MiB with a buffer of {BUFFER_BYTES >> 20} MiB"
