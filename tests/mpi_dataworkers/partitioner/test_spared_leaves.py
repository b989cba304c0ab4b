"""Leaves of a batch that are not sent, because nothing but moved operators reads them: the program cannot tell."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import sample_models as models
import torch
from torch.utils.data import default_collate

from hetstream.mpi_dataworkers.partitioner.partition import Partition, partition
from hetstream.mpi_dataworkers.partitioner.unsent import UnsentLeaf, unsent

LOADER_OPTIONS: dict[str, Any] = {}
VALUES = torch.arange(12.0).reshape(3, 4)


def train(loader: Any, between: Callable[[int, Any], Any] | None, done: Callable[[Any], Any]) -> list[str]:
    torch.manual_seed(0)
    model = models.Clean()
    done(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for number, (values, labels) in enumerate(loader):
        read = between(number, values) if between is not None else 0.0
        optimizer.zero_grad()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(values), labels) + read
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()).hex())
    return losses


def both(
    loaders: Callable[..., Any], service: str | None, between: Callable[[int, Any], Any] | None = None, **options: Any
) -> Partition:
    """Train as it is written and with a partition, which must give the same; the partition."""
    dataset = models.Rows(160)
    expected = train(loaders(dataset, batch_size=8, seed=5, **options), between, lambda _: None)
    loader = loaders(dataset, batch_size=8, seed=5, service=service, **options)
    example = default_collate([dataset[index] for index in range(8)])
    made: list[Partition] = []
    found = train(loader, between, lambda model: made.append(partition(model, example, loader=loader, offload="all")))
    assert found == expected
    assert made[0].is_active
    return made[0]


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_leaf_that_nothing_else_reads_is_not_sent(loaders: Callable[..., Any], three: Any, shuffle: bool) -> None:
    seen: list[type] = []

    def between(_: int, values: Any) -> float:
        seen.append(type(values))
        assert (values.shape, values.dtype, values.device.type) == ((8, 4), torch.float32, "cpu")
        assert len(values) == values.size(0) == 8
        return 0.0

    done = both(loaders, three.name, between, shuffle=shuffle)
    assert seen[-1] is UnsentLeaf
    assert (done.counts.checked, done.counts.partitioned, done.counts.original) == (3, 17, 0)
    assert done.counts.remade == 0
    assert done.decision is not None
    assert done.decision.not_sent
    assert done.decision.bytes_added == 0, "as many bytes come as go"


def test_a_leaf_that_somebody_reads_later_is_made_once_more_and_then_sent_again(
    loaders: Callable[..., Any], three: Any, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[type] = []

    def between(number: int, values: Any) -> float:
        seen.append(type(values))
        return float(values.nan_to_num().sum()) if number >= 8 else 0.0

    done = both(loaders, three.name, between)
    assert done.counts.remade == 4, "three times, and in the batch that was there already"
    assert (done.counts.partitioned, done.counts.original) == (17, 0)
    assert UnsentLeaf in seen
    assert seen[-1] is not UnsentLeaf
    assert "leaf 0 of each batch is sent again: something reads it" in caplog.text


def test_a_leaf_that_the_program_reads_from_the_beginning_is_always_sent(
    loaders: Callable[..., Any], three: Any
) -> None:
    done = both(loaders, three.name, lambda _, values: float(values.nan_to_num().mean()))
    assert done.counts.remade == 0
    assert done.decision is not None
    assert not done.decision.not_sent


def test_a_leaf_that_was_not_sent_may_be_changed_in_place(loaders: Callable[..., Any], three: Any) -> None:
    def between(number: int, values: Any) -> float:
        if number in (8, 10):
            values.mul_(2)
        return 0.0

    done = both(loaders, three.name, between)
    assert (done.counts.original, done.counts.remade) == (2, 2)


def transposed(rows: Any) -> Any:
    values, labels = default_collate(rows)
    return values.t().contiguous().t(), labels


def test_a_leaf_that_lies_otherwise_in_memory_is_sent(loaders: Callable[..., Any], three: Any) -> None:
    strides: list[tuple[int, ...]] = []

    def between(_: int, values: Any) -> float:
        strides.append(values.stride())
        values.contiguous().view(-1)
        return 0.0

    done = both(loaders, three.name, between, collate_fn=transposed)
    assert {*strides} == {(1, 8)}
    assert (done.counts.partitioned, done.counts.original, done.counts.remade) == (17, 0, 0)


def test_in_process_everything_is_there(loaders: Callable[..., Any]) -> None:
    done = both(loaders, None)
    assert done.counts.partitioned == 17
    assert done.decision is not None
    assert not done.decision.not_sent


def leaf_of(values: torch.Tensor) -> UnsentLeaf:
    made = iter([values.clone()])
    return unsent(tuple(values.shape), values.dtype, values.device, lambda: next(made), (None, 0))


READS: dict[str, Callable[[Any], Any]] = {
    "an operator": lambda leaf: leaf + 1,
    "a method": lambda leaf: leaf.sum(),
    "a view": lambda leaf: leaf[1],
    "a list of tensors": lambda leaf: torch.cat([leaf, leaf]),
    "numpy": lambda leaf: torch.from_numpy(leaf.numpy()),
    "a list": lambda leaf: torch.tensor(leaf.tolist()),
    "iteration": lambda leaf: torch.stack(list(leaf)),
    "pickle": lambda leaf: pickle.loads(pickle.dumps(leaf)),
    "a deep copy": copy.deepcopy,
    "a transposed view": lambda leaf: leaf.T,
    "memory": lambda leaf: leaf.data,
    "text": lambda leaf: torch.tensor([len(repr(leaf)), len(f"{leaf}")]),
    "moved and read": lambda leaf: leaf.to("cpu").detach().clone() * 2,
    "another type": lambda leaf: leaf.to(torch.float64),
    "beneath Python": lambda leaf: torch.ops.aten.add(leaf, 1),
    "a gradient": lambda leaf: torch.autograd.grad(leaf.requires_grad_().square().sum(), leaf.to("cpu"))[0],
}


@pytest.mark.parametrize("how", READS)
def test_whoever_reads_such_a_leaf_gets_the_tensor(how: str) -> None:
    assert torch.equal(READS[how](leaf_of(VALUES)), READS[how](VALUES.clone()))


def test_what_reaches_it_beneath_python_gets_the_tensor() -> None:
    leaf = leaf_of(VALUES)
    with torch._C.DisableTorchFunctionSubclass():
        assert torch.equal(torch.neg(leaf), -VALUES)
