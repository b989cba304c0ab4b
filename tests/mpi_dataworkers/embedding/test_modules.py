"""Modules over embedding tables against torch's own with torch's own optimizers, in one process without servers."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import hetstream
from hetstream.errors import ConfigError, EmbeddingError
from tests.mpi_dataworkers.embedding.programs import batches, train

NUM_ROWS = 1000

Make = Callable[[], nn.Module]
OPTIMIZERS: dict[str, tuple[Any, Callable[[Any], torch.optim.Optimizer], bool]] = {
    "sgd": (lambda: hetstream.RowSGD(0.01), lambda parameters: torch.optim.SGD(parameters, lr=0.01), False),
    "adam": (lambda: hetstream.RowAdam(0.1), lambda parameters: torch.optim.SparseAdam(list(parameters), lr=0.1), True),
}


@pytest.mark.shows("embedding modules compute and update as torch's, bit for bit")
@pytest.mark.parametrize("dim", [16, 10, 1])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_bag_is_torchs_bit_for_bit(optimizer: str, mode: str, dim: int) -> None:
    ours, theirs, is_sparse = OPTIMIZERS[optimizer]
    if mode == "max" and is_sparse:
        is_sparse = False
        theirs = OPTIMIZERS["sgd"][1]
        ours = OPTIMIZERS["sgd"][0]
    torch.manual_seed(1)
    bag = nn.EmbeddingBag(NUM_ROWS, dim, mode=mode, sparse=is_sparse)
    expected = train(bag, dim, batches(NUM_ROWS), theirs(bag.parameters()))
    torch.manual_seed(1)
    own = hetstream.EmbeddingBag(NUM_ROWS, dim, mode=mode, optimizer=ours())
    assert train(own, dim, batches(NUM_ROWS)) == expected
    assert torch.equal(own.state_dict()["weight"], bag.weight.detach())


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_bags_of_one_id_are_torchs_bit_for_bit(optimizer: str, mode: str) -> None:
    ours, theirs, is_sparse = OPTIMIZERS[optimizer]
    torch.manual_seed(1)
    bag = nn.EmbeddingBag(NUM_ROWS, 16, mode=mode, sparse=is_sparse)
    optimizer_of_torch = theirs(bag.parameters())
    torch.manual_seed(1)
    own = hetstream.EmbeddingBag(NUM_ROWS, 16, mode=mode, optimizer=ours())
    for step in range(20):
        ids = torch.randint(40 + step, (300, 1), generator=torch.Generator().manual_seed(step))
        expected, got = bag(ids), own(ids)
        assert torch.equal(expected, got)
        optimizer_of_torch.zero_grad()
        expected.pow(2).sum().backward()
        got.pow(2).sum().backward()
        optimizer_of_torch.step()
    assert torch.equal(own.state_dict()["weight"], bag.weight.detach())


@pytest.mark.shows("a GradScaler scales and skips updates of rows as those of torch's parameters, bit for bit")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_grad_scaler_does_what_it_does_to_torchs(optimizer: str) -> None:
    make, theirs, is_sparse = OPTIMIZERS[optimizer]

    def run(bag: nn.Module, of_bag: torch.optim.Optimizer | None, rows: Any = None) -> tuple[list[float], list[float]]:
        torch.manual_seed(2)
        head = nn.Linear(8, 1)
        optimizers = [torch.optim.SGD(head.parameters(), lr=0.01), *([of_bag] if of_bag else [])]
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**100, growth_interval=4)
        if rows is not None:
            rows.scaler = scaler
        losses, scales = [], []
        for number, (ids, target) in enumerate(batches(NUM_ROWS, 40)):
            for each in optimizers:
                each.zero_grad()
            loss = functional.mse_loss(head(bag(ids)), target)
            if number in (25, 30):
                loss = loss + bag(ids[:2]).sum() * (torch.inf if number == 25 else torch.nan)  # the head's stay finite
            scaler.scale(loss).backward()
            for each in optimizers:
                scaler.step(each)
            scaler.update()
            losses.append(loss.item())
            scales.append(scaler.get_scale())
        return [loss for loss in losses if loss == loss], scales

    torch.manual_seed(1)
    bag = nn.EmbeddingBag(NUM_ROWS, 8, sparse=is_sparse)
    expected = run(bag, theirs(bag.parameters()))
    torch.manual_seed(1)
    own = hetstream.EmbeddingBag(NUM_ROWS, 8, optimizer=(rows := make()))
    assert run(own, None, rows) == expected
    assert len({*expected[1]}) > 4, "it has grown and shrunk"
    assert torch.equal(own.state_dict()["weight"], bag.weight.detach())


def test_a_scaler_is_told_of_rows_alone_and_of_each_backward() -> None:
    rows = hetstream.RowSGD(0.5)
    rows.scaler = scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=100)
    embedding = hetstream.Embedding(10, 4, optimizer=rows)
    weight = embedding.state_dict()["weight"].clone()
    for ids in (torch.tensor([1]), torch.tensor([1, 2])):  # two losses in a step, and no optimizer of torch's
        scaler.scale(embedding(ids).sum()).backward()
    scaler.update()
    weight[1] -= 1.0
    weight[2] -= 0.5
    assert torch.equal(embedding.state_dict()["weight"], weight)
    for factor in (1.0, torch.inf):
        scaler.scale(embedding(torch.tensor([3])).sum() * factor).backward()
    scaler.update()
    weight[3] -= 0.5
    assert torch.equal(embedding.state_dict()["weight"], weight)
    assert scaler.get_scale() == 4.0
    rows.scaler = torch.amp.GradScaler("cpu", enabled=False)
    (embedding(torch.tensor([4])).sum() * torch.inf).backward()
    assert embedding.state_dict()["weight"][4].isinf().all(), "as torch's, which updates then"


@pytest.mark.parametrize("padding_idx", [None, 3, -1])
def test_an_embedding_is_torchs_bit_for_bit(padding_idx: int | None) -> None:
    torch.manual_seed(1)
    theirs = nn.Embedding(NUM_ROWS, 8, padding_idx=padding_idx)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    torch.manual_seed(1)
    ours = hetstream.Embedding(NUM_ROWS, 8, padding_idx=padding_idx, optimizer=hetstream.RowSGD(0.1))
    for ids, _ in batches(NUM_ROWS):
        optimizer.zero_grad()
        expected, got = theirs(ids), ours(ids)
        assert torch.equal(expected, got)
        expected.pow(2).sum().backward()
        got.pow(2).sum().backward()
        optimizer.step()
    assert torch.equal(ours.state_dict()["weight"], theirs.weight.detach())


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_with_a_padded_row_are_torchs(mode: str) -> None:
    torch.manual_seed(1)
    theirs = nn.EmbeddingBag(50, 4, mode=mode, padding_idx=7)
    torch.manual_seed(1)
    ours = hetstream.EmbeddingBag(50, 4, mode=mode, padding_idx=7, optimizer=hetstream.RowSGD(0.1))
    generator = torch.Generator().manual_seed(2)
    for _ in range(20):
        ids = torch.randint(50, (6, 3), generator=generator)
        assert torch.equal(theirs(ids), ours(ids))
    only = torch.full((2, 3), 7)
    assert torch.equal(theirs(only), ours(only))
    nothing, offsets = torch.empty(0, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    assert torch.equal(theirs(nothing, offsets), ours(nothing, offsets))


def test_weights_of_samples_and_last_offsets_are_torchs() -> None:
    torch.manual_seed(1)
    theirs = nn.EmbeddingBag(50, 4, mode="sum", include_last_offset=True)
    torch.manual_seed(1)
    ours = hetstream.EmbeddingBag(50, 4, mode="sum", include_last_offset=True, optimizer=hetstream.RowSGD(0.1))
    ids, offsets, weights = torch.tensor([1, 2, 2, 49, 0]), torch.tensor([0, 2, 2, 5]), torch.rand(5)
    assert torch.equal(theirs(ids, offsets, weights), ours(ids, offsets, weights))
    assert torch.equal(theirs(ids.int(), offsets.int(), weights), ours(ids.int(), offsets.int(), weights))


def test_a_table_that_is_looked_up_twice_in_a_step_gets_both_gradients() -> None:
    torch.manual_seed(1)
    theirs = nn.Embedding(20, 4)
    torch.manual_seed(1)
    ours = hetstream.Embedding(20, 4, optimizer=hetstream.RowSGD(0.5))
    first, second = torch.tensor([1, 2, 3]), torch.tensor([3, 4, 3])
    for module in (theirs, ours):
        (module(first).sum() + module(second).pow(2).sum()).backward()
    with torch.no_grad():
        theirs.weight -= 0.5 * theirs.weight.grad
    torch.testing.assert_close(ours.state_dict()["weight"], theirs.weight.detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_row_wise_adagrad_is_its_formula(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    ours = hetstream.EmbeddingBag(30, 6, mode="sum", dtype=dtype, optimizer=hetstream.RowWiseAdagrad(0.1, eps=1e-6))
    weight = ours.state_dict()["weight"].clone()
    sums = torch.zeros(30)
    generator = torch.Generator().manual_seed(2)
    for _ in range(5):
        ids = torch.randint(30, (4, 3), generator=generator)
        leaf = weight.clone().requires_grad_()
        functional.embedding_bag(ids, leaf, mode="sum").float().pow(2).sum().backward()
        ours(ids).float().pow(2).sum().backward()
        grad = leaf.grad
        assert grad is not None
        touched = ids.unique()
        sums[touched] += grad[touched].float().pow(2).mean(1)
        step = 0.1 * grad[touched].float() / (sums[touched].sqrt() + 1e-6)[:, None]
        weight[touched] = (weight[touched].float() - step).to(dtype)
        torch.testing.assert_close(ours.state_dict()["weight"], weight)


def test_a_state_of_torchs_module_is_loaded_and_training_goes_on_from_ones_own() -> None:
    bag = nn.EmbeddingBag(40, 4)
    own = hetstream.EmbeddingBag(40, 4, optimizer=hetstream.RowAdam(0.1))
    own.load_state_dict(bag.state_dict())
    assert torch.equal(own.state_dict()["weight"], bag.weight.detach())
    data = batches(40)
    torch.manual_seed(1)
    whole = train(own, 4, data)
    other = hetstream.EmbeddingBag(40, 4, optimizer=hetstream.RowAdam(0.1))
    other.load_state_dict(bag.state_dict())
    torch.manual_seed(2)
    head = nn.Linear(4, 1)
    train(other, 4, data[:10], head=head)
    third = hetstream.EmbeddingBag(40, 4, optimizer=hetstream.RowAdam(0.1))
    third.load_state_dict(other.state_dict())
    assert train(third, 4, data[10:], head=head) == whole[10:]


def test_wrong_ids_and_arguments_are_named() -> None:
    bag = hetstream.EmbeddingBag(10, 4, name="users", optimizer=hetstream.RowSGD(0.1))
    for wrong in (10, -1):
        with pytest.raises(IndexError, match=f"table users: there is no row {wrong}, its ids are 0 to 9"):
            bag(torch.tensor([[1, wrong]]))
    with pytest.raises(ConfigError, match="another embedding table of this process has it"):
        hetstream.EmbeddingBag(10, 4, name="users", optimizer=hetstream.RowSGD(0.1))
    with pytest.raises(ConfigError, match="rows are updated by"):
        hetstream.EmbeddingBag(10, 4, optimizer=torch.optim.SGD)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=r"weight has shape \(11, 4\), and the table \(10, 4\)"):
        bag.load_state_dict(nn.EmbeddingBag(11, 4).state_dict())


def test_a_collection_is_one_bag_for_each_feature() -> None:
    configs = [
        hetstream.EmbeddingBagConfig(20, 4, "users", ["user"]),
        hetstream.EmbeddingBagConfig(30, 4, "items", ["item", "seen"]),
    ]
    collection = hetstream.EmbeddingBagCollection(configs, optimizer=hetstream.RowSGD(0.1))
    state = collection.state_dict()
    bags = {
        name: nn.EmbeddingBag.from_pretrained(state[f"embedding_bags.{table}.weight"].clone(), mode="sum", freeze=False)
        for name, table in (("user", "users"), ("item", "items"))
    }
    features = {"seen": torch.tensor([[1, 2], [29, 1]]), "user": torch.tensor([19, 0]), "item": torch.tensor([3, 3])}
    got = collection(features)
    expected = {
        "seen": bags["item"](features["seen"]),
        "user": bags["user"](features["user"][:, None]),
        "item": bags["item"](features["item"][:, None]),
    }
    assert list(got) == list(features)
    for name, rows in expected.items():
        assert torch.equal(got[name], rows)
    torch.stack(list(got.values())).pow(2).sum().backward()
    torch.stack(list(expected.values())).pow(2).sum().backward()
    state = collection.state_dict()
    for bag, table in ((bags["user"], "users"), (bags["item"], "items")):
        assert bag.weight.grad is not None
        torch.testing.assert_close(state[f"embedding_bags.{table}.weight"], bag.weight.detach() - 0.1 * bag.weight.grad)


def test_features_of_different_numbers_of_samples_are_refused() -> None:
    tables = [
        hetstream.EmbeddingBagConfig(20, 4, "users", ["user"]),
        hetstream.EmbeddingBagConfig(30, 4, "items", ["item"]),
    ]
    collection = hetstream.EmbeddingBagCollection(tables, optimizer=hetstream.RowSGD(0.1))
    with pytest.raises(EmbeddingError, match="features of different numbers of samples"):
        collection({"user": torch.tensor([1, 2, 3, 4]), "item": torch.tensor([1, 2])})


class _FailsOnce(torch.autograd.Function):
    failed = False

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor) -> torch.Tensor:
        return given.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        if not _FailsOnce.failed:
            _FailsOnce.failed = True
            raise MemoryError("out of memory")
        return grad


def test_rows_are_updated_after_a_backward_that_failed() -> None:
    embedding = hetstream.Embedding(10, 4, optimizer=hetstream.RowSGD(0.5))
    weight = embedding.state_dict()["weight"].clone()
    fails_later = _FailsOnce.apply(nn.Linear(4, 4)(torch.ones(4)))
    with pytest.raises(MemoryError):
        (fails_later.sum() + embedding(torch.tensor([1, 2])).sum()).backward()
    embedding(torch.tensor([2, 3])).sum().backward()
    weight[2:4] -= 0.5
    assert torch.equal(embedding.state_dict()["weight"], weight)


@pytest.mark.parametrize("is_reentrant", [True, False])
def test_what_a_checkpoint_computes_again_has_the_rows_of_the_step(is_reentrant: bool) -> None:
    """Two segments over one table: the second is computed again when the backward of the first has ended."""
    torch.manual_seed(1)
    theirs = nn.Embedding(10, 4)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    ours = hetstream.Embedding(10, 4, optimizer=hetstream.RowSGD(0.1))
    ours.load_state_dict(theirs.state_dict())
    for step in range(3):
        given = torch.ones(1, requires_grad=True)
        for module in (theirs, ours):

            def segment(given: torch.Tensor, ids: torch.Tensor, module: nn.Module = module) -> torch.Tensor:
                return (module(ids).tanh() * given).pow(2).sum()

            parts = [
                checkpoint(segment, given, torch.arange(3) + first + step, use_reentrant=is_reentrant)
                for first in range(3)
            ]
            torch.stack(parts).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(ours.state_dict()["weight"], theirs.weight.detach())
    assert ours.table.num_updates == 3


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_copy_has_rows_of_its_own(copied: Callable[[Any], Any]) -> None:
    configs = [hetstream.EmbeddingBagConfig(20, 4, "users", ["user"])]
    collection = hetstream.EmbeddingBagCollection(configs, optimizer=hetstream.RowSGD(0.1))
    other = copied(collection)
    before = collection({"user": torch.arange(20)})["user"].detach()
    assert torch.equal(other({"user": torch.arange(20)})["user"], before)
    other.load_state_dict({"embedding_bags.users.weight": torch.ones(20, 4)})
    assert torch.equal(other({"user": torch.arange(20)})["user"], torch.ones(20, 4))
    assert torch.equal(collection({"user": torch.arange(20)})["user"], before)


def test_the_state_of_another_optimizer_is_refused() -> None:
    adagrad = hetstream.Embedding(10, 4, optimizer=hetstream.RowWiseAdagrad(0.1))
    adam = hetstream.Embedding(10, 4, optimizer=hetstream.RowAdam(0.1))
    with pytest.raises(RuntimeError, match=r"optimizer_state has shape \(10, 1\).*optimizer \(10, 8\)"):
        adam.load_state_dict(adagrad.state_dict())


def test_wrong_features_and_padding_are_named() -> None:
    configs = [
        hetstream.EmbeddingBagConfig(20, 4, "users", ["user"]),
        hetstream.EmbeddingBagConfig(30, 4, "items", ["item", "seen"]),
    ]
    collection = hetstream.EmbeddingBagCollection(configs, optimizer=hetstream.RowSGD(0.1))
    ids = torch.tensor([0, 1])
    with pytest.raises(IndexError, match="feature user: there is no row 20, its ids are 0 to 19"):
        collection({"item": ids, "user": torch.tensor([19, 20])})
    with pytest.raises(IndexError, match="feature seen: there is no row -1, its ids are 0 to 29"):
        collection({"user": ids, "item": ids, "seen": torch.tensor([[0, 1], [2, -1]])})
    with pytest.raises(EmbeddingError, match=r"ids of dtype torch\.float32"):
        collection({"user": torch.tensor([1.7])})
    empty = collection({"user": ids[:0], "seen": ids[:0].reshape(0, 3)})
    assert {name: tuple(rows.shape) for name, rows in empty.items()} == {"user": (0, 4), "seen": (0, 4)}
    with pytest.raises(ConfigError, match="each feature of a collection has a name of its own"):
        hetstream.EmbeddingBagCollection(
            [configs[0], hetstream.EmbeddingBagConfig(5, 4, "more", ["user"])], optimizer=hetstream.RowSGD(0.1)
        )
    for padding_idx in (10, -11):
        with pytest.raises(ConfigError, match=f"padding_idx={padding_idx}: a row from -10 to 9"):
            hetstream.Embedding(10, 4, padding_idx=padding_idx, optimizer=hetstream.RowSGD(0.1))
