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

from hetstream.mpi_dataworkers.partitioner.leaves import flatten, unread
from hetstream.mpi_dataworkers.partitioner.own_call import OwnCall
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
        assert (done.counts.checked, done.counts.partitioned, done.counts.original) == (3, 7, 0), done.counts.reasons
    else:
        assert [*done.counts.reasons] == ["an argument that is no tensor has another value"]


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
    assert ("data workers run 5 operators" in caplog.text) == (kind is TakesBatch)
    said = "argument 0 of the forward, ['file-16', 'file-17', 'file-18', 'file-19', 'file-20', 'fil, is another one in"
    assert (said in caplog.text) == (kind is ReadsName)


def sometimes_more(rows: list[dict[str, Any]]) -> dict[str, Any]:
    batch: dict[str, Any] = default_collate(rows)
    return batch | {"extra": torch.ones(len(rows))} if rows[0]["name"].endswith("4") else batch


def test_a_batch_whose_structure_changes_runs_as_it_is_written(loaders: Callable[..., Any], three: Any) -> None:
    dataset = NamedRows(80)
    torch.manual_seed(0)
    expected = train(loaders(dataset, batch_size=8, collate_fn=sometimes_more), TakesBatch())
    torch.manual_seed(0)
    model, loader = TakesBatch(), loaders(dataset, batch_size=8, collate_fn=sometimes_more, service=three.name)
    done = partition(model, default_collate([dataset[0], dataset[1]]), loader=loader, offload="all")
    assert train(loader, model) == expected
    assert (done.counts.checked, done.counts.partitioned, done.counts.original) == (3, 5, 2)
    assert [*done.counts.reasons] == ["it was called with arguments of another structure"]


def test_what_a_forward_changes_in_its_arguments_the_program_finds_in_its_own() -> None:
    def change(batch: dict[str, Any], *, more: list[Any]) -> int:
        batch["made"] = 1
        del batch["gone"]
        batch["inner"][1]["x"] = 2
        more.append(3)
        return 4

    def arguments() -> Any:
        return ({"gone": 0, "inner": ({}, {"x": 0, "y": kept})},), {"more": [kept]}

    kept = object()
    theirs = arguments()
    call = OwnCall(change, theirs, arguments())
    assert call() == 4
    assert call.has_changed
    assert theirs == (({"inner": ({}, {"x": 2, "y": kept}), "made": 1},), {"more": [kept, 3]})
    untouched = OwnCall(lambda *_, **__: None, arguments(), arguments())
    untouched()
    assert not untouched.has_changed


def test_a_list_of_plain_values_is_one_leaf() -> None:
    few, many = ({"names": [*names], "x": (torch.zeros(1), [torch.zeros(1)])} for names in ("ab", "abcdef"))
    assert flatten(few)[1] == flatten(many)[1]
    assert flatten(many)[0][0] == [*"abcdef"]
    assert len(flatten(many)[0]) == 3


LOOKS: dict[str, Callable[[Any], Any]] = {
    "a comparison": lambda value: value == "a",
    "a key": lambda value: {"a": 1}.get(value),
    "a length": len,
    "a loop": list,
    "text": lambda value: f"{value}",
    "a method": lambda value: value.upper(),
    "its type": lambda value: isinstance(value, str),
    "a sum": lambda value: "x" + value,
    "what it holds": lambda value: "a" in value,
    "where it is held": lambda value: value in ["a", "b"],
    "joined": lambda value: "".join([value]),
    "a number": lambda value: 2 * value,
    "an operator": lambda value: torch.ones(1) * value,
    "a size": lambda value: torch.ones(value),
    "a condition": lambda value: 1 if value else 2,
    "and nothing said": lambda value: _try(value),
}


def _try(value: Any) -> None:
    with contextlib.suppress(Exception):
        value.upper()


@pytest.mark.parametrize("how", LOOKS)
def test_whoever_looks_at_a_value_is_noticed(how: str) -> None:
    assert unread(["a"], [0], lambda leaves: LOOKS[how](leaves[0])) == frozenset()


def test_who_hands_a_value_on_does_not_look_at_it() -> None:
    def call(leaves: list[Any]) -> Any:
        held = {"name": leaves[0], "step": leaves[1]}
        return leaves[2] + len(held), held["name"] is None, leaves[1] > 3

    assert unread(["a", 5, torch.ones(2)], [0, 1], call) == {0}
