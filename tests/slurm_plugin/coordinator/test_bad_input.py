"""Bad input to a coordinator that is a process of its own: each is refused or frozen with one clear line, and the
guaranteed job's order stays."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from hetstream.hetjob.gpu import environment
from hetstream.hetjob.gpu.emulated_file import EmulatedGpuFile
from hetstream.hetjob.gpu.handshake import Connection, Introduction
from hetstream.hetjob.gpu.orders import VERSION, GpuUse, JobClass, Statistics
from hetstream.slurm_plugin.coordinator.table import GpuRow, look
from tests.slurm_plugin.coordinator.conftest import HETSTREAM, TRAIN, Node

MIB = 2**20


@pytest.fixture
def guaranteed(node: Node) -> Iterator[Connection]:
    """A guaranteed job beside which everything happens; at the end it still has its order."""
    node.coordinate()
    with closing(connect(node, JobClass.GUARANTEED)) as connection:
        report(connection, boundaries=2, boundary_ns=1, mini_batch_ns=10**7, is_idle=1)
        yield connection
        node.wait_until(lambda: is_told(connection, GpuUse.RUN), 5, "the guaranteed job's order")
        assert connection.look()


def connect(node: Node, job_class: JobClass) -> Connection:
    return Connection(str(node.socket), Introduction(VERSION, job_class.value, job_class, node.gpu))


def report(connection: Connection, **record: int) -> None:
    connection.report(Statistics(updated_ns=time.monotonic_ns(), host_capacity_bytes=MIB, **record), news=True)


def is_told(connection: Connection, verdict: GpuUse) -> bool:
    order = connection.order()
    return order is not None and order.verdict == verdict and order.valid_until_ns > time.monotonic_ns()


def shown(node: Node) -> GpuRow:
    (row,) = look(str(node.socket)).gpus
    return row


def reason(node: Node) -> str:
    return next(process.reason for process in shown(node).processes if process.job_class == "opportunistic")


@pytest.mark.shows("a job that lies about its memory gains nothing by it")
def test_a_job_that_says_that_it_holds_less_memory_than_it_does_is_frozen(node: Node, guaranteed: Connection) -> None:
    with closing(connect(node, JobClass.OPPORTUNISTIC)) as liar, closing(EmulatedGpuFile(node.gpu_file)) as memory:
        report(liar, boundaries=5, held_bytes=MIB, peak_bytes=MIB, is_idle=1)
        node.wait_until(lambda: is_told(liar, GpuUse.RUN), 10, "an order to run")
        assert memory.take(64 * MIB)
        node.wait_until(lambda: is_told(liar, GpuUse.PAUSE), 10, "its pause")
        assert "says that it holds 1,048,576 bytes, and the GPU counts 67,108,864: paused" in reason(node)
        memory.give(64 * MIB)
        node.wait_until(lambda: is_told(liar, GpuUse.RUN), 10, "an order to run again")


@pytest.mark.shows("a GPU that vanishes, or is a part of one, is told")
@pytest.mark.parametrize("how", ["shorter", "other", "removed", "another of its name"])
def test_on_a_gpu_that_vanishes_the_others_pause_and_the_coordinator_goes_on(
    node: Node, guaranteed: Connection, how: str
) -> None:
    with closing(connect(node, JobClass.OPPORTUNISTIC)) as other:
        report(other, boundaries=5, is_idle=1)
        node.wait_until(lambda: is_told(other, GpuUse.RUN), 10, "an order to run")
        before, kept = node.gpu_file.read_bytes(), node.directory / "kept"
        os.link(node.gpu_file, kept)
        if how in ("removed", "another of its name"):
            node.gpu_file.unlink()
        if how == "another of its name":
            node.emulate()
        with kept.open("r+b") as file:
            if how == "shorter":
                file.truncate(0)
            elif how == "other":
                file.write(os.urandom(len(before)))
        node.wait_until(lambda: is_told(other, GpuUse.PAUSE), 10, "its pause")
        assert "the GPU does not answer any more: paused" in reason(node)
        assert shown(node).is_lost
        with kept.open("r+b") as file:
            file.write(before)
        kept.replace(node.gpu_file)
        node.wait_until(lambda: is_told(other, GpuUse.RUN), 10, "an order to run again")


@pytest.mark.shows("forged statistics and pages harm nobody")
@pytest.mark.parametrize(
    "record", [{"boundaries": 2**63 - 1}, {"held_bytes": -1}, {"updated_ns": 2**62}, {"is_idle": 7}]
)
def test_a_job_whose_statistics_cannot_be_is_paused_with_a_line(
    node: Node, guaranteed: Connection, record: dict[str, int]
) -> None:
    """Two processes of it, which would meet at a boundary."""
    said = {"updated_ns": time.monotonic_ns(), "boundaries": 5, "is_idle": 1, **record}
    with closing(connect(node, JobClass.OPPORTUNISTIC)) as one, closing(connect(node, JobClass.OPPORTUNISTIC)) as two:
        for liar in (one, two):
            liar.report(Statistics(**said), news=True)
        node.wait_until(lambda: len(shown(node).processes) == 3, 10, "both to be there")
        node.wait_until(lambda: "it has said nothing that can be: paused" in reason(node), 10, "the line")
        assert is_told(one, GpuUse.PAUSE)
        assert is_told(two, GpuUse.PAUSE)


def test_a_gpu_that_is_named_twice_is_refused_in_one_line(node: Node) -> None:
    argv = [*HETSTREAM, "internal", "coordinator", "--own-jobs", "--socket", str(node.socket)]
    done = subprocess.run([*argv, "--gpu", node.gpu, "--gpu", node.gpu], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [f"hetstream internal coordinator: --gpu {node.gpu}: it is named twice"]


@pytest.mark.shows("a GPU under two spellings, or a file in its place, is found")
def test_a_gpu_under_two_spellings_is_one(node: Node) -> None:
    """Relative, through links, absolute: nobody has a second one of the same memory."""
    link = node.directory / "link"
    link.symlink_to("gpu0")
    spellings = [f"emulation:{os.path.relpath(node.gpu_file)}", f"emulation:{link}"]
    argv = [*HETSTREAM, "internal", "coordinator", "--own-jobs", "--socket", str(node.socket), "--gpu", node.gpu]
    for gpu in spellings:
        done = subprocess.run([*argv, "--gpu", gpu], capture_output=True, text=True, timeout=60)
        assert (done.returncode, "it is named twice" in done.stderr) == (2, True)
    node.coordinate()
    train = [sys.executable, str(TRAIN), "100000", "16", "5"]
    settings = {"HETSTREAM_GPU": spellings[0], "HETSTREAM_GPU_SOCKET": str(node.socket)}
    programs = [node.run("by-hand", train, environment(settings)), node.share("opportunistic", spellings[1], train)]
    for program in programs:
        node.goes_on(program, 3)
    assert {process.pid for process in shown(node).processes} == {program.process.pid for program in programs}


@pytest.mark.shows("there are never two guaranteed jobs on a GPU, also without a packer")
def test_a_second_guaranteed_job_on_a_gpu_ends_with_one_line(node: Node) -> None:
    """Also in one Slurm job."""
    node.coordinate()
    slurm = {"SLURM_JOB_ID": "8123"}
    first = node.train("guaranteed", wait_ms=15, faults=slurm)
    node.goes_on(first, 3)
    second = node.train("guaranteed", steps=3, faults=slurm)
    assert second.process.wait(60) == 1
    assert (len(second.said.splitlines()), second.losses) == (1, [])
    assert f"guaranteed job 'process {first.process.pid}' has GPU {node.gpu}" in second.said
    assert "use --class opportunistic" in second.said
    node.goes_on(first, 3)
    assert first.said == ""


@pytest.mark.parametrize("gpu", ["", " ", ","])
def test_a_program_that_is_to_share_no_gpu_is_not_run(tmp_path: Path, gpu: str) -> None:
    """The variable behind `--gpu` is not set: the program would share nothing, and be held back by nobody."""
    ran = tmp_path / "ran"
    argv = [*HETSTREAM, "gpu", "run", "--class=opportunistic", f"--gpu={gpu}", "touch", str(ran)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "names no GPU" in done.stderr
    assert not ran.exists()


@pytest.mark.shows("an agent of another version is refused")
def test_an_agent_of_another_version_ends_with_a_line_or_goes_on_as_if_alone(
    node: Node, guaranteed: Connection
) -> None:
    patched = "from hetstream.hetjob.gpu import orders; orders.VERSION = 99; import runpy, sys"
    patched += f"; sys.path.insert(0, {str(TRAIN.parent)!r})"
    argv = [sys.executable, "-c", f"{patched}; runpy.run_path({str(TRAIN)!r}, run_name='__main__')", "3", "16", "0"]
    line = f"the coordinator of this node's GPUs speaks protocol {VERSION}, and this hetstream protocol 99"
    programs = {}
    for job_class in JobClass:
        settings = {
            "HETSTREAM_GPU": node.gpu, "HETSTREAM_JOB_CLASS": job_class.value, "HETSTREAM_GPU_SOCKET": str(node.socket),
        }  # fmt: skip
        programs[job_class] = subprocess.Popen(
            argv, env={**os.environ, **environment(settings)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
    for job_class, program in programs.items():
        losses, said = program.communicate(timeout=100)
        assert line in said
        assert len(said.splitlines()) == 1
        if job_class is JobClass.GUARANTEED:
            assert "goes on as if alone" in said
            assert len(losses.split()) == 3
        else:
            assert (program.returncode, losses) == (1, "")
