"""What `state_dict` and `load_state_dict` of modules over embedding tables save, restore and leave as it is."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetstream
from hetstream.checkpoint.memory.view import find_stores
from hetstream.errors import EmbeddingError
from tests.mpi_dataworkers.embedding.conftest import Servers
from tests.mpi_dataworkers.embedding.programs import batches, train
from tests.mpi_dataworkers.embedding.servers import until

NUM_ROWS, DIM = 2000, 8
DATA = batches(NUM_ROWS, 30)


def _bag(name: str | None = None, seed: int = 1, **options: Any) -> hetstream.EmbeddingBag:
    torch.manual_seed(seed)
    options = {"optimizer": hetstream.RowAdam(0.1), "cache_bytes": 500 * 12 * DIM, **options}
    return hetstream.EmbeddingBag(NUM_ROWS, DIM, mode="sum", name=name, **options)


def _rows(bag: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([bag(ids[:, None]) for ids in torch.arange(NUM_ROWS).split(100)])


def _saved(module: nn.Module) -> dict[str, Any]:
    return copy.deepcopy(module.state_dict())


@pytest.mark.shows("a module's load restores its own tables alone, and the others keep their rows")
@pytest.mark.parametrize("num_servers", [0, 1, 3])
def test_a_load_touches_what_is_loaded(servers: Servers, num_servers: int) -> None:
    if num_servers:
        servers(num_servers)
    model = nn.ModuleDict({"first": _bag("first"), "second": _bag("second")})
    for bag in model.values():
        train(bag, DIM, DATA[:10])
    saved = _saved(model)
    first = _rows(model["first"])
    for bag in model.values():
        train(bag, DIM, DATA[10:20])
    second = _rows(model["second"])
    del bag
    model["first"].load_state_dict({name[6:]: value for name, value in saved.items() if name.startswith("first.")})
    assert torch.equal(_rows(model["first"]), first)
    assert torch.equal(_rows(model["second"]), second)
    again = _saved(model)  # and a generation has both
    train(model["first"], DIM, DATA[20:])
    model.load_state_dict(again)
    assert torch.equal(_rows(model["first"]), first)
    assert torch.equal(_rows(model["second"]), second)
    model.load_state_dict(saved)
    assert torch.equal(_rows(model["first"]), first)
    assert not torch.equal(_rows(model["second"]), second)


@pytest.mark.shows("tables that a checkpoint lacks keep their first rows when it is loaded")
@pytest.mark.parametrize("order", ["before", "after"])
def test_a_table_that_the_checkpoint_lacks_keeps_its_first_rows(servers: Servers, order: str) -> None:
    expected = _rows(_bag(seed=7))
    servers(2)
    bag = _bag("known")
    train(bag, DIM, DATA)
    saved, rows = _saved(bag), _rows(bag)
    del bag
    servers(3, first=10)
    bag = _bag("known", seed=3)
    if order == "before":
        new = _bag("new", seed=7)
    bag.load_state_dict(saved)
    if order == "after":
        new = _bag("new", seed=7)
    assert torch.equal(_rows(new), expected)
    assert torch.equal(_rows(bag), rows)


def test_a_table_that_grows_is_loaded_alone_before_it_is_used(servers: Servers) -> None:
    servers(1)
    both = [_bag("kept"), grows := _bag("grows", new_rows=0.1)]
    train(grows, DIM, DATA[:5])
    saved, rows = _saved(grows), _rows(grows)
    del both, grows
    servers(1, first=1)
    both = [_bag("kept"), grows := _bag("grows", new_rows=0.1, seed=9)]
    grows.load_state_dict(saved)
    assert torch.equal(_rows(grows), rows)
    grows.load_state_dict(saved)
    with pytest.raises(EmbeddingError, match="Load it before it is used, or all tables"):
        _rows(grows)
    assert len(both) == 2


@pytest.mark.parametrize("num_servers", [0, 1])
def test_the_number_of_updates_goes_with_the_state_of_the_optimizer(servers: Servers, num_servers: int) -> None:
    if num_servers:
        servers(num_servers)
    torch.manual_seed(3)
    weight = torch.randn(NUM_ROWS, DIM)
    theirs = nn.EmbeddingBag.from_pretrained(weight.clone(), mode="sum", sparse=True, freeze=False)
    expected = train(theirs, DIM, DATA, torch.optim.SparseAdam(list(theirs.parameters()), lr=0.1))
    bag = _bag("of updates")
    train(bag, DIM, DATA[:7])
    bag.load_state_dict({"weight": weight})
    assert train(bag, DIM, DATA) == expected
    bag.load_state_dict({"weight": weight})
    torch.manual_seed(2)
    head = nn.Linear(DIM, 1)
    assert train(bag, DIM, DATA[:10], head=head) == expected[:10]
    saved = _saved(bag)
    del bag
    if num_servers:
        servers(2, first=5)
    other = _bag("of updates")
    train(other, DIM, DATA[:3])
    other.load_state_dict(saved)
    assert train(other, DIM, DATA[10:], head=head) == expected[10:]


def test_the_state_of_an_optimizer_without_its_number_of_updates_is_refused() -> None:
    bag = _bag()
    saved = _saved(bag)
    del saved["table"]
    with pytest.raises(RuntimeError, match=r'Missing key.*"table"'):
        bag.load_state_dict(saved)
    del saved["optimizer_state"]
    bag.load_state_dict(saved)


class _Model(nn.Module):
    def __init__(self, users: nn.Module, words: nn.Module) -> None:
        super().__init__()
        self.users, self.words, self.head = users, words, nn.Linear(2 * DIM, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(torch.cat([self.users(ids), self.words(ids[:, 0] % 50)], 1))
        return found


@pytest.mark.shows("trained rows of embedding servers are written to a file that plain torch loads")
@pytest.mark.parametrize("num_servers", [0, 2])
def test_a_file_of_trained_rows_is_loaded_by_plain_torch(servers: Servers, num_servers: int, tmp_path: Path) -> None:
    if num_servers:
        servers(num_servers)
    model = _Model(_bag(), hetstream.Embedding(50, DIM, optimizer=hetstream.RowSGD(0.1), new_rows=0.1))
    for ids, target in hetstream.lookahead(DATA, {model.users: lambda batch: batch[0]}):
        (model(ids) - target).pow(2).mean().backward()
    torch.save(hetstream.torch_state_dict(model), tmp_path / "rows.pt")
    plain = _Model(nn.EmbeddingBag(NUM_ROWS, DIM, mode="sum"), nn.Embedding(50, DIM))
    plain.load_state_dict(torch.load(tmp_path / "rows.pt", weights_only=True))
    with torch.no_grad():
        for ids, _ in DATA:
            assert torch.equal(plain(ids), model(ids))


@pytest.mark.parametrize("num_servers", [0, 2])
def test_a_flash_checkpoint_restores_rows_after_any_number_of_updates(
    servers: Servers, folder: Path, tmp_path: Path, num_servers: int
) -> None:
    def flash() -> hetstream.FlashCheckpointer:
        options = hetstream.CheckpointOptions(shared_memory=folder / "memory")
        return hetstream.FlashCheckpointer(tmp_path / "saved", options=options)

    if num_servers:
        servers(num_servers)
    bag = _bag("flash")
    for ids, _ in DATA * 4:  # more digits than none has
        bag(ids).sum().backward()
    with flash() as checkpointer:
        checkpointer.save(3, {"model": bag})
    rows = _rows(bag)
    del bag
    if num_servers:
        servers(num_servers, first=5)
    other = _bag("flash", seed=4)
    with flash() as checkpointer:
        assert checkpointer.restore({"model": other}) == 3
    assert torch.equal(_rows(other), rows)
    assert other.table.num_updates == 120
    until(lambda: not any(one.writer_alive for one in find_stores([folder / "memory"])), "the checkpoint writer ends")
