"""How long the optimizers of this process take (T_upd of a step): torch's own hooks around every `optimizer.step`.
Between two of these calls `EmbeddingTimer` times the lookups of embeddings.

A random one of eight calls is timed, so that no period of the program hides a call. Where the parameters are on a CPU
the clock says how long it took. On a CUDA device the call returns before its work is done: two events are recorded, and
read at a later call, when they have passed; nothing waits for them. Of optimizers within optimizers the innermost
counts; what wraps it may synchronise. Where the optimizer computes the gradients itself, by a closure as Lightning
gives it one, time counts from the closure's end on.

A step that torch.compile has compiled is not seen, and neither is one that a CUDA graph replays: no Python runs there.
"""

from __future__ import annotations

import math
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from hetstream.base.process import generation
from hetstream.mpi_dataworkers.wire.messages import EmbeddingLookups, OptimizerCalls

# Moments of the work of a device, and the time between two, without ever waiting: the trainer's timers use them.

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


# How long a step of this process looks up embeddings (T_emb): torch's own hooks, in a few steps only.
#
# What counts is the forward of `torch.nn.Embedding`, `torch.nn.EmbeddingBag` and their subclasses, and of hetstream's
# modules over tables on embedding servers, which say so of themselves, where gradients are recorded. What is exchanged
# with other ranks in it, or waited for, is in it, and so is what FSDP gathers for one that it wraps. Their backward is
# not: it is a part of the gradients. Nor is what a checkpoint looks up again there.
#
# A hook on all modules makes each call of one dearer. So it is there in about one step a second, and in one of eight at
# most: from the end of an optimizer's call to the end of the next. Which one is drawn, so that no period of the program
# hides a lookup. On a CPU the clock says how long a lookup took. On a CUDA device two events are recorded, and read
# when they have passed; nothing waits for them. A program without embeddings is soon left alone.
#
# A program that uses torch.compile is not looked at: it would warn of the hooks.

_EMBEDDINGS = (torch.nn.Embedding, torch.nn.EmbeddingBag)
_EVERY_S = 1.0
_TIMED_SHARE = 1 / 8
# Timed steps without a lookup after which a program counts as one without embeddings.
_MOST_WITHOUT = 16
# Lookups of a step; a program with more is not measured.
_MOST_LOOKUPS = 512


class EmbeddingTimer:
    """Times the lookups of some steps.

    Args:
        draw: numbers from 0 to 1, none of the program's own generators.
        clock: seconds.
    """

    def __init__(self, draw: Callable[[], float], clock: Callable[[], float] = time.perf_counter) -> None:
        self._draw, self._clock = draw, clock
        self._num_watched = self._num_timed = 0
        self._timed_s = 0.0
        self._has_embeddings = self._is_over = False
        self._next_s = -math.inf
        self._generation = generation()
        # Of the step that is watched, or was watched last: its hooks, its thread, the lookup that has begun (module,
        # device and when), and all that have ended.
        self._hooks: tuple[RemovableHandle, ...] = ()
        self._thread = self._module = 0
        self._device: torch.device | None = None
        self._began: Moment | None = None
        self._lookups: list[tuple[Moment, Moment]] = []
        self._is_spoiled = self._is_pending = False
        _timers.add(self)

    def lookups(self) -> EmbeddingLookups | None:
        """What was timed so far, None without embeddings; any thread may ask."""
        return EmbeddingLookups(self._num_timed, self._timed_s) if self._has_embeddings else None

    def step_ended(self) -> None:
        """An optimizer's call has ended: so has the step that was watched, and the next may be."""
        if self._hooks:
            self._end()
        if self._is_over or (now := self._clock()) < self._next_s or self._draw() >= _TIMED_SHARE:
            return
        if self._generation != generation() or _is_compiled():
            self._is_over = True
        elif self._take():
            self._next_s = now + _EVERY_S
            self._thread, self._module, self._is_spoiled = threading.get_ident(), 0, False
            self._hooks = register_module_forward_pre_hook(self._before), register_module_forward_hook(self._after)

    def _before(self, module: torch.nn.Module, _: Any) -> None:
        # A compiler that traces this comes no further, so it breaks no graph. Of a lookup within another the outer one
        # counts.
        if torch.compiler.is_compiling() or self._module:
            return
        is_on_servers = getattr(module, "looks_up_embeddings", False) is True
        if not (isinstance(module, _EMBEDDINGS) or is_on_servers):
            return
        if not torch.is_grad_enabled() or self._thread != threading.get_ident() or _is_backward():
            return
        parameter = next(torch.nn.Module.parameters(module), None)  # a subclass may have another method of that name
        device = torch.device("cpu") if is_on_servers else None if parameter is None else parameter.device
        self._device = device if len(self._lookups) < _MOST_LOOKUPS else None
        self._module, self._began = id(module), self._now()

    def _after(self, module: torch.nn.Module, _: Any, __: Any) -> None:
        if torch.compiler.is_compiling() or self._module != id(module) or self._thread != threading.get_ident():
            return
        self._module, ended = 0, self._now()
        if self._began is None or ended is None:
            self._is_spoiled = True
        else:
            self._lookups.append((self._began, ended))

    def _now(self) -> Moment | None:
        return moment(self._device, self._clock) if self._device is not None else None

    def pause(self) -> None:
        """Have no hooks until the next step has ended; a step that is being watched is not counted.

        Between two epochs a program may do anything, and torch.compile warns of hooks. Any thread may call this.
        """
        if self._hooks:
            self._unhook()
            self._lookups.clear()

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = ()

    def _end(self) -> None:
        self._unhook()
        self._num_watched += 1
        self._has_embeddings = self._has_embeddings or bool(self._lookups)
        # A lookup that raised has begun and not ended.
        if self._is_spoiled or self._module or self._thread != threading.get_ident():
            self._lookups.clear()
        else:
            self._is_pending = True
            self._take()
        self._is_over = not self._has_embeddings and self._num_watched >= _MOST_WITHOUT

    def _take(self) -> bool:
        """Count the step that was watched last, if the device is through with it; whether there is none left."""
        if not self._is_pending:
            return True
        ends = [ended for _, ended in self._lookups]
        is_on_gpu = any(not isinstance(ended, float) for ended in ends)
        if (is_on_gpu and torch.cuda.is_current_stream_capturing()) or not all(has_passed(ended) for ended in ends):
            return False
        self._timed_s += sum(seconds_between(began, ended) for began, ended in self._lookups)
        self._num_timed += 1
        self._lookups.clear()
        self._is_pending = False
        return True


_timers: weakref.WeakSet[EmbeddingTimer] = weakref.WeakSet()


def pause_all() -> None:
    """Pause every timer: a forward is about to be traced, and a hook that reads the clock would end its graph."""
    for timer in list(_timers):
        timer.pause()


def _is_backward() -> bool:
    """Whether autograd runs in this thread: what was checkpointed is computed again there, maybe not to its end."""
    return torch._C._current_graph_task_id() != -1


def _is_compiled() -> bool:
    """Whether the program has called torch.compile. What cannot be known counts as a yes."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is None:
        return False
    # torch's own marks of what is never compiled are there, too, with None.
    backends = getattr(dynamo, "cached_backends", None)
    return not isinstance(backends, dict) or any(backend is not None for backend in backends.values())


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
