"""How long trainers wait for data: asked of the running hetstream jobs whose service this user may talk to.

`hetstream util` and `hetstream advise` ask and wait. It reads the address files of this user's own jobs, and waits a
few seconds at most for one that does not answer. A file system that does not answer keeps who looks there for good:
`hetstream serve` and `hetstream exporter`, which must go on, let `SharesAside` look.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from hetstream.base.errors import HetstreamError
from hetstream.hetjob.find_service import job_directory
from hetstream.hetjob.jobs_dir import IN_SUBMIT_DIR, JOBS_DIR, for_user, in_home, setting
from hetstream.slurm_plugin.client.model import Job
from hetstream.slurm_plugin.client.users import is_own

# What a job told longer ago is not shown: its file system may have gone away meanwhile.
_KNOWN_FOR_S = 300.0
# A look that is quick is waited for, so that the first reading has shares too.
PATIENCE_S = 2.0


def wait_shares(jobs: Iterable[Job]) -> dict[str, float]:
    """Label of each running job that tells -> share of time that its training loops waited for data, 0 to 1.

    Of a heterogeneous job component 0 is named, which has the trainers.
    """
    return {job.label: share for job in jobs if may_tell(job) and (share := share_of(job)) is not None}


def may_tell(job: Job) -> bool:
    """Whether one may look whether it has a service: the keys are for its user alone, as `address.py` checks.

    Directories of others are not looked into at all. What lies there is theirs: a link to a file system that does not
    answer would keep whoever follows it.
    """
    may_have = job.is_running and bool(job.work_dir) and not job.trainer and not (job.het and job.het.offset)
    return may_have and is_own(job)


def share_of(job: Job) -> float | None:
    """What one job tells; None if it tells nothing."""
    try:
        directory = directory_of(job)
        path = directory / "address" if directory else None
        if path is None or not os.access(path, os.R_OK):
            return None
    except OSError:
        return None  # another user's directory
    return _ask(path)


def directory_of(job: Job) -> Path | None:
    """The directory of a job that may tell; None without one."""
    return job_directory(_places(job), str(job.het.het_job_id if job.het else job.job_id))


def _places(job: Job) -> list[Path]:
    """Where the directory of a job may be."""
    try:
        pattern = setting(JOBS_DIR, os.environ)
    except HetstreamError:
        pattern = None  # a wrong one is told where somebody asks for a job
    named, home = [for_user(pattern, job.user)] if pattern else [], in_home()
    return [*named, Path(job.work_dir) / IN_SUBMIT_DIR, *([home] if home else [])]


class SharesAside:
    """Looks beside the caller, with one thread for each file system: one that does not answer keeps only its own.

    Args:
        look: what one job tells.
        mounts: where file systems are mounted.
        patience_s: how long the caller waits for looks that began with its call.
    """

    def __init__(
        self,
        look: Callable[[Job], float | None] = share_of,
        mounts: Callable[[], Sequence[str]] | None = None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._look = look
        self._mounts = mounts or _mount_points
        self._patience_s = patience_s
        self._changed = threading.Condition()
        self._known: dict[str, tuple[float, float]] = {}  # label -> share, and when it was told
        self._busy: set[str] = set()

    def __call__(self, jobs: Iterable[Job]) -> Mapping[str, float]:
        """The shares of these jobs as far as they are known; looks for newer ones meanwhile."""
        wanted: dict[str, list[Job]] = {}
        mounts = self._mounts()
        for job in jobs:
            if may_tell(job):
                wanted.setdefault(" ".join(_mount_of(str(path), mounts) for path in _places(job)), []).append(job)
        begun = []
        for mount, here in wanted.items():
            with self._changed:
                if mount in self._busy:
                    continue  # since the last call: it does not answer
                self._busy.add(mount)
            begun.append(mount)
            threading.Thread(target=self._run, args=(mount, here), name="hetstream-shares", daemon=True).start()
        labels = {job.label for here in wanted.values() for job in here}
        with self._changed:
            self._changed.wait_for(lambda: self._busy.isdisjoint(begun), self._patience_s)
            oldest_s = time.monotonic() - _KNOWN_FOR_S
            self._known = {
                label: share for label, share in self._known.items() if label in labels and share[1] > oldest_s
            }
            return {label: share for label, (share, _) in self._known.items()}

    def _run(self, mount: str, jobs: Sequence[Job]) -> None:
        try:
            for job in jobs:
                share = self._look(job)
                with self._changed:
                    if share is not None:
                        self._known[job.label] = share, time.monotonic()
                    else:
                        self._known.pop(job.label, None)
        finally:
            with self._changed:
                self._busy.discard(mount)
                self._changed.notify_all()


def _mount_points() -> list[str]:
    """As the kernel lists them; this asks no file system."""
    try:
        lines = Path("/proc/self/mounts").read_text(errors="replace").splitlines()
    except OSError:
        return []
    return [line.split(" ")[1].replace("\\040", " ") for line in lines if line.count(" ") >= 2]


def _mount_of(path: str, mounts: Sequence[str]) -> str:
    """Where the file system of a path is mounted, by the names alone."""
    holding = (mount for mount in mounts if path == mount or path.startswith(f"{mount.rstrip('/')}/"))
    return max(holding, key=len, default="/")


def _ask(path: Path) -> float | None:
    # Only here: it brings ZeroMQ, which no reading of a cluster needs.
    from hetstream.mpi_dataworkers.status_client import StatusClient, running_service

    try:
        with StatusClient(running_service(path)) as client:
            loaders = client.fetch().loaders
    except HetstreamError:
        return None  # it is ending, or on a host that this one does not reach: then nothing is known of it
    elapsed_s = sum(loader.totals.elapsed_s for loader in loaders)
    return min(1.0, sum(loader.totals.wait_s for loader in loaders) / elapsed_s) if elapsed_s > 0 else None
