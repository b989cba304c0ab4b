"""Tensors of a batch that overlap in memory still do so in the trainer, as they do behind torch's worker processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetstream import DataLoader
from hetstream.mpi_dataworkers.errors import ProtocolError
from hetstream.mpi_dataworkers.ops import tree
from hetstream.mpi_dataworkers.ops.tree import flatten, unflatten
from hetstream.mpi_dataworkers.wire.codec import fuse, size_of, split


def travel(batch: Any) -> Any:
    spec, buffers = flatten(batch)
    frames, places = fuse(buffers)
    return unflatten(spec, split([bytearray(frame) for frame in frames], places))


def sent_bytes(batch: Any) -> int:
    return sum(map(size_of, flatten(batch)[1]))


def twice(size: int) -> list[torch.Tensor]:
    table, other = torch.arange(float(size)), torch.ones(3)
    return [table, other, table]


def views(size: int) -> dict[str, torch.Tensor]:
    table = torch.arange(float(size * 4)).reshape(size, 4)
    return {
        "all": table,
        "column": table[:, 1],
        "rows": table[2:],
        "flat": table.view(-1),
        "bytes": table.view(torch.uint8),
    }


def many(size: int) -> list[torch.Tensor]:
    table = torch.arange(size * 12, dtype=torch.int32).reshape(12, size)
    return [*(row.clone() for row in table), *table, table.T]


def channels_last(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    images = torch.arange(24.0 * size).reshape(2, 3, 4, size).to(memory_format=torch.channels_last)
    return images, images[1]


MAKERS = [twice, views, many, channels_last]


def many_alike() -> list[torch.Tensor]:
    return [torch.full((3, 2), float(number)) for number in range(12)]


def many_ragged() -> list[torch.Tensor]:
    return [torch.full((2, number + 1), float(number)) for number in range(12)]


def two_small() -> list[torch.Tensor]:
    return [torch.ones(2, 3), torch.ones(2, 3)]


def two_large() -> list[torch.Tensor]:
    return [torch.ones(300, 300), torch.ones(300, 300)]


def two_that_numpy_lacks() -> list[torch.Tensor]:
    return [torch.ones(2, 3, dtype=torch.bfloat16), torch.ones(2, 3, dtype=torch.bfloat16)]


@pytest.mark.parametrize("make", [many_alike, many_ragged, two_small, two_large, two_that_numpy_lacks])
def test_for_autograd_each_tensor_is_one_of_its_own(make: Callable[[], list[torch.Tensor]]) -> None:
    first, *others = travel(make())
    weight = torch.ones_like(first, requires_grad=True)
    loss = (first * weight).sum()
    for other in others:
        other.mul_(2)  # in place, between forward and backward
    loss.backward()  # type: ignore[no-untyped-call]
    assert torch.equal(weight.grad, make()[0])
    assert [tensor.detach_() is tensor for tensor in (first, *others)] == [True] * (1 + len(others))


def everything_changed(batch: Any) -> list[torch.Tensor]:
    """Add to each tensor in turn: with common memory, the others change, too."""
    tensors = list(batch.values()) if isinstance(batch, dict) else list(batch)
    for tensor in tensors:
        tensor.add_(1)
    return tensors


@pytest.mark.parametrize("size", [5, 40_000])
@pytest.mark.parametrize("make", MAKERS)
def test_what_is_written_to_one_is_seen_in_the_others(make: Callable[[int], Any], size: int) -> None:
    came = travel(make(size))
    assert type(came) is type(make(size))
    values = list(came.values()) if isinstance(came, dict) else list(came)
    wanted = make(size)
    for got, want in zip(values, wanted.values() if isinstance(wanted, dict) else wanted, strict=True):
        assert torch.equal(got, want)
        assert (got.dtype, got.shape, got.stride()) == (want.dtype, want.shape, want.stride())
    for got, want in zip(everything_changed(came), everything_changed(make(size)), strict=True):
        assert torch.equal(got, want)


def test_the_same_tensor_is_the_same_object_and_comes_once() -> None:
    first, _, last = travel(twice(50_000))
    assert first is last
    assert sent_bytes(twice(50_000)) == 50_003 * 4


class Shared(torch.utils.data.Dataset[list[torch.Tensor]]):
    """Each sample is a whole batch of tensors with common memory."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> list[torch.Tensor]:
        return many(index + 3)


@pytest.mark.shows("batches arrive as from torch's own worker process: types, strides, sharing, gradients")
def test_it_is_so_behind_torch_s_worker_processes_and_behind_data_workers(three: Any) -> None:
    of_torch = torch.utils.data.DataLoader(Shared(), batch_size=None, num_workers=1)
    wanted = [everything_changed(batch) for batch in of_torch]
    with DataLoader(Shared(), batch_size=None, service=three.name) as loader:
        found = [everything_changed(batch) for batch in loader]
    for got, want in zip(found, wanted, strict=True):
        assert all(map(torch.equal, got, want))


def test_what_only_looks_common_stays_apart() -> None:
    table = torch.zeros(1000, 1000)
    columns = [table[:, 0], table[:, 1]]
    assert sent_bytes(columns) == 2 * 1000 * 4, "the table itself does not travel"
    assert sent_bytes([*table[:2].split(1), torch.empty(0), table[:0]]) <= 2 * 1000 * 4 + 64, "and what aligns it"
    left, right = travel([torch.arange(6.0)[:3], torch.arange(6.0)[3:]])
    assert left.tolist() + right.tolist() == list(range(6))
    numbers = np.arange(10)
    whole, part = travel([torch.from_numpy(numbers[:6]), torch.from_numpy(numbers[4:])])
    assert whole.tolist() + part.tolist() == [0, 1, 2, 3, 4, 5, 4, 5, 6, 7, 8, 9]
    conjugate = torch.arange(4) * 1j
    assert torch.equal(torch.stack(travel([conjugate, conjugate.conj()])), torch.stack([conjugate, conjugate.conj()]))


@pytest.mark.shows("batches arrive as from torch's own worker process: types, strides, sharing, gradients")
def test_a_leaf_s_gradient_is_asked_for_and_a_view_of_it_is_torch_s_error() -> None:
    weights = torch.ones(5, requires_grad=True)
    first, other, second = travel([weights, torch.ones(5), weights])
    assert first is second
    assert (first.requires_grad, first.is_leaf, other.requires_grad) == (True, True, False)
    (first * 2).sum().backward()
    assert first.grad.tolist() == [2] * 5
    with pytest.raises(RuntimeError, match="Cowardly refusing to serialize non-leaf tensor"):
        flatten([weights, weights.view(5, 1)])
    leaf, view = travel([weights, weights.detach().view(5, 1)])
    assert (leaf.requires_grad, view.requires_grad) == (True, False)
    view += 1
    assert leaf.tolist() == [2] * 5


class Learnable(torch.utils.data.Dataset[Any]):
    """A dataset with parameters of its own, which are to be trained."""

    def __init__(self) -> None:
        self.offsets = torch.nn.Parameter(torch.zeros(8, 1))

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return {"x": [self.offsets[index] + index]}


def test_a_graph_that_ends_at_a_copy_of_the_dataset_is_an_error_wherever_the_step_is_made(service: Any) -> None:
    for num_workers in (0, 1):
        service.start_workers(num_workers)
        with (
            DataLoader(Learnable(), batch_size=4, service=service.name) as loader,
            pytest.raises(RuntimeError, match="Cowardly refusing to serialize non-leaf tensor"),
        ):
            list(loader)
    dataset = Learnable()
    with DataLoader(dataset, batch_size=4) as loader:
        for batch in loader:
            batch["x"][0].sum().backward()
    assert dataset.offsets.grad is not None
    assert dataset.offsets.grad.tolist() == [[1.0]] * 8, "in the program itself"


@st.composite
def some_views(draw: st.DrawFn) -> list[torch.Tensor]:
    memory = torch.arange(24, dtype=draw(st.sampled_from([torch.int16, torch.float64])))
    found = []
    for _ in range(draw(st.integers(2, 10))):
        begin = draw(st.integers(0, 23))
        view = memory[begin : draw(st.integers(begin, 24)) : draw(st.integers(1, 3))]
        found.append(view.reshape(2, -1).T if draw(st.booleans()) and len(view) % 2 == 0 and len(view) else view)
    return found


@given(some_views())
@settings(max_examples=150, deadline=None)
def test_any_views_have_their_values(batch: list[torch.Tensor]) -> None:
    for got, want in zip(travel(batch), batch, strict=True):
        assert torch.equal(got, want)
        assert got.shape == want.shape


def test_a_structure_that_does_not_fit_is_refused() -> None:
    spec, buffers = flatten(twice(5))
    frames = [memoryview(bytearray(buffer)) for buffer in buffers]
    table, packs, nodes, places, rooms = tree._decoder.decode(spec)
    assert places
    assert not rooms
    view = [0, "float32", 0, [1], [1], False, {}]
    other_values = {
        1: ["float64x", "load"], 2: [-4, 2, 1 << 63], 3: [[99], [-1], [1, 1], [1 << 63]], 4: [[-1], ["x"]],
        6: [[1], "x"],
    }  # fmt: skip
    wrongs: list[Any] = [
        [9], [7], ["x"], None, view[:4], view[:6], [7, *view[1:]], [1, "int64", 0, [1], [1], True, {}],
        *[[*view[:at], value, *view[at + 1 :]] for at, values in other_values.items() for value in values],
    ]  # fmt: skip
    for wrong in wrongs:
        with pytest.raises(ProtocolError):
            unflatten(tree._encoder.encode((table, packs, nodes, [wrong, [1], 0], [])), frames)
    pieces = [[0, 2, [5], [1]], [7, 0, [5], [1]], [0, 0, [5], [0]], [0, 0, [4], [1]], [0, 0, [1 << 62], [0]]]
    for room in ([1 << 40, []], [1 << 40, [[0, 0, [5], [1]]]], [-1, []], [64], *[[64, [piece]] for piece in pieces]):
        with pytest.raises(ProtocolError):
            print(
                room, unflatten(tree._encoder.encode((table, packs, nodes, [[-1, *view[1:]], [1], 0], [room])), frames)
            )
