"""Starts the agent when the program has imported torch. Imports nothing of torch, and little else, before."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from typing import TYPE_CHECKING

from hetstream.base.process import when_imported

if TYPE_CHECKING:
    from hetstream.hetjob.gpu.orders import LocalRank

# Who has started this process; it may have gone by the time torch is imported.
_PARENT = os.getppid()


def _environ_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # it has gone, or is root's, as Slurm's own are
        return b""


_PARENTS_ENVIRON = _environ_of(_PARENT)


def share_when_torch_is_imported() -> None:
    """Wait for torch. A program that never imports it launches nothing by it, and is left alone."""
    when_imported("torch", lambda _: _share())


def _share() -> None:
    """Start the agent. Processes that the program has made with multiprocessing have nothing of an emulated GPU."""
    from hetstream.base.errors import HetstreamError
    from hetstream.hetjob.gpu.config import settings_from_environment
    from hetstream.hetjob.gpu.emulated_file import PREFIX

    try:
        settings = settings_from_environment()
        if settings is not None and not (_is_child() and settings.gpus[0].startswith(PREFIX)):
            from hetstream.hetjob.gpu.hooks import share_gpu

            share_gpu(settings, _launcher(settings.rank))
    except HetstreamError as error:
        raise SystemExit(f"hetstream: {error}") from error


def _launcher(rank: LocalRank) -> int:
    """The process that has numbered this one; 0: nobody has.

    A shell between them has the number, too, and may end; a batch script has one from Slurm. Only what multiprocessing
    has made ends with its parent anyhow.
    """
    is_inherited = f"\0{rank.said_by}={rank.number}\0".encode() in b"\0" + _PARENTS_ENVIRON
    return _PARENT if rank.said_by and (_is_child() or not is_inherited) else 0


def _is_child() -> bool:
    """Whether multiprocessing made this process. One that is spawned imports the program before it knows its parent."""
    is_being_made = getattr(multiprocessing.current_process(), "_inheriting", False)
    return is_being_made or multiprocessing.parent_process() is not None
