"""The coordinator's loop: admits processes, reads their statistics, has `decide` decide, and writes their orders.

One thread. It wakes when a process has news, and often enough to renew orders. What a process sends is read in bounded
pieces, and a process that does not talk as it should is dropped: then it counts as gone, and pauses if it is bound to.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import selectors
import socket
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hetstream.base.access import UntrustedFile
from hetstream.base.errors import HetstreamError
from hetstream.base.limits import ConnectionLimit
from hetstream.base.typed_json import encode
from hetstream.base.unix_sockets import listen_at, peer_of
from hetstream.hetjob.errors import GpuJobRefused, GpuTaken
from hetstream.hetjob.gpu.agent import is_good_news
from hetstream.hetjob.gpu.config import reach
from hetstream.hetjob.gpu.handshake import (
    MOST_BYTES,
    NEWS,
    OTHER_WORK,
    UPGRADED,
    CoordinatorAnswer,
    Introduction,
    read_introduction,
)
from hetstream.hetjob.gpu.orders import (
    VERSION,
    JobClass,
    Order,
    Page,
    Statistics,
    make_orders,
    make_statistics,
    make_work,
)
from hetstream.slurm_plugin.coordinator.admission import Admission, Agentless, Peer, agentless, check_rank
from hetstream.slurm_plugin.coordinator.decide import GpuState, Measurements, OrderDecision, SharingJob, decide_all
from hetstream.slurm_plugin.coordinator.gpus import Gpu, of_this_namespace
from hetstream.slurm_plugin.coordinator.table import (
    TABLE_VERSION,
    GpuTable,
    Who,
    asks_to_look,
    gpu_row,
    of_user,
    sealed_file,
)

# How often each user connects: a crowd of one of them costs the others nothing, and the log few lines. Pure.


@dataclass
class _User:
    left: float
    at_s: float
    said_s: float | None = None
    num_unsaid: int = 0
    last: str = ""


class Crowds:
    """Turns away whoever connects again and again, and says who was turned away: once, then how many more.

    Args:
        most: connections of a user at once.
        per_s: in the long run.
        said_s: time from a line about a user to the next one.
    """

    def __init__(self, most: int, per_s: float, said_s: float) -> None:
        self._most, self._per_s, self._said_s = most, per_s, said_s
        self._users: dict[int, _User] = {}

    def may_enter(self, uid: int, now_s: float) -> bool:
        """Return whether a user may have another connection now, which is counted."""
        user = self._user(uid, now_s)
        user.left = min(float(self._most), user.left + (now_s - user.at_s) * self._per_s)
        user.at_s = now_s
        if user.left < 1:
            return False
        user.left -= 1
        return True

    def turned_away(self, uid: int, why: str, now_s: float) -> str:
        """Return what to say of a connection that was refused; empty if it is only counted."""
        user = self._user(uid, now_s)
        if user.said_s is not None and now_s - user.said_s < self._said_s:
            user.num_unsaid, user.last = user.num_unsaid + 1, why
            return ""
        user.said_s = now_s
        return why

    def to_say(self, now_s: float) -> list[str]:
        """Return what was counted and is to be said by now. Who has long been away is forgotten."""
        lines = []
        for uid, user in list(self._users.items()):
            if user.said_s is not None and now_s - user.said_s < self._said_s:
                continue
            if user.num_unsaid:
                lines.append(f"{user.num_unsaid} more connections of user {uid} came to nothing, the last: {user.last}")
                user.num_unsaid, user.said_s = 0, now_s
            elif now_s - user.at_s > self._most / self._per_s:
                del self._users[uid]
        return lines

    def _user(self, uid: int, now_s: float) -> _User:
        return self._users.setdefault(uid, _User(float(self._most), now_s))


_log = logging.getLogger(__name__)

# Interval at which orders are renewed while GPUs are shared; each is valid for several intervals.
RENEW_S = 0.02
# Interval at which root's grants are read.
_GRANTS_S = 0.5
_MOST_PROCESSES = 256
_MOST_OF_USER = 64
# A job with mini-batches of a millisecond has 40 news in the time between two renewals.
_MOST_NEWS = 200
_BACKLOG = 256
# Connections of a user at once, and in a second: each process has one for as long as it runs. Not of root.
_MOST_AT_ONCE, _MOST_PER_S = 2 * _MOST_OF_USER, 32.0
_CROWD_SAID_S = 30.0
# Oldest introduction that is answered; its sender has given up long before.
_MOST_BEHIND_NS = 10_000_000_000
_MODE = 0o666  # who may do what is decided by the kernel's word on each connection


@dataclass(eq=False)
class _Member:
    """A connection, and the process behind it once it is admitted."""

    connection: socket.socket
    peer: Peer
    name: str
    since_ns: int
    gpu: str = ""
    job_class: JobClass = JobClass.OPPORTUNISTIC
    job: str = ""
    orders: Page[Order] | None = None
    statistics: Page[Statistics] | None = None
    decision: OrderDecision | None = None
    introduction: Introduction | None = None
    num_news: int = 0
    num_works: int = 0
    waits_for: str = ""

    @property
    def gang(self) -> str:
        """What the processes have in common that were launched together, and so train together."""
        return f"{self.job}\n{self.introduction.launch}" if self.introduction else ""

    @property
    def rank(self) -> int | None:
        """Among them, if it knows of others."""
        return self.introduction.rank if self.introduction and self.introduction.num_ranks > 1 else None


@dataclass
class _SharedGpu:
    gpu: Gpu
    seen: Measurements
    state: GpuState = field(default_factory=GpuState)
    decisions: dict[str, OrderDecision] = field(default_factory=dict)
    is_reserved: bool = False
    is_awaited: bool = True  # its guaranteed job may have been there before the coordinator, and has not come to it
    agentless: dict[int, Agentless] | None = None  # None: nobody has counted
    complained: Collection[str] = ()  # jobs that are to be taken away for want of an agent
    work: tuple[int, int] = field(default_factory=make_work)
    num_works: int = 0  # pages of work so far, without the first
    is_work_written: bool = False

    def work_of(self, *, writes: bool) -> int:
        """Return the descriptor of the page in which the guaranteed job's first process says that it is busy."""
        if writes:
            self.end_work()
            self.is_work_written = True
        written, read = self.work
        return written if writes else read

    def end_work(self) -> None:
        """Begin another page: a process whose job has ended can still write into this one."""
        if self.is_work_written:
            self._close_work()
            self.work, self.is_work_written = make_work(), False
            self.num_works += 1

    def close(self) -> None:
        self.gpu.close()
        self._close_work()

    def _close_work(self) -> None:
        for descriptor in self.work:
            os.close(descriptor)


def _measured(shared: _SharedGpu, members: Sequence[_Member]) -> Measurements:
    """One GPU and its processes, as they are now."""
    reading = shared.gpu.reading()
    jobs = tuple(
        SharingJob(
            member.name,
            member.job_class,
            member.since_ns,
            member.statistics.read() if member.statistics else None,
            reading.held_by(member.peer.pid),
            member.gang,
        )
        for member in members
    )
    others = (shared.agentless or {}).values()
    return Measurements(
        shared.gpu.capacity_bytes, jobs, shared.is_reserved, reading.is_lost, shared.is_awaited,
        agentless_bytes=sum(process.held_bytes for process in others),
        is_hogged=any(process.is_hog for process in others),
    )  # fmt: skip


class Coordinator:
    """Coordinates the GPUs of this node until it is stopped.

    Args:
        path: of the socket; one that a dead coordinator has left is replaced.
        gpus: what is shared.
        admission: who may.

    Raises:
        HetstreamError: another coordinator listens there.
        OSError: the socket cannot be made.
    """

    def __init__(self, path: Path, gpus: Sequence[Gpu], admission: Admission) -> None:
        self._admission = admission
        self._tables: dict[int | None, bytes] = {}  # of this renewal, by who may see them; None: who may see all
        self._members: list[_Member] = []
        self._places: ConnectionLimit[_Member] = ConnectionLimit(_MOST_PROCESSES, _MOST_OF_USER)
        self._crowds = Crowds(_MOST_AT_ONCE, _MOST_PER_S, _CROWD_SAID_S)
        self._num_admitted = 0
        self._grants_read_s = -_GRANTS_S
        self._listener = _listen(path)
        self._gpus = {gpu.name: _SharedGpu(gpu, Measurements(gpu.capacity_bytes)) for gpu in gpus}
        self._path = path
        self._socket_inode = path.lstat().st_ino
        self._resting: list[_Member] = []
        self._news_counted_s = time.monotonic()
        self._wake, self._waker = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._is_stopped = False

    def run(self) -> None:
        """Work until `stop`."""
        try:
            self._read_grants()  # who was there before it, while nobody can have come since
            while not self._is_stopped:
                self._step()
        finally:
            self._close()

    def stop(self) -> None:
        """Have `run` return; from any thread or signal handler."""
        self._is_stopped = True
        with contextlib.suppress(OSError):
            self._waker.send(b"!")

    def _step(self) -> None:
        ready = self._selector.select(RENEW_S if self._members else _GRANTS_S)
        self._listen_to_all_again()
        for key, _ in ready:
            if key.fileobj is self._listener:
                self._accept()
            elif key.fileobj is not self._wake:
                self._hear(key.data)
        self._read_grants()
        self._tell_of_other_work()
        self._decide()

    def _tell_of_other_work(self) -> None:
        """Where a guaranteed job has come or gone, all others on the GPU read another page."""
        for member in self._members:
            shared = self._gpus.get(member.gpu)
            if shared is None or member.num_works == shared.num_works:
                continue
            with contextlib.suppress(OSError):  # it does not read now, and is told the next time; or it has gone
                descriptor = shared.work_of(writes=False)
                socket.send_fds(member.connection, [OTHER_WORK], [descriptor], socket.MSG_DONTWAIT)
                member.num_works = shared.num_works

    def _listen_to_all_again(self) -> None:
        """Each renewal begins with nobody having said too much."""
        now_s = time.monotonic()
        if now_s - self._news_counted_s < RENEW_S:
            return
        self._news_counted_s = now_s
        self._tables.clear()
        for member in self._members:
            member.num_news = 0
        for member in self._resting:
            self._selector.register(member.connection, selectors.EVENT_READ, member)
        self._resting.clear()

    def _accept(self) -> None:
        """All that wait, so that a crowd does not fill the queue; a crowd that goes on comes again after the orders."""
        for _ in range(_BACKLOG):
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._enter(connection)

    def _enter(self, connection: socket.socket) -> None:
        reach("coordinator.accepted")
        connection.setblocking(False)
        pid, uid = peer_of(connection)
        if uid not in (0, os.geteuid()) and not self._crowds.may_enter(uid, time.monotonic()):
            connection.close()  # a refusal would be final, and its agents are to try again
            self._turned_away(uid, f"GPU left pid={pid} uid={uid}: it connects too often")
            return
        self._num_admitted += 1
        member = _Member(connection, Peer(pid, uid), f"{self._num_admitted}", time.monotonic_ns())
        self._members.append(member)
        self._places.enter(member, uid)
        self._selector.register(connection, selectors.EVENT_READ, member)
        crowded_out = self._places.one_too_many()
        if crowded_out is not None:
            self._drop(crowded_out, f"user {crowded_out.peer.uid} has too many connections")

    def _hear(self, member: _Member) -> None:
        """An introduction, or news. News say nothing: what counts is in the page.

        Who sends them without end is not listened to until the next renewal: else nobody's orders would be renewed.
        """
        if member not in self._members:
            return
        try:
            message = member.connection.recv(MOST_BYTES)
            while message and member.gpu:
                member.num_news += 1
                if member.num_news > _MOST_NEWS:
                    self._selector.unregister(member.connection)
                    self._resting.append(member)
                    return
                message = member.connection.recv(MOST_BYTES)
        except BlockingIOError:
            return
        except OSError:
            message = b""
        if not message:
            self._drop(member, "it has gone")
            return
        try:
            self._admit(member, message)
        except GpuJobRefused as error:
            with contextlib.suppress(OSError):
                is_taken = isinstance(error, GpuTaken)
                member.connection.send(encode(CoordinatorAnswer(VERSION, refusal=str(error), is_taken=is_taken)))
            self._drop(member, f"refused: {error}")

    def _admit(self, member: _Member, message: bytes) -> None:
        reach("coordinator.heard")
        if asks_to_look(message):
            self._show(member)
            return
        introduction = read_introduction(message)
        if introduction.gpu not in self._gpus:
            raise GpuJobRefused(f"GPU {introduction.gpu!r} is not shared here; shared are: {', '.join(self._gpus)}")
        behind_ns = time.monotonic_ns() - introduction.now_ns
        if not 0 <= behind_ns <= _MOST_BEHIND_NS:
            raise GpuJobRefused(
                "its clock (CLOCK_MONOTONIC) is not this node's, so it could not tell when an order lapses. Run it "
                "without a time namespace of its own"
            )
        admitted = self._admission.admit(member.peer, introduction)
        for other in [*self._members]:
            is_asked = other.gpu == introduction.gpu or (other.gpu and other.job == admitted.job)
            if is_asked and other not in self._resting:
                self._hear(other)  # one that has ended has no GPU, and is none of its job's processes any more
        check_rank(
            introduction, admitted.job, (other.introduction for other in self._members if other.job == admitted.job)
        )
        first = not self._has_guaranteed(introduction.gpu)
        if admitted.job_class is JobClass.GUARANTEED:
            others = self._guaranteed_on({introduction.gpu}) - {admitted.job}
            self._admission.check_guaranteed(introduction.gpu, admitted.job, others)
            self._gpus[introduction.gpu].is_awaited = False
        member.job, member.job_class, member.gpu = admitted.job, admitted.job_class, introduction.gpu
        member.introduction = introduction
        member.orders, order_descriptor = make_orders()
        try:
            member.statistics, statistics_descriptor = make_statistics()
            try:
                reach("coordinator.pages_made")
                answer = encode(CoordinatorAnswer(VERSION, job_class=member.job_class))
                with contextlib.suppress(OSError):  # it has gone already: seen at its connection
                    writes = first and member.job_class is JobClass.GUARANTEED
                    work_descriptor = self._gpus[member.gpu].work_of(writes=writes)
                    member.num_works = self._gpus[member.gpu].num_works
                    descriptors = [order_descriptor, statistics_descriptor, work_descriptor]
                    socket.send_fds(member.connection, [answer], descriptors)
            finally:
                os.close(statistics_descriptor)
        finally:
            os.close(order_descriptor)
        reach("coordinator.answered")
        _log.info(
            "GPU shared gpu=%s job=%s class=%s pid=%d uid=%d",
            member.gpu, member.job, member.job_class.value, member.peer.pid, member.peer.uid,
        )  # fmt: skip

    def _show(self, member: _Member) -> None:
        """Send the table. It is made once in a renewal: many who look hold up nobody's orders."""
        uid = member.peer.uid
        sees_all = uid in (0, os.geteuid())
        seen_by = None if sees_all else uid
        if seen_by not in self._tables:
            self._tables[seen_by] = self._table(seen_by)
        descriptor = sealed_file(self._tables[seen_by])
        try:
            with contextlib.suppress(OSError):  # it has gone already
                socket.send_fds(member.connection, [encode(CoordinatorAnswer(VERSION))], [descriptor])
        finally:
            os.close(descriptor)
        self._drop(member)

    def _table(self, uid: int | None) -> bytes:
        who = {member.name: Who(member.job, member.peer.uid, member.peer.pid, member.rank) for member in self._members}
        now_ns = time.monotonic_ns()
        rows = []
        for shared in self._gpus.values():
            others = None if shared.agentless is None else shared.agentless.values()
            rows.append(gpu_row(shared.gpu, shared.state, shared.seen, shared.decisions, who, others, now_ns))
        shown = tuple(rows) if uid is None else of_user(rows, uid)
        return encode(GpuTable(TABLE_VERSION, socket.gethostname(), time.time(), shown))

    def _decide(self) -> None:
        seen: dict[str, Measurements] = {}
        for name, shared in self._gpus.items():
            members = [member for member in self._members if member.gpu == name]
            if members or shared.is_reserved:
                seen[name] = shared.seen = _measured(shared, members)
            else:
                shared.state, shared.decisions = GpuState(), {}
                shared.seen = _measured(shared, ())
        if not seen:
            return
        now_ns = time.monotonic_ns()
        states, decisions = decide_all({name: self._gpus[name].state for name in seen}, seen, now_ns)
        for name, state in states.items():
            self._gpus[name].state, self._gpus[name].decisions = state, decisions[name]
        reach("coordinator.decided")
        for member in self._members:
            decision = decisions.get(member.gpu, {}).get(member.name)
            if decision is None or member.orders is None:
                continue
            member.orders.write(decision.order)
            reach("coordinator.ordered")
            before = member.decision.order if member.decision else None
            if member.job_class is JobClass.OPPORTUNISTIC and is_good_news(before, decision.order, now_ns):
                with contextlib.suppress(OSError):  # it does not read, or is gone: seen at its connection
                    member.connection.send(NEWS, socket.MSG_DONTWAIT)
            if decision.is_disobedient and not (member.decision and member.decision.is_disobedient):
                _log.warning("GPU order not kept gpu=%s job=%s: %s", member.gpu, member.job, decision.reason)
            member.decision = decision

    def _read_grants(self) -> None:
        now_s = time.monotonic()
        if now_s - self._grants_read_s >= _GRANTS_S:
            self._grants_read_s = now_s
            for line in self._crowds.to_say(now_s):
                _log.info("%s", line)
            for name, shared in self._gpus.items():
                shared.is_reserved = self._admission.is_reserved(name)
                shared.is_awaited = shared.is_awaited and shared.is_reserved
                self._look_for_agentless(name, shared)
            for member in list(self._members):
                self._check_grant(member)

    def _look_for_agentless(self, gpu: str, shared: _SharedGpu) -> None:
        with_agent: dict[int, bool] = {}
        for member in self._members:
            if member.gpu:
                with_agent[member.peer.pid] = member.gpu == gpu or with_agent.get(member.peer.pid, False)
        now_ns = time.monotonic_ns()
        shared.agentless = agentless(
            of_this_namespace(shared.gpu.reading()), shared.gpu.capacity_bytes, with_agent, shared.agentless,
            self._admission.holder_of, now_ns,
        )  # fmt: skip
        complaints = {
            process.holder.job: complaint
            for process in (shared.agentless or {}).values()
            if process.holder and (complaint := process.complaint(now_ns))
        }
        for job in complaints.keys() - shared.complained:
            _log.warning("GPU used without an agent gpu=%s job=%s: %s", gpu, job, complaints[job])
        shared.complained = complaints.keys()

    def _check_grant(self, member: _Member) -> None:
        """A process that outlives its job, or whose job has become another, has lost its place."""
        if member.introduction is None:
            return
        try:
            admitted = self._admission.admit(member.peer, member.introduction)
        except GpuJobRefused as error:
            self._drop(member, f"no longer admitted: {error}")
            return
        if (admitted.job, admitted.job_class) == (member.job, member.job_class):
            return
        if admitted.job == member.job and admitted.job_class is JobClass.GUARANTEED:
            self._upgrade(member)
        else:
            self._drop(member, f"it has become {admitted.job_class.value} and of job {admitted.job}")

    def _upgrade(self, member: _Member) -> None:
        """An opportunistic process becomes guaranteed, and goes on; but never beside another guaranteed job."""
        gpus = {own.gpu for own in self._members if own.job == member.job}  # on all of them, or on none
        if other := next(iter(sorted(self._guaranteed_on(gpus) - {member.job})), ""):
            if other != member.waits_for:
                member.waits_for = other
                _log.warning(
                    "GPU not given gpu=%s job=%s: it is to become guaranteed, and guaranteed job %s has the GPU",
                    member.gpu, member.job, other,
                )  # fmt: skip
            return
        shared = self._gpus[member.gpu]
        work_descriptor = shared.work_of(writes=not self._has_guaranteed(member.gpu))
        try:
            socket.send_fds(member.connection, [UPGRADED], [work_descriptor], socket.MSG_DONTWAIT)
        except OSError:
            return  # it does not read now, and is told the next time; or it has gone: seen at its connection
        member.job_class, member.num_works = JobClass.GUARANTEED, shared.num_works
        shared.is_awaited = False
        _log.info("GPU given gpu=%s job=%s pid=%d: it is guaranteed now", member.gpu, member.job, member.peer.pid)

    def _has_guaranteed(self, gpu: str) -> bool:
        """Whether a guaranteed process is on a GPU: of several, the first one writes its page of work."""
        return bool(self._guaranteed_on({gpu}))

    def _guaranteed_on(self, gpus: Collection[str]) -> set[str]:
        """The guaranteed jobs that have processes on these GPUs."""
        return {other.job for other in self._members if other.gpu in gpus and other.job_class is JobClass.GUARANTEED}

    def _drop(self, member: _Member, why: str = "") -> None:
        """Have no more to do with a process; without a reason there is nothing to say about it."""
        self._members.remove(member)
        self._places.leave(member)
        if member in self._resting:
            self._resting.remove(member)
        else:
            self._selector.unregister(member.connection)
        member.connection.close()
        for page in (member.orders, member.statistics):
            if page is not None:
                page.close()
        if member.job_class is JobClass.GUARANTEED and not self._has_guaranteed(member.gpu):
            self._gpus[member.gpu].end_work()
        said = f"GPU left gpu={member.gpu} job={member.job} pid={member.peer.pid}: {why}"
        if why and member.gpu:
            _log.info("%s", said)
        elif why:
            self._turned_away(member.peer.uid, said)

    def _turned_away(self, uid: int, why: str) -> None:
        """Log a connection that was refused; of a crowd the first, and later how many more."""
        if said := self._crowds.turned_away(uid, why, time.monotonic()):
            _log.info("%s", said)

    def _close(self) -> None:
        for member in list(self._members):
            self._drop(member, "the coordinator ends")
        self._selector.close()
        self._listener.close()
        self._wake.close()
        self._waker.close()
        for shared in self._gpus.values():
            shared.close()
        with contextlib.suppress(FileNotFoundError):
            if self._path.lstat().st_ino == self._socket_inode:  # else another coordinator listens there by now
                self._path.unlink()


def _listen(path: Path) -> socket.socket:
    try:
        return listen_at(path, socket.SOCK_SEQPACKET, _MODE, _BACKLOG)
    except UntrustedFile as error:
        raise HetstreamError(f"the coordinator does not listen at {path}: {error}") from error
    except FileExistsError as error:
        raise HetstreamError(f"{path}: {error.strerror}. Give another --socket") from error
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise HetstreamError(
            f"another coordinator of GPUs listens at {path}. Stop it, or give another --socket"
        ) from error
