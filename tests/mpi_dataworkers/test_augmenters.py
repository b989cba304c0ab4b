"""batchgenerators' augmenters over data workers, by classes with their attributes and methods: who is asked when, what
is drawn, where each ends, and what stays with the program. tests/peers/test_nnunet.py has batchgenerators' own."""

from __future__ import annotations

import itertools
import multiprocessing
import random
import time
from collections.abc import Iterator
from typing import Any

import augmenter_programs as programs
import numpy as np
import pytest
import torch
from hooking import hooked

from hetstream.mpi_dataworkers.errors import PipelineError
from hetstream.mpi_dataworkers.loader import augmenters, unmodified_streams
from hetstream.mpi_dataworkers.ops.batch_comparison import compare


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Classes that are stood in for, as the hook does it."""
    monkeypatch.setattr(unmodified_streams, "_DEEPER", 0.0)
    monkeypatch.setattr(augmenters, "_numbers", itertools.count())
    augmenters._drawn_before.clear()
    found: Any = programs.modules()
    for patch in ("nondeterministic", "deterministic", "single", "trainer"):
        getattr(augmenters, f"patch_{patch}")(found)
    yield found
    augmenters._drawn_before.clear()


def until_data_workers_go_on(augmenter: Any) -> None:
    """Wait until they make the batches of a stream that has begun."""
    deadline = time.monotonic() + 60
    for iterator in vars(augmenter)["_hetstream"]._batches:
        while iterator._plain is not None:
            assert iterator._streamed is not None
            iterator._look()
            time.sleep(0.02)
            assert time.monotonic() < deadline


def first(augmenter: Any, number: int) -> list[Any]:
    return [next(augmenter) for _ in range(number)]


def test_ends_and_turns_are_those_of_processes(three: Any, theirs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with hooked(three.name, monkeypatch):
        for lengths in ([3, 5], [5, 3, 3], [4, 0, 1], [6]):
            seeds = [100 + number for number in range(len(lengths))]
            torch.manual_seed(3)
            expected = programs.epochs_of_processes(programs.Ends(lengths), programs.twice, seeds, 12)
            augmenter = theirs.MultiThreadedAugmenter(programs.Ends(lengths), programs.twice, len(lengths), seeds=seeds)
            found = []
            for epoch in range(12):
                found.append([*augmenter])
                if epoch == 7:
                    until_data_workers_go_on(augmenter)
            augmenter._finish()
            assert not compare(found, expected).differences, lengths


def test_with_a_seed_batches_do_not_depend_on_who_makes_them(
    three: Any, theirs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(num_processes: int, waits: bool) -> list[Any]:
        monkeypatch.setattr(augmenters, "_numbers", itertools.count())
        both = [
            theirs.NonDetMultiThreadedAugmenter(programs.Endless(), programs.twice, num_processes) for _ in range(2)
        ]
        got = [first(each, 30) for each in both]
        if waits:
            until_data_workers_go_on(both[0])
        got.append(first(both[0], 10))
        for each in both:
            each._finish()
        return got

    monkeypatch.setenv("HETSTREAM_SEED", "7")
    expected = made(1, waits=False)
    assert compare(expected[0], expected[1]).differences  # no two draw alike
    assert not compare(made(3, waits=False), expected).differences
    with hooked(three.name, monkeypatch):
        assert not compare(made(3, waits=True), expected).differences
        monkeypatch.setenv("HETSTREAM_SEED", "8")
        assert compare(made(3, waits=True), expected).differences
    monkeypatch.delenv("HETSTREAM_SEED")
    assert next(theirs.NonDetMultiThreadedAugmenter(programs.Endless(), None, 2)) == "its own"


def test_a_resumed_run_draws_what_it_would_have_drawn(theirs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETSTREAM_SEED", "7")

    def begun(epoch: int) -> list[list[Any]]:
        monkeypatch.setattr(augmenters, "_numbers", itertools.count())
        both = theirs.nnUNetTrainer(theirs.NonDetMultiThreadedAugmenter, epoch).get_dataloaders()
        got = [first(each, 16) for each in both]
        for each in both:
            each._finish()
        return got

    (training, validation), (resumed_training, resumed_validation) = begun(0), begun(2)
    assert not compare(resumed_training[:6], training[10:]).differences
    assert not compare(resumed_validation[:12], validation[4:]).differences
    assert not augmenters._drawn_before


def test_a_state_is_given_where_the_loader_draws_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    info = torch.utils.data._utils.worker.WorkerInfo(id=1, num_workers=2, seed=0, dataset=None)
    monkeypatch.setattr(torch.utils.data._utils.worker, "_worker_info", info)

    def stream(loader: Any) -> augmenters.AugmentedStream:
        return augmenters.AugmentedStream(augmenters.Asked(loader, None, 2, 2, ends=False), 5, 0, None)

    one, other = stream(programs.Endless()), stream(programs.Endless())
    made, again = iter(one), iter(other)
    expected = [next(made) for _ in range(4)]
    other.load_state_dict(one.state_dict())
    assert not compare([next(again) for _ in range(3)], [next(made) for _ in range(3)]).differences
    assert compare(expected[0], expected[1]).differences
    counting = stream(programs.Counts())
    made = iter(counting)
    for _ in range(3):
        next(made)
    with pytest.raises(PipelineError, match="changes from batch to batch"):
        counting.state_dict()
    monkeypatch.setattr(augmenters, "_LARGEST_HELD_BYTES", 10)
    large = stream(programs.Endless())
    next(iter(large))
    with pytest.raises(PipelineError, match="is large"):
        large.state_dict()


@pytest.mark.parametrize("kind", ["NonDetMultiThreadedAugmenter", "MultiThreadedAugmenter"])
def test_what_raises_ends_the_augmenter_with_batchgenerators_error(
    kind: str, three: Any, theirs: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with hooked(three.name, monkeypatch):
        augmenter = getattr(theirs, kind)(programs.Breaks(), None, 2)
        with pytest.raises(RuntimeError, match="One or more background workers are no longer alive"):
            first(augmenter, 20)
        assert not augmenter.initialized
        assert not multiprocessing.active_children()  # though pytest holds the traceback
        assert "a case that cannot be read" in capfd.readouterr().err
    assert "_hetstream" not in vars(augmenter)


def test_an_endless_augmenter_whose_loader_ends_says_so(
    theirs: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HETSTREAM_SEED", "7")
    with pytest.raises(RuntimeError, match="no longer alive"):
        first(theirs.NonDetMultiThreadedAugmenter(programs.Ends([2, 2]), None, 2), 9)
    assert "has to be infinite" in capfd.readouterr().err


def test_the_programs_own_process_goes_on_unless_it_is_asked_to(
    three: Any, theirs: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def drawn(loader: Any, number: int = 12) -> list[Any]:
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(3)
        got = first(theirs.SingleThreadedAugmenter(loader, programs.twice), number)
        return [*got, random.random(), np.random.rand(), torch.rand(2)]

    expected = drawn(programs.Endless())
    with hooked(three.name, monkeypatch):
        travels = drawn(programs.Endless())
        assert not compare(drawn(programs.CannotTravel()), expected).differences
        monkeypatch.delenv("HETSTREAM_IN_PROCESS_LOADERS")
        assert not compare(drawn(programs.Endless()), expected).differences
        monkeypatch.setenv("HETSTREAM_SEED", "7")
        assert not compare(drawn(programs.Endless()), expected).differences
    assert any("HETSTREAM_SEED has no effect" in message for message in caplog.messages)
    assert compare(travels, expected).differences
    random.seed(3)
    np.random.seed(3)
    assert travels[-3:-1] == [random.random(), np.random.rand()]


def test_one_that_streams_ends_and_begins_anew(three: Any, theirs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class EndsAlone(programs.Ends):
        thread_id = 0

    with hooked(three.name, monkeypatch):
        augmenter = theirs.SingleThreadedAugmenter(EndsAlone([3]), None)
        augmenter.data_loader.was_initialized = False
        positions = []
        for _ in range(9):
            try:
                positions.append(next(augmenter)["position"])
            except StopIteration:
                positions.append("end")
        assert positions == [1, 2, 3, "end", 1, 2, 3, "end", 1]
