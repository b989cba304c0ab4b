"""How long the optimizers of this process take (T_upd of a step): torch's own hooks around every `optimizer.step`.
Between two of these calls `embedding_lookups.py` times the lookups of embeddings.

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
from hetstream.mpi_dataworkers.loader.embedding_lookups import EmbeddingTimer
from hetstream.mpi_dataworkers.loader.moments import Moment, has_passed, moment, seconds_between
from hetstream.mpi_dataworkers.wire.messages import OptimizerCalls

_TIMED_SHARE = 1 / 8
# The first calls allocate what the optimizer keeps.
_WARM_UP = 3
# Pairs of events that have not passed; with more the device is far behind, and no more are recorded.
_MOST_PENDING = 16


class OptimizerTimer:
    """Counts and times; `before` and `after` are the hooks.

    Args:
        draw: numbers from 0 to 1, none of the program's own generators.
        clock: seconds.
        embeddings: is told when a counted call has ended.
    """

    def __init__(
        self,
        draw: Callable[[], float],
        clock: Callable[[], float] = time.perf_counter,
        embeddings: EmbeddingTimer | None = None,
    ) -> None:
        self._draw, self._clock, self._embeddings = draw, clock, embeddings
        self._num_calls = self._num_timed = 0
        self._timed_s = 0.0
        # The innermost call that has begun: its thread, its optimizer, and when its update began if it is timed.
        self._thread, self._optimizer = 0, 0
        self._began: Moment | None = None
        self._pending: deque[tuple[Moment, Moment]] = deque()
        self._generation = generation()

    def calls(self) -> OptimizerCalls:
        """What was counted so far; any thread may ask."""
        lookups = self._embeddings.lookups() if self._embeddings is not None else None
        return OptimizerCalls(self._num_calls, self._num_timed, self._timed_s, lookups)

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
            if ended is not None:
                self._pending.append((began, ended))
        if self._embeddings is not None and self._num_calls >= _WARM_UP:
            self._embeddings.step_ended()

    def pause(self) -> None:
        """Have no hooks on modules until the next call has ended."""
        if self._embeddings is not None:
            self._embeddings.pause()

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

    def _mark(self, optimizer: torch.optim.Optimizer) -> Moment | None:
        """This moment where the parameters are."""
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        device = next((parameter.device for parameter in parameters), None)
        return moment(device, self._clock) if device is not None and len(self._pending) < _MOST_PENDING else None

    def _look(self) -> None:
        """Read the events that have passed; not where that is forbidden: in a forked process, and in a capture."""
        if not self._pending or self._generation != generation() or torch.cuda.is_current_stream_capturing():
            return
        while self._pending and has_passed(self._pending[0][1]):
            self._take(seconds_between(*self._pending.popleft()))

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
            draw = Random(0).random
            _timer = OptimizerTimer(draw, embeddings=EmbeddingTimer(draw))
            register_optimizer_step_pre_hook(_timer.before)
            register_optimizer_step_post_hook(_timer.after)


def pause() -> None:
    """A pass over the data has ended: what the program does until it trains again is not looked at."""
    if _timer is not None:
        _timer.pause()


def calls() -> OptimizerCalls | None:
    """What was counted; None if nothing watches, or no optimizer has stepped."""
    found = _timer.calls() if _timer is not None else None
    return found if found is not None and found.num_calls else None
