"""A training program that knows nothing of sharing: one line with the loss for each step.

Arguments: how many steps, the width of the model, milliseconds of waiting for data before each step.
"""

from __future__ import annotations

import sys
import threading

import torch
import without_compiler  # noqa: F401

steps, width, wait_ms = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
torch.set_num_threads(1)  # sums of floats depend on it
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, width))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
batch = torch.randn(64, width)
data = threading.Event()
for _ in range(steps):
    data.wait(wait_ms / 1000)
    loss = model(batch).square().mean()
    optimizer.zero_grad()
    loss.backward()
    value = loss.item()
    optimizer.step()  # the last thing that is launched, so the GPU is idle from here on
    print(value.hex(), flush=True)
