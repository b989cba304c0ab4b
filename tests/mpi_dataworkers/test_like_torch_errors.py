"""What a program catches of a sample's exception is what torch's worker process gives it, whatever it is."""

from __future__ import annotations

import builtins
import multiprocessing
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
from torch._utils import ExceptionWrapper

from hetstream.mpi_dataworkers.errors import RemoteError
from hetstream.mpi_dataworkers.loader import user_errors
from hetstream.mpi_dataworkers.loader.user_errors import rebuild_error
from hetstream.mpi_dataworkers.ops.pipeline import SampleError, describe_failure
from hetstream.mpi_dataworkers.wire.messages import BatchFailed

# --- exceptions of a program ----------------------------------------------------------------------------------------


class Plain(Exception):
    pass


class TwoArguments(Exception):
    def __init__(self, code: int, text: str) -> None:
        super().__init__(code, text)
        self.code = code


class ByKeyword(Exception):
    def __init__(self, *, path: str) -> None:
        super().__init__(f"cannot read {path}")
        self.path = path


class Optional(Exception):
    def __init__(self, text: str = "nothing", *, code: int = 3) -> None:
        super().__init__(text)
        self.code = code


class NoArguments(Exception):
    def __init__(self) -> None:
        super().__init__("always the same")


class WithMessage(Exception):
    message = "of the class"

    def __init__(self, number: int = 0, message: str = "") -> None:
        super().__init__(message)
        self.number = number


class WithEmptyMessage(Exception):
    message = ""


class MessageOnly(Exception):
    message = "of the class"

    def __init__(self, message: str) -> None:
        super().__init__(message)


class OwnReduce(Exception):
    def __reduce__(self) -> Any:
        raise TypeError("not to be pickled")


class OwnText(Exception):
    def __str__(self) -> str:
        return f"<<{self.args[0]}>>"


class NoText(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


class NoTextAtAll(Exception):
    def __str__(self) -> Any:
        return None


class RaisesWhenMade(Exception):
    def __init__(self, number: Any) -> None:
        super().__init__(number + 1)


class NewOfItsOwn(Exception):
    def __new__(cls, number: int, name: str) -> Any:
        return super().__new__(cls, number)

    def __init__(self, number: int, name: str) -> None:
        super().__init__(number, name)


class IsKey(KeyError):
    pass


class IsStop(StopIteration):
    pass


class IsSystem(OSError):
    pass


class IsRuntime(RuntimeError):
    pass


class IsLookup(LookupError, ValueError):
    pass


def holder() -> Any:
    class Local(Exception):
        pass

    return Local("of a function")


def with_attributes() -> Exception:
    error = Plain("with", "attributes")
    error.lock, error.stream = sys.stdout, lambda: None  # type: ignore[attr-defined]
    return error


def with_cause() -> Exception:
    error = Plain("after another")
    error.__cause__ = ValueError("the cause")
    return error


def with_context() -> Exception:
    error = Plain("while another")
    error.__context__ = KeyError("the context")
    return error


def with_notes() -> Exception:
    error = Plain("with notes")
    error.__notes__ = ["a note", "one more"]  # type: ignore[attr-defined]
    return error


CASES: dict[str, Callable[[], BaseException]] = {
    "plain": lambda: Plain("text"),
    "without arguments": Plain,
    "many arguments": lambda: Plain(1, "b", [3]),
    "two arguments": lambda: TwoArguments(3, "text"),
    "by keyword": lambda: ByKeyword(path="/a"),
    "optional": lambda: Optional("text", code=5),
    "no arguments": NoArguments,
    "message": lambda: WithMessage(3, "text"),
    "empty message": lambda: WithEmptyMessage("text"),
    "message only": lambda: MessageOnly("text"),
    "own reduce": lambda: OwnReduce("text"),
    "own text": lambda: OwnText("text"),
    "no text": lambda: NoText("text"),
    "no text at all": lambda: NoTextAtAll("text"),
    "raises when made": lambda: RaisesWhenMade(3),
    "new of its own": lambda: NewOfItsOwn(3, "name"),
    "a key": lambda: IsKey("key"),
    "a key of two": lambda: KeyError("a", "b"),
    "a system's": lambda: IsSystem(2, "No such file", "/a"),
    "a file's": lambda: FileNotFoundError(2, "No such file or directory", "/a"),
    "a runtime's": lambda: IsRuntime("text"),
    "two bases": lambda: IsLookup("text"),
    "text in Unicode": lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"),
    "local": holder,
    "attributes": with_attributes,
    "cause": with_cause,
    "context": with_context,
    "notes": with_notes,
    "percent": lambda: Plain("100 % of %s {braces} {0}"),
    "lines": lambda: Plain("one\ntwo\r\nthree\ttab"),
    "surrogates": lambda: Plain("a \udcff surrogate"),
    "null": lambda: Plain("a\0b"),
    "long": lambda: Plain("x" * 2000),
    "key of a text": lambda: KeyError('it\'s "quoted"\n'),
    "empty": lambda: ValueError(""),
}
if sys.version_info >= (3, 11):
    CASES["group"] = lambda: ExceptionGroup("both", [ValueError("a"), KeyError("b")])  # noqa: F821
_BUILTIN = [found for found in vars(builtins).values() if isinstance(found, type) and issubclass(found, Exception)]
for _kind in dict.fromkeys(_BUILTIN):
    if _kind.__name__ not in ("ExceptionGroup", "UnicodeDecodeError", "UnicodeEncodeError", "UnicodeTranslateError"):
        CASES[f"builtin {_kind.__name__}"] = lambda kind=_kind: kind("its text")


# Torch's worker process cannot hand over a class that is local to a function, and the loader waits in vain.
# Of a group torch makes a TypeError, which says nothing of it.
BETTER = ("local", "group")


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:  # noqa: BLE001, whatever it is
        return caught


def of_torch(error: BaseException) -> BaseException:
    wrapped = ExceptionWrapper((type(error), error, error.__traceback__), where="in DataLoader worker process 0")
    try:
        wrapped.reraise()
    except BaseException as caught:  # noqa: BLE001, as above
        return caught
    raise AssertionError("it raises")


def of_data_worker(error: BaseException) -> BaseException:
    failed = SampleError(5)
    failed.__cause__ = error
    return rebuild_error(BatchFailed("session", 3, describe_failure(failed)))


def text_of(error: BaseException) -> str:
    try:
        return str(error)
    except (TypeError, ValueError) as failed:
        return f"{type(failed).__name__}: {failed}"


@pytest.mark.parametrize("name", CASES)
def test_an_exception_of_a_sample_is_caught_as_from_torch(name: str) -> None:
    error = raised(CASES[name]())
    wanted, caught = of_torch(error), of_data_worker(error)
    if isinstance(wanted, StopIteration):
        # A loop over torch's loader ends there as if there were no more data, and says nothing.
        assert isinstance(caught, RuntimeError)
        return
    if name in BETTER:
        assert type(caught) is RemoteError
        assert type(error).__name__ in str(caught)
        return
    if type(wanted) is RuntimeError and type(error) is not RuntimeError:
        assert type(caught) is RemoteError, "which is a RuntimeError, too"
    else:
        assert type(caught) is type(wanted)
    assert [type(argument).__mro__[-2] for argument in caught.args] == [
        type(argument).__mro__[-2] for argument in wanted.args
    ]
    for found in (caught, wanted):
        if type(found) in (RuntimeError, RemoteError) or type(found).__str__ in (Exception.__str__, KeyError.__str__):
            assert type(error).__name__ in str(found), "the traceback ends in it"
            assert "in raised" in str(found), "where it was raised"
    own = text_of(error).encode(errors="backslashreplace").decode()
    if type(caught).__str__ is Exception.__str__ and not own.startswith(("ValueError", "TypeError")):
        assert own in str(caught)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()], ids=repr)
def test_what_is_no_exception_is_an_error_of_the_loader(error: BaseException) -> None:
    """Torch's worker process ends of it, and the loader raises a RuntimeError."""
    caught = of_data_worker(raised(error))
    assert isinstance(caught, RuntimeError)
    assert type(error).__name__ in str(caught)


def test_a_process_that_closed_its_connections_and_goes_on_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_errors, "_ENDS_IN_S", 0.1)
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    process.start()
    error = user_errors.of_dead_process(process.pid or 0)
    process.join(10)
    assert process.exitcode == -signal.SIGKILL
    assert str(error) == f"DataLoader worker (pid(s) {process.pid}) exited unexpectedly"
    assert "killed by signal: Killed" in str(error.__cause__)
