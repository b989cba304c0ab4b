"""What a process holds that the processes which are forked from it would have in common, or would lack.

Used by `fork_server.py` before and after it loads a pipeline. An open file has one position for all of them, a thread
is not forked, a child belongs to one parent, shared memory that was private to a process is no longer, and CUDA does
not work after a fork.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

from hetstream.mpi_dataworkers.ops.shared_memory import shared_mappings

_cuda: Any = torch.cuda


@dataclass(frozen=True)
class Holdings:
    """What a process holds at one time.

    Attributes:
        descriptors: with what each of them is open on.
        num_threads: with the main one.
        has_children: processes that it has started, ended or not, but not those that it has waited for.
        shared: its shared mappings, as the kernel writes them.
        uses_gpu: it has begun to use CUDA.
    """

    descriptors: frozenset[tuple[int, str]]
    num_threads: int
    has_children: bool
    shared: frozenset[str]
    uses_gpu: bool

    @classmethod
    def now(cls) -> Holdings:
        """Those of this process (proc(5))."""
        num_threads, uses_gpu = len(os.listdir("/proc/self/task")), bool(_cuda.is_initialized())
        return cls(_descriptors(), num_threads, _has_children(), shared_mappings(), uses_gpu)

    def why_not_fork(self, before: Holdings) -> str:
        """What has come since `before` that forked processes must not have in common; "" when nothing has."""
        opened = sorted(self.descriptors - before.descriptors)
        if opened:
            return f"opened {opened[0][1]}"
        if self.num_threads > 1:
            return "started a thread"
        if self.has_children:
            return "started a process"
        if self.shared - before.shared:
            return f"mapped shared memory: {min(self.shared - before.shared)}"
        return "began to use CUDA" if self.uses_gpu else ""


def _descriptors() -> frozenset[tuple[int, str]]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add((int(name), os.readlink(f"/proc/self/fd/{name}")))
        except FileNotFoundError:
            continue  # that of the directory itself
    return frozenset(found)


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True
