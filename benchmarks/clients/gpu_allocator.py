"""Records what PyTorch's allocator does in some steps of training on a real GPU, for benchmarks.gpu_sharing.

Takes one JSON object: `path` of the file to write, `steps`. A convolution net, so that small and large tensors of many
sizes come and go; one stream.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from benchmarks.allocator_trace import exported

_MOST_ENTRIES = 100_000


def main() -> None:
    """Train from an allocator that holds nothing, and write its history."""
    request = json.loads(sys.argv[1])
    torch.manual_seed(0)
    torch.cuda.memory._record_memory_history(context=None, stacks="python", max_entries=_MOST_ENTRIES)
    layers: list[torch.nn.Module] = []
    for before, after in ((3, 64), (64, 128), (128, 256), (256, 512)):
        layers += [torch.nn.Conv2d(before, after, 3, 2, 1), torch.nn.BatchNorm2d(after), torch.nn.ReLU()]
    model = torch.nn.Sequential(*layers, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(512, 1000))
    model = model.cuda()
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(request["steps"]):
        images = torch.randn(32 if step % 2 else 48, 3, 224, 224, device="cuda")  # sizes change from step to step
        loss = model(images).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == request["steps"] // 2:
            torch.cuda.empty_cache()
    torch.cuda.synchronize()
    source = f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}"
    device = torch.cuda.current_device()
    Path(request["path"]).write_bytes(exported(torch.cuda.memory._snapshot(), device, source))


if __name__ == "__main__":
    main()
