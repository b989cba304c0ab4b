"""Forwards that no graph holds as a whole: what runs before torch.compile's first break moves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sample_models as models
import torch
from hooking import hooked
from torch.utils.data import DataLoader, default_collate

from hetstream.mpi_dataworkers.partitioner.partition import Partition, partition

LOADER_OPTIONS: dict[str, Any] = {}
DECIDES = (
    "that is the forward's beginning alone; the rest stays: torch.compile traces no further, and says: "
    "Detected data-dependent branching"
)


@pytest.fixture(autouse=True)
def _own_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    assert torch._C._dynamo.eval_frame.set_eval_frame(None) is None, "frames are still looked at"
    torch._dynamo.reset()


def train(loader: Any, model: torch.nn.Module, between: Callable[[int, Any], Any] | None = None) -> list[str]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for number, (values, labels) in enumerate(loader):
        if between is not None:
            between(number, model)
        optimizer.zero_grad()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(values), labels) + values[0, 1].nan_to_num()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()).hex())
    return losses


def both(
    loaders: Callable[..., Any],
    make: Callable[[], torch.nn.Module],
    between: Callable[[int, Any], Any] | None = None,
    num_rows: int = 80,
    **options: Any,
) -> Partition:
    """Train as it is written and partitioned; both must give the same."""
    dataset = models.Rows(num_rows)
    torch.manual_seed(0)
    expected = train(loaders(dataset, batch_size=8), make(), between)
    torch.manual_seed(0)
    model, loader = make(), loaders(dataset, batch_size=8, **options)
    example = default_collate([dataset[number] for number in range(8)])
    done = partition(model, example, loader=loader, offload="all")
    assert train(loader, model, between) == expected
    return done


@pytest.mark.shows("what no parameter, changed buffer or side effect leads to moves out of a forward")
def test_what_runs_before_a_decision_by_the_data_moves(loaders: Callable[..., Any], three: Any) -> None:
    done = both(loaders, models.DecidesByData, num_rows=77, service=three.name)
    assert (done.counts.checked, done.counts.partitioned, done.counts.original) == (4, 6, 0), done.counts.reasons
    assert done.decision is not None
    assert len(done.decision.moved) == 5
    assert DECIDES in done.reason
    assert done.analysis is not None
    lines = {operator.line for operator in done.analysis.graph.operators if operator.name in done.decision.moved}
    assert {line.split(":")[0] for line in lines} == {"sample_models.py"}


@pytest.mark.shows("a forward that decides by the data, reads files or the time, or has side effects, stays right")
@pytest.mark.parametrize(
    "kind", [models.DecidesInside, models.DecidesTwice, models.ChangesInPlaceLater, models.DecidesAndNormalises]
)
def test_forwards_of_many_kinds_have_their_losses(
    kind: type[torch.nn.Module], loaders: Callable[..., Any], three: Any
) -> None:
    done = both(loaders, kind, service=three.name)
    assert (done.counts.checked, done.counts.partitioned, done.counts.original) == (3, 7, 0), done.reason


def test_outputs_that_share_memory_stay(loaders: Callable[..., Any]) -> None:
    done = both(loaders, models.ChangesAPartLater)
    assert done.counts.original == 0, done.counts.reasons
    assert done.analysis is not None
    reasons = {verdict.reason for verdict in done.analysis.verdicts.values()}
    assert "what comes behind may change it in place, and with it what shares its memory" in reasons


def test_where_nothing_runs_before_the_decision_nothing_moves(loaders: Callable[..., Any]) -> None:
    done = both(loaders, models.DecidesAtOnce)
    assert not done.is_active


# What changes, and how many of the five steps behind compute all; see `CHANGES` of test_partition.py.
CHANGES: dict[str, tuple[Callable[[Any], Any], int]] = {
    "attribute": (lambda model: setattr(model, "factor", 3.0), 3),
    "global": (lambda _: setattr(models, "FACTOR", 3.0), 3),
    "layer": (lambda model: setattr(model, "layer", torch.nn.Linear(4, 1)), 0),
    "buffer": (lambda model: model.mean.add_(1), 5),
    "buffer, unseen": (lambda model: model.mean.data.add_(1), 5),
    "hook": (lambda model: model.layer.register_forward_hook(lambda _, __, output: output * 2), 0),
    "deep in an object": (lambda model: setattr(model.settings.scaling, "scale", 3.0), 3),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_changes_before_its_decision_is_seen_to(
    change: str, loaders: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def make() -> torch.nn.Module:
        monkeypatch.setattr(models, "FACTOR", 2.0)
        return models.DecidesByGlobals()

    def between(number: int, model: Any) -> None:
        if number == 5:
            CHANGES[change][0](model)

    done = both(loaders, make, between)
    assert done.counts.original == CHANGES[change][1], done.counts


def test_a_program_that_knows_nothing(
    three: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def losses() -> list[str]:
        torch.manual_seed(0)
        return train(DataLoader(models.Rows(96), 8), models.DecidesInside())

    expected = losses()
    monkeypatch.setenv("HETSTREAM_OFFLOAD", "all")
    with hooked(three.name, monkeypatch):
        assert losses() == expected
    assert "data workers run" in caplog.text
    assert DECIDES in caplog.text
    assert "runs as it is" not in caplog.text


def test_the_compilers_own_cache_is_left_to_the_program(loaders: Callable[..., Any]) -> None:
    """Neither is a graph of another compilation used here, nor keeps this one the program from compiling."""
    dataset = models.Rows(80)
    example = default_collate([dataset[number] for number in range(8)])
    compiled: list[int] = []

    def counting(graph: Any, _: Any) -> Any:
        compiled.append(1)
        return graph.forward

    model, other = models.DecidesByData(), models.DecidesByData()
    loader = loaders(dataset, batch_size=8)
    done = partition(model, example, loader=loader, offload="all")
    train(loader, model)
    assert done.counts.partitioned == 7
    whole = torch.compile(other, backend=counting)
    with torch.no_grad():
        assert torch.equal(whole(example[0]), other(example[0]))
    assert compiled
