"""Random numbers under the start-up hook against torch itself, property by property: where two runs, ranks, passes or
samples have the same numbers in torch's worker processes, they have them with data workers, and where not, not.

The values themselves are others: torch's follow from who makes a sample after which, these from the sample alone.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import noise_programs as programs
import numpy as np
import pytest
import torch
from hooking import assert_no_local_step, hooked
from torch.utils.data import DataLoader, Subset

from hetstream import DataLoader as OwnLoader

# What a program may do twice, differently or alike, and sees twice: a row of numbers for each sample.
Run = Callable[[], Any]


def ranks(dataset: Callable[[], Any], init: Callable[[int], Any]) -> list[Run]:
    """Two ranks that torch.manual_seed has made alike."""

    def run(rank: int) -> Any:
        torch.manual_seed(0)
        return programs.one_pass(dataset(), worker_init_fn=init(rank))

    return [lambda: run(0), lambda: run(1)]


def passes(seeds: tuple[int, int], dataset: Callable[[], Any], **options: Any) -> list[Run]:
    """Two passes of one loader, each after torch.manual_seed."""
    loader = DataLoader(dataset(), programs.BATCH_SIZE, **{"num_workers": 2} | options)

    def run(seed: int) -> Any:
        torch.manual_seed(seed)
        return torch.cat(list(loader)).numpy()

    return [lambda: run(seeds[0]), lambda: run(seeds[1])]


def unseeded_passes(dataset: Any, between: Callable[[Any], None] = lambda _: None, **options: Any) -> list[Run]:
    """Two passes of one loader, and what the program does before each."""
    loader = DataLoader(dataset, programs.BATCH_SIZE, **{"num_workers": 2} | options)

    def run() -> Any:
        between(dataset)
        return torch.cat(list(loader)).numpy()

    return [run, run]


def datasets(first: Callable[[], Any], second: Callable[[], Any]) -> list[Run]:
    """Two programs alike but for the dataset."""

    def run(dataset: Any) -> Any:
        torch.manual_seed(3)
        return programs.one_pass(dataset)

    return [lambda: run(first()), lambda: run(second())]


def in_a_nested(init: Callable[[int], Any]) -> list[Run]:
    return ranks(lambda: programs.Nested(programs.SeedsItself()), init)


def draw_from_own(dataset: Any) -> None:
    dataset.numpy.random()


def resumed(**options: Any) -> list[Run]:
    """The third epoch of a run, and of one that begins there with the generator's state."""

    def epoch(number: int, loader: Any) -> Any:
        torch.manual_seed(1000 + number)
        return torch.cat(list(loader)).numpy()

    def loader() -> Any:
        return DataLoader(programs.Noise(), programs.BATCH_SIZE, shuffle=True, **{"num_workers": 2} | options)

    def whole() -> Any:
        one = loader()
        return [epoch(number, one) for number in (1, 2, 3)][-1]

    return [whole, lambda: epoch(3, loader())]


def with_named(*seeds: tuple[int, int]) -> list[Run]:
    """Two programs that seed the generators of their module."""

    def run(first: int, second: int) -> Any:
        programs.seed_the_named(first, second)
        torch.manual_seed(3)
        return programs.one_pass(programs.NamedNoise())

    return [functools.partial(run, *seed) for seed in seeds]


PROPERTIES: dict[str, Callable[[], list[Run]]] = {
    "ranks without worker_init_fn": lambda: ranks(programs.Noise, lambda _: None),
    "ranks that worker_init_fn adds": lambda: ranks(programs.Noise, programs.AddsRank),
    "ranks that it adds to NumPy": lambda: ranks(programs.Noise, programs.AddsRankToNumpy),
    "ranks with seeds of a configuration": lambda: ranks(programs.Noise, programs.SeedsByConfig),
    "ranks in one worker": lambda: ranks(programs.Noise, programs.OnlyTheFirstWorker),
    "ranks by draws": lambda: ranks(programs.Noise, programs.DrawsFromIt),
    "one rank twice": lambda: ranks(programs.Noise, lambda _: programs.AddsRank(1)),
    "ranks in the dataset's generators": lambda: ranks(programs.OwnNoise, programs.SeedsTheDatasets),
    "one rank's generators twice": lambda: ranks(programs.OwnNoise, lambda _: programs.SeedsTheDatasets(1)),
    "generators from generators": lambda: [
        *ranks(lambda: programs.OwnNoise(1), programs.DerivesFromTheDatasets)[:1],
        *ranks(lambda: programs.OwnNoise(2), programs.DerivesFromTheDatasets)[:1],
    ],
    "generators from generators twice": lambda: ranks(programs.OwnNoise, programs.DerivesFromTheDatasets),
    "ranks in a number of the dataset": lambda: ranks(programs.SeedsItself, programs.TellsTheDataset),
    "ranks in a number of the dataset in it": lambda: in_a_nested(programs.TellsTheDataset),
    "a rank's number twice": lambda: in_a_nested(lambda _: programs.TellsTheDataset(1)),
    "one seed, two passes": lambda: passes((5, 5), programs.Noise),
    "two seeds, two passes": lambda: passes((5, 6), programs.Noise),
    "one seed, kept workers": lambda: passes((5, 5), programs.Noise, persistent_workers=True),
    "one seed, worker_init_fn": lambda: passes((5, 5), programs.Noise, worker_init_fn=programs.AddsRank(1)),
    "two seeds, seeds of a configuration": lambda: passes(
        (5, 6), programs.Noise, worker_init_fn=programs.SeedsByConfig(1)
    ),
    "seeds of a configuration, kept workers": lambda: passes(
        (5, 5), programs.Noise, worker_init_fn=programs.SeedsByConfig(1), persistent_workers=True
    ),
    "a generator for the loader": lambda: passes(
        (5, 5), programs.Noise, generator=torch.Generator().manual_seed(1), shuffle=True
    ),
    "two passes without a seed": lambda: unseeded_passes(programs.Noise()),
    "own generators, two passes": lambda: unseeded_passes(programs.OwnNoise()),
    "own generators, kept workers": lambda: unseeded_passes(programs.OwnNoise(), persistent_workers=True),
    "own generators that the program draws from": lambda: unseeded_passes(programs.OwnNoise(), draw_from_own),
    "own generators, other seeds": lambda: datasets(lambda: programs.OwnNoise(1), lambda: programs.OwnNoise(2)),
    "own generators, the same seeds": lambda: datasets(programs.OwnNoise, programs.OwnNoise),
    "set_random_state before each pass": lambda: unseeded_passes(
        programs.Randomizable(), lambda dataset: dataset.set_random_state(1234)
    ),
    "set_random_state, other seeds": lambda: datasets(
        lambda: programs.Randomizable().set_random_state(1), lambda: programs.Randomizable().set_random_state(2)
    ),
    "never seeded, a generator of the class": lambda: datasets(programs.Randomizable, programs.Randomizable),
    "generators of the module, other seeds": lambda: with_named((1, 4), (2, 4)),
    "generators that helpers name, other seeds": lambda: with_named((1, 4), (1, 5)),
    "generators of the module, the same seeds": lambda: with_named((1, 4), (1, 4)),
    "ranks in globals": lambda: ranks(programs.NamedNoise, programs.SetsGlobals),
    "one rank's globals twice": lambda: ranks(programs.NamedNoise, lambda _: programs.SetsGlobals(1)),
    "in a Subset": lambda: datasets(
        lambda: Subset(programs.OwnNoise(1), range(8)), lambda: Subset(programs.OwnNoise(2), range(8))
    ),
    "a resumed run": resumed,
    "a resumed run, worker_init_fn": lambda: resumed(worker_init_fn=programs.AddsRank(1)),
    "a resumed run, kept workers": lambda: resumed(persistent_workers=True),
}


# Those whose kind another one shows, too: with kept workers, with another worker_init_fn, with other generators.
SLOW = {
    "ranks that it adds to NumPy",
    "ranks in one worker",
    "one rank's generators twice",
    "ranks in a number of the dataset",
    "a rank's number twice",
    "one seed, kept workers",
    "seeds of a configuration, kept workers",
    "a generator for the loader",
    "own generators, kept workers",
    "set_random_state, other seeds",
    "generators of the module, the same seeds",
    "one rank's globals twice",
    "in a Subset",
    "a resumed run, kept workers",
}


def found(name: str) -> list[str]:
    """For each number of a sample whether the two runs have it in common: in all samples, in some, in none."""
    first, second = (run() for run in PROPERTIES[name]())
    assert first.shape == second.shape
    alike = (first == second).mean(axis=0)
    return ["all" if share == 1 else "none" if share == 0 else "some" for share in alike]


@pytest.mark.shows("random numbers agree and differ where they do with torch, also in Lightning and transformers")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in PROPERTIES]
)
def test_runs_have_the_same_numbers_where_they_have_them_with_torch(
    three: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    expected = found(name)
    with hooked(three.name, monkeypatch):
        assert found(name) == expected
    with hooked(None, monkeypatch):
        assert found(name) == expected, "in process"


@pytest.mark.shows("random numbers agree and differ where they do with torch, also in Lightning and transformers")
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize(
    "num_workers", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(5, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    ("dataset", "init"),
    [
        (programs.Noise, programs.AddsRank(1)),
        (programs.OwnNoise, programs.SeedsTheDatasets(1)),
        (programs.OwnNoise, programs.DerivesFromTheDatasets(1)),
        (programs.OwnNoise, None),
        (programs.Randomizable, None),
        (programs.SeedsItself, programs.TellsTheDataset(1)),
        (programs.NamedNoise, programs.SetsGlobals(1)),
        (programs.NamedNoise, None),
    ],
    ids=lambda given: getattr(given, "__name__", type(given).__name__),
)
def test_it_does_not_matter_who_makes_a_sample(
    three: Any, monkeypatch: pytest.MonkeyPatch, dataset: Any, init: Any, num_workers: int
) -> None:
    def run() -> Any:
        torch.manual_seed(1)
        return programs.one_pass(dataset(), num_workers=num_workers, worker_init_fn=init)

    plain = run()
    with hooked(None, monkeypatch):
        in_process = run()
    with hooked(three.name, monkeypatch):
        streamed = run()
    assert (streamed == in_process).all()
    if dataset is programs.SeedsItself:
        assert (streamed == plain).all(), "what follows from torch's seeds alone is torch's"
    if dataset is programs.OwnNoise:
        assert (streamed[:, 4] == streamed[:, 5]).all(), "an image and its mask are turned alike"
        assert (plain[:, 4] == plain[:, 5]).all()
    if dataset is programs.Noise:
        assert len(np.unique(streamed[:, 0])) == len(streamed)


class Counted:
    """A `worker_init_fn` that notes who ran it."""

    def __init__(self, file: str) -> None:
        self.file = file

    def __call__(self, worker_id: int) -> None:
        with open(self.file, "a") as noted:
            noted.write(f"{os.getpid()} {worker_id} {torch.initial_seed()}\n")


@pytest.mark.parametrize("persistent", [False, True])
def test_worker_init_fn_runs_once_for_each_worker_and_pass_in_a_process(
    three: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any, persistent: bool
) -> None:
    with hooked(three.name, monkeypatch):
        init = Counted(str(tmp_path / "noted"))
        options: dict[str, Any] = {"num_workers": 2, "worker_init_fn": init, "persistent_workers": persistent}
        loader = DataLoader(programs.Noise(), 1, **options)
        for _ in range(3):
            assert len(list(loader)) == programs.NUM_SAMPLES
        assert_no_local_step(loader)
    lines = (tmp_path / "noted").read_text().splitlines()
    twice = {line for line in lines if lines.count(line) > 1}
    # One that compares looks what worker_init_fn leaves behind, before it makes its first step.
    assert len({line.split()[0] for line in twice}) <= 1, "never twice for one seed"
    assert len({line.split()[2] for line in lines}) == (2 if persistent else 6)


# --- hetstream's own loader -----------------------------------------------------------------------------------------


def own(rank: int = 0, **options: Any) -> OwnLoader[Any]:
    keywords: dict[str, Any] = {"batch_size": 2, "seed": 7, "rank": rank, "world_size": 2} | options
    return OwnLoader(programs.Noise(), **keywords)


def rows(loader: OwnLoader[Any]) -> Any:
    return torch.cat(list(loader)).numpy()


@pytest.mark.parametrize("where", ["data workers", "in process", "own processes"])
@pytest.mark.parametrize(
    "options",
    [
        {"sampler": range(programs.NUM_SAMPLES)},
        {"batch_size": 1, "batch_sampler": [[index] for index in range(programs.NUM_SAMPLES)]},
        {"batch_size": None},
        {},
        {"shuffle": True},
        {"global_batch_size": 4, "batch_size": 1},
    ],
    ids=["sampler", "batch sampler", "unbatched", "planned", "shuffled", "global"],
)
def test_ranks_of_hetstreams_loader_draw_other_numbers(three: Any, options: dict[str, Any], where: str) -> None:
    place = {"data workers": {"service": three.name}, "in process": {}, "own processes": {"num_workers": 1}}[where]
    first, again, second = (own(rank, **options | place) for rank in (0, 0, 1))
    with first, again, second:
        ones, others = rows(first), rows(second)
        assert (rows(again) == ones).all()
    assert len(ones) == len(others)
    assert not (ones == others).any()


def test_a_sample_of_a_planned_order_is_augmented_alike_at_any_number_of_ranks() -> None:
    alone = rows(own(world_size=1, global_batch_size=4, batch_size=1))
    together = [rows(own(rank, global_batch_size=4, batch_size=1)) for rank in (0, 1)]
    steps = zip(*(np.split(part, len(part) // 2) for part in together), strict=True)
    assert (np.concatenate([part for step in steps for part in step]) == alone).all()


class Endless(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return (torch.rand(3, dtype=torch.float64) for _ in range(8))


@pytest.mark.parametrize("seed", [None, 7])
def test_ranks_that_each_go_over_all_of_a_stream_have_an_order_in_common_only_with_a_seed(seed: int | None) -> None:
    options: dict[str, Any] = {"batch_size": 2, "sharding": "off", "seed": seed, "world_size": 2}
    ones, others = (rows(OwnLoader(Endless(), rank=rank, **options)) for rank in (0, 1))
    assert (ones == others).all() == (seed is not None)


def test_a_state_of_a_release_whose_ranks_drew_alike_says_what_differs(caplog: pytest.LogCaptureFixture) -> None:
    sampler = {"sampler": range(programs.NUM_SAMPLES)}
    for rank, options, is_said in ((1, sampler, True), (0, sampler, False), (1, {}, False)):
        state = own(rank, **options).state_dict()
        own(rank, **options).load_state_dict(state)
        assert not caplog.messages
        del state["ranks_differ"]
        own(rank, **options).load_state_dict(state)
        assert ["rank 1 has its own" in line for line in caplog.messages] == [True] * is_said
        caplog.clear()
