"""Flash checkpoint: model, optimizer, generators and data position as one record, in memory first, on disk behind.

`FlashCheckpointer` is what a training program uses, `CheckpointReader` what an evaluation reads its checkpoints with.
Importing this package does not import torch; these classes do.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hetstream.checkpoint.policy.interval import Adaptive, Every
from hetstream.checkpoint.policy.retention import Best, Retention

if TYPE_CHECKING:
    from hetstream.checkpoint.flash.checkpointer import FlashCheckpointer
    from hetstream.checkpoint.flash.options import Options
    from hetstream.checkpoint.flash.reader import CheckpointReader
    from hetstream.checkpoint.flash.restoring import Loaded
    from hetstream.checkpoint.flash.stats import Stats

__all__ = [
    "Adaptive",
    "Best",
    "CheckpointReader",
    "Every",
    "FlashCheckpointer",
    "Loaded",
    "Options",
    "Retention",
    "Stats",
]


# Importing any of these imports torch.
_TORCH_SIDE = {
    "CheckpointReader": "reader",
    "FlashCheckpointer": "checkpointer",
    "Loaded": "restoring",
    "Options": "options",
    "Stats": "stats",
}


def __getattr__(name: str) -> Any:
    if name in _TORCH_SIDE:
        return getattr(importlib.import_module(f"hetstream.checkpoint.flash.{_TORCH_SIDE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
