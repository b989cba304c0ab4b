"""slurmctld is killed and started again at each step of an opportunistic job's life, on real Slurm: no job is lost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.clients.ckpt_job import SAVE_EVERY, CheckpointJob, differences, undisturbed
from tests.cluster.packing_site import Site, held_job

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.every_release, pytest.mark.timeout(400)]
# It trains for longer than slurmctld takes to write down that it runs.
STEPS = 400


@pytest.fixture
def job(site: Site) -> Iterator[CheckpointJob]:
    with held_job(site, STEPS) as job:
        write_down(site)
        yield job


def write_down(site: Site) -> None:
    """Wait until slurmctld has written down what it knows: it forgets what came in the seconds before it was killed."""
    state, word = Path(site.record.state_dir) / "state" / "job_state", f"at-{time.time_ns()}"
    site.run("scontrol", "update", f"JobId={site.guaranteed}", f"AdminComment={word}")

    def is_written() -> bool:
        try:
            return word.encode() in state.read_bytes()
        except FileNotFoundError:  # slurmctld puts another one in its place
            return False

    site.wait_until(is_written, 20, "slurmctld's state")


def kill_and_start(site: Site) -> None:
    site.kill("slurmctld")
    site.start_again("slurmctld")


def killed_at(site: Site, monkeypatch: pytest.MonkeyPatch, command: str, *, is_heard: bool = False) -> list[str]:
    """Have slurmctld killed once, just before the packer's next command of this kind, or just after it has heard it.

    Returns:
        For which jobs the command was sent.
    """
    slurm: Any = site.packer._slurm
    act, killed = getattr(slurm, command), list[str]()

    def acting(job: str, *more: Any) -> None:
        killed.append(job)
        if is_heard:
            act(job, *more)
        if len(killed) == 1:
            kill_and_start(site)
        if not is_heard:
            act(job, *more)

    monkeypatch.setattr(slurm, command, acting)
    return killed


@pytest.mark.shows("slurmctld is killed while jobs are held, placed, running or requeued, and no job is lost")
@pytest.mark.parametrize("point", ["held", "placed", "running", "evicted", "requeued"])
def test_a_slurmctld_that_is_killed_loses_no_job(
    site: Site, job: CheckpointJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    truth = undisturbed(tmp_path / "truth", STEPS)
    if point == "held":
        kill_and_start(site)
    killed = killed_at(site, monkeypatch, "release") if point == "placed" else []
    site.pack_until(lambda: site.happened("started"), "a start")
    assert set(killed) == ({job.job_id} if point == "placed" else set())
    job.wait_for_steps(SAVE_EVERY + 1)
    write_down(site)
    if point == "running":
        kill_and_start(site)
        site.guaranteed_goes_on(5)
    if point in ("evicted", "requeued"):
        site.complaint = "it goes on although it should pause"
        killed = killed_at(site, monkeypatch, "requeue_held", is_heard=point == "requeued")
        ends = "evicted" if point == "evicted" else "taken back"
        site.pack_until(lambda: site.happened(ends), "its eviction")
        site.complaint = ""
        assert killed[0] == job.job_id
        site.pack_until(lambda: site.happened("started") == 2, "a second start")
    job.wait_for_end()
    assert list(differences(job, truth)) == []
    assert len(job.starts()) == (2 if point in ("evicted", "requeued") else 1)
    site.check_guaranteed()
