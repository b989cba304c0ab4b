"""How much of a cluster was allocated in a window, and how much of that did something. Pure; used by `hetstream util`.

Allocated is what jobs held, whatever they did with it. Effective is what they used: CPU time of their processes, GPUs
as busy as somebody measured, or as hetstream's own trainers were not waiting for data. What nobody measured is left out
of the effective share, and the coverage says how much was measured.
"""

from __future__ import annotations

import math
import os
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from hetstream.base.errors import HetstreamError
from hetstream.hetjob.job.find_service import job_directory
from hetstream.hetjob.job.job import IN_SUBMIT_DIR, JOBS_DIR, for_user, in_home, setting
from hetstream.slurm_plugin.client.accounting import Usage
from hetstream.slurm_plugin.client.counted import counted
from hetstream.slurm_plugin.client.model import Job, Node, is_own

HOUR_S = 3600.0


@dataclass(frozen=True)
class Window:
    """A span of time, in seconds since the epoch."""

    start_s: float
    end_s: float

    @property
    def length_s(self) -> float:
        return self.end_s - self.start_s

    def held_s(self, usage: Usage) -> float:
        """Return how long the job held its GPUs within the window."""
        end_s = self.end_s if usage.end_s is None else min(usage.end_s, self.end_s)
        return max(0.0, end_s - max(usage.start_s, self.start_s))

    def ran(self, usage: Usage) -> tuple[float, float, float]:
        """Return when within the window a job began and ended to run, and in which share of that time it held its CPUs.

        One that is suspended now is taken to have run until then without a break; of one that was suspended before, all
        its time is taken to be alike.
        """
        start_s, share = max(usage.start_s, self.start_s), 1.0
        end_s = start_s + self.held_s(usage)
        if usage.elapsed_s is not None and usage.is_suspended:
            end_s = max(start_s, min(end_s, usage.start_s + usage.elapsed_s))
        elif usage.elapsed_s is not None and usage.suspended_s > 0:
            share = usage.elapsed_s / (usage.elapsed_s + usage.suspended_s)
        return start_s, end_s, share

    def ran_s(self, usage: Usage) -> float:
        """Return how long it held its CPUs within the window."""
        start_s, end_s, share = self.ran(usage)
        return (end_s - start_s) * share


@dataclass
class Utilisation:
    """What one group of jobs held and used.

    Attributes:
        cpu_hours, gpu_hours: allocated.
        cpu_hours_used: of the hours below, those that the processes used.
        cpu_hours_measured: allocated hours of the jobs whose use is known.
        gpu_hours_used, gpu_hours_measured: the same for GPUs.
        num_gpu_types_unknown: jobs whose instances of MIG count as an average.
        num_resized: jobs that began with another size, of which nothing says with which.
        num_gpus_unknown: jobs that may have held more GPUs than they are counted with.
        wait_gpu_hours: GPU hours in which trainers waited for data, of hetstream's own jobs.
    """

    num_jobs: int = 0
    num_resized: int = 0
    num_gpus_unknown: int = 0
    num_gpu_types_unknown: int = 0
    cpu_hours: float = 0.0
    gpu_hours: float = 0.0
    cpu_hours_used: float = 0.0
    cpu_hours_measured: float = 0.0
    gpu_hours_used: float = 0.0
    gpu_hours_measured: float = 0.0
    wait_gpu_hours: float = 0.0
    waits_known: bool = field(default=False)

    def add(self, usage: Usage, window: Window) -> None:
        """Count one job's part of the window."""
        held_s = window.held_s(usage)
        if held_s <= 0:
            return
        cpu_hours = usage.cpus * usage.cpu_share * window.ran_s(usage) / HOUR_S
        gpu_hours = usage.gpus * held_s / HOUR_S
        self.num_jobs += 1
        self.num_resized += usage.is_resized
        self.num_gpus_unknown += not usage.gpus_known
        self.num_gpu_types_unknown += not usage.gpu_types_known
        self.cpu_hours += cpu_hours
        self.gpu_hours += gpu_hours
        if usage.cpu_used_s is not None:
            # Use is known for the whole job: its part of the window is taken to be like the rest.
            ran_s = window.end_s - usage.start_s if usage.ran_s is None else usage.ran_s
            had_s = usage.cpus * usage.cpu_share * ran_s
            share = usage.cpu_used_s / had_s if had_s > 0 else 0.0
            self.cpu_hours_measured += cpu_hours
            self.cpu_hours_used += cpu_hours * min(1.0, share)
        busy = usage.gpu_share
        if busy is None and usage.wait_share is not None:
            busy = 1.0 - usage.wait_share
        if usage.gpus and busy is not None:
            self.gpu_hours_measured += gpu_hours
            self.gpu_hours_used += gpu_hours * busy
        if usage.wait_share is not None:
            self.waits_known = True
            self.wait_gpu_hours += gpu_hours * usage.wait_share


def with_shared_cpus(usages: Sequence[Usage], window: Window, cpus: Mapping[str, int]) -> list[Usage]:
    """Return the runs, where jobs of a partition are given the same CPUs: never more of them together than there are.

    Which jobs had the same ones no accounting says. Whenever those of a partition were given more than its nodes have,
    they count in proportion; as long as they were given less, each CPU counts for each of them.

    Args:
        usages: all.
        window: that is looked at.
        cpus: of the partitions whose jobs may share CPUs.
    """
    shares: dict[int, float] = {}
    for partition, most in cpus.items():
        here = [place for place, usage in enumerate(usages) if usage.partition == partition]
        spans = {place: span for place in here if (span := window.ran(usages[place]))[1] > span[0]}
        changes = sorted(
            change
            for place, (start_s, end_s, ran) in spans.items()
            for change in ((start_s, ran * _given(usages[place])), (end_s, -ran * _given(usages[place])))
        )
        # Seconds up to each change of what is held, each weighed by the share that counts then.
        moments_s, weighed_s, held = [-math.inf], [0.0], 0.0
        for moment_s, change in changes:
            share = min(1.0, most / held) if held > 0 else 1.0
            passed_s = moment_s - moments_s[-1] if moments_s[-1] > -math.inf else 0.0
            moments_s.append(moment_s)
            weighed_s.append(weighed_s[-1] + passed_s * share)
            held += change
        for place, (start_s, end_s, _) in spans.items():
            first_s, last_s = (weighed_s[bisect_right(moments_s, moment_s) - 1] for moment_s in (start_s, end_s))
            shares[place] = (last_s - first_s) / (end_s - start_s)
    return [
        replace(usage, cpu_share=usage.cpu_share * shares[place]) if shares.get(place, 1.0) < 1 else usage
        for place, usage in enumerate(usages)
    ]


def _given(usage: Usage) -> float:
    """CPUs of a run that count."""
    return usage.cpus * usage.cpu_share


BY: Mapping[str, Callable[[Usage], str]] = {
    "partition": lambda usage: usage.partition,
    "account": lambda usage: usage.account,
    "user": lambda usage: usage.user,
}


def utilisation(usages: Iterable[Usage], window: Window, by: str) -> dict[str, Utilisation]:
    """Sum up the jobs by `partition`, `account` or `user`; those with most GPU hours, then CPU hours, come first."""
    groups: dict[str, Utilisation] = {}
    for usage in usages:
        if window.held_s(usage) > 0:
            groups.setdefault(BY[by](usage), Utilisation()).add(usage, window)
    return dict(sorted(groups.items(), key=lambda item: (-item[1].gpu_hours, -item[1].cpu_hours, item[0])))


def together(usages: Iterable[Usage], window: Window) -> Utilisation:
    """Sum up all jobs."""
    everything = Utilisation()
    for usage in usages:
        everything.add(usage, window)
    return everything


def capacity(nodes: Sequence[Node], partition: str | None = None) -> tuple[int, float]:
    """CPUs and GPUs that count now, of the nodes of one partition or of all; an instance of MIG as its share of one."""
    there = counted(node for node in nodes if partition is None or partition in node.partitions)
    return there.cpus, there.gpus_with_mig


def share(part: float, whole: float) -> float | None:
    """Return a share, None of nothing."""
    return part / whole if whole > 0 else None


# How long trainers wait for data: asked of the running hetstream jobs whose service this user may talk to.
#
# `hetstream util` and `hetstream advise` ask and wait. It reads the address files of this user's own jobs, and waits a
# few seconds at most for one that does not answer. A file system that does not answer keeps who looks there for good:
# `hetstream serve` and `hetstream exporter`, which must go on, let `SharesAside` look.

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
    """Return whether one may look whether it has a service: the keys are for its user alone, as `address.py` checks.

    Directories of others are not looked into at all. What lies there is theirs: a link to a file system that does not
    answer would keep whoever follows it.
    """
    may_have = job.is_running and bool(job.work_dir) and not job.trainer and not (job.het and job.het.offset)
    return may_have and is_own(job)


def share_of(job: Job) -> float | None:
    """Return what one job tells; None if it tells nothing."""
    try:
        directory = directory_of(job)
        path = directory / "address" if directory else None
        if path is None or not os.access(path, os.R_OK):
            return None
    except OSError:
        return None  # another user's directory
    return _ask(path)


def directory_of(job: Job) -> Path | None:
    """Return the directory of a job that may tell; None without one."""
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
    from hetstream.mpi_dataworkers.dispatcher.client import StatusClient, running_service

    try:
        with StatusClient(running_service(path)) as client:
            loaders = client.fetch().loaders
    except HetstreamError:
        return None  # it is ending, or on a host that this one does not reach: then nothing is known of it
    elapsed_s = sum(loader.totals.elapsed_s for loader in loaders)
    return min(1.0, sum(loader.totals.wait_s for loader in loaders) / elapsed_s) if elapsed_s > 0 else None
