"""`make bench-ckpt_requeue`: a training job is killed and requeued on real Slurm, twenty times. Is the result the same?

Half of the times its trainer is killed and its script starts it again on the same node; half of the times Slurm
requeues the job. docs/benchmarks.md explains the rows.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from benchmarks import harness
from benchmarks.clients.ckpt_job import SAVE_EVERY, CheckpointJob, differences, undisturbed
from benchmarks.harness import Row
from hetstream.slurm_plugin.devcluster.boot import BootRequest, boot
from hetstream.slurm_plugin.devcluster.programs import missing_programs
from hetstream.slurm_plugin.devcluster.roots import DEFAULT_CACHE_DIR, HOST, choose_programs
from hetstream.slurm_plugin.devcluster.spec import DEFAULT_STATE_ROOT, ClusterShape
from hetstream.slurm_plugin.devcluster.teardown import tear_down

CASE = "kills and requeues of a training job"
KILLS = 20
# Trained in each start before it is killed: random, so that kills come at any moment of the save interval.
MIN_STEPS, MAX_STEPS = 8, 30
SEED = 20


def main() -> int:
    """Run the benchmark."""
    args = harness.parser("Kill and requeue a training job on a throw-away Slurm cluster.", repeats=1).parse_args()
    missing = missing_programs()
    if os.geteuid() != 0 or missing:
        print("needs root and Debian's Slurm: hetstream devcluster install", file=sys.stderr)
        return 2
    kills = 2 if args.quick else KILLS
    with ExitStack() as undo:
        record = boot(
            BootRequest(f"bench-{os.getpid()}", DEFAULT_STATE_ROOT / f"bench-{os.getpid()}", ClusterShape()),
            choose_programs(HOST, DEFAULT_CACHE_DIR, _say),
            _say,
        )
        undo.callback(tear_down, Path(record.state_dir))
        directory = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="hetstream-bench-")))
        rows, problems = measure(directory, record.environment(os.environ), kills)
    context = {
        "machine": harness.machine(),
        "versions": harness.versions("torch"),
        "notes": [
            f"A step every 20 ms, a save every {SAVE_EVERY}; each kill comes {MIN_STEPS} to {MAX_STEPS} steps after "
            f"a start (random, seed {SEED}). Trainer, writer, data worker and job master are steps of one hetjob.",
            "Down: from the kill to the first step after it. It holds the start of Python, torch and the program, and "
            "for a requeue Slurm's; Slurm's two minutes before it starts a requeued job are skipped.",
            "The undisturbed run is one process without Slurm.",
        ],
    }
    failures = {f"problem {number}": text for number, text in enumerate(problems, start=1)}
    return harness.finish("ckpt_requeue", args.out, rows, failures, context)


def measure(directory: Path, environ: Mapping[str, str], kills: int) -> tuple[list[Row], list[str]]:
    """Kill one job so often, alternately its trainer and the whole job.

    Args:
        directory: an empty one.
        environ: in which Slurm's commands reach a cluster.
        kills: how often.

    Returns:
        The rows, and what is not as it must be.
    """
    dice = random.Random(SEED)
    steps = (kills + 1) * MAX_STEPS
    truth = undisturbed(directory / "truth", steps)
    job = CheckpointJob(directory / "job", environ, steps)
    problems: list[str] = []
    down_s: dict[str, list[float]] = {"trainer": [], "job": []}
    try:
        job.submit()
        for number in range(kills):
            job.wait_for_steps(dice.randint(MIN_STEPS, MAX_STEPS))
            if (job.directory / "run" / "result").exists():
                problems.append(f"training was over after {number} of {kills} kills")
                break
            what = "job" if number % 2 else "trainer"
            began_s = time.monotonic()
            if what == "trainer":
                job.kill_trainer()
            else:
                left = job.requeue()
                problems += [f"left in /dev/shm after requeue {number}: {', '.join(left)}"] if left else []
            starts = number + 2
            job.wait(lambda wanted=starts: len(job.starts()) >= wanted, f"start {starts}")  # type: ignore[misc]
            job.wait_for_steps(1)
            down_s[what].append(time.monotonic() - began_s)
            _say(f"kill {number + 1}: {what}, down {down_s[what][-1]:.1f} s, {job.starts()[-1]}")
        job.wait_for_end()
        problems += [*differences(job, truth), *_leftovers(job)]
    except (TimeoutError, RuntimeError, ValueError) as error:
        problems.append(str(error))
    finally:
        job.cancel()
        for name in job.shared_memory():
            shutil.rmtree(Path("/dev/shm") / name, ignore_errors=True)
    starts_after = job.starts()[1:]
    # What the trainer had done and no save held: after a requeue it saves once more when it is told to end.
    lost = {
        what: [
            start.last - start.step for number, start in enumerate(starts_after) if (number % 2 == 1) == (what == "job")
        ]
        for what in down_s
    }
    wrong = [
        f"start {number + 1} went on from {start.source}, not from {expected}"
        for number, start in enumerate(starts_after)
        if start.source != (expected := "disk" if number % 2 else "memory")
    ]
    rows = [
        _row("kills and requeues survived", [float(len(starts_after))], "", float(kills), at_least=True),
        _row("steps lost, trainer killed", lost["trainer"], "steps", float(SAVE_EVERY)),
        _row("steps lost, job requeued", lost["job"], "steps", float(SAVE_EVERY)),
        _row("down, trainer killed", down_s["trainer"], "s"),
        _row("down, job requeued", down_s["job"], "s"),
        _row("differences from the undisturbed run", [float(len(problems) + len(wrong))], "", 0.0),
    ]
    return rows, [*problems, *wrong]


def _leftovers(job: CheckpointJob) -> list[str]:
    left = [f"/dev/shm/{name}" for name in job.shared_memory()]
    return [f"left behind: {', '.join(left)}"] if left else []


def _row(system: str, values: list[float], unit: str, goal: float | None = None, *, at_least: bool = False) -> Row:
    if not values:
        return Row(CASE, system, None, unit, note="no kill of this kind")
    ordered = sorted(values)
    median = ordered[len(ordered) // 2]
    met = None
    if goal is not None:
        met = ordered[0] >= goal if at_least else ordered[-1] <= goal
    target = None if goal is None else f"{'>=' if at_least else '<='} {goal:g}"
    return Row(CASE, system, median, unit, (ordered[0], ordered[-1]), target, met, samples=tuple(values))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
