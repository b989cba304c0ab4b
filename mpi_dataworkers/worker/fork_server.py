"""Processes that have loaded a large pipeline, and from which the processes of a data worker are forked.

Python's objects can be shared by processes only as the memory of the one that has forked them. So a process that comes
to a large pipeline asks its supervisor (`ask_to_be_forked`). That one forks a *fork server*, which loads the pipeline
and nothing else, and compares what it holds with what it held before (`ops/fork_safety.py`). Where nothing is in the
way, those who asked leave, and the fork server forks processes in their slots, now and whenever one of them dies. Else,
or
when the fork server ends, hangs or is stopped, they load the pipeline for themselves.

The fork server makes no batch, has no thread and no connection. What it forks are children of the supervisor: of the
two forks that make one of them the first ends at once, and the supervisor adopts the second.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import logging
import mmap
import os
import signal
import socket
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import msgspec

from hetstream.mpi_dataworkers.errors import PipelineError
from hetstream.mpi_dataworkers.ops.fork_safety import Holdings, importing
from hetstream.mpi_dataworkers.ops.import_effects import without_effects
from hetstream.mpi_dataworkers.ops.pickled_pipeline import PickledPipeline, load_pipeline
from hetstream.mpi_dataworkers.ops.pipeline import Pipeline, use_one_thread
from hetstream.mpi_dataworkers.ops.process_memory import leave_attachments_alone
from hetstream.mpi_dataworkers.ops.program import SettingsInForce, changed_since, enter_program
from hetstream.mpi_dataworkers.process.children import (
    FRESH_PROCESS,
    ForksEndHere,
    adopt_orphans,
    begin_child,
    end_group,
    fork_child,
    has_ended,
    imported_again,
    is_signalled,
    is_stopped,
)
from hetstream.mpi_dataworkers.process.programs import joined, serves
from hetstream.mpi_dataworkers.wire.messages import Program, ProvidePipeline
from hetstream.mpi_dataworkers.wire.pipeline_transfer import buffers_in, places_of, read_into
from hetstream.mpi_dataworkers.worker.process import LoadAnswer, StackFile, WorkPage

# What a data worker process has loaded of the program that it serves.
#
# Used by the process that makes batches (`pipelines.py`), and by one that loads a pipeline for others, which are forked
# from it (`ForkServers`): they go on with the object as it was left.

_log = logging.getLogger(__name__)


def objects_bytes(pickled: PickledPipeline) -> int:
    """Return bytes of a pipeline's objects in pickled form; the arrays beside them are shared anyway."""
    return memoryview(pickled.blob).nbytes


def _imports_of(program: Program) -> AbstractContextManager[None]:
    return nullcontext() if program.knows_hetstream else without_effects()


@contextmanager
def _modules_of(program: Program) -> Iterator[None]:
    """Import what the program imports.

    Raises:
        PipelineError: it cannot be imported.
    """
    try:
        with _imports_of(program), imported_again(), importing():
            yield
    except PipelineError:
        raise
    except BaseException as error:  # the program's modules are imported: anything may come
        text = f"{type(error).__name__}: {error}"
        raise PipelineError(f"the program's modules cannot be imported in a data worker: {text}") from error


class OtherProgram(Exception):
    """This process serves another program, or has loaded another version of its modules."""


class LoadedProgram:
    """The program of this process, and the pipeline that was loaded before it was forked, if one was.

    Attributes:
        program: that this process serves; None as long as it serves none. Other threads may read it.
        kept_bytes: `objects_bytes` of the pipeline that was loaded before this process was forked; 0 for none.
    """

    def __init__(self) -> None:
        self.program: Program | None = None
        self._in_force = SettingsInForce()
        self._said_changed = False
        self.kept_bytes = 0
        self._kept: tuple[PickledPipeline, Pipeline] | None = None

    def enter(self, pickled: PickledPipeline) -> None:
        """Put what the program had set when it defined a pipeline in force.

        Raises:
            PipelineError: a module of the program cannot be imported.
        """
        if self._in_force.is_entered(pickled.pipeline_id, pickled.settings):
            return
        self._in_force.program = pickled.program
        with _modules_of(pickled.program):
            self._in_force.enter(pickled.pipeline_id, pickled.settings)

    def load(self, pickled: PickledPipeline) -> Pipeline:
        """Be a process of a pipeline's program, under its settings, and unpickle it.

        Raises:
            OtherProgram: this process cannot.
            PipelineError: user code failed, or a module would have changed what the running program owns.
        """
        program = pickled.program
        if self.program is None:
            enter_program(program)
            leave_attachments_alone()
        elif not serves(self.program, program):
            raise OtherProgram
        self.program = program if self.program is None else joined(self.program, program)
        with _imports_of(program), imported_again():
            return self._load(pickled)

    def _load(self, pickled: PickledPipeline) -> Pipeline:
        program = pickled.program
        self.enter(pickled)
        with _modules_of(program):
            other = self._in_force.other_than_sent()
        if other:
            raise PipelineError(
                f"{other} is another one in data workers: the program has changed it, and it does not travel"
            )
        changed = changed_since(program)
        if changed and not self._said_changed:
            self._said_changed = True
            _log.warning(
                "on this host the source of %s is not what the program has loaded: samples may differ until it "
                "starts again",
                ", ".join(changed),
            )
        return load_pipeline(pickled)

    def keep(self, pickled: PickledPipeline) -> None:
        """Load a pipeline for processes that are forked from this one."""
        pipeline = self.load(pickled)
        self.kept_bytes = objects_bytes(pickled)
        if not pickled.buffers:  # else arrays lie in the memory in which it came
            pickled = replace(pickled, blob=b"")
        self._kept = pickled, pipeline

    def forget(self, pipeline_id: str) -> None:
        """A pipeline will not be entered again."""
        self.take(pipeline_id)
        self._in_force.forget(pipeline_id)

    def take(self, pipeline_id: str) -> tuple[PickledPipeline, Pipeline] | None:
        """Return the pipeline that was loaded before this process was forked: once, because samples may change it."""
        if self._kept is None or self._kept[0].pipeline_id != pipeline_id:
            return None
        taken, self._kept = self._kept, None
        return taken


# One copy of each pickled pipeline for all processes of a data worker: fetched once, and mapped by each.
#
# What is shared here are bytes, never objects: each process unpickles for itself, so what a dataset opens in
# `__setstate__` is its own. (Where it opens nothing, a fork server loads it for all.) Arrays and tensors lie in the
# mapped memory, which a process copies page by page as it writes to it.
#
# The memory belongs to no name: it is made by the supervisor before it forks, and is gone with the last process. Who
# has mapped a slot holds a lock on it, which the kernel takes away at the process's end; a slot that nobody has locked
# is used again. A process that is stopped keeps its locks; the others do not wait for it, but fetch for themselves.

_NUM_SLOTS = 16
# A small pickled pipeline stays for processes that come later.
_KEEP_UNUSED_BYTES = 1 << 20
# Of a slot: the pipeline's id, written last; the bytes of the message without its contents.
_NAME_BYTES = 64
_LENGTH_BYTES = 8
# Of the turn: the process that had it last.
_PID_BYTES = 8
_EXCHANGE_LOOK_AGAIN_S = 0.02


class Exchange:
    """The slots, shared by a supervisor and its children; made before the fork.

    Args:
        num_slots: pipelines that can be kept at a time; what comes when all are in use is kept by one process alone.
    """

    def __init__(self, num_slots: int = _NUM_SLOTS) -> None:
        self._turn = os.memfd_create("hetstream-turn")
        self._slots = [_own_memory() for _ in range(num_slots)]

    @contextlib.contextmanager
    def alone(self, should_stop: Callable[[], bool]) -> Iterator[bool]:
        """Wait until no other process of this data worker fetches a pickled pipeline, or the one that does is stopped.

        Gives:
            Whether the others wait for this one.
        """
        own = _opened(self._turn)
        try:
            while not (turn := _locked(own, fcntl.LOCK_EX)) and not should_stop() and not self._is_held_up():
                time.sleep(_EXCHANGE_LOOK_AGAIN_S)
            if turn:
                os.pwrite(own, os.getpid().to_bytes(_PID_BYTES, "little"), 0)
            yield turn
        finally:
            os.close(own)

    def _is_held_up(self) -> bool:
        """Whether the process whose turn it is, or was a moment ago, does not run."""
        return is_stopped(int.from_bytes(os.pread(self._turn, _PID_BYTES, 0), "little"))

    def find(self, pipeline_id: str) -> PickledPipeline | None:
        """Map a pickled pipeline that is here."""
        for slot in self._slots:
            if _name_of(slot) != pipeline_id:
                continue
            own = _opened(slot)
            try:
                if _locked(own, fcntl.LOCK_SH) and _name_of(own) == pipeline_id:
                    return _mapped(own)
            finally:
                os.close(own)
        return None

    def keep(self, message: ProvidePipeline, directory: Path, shared: bool = True) -> PickledPipeline:
        """Put a pickled pipeline here and map it. Call it inside `alone`.

        Args:
            message: as it came.
            directory: where large pickled pipelines lie, the service's `pipelines_dir`.
            shared: the other processes wait for this one; else it keeps the pickled pipeline for itself.

        Raises:
            HandoverFailed: its bytes cannot be had.
        """
        own = self._free_slot() if shared else _own_memory()
        try:
            _fill(own, message, directory)
            # As `alone` holds the others back, none comes between the two locks.
            fcntl.flock(own, fcntl.LOCK_SH)
            return _mapped(own)
        finally:
            os.close(own)

    def _free_slot(self) -> int:
        """A slot that this process has locked, or memory of its own. Gives the memory of unused large ones back."""
        free = [own for own in map(_opened, self._slots) if _locked_or_closed(own)]
        facts = {own: os.fstat(own) for own in free}
        chosen = min(free, key=lambda own: (facts[own].st_size > 0, facts[own].st_mtime), default=-1)
        for own in free:
            if own == chosen or facts[own].st_size > _KEEP_UNUSED_BYTES:
                os.ftruncate(own, 0)
            if own != chosen:
                os.close(own)
        return chosen if chosen >= 0 else _own_memory()

    def give_back(self, pipeline_id: str) -> None:
        """Free the memory of a pickled pipeline, unless a process has it mapped."""
        for slot in self._slots:
            if _name_of(slot) != pipeline_id:
                continue
            own = _opened(slot)
            try:
                if _locked(own, fcntl.LOCK_EX) and _name_of(own) == pipeline_id:
                    os.ftruncate(own, 0)
            finally:
                os.close(own)

    def close(self) -> None:
        """Give it all back; what is mapped stays for as long as it is used."""
        for descriptor in (self._turn, *self._slots):
            os.close(descriptor)


def _own_memory() -> int:
    return os.memfd_create("hetstream-pipeline")


def _opened(descriptor: int) -> int:
    """Open the file anew: locks belong to an open file, and the inherited one is common to all processes."""
    return os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)


def _locked_or_closed(own: int) -> bool:
    if _locked(own, fcntl.LOCK_EX):
        return True
    os.close(own)
    return False


def _locked(own: int, kind: int) -> bool:
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(own, kind | fcntl.LOCK_NB)
        return True
    return False


def _name_of(slot: int) -> str:
    return os.pread(slot, _NAME_BYTES, 0).rstrip(b"\0").decode()


def _fill(own: int, message: ProvidePipeline, directory: Path) -> None:
    contents = message.contents
    without_data = msgspec.structs.replace(contents, data=b"")
    head = msgspec.msgpack.encode(msgspec.structs.replace(message, contents=without_data))
    start = _start_of(len(head))
    num_bytes = places_of(contents.sizes)[-1]
    os.ftruncate(own, start + num_bytes)
    with mmap.mmap(own, start + num_bytes) as whole, memoryview(whole) as view, view[start:] as room:
        view[_NAME_BYTES : _NAME_BYTES + _LENGTH_BYTES] = len(head).to_bytes(_LENGTH_BYTES, "little")
        view[_NAME_BYTES + _LENGTH_BYTES : _NAME_BYTES + _LENGTH_BYTES + len(head)] = head
        read_into(room, contents, directory)
    os.pwrite(own, message.pipeline_id.encode().ljust(_NAME_BYTES, b"\0"), 0)


def _start_of(head_bytes: int) -> int:
    """Where the buffers start: on a page, behind the head."""
    return -(-(_NAME_BYTES + _LENGTH_BYTES + head_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE


def _mapped(own: int) -> PickledPipeline:
    """Map a full slot; what is written to the memory is seen by this process alone.

    The mapping has a descriptor of the same open file, so the lock is held for as long as an array lies in the memory.
    """
    whole = memoryview(mmap.mmap(own, 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE))
    head_bytes = int.from_bytes(whole[_NAME_BYTES : _NAME_BYTES + _LENGTH_BYTES], "little")
    head = whole[_NAME_BYTES + _LENGTH_BYTES :][:head_bytes]
    message = msgspec.msgpack.decode(head, type=ProvidePipeline)
    buffers = buffers_in(whole[_start_of(head_bytes) :], message.contents)
    blob = buffers.pop(0) if message.contents.with_blob else message.blob
    return PickledPipeline(message.pipeline_id, message.program, message.settings, blob, buffers, message.shared)


# Pickled objects below this are loaded by each process: to be forked anew takes longer than their memory is worth.
FORK_FROM_BYTES = 1 << 20
# A fork server that has not forked by then, nor after as long as it took to load, is of no use: page tables are copied
# twice, 0.1 s for a GB. A process that was not noticed by then is of none either.
_FORK_S = 5.0
_NOTICED_S = 5.0
_LOOK_AGAIN_S = 0.002
_ASK_AGAIN_S = 0.01
# Refusals that are remembered: a program may change its dataset at each epoch, and a service outlives its programs.
_MOST_REFUSED = 256
# Of a request: what a process is started with, with the stack of the one that it replaces.
_MOST_REQUEST_BYTES = 1 << 20
_LOADED, _REFUSED = b"1", b"0"
_MOST_ANSWER_BYTES = 1 << 10


def wish(page: WorkPage, pipeline_id: str, limit_s: float) -> None:
    """Ask the supervisor to have a pipeline loaded for processes that take this one's place; see `ask_to_be_forked`."""
    page.wish(pipeline_id, limit_s)
    os.kill(os.getppid(), signal.SIGCHLD)  # look here now


def ask_to_be_forked(page: WorkPage, pipeline_id: str, limit_s: float, is_wanted: Callable[[], bool]) -> bool:
    """Ask the supervisor to have a pipeline loaded once for all processes, and wait until it was, or will not be.

    Args:
        page: of this process.
        pipeline_id: of the pipeline; while a process of this host has its bytes, the fork server finds it.
        limit_s: how long loading may take.
        is_wanted: asked while it waits.

    Returns:
        Whether this process is to leave with `FRESH_PROCESS`; else it goes on by itself.
    """
    supervisor = os.getppid()
    if page.wished[0] != pipeline_id:
        wish(page, pipeline_id, limit_s)
    while page.answer is LoadAnswer.WAIT and is_wanted() and not is_stopped(supervisor):
        time.sleep(_ASK_AGAIN_S)
    if not is_wanted():
        return False  # the wish stands, so that a long load that nobody waits for now comes to its end
    if page.answer is LoadAnswer.LEAVE:
        return True
    page.wish("")
    return False


@dataclass
class _ForkServer:
    """One of them, as its supervisor sees it."""

    pid: int
    channel: socket.socket
    limit_s: float
    started: float
    is_loaded: bool = False
    load_s: float = 0.0


class ForkServers:
    """The fork servers of one supervisor, by the pipeline that each has loaded.

    Args:
        exchange: where they find it.
        leave_supervisor: called in a child of the supervisor, to give up what is the supervisor's alone.
        run: be a data worker process, with what the supervisor wrote for it, and return its exit code.
        clock: seconds in which the supervisor ran.
    """

    def __init__(
        self,
        exchange: Exchange,
        leave_supervisor: Callable[[], None],
        run: Callable[[bytes, WorkPage, StackFile, LoadedProgram], int],
        clock: Callable[[], float],
    ) -> None:
        self._exchange, self._leave_supervisor, self._run, self._clock = exchange, leave_supervisor, run, clock
        self._servers: dict[str, _ForkServer] = {}
        self._refused: dict[str, str] = {}  # with the reason; the oldest first
        self._ended: set[int] = set()  # processes that are not reaped yet

    def answer(self, pipeline_id: str, limit_s: float) -> LoadAnswer:
        """Return what to tell a process that wants a pipeline to be loaded once for all; begin to load it, if nobody
        has.
        """
        server = self._servers.get(pipeline_id)
        if server is None and pipeline_id not in self._refused:
            try:
                self._servers[pipeline_id] = self._begin(pipeline_id, limit_s)
            except OSError as error:  # no process or descriptor to spare
                self._refuse(pipeline_id, f"a fork server cannot be started: {error}")
                return LoadAnswer.LOAD
            return LoadAnswer.WAIT
        if server is not None and not server.is_loaded:
            self._hear(pipeline_id, server)
        if pipeline_id in self._refused:
            return LoadAnswer.LOAD
        return LoadAnswer.LEAVE if server is not None and server.is_loaded else LoadAnswer.WAIT

    def fork(self, pipeline_id: str, start_bytes: bytes, page: WorkPage, stacks: StackFile) -> int | None:
        """Have a data worker process forked that has a pipeline.

        Args:
            pipeline_id: of the pipeline.
            start_bytes: for `run`.
            page: of the process.
            stacks: of the process.

        Returns:
            Its process id; None when there is no fork server for it, or none that works.
        """
        server = self._servers.get(pipeline_id)
        if server is None or not server.is_loaded:
            return None
        deadline = time.monotonic() + max(_FORK_S, server.load_s)
        try:
            socket.send_fds(server.channel, [start_bytes], [page.descriptor, stacks.descriptor])
            while not page.pid:
                if time.monotonic() > deadline or is_signalled() or is_stopped(server.pid) or has_ended(server.pid):
                    raise TimeoutError("it does not answer")
                time.sleep(_LOOK_AGAIN_S)
        except OSError as error:
            self._refuse(pipeline_id, f"its fork server {server.pid} failed: {error}")
            return None
        page.note_known()
        return page.pid

    def end_unused(self, in_use: Collection[str]) -> None:
        """End those that no process was forked from, and that none waits for."""
        for pipeline_id in self._servers.keys() - in_use:
            self._end(pipeline_id)

    def forget(self, pid: int, how: str) -> bool:
        """Take note that a process has ended, before it is waited for.

        If it is a fork server that has ended by itself, its pipeline is loaded by each process from now on.

        Args:
            pid: of any process.
            how: it ended, in words.

        Returns:
            Whether it is one of them.
        """
        if pid in self._ended:
            self._ended.remove(pid)
            return True
        for pipeline_id, server in self._servers.items():
            if server.pid == pid:
                self._refuse(pipeline_id, f"its fork server {pid} {how}")
                self._ended.remove(pid)
                return True
        return False

    def leave(self) -> None:
        """In a child of the supervisor: they are not its own."""
        for server in self._servers.values():
            server.channel.close()
        self._servers.clear()

    def close(self) -> None:
        """End them all, and wait for them."""
        self.end_unused(())
        for pid in self._ended:
            end_group(pid)
            os.waitpid(pid, 0)
        self._ended.clear()

    def _begin(self, pipeline_id: str, limit_s: float) -> _ForkServer:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        supervisor = os.getpid()

        def run() -> int:
            if not begin_child(supervisor):
                return 0
            ours.close()
            self._leave_supervisor()
            return self._serve(pipeline_id, theirs, supervisor)

        try:
            pid = fork_child(run)
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        return _ForkServer(pid, ours, limit_s, self._clock())

    def _hear(self, pipeline_id: str, server: _ForkServer) -> None:
        """Take note of what a fork server says that is loading."""
        said = b""
        with contextlib.suppress(OSError):  # it has said nothing yet, or has ended, which `forget` is told
            said = server.channel.recv(_MOST_ANSWER_BYTES)
        load_s = self._clock() - server.started
        if said == _LOADED:
            server.is_loaded, server.load_s = True, load_s
        elif said.startswith(_REFUSED):
            self._refuse(pipeline_id, f"loading it {said.removeprefix(_REFUSED).decode(errors='replace')}")
        elif is_stopped(server.pid):
            self._refuse(pipeline_id, "its fork server is stopped")
        elif load_s > server.limit_s:
            self._refuse(pipeline_id, f"its fork server has not loaded it in {server.limit_s:g} s")

    def _refuse(self, pipeline_id: str, reason: str) -> None:
        """Have each process load a pipeline. Of a program with one for each epoch a reason is a warning once."""
        level = logging.INFO if reason in self._refused.values() else logging.WARNING
        _log.log(level, "pipeline=%s is loaded in each process, and in each pass: %s", pipeline_id[:8], reason)
        self._refused[pipeline_id] = reason
        if len(self._refused) > _MOST_REFUSED:
            del self._refused[next(iter(self._refused))]
        if pipeline_id in self._servers:
            self._end(pipeline_id)

    def _end(self, pipeline_id: str) -> None:
        server = self._servers.pop(pipeline_id)
        server.channel.close()
        self._ended.add(server.pid)
        os.kill(server.pid, signal.SIGKILL)

    # --- in the fork server -----------------------------------------------------------------------------------------

    def _serve(self, pipeline_id: str, channel: socket.socket, supervisor: int) -> int:
        """Load a pipeline, and fork whatever the supervisor asks for."""
        use_one_thread()
        loaded, reason = self._load(pipeline_id)
        if reason:
            channel.send(_REFUSED + reason.encode()[: _MOST_ANSWER_BYTES - 1])
        else:
            channel.send(_LOADED)
            of = pipeline_id[:8], os.getpid(), loaded.kept_bytes
            _log.info("pipeline=%s loaded once for this host, in process %d: %d bytes", *of)
        os.kill(supervisor, signal.SIGCHLD)  # look here now
        if reason:
            return 0
        gc.freeze()  # what is here is shared with the children until they write to it
        while True:
            start_bytes, descriptors, _, _ = socket.recv_fds(channel, _MOST_REQUEST_BYTES, 2)
            if not start_bytes:
                return 0
            start = partial(self._start, channel, start_bytes, descriptors, loaded, supervisor)
            between = fork_child(start)
            with contextlib.suppress(ChildProcessError):  # loading has taken SIGCHLD: who ends is waited for there
                os.waitpid(between, 0)
            for descriptor in descriptors:
                os.close(descriptor)
            # Who was forked needs the bytes no more. Those that left for it had them mapped; the last one is gone now.
            self._exchange.give_back(pipeline_id)

    def _load(self, pipeline_id: str) -> tuple[LoadedProgram, str]:
        """Load a pipeline, and say why processes cannot be forked with it."""
        loaded = LoadedProgram()
        pickled = self._exchange.find(pipeline_id)
        if pickled is None:
            return loaded, "failed: its bytes are not shared"
        adopt_orphans(True)  # what loading has started is then a child, whoever of them started it
        before = Holdings.now()
        try:
            with ForksEndHere():
                loaded.keep(pickled)
        except Exception as error:  # noqa: BLE001, user code: each process will see for itself
            return loaded, f"failed: {error}"
        holdings = Holdings.now()
        if holdings.threads - before.threads:
            _end_threads_that_forks_end()
            holdings = Holdings.now()
        reason = holdings.why_not_fork(before)
        adopt_orphans(False)
        return loaded, reason

    # --- in what it forks -------------------------------------------------------------------------------------------

    def _start(
        self, channel: socket.socket, start_bytes: bytes, descriptors: list[int], loaded: LoadedProgram, supervisor: int
    ) -> int:
        """Fork the process, which is the supervisor's child as soon as this one has ended."""
        channel.close()
        page, stacks, between = WorkPage(descriptors[0]), StackFile(descriptors[1]), os.getpid()

        def run() -> int:
            while os.getppid() == between:
                time.sleep(_LOOK_AGAIN_S)
            if not begin_child(supervisor):
                return 0
            page.pid = os.getpid()
            deadline = time.monotonic() + _NOTICED_S
            while not page.is_known:
                if time.monotonic() > deadline:
                    return FRESH_PROCESS
                time.sleep(_LOOK_AGAIN_S)
            return self._run(start_bytes, page, stacks, loaded)

        fork_child(run)
        return 0


def _end_threads_that_forks_end() -> None:
    """Fork once: libraries with handlers of forks (pthread_atfork(3)), such as OpenBLAS, end their threads before it.

    They begin them anew when they are next used. scipy has such a thread as soon as it is imported.
    """
    pid = fork_child(lambda: 0)
    with contextlib.suppress(ChildProcessError):  # loading has taken SIGCHLD: who ends is waited for there
        os.waitpid(pid, 0)
