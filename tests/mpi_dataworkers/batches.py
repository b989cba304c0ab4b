"""Batches of `sample_datasets.py` as values that can be compared."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def as_bytes(loader: Iterable[Any]) -> list[tuple[bytes, list[int]]]:
    """One epoch, or several batches of one: the bytes and the sample ids of each batch."""
    return [(values.numpy().tobytes(), ids.tolist()) for values, ids in loader]


def check_that_a_lost_worker_costs_nothing(loader: Any, reference: Any, flag: Path, number: signal.Signals) -> None:
    """Compare two epochs with a reference, where a data worker is struck in the first.

    Args:
        loader: whose dataset strikes.
        reference: one that has the same samples.
        flag: holds the process id of the data worker that was struck.
        number: the signal.
    """
    assert as_bytes(loader) == as_bytes(reference)
    assert flag.exists(), "no data worker came to the sample"
    if number == signal.SIGSTOP:
        os.kill(int(flag.read_text()), signal.SIGCONT)
    assert as_bytes(loader) == as_bytes(reference), "the next epoch, with the worker back or replaced"
