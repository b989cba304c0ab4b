"""Conversion against sbatch itself: each script is submitted held, plain and converted, and the jobs are compared.

    python tests/peers/sbatch_gate.py [--slurm RELEASE] [DIR ...]

The oracle is Slurm: what sbatch accepts converted must be accepted too, or refused for a documented limit; what it
refuses must be refused; and what slurmctld then knows of component 0 is what it knows of the plain job, field by field
(`scontrol show job`, and the job description that it logs, which has what scontrol does not show). Component 1 is
compared with a job of data workers that is submitted alone, so nothing of the trainer can be in it. What may differ is
in `ALLOWED`, with the reason. Without DIR it takes the folder that `sbatch_corpus.py` collects. Exit code 1 on any
difference. It needs root and boots a cluster of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from hetstream.hetjob.convert.sbatch_options import megabytes
from hetstream.slurm_plugin.client.slurm_units import expand
from tests.devcluster.boot import BootRequest, boot
from tests.devcluster.render import version_tuple
from tests.devcluster.roots import DEFAULT_CACHE_DIR, HOST, choose_programs
from tests.devcluster.spec import DEFAULT_STATE_ROOT
from tests.devcluster.teardown import tear_down
from tests.peers import sbatch_corpus
from tests.peers.sbatch_site import DATA_WORKER_PARTITION, SHAPE, commands_after_boot, named_in, settings_of

HERE = Path(__file__).resolve().parent
# sbatch --wait does not return while its job is held.
_SUBMISSION_LIMIT_S = 60.0
_WORKERS, _WORKER_CPUS, _WORKER_MB = 2, 2, 4096
_OURS = (f"--data-worker-cpus={_WORKER_CPUS}", f"--data-worker-partition={DATA_WORKER_PARTITION}")
# Limits that hetjob/convert/convert.py documents, by words of their errors. A job array has none: it gets companions.
DOCUMENTED = {
    "AlreadyHeterogeneous": "but hetstream adds the data workers as component 1 itself",
    "NotAShellScript": "is not a shell, and the job master is started by shell lines",
    "BurstBufferNotShared": "so data workers could not read it (Slurm limit)",
    "WrappedCommand": "--wrap leaves no script to convert",
    "JobArrayNotSupported": "is not supported with a heterogeneous job (Slurm limit)",
}

Fields = Mapping[str, str]


# ---- what may differ -----------------------------------------------------------------------------


def _number(text: str | None) -> float:
    """The first number of a value (`4`, `4-8`); 0 without one."""
    match = re.match(r"\d+", text or "")
    return float(match[0]) if match else 0.0


def _any(_name: str, _plain: Fields, _converted: Fields) -> bool:
    return True


def _state_of_dependency(name: str, plain: Fields, converted: Fields) -> bool:
    """Slurm looks at `singleton` in its own time; what was asked for is compared in the description."""
    states = {re.sub(r"\((?:un)?fulfilled\)", "", job.get(name, "")) for job in (plain, converted)}
    return states <= {"(null)", "singleton"}


def _near_in_time(name: str, plain: Fields, converted: Fields) -> bool:
    """Both were submitted now, a moment apart."""
    try:
        first, second = (datetime.fromisoformat(job[name]) for job in (plain, converted))
    except (KeyError, ValueError):
        return False
    return abs((first - second).total_seconds()) < 900


def _same_file_name(name: str, plain: Fields, converted: Fields) -> bool:
    """sbatch gets the converted script from a temporary directory."""
    return Path(plain[name]).name == Path(converted[name]).name


def _same_but_place(name: str, plain: Fields, converted: Fields) -> bool:
    """The last word is the script; what a variable of sbatch says may stand before it as an option."""
    (*before, script), (*after, placed) = (job.get(name, "").split() or [""] for job in (plain, converted))
    return {*before} <= {*after} and Path(script).name == Path(placed).name


def _fewer_cpus(name: str, plain: Fields, converted: Fields) -> bool:
    """Data workers do the preprocessing: the trainer may have fewer CPUs, and never more."""
    return 0 < _number(converted.get(name)) < _number(plain.get(name))


def _cpus(job: Fields) -> float:
    """What memory for each CPU is multiplied with; CPUs for each GPU are not in the NumCPUs of a job that waits."""
    return _number(job.get("CpusPerTres", "").rpartition(":")[2]) or _number(job.get("NumCPUs"))


def _memory_kept(name: str, plain: Fields, converted: Fields) -> bool:
    """With fewer CPUs each has more memory, rounded up to whole MB."""
    before, after = ((megabytes(job.get(name, "")) or 0.0) * _cpus(job) for job in (plain, converted))
    return before <= after <= before + _cpus(converted)


def _tres(text: str) -> dict[str, str]:
    return dict(part.split("=", 1) for part in text.split(",") if "=" in part)


def _fewer_cpus_in_tres(name: str, plain: Fields, converted: Fields) -> bool:
    """Only CPUs, what is billed for them, and memory that goes with them."""
    before, after = _tres(plain.get(name, "")), _tres(converted.get(name, ""))
    different = {key for key in before | after if before.get(key) != after.get(key)}
    fewer = _number(after.get("cpu")) < _number(before.get("cpu")) or _cpus(converted) < _cpus(plain)
    return different <= {"cpu", "billing", "mem"} and fewer


def _fewer_cpus_per_tres(name: str, plain: Fields, converted: Fields) -> bool:
    """`cpu:8,gres/gpu:1` or `gres:gpu:8` with another number of CPUs."""
    before, after = (re.split(r"[:=](?=\d+(?:,|$))", job.get(name, "")) for job in (plain, converted))
    shapes = [re.sub(r"(?:^|(?<=,))(cpu[:=]|gres[:/]gpu:)\d+", r"\1N", job.get(name, "")) for job in (plain, converted)]
    return shapes[0] == shapes[1] and before != after and bool(re.search(r"cpu|^gres.gpu:\d+$", plain.get(name, "")))


Allowed = Callable[[str, Fields, Fields], bool]
# Field of component 0: what the difference may be, and why.
ALLOWED: dict[str, tuple[Allowed, str]] = {
    **dict.fromkeys(
        ("JobId", "HetJobId", "HetJobOffset", "HetJobIdSet", "ArrayJobId"), (_any, "it is another job, with components")
    ),
    **dict.fromkeys(
        ("SubmitTime", "EligibleTime", "StartTime", "EndTime", "LastSchedEval", "Deadline", "begin",
         "deadline"),
        (_near_in_time, "submitted a moment later"),
    ),
    "AccrueTime": (_any, "a held heterogeneous job has one where another has none yet"),
    "Dependency": (_state_of_dependency, "Slurm looks at it in its own time"),
    "SubmitLine": (_same_but_place, "sbatch gets the converted script from a temporary directory"),
    "Command": (_same_file_name, "sbatch gets the converted script from a temporary directory"),
    **dict.fromkeys(("NumCPUs", "CPUs/Task", "MinCPUsNode"), (_fewer_cpus, "the trainer keeps fewer CPUs")),
    **dict.fromkeys(("TRES", "ReqTRES"), (_fewer_cpus_in_tres, "the trainer keeps fewer CPUs")),
    **dict.fromkeys(("CpusPerTres", "TresPerTask"), (_fewer_cpus_per_tres, "the trainer keeps fewer CPUs")),
    "MinMemoryCPU": (_memory_kept, "fewer CPUs, the same memory"),
}  # fmt: skip
# What a component has from the job: Slurm gives these of the first to all, or conversion says them anew.
OF_THE_JOB = (
    "JobName", "UserId", "GroupId", "MCS_label", "Priority", "Nice", "Account", "QOS", "WCKey", "JobState", "Reason",
    "Requeue", "TimeLimit", "TimeMin", "Deadline", "AllocNode:Sid", "ExcNodeList", "Reservation", "WorkDir", "StdErr",
    "StdIn", "StdOut", "MailUser", "MailType", "Dependency", "Command", "BatchFlag", "KillOInInvalidDependent",
    "Comment", "DelayBoot", "SubmitLine",
)  # fmt: skip
# Since then the components of one job do not wait for each other.
_SINGLETON_SINCE = (23, 11)
_SIZES = ("NumCPUs", "NumTasks", "CPUs/Task")


# ---- jobs as slurmctld shows them ----------------------------------------------------------------


def parse_jobs(shown: str) -> dict[str, dict[str, str]]:
    """The jobs of `scontrol show job`, by their ids. A heterogeneous one is `ID+OFFSET`, an array is its ARRAY ID."""
    jobs: dict[str, dict[str, str]] = {}
    for record in re.split(r"\n\s*\n", shown):
        fields: dict[str, str] = {}
        for line in record.splitlines():
            words = re.split(r"(?:^|\s+)([A-Z][\w/.:&-]*)=", line.strip())
            for key, value in zip(words[1::2], words[2::2], strict=True):
                fields.setdefault(key, value.strip())
        if "JobId" in fields:
            het = f"{fields['HetJobId']}+{fields['HetJobOffset']}" if "HetJobId" in fields else ""
            jobs[het or fields.get("ArrayJobId") or fields["JobId"]] = _without_own_id(fields)
    return jobs


def _without_own_id(fields: dict[str, str]) -> dict[str, str]:
    """Paths with `%j` have the job's number in them."""
    ids = [re.escape(fields[key]) for key in ("HetJobId", "ArrayJobId", "JobId") if key in fields]
    own = re.compile(rf"(?<!\d)(?:{'|'.join(ids)})(?!\d)")
    return {key: own.sub("ID", value) if key.startswith("Std") else value for key, value in fields.items()}


# Of the description that sbatch sent, as slurmctld logs it: what `scontrol show job` does not show.
_LOGGED = re.compile(
    r"\b(dependency|signal|open_mode|acctg_freq|wait_all_nodes|cpu_freq|kill_on_node_fail|mail_type|mail_user|mem_bind"
    r"|plane_size|bitflags|overcommit|requeue|array_inx|burst_buffer|network|begin|deadline|immediate|container)[=:](\S*)"
)


def parse_descriptions(log: str) -> list[dict[str, str]]:
    """The job descriptions that slurmctld logs at debug3, one of each component."""
    described: list[dict[str, str]] = []
    for line in log.splitlines():
        if "JobDesc: " in line:
            described.append({})
        elif described and "debug3:    " in line:
            described[-1].update(_LOGGED.findall(line.partition("debug3:    ")[2]))
    return described


# ---- submission ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A script, what is set in the environment in which it is submitted, and options on the command line."""

    path: Path
    environ: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class Submission:
    """What became of one submission.

    Attributes:
        code: exit code; None when it did not return in time.
        job_id: of the job; empty without one.
        error: what was said last.
        described: what slurmctld was asked for, one of each component.
    """

    code: int | None
    job_id: str
    error: str
    described: tuple[Fields, ...] = ()

    @property
    def accepted(self) -> bool:
        """Whether there is a job, or sbatch found nothing wrong (`--test-only`)."""
        return self.code == 0 or bool(self.job_id)

    @property
    def is_ours(self) -> str:
        """The name of hetstream's own error, if it was one of the documented limits."""
        is_ours = self.code == 2 and self.error.startswith("hetstream sbatch: ")
        return next((name for name, words in DOCUMENTED.items() if is_ours and words in self.error), "")


class Submitter:
    """Submits scripts to one cluster, with sbatch and with `hetstream sbatch`.

    Args:
        environ: of the commands; it names the cluster.
        log: of slurmctld.
        directory: for copies of the scripts and for output.
    """

    def __init__(self, environ: Mapping[str, str], log: Path, directory: Path) -> None:
        self._environ = {name: value for name, value in environ.items() if not name.startswith(("SBATCH_", "SLURM_J"))}
        self._log, self._directory = log, directory
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "submitter.py")], env=self._environ, text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )  # fmt: skip

    def close(self) -> None:
        """End the process that submits."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)
        self._process.stdout.close()

    def plain(self, case: Case) -> Submission:
        """By sbatch, held."""
        return self._submit(self._sbatch, ["sbatch", "--hold"], case)

    def converted(self, case: Case, *, companions: bool = False) -> Submission:
        """By `hetstream sbatch`, held; with companions there is no component 1."""
        words = [f"--data-workers={'0-' if companions else ''}{_WORKERS}", *_OURS]
        return self._submit(self._hetstream, ["sbatch", "--hold", *words], case)

    def data_workers_alone(self) -> dict[str, str]:
        """Jobs of what component 1 is for, by the field in which they have their memory; each held."""
        words = [f"--partition={DATA_WORKER_PARTITION}", f"--cpus-per-task={_WORKER_CPUS}", f"--ntasks={_WORKERS}"]
        by_node = [f"--ntasks-per-node={_WORKERS}", f"--mem={_WORKER_MB * _WORKERS}"]
        forms = {"MinMemoryCPU": words, "MinMemoryNode": [*words, *by_node]}
        return {
            memory: self.run("sbatch", "--parsable", "--hold", *form, "--wrap=true").strip()
            for memory, form in forms.items()
        }

    def run(self, *argv: str) -> str:
        """A command of Slurm on this cluster: what it prints."""
        done = subprocess.run(argv, env=self._environ, capture_output=True, text=True, errors="replace", timeout=120)
        return done.stdout

    def _submit(self, how: Callable[..., int | None], words: Sequence[str], case: Case) -> Submission:
        begin = self._log.stat().st_size
        # One place for all, so that paths have no other difference.
        shutil.copyfile(case.path, self._directory / case.path.name)
        out = self._directory / "output"
        code = how([*words, *case.arguments, case.path.name], out, case.environ)
        stdout, stderr = (Path(f"{out}.{name}").read_text(errors="replace") for name in ("stdout", "stderr"))
        with self._log.open(errors="replace") as log:
            log.seek(begin)
            described = parse_descriptions(log.read())
        found = re.search(r"^(?:Submitted batch job )?(\d+)", stdout, re.MULTILINE)
        errors = [line for line in stderr.splitlines() if re.match(r"sbatch: \w+|hetstream sbatch: ", line)]
        return Submission(code, found[1] if found else "", (errors or [stderr.strip()])[-1], tuple(described))

    def _sbatch(self, words: Sequence[str], out: Path, environ: Mapping[str, str]) -> int | None:
        with Path(f"{out}.stdout").open("w") as stdout, Path(f"{out}.stderr").open("w") as stderr:
            process = subprocess.Popen(
                list(words), cwd=self._directory, env={**self._environ, **environ}, stdin=subprocess.DEVNULL,
                stdout=stdout, stderr=stderr,
            )  # fmt: skip
            try:
                return process.wait(timeout=_SUBMISSION_LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                return None

    def _hetstream(self, words: Sequence[str], out: Path, environ: Mapping[str, str]) -> int | None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = {"argv": list(words), "cwd": str(self._directory), "out": str(out), "environ": dict(environ)}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        pid = int(self._process.stdout.readline())
        with _killed_after(pid, _SUBMISSION_LIMIT_S) as killed:
            code = int(self._process.stdout.readline())
        return None if killed else code


@contextmanager
def _killed_after(group: int, limit_s: float) -> Iterator[list[int]]:
    """Kill a process group that takes too long; the list then has it."""
    killed: list[int] = []

    def kill(_number: int, _frame: object) -> None:
        killed.append(group)
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)

    before = signal.signal(signal.SIGALRM, kill)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield killed
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# ---- comparison ----------------------------------------------------------------------------------


@dataclass
class Report:
    """What was found.

    Attributes:
        accepted: scripts that both accepted, with component 1.
        arrays: of them those that have companions in its place.
        refused: scripts that both refused, and why sbatch did.
        other_words: of them those that sbatch refused with other words once converted.
        documented: scripts that only hetstream refused, by the documented limit.
        differences: script, what differs, plain value, converted value.
        allowed: how often a field differed as it may.
    """

    accepted: list[str] = field(default_factory=list)
    arrays: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    other_words: dict[str, str] = field(default_factory=dict)
    documented: dict[str, str] = field(default_factory=dict)
    differences: list[tuple[str, str, str, str]] = field(default_factory=list)
    allowed: Counter[str] = field(default_factory=Counter)

    def text(self) -> str:
        """The summary as a table."""
        lines = [
            f"accepted both         {len(self.accepted)} ({len(self.arrays)} of them arrays, with companions)",
            f"refused both          {len(self.refused)}",
            f"refused by hetstream  {len(self.documented)}, by documented limits",
            f"different             {len({name for name, *_ in self.differences})}",
        ]
        lines += [f"  allowed {number:>5}  {name}: {ALLOWED[name][1]}" for name, number in sorted(self.allowed.items())]
        lines += [f"  refused by both       {name}: {why}" for name, why in self.refused.items()]
        lines += [f"    converted, sbatch says  {name}: {why}" for name, why in self.other_words.items()]
        lines += [f"  documented limit      {name}: {why}" for name, why in self.documented.items()]
        lines += [f"  DIFFERENT {name}: {what}: {old!r} -> {new!r}" for name, what, old, new in self.differences]
        return "\n".join(lines)


def differences(plain: Fields, converted: Fields, allowed: Counter[str]) -> Iterator[tuple[str, str, str]]:
    """The fields of component 0 that are others than the plain job's, and not as they may be."""
    for name in dict.fromkeys([*plain, *converted]):
        if plain.get(name) != converted.get(name):
            if name in ALLOWED and ALLOWED[name][0](name, plain, converted):
                allowed[name] += 1
            else:
                yield name, plain.get(name, ""), converted.get(name, "")
    if "MinMemoryCPU" in plain and plain.get("MinMemoryCPU") == converted.get("MinMemoryCPU"):
        before, after = (_tres(job.get("TRES", job.get("ReqTRES", ""))).get("mem", "") for job in (plain, converted))
        if (megabytes(after) or 0.0) < (megabytes(before) or 0.0):
            yield "memory", before, after


def foreign(
    worker: Fields, trainer: Fields, alone: Fields, release: tuple[int, ...] = ()
) -> Iterator[tuple[str, str, str]]:
    """The fields of component 1 that neither data workers alone have nor the whole job."""
    for name in dict.fromkeys([*alone, *worker]):
        value = _or_none(worker.get(name))
        if name in _SIZES:
            expected = {_or_none(alone.get(name))}
        elif name in ("TRES", "ReqTRES"):
            value, expected = _without_memory(value), {_without_memory(_or_none(alone.get(name)))}
        elif name == "MinMemoryCPU":
            # Where the script leaves memory to the partition, data workers do, too.
            expected = {_or_none(alone.get(name)), f"{_WORKER_MB // _WORKER_CPUS // 1024}G"}
        elif name in ALLOWED and ALLOWED[name][0] is _any:
            continue
        elif name in ("Reboot", "OverSubscribe", "Exclusive") and trainer.get("Reboot") == "1":
            # sbatch carries --reboot to every component and has no option against it; conversion says so.
            expected = {_or_none(trainer.get(name))}
        elif name == "Dependency" and "singleton" in value and release < _SINGLETON_SINCE:
            # It has the trainer's name and user: it would wait for the trainer, which waits for it.
            expected = set()
        elif name == "ExcNodeList":
            # slurmctld adds the nodes that another component names.
            given = {host for key in ("ExcNodeList", "ReqNodeList") for host in expand(trainer.get(key, ""))}
            expected = {value if given.issuperset(expand(value or "")) else ""}
        else:
            expected = {_or_none(alone.get(name))} | ({_or_none(trainer.get(name))} if name in OF_THE_JOB else set())
        near = name in ALLOWED and ALLOWED[name][0] is _near_in_time and _near_in_time(name, trainer, worker)
        if value not in expected and not near:
            yield f"component 1 {name}", " or ".join(sorted(map(str, expected))), str(value)


def _or_none(value: str | None) -> str:
    """A field that is not there, or is empty, is none; so Slurm shows some, too."""
    return "" if value in (None, "(null)") else value or ""


def _without_memory(tres: str | None) -> str:
    """Data workers have memory of their own, and as many nodes as Slurm packs them onto."""
    return ",".join(part for part in (tres or "").split(",") if not part.startswith(("mem=", "billing=", "node=")))


def compare(submitter: Submitter, cases: Mapping[str, Case]) -> Report:
    """Submit all scripts both ways, and compare what slurmctld then has."""
    report = Report()
    release = version_tuple(submitter.run("sbatch", "--version").split()[1])
    plain = {name: submitter.plain(case) for name, case in cases.items()}
    before = parse_jobs(submitter.run("scontrol", "show", "job"))
    # Gone, so that a job of the same name finds nothing to wait for (--dependency=singleton), as the plain one did not.
    submitter.run("scancel", "--user=root")
    alone = submitter.data_workers_alone()
    converted = {}
    for name, case in cases.items():
        converted[name] = submitter.converted(case)
        if converted[name].is_ours == "JobArrayNotSupported":
            converted[name] = submitter.converted(case, companions=True)
            report.arrays.append(name)
        _judge(report, name, plain[name], converted[name])
    report.arrays = [name for name in report.arrays if name in report.accepted]
    after = parse_jobs(submitter.run("scontrol", "show", "job"))
    submitter.run("scancel", "--user=root")
    forms = {memory: after[job_id] for memory, job_id in alone.items()}
    for name in report.accepted:
        found = _of_one(before, after, plain[name], converted[name], forms, report.allowed, release)
        report.differences += [(name, *difference) for difference in found]
    return report


def _judge(report: Report, name: str, plain: Submission, converted: Submission) -> None:
    """Which of them was accepted."""
    if not plain.accepted and not converted.accepted:
        report.refused[name] = plain.error
        if converted.error != plain.error:
            report.other_words[name] = converted.error
    elif plain.accepted and converted.is_ours:
        report.documented[name] = converted.is_ours
    elif plain.accepted != converted.accepted:
        verdicts = [item.error or f"accepted as job {item.job_id}" for item in (plain, converted)]
        report.differences.append((name, "verdict", *verdicts))
    else:
        report.accepted.append(name)


def _of_one(
    before: Mapping[str, Fields], after: Mapping[str, Fields], plain: Submission, converted: Submission,
    alone: Mapping[str, Fields], allowed: Counter[str], release: tuple[int, ...],
) -> Iterator[tuple[str, str, str]]:  # fmt: skip
    """What differs of one script that both accepted."""
    if not plain.job_id or not converted.job_id:
        if plain.job_id or converted.job_id:
            yield "job", plain.job_id, converted.job_id
        return
    has_components = f"{converted.job_id}+1" in after
    trainer = after[f"{converted.job_id}+0" if has_components else converted.job_id]
    yield from differences(before[plain.job_id], trainer, allowed)
    yield from differences(plain.described[0], converted.described[0], allowed)
    if has_components:
        worker = after[f"{converted.job_id}+1"]
        form = next((form for memory, form in alone.items() if memory in worker), {})
        yield from foreign(worker, trainer, form, release)


# ---- from the command line -----------------------------------------------------------------------


def scripts_in(folders: Sequence[Path]) -> dict[str, Path]:
    """The scripts of folders, by their paths below them."""
    found = {str(path.relative_to(folder)): path for folder in folders for path in folder.rglob("*")}
    return {name: found[name] for name in sorted(found) if found[name].is_file()}


def text_of(scripts: Mapping[str, Path]) -> list[str]:
    """What they say, whatever bytes are in them."""
    return [path.read_text(errors="replace") for path in scripts.values()]


@contextmanager
def submitter_on(state_dir: Path, environ: Mapping[str, str], commands: Sequence[Sequence[str]]) -> Iterator[Submitter]:
    """A submitter for a cluster that has just been booted."""
    directory = state_dir / "gate"
    directory.mkdir()
    submitter = Submitter(environ, state_dir / "log" / "slurmctld.log", directory)
    try:
        for command in commands:
            submitter.run(*command)
        yield submitter
    finally:
        submitter.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """Boot, compare, say what was found."""
    parser = argparse.ArgumentParser(description="Compare converted with plain submission.")
    parser.add_argument("--slurm", default=HOST, metavar="RELEASE", help="host, 24.11 or 26.05")
    parser.add_argument("folders", nargs="*", type=Path, default=[sbatch_corpus.FOLDER], metavar="DIR")
    options = parser.parse_args(arguments)
    scripts = scripts_in(options.folders)
    if not scripts:
        parser.error(f"no scripts in {', '.join(map(str, options.folders))}. Collect them: {sbatch_corpus.COLLECT}")
    named = named_in(text_of(scripts))
    name = f"gate-{secrets.token_hex(3)}"
    state_dir = DEFAULT_STATE_ROOT / name
    try:
        record = boot(
            BootRequest(name, state_dir, SHAPE, settings=tuple(settings_of(named))),
            choose_programs(options.slurm, DEFAULT_CACHE_DIR, print),
            print,
        )
        with submitter_on(state_dir, record.environment(os.environ), list(commands_after_boot(named))) as submitter:
            report = compare(submitter, {name: Case(path) for name, path in scripts.items()})
    finally:
        tear_down(state_dir)
    print(f"Slurm {record.slurm_version}, {len(scripts)} scripts\n{report.text()}")
    return 1 if report.differences else 0


if __name__ == "__main__":
    sys.exit(main())
