"""What jobs were given and what they used, from Slurm's accounting or from what slurmctld still remembers. Reads only.

`hetstream util` and `hetstream advise` ask for the jobs of a window of time. With slurmdbd sacct knows all jobs, and
how much CPU time they used where that is gathered. Without, slurmctld knows the jobs that run, and those that ended up
to `MinJobAge` seconds ago.

`hetstream job` asks for one job of any kind. When it has ended, sacct knows it; while it runs, the daemons on its nodes
do (sstat). Both know what `JobAcctGatherType` gathers. Without it there is only what the job was given.
"""

from __future__ import annotations

import base64
import binascii
import re
import time
import zlib
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from hetstream.base import typed_json
from hetstream.hetjob.convert.sbatch_options import time_limit_s
from hetstream.hetjob.errors import SlurmCommandError
from hetstream.hetjob.job.find_service import JobPlace
from hetstream.hetjob.job.job import jobs_dir_in
from hetstream.slurm_plugin.client.model import Gres, Job, Snapshot, gpu_share, total
from hetstream.slurm_plugin.client.parse_text import FIELD_END, job_format, new_separators, parse_rows
from hetstream.slurm_plugin.client.read import gpus_by_type, plain_environ, untyped_share
from hetstream.slurm_plugin.client.run import EXIT_TIMED_OUT, run_slurm
from hetstream.slurm_plugin.client.slurm_units import (
    expand,
    local_time,
    megabytes,
    moment,
    parse_gres,
    text_or_empty,
    tres,
)
from hetstream.slurm_plugin.errors import UnreadableAnswer

# What jobstats has written into a job's AdminComment: how busy its GPUs were, and its CPU time. Pure; reads only.
#
# jobstats (Princeton's) puts `JS1:` and a compressed JSON document there when a job ends; operators alone can write it.

_MARK = "JS1:"
# A job of a thousand nodes has less; what unpacks to more is none of it.
_MAX_BYTES = 4 << 20


class _Node(msgspec.Struct):
    total_time: float = 0.0
    gpu_utilization: dict[str, float] = msgspec.field(default_factory=dict)


class _Document(msgspec.Struct):
    nodes: dict[str, _Node]


@dataclass(frozen=True)
class JobMeasurements:
    """What was measured.

    Attributes:
        gpu_share: how busy the job's GPUs were on average, 0 to 1; None if it had none.
        cpu_used_s: CPU time of its processes.
    """

    gpu_share: float | None
    cpu_used_s: float


def told_by_jobstats(comment: str) -> JobMeasurements | None:
    """Read an AdminComment; None for what is not jobstats', or was too short to measure (`JS1:Short`, `JS1:None`)."""
    if not comment.startswith(_MARK):
        return None
    try:
        unpack = zlib.decompressobj(wbits=31)  # gzip
        text = unpack.decompress(base64.b64decode(comment.removeprefix(_MARK), validate=True), _MAX_BYTES)
        if not unpack.eof:
            return None
        nodes = typed_json.decode(text, _Document).nodes.values()
    except (binascii.Error, ValueError, zlib.error, msgspec.DecodeError):
        return None
    busy = [percent for node in nodes for percent in node.gpu_utilization.values()]
    share = min(1.0, max(0.0, sum(busy) / len(busy) / 100)) if busy else None
    return JobMeasurements(share, sum(node.total_time for node in nodes))


SACCT_FIELDS = (
    "JobIDRaw", "DBIndex", "User", "Account", "Partition", "State", "Submit", "Start", "End", "ElapsedRaw", "Suspended",
    "AllocCPUS", "AllocTRES", "TotalCPU", "TRESUsageInAve", "TimelimitRaw", "NodeList", "AdminComment", "JobName",
)  # fmt: skip
# Jobs that ran, whatever became of them. Without states sacct leaves out running ones that were held for a moment (seen
# on 26.05); with states it needs an end, or asks of one moment alone (slurmdb_job_cond_def_start_end).
SACCT_STATES = "R,CD,F,CA,TO,NF,OOM,PR,DL,S,RQ"
# A month of a large site's jobs in one answer is more than slurmdbd gives: each question is for a day at the most, and
# all of them together have a deadline.
_DAY_S, _ONE_S, _ALL_S = 86400.0, 120.0, 600.0
Row = Mapping[str, str]
# More digits are no time, and more than a float can hold.
_CPU_TIME = re.compile(r"(?:(\d{1,12})-)?(?:(\d{1,12}):)?(\d{1,12}):(\d{1,12}(?:\.\d+)?)")


@dataclass(frozen=True, slots=True)
class Usage:
    """What one run of a job held, and used of it as far as that is known.

    From its start to its end a job holds its GPUs and its memory, also while it is suspended; its CPUs it holds while
    it runs. So Slurm schedules (see `counted.py`), and so slurmdbd counts for sreport: it takes the time in which jobs
    were suspended from their CPUs alone (_add_tres_time_2_list in as_mysql_rollup.c, 22.05 to 26.05). A job whose size
    was changed has a run of each size.

    Attributes:
        gpus: whole ones; a part by MIG counts as that part.
        end_s: None while it runs.
        elapsed_s: how long it has run, without the time in which it was suspended; None where nobody says so.
        suspended_s: how long it has been suspended.
        is_suspended: it is so now.
        is_resized: it began with another size, and nothing says with which.
        cpu_used_s: CPU time of its processes; None where nobody gathered it.
        gpu_share: how busy its GPUs were, 0 to 1; None where nobody gathered it.
        gpus_known: False where it may have held more, and nothing says how many.
        wait_share: share of their time that its trainers wait for data, told by hetstream itself; None for other jobs.
        cpu_share: which share of its CPUs counts as its own; see `Job`.
        nodes: where it ran; empty where that is not known.
        untyped_gpus: of `gpus` those of which nothing says the type: whole ones, until `with_mig` has looked.
        gpu_types_known: False where some count as the average of what their nodes have.
    """

    job: str
    name: str
    user: str
    account: str
    partition: str
    cpus: int
    gpus: float
    start_s: float
    end_s: float | None
    cpu_used_s: float | None = None
    gpu_share: float | None = None
    wait_share: float | None = None
    gpus_known: bool = True
    elapsed_s: float | None = None
    suspended_s: float = 0.0
    is_suspended: bool = False
    is_resized: bool = False
    nodes: tuple[str, ...] = ()
    untyped_gpus: int = 0
    gpu_types_known: bool = True
    cpu_share: float = 1.0

    @property
    def ran_s(self) -> float | None:
        """How long it ran, or has run; None of one that runs where nobody says so."""
        if self.elapsed_s is not None:
            return self.elapsed_s
        return None if self.end_s is None else self.end_s - self.start_s


def has_accounting(snapshot: Snapshot) -> bool:
    """Return whether sacct has something to say."""
    return snapshot.config.get("AccountingStorageType", "").endswith("slurmdbd")


def from_sacct(
    environ: Mapping[str, str],
    cluster: str,
    start_s: float,
    end_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[Usage, ...]:
    """Return the jobs of all users of a cluster that ran within a window, asked for day by day.

    The cluster is named because sacct, unlike Slurm's other commands, does not act on SLURM_CLUSTERS: it would tell of
    the cluster of its slurm.conf.

    Raises:
        SlurmCommandError: sacct failed, or took too long.
        UnreadableAnswer: it printed another form.
    """
    plain = plain_environ(environ)
    rows: list[Row] = []
    deadline_s = clock() + _ALL_S
    begin_s = start_s
    while begin_s < end_s:
        until_s = min(begin_s + _DAY_S, end_s)
        delimiter = new_separators()[0]
        argv = [
            "sacct", "--allusers", "--duplicates", "--noheader", "--parsable2", f"--delimiter={delimiter}",
            f"--format={','.join(SACCT_FIELDS)}", f"--starttime={local_time(begin_s)}",
            f"--endtime={local_time(until_s)}", f"--state={SACCT_STATES}",
            *([f"--clusters={cluster}"] if cluster else []),
        ]  # fmt: skip
        left_s = deadline_s - clock()
        hint = "Check whether slurmdbd answers: sacctmgr show cluster. Of a long window ask for less: --start=now-1day"
        if left_s <= 0:
            what = f"the days before {local_time(begin_s)} took {_ALL_S:g} s"
            raise SlurmCommandError(argv, EXIT_TIMED_OUT, "", what, hint)
        done = run_slurm(argv, env=plain, hint=hint, timeout_s=min(_ONE_S, left_s))
        rows += sacct_rows(done.stdout, delimiter)
        begin_s = until_s
    return usages_of(rows)


def sacct_rows(text: str, delimiter: str = FIELD_END, fields: Sequence[str] = SACCT_FIELDS) -> list[Row]:
    """Return the lines of sacct, of jobs and of their steps. The name stands last, and may have line ends.

    Raises:
        UnreadableAnswer: a line has another number of fields.
    """
    lines: list[str] = []
    for line in text.split("\n"):
        # What has no delimiter goes on with the name before; who wrote it there cannot know the delimiter.
        if lines and delimiter not in line:
            lines[-1] += f"\n{line}"
        elif line:
            lines.append(line)
    rows: list[Row] = []
    for line in lines:
        values = line.removesuffix("\n").split(delimiter)
        if len(values) != len(fields):
            raise UnreadableAnswer(f"sacct printed {len(values)} fields and not {len(fields)}", line)
        rows.append(dict(zip(fields, values, strict=True)))
    return rows


def usages_of(rows: Iterable[Row]) -> tuple[Usage, ...]:
    """Return the runs of jobs among the lines of sacct; how busy their GPUs were is in the lines of their steps.

    A job that was requeued, or whose size was changed, has several runs under one number; a run that goes over midnight
    is in the answers for two days.

    Args:
        rows: steps behind the line of their job, as sacct prints them.

    Raises:
        UnreadableAnswer: a value has another form.
    """
    runs: dict[Hashable, Row] = {}
    steps: dict[Hashable, dict[str, Row]] = {}
    last: dict[str, Hashable] = {}  # run that the lines are about, by job
    for row in rows:
        job, _, step = row["JobIDRaw"].partition(".")
        if step:
            steps.setdefault(last.get(job, job), {})[step] = row
        else:
            # 22.05 gives the runs of two sizes one start.
            run: Hashable = (job, row["DBIndex"], row["Submit"], row["Start"])
            last[job] = run
            runs[run] = row
    found = []
    for run, row in runs.items():
        try:
            start_s = moment(row["Start"])
            if start_s is not None:
                found.append(_usage(row, [*steps.get(run, {}).values()], start_s))
        except ValueError as exc:
            raise UnreadableAnswer(str(exc), repr(row)) from exc
    return tuple(found)


def _usage(row: Row, steps: Sequence[Row], said_start_s: float) -> Usage:
    # A job of another size counts as submitted when it got that size, and 22.05 has its first start beside that.
    start_s = max(said_start_s, moment(row["Submit"]) or 0.0)
    elapsed_s = float(row["ElapsedRaw"]) if row["ElapsedRaw"] else None
    suspended_s = cpu_seconds(row["Suspended"])
    reported = told_by_jobstats(row["AdminComment"])
    untyped, parts = _gpus(row["AllocTRES"])
    gpus = untyped + parts
    end_s = moment(row["End"])
    # Of a job that runs, the accounting has those of its steps that have ended, and of a long one nothing.
    counted = (cpu_seconds(row["TotalCPU"]), _gpu_share(row, steps, gpus)) if end_s is not None else (0.0, None)
    used_s = counted[0] or (reported.cpu_used_s if reported else 0.0)
    return Usage(
        job=row["JobIDRaw"],
        name=row["JobName"],
        user=row["User"],
        account=text_or_empty(row["Account"]),
        partition=row["Partition"].split(",")[0],
        cpus=int(row["AllocCPUS"] or 0),
        gpus=gpus,
        start_s=start_s,
        end_s=end_s,
        elapsed_s=None if elapsed_s is None else max(0.0, elapsed_s - (start_s - said_start_s)),
        suspended_s=suspended_s if end_s is None else min(suspended_s, max(0.0, end_s - start_s)),
        is_suspended=row["State"] == "SUSPENDED",
        # Zero means that nobody gathered it: no program uses no CPU at all.
        cpu_used_s=used_s or None,
        gpu_share=reported.gpu_share if reported and reported.gpu_share is not None else counted[1],
        nodes=expand(row["NodeList"]) if untyped else (),
        untyped_gpus=untyped,
    )


def _gpu_share(job: Row, steps: Sequence[Row], gpus: float) -> float | None:
    """How busy a job's GPUs were: what its steps used, of what it held in all its time, also while it was suspended.

    A step that does nothing beside another one takes nothing away from that: each counts with its own GPUs and time.
    A task that uses several GPUs adds them up, to more than 100 %.
    """
    elapsed_s = float(job["ElapsedRaw"] or 0)
    held_s = elapsed_s + cpu_seconds(job["Suspended"])
    if gpus <= 0 or elapsed_s <= 0:
        return None
    used, is_known = 0.0, False
    for step in steps:
        said = tres(step["TRESUsageInAve"]).get("gres/gpuutil")
        if said:
            is_known = True
            own = min(gpus, sum(_gpus(step["AllocTRES"])) or gpus)
            busy = float(said) / 100
            share = min(1.0, max(0.0, busy / own if busy > 1 else busy))
            used += share * own * min(elapsed_s, float(step["ElapsedRaw"] or elapsed_s))
    return min(1.0, used / (gpus * held_s)) if is_known else None


def _gpus(allocated: str) -> tuple[int, float]:
    """GPUs of no type, and those of one, of which a part by MIG counts as that part.

    `gres/gpu=2,gres/gpu:h200=2` are two GPUs: the types add up to the whole.
    """
    found = parse_gres(allocated)
    typed = [gres for gres in found if gres.name == "gpu" and gres.type]
    untyped = total((gres for gres in found if not gres.type), "gpu") - sum(gres.count for gres in typed)
    return max(0, untyped), sum(gpu_share(gres.type) * gres.count for gres in typed)


def with_mig(
    usages: Sequence[Usage], snapshot: Snapshot, ask: Callable[[], Mapping[int, tuple[Gres, ...] | None]]
) -> tuple[Usage, ...]:
    """Return the jobs of sacct, where its TRES name no type and MIG divides GPUs of their nodes: with what these were.

    A running job is as the queue has it. Of others slurmctld is asked, as long as it remembers them. Of those before,
    instances of one size leave no doubt; of several sizes each counts as the average of what the nodes have now.

    Args:
        usages: all.
        snapshot: the nodes, and the running jobs.
        ask: what jobs held, by their numbers; called if there is need.
    """
    divided = {node.name for node in snapshot.nodes if node.mig}
    in_doubt = [usage for usage in usages if usage.untyped_gpus and not divided.isdisjoint(usage.nodes)]
    if not in_doubt:
        return tuple(usages)
    running = {str(job.job_id): job for job in snapshot.jobs if job.holds_resources}
    of_nodes = {node.name: gpus_by_type(node.gres) for node in snapshot.nodes}
    held: Mapping[int, tuple[Gres, ...] | None] | None = None
    found = {}
    for usage in in_doubt:
        job = running.get(usage.job) if usage.end_s is None else None
        share, is_known = untyped_share([of_nodes], usage.nodes, usage.gpus)
        if job and job.count("gpu") == usage.gpus:
            share, is_known = job.gpus / usage.gpus, job.gpu_types_known
        if not is_known:
            held = ask() if held is None else held
            types = gpus_by_type(held.get(int(usage.job)) or () if usage.job.isdecimal() else ())
            if "" not in types and sum(types.values()) == usage.gpus:
                share, is_known = untyped_share([{"": types}], [""], usage.gpus)[0], True
        typed = usage.gpus - usage.untyped_gpus
        gpus = typed + share * usage.untyped_gpus
        found[usage.job, usage.start_s] = replace(usage, gpus=gpus, gpu_types_known=is_known)
    return tuple(found.get((usage.job, usage.start_s), usage) for usage in usages)


def cpu_seconds(text: str) -> float:
    """Return seconds of `1-02:03:04`, `02:03:04` or `03:04.567`."""
    if not text_or_empty(text):
        return 0.0
    match = _CPU_TIME.fullmatch(text)
    if not match:
        raise ValueError(f"CPU time {text!r}: must be [[DAYS-]HOURS:]MINUTES:SECONDS")
    days, hours, minutes, seconds = match.groups()
    return ((int(days or 0) * 24 + int(hours or 0)) * 60 + int(minutes)) * 60 + float(seconds)


@dataclass(frozen=True, slots=True)
class Times:
    """What squeue says of the time of a job.

    Attributes:
        ran_s: how long it has run, without the time in which it was suspended; None where squeue does not say.
        is_resized: it has another size than it began with.
    """

    ran_s: float | None = None
    is_resized: bool = False


def times_of_queue(environ: Mapping[str, str]) -> dict[int, Times]:
    """Return the times of all jobs that slurmctld knows, ended ones that it remembers too, by their numbers.

    squeue takes away the time in which a job was suspended (job_time_used in src/squeue/print.c, 22.05 to 26.05).

    Raises:
        SlurmCommandError: squeue failed.
        UnreadableAnswer: it printed another form.
    """
    fields, ends = ("JobID", "TimeUsed", "ResizeTime"), new_separators()
    argv = ["squeue", "--all", "--states=all", "--noheader", "-O", job_format(fields, *ends)]
    done = run_slurm(argv, env=plain_environ(environ), hint="Check: scontrol ping")
    return {
        int(row["JobID"]): Times(time_limit_s(row["TimeUsed"]), bool(text_or_empty(row["ResizeTime"])))
        for row in parse_rows(done.stdout, fields, *ends)
    }


def from_queue(
    jobs: Sequence[Job], gpus_unknown: Collection[int] = (), times: Mapping[int, Times] | None = None, now_s: float = 0
) -> tuple[Usage, ...]:
    """Return the jobs that squeue still shows, with those that have ended: what they held, and nothing of what they
    used.

    Args:
        jobs: those.
        gpus_unknown: numbers of those that may have held more GPUs than they asked for.
        times: of them, by their numbers; one of which nothing is said has run from its start on.
        now_s: when squeue was asked for the times, or a little earlier.
    """
    return tuple(
        _in_queue(job, job.job_id not in gpus_unknown, (times or {}).get(job.job_id, Times()), now_s)
        for job in jobs
        if job.start_s is not None and not job.is_pending
    )


def _in_queue(job: Job, gpus_known: bool, times: Times, now_s: float) -> Usage:
    end_s, start_s = None if job.holds_resources else job.end_s, job.start_s or 0.0
    between_s = (now_s if end_s is None else end_s) - start_s
    return Usage(
        job=job.label,
        name=job.name,
        user=job.user,
        account=job.account,
        partition=job.partitions[0],
        cpus=job.num_cpus,
        gpus=job.gpus,
        start_s=start_s,
        end_s=end_s,
        elapsed_s=times.ran_s,
        suspended_s=0.0 if times.ran_s is None else max(0.0, between_s - times.ran_s),
        is_suspended=job.state == "SUSPENDED",
        is_resized=times.is_resized,
        gpus_known=gpus_known,
        gpu_types_known=job.gpu_types_known,
        cpu_share=job.cpu_share,
    )


# Where Slurm says that a job works, from any number that names a part of it: squeue while it remembers, then sacct.

# Ids, states and users hold no blank, so what follows the fourth one is the directory, whatever is in it.
_SQUEUE = ("squeue", "--noheader", "--states=all", "--format=%i %A %T %u %Z")
_COMPANION = re.compile(r"(?:^|\s)hets:trainer=(\d+)(?:\s|$)")


def job_place(job: str, environ: Mapping[str, str]) -> JobPlace:
    """Return where a job is, which `N`, `N+COMPONENT`, `N_TASK` or the number of a companion names.

    Raises:
        SlurmCommandError: Slurm does not know it, or does not answer.
    """
    try:
        shown = run_slurm([*_SQUEUE, f"--jobs={job}"], env=environ, hint="Check: squeue --me").stdout
        found = parse_place(shown)
        if found is None:
            argv = [*_SQUEUE, f"--jobs={job}"]
            raise SlurmCommandError(argv, 0, shown, "Invalid job id specified", "Check: squeue --me")
    except SlurmCommandError as error:
        found = _from_accounting(job, environ)
        if found is None:
            raise error
        return found
    comment = run_slurm(["squeue", "--noheader", "--states=all", "--format=%k", f"--jobs={job}"], env=environ)
    trainer = _COMPANION.search(comment.stdout)
    found = replace(found, job_id=trainer[1]) if trainer else found
    return replace(found, jobs_dir=_named_in_script(found.job_id, environ))


def _named_in_script(job_id: str, environ: Mapping[str, str]) -> str:
    """The place of the job's directory that its script names; slurmctld shows scripts to their owners and operators."""
    try:
        return jobs_dir_in(run_slurm(["scontrol", "write", "batch_script", job_id, "-"], env=environ).stdout)
    except SlurmCommandError:
        return ""


def parse_place(text: str) -> JobPlace | None:
    """Return the place in lines of id, own number, state, user and directory; of several components the first one's."""
    found: dict[str, JobPlace] = {}
    for line in text.splitlines():
        job_id, own, state, user, directory = [*line.strip().split(" ", 4), "", "", "", ""][:5]
        component = re.fullmatch(r"(\d+)\+\d+", job_id)
        if own.isdigit() and directory.startswith("/"):
            found.setdefault(job_id, JobPlace(component[1] if component else own, Path(directory), state, user))
    return next((found[job_id] for job_id in sorted(found, key=lambda job_id: (len(job_id), job_id))), None)


def _from_accounting(job: str, environ: Mapping[str, str]) -> JobPlace | None:
    """The same from sacct, which remembers jobs for longer; None without accounting, or if it does not know the job."""
    argv = ["sacct", "--noheader", "--parsable2", "--delimiter= ", "--allocations", f"--jobs={job}"]
    if environ.get("SLURM_CLUSTERS"):
        argv.append(f"--clusters={environ['SLURM_CLUSTERS']}")  # sacct does not read it, squeue does
    try:
        shown = run_slurm([*argv, "--format=JobID,JobIDRaw,State%20,User,WorkDir"], env=environ).stdout
    except SlurmCommandError:
        return None
    # Of a cancelled job sacct says by whom: `CANCELLED by 1000`.
    return parse_place(re.sub(r"^(\S+ \S+ CANCELLED) by \d+ ", r"\1 ", shown, flags=re.MULTILINE))


# The name stands last, and may have any characters.
_FIELDS = (*SACCT_FIELDS[:-1], "JobID", "TRESUsageInTot", "ExitCode", SACCT_FIELDS[-1])
_STEP_FIELDS = ("JobID", "TRESUsageInTot")


@dataclass(frozen=True, slots=True)
class JobUse:
    """One run of a job, of a component or of an array task.

    Attributes:
        label: as users write it: `12`, `12+1`, `12_3`.
        number: the record's own.
        state: in Slurm's spelling.
        usage: what it held, and its CPU time and its GPUs' as far as these are known.
        num_nodes: that it has.
        memory_mb: that it was given, on all nodes; None where nothing says so.
        memory_used_mb: the most that a step of it had, on all nodes; None where nobody gathered it.
        limit_s: its time limit; None if it has none.
        exit_code: as sacct says it, `1:0`; empty where nothing says so.
    """

    label: str
    number: str
    state: str
    usage: Usage
    num_nodes: int = 0
    memory_mb: int | None = None
    memory_used_mb: int | None = None
    limit_s: float | None = None
    exit_code: str = ""

    @property
    def cpu_share(self) -> float | None:
        """CPU time that it used, of what its CPUs had; None where it is not known."""
        held_s = self.usage.cpus * (self.usage.ran_s or 0.0)
        return None if self.usage.cpu_used_s is None or not held_s else self.usage.cpu_used_s / held_s

    @property
    def memory_share(self) -> float | None:
        """The most memory that it had, of what it was given; None where it is not known."""
        return None if self.memory_used_mb is None or not self.memory_mb else self.memory_used_mb / self.memory_mb


def recorded(jobs: Sequence[str], environ: Mapping[str, str], cluster: str) -> tuple[JobUse, ...]:
    """Return what sacct knows of jobs; those that it does not know are left out.

    Args:
        jobs: arguments that choose them, such as `--jobs=12`.
        environ: to run sacct in.
        cluster: the cluster's name; empty for that of its slurm.conf.

    Raises:
        SlurmCommandError: sacct failed.
        UnreadableAnswer: it printed another form.
    """
    delimiter = new_separators()[0]
    argv = [
        "sacct", *jobs, "--noheader", "--parsable2", f"--delimiter={delimiter}", f"--format={','.join(_FIELDS)}",
        *([f"--clusters={cluster}"] if cluster else []),
    ]  # fmt: skip
    done = run_slurm(
        argv, env=plain_environ(environ), hint="Check whether slurmdbd answers: sacctmgr show cluster", timeout_s=_ONE_S
    )
    return uses_of(sacct_rows(done.stdout, delimiter, _FIELDS))


def uses_of(rows: Iterable[Row]) -> tuple[JobUse, ...]:
    """Return the jobs in the lines of sacct, with the most that one of their steps used.

    Raises:
        UnreadableAnswer: a value has another form.
    """
    rows = list(rows)
    steps: dict[str, list[Row]] = {}
    jobs: dict[str, Row] = {}
    for row in rows:
        number, _, step = row["JobIDRaw"].partition(".")
        if step:
            steps.setdefault(number, []).append(row)
        else:
            jobs[number] = row
    found = []
    for usage in usages_of(rows):
        row = jobs[usage.job]
        allocated = tres(row["AllocTRES"])
        try:
            used = [memory for step in steps.get(usage.job, []) if (memory := _memory_mb(step)) is not None]
            found.append(
                JobUse(
                    label=row["JobID"],
                    number=usage.job,
                    state=row["State"].partition(" ")[0],
                    usage=usage,
                    num_nodes=int(allocated.get("node", 0)),
                    memory_mb=megabytes(allocated["mem"]) if allocated.get("mem") else None,
                    memory_used_mb=max(used, default=None),
                    limit_s=60 * float(row["TimelimitRaw"]) if row["TimelimitRaw"].isdecimal() else None,
                    exit_code=row["ExitCode"],
                )
            )
        except ValueError as error:
            raise UnreadableAnswer(str(error), repr(row)) from error
    return tuple(found)


def _memory_mb(step: Row) -> int | None:
    """What all tasks of a step had at most; None where nobody gathered it."""
    text = tres(step["TRESUsageInTot"]).get("mem")
    # 0 is no measurement: a step that is over before the first look.
    return megabytes(text) or None if text else None


def of_queue(job: Job, usage: Usage) -> JobUse:
    """Return a job that squeue shows: what it was given.

    Args:
        job: its record.
        usage: what it holds.
    """
    return JobUse(
        label=job.label,
        number=str(job.job_id),
        state=job.state,
        usage=usage,
        num_nodes=len(job.nodes) or job.num_nodes,
        memory_mb=job.memory_mb or None,
        limit_s=job.time_limit_s,
    )


def with_steps(uses: Sequence[JobUse], environ: Mapping[str, str]) -> tuple[tuple[JobUse, ...], str]:
    """Return jobs that run, with what their steps have used until now, and why that is not known; empty if it is.

    sstat asks the nodes, which answer to the job's user, and to operators.
    """
    # It takes no delimiter of ours (22.05 to 26.05); none of these fields has a user's text.
    delimiter, found = "|", dict[str, list[Row]]()
    argv = ["sstat", "--allsteps", "--noheader", "--parsable2"]
    argv += [f"--format={','.join(_STEP_FIELDS)}", f"--jobs={','.join(use.number for use in uses)}"]
    try:
        for row in sacct_rows(run_slurm(argv, env=plain_environ(environ)).stdout, delimiter, _STEP_FIELDS):
            found.setdefault(re.sub(r"[.].*", "", row["JobID"]), []).append(row)
        return tuple(_with_own_steps(use, found) for use in uses), ""
    except SlurmCommandError as error:
        return tuple(uses), f"sstat: {error.reason}"
    except (UnreadableAnswer, ValueError) as error:
        return tuple(uses), f"sstat: {error}"


def _with_own_steps(use: JobUse, steps: Mapping[str, Sequence[Row]]) -> JobUse:
    own = steps.get(use.number) or steps.get(use.label) or ()
    used_s = sum(cpu_seconds(tres(step["TRESUsageInTot"]).get("cpu", "")) for step in own)
    used_mb = max((memory for step in own if (memory := _memory_mb(step)) is not None), default=None)
    return replace(use, usage=replace(use.usage, cpu_used_s=used_s or None), memory_used_mb=used_mb)
