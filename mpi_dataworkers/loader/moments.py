"""Moments of the work of a device, and the time between two, without ever waiting: the trainer's timers use them."""

from __future__ import annotations

from collections.abc import Callable

import torch

# On a CPU a clock's reading; on a CUDA device an event, which may not have passed yet.
Moment = float | torch.cuda.Event
_MS_PER_S = 1e3


def moment(device: torch.device, clock: Callable[[], float]) -> Moment | None:
    """Now, in the order of the device's work; None where it cannot be had without waiting."""
    if device.type == "cpu":
        return clock()
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return None
    event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def has_passed(moment: Moment) -> bool:
    """Whether the device has come to it; not to be asked in a forked process, or while a CUDA graph is captured."""
    return isinstance(moment, float) or bool(moment.query())  # type: ignore[no-untyped-call]


def seconds_between(began: Moment, ended: Moment) -> float:
    """Of two moments of one device that have passed."""
    if isinstance(began, float) or isinstance(ended, float):
        assert isinstance(began, float)
        assert isinstance(ended, float)
        return ended - began
    return float(began.elapsed_time(ended)) / _MS_PER_S
