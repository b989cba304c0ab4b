"""Where the reader of a shard was, as bytes that travel with batches and leases: JSON, or a pickle.

JSON where it gives the same value back; a state of the dataset that holds tensors, say, or keys that are no text, is
pickled. Those bytes come from processes that hold the job's key, and from a state that the program loads.
"""

from __future__ import annotations

import json
import pickle
from typing import Any

import cloudpickle


def pack(value: dict[str, Any]) -> bytes:
    """A snapshot as bytes.

    Raises:
        Exception: whatever pickling the user's objects raises.
    """
    try:
        text = json.dumps(value)
        if json.loads(text) == value:  # a tuple, or a key that is a number, would come back as something else
            return text.encode()
    except (TypeError, ValueError):
        pass
    packed: bytes = cloudpickle.dumps(value)  # classes of the program's `__main__` by value
    return packed


def is_text(packed: bytes) -> bool:
    """Whether a snapshot is JSON: an object, and nothing before it, as `pack` writes it.

    Of what is not, pickle may run anything. So whoever lets text in asks this, and whoever reads it asks this, too.
    """
    return packed.startswith(b"{")


def unpack(packed: bytes) -> dict[str, Any]:
    """The snapshot that `pack` was given."""
    value: dict[str, Any] = json.loads(packed) if is_text(packed) else pickle.loads(packed)
    return value
