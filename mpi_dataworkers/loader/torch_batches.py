"""Batches as torch has them: rebuilt from what has come, and pinned.

Made by `loader_connection.py` for `client.py`, which knows no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data._utils import pin_memory as torch_pin

from hetstream.mpi_dataworkers.ops.tree import holds_objects, unflatten
from hetstream.mpi_dataworkers.wire.codec import Buffer, split
from hetstream.mpi_dataworkers.wire.messages import Batch

_pin_memory: Any = torch_pin.pin_memory


@dataclass(frozen=True)
class TorchBatches:
    """Builds a loader's batches; a `BatchBuilder`.

    Attributes:
        pin: they go to pinned memory, if there is a GPU.
    """

    pin: bool

    def build(self, header: Batch, frames: Sequence[Buffer]) -> Any:
        """The batch of this header; None for one without samples."""
        if header.num_samples == 0:
            return None
        return self.pinned(unflatten(header.spec, split(frames, header.buffers)))

    def runs_program(self, header: Batch) -> bool:
        """Whether `build` runs code of the program, which may hang."""
        return header.num_samples > 0 and holds_objects(header.spec)

    def pinned(self, batch: Any) -> Any:
        """The batch in pinned memory, if the loader pins and there is a GPU."""
        return _pin_memory(batch) if self.pin and torch.cuda.is_available() else batch
