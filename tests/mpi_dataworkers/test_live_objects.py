"""Pickling for data workers never changes the objects of a program that only knows torch."""

from __future__ import annotations

import copyreg
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hetstream.mpi_dataworkers.errors import PipelineError
from hetstream.mpi_dataworkers.loader.live_objects import ask_apart
from hetstream.mpi_dataworkers.ops.pickling import RunsUserCode, pickle_apart


class Writes:
    """Says how it is pickled, and does something beside it."""

    def __init__(self, does: Callable[[Any], object], **values: Any) -> None:
        self._does = does
        vars(self).update(values)

    def __getstate__(self) -> dict[str, Any]:
        self._does(self)
        return {}


class Registered:
    """It is pickled as `copyreg` says."""


def reduced(value: Registered) -> Any:
    vars(value)["count"] = 1
    return Registered, ()


def ask(held: Any) -> None:
    ask_apart({"dataset": held}, lambda: pickle_apart(held))


def test_what_pickling_would_change_is_named_and_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"0123456789")
    with open(tmp_path / "data", "rb") as file, open(tmp_path / "data", "rb") as kept, socket.socket() as line:
        counting, cached, named = (
            Writes(lambda self: vars(self).update(count=self.count + 1), count=0),
            Writes(lambda self: self.cache.clear(), cache={1: 2}),
            Writes(lambda self: vars(self).pop("name"), name="a"),
        )
        for held, says in [
            (Writes(lambda self: self.file.close(), file=file), "dataset.file is closed"),
            (Writes(lambda self: self.file.seek(5), file=kept), "dataset.file is closed, or read from another place"),
            (Writes(lambda self: os.lseek(self.file.fileno(), 7, os.SEEK_SET), file=kept), "dataset.file"),
            (Writes(lambda self: self.line.close(), line=line), "dataset.line"),
            (counting, "dataset.count: 0, then 1"),
            (cached, "dataset.cache"),
            ([named], "dataset[0].name"),
        ]:
            with pytest.raises(PipelineError, match="pickling changes the program's own objects") as caught:
                ask(held)
            assert says in str(caught.value)
        assert (file.read(3), kept.read(3), line.fileno() >= 0) == (b"012", b"012", True)
        assert (counting.count, cached.cache, named.name) == (0, {1: 2}, "a")  # type: ignore[attr-defined]


def test_nothing_is_written_for_the_program(tmp_path: Path) -> None:
    with open(tmp_path / "log", "w") as log:
        log.write("not yet written")
        with pytest.raises(PipelineError):
            ask(Writes(lambda self: self.log.flush(), log=log))
        assert (tmp_path / "log").read_text() == ""
    assert (tmp_path / "log").read_text() == "not yet written"


def test_what_pickling_leaves_as_it_is_may_be_pickled(capfd: Any) -> None:
    ask(Writes(lambda self: print("said by the process that was asked"), values=[1, 2]))
    assert capfd.readouterr() == ("", "")


def test_what_cannot_be_asked_is_not_pickled() -> None:
    def refuses(_: Any) -> None:
        raise PipelineError("it cannot be pickled")

    with pytest.raises(PipelineError, match=r"^it cannot be pickled$"):
        ask(Writes(refuses))
    with pytest.raises(PipelineError, match="the process that was to pickle it first has died"):
        ask(Writes(lambda _: os.kill(os.getpid(), signal.SIGKILL)))


def test_user_code_is_met_wherever_it_is_before_it_is_called(monkeypatch: Any) -> None:
    called: list[Any] = []
    pickle_apart({"plain": [1, "a", object()]}, runs_user_code=False)
    for held in [[0] * 5000 + [Writes(called.append)], {"deep": [{"deeper": (Writes(called.append),)}]}]:
        with pytest.raises(RunsUserCode, match="Writes"):
            pickle_apart(held, runs_user_code=False)
    monkeypatch.setitem(copyreg.dispatch_table, Registered, reduced)
    registered = Registered()
    with pytest.raises(RunsUserCode, match="Registered"):
        pickle_apart([registered], runs_user_code=False)
    assert (called, vars(registered)) == ([], {})
