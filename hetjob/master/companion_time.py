"""The time of one job's companions: what each asked for, when its limit ends it, and the CPU time that holes gave.

Called by `elastic.py`, pure but for the state that it keeps. `hetstream.hetjob.elastic.holes` decides. A companion was
in a hole if Slurm has started it with less time than the most that it asked for: somebody's planned start follows.
Without `--data-worker-time-min` companions ask for what the options say, and their time is only noted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from hetstream.hetjob.elastic.holes import Holes, TimeRequest
from hetstream.hetjob.errors import MasterError
from hetstream.hetjob.ports import MarkedJob


class TimeTally(msgspec.Struct, forbid_unknown_fields=True):
    """What outlives a killed job master.

    Attributes:
        num_jobs: companions that have started and are over.
        num_in_holes: of them, in holes.
        cpu_s: CPU-seconds that they held.
        hole_cpu_s: of them, in holes.
        asked: the most seconds that companions which are not over have asked for, by job id.
    """

    num_jobs: int = 0
    num_in_holes: int = 0
    cpu_s: float = 0.0
    hole_cpu_s: float = 0.0
    asked: dict[str, float] = msgspec.field(default_factory=dict)


@dataclass
class _Life:
    """A companion; times are on the caller's clock.

    Attributes:
        asked: for what; None as long as the options say.
        asked_at: since when.
        started_at: by Slurm.
        ends_at: by its time limit; None while that is not known.
        granted_s: from its start to that end.
        worked_at: first registered with the dispatcher.
        drained_at: told to leave.
    """

    cpus: int
    asked: TimeRequest | None
    asked_at: float
    started_at: float | None = None
    ends_at: float | None = None
    granted_s: float = 0.0
    worked_at: float | None = None
    drained_at: float | None = None


class CompanionTime:
    """The companions of one job.

    Args:
        holes: decides how long they ask for; None if they run as long as the job.
        tally: of a job master of before.
        job_end_s: when the job ends, in seconds since 1970; None if that is not known.
    """

    def __init__(self, holes: Holes | None, tally: TimeTally | None = None, job_end_s: float | None = None) -> None:
        self.holes = holes
        self._job_end_s = job_end_s
        self.tally = tally or TimeTally()
        self._lives: dict[str, _Life] = {}

    def request(self, time_s: float) -> TimeRequest | None:
        """What the next companion asks for; None for as long as the options say.

        Args:
            time_s: now, in seconds since 1970.

        Raises:
            MasterError: the job ends before a companion would be of use.
        """
        if self.holes is None:
            return None
        left_s = None if self._job_end_s is None else self._job_end_s - time_s
        asked = self.holes.request(left_s)
        if asked is None:
            raise MasterError(self.holes.why_not(left_s))
        return asked

    def submitted(self, job_id: str, cpus: int, asked: TimeRequest | None, now: float) -> None:
        """Note a companion that was submitted."""
        self._lives[job_id] = _Life(cpus, asked, now)
        if asked is not None:
            self.tally.asked[job_id] = asked.time_s

    def listed(self, jobs: Iterable[MarkedJob], now: float) -> None:
        """Take in what Slurm says of those that are not over."""
        for job in jobs:
            life = self._lives.setdefault(job.job_id, _Life(job.num_cpus, None, now))
            if job.state != "PENDING" and job.left_s is not None:
                if life.started_at is None and life.worked_at is not None and self.holes is not None:
                    self.holes.started(life.worked_at - (now - job.elapsed_s))
                life.started_at, life.ends_at = now - job.elapsed_s, now + job.left_s
                life.granted_s = job.elapsed_s + job.left_s

    def working(self, job_id: str, now: float) -> None:
        """It serves."""
        life = self._lives.get(job_id)
        if life is not None and life.worked_at is None:
            life.worked_at = now
            if self.holes is not None and life.started_at is not None:
                self.holes.started(now - life.started_at)

    def leaves(self, job_id: str, now: float) -> None:
        """It was told to leave."""
        if job_id in self._lives:
            self._lives[job_id].drained_at = now

    def over(self, job_id: str, now: float) -> None:
        """Slurm does not list it any more, or it was cancelled."""
        life = self._lives.pop(job_id, None)
        if life is None:
            return
        if self.holes is not None and life.drained_at is not None:
            self.holes.drained(now - life.drained_at)
        began = life.started_at if life.started_at is not None else life.worked_at
        if began is not None:
            cpu_s = life.cpus * (now - began)
            self.tally.num_jobs += 1
            self.tally.cpu_s += cpu_s
            if self._is_in_hole(job_id, life):
                self.tally.num_in_holes += 1
                self.tally.hole_cpu_s += cpu_s
        self.tally.asked.pop(job_id, None)

    def needs_a_look(self, job_ids: Iterable[str]) -> bool:
        """Whether the end of one of these, which run, is of interest and not known."""
        lives = (self._lives.get(job_id) for job_id in job_ids)
        return self.holes is not None and any(life is not None and life.ends_at is None for life in lives)

    def due(self, job_ids: Iterable[str], steps_s: Mapping[str, float], now: float) -> dict[str, float]:
        """Those that have to leave before their time limit ends them, and in how many seconds it would.

        Args:
            job_ids: those that run and were not told to leave.
            steps_s: how long one of their processes takes for a step; those of which that is not known are left out.
            now: on the clock of all calls.
        """
        found: dict[str, float] = {}
        rule = self.holes or Holes(0.0)
        for job_id in job_ids:
            life = self._lives.get(job_id)
            if life is not None and life.ends_at is not None:
                left_s = life.ends_at - now
                if rule.is_due(left_s, life.granted_s, steps_s.get(job_id, 0.0)):
                    found[job_id] = left_s
        return found

    def lasted(self, job_ids: Iterable[str]) -> None:
        """These have come to their end and leave."""
        for job_id in job_ids:
            life = self._lives.get(job_id)
            if self.holes is not None and life is not None and life.asked is not None:
                self.holes.lasted(life.asked.time_min_s, life.granted_s)

    def impatient(self, job_ids: Iterable[str], now: float) -> dict[str, TimeRequest]:
        """Of those that wait, the ones that ask for a shorter hole from now on.

        The caller tells Slurm, and says so with `asks`.
        """
        found: dict[str, TimeRequest] = {}
        for job_id in job_ids:
            life = self._lives.get(job_id)
            if self.holes is not None and life is not None and life.asked is not None:
                shorter_s = self.holes.shorter(life.asked.time_min_s, now - life.asked_at)
                if shorter_s is not None:
                    found[job_id] = TimeRequest(shorter_s, life.asked.time_s)
        return found

    def asks(self, job_id: str, asked: TimeRequest, now: float) -> None:
        """It asks for something else from now on."""
        life = self._lives.get(job_id)
        if life is not None:
            life.asked, life.asked_at = asked, now

    def summary(self, now: float) -> dict[str, Any]:
        """For the job's summary, with those that are not over yet."""
        for job_id in list(self._lives):
            self.over(job_id, now)
        tally = self.tally
        return {
            "companions": tally.num_jobs,
            "companions_in_holes": tally.num_in_holes,
            "companion_cpu_s": round(tally.cpu_s, 1),
            "companion_cpu_s_in_holes": round(tally.hole_cpu_s, 1),
        }

    def _is_in_hole(self, job_id: str, life: _Life) -> bool:
        asked_s = self.tally.asked.get(job_id)
        # Slurm's times are whole seconds.
        return asked_s is not None and life.ends_at is not None and life.granted_s < asked_s - 2
