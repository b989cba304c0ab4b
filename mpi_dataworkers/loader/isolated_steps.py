"""Steps that may end the process that makes them, made for the trainer in a child of it.

Used by `remote_source.py` for steps that a data worker was at when it was lost. Out of memory the kernel ends the child
first, and the child takes less than what is left: where a whole job step is killed at once (Slurm's OOMKillStep), an
exception comes instead.
"""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing
import os
import signal
import socket
import struct
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec

from hetstream.base import limits
from hetstream.mpi_dataworkers.errors import DataWorkerDied
from hetstream.mpi_dataworkers.loader.user_errors import rebuild_error
from hetstream.mpi_dataworkers.ops.pipeline import MadeStep, Watched, describe_failure, use_one_thread
from hetstream.mpi_dataworkers.ops.tree import flatten, unflatten
from hetstream.mpi_dataworkers.process.children import begin_child, fork_child
from hetstream.mpi_dataworkers.process.config import memory_of_task_from_environment
from hetstream.mpi_dataworkers.wire.codec import aligned, fuse, in_one_piece, split
from hetstream.mpi_dataworkers.wire.failures import OnFailure, StepFailures
from hetstream.mpi_dataworkers.wire.messages import BatchFailed, ErrorPolicy, Failure

# Of what is left, the part that the child may take: the trainer goes on meanwhile.
_SHARE = 7 / 8
_NO_LIMIT_S = 10**9
# Of a job's memory that the trainer seems to fill: most samples need no more.
_LEAST_BYTES = 64 << 20
_STATM = Path("/proc/self/statm")
_INDEX = struct.Struct("<q")

# Makes a step in the child, under a policy, and gives it with where the shard's reader is then; None: there is none.
Make = Callable[..., tuple[MadeStep, bytes] | None]


def _left_bytes() -> int:
    """Private memory that this process, a child of the trainer, may take.

    Slurm may also watch a job's memory without a control group (JobAcctGatherParams=OverMemoryKill, slurm.conf(5)), and
    then counts what is shared with the trainer once for each of the two.
    """
    left_bytes = int(limits.available_bytes() * _SHARE)
    task_bytes = memory_of_task_from_environment()
    if task_bytes is None:
        return left_bytes
    resident_bytes = int(_STATM.read_text().split()[1]) * mmap.PAGESIZE
    return min(left_bytes, max(_LEAST_BYTES, int((task_bytes - 2 * resident_bytes) * _SHARE)))


@contextlib.contextmanager
def limited_to_rest() -> Iterator[None]:
    """Let this process, a child of the trainer, take no more memory than is left."""
    with limits.limited(_left_bytes(), _NO_LIMIT_S):
        yield


class _Page(Watched):
    """Memory that outlives the child: which sample it is at."""

    def __init__(self) -> None:
        self._page = mmap.mmap(-1, mmap.PAGESIZE)
        self.at_sample(-1)

    def at_sample(self, sample_index: int, thread: int = 0) -> None:  # noqa: ARG002, there is one
        _INDEX.pack_into(self._page, 0, sample_index)

    def rest(self, thread: int = 0) -> None:
        """None runs: said by nobody here."""

    @property
    def sample_index(self) -> int:
        return int(_INDEX.unpack_from(self._page)[0])


class StepsApart:
    """A child that makes steps, one after the other, and another one in its place when it dies or hangs.

    Args:
        make: called in the child with the policy, who is told at which sample it is, and what `made` was given.
    """

    def __init__(self, make: Make) -> None:
        self._make = make
        self._page = _Page()
        self._child: tuple[int, Connection] | None = None
        self._has_hung = False

    def made(self, step: int, num_samples: int, policy: ErrorPolicy, *request: Any) -> tuple[MadeStep, bytes] | None:
        """A step, with the attempts and the policy that it has on data workers.

        Args:
            step: its number.
            num_samples: that it has; -1 where that is not known, and no sample can be left out by its index.
            policy: what becomes of it if it fails.
            *request: for `make`, small.

        Raises:
            DataWorkerDied: it has ended its process in each attempt.
            Exception: of user code.
        """
        failures = StepFailures()
        while True:
            lacking = [failure.sample_index for failure in failures.left_out]
            if -1 in lacking:
                return MadeStep(None, 0, num_samples, failures.left_out), b""
            now = msgspec.structs.replace(policy, quarantined=[*policy.quarantined, *lacking])
            try:
                answer = self._ask((now, *request))
            except EOFError:
                failure = self._failure_of_dead(step)
                verdict = failures.note("", failure, policy)
                if verdict is OnFailure.RAISE or (num_samples < 0 and verdict is OnFailure.LEAVE_OUT):
                    raise DataWorkerDied(failure.text) from None
                continue
            if answer is None:
                return None
            if isinstance(answer, Failure):
                raise rebuild_error(BatchFailed("", step, answer))
            made, snapshot = answer
            return msgspec.structs.replace(made, left_out=[*failures.left_out, *made.left_out]), snapshot

    def close(self) -> None:
        """End the child."""
        if self._child is not None:
            pid, channel = self._child
            self._child = None
            channel.close()
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    def _ask(self, request: tuple[Any, ...]) -> Any:
        """What the child answers.

        Raises:
            EOFError: it died.
        """
        if self._child is None:
            self._child = self._begin()
        channel = self._child[1]
        try:
            channel.send(request)
            self._wait(request[0].sample_timeout_s)
            answer = channel.recv()
            if answer is None or isinstance(answer, Failure):
                return answer
            made, snapshot, spec, places, sizes = answer
            frames = [aligned(size).data for size in sizes]
            for frame in frames:
                if frame.nbytes:
                    channel.recv_bytes_into(frame)
        except OSError as error:
            raise EOFError from error
        except EOFError:
            raise
        except BaseException:  # a handler of a signal: whoever asks next must not get this answer
            self.close()
            raise
        batch = unflatten(spec, split(frames, places)) if made.num_samples else None
        return msgspec.structs.replace(made, batch=batch), snapshot

    def _wait(self, sample_timeout_s: float) -> None:
        """Wait for the child's answer; end it where it is at one sample for too long."""
        assert self._child is not None
        pid, channel = self._child
        seen = self._page.sample_index
        while not channel.poll(sample_timeout_s):
            before, seen = seen, self._page.sample_index
            if seen == before:
                os.kill(pid, signal.SIGKILL)
                self._has_hung = True

    def _failure_of_dead(self, step: int) -> Failure:
        """What is known of the child, which has died; another one comes in its place."""
        assert self._child is not None
        (pid, channel), self._child = self._child, None
        channel.close()
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        how = f"ended with code {code}" if code >= 0 else f"was killed by signal {-code}"
        how = "was longer at one sample than sample_timeout_s" if self._has_hung else how
        self._has_hung = False
        index = self._page.sample_index
        what = f"sample {index}" if index >= 0 else "no single sample"
        host = socket.gethostname()
        text = f"process {pid} on {host}, a child of the trainer, {how}, at {what} of step {step}"
        kind = (DataWorkerDied.__module__, DataWorkerDied.__qualname__)
        return Failure(index, kind, text, "(it left no stack)", host, pid)

    def _begin(self) -> tuple[int, Connection]:
        ours, theirs = multiprocessing.Pipe()
        trainer = os.getpid()

        def run() -> int:
            ours.close()
            if begin_child(trainer):
                self._serve(theirs)
            return 0

        with warnings.catch_warnings():
            # That the trainer has threads is known: as in torch's worker processes, none of them is needed here.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = fork_child(run)
        theirs.close()
        return pid, ours

    # --- in the child -----------------------------------------------------------------------------------------------

    def _serve(self, channel: Connection) -> None:
        use_one_thread()
        with contextlib.suppress(EOFError, OSError):  # the trainer has closed it, or is gone
            while True:
                policy, *request = channel.recv()
                self._page.at_sample(-1)
                frames: Sequence[Any] = ()
                try:
                    with limited_to_rest():
                        found = self._make(policy, self._page, *request)
                        answer: Any = None
                        if found is not None:
                            made, snapshot = found
                            spec, buffers = flatten(made.batch)
                            frames, places = fuse(buffers)
                            sizes = [memoryview(frame).nbytes for frame in map(in_one_piece, frames)]
                            answer = msgspec.structs.replace(made, batch=None), snapshot, spec, places, sizes
                except Exception as error:  # noqa: BLE001, user code; raised in the trainer in the step's place
                    frames, answer = (), describe_failure(error)
                except BaseException:
                    traceback.print_exc()
                    raise
                channel.send(answer)
                for frame in map(in_one_piece, frames):
                    if memoryview(frame).nbytes:
                        channel.send_bytes(frame)
