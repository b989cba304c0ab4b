"""From a command line to a converted script: what `hetstream convert` and `hetstream sbatch` share.

It reads the script, asks the cluster what conversion needs to know, and calls the pure chain of `hetjob`. It submits
nothing.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from hetstream.base.errors import UsageError
from hetstream.base.files import read_regular
from hetstream.base.text import duration
from hetstream.hetjob.convert.convert import MissingPartition, check_cluster, convert, script_options
from hetstream.hetjob.convert.directives import OPTIONS, Directive, is_own
from hetstream.hetjob.convert.launches import is_of_srun
from hetstream.hetjob.convert.plan import HetPlan, opportunistic_partitions
from hetstream.hetjob.convert.render import render
from hetstream.hetjob.convert.sbatch_options import (
    ALIASES,
    TAKES_VALUE,
    SbatchOption,
    SbatchOptions,
    from_environment,
    handed_on,
    plain_words,
    taken_variables,
)
from hetstream.hetjob.convert.shell import Unknown
from hetstream.hetjob.convert.spec import JobSpec, read_spec
from hetstream.hetjob.convert.step_demand import SubmitContext
from hetstream.hetjob.errors import SlurmCommandError
from hetstream.hetjob.job.job import IN_SUBMIT_DIR, JOBS_DIR, JOURNAL_DIR, choose, is_directory_pattern, setting
from hetstream.hetjob.ports import UNKNOWN_CLUSTER, ClusterLimits, SlurmClient
from hetstream.slurm_plugin.client.slurm_units import seconds
from hetstream.slurm_plugin.submit.request import notes_on_lines, parse_command_line, requested

# A longer file is no script that somebody wrote.
_MOST_READ_BYTES = 1 << 20
# Of paths in a script and in what it runs: on a slow file system looking each up takes about a millisecond.
_MOST_PATHS = 10_000


@dataclass(frozen=True)
class Conversion:
    """A script and what became of it.

    Attributes:
        script: the bytes to submit; the user's own when there is no plan.
        plan: None when the script has no directives.
        notes: what the user should know, one line each.
        taken: variables of the environment that the script says as options; sbatch is to be called without them, as
            they would be options of every component.
    """

    script: bytes
    plan: HetPlan | None
    notes: tuple[str, ...] = ()
    taken: tuple[str, ...] = ()

    def environ_of_sbatch(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the environment to call sbatch in."""
        return {name: value for name, value in environ.items() if name not in self.taken}

    def words_to_unset(self) -> list[str]:
        """Return the words before `sbatch` with which a shell calls it in that environment."""
        return ["env", *(word for name in self.taken for word in ("-u", name))] if self.taken else []


def convert_script(
    body: bytes,
    name: str,
    command_line: Sequence[SbatchOption],
    environ: Mapping[str, str],
    client: SlurmClient,
    program: Sequence[str],
    proposed: Sequence[Directive] | None = None,
) -> Conversion:
    """Convert one script, or leave it alone when nothing asks for data workers.

    Args:
        body: the script.
        name: its name, for messages.
        command_line: options of sbatch and of hetstream.
        environ: the environment that sbatch will run in.
        client: asked for the cluster's partitions; a cluster that does not answer is left to sbatch.
        program: how the job calls hetstream.
        proposed: directives of past jobs that hold where neither the script nor the command line says otherwise; None
            where past jobs were not asked.

    Raises:
        UsageError: directives, options or Slurm limits; see `hetstream.hetjob.errors`.
    """
    text = body.decode(errors="surrogateescape")
    directives = [*(proposed or ()), *requested(text, name, command_line, environ)]
    spec = read_spec(directives, name, counts_from_history=proposed is not None)
    notes = notes_on_lines(text, name)
    if spec is None:
        return Conversion(body, None, notes)
    if b"\r\n" in body:
        raise UsageError(f"{name}: the lines end in CR LF (DOS), which sbatch refuses. Run: sed -i 's/\\r$//' {name}")
    in_script = script_options(text, name)
    given = [option for option in command_line if not is_own(option.name)]
    options = [*from_environment(environ, in_script, given), *given]
    all_options = SbatchOptions((*in_script, *options))
    job_environ = handed_on(environ, SbatchOptions(tuple(in_script)), SbatchOptions(tuple(given)))
    jobs_dir, why = _jobs_dir(spec, environ, all_options.has("chdir"))
    notes = (*notes, *([why] if why else []))
    spec = replace(spec, jobs_dir=jobs_dir, journal_dir=spec.journal_dir or setting(JOURNAL_DIR, environ))
    cluster, silence = ask_cluster(client, clusters_of(environ, in_script, given))
    cluster = replace(cluster, opportunistic=opportunistic_partitions(environ))
    check_cluster(spec, cluster)
    try:
        around = _surroundings(job_environ, all_options)
        plan = convert(spec, text, name, command_line=options, cluster=cluster, surroundings=around)
    except MissingPartition as exc:
        if silence is None:
            raise
        raise MissingPartition(f"{exc}. Slurm was asked: {silence}") from silence
    notes = (*notes, *_notes_on_dashes(all_options), *_note_on_partition(spec, cluster))
    notes += (*_note_on_time(spec, all_options, cluster), *_note_on_own_job(spec, text, name))
    taken = tuple(taken_variables(environ, in_script, given))
    # sbatch is called without these, and would have handed them on to the job.
    plan = replace(plan, exports={name: job_environ[name] for name in taken if name in job_environ})
    return Conversion(render(text, plan, program).encode(errors="surrogateescape"), plan, notes, taken)


def _jobs_dir(spec: JobSpec, environ: Mapping[str, str], is_elsewhere: bool) -> tuple[str | None, str]:
    """The place of the job's directory that the script names, if it has to, and one line for the user or none.

    Raises:
        ConfigError: somebody else could change it.
    """
    named = spec.jobs_dir or setting(JOBS_DIR, environ)
    if not spec.has_master and spec.checkpoint is None:
        return named, ""  # the job has no directory
    place, why = choose(named, Path.cwd())
    if place is None and is_elsewhere:
        # Slurm will know where the job works, but not where it was submitted: its script says that.
        place = Path.cwd() / IN_SUBMIT_DIR
    text = str(place or "")
    return named or (text if is_directory_pattern(text) and "%" not in text else None), why


def _surroundings(job_environ: Mapping[str, str], options: SbatchOptions) -> SubmitContext:
    """What a script finds where it runs: files, from its working directory on, and variables."""
    directory = Path(options.value("chdir") or ".")
    left = _MOST_PATHS

    def read(path: str) -> str | None:
        nonlocal left
        left -= 1
        if left < 0:
            raise Unknown(f"it names more than {_MOST_PATHS:,} paths, too many to look at")
        place = directory / Path(path).expanduser()
        try:
            found = read_regular(place, _MOST_READ_BYTES)
            return None if found is None else found.decode()
        except (OSError, ValueError, RuntimeError):
            return None

    # What Slurm says of a job around this submission it will say of that job alone, but for what its srun acts on.
    known = {name: value for name, value in job_environ.items() if not name.startswith("SLURM_") or is_of_srun(name)}
    return SubmitContext(read, {**known, "SLURM_SUBMIT_DIR": str(Path.cwd())})


def _notes_on_dashes(options: SbatchOptions) -> list[str]:
    """What to say about long options behind one dash: getopt reads them letter by letter."""
    found = []
    for item in options.items:
        word = item.words[0] if item.words else ""
        name = word[1:].partition("=")[0]
        if len(name) > 1 and (name in TAKES_VALUE or name in ALIASES):
            (taken,) = plain_words([item])
            found.append(
                f"{item.origin}: sbatch takes {word} for letters, the first of them {taken}. Did you mean -{word}?"
            )
    return found


def _note_on_partition(spec: JobSpec, cluster: ClusterLimits) -> list[str]:
    """What to say when nobody chose where the data workers run, and they take CPUs from beside GPUs."""
    name = cluster.default_partition
    limits = cluster.limits.get(name or "")
    if not spec.data_workers_max or spec.data_worker_partition or limits is None:
        return []
    if not any(node.has_gpus for node in limits.nodes):
        return []
    return [
        f"the data workers go to the default partition {name}, whose nodes have GPUs. --data-worker-partition=NAME "
        "puts them elsewhere; see: sinfo -e -o '%P %c %m %G'"
    ]


# A command of a script, with the lines on which it goes on.
_COMMAND = re.compile(r"(?:\\\n|[^\n;])+")
_OWN_ID = r"\$\{?SLURM_JOB_?ID\b"
# Patterns that a command has one behind the other: a single one of all would take quadratic or cubic time.
_ASKS_ABOUT_OWN_JOB = ((r"\bsqueue\b", _OWN_ID), (r"\bscontrol\s", r"\bshow\s+job\b", _OWN_ID))
_MEANS_OWN_STEP = ((rf"{_OWN_ID}\}}?\.\d",),)  # as in `scancel -s USR1 $SLURM_JOB_ID.0`
# What takes Slurm's variables from an `srun`: `env -i srun`, `unset ${!SLURM_@}`.
_TAKES_VARIABLES = (
    (r"\benv\b", r"\s-(?:(?=\w*i)\w+|-ignore-environment)?(?=\s)", r"\bsrun\b"),
    (r"\bunset\b", r"\bSLURM_HET_SIZE\b|\$\{!SLURM\w*[@*]|\bSLURM_?\*"),
    (r"\bexec\s+-(?=\w*c)\w+\s", r"\bsrun\b"),
)


def _note_on_own_job(spec: JobSpec, text: str, name: str) -> list[str]:
    """What to say when a script means its job or a step of it where that is something else than in a plain job."""
    meanings = (
        (spec.has_components, _ASKS_ABOUT_OWN_JOB,
         "Slurm answers for each component of the job, the trainer's and the data workers'. What is the trainer's"),
        (spec.has_master or spec.checkpoint is not None, _MEANS_OWN_STEP,
         "the first steps of the job are hetstream's, and the script's have other numbers. How to find one by name"),
        (spec.has_components, _TAKES_VARIABLES,
         "without SLURM_HET_SIZE in its environment srun starts nothing in a job of several components. What to add"),
    )  # fmt: skip
    return [
        f"{name} line {text.count(chr(10), 0, command.start()) + 1}: {what}: docs/jobs.md"
        for is_other, ways, what in meanings
        if is_other
        for command in islice((found for found in _COMMAND.finditer(text) if _has(found[0], ways)), 1)
    ]


def _has(command: str, ways: Iterable[Sequence[str]]) -> bool:
    """Whether a command has all patterns of some way, one behind the other."""
    for patterns in ways:
        end = 0
        for pattern in patterns:
            found = re.compile(pattern).search(command, end)
            if found is None:
                break
            end = found.end()
        else:
            return True
    return False


def _note_on_time(spec: JobSpec, options: SbatchOptions, cluster: ClusterLimits) -> list[str]:
    """What to say when a job that would start alone waits for its data workers' partition.

    They have the job's time limit. It is no error: a QOS may have the flag PartitionTimeLimit.
    """
    name = spec.data_worker_partition or cluster.default_partition or ""
    asked = options.value("time") or ""
    limits = [cluster.limits.get(partition) for partition in name.split(",")]
    longest = [limit.max_time_s for limit in limits if limit is not None and limit.max_time_s is not None]
    if not spec.data_workers_max or len(longest) < len(limits):
        return []
    try:
        time_s = math.inf if asked.upper() in ("INFINITE", "UNLIMITED", "-1", "0") else seconds(asked)
    except ValueError:
        return []  # sbatch says what is wrong with it
    if time_s is None or time_s <= max(longest):
        return []
    return [
        f"--time={asked} is more than MaxTime={duration(max(longest))} of partition {name}, and data workers have the "
        "job's time limit: unless its QOS allows more, Slurm starts them never. Ask for less time, or give another "
        "--data-worker-partition; see: sinfo -o '%P %l'"
    ]


def note_on_arguments(script: str, arguments: Sequence[str]) -> list[str]:
    """Return what to say about options of hetstream that stand behind the script, where sbatch ends its own options."""
    own = [word for word in arguments if word.startswith("--") and word[2:].partition("=")[0] in OPTIONS]
    verb = "is an argument" if len(own) == 1 else "are arguments"
    return [f"{' '.join(own)} {verb} of {script}: options of hetstream stand before the script"] if own else []


# What a shell script uses its arguments by: `$1`, loops without a list (`for x; do`), and files that it sources, which
# see them too. Too much rather than too little: a match leaves the words to the script.
_ARGUMENTS = re.compile(
    r"\$[1-9@*#]|\$\{[#!]?[1-9@*]|\bshift\b|\bgetopts?\b|\bBASH_ARGV\b"
    r"|\b(?:for|select)\s+\w+\s*(?:;|\n)\s*do\b|(?:^|[;&|({]|\bthen|\bdo|\belse)[ \t]*(?:source|\.)[ \t]+\S",
    re.MULTILINE,
)
_SHELL = re.compile(r"#!\s*\S*\b(ba|da|k|z)?sh\b")


def options_behind(body: bytes, arguments: Sequence[str]) -> list[SbatchOption]:
    """Options of sbatch or hetstream that stand behind a script which does not use arguments; all words, or none.

    sbatch would give them to the script, where nothing could come of them.
    """
    text = body.decode(errors="surrogateescape")
    if not arguments or not _SHELL.match(text) or _ARGUMENTS.search(text):
        return []
    try:
        options, unread = parse_command_line(arguments, os.environ)
    except UsageError:
        return []
    return [] if unread else options


def clusters_of(environ: Mapping[str, str], in_script: Iterable[SbatchOption], given: Iterable[SbatchOption]) -> str:
    """Return what sbatch takes for `--clusters`; empty for the cluster that it is called on.

    The command line wins over the environment, and that over the script (sbatch(1), INPUT ENVIRONMENT VARIABLES).

    Args:
        environ: of sbatch, which reads the later of these variables where both are there (src/sbatch/opt.c).
        in_script: options of the script.
        given: those of the command line.
    """
    named = (
        SbatchOptions(tuple(given)).value("clusters"),
        environ.get("SLURM_CLUSTERS") or environ.get("SBATCH_CLUSTERS"),
        SbatchOptions(tuple(in_script)).value("clusters"),
    )
    return next((name for name in named if name), "")


def ask_cluster(client: SlurmClient, clusters: str) -> tuple[ClusterLimits, SlurmCommandError | None]:
    """Return the cluster that a job goes to as far as it is known, and why no more.

    Args:
        client: asked.
        clusters: see `clusters_of`.
    """
    unknown = replace(UNKNOWN_CLUSTER, default_mb_per_cpu=None)
    if "," in clusters or clusters.lower() == "all":
        return unknown, None  # the job goes to whichever starts it first
    try:
        return client.cluster(clusters), None
    except SlurmCommandError as exc:
        return unknown, exc
