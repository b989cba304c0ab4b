"""The coordinator, with agents that the tests are: what they may send, read and say."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import pytest

from hetstream.base.errors import HetstreamError, OptionsError
from hetstream.base.typed_json import encode
from hetstream.hetjob.errors import GpuCoordinatorError, GpuJobRefused, GpuTaken
from hetstream.hetjob.gpu import handshake, orders
from hetstream.hetjob.gpu.config import settings_from_environment
from hetstream.hetjob.gpu.handshake import Connection, Introduction
from hetstream.hetjob.gpu.orders import VERSION, GpuUse, JobClass, Order, Statistics
from hetstream.slurm_plugin.cli.gpu import _program
from hetstream.slurm_plugin.coordinator.admission import (
    Admission,
    GrantedJobs,
    GuaranteedProcess,
    OwnJobs,
    Peer,
    guaranteed_processes,
)
from hetstream.slurm_plugin.coordinator.gpus import StatedGpu
from hetstream.slurm_plugin.coordinator.server import Coordinator
from tests.base.users import STRANGER, VICTIM, needs_root, run_as
from tests.conftest import WaitUntil

GIB = 2**30
GPU = "GPU-1a2b"
Running = Callable[[Admission], Coordinator]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "gpu.sock"


@contextmanager
def running(path: Path, admission: Admission) -> Iterator[Coordinator]:
    coordinator = Coordinator(path, [StatedGpu(GPU, 32 * GIB)], admission)
    thread = threading.Thread(target=coordinator.run)
    thread.start()
    try:
        yield coordinator
    finally:
        coordinator.stop()
        thread.join()


@pytest.fixture
def coordinator(path: Path) -> Iterator[Coordinator]:
    """One for this user's jobs."""
    with running(path, OwnJobs()) as coordinator:
        yield coordinator


def connect(path: Path, job_class: JobClass, job: str = "7", version: int = VERSION, gpu: str = GPU) -> Connection:
    return Connection(str(path), Introduction(version, job, job_class, gpu))


def statistics(**record: int) -> Statistics:
    return Statistics(updated_ns=time.monotonic_ns(), host_capacity_bytes=GIB, **record)


@pytest.fixture
def guaranteed(path: Path, coordinator: Coordinator) -> Iterator[Connection]:
    """A guaranteed job between two mini-batches, for long."""
    with closing(connect(path, JobClass.GUARANTEED)) as connection:
        connection.report(statistics(boundaries=2, boundary_ns=1, mini_batch_ns=10**7, is_idle=1), news=True)
        yield connection


@pytest.fixture
def opportunistic(path: Path, coordinator: Coordinator) -> Iterator[Connection]:
    with closing(connect(path, JobClass.OPPORTUNISTIC)) as connection:
        connection.report(statistics(), news=True)
        yield connection


def has(connection: Connection, verdict: GpuUse) -> Callable[[], bool]:
    def check() -> bool:
        order = connection.order()
        return order is not None and order.verdict == verdict and order.valid_until_ns > time.monotonic_ns()

    return check


def test_orders_are_renewed_and_lapse_with_the_coordinator(path: Path, wait_until: WaitUntil) -> None:
    with running(path, OwnJobs()):
        connection = connect(path, JobClass.OPPORTUNISTIC)
        connection.report(statistics(), news=True)
        wait_until(has(connection, GpuUse.RUN))
        first = connection.order()
        wait_until(lambda: connection.order() != first)
        assert connection.look()
    with closing(connection):
        assert not connection.look()
        wait_until(lambda: not has(connection, GpuUse.RUN)(), 1)
    assert not path.exists()


def test_when_the_guaranteed_job_leaves_the_others_have_the_gpu(
    guaranteed: Connection, opportunistic: Connection, wait_until: WaitUntil
) -> None:
    wait_until(lambda: (order := opportunistic.order()) is not None and order.open_until_ns > 0)
    assert opportunistic.order().limit_bytes < 32 * GIB  # type: ignore[union-attr]
    guaranteed.close()
    wait_until(lambda: (order := opportunistic.order()) is not None and order.limit_bytes == 32 * GIB)


def test_the_others_hear_that_the_guaranteed_job_is_busy_from_itself(
    guaranteed: Connection, opportunistic: Connection, wait_until: WaitUntil
) -> None:
    wait_until(lambda: (order := opportunistic.order()) is not None and order.open_until_ns > 0)
    assert opportunistic.busy_since_ns() == 0
    guaranteed.say_busy(7)
    assert opportunistic.busy_since_ns() == 7
    opportunistic.say_busy(8)  # it may only read that
    assert guaranteed.busy_since_ns() == opportunistic.busy_since_ns() == 7


@pytest.mark.shows("forged statistics and pages harm nobody")
@pytest.mark.parametrize("how", ["corrupted", "forged"])
def test_a_guaranteed_job_whose_page_cannot_be_believed_lets_nobody_on(
    guaranteed: Connection, opportunistic: Connection, wait_until: WaitUntil, how: str
) -> None:
    wait_until(has(opportunistic, GpuUse.RUN))
    if how == "corrupted":
        guaranteed._statistics._memory[:] = b"\xa5" * orders.SIZE_BYTES
    else:
        guaranteed.report(Statistics(updated_ns=2**62, boundary_ns=2**62, is_idle=1), news=True)
    wait_until(has(opportunistic, GpuUse.PAUSE))


def test_a_guaranteed_job_that_falls_silent_in_a_mini_batch_lets_nobody_on(
    guaranteed: Connection, opportunistic: Connection, wait_until: WaitUntil
) -> None:
    wait_until(has(opportunistic, GpuUse.RUN))
    guaranteed.report(statistics(boundaries=3, boundary_ns=1, mini_batch_ns=10**7, is_idle=0), news=True)
    wait_until(has(opportunistic, GpuUse.PAUSE))


def test_a_process_that_waits_is_woken_when_it_may_go_on(
    guaranteed: Connection, opportunistic: Connection, wait_until: WaitUntil
) -> None:
    guaranteed.report(statistics(boundaries=3, boundary_ns=1, mini_batch_ns=10**7, is_idle=0), news=True)
    wait_until(has(opportunistic, GpuUse.PAUSE))
    assert opportunistic.look()
    began_s = time.monotonic()
    guaranteed.report(statistics(boundaries=3, boundary_ns=1, mini_batch_ns=10**7, is_idle=1), news=True)
    opportunistic.wait(30)
    assert time.monotonic() - began_s < 5
    assert has(opportunistic, GpuUse.RUN)()


def test_a_process_of_another_version_is_refused_with_a_line(path: Path, coordinator: Coordinator) -> None:
    with pytest.raises(GpuJobRefused, match=rf"protocol {VERSION + 1}, and this node's coordinator by .* {VERSION}"):
        connect(path, JobClass.OPPORTUNISTIC, version=VERSION + 1)


@pytest.mark.shows("unknown classes, and quotas that the cluster cannot keep, are refused")
def test_an_unknown_class_is_no_class(path: Path, coordinator: Coordinator, tmp_path: Path) -> None:
    """In a program's environment, in what it sends, and in a grant."""
    with pytest.raises(OptionsError, match="HETSTREAM_JOB_CLASS=best: use one of guaranteed, opportunistic"):
        settings_from_environment({"HETSTREAM_GPU": GPU, "HETSTREAM_JOB_CLASS": "best"})
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.connect(str(path))
        stranger.send(encode({"version": VERSION, "job": "7", "job_class": "best", "gpu": GPU}))
        assert b"it sent no introduction: Invalid enum value 'best'" in stranger.recv(4096)
    (tmp_path / "7.json").write_text(json.dumps({"uid": os.geteuid(), "job_class": "best", "gpus": [GPU]}))
    admission = GrantedJobs(tmp_path, lambda _: None)
    with pytest.raises(GpuJobRefused, match=r"job '7' of user .* was given no GPU"):
        admission.admit(Peer(1, os.geteuid()), Introduction(VERSION, "7", JobClass.GUARANTEED, GPU))
    assert not admission.is_reserved(GPU)


@pytest.mark.shows("an agent of another version is refused")
def test_a_coordinator_of_another_version_is_refused_with_a_line(
    path: Path,
) -> None:
    message = encode(handshake.CoordinatorAnswer(VERSION + 1))
    with pytest.raises(GpuJobRefused, match=f"speaks protocol {VERSION + 1}, and this hetstream protocol {VERSION}"):
        handshake._check(str(path), message, 0, 2)


def test_a_gpu_that_is_not_shared_is_refused(path: Path, coordinator: Coordinator) -> None:
    with pytest.raises(GpuJobRefused, match="GPU 'GPU-9' is not shared here; shared are: GPU-1a2b"):
        connect(path, JobClass.OPPORTUNISTIC, gpu="GPU-9")


def test_whatever_a_process_sends_the_others_keep_their_orders(
    path: Path, opportunistic: Connection, wait_until: WaitUntil
) -> None:
    for message in (b"", b"{", b"\xff" * 4000, b'{"version":true}', b'{"version":1}', b"[" * 4000):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
            stranger.connect(str(path))
            if message:
                stranger.send(message)
    before = opportunistic.order()
    wait_until(lambda: opportunistic.order() != before)
    assert opportunistic.look()


def test_one_user_with_many_connections_shuts_out_himself_alone(path: Path, opportunistic: Connection) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(80):
            connection = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            connection.connect(str(path))
        stack.enter_context(closing(connect(path, JobClass.OPPORTUNISTIC)))


def test_a_second_coordinator_is_refused_and_a_dead_ones_socket_replaced(path: Path, wait_until: WaitUntil) -> None:
    with running(path, OwnJobs()), pytest.raises(HetstreamError, match="another coordinator of GPUs listens at"):
        Coordinator(path, [], OwnJobs())
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
        dead.bind(str(path))
    with running(path, OwnJobs()):
        connect(path, JobClass.GUARANTEED).close()


@pytest.fixture
def from_before(path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A guaranteed job that was there before its coordinator, and trains."""
    environ = {"HETSTREAM_GPU": f"GPU-0,{GPU}", "HETSTREAM_JOB_CLASS": "guaranteed", "HETSTREAM_GPU_SOCKET": str(path)}
    library = path.with_name("libtorch_cpu.so")
    library.write_bytes(b"mapped")
    code = "import mmap, sys; file = open(sys.argv[1]); kept = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)"
    has_torch = [sys.executable, "-ISc", f"{code}; print(flush=True); input()", str(library)]
    environ = {**os.environ, **environ, "HETSTREAM_GPU_JOB": "7"}
    with subprocess.Popen(has_torch, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def test_what_has_a_guaranteed_jobs_environment_and_no_torch_keeps_no_gpu(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shell in which its variables are set, or what it has left behind; it never comes, and may live for days."""
    for name, value in (("GPU", GPU), ("JOB_CLASS", "guaranteed"), ("GPU_SOCKET", str(path))):
        monkeypatch.setenv(f"HETSTREAM_{name}", value)
    with subprocess.Popen(["sh", "-c", "echo; read _"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as shell:
        assert shell.stdout is not None
        shell.stdout.readline()  # it has this environment by now
        assert guaranteed_processes(path) == []
        shell.kill()


@pytest.mark.shows("a new coordinator lets nobody on before the guaranteed job has come back")
def test_a_guaranteed_job_from_before_the_coordinator_has_its_gpu_until_it_comes(
    path: Path, from_before: subprocess.Popen[bytes], wait_until: WaitUntil
) -> None:
    admission = OwnJobs(partial(guaranteed_processes, path))
    with running(path, admission), closing(connect(path, JobClass.OPPORTUNISTIC)) as other:
        other.report(statistics(), news=True)
        wait_until(has(other, GpuUse.PAUSE))
        with pytest.raises(GpuTaken, match=f"guaranteed job '7' has GPU {GPU}"):
            connect(path, JobClass.GUARANTEED, "8")
        assert has(other, GpuUse.PAUSE)()
        connect(path, JobClass.GUARANTEED, "7").close()
        wait_until(has(other, GpuUse.RUN))


def test_who_was_there_before_is_looked_for_before_anybody_can_come(path: Path) -> None:
    """Else a job that begins meanwhile, and waits for others before it computes, would be taken for one from before."""
    looked = []

    def find() -> tuple[GuaranteedProcess, ...]:
        looked.append("once")
        return ()

    coordinator = Coordinator(path, [StatedGpu(GPU, 32 * GIB)], OwnJobs(find))
    coordinator.stop()
    coordinator.run()
    assert looked == ["once"]


def test_a_guaranteed_job_from_before_the_coordinator_that_ends_leaves_the_gpu_to_the_others(
    path: Path, from_before: subprocess.Popen[bytes], wait_until: WaitUntil
) -> None:
    assert guaranteed_processes(path.with_name("other.sock")) == []
    admission = OwnJobs(partial(guaranteed_processes, path))
    with running(path, admission), closing(connect(path, JobClass.OPPORTUNISTIC)) as other:
        other.report(statistics(), news=True)
        wait_until(has(other, GpuUse.PAUSE))
        from_before.kill()
        wait_until(has(other, GpuUse.RUN))


def test_a_gpu_has_one_guaranteed_job_of_its_user(path: Path, coordinator: Coordinator) -> None:
    """Its processes may be several; the programs of one Slurm job are several jobs."""

    def come(program: str) -> Connection:
        return Connection(str(path), Introduction(VERSION, "8123", JobClass.GUARANTEED, GPU, program=program))

    with closing(come("a")), closing(come("a")), pytest.raises(GpuTaken, match="guaranteed job 'a' has GPU") as taken:
        come("b")
    assert "use --class opportunistic" in str(taken.value)
    come("b").close()  # those that have left hold nothing


def test_the_tasks_of_one_step_are_one_program_and_those_of_a_batch_script_are_not() -> None:
    task = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "3", "SLURM_STEP_NUM_TASKS": "2"}
    assert _program(task) == "step 7.3"
    assert (
        _program({**task, "SLURM_STEP_NUM_TASKS": "1"}) == _program({"SLURM_JOB_ID": "7"}) == f"process {os.getpid()}"
    )


def test_where_nobody_listens_is_no_coordinator(path: Path) -> None:
    with pytest.raises(GpuCoordinatorError, match="no coordinator of GPUs answers at"):
        connect(path, JobClass.GUARANTEED)


class TestGrants:
    """What jobs were given, as root wrote it."""

    @pytest.fixture
    def grants(self, tmp_path: Path) -> Path:
        directory = tmp_path / "grants"
        directory.mkdir()
        return directory

    def grant(self, grants: Path, job: str, job_class: JobClass, uid: int) -> Path:
        path = grants / f"{job}.json"
        path.write_text(json.dumps({"uid": uid, "job_class": job_class.value, "gpus": [GPU]}))
        return path

    def admit(self, grants: Path, job: str, uid: int, of: str | None = None) -> JobClass:
        admission = GrantedJobs(grants, lambda _: of)
        return admission.admit(Peer(1, uid), Introduction(VERSION, job, JobClass.GUARANTEED, GPU)).job_class

    @pytest.mark.shows("a shared GPU's pages are read-only for jobs, and peers are known by the kernel")
    def test_a_job_is_what_it_was_given_and_not_what_it_says(self, grants: Path) -> None:
        self.grant(grants, "7", JobClass.OPPORTUNISTIC, 1000)
        assert self.admit(grants, "7", 1000) is JobClass.OPPORTUNISTIC

    @pytest.mark.shows("a shared GPU's pages are read-only for jobs, and peers are known by the kernel")
    def test_the_job_of_a_process_is_the_kernels_word_where_there_is_one(self, grants: Path) -> None:
        self.grant(grants, "7", JobClass.GUARANTEED, 1000)
        self.grant(grants, "8", JobClass.OPPORTUNISTIC, 1000)
        assert self.admit(grants, "7", 1000, of="8") is JobClass.OPPORTUNISTIC

    @pytest.mark.parametrize(
        ("job", "uid", "reason"),
        [
            ("8", 1000, "was given no GPU"),
            ("../7", 1000, "was given no GPU"),
            ("7", 1001, "user 1001 was given no GPU"),
        ],
    )
    def test_others_are_refused(self, grants: Path, job: str, uid: int, reason: str) -> None:
        self.grant(grants, "7", JobClass.GUARANTEED, 1000)
        with pytest.raises(GpuJobRefused, match=reason):
            self.admit(grants, job, uid)

    def test_what_others_could_have_written_is_no_grant(self, grants: Path) -> None:
        self.grant(grants, "7", JobClass.GUARANTEED, 1000).chmod(0o666)
        with pytest.raises(GpuJobRefused, match="was given no GPU"):
            self.admit(grants, "7", 1000)
        assert not GrantedJobs(grants).is_reserved(GPU)

    def test_a_guaranteed_job_counts_before_it_has_an_agent(
        self, grants: Path, path: Path, wait_until: WaitUntil
    ) -> None:
        self.grant(grants, "7", JobClass.OPPORTUNISTIC, os.geteuid())
        with running(path, GrantedJobs(grants)), closing(connect(path, JobClass.GUARANTEED)) as connection:
            assert connection.job_class is JobClass.OPPORTUNISTIC
            connection.report(statistics(), news=True)
            wait_until(has(connection, GpuUse.RUN))
            self.grant(grants, "9", JobClass.GUARANTEED, 1000)
            wait_until(has(connection, GpuUse.PAUSE))

    @pytest.mark.shows("a shared GPU's pages are read-only for jobs, and peers are known by the kernel")
    @needs_root
    def test_another_user_is_known_as_such_and_cannot_open_pages(self, grants: Path, path: Path) -> None:
        self.grant(grants, "7", JobClass.OPPORTUNISTIC, VICTIM)
        for directory in path.parents:
            if directory.stat().st_mode & 0o005 != 0o005 and directory != directory.parent:
                directory.chmod(directory.stat().st_mode | 0o005)

        def be_refused() -> None:
            with pytest.raises(GpuJobRefused, match=f"of user {STRANGER} was given no GPU"):
                connect(path, JobClass.GUARANTEED)
            own = os.getppid()
            with pytest.raises(PermissionError):
                os.listdir(f"/proc/{own}/fd")

        def take_part() -> None:
            with closing(connect(path, JobClass.GUARANTEED)) as connection:
                assert connection.job_class is JobClass.OPPORTUNISTIC
                order: Order | None = connection.order()
                assert order is None or order.verdict in set(GpuUse)
                with pytest.raises(TypeError, match="readonly"):
                    connection._orders._memory[0:1] = b"x"

        with running(path, GrantedJobs(grants)):
            run_as(STRANGER, be_refused)
            run_as(VICTIM, take_part)
