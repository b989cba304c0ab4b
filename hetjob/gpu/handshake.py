"""How a process and the coordinator of its node meet: one message each way over a Unix socket.

The coordinator knows who asks from the kernel (SO_PEERCRED), and answers with the descriptors of the two pages. Later
on each sends a byte when it has written something that cannot wait. The end of the connection is the end of
either.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import socket
import time
from pathlib import Path
from typing import Annotated

import msgspec

from hetstream.base.text import printable, shortened
from hetstream.base.typed_json import decode, encode
from hetstream.base.unix_sockets import StrangerListens, connect_to
from hetstream.hetjob.errors import GpuCoordinatorError, GpuJobRefused, GpuTaken
from hetstream.hetjob.gpu.config import reach
from hetstream.hetjob.gpu.orders import VERSION, JobClass, Order, Page, Statistics, Work

MOST_BYTES = 4096
NEWS = b"!"
# From the coordinator: the job is guaranteed from now on. With it comes the descriptor by which it writes its work.
UPGRADED = b"^"
# From the coordinator: another job says from now on when it is busy, in the page whose descriptor comes along.
OTHER_WORK = b"w"
# A coordinator that is there answers within milliseconds.
_ANSWER_S = 2.0

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class Introduction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a process says of itself. The coordinator believes the version alone, and compares the clock with its own.

    Attributes:
        version: of the pages.
        job: id of the Slurm job; a name, where there is no Slurm.
        program: name that `hetstream gpu run` gave to the program, of which a Slurm job may have several; empty: none.
        job_class: what the process takes itself for.
        gpu: which GPU it uses.
        now_ns: its clock, when the connection is made.
        rank: among the processes of its launch on this node, from 0.
        num_ranks: how many these are; 0: it does not know.
        launch: tells this launch from others that the job runs at the same time.
    """

    version: int
    job: _Name
    job_class: JobClass
    gpu: _Name
    now_ns: int = 0
    rank: Annotated[int, msgspec.Meta(ge=0)] = 0
    num_ranks: Annotated[int, msgspec.Meta(ge=0)] = 0
    launch: Annotated[str, msgspec.Meta(max_length=256)] = ""
    program: Annotated[str, msgspec.Meta(max_length=256)] = ""


class CoordinatorAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the coordinator says.

    Attributes:
        version: of the pages.
        refusal: why the process may not take part; empty: it may, and three descriptors come along.
        job_class: what the process is.
        is_taken: it is refused because another guaranteed job has the GPU.
    """

    version: int
    refusal: str = ""
    job_class: JobClass = JobClass.OPPORTUNISTIC
    is_taken: bool = False


class _Version(msgspec.Struct, frozen=True):
    """All that is read of a message of another version."""

    version: int


def read_introduction(message: bytes) -> Introduction:
    """Read what a process sent.

    Raises:
        GpuJobRefused: it is of another version, or no introduction.
    """
    try:
        version = decode(message, _Version).version
        if version != VERSION:
            raise GpuJobRefused(
                f"its hetstream shares GPUs by protocol {version}, and this node's coordinator by protocol {VERSION}. "
                "Use the hetstream that the cluster has"
            )
        return decode(message, Introduction)
    except msgspec.MsgspecError as error:
        raise GpuJobRefused(f"it sent no introduction: {error}") from error


class Connection:
    """A process's connection with its coordinator.

    Args:
        path: of the coordinator's socket.
        introduction: who asks.
        coordinator_uid: user that the coordinator may run as, beside root and this user; None: nobody else.

    Raises:
        GpuCoordinatorError: nobody answers there, or a user who is not the coordinator's listens.
        GpuJobRefused: the coordinator does not want this process.
    """

    def __init__(self, path: str, introduction: Introduction, coordinator_uid: int | None = None) -> None:
        with contextlib.ExitStack() as undo:
            introduction = msgspec.structs.replace(introduction, now_ns=time.monotonic_ns())
            connection, answer, descriptors = ask(path, encode(introduction), coordinator_uid, num_descriptors=3)
            undo.callback(connection.close)
            try:
                self._orders = Page(descriptors[0], Order, writable=False)
                self._statistics = Page(descriptors[1], Statistics, writable=True)
                self._work, self._writes_work = _work_page(descriptors[2])
            except (ValueError, OSError) as error:  # a file that is shorter than a page, of another mode, or none
                raise GpuCoordinatorError(f"what the coordinator at {path} sent are no pages: {error}") from error
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
            undo.pop_all()
        self.job_class = answer.job_class
        connection.setblocking(False)
        self._connection = connection
        self.is_lost = False

    def order(self) -> Order | None:
        """Return the newest order; None if the page holds none that is whole."""
        return self._orders.read()

    def report(self, statistics: Statistics, *, news: bool) -> None:
        """Write statistics; with `news`, wake the coordinator. Never waits."""
        reach("agent.reporting")
        self._statistics.write(statistics)
        reach("agent.reported")
        if news:
            with contextlib.suppress(OSError):  # it is stopped, or gone: `look` says which
                self._connection.send(NEWS)

    def busy_since_ns(self) -> int:
        """Return when the guaranteed job began to use the GPU last, as far as it says; 0: it has not."""
        work = self._work.read()
        return work.since_ns if work else 0

    def say_busy(self, now_ns: int) -> None:
        """Of a guaranteed process: it uses the GPU from now on."""
        if self._writes_work:
            self._work.write(Work(now_ns))

    def look(self) -> bool:
        """Take what the coordinator has sent; whether it is there. But for an upgrade, what it says is in the page."""
        try:
            while not self.is_lost:
                message, descriptors, _, _ = socket.recv_fds(self._connection, 1, 1, socket.MSG_CMSG_CLOEXEC)
                self.is_lost = message == b""
                if message == UPGRADED:
                    self.job_class = JobClass.GUARANTEED
                self._take_work(descriptors)
        except BlockingIOError:
            pass
        except OSError:
            self.is_lost = True
        return not self.is_lost

    def _take_work(self, descriptors: list[int]) -> None:
        """Read or write another page of work from now on: what was said in the one before counts no more."""
        for descriptor in descriptors:
            with contextlib.suppress(ValueError, OSError):  # it is no page
                work, writes = _work_page(descriptor)
                self._work.close()
                self._work, self._writes_work = work, writes
            os.close(descriptor)

    def wait(self, timeout_s: float) -> None:
        """Wait until the coordinator has news, or for the timeout; where it has gone, for all of that."""
        if self.is_lost:
            time.sleep(timeout_s)
        elif select.select([self._connection], [], [], timeout_s)[0]:
            self.look()

    def close(self) -> None:
        """Leave; a second time does nothing."""
        self._connection.close()
        for page in (self._orders, self._statistics, self._work):
            page.close()


def _work_page(descriptor: int) -> tuple[Page[Work], bool]:
    """The page, and whether this process writes it: of several guaranteed processes on a GPU, the first one does.

    Raises:
        ValueError, OSError: it is no page.
    """
    writes = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR
    return Page(descriptor, Work, writable=writes), writes


def ask(
    path: str, message: bytes, coordinator_uid: int | None, num_descriptors: int
) -> tuple[socket.socket, CoordinatorAnswer, list[int]]:
    """Send the first message of a connection to the coordinator, and wait for its answer.

    Args:
        path: of its socket.
        message: an introduction, or what asks for its table.
        coordinator_uid: user that it may run as, beside root and this user; None: nobody else.
        num_descriptors: that its answer brings.

    Returns:
        The connection, the answer and the descriptors; all of them are the caller's to close.

    Raises:
        GpuCoordinatorError, GpuJobRefused: as `Connection`.
    """
    descriptors: list[int] = []
    try:
        connection = connect_to(Path(path), socket.SOCK_SEQPACKET, _ANSWER_S, [coordinator_uid])
    except StrangerListens as error:
        # Whoever makes the pages can end their readers, and say when they run: not anybody may.
        raise GpuCoordinatorError(
            f"{error} listens at {path}, and the coordinator of GPUs would be root's, or of the user that "
            "HETSTREAM_GPU_COORDINATOR_UID names: it is not asked"
        ) from error
    except OSError as error:
        raise _silent(path, error) from error
    try:
        connection.settimeout(_ANSWER_S)
        reach("agent.connected")
        connection.send(message)
        reach("agent.introduced")
        text, descriptors, _, _ = socket.recv_fds(connection, MOST_BYTES, num_descriptors, socket.MSG_CMSG_CLOEXEC)
        reach("agent.answered")
        return connection, _check(path, text, len(descriptors), num_descriptors), descriptors
    except BaseException as error:
        connection.close()
        for descriptor in descriptors:
            os.close(descriptor)
        if isinstance(error, OSError):
            raise _silent(path, error) from error
        raise


def _silent(path: str, error: OSError) -> GpuCoordinatorError:
    return GpuCoordinatorError(
        f"no coordinator of GPUs answers at {path}: {error.strerror or error}. Check on that node: systemctl status "
        "hetstream-gpu"
    )


def _check(path: str, message: bytes, num_descriptors: int, expected: int) -> CoordinatorAnswer:
    if not message:
        raise GpuCoordinatorError(
            f"the coordinator at {path} closed the connection without an answer: it ends just now, or this user "
            "connects too often; its log says which"
        )
    try:
        version = decode(message, _Version).version
        answer = decode(message, CoordinatorAnswer) if version == VERSION else None
    except msgspec.MsgspecError as error:
        raise GpuCoordinatorError(f"what answers at {path} is no coordinator of GPUs: {error}") from error
    if answer is None:
        raise GpuJobRefused(
            f"the coordinator of this node's GPUs speaks protocol {version}, and this hetstream protocol {VERSION}. "
            "Use the hetstream that the cluster has"
        )
    if answer.refusal:
        refused = GpuTaken if answer.is_taken else GpuJobRefused
        reason = printable(shortened(answer.refusal, 500))
        raise refused(f"the coordinator of this node's GPUs refuses this process: {reason}")
    if num_descriptors != expected:
        raise GpuCoordinatorError(f"the coordinator at {path} sent {num_descriptors} descriptors instead of {expected}")
    return answer
