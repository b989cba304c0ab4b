"""How long a step of this process looks up embeddings (T_emb): torch's own hooks, in a few steps only.

What counts is the forward of `torch.nn.Embedding`, `torch.nn.EmbeddingBag` and their subclasses where gradients are
recorded; what a subclass exchanges with other ranks in its forward is in it, and so is what FSDP gathers for one that
it wraps. Their backward is not: it is a part of the gradients. Nor is what a checkpoint looks up again there.

A hook on all modules makes each call of one dearer. So it is there in about one step a second, and in one of eight at
most: from the end of an optimizer's call to the end of the next. Which one is drawn, so that no period of the program
hides a lookup. On a CPU the clock says how long a lookup took. On a CUDA device two events are recorded, and read
when they have passed; nothing waits for them. A program without embeddings is soon left alone.

A program that uses torch.compile is not looked at: it would warn of the hooks.
"""

from __future__ import annotations

import math
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from hetstream.base.forks import generation
from hetstream.mpi_dataworkers.loader.moments import Moment, has_passed, moment, seconds_between
from hetstream.mpi_dataworkers.wire.messages import EmbeddingLookups

_EMBEDDINGS = (torch.nn.Embedding, torch.nn.EmbeddingBag)
_EVERY_S = 1.0
_TIMED_SHARE = 1 / 8
# A program that has looked up nothing in so many timed steps has no embeddings.
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
        if torch.compiler.is_compiling() or not isinstance(module, _EMBEDDINGS) or self._module:
            return
        if not torch.is_grad_enabled() or self._thread != threading.get_ident() or _is_backward():
            return
        parameter = next(torch.nn.Module.parameters(module), None)  # a subclass may have another method of that name
        has_room = parameter is not None and len(self._lookups) < _MOST_LOOKUPS
        self._device = parameter.device if parameter is not None and has_room else None
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
