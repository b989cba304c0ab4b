"""Programs that do not know hetstream, under the start-up hook: what of their forward moves, and that losses stay."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import sample_models as models
import torch
import torch.utils.checkpoint
from hooking import hooked
from torch.utils.data import DataLoader

from benchmarks.partition_programs.catalogue import PROGRAMS
from benchmarks.partition_programs.training import train
from hetstream.mpi_dataworkers.loader.connection import LoaderConnection
from hetstream.mpi_dataworkers.partitioner import cut, partition
from hetstream.mpi_dataworkers.partitioner.cut import CutDecision, Cutter, Rates
from hetstream.mpi_dataworkers.partitioner.forward import PartitionedForward
from hetstream.mpi_dataworkers.partitioner.unmodified import _calls


@pytest.fixture
def offloading(three: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The hook with three data workers, and everything that may move does."""
    monkeypatch.setenv("HETSTREAM_OFFLOAD", "all")
    with hooked(three.name, monkeypatch):
        yield
    assert not _calls.followers, "a loader is followed for ever"


def losses_of(model: torch.nn.Module, loader: Any, epochs: int = 1) -> list[str]:
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for _ in range(epochs):
        for values, labels in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.binary_cross_entropy_with_logits(model(values.to("cpu")), labels)
            loss.backward()
            optimizer.step()
            # With torch's generator: its own loader draws a seed in each pass, and nothing else may.
            losses.append(f"{float(loss.detach()).hex()} {hash(torch.get_rng_state().numpy().tobytes())}")
    return losses


def model_of(kind: type[torch.nn.Module]) -> torch.nn.Module:
    torch.manual_seed(0)
    return kind()


@pytest.mark.shows("partitioning works with evaluation, AMP, DDP, `torch.compile`, two models and two loaders")
@pytest.mark.parametrize("name", ["dlrm", "cnn", "depends_on_data"])
def test_a_program_that_knows_nothing_has_its_losses(
    name: str, three: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = train(PROGRAMS[name], 6)
    monkeypatch.setenv("HETSTREAM_OFFLOAD", "all")
    with hooked(three.name, monkeypatch):
        assert train(PROGRAMS[name], 6) == expected
    said = "\n".join(record.getMessage() for record in caplog.records)
    assert "data workers run" in said
    beginning = "; that is the forward's beginning alone; the rest stays: "
    assert (beginning in said) == (name == "depends_on_data")
    assert ("Detected data-dependent branching" in said) == (beginning in said)
    assert not _calls.followers


@pytest.mark.shows("partitioning works with evaluation, AMP, DDP, `torch.compile`, two models and two loaders")
def test_evaluation_between_two_epochs_and_a_second_loader_change_nothing(
    three: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = losses_of(model_of(models.Clean), DataLoader(models.Rows(48), 8))
    monkeypatch.setenv("HETSTREAM_OFFLOAD", "all")
    with hooked(three.name, monkeypatch):
        model = model_of(models.Clean)
        loader, validation = DataLoader(models.Rows(48), 8), DataLoader(models.Rows(16), 8)
        assert losses_of(model, loader) == expected
        forward = vars(model)["_compiled_call_impl"]
        assert isinstance(forward, PartitionedForward)
        model.eval()
        with torch.no_grad():
            for values, _ in validation:
                assert torch.equal(model(values), models.Clean.forward(model, values))
        model.train()
        losses_of(model, loader)
        assert forward.counts.partitioned == 6
        _end_followers()


class TwoTowers(torch.nn.Module):
    """Two models whose outputs are added, each with a batch of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = models.Clean(), models.Clean()

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = self.left(left) + self.right(right)
        return added


@pytest.mark.parametrize("takes_from", ["two loaders", "one loader"])
def test_of_a_forward_that_takes_two_batches_the_part_of_one_moves(
    takes_from: str, three: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def losses() -> tuple[list[str], Any]:
        model = model_of(TwoTowers)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        left = iter(DataLoader(models.Rows(160), 8))
        right = iter(DataLoader(models.Rows(160), 8)) if takes_from == "two loaders" else left
        found = []
        for (values, labels), (others, _) in zip(left, right, strict=True):
            optimizer.zero_grad()
            loss = torch.nn.functional.binary_cross_entropy_with_logits(model(values, others), labels)
            loss.backward()
            optimizer.step()
            found.append(float(loss.detach()).hex())
        return found, vars(model).get("_compiled_call_impl")

    expected, _ = losses()
    monkeypatch.setenv("HETSTREAM_OFFLOAD", "all")
    with hooked(three.name, monkeypatch):
        found, forward = losses()
    assert found == expected
    assert (forward.counts.checked, forward.counts.original) == (3, 0)
    assert forward.counts.partitioned >= len(expected) - 10
    _end_followers()


def _end_followers() -> None:
    for follower in list(_calls.followers):
        follower._end("the test ends")


def test_activation_checkpointing_recomputes_what_it_computed(three: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def losses() -> list[str]:
        model, found = model_of(models.Clean), []
        for values, _ in DataLoader(models.Rows(80), 8):
            loss = torch.utils.checkpoint.checkpoint(model, values, use_reentrant=False).square().sum()
            loss.backward()
            found.append(float(loss.detach()).hex())
        return found

    expected = losses()
    monkeypatch.setenv("HETSTREAM_OFFLOAD", "all")
    with hooked(three.name, monkeypatch):
        assert losses() == expected


def test_a_loader_whose_batches_arrive_nowhere_is_followed_no_more(
    offloading: None, caplog: pytest.LogCaptureFixture
) -> None:
    assert len(list(DataLoader(models.Rows(120), 2))) == 60
    assert not _calls.followers
    assert "its batches arrive in no model's forward as the loader gives them" in caplog.text


@pytest.mark.shows("partitioning works with evaluation, AMP, DDP, `torch.compile`, two models and two loaders")
def test_two_models_of_one_loader_stay_where_they_are(offloading: None, caplog: pytest.LogCaptureFixture) -> None:
    one, other = model_of(models.Clean), model_of(models.Drops)
    for values, _ in DataLoader(models.Rows(32), 8):
        one(values)
        other(values)
    assert "its batches go to several models" in caplog.text
    assert "_compiled_call_impl" not in vars(one)


def test_nothing_is_followed_unless_asked_for(three: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with hooked(three.name, monkeypatch):
        assert len(list(DataLoader(models.Rows(32), 8))) == 4
        assert not _calls.followers


def test_what_is_said_of_a_model(offloading: None, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    losses_of(model_of(models.Clean), DataLoader(models.Rows(48), 8))
    assert "data workers run 5 operators of Clean's forward: everything that may move was asked for" in caplog.text


@pytest.mark.shows("a partitioned program has the losses of the original, bit for bit on CPU trainers")
def test_random_operators_move_when_all_is_asked_for(offloading: None, caplog: pytest.LogCaptureFixture) -> None:
    losses_of(model_of(models.Noisy), DataLoader(models.Rows(80), 8))
    assert "data workers run" in caplog.text
    assert "the check of a batch failed" not in caplog.text


@pytest.mark.shows("costs decide where a forward is cut; a cut that gains nothing is taken back")
@pytest.mark.parametrize("gains", [True, False])
def test_a_cut_that_gains_nothing_is_taken_back(
    gains: bool, three: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = losses_of(model_of(models.Clean), DataLoader(models.Rows(400), 8))
    measured: list[tuple[int, int]] = []

    def judged(with_cut_s: list[float], without_s: list[float]) -> cut.CutAssessment:
        measured.append((len(with_cut_s), len(without_s)))
        return cut.CutAssessment(gains, 0.5 if gains else 1.0, 1.0, True, "as measured")

    monkeypatch.setattr(cut, "judged", judged)
    monkeypatch.setattr(partition, "STEPS_OF_A_LOOK", 10**6)
    decide = Cutter.decide

    def eager(cutter: Cutter, rates: Rates) -> CutDecision:
        gain = sum(cost.trainer_s for cost in cutter._costs.values())
        return cutter.largest(rates) if gain else decide(cutter, rates)

    monkeypatch.setattr(Cutter, "decide", eager)
    stages: list[bool] = []
    use = LoaderConnection.use_forward_stage

    def used(connection: LoaderConnection, stage: Any, on_extra: Any) -> None:
        stages.append(stage is not None)
        use(connection, stage, on_extra)

    monkeypatch.setattr(LoaderConnection, "use_forward_stage", used)
    monkeypatch.setenv("HETSTREAM_OFFLOAD", "auto")
    with hooked(three.name, monkeypatch):
        assert losses_of(model_of(models.Clean), DataLoader(models.Rows(400), 8)) == expected
    assert "data workers run 5 operators" in caplog.text
    assert measured == [(2, 1)], "a block of steps without the cut lies between two with it"
    assert ("Clean runs as it is written: as measured" in caplog.text) != gains
    # Blocks without it are without it in the data workers, too.
    assert stages == [True, False, True] + [False] * (not gains)
