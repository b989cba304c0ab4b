"""Which operators of a program are kernels of an emulated GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from hetstream.hetjob.gpu.emulated_file import EmulatedGpuFile

# What runs between an optimizer's step and the next forward would end the idle gap that begins there.
PROGRAM = """
import sys
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from hetstream.hetjob.gpu.emulation import EmulatedGpu, Kernels
launches, at_boundary = [0], []
register_optimizer_step_post_hook(lambda *_: at_boundary.append(launches[0]))
def before(): launches[0] += 1
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with Kernels(EmulatedGpu(sys.argv[1], 0), before, lambda: None):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    print(launches[0] > 5, launches[0] - at_boundary[0])
"""


def test_nothing_is_launched_between_a_step_and_the_next_forward(tmp_path: Path) -> None:
    EmulatedGpuFile.create(tmp_path / "gpu0", capacity_bytes=10**9, core=0, segment_bytes=1, bus_bytes_per_s=1)
    argv = [sys.executable, "-c", PROGRAM, str(tmp_path / "gpu0")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=100)
    assert done.stdout == "True 0\n", done.stderr
