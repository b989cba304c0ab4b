"""A buffer of the model that data workers have a copy of: whether it is still what was copied.

Its version, which counts changes, is looked at in each step. Contents are compared when that is another one, so that a
checkpoint that is loaded with the same contents changes nothing. Called by `forward.py`.
"""

from __future__ import annotations

from typing import Any

import torch


class CopiedBuffer:
    """See the module.

    Args:
        table, name: where the buffer is in its module; it may be replaced there.
        copy: what data workers have.
        is_small: its contents are compared in each step, since `.data` and `.numpy()` change it uncounted.
    """

    def __init__(self, table: dict[str, Any], name: str, copy: torch.Tensor, is_small: bool) -> None:
        self._table, self._name, self._copy, self._is_small = table, name, copy, is_small
        self._seen: tuple[Any, int] | None = None
        self._is_equal = False

    def change(self) -> str:
        """How it differs from the copy; "" when it does not."""
        now = self._table.get(self._name)
        version = now._version if isinstance(now, torch.Tensor) else 0
        if self._seen is None or self._seen[0] is not now or self._seen[1] != version:
            self._seen, self._is_equal = (now, version), same_bytes(now, self._copy)
        if not self._is_equal:
            return f"the buffer {self._name}, of which data workers have a copy, has changed"
        if self._is_small and not same_bytes(now, self._copy):
            return (
                f"the buffer {self._name}, of which data workers have a copy, has changed uncounted, as through .data"
            )
        return ""


def same_bytes(value: Any, other: torch.Tensor) -> bool:
    """Whether a value is a tensor of the same type, size and contents, each byte of them; NaN equals itself."""
    if not isinstance(value, torch.Tensor) or value.dtype != other.dtype or value.shape != other.shape:
        return False
    if value.numel() == 0:
        return True
    first, second = (
        tensor.detach().to(other.device).contiguous().reshape(-1).view(torch.uint8) for tensor in (value, other)
    )
    return torch.equal(first, second)
