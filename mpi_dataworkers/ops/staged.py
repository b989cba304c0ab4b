"""The batch stage: user code that gets each finished batch, after collate, in the process that has made it.

Used by `pipeline.py`. `tree.py` takes a `StagedBatch` apart as it does any batch, so its tensors travel as tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data._utils import pin_memory as torch_pin
from torch.utils.data._utils import worker as torch_worker

from hetstream.mpi_dataworkers.generators import making_sample

BatchStage = Callable[[Any], Any]
_pin_memory: Any = torch_pin.pin_memory


@dataclass(frozen=True)
class StagedBatch:
    """What a batch stage may return: a batch for the program, and tensors that the program does not see.

    Attributes:
        batch: what the training loop gets.
        extra: what `LoaderConnection.on_extra` gets just before.
    """

    batch: Any
    extra: Sequence[torch.Tensor]

    def pin_memory(self) -> StagedBatch:
        """The same in pinned memory; torch's own loader calls it, in process."""
        return StagedBatch(_pin_memory(self.batch), _pin_memory(list(self.extra)))


def run_stage(stage: BatchStage, batch: Any, seed: int) -> Any:
    """Run a batch stage, alike in every process: without gradients, which do not travel, and without
    `get_worker_info()`, which is not the same everywhere.

    Args:
        stage: the stage.
        batch: what it gets.
        seed: of `sample_generator()`; the global generators are seeded before.
    """
    info, torch_worker._worker_info = torch_worker._worker_info, None
    try:
        with torch.no_grad(), making_sample(seed):
            return stage(batch)
    finally:
        torch_worker._worker_info = info
