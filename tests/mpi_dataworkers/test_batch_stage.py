"""The batch stage: the same bytes wherever it runs, and another one from any step on."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hook_programs as programs
import numpy as np
import pytest
import sample_datasets as datasets
import sample_stages as stages
import torch
from hooking import connection_of, hooked
from torch.utils.data import DataLoader as TorchLoader

from hetstream import DataLoader
from hetstream.base.errors import OptionsError
from hetstream.mpi_dataworkers.errors import PipelineError
from hetstream.mpi_dataworkers.ops.pipeline import StagedBatch
from hetstream.mpi_dataworkers.ops.tree import flatten, holds_objects, unflatten
from hetstream.mpi_dataworkers.wire.codec import fuse, split

Make = Callable[..., DataLoader]
LOADER_OPTIONS: dict[str, Any] = {"batch_size": 4, "seed": 5}
LENGTH, NUM_STEPS = 50, 13
IN_SERVICE, IN_TRAINER, IN_PROCESSES = "service", "trainer", "processes"


def length_of(element: Any) -> int:
    return int(element[1]) % 7 + 1


def where(place: str, three: Any) -> dict[str, Any]:
    return {IN_SERVICE: {"service": three.name}, IN_TRAINER: {}, IN_PROCESSES: {"num_workers": 2}}[place]


def as_bytes(batches: Any) -> list[Any]:
    return [[part.numpy().tobytes() if isinstance(part, torch.Tensor) else part for part in batch] for batch in batches]


# Kinds of data, and how they are read.
READ: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "indexed": (lambda: datasets.Augmented(LENGTH), {"shuffle": True}),
    "sampler": (lambda: datasets.Augmented(LENGTH), {"sampler": [*range(0, LENGTH, 2), *range(1, LENGTH, 2)]}),
    "divided": (lambda: datasets.Augmented(LENGTH), {"sharding": "data", "num_shards": 3}),
    "lengths": (
        lambda: datasets.Augmented(LENGTH),
        {"lengths": np.arange(LENGTH) % 9 + 1, "bucket_boundaries": [4, 7], "shuffle": True},
    ),
    "stream": (lambda: datasets.Log(LENGTH), {"num_shards": 3}),
    "rounds": (
        lambda: datasets.Log(LENGTH),
        {"num_shards": 2, "length_of": length_of, "bucket_boundaries": [3, 5]},
    ),
}
PLACES = [IN_SERVICE, IN_PROCESSES]


# --- the same everywhere --------------------------------------------------------------------------------------------


@pytest.mark.shows("a stage on the batch is the same everywhere, and is switched between two steps")
@pytest.mark.parametrize("read", READ)
def test_the_stage_makes_the_same_of_each_batch_wherever_it_runs(three: Any, loaders: Make, read: str) -> None:
    dataset, options = READ[read]
    want, staged_twice = [], loaders(dataset(), batch_stage=stages.Noise(), **options)
    for _ in range(2):
        want.append(as_bytes(staged_twice))
    plain = as_bytes(loaders(dataset(), **options))
    assert [ids for _, ids in want[0]] == [ids for _, ids in plain]
    assert all(one != other for (one, _), (other, _) in zip(want[0], plain, strict=True))
    for place in PLACES:
        loader = loaders(dataset(), batch_stage=stages.Noise(), **options, **where(place, three))
        assert [as_bytes(loader) for _ in range(2)] == want, place
    assert want[0] != want[1], "another epoch draws other numbers"


def test_each_step_draws_numbers_of_its_own_and_the_programs_are_left_alone(loaders: Make) -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    noise = stages.Noise()
    own = noise.own.bit_generator.state
    zeros = stages.Times(0.0)
    batches = list(loaders(datasets.Augmented(LENGTH), batch_stage=noise))
    quiet = list(loaders(datasets.Augmented(LENGTH), batch_stage=zeros))
    plain = list(loaders(datasets.Augmented(LENGTH)))
    added = {round(float((one[0] - other[0]).mean()), 4) for one, other in zip(batches, plain, strict=True)}
    assert len(added) == NUM_STEPS
    assert all(not batch[0].any() for batch in quiet)
    assert torch.equal(torch.get_rng_state(), before)
    assert noise.own.bit_generator.state == own


@pytest.mark.parametrize("place", [IN_SERVICE, IN_TRAINER, IN_PROCESSES])
def test_a_module_is_a_stage_without_gradients(three: Any, loaders: Make, place: str) -> None:
    loader = loaders(datasets.Augmented(12), batch_stage=stages.Network(), **where(place, three))
    batches, plain = list(loader), list(loaders(datasets.Augmented(12)))
    assert not any(batch[0].requires_grad for batch in batches)
    assert all(torch.equal(one[0], other[0] * 1.5) for one, other in zip(batches, plain, strict=True))


def test_a_stage_may_collate(three: Any, loaders: Make) -> None:
    want = as_bytes(loaders(datasets.Augmented(12)))
    for place in PLACES:
        got = as_bytes(loaders(datasets.Augmented(12), batch_stage=stages.again, **where(place, three)))
        assert got == want


def test_data_workers_that_die_in_the_stage_cost_nothing(service: Any, loaders: Make, tmp_path: Path) -> None:
    service.start_workers(2)
    stage = stages.Striking(2.0, 7, tmp_path)
    options = {"shuffle": True, "max_attempts": 10}
    dying = loaders(datasets.Augmented(LENGTH), batch_stage=stage, service=service.name, **options)
    want = loaders(datasets.Augmented(LENGTH), batch_stage=stages.Times(2.0), **options)
    batches = as_bytes(itertools.islice(dying, 3))
    dying.set_epoch(0)
    assert batches == as_bytes(itertools.islice(want, 3))
    want.set_epoch(0)
    assert as_bytes(dying) == as_bytes(want)
    assert any(file.name.isdigit() for file in tmp_path.iterdir()), "none has died"


# --- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [IN_SERVICE, IN_TRAINER, IN_PROCESSES])
@pytest.mark.parametrize("read", ["indexed", "stream"])
def test_what_a_stage_raises_names_its_line_and_the_step(three: Any, loaders: Make, place: str, read: str) -> None:
    dataset, options = READ[read]
    options = {**options, "shuffle": None, "num_shards": 1} if read == "stream" else {"shuffle": False}
    loader = loaders(dataset(), batch_stage=stages.Raising(17), **options, **where(place, three))
    batches = iter(loader)
    seen = [next(batches) for _ in range(4)]
    with pytest.raises(datasets.UserError, match="no batch with 17") as raised:
        next(batches)
    text = "".join([str(raised.value), *getattr(raised.value, "__notes__", ()), *map(str, raised.traceback)])
    assert "step 4" in text
    assert "sample_stages.py" in text
    assert len([*seen, *batches]) == NUM_STEPS - 1, "as torch, it goes on after it"


def ending(batch: Any) -> Any:
    raise StopIteration(len(batch))


def test_a_stage_that_raises_stop_iteration_does_not_end_the_pass(loaders: Make) -> None:
    with pytest.raises(RuntimeError, match=r"a function that the loader was given, raised StopIteration\(2\)"):
        list(loaders(datasets.Augmented(8), batch_stage=ending))


@pytest.mark.parametrize("place", [IN_SERVICE, IN_TRAINER, IN_PROCESSES])
def test_a_step_whose_stage_raises_is_left_out_if_errors_are_skipped(three: Any, loaders: Make, place: str) -> None:
    loader = loaders(datasets.Augmented(LENGTH), batch_stage=stages.Raising(17), on_error="skip", **where(place, three))
    ids = [index for batch in loader for index in batch[1].tolist()]
    assert ids == [index for index in range(LENGTH) if not 16 <= index < 20]
    assert loader.stats()["skipped"] == 4
    assert [skipped.sample_index for skipped in loader.skipped_samples] == [-1]


@pytest.mark.shows("closures that cannot be pickled stay in the trainer")
@pytest.mark.parametrize(
    ("stage", "text"),
    [
        (3, "batch_stage=3: must be a function of a batch or None"),
        (stages.Locked(), r"lock \(_thread.lock\) cannot be pickled .* class of a module"),
        (stages.Locked().__call__, "cannot be pickled"),
    ],
)
def test_what_cannot_be_a_stage_is_refused_at_once(loaders: Make, stage: Any, text: str) -> None:
    with pytest.raises(OptionsError, match=text):
        loaders(datasets.Augmented(8), batch_stage=stage)
    loader = loaders(datasets.Augmented(8), batch_stage=stages.Times(2.0))
    batches = iter(loader)
    first = next(batches)
    with pytest.raises(OptionsError, match=text):
        loader.set_batch_stage(stage)
    plain = list(loaders(datasets.Augmented(8)))
    assert torch.equal(torch.cat([first[0], next(batches)[0]]), torch.cat([batch[0] for batch in plain]) * 2)


# --- another stage between two steps --------------------------------------------------------------------------------


def switched(loader: Any, at: dict[int, Any]) -> list[Any]:
    """The batches of a pass, with another stage before some steps."""
    got, batches = [], iter(loader)
    for step in itertools.count():
        if step in at:
            loader.set_batch_stage(at[step])
        try:
            got.append(next(batches))
        except StopIteration:
            return got
    raise AssertionError


def pieced(loaders: Make, read: str, at: dict[int, Any]) -> list[Any]:
    """What `switched` is to give: of each whole pass with one stage its part."""
    dataset, options = READ[read]
    whole = {step: as_bytes(loaders(dataset(), batch_stage=stage, **options)) for step, stage in at.items()}
    last = 0
    want: list[Any] = []
    for step in range(len(whole[0])):
        last = step if step in at else last
        want.append(whole[last][step])
    return want


@pytest.mark.shows("a stage on the batch is the same everywhere, and is switched between two steps")
@pytest.mark.parametrize("read", READ)
@pytest.mark.parametrize("steps", [(0, 1, 2), (5, 6, 12), pytest.param((3, 13), marks=pytest.mark.slow)])
def test_another_stage_begins_at_its_step_and_no_batch_is_lost_or_comes_twice(
    three: Any, loaders: Make, read: str, steps: tuple[int, ...]
) -> None:
    dataset, options = READ[read]
    changes = dict(zip(steps, [stages.Noise(2.0), None, stages.Times(3.0)], strict=False))
    want = pieced(loaders, read, {0: None} | changes)
    for place in [IN_SERVICE, IN_TRAINER, IN_PROCESSES]:
        loader = loaders(dataset(), **options, **where(place, three))
        assert as_bytes(switched(loader, changes)) == want, place


def test_a_stage_stays_for_the_passes_that_follow(three: Any) -> None:
    for options in ({"service": three.name}, {}, {"num_workers": 1, "persistent_workers": True}):
        # Not from the fixture, which would hold processes that are kept.
        with DataLoader(datasets.Augmented(20), **LOADER_OPTIONS, **options) as loader:
            switched(loader, {2: stages.Noise()})
            want = DataLoader(datasets.Augmented(20), **LOADER_OPTIONS, batch_stage=stages.Noise())
            want.set_epoch(1)
            assert as_bytes(loader) == as_bytes(want), options


def test_batches_that_may_come_in_any_order_come_once_through_a_change(three: Any, loaders: Make) -> None:
    loader = loaders(datasets.Augmented(200), in_order=False, service=three.name)
    batches = iter(loader)
    got = [next(batches) for _ in range(9)]
    loader.set_batch_stage(stages.Times(0.0))
    rest = list(batches)
    assert sorted(index for batch in [*got, *rest] for index in batch[1].tolist()) == list(range(200))
    assert all(batch[0].any() for batch in got)
    assert not any(batch[0].any() for batch in rest)


@pytest.mark.shows("a stage on the batch is the same everywhere, and is switched between two steps")
def test_a_change_while_data_workers_die_loses_nothing(service: Any, loaders: Make, tmp_path: Path) -> None:
    service.start_workers(2)
    loader = loaders(datasets.Augmented(80), service=service.name, max_attempts=10, shuffle=True)
    first = stages.Striking(2.0, 9, tmp_path)
    got = as_bytes(switched(loader, {0: first, 4: stages.Times(3.0), 9: stages.Striking(2.0, 9, tmp_path)}))
    two, three = (loaders(datasets.Augmented(80), shuffle=True, batch_stage=stages.Times(by)) for by in (2.0, 3.0))
    twice, thrice = as_bytes(two), as_bytes(three)
    assert got == [*twice[:4], *thrice[4:9], *twice[9:]]


def test_steps_that_the_loader_makes_itself_have_the_stage_of_their_time(service: Any, loaders: Make) -> None:
    for read in ("indexed", "stream"):
        dataset, options = READ[read]
        changes = {0: stages.Noise(), 3: stages.Times(2.0), 5: None}
        loader = loaders(dataset(), service=service.name, **options)
        assert as_bytes(switched(loader, changes)) == pieced(loaders, read, changes)
        assert loader.stats()["local_steps"] == loader.stats()["steps"]


def test_a_dataset_that_can_no_longer_be_pickled_is_as_it_was_sent(three: Any, loaders: Make) -> None:
    dataset = stages.Opening(LENGTH)
    loader = loaders(dataset, service=three.name)
    batches = iter(loader)
    got = [next(batches) for _ in range(2)]
    dataset[0]
    dataset.length = 3  # and a change that is for the next pass
    loader.set_batch_stage(stages.Times(2.0))
    got += batches
    plain, double = (loaders(datasets.Augmented(LENGTH), batch_stage=stage) for stage in (None, stages.Times(2.0)))
    assert as_bytes(got) == [*as_bytes(plain)[:2], *as_bytes(double)[2:]]


def test_a_stage_does_not_change_where_shared_memory_would_become_a_copy(three: Any, loaders: Make) -> None:
    dataset = stages.Opening(LENGTH)
    dataset.table = torch.zeros(8).share_memory_()
    loader = loaders(dataset, service=three.name)
    batches = iter(loader)
    got = [next(batches)]
    dataset[0]
    with pytest.raises(PipelineError, match="between two iterations"):
        loader.set_batch_stage(stages.Times(2.0))
    assert as_bytes([*got, *batches]) == as_bytes(loaders(datasets.Augmented(LENGTH)))


# --- resume and sharing ---------------------------------------------------------------------------------------------


@pytest.mark.shows("a stage on the batch is the same everywhere, and is switched between two steps")
@pytest.mark.parametrize("read", ["indexed", "sampler", "stream"])
def test_a_state_from_before_the_change_is_continued_with_either_stage(three: Any, loaders: Make, read: str) -> None:
    dataset, options = READ[read]
    loader = loaders(dataset(), service=three.name, **options)
    batches = iter(loader)
    for _ in range(5):
        next(batches)
    before = json.dumps(loader.state_dict()) if read != "stream" else loader.state_dict()
    loader.set_batch_stage(stages.Noise())
    next(batches)
    after = loader.state_dict()
    loader.close()
    want = as_bytes(loaders(dataset(), batch_stage=stages.Noise(), **options))
    for state, step in ((before, 5), (after, 6)):
        other = loaders(dataset(), batch_stage=stages.Noise(), service=three.name, **options)
        other.load_state_dict(json.loads(state) if isinstance(state, str) else state)
        assert as_bytes(other) == want[step:]


@pytest.mark.shows("a stage on the batch is the same everywhere, and is switched between two steps")
@pytest.mark.parametrize("name", [None, "numbers"])
def test_loaders_share_as_long_as_they_have_the_same_stage(
    three: Any, loaders: Make, tmp_path: Path, name: str | None
) -> None:
    def make(job: str, stage: Any) -> DataLoader:
        common = {"service": three.name, "job_name": f"{job}-{name}", "sharing": "lossless", "pipeline_name": name}
        return loaders(datasets.Logged(40, tmp_path / "read"), batch_stage=stage, **common)

    one, two, other = make("one", stages.Times(2.0)), make("two", stages.Times(2.0)), make("three", stages.Times(3.0))
    double, triple = (as_bytes(loaders(datasets.Augmented(40), batch_stage=stages.Times(by))) for by in (2.0, 3.0))
    got = [as_bytes(batches) for batches in zip(*zip(one, two, other, strict=True), strict=True)]
    assert got == [double, double, triple]
    assert one.stats()["shared_steps"] + two.stats()["shared_steps"] == 10
    assert other.stats()["shared_steps"] == 0
    one.set_epoch(0)
    assert as_bytes(switched(one, {0: None, 4: stages.Times(3.0)}))[4:] == triple[4:]


# --- annotated batches ----------------------------------------------------------------------------------------------


def test_an_annotated_batch_travels_as_tensors() -> None:
    staged = stages.Annotating()([torch.rand(4, 3), torch.arange(4)])
    spec, leaves = flatten(staged)
    assert not holds_objects(spec)
    frames, places = fuse(leaves)
    again = unflatten(spec, split([bytes(frame) for frame in frames], places))
    assert type(again) is StagedBatch
    assert torch.equal(again.batch[0], staged.batch[0])
    assert len(again.extra) == len(staged.extra)
    assert all(torch.equal(one, other) for one, other in zip(again.extra, staged.extra, strict=True))
    assert [one.dtype for one in again.extra] == [one.dtype for one in staged.extra]


@pytest.mark.parametrize("place", [IN_SERVICE, IN_TRAINER, IN_PROCESSES])
def test_the_program_gets_the_batch_and_the_rest_is_told_just_before(three: Any, loaders: Make, place: str) -> None:
    loader = loaders(datasets.Augmented(LENGTH), batch_stage=stages.Annotating(), **where(place, three))
    plain = list(loaders(datasets.Augmented(LENGTH)))
    assert [batch[0].tolist() for batch in loader] == [ids.tolist() for _, ids in plain], "nobody asks for the rest"
    loader.set_epoch(0)
    events: list[Any] = []

    def on_extra(step: int, batch: Any, extra: Any) -> Any:
        events.append((step, extra))
        return batch

    loader._connection.on_extra = on_extra
    for number, batch in enumerate(loader):
        events.append(batch)
        step, extra = events[2 * number]
        assert step == number
        assert torch.equal(extra[0], plain[number][0])
        assert torch.equal(extra[-1], batch[0].to(torch.int32))
        assert len(extra) == 13
    assert len(events) == 2 * NUM_STEPS


# --- under the hook -------------------------------------------------------------------------------------------------


@pytest.fixture(params=[IN_SERVICE, IN_TRAINER])
def hook(request: pytest.FixtureRequest, three: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with hooked(three.name if request.param == IN_SERVICE else None, monkeypatch):
        yield request.param


@pytest.mark.parametrize("persistent", [False, True])
def test_a_loader_of_torch_changes_its_stage_under_the_hook(hook: str, persistent: bool) -> None:
    def make() -> Any:
        torch.manual_seed(4)
        options = {"num_workers": 2, "persistent_workers": True} if persistent else {}
        return TorchLoader(programs.Numbers(30), 4, shuffle=True, **options)

    plain = [[batch.tolist() for batch in loader] for loader in [make()] for _ in range(2)]
    loader, told = make(), []
    batches = iter(loader)
    got = [next(batches).tolist() for _ in range(2)]

    def on_extra(step: int, batch: Any, extra: Any) -> Any:
        told.append((step, extra[0].tolist()))
        return batch

    connection_of(loader).use_forward_stage(stages.doubled_beside, on_extra)
    got += [batch.tolist() for batch in batches]
    assert [got, [batch.tolist() for batch in loader]] == plain, hook
    doubled = [[[2 * value for value in batch] for batch in epoch] for epoch in plain]
    assert told == [*list(enumerate(doubled[0]))[2:], *enumerate(doubled[1])]
    connection_of(loader).use_forward_stage(None, None)
    assert len(list(loader)) == 8
    assert len(told) == 14
