"""What a process holds that the processes which are forked from it would have in common, or would lack.

Used by `fork_server.py` before and after it loads a pipeline. An open file has one position for all of them, a thread
is not forked, a child belongs to one parent, shared memory that was private to a process is no longer, and CUDA does
not work after a fork.

What importing modules has started are threads that torch's worker processes lack, too: they are forked from a program
that has imported them (pyarrow has one).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from hetstream.mpi_dataworkers.ops.process_memory import shared_mappings

_cuda: Any = torch.cuda
_of_imports: set[str] = set()  # threads of this process


@dataclass(frozen=True)
class Holdings:
    """What a process holds at one time.

    Attributes:
        descriptors: with what each of them is open on.
        threads: with the main one, but for those of imports.
        has_children: processes that it has started, ended or not, but not those that it has waited for.
        shared: its shared mappings, as the kernel writes them.
        uses_gpu: it has begun to use CUDA.
    """

    descriptors: frozenset[tuple[int, str]]
    threads: frozenset[str]
    has_children: bool
    shared: frozenset[str]
    uses_gpu: bool

    @classmethod
    def now(cls) -> Holdings:
        """Those of this process (proc(5))."""
        threads, uses_gpu = frozenset(_threads() - _of_imports), bool(_cuda.is_initialized())
        return cls(_descriptors(), threads, _has_children(), shared_mappings(), uses_gpu)

    def why_not_fork(self, before: Holdings) -> str:
        """What has come since `before` that forked processes must not have in common; "" when nothing has."""
        opened = sorted(self.descriptors - before.descriptors)
        if opened:
            return f"opened {opened[0][1]}"
        if self.threads - before.threads:
            return "started a thread"
        if self.has_children:
            return "started a process"
        if self.shared - before.shared:
            return f"mapped shared memory: {min(self.shared - before.shared)}"
        return "began to use CUDA" if self.uses_gpu else ""


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Import modules: the threads that they start are those of imports."""
    before = _threads()
    try:
        yield
    finally:
        _of_imports.update(_threads() - before)


def _threads() -> set[str]:
    return set(os.listdir("/proc/self/task"))


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
