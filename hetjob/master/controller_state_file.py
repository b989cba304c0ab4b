"""The file in which the elastic controller's memory and changes outlive a killed job master. Called by `elastic.py`;
`hetstream why` reads there what the job warns of.

It lies beside the address file and goes with it when the job ends. What cannot be read or written costs the memory,
never the job.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from hetstream.base import typed_json
from hetstream.base.files import Directory
from hetstream.hetjob.elastic.companions import Holes, TimeRequest
from hetstream.hetjob.elastic.controller import ControllerState
from hetstream.hetjob.elastic.step_terms import StepTerm
from hetstream.hetjob.errors import MasterError
from hetstream.hetjob.job.job import CONTROLLER_STATE_FILE
from hetstream.hetjob.ports import MarkedJob

# The time of one job's companions: what each asked for, when its limit ends it, and the CPU time that holes gave.
#
# Called by `elastic.py`, pure but for the state that it keeps. `hetstream.hetjob.elastic.companions` decides. A
# companion was in a hole if Slurm has started it with less time than the most that it asked for: somebody's planned
# start
# follows. Without `--data-worker-time-min` companions ask for what the options say, and their time is only noted.


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
        """Return what the next companion asks for; None for as long as the options say.

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
        """Return whether the end of one of these, which run, is of interest and not known."""
        lives = (self._lives.get(job_id) for job_id in job_ids)
        return self.holes is not None and any(life is not None and life.ends_at is None for life in lives)

    def due(self, job_ids: Iterable[str], steps_s: Mapping[str, float], now: float) -> dict[str, float]:
        """Return those that have to leave before their time limit ends them, and in how many seconds it would.

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


# A warning that some process of a job runs out of memory: what `elastic.json` keeps of it, and `hetstream why` shows.
#
# Made by `memory.py`, and kept here. Pure.


class MemoryWarning(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One warning.

    Attributes:
        job: the Slurm job whose memory it is: the trainer's, or a companion.
        text: what is so, and what was done about it.
        command: what helps, as a command or a directive.
        full_at_s: when memory will be full, on the clock of whoever made it; in the file seconds since the epoch.
    """

    job: str
    text: str
    command: str
    full_at_s: float


log = logging.getLogger(__name__)

# As many changes as a day has at a cooldown of 86 s; the service's events have all.
MOST_CHANGES = 1000
_MAX_BYTES = 16 << 20


class _FileContent(msgspec.Struct, forbid_unknown_fields=True):
    memory: ControllerState
    changes: list[dict[str, Any]]
    tally: TimeTally = msgspec.field(default_factory=TimeTally)
    warnings: tuple[MemoryWarning, ...] = ()
    step_terms: tuple[StepTerm, ...] = ()


class ControllerStateFile:
    """The file.

    Args:
        path: where; what a job master of before has written there is read now.

    Attributes:
        memory: of the job master of before; None without one.
        changes: the last ones, oldest first, also those of before.
        tally: the time of the companions, also of those of before; whoever counts changes it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._written = b""
        self._problem = ""
        self.memory: ControllerState | None = None
        self.tally = TimeTally()
        self.changes: deque[Mapping[str, Any]] = deque(maxlen=MOST_CHANGES)
        try:
            with Directory.open_safe(self._path.parent, own=True) as directory:
                page = typed_json.decode(directory.read(path.name, _MAX_BYTES), _FileContent)
        except FileNotFoundError:
            return
        except (OSError, msgspec.MsgspecError) as error:
            log.warning("%s cannot be read, the elastic controller begins anew: %s", path, error)
            return
        self.memory = page.memory
        self.tally = page.tally
        self.changes.extend(page.changes)

    def write(
        self, memory: ControllerState, warnings: Sequence[MemoryWarning] = (), step_terms: Sequence[StepTerm] = ()
    ) -> None:
        """Write down what is known now, if anything is new: the old page or the new one is there, whole."""
        changes = [dict(change) for change in self.changes]
        page = msgspec.json.encode(_FileContent(memory, changes, self.tally, tuple(warnings), tuple(step_terms)))
        if page == self._written:
            return
        try:
            with Directory.open_safe(self._path.parent, own=True) as directory:
                directory.write_whole(self._path.name, page)
        except OSError as error:
            if str(error) != self._problem:
                log.warning("%s cannot be written: a job master that is killed forgets this: %s", self._path, error)
            self._problem = str(error)
            return
        self._written = page


class JobReport(NamedTuple):
    """What a running job tells of itself.

    Attributes:
        warnings: of its memory.
        step_terms: the parts of its step.
    """

    warnings: tuple[MemoryWarning, ...] = ()
    step_terms: tuple[StepTerm, ...] = ()


def told_by(directory: Path) -> JobReport:
    """Return what the job master with this directory tells now; nothing where it keeps nothing.

    Raises:
        OSError: it cannot be read, or is none of this user's.
        MsgspecError: it is another file.
    """
    try:
        with Directory.open(directory) as opened:
            page = typed_json.decode(opened.read(CONTROLLER_STATE_FILE, _MAX_BYTES), _FileContent)
    except FileNotFoundError:
        return JobReport()
    return JobReport(page.warnings, page.step_terms)
