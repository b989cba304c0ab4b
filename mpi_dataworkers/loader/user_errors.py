"""What user code raised, on its way to the training loop: from a data worker, or from this process."""

from __future__ import annotations

import builtins
import contextlib
import importlib
import os
import pickle
import signal
import sys
import time
import types
from multiprocessing.reduction import ForkingPickler
from typing import Any

from torch import _utils as torch_utils
from torch.utils.data._utils import fetch as torch_fetch
from torch.utils.data._utils import signal_handling
from torch.utils.data._utils import worker as torch_worker

from hetstream.mpi_dataworkers.errors import RemoteError
from hetstream.mpi_dataworkers.ops.pipeline import Pipeline, SampleError
from hetstream.mpi_dataworkers.ops.structure import resolve_class
from hetstream.mpi_dataworkers.process.handlers import others
from hetstream.mpi_dataworkers.wire.messages import BatchFailed, Failure


class _InLines(str):
    """A text that is shown as it is where an exception shows its arguments' `repr`, as KeyError does; torch's
    `KeyErrorMessage` is one, too."""

    __slots__ = ()

    def __repr__(self) -> str:
        return self


def summary_of(failure: Failure) -> str:
    """A failure on one line: what, and where."""
    first = failure.text.partition("\n")[0]
    return f"{first} (on {failure.host}, {failure.interpreter})" if failure.host else first


def made_at(error: Exception, step: int) -> Exception:
    """An exception of user code in this process: its traceback says the step, if not the sample (Python 3.11)."""
    notes = [note for note in getattr(error, "__notes__", ()) if note.startswith("hetstream: ")]
    if hasattr(error, "add_note") and not notes:
        error.add_note(f"hetstream: step {step}")
    return error


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except others():  # user code; an exception need not be able to say what it is
        return ""


def rebuild_error(failed: BatchFailed) -> Exception:
    """The exception of a data worker as its own type, with the sample and the remote traceback in its text."""
    failure = failed.failure
    module, name = failure.error_type
    where = f"sample {failure.sample_index}" if failure.sample_index >= 0 else f"step {failed.step}"
    host = f" on {failure.host} ({failure.interpreter})" if failure.host else ""
    text = _InLines(f"{failure.text}\n\nin a data worker{host}, {where}:\n{failure.remote_traceback}")
    try:
        if module not in ("builtins", "__main__"):
            importlib.import_module(module)
        kind = getattr(builtins, name) if module == "builtins" else resolve_class(module, name)
        # What torch does for classes whose first argument is no text.
        error = kind(message=text) if getattr(kind, "message", None) else kind(text)
        if hasattr(error, "add_note") and text not in _text_of(error):  # its text is its own
            error.add_note(text)
    except others():  # a class that is not here or takes other arguments: any exception may come
        return RemoteError(f"{module}.{name}: {text}")
    fit = isinstance(error, Exception) and not isinstance(error, StopIteration)  # which would look like the end
    return error if fit else RemoteError(f"{module}.{name}: {text}")


# What user code raised, as the program gets it from torch's own worker process: for programs that only know torch.
#
# Type, arguments and text are torch's, with the frames of its worker in the place of hetstream's.

_ExceptionWrapper: Any = torch_utils.ExceptionWrapper
_MapDatasetFetcher: Any = torch_fetch._MapDatasetFetcher
_worker_loop: Any = torch_worker._worker_loop
_signals: Any = signal_handling

# Time that a process has to end by itself once its connections are closed.
_ENDS_IN_S = 5.0


def handed_over(error: SampleError, pipeline: Pipeline, step: int) -> bytes:
    """What torch's worker process hands over in the place of a step.

    Args:
        error: of the step.
        pipeline: of the program.
        step: its number, which decides on the worker process.

    Returns:
        It in pickled form. Empty where torch hands over nothing: a class that cannot be pickled, for which its loader
        waits in vain; and without worker processes, where what is raised is the program's own object, but for a
        StopIteration, whose type is all that counts.
    """
    cause = error.__cause__ or error
    if not pipeline.has_workers:
        return pickle.dumps(StopIteration()) if isinstance(cause, StopIteration) else b""
    without_own_notes(cause)
    where = f"in DataLoader worker process {step % pipeline.num_workers}"
    wrapper = _ExceptionWrapper((type(cause), cause, _traceback_in_torch(cause, pipeline)), where)
    try:
        return bytes(ForkingPickler.dumps(wrapper))
    except others():  # whatever the class of an exception does
        return b""


def raised_by_torch(handed: bytes) -> Exception | None:
    """The exception that torch's loader raises for what its worker process has handed over; None for nothing."""
    try:
        given = pickle.loads(handed) if handed else None
        if isinstance(given, Exception):
            return given
    except others():  # the module of its class is not here
        return None
    return None if given is None else reraised(given)


def reraised(wrapper: Any) -> Exception:
    """What torch's `ExceptionWrapper` raises.

    Its frame refers to the exception, which refers to the frame: in such a cycle, whoever iterates would stay until
    the garbage collector comes, and torch's worker processes would be ended by force then, after 5 s each.
    """
    try:
        wrapper.reraise()
    except others() as error:
        last_of(error).tb_frame.clear()
        return error
    raise AssertionError("it raises")


def timed_out(timeout_s: float) -> RuntimeError:
    """What torch's loader raises when its `timeout` has passed."""
    return RuntimeError(f"DataLoader timed out after {timeout_s:g} seconds")


def of_dead_process(pid: int) -> RuntimeError:
    """What torch's loader raises that waits for a worker process which has ended. Nobody has waited for its end yet."""
    error = RuntimeError(f"DataLoader worker (pid(s) {pid}) exited unexpectedly")
    key = id(error)
    with contextlib.suppress(ChildProcessError):  # its connections are closed a moment before
        deadline = time.monotonic() + _ENDS_IN_S
        while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
            if time.monotonic() > deadline:  # a sample has closed them, and goes on
                os.kill(pid, signal.SIGKILL)
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
                break
            time.sleep(0.01)
    _signals._set_worker_pids(key, (pid,))
    try:
        _signals._error_if_any_worker_fails()  # it says how: of exit code 0, nothing
    except RuntimeError as how:
        error.__cause__ = how.with_traceback(None)
    finally:
        _signals._remove_worker_pids(key)
    return error


def last_of(error: BaseException) -> types.TracebackType:
    """Where an exception was raised, that was caught here."""
    last = error.__traceback__
    assert last is not None
    while last.tb_next is not None:
        last = last.tb_next
    return last


def is_of_sample(error: BaseException) -> bool:
    """Whether torch's own loader raises it for a worker process that made a step: what user code raised there."""
    return last_of(error).tb_frame.f_code is _ExceptionWrapper.reraise.__code__


def without_own_notes(error: BaseException) -> None:
    """Take hetstream's notes from an exception."""
    with contextlib.suppress(Exception):  # user code: it may be any attribute
        notes: Any = getattr(error, "__notes__", [])
        notes[:] = [note for note in notes if not str(note).startswith("hetstream: ")]


class _Called(Exception):
    """torch's fetcher has called user code."""


def _traceback_in_torch(cause: BaseException, pipeline: Pipeline) -> types.TracebackType | None:
    """The traceback as it is where torch's worker process calls user code."""
    own = cause.__traceback__  # it begins in the pipeline
    if own is None:
        return None
    calls: list[tuple[types.FrameType, int, int]] = []
    frame: types.FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not _worker_loop.__code__:
        frame = frame.f_back
    if frame is not None:
        calls.append((frame, frame.f_lasti, frame.f_lineno))
    fetching = _fetching(own.tb_frame.f_code, pipeline)
    while fetching is not None:
        if fetching.tb_frame.f_code.co_filename == torch_fetch.__file__:
            calls.append((fetching.tb_frame, fetching.tb_lasti, fetching.tb_lineno))
        fetching = fetching.tb_next
    joined = own.tb_next
    for called, lasti, line in reversed(calls):
        joined = types.TracebackType(joined, called, lasti, line)
    return joined


def _fetching(place: types.CodeType, pipeline: Pipeline) -> types.TracebackType | None:
    """How torch's fetcher comes to call what was called in a place of the pipeline."""

    def call(*_: Any) -> Any:
        raise _Called

    names = ["__getitem__", *(["__getitems__"] if place is Pipeline._together.__code__ else [])]
    in_collate = place is Pipeline._collated.__code__
    dataset = type("Dataset", (), dict.fromkeys(names, (lambda *_: None) if in_collate else call))()
    try:
        _MapDatasetFetcher(dataset, pipeline.batched, call, False).fetch([0])
    except _Called as called:
        return called.__traceback__
    return None
