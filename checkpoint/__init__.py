"""Flash checkpoint: model, optimizer, generators and data position as one record, in memory first, on disk behind."""

from __future__ import annotations

import importlib
from typing import Any

if __name__ != "hetstream.checkpoint":
    # From the root of a checkout it would be a second copy, whose classes are not those of hetstream.
    raise ImportError(f"no module of this name is hetstream's: import hetstream.checkpoint instead of {__name__}")


def __getattr__(name: str) -> Any:
    """What `hetstream` has of checkpoints, such as `Best`, can be imported from here, too (PEP 562)."""
    value = None if name.startswith("_") else getattr(importlib.import_module("hetstream"), name, None)
    if not str(getattr(value, "__module__", "")).startswith(f"{__name__}."):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return value
