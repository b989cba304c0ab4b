"""One of torch's own worker processes, which makes steps that are compared with those of data workers; see `canary`."""

from __future__ import annotations

import collections
import contextlib
import os
import pickle
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from multiprocessing import connection
from multiprocessing.reduction import ForkingPickler
from typing import Any, Final

import msgspec
import torch
from torch.utils import _pytree
from torch.utils.data._utils import signal_handling

from hetstream.mpi_dataworkers.loader.isolated_steps import limited_to_rest
from hetstream.mpi_dataworkers.loader.local_workers import (
    PlainLoader,
    StepDataset,
    StepRequest,
    no_collate,
)
from hetstream.mpi_dataworkers.loader.user_errors import handed_over, of_dead_process, raised_by_torch, summary_of
from hetstream.mpi_dataworkers.ops.batch_comparison import compare
from hetstream.mpi_dataworkers.ops.changes import acts_on_files, changed_by
from hetstream.mpi_dataworkers.ops.pipeline import Pipeline, SampleError, StagedBatch, describe_failure
from hetstream.mpi_dataworkers.ops.process_memory import PrivateMemory
from hetstream.mpi_dataworkers.ops.tree import flatten, holds_objects
from hetstream.mpi_dataworkers.ops.worker_context import EnteredPipeline
from hetstream.mpi_dataworkers.process.children import go_first
from hetstream.mpi_dataworkers.process.handlers import others
from hetstream.mpi_dataworkers.wire.messages import Failure

_signals: Any = signal_handling

# For a step, which torch's own loader would wait for without end: for a first look, and at most.
LEAST_S, MOST_S = 60.0, 300.0
# For the end of a process whose connections are gone.
_ENDS_IN_S = 2.0


class NotMade(Exception):
    """There is nothing to compare with: the worker process died, or gave no step in time."""


class NotInTime(NotMade):
    """It gave no step in time: it may wait for what another process holds."""


class HasEnded(NotMade):
    """It died while a step was waited for.

    Args:
        worker: the process.

    Attributes:
        as_torch: what torch's loader raises for it.
    """

    def __init__(self, worker: Any) -> None:
        self.as_torch = of_dead_process(worker.pid)
        worker.join()
        super().__init__(f"torch's own worker process ended with exit code {worker.exitcode}")


class Made(msgspec.Struct, frozen=True):
    """What became of a step.

    Attributes:
        num_samples: in the batch.
        batch: as the program gets it; None without samples, and where it raised.
        payload: the same, with what moved operators add to it.
        failure: what user code raised; `is_final` where the batch was made, and cannot be sent.
        untouched: of a batch with objects of classes, another one: to compare an object is to ask it what it holds,
            and that may change it.
        changes: why the program is to make its samples itself, on one line: they write into memory that it shares, or,
            of a step with a negative number, a sample that was made twice, may depend on what their process has made
            before.
        repeated: of such a step, how the second making differs from the first one, `batch`, by field.
        wrote: what its samples did to files, on one line: as in `wire.delivery_messages.Batch`, or how many bytes they
            wrote but for standard output and error.
        handed_over: with `failure`, what the program gets in the place of the step; see `torch_errors`.
    """

    num_samples: int
    batch: Any
    failure: Failure | None = None
    untouched: tuple[Any] | None = None
    payload: Any = None
    changes: str = ""
    repeated: Mapping[str, str] = {}
    wrote: str = ""
    handed_over: bytes = b""

    @classmethod
    def of(cls, num_samples: int, payload: Any) -> Made:
        """A step that was made. What moved operators add to it may differ in its last bits from host to host."""
        return cls(num_samples, payload.batch if type(payload) is StagedBatch else payload, payload=payload)

    @property
    def raised(self) -> Exception | None:
        """What torch raises in the place of the step; None where it raises nothing."""
        return raised_by_torch(self.handed_over)

    @property
    def no_batch(self) -> str:
        """Why the program cannot have its batch, on one line; "" where it can."""
        return self.changes or ("" if self.failure is None else f"torch's own worker process raises {self.summary}")

    @property
    def outcome(self) -> tuple[Any, ...]:
        """What became of it, but for the batch and the text of an exception."""
        return (self.num_samples,) if self.failure is None else self.failure.error_type

    @property
    def summary(self) -> str:
        """The same on one line, and the text."""
        if self.failure is None:
            return f"{self.num_samples} samples"
        return f"{self.failure.error_type[1]}: {summary_of(self.failure)}"


def _made_of(answer: Any) -> Made:
    """A step from the answer of `_WitnessSteps`, a child of this process."""
    if isinstance(answer, Made):
        return answer
    num_samples, batch, other, wrote = answer
    # Now: what tensors share comes from the process, which may end.
    untouched = None if other is None else (pickle.loads(other),)
    made = Made.of(num_samples, pickle.loads(batch))
    return msgspec.structs.replace(made, untouched=untouched, wrote=wrote)


def _pickled(batch: Any) -> tuple[bytes, bytes | None]:
    """A batch in pickled form, and with objects of classes a second time."""
    once = bytes(ForkingPickler.dumps(batch))
    return once, bytes(ForkingPickler.dumps(batch)) if holds_objects(flatten(batch)[0]) else None


class _Output:
    """What this process writes, and what of it goes to standard output and error, where nobody reads it."""

    def begin(self) -> None:
        """Take the place of standard output and error."""
        self._nowhere = os.memfd_create("hetstream-output", os.MFD_CLOEXEC)
        for descriptor in (1, 2):
            os.dup2(self._nowhere, descriptor)
        self._written = self._all()

    def written(self) -> int:
        """Bytes that this thread has written to files since the last call (proc(5), io), but for those."""
        before, self._written = self._written, self._all()
        shown = os.lseek(self._nowhere, 0, os.SEEK_CUR)
        os.ftruncate(self._nowhere, os.lseek(self._nowhere, 0, os.SEEK_SET))
        return max(0, self._written - before - shown)

    @staticmethod
    def _all() -> int:
        try:
            with open("/proc/thread-self/io", "rb") as lines:
                return next(int(line.split()[1]) for line in lines if line.startswith(b"wchar:"))
        except OSError:  # a kernel that does not count it
            return 0


class _WitnessSteps(StepDataset):
    """The steps of a witness. What its samples print and write is shown by data workers, and not twice.

    Nor does it change what the program shares with its processes: samples that write there are left to the program.
    """

    _pass_number = 0  # of the process
    _output: Final = _Output()
    _memory: PrivateMemory | None = None

    def __init__(self, pipeline: Pipeline, has_limit: bool) -> None:
        super().__init__(replace(pipeline, cache_place=""))  # what is compared is made anew
        self._has_limit = has_limit

    def __getitem__(self, numbered: tuple[int, StepRequest | None]) -> Any:
        number, request = numbered
        if not self._pass_number:
            go_first()
            self._output.begin()
        if self._memory is None:
            try:
                self._memory = PrivateMemory()
            except OSError as error:  # what cannot be compared without harm is the program's own
                return Made(0, None, changes=str(error))
        elif self._pass_number != number:
            self._memory.renew()
        self._pass_number = number
        answer = None if request is None else self._answer(request)
        if written := self._memory.written():
            return Made(
                0, None, changes=f"its samples write into memory that processes of the program share: {written}"
            )
        return answer

    def _answer(self, request: StepRequest) -> Any:
        is_made = False
        try:
            with limited_to_rest() if self._has_limit else contextlib.nullcontext():
                if request[1] < 0:
                    return self._twice(request)
                self._output.written()
                with acts_on_files() as found:
                    made, _ = self.make(request)
                # default_collate makes memory for each tensor by one byte at its end.
                written_bytes = max(0, self._output.written() - len(_pytree.tree_leaves(made.batch)))
            is_made = True
            # Here, because torch's process says nothing of a batch that it cannot send, and its loader waits for it.
            wrote = found.act or (f"{written_bytes} bytes" if written_bytes else "")
            return made.num_samples, *_pickled(made.batch), wrote
        except SampleError as error:
            handed = handed_over(error, self._pipeline, request[1])  # before it is described, which adds a note
            return Made(0, None, describe_failure(error), handed_over=handed)
        except Exception as error:  # noqa: BLE001, user code may raise anything
            failure = describe_failure(error, is_final=is_made)
            if is_made:
                return Made(0, None, failure)
            # torch raises it once in each process, and something else for the steps that follow.
            return Made(0, None, changes=f"its worker_init_fn raises {failure.error_type[1]}: {summary_of(failure)}")

    def _twice(self, request: StepRequest) -> Made:
        """Make a sample twice; a collate function that needs several raises, and what samples change shows all the
        same. Before, see that `worker_init_fn` leaves nothing behind: here one process plays the parts of several."""
        batches: list[bytes] = []

        def make() -> None:
            with contextlib.suppress(Exception):
                batches.append(pickle.dumps(self.make(request)[0].batch))

        # Not that of the steps: a collate_fn that is its loader's own method reaches it, and it remembers its parts.
        apart = EnteredPipeline(self._pipeline, 0, is_torchs=True)
        with contextlib.suppress(Exception):  # it is the first step's own failure
            if left := apart.left_by_parts(request[0]):
                return Made(0, None, changes=f"worker_init_fn sets for each worker what here several share: {left}")
        if changes := changed_by(make, self._pipeline.user_objects):
            said = "what makes its samples is changed by them, so they may depend on one another"
            return Made(0, None, changes=f"{said}: {changes}")
        if len(batches) < 2:
            return Made(0, None)
        first, second = map(pickle.loads, batches)
        differences = compare(second, first).differences
        return Made(1, first, repeated={each.field: str(each) for each in reversed(differences)})


@contextlib.contextmanager
def _handler_kept() -> Iterator[None]:
    """Leave the handler that torch sets for the death of a child as it is.

    Torch sets it behind the start of a loader's processes: the next process, too, begins without it.
    """
    handler, was_set = signal.getsignal(signal.SIGCHLD), _signals._SIGCHLD_handler_set
    try:
        yield
    finally:
        if _signals._SIGCHLD_handler_set and not was_set:
            signal.signal(signal.SIGCHLD, handler)
            _signals._SIGCHLD_handler_set = False


class _Requests:
    """The steps that a witness is asked for: what torch's loader draws from its sampler, two steps ahead.

    Beside the witness, not of it: torch's loader holds it, and must not hold the witness, with which the process ends.

    Attributes:
        asked: in the life of the process.
        under_way: of this pass, with None in the place of a step that nobody had asked for yet.
    """

    def __init__(self) -> None:
        self.asked: list[StepRequest] = []
        self._num_passes = 0
        self.under_way: collections.deque[int | None] = collections.deque()
        self._to_ask: collections.deque[StepRequest] = collections.deque()

    def begin(self, requests: Sequence[StepRequest]) -> None:
        """Forget those of the pass before."""
        self.under_way.clear()
        self._to_ask = collections.deque(requests)

    def add(self, request: StepRequest) -> None:
        """Ask for one more."""
        self._to_ask.append(request)

    def __iter__(self) -> Iterator[tuple[int, StepRequest | None]]:
        self._num_passes += 1
        while True:
            request = self._to_ask.popleft() if self._to_ask else None
            self.under_way.append(None if request is None else request[1])
            if request is not None:
                self.asked.append(request)
            yield self._num_passes, request

    def __contains__(self, step: int) -> bool:
        return step in self.under_way or any(step == request[1] for request in self._to_ask)

    def all(self) -> list[StepRequest]:
        """All that were asked for."""
        return [*self.asked, *self._to_ask]

    def forget(self, step: int) -> None:
        """A step was not asked for to be compared: nobody will have it made once more."""
        self.asked = [request for request in self.asked if request[1] != step]


class Witness:
    """One of torch's own worker processes: it makes steps from the program's own objects as they are when it starts.

    It works while the program goes on, and `made` waits for it.

    Args:
        pipeline: of the program.
        is_kept: it outlives a pass, as with `persistent_workers`.
        multiprocessing_context: of the loader.
        has_limit: it may take as much memory as is left, for steps that have ended data workers.

    Attributes:
        requests: what it was asked for.
    """

    def __init__(
        self, pipeline: Pipeline, is_kept: bool, multiprocessing_context: Any, has_limit: bool = False
    ) -> None:
        self.requests = _Requests()
        self._loader = PlainLoader(
            _WitnessSteps(pipeline, has_limit),
            batch_size=None,
            sampler=self.requests,
            collate_fn=no_collate,
            generator=torch.Generator(),  # its own, so that the program's generators are not advanced
            num_workers=1,
            prefetch_factor=2,
            persistent_workers=is_kept,
            multiprocessing_context=multiprocessing_context,
        )
        self._made: dict[int, Made] = {}
        self._kept_from: int | None = None
        self._answers: Any = None
        self._answer: tuple[int | None, Any] | None = None  # that was taken last, and is not in `_made` yet
        self._is_late = self._is_interrupted = False

    def begin(self, requests: Sequence[StepRequest]) -> None:
        """Begin a pass with some of its steps; starts the process, or goes on with the one that was kept.

        Raises:
            NotMade: it cannot be started.
        """
        self._made.clear()
        self.requests.begin(requests)
        self._answer, self._is_interrupted = None, True
        try:
            with _handler_kept():
                self._answers = iter(self._loader)
        except others() as error:  # of torch or the system; with start method "spawn" also of what it pickles
            raise NotMade(f"no worker process can be started: {error}") from error
        # As else its death would be an exception of torch in whatever the trainer does then.
        iterator = self._answers
        if iterator._worker_pids_set:
            _signals._remove_worker_pids(id(iterator))
            iterator._worker_pids_set = False
        self._is_interrupted = False

    def ask(self, request: StepRequest) -> None:
        """Have one more step of the pass made.

        Raises:
            NotMade: as `made`.
        """
        self._look_for_process()
        self.requests.add(request)
        if self.requests.under_way[0] is None and self._answers._worker_result_queue._reader.poll():
            self._take()  # else it is still at its start, and `made` does this

    def has(self, step: int) -> bool:
        """Whether a step of this pass was asked for."""
        return step in self._made or step in self.requests

    def made(self, step: int, limit_s: float = MOST_S) -> Made:
        """Wait for a step that was asked for.

        Args:
            step: which.
            limit_s: for how long.

        Raises:
            NotMade: the process died, gave no answer in time, or makes the steps of another pass by now.
        """
        if not self.has(step):
            raise NotMade("another iteration of this loader has begun")
        while step not in self._made:
            self._take(limit_s)
        return self._made[step]

    def forget(self, step: int) -> None:
        """A step was taken, and is not asked for again."""
        self._made.pop(step, None)
        self.requests.forget(step)

    def drop_before(self, step: int) -> None:
        """Keep no batch of a step before this one."""
        self._kept_from = step
        self._made = {number: made for number, made in self._made.items() if number >= step}

    def end(self) -> None:
        """End the process, and wait until it has ended: what it holds is free then."""
        iterator: Any = self._answers
        self._answers = self._loader._iterator = None
        self._made.clear()
        if iterator is not None and iterator._of_process == os.getpid():  # else it is the parent's
            for worker in iterator._workers if self._is_late else ():
                worker.kill()  # torch would wait for it
            iterator._shutdown_workers()

    def _take(self, limit_s: float = MOST_S) -> None:
        """Take the oldest answer; torch's loader then draws the next request."""
        self._look_for_process()
        if self._answer is None:
            self._receive(limit_s)
        assert self._answer is not None
        step, answer = self._answer
        try:
            if step is not None and (self._kept_from is None or step >= self._kept_from):
                self._made[step] = _made_of(answer)
        except others() as error:  # of user code that makes the batch's objects anew
            self._answer = None
            raise self._not_made(error) from error
        self._answer = None

    def _look_for_process(self) -> None:
        """Ask for no step where nobody makes it.

        Raises:
            NotMade: the process is not there, or what it has sent was lost.
        """
        if self._answers is None or self._is_interrupted:
            raise NotMade("an exception of a signal's handler has interrupted torch's own worker process")

    def _receive(self, limit_s: float) -> None:
        iterator = self._answers
        # torch's own wait does not end when the process does, unless its death may be an exception anywhere.
        worker, answers = iterator._workers[0], iterator._worker_result_queue._reader
        ready = connection.wait([answers, worker.sentinel], limit_s)
        if answers not in ready:
            if worker.sentinel not in ready:
                self._is_late = True
                raise NotInTime(f"torch's own worker process gave no step in {limit_s:g} s")
            raise HasEnded(worker)
        self._is_interrupted = True  # torch then lacks an answer that it waits for
        try:
            answer = next(iterator)
            self._answer = self.requests.under_way.popleft(), answer
        except others() as error:  # of torch, or of user code in it
            self._is_interrupted = False
            raise self._not_made(error) from error
        self._is_interrupted = False

    def _not_made(self, error: Exception) -> NotMade:
        """What it means that an answer cannot be taken."""
        worker = self._answers._workers[0]
        # It may end with what tensors of its answer lie in.
        if isinstance(error, OSError | EOFError) and connection.wait([worker.sentinel], _ENDS_IN_S):
            return HasEnded(worker)
        return NotMade(f"{type(error).__name__}: {error}".partition("\n")[0])
