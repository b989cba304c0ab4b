"""`hetstream job`: a job in any state: why it waits, what it does, what it did and used, its events and logs."""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from hetstream.base.errors import UsageError
from hetstream.base.files import Directory, UntrustedFile
from hetstream.base.text import duration, duration_words, percent, printable, size_words
from hetstream.hetjob.elastic.step_terms import StepTerm
from hetstream.hetjob.errors import ServiceNotFound, SlurmCommandError
from hetstream.hetjob.job.ended_job import (
    EMBEDDING_DIR,
    SUMMARY_FILE,
    JobLeft,
    ended_of,
    jobs_left,
    load_summary,
    remove,
    servers_words,
    summary_line,
)
from hetstream.hetjob.job.find_service import JOB_ID, find_address_file, find_directory
from hetstream.hetjob.job.job import IN_SUBMIT_DIR, JOBS_DIR, RULE, for_user, is_directory_pattern, places, setting
from hetstream.mpi_dataworkers.embedding.registration import REGISTRY, Registration, read_registrations
from hetstream.mpi_dataworkers.errors import ServiceError
from hetstream.mpi_dataworkers.wire.messages import Status
from hetstream.slurm_plugin.cli.cluster_source import read_cluster_or_jobs
from hetstream.slurm_plugin.cli.output import meta_of
from hetstream.slurm_plugin.cli.screen import check_interval, show_again
from hetstream.slurm_plugin.client.accounting import (
    JobUse,
    Times,
    from_queue,
    has_accounting,
    job_place,
    of_queue,
    recorded,
    with_steps,
)
from hetstream.slurm_plugin.client.model import Job, Snapshot, is_own
from hetstream.slurm_plugin.client.read import CommandReader
from hetstream.slurm_plugin.client.slurm import CommandSlurm
from hetstream.slurm_plugin.client.slurm_units import local_time
from hetstream.slurm_plugin.errors import UnknownJob
from hetstream.slurm_plugin.insight.het_job import find_jobs
from hetstream.slurm_plugin.insight.last_reading import SOURCE
from hetstream.slurm_plugin.render.tables import (
    RED,
    SCHEMA_VERSION,
    YELLOW,
    Column,
    Report,
    Row,
    Section,
    as_table,
    by_state,
    gib,
    rate_words,
    wrapped,
)
from hetstream.slurm_plugin.render.top import render

log = logging.getLogger(__name__)

# Between two questions to slurmctld and to the daemons of nodes; a job's own service is asked each time.
_SLURM_S = 30.0
_DEFAULT_LINES = 20
# As wide as is told apart at a glance.
_MOST_LOOKS = 60
# Jobs that have ended are shown for so long with --me.
_ENDED_S = 86400.0

EPILOG = """\
A pending job: what it waits for, as hetstream why says it. A job with data workers that runs: what they and its loaders
do; one that has ended: what they did. Of any job of Slurm's: what it was given, and used of it as far as the site
records that. --watch shows it again and again until Ctrl-C.

WAITED is the share of the last seconds, or of a whole run, in which the training loop waited for data; LOCAL are steps
that the trainer had to make itself. BUSY is the share in which a data worker made steps. If trainers wait and data
workers are busy, more data workers help. If trainers wait and data workers are idle, something else holds the job up,
such as the network. CPU is the CPU time that a job used, of what its CPUs had; MEMORY the most that one of its steps
had, of what it was given; GPU how busy its GPUs were.

examples:
  hetstream job 8123                     by any of its numbers, from anywhere as long as Slurm knows it
  hetstream job                          the only one that was submitted from this directory, or runs on this host
  hetstream job .hetstream/job-8123      without Slurm
  hetstream job --me                     all of yours that wait, run, or have ended within a day
  hetstream job 8123 --events            what happened in it, with its causes; also when it has ended
  hetstream job 8123 --logs              the last lines of each log; --logs master: all of the job master's
  hetstream job --clean --older-than 30d --remove ~/runs/*

logs:
  master         what the job master decided and why
  dispatcher     which data workers and loaders came and went
  data-worker-N  the data workers of component 1; companion-N: those that joined later; gpu-companion-N: with a GPU
  embedding-server-N  the embedding servers; embedding-companion-N: those that joined later
  writers/NODE   the checkpoint writers

exit codes:
  0  done
  1  neither Slurm nor a directory of this user's knows the job, or Slurm could not be asked
  2  the command line is wrong, or names no job where there are several services or none
"""


def add_job_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb."""
    parser.description = "Show a job in whatever state it is: why it waits, what it does, what it did and used."
    parser.usage = "%(prog)s [options] [JOB] [LOG ...]"
    parser.epilog = EPILOG
    parser.add_argument(
        "words", nargs="*", metavar="JOB", help="job id, also of a component or companion; or a job's directory"
    )
    parser.add_argument("--me", action="store_true", help="all jobs of yours, with what they use")
    parser.add_argument("--watch", action="store_true", help="again and again until Ctrl-C; --events: also new ones")
    parser.add_argument(
        "--interval", type=float, default=2.0, metavar="S", help="seconds between two looks (default 2)"
    )
    parser.add_argument("--json", action="store_true", help="JSON: one object, with --watch and --events one a line")
    parser.add_argument("--service", metavar="file:FILE", help="address file of a dispatcher (or HETSTREAM_SERVICE)")
    parser.add_argument("--events", action="store_true", help="what happened in it, oldest first, each with its cause")
    logs = parser.add_argument_group("logs")
    logs.add_argument("--logs", action="store_true", help="its logs: the last lines of each, or all of those named")
    logs.add_argument("-n", "--lines", type=int, metavar="N", help=f"so many last lines (default {_DEFAULT_LINES})")
    logs.add_argument("--path", action="store_true", help="only where they are")
    clean = parser.add_argument_group("what old jobs have left")
    clean.add_argument(
        "--clean",
        action="store_true",
        help="list what old jobs have left in DIRs (default: here): their directories in "
        f".hetstream, and rows of embedding tables in {EMBEDDING_DIR}",
    )
    clean.add_argument("--remove", action="store_true", help="remove them")
    clean.add_argument("--older-than", default="14d", metavar="AGE", help="how old, as 12h, 30d or 8w (default 14d)")
    clean.add_argument("--jobs-dir", metavar="DIR", help=f"a place of jobs' directories, too (default: ${JOBS_DIR})")
    clean.add_argument(
        "--checkpoints",
        type=Path,
        action="append",
        default=[],
        metavar="DIR",
        help="all checkpoints that you keep are in there: rows of embedding tables go that none of them names",
    )
    parser.set_defaults(run=run, fresh=False)


def run(args: argparse.Namespace) -> int:
    """Show what was asked for."""
    if sum((args.me, args.events, args.logs, args.clean)) > 1:
        raise UsageError("--me, --events, --logs and --clean: one of them")
    if args.clean:
        return run_clean(args)
    args.job, *args.names = args.words or [None]
    if args.logs:
        return run_logs(args)
    if args.names:
        raise UsageError(f"{printable(args.names[0])!r}: one job at a time")
    if args.events:
        return run_events(args)
    check_interval(args)
    if args.me:
        if args.job or args.service:
            raise UsageError("--me names the jobs: leave the other one away")
        return show_again(args, lambda: _of_user(args), _json_of, _lines_of, once=not args.watch)
    watched = _Watched(args)
    return show_again(args, watched.look, _json_of, _lines_of, once=not args.watch)


def address_file_of(args: argparse.Namespace) -> Path:
    """Address file of the service that these arguments name."""
    return find_address_file(args.job, args.service, os.environ, Path.cwd(), lambda job: job_place(job, os.environ))


class _Service(NamedTuple):
    """What a job's service says: its name, and steps per second at this look and those before."""

    status: Status
    name: str
    speeds: tuple[float, ...]


@dataclass(frozen=True)
class Answer:
    """What is known of a job now.

    Attributes:
        parts: in order.
        facts: the same for JSON.
    """

    parts: Sequence[Report | _Service]
    facts: Mapping[str, Any]


def _json_of(answer: Answer) -> str:
    return json.dumps(answer.facts)


def _lines_of(answer: Answer, color: bool, width: int | None) -> list[str]:
    lines: list[str] = []
    for part in answer.parts:
        if isinstance(part, Report):
            more = as_table(part, color, width)
        else:
            more = render(part.status, part.name, color, width, part.speeds)
        lines += ["", *more] if lines else more
        for note in part.notes if isinstance(part, Report) else ():
            lines += wrapped(f"({printable(note)})", width, 1)
    return lines


class _Watched:
    """A job that is looked at again and again."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._in_slurm: Answer | None = None
        self._is_pending = False
        self._looked_s = -math.inf
        self._speeds: deque[float] = deque(maxlen=_MOST_LOOKS)
        self._servers: dict[str, Registration] = {}

    def look(self) -> Answer:
        """Return what is known of it now."""
        job = self._args.job
        by_number = job is not None and JOB_ID.fullmatch(job) is not None
        if by_number and time.monotonic() - self._looked_s >= _SLURM_S:
            self._ask_slurm()
        if self._is_pending and self._in_slurm is not None:
            return self._in_slurm
        try:
            own = _of_directory(address_file_of(self._args).parent, self._speeds, self._servers)
        except (ServiceNotFound, ServiceError) as error:
            if self._in_slurm is None:
                raise
            log.debug("no data worker tells of the job: %s", error)
            return self._in_slurm
        if self._in_slurm is None:
            return own
        return Answer([*own.parts, *self._in_slurm.parts], {**self._in_slurm.facts, **own.facts})

    def _ask_slurm(self) -> None:
        try:
            self._in_slurm, self._is_pending = _of_slurm(self._args)
        except (SlurmCommandError, UnknownJob) as error:
            # A directory may tell of the job all the same: Slurm forgets.
            address_file_of(self._args)
            self._in_slurm, self._is_pending = None, False
            log.debug("Slurm tells nothing of the job: %s", error)
        self._looked_s = time.monotonic()


def _of_slurm(args: argparse.Namespace) -> tuple[Answer, bool]:
    """What Slurm knows of the job that a number names, and whether it is pending.

    Raises:
        UnknownJob: nothing.
        SlurmCommandError: it could not be asked.
    """
    # Only here: they look at thousands of nodes as arrays, which a job without Slurm does not need.
    from hetstream.slurm_plugin.cli.packing_arguments import packing_reasons
    from hetstream.slurm_plugin.cli.why import report_of, told_lines
    from hetstream.slurm_plugin.insight.proposals import told_by_job

    snapshot = read_cluster_or_jobs(args)
    jobs = find_jobs(snapshot.jobs, args.job)
    if not jobs and snapshot.source == SOURCE:
        snapshot = CommandSlurm().seen()
        jobs = find_jobs(snapshot.jobs, args.job)
    pending = [job for job in jobs if job.is_pending]
    others = [job for job in jobs if not job.is_pending]
    uses, notes = _uses_now(others, snapshot) if others else ((), [])
    if not jobs:
        uses, notes = _uses_ended(args.job, snapshot)
    reports: list[Report] = []
    facts = {**meta_of("job", snapshot), "version": SCHEMA_VERSION}
    document: dict[str, Any] = {"meta": facts, "uses": [*map(_use_row, uses)], "notes": notes}
    if uses:
        reports.append(_use_report(uses, notes, others))
    if pending:
        why = report_of(args.job, pending, snapshot, {}, packing_reasons(snapshot, pending))
        reports.append(why)
        document |= {"why": why.summary, **{section.name: [*section.rows] for section in why.sections}}
    for job in others:
        if lines := told_lines(told_by_job(job)):
            reports.append(Report({}, {}, lines, ()))
    return Answer(reports, document), bool(pending) and not others


def _uses_now(jobs: Sequence[Job], snapshot: Snapshot) -> tuple[Sequence[JobUse], list[str]]:
    """What jobs that run use, and why that is not known."""
    now_s = time.time()
    uses = [
        of_queue(job, usage)
        for job in jobs
        for usage in from_queue([job], (), {job.job_id: Times(now_s - job.start_s)} if job.start_s else {}, now_s)
    ]
    if not uses or _gathers_nothing(snapshot):
        return uses, _gathers_nothing(snapshot)
    found, problem = with_steps(uses, os.environ)
    return found, [f"what it uses now is not known: {problem}"] if problem else []


def _uses_ended(name: str, snapshot: Snapshot) -> tuple[Sequence[JobUse], list[str]]:
    """What a job that has ended used, and why that is not known.

    Raises:
        UnknownJob: nobody remembers it.
    """
    if has_accounting(snapshot):
        uses: Sequence[JobUse] = recorded([f"--jobs={name}"], os.environ, snapshot.config.get("ClusterName", ""))
        notes = _gathers_nothing(snapshot)
    else:
        remembered = find_jobs(CommandReader(os.environ).jobs(ended=True), name)
        uses = [of_queue(job, usage) for job in remembered for usage in from_queue([job])]
        notes = ["what an ended job used is not recorded: this cluster has no accounting (AccountingStorageType)"]
    if not uses:
        hidden = f" {snapshot.hidden} may hide it from you." if snapshot.hides_jobs else ""
        raise UnknownJob(f"Slurm knows no job {name}, or has forgotten it.{hidden} Check: scontrol show job {name}")
    return uses, notes


def _gathers_nothing(snapshot: Snapshot) -> list[str]:
    how = snapshot.config.get("JobAcctGatherType", "")
    is_off = how in ("", "(null)") or how.endswith("none")
    return [f"how much of it was used is not recorded: slurm.conf has JobAcctGatherType={how}"] if is_off else []


def _of_user(args: argparse.Namespace) -> Answer:
    """All jobs of this user that wait, run, or have ended within a day."""
    snapshot = read_cluster_or_jobs(args)
    own = [job for job in snapshot.jobs if is_own(job)]
    waiting = [job for job in own if job.is_pending]
    uses, notes = _uses_now([job for job in own if not job.is_pending], snapshot)
    if has_accounting(snapshot):
        chosen = [f"--user={os.geteuid()}", f"--starttime={local_time(time.time() - _ENDED_S)}"]
        ended = recorded(chosen, os.environ, snapshot.config.get("ClusterName", ""))
        uses = [*uses, *(use for use in ended if use.usage.end_s is not None)]
    rows = sorted([*map(_use_row, uses), *map(_waiting_row, waiting)], key=_place)
    section = Section("uses", _known_columns(rows), rows, empty="no job of yours waits, runs or has ended within a day")
    report = Report({}, {}, [], (section,), notes)
    meta = {**meta_of("job", snapshot), "version": SCHEMA_VERSION}
    return Answer([report], {"meta": meta, "uses": rows, "notes": notes})


def _use_report(uses: Sequence[JobUse], notes: Sequence[str], running: Sequence[Job]) -> Report:
    first = uses[0]
    lines = []
    if not running:
        code = f", exit code {first.exit_code.partition(':')[0]}" if first.exit_code not in ("", "0:0") else ""
        lines = [f"job {first.label} ({first.usage.name}) of {first.usage.user} has ended: {first.state}{code}"]
    rows = [*map(_use_row, uses)]
    return Report({}, {}, lines, (Section("uses", _known_columns(rows), rows),), notes)


def _place(row: Row) -> list[int]:
    """By number, then component or index: `7`, `31+0`, `31+1`."""
    return [int(number) for number in re.findall(r"\d+", row["job"])]


def _known_columns(rows: Sequence[Row]) -> list[Column]:
    """Leave out shares that are known of no job, and GPUs where none has any."""
    has_gpus = any(row["gpus"] for row in rows)
    return [
        column
        for column in _USE_COLUMNS
        if not column.key.endswith("_share") or any(row[column.key] is not None for row in rows)
        if has_gpus or column.key != "gpus"
    ]


def _use_row(use: JobUse) -> Row:
    return {
        "job": use.label, "name": use.usage.name, "state": use.state, "nodes": use.num_nodes, "cpus": use.usage.cpus,
        "cpu_share": use.cpu_share, "memory_mb": use.memory_mb, "memory_share": use.memory_share,
        "gpus": use.usage.gpus, "gpu_share": use.usage.gpu_share, "ran_s": use.usage.ran_s, "limit_s": use.limit_s,
        "cpu_used_s": use.usage.cpu_used_s, "memory_used_mb": use.memory_used_mb, "exit_code": use.exit_code,
    }  # fmt: skip


def _waiting_row(job: Job) -> Row:
    return {
        "job": job.label, "name": job.name, "state": job.state, "nodes": job.num_nodes, "cpus": job.num_cpus,
        "cpu_share": None, "memory_mb": job.memory_mb, "memory_share": None, "gpus": job.gpus, "gpu_share": None,
        "ran_s": None, "limit_s": job.time_limit_s, "cpu_used_s": None, "memory_used_mb": None, "exit_code": "",
    }  # fmt: skip


def _low(key: str) -> Callable[[Row], str]:
    """Marks what used little of what it was given."""
    return lambda row: "" if row[key] is None or row[key] >= _USED_WELL else RED if row[key] < _USED_BADLY else YELLOW


# Shares of what a job was given, below which others could have had some of it.
_USED_WELL, _USED_BADLY = 0.5, 0.2
_USE_COLUMNS = (
    Column("job", "JOB", left=True),
    Column("name", "NAME", left=True, priority=2, cuts=True),
    Column("state", "STATE", left=True, mark=by_state),
    Column("nodes", "NODES", priority=4),
    Column("cpus", "CPUS"),
    Column("cpu_share", "CPU", percent, mark=_low("cpu_share")),
    Column("memory_mb", "GIB", gib, priority=1),
    Column("memory_share", "MEMORY", percent, mark=_low("memory_share")),
    Column("gpus", "GPUS", lambda value: f"{value:g}"),
    Column("gpu_share", "GPU", percent, mark=_low("gpu_share")),
    Column("ran_s", "TIME", duration),
    Column("limit_s", "OF", duration, priority=3),
)


def _of_directory(directory: Path, speeds: deque[float], servers: dict[str, Registration]) -> Answer:
    """What a job with data workers does or did, by its directory.

    Args:
        directory: the job's.
        speeds: steps per second at the looks before; this one's are added.
        servers: what embedding servers said at the look before; then what they say at this one.
    """
    path = directory / "address"
    if not path.exists() and (directory / SUMMARY_FILE).exists():
        summary = _read(directory)
        try:
            parts = _of_record(summary, directory)
        except (ValueError, ArithmeticError, LookupError, TypeError, AttributeError) as error:
            raise ServiceError(f"{directory / SUMMARY_FILE} is no record of a job: {error!r}") from error
        return Answer(parts, {"record": summary})
    from hetstream.mpi_dataworkers.dispatcher.client import StatusClient, running_service

    with StatusClient(running_service(path)) as client:
        status = client.fetch()
    speeds.append(sum(loader.steps_per_s for loader in status.loaders))
    service = _Service(status, directory.name, tuple(speeds))
    facts = {"service": msgspec.to_builtins(status)}
    rows = _server_rows(directory, servers)
    if not rows:
        return Answer([service], facts)
    section = Section("embedding_servers", _SERVER_COLUMNS, rows)
    return Answer([service, Report({}, {}, [], (section,))], {**facts, "embedding_servers": rows})


def _server_rows(directory: Path, before: dict[str, Registration]) -> list[Row]:
    """What a job's embedding servers have and do."""
    found = read_registrations(directory / REGISTRY)
    if found and not before:
        before |= found
        time.sleep(_BETWEEN_LOOKS_S)  # how fast they are shows from one look to the next
        found = read_registrations(directory / REGISTRY)
    now = time.time()
    rows: list[Row] = [
        {
            "server": name, "rows": said.rows, "bytes": said.bytes, "limit_bytes": said.limit_bytes,
            "share": said.bytes / said.limit_bytes if said.limit_bytes else None,
            "reads_per_s": said.reads_per_s(before[name]) if name in before else None,
            "state": "silent" if now - said.written_s > _SILENT_S else "draining" if said.draining else "serving",
        }
        for name, said in sorted(found.items(), key=lambda item: (len(item[0]), item[0]))
    ]  # fmt: skip
    before.clear()
    before |= found
    return rows


# An embedding server says each second what it has.
_BETWEEN_LOOKS_S, _SILENT_S = 1.5, 30.0
# So full, one more would be needed.
_FULL = 0.8
_HELD_COLUMNS = (
    Column("rows", "ROWS", lambda value: f"{value:,}"),
    Column("bytes", "BYTES", size_words),
    Column("limit_bytes", "OF", size_words, priority=1),
    Column("share", "FULL", percent, mark=lambda row: YELLOW if (row["share"] or 0.0) >= _FULL else ""),
)
_SERVER_COLUMNS = (
    Column("server", "EMBEDDING SERVER", left=True),
    Column("state", "STATE", left=True, mark=lambda row: "" if row["state"] == "serving" else YELLOW),
    *_HELD_COLUMNS,
    Column("reads_per_s", "ROWS READ/S", rate_words),
)
_ENDED_SERVER_COLUMNS = (
    Column("server", "EMBEDDING SERVER", left=True),
    *_HELD_COLUMNS,
    Column("reads", "ROWS READ", lambda value: f"{value:,}"),
)


# `hetstream job --events`: what happened in a job, with its causes.


def run_events(args: argparse.Namespace) -> int:
    """Print them."""
    from hetstream.mpi_dataworkers.dispatcher.events import EVENTS_FILE, follow_events, read_events, render_line

    directory = address_file_of(args).parent
    places = [place / EVENTS_FILE for place in (directory / "dispatcher", directory)]
    path = next((place for place in places if place.exists()), None)
    if path is None and (directory / "dispatcher").is_symlink():
        place = (directory / "dispatcher").readlink()
        raise UsageError(f"the events are on a disk of the job's first node until it ends: {place}. Run this there")
    if path is None:
        raise UsageError(f"no {EVENTS_FILE} in {directory} or {directory / 'dispatcher'}: no dispatcher has run there")
    for line in (follow_events if args.watch else read_events)(path):
        print(printable(line.decode(errors="replace").rstrip() if args.json else render_line(line)))
        if args.watch:
            sys.stdout.flush()
    return 0


# `hetstream job --logs`: what the parts of a job wrote, while it runs and when it is over.

_MAX_BYTES = 256 << 20
_WRITERS = "writers"


def directory_of(job: str) -> Path:
    """Return the directory of the job that a user names."""
    jobs_dir = setting(JOBS_DIR, os.environ)
    return find_directory(job, Path.cwd(), lambda name: job_place(name, os.environ), jobs_dir)


def run_logs(args: argparse.Namespace) -> int:
    """Print them."""
    if args.lines is not None and args.lines < 1:
        raise UsageError(f"--lines {args.lines}: at least 1")
    if args.job is None:
        raise UsageError("--logs: name a job, or its directory")
    path = directory_of(args.job)
    with Directory.open(path) as directory:
        logs = list(_logs(directory))
        if not logs:
            raise UsageError(
                f"no log in {path}: the job has not started, or had no data workers and no checkpoint writers"
            )
        chosen = [log for log in logs if not args.names or any(_is_called(log, name) for name in args.names)]
        if not chosen:
            known = ", ".join(str(log.with_suffix("")) for log in logs)
            raise UsageError(f"no log {' or '.join(map(repr, args.names))} in {path}. It has: {known}")
        if args.path:
            print("\n".join(printable(str(path / log)) for log in chosen))
            return 0
        num_lines = args.lines or (None if args.names else _DEFAULT_LINES)
        for place, log in enumerate(chosen):
            if len(chosen) > 1:
                print(f"{chr(10) if place else ''}==> {printable(str(path / log))} <==")
            for line in _last_lines(directory, log, num_lines):
                print(printable(line))
    sys.stdout.flush()
    return 0


def _logs(directory: Directory) -> Iterator[Path]:
    """The logs of a job in its directory, its master's first."""
    order = {"master.log": 0, "dispatcher.log": 1}
    yield from sorted(_named(directory), key=lambda log: (order.get(log.name, 2), len(log.name), log.name))
    try:
        with directory.enter(_WRITERS) as writers:
            yield from sorted(Path(_WRITERS) / log for log in _named(writers))
    except FileNotFoundError:
        pass
    except UntrustedFile as error:
        print(f"logs of checkpoint writers are not shown: {printable(str(error))}", file=sys.stderr)


_STEP_ENDED = "(Slurm has ended the step)"
# Where a step ends for a reason of its own, such as its time limit, slurmstepd's line goes on with it.
_ENDED_WITH_ITS_JOB = re.compile(
    r"srun: Job step aborted: Waiting up to .*|srun: got SIGCONT|srun: forcing job termination"
    r"|slurmstepd\S*: error: \*\*\* STEP \S+ ON \S+ CANCELLED AT \S+ \*\*\*"
)


def _named(directory: Directory) -> Iterator[Path]:
    return (Path(name) for name in directory.names() if name.endswith(".log") and not directory.has_directory(name))


def _is_called(path: Path, name: str) -> bool:
    return name in (path.name, path.stem, f"{path.parent.name}/{path.stem}")


def _last_lines(directory: Directory, log: Path, num_lines: int | None) -> list[str]:
    """The last lines, or all; of what is no log of the job's, why it is not read."""
    try:
        if log.parent.name:
            with directory.enter(log.parent.name) as writers:
                return _last_lines(writers, Path(log.name), num_lines)
        lines = directory.read(log.name, _MAX_BYTES).decode(errors="replace").splitlines()
    except UntrustedFile as error:
        return [f"not shown: {error}"]
    lines = _in_plain_words(lines)
    return lines if num_lines is None else lines[-num_lines:]


def _in_plain_words(lines: Sequence[str]) -> list[str]:
    """A log without what srun and slurmstepd say of each step that ends with its job: it would read as a failure."""
    shown: list[str] = []
    for line in lines:
        if not _ENDED_WITH_ITS_JOB.fullmatch(line):
            shown.append(line)
        elif _STEP_ENDED not in shown[-3:]:
            shown.append(_STEP_ENDED)
    return shown


# What the loaders of an ended job took, who made it, and what the elastic controller did.

_LOADER_COLUMNS = (
    Column("loader", "LOADER", left=True, cuts=True),
    Column("rank", "RANK"),
    Column("host", "HOST", left=True, priority=3),
    Column("epochs", "EPOCHS", priority=2),
    Column("steps", "STEPS"),
    Column("samples", "SAMPLES", priority=1),
    Column("bytes", "BYTES", priority=4),
    Column("waited", "WAITED"),
    Column("local", "LOCAL"),
    Column("left_out", "LEFT OUT"),
    Column("cached", "CACHED", priority=3),
)
_DECISIONS_SHOWN = 10


def _read(directory: Path) -> dict[str, Any]:
    try:
        summary, _ = load_summary(directory)
    except FileNotFoundError as error:
        raise ServiceNotFound(f"no {SUMMARY_FILE} in {directory}") from error
    except ValueError as error:
        raise ServiceError(f"{directory / SUMMARY_FILE} {error}") from error
    return summary


def _of_record(summary: Mapping[str, Any], directory: Path) -> list[Report]:
    """What a job did that has ended: one line, its loaders, and what changed."""
    name = summary.get("job_name")
    head = f"{directory.name}{f' ({name})' if name else ''} has ended: {summary_line(summary)}{servers_words(summary)}"
    loaders = sorted(summary.get("loaders", []), key=lambda loader: (loader["pid"], loader["ordinal"]))
    has_cache = any(loader.get("cache_hits") or loader.get("cache_misses") for loader in loaders)
    columns = [column for column in _LOADER_COLUMNS if has_cache or column.key != "cached"]
    tables = [Section("loaders", columns, [*map(_loader_row, loaders)])] if loaders else []
    if servers := summary.get("embedding_servers"):
        tables.append(Section("embedding_servers", _ENDED_SERVER_COLUMNS, [*map(_ended_server_row, servers)]))
    lines: list[str] = []
    elastic = summary.get("elastic") or {}
    for name, whose in (
        ("elastic", "data workers"),
        ("elastic_gpu", "data workers with a GPU"),
        ("elastic_embedding", "embedding servers"),
    ):
        lines += _changes((summary.get(name) or {}).get("decisions", []), whose)
    if elastic.get("step_terms"):
        terms = [StepTerm(**{name: row[name] for name in StepTerm.__struct_fields__}) for row in elastic["step_terms"]]
        lines += ["", "parts of a step:", *(f"  {term}" for term in terms)]
    if elastic.get("trainer_memory"):
        lines += ["", str(elastic["trainer_memory"])]
    ended = ended_of(summary, directory.name, "", 0.0)
    if ended and ended.advice:
        lines += ["", f"{ended.advice}: next time --trainer-cpus={ended.needed_cpus}"]
    lines = [*lines, "", f"more: hetstream job --events {directory}; with --logs its logs"]
    return [Report({}, {}, [head], tables), Report({}, {}, lines[1:], ())]


def _changes(decisions: Sequence[Mapping[str, Any]], whose: str) -> list[str]:
    """What the controller of one stage did; empty if it did nothing."""
    if not decisions:
        return []
    shown = [
        f"  at {time.strftime('%H:%M:%S', time.localtime(row['time']))}: "
        f"{row['action']} {row['count']}, because {row['reason']}"
        for row in decisions[-_DECISIONS_SHOWN:]
    ]
    return ["", f"changes of the number of {whose} ({len(decisions)}, the last {_DECISIONS_SHOWN}):", *shown]


def _loader_row(loader: Mapping[str, Any]) -> Row:
    waited = min(1.0, loader["wait_s"] / loader["elapsed_s"]) if loader["elapsed_s"] > 0 else 0.0
    return {
        "loader": str(loader.get("title") or loader["job_name"]), "rank": loader["rank"], "host": loader["host"],
        "epochs": f"{loader['epochs']:,}", "steps": f"{loader['steps']:,}", "samples": f"{loader['samples']:,}",
        "bytes": size_words(loader["bytes"]), "waited": f"{waited:.0%}", "local": f"{loader['local_steps']:,}",
        "left_out": f"{loader['skipped']:,}", "cached": _cached(loader),
    }  # fmt: skip


def _ended_server_row(server: Mapping[str, Any]) -> Row:
    limit = server.get("limit_bytes")
    row: Row = {name: int(server[name]) for name in ("rows", "bytes", "reads", "limit_bytes")}
    return {"server": str(server["name"]), **row, "share": server["bytes"] / limit if limit else None}


def _cached(loader: Mapping[str, Any]) -> str:
    """Which share of the fronts of its samples a prefix cache had."""
    hits, misses = loader.get("cache_hits", 0), loader.get("cache_misses", 0)
    return f"{hits / (hits + misses):.0%}" if hits or misses else "-"


# `hetstream job --clean`: remove what old jobs have left in their places, or without `--remove` say what would go.

_UNITS_S = {"h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}


def run_clean(args: argparse.Namespace) -> int:
    """Say what is old, and remove it if that was asked for."""
    from hetstream.hetjob.job.embedding_servers import logs_left

    limit_s = _seconds(args.older_than)
    directories = [*map(Path, args.words)]
    if missing := [path for path in (*directories, *args.checkpoints) if not path.is_dir()]:
        raise UsageError(f"{missing[0]} is no directory")
    # All of it holds jobs of this user; a directory of another name may hold a `job-7` that is none of ours.
    pattern = args.jobs_dir or (None if directories else setting(JOBS_DIR, os.environ))
    if pattern and not is_directory_pattern(pattern):
        raise UsageError(f"--jobs-dir {pattern!r}: must be {RULE}")
    named = [path / IN_SUBMIT_DIR for path in directories]
    found = [*named, *([for_user(pattern)] if pattern else [])] if named else places([Path.cwd()], pattern)
    # `--embedding-dir` may have named another place: a user names it here.
    tables = [place for path in directories or [Path.cwd()] for place in (path / EMBEDDING_DIR, path)]
    # Without a job's directory, as where only `hetstream run` was used, there need be no Slurm.
    has_jobs = any(path for place in (*found, *tables) for path in place.glob("job-*"))
    living = CommandSlurm().living_jobs() if has_jobs else {}
    now = time.time()
    rows: list[dict[str, object]] = []
    failed = False
    for left in (
        *(job for place in found for job in jobs_left(place, living)),
        *(logs for place in tables for logs in logs_left(place, living, args.checkpoints)),
    ):
        reason = left.why_kept or ("" if now - left.newest_s >= limit_s else f"younger than {args.older_than}")
        done = "kept" if reason else "removed" if args.remove else "would be removed"
        if args.remove and not reason:
            try:
                remove(left)
            except OSError as error:
                done, reason, failed = "kept", str(error), True
        rows.append({"directory": str(left.path), "age_s": round(now - left.newest_s), "bytes": left.num_bytes})
        rows[-1] |= {"done": done, "reason": reason}
        if not args.json:
            print(printable(_line(left, now, done, reason)))
    if args.json:
        print(json.dumps({"meta": {"version": 1}, "directories": rows}, indent=1))
    else:
        _say_total(rows, args.remove)
    return 1 if failed else 0


def _line(left: JobLeft, now: float, done: str, reason: str) -> str:
    age = duration_words(now - left.newest_s)
    return f"{left.path}  {size_words(left.num_bytes)}, {age} old: {done}{f' ({reason})' if reason else ''}"


def _say_total(rows: list[dict[str, object]], removing: bool) -> None:
    chosen = [row for row in rows if row["done"] != "kept"]
    size = size_words(sum(float(str(row["bytes"])) for row in chosen))
    verb = "removed" if removing else "would be removed; do it with --remove"
    print(f"hetstream: {len(chosen)} of {len(rows)} directories, {size}: {verb}", file=sys.stderr)


def _seconds(age: str) -> float:
    match = re.fullmatch(r"(\d+)([hdw])", age, re.ASCII)
    if not match:
        raise UsageError(f"--older-than {age!r}: write a number and h, d or w, such as 30d")
    return int(match[1]) * _UNITS_S[match[2]]
