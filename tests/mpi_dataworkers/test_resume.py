"""Resume: continuing from a state equals the run that was never stopped, with any number of data workers and ranks."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sample_datasets as datasets
import torch
from torch.distributed.checkpoint.stateful import Stateful
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, Sampler, WeightedRandomSampler

from hetstream import DataLoader
from hetstream.base.errors import OptionsError
from hetstream.mpi_dataworkers.errors import StateError
from hetstream.mpi_dataworkers.order.data_state import VERSION
from tests.mpi_dataworkers.batches import as_bytes

RunProgram = Callable[..., "subprocess.CompletedProcess[str]"]
Make = Callable[..., DataLoader]
LENGTH, BATCH, STEPS = 50, 8, 7


class Remembering(Sampler[int]):
    """A sampler whose epochs differ and that keeps its own state, as Lightning's and torchdata's do."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.rounds = 0

    def __iter__(self) -> Iterator[int]:
        self.rounds += 1
        return iter(np.random.default_rng(self.rounds).permutation(self.length).tolist())

    def __len__(self) -> int:
        return self.length

    def state_dict(self) -> dict[str, int]:
        return {"rounds": self.rounds}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.rounds = state["rounds"]


class Forgetful(Remembering):
    """The same without a state."""

    state_dict = load_state_dict = None  # type: ignore[assignment]

    def __getattribute__(self, name: str) -> Any:
        if name in ("state_dict", "load_state_dict"):
            raise AttributeError(name)
        return super().__getattribute__(name)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


DATA = datasets.Augmented(LENGTH)
# What decides the order -> the loader's keywords, made anew for each loader.
ORDERS: dict[str, Callable[[], dict[str, Any]]] = {
    "shuffled": lambda: {"shuffle": True, "batch_size": BATCH},
    "global": lambda: {"shuffle": True, "global_batch_size": BATCH},
    "by length": lambda: {
        "shuffle": True,
        "batch_size": BATCH,
        "lengths": [1 + i % 9 for i in range(LENGTH)],
        "bucket_boundaries": [3, 6],
    },
    "generator": lambda: {"shuffle": True, "batch_size": BATCH, "generator": generator(3)},
    "RandomSampler": lambda: {"sampler": RandomSampler(DATA), "batch_size": BATCH},
    "WeightedRandomSampler": lambda: {
        "sampler": WeightedRandomSampler(torch.arange(1.0, LENGTH + 1), LENGTH, generator=generator(4)),
        "batch_size": BATCH,
    },
    "DistributedSampler": lambda: {"sampler": DistributedSampler(range(2 * LENGTH), 2, 1), "batch_size": BATCH},
    "own state": lambda: {"batch_sampler": BatchSampler(Remembering(LENGTH), BATCH, False)},
    "list": lambda: {"batch_sampler": [[i, i + 1] for i in range(STEPS)]},
}
# After how many steps the state is saved; an epoch has 7, and the 8th call ends it.
MOMENTS = {"before": 0, "first": 1, "middle": 4, "last": 7, "end": 8, "next epoch": 11, "its end": 16}


def take(loader: DataLoader, calls: int) -> list[tuple[bytes, list[int]]]:
    """Call `next` so often over as many epochs as that needs, and return the batches."""
    taken: list[tuple[bytes, list[int]]] = []
    passing = None
    for _ in range(calls):
        passing = passing if passing is not None else iter(loader)
        try:
            taken += as_bytes([next(passing)])
        except StopIteration:
            passing = None
    return taken


def check_moment(make: Make, calls: int, whole: list[tuple[bytes, list[int]]]) -> None:
    """Save after `calls`, load into a second loader, save and load again into a third, and read on."""
    torch.manual_seed(1)
    first = make()
    begin = take(first, calls)
    state, program = json.loads(json.dumps(first.state_dict())), torch.get_rng_state()
    assert len(json.dumps(state)) < 10_000
    first.close()
    torch.manual_seed(99)
    torch.set_rng_state(program)  # from the program's own checkpoint
    second = make()
    second.load_state_dict(state)
    again = json.loads(json.dumps(second.state_dict()))
    assert again == state, "a state that is saved before the first batch is the one that was loaded"
    second.close()
    third = make()
    third.load_state_dict(again)
    # After the last batch of an epoch the next one begins at once: the call that would end it is not made.
    rest = take(third, 24 - calls - (calls % (STEPS + 1) == STEPS))
    assert begin + rest == whole
    third.close()


@pytest.mark.shows("a resumed run with shuffling and random transforms is the uninterrupted one")
@pytest.mark.shows("a run that was resumed from any state gives what the uninterrupted run gives; the state is JSON")
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("moment", MOMENTS)
def test_continuing_equals_the_uninterrupted_run(order: str, moment: str) -> None:
    def make() -> DataLoader:
        return DataLoader(
            datasets.Augmented(2 * LENGTH if order == "DistributedSampler" else LENGTH), **ORDERS[order]()
        )

    torch.manual_seed(1)
    check_moment(make, MOMENTS[moment], take(make(), 24))


@pytest.mark.shows("a run that was resumed from any state gives what the uninterrupted run gives; the state is JSON")
def test_continuing_a_stream_equals_the_uninterrupted_run(service: Any) -> None:
    service.start_workers(1)
    for order in ("shuffled", "global", "RandomSampler"):
        length = 2 * LENGTH if order == "DistributedSampler" else LENGTH

        def make(service_name: str | None = service.name, order: str = order, length: int = length) -> DataLoader:
            return DataLoader(datasets.Augmented(length), service=service_name, **ORDERS[order]())

        torch.manual_seed(1)
        whole = take(make(None), 24)
        check_moment(make, MOMENTS["middle" if order == "global" else "next epoch"], whole)


@pytest.mark.shows("the state counts what was yielded; `torch.distributed.checkpoint` keeps it")
def test_local_processes_are_ahead_of_the_state() -> None:
    def make() -> DataLoader:
        return DataLoader(
            datasets.Augmented(LENGTH), batch_size=BATCH, shuffle=True, generator=generator(3), num_workers=2
        )

    check_moment(make, 4, take(make(), 24))


# --- another world size ---------------------------------------------------------------------------------------------


def ranks(world_size: int, **options: Any) -> list[DataLoader]:
    return [
        DataLoader(datasets.Augmented(203), shuffle=True, seed=7, rank=rank, world_size=world_size, **options)
        for rank in range(world_size)
    ]


def global_steps(loaders: list[DataLoader], num_steps: int) -> list[list[tuple[bytes, int]]]:
    """For each step the samples of all ranks, in order: (bytes, index)."""
    steps: list[list[tuple[bytes, int]]] = []
    passes = [iter(loader) for loader in loaders]
    for _ in range(num_steps):
        batches = [next(one) for one in passes]
        assert max(len(ids) for _, ids in batches) - min(len(ids) for _, ids in batches) <= 1
        steps.append(
            [
                (row.numpy().tobytes(), int(index))
                for values, ids in batches
                for row, index in zip(values, ids, strict=True)
            ]
        )
    return steps


@pytest.mark.shows("a state of four ranks continues with 1, 2, 3 or 8 in the same global order")
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_a_state_of_four_ranks_continues_with_any_number_in_the_same_global_order(world_size: int) -> None:
    whole = global_steps(ranks(1, global_batch_size=24), 9)
    saved = ranks(4, global_batch_size=24)
    assert global_steps(saved, 3) == whole[:3]
    states = [json.dumps(loader.state_dict(), sort_keys=True) for loader in saved]
    assert len(set(states)) == 1, "so that it does not matter which rank's state a checkpoint keeps"
    resumed = ranks(world_size, global_batch_size=24)
    for loader in resumed:
        loader.load_state_dict(json.loads(states[0]))
    assert global_steps(resumed, 6) == whole[3:]


def test_without_a_global_batch_size_another_world_size_is_refused_and_the_way_is_told() -> None:
    state = ranks(4, batch_size=6)[0].state_dict()
    with pytest.raises(
        StateError, match=r"world_size: 4 in the state, 2 here \(.*global_batch_size= instead of batch_s"
    ):
        ranks(2, batch_size=6)[0].load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"global_batch_size": 3, "world_size": 4, "rank": 0}, "global_batch_size=3 with 4 ranks: each rank needs a"),
        ({"global_batch_size": 8, "batch_size": 4}, "batch_size=4 with global_batch_size=8: give one of them"),
        ({"global_batch_size": 8, "sampler": [1]}, "global_batch_size with a sampler"),
        ({"global_batch_size": 0}, "global_batch_size=0: must be a whole number of at least 1 or None"),
    ],
    ids=str,
)
def test_a_global_batch_size_that_cannot_be_divided_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(OptionsError, match=says):
        DataLoader(datasets.Augmented(40), **options)


# --- what a state is ------------------------------------------------------------------------------------------------


@pytest.mark.shows("a state has less than 1 KB for 10 million samples, and resuming reads nothing again")
def test_the_state_of_ten_million_samples_is_small_and_continues_at_once() -> None:
    loader = DataLoader(datasets.Augmented(10_000_000), batch_size=100, shuffle=True)
    state = loader.state_dict() | {"step": 90_000}
    assert len(json.dumps(state)) < 1000
    other = DataLoader(datasets.Augmented(10_000_000), batch_size=100, shuffle=True)
    started = time.process_time()
    other.load_state_dict(state)
    next(iter(other))
    assert time.process_time() - started < 0.5, "nothing is replayed; benchmarks/resume.py measures it"


@pytest.mark.shows("foreign, stale and damaged states are refused, all differences named")
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"version": 1}, f"version 1, this release reads version {VERSION}"),
        ({"step": 10_000}, "step 10000 of epoch 0, but an epoch here has 5 steps"),
        ({"world_size": 4}, "world_size: 4 in the state, 1 here"),
        ({"epoch": "x", "step": -1}, "damaged: epoch='x': must be a whole number of at least 0; step=-1: must be"),
        ({"more": 1}, "damaged: 'more' is unknown"),
        ({"epoch": 2**40}, "damaged: epoch=1099511627776: must be a whole number of at least 0"),
    ],
    ids=str,
)
def test_damaged_states_are_refused(change: dict[str, Any], says: str) -> None:
    loader = DataLoader(datasets.Augmented(40), batch_size=8)
    with pytest.raises(StateError, match=says):
        loader.load_state_dict(loader.state_dict() | change)


@pytest.mark.parametrize("state", [None, 3, [], {}, {"epoch": 1}])
def test_what_is_no_state_is_refused(state: Any) -> None:
    with pytest.raises(StateError, match="no state of a hetstream DataLoader"):
        DataLoader(datasets.Augmented(40)).load_state_dict(state)


@pytest.mark.shows("foreign, stale and damaged states are refused, all differences named")
def test_foreign_states_are_refused_with_all_differences() -> None:
    state = DataLoader(datasets.Augmented(40), batch_size=8, shuffle=True, seed=1).state_dict()
    with pytest.raises(StateError) as caught:
        DataLoader(datasets.Poisoned(41), batch_size=4, collate_fn=list, rank=0, world_size=2).load_state_dict(state)
    for part in (
        "batch_size: 8 in the state, 4 here",
        "dataset: sample_datasets.Augmented in the state, sample_datasets.Poisoned here",
        "length: 40 in the state, 41 here",
        "collate_fn: ",
        "seed: 1 in the state, 0 here",
        "shuffle: True in the state, False here",
        "world_size: 1 in the state, 2 here",
    ):
        assert part in str(caught.value)


@pytest.mark.shows("foreign, stale and damaged states are refused, all differences named")
def test_a_dataset_with_a_fingerprint_is_told_apart_by_it() -> None:
    first, second = datasets.Augmented(40), datasets.Augmented(40)
    first.fingerprint, second.fingerprint = "aaa", "bbb"  # type: ignore[attr-defined]
    with pytest.raises(StateError, match="fingerprint: aaa in the state, bbb here"):
        DataLoader(second).load_state_dict(DataLoader(first).state_dict())


def test_a_sampler_without_a_state_is_drawn_again_as_far_as_it_was() -> None:
    def loader() -> DataLoader[Any]:
        return DataLoader(datasets.Augmented(LENGTH), sampler=Forgetful(LENGTH), batch_size=BATCH)

    first = loader()
    begin = take(first, 3)
    state = json.loads(json.dumps(first.state_dict()))
    assert begin + as_bytes(_loaded(loader(), state)) == as_bytes(loader())
    another = _loaded(loader(), state)
    next(iter(another.sampler))  # it draws anew each time: its second epoch is another order
    with pytest.raises(StateError, match=r"gave other samples for the first 3 steps .* or it has no state"):
        iter(another)


def test_after_the_last_batch_the_next_iteration_is_the_next_epoch() -> None:
    def loader(data: Any = DATA, **options: Any) -> DataLoader[Any]:
        return DataLoader(data, **{"batch_size": BATCH} | options)

    cases: list[tuple[Any, dict[str, Any]]] = [
        (DATA, {"shuffle": True}),
        (DATA, {"sampler": list(range(LENGTH))}),
        (datasets.Log(LENGTH), {}),
        (datasets.Log(LENGTH), {"num_workers": 1, "repeat": 2}),
    ]
    for data, options in cases:
        whole = loader(data, **options)
        first_epoch, second_epoch, third_epoch = (as_bytes(whole) for _ in range(3))
        saved = loader(data, **options)
        take(saved, len(first_epoch))
        state = saved.state_dict()
        resumed = _loaded(loader(data, **options), state)
        assert as_bytes(resumed) == second_epoch
        assert as_bytes(resumed) == third_epoch
        # The rule's other half: an epoch that is named is that epoch, of which nothing is left.
        named = _loaded(loader(data, **options), state)
        named.set_epoch(0)
        assert as_bytes(named) == []
        assert as_bytes(named) == second_epoch


def test_a_sampler_that_gives_other_samples_than_it_did_is_refused() -> None:
    def loader(order: list[int]) -> DataLoader:
        return DataLoader(datasets.Augmented(LENGTH), sampler=order, batch_size=2)

    first = loader([0, 1, 2, 3, 4, 5])
    take(first, 2)
    with pytest.raises(StateError, match="gave other samples for the first 2 steps"):
        iter(_loaded(loader([0, 1, 2, 4, 3, 5]), first.state_dict()))
    with pytest.raises(StateError, match="ends at step 1, the state was saved at step 2"):
        iter(_loaded(loader([0, 1]), first.state_dict()))
    assert as_bytes(_loaded(loader([0, 1, 2, 3, 5, 4]), first.state_dict()))[0][1] == [5, 4]


def _loaded(loader: DataLoader, state: dict[str, Any]) -> DataLoader:
    loader.load_state_dict(state)
    return loader


# --- real programs --------------------------------------------------------------------------------------------------

TRAINER = """
import json, os, signal, sys
from pathlib import Path
from hetstream import DataLoader
from sample_datasets import Augmented

dies_at = int(sys.argv[1])
rank = os.environ.get("RANK", "0")
checkpoint, ledger = Path(f"checkpoint.{rank}"), Path(f"ledger.{rank}")
loader = DataLoader(Augmented(300), global_batch_size=12, shuffle=True, seed=3, job_name="train")
steps = []
if checkpoint.exists():
    saved = json.loads(checkpoint.read_text())
    loader.load_state_dict(saved["data"])
    steps = saved["steps"]
started = len(steps)
for values, ids in loader:
    steps.append([ids.tolist(), values.sum().item()])
    if len(steps) == dies_at:
        os.kill(os.getpid(), signal.SIGKILL)
    if len(steps) % 5 == 0:
        new = checkpoint.with_suffix(".new")
        new.write_text(json.dumps({"data": loader.state_dict(), "steps": steps}))
        new.rename(checkpoint)
ledger.write_text(json.dumps(steps))
print("started at", started)
"""


def expected_steps(rank: int, world_size: int) -> list[Any]:
    loader = DataLoader(
        datasets.Augmented(300), global_batch_size=12, shuffle=True, seed=3, rank=rank, world_size=world_size
    )
    return [[ids.tolist(), values.sum().item()] for values, ids in loader]


@pytest.mark.shows("a trainer continues at its checkpoint: batches behind it come again, others never do")
def test_a_killed_trainer_continues_at_its_checkpoint(service: Any, run_program: RunProgram) -> None:
    service.start_workers(1)
    killed = run_program(TRAINER, service.directory, "13", HETSTREAM_SERVICE=service.name)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    service.start_workers(1)
    again = run_program(TRAINER, service.directory, "-1", HETSTREAM_SERVICE=service.name)
    assert again.stdout == "started at 10\n", again.stderr
    assert json.loads((service.directory / "ledger.0").read_text()) == expected_steps(0, 1)


@pytest.mark.shows("a restarted rank rejoins at its round")
@pytest.mark.shows("ranks never wait for one another in the loader; a rank that restarts goes on at its step")
def test_a_killed_rank_rejoins_at_its_step_and_stops_nobody(service: Any, run_program: RunProgram) -> None:
    service.start_workers(1)

    def run(rank: int, dies_at: str) -> subprocess.CompletedProcess[str]:
        names = {"RANK": str(rank), "WORLD_SIZE": "3", "HETSTREAM_SERVICE": service.name}
        return run_program(TRAINER, service.directory, dies_at, **names)

    assert run(1, "7").returncode == -signal.SIGKILL
    for rank in (0, 2):  # they end while rank 1 is away
        assert run(rank, "-1").returncode == 0
    assert run(1, "-1").stdout == "started at 5\n"
    for rank in range(3):
        assert json.loads((service.directory / f"ledger.{rank}").read_text()) == expected_steps(rank, 3)


CHECKPOINTED = """
import json, os, sys, torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hetstream import DataLoader
from sample_datasets import Augmented

dist.init_process_group("gloo")
def goes_on(order):
    options = {"sampler": torch.utils.data.DistributedSampler(range(96))} if order == "sampler" else {"shuffle": True}
    size = {"batch_size": 4} if options.get("sampler") else {"global_batch_size": 8}
    def loader():
        return DataLoader(Augmented(96), seed=2, **options, **size)
    model = torch.nn.Linear(2, 2)
    first = loader()
    passing = iter(first)
    begin = [next(passing)[1].tolist() for _ in range(4)]
    key = f"data.{dist.get_rank()}" if options.get("sampler") else "data"
    dcp.save({"model": model.state_dict(), key: first}, checkpoint_id=order)
    rest = [ids.tolist() for _, ids in passing]
    second = loader()
    dcp.load({"model": model.state_dict(), key: second}, checkpoint_id=order)
    return [ids.tolist() for _, ids in second] == rest and len(begin + rest) == 12
for order in sys.argv[1:]:
    with open(f"{order}.{dist.get_rank()}", "w") as file:
        json.dump(goes_on(order), file)
dist.destroy_process_group()
"""
DCP_ORDERS = ("planned", "sampler")


@pytest.fixture(scope="module")
def checkpointed(run_program: RunProgram, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two ranks have said whether each order goes on: torch is loaded once for both."""
    directory = tmp_path_factory.mktemp("checkpointed")
    launcher = (
        "import sys; from torch.distributed.run import main\n"
        f"open('dcp.py', 'w').write({CHECKPOINTED!r})\n"
        f"main(['--standalone', '--nproc-per-node=2', 'dcp.py', *{DCP_ORDERS!r}])\n"
    )
    result = run_program(launcher, directory, OMP_NUM_THREADS="1")
    assert result.returncode == 0, result.stderr
    return directory


@pytest.mark.shows("the state counts what was yielded; `torch.distributed.checkpoint` keeps it")
@pytest.mark.parametrize("order", DCP_ORDERS)
def test_torchs_distributed_checkpoint_keeps_the_loader(checkpointed: Path, order: str) -> None:
    assert [json.loads((checkpointed / f"{order}.{rank}").read_text()) for rank in range(2)] == [True, True]
    assert isinstance(DataLoader(datasets.Augmented(3)), Stateful)
