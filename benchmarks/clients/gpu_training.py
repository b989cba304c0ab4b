"""A training program, for benchmarks.gpu_sharing; it knows nothing of sharing.

Takes one JSON object: `steps` or `seconds`, `wait_ms` of waiting for data before each step, `width` and `rows` of the
model and its batches, `layers`, `device` (the CPU if it says nothing). Prints one line for each step: when it ended,
and how long it computed, in nanoseconds of CLOCK_MONOTONIC.
"""

from __future__ import annotations

import json
import sys
import threading
import time

import torch


def main() -> None:
    """Train."""
    request = json.loads(sys.argv[1])
    torch.manual_seed(0)
    width = request["width"]
    modules = [module for _ in range(request["layers"]) for module in (torch.nn.Linear(width, width), torch.nn.ReLU())]
    device = request.get("device", "cpu")
    model = torch.nn.Sequential(*modules).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    batch = torch.randn(request["rows"], width, device=device)
    data = threading.Event()
    end_s = time.monotonic() + request.get("seconds", 1e9)
    for _ in range(request.get("steps", 10**9)):
        data.wait(request["wait_ms"] / 1000)
        began_ns = time.monotonic_ns()
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()
        now_ns = time.monotonic_ns()
        print(now_ns, now_ns - began_ns, flush=True)
        if time.monotonic() > end_s:
            break


if __name__ == "__main__":
    main()
