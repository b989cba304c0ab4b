"""Whatever a forward reads, and however a program changes its batch: the losses are those of the plain program."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import io
import math
import random
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import sample_models as models
import state_programs
import torch
import unguarded_states
from state_programs import CONSTANTS, STATES, WAYS, Reads
from torch.utils.data import DataLoader, default_collate
from unguarded_states import COMPARED, REFUSED

from hetstream.mpi_dataworkers.ops.code_globals import is_own
from hetstream.mpi_dataworkers.partitioner.partition import Partition, partition

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
LOADER_OPTIONS: dict[str, Any] = {"batch_size": 8}
STEPS, CHANGE = 16, 9
Before = Callable[[int, Any, torch.Tensor], Any]


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    restore = state_programs.put_back()
    yield
    unguarded_states.put_back()
    restore()


def trained(loader: Any, model: Any, before: Before) -> list[str]:
    """The losses of a plain loop; `before` is what the program does in front of each forward."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for number, (values, labels) in enumerate(loader):
        said = before(number, model, values)
        optimizer.zero_grad()
        outputs = model(values)
        outputs = getattr(outputs, "logits", outputs)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(outputs.float(), labels)
        loss.backward()
        optimizer.step()
        losses.append(f"{float(loss.detach()).hex()} {said}")
    return losses


def both(loaders: Callable[..., Any], make: Callable[[], Any], before: Before) -> Partition:
    """Train as it is and partitioned, which must give the same."""
    dataset, restore = models.Rows(8 * STEPS), state_programs.put_back()
    torch.manual_seed(0)
    expected = trained(DataLoader(dataset, 8), make(), before)
    unguarded_states.put_back()
    restore()
    torch.manual_seed(0)
    model, loader = make(), loaders(dataset)
    example = default_collate([dataset[number] for number in range(8)])
    done = partition(model, example, loader=loader, offload="all")
    assert trained(loader, model, before) == expected, (done.reason, done.counts)
    if done.is_active:
        done.remove("the test ends")
    return done


def changing(change: Any) -> Before:
    def before(number: int, model: Any, _: torch.Tensor) -> None:
        if number == CHANGE:
            change(model)

    return before


@pytest.mark.shows("a forward that decides by the data, reads files or the time, or has side effects, stays right")
@pytest.mark.parametrize("kind", [*STATES, *CONSTANTS])
def test_what_a_forward_reads_may_change(kind: str, loaders: Callable[..., Any]) -> None:
    make, read, change = (STATES | CONSTANTS)[kind]
    done = both(loaders, lambda: Reads(make, read), changing(change))
    refused = "keeps results", "Python's random numbers"
    assert done.counts.checked >= 1 or any(text in done.reason for text in refused), done.counts


@pytest.mark.parametrize("kind", COMPARED)
def test_what_has_no_guard_is_compared(kind: str, loaders: Callable[..., Any]) -> None:
    make, read, change = COMPARED[kind]
    done = both(loaders, lambda: Reads(make, read), changing(change))
    assert done.counts.partitioned == CHANGE - 3, done.reason
    assert done.counts.original >= 1


@pytest.mark.parametrize("kind", REFUSED)
def test_what_has_no_guard_and_cannot_be_compared_is_refused(kind: str, loaders: Callable[..., Any]) -> None:
    reason, (make, read, change) = REFUSED[kind]
    done = both(loaders, lambda: Reads(make, read), changing(change))
    assert reason in done.reason
    assert done.counts.checked == done.counts.partitioned == 0


class Scaled(models.Clean):
    """Takes a number, or a tuple of one, whose sign it reads."""

    def forward(self, values: torch.Tensor, scale: Any) -> torch.Tensor:
        sign = math.copysign(1.0, scale[0] if isinstance(scale, tuple) else scale)
        return super().forward(values * (2 + sign))


@pytest.mark.parametrize("scales", [(0.0, -0.0), ((0.0,), (-0.0,))], ids=["number", "in a tuple"])
@pytest.mark.parametrize("keyword", [False, True])
def test_a_negative_zero_among_the_arguments_is_compared(
    scales: tuple[Any, Any], keyword: bool, loaders: Callable[..., Any]
) -> None:
    def call(model: Any, values: torch.Tensor, number: int) -> torch.Tensor:
        scale = scales[number >= CHANGE]
        made: torch.Tensor = model(values, scale=scale) if keyword else model(values, scale)
        return made

    dataset, model = models.Rows(8 * STEPS), Scaled()
    loader = loaders(dataset)
    example = default_collate([dataset[number] for number in range(8)])
    arguments: Any = lambda batch: (batch[0], scales[0])  # noqa: E731
    done = partition(model, example, loader=loader, offload="all", inputs=arguments)
    for number, (values, _) in enumerate(loader):
        expected = Scaled.forward(model, values, scales[number >= CHANGE])
        assert torch.equal(call(model, values, number), expected), (number, done.reason, done.counts)
    assert done.counts.original == STEPS - CHANGE, (done.reason, done.counts)


def test_only_torchs_own_loader_draws_from_torchs_generator(loaders: Callable[..., Any]) -> None:
    for loader, draws in ((DataLoader(models.Rows(16), 8), True), (loaders(models.Rows(16)), False)):
        before = torch.get_rng_state()
        next(iter(loader))
        assert torch.equal(before, torch.get_rng_state()) is not draws


class Lazy(ModuleType):
    """A module that is imported when an attribute of it is asked for, as SpeechBrain has them."""

    def __getattr__(self, name: str) -> Any:
        raise ImportError(f"{self.__name__} is not installed")


def test_a_module_that_is_imported_later_is_left_alone(
    loaders: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "speech_lazy", Lazy("speech_lazy"))
    assert not is_own(sys.modules["speech_lazy"])
    assert both(loaders, models.Clean, lambda *_: None).counts.partitioned == STEPS - 3


class HasNoGradient(models.Clean):
    @torch.no_grad()
    def also(self, values: torch.Tensor) -> torch.Tensor:
        return values * 2


def test_a_method_without_gradients_is_no_part_that_is_compiled(loaders: Callable[..., Any]) -> None:
    assert both(loaders, HasNoGradient, lambda *_: None).counts.partitioned == STEPS - 3


@pytest.mark.shows("a leaf is always sent, and moved values are taken only for its very bytes")
@pytest.mark.shows("arguments and leaves that are changed in place stay right")
@pytest.mark.parametrize("way", WAYS)
def test_a_batch_may_be_changed_in_place(way: str, loaders: Callable[..., Any]) -> None:
    def before(number: int, _: Any, values: torch.Tensor) -> None:
        if number >= CHANGE:
            WAYS[way](values)

    done = both(loaders, models.Clean, before)
    assert (done.counts.checked, done.counts.partitioned) == (3, CHANGE - 3)
    assert done.counts.original == STEPS - CHANGE


def scripted(model: Any) -> Any:
    return torch.jit.script(model)(torch.ones(2, 4)).sum().item().hex()


def exported(model: Any) -> Any:
    return torch.export.export(model, (torch.ones(2, 4),)).module()(torch.ones(2, 4)).sum().item().hex()


def in_eval_mode(model: Any) -> Any:
    model.eval()
    found = scripted(model), model(torch.ones(2, 4)).sum().item().hex()
    model.train()
    return found


def saved_whole(model: Any) -> Any:
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    found = torch.load(stream, weights_only=False)
    return sorted(vars(found)), found(torch.ones(2, 4)).sum().item().hex()


LOOKS: dict[str, Callable[[Any], Any]] = {
    "jit.script": scripted,
    "jit.trace": lambda model: torch.jit.trace(model, torch.ones(2, 4))(torch.ones(3, 4)).sum().item().hex(),
    "export": exported,
    "fx": lambda model: torch.fx.symbolic_trace(model)(torch.ones(2, 4)).sum().item().hex(),
    "signature": lambda model: str(inspect.signature(model.forward)),
    "eval mode": in_eval_mode,
    "copy": lambda model: copy.deepcopy(model)(torch.ones(2, 4)).sum().item().hex(),
    "saved whole": saved_whole,
}


class Plain(torch.nn.Module):
    """As `models.Clean`, of what torch.jit.script takes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.layer(torch.nan_to_num(values).clamp(0.0, 50.0).log1p() - 0.5)


@pytest.mark.parametrize("look", LOOKS)
def test_a_program_may_look_at_its_model(look: str, loaders: Callable[..., Any]) -> None:
    def before(number: int, model: Any, _: torch.Tensor) -> Any:
        return LOOKS[look](model) if number == CHANGE else None

    done = both(loaders, Plain, before)
    assert done.counts.partitioned == STEPS - 3


READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "type": lambda values: type(values).__name__,
    "inference mode": lambda values: _in_inference_mode(values),
    "to_dlpack": lambda values: float(torch.from_dlpack(torch.utils.dlpack.to_dlpack(values)).nan_to_num().sum()),
    "parameter": lambda values: float(torch.nn.Parameter(values).nan_to_num().sum().detach()),
    "sparse": lambda values: float(values.nan_to_num().to_sparse().to_dense().sum()),
}


def _in_inference_mode(values: torch.Tensor) -> Any:
    with torch.inference_mode():
        return float(values.nan_to_num().sum())


@pytest.mark.parametrize("way", READS)
def test_a_program_may_read_its_batch(way: str, loaders: Callable[..., Any]) -> None:
    done = both(loaders, models.Clean, lambda _, model, values: READS[way](values))
    assert done.counts.partitioned == STEPS - 3


class Drawn(models.Rows):
    """Rows with noise that nobody can draw again."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        values, label = super().__getitem__(index)
        return values + torch.from_numpy(np.random.default_rng().random(4, dtype=np.float32)), label


def transposed(rows: Any) -> Any:
    values, labels = default_collate(rows)
    return values.t().contiguous().t(), labels


@pytest.mark.shows("a leaf is always sent, and moved values are taken only for its very bytes")
def test_what_a_program_reads_is_what_its_forward_had(loaders: Callable[..., Any], three: Any) -> None:
    dataset, model = Drawn(8 * STEPS), models.Clean()
    loader = loaders(dataset, service=three.name, collate_fn=transposed)
    done = partition(model, transposed([dataset[number] for number in range(8)]), loader=loader, offload="all")
    for values, _ in loader:
        logits = model(values)
        assert values.stride() == (1, 8)
        assert torch.equal(models.Clean.forward(model, values), logits)
    assert (done.counts.checked, done.counts.partitioned, done.counts.original) == (3, STEPS - 3, 0), done.reason


def test_a_program_may_ask_for_gradients_of_its_batch_in_mid_run(loaders: Callable[..., Any]) -> None:
    def before(number: int, model: Any, values: torch.Tensor) -> Any:
        if number < CHANGE:
            return None
        values.nan_to_num_().requires_grad_()
        (gradient,) = torch.autograd.grad(model(values).sum(), values)
        return float(gradient.sum()).hex()

    both(loaders, models.Clean, before)


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    clean: torch.Tensor


class GivesAnObject(models.Clean):
    def forward(self, values: torch.Tensor) -> Any:
        clean = torch.nan_to_num(values).clamp(0, 50).log1p() - self.mean
        return Output(self.layer(clean), clean)


def test_a_forward_may_return_an_object(loaders: Callable[..., Any]) -> None:
    done = both(loaders, GivesAnObject, lambda *_: None)
    assert done.counts.partitioned == STEPS - 3


def test_a_forward_may_catch_what_its_operators_raise(loaders: Callable[..., Any]) -> None:
    class Catches(models.Clean):
        def also(self, values: torch.Tensor) -> torch.Tensor:
            values = (values + 1).mul_(0.5)  # its own, which is no more where it begins anew
            try:
                return values * torch.ones(2)[self.row]
            except IndexError:
                return values * 3

    def make() -> Any:
        model = Catches()
        model.register_buffer("row", torch.tensor([1]))
        return model

    def before(number: int, model: Any, _: torch.Tensor) -> None:
        if number == CHANGE:
            model.row.fill_(7)

    assert both(loaders, make, before).counts.checked == 3
