"""How soon an opportunistic job starts, yields and goes on, on real Slurm: beside planned jobs and others' starts."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

import pytest

from benchmarks.clients.ckpt_job import CheckpointJob
from tests.cluster.packing_site import Site, held_job

pytestmark = [pytest.mark.slurm, pytest.mark.every_release, pytest.mark.timeout(300)]
# Backfill looks each second here, and a busy machine is slow: without its least time limit the job would wait until the
# planned job has ended.
_STARTS_S = 10.0
# Ends of jobs, and a cycle of backfill. A job that is to give way first saves its state: Slurm's KillWait at most.
_LATE_S, _KILL_WAIT_S = 5.0, 30.0
# The coordinator looks at grants each half second and renews orders each 20 ms; then the mini-batch that runs comes to
# its end. The rest is for a busy machine.
_YIELDS_S = 1.0
# Slurm's end of the job, its Epilog, and the coordinator's next look at grants.
_TOLD_S = 3.0
# No mini-batch takes as long.
_PAUSED_S = 2.0


@pytest.fixture
def job(site: Site) -> Iterator[CheckpointJob]:
    with held_job(site, 100_000) as job:
        yield job


@dataclass
class OwnJob:
    """A job with GPUs of their own, without an agent."""

    site: Site
    options: tuple[str, ...]

    def __post_init__(self) -> None:
        directory = self.site.out_dir
        script = f"date +%s.%N >{directory}/begun; until [ -e {directory}/end ]; do sleep 0.05; done"
        options = ("--partition=gpu", "--mem=100", "--time=5", "--output=/dev/null", *self.options)
        self.number = self.site.run(
            "sbatch", "--parsable", *options, f"--wrap={script}; date +%s.%N >{directory}/ended"
        ).strip()

    def end(self) -> None:
        (self.site.out_dir / "end").touch()
        self.site.wait_until(lambda: (self.site.out_dir / "ended").exists(), 20, "its end")

    def shown(self) -> str:
        return self.site.run("scontrol", "show", "job", self.number)


def moment(shown: str, name: str) -> datetime | None:
    found = re.search(rf"\b{name}=(\d\S+)", shown)
    return datetime.fromisoformat(found[1]) if found else None


def end(job: CheckpointJob) -> None:
    """Let it end by itself, if it runs."""
    if job.state() == "RUNNING":
        job.end_soon(5)
        job.wait_for_end()


def steps_at(job: CheckpointJob) -> list[float]:
    """When each step ended."""
    lines = (job.directory / "run" / "times").read_text().splitlines()
    return [float(line.split()[1]) for line in lines if line[0].isdigit() and len(line.split()) == 2]


@pytest.mark.shows("a planned job does not starve an opportunistic one, and its planned start does not move")
@pytest.mark.slow
@pytest.mark.parametrize("cpus", [1, 3])
def test_a_planned_start_starves_no_opportunistic_job_and_is_not_delayed_by_one(
    site: Site, job: CheckpointJob, cpus: int
) -> None:
    """Its time limit reaches into the planned start. If that needs its CPUs (3 of 4), it gives way; else it goes on."""
    planned = OwnJob(site, ("--gpus=2", f"--cpus-per-task={cpus}"))

    def planned_start() -> datetime | None:
        return moment(planned.shown(), "StartTime")

    def shown() -> str:
        return site.run("scontrol", "show", "job", job.job_id)

    site.wait_until(planned_start, 30, "a planned start")
    before = planned_start()
    assert before is not None
    assert "TimeLimit=00:30:00" in shown()
    placed_at = time.monotonic()
    site.pack_until(lambda: "JobState=RUNNING" in shown(), "a start in front of the planned job")
    started_s = time.monotonic() - placed_at
    site.pack_until(lambda: site.happened("started"), "its own time limit")
    started = moment(shown(), "StartTime")
    assert started is not None
    assert "TimeLimit=00:30:00" in shown()
    job.wait_for_steps(2)
    after = planned_start()
    assert after is not None
    moved_s = abs((after - before).total_seconds())
    site.run("scancel", site.guaranteed)
    site.wait_until(lambda: "JobState=RUNNING" in planned.shown(), 60, "the start of the planned job")
    free = moment(site.run("scontrol", "show", "job", site.guaranteed), "EndTime")
    began = planned_start()
    assert began is not None
    assert free is not None
    late_s = (began - free).total_seconds()
    print(f"started in front of a planned job {started_s:.1f} s after it was placed; that job's start moved by "
          f"{moved_s:.0f} s, and came {late_s:.0f} s after its GPUs were free")  # fmt: skip
    assert started_s < _STARTS_S
    assert moved_s <= 1, "a second in which Slurm looked"
    gives_way = cpus > 1
    assert late_s <= _LATE_S + (_KILL_WAIT_S if gives_way else 0.0)
    assert ("Restarts=1" in shown()) == gives_way
    assert ("JobState=RUNNING" in shown()) != gives_way
    site.run("scancel", planned.number)
    end(job)


@pytest.mark.shows("an opportunistic job yields soon after a job was given its GPU, and goes on when that has ended")
def test_an_opportunistic_job_yields_to_a_job_that_starts_and_hears_when_it_has_ended(
    site: Site, job: CheckpointJob
) -> None:
    site.pack_until(lambda: site.happened("started"), "a start beside the guaranteed job")
    job.wait_for_steps(2)
    site.run("scancel", site.guaranteed)
    site.wait_until(lambda: not site.processes("guaranteed"), 30, "the end of the guaranteed job")
    alone = len(steps_at(job))
    site.wait_until(lambda: len(steps_at(job)) > alone + 20, 30, "steps that nobody holds up")
    own = OwnJob(site, ("--gpus=1",))
    grant = site.sharing / "grants" / f"{own.number}.json"
    site.wait_until(lambda: (site.out_dir / "begun").exists(), 30, "its start")
    assert json.loads(grant.read_text())["gpus"] == [site.gpu().gpu], "it has the other GPU"
    granted_at = grant.stat().st_mtime
    site.wait_until(lambda: time.time() - steps_at(job)[-1] > _PAUSED_S, 30, "a pause")
    before = steps_at(job)
    batch_s = max(later - earlier for earlier, later in zip(before[-20:], before[-19:], strict=False))
    yields_s = max(0.0, before[-1] - granted_at)
    own.end()
    site.wait_until(lambda: len(steps_at(job)) > len(before), 30, "a step on a free GPU")
    told_s = steps_at(job)[len(before)] - float((site.out_dir / "ended").read_text())
    print(f"yielded {yields_s:.2f} s after the start of a job with a mini-batch of {batch_s:.2f} s, and went on "
          f"{told_s:.2f} s after its end")  # fmt: skip
    assert yields_s < _YIELDS_S + batch_s
    assert told_s < _TOLD_S + batch_s
    assert not site.happened("evicted")
    end(job)
