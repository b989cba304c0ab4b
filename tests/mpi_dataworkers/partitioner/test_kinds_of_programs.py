"""Unmodified programs of many kinds: with and without what moves they have the same losses, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kinds_of_programs
import pytest
import torch
from hooking import hooked

from hetstream.mpi_dataworkers.partitioner.cut import Cutter
from hetstream.mpi_dataworkers.partitioner.unmodified import _calls

# What is said of each: the number of moved operators, or why none moves.
SAID = {
    "keywords": "data workers run",
    "names_in_keywords": "data workers run",
    "wrapped": "data workers run",
    "defaults": "data workers run",
    "hooks": "data workers run",
    "hooks_inside": "data workers run",
    "compiled_for_any_size": "torch.compile compiles the model, or a part of it",
    "autocast_in_some_steps": "data workers run",
    "changes_its_batch": "changes it in place",
    "changes_a_tensor_in_place": "data workers run",
    "two_models": "its batches go to several models",
    "accumulated": "data workers run",
    "evaluated_in_between": "that is the forward's beginning alone",
}


def losses_of(program: Callable[[], list[str]]) -> list[str]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    return program()


@pytest.mark.slow
@pytest.mark.parametrize("offload", ["auto", "all"])
@pytest.mark.parametrize("program", kinds_of_programs.PROGRAMS, ids=lambda program: program.__name__)
def test_a_program_has_its_losses(
    program: Callable[[], list[str]],
    offload: str,
    three: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    expected = losses_of(program)
    monkeypatch.setattr(Cutter, "decide", Cutter.largest)  # else what pays depends on the machine
    monkeypatch.setenv("HETSTREAM_OFFLOAD", offload)
    with hooked(three.name, monkeypatch):
        assert losses_of(program) == expected
        for follower in list(_calls.followers):
            follower._end("the test ends")
    assert SAID[program.__name__] in caplog.text
    assert "the check of a batch failed" not in caplog.text
