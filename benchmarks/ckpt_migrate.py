"""`make bench-ckpt_migrate`: a training job moves to another node on real Slurm. How long does nobody train?

Beside it, in the same run, what the same move costs by hand: cancel, submit again, queue, start Python and torch, make
the model, restore. docs/benchmarks-data.md explains the rows.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks import harness, machine
from benchmarks.clients.ckpt_job import CheckpointJob, differences, undisturbed
from benchmarks.cluster import throw_away_cluster, why_no_cluster
from benchmarks.harness import Row, row_of

CASE = "a training job moves to another node"
MIGRATE, RESUBMIT = "hetstream migrate", "scancel and sbatch"
ROUNDS = 5
STEP_S = 0.05
# So much is trained between two moves, and behind the last one.
NUM_STEPS = 20


def main() -> int:
    """Run the benchmark."""
    args = harness.parser("Move a training job on a throw-away Slurm cluster.", repeats=1).parse_args()
    if reason := why_no_cluster():
        harness.say(reason)
        return 2
    rounds = 1 if args.quick else ROUNDS
    with throw_away_cluster() as (directory, environ):
        rows, problems = measure(directory, environ, [MIGRATE, RESUBMIT] * rounds)
    context = {
        "machine": machine.describe(),
        "versions": machine.versions("torch"),
        "notes": [
            f"Pause: from the end of the last step before the move to the moment when the first one behind it can "
            f"begin. A step takes {1000 * STEP_S:g} ms and a little; a small model; trainer, writer, data worker and "
            "job master are steps of one hetjob. The queue is empty: the new job starts at once in both cases.",
            "The undisturbed run is one process without Slurm.",
        ],
    }
    failures = {f"problem {number}": text for number, text in enumerate(problems, start=1)}
    return harness.finish("ckpt_migrate", args.out, rows, failures, context)


def measure(directory: Path, environ: Mapping[str, str], moves: Sequence[str]) -> tuple[list[Row], list[str]]:
    """Move one training again and again, and compare what it gives with a run that nobody disturbed.

    Args:
        directory: an empty one.
        environ: in which Slurm's commands reach a cluster.
        moves: by which means each.

    Returns:
        The rows, and what is not as it must be.
    """
    job = CheckpointJob(directory / "job", environ, steps=1_000_000, step_s=STEP_S)
    jobs: list[CheckpointJob] = [job]
    problems: list[str] = []
    try:
        job.submit()
        for move in moves:
            jobs[-1].wait_for_steps(NUM_STEPS)
            jobs.append(_move(jobs[-1], move))
            harness.say(f"{move}: job {jobs[-2].job_id} to {jobs[-1].job_id}, {jobs[-1].starts()[-1:]}")
        jobs[-1].wait_for_steps(1)
        jobs[-1].end_soon(2 * NUM_STEPS)
        for one in jobs:
            one.wait_for_end()
        truth = undisturbed(directory / "truth", max(int(words[0]) for words in job.ledger() if words[0].isdigit()))
        problems += differences(job, truth)
    except (TimeoutError, RuntimeError, ValueError) as error:
        problems.append(str(error))
    finally:
        for one in jobs:
            one.cancel()
    for one in jobs:
        for name in one.shared_memory():
            problems.append(f"left behind: /dev/shm/{name}")
            shutil.rmtree(Path("/dev/shm") / name, ignore_errors=True)
    starts, pauses_s = job.starts()[1:], job.pauses_s()
    if len(starts) != len(moves):
        problems.append(f"{len(starts)} starts behind the first, {len(moves)} moves")
    lost = [abs(start.last - start.step) for start in starts]
    by_move = {
        name: [s for s, move in zip(pauses_s, moves, strict=False) if move == name] for name in dict.fromkeys(moves)
    }
    rows = [row_of(CASE, f"pause, {name}", values, "s") for name, values in by_move.items()]
    if by_move.get(MIGRATE) and by_move.get(RESUBMIT):
        ratios = [other / own for own, other in zip(by_move[MIGRATE], by_move[RESUBMIT], strict=False)]
        rows.append(row_of(CASE, f"{RESUBMIT} / {MIGRATE}", ratios, "x"))
    rows += [
        row_of(CASE, "steps lost or made twice", [float(sum(lost))], "steps", at_most=0),
        row_of(CASE, "differences from the undisturbed run", [float(len(problems))], "", at_most=0),
    ]
    return rows, problems


def _move(job: CheckpointJob, move: str) -> CheckpointJob:
    if move == MIGRATE:
        return job.migrate(f"--exclude={node_of(job)}")
    job.run("scancel", job.job_id)
    job.wait_for_end()
    new = job.resubmit()
    starts = len(job.starts())
    new.wait(lambda: len(new.starts()) > starts, "the start of the job that was submitted again")
    return new


def node_of(job: CheckpointJob) -> str:
    """Where the trainer runs."""
    lines = job.run("squeue", "--noheader", f"--jobs={job.job_id}", "--format=%i %N").splitlines()
    return next(line.split()[1] for line in lines if line.split()[0] == f"{job.job_id}+0")


if __name__ == "__main__":
    sys.exit(main())
