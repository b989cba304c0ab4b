"""`make bench-ckpt_requeue`: a training job is killed and requeued on real Slurm, twenty times. Is the result the same?

Half of the times its trainer is killed and its script starts it again on the same node; half of the times Slurm
requeues the job. docs/benchmarks-data.md explains the rows.
"""

from __future__ import annotations

import random
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks import harness, machine
from benchmarks.clients.ckpt_job import SAVE_EVERY, CheckpointJob, differences, undisturbed
from benchmarks.cluster import throw_away_cluster, why_no_cluster
from benchmarks.harness import Row, row_of

CASE = "kills and requeues of a training job"
KILLS = 20
# Trained in each start before it is killed: random, so that kills come at any moment of the save interval.
MIN_STEPS, MAX_STEPS = 8, 30
SEED = 20


def main() -> int:
    """Run the benchmark."""
    args = harness.parser("Kill and requeue a training job on a throw-away Slurm cluster.", repeats=1).parse_args()
    if reason := why_no_cluster():
        harness.say(reason)
        return 2
    kills = 2 if args.quick else KILLS
    with throw_away_cluster() as (directory, environ):
        rows, problems = measure(directory, environ, kills)
    context = {
        "machine": machine.describe(),
        "versions": machine.versions("torch"),
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
    steps = (kills + 1) * MAX_STEPS
    truth = undisturbed(directory / "truth", steps)
    job = CheckpointJob(directory / "job", environ, steps)
    problems: list[str] = []
    down_s: dict[str, list[float]] = {"trainer": [], "job": []}
    try:
        job.submit()
        for what, seconds in _kill_again_and_again(job, kills, problems):
            down_s[what].append(seconds)
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
    problems += [
        f"start {number + 1} went on from {start.source}, not from {expected}"
        for number, start in enumerate(starts_after)
        if start.source != (expected := "disk" if number % 2 else "memory")
    ]
    rows = [
        row_of(CASE, "kills and requeues survived", [float(len(starts_after))], "", at_least=kills),
        row_of(CASE, "steps lost, trainer killed", lost["trainer"], "steps", at_most=SAVE_EVERY),
        row_of(CASE, "steps lost, job requeued", lost["job"], "steps", at_most=SAVE_EVERY),
        row_of(CASE, "down, trainer killed", down_s["trainer"], "s"),
        row_of(CASE, "down, job requeued", down_s["job"], "s"),
        row_of(CASE, "differences from the undisturbed run", [float(len(problems))], "", at_most=0),
    ]
    return rows, problems


def _kill_again_and_again(job: CheckpointJob, kills: int, problems: list[str]) -> Iterator[tuple[str, float]]:
    """What was killed, and for how many seconds nothing was trained; what is not as it must be joins `problems`."""
    dice = random.Random(SEED)
    for number in range(kills):
        job.wait_for_steps(dice.randint(MIN_STEPS, MAX_STEPS))
        if (job.directory / "run" / "result").exists():
            problems.append(f"training was over after {number} of {kills} kills")
            return
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
        down_s = time.monotonic() - began_s
        harness.say(f"kill {number + 1}: {what}, down {down_s:.1f} s, {job.starts()[-1]}")
        yield what, down_s


def _leftovers(job: CheckpointJob) -> list[str]:
    left = [f"/dev/shm/{name}" for name in job.shared_memory()]
    return [f"left behind: {', '.join(left)}"] if left else []


if __name__ == "__main__":
    sys.exit(main())
