"""What is moved of a forward, beside everything else that a loader does: batches and losses are the plain program's."""

from __future__ import annotations

import collections
import contextlib
import logging
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
import sample_models as models
import sample_stages as stages
import torch
from hooking import hooked
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import default_collate

from hetstream import DataLoader, mix
from hetstream.mpi_dataworkers.partitioner.cut import Cutter
from hetstream.mpi_dataworkers.partitioner.partition import Partition, partition
from hetstream.mpi_dataworkers.partitioner.unmodified import _calls

LENGTH = 160
LOADER_OPTIONS: dict[str, Any] = {"batch_size": 8, "seed": 3, "shuffle": True}
ON_GPUS = {"gpu_stage": stages.Shifts(3.0)}
MOVED = "data workers run 5 operators of Clean's forward"


@pytest.fixture(scope="module")
def staged(three: Any) -> Iterator[Any]:
    """Three data workers without a GPU, and one with."""
    three.start_workers(1, "--device", "gpu")
    return three


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` moves what may move, as if it were worth it."""
    monkeypatch.setattr(Cutter, "decide", lambda cutter, rates: Cutter.largest(cutter, rates))


@pytest.fixture
def offloading(
    staged: Any, eager: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Iterator[pytest.LogCaptureFixture]:
    """The start-up hook with `--offload auto`; what was logged is given."""
    monkeypatch.setenv("HETSTREAM_OFFLOAD", "auto")
    caplog.set_level(logging.WARNING)
    with hooked(staged.name, monkeypatch):
        yield caplog
    assert not _calls.followers, "a loader is followed for ever"


@contextlib.contextmanager
def plainly(streams: bool = False) -> Iterator[None]:
    """The program without `--offload`, and without a service unless it is to stream."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("HETSTREAM_OFFLOAD", "off")
        if not streams:
            patched.delenv("HETSTREAM_SERVICE")
        yield


class Training:
    """A model in training; what its forward got, and what came out, step by step."""

    def __init__(self, kind: type[torch.nn.Module] = models.Clean) -> None:
        torch.manual_seed(0)
        self.model = kind()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.losses: list[str] = []

    def train(self, batches: Any) -> list[str]:
        """Losses, and digests of the batches, so far."""
        for values, labels in batches:
            self.optimizer.zero_grad()
            loss = torch.nn.functional.binary_cross_entropy_with_logits(self.model(values), labels)
            loss.backward()
            self.optimizer.step()
            self.losses.append(f"{float(loss.detach()).hex()} {int(labels.sum())}")
        return self.losses

    def partitioned_by(self, loader: Any, offload: str = "all") -> Partition:
        """Have its forward's part run in the data workers of a loader."""
        example = default_collate([loader.dataset[index] for index in range(8)])
        return partition(self.model, example, loader=loader, offload=offload)


@pytest.mark.parametrize(
    ("kind", "own"),
    [(models.Clean, {"batch_stage": stages.Shifts(2.0)} | ON_GPUS), (models.Noisy, ON_GPUS)],
    ids=["both", "random"],
)
def test_operators_run_behind_the_stage_on_gpus(
    kind: type[torch.nn.Module], own: dict[str, Any], staged: Any, loaders: Callable[..., Any]
) -> None:
    found = []
    for service in (None, staged.name):
        training, loader = Training(kind), loaders(models.Rows(LENGTH), service=service, **own)
        done = training.partitioned_by(loader)
        torch.manual_seed(2)
        found.append(training.train(loader))
        assert done.counts.partitioned > 10, done.counts
        assert done.counts.original == 0
        assert service is None or loader.stats()["local_steps"] == 0
    assert found[0] == found[1]
    if kind is models.Clean:
        assert found[0] == Training().train(loaders(models.Rows(LENGTH), **own))


def test_a_program_with_our_loader_and_a_gpu_stage_is_partitioned_by_the_hook(
    offloading: pytest.LogCaptureFixture, loaders: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def losses() -> list[str]:
        training = Training()
        loader = loaders(models.Rows(LENGTH), **ON_GPUS)
        for _ in range(3):
            training.train(loader)
        return training.losses

    found = losses()
    assert MOVED in offloading.text
    with plainly():
        assert found == losses()


def test_what_the_program_partitions_itself_the_hook_leaves_alone(
    offloading: pytest.LogCaptureFixture, loaders: Callable[..., Any]
) -> None:
    training, loader = Training(), loaders(models.Rows(LENGTH))
    done = training.partitioned_by(loader)
    training.train(loader)
    assert done.counts.partitioned == LENGTH // 8 - 3
    assert offloading.text.count(MOVED) == 1


def test_the_program_changes_its_own_stage_while_operators_are_moved(staged: Any, loaders: Callable[..., Any]) -> None:
    def losses(partitioned: bool) -> tuple[list[str], Partition | None]:
        training, loader = Training(), loaders(models.Rows(LENGTH), service=staged.name, batch_stage=stages.Shifts(2.0))
        done = training.partitioned_by(loader) if partitioned else None
        batches = iter(loader)
        training.train(islice(batches, 6))
        loader.set_batch_stage(stages.Shifts(4.0))
        training.train(islice(batches, 6))
        if done is not None:
            assert done.counts.partitioned == 9
            done.remove("the test says so")
        training.train(batches)
        return training.losses, done

    expected, _ = losses(partitioned=False)
    found, _ = losses(partitioned=True)
    assert found == expected


@pytest.mark.parametrize("num_ahead", [1, 3])
def test_a_program_that_fetches_batches_ahead(
    num_ahead: int, offloading: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NVIDIA's examples do, and as our loader does with `device=`: the forward gets a batch that is not the last."""

    def ahead(loader: Any) -> Iterator[Any]:
        fetched = collections.deque[Any]()
        for batch in loader:
            fetched.append([part.to("cpu", non_blocking=True) for part in batch])
            if len(fetched) > num_ahead:
                yield fetched.popleft()
        yield from fetched

    def losses() -> list[str]:
        return Training().train(ahead(TorchLoader(models.Rows(LENGTH), 8)))

    found = losses()
    assert MOVED in offloading.text
    with plainly():
        assert found == losses()


def test_rounds_of_like_lengths(offloading: pytest.LogCaptureFixture, loaders: Callable[..., Any]) -> None:
    lengths = {"lengths": [index % 9 + 1 for index in range(LENGTH)], "bucket_boundaries": [4, 7]}
    training, loader = Training(), loaders(models.Rows(LENGTH), **lengths)
    plain = Training()
    for epoch in range(2):
        training.train(loader)
        reference = loaders(models.Rows(LENGTH), service=None, **lengths)
        reference.set_epoch(epoch)
        with plainly():
            plain.train(reference)
    assert training.losses == plain.losses
    assert MOVED in offloading.text


@pytest.mark.parametrize("what", ["datasets", "loaders"])
def test_mixtures(
    what: str, offloading: pytest.LogCaptureFixture, loaders: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def losses() -> list[str]:
        parts: list[Any] = [models.Rows(LENGTH), models.Rows(LENGTH // 2)]
        if what == "loaders":
            mixed = mix([loaders(part) for part in parts], weights=[2, 1], seed=5)
        else:
            mixed = loaders(mix(parts, weights=[2, 1], seed=5))
        training = Training()
        for _ in range(2):
            training.train(mixed)
        return training.losses

    found = losses()
    assert MOVED in offloading.text
    _end_followers()
    with plainly():
        assert found == losses()


def _end_followers() -> None:
    for follower in list(_calls.followers):
        follower._end("the test ends")


PERSISTENT = {"num_workers": 2, "persistent_workers": True}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (TorchLoader, PERSISTENT),
        (DataLoader, {}),
        pytest.param(TorchLoader, {}, marks=pytest.mark.slow),
        pytest.param(TorchLoader, {"num_workers": 2}, marks=pytest.mark.slow),
        pytest.param(DataLoader, PERSISTENT, marks=pytest.mark.slow),
    ],
    ids=lambda one: one.__module__.split(".")[0] if isinstance(one, type) else "-".join(one) or "plain",
)
def test_epochs_over_a_dataset_that_changes(
    kind: Any,
    options: dict[str, Any],
    offloading: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def losses() -> list[str]:
        torch.manual_seed(1)
        more = {"seed": 7} if kind is DataLoader else {}
        training, loader = Training(), kind(models.Scaled(96), 8, shuffle=True, **options, **more)
        for epoch in range(4):
            loader.dataset.scale = 1.0 + epoch
            training.train(loader)
        return training.losses

    found = losses()
    assert MOVED in offloading.text
    with plainly(streams=kind is DataLoader):  # whose data workers see each change, whatever torch's would
        assert found == losses()


@pytest.mark.parametrize("sharing", ["lossless", "window"])
def test_of_two_programs_that_share_a_stream_one_is_partitioned(
    sharing: str, staged: Any, loaders: Callable[..., Any]
) -> None:
    shared = {"service": staged.name, "sharing": sharing, "pipeline_name": f"rows-{sharing}"}
    one, other = Training(), Training()
    loader, another = loaders(models.Rows(LENGTH), **shared), loaders(models.Rows(LENGTH), **shared)
    done = one.partitioned_by(loader)
    for mine, its in zip(loader, another, strict=True):
        one.train([mine])
        other.train([its])
    expected = Training().train(loaders(models.Rows(LENGTH)))
    assert other.losses == expected
    assert one.losses == expected
    assert done.counts.partitioned > 10
    assert loader.stats()["local_steps"] == another.stats()["local_steps"] == 0


def test_a_run_goes_on_from_the_middle_of_an_epoch(
    offloading: pytest.LogCaptureFixture, loaders: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saved with a cut, and without one; loaded with one: nothing in a state or a checkpoint knows of it."""
    plain = loaders(models.Rows(LENGTH), service=None)
    monkeypatch.setenv("HETSTREAM_OFFLOAD", "off")
    expected = Training()
    for _ in range(2):
        expected.train(plain)
    monkeypatch.setenv("HETSTREAM_OFFLOAD", "auto")

    def begun(num_steps: int) -> tuple[Any, Any, Any]:
        training, loader = Training(), loaders(models.Rows(LENGTH))
        batches = iter(loader)
        training.train(islice(batches, num_steps))
        assert training.losses == expected.losses[:num_steps]
        states = training.model.state_dict(), training.optimizer.state_dict(), loader.state_dict()
        _end_followers()
        return states

    for num_steps in (2, 9):
        weights, moments, position = begun(num_steps)
        offloading.clear()
        assert [*weights] == [*models.Clean().state_dict()]
        training, loader = Training(), loaders(models.Rows(LENGTH))
        training.model.load_state_dict(weights)
        training.optimizer.load_state_dict(moments)
        loader.load_state_dict(position)
        for _ in range(2):
            training.train(loader)
        assert training.losses == expected.losses[num_steps:]
        assert "data workers run" in offloading.text


class Stronger(models.Clean):
    """Another model, whose operators are the same, and whose values are not."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 7.5


def test_one_of_two_models_of_a_loader_takes_nothing_that_was_computed_for_the_other(
    loaders: Callable[..., Any],
) -> None:
    one, other, loader = Training(), Training(Stronger), loaders(models.Rows(LENGTH))
    first, second = one.partitioned_by(loader), None
    for number, batch in enumerate(loader):
        if number == 5:
            second = other.partitioned_by(loader)
        one.train([batch])
        other.train([batch])
        if number == 9:
            first.remove("the test says so")
    assert one.losses == Training().train(loaders(models.Rows(LENGTH)))
    assert other.losses == Training(Stronger).train(loaders(models.Rows(LENGTH)))
    assert first.counts.partitioned == 3
    assert second is not None
    assert second.counts.partitioned == LENGTH // 8 - 6 - 3, "the first one's end has taken its operators away"
