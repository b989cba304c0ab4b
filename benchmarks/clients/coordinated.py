"""hetstream's side of the coordinated-reads benchmark: one data worker process, ranks that read by length or not."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from benchmarks.clients.lengths import BATCH_SIZE, BOUNDARIES, WORLD_SIZE, Batch, Emulation, skewed_lengths, train
from benchmarks.clients.service import running, wait_for_data_workers
from hetstream import DataLoader


class Texts(Dataset[Any]):
    """Sample i is as many numbers as its length says."""

    def __init__(self, lengths: npt.NDArray[np.int64]) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.zeros(int(self.lengths[index]), dtype=torch.int32)


def pad(texts: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Collate: pad to the longest, and say the lengths."""
    lengths = torch.tensor([len(text) for text in texts])
    return torch.nn.utils.rnn.pad_sequence(texts, batch_first=True), lengths


def read(loader: Any) -> Iterator[Batch]:
    """What each batch costs."""
    for padded, lengths in loader:
        yield padded.shape[0], int(lengths.sum()), padded.shape[1]


def main() -> None:
    """Measure every case of the request."""
    by_length, request = sys.argv[1] == "by-length", json.loads(sys.argv[-1])
    torch.set_num_threads(1)
    lengths = skewed_lengths(request["samples"])
    options = {"lengths": lengths.tolist(), "bucket_boundaries": BOUNDARIES} if by_length else {}
    for case, emulation in request["cases"].items():
        with ExitStack() as stack:
            service = stack.enter_context(running(processes=1, cores=set(request["cores"])))
            common = {"batch_size": BATCH_SIZE, "shuffle": True, "collate_fn": pad}
            job = {"service": service, "job_name": "job", "world_size": WORLD_SIZE}
            ranks = []
            for rank in range(WORLD_SIZE):
                loader: Any = DataLoader(Texts(lengths), **common, **job, **options, rank=rank)  # type: ignore[arg-type]
                stack.enter_context(loader)
                wait_for_data_workers(loader, 1)
                ranks.append(partial(read, loader))
            train(case, Emulation(**emulation), ranks, len(loader))


if __name__ == "__main__":
    main()
