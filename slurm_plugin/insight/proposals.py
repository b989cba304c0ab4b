"""What past jobs say of new submissions: reads the job history, and asks `past_jobs.py`.

Called by `hetstream advise`, `hetstream convert --auto` and job masters. First the records of this user's ended jobs
come into the history; without a single past job no file is made. A history that cannot be used costs the proposals, not
the command.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from hetstream.base.text import count_words, user_name
from hetstream.hetjob.convert.directives import Directive
from hetstream.hetjob.convert.render import what_runs
from hetstream.hetjob.convert.sbatch_options import SbatchOptions
from hetstream.hetjob.convert.spec import gpus_per_task, tasks_per_node
from hetstream.hetjob.elastic.step_terms import UsualLength
from hetstream.hetjob.job.ended_job import EndedJob, load_own_summary, read_ended
from hetstream.hetjob.job.job import IN_SUBMIT_DIR
from hetstream.hetjob.master.controller_state_file import JobReport, told_by
from hetstream.slurm_plugin.client.model import Job
from hetstream.slurm_plugin.errors import HistoryError
from hetstream.slurm_plugin.insight.utilisation import directory_of, may_tell
from hetstream.slurm_plugin.past_jobs import (
    CLOCKS_DIFFER_S,
    HISTORY_FILE,
    Features,
    JobHistory,
    PastJob,
    Proposal,
    history_directory,
    keeps_plain_names,
    last_batch,
    past_job_of,
    propose,
    usual_length,
)

# The records that ended hetstream jobs have left where they were submitted. Called by `advise` and `convert --auto`.
#
# It reads directories, `job-ID/` in each place, and asks nobody. What this user may not read is left out.


def ended_jobs(places: Iterable[Path], since_s: float, until_s: float) -> list[EndedJob]:
    """Of each script's name and place, the newest of this user's jobs that ended in this time.

    Args:
        places: that hold directories of jobs, such as `.hetstream` where they were submitted.
        since_s, until_s: in seconds since the epoch. A record with a later date says not when its job ended.
    """
    newest: dict[tuple[Path, str], EndedJob] = {}
    for directory in _directories(places):
        try:
            found = read_ended(directory)
        except OSError:
            continue
        if found is None or not since_s <= found.ended_s <= until_s + CLOCKS_DIFFER_S:
            continue
        before = newest.get((directory.parent, found.name))
        if before is None or before.ended_s < found.ended_s:
            newest[directory.parent, found.name] = found
    return sorted(newest.values(), key=lambda job: job.ended_s)


def past_jobs(places: Iterable[Path]) -> list[PastJob]:
    """Return what the records of this user's own jobs tell, as the job history keeps them.

    What belongs to others is left out: a record in a directory that many can write to must not decide what this user
    submits.

    Args:
        places: as of `ended_jobs`.
    """
    return [past_job for directory in _directories(places) if (past_job := _read(directory)) is not None]


def _directories(places: Iterable[Path]) -> Iterator[Path]:
    """The directories of jobs in these places."""
    for place in sorted({path.resolve() for path in places}):
        try:
            yield from sorted(place.glob("job-*"))
        except OSError:
            continue  # another user's place


def _read(directory: Path) -> PastJob | None:
    try:
        summary, status = load_own_summary(directory)
    except (OSError, ValueError):
        return None  # it runs, is not ours, or no record
    place = directory.parent  # resolved
    submit_dir = str(place.parent) if place.name == IN_SUBMIT_DIR else ""
    job, user = directory.name.split("-")[1], user_name(status.st_uid)
    return past_job_of(summary, job, user, round(status.st_mtime, 3), submit_dir)


log = logging.getLogger(__name__)

# Scripts are listed for this time after their last job has ended.
LISTED_S = 30 * 86400.0
NO_HISTORY = "no past job with an elastic range of data workers is known yet: nothing is proposed from history"


@dataclass(frozen=True)
class Remembered:
    """The history as it was read.

    Attributes:
        jobs: the oldest first.
        user: what stands in it for this user; "" if that is not known.
        directory: the same for the directory that the caller asked about.
        problem: why it could not be used; empty if it could.
        num_unreadable: records in it that are damaged, and left out.
        directories: by what stands in it for them, those that jobs were submitted from whose own records are here.
    """

    jobs: tuple[PastJob, ...] = ()
    user: str = ""
    directory: str = ""
    problem: str = ""
    num_unreadable: int = 0
    directories: Mapping[str, str] = field(default_factory=dict)

    @property
    def notes(self) -> list[str]:
        """What the user should know of it."""
        if self.problem:
            return [self.problem]
        found = [f"{count_words(self.num_unreadable, 'damaged record')} of the job history: left out"]
        return (found if self.num_unreadable else []) + ([] if self.jobs else [NO_HISTORY])


def remember(
    places: Iterable[Path], environ: Mapping[str, str], now_s: float, directory: Path | None = None
) -> Remembered:
    """Add what the records in these places tell, and read all that is known.

    Args:
        places: that hold directories of jobs.
        environ: names the job history.
        now_s: in seconds since the epoch.
        directory: that a job is submitted from; None where that is not asked.
    """
    history_place = history_directory(environ)
    new = past_jobs(places)
    try:
        if not new and not (history_place / HISTORY_FILE).exists():
            return Remembered()
        with JobHistory(history_place, plain_names=keeps_plain_names(environ)) as history:
            history.add(new, now_s)
            return Remembered(
                tuple(history.jobs(now_s)),
                history.kept_name(user_name(os.geteuid())),
                history.kept_name(os.path.realpath(directory)) if directory else "",
                num_unreadable=history.num_unreadable,
                directories={history.kept_name(path): path for job in new if (path := job.features.directory)},
            )
    except HistoryError as error:
        return Remembered(problem=str(error))
    except OSError as error:
        return Remembered(problem=f"job history in {history_place} cannot be looked at: {error.strerror}")


@dataclass(frozen=True)
class NextSubmission:
    """What one of this user's scripts may ask for the next time.

    Attributes:
        name: of the script.
        directory: that it was submitted from; "" where the history alone knows it, by a digest.
        proposal: what it may ask for.
    """

    name: str
    directory: str
    proposal: Proposal


def next_submissions(history: Remembered, now_s: float) -> list[NextSubmission]:
    """For each script of this user of which a job has ended of late, by name; one for each directory that has it."""
    newest: dict[tuple[str, str], Features] = {}
    for job in history.jobs:
        if history.user and job.features.user == history.user and job.ended_s >= now_s - LISTED_S:
            newest[job.features.name, job.features.directory] = job.features
    found = (
        NextSubmission(name, history.directories.get(directory, ""), proposal)
        for (name, directory), features in newest.items()
        if (proposal := propose(features, history.jobs)) is not None
    )
    return sorted(found, key=lambda submission: (submission.name, submission.directory))


def for_script(history: Remembered, name: str, script: str, options: SbatchOptions) -> Proposal | None:
    """Return what a script may ask for that is about to be submitted; None where no past job is like it.

    Args:
        history: of past jobs.
        name: of the script.
        script: its text.
        options: of sbatch, in force for it.
    """
    gpus = gpus_per_task(options) * _num_tasks(options)
    runs = what_runs(script)
    features = Features(
        options.value("job-name") or name, round(gpus), history.user, directory=history.directory,
        commands=runs.commands, files=runs.files,
    )  # fmt: skip
    batch = last_batch(features, history.jobs)
    return propose(msgspec.structs.replace(features, batch=batch), history.jobs)


def usual_length_of(
    job_name: str, directory: Path, places: Iterable[Path], environ: Mapping[str, str]
) -> UsualLength | None:
    """Return how long jobs like this one run; None where no past job says so.

    Args:
        job_name: as Slurm has it.
        directory: that it was submitted from.
        places: that hold directories of jobs.
        environ: names the job history.
    """
    history = remember(places, environ, time.time(), directory)
    if history.problem:
        log.warning("how long similar jobs ran is not known: %s", history.problem)
    return usual_length(Features(job_name, user=history.user, directory=history.directory), history.jobs)


def _num_tasks(options: SbatchOptions) -> int:
    nodes = options.number("nodes") or 1
    return options.number("ntasks") or nodes * tasks_per_node(options)


def as_directives(proposal: Proposal, given: Sequence[Directive]) -> list[Directive]:
    """Return the proposal as directives, without what the script or the command line says itself.

    Args:
        proposal: from history.
        given: directives of the script and of the command line. Sizes that depend on one of them are left out.
    """
    names = {option.name for option in given}
    if "data-worker-threads" in names:
        names |= {"data-worker-cpus"}
    if "data-worker-cpus" in names:
        names |= {"data-worker-mem"}
    return [
        Directive(name, value, "history of past jobs") for name, value in proposal.options.items() if name not in names
    ]


# What a running job tells of itself: memory that will be full soon, the parts of its step. Reads a file in the job's
# directory; asks nobody.
#
# Called by `hetstream why`. Only the directories of this user's own jobs are looked into, as in `utilisation.py`.


def told_by_job(job: Job) -> JobReport:
    """By one record of the queue; nothing also where nothing can be known."""
    if not may_tell(job):
        return JobReport()
    try:
        directory = directory_of(job)
        return told_by(directory) if directory else JobReport()
    except (OSError, msgspec.MsgspecError):
        return JobReport()  # it is ending, or of another release
