"""Stages that misbehave, in a module beside the programs as a user's would be."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch


class Shapes:
    """Another structure for each batch, and none of tensors alone."""

    def __call__(self, batch: Any) -> Any:
        first = int(batch[1][0])
        made = (
            {"id": first, "name": f"sample {first}"}, (batch[0], [first, None]), None, b"\0" * first, "",
            [], {"nested": {"values": batch[0], first: {first}}}, Path("a") / str(first),
        )  # fmt: skip
        return made[first // 4 % len(made)]


class Large:
    """Much more than comes in, and a view of little of much."""

    def __call__(self, batch: Any) -> Any:
        large = batch[0].sum() + torch.arange(1 << 23, dtype=torch.float32)
        return [large, torch.zeros(1 << 22)[:3], batch[1]]


class InPlace:
    """Changes what it gets, and gives the same tensor twice."""

    def __call__(self, batch: Any) -> Any:
        batch[0].mul_(3).sub_(1)
        return [batch[0], batch[0], batch[1].flip(0)]


class Counting:
    """Depends on how often it was called: no function of the batch."""

    calls = 0

    def __call__(self, batch: Any) -> Any:
        Counting.calls += 1
        return [batch[0] + Counting.calls, batch[1]]


class HoldsGil:
    """A call into C that lets no other thread run for longer than a data worker may be silent."""

    def __init__(self, seconds: int, at: int) -> None:
        self.seconds, self.at = seconds, at

    def __call__(self, batch: Any) -> Any:
        if self.at in batch[1].tolist():
            ctypes.PyDLL(None).sleep(self.seconds)
        return batch


class Raises:
    """Raises one of what Python and torch have, for the batch with sample 9."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __call__(self, batch: Any) -> Any:
        if 9 in batch[1].tolist():
            raise self.error
        return batch
