"""How long the optimizers of this process take (T_upd of a step): torch's own hooks around every `optimizer.step`.

A random one of eight calls is timed, so that no period of the program hides a call. Where the parameters are on a CPU
the clock says how long it took. On a CUDA device the call returns before its work is done: two events are recorded, and
read at a later call, when they have passed; nothing waits for them. Of optimizers within optimizers the innermost
counts; what wraps it may synchronise. Where the optimizer computes the gradients itself, by a closure as Lightning
gives it one, time counts from the closure's end on.

A step that torch.compile has compiled is not seen, and neither is one that a CUDA graph replays: no Python runs there.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hetstream.base.forks import generation
from hetstream.mpi_dataworkers.wire.messages import OptimizerCalls

_TIMED_SHARE = 1 / 8
# The first calls allocate what the optimizer keeps.
_WARM_UP = 3
# Pairs of events that have not passed; with more the device is far behind, and no more are recorded.
_MOST_PENDING = 16
_MS_PER_S = 1e3


class OptimizerTimer:
    """Counts and times; `before` and `after` are the hooks.

    Args:
        draw: numbers from 0 to 1, none of the program's own generators.
        clock: seconds.
    """

    def __init__(self, draw: Callable[[], float], clock: Callable[[], float] = time.perf_counter) -> None:
        self._draw, self._clock = draw, clock
        self._num_calls = self._num_timed = 0
        self._timed_s = 0.0
        # The innermost call that has begun: its thread, its optimizer, and when its update began if it is timed.
        self._thread, self._optimizer = 0, 0
        self._began: float | torch.cuda.Event | None = None
        self._pending: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._generation = generation()

    def calls(self) -> OptimizerCalls:
        """What was counted so far; any thread may ask."""
        return OptimizerCalls(self._num_calls, self._num_timed, self._timed_s)

    def before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """A call begins; of a timed one with a closure, other arguments."""
        if torch.compiler.is_compiling():
            return None
        self._thread, self._optimizer, self._began = threading.get_ident(), id(optimizer), None
        if self._num_calls < _WARM_UP or self._draw() >= _TIMED_SHARE:
            return None
        self._look()
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._began = self._mark(optimizer)
            return None
        again = self._from_its_end(optimizer, closure)
        return ((args[0], again, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": again})

    def after(self, optimizer: torch.optim.Optimizer, _: Any, __: Any) -> None:
        """A call has ended."""
        if torch.compiler.is_compiling():
            return
        if self._thread != threading.get_ident() or self._optimizer != id(optimizer):
            return
        began, self._thread, self._began = self._began, 0, None
        self._num_calls += 1
        if isinstance(began, float):
            self._take(self._clock() - began)
        elif began is not None:
            ended = self._mark(optimizer)
            if ended is not None and not isinstance(ended, float):
                self._pending.append((began, ended))

    def _from_its_end(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure; the update begins when it returns. One that is called several times is of no use here."""
        num = 0

        def run() -> Any:
            nonlocal num
            num += 1
            value = closure()
            self._began = self._mark(optimizer) if num == 1 else None
            return value

        return run

    def _mark(self, optimizer: torch.optim.Optimizer) -> float | torch.cuda.Event | None:
        """This moment where the parameters are; None where it cannot be had without waiting."""
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        device = next((parameter.device for parameter in parameters), None)
        if device is None or device.type == "cpu":
            return self._clock() if device is not None else None
        if device.type != "cuda" or len(self._pending) >= _MOST_PENDING or torch.cuda.is_current_stream_capturing():
            return None
        event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        return event

    def _look(self) -> None:
        """Read the events that have passed; not where that is forbidden: in a forked process, and in a capture."""
        if not self._pending or self._generation != generation() or torch.cuda.is_current_stream_capturing():
            return
        while self._pending and self._pending[0][1].query():  # type: ignore[no-untyped-call]
            began, ended = self._pending.popleft()
            self._take(began.elapsed_time(ended) / _MS_PER_S)

    def _take(self, seconds: float) -> None:
        self._num_timed += 1
        self._timed_s += seconds


_watching = threading.Lock()
_timer: OptimizerTimer | None = None


def watch() -> None:
    """Count and time all optimizers of this process from now on; calling it twice changes nothing."""
    global _timer
    with _watching:
        if _timer is None:
            _timer = OptimizerTimer(Random(0).random)
            register_optimizer_step_pre_hook(_timer.before)
            register_optimizer_step_post_hook(_timer.after)


def calls() -> OptimizerCalls | None:
    """What was counted; None if nothing watches, or no optimizer has stepped."""
    found = _timer.calls() if _timer is not None else None
    return found if found is not None and found.num_calls else None
