"""What other users of the node, and jobs that mean no good, may try at the coordinator and at its agents."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from hetstream.base.errors import HetstreamError
from hetstream.base.typed_json import encode
from hetstream.hetjob.errors import GpuCoordinatorError, GpuJobRefused
from hetstream.hetjob.gpu.handshake import NEWS, Connection, CoordinatorAnswer, Introduction, ask
from hetstream.hetjob.gpu.orders import VERSION, GpuUse, JobClass, Page, Statistics, Work
from hetstream.slurm_plugin.coordinator.admission import GrantedJobs, OwnJobs, Peer
from hetstream.slurm_plugin.coordinator.server import Coordinator, Crowds, _Member
from hetstream.slurm_plugin.coordinator.table import ProcessRow, look
from tests.base.users import STRANGER, VICTIM, needs_root, run_as
from tests.conftest import WaitUntil
from tests.slurm_plugin.coordinator.test_coordinator import GPU, connect, has, running, statistics


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "gpu.sock"


@pytest.fixture
def member(path: Path) -> Iterator[Connection]:
    """A job of a coordinator for this user's jobs."""
    with running(path, OwnJobs()), closing(connect(path, JobClass.OPPORTUNISTIC)) as connection:
        connection.report(statistics(), news=True)
        yield connection


@pytest.fixture
def grants(tmp_path: Path) -> Path:
    directory = tmp_path / "grants"
    directory.mkdir(mode=0o755)
    return directory


def grant(grants: Path, job: str, job_class: JobClass) -> Path:
    path = grants / f"{job}.json"
    path.write_text(json.dumps({"uid": os.geteuid(), "job_class": job_class.value, "gpus": [GPU]}))
    return path


def is_there(path: Path) -> bool:
    """Whether the coordinator shows a guaranteed process."""
    return any(process.job_class == "guaranteed" for gpu in look(str(path)).gpus for process in gpu.processes)


def is_renewed(connection: Connection, wait_until: WaitUntil) -> None:
    before = connection.order()
    wait_until(lambda: connection.order() != before, 5)
    assert connection.look()


@pytest.mark.shows("forged statistics and pages harm nobody")
@pytest.mark.parametrize(
    "message",
    [b'{"a":' + b"[" * 4000, b'{"a":' * 700, b'{"version":' + b"9" * 4000 + b"}", b"x" * 100_000],
    ids=["brackets", "objects", "digits", "overlong"],
)
def test_no_message_ends_the_coordinator(path: Path, member: Connection, wait_until: WaitUntil, message: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.connect(str(path))
        stranger.send(message)
        assert b"refusal" in stranger.recv(4096)
    is_renewed(member, wait_until)


def test_descriptors_that_are_sent_to_the_coordinator_do_not_stay(
    path: Path, member: Connection, wait_until: WaitUntil
) -> None:
    kept, given = os.pipe()
    with open(kept, "rb"), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.connect(str(path))
        socket.send_fds(stranger, [b"{}"], [given] * 100)
        os.close(given)
        assert b"refusal" in stranger.recv(4096)
        assert os.read(kept, 1) == b""  # nobody has the other end


def test_who_sends_news_without_end_holds_up_nobodys_orders(
    path: Path, member: Connection, wait_until: WaitUntil
) -> None:
    is_over = threading.Event()

    def send(flooding: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while not is_over.is_set():
                flooding.send(NEWS)

    with closing(connect(path, JobClass.OPPORTUNISTIC)) as flooding:
        flooding._connection.settimeout(0.1)
        threads = [threading.Thread(target=send, args=(flooding._connection,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(20):
                is_renewed(member, wait_until)
        finally:
            is_over.set()
            for thread in threads:
                thread.join()


class Endless(socket.socket):
    """A connection whose other end is faster than the coordinator."""

    heard = 0

    def recv(self, bufsize: int, flags: int = 0, /) -> bytes:
        self.heard += 1
        assert self.heard < 100_000, "the coordinator hears nobody else any more"
        return NEWS


def test_who_is_faster_than_the_coordinator_rests_until_the_next_renewal(path: Path) -> None:
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    coordinator = Coordinator(path, [], OwnJobs())
    with closing(near), closing(Endless(fileno=far.detach())) as endless:
        member = _Member(endless, Peer(1, os.geteuid()), "1", 0, gpu=GPU)
        coordinator._members.append(member)
        coordinator._selector.register(endless, selectors.EVENT_READ, member)
        coordinator._hear(member)
        assert endless not in coordinator._selector.get_map()
        coordinator._news_counted_s -= 1
        coordinator._listen_to_all_again()
        assert endless in coordinator._selector.get_map()
        coordinator._hear(member)
        coordinator._close()  # also while it rests


@needs_root
def test_an_agent_tells_nothing_to_a_user_who_is_not_the_coordinator(wait_until: WaitUntil) -> None:
    with tempfile.TemporaryDirectory(prefix="hetstream-test-gpu-") as place:
        Path(place).chmod(0o777)
        path = f"{place}/gpu.sock"
        heard, tell = os.pipe()

        def listen() -> None:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
                listener.bind(path)
                listener.listen()
                os.write(tell, b"!")
                connection, _ = listener.accept()
                with connection:
                    assert connection.recv(4096) == b""
                connection, _ = listener.accept()
                with connection:
                    assert connection.recv(4096)
                    connection.send(encode(CoordinatorAnswer(VERSION)))

        impostor = threading.Thread(target=run_as, args=(STRANGER, listen))
        impostor.start()
        os.read(heard, 1)
        introduction = Introduction(VERSION, "7", JobClass.GUARANTEED, GPU)
        with pytest.raises(GpuCoordinatorError, match=f"user {STRANGER} listens at .*: it is not asked"):
            Connection(path, introduction, VICTIM)
        with pytest.raises(GpuCoordinatorError, match="sent 0 descriptors instead of 3"):
            Connection(path, introduction, STRANGER)
        impostor.join()
        os.close(heard)
        os.close(tell)


@pytest.mark.shows("a crowd of connections of one user keeps nobody else from the coordinator")
@needs_root
def test_a_crowd_of_one_user_keeps_nobody_out_and_is_a_line_of_the_log(
    caplog: pytest.LogCaptureFixture, wait_until: WaitUntil
) -> None:
    caplog.set_level("INFO")
    with tempfile.TemporaryDirectory(prefix="hetstream-test-gpu-") as place:
        Path(place).chmod(0o755)
        path = Path(place) / "gpu.sock"
        is_over, end = os.pipe()
        os.set_blocking(is_over, False)
        begun, begin = os.pipe()

        def flood() -> None:
            """As fast as it can, and without a queue of its own."""
            kept: list[socket.socket] = []
            number = 0
            os.close(end)
            while True:
                with contextlib.suppress(BlockingIOError):
                    if not os.read(is_over, 1):
                        return
                stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                stranger.setblocking(False)
                with contextlib.suppress(OSError):
                    stranger.connect(str(path))
                    stranger.send(b"x" * 4000)
                kept.append(stranger)
                if len(kept) > 300:
                    kept.pop(0).close()
                number += 1
                if number == 3000:
                    os.write(begin, b"!")

        with running(path, OwnJobs()):
            crowd = threading.Thread(target=run_as, args=(STRANGER, flood))
            crowd.start()
            try:
                os.read(begun, 1)
                for job in range(12):
                    with closing(connect(path, JobClass.OPPORTUNISTIC, str(job))) as connection:
                        connection.report(statistics(), news=True)
                        wait_until(lambda connection=connection: connection.order() is not None, 20)
            finally:
                os.close(end)
                crowd.join()
        for descriptor in (is_over, begun, begin):
            os.close(descriptor)
    about = [line for line in caplog.messages if f"uid={STRANGER}" in line or f"user {STRANGER}" in line]
    assert 0 < len([*about, *(line for line in caplog.messages if "job= " in line)]) < 10, caplog.messages[:20]


class TestCrowds:
    """Who connects again and again, by a clock."""

    def test_a_user_has_some_at_once_and_then_as_many_as_time_gives_him(self) -> None:
        crowds = Crowds(4, 2.0, 30.0)
        assert [crowds.may_enter(1, 0.0) for _ in range(6)] == [True] * 4 + [False] * 2
        assert crowds.may_enter(2, 0.0), "another user is not concerned"
        assert [crowds.may_enter(1, 1.0) for _ in range(3)] == [True, True, False]
        assert [crowds.may_enter(1, 100.0) for _ in range(5)] == [True] * 4 + [False]

    def test_the_first_is_said_and_the_others_are_counted(self) -> None:
        crowds = Crowds(4, 2.0, 30.0)
        assert crowds.turned_away(1, "why", 0.0) == "why"
        assert [crowds.turned_away(1, f"why {number}", 1.0) for number in range(5)] == [""] * 5
        assert crowds.to_say(29.0) == []
        assert crowds.to_say(30.0) == ["5 more connections of user 1 came to nothing, the last: why 4"]
        assert crowds.turned_away(2, "his", 31.0) == "his"
        assert crowds.turned_away(1, "again", 31.0) == ""
        assert crowds.to_say(61.0) == ["1 more connections of user 1 came to nothing, the last: again"]
        assert crowds.to_say(1000.0) == []
        assert crowds._users == {}, "who is away is forgotten"


def test_what_is_no_page_is_no_coordinators(path: Path) -> None:
    """Files of no length in the place of pages."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen()

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                empty = os.memfd_create("empty")
                socket.send_fds(connection, [encode(CoordinatorAnswer(VERSION))], [empty] * 3)
                os.close(empty)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(GpuCoordinatorError, match="are no pages"):
            connect(path, JobClass.GUARANTEED)
        thread.join()


def test_a_process_with_another_clock_is_refused(
    path: Path, member: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container with a time namespace."""
    for off_ns in (10**12, -(10**12)):
        said = Introduction(VERSION, "7", JobClass.GUARANTEED, GPU, time.monotonic_ns() + off_ns)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
            other.connect(str(path))
            other.send(encode(said))
            assert b"is not this node's" in other.recv(4096)


class TestSocket:
    """What stands where the coordinator is to listen."""

    def test_a_file_is_not_replaced(self, path: Path) -> None:
        path.write_text("results of a year")
        with pytest.raises(HetstreamError, match="is no socket: it is not replaced"):
            Coordinator(path, [], OwnJobs())
        assert path.read_text() == "results of a year"

    def test_a_link_is_not_followed(self, path: Path, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("results of a year")
        path.symlink_to("file")
        with pytest.raises(HetstreamError, match="is no socket"):
            Coordinator(path, [], OwnJobs())

    def test_where_everybody_can_swap_it_nobody_listens(self, tmp_path: Path) -> None:
        (tmp_path / "open").mkdir()
        (tmp_path / "open").chmod(0o777)
        with pytest.raises(HetstreamError, match="anybody could put another directory in the place"):
            Coordinator(tmp_path / "open" / "gpu.sock", [], OwnJobs())

    def test_a_stopped_coordinator_with_a_full_queue_is_not_replaced(self, path: Path) -> None:
        with contextlib.ExitStack() as stack:
            stopped = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            stopped.bind(str(path))
            stopped.listen(0)
            waiting = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            waiting.connect(str(path))
            with pytest.raises(HetstreamError, match="another coordinator of GPUs listens"):
                Coordinator(path, [], OwnJobs())

    def test_who_ends_leaves_the_socket_of_another_alone(self, path: Path, tmp_path: Path) -> None:
        with running(path, OwnJobs()):
            path.rename(tmp_path / "old.sock")
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
                other.bind(str(path))
        assert path.is_socket()


class TestGrants:
    """Files and directories of grants that are not as root's should be."""

    def test_reports_name_the_job_that_the_kernel_knows(self, grants: Path) -> None:
        grant(grants, "8", JobClass.OPPORTUNISTIC)
        named = Introduction(VERSION, "7 class=guaranteed\nGPU left", JobClass.GUARANTEED, GPU)
        admitted = GrantedJobs(grants, lambda _: "8").admit(Peer(1, os.geteuid()), named)
        assert (admitted.job, admitted.job_class) == ("8", JobClass.OPPORTUNISTIC)
        own = OwnJobs().admit(Peer(1, os.geteuid()), named)
        assert "\n" not in own.job

    @pytest.mark.parametrize("what", ["pipe", "link", "directory", "large", "brackets"])
    def test_what_is_no_grant_holds_up_nobody(
        self, grants: Path, tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        bad = grants / "7.json"
        if what == "pipe":
            os.mkfifo(bad)
        elif what == "link":
            bad.symlink_to(grant(tmp_path, "real", JobClass.GUARANTEED))
        elif what == "directory":
            bad.mkdir()
        else:
            bad.write_text('{"gpus": [' + "[" * (70_000 if what == "large" else 10_000))
        admission = GrantedJobs(grants, lambda _: None)
        for _ in range(2):
            with pytest.raises(GpuJobRefused, match="was given no GPU"):
                admission.admit(Peer(1, os.geteuid()), Introduction(VERSION, "7", JobClass.GUARANTEED, GPU))
            assert not admission.is_reserved(GPU)
        assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
            "GPU grant not used file=7.json"
        ]

    @needs_root
    @pytest.mark.parametrize("what", ["file", "directory", "mode"])
    def test_what_a_stranger_owns_or_could_write_is_no_grant(self, grants: Path, what: str) -> None:
        file = grant(grants, "7", JobClass.GUARANTEED)
        if what == "mode":
            grants.chmod(0o777)
        else:
            os.chown(file if what == "file" else grants, STRANGER, STRANGER)
        admission = GrantedJobs(grants, lambda _: None)
        with pytest.raises(GpuJobRefused, match="was given no GPU"):
            admission.admit(Peer(1, os.geteuid()), Introduction(VERSION, "7", JobClass.GUARANTEED, GPU))

    def test_where_nobody_can_say_what_was_granted_the_gpu_is_reserved(self, grants: Path) -> None:
        admission = GrantedJobs(grants)
        assert not admission.is_reserved(GPU)
        grants.rmdir()
        assert admission.is_reserved(GPU)

    def test_a_process_that_outlives_its_job_loses_its_place(
        self, grants: Path, path: Path, wait_until: WaitUntil
    ) -> None:
        file = grant(grants, "7", JobClass.GUARANTEED)
        grant(grants, "8", JobClass.OPPORTUNISTIC)
        with (
            running(path, GrantedJobs(grants, lambda _: None)),
            closing(connect(path, JobClass.GUARANTEED, "7")) as guaranteed,
            closing(connect(path, JobClass.OPPORTUNISTIC, "8")) as other,
        ):
            other.report(statistics(), news=True)
            guaranteed.report(Statistics(updated_ns=time.monotonic_ns()), news=True)
            wait_until(has(other, GpuUse.PAUSE))
            file.unlink()
            wait_until(has(other, GpuUse.RUN))
            wait_until(lambda: not guaranteed.look())
            grant(grants, "8", JobClass.GUARANTEED)
            wait_until(lambda: other.look() and other.job_class is JobClass.GUARANTEED)
            grant(grants, "8", JobClass.OPPORTUNISTIC)
            wait_until(lambda: not other.look())

    @pytest.mark.shows("there are never two guaranteed jobs on a GPU, also without a packer")
    def test_two_guaranteed_jobs_that_slurm_has_put_on_one_gpu_are_told_of(
        self, grants: Path, path: Path, wait_until: WaitUntil, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Both are guaranteed by root's word, so none is refused, and others wait for both."""
        for job in ("7", "8"):
            grant(grants, job, JobClass.GUARANTEED)
        with running(path, GrantedJobs(grants, lambda _: None)), closing(connect(path, JobClass.GUARANTEED, "7")):
            for _ in range(2):
                connect(path, JobClass.GUARANTEED, "8").close()
        assert caplog.text.count(f"GPU given twice gpu={GPU} job=8: guaranteed job 7 has it, too") == 1

    def test_a_guaranteed_job_from_before_the_coordinator_is_waited_for(
        self, grants: Path, path: Path, wait_until: WaitUntil
    ) -> None:
        """The other one may hold what the coordinator before has let it hold."""

        def other_one() -> ProcessRow | None:
            rows = [process for row in look(str(path)).gpus for process in row.processes if process.job == "8"]
            return rows[0] if rows else None

        def is_told(reason: str) -> bool:
            row = other_one()
            return row is not None and reason in row.reason

        grant(grants, "7", JobClass.GUARANTEED)
        grant(grants, "8", JobClass.OPPORTUNISTIC)
        with (
            running(path, GrantedJobs(grants, lambda _: None)),
            closing(connect(path, JobClass.OPPORTUNISTIC, "8")) as other,
        ):
            other.report(statistics(boundaries=50, held_bytes=2**30, limit_bytes=2**31), news=True)
            wait_until(lambda: is_told("from before this coordinator has not come to it yet: paused"))
            row = other_one()
            assert row is not None
            assert (row.verdict, row.limit_bytes) == ("pause", 2**31)
            connect(path, JobClass.GUARANTEED, "7").close()
            wait_until(lambda: is_told("a guaranteed job without an agent has the GPU"))

    @pytest.mark.shows("there are never two guaranteed jobs on a GPU, also without a packer")
    def test_an_upgrade_waits_for_the_guaranteed_job_that_has_the_gpu(
        self, grants: Path, path: Path, wait_until: WaitUntil, caplog: pytest.LogCaptureFixture
    ) -> None:
        file = grant(grants, "7", JobClass.GUARANTEED)
        grant(grants, "8", JobClass.OPPORTUNISTIC)
        with (
            running(path, GrantedJobs(grants, lambda _: None)),
            closing(connect(path, JobClass.GUARANTEED, "7")) as guaranteed,
            closing(connect(path, JobClass.OPPORTUNISTIC, "8")) as other,
        ):
            other.report(statistics(), news=True)
            guaranteed.report(statistics(), news=True)
            wait_until(has(other, GpuUse.PAUSE))
            grant(grants, "8", JobClass.GUARANTEED)
            wait_until(lambda: "guaranteed job 7 has the GPU" in caplog.text)
            assert other.look()
            assert other.job_class is JobClass.OPPORTUNISTIC
            guaranteed.close()
            file.unlink()
            wait_until(lambda: other.look() and other.job_class is JobClass.GUARANTEED)
            assert caplog.text.count("has the GPU") == 1

    @pytest.mark.shows("what a guaranteed job kept of its GPU's page says nothing after its end")
    @pytest.mark.parametrize("upgraded", [False, True])
    def test_what_a_job_kept_of_its_gpu_says_nothing_after_its_end(
        self, grants: Path, path: Path, wait_until: WaitUntil, upgraded: bool
    ) -> None:
        """It keeps the descriptor of its page of work, and writes on: to nobody."""
        file = grant(grants, "7", JobClass.GUARANTEED)
        grant(grants, "9", JobClass.OPPORTUNISTIC)
        message = encode(Introduction(VERSION, "7", JobClass.GUARANTEED, GPU, time.monotonic_ns()))
        with contextlib.ExitStack() as undo:
            undo.enter_context(running(path, GrantedJobs(grants, lambda _: None)))
            beside = undo.enter_context(closing(connect(path, JobClass.OPPORTUNISTIC, "9")))
            first, _, descriptors = ask(str(path), message, None, num_descriptors=3)
            undo.callback(first.close)
            for descriptor in descriptors:
                undo.callback(os.close, descriptor)
            kept = undo.enter_context(closing(Page(descriptors[2], Work, writable=True)))
            kept.write(Work(3))
            wait_until(lambda: beside.look() and beside.busy_since_ns() == 3)
            file.unlink()  # its job ends, and its process does not
            wait_until(lambda: beside.look() and beside.busy_since_ns() == 0)
            kept.write(Work(2**62))
            assert beside.busy_since_ns() == 0
            grant(grants, "8", JobClass.OPPORTUNISTIC if upgraded else JobClass.GUARANTEED)
            # (It takes itself for guaranteed; the coordinator knows better.)
            second = undo.enter_context(closing(connect(path, JobClass.OPPORTUNISTIC, "8")))
            if upgraded:
                grant(grants, "8", JobClass.GUARANTEED)
                wait_until(lambda: second.look() and second.job_class is JobClass.GUARANTEED)
            late = undo.enter_context(closing(connect(path, JobClass.OPPORTUNISTIC, "9")))
            second.say_busy(5)
            kept.write(Work(2**62))
            for reader in (beside, late):
                wait_until(lambda reader=reader: reader.look() and reader.busy_since_ns() == 5)
            kept.write(Work(0))
            assert beside.busy_since_ns() == late.busy_since_ns() == second.busy_since_ns() == 5

    def test_who_does_not_read_for_a_while_is_told_of_another_page_then(
        self, grants: Path, path: Path, wait_until: WaitUntil
    ) -> None:
        grant(grants, "9", JobClass.OPPORTUNISTIC)
        with (
            running(path, GrantedJobs(grants, lambda _: None)),
            closing(connect(path, JobClass.OPPORTUNISTIC, "9")) as silent,
        ):
            for job in range(20, 60):  # more than its socket takes
                file = grant(grants, f"{job}", JobClass.GUARANTEED)
                with closing(connect(path, JobClass.GUARANTEED, f"{job}")) as guaranteed:
                    guaranteed.say_busy(job)
                    wait_until(lambda: is_there(path), 5)
                file.unlink()
            grant(grants, "8", JobClass.GUARANTEED)
            with closing(connect(path, JobClass.GUARANTEED, "8")) as last:
                last.say_busy(5)
                wait_until(lambda: silent.look() and silent.busy_since_ns() == 5)

    def test_a_job_that_was_upgraded_says_itself_that_it_is_busy(
        self, grants: Path, path: Path, wait_until: WaitUntil
    ) -> None:
        grant(grants, "7", JobClass.OPPORTUNISTIC)
        grant(grants, "8", JobClass.OPPORTUNISTIC)
        with (
            running(path, GrantedJobs(grants, lambda _: None)),
            closing(connect(path, JobClass.OPPORTUNISTIC, "7")) as beside,
            closing(connect(path, JobClass.OPPORTUNISTIC, "8")) as upgraded,
        ):
            upgraded.say_busy(5)
            assert beside.busy_since_ns() == 0, "it was not guaranteed yet"
            grant(grants, "8", JobClass.GUARANTEED)
            wait_until(lambda: upgraded.look() and upgraded.job_class is JobClass.GUARANTEED)
            upgraded.say_busy(7)
            assert beside.busy_since_ns() == 7
