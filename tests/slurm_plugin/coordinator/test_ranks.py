"""Jobs of two processes on two emulated GPUs, launched by torchrun or by hand; all of it real processes and signals."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from hetstream.hetjob.gpu.emulated_file import EmulatedGpuFile
from hetstream.slurm_plugin.coordinator.table import ProcessRow, look
from tests.conftest import WaitUntil
from tests.processes import children_of
from tests.slurm_plugin.coordinator.conftest import TRAIN, TRAIN_RANKS, Node, Program, ranks_alone
from tests.slurm_plugin.coordinator.test_processes import alone

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


@pytest.fixture
def node(tmp_path: Path, wait_until: WaitUntil) -> Iterator[Node]:
    """A machine with two emulated GPUs, and nothing on them."""
    node = Node(tmp_path, wait_until, num_gpus=2)
    node.emulate()
    try:
        yield node
    finally:
        node.stop()


class Gang:
    """A job of two processes."""

    def __init__(
        self, node: Node, job_class: str, gpus: Sequence[str], wait_ms: float = 0, *, data_workers: str = "fork"
    ) -> None:
        self.node, self.losses = node, node.directory / f"{job_class}-losses"
        argv = [*TORCHRUN, str(TRAIN_RANKS), "100000", "64", str(wait_ms), str(self.losses), data_workers]
        self.program = node.share(job_class, ",".join(gpus), argv)

    def made(self, rank: int) -> list[str]:
        path = self.losses.with_name(f"{self.losses.name}.{rank}")
        return path.read_text().split("\n")[:-1] if path.exists() else []

    def goes_on(self, steps: int) -> None:
        target = len(self.made(1)) + steps

        def is_done() -> bool:
            return len(self.made(1)) >= target or self.program.process.poll() is not None

        self.node.wait_until(is_done, 60, f"{steps} more steps of both ranks")
        assert len(self.made(1)) >= target, self.program.said

    def rows(self) -> list[tuple[str, ProcessRow]]:
        """Its processes, each with its GPU, as the coordinator knows them."""
        job = f"process {self.program.process.pid}"
        return [(row.gpu, one) for row in look(str(self.node.socket)).gpus for one in row.processes if one.job == job]


def pauses(node: Node, gang: Gang, goes_on: Callable[[], None]) -> None:
    """It makes no step any more while somebody else makes many."""
    before = -1
    while before != len(gang.made(0)):
        before = len(gang.made(0))
        goes_on()


@pytest.mark.shows("a job with several GPUs of a node is placed, paused and upgraded as a whole")
@pytest.mark.slow
def test_two_ranks_share_two_gpus_beside_a_guaranteed_job_on_one_of_them(node: Node, tmp_path: Path) -> None:
    """Each has an agent, its children have none; a coordinator that dies stops both; what they compute is as alone."""
    coordinator = node.coordinate()
    gang = Gang(node, "opportunistic", node.gpus, data_workers="spawn")
    gang.goes_on(3)
    assert [(gpu, one.rank) for gpu, one in gang.rows()] == [(node.gpus[0], 0), (node.gpus[1], 1)]
    stops = node.fault("agent.boundary", "stop", 80)  # in a mini-batch, for all that others know
    guaranteed = node.train("guaranteed", wait_ms=15, faults=stops)  # on the first GPU
    node.goes_on(guaranteed, 40)
    gang.goes_on(3)  # in its gaps
    assert "goes on as if alone" not in guaranteed.said
    node.wait_until(lambda: node.is_struck("agent.boundary", "stop"), 60, "it to be stopped")
    # Who is held up holds up the other one, at a boundary of both.
    node.wait_until(lambda: any("at boundary" in one.reason for _, one in gang.rows()), 30, "the second rank to wait")
    before = gang.made(0), gang.made(1)
    assert {one.verdict for _, one in gang.rows()} == {"pause", "finish"}
    os.kill(guaranteed.process.pid, signal.SIGCONT)
    gang.goes_on(3)
    assert len(gang.made(0)) > len(before[0])
    coordinator.kill()
    pauses(node, gang, lambda: node.goes_on(guaranteed, 20))
    node.coordinate()
    gang.goes_on(3)
    guaranteed.process.kill()
    gang.goes_on(20)
    gang.program.process.kill()  # its ranks end with it
    expected = ranks_alone(tmp_path / "truth", 25)
    assert [gang.made(rank)[:25] for rank in (0, 1)] == expected
    assert guaranteed.losses == alone(len(guaranteed.losses))


@pytest.mark.shows("a job with several GPUs of a node is placed, paused and upgraded as a whole")
def test_a_rank_that_is_killed_leaves_nothing_and_the_guaranteed_job_computes_as_alone(node: Node) -> None:
    coordinator = node.coordinate()

    def opened() -> tuple[int, int]:
        """Descriptors that the coordinator has, and pages that it has mapped."""
        process = Path(f"/proc/{coordinator.pid}")
        return len([*(process / "fd").iterdir()]), (process / "maps").read_text().count("hetstream-gpu")

    guaranteed = node.train("guaranteed", wait_ms=15)
    node.goes_on(guaranteed, 5)
    before = opened()
    gang = Gang(node, "opportunistic", node.gpus)
    gang.goes_on(2)
    assert opened()[1] == before[1] + 4
    first, second = (one.pid for _, one in gang.rows())
    os.kill(second, signal.SIGKILL)
    node.wait_until(lambda: gang.program.process.poll() is not None, 60, "torchrun to end the other rank")
    node.wait_until(lambda: opened() == before, 20, "the coordinator's descriptors")
    for number, pid in ((0, first), (1, second)):
        with closing(EmulatedGpuFile(node.directory / f"gpu{number}")) as gpu:
            assert gpu.held_by(pid) == 0
    node.goes_on(guaranteed, 10)
    assert coordinator.poll() is None
    assert guaranteed.losses == alone(len(guaranteed.losses))


@pytest.mark.slow
def test_the_ranks_of_two_jobs_share_one_gpu(node: Node, tmp_path: Path) -> None:
    """The guaranteed job leaves it idle while both of its processes do, and the other one's pause together."""
    node.coordinate()
    guaranteed = Gang(node, "guaranteed", node.gpus[:1], wait_ms=100)
    guaranteed.goes_on(12)
    opportunistic = Gang(node, "opportunistic", node.gpus[:1])
    opportunistic.goes_on(5)
    assert {(gpu, one.rank) for gpu, one in guaranteed.rows()} == {(node.gpus[0], 0), (node.gpus[0], 1)}
    assert {(gpu, one.rank) for gpu, one in opportunistic.rows()} == {(node.gpus[0], 0), (node.gpus[0], 1)}
    assert all(one.paused_s > 0 for _, one in opportunistic.rows())
    made = len(opportunistic.made(1))
    guaranteed.goes_on(10)
    opportunistic.goes_on(5)
    expected = ranks_alone(tmp_path / "truth", made)
    for gang in (guaranteed, opportunistic):
        steps = min(made, len(gang.made(1)))
        assert [gang.made(rank)[:steps] for rank in (0, 1)] == [losses[:steps] for losses in expected]


def claims(node: Node, job_class: str, gpus: Sequence[str], **environ: str) -> Program:
    """A process that says of itself what the test says."""
    return node.share(job_class, ",".join(gpus), [sys.executable, str(TRAIN), "3", "16", "0"], environ)


@pytest.mark.shows("ranks that claim other GPUs, or more GPUs than there are, are refused")
def test_what_ranks_claim_wrongly_is_one_line(node: Node) -> None:
    """More ranks than GPUs, a GPU that the job has not, one that nobody shares: an opportunistic process ends."""
    node.coordinate()
    other = node.directory / "gpu2"
    other.write_bytes(node.gpu_file.read_bytes())
    refused = {
        "LOCAL_RANK=2, and the job has 2 GPUs on this node": claims(node, "opportunistic", node.gpus, LOCAL_RANK="2"),
        "5 is none of the 2 GPUs that the job has": claims(node, "opportunistic", node.gpus, CUDA_VISIBLE_DEVICES="5"),
        "gpu2' is not shared here": claims(node, "opportunistic", [*node.gpus, f"emulation:{other}"], LOCAL_RANK="2"),
    }
    goes_on = claims(node, "guaranteed", node.gpus, LOCAL_RANK="2")
    for line, program in refused.items():
        assert program.process.wait(60) == 1
        assert line in program.said
        assert (len(program.said.splitlines()), program.losses) == (1, [])
    assert goes_on.process.wait(60) == 0
    assert goes_on.said.endswith("this guaranteed job goes on as if alone\n")
    assert len(goes_on.losses) == 3


@pytest.mark.shows("ranks that claim other GPUs, or more GPUs than there are, are refused")
@pytest.mark.slow
def test_a_rank_that_says_another_number_of_ranks_than_the_others_is_refused(node: Node) -> None:
    node.coordinate()
    ready = node.directory / "ready"
    train = f"exec setpriv --pdeathsig=KILL {sys.executable} {TRAIN}"  # it ends with its shell
    script = f"""
        (export LOCAL_RANK=0 LOCAL_WORLD_SIZE=2; {train} 100000 16 0) &
        until [ -e {ready} ]; do sleep 0.05; done
        (export LOCAL_RANK=1 LOCAL_WORLD_SIZE=3; {train} 3 16 0 >{ready})
        echo ended $? >&2
        wait
    """
    both = node.share("opportunistic", ",".join(node.gpus), ["sh", "-c", script])
    node.goes_on(both, 3)
    ready.touch()
    node.wait_until(lambda: "ended" in both.said, 60, "the second rank's end")
    line, code = both.said.splitlines()
    assert "3 processes of job process" in line
    assert "rank 0 of them says 2. Start all of them by one torchrun or srun" in line
    assert (code, ready.read_text()) == ("ended 1", "")
    node.goes_on(both, 3)


def is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_ranks_that_wait_for_a_coordinator_end_with_their_launcher_and_other_processes_wait_on(node: Node) -> None:
    """torchrun is killed in a way that it cannot tell them. What a shell leaves behind may be meant to stay, also in a
    batch script, whose processes all have the number of its first task.
    """
    job = node.share("opportunistic", ",".join(node.gpus), [*TORCHRUN, str(TRAIN), "3", "16", "0"])
    train = [sys.executable, str(TRAIN), "3", "16", "0"]
    leave = node.directory / "leave"
    os.mkfifo(leave)
    leaving = node.share(
        "opportunistic", node.gpu,
        ["env", "SLURM_LOCALID=0", "sh", "-c", 'nohup "$@" & echo $!; read _ <"$0"', str(leave), *train],
    )  # fmt: skip
    node.wait_until(lambda: job.said.count("this opportunistic job pauses") == 2, 60, "both ranks to pause")
    node.wait_until(lambda: "this opportunistic job pauses" in leaving.said, 60, "the other one to pause")
    ranks = children_of(job.process.pid)
    assert len(ranks) == 2
    (left,) = map(int, leaving.losses)
    try:
        job.process.kill()
        leave.write_text("now\n")
        assert leaving.process.wait(10) == 0
        node.wait_until(lambda: not any(map(is_there, ranks)), 20, "the end of the ranks")
        node.coordinate()
        node.wait_until(lambda: len(leaving.losses) == 4, 60, "the other one to go on")
    finally:
        for pid in filter(is_there, (*ranks, left)):
            os.kill(pid, signal.SIGKILL)
    assert job.said.count("who launched this process (torchrun, srun) has gone: it ends") == 2
