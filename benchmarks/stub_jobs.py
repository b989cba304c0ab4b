"""Jobs on a real Slurm cluster whose training and data workers are waits, and whose job masters are played here.

Trainers and companions are real jobs that wait (`waiting_jobs.py`). A job's work is done at the speed that its running
companions give it. Each job reports to the site daemon by the real protocol, as the
job's user, and acts on its grant as a job master does: companions are submitted for the nodes that the grant prefers,
and cancelled when it shrinks.
"""

from __future__ import annotations

import math
import select
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.waiting_jobs import TRAINERS, WORKERS, WaitingJob, WaitingJobs
from hetstream.hetjob.ports import Measured, RemainingWork, SpeedPoint
from hetstream.hetjob.site.client import SiteSettings, ask
from hetstream.hetjob.site.messages import GrantLimit, ReportDemand

# A look at the pipes that are not open yet.
_LOOK_MS = 10
_THREADS = 4
_LEAST_STEPS = 1e-9


@dataclass(frozen=True)
class Plan:
    """What a job is.

    Attributes:
        name: of it.
        submit_s: since the first submission.
        work_s: at the ideal speed.
        units: tasks.
        gpus, cpus: of each.
        limit_minutes: its time limit.
        speed: that it has without companions.
        demand: CPUs of companions with which it is at its best; 0 for a job without any.
        best_speed: with so many.
    """

    name: str
    submit_s: float
    work_s: float
    units: int
    gpus: int
    cpus: int
    limit_minutes: int
    speed: float
    demand: float = 0.0
    best_speed: float = 1.0

    def speed_with(self, cpus: int) -> float:
        """With so many CPUs of companions."""
        return self.best_speed * min(1.0, cpus / self.demand) if self.demand else self.speed


@dataclass(frozen=True)
class Site:
    """Where the jobs run, and whom they ask.

    Attributes:
        directory: for named pipes.
        environ: in which Slurm's commands reach the cluster.
        daemon: None for jobs without data workers.
        worker_cpus: of a companion.
        worker_times: sbatch options about how long a companion runs.
        prefer_s: a companion that waits for its node for longer is submitted again for any.
    """

    directory: Path
    environ: Mapping[str, str]
    daemon: SiteSettings | None = None
    worker_cpus: int = 8
    worker_times: tuple[str, ...] = ()
    prefer_s: float = 3.0


@dataclass
class Ran:
    """When a job started and ended, in seconds since the first submission.

    Attributes:
        start_s: NaN as long as it did not.
        end_s: likewise.
        changes: (time, running companions).
    """

    start_s: float = math.nan
    end_s: float = math.nan
    changes: list[tuple[float, int]] = field(default_factory=list)


class StubsFailed(Exception):
    """A job ended before its work was done, was refused by the daemon, or nothing ended in time."""


@dataclass(eq=False)
class _Job:
    plan: Plan
    ran: Ran
    trainer: WaitingJob | None = None
    companions: list[WaitingJob] = field(default_factory=list)
    left_s: float = 0.0
    since_s: float = 0.0
    speed: float = 0.0
    report_at_s: float = 0.0
    report: Future[Any] | None = None
    grant: GrantLimit | None = None

    @property
    def has_ended(self) -> bool:
        return not math.isnan(self.ran.end_s)

    @property
    def staying(self) -> list[WaitingJob]:
        return [one for one in self.companions if not one.is_leaving]

    def advance(self, now_s: float, worker_cpus: int) -> None:
        """Work up to now is done at the speed of before; from now on as the companions are."""
        self.left_s -= self.speed * (now_s - self.since_s)
        self.since_s = now_s
        running = sum(one.fd is not None for one in self.companions)
        self.speed = self.plan.speed_with(running * worker_cpus)
        if not self.ran.changes or self.ran.changes[-1][1] != running:
            self.ran.changes.append((now_s, running))


class StubJobs:
    """All jobs of a list, from the first submission to the last end.

    Args:
        plans: by submission.
        site: where.

    Attributes:
        num_submitted, num_cancelled: jobs in Slurm.
        num_lost: companions that ended without having been told to: preempted by trainers.
    """

    def __init__(self, plans: list[Plan], site: Site) -> None:
        self._site = site
        self._jobs = [_Job(plan, Ran(), left_s=plan.work_s) for plan in plans]
        self._poll = select.poll()
        self._of_fd: dict[int, tuple[_Job, WaitingJob]] = {}
        self._acts: list[Future[Any]] = []
        self._begin_s = 0.0
        self.num_submitted = self.num_cancelled = self.num_lost = 0

    @property
    def ran(self) -> list[Ran]:
        """What the jobs did, in their order."""
        return [job.ran for job in self._jobs]

    def run(self, most_s: float, progress: Callable[[int, int], None] | None = None) -> None:
        """Run them all.

        Args:
            most_s: until all have ended.
            progress: told how many have, now and then.

        Raises:
            StubsFailed: see there.
        """
        with (
            ThreadPoolExecutor(_THREADS, "daemon") as questions,
            WaitingJobs(self._site.directory, self._site.environ) as self._slurm,
        ):
            self._begin_s = time.monotonic()
            try:
                told_s = 0.0
                while (num_ended := sum(job.has_ended for job in self._jobs)) < len(self._jobs):
                    now_s = self._now_s()
                    if now_s > most_s:
                        waiting = [job.plan.name for job in self._jobs if not job.has_ended]
                        raise StubsFailed(f"after {most_s:g} s these have not ended: {', '.join(waiting)}")
                    if progress and now_s > told_s + 10:
                        told_s = now_s
                        progress(num_ended, len(self._jobs))
                    self._look(now_s, questions)
            finally:
                self.num_submitted, self.num_cancelled = self._slurm.num_submitted, self._slurm.num_cancelled
                for job in self._jobs:
                    for one in (*job.companions, *([job.trainer] if job.trainer else [])):
                        one.close()

    def _now_s(self) -> float:
        return time.monotonic() - self._begin_s

    def _look(self, now_s: float, questions: ThreadPoolExecutor) -> None:
        for job in self._jobs:
            if job.has_ended:
                self._leftovers(job)
            elif job.trainer is None:
                if job.plan.submit_s <= now_s:
                    job.trainer = self._slurm.submit(self._trainer_options(job.plan))
            elif job.trainer.fd is None:
                if job.trainer.opens():
                    self._watch(job, job.trainer)
                    now_s = self._now_s()
                    job.ran.start_s = job.since_s = job.report_at_s = now_s
                    job.advance(now_s, self._site.worker_cpus)
            else:
                self._companions(job)
                if job.plan.demand:
                    self._talk(job, questions)
                    self._act(job)
                now_s = self._now_s()
                if job.speed > 0 and job.left_s - job.speed * (now_s - job.since_s) <= 0:
                    self._end(job, now_s)
        for fd, _ in self._poll.poll(_LOOK_MS):
            self._gone(*self._of_fd[fd])
        for act in [act for act in self._acts if act.done()]:
            self._acts.remove(act)
            act.result()

    # --- Slurm ------------------------------------------------------------------------------------------------------

    def _trainer_options(self, plan: Plan) -> list[str]:
        return [
            f"--partition={TRAINERS}", f"--job-name={plan.name}", f"--time={plan.limit_minutes}",
            f"--ntasks={plan.units}", f"--gpus-per-task={plan.gpus}", f"--cpus-per-task={plan.cpus}",
        ]  # fmt: skip

    def _companion_options(self, job: _Job) -> list[str]:
        """As `hetjob/master/companions.py` has them."""
        assert job.trainer is not None
        number = job.trainer.job_id
        return [
            f"--partition={WORKERS}", "--nodes=1", "--ntasks=1", f"--cpus-per-task={self._site.worker_cpus}",
            f"--dependency=after:{number}", "--kill-on-invalid-dep=yes", *self._site.worker_times,
            f"--comment=hets:trainer={number} hets:start={number}.0", f"--job-name={job.plan.name}-data-worker",
        ]  # fmt: skip

    def _cancel(self, leaving: list[WaitingJob]) -> None:
        self._acts.append(self._slurm.cancel(leaving))

    def _watch(self, job: _Job, one: WaitingJob) -> None:
        assert one.fd is not None
        self._of_fd[one.fd] = (job, one)
        self._poll.register(one.fd, 0)  # an error is always told: nobody reads any more

    def _forget(self, one: WaitingJob) -> None:
        if one.fd is not None:
            self._poll.unregister(one.fd)
            del self._of_fd[one.fd]
        one.close()

    def _gone(self, job: _Job, one: WaitingJob) -> None:
        """A running job has ended, and not by its pipe."""
        self._forget(one)
        if one is job.trainer:
            raise StubsFailed(f"trainer {job.plan.name} (job {one.job_id}) ended before its work was done")
        self.num_lost += not one.is_leaving
        job.companions.remove(one)
        if not job.has_ended:
            job.advance(self._now_s(), self._site.worker_cpus)

    # --- a job master -----------------------------------------------------------------------------------------------

    def _companions(self, job: _Job) -> None:
        """See which companions have started; let those that wait for their node run on any."""
        for one in list(job.companions):
            if one.fd is not None:
                continue
            if one.opens():
                self._watch(job, one)
                job.advance(self._now_s(), self._site.worker_cpus)
            elif one.is_leaving:
                # It waited in the queue. Should it start all the same, Slurm has its cancellation.
                if not self._acts:
                    job.companions.remove(one)
                    self._forget(one)
            elif one.node and one.job_id and time.monotonic() - one.since_s > self._site.prefer_s:
                self._cancel([one])
                job.companions.append(self._slurm.submit(self._companion_options(job)))

    def _talk(self, job: _Job, questions: ThreadPoolExecutor) -> None:
        """Report when it is due, and take the answer."""
        assert self._site.daemon is not None
        if job.report is not None:
            if job.report.done():
                answer, job.report = job.report.result(), None
                if not isinstance(answer, GrantLimit):
                    raise StubsFailed(f"the site daemon refuses {job.plan.name}: {answer}")
                job.grant = answer
                job.report_at_s = self._now_s() + answer.next_s
        elif self._now_s() >= job.report_at_s and job.trainer is not None and job.trainer.job_id:
            job.advance(self._now_s(), self._site.worker_cpus)
            job.report = questions.submit(ask, self._site.daemon, self._demand(job, int(job.trainer.job_id)))

    def _demand(self, job: _Job, job_id: int) -> ReportDemand:
        plan, size = job.plan, self._site.worker_cpus
        most = math.ceil(plan.demand / size)
        points = [
            SpeedPoint(size, number, plan.speed_with(number * size)) for number in sorted({1, max(1, most - 1), most})
        ]
        left = RemainingWork(max(job.left_s, _LEAST_STEPS), 0.0, "directive", plan.work_s)
        wait_share = min(1.0, max(0.0, 1.0 - job.speed / plan.best_speed))
        # A step is a second of work at the ideal speed.
        measured = Measured(job.speed, 1.0, tuple(points), gpus=plan.units * plan.gpus, remaining=left)
        return ReportDemand(job_id, 0, len(job.staying), most, size, wait_share, measured)

    def _act(self, job: _Job) -> None:
        """Bring the number of companions to what was granted, once for each answer."""
        grant, job.grant = job.grant, None
        if grant is None or grant.limit is None:
            return
        have = job.staying
        aim = min(grant.limit, math.ceil(job.plan.demand / self._site.worker_cpus))
        if aim < len(have):
            # Those that wait leave first, then those that came last.
            known = [one for one in have if one.job_id is not None]
            order = sorted(known, key=lambda one: (one.fd is not None, -one.since_s))
            if leaving := order[: len(have) - aim]:
                self._cancel(leaving)
        for number in range(aim - len(have)):
            node = grant.nodes[number] if number < len(grant.nodes) else ""
            job.companions.append(self._slurm.submit(self._companion_options(job), node))

    def _end(self, job: _Job, now_s: float) -> None:
        assert job.trainer is not None
        job.advance(now_s, self._site.worker_cpus)
        job.ran.end_s = now_s
        self._forget(job.trainer)
        self._leftovers(job)

    def _leftovers(self, job: _Job) -> None:
        """The companions of a job that has ended."""
        if known := [one for one in job.staying if one.job_id is not None]:
            self._cancel(known)
