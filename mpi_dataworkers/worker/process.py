"""What a data worker process is started with: by its supervisor, or as a rank of an MPI world."""

from __future__ import annotations

import contextlib
import enum
import math
import mmap
import os
import re
import signal
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from hetstream.mpi_dataworkers.errors import DataWorkerDied
from hetstream.mpi_dataworkers.ops.pipeline import MadeStep
from hetstream.mpi_dataworkers.process.interpreter import this_interpreter
from hetstream.mpi_dataworkers.threads import MAX_THREADS
from hetstream.mpi_dataworkers.wire.messages import Device, Failure, Fate, GrantLease, ProvidePipeline

# What a data worker with a GPU asks of the stage before its own. `worker/gpu_stage.py` has it.


class EarlierStage(Protocol):
    """Gives the batches from which the steps of leases are made. Of the main thread."""

    def take(self, lease: GrantLease, step: int) -> MadeStep | None:
        """Wait for the batch of a leased step; the steps of a lease are asked for in their order.

        Returns:
            It; None when nobody makes it: the caller makes the whole step.

        Raises:
            StepFailed: it cannot be made.
            LeaseGone: the lease is not held any more.
            HandoverFailed: the service does not let it ask.
        """

    def missed(self, made_here_s: float) -> None:
        """Count the time of a step that was made here because nobody else had made it: as good as waiting."""

    def close(self) -> None:
        """Ask for no more."""


class StageLeases(Protocol):
    """The leases of the later stage."""

    def holds(self, token: int) -> bool:
        """Return whether a lease is still to be worked on."""

    def held(self) -> Sequence[GrantLease]:
        """Return all of them, the oldest first."""


# Makes the stage before, for one process: its id as a data worker, its leases, and what fetches a pipeline as it was
# provided, for as long as that is wanted.
FetchProvided = Callable[[str, Callable[[], bool]], ProvidePipeline]
MakeEarlierStage = Callable[[str, StageLeases, FetchProvided], EarlierStage]


@dataclass(frozen=True)
class WorkerOptions:
    """What all processes of a data worker have in common.

    Attributes:
        cache_bytes: finished batches that each keeps for other loaders that share them.
        num_threads: that make the samples of a batch, where the dataset is thread-safe.
        over_mpi: it is a rank of an MPI world.
        forks_anew: the supervisor has a large pipeline loaded once for its processes, and forks them anew.
        make_earlier: makes the stage before, for a data worker that has a GPU; None for one without.
    """

    cache_bytes: int = 0
    num_threads: int = 1
    over_mpi: bool = False
    forks_anew: bool = False
    make_earlier: MakeEarlierStage | None = None

    @property
    def device(self) -> Device:
        """What it makes steps with."""
        return "cpu" if self.make_earlier is None else "gpu"


class WorkerStart(msgspec.Struct, frozen=True):
    """What one process is started with.

    Attributes:
        worker_id: its id for the dispatcher, 32 hexadecimal digits.
        slot: its place among its supervisor's processes; processes for several programs may be in one. "" where nobody
            can fork it anew.
        replaces: id of the dead process whose place it takes, or "".
        fate: how that one ended.
    """

    worker_id: str
    slot: str = ""
    replaces: str = ""
    fate: Fate | None = None


# How a data worker ends within 2 s of SIGTERM or Ctrl-C, whatever its user code and its peers do. Pure.
#
# It is one budget: `supervisor.py` notes once when it was told to end, and hands that to its processes
# (`watch.WorkPage`). Each wait of `worker.py` ends at a time that follows from it, so waits are never added up.

# User code may finish the step that it is at; what takes longer is killed, and made again elsewhere.
_USER_CODE_S = 1.0
# Batches may leave for loaders until here. A process that still waits for one says goodbye to the dispatcher now.
_BATCHES_S = 1.5
# And messages for the dispatcher.
_MESSAGES_S = 1.7
# What is left is killed; the rest of the 2 s is for the kernel, and for the end of the supervisor.
_GONE_S = 1.8


@dataclass(frozen=True)
class ShutdownDeadlines:
    """Times by which a data worker is done with one thing after the other, on the monotonic clock, s.

    Attributes:
        told_at: when it was told to end; infinity, and so are the others, until it is.
    """

    told_at: float = math.inf

    @property
    def batches_by(self) -> float:
        """Batches have left for the loaders."""
        return self.told_at + _BATCHES_S

    @property
    def messages_by(self) -> float:
        """Messages have left for the dispatcher."""
        return self.told_at + _MESSAGES_S

    def is_overdue(self, now: float, runs_user_code: bool) -> bool:
        """Return whether a process is to be killed."""
        return now >= self.told_at + (_USER_CODE_S if runs_user_code else _GONE_S)

    def next_look_s(self, now: float, most_s: float) -> float:
        """Return how soon to ask again, at most `most_s`."""
        due = (self.told_at + after_s - now for after_s in (_USER_CODE_S, _GONE_S))
        return min([most_s, *(left_s for left_s in due if left_s > 0)])


# What a data worker process is doing, and how it ended: what its supervisor sees from outside.
#
# The process writes where it is into a page of shared memory, which outlives it; that costs a microsecond a sample, and
# a process that hangs with the GIL held, or is gone, need not answer. `supervisor.py` reads it, and writes there when
# the process is to end.

# Steps begun, limit, token, step, session id; for each thread since when (0: no user code runs) and which sample; when
# it was told to end (0: it was not); how often it asked for another process; when it made a step last (0: never); which
# pipeline it wants to be forked with, how long loading that may take, and the answer; its process id, and whether its
# supervisor knows it; which pipeline it was forked with and uses; a lease whose loader's pass has ended, 0 for none.
_PAGE = struct.Struct("<qdqq64s")
_THREAD = struct.Struct("<dq")
_BEGUN = struct.Struct("<qdqq64sdq")  # both, of thread 0
_THREADS_BYTES = _THREAD.size * MAX_THREADS
_SINCE = _TOLD = struct.Struct("<d")
_TOLD_AT = _PAGE.size + _THREADS_BYTES
_ASKED = struct.Struct("<q")
_ASKED_AT = _TOLD_AT + _TOLD.size
_MADE_AT = _ASKED_AT + _ASKED.size
_WISH = struct.Struct("<64sdq")
_NAME = struct.Struct("<64s")
_WISH_AT = _MADE_AT + _SINCE.size
_ANSWER = struct.Struct("<q")
_ANSWER_AT = _WISH_AT + _WISH.size - _ANSWER.size
_PID = _KNOWN = struct.Struct("<q")
_PID_AT = _WISH_AT + _WISH.size
_KNOWN_AT = _PID_AT + _PID.size
_SHARES_AT = _KNOWN_AT + _KNOWN.size
_UNWANTED = struct.Struct("<q")
_UNWANTED_AT = _SHARES_AT + _NAME.size


class LoadAnswer(enum.IntEnum):
    """What a process is told that wants a pipeline to be loaded before it is forked."""

    WAIT = 0
    LEAVE = 1  # and be forked anew, by a process that has loaded it
    LOAD = 2  # for itself


@dataclass(frozen=True)
class Work:
    """User code that runs, or ran at the end.

    Attributes:
        session_id, token, step: for which step of which lease.
        sample_index: -1 when it is not one sample.
        since: when it began with the sample, on the monotonic clock, s.
        limit_s: after that long it hangs.
    """

    session_id: str
    token: int
    step: int
    sample_index: int
    since: float
    limit_s: float


class WorkPage:
    """The page of one process; made before the fork.

    Args:
        descriptor: of a page that another process has made; it is closed with this one.

    Attributes:
        descriptor: for a process that is no child of the one that made the page.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        if descriptor is None:
            descriptor = os.memfd_create("hetstream-page")
            os.ftruncate(descriptor, mmap.PAGESIZE)
        self.descriptor = descriptor
        try:
            self._page = mmap.mmap(descriptor, mmap.PAGESIZE)
        except OSError:
            os.close(descriptor)
            raise
        self._steps = 0

    def begin(self, session_id: str, token: int, step: int, limit_s: float) -> None:
        """User code is about to run for a step."""
        self._steps += 1
        _BEGUN.pack_into(self._page, 0, self._steps, limit_s, token, step, session_id.encode(), time.monotonic(), -1)

    def at_sample(self, sample_index: int, thread: int = 0) -> None:
        """A thread, below `MAX_THREADS`, comes to a sample, or with -1 to something else."""
        _THREAD.pack_into(self._page, _PAGE.size + thread * _THREAD.size, time.monotonic(), sample_index)

    def rest(self, thread: int = 0) -> None:
        """No user code runs in a thread."""
        _SINCE.pack_into(self._page, _PAGE.size + thread * _THREAD.size, 0.0)

    @property
    def deadlines(self) -> ShutdownDeadlines:
        """Until when the process may do what; written by its supervisor before it signals it, or by itself."""
        (told_at,) = _TOLD.unpack_from(self._page, _TOLD_AT)
        return ShutdownDeadlines(told_at) if told_at else ShutdownDeadlines()

    @deadlines.setter
    def deadlines(self, deadlines: ShutdownDeadlines) -> None:
        _TOLD.pack_into(self._page, _TOLD_AT, deadlines.told_at)

    def ask_for_another(self) -> None:
        """The supervisor is to fork one more process in the same slot."""
        _ASKED.pack_into(self._page, _ASKED_AT, self.num_asked + 1)

    @property
    def num_asked(self) -> int:
        """How often another process was asked for."""
        return int(_ASKED.unpack_from(self._page, _ASKED_AT)[0])

    def note_made(self, now: float) -> None:
        """A step was made, on the monotonic clock, s."""
        _SINCE.pack_into(self._page, _MADE_AT, now)

    @property
    def made_at(self) -> float:
        """When a step was made last, on the monotonic clock, s; 0 for never. Steps that failed do not count."""
        return float(_SINCE.unpack_from(self._page, _MADE_AT)[0])

    @property
    def num_steps(self) -> int:
        """Steps that were begun."""
        return int(_PAGE.unpack_from(self._page)[0])

    def read(self) -> Work | None:
        """Return what runs, or ran when the process ended; of several samples the one that was begun first."""
        threads = _THREAD.iter_unpack(self._page[_PAGE.size : _PAGE.size + _THREADS_BYTES])
        at_work = [(since, sample_index) for since, sample_index in threads if since > 0]
        if not at_work:
            return None
        since, sample_index = min(at_work)
        _, limit_s, token, step, session = _PAGE.unpack_from(self._page)
        return Work(session.rstrip(b"\0").decode(), token, step, sample_index, since, limit_s)

    def wish(self, pipeline_id: str, limit_s: float = 0.0) -> None:
        """Want a pipeline to be loaded before this process is forked anew; "" to want it no more."""
        _WISH.pack_into(self._page, _WISH_AT, b"", limit_s, LoadAnswer.WAIT)
        _NAME.pack_into(self._page, _WISH_AT, pipeline_id.encode())  # who sees it, sees the rest

    @property
    def wished(self) -> tuple[str, float]:
        """The pipeline that the process wants, "" for none, and how long loading may take, s."""
        pipeline_id, limit_s, _ = _WISH.unpack_from(self._page, _WISH_AT)
        return pipeline_id.rstrip(b"\0").decode(), limit_s

    @property
    def answer(self) -> LoadAnswer:
        """The supervisor's, to the wish."""
        return LoadAnswer(_ANSWER.unpack_from(self._page, _ANSWER_AT)[0])

    @answer.setter
    def answer(self, answer: LoadAnswer) -> None:
        _ANSWER.pack_into(self._page, _ANSWER_AT, answer)

    @property
    def pid(self) -> int:
        """Of a process that says so itself, because its supervisor has not forked it; 0 until then."""
        return int(_PID.unpack_from(self._page, _PID_AT)[0])

    @pid.setter
    def pid(self, pid: int) -> None:
        _PID.pack_into(self._page, _PID_AT, pid)

    @property
    def is_known(self) -> bool:
        """Whether the supervisor has taken note of the process id."""
        return bool(_KNOWN.unpack_from(self._page, _KNOWN_AT)[0])

    def note_known(self) -> None:
        """The supervisor watches the process from now on."""
        _KNOWN.pack_into(self._page, _KNOWN_AT, 1)

    @property
    def shares(self) -> str:
        """The pipeline with which the process was forked, while it is in use; "" for none."""
        return bytes(_NAME.unpack_from(self._page, _SHARES_AT)[0]).rstrip(b"\0").decode()

    @shares.setter
    def shares(self, pipeline_id: str) -> None:
        _NAME.pack_into(self._page, _SHARES_AT, pipeline_id.encode())

    @property
    def unwanted(self) -> int:
        """The token of a lease in work whose pass has ended, so that nobody waits for its step; 0 for none."""
        return int(_UNWANTED.unpack_from(self._page, _UNWANTED_AT)[0])

    @unwanted.setter
    def unwanted(self, token: int) -> None:
        _UNWANTED.pack_into(self._page, _UNWANTED_AT, token)

    def close(self) -> None:
        """Give the page back."""
        self._page.close()
        os.close(self.descriptor)


def how_it_ended(exit_code: int, out_of_memory: bool) -> str:
    """Return a process's end in words, from `os.waitstatus_to_exitcode` and whether its cgroup counted an OOM kill."""
    if exit_code >= 0:
        return f"ended with code {exit_code}"
    if exit_code == -signal.SIGKILL and out_of_memory:
        return "was killed by the kernel: out of memory"
    with contextlib.suppress(ValueError):
        return f"was killed by signal {-exit_code} ({signal.Signals(-exit_code).name})"
    return f"was killed by signal {-exit_code}"


def fate_of(reason: str, work: Work | None, stack: str, host: str, pid: int) -> Fate:
    """Return the fate of a process, with the failure of the step that it was at."""
    if work is None:
        return Fate(f"{reason} while it made no batch", "", 0, -1, None)
    kind = (DataWorkerDied.__module__, DataWorkerDied.__qualname__)
    what = f"sample {work.sample_index}" if work.sample_index >= 0 else "no single sample"
    text = f"the data worker process {pid} on {host} {reason}, at {what} of step {work.step}"
    python = str(this_interpreter())
    failure = Failure(work.sample_index, kind, text, stack or "(it left no stack)", host, pid, interpreter=python)
    return Fate(reason, work.session_id, work.token, work.step, failure)


def count_oom_kills(cgroups: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int:
    """Processes of this one's memory cgroup that the kernel has killed for memory; 0 where that cannot be read.

    The counter `oom_kill` is in memory.events (https://docs.kernel.org/admin-guide/cgroup-v2.html) and, in version 1,
    in memory.oom_control.
    """
    with contextlib.suppress(OSError):
        for line in cgroups.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            inside = path.lstrip("/")
            if "memory" in controllers.split(","):
                candidates = [root / "memory" / inside / "memory.oom_control", root / "memory" / "memory.oom_control"]
            elif controllers == "":
                candidates = [root / inside / "memory.events", root / "memory.events"]
            else:
                continue
            for file in candidates:
                with contextlib.suppress(OSError):
                    found = re.search(r"^oom_kill (\d+)$", file.read_text(), re.MULTILINE)
                    if found:
                        return int(found.group(1))
    return 0


class StackFile:
    """Where `faulthandler` writes the stacks of one process, without its help: memory that outlives it.

    Args:
        descriptor: of one that another process has made.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        self.descriptor = os.memfd_create("hetstream-stack") if descriptor is None else descriptor

    def read(self) -> str:
        """Return what was written."""
        return os.pread(self.descriptor, 1 << 16, 0).decode(errors="replace").strip()

    def close(self) -> None:
        """Give it back."""
        os.close(self.descriptor)
