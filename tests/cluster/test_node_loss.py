"""A node of a training job is lost with all of its memory, on nodes with networks and shared memory of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from hetstream.checkpoint.disk import commit
from hetstream.slurm_plugin.client.run import run_slurm
from tests.cluster.networked import Cluster, networked_cluster
from tests.devcluster.spec import ClusterShape

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.every_release, pytest.mark.timeout(600)]

PROGRAM = Path(__file__).parent / "programs" / "train_replicated.py"
HETSTREAM = Path(sys.executable).with_name("hetstream")
STEPS, GATE, RANKS = 40, 12, 2
# Slurm takes a node for DOWN half a minute after it has fallen silent.
TIMEOUT_S = 240.0
# The first node has the batch script, the last one is spare.
NODES = ("gpu0", "gpu1", "gpu2")
# From a checkpoint writer's second write on the disk is full, unless the file of that write is there.
FULL = {f"full-{number}": f"writer.chosen:{number}:full:/dev/shm/full-{number}" for number in range(2, 20)}
SCRIPT = f"""#!/bin/bash
#SBATCH --job-name=loss --output=out.txt --open-mode=append --gres=gpu:1 --cpus-per-task=2 --mem=2G --time=20
#HETSTREAM --checkpoint=checkpoints --checkpoint-size=4M --checkpoint-replicas=1
for start in 1 2 3; do
  srun --nodes={RANKS} --ntasks={RANKS} {sys.executable} {PROGRAM} "$PWD" {STEPS} {GATE} && exit 0
done
exit 1
"""
WaitUntil = Callable[..., None]


@dataclass
class Job:
    """The training job; every start of its trainers goes on from what it finds."""

    cluster: Cluster
    directory: Path
    job_id: str
    wait_until: WaitUntil

    def wait(self, condition: Callable[[], object], what: str) -> None:
        self.wait_until(condition, TIMEOUT_S, what)

    def story(self) -> str:
        logs = [self.directory / "out.txt", *self.directory.glob(".hetstream/*/writers/*.log")]
        return "\n".join(f"--- {log.name}\n{log.read_text()[-2000:]}" for log in logs if log.exists())

    def texts(self, name: str) -> list[str]:
        """What each rank has written under a name; nothing before all have."""
        paths = [self.directory / f"{name}{rank}" for rank in range(RANKS)]
        return [path.read_text() for path in paths] if all(path.exists() for path in paths) else []

    def on_disk(self) -> list[int]:
        """Steps of the checkpoints."""
        return [generation.step for generation in commit.committed(self.directory / "checkpoints")]

    def show(self) -> str:
        return self.cluster.run("scontrol", "show", "job", self.job_id)

    def has_ended(self) -> bool:
        return re.search(r"JobState=(PENDING|RUNNING|COMPLETING)", self.show()) is None

    def goes_on_from_memory(self, sources: str) -> None:
        """See that the second start of each rank has, bit by bit, what was saved at the gate.

        It was not on disk when the node was lost, and cannot have got there without the part of that node.
        """
        self.wait(lambda: all(text.count("\n") == 2 for text in self.texts("restored-")), "the second start")
        restored = [text.splitlines()[1] for text in self.texts("restored-")]
        assert restored == [f"{GATE} {digest}" for digest in self.texts(f"at-{GATE}.")]
        out = (self.directory / "out.txt").read_text()
        assert f"restored step {GATE} of attempt 1 from {sources}\n" in out, self.story()
        # From now on the disk has room; else Slurm would end the checkpoint writers before the last step is there.
        for node in filter(self.cluster.processes, NODES):
            for name in FULL:
                (self.cluster.shared_memory(node) / name).touch()

    def ends_as(self, truth: list[str]) -> None:
        """See that the job ends as if nothing had happened."""
        self.wait(self.has_ended, "the end of the job")
        assert "ExitCode=0:0" in self.show(), self.story()
        assert self.texts("result-") == truth
        assert self.on_disk()[0] == STEPS


@pytest.fixture
def cluster(release: str) -> Iterator[Cluster]:
    """A cluster for one test: what is lost stays lost."""
    shape = ClusterShape(gpu_nodes=len(NODES), gpus_per_node=1, cpu_nodes=0, cpus_per_node=4)
    with networked_cluster(release, shape) as networked:
        yield networked


@pytest.fixture
def submit(cluster: Cluster, wait_until: WaitUntil) -> Iterator[Callable[..., Job]]:
    """A function that submits the job and waits until all ranks are at the gate, with the disk behind."""
    jobs: list[Job] = []

    def act(*options: str) -> Job:
        directory = cluster.out_dir / "loss"
        directory.mkdir()
        (directory / "train.sbatch").write_text(SCRIPT)
        environ = {**cluster.env, "HETSTREAM_CKPT_FAULT": ",".join(FULL.values()), "OMP_NUM_THREADS": "1"}
        argv = [str(HETSTREAM), "sbatch", "--parsable", *options, "train.sbatch"]
        job = Job(cluster, directory, run_slurm(argv, env=environ, cwd=str(directory)).stdout.strip(), wait_until)
        jobs.append(job)
        job.wait(lambda: job.texts(f"at-{GATE}."), "the gate")
        assert job.on_disk() == [1], "the disk is to be behind"
        return job

    yield act
    for job in jobs:
        print(job.show(), job.story())


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The final state of each rank where nothing is lost."""
    directory = tmp_path_factory.mktemp("truth")
    argv = [sys.executable, str(PROGRAM), str(directory), str(STEPS), str(GATE)]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    environ |= {"SLURM_NTASKS": str(RANKS), "SLURM_STEP_ID": "0", "OMP_NUM_THREADS": "1"}
    ranks = [subprocess.Popen(argv, env={**environ, "SLURM_PROCID": str(rank)}) for rank in range(RANKS)]
    assert [process.wait(TIMEOUT_S) for process in ranks] == [0] * RANKS
    return [(directory / f"result-{rank}").read_text() for rank in range(RANKS)]


@pytest.mark.shows("after the loss of a host, replicas restore the newest common generation bit by bit")
def test_a_step_that_starts_again_on_a_spare_node_has_lost_nothing(
    cluster: Cluster, submit: Callable[..., Job], truth: list[str]
) -> None:
    """With `--no-kill` the job goes on without the node, and its script starts the trainers on those that are left."""
    job = submit("--nodes=3", "--ntasks-per-node=1", "--no-kill")
    cluster.lose("gpu1")
    (job.directory / "gate").touch()
    job.goes_on_from_memory("memory, replica")
    job.ends_as(truth)


@pytest.mark.shows("after the loss of a host, replicas restore the newest common generation bit by bit")
@pytest.mark.parametrize(
    ("lost", "sources"),
    [
        ("gpu1", "memory, replica"),
        # The node with the batch script. Both ranks have moved: both come from what was on the node that is left.
        ("gpu0", "replica"),
    ],
)
def test_a_requeued_job_that_comes_back_to_the_node_that_is_left_has_lost_nothing(
    lost: str, sources: str, cluster: Cluster, submit: Callable[..., Job], truth: list[str]
) -> None:
    """What is not on disk stays in the memory of the node that is left, with the replica of the lost one."""
    job = submit("--nodes=2", "--ntasks-per-node=1")
    cluster.lose(lost)
    job.goes_on_from_memory(sources)
    assert "Restarts=1" in job.show()
    job.ends_as(truth)


@pytest.mark.shows("after the loss of a host, replicas restore the newest common generation bit by bit")
def test_a_job_that_stays_without_its_script_goes_on_when_it_is_requeued(
    cluster: Cluster, submit: Callable[..., Job], truth: list[str]
) -> None:
    """With `--no-kill` Slurm keeps the job also without the node of its batch script: nobody starts anything there."""
    job = submit("--nodes=2", "--ntasks-per-node=1", "--no-kill")
    cluster.lose("gpu0")
    job.wait(lambda: cluster.state("gpu0").startswith("down"), "Slurm's verdict on the node")
    job.wait(lambda: "1.1" not in cluster.run("squeue", "--noheader", "--steps"), "the end of the trainers' step")
    assert "JobState=RUNNING" in job.show()
    cluster.run("scontrol", "requeue", job.job_id)
    job.goes_on_from_memory("replica")
    job.ends_as(truth)
