"""Which stores in memory belong to nobody any more, each with the reason. Pure; called by `hetstream ckpt gc`.

A store is kept while anybody could still use it: a process that holds it, or a job that may go on with it, requeued or
not. What is in memory alone is given up only if the user says so.
"""

from __future__ import annotations

from collections.abc import Mapping

from hetstream.checkpoint.config import NO_JOB
from hetstream.checkpoint.memory.view import FoundStore


def reason_to_keep(store: FoundStore, jobs: Mapping[str, str] | None, *, discard_unsaved: bool) -> str:
    """Why a store must stay; "" if it may go.

    Args:
        store: as it was found.
        jobs: Slurm jobs of this user that are not over, id to state; None if Slurm did not say.
        discard_unsaved: give up generations that are not on disk.
    """
    job = store.holder.job
    if store.trainer_alive:
        return f"its trainer lives, pid {store.holder.pid} on {store.holder.host}"
    if store.writer_alive:
        return "its checkpoint writer lives"
    if job != NO_JOB and jobs is None:
        return f"Slurm did not say whether job {job} is over"
    if job != NO_JOB and jobs is not None and job in jobs:
        return f"job {job} is {jobs[job]}"
    newest = store.generations[0] if store.generations else None
    is_unsaved = newest is not None and (store.persisted is None or newest > store.persisted)
    if is_unsaved and not store.is_orphaned and not discard_unsaved:
        return f"{newest} is in memory alone; `hetstream ckpt writer --once` writes it, --discard-unsaved gives it up"
    return ""


def reason_to_remove(store: FoundStore) -> str:
    """Why a store that need not stay is nobody's."""
    job = store.holder.job
    owner = "its program is gone" if job == NO_JOB else f"job {job} is over"
    newest = store.generations[0] if store.generations else None
    if newest is None:
        return f"{owner} and it holds nothing"
    if store.persisted is not None and store.persisted >= newest:
        return f"{owner} and {newest} is on disk"
    if store.is_orphaned:
        return f"{owner}; {newest} is of a checkpoint directory that was deleted and made again"
    return f"{owner}; {newest} is given up"
