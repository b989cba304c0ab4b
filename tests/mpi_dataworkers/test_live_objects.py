"""Pickling for data workers never changes the objects of a program that only knows torch."""

from __future__ import annotations

import os
import pickle
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hetstream.mpi_dataworkers.errors import PipelineError
from hetstream.mpi_dataworkers.loader.live_objects import ask_apart


class Writes:
    """Says how it is pickled, and does something beside it."""

    def __init__(self, does: Callable[[Any], object], **values: Any) -> None:
        self._does = does
        vars(self).update(values)

    def __getstate__(self) -> dict[str, Any]:
        self._does(self)
        return {}


def ask(held: Any) -> None:
    ask_apart({"dataset": held}, lambda: pickle.dumps(held))


def test_what_pickling_would_change_is_named_and_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"0123456789")
    with open(tmp_path / "data", "rb") as file, socket.socket() as line:
        cases = [
            (Writes(lambda self: self.file.close(), file=file), "dataset.file is closed"),
            (Writes(lambda self: self.line.close(), line=line), "dataset.line"),
            (Writes(lambda self: vars(self).update(count=self.count + 1), count=0), "dataset.count: 0, then 1"),
            (Writes(lambda self: self.cache.clear(), cache={1: 2}), "dataset.cache"),
            ([Writes(lambda self: vars(self).pop("name"), name="a")], "dataset[0].name"),
        ]
        for held, says in cases:
            before = pickle.dumps([vars(each).get("count") for each in [held] if isinstance(each, Writes)])
            with pytest.raises(PipelineError, match="pickling changes the program's own objects") as caught:
                ask(held)
            assert says in str(caught.value)
            assert pickle.dumps([vars(each).get("count") for each in [held] if isinstance(each, Writes)]) == before
        assert (file.read(3), line.fileno() >= 0) == (b"012", True)
        assert cases[3][0].cache == {1: 2}  # type: ignore[union-attr]


def test_what_pickling_leaves_as_it_is_may_be_pickled(capfd: Any) -> None:
    ask(Writes(lambda self: print("said by the process that was asked"), values=[1, 2]))
    ask({"no object": "that says how it is pickled"})
    assert capfd.readouterr() == ("", "")


def test_what_cannot_be_asked_is_not_pickled() -> None:
    def refuses(_: Any) -> None:
        raise PipelineError("it cannot be pickled")

    with pytest.raises(PipelineError, match=r"^it cannot be pickled$"):
        ask(Writes(refuses))
    with pytest.raises(PipelineError, match="the process that pickled it has died"):
        ask(Writes(lambda _: os.kill(os.getpid(), signal.SIGKILL)))
