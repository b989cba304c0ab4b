"""Unmodified programs that do what partitioners do not expect: their losses stay as they are, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kinds_of_programs
import pytest
import stranger_programs
import torch
from hooking import hooked

from hetstream.mpi_dataworkers.partitioner.cut import Cutter
from hetstream.mpi_dataworkers.partitioner.unmodified import _calls

pytestmark = pytest.mark.slow
MOVES = "data workers run"
NOWHERE = "its batches arrive in no model's forward as the loader gives them"
# What is said of each; nothing but that operators have moved where it is not named.
SAID = {
    "data_classes": NOWHERE,
    "own_kind_of_tensor": NOWHERE,
    "lone_last_row": "torch.compile has traced it anew, and its graph is another one",
    "hooks_of_all_modules_in_mid_run": "there are hooks of all modules",
    "caught_in_forward": "nothing of Catches moves",
}


def losses_of(program: Callable[[], list[str]]) -> list[str]:
    torch.manual_seed(0)
    return program()


def moved(program: Callable[[], list[str]], offload: str, service: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The losses of a program of which everything that may move does."""
    monkeypatch.setattr(Cutter, "decide", Cutter.largest)  # else what pays depends on the machine
    monkeypatch.setenv("HETSTREAM_OFFLOAD", offload)
    with hooked(service, monkeypatch):
        losses = losses_of(program)
        for follower in list(_calls.followers):
            follower._end("the test ends")
    return losses


@pytest.mark.parametrize("program", stranger_programs.PROGRAMS, ids=lambda program: program.__name__)
def test_a_program_has_its_losses(
    program: Callable[[], list[str]], three: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = losses_of(program)
    assert moved(program, "auto", three.name, monkeypatch) == expected
    assert SAID.get(program.__name__, MOVES) in caplog.text
    assert "the check of a batch failed" not in caplog.text


def test_two_calls_with_one_batch_drop_other_values(
    three: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    apart = [float.fromhex(each) for each in moved(stranger_programs.both_drops, "all", three.name, monkeypatch)]
    assert len(apart) == kinds_of_programs.ROWS // kinds_of_programs.BATCH
    assert min(apart) > 0, "two calls drew the same numbers"
    assert "it is called once more with a batch" in caplog.text
