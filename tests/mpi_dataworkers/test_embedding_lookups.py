"""How long embeddings are looked up: what counts, in which steps, and that a program notices nothing."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._dynamo import eval_frame
from torch.nn.modules import module as torch_module
from torch.utils.checkpoint import checkpoint

from hetstream.mpi_dataworkers.loader import step_times
from hetstream.mpi_dataworkers.loader.step_times import EmbeddingTimer
from hetstream.mpi_dataworkers.wire.messages import EmbeddingLookups
from tests.mpi_dataworkers.test_optimizer_calls import Clock, Event

IDS = torch.tensor([0, 1])


class Table(torch.nn.Embedding):
    """A lookup takes a quarter of a second by the clock, and so does one in a table within it."""

    def __init__(self, clock: Clock, inner: torch.nn.Module | None = None) -> None:
        super().__init__(2, 2)
        self.clock, self.inner = clock, inner

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.clock.now_s += 0.25
        return super().forward(ids) if self.inner is None else self.inner(ids)


class Bags(torch.nn.EmbeddingBag):
    """Takes half a second."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(2, 2)
        self.clock = clock

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.clock.now_s += 0.5
        return super().forward(*args, **kwargs)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def timer(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Iterator[EmbeddingTimer]:
    monkeypatch.setattr(eval_frame, "cached_backends", {})  # other tests have compiled
    timer = EmbeddingTimer(lambda: 0.0, clock)
    yield timer
    timer.pause()


def timed(timer: EmbeddingTimer, clock: Clock, *steps: Callable[[], object]) -> EmbeddingLookups | None:
    """What is known after these steps, of which each may be timed; no hook stays."""
    for step in steps:
        clock.now_s += 10.0
        timer.step_ended()
        step()
    timer._next_s = float("inf")
    timer.step_ended()
    timer._next_s = -float("inf")
    assert not torch_module._has_any_global_hook()
    return timer.lookups()


@pytest.mark.shows("the parts of a step that a running job can tell are timed now and then")
def test_lookups_of_a_step_are_added_up_and_nothing_else_is(timer: EmbeddingTimer, clock: Clock) -> None:
    table, bags, other = Table(clock), Bags(clock), torch.nn.Linear(2, 2)

    def step() -> None:
        other(table(IDS) + table(IDS))
        bags(input=IDS[None])
        clock.now_s += 3.0

    assert timer.lookups() is None
    assert timed(timer, clock, step, step) == EmbeddingLookups(2, 2.0)


def test_an_outer_lookup_counts_and_so_does_none_without_gradients(timer: EmbeddingTimer, clock: Clock) -> None:
    table = Table(clock, Table(clock))

    def validated() -> None:
        table(IDS)
        with torch.no_grad():
            table(IDS)

    assert timed(timer, clock, validated, validated) == EmbeddingLookups(2, 1.0)


def test_one_step_a_second_is_timed_and_one_of_eight(timer: EmbeddingTimer, clock: Clock) -> None:
    drawn, table = iter(range(10**6)), Table(clock)
    timer._draw = lambda: next(drawn) % 16 / 16
    num_hooked = 0
    for _ in range(1600):
        timer.step_ended()
        num_hooked += bool(torch_module._has_any_global_hook())
        table(IDS)
        clock.now_s += 1.0
    assert 195 <= num_hooked <= 200
    for _ in range(1600):
        timer.step_ended()
        num_hooked += bool(torch_module._has_any_global_hook())
        clock.now_s += 0.01
    assert num_hooked <= 200 + 16
    timed(timer, clock)


def test_a_lookup_that_raises_spoils_its_step_and_no_other(timer: EmbeddingTimer, clock: Clock) -> None:
    table = Table(clock)

    def broken() -> None:
        table(IDS)
        with pytest.raises(IndexError):
            table(torch.tensor([7]))

    assert timed(timer, clock, lambda: table(IDS), broken, lambda: table(IDS)) == EmbeddingLookups(2, 0.5)

    def elsewhere() -> None:
        other = threading.Thread(target=lambda: table(IDS))
        other.start()
        other.join()

    assert timed(timer, clock, elsewhere, lambda: None) == EmbeddingLookups(4, 0.5), "a thread of its own is no step"


def test_a_program_without_embeddings_is_soon_left_alone(timer: EmbeddingTimer, clock: Clock) -> None:
    plain = torch.nn.Linear(2, 2)
    assert timed(timer, clock, *[lambda: plain(torch.ones(2))] * 16) is None
    timer.step_ended()
    assert not torch_module._has_any_global_hook()
    assert timed(timer, clock, lambda: Table(clock)(IDS)) is None


def test_a_compiled_program_is_not_looked_at_and_gets_no_warning(
    timer: EmbeddingTimer, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.optim.SGD(
        torch.nn.Linear(1, 1).parameters(), lr=0.1
    ).zero_grad()  # loads torch's compiler, and compiles nothing
    assert not step_times._is_compiled()
    compiled = torch.compile(Table(clock), backend="eager")
    assert step_times._is_compiled()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        timer.step_ended()
        compiled(IDS)
    assert not torch_module._has_any_global_hook()
    torch._dynamo.reset()
    monkeypatch.delattr(eval_frame, "cached_backends")
    assert step_times._is_compiled(), "what cannot be known counts as a yes"


def test_a_program_that_first_compiles_within_a_timed_step_gets_its_one_graph(
    timer: EmbeddingTimer, clock: Clock
) -> None:
    table = torch.nn.Embedding(2, 2)
    timer.step_ended()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using `torch.compile")
        assert torch.equal(torch.compile(table, backend="eager", fullgraph=True)(IDS), table(IDS))
    torch._dynamo.reset()
    timed(timer, clock)


def test_what_a_checkpoint_looks_up_again_is_a_part_of_the_gradients(timer: EmbeddingTimer, clock: Clock) -> None:
    table = Table(clock)

    def step() -> None:
        checkpoint(lambda ids: table(ids).exp().sum(), IDS, use_reentrant=False).backward()

    assert timed(timer, clock, step, step) == EmbeddingLookups(2, 0.5)


def test_a_method_of_the_programs_own_is_not_called(timer: EmbeddingTimer, clock: Clock) -> None:
    class Custom(Table):
        def parameters(self, rate: float) -> list[Any]:  # type: ignore[override]
            raise AssertionError(rate)

    assert timed(timer, clock, lambda: Custom(clock)(IDS)) == EmbeddingLookups(1, 0.25)


def test_between_two_passes_there_are_no_hooks_and_what_was_begun_does_not_count(
    timer: EmbeddingTimer, clock: Clock
) -> None:
    table = Table(clock)
    timer.step_ended()
    table(IDS)
    timer.pause()
    assert not torch_module._has_any_global_hook()
    assert timed(timer, clock, lambda: table(IDS)) == EmbeddingLookups(1, 0.25)


def test_a_model_that_is_copied_in_a_timed_step_has_nothing_of_it(timer: EmbeddingTimer, clock: Clock) -> None:
    table = torch.nn.Embedding(2, 2)
    timer.step_ended()
    assert torch_module._has_any_global_hook()
    assert not copy.deepcopy(table)._forward_hooks
    assert table.__dict__.keys() == torch.nn.Embedding(2, 2).__dict__.keys()
    timed(timer, clock)


def test_on_a_gpu_nothing_waits_and_no_step_is_timed_before_the_last_one_is_known(
    timer: EmbeddingTimer, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    capturing = False
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(Event, "num", 0)
    monkeypatch.setattr(Event, "num_passed", 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the parameters' device")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    table = torch.nn.Embedding(2, 2)
    parameter: Any = type("OnGpu", (), {"device": torch.device("cuda", 0)})()
    monkeypatch.setattr(torch.nn.Module, "parameters", lambda module: iter([parameter]))
    assert timed(timer, clock, lambda: (table(IDS), table(IDS)), lambda: table(IDS)) == EmbeddingLookups(0, 0.0)
    assert Event.num == 4, "the second step is not timed: the device has not come so far"
    Event.num_passed = Event.num
    capturing = True
    assert timed(timer, clock, lambda: table(IDS)) == EmbeddingLookups(0, 0.0)
    capturing = False
    assert timed(timer, clock, lambda: table(IDS)) == EmbeddingLookups(1, 2.0)
