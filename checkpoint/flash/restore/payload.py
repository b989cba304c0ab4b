"""The tensors of a record where they lie: in a slot's memory, or in a mapped file.

Called by `source.py`, for a restore. A view is made when somebody asks for it: most tensors are copied from their
addresses, and ten thousand views take longer than their bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hetstream.checkpoint.record.layout import Entry
from hetstream.checkpoint.tensors.views import bytes_as_tensor, tensor_of


class Payload:
    """Memory, and what lies in it.

    Args:
        entries: the tensors.
        data: the memory that their offsets count from. It stays mapped as long as this object does.

    Attributes:
        entries: the tensors.
        begin: the address that their offsets count from.
    """

    def __init__(self, entries: Sequence[Entry], data: memoryview) -> None:
        self.entries = entries
        self._data = data
        self._whole = bytes_as_tensor(data)
        self.begin = self._whole.data_ptr()

    def view(self, index: int) -> torch.Tensor:
        """A tensor, uncopied; nobody must write to it."""
        entry = self.entries[index]
        return tensor_of(entry, self._data[entry.offset : entry.offset + entry.num_bytes])
