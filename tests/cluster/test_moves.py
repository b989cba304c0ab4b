"""A companion far from its trainer moves beside it on real Slurm. Hosts have names of their own; CPU work is sleeps."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.clients.elastic_job import ElasticJob
from hetstream.hetjob.site.client import UnixAddress
from tests.cluster.networked import Cluster, networked_cluster
from tests.devcluster.spec import ClusterShape

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.every_release]
# Beside a trainer of two CPUs two data workers have room, and elsewhere more than are wanted.
SHAPE = ClusterShape(gpu_nodes=1, gpus_per_node=1, cpu_nodes=2, cpus_per_node=4)
WaitUntil = Callable[..., None]


@pytest.fixture(scope="module")
def cluster(release: str, running_cluster: Callable[..., Any]) -> Iterator[Cluster]:
    with networked_cluster(release, SHAPE, running_cluster) as networked:
        yield networked


@pytest.fixture
def daemon(cluster: Cluster, tmp_path: Path, wait_until: WaitUntil) -> Iterator[UnixAddress]:
    """A site daemon that divides the CPUs of all nodes."""
    address = UnixAddress(tmp_path / "socket")
    options = ["--allocate", "--pool", "gpu,cpu", "--interval", "5", "--state-dir", str(tmp_path / "state")]
    argv = [sys.executable, "-m", "hetstream.slurm_plugin.cli", "daemon", "--address", str(address), *options]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(argv, env=cluster.env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        wait_until(address.path.exists, 60, "the daemon")
        yield address
    finally:
        process.kill()
        process.wait(60)
        print((tmp_path / "log").read_text())


def test_a_remote_companion_moves_beside_its_trainer_when_there_is_room(
    cluster: Cluster, daemon: UnixAddress, wait_until: WaitUntil
) -> None:
    """On the trainer's host a data worker makes a step in 0.1 s, elsewhere in 0.25 s; three are too few to feed it."""
    held = ["sbatch", "--parsable", "-p", "gpu", "-c1", "--mem-per-cpu=1", "--output=/dev/null"]
    other = cluster.run(*held, "--wrap=exec sleep 900").strip()
    wait_until(lambda: cluster.run("squeue", "-hj", other, "-o", "%t").strip() == "R", 60)
    env = {**cluster.env, "HETSTREAM_DAEMON": str(daemon)}
    directives = "--data-workers=0-3 --data-worker-cpus=1 --data-worker-cooldown=2 --data-worker-partition=gpu,cpu"
    costs = ("--make-s=0.1", "--far-s=0.15", "--step-s=0.01", "--num-steps=60")
    job = ElasticJob(cluster.out_dir / "moves", env, f"{directives} --total-steps=100000", *costs)

    def places() -> dict[str, str]:
        """Running companions: job id -> node."""
        rows = cluster.run("squeue", "-h", "-t", "R", "-o", "%A %N").splitlines()
        return {job_id: node for job_id, node in map(str.split, rows) if job_id in running}

    try:
        wait_until(lambda: len(job.companions("R")) == 3, 180, "three companions")
        running = set(job.companions("R"))
        before = places()
        assert sorted(node == "gpu0" for node in before.values()) == [False, False, True], before
        cluster.run("scancel", other)
        moved = lambda: [one for one in job.events("DataWorkersChanged") if "works in its place" in one["cause"]]  # noqa: E731
        wait_until(moved, 180, "a move")
        (event, *_) = moved()
        said = re.match(r"companion (\d+) is on node=(cpu\d), and node=gpu0 of a trainer has room: ", event["cause"])
        successor = re.search(r"; companion (\d+) works in its place", event["cause"])
        assert said
        assert successor
        assert (event["action"], event["count"], before[said[1]]) == ("drain", 1, said[2])
        running = {*running, successor[1]}
        wait_until(lambda: said[1] not in places(), 60, "the end of the other one")
        after = places()
        assert after == {**{key: node for key, node in before.items() if key != said[1]}, successor[1]: "gpu0"}
        log = job.home / "master.log"
        wait_until(lambda: f"companion job={said[1]} ended" in log.read_text(), 60, "the job master to see it")
        first, _, later = log.read_text().partition(f"companion job={successor[1]} takes its place when it works")
        assert later
        assert f"companion job={said[1]} ended" not in first, "the successor first"
        steps = len(job.steps())
        wait_until(lambda: len(job.steps()) > steps + 130, 90, "two epochs")
        assert len(moved()) == 1, "there is no more room, and where it is now it stays"
        assert all(one["orderly"] for one in job.events("DataWorkerLost"))
        assert not job.events("LeaseRevoked")
        known = re.compile(r"^step +T_grad \+ T_upd: [\d.]+ ms ± ", re.MULTILINE)
        wait_until(lambda: known.search(job.hetstream("why", job.job_id)), timeout_s=90, what="the time of a step")
        job.stop()
        wait_until(job.has_ended, timeout_s=120, what="no job that is left")
    finally:
        print((job.home / "master.log").read_text() if (job.home / "master.log").exists() else "no master.log")
        cluster.run("scancel", "--quiet", other, job.job_id)
        wait_until(job.has_ended, timeout_s=120, what="an empty queue")
    assert job.ledger_problems(240) == []
