"""Which exceptions are those of a program's handlers of signals."""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from hetstream.mpi_dataworkers.ops.batch_comparison import compare
from hetstream.mpi_dataworkers.process.handlers import of_handler, others, suppressed_others


class Interrupted(Exception):
    """Of a handler."""


def plain(number: int, frame: FrameType | None) -> None:
    raise Interrupted


def deep(*given: Any) -> None:
    def raising() -> None:
        raise Interrupted

    raising()


def dropping(number: int, frame: FrameType | None) -> None:
    del number, frame
    raise Interrupted


def once(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)
    raise Interrupted


class Watchdog:
    def __call__(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        raise Interrupted

    def bound(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        raise Interrupted


def told(what: str, number: int, frame: FrameType | None) -> None:
    del what, number, frame
    raise Interrupted


HANDLERS = {
    "plain": plain,
    "deep": deep,
    "dropping": dropping,
    "once": once,
    "callable": Watchdog(),
    "bound": Watchdog().bound,
    "partial": functools.partial(told, "late"),
}


class Interrupting:
    """Its pickling, and whatever looks at it, is interrupted."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        signal.raise_signal(signal.SIGUSR1)
        return object, ()


@pytest.fixture(autouse=True)
def _kept() -> Iterator[None]:
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("handler", HANDLERS.values(), ids=HANDLERS)
def test_an_exception_of_a_handler_is_known_by_its_traceback(handler: Callable[..., None]) -> None:
    signal.signal(signal.SIGUSR1, handler)
    with pytest.raises(Interrupted) as raised:
        compare([Interrupting()], [Interrupting()])  # which lets classes of users refuse it
    assert of_handler(raised.value)
    signal.signal(signal.SIGUSR1, handler)
    with pytest.raises(Interrupted), suppressed_others():
        signal.raise_signal(signal.SIGUSR1)


@pytest.mark.parametrize("given", [(), (1, None)], ids=["nothing", "no frame"])
def test_any_other_exception_is_not(given: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGUSR1, plain)

    def failing(*given: Any) -> None:
        raise Interrupted(given)

    caught = None
    try:
        failing(*given)
    except others() as error:
        caught = error
    assert isinstance(caught, Interrupted)
    with suppressed_others():
        failing(*given)
