"""Flash checkpoint: model, optimizer, generators and data position as one record, in memory first, on disk behind.

`FlashCheckpointer` is what a training program uses. Importing this package does not import torch; that class does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from checkpoint.policy.interval import Adaptive, Every
from checkpoint.policy.retention import Best, Retention

if TYPE_CHECKING:
    from checkpoint.flash.checkpointer import FlashCheckpointer, Loaded, Stats
    from checkpoint.flash.options import Options

__all__ = ["Adaptive", "Best", "Every", "FlashCheckpointer", "Loaded", "Options", "Retention", "Stats"]


def __getattr__(name: str) -> Any:
    if name in ("FlashCheckpointer", "Loaded", "Stats"):
        from checkpoint.flash import checkpointer

        return getattr(checkpointer, name)
    if name == "Options":
        from checkpoint.flash.options import Options

        return Options
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
