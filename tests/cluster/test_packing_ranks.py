"""Jobs of two processes on two GPUs of a node, on real Slurm: placed on both or on none, paused together, gone at once.

All train for real on emulated GPUs, by srun, in DistributedDataParallel.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from hetstream.hetjob.site.messages import NodeGpus, ShowGpus
from hetstream.slurm_plugin.client.packing_slurm import PackingSlurm
from hetstream.slurm_plugin.coordinator.table import GpuTable, GpuWatch, ProcessRow, look
from hetstream.slurm_plugin.packing.packer import Packer
from hetstream.slurm_plugin.packing.quota import Quotas
from tests.cluster.packing_site import RULES, Site
from tests.clusters import running_cluster
from tests.conftest import WaitUntil
from tests.devcluster.spec import ClusterShape
from tests.slurm_plugin.coordinator.conftest import TRAIN_RANKS, ranks_alone

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]
OPPORTUNISTIC = ("--partition=opp", "--comment=hetstream:gpus=2 hetstream:gpu-memory=128M")


class TwoGpus(Site):
    """A cluster whose nodes tell of all of their GPUs, by the code of `hetstream internal gpu-report`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        quotas = Quotas({"vision": 2}, partitions=("gpu",))
        self.packer = Packer(
            PackingSlurm(self.env), self.told, ["opp"], self.events.append, acting=True, quotas=lambda _: quotas,
            rules=RULES,
        )  # fmt: skip

    def tables(self) -> dict[str, GpuTable]:
        """What each node's coordinator says."""
        directories = sorted(self.sharing.parent.iterdir())
        return {directory.name: look(str(directory / "gpu.sock")) for directory in directories}

    def told(self) -> ShowGpus:
        nodes = []
        for node, table in self.tables().items():
            watch = GpuWatch(node, {gpu.gpu: int(gpu.gpu[-1]) for gpu in table.gpus})
            watch.see(table)
            nodes.append(NodeGpus(node, 0.0, watch.report(table).gpus))
        return ShowGpus(tuple(nodes), {})

    def submit_ranks(self, name: str, *words: str, wait_ms: int = 20, data_workers: str = "fork") -> str:
        """Submit a job of two ranks. They wait for data between steps: what runs beside them needs the cores, too."""
        train = f"{sys.executable} {TRAIN_RANKS} 1000000 64 {wait_ms} {name} {data_workers}"
        command = f"exec srun --kill-on-bad-exit=1 {train}"
        fixed = ("--parsable", "--ntasks=2", "--cpus-per-task=1", "--mem=1G", "--time=20", f"--output={name}.out")
        return self.run("sbatch", *fixed, *words, f"--wrap={command}")

    def made(self, name: str, rank: int) -> list[str]:
        path = self.out_dir / f"{name}.{rank}"
        return path.read_text().split("\n")[:-1] if path.exists() else []

    def ranks_go_on(self, name: str, steps: int) -> None:
        target = len(self.made(name, 1)) + steps
        self.wait_until(lambda: len(self.made(name, 1)) >= target, 90, f"{steps} more steps of {name}")

    def rows(self, job: str) -> list[tuple[str, ProcessRow]]:
        gpus = [(node, gpu) for node, table in self.tables().items() for gpu in table.gpus]
        return [(f"{node}:{gpu.gpu[-1]}", one) for node, gpu in gpus for one in gpu.processes if one.job == job]

    def has_opportunistic(self, job: str) -> bool:
        """Whether the job runs on both GPUs, by Slurm's books."""
        shown = self.run("scontrol", "--details", "--oneliner", "show", "job", job)
        return "JobState=RUNNING" in shown and all(re.search(rf"opp:p{number}:1\b", shown) for number in (0, 1))


Shape = tuple[int, int]  # nodes, and GPUs of each


@pytest.fixture(params=[(1, 2)], ids=["one node"])
def shape(request: pytest.FixtureRequest) -> Shape:
    return cast(Shape, request.param)


@pytest.fixture
def site(shape: Shape, request: pytest.FixtureRequest, wait_until: WaitUntil) -> Iterator[TwoGpus]:
    """A cluster; at the end nothing is left of any job."""
    with running_cluster("ranks", ClusterShape(*shape, 0, 6), packing=True) as running:
        site = TwoGpus(running.record, running.directory(request.node.name), wait_until)
        yield site
        print(*site.events, sep="\n")
        site.clear(wait_until)
        left = site.sharing.parent
        wait_until(lambda: not list(left.glob("*/*/[0-9]*")), 10, "the end of all that the Prolog wrote")


@pytest.mark.shows("a job with several GPUs of a node is placed, paused and upgraded as a whole")
@pytest.mark.shows("the packer places an opportunistic job beside a guaranteed one, and it goes on from its checkpoint")
def test_two_ranks_beside_a_guaranteed_job_are_one_job(site: TwoGpus, tmp_path: Path) -> None:
    site.start_guaranteed()  # on one of the two GPUs
    site.wait_until(lambda: site.is_told_of(site.guaranteed), 60, "the node's word")
    job = site.submit_ranks("ranks", *OPPORTUNISTIC, data_workers="spawn")
    site.pack_until(lambda: site.happened("started"), "a start on both GPUs")
    assert site.has_opportunistic(job)
    site.ranks_go_on("ranks", 5)
    rows = site.rows(job)
    assert [(gpu, one.rank, one.job_class) for gpu, one in rows] == [
        ("gpu0:0", 0, "opportunistic"), ("gpu0:1", 1, "opportunistic"),
    ]  # fmt: skip
    site.kill("coordinator gpu0")
    site.guaranteed_goes_on(10)
    before = site.made("ranks", 0), site.made("ranks", 1)
    site.guaranteed_goes_on(10)
    assert (site.made("ranks", 0), site.made("ranks", 1)) == before, "they went on without a coordinator"
    site.start_again("coordinator gpu0")
    site.ranks_go_on("ranks", 5)
    os.kill(rows[1][1].pid, signal.SIGKILL)
    site.wait_until(lambda: "RUNNING" not in site.run("squeue", "-h", "-j", job, "-o", "%T"), 60, "the job's end")
    site.wait_until(lambda: not site.rows(job), 20, "the end of both ranks")
    site.check_guaranteed()
    expected = ranks_alone(tmp_path, 10)
    assert [site.made("ranks", rank)[:10] for rank in (0, 1)] == expected


@pytest.mark.slow
def test_two_ranks_beside_two_guaranteed_ranks(site: TwoGpus, tmp_path: Path) -> None:
    guaranteed = site.submit_ranks("guaranteed", "--partition=gpu", "--gpus=2", wait_ms=60)
    site.ranks_go_on("guaranteed", 10)
    site.wait_until(lambda: site.is_told_of(guaranteed), 60, "the node's word")
    job = site.submit_ranks("ranks", *OPPORTUNISTIC)
    site.pack_until(lambda: site.happened("started"), "a start on both GPUs")
    site.ranks_go_on("ranks", 5)
    assert [(gpu, one.rank) for gpu, one in site.rows(guaranteed)] == [("gpu0:0", 0), ("gpu0:1", 1)]
    assert all(one.paused_s > 0 for _, one in site.rows(job)), "they launched whenever they liked"
    site.ranks_go_on("guaranteed", 10)
    expected = ranks_alone(tmp_path, 10)
    for name in ("ranks", "guaranteed"):
        site.ranks_go_on(name, 5)
        assert [site.made(name, rank)[:10] for rank in (0, 1)] == expected


# On one node it is less: there is no other one that could hear too early.
@pytest.mark.shows("a job with several GPUs of a node is placed, paused and upgraded as a whole")
@pytest.mark.parametrize(
    "shape",
    [pytest.param((1, 2), id="one node"), pytest.param((2, 1), id="two nodes")],
    indirect=True,
)
@pytest.mark.slow
def test_a_gang_is_upgraded_where_it_runs(site: TwoGpus, shape: Shape, tmp_path: Path) -> None:
    """All of its GPUs are held before any of its nodes hears of it; its processes go on."""
    nodes, gpus = shape
    wish = f"--comment=hetstream:class=guaranteed hetstream:gpus={gpus} hetstream:gpu-memory=128M"
    job = site.submit_ranks("ranks", "--partition=opp", "--account=vision", f"--nodes={nodes}", wish)
    site.pack_until(lambda: site.happened("started"), "a start on both GPUs")
    site.ranks_go_on("ranks", 5)
    before = site.rows(job)
    assert {one.job_class for _, one in before} == {"opportunistic"}
    site.pack_until(lambda: site.happened("upgraded"), "its upgrade")
    after = site.rows(job)
    assert [(gpu, one.pid, one.job_class) for gpu, one in after] == [
        (gpu, one.pid, "guaranteed") for gpu, one in before
    ]  # fmt: skip
    holders = site.run("squeue", "-h", "-t", "R", "-p", "gpu", "-o", "%k").split()
    assert holders == [f"hetstream:holds={job}@0"] * 2
    site.ranks_go_on("ranks", 5)
    site.run("scancel", job)
    site.pack_until(lambda: not site.run("squeue", "-h"), "the end of what kept its GPUs")
    assert [site.made("ranks", rank)[:10] for rank in (0, 1)] == ranks_alone(tmp_path, 10)
