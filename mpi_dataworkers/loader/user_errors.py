"""What user code raised, on its way to the training loop: from a data worker, or from this process."""

from __future__ import annotations

import builtins
import importlib

from hetstream.mpi_dataworkers.errors import RemoteError
from hetstream.mpi_dataworkers.handlers import others
from hetstream.mpi_dataworkers.ops.structure import resolve_class
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
