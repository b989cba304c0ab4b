"""Train on the digits twice, as a heterogeneous job with hetstream and as the plain script, and compare: `make demo`.

Uses the public commands as a user would: a throw-away Slurm cluster when this machine can have one (root and Slurm),
else `hetstream run`. Copies the script and the program, unchanged, into a folder for each run. Removes the cluster
whatever happens. Exit code 1 when a sample was lost, duplicated or out of order, or a stage failed.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import h5py
import report

HERE = Path(__file__).resolve().parent
DEVCLUSTER = str(Path(sys.executable).with_name("devcluster"))  # of a checkout
SLURM_OUT = "digits-*.out"  # train.sbatch's --output
LOCAL_OUT = "digits-local.out"
# The trainer needs no more: a batch takes about half as long again to make as to train on.
MOST_DATA_WORKERS = 3
# Each takes a few seconds on an idle machine; these end a run that hangs.
COMMAND_TIMEOUT_S = 90.0
RUN_TIMEOUT_S = 240.0
KILL_AFTER_S = 15.0
POLL_INTERVAL_S = 0.2
JOB_POLL_INTERVAL_S = 0.5
LOOK_S = 0.5
_START = time.monotonic()


class DemoError(Exception):
    """A stage of the demo failed; the message says which command and what it printed."""


@dataclass(frozen=True)
class Place:
    """Where the two runs happen.

    Attributes:
        backend: `slurm` or `local`.
        reason: why there.
        prefix: words in front of a command that reach the cluster.
        slurm_version: None without Slurm.
    """

    backend: str
    reason: str
    prefix: tuple[str, ...] = ()
    slurm_version: str | None = None


def cores() -> list[int]:
    """The machine's cores that this program may use: the first is the GPU node's, data workers have the others."""
    return sorted(os.sched_getaffinity(0))


def num_data_workers() -> int:
    return max(1, min(len(cores()) - 1, MOST_DATA_WORKERS))


def busy_share() -> float:
    """Part of the machine's cores that are in use now, 0 to 1; the load average still has what was a minute ago."""

    def ticks() -> tuple[int, int]:
        used = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
        return sum(used), used[3] + used[4]

    before = ticks()
    time.sleep(LOOK_S)
    whole, idle = (now - then for now, then in zip(ticks(), before, strict=True))
    return 1 - idle / whole if whole else 0.0


def say(text: str) -> None:
    print(f"[{time.monotonic() - _START:5.1f} s] {text}", flush=True)


def command(argv: list[str], **options: Any) -> str:
    """Run a short command and return its stdout."""
    try:
        done: subprocess.CompletedProcess[str] = subprocess.run(
            argv, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, **options
        )
    except subprocess.TimeoutExpired as exc:
        raise DemoError(f"{shlex.join(argv)}: no end after {COMMAND_TIMEOUT_S:.0f} s") from exc
    if done.returncode != 0:
        raise DemoError(f"{shlex.join(argv)}: exit code {done.returncode}: {(done.stderr or done.stdout).strip()}")
    return done.stdout


@contextmanager
def place(force_local: bool) -> Iterator[Place]:
    """Boot the cluster if this machine can have one, and remove it at the end."""
    why_not = "asked for by --local" if force_local else why_no_cluster()
    if why_not is not None:
        say(f"local backend: {why_not}")
        yield Place("local", why_not)
        return
    name = f"demo-{os.getpid()}"
    try:
        try:
            say("booting a throw-away Slurm cluster: a GPU node (fake GPU) with one core, a CPU node with the others")
            shape = ["--gpu-nodes=1", "--gpus-per-node=1", "--cpu-nodes=1"]
            shape += ["--own-cores"] if len(cores()) > 1 else ["--cpus-per-node=1"]
            facts = json.loads(command([DEVCLUSTER, "up", "--name", name, *shape, "--json"]))
        except DemoError as error:
            say(f"local backend: the cluster did not start: {error}")
            facts = None
        if facts is None:
            yield Place("local", "the throw-away Slurm cluster did not start")
        else:
            say(f"Slurm {facts['slurm_version']} is up: {' '.join(facts['nodes'])}")
            prefix = (DEVCLUSTER, "exec", "--name", name, "--")
            yield Place("slurm", "a throw-away cluster on this machine", prefix, facts["slurm_version"])
    finally:
        # From here on an impatient Ctrl-C must not leave daemons behind.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        say(command([DEVCLUSTER, "down", "--name", name], start_new_session=True).strip())


def why_no_cluster() -> str | None:
    if os.geteuid() != 0:
        return "a Slurm cluster needs root"
    if not Path(DEVCLUSTER).exists():
        return "a throw-away cluster needs a checkout with `make venv`"
    facts = json.loads(command([DEVCLUSTER, "install", "--dry-run", "--json"]))
    return f"Slurm is not installed: {', '.join(facts['missing'])} missing" if facts["missing"] else None


def follow(ended: Callable[[], bool], folder: Path, output: str, interval_s: float) -> float:
    """Print a program's output as it comes, until `ended` says so; returns the seconds that took.

    Args:
        ended: Asked every `interval_s` seconds.
        folder: Where the program runs.
        output: Pattern of the file in `folder` that its output goes to.
        interval_s: See `ended`.
    """
    begin = time.monotonic()
    shown, last, elapsed_s = 0, False, 0.0
    while True:
        text = read_all(folder, output)
        whole = text.rfind("\n") + 1
        for line in text[shown:whole].splitlines():
            print(f"          | {line}", flush=True)
        shown = max(shown, whole)
        if last:
            return elapsed_s
        last = ended()
        elapsed_s = time.monotonic() - begin
        if elapsed_s > RUN_TIMEOUT_S:
            raise DemoError(f"no end after {RUN_TIMEOUT_S:.0f} s; the output is in {folder}")
        if not last:
            time.sleep(interval_s)


def run_job(where: Place, submit: list[str], folder: Path) -> tuple[str, report.Run, tuple[report.Component, ...]]:
    """Submit a batch script and follow its job to the end: job id, run, components."""
    say(f"$ cd {os.path.relpath(folder)} && {shlex.join(submit)}")
    job_id = command([*where.prefix, *submit], cwd=folder).split()[0].partition(";")[0]
    show = [*where.prefix, "scontrol", "show", "job", "-o", job_id]
    # Not sbatch --wait: it looks only every half minute when a job takes longer than a few seconds.
    elapsed_s = follow(lambda: not report.active(command(show)), folder, SLURM_OUT, JOB_POLL_INTERVAL_S)
    shown = command(show)
    if not report.completed(shown):
        raise DemoError(f"job {job_id} failed:\n{shown}\n{read_all(folder, SLURM_OUT)}")
    return job_id, report.read_output(read_all(folder, SLURM_OUT), elapsed_s), report.components_of(shown)


def run_program(argv: list[str], folder: Path, on: list[int]) -> report.Run:
    """Run a command here, on some cores, and follow it to its end."""
    say(f"$ cd {os.path.relpath(folder)} && taskset --cpu-list {','.join(map(str, on))} {shlex.join(argv)}")
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, on)  # inherited
    try:
        with open(folder / LOCAL_OUT, "wb") as output:
            process = subprocess.Popen(argv, cwd=folder, stdout=output, stderr=output, start_new_session=True)
    finally:
        os.sched_setaffinity(0, before)
    try:
        elapsed_s = follow(lambda: process.poll() is not None, folder, LOCAL_OUT, POLL_INTERVAL_S)
    finally:
        end_group(process)
    if process.returncode != 0:
        raise DemoError(f"{shlex.join(argv)}: exit code {process.returncode}:\n{read_all(folder, LOCAL_OUT)}")
    return report.read_output(read_all(folder, LOCAL_OUT), elapsed_s)


def read_all(folder: Path, pattern: str) -> str:
    return "".join(path.read_text(errors="replace") for path in sorted(folder.glob(pattern)))


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a command that still runs, with the processes it started."""
    if process.poll() is not None:
        return
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(KILL_AFTER_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run_folder(work_dir: Path, name: str) -> Path:
    """A folder with the script, the program and the data, as a user would have it."""
    folder = work_dir / name
    folder.mkdir()
    for file in ("train.sbatch", "train.py"):
        shutil.copy(HERE / file, folder)
    os.link(work_dir / "digits.h5", folder / "digits.h5")
    return folder


def plain_run(where: Place, folder: Path, program: list[str]) -> report.Run:
    """The script without hetstream, on the same cluster."""
    if where.backend == "slurm":
        return run_job(where, ["sbatch", "--parsable", "train.sbatch"], folder)[1]
    return run_program(program, folder, cores()[:1])


def streamed_run(
    where: Place, folder: Path, program: list[str]
) -> tuple[report.Run, tuple[report.Component, ...], dict[str, Any]]:
    """The script with hetstream: the run, the components it had, and hetstream's summary."""
    if where.backend == "slurm":
        # The script has one, for two cores.
        more = [f"--data-workers={num_data_workers()}"] if num_data_workers() > 1 else []
        job_id, run, components = run_job(where, ["hetstream", "sbatch", "--parsable", *more, "train.sbatch"], folder)
        summary = folder / ".hetstream" / f"job-{job_id}" / "summary.json"
    else:
        workers = ["--data-workers", str(num_data_workers())]
        run = run_program(["hetstream", "run", *workers, "--json", "summary.json", "--", *program], folder, cores())
        here = os.uname().nodename
        components = (
            report.Component("trainer", 1, 1, 0, here),
            report.Component("data_workers", 1, num_data_workers(), 0, here),
        )
        summary = folder / "summary.json"
    return run, components, json.loads(summary.read_text())


def demo(work_dir: Path, force_local: bool) -> report.Result:
    """All stages; the cluster, if there was one, is gone at the end."""
    busy_before = busy_share()
    shutil.rmtree(work_dir, ignore_errors=True)
    work_dir.mkdir(parents=True)
    data = work_dir / "digits.h5"
    say("writing scikit-learn's digits to HDF5")
    command([sys.executable, str(HERE / "prepare.py"), str(data)])
    with h5py.File(data) as file:
        ids = {split: file[split]["ids"][:].tolist() for split in file}
    program, epochs = report.program_of((HERE / "train.sbatch").read_text())
    with place(force_local) as where:
        say("first without hetstream, for comparison: the GPU node's core alone")
        plain = plain_run(where, run_folder(work_dir, "plain"), program)
        say("now with hetstream: the same script and program, and data workers on the other cores")
        streamed, components, summary = streamed_run(where, run_folder(work_dir, "hetstream"), program)
    compared_steps, differing_steps = report.compared_of(summary)
    ledger, plain_ledger = (read_all(work_dir / name, "ledger.jsonl") for name in ("hetstream", "plain"))
    return report.Result(
        backend=where.backend,
        reason=where.reason,
        slurm_version=where.slurm_version,
        components=components,
        delivery=report.count_delivery(ledger.splitlines(), ids, epochs),
        same_order=ledger == plain_ledger,
        num_samples=len(ids["train"]),
        compared_steps=compared_steps,
        differing_steps=differing_steps,
        streamed=streamed,
        plain=plain,
        num_cores=len(cores()),
        busy_before=busy_before,
    )


def stop(number: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt(signal.Signals(number).name)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write the result to this file, and a picture beside it")
    parser.add_argument("--work-dir", type=Path, default=Path("build/demo"), help="emptied first (%(default)s)")
    parser.add_argument("--local", action="store_true", help="do not boot a cluster")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, stop)
    # The commands and the jobs find `hetstream` and `python` where this Python is.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    try:
        result = demo(args.work_dir.absolute(), args.local)
    except DemoError as error:
        # When removing the cluster failed too, the first failure is the one to read.
        for failure in (error.__context__, error):
            if isinstance(failure, DemoError):
                print(f"demo: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as interrupt:
        print(f"demo: stopped ({str(interrupt) or 'SIGINT'})", file=sys.stderr)
        return 130
    print(f"\n{report.table(result)}\n")
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result.as_json(), indent=1) + "\n")
        drawing = args.json.with_suffix(".svg")
        drawing.write_text(report.picture(result))
        say(f"wrote {args.json} and {drawing}")
    return 0 if result.passed else 1


if __name__ == "__main__":
    sys.exit(main())
