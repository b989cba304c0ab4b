"""Programs that use torch.compile themselves: for a function before the forward, a model, or a part of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sample_models as models
import torch
from hooking import hooked
from torch.utils.data import DataLoader, default_collate

from hetstream.mpi_dataworkers.partitioner.partition import Partition, partition
from hetstream.mpi_dataworkers.partitioner.unmodified import _calls

LOADER_OPTIONS: dict[str, Any] = {}
WEIGHTS = torch.linspace(0.0, 1.0, 12).reshape(4, 3)


@pytest.fixture(autouse=True)
def _own_compiler() -> Iterator[None]:
    """What is compiled here is forgotten."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def train(loader: Any, model: torch.nn.Module, read: Callable[[torch.Tensor], torch.Tensor] | None = None) -> list[str]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for values, labels in loader:
        optimizer.zero_grad()
        weight = read(values).nan_to_num().mean() if read is not None else 1.0
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(values), labels) * weight
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()).hex())
    return losses


def losses_of(
    loaders: Callable[..., Any],
    make: Callable[[], torch.nn.Module],
    is_partitioned: bool,
    read: Callable[[torch.Tensor], torch.Tensor] | None = None,
    **options: Any,
) -> tuple[list[str], Partition | None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    dataset = models.Rows(80)
    model, loader = make(), loaders(dataset, batch_size=8, **options)
    example = default_collate([dataset[number] for number in range(8)])
    done = partition(model, example, loader=loader, offload="all") if is_partitioned else None
    return train(loader, model, read), done


@pytest.mark.parametrize("is_full_graph", [False, True])
def test_a_compiled_function_reads_a_leaf_as_it_reads_a_tensor(
    is_full_graph: bool, loaders: Callable[..., Any], three: Any
) -> None:
    read = torch.compile(lambda values: values.nan_to_num() @ WEIGHTS, backend="aot_eager", fullgraph=is_full_graph)
    expected, _ = losses_of(loaders, models.Clean, is_partitioned=False, read=read)
    found, done = losses_of(loaders, models.Clean, is_partitioned=True, read=read, service=three.name)
    assert found == expected
    assert done is not None
    assert (done.counts.checked, done.counts.partitioned, done.counts.original) == (3, 7, 0)


def whole() -> Any:
    return torch.compile(models.Clean(), backend="eager")


def in_place() -> torch.nn.Module:
    model = models.Clean()
    model.compile(backend="eager")
    return model


def part() -> torch.nn.Module:
    model = models.Clean()
    model.layer = torch.compile(model.layer, backend="eager")  # type: ignore[assignment]
    return model


def part_in_place() -> torch.nn.Module:
    model = models.Clean()
    model.layer.compile(backend="eager")
    return model


MAKES = [whole, in_place, part, part_in_place]
STAYS = "torch.compile compiles the model, or a part of it"


@pytest.mark.parametrize("make", MAKES, ids=lambda make: make.__name__)
def test_a_compiled_model_has_its_losses(
    make: Callable[[], torch.nn.Module], loaders: Callable[..., Any], three: Any
) -> None:
    expected, _ = losses_of(loaders, make, is_partitioned=False)
    found, done = losses_of(loaders, make, is_partitioned=True, service=three.name)
    assert found == expected
    assert done is not None
    assert STAYS in done.reason


def test_a_function_of_the_forward_that_torch_compile_compiles_keeps_it_whole(loaders: Callable[..., Any]) -> None:
    compiled = torch.compile(lambda values: values * 2, backend="eager")

    class Calls(models.Clean):
        def also(self, values: torch.Tensor) -> torch.Tensor:
            doubled: torch.Tensor = compiled(values)
            return doubled

    found, done = losses_of(loaders, Calls, is_partitioned=True)
    assert found == losses_of(loaders, Calls, is_partitioned=False)[0]
    assert done is not None
    assert "a part of the model" in done.reason


@pytest.mark.shows("partitioning works with evaluation, AMP, DDP, `torch.compile`, two models and two loaders")
@pytest.mark.parametrize("make", MAKES, ids=lambda make: make.__name__)
def test_a_compiled_model_of_a_program_that_knows_nothing_has_its_losses(
    make: Callable[[], torch.nn.Module], three: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    expected = train(DataLoader(models.Rows(80), 8), make())
    torch._dynamo.reset()
    torch.manual_seed(0)
    monkeypatch.setenv("HETSTREAM_OFFLOAD", "all")
    with hooked(three.name, monkeypatch):
        assert train(DataLoader(models.Rows(80), 8), make()) == expected
    assert not _calls.followers
    assert STAYS in caplog.text
    assert "runs as it is written from now on" not in caplog.text
