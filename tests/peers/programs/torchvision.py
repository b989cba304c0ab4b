"""torchvision for timm's tests. Its build on PyPI is for torch with CUDA; for others operators are missing there.

It lies apart from the other packages, some of which use torchvision where they can import it.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import PathFinder

import torch

for operator in ("nms", "qnms"):
    torch.library.define(f"torchvision::{operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
spec = PathFinder.find_spec("torchvision", [f"{sys.prefix}/torchvision"])
if spec is None or spec.loader is None:
    raise ModuleNotFoundError("torchvision", name="torchvision")
module = sys.modules["torchvision"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
