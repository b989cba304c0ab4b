"""A training job moves to another node on real Slurm, with data workers: no step is lost, none is made twice."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.ckpt_migrate import MIGRATE, measure
from benchmarks.clients.ckpt_job import HETSTREAM, CheckpointJob, differences, undisturbed
from hetstream.checkpoint.disk.ownership import history
from hetstream.hetjob.job.processes import start_child
from hetstream.hetjob.master.memory import LOG_FILE, Migration
from hetstream.hetjob.ports import Child

pytestmark = [pytest.mark.slurm, pytest.mark.every_release]


@pytest.mark.shows("seamless migration: the new job goes on from the very next step")
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_training_job_moves_to_another_node_without_a_step_lost(devcluster: Any) -> None:
    directory: Path = devcluster.out_dir / "migrated"
    directory.mkdir()
    rows, problems = measure(directory, devcluster.env, [MIGRATE])
    assert problems == []
    assert all(row.met is not False for row in rows), rows
    events = history(directory / "job" / "checkpoints")
    assert [one.event for one in events] == ["started", "handed over", "started", "took over", "ended"]
    hosts = {one.identity.job: one.identity for one in events if one.identity}
    assert len(hosts) == 2
    print(f"pause: {events[3].pause_s:.2f} s by the history, {rows[0].value:.2f} s by the ledger")


def start_command(argv: Sequence[str], environ: Mapping[str, str], log_file: Path) -> Child:
    return start_child(argv, env=environ, log=log_file)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_job_master_moves_its_trainer_to_a_job_with_more_memory(devcluster: Any) -> None:
    """With the job master's own environment, as after a memory warning; that this leads there is tested elsewhere."""
    directory: Path = devcluster.out_dir / "moved-by-itself"
    directory.mkdir()
    job = CheckpointJob(directory / "job", devcluster.env, steps=1_000_000, step_s=0.05)
    new = None
    try:
        job.submit()
        job.wait_for_steps(10)
        (master,) = [
            pid
            for pid, argv in job.processes().items()
            if argv[-3:-1] == ["internal", "master", "serve"] and argv[0] != "srun"
        ]
        words = Path(f"/proc/{master}/environ").read_bytes().decode().rstrip("\0").split("\0")
        environ = dict(word.split("=", 1) for word in words)
        assert "SLURM_STEP_ID" in environ
        log_file = job.directory / ".hetstream" / f"job-{job.job_id}" / LOG_FILE
        migration = Migration([str(HETSTREAM)], job.job_id, log_file, environ, start_command)
        migration.begin("3G")
        job.wait(lambda: re.search(r"^\d+$", log_file.read_text(), re.MULTILINE), "the id of the job that takes over")
        submitted = re.search(r"^\d+$", log_file.read_text(), re.MULTILINE)
        assert submitted
        new = job.resume_as(submitted[0])
        new.wait(lambda: [one.event for one in history(job.checkpoints)][-1:] == ["took over"], "the hand-over")
        new.wait_for_steps(10)
        # The 4 MB of each slot of the checkpoints come on top.
        memory = re.search(r"MinMemoryNode=(\S+)", devcluster.run("scontrol", "show", "job", submitted[0]))
        assert memory
        assert memory[1].startswith(("3G", "30", "31")), memory[1]
        for pid in new.trainers():
            found = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            assert f"SLURM_JOB_ID={submitted[0]}".encode() in found
        new.end_soon(20)
        new.wait_for_end()
        job.wait_for_end()
        migration.look()
        last = max(int(words[0]) for words in job.ledger() if words[0].isdigit())
        assert list(differences(job, undisturbed(directory / "truth", last))) == []
    finally:
        job.cancel()
        if new is not None:
            new.cancel()
    assert not [*job.shared_memory(), *new.shared_memory()]
