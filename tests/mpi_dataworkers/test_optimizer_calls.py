"""How long optimizers take: which calls count, which are timed, and that the program notices nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dynamo import eval_frame
from torch.nn.modules import module as torch_module
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hetstream import DataLoader
from hetstream.mpi_dataworkers.dispatcher.client import StatusClient, running_service
from hetstream.mpi_dataworkers.loader import step_times
from hetstream.mpi_dataworkers.loader.step_times import OptimizerTimer
from hetstream.mpi_dataworkers.wire.messages import OptimizerCalls


class Clock:
    """Goes on only when it is told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Slow(torch.optim.SGD):
    """Takes a quarter of a second for an update by the clock."""

    def __init__(self, clock: Clock) -> None:
        super().__init__([torch.nn.Parameter(torch.ones(2))], lr=0.5)
        self.clock = clock

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        value = super().step(closure)
        self.clock.now_s += 0.25
        return value


@contextmanager
def hooked(timer: OptimizerTimer) -> Iterator[OptimizerTimer]:
    hooks = register_optimizer_step_pre_hook(timer.before), register_optimizer_step_post_hook(timer.after)
    yield timer
    for hook in hooks:
        hook.remove()


class Plain(torch.optim.Optimizer):
    """Knows nothing of other optimizers' steps: its own takes a quarter of a second by the clock."""

    def __init__(self, clock: Clock) -> None:
        super().__init__([torch.nn.Parameter(torch.ones(2))], {})
        self.clock = clock
        self.num_closures = 1

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        value = None
        for _ in range(self.num_closures):
            value = None if closure is None else closure()
        self.clock.now_s += 0.25
        return value


def always() -> float:
    return 0.0


def test_calls_are_counted_and_after_the_first_ones_timed() -> None:
    clock = Clock()
    with hooked(OptimizerTimer(always, clock)) as timer:
        optimizer = Plain(clock)
        for _ in range(10):
            optimizer.step()
        assert (timer.calls().num_calls, timer.calls().num_timed, timer.calls().timed_s) == (10, 7, 1.75)


def test_one_in_eight_is_timed_whatever_the_period_of_the_program() -> None:
    clock, drawn = Clock(), iter(range(10**6))
    with hooked(OptimizerTimer(lambda: next(drawn) % 16 / 16, clock)) as timer:
        optimizer = Plain(clock)
        for _ in range(3 + 160):
            optimizer.step()
        assert timer.calls().num_timed == 20
        before = torch.random.get_rng_state()
        step_times.watch()
        optimizer.step()
        assert torch.equal(torch.random.get_rng_state(), before)


def test_what_a_closure_takes_is_no_update() -> None:
    clock = Clock()

    def closure() -> float:
        clock.now_s += 3.0
        return 0.5

    with hooked(OptimizerTimer(always, clock)) as timer:
        optimizer = Plain(clock)
        assert [optimizer.step(closure) for _ in range(4)] == [0.5] * 4
        assert [optimizer.step(closure=closure) for _ in range(4)] == [0.5] * 4
        assert (timer.calls().num_timed, timer.calls().timed_s) == (5, 1.25)
        # Where an optimizer calls it several times, what lies between is not known.
        optimizer.num_closures = 2
        assert optimizer.step(closure) == 0.5
        assert (timer.calls().num_calls, timer.calls().num_timed) == (9, 5)


def test_of_optimizers_within_optimizers_the_innermost_counts() -> None:
    clock = Clock()

    class Around(Plain):
        def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
            self.clock.now_s += 5.0
            for inner in (one, other):
                inner.step()
            self.clock.now_s += 5.0

    with hooked(OptimizerTimer(always, clock)) as timer:
        one, other = Plain(clock), Slow(clock)
        for _ in range(4):
            Around(clock).step()
        calls = timer.calls()
        assert (calls.num_calls, calls.num_timed) == (8, 5)


def test_a_step_that_raises_and_one_of_another_thread_spoil_no_other() -> None:
    clock = Clock()

    class Broken(Plain):
        def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
            raise ArithmeticError("no")

    with hooked(OptimizerTimer(always, clock)) as timer:
        optimizer = Plain(clock)
        for _ in range(3):
            optimizer.step()
        with pytest.raises(ArithmeticError):
            Broken(clock).step()

        def elsewhere() -> None:
            other = threading.Thread(target=Plain(clock).step)
            other.start()
            other.join()

        optimizer.step(elsewhere)  # the other one's call has begun since, and ended
        optimizer.step()
        assert (timer.calls().num_timed, timer.calls().timed_s) == (2, 0.5)


class Event:
    """A CUDA event that has passed when the test says so; a second after the one before it."""

    num = 0
    num_passed = 0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        Event.num += 1
        self.number = Event.num

    def record(self, stream: object) -> None:
        assert stream == "the parameters' device"

    def query(self) -> bool:
        return self.number <= Event.num_passed

    def elapsed_time(self, later: Event) -> float:
        assert later.query(), "it would wait"
        return 1e3 * (later.number - self.number)


def test_on_a_gpu_events_are_read_when_they_have_passed_and_nothing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    capturing = False
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(Event, "num", 0)
    monkeypatch.setattr(Event, "num_passed", 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the parameters' device" if device.index else "")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    parameter = SimpleNamespace(device=torch.device("cuda", 1))
    optimizer: Any = SimpleNamespace(param_groups=[{"params": [parameter]}])
    timer = OptimizerTimer(always)

    def step() -> None:
        assert timer.before(optimizer, (optimizer,), {}) is None
        timer.after(optimizer, (optimizer,), {})

    for _ in range(5):
        step()
    assert (Event.num, timer.calls().num_calls, timer.calls().num_timed) == (4, 5, 0)
    Event.num_passed = 3
    step()
    assert (timer.calls().num_timed, timer.calls().timed_s) == (1, 1.0), "of the second pair one has not passed"
    capturing, Event.num_passed = True, Event.num
    step()
    assert (Event.num, timer.calls().num_timed) == (6, 1), "a graph that is captured knows no such events"
    capturing = False
    step()
    assert (timer.calls().num_timed, timer.calls().timed_s) == (3, 3.0)
    # A device that is far behind, or hangs, gets no more of them.
    for _ in range(40):
        step()
    assert Event.num == 2 * (3 + 16)


def compiled_steps() -> tuple[int, list[float]]:
    """How many graphs two compiled steps are made of, and what they make."""
    torch._dynamo.reset()
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    step = torch.compile(optimizer.step, backend=backend)
    for _ in range(2):
        parameter.grad = torch.ones(2)
        step()
    torch._dynamo.reset()
    return len(graphs), parameter.tolist()


# torch's own import of its compiler warns.
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.slow
def test_a_compiled_step_compiles_as_before() -> None:
    before = compiled_steps()
    assert before[1] == [0.0, 0.0]
    with hooked(OptimizerTimer(always)):
        assert compiled_steps() == before


def was_told(calls: OptimizerCalls | None) -> bool:
    return calls is not None and calls.embeddings is not None


def test_the_dispatcher_is_told(three: Any, wait_until: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    data = torch.utils.data.TensorDataset(torch.arange(64.0))
    model, table = torch.nn.Linear(1, 1), torch.nn.Embedding(64, 1)
    optimizer = torch.optim.SGD([*model.parameters(), *table.parameters()], lr=0.1)
    with (
        DataLoader(data, batch_size=4, service=three.name) as loader,
        StatusClient(running_service(three.address_file)) as client,
    ):
        for step, (batch,) in enumerate(loader):
            if step == 4:
                # Else it is drawn, once a second, and not where other tests have compiled.
                monkeypatch.setattr(eval_frame, "cached_backends", {})
                monkeypatch.setattr(step_times._timer._embeddings, "_draw", lambda: 0.0)
                monkeypatch.setattr(step_times._timer._embeddings, "_is_over", False)
                monkeypatch.setattr(step_times._timer._embeddings, "_next_s", 0.0)
            (model(batch[:, None]) + table(batch.long())).sum().backward()
            optimizer.step()
            if step == 8:
                wait_until(lambda: was_told(client.fetch().loaders[0].optimizer), what="the optimizer's calls")
        assert not torch_module._has_any_global_hook(), "the pass has ended"
        told = client.fetch().loaders[0].optimizer
        now = step_times.calls()
        assert told is not None
        assert now is not None
        assert 0 < told.num_calls <= now.num_calls
        assert told.embeddings is not None
