"""`hetstream migrate`: start a job that takes over the training of a running one, and follow the hand-over."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hetstream.base.errors import UsageError
from hetstream.base.files import temporary_place
from hetstream.checkpoint.disk.ownership import history, living_request, read_owner
from hetstream.hetjob.convert.convert import AlreadyHeterogeneous, script_options
from hetstream.hetjob.convert.directives import OPTIONS, from_command_line, read_directives
from hetstream.hetjob.convert.render import without_block
from hetstream.hetjob.convert.sbatch_options import SbatchOption, SbatchOptions, words_of
from hetstream.hetjob.convert.spec import read_spec
from hetstream.hetjob.errors import SlurmCommandError
from hetstream.slurm_plugin.cli.why import named_jobs
from hetstream.slurm_plugin.client.model import Job, is_own
from hetstream.slurm_plugin.client.slurm import CommandSlurm, submit_script
from hetstream.slurm_plugin.submit.conversion import Conversion, convert_script
from hetstream.slurm_plugin.submit.migration import Sight, Stage, arguments_of, export_option, stage, with_memory
from hetstream.slurm_plugin.submit.program import own_program
from hetstream.slurm_plugin.submit.request import parse_command_line

HELP = """\
usage: hetstream migrate JOBID [OPTIONS OF SBATCH AND HETSTREAM] [--dry-run] [--json] [--no-wait] [--timeout=S]
                               [-- ARGUMENTS OF THE SCRIPT]

Submit the script of a running training job once more. The new job starts and makes its model while the old one trains;
when it is ready the old one saves and stops, and the new one goes on from that very step. Both need FlashCheckpointer.

  JOBID          the running job; yours
  OPTIONS        such as --nodelist, --exclude, --mem, --time: they win over the script's. Options that were
                 given to the first sbatch on its command line are not in the script: repeat them
  --dry-run      print the script and the command, submit nothing
  --json         print one JSON document at the end
  --no-wait      return when the job is submitted
  --timeout=S    stop watching after so many seconds (default 3600); the hand-over goes on without

example:
  hetstream migrate 8123 --exclude=gpu7
  hetstream migrate 8123 --mem=96G

exit codes:
  0  the new job has taken over, or was submitted (--no-wait)
  1  Slurm could not be asked, the new job ended before it took over, or it takes longer than --timeout
  2  the command line is wrong
"""
_OWN = ("dry-run", "json", "no-wait", "timeout", "help")
_TIMEOUT_S = 3600.0
_POLL_S = 0.5
_ASK_SLURM_S = 2.0


@dataclass(frozen=True)
class _Request:
    """The command line.

    Attributes:
        job_id: the job to move.
        options: of sbatch and hetstream.
        arguments: behind `--`; None without.
    """

    job_id: str
    options: list[SbatchOption]
    arguments: list[str] | None
    dry_run: bool
    as_json: bool
    waits: bool
    timeout_s: float


def add_migrate_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb."""
    parser.add_argument("words", nargs=argparse.REMAINDER)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Submit and follow."""
    request = _parse(args.words)
    if request is None:
        print(HELP, end="")
        return 0
    client = CommandSlurm()
    job = named_jobs(request.job_id, client.seen())[0]
    old = str(job.het.het_job_id if job.het else job.job_id)
    if job.state not in ("RUNNING", "SUSPENDED"):
        raise UsageError(f"job {old} is {job.state}: only a running job can hand over. Check: squeue --jobs={old}")
    if not is_own(job):
        raise UsageError(f"job {old} is {job.user}'s, and only they can move it. Your own: hetstream jobs -u $USER")
    command = client.command(old)
    parts = command.split(" ")
    beginnings = [" ".join(parts[:count]) for count in range(1, len(parts) + 1)]
    arguments = arguments_of(
        command, [beginning for beginning in beginnings if Path(beginning).is_file()], request.arguments, old
    )
    name = Path(command.partition(" ")[0] or "sbatch").name
    # Where sbatch was called: relative paths of the script begin there.
    directory = job.work_dir or str(Path.cwd())
    conversion, options, checkpoints = _prepare(request, job, old, name, client)
    if request.dry_run:
        return _print_dry_run(conversion, options, [name, *arguments], directory)
    new = _submit(conversion, options, name, arguments, directory)
    _note(f"job {new} is submitted to take over from job {old}")
    if not request.waits:
        found = Stage(f"job {new} is submitted to take over from job {old}")
    else:
        found = _follow(client, old, new, checkpoints, request.timeout_s)
    if request.as_json:
        print(json.dumps({
            "old_job": old, "new_job": new, "done": found.is_done, "stage": found.text, "step": found.step,
            "pause_s": found.pause_s, "checkpoints": str(checkpoints) if checkpoints else None,
        }))  # fmt: skip
    else:
        print(new)
    return 0 if found.is_done or not request.waits else 1


def _parse(written: Sequence[str]) -> _Request | None:
    """Read the command line; None: help is asked for."""
    extra = {*OPTIONS, "timeout"}
    options, unread = parse_command_line(written, os.environ, extra)
    behind: list[SbatchOption] = []
    arguments: list[str] | None = None
    if unread:
        end = unread.index("--") if "--" in unread else len(unread)
        arguments = unread[end + 1 :] if end < len(unread) else None
        behind, unknown = parse_command_line(unread[1:end], os.environ, extra)
        if unknown:
            raise UsageError(f"{unknown[0]!r} is one word too many: arguments of the script stand behind --")
    given = SbatchOptions((*options, *behind))
    if given.has("help"):
        return None
    if not unread:
        raise UsageError("which job? Write: hetstream migrate JOBID; see: hetstream jobs -u $USER")
    for name in ("wrap", "array", "wait", "test-only"):
        if given.has(name):
            raise UsageError(f"--{name} makes no sense with migrate: it submits the script of job {unread[0]} once")
    timeout = given.value("timeout") or str(_TIMEOUT_S)
    try:
        timeout_s = float(timeout)
    except ValueError:
        raise UsageError(f"--timeout={timeout}: a number of seconds") from None
    kept = [option for option in given.items if option.name not in (*_OWN, "parsable")]
    return _Request(
        unread[0], kept, arguments, given.has("dry-run"), given.has("json"), not given.has("no-wait"), timeout_s
    )


def _prepare(
    request: _Request, job: Job, old: str, name: str, client: CommandSlurm
) -> tuple[Conversion, list[SbatchOption], Path | None]:
    """The script, converted as `hetstream sbatch` would, the options, and the checkpoint directory if it is known."""
    submitted = client.batch_script(old).decode(errors="surrogateescape")
    text = without_block(submitted)
    spec = read_spec([*read_directives(text, name), *from_command_line(request.options)], name)
    if spec is None and text != submitted:
        raise UsageError(
            f"job {old} was converted with options of the command line, which its script does not hold. Repeat them, "
            f"as in: hetstream migrate {old} --checkpoint=DIR --checkpoint-size=SIZE"
        )
    text = with_memory(text, request.options)
    outside = list(request.options)
    if not SbatchOptions(tuple(outside)).has("job-name"):
        outside.append(SbatchOption("job-name", job.name, "hetstream", (f"--job-name={job.name}",)))
    try:
        in_script = script_options(text, name)
    except AlreadyHeterogeneous:
        in_script = []  # components that the user wrote: passed on as they are
    outside = [option for option in outside if option.name != "export"]
    outside.append(export_option(old, in_script, request.options))
    body = text.encode(errors="surrogateescape")
    conversion = convert_script(body, name, outside, os.environ, client, own_program())
    for note in conversion.notes:
        _note(note)
    checkpoints = Path(job.work_dir, spec.checkpoint) if spec and spec.checkpoint else None
    return conversion, outside, checkpoints


def _words(conversion: Conversion, options: Sequence[SbatchOption]) -> list[str]:
    return list(conversion.plan.sbatch_options) if conversion.plan else words_of(options)


def _submit(
    conversion: Conversion, options: Sequence[SbatchOption], name: str, arguments: Sequence[str], cwd: str
) -> str:
    """As `hetstream sbatch` does, with the script under its own name."""
    environ = conversion.environ_of_sbatch(os.environ)
    with tempfile.TemporaryDirectory(prefix="hetstream-", dir=temporary_place()) as directory:
        path = Path(directory, name)
        path.write_bytes(conversion.script)
        return submit_script(_words(conversion, options), path, arguments, environ, cwd)


def _print_dry_run(conversion: Conversion, options: Sequence[SbatchOption], script: Sequence[str], cwd: str) -> int:
    sys.stdout.flush()
    sys.stdout.buffer.write(conversion.script)
    command = shlex.join([*conversion.words_to_unset(), "sbatch", *_words(conversion, options), *script])
    _note(f"would run in {cwd}, on the script above: {command}")
    return 0


def _follow(client: CommandSlurm, old: str, new: str, checkpoints: Path | None, timeout_s: float) -> Stage:
    """Say how far it is until it is over."""
    deadline_s = time.monotonic() + timeout_s
    # Of a heterogeneous job, component 0 has the leader's number.
    states: dict[str, str] | None = None
    asked_s, said = -_ASK_SLURM_S, ""
    while True:
        if time.monotonic() >= asked_s + _ASK_SLURM_S:
            try:
                states = client.living_jobs()
            except SlurmCommandError as error:
                _note(f"Slurm does not answer, the hand-over goes on: {error}")
            asked_s = time.monotonic()
        found = stage(_look(old, new, states, checkpoints)) if states is not None else Stage("Slurm does not answer")
        if found.text != said:
            said = found.text
            _note(said)
        if found.is_over:
            return found
        if time.monotonic() > deadline_s:
            _note(f"not over after {timeout_s:g} s; it goes on by itself. To undo it: scancel {new}")
            return found
        time.sleep(_POLL_S)


def _look(old: str, new: str, states: Mapping[str, str], checkpoints: Path | None) -> Sight:
    request = living_request(checkpoints) if checkpoints else None
    return Sight(
        old,
        new,
        states.get(old, ""),
        states.get(new, ""),
        request.successor.job.partition("+")[0] if request else "",
        read_owner(checkpoints) if checkpoints else None,
        history(checkpoints) if checkpoints else (),
    )


def _note(text: str) -> None:
    print(f"hetstream: {text}", file=sys.stderr, flush=True)
