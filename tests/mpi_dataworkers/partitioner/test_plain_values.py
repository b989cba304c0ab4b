"""Batches and forwards with plain values among their tensors: names, numbers, lists of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import sample_models as models
import torch
from hooking import hooked
from torch.utils.data import DataLoader, Dataset, default_collate

from hetstream.mpi_dataworkers.partitioner.leaves import flatten
from hetstream.mpi_dataworkers.partitioner.partition import partition
from hetstream.mpi_dataworkers.partitioner.unmodified import _calls

LOADER_OPTIONS: dict[str, Any] = {}


class NamedRows(Dataset[dict[str, Any]]):
    """The rows of `Rows`, each with the name of a file."""

    def __init__(self, num_rows: int) -> None:
        self._rows = models.Rows(num_rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        values, label = self._rows[index]
        return {"name": f"file-{index}", "label": label, "values": values}


class TakesBatch(models.Clean):
    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        return super().forward(batch["values"])


class ReadsName(models.Clean):
    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        scale = 2.0 if any(name.endswith("9") for name in batch["name"]) else 1.0
        return super().forward(batch["values"]) * scale


class AsksForType(models.Clean):
    """An object whose type is asked for is not noticed when it is looked at afterwards."""

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        names = batch["name"]
        scale = 2.0 if type(names) is list and names[0].endswith("8") else 1.0
        return super().forward(batch["values"]) * scale


def train(loader: Any, model: torch.nn.Module) -> list[str]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for batch in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(batch), batch["label"])
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()).hex())
    return losses


@pytest.mark.shows("hooks, and values that are no tensors, stay right in a partitioned forward")
@pytest.mark.parametrize("kind", [TakesBatch, ReadsName, AsksForType])
def test_names_in_a_batch_are_handed_on_unless_the_forward_looks_at_them(
    kind: type[torch.nn.Module], loaders: Callable[..., Any], three: Any
) -> None:
    dataset = NamedRows(77)
    torch.manual_seed(0)
    expected = train(loaders(dataset, batch_size=8), kind())
    torch.manual_seed(0)
    model, loader = kind(), loaders(dataset, batch_size=8, service=three.name)
    example = default_collate([dataset[number] for number in range(8)])
    done = partition(model, example, loader=loader, offload="all")
    assert train(loader, model) == expected
    if kind is TakesBatch:
        assert (done.counts.checked, done.counts.partitioned, done.counts.original) == (4, 6, 0), done.counts.reasons
    else:
        assert [*done.counts.reasons] == ["torch.compile has traced it anew, and its graph is another one"]


@pytest.mark.parametrize("kind", [TakesBatch, ReadsName])
def test_names_in_the_batches_of_a_program_that_knows_nothing(
    kind: type[torch.nn.Module], three: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def losses() -> list[str]:
        torch.manual_seed(0)
        return train(DataLoader(NamedRows(80), 8), kind())

    expected = losses()
    monkeypatch.setenv("HETSTREAM_OFFLOAD", "all")
    with hooked(three.name, monkeypatch):
        assert losses() == expected
    assert not _calls.followers
    assert "data workers run 5 operators" in caplog.text
    assert ("torch.compile has traced it anew, and its graph is another one" in caplog.text) == (kind is ReadsName)


def sometimes_more(rows: list[dict[str, Any]]) -> dict[str, Any]:
    batch: dict[str, Any] = default_collate(rows)
    return batch | {"extra": torch.ones(len(rows))} if rows[0]["name"].endswith("4") else batch


@pytest.mark.shows("a model or a batch that changes its structure stays right")
def test_a_batch_whose_structure_changes_runs_as_it_is_written(loaders: Callable[..., Any], three: Any) -> None:
    dataset = NamedRows(80)
    torch.manual_seed(0)
    expected = train(loaders(dataset, batch_size=8, collate_fn=sometimes_more), TakesBatch())
    torch.manual_seed(0)
    model, loader = TakesBatch(), loaders(dataset, batch_size=8, collate_fn=sometimes_more, service=three.name)
    done = partition(model, default_collate([dataset[0], dataset[1]]), loader=loader, offload="all")
    assert train(loader, model) == expected
    assert (done.counts.checked, done.counts.partitioned, done.counts.original) == (3, 5, 2)
    assert [*done.counts.reasons] == ["data workers have computed nothing of what it is given now"]


class ChangesItsBatch(models.Clean):
    """Puts what it has made into the dictionary that it is given, and takes another part out."""

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        batch["made"] = torch.nan_to_num(batch["values"]).clamp(0, 50)
        del batch["name"]
        return super().forward(batch["made"])


@pytest.mark.shows("arguments and leaves that are changed in place stay right")
def test_what_a_forward_changes_in_its_arguments_the_program_finds_in_its_own(
    loaders: Callable[..., Any], three: Any
) -> None:
    def losses(loader: Any, model: torch.nn.Module) -> list[str]:
        found = []
        for batch in loader:
            assert "name" in batch
            logits = model(batch)
            loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, batch["label"])
            loss.backward()
            found.append(f"{float(loss.detach()).hex()} {float(batch['made'].sum()).hex()} {[*batch]}")
        return found

    dataset = NamedRows(80)
    torch.manual_seed(0)
    expected = losses(loaders(dataset, batch_size=8), ChangesItsBatch())
    torch.manual_seed(0)
    model, loader = ChangesItsBatch(), loaders(dataset, batch_size=8, service=three.name)
    done = partition(model, default_collate([dataset[number] for number in range(8)]), loader=loader, offload="all")
    assert losses(loader, model) == expected
    assert (done.counts.checked, done.counts.partitioned, done.counts.original) == (3, 7, 0), done.reason


def test_a_list_of_plain_values_is_one_leaf() -> None:
    few, many = ({"names": [*names], "x": (torch.zeros(1), [torch.zeros(1)])} for names in ("ab", "abcdef"))
    assert flatten(few)[1] == flatten(many)[1]
    assert flatten(many)[0][0] == [*"abcdef"]
    assert len(flatten(many)[0]) == 3


# What a forward may ask of a value that is no tensor: whether this is a batch whose numbers it doubles.
LOOKS: dict[str, Callable[[Any], Any]] = {
    "a comparison": lambda names: names[0] == "file-48",
    "a key": lambda names: {"file-48": 1}.get(names[0]),
    "a loop": lambda names: any(name == "file-48" for name in names),
    "text": lambda names: f"{names[0]}" == "file-48",
    "a method": lambda names: names[0].upper() == "FILE-48",
    "its type": lambda names: isinstance(names[0], str) and names[0].endswith("48"),
    "a sum": lambda names: "a " + names[0] == "a file-48",
    "what it holds": lambda names: "48" in names[0],
    "where it is held": lambda names: "file-48" in names,
    "joined": lambda names: "48" in "".join(names),
    "a number": lambda names: int(names[0].split("-")[1]) == 48,
    "a length": lambda names: len(names[0]) == 6,
    "and nothing said": lambda names: _try(names[0]),
}


def _try(name: str) -> bool:
    with contextlib.suppress(Exception):
        return {"file-48": True}[name]
    return False


class Looks(models.Clean):
    def __init__(self, look: Callable[[Any], Any]) -> None:
        super().__init__()
        self.look = look

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        return super().forward(batch["values"] * (2.0 if self.look(batch["name"]) else 1.0))


@pytest.mark.parametrize("how", LOOKS)
def test_whoever_looks_at_a_value_gets_that_of_the_batch(how: str, loaders: Callable[..., Any]) -> None:
    dataset = NamedRows(80)
    torch.manual_seed(0)
    expected = train(loaders(dataset, batch_size=8), Looks(LOOKS[how]))
    torch.manual_seed(0)
    model, loader = Looks(LOOKS[how]), loaders(dataset, batch_size=8)
    partition(model, default_collate([dataset[number] for number in range(8)]), loader=loader, offload="all")
    assert train(loader, model) == expected
