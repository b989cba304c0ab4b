"""Nothing but the end of the data looks like it: an error is raised, takes its own step at most, and hides no batch."""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sample_datasets as datasets

from hetstream import DataLoader
from hetstream.mpi_dataworkers.errors import PipelineError

WHERE = ["data workers", "fallback", "own process"]


@pytest.fixture(scope="module")
def empty(three: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A service without data workers."""
    running = type(three)(tmp_path_factory.mktemp("empty"))
    running.start_dispatcher()
    yield running
    running.stop()


@pytest.fixture
def loaders(three: Any, empty: Any) -> Iterator[Callable[..., DataLoader]]:
    """Make loaders that are closed after the test."""
    made: list[DataLoader] = []
    places = {"data workers": {"service": three.name}, "fallback": {"service": empty.name}}

    def make(where: str, dataset: Any, **options: Any) -> DataLoader:
        place: dict[str, Any] = places.get(where, {"num_workers": 1})
        made.append(DataLoader(dataset, **{"batch_size": 8} | place | options))
        return made[-1]

    yield make
    for loader in made:
        loader.close()


class Once(datasets.Augmented):
    """At sample 16 something happens to the process, the first time."""

    def __init__(self, length: int, flag: Path, what: Callable[[], None]) -> None:
        super().__init__(length)
        self.flag = flag
        self.what = what

    def __getitem__(self, index: int) -> Any:
        if index == 16 and not self.flag.exists():
            self.flag.touch()
            self.what()
        return super().__getitem__(index)


def linger() -> None:
    time.sleep(2.5)


def stop(*_: Any) -> Any:
    raise StopIteration("of user code")


def ids_of(passing: Any) -> list[list[int]]:
    return [ids.tolist() for _, ids in passing]


@pytest.mark.shows("after a timeout no step is missing")
def test_a_timeout_in_process_takes_no_step(loaders: Any, tmp_path: Path) -> None:
    loader = loaders("own process", Once(40, tmp_path / "flag", linger), timeout=1)
    passing = iter(loader)
    seen = ids_of(itertools.islice(passing, 2))
    with pytest.raises(RuntimeError, match="timed out after 1 seconds"):
        next(passing)
    assert loader.state_dict()["step"] == 2
    while len(seen) < 3:
        try:
            seen += ids_of([next(passing)])
        except RuntimeError as error:
            assert "timed out" in str(error)  # noqa: PT017, it may come more than once
    assert seen + ids_of(passing) == ids_of(DataLoader(datasets.Augmented(40), batch_size=8))
    assert loader.stats()["steps"] == 5


# In its own process: torch's handler of SIGCHLD raises wherever the program is, also between an `open` and its `close`.
DYING = """
import json, os, signal, sys
from hetstream import DataLoader
from sample_datasets import Augmented, Log
from torch.utils.data import get_worker_info

def die():
    os.kill(os.getpid(), signal.SIGKILL)

class Once(Augmented):
    def __getitem__(self, index):
        if index == 16 and not os.path.exists("died"):
            open("died", "x").close()
            die()
        return super().__getitem__(index)

class DyingLog(Log):
    def __iter__(self):
        for values, index in super().__iter__():
            if index >= 16 and get_worker_info() is not None:
                die()
            yield values, index

loader = DataLoader(Once(40) if sys.argv[1] == "indices" else DyingLog(40), batch_size=8, num_workers=1)
passing = iter(loader)
seen, told = 0, ""
for _ in range(7):
    try:
        next(passing)
        seen += 1
        told = ""
    except (RuntimeError, OSError) as error:
        told = str(error)
print(json.dumps({"seen": seen, "told": told, "state": loader.state_dict()}))
"""


@pytest.mark.shows("a killed process makes nobody hang, and its end is reported in words")
@pytest.mark.shows("once a process of the loader has died, every call raises")
@pytest.mark.parametrize("kind", [pytest.param("indices", marks=pytest.mark.slow), "stream"])
def test_a_process_that_died_is_not_the_end_however_often_it_is_asked(
    run_program: Any, tmp_path: Path, kind: str
) -> None:
    run = run_program(DYING, tmp_path, kind)
    assert run.returncode == 0, run.stderr
    told = json.loads(run.stdout)
    assert told["seen"] <= 4
    assert told["state"]["epoch"] == told["state"]["pass_index"] == 0
    assert re.search("exited unexpectedly|processes ended before step", told["told"])


@pytest.mark.shows("a StopIteration of user code is an error of `hetstream.DataLoader`")
@pytest.mark.parametrize("where", WHERE[:2])
@pytest.mark.parametrize("keyword", ["worker_init_fn", "collate_fn"])
def test_a_stop_iteration_of_user_code_is_an_error(loaders: Any, where: str, keyword: str) -> None:
    for dataset in (datasets.Augmented(16), datasets.Log(16)):
        # Of a stream a program without worker processes calls no worker_init_fn, as in torch.
        passing = iter(loaders(where, dataset, num_workers=1, **{keyword: stop}))
        try:
            batch = next(passing, "the end")
        except Exception as error:  # noqa: BLE001, which type it has differs
            batch = str(error)
        del passing
        assert "StopIteration" in batch


STOPPING = """
from hetstream import DataLoader
from sample_datasets import Augmented, Log
def stop(*_):
    raise StopIteration("of user code")
for dataset in (Augmented(16), Log(16)):
    for keyword in ("worker_init_fn", "collate_fn"):
        try:
            print(next(iter(DataLoader(dataset, batch_size=8, num_workers=1, **{keyword: stop})), "the end"))
        except Exception as error:
            print(str(error).partition(chr(10))[0])
"""


@pytest.mark.shows("a StopIteration of user code is an error of `hetstream.DataLoader`")
@pytest.mark.slow
def test_nor_in_a_process_of_the_loader(run_program: Any, tmp_path: Path) -> None:
    lines = run_program(STOPPING, tmp_path).stdout.splitlines()
    assert len(lines) == 4
    for line in lines:
        assert "RuntimeError" in line or "processes ended before step 0" in line


class Breaking:
    """A sampler that raises once, beyond what is drawn at the beginning, and goes on."""

    def __init__(self) -> None:
        self.numbers = iter(range(200))

    def __iter__(self) -> Breaking:
        return self

    def __next__(self) -> list[int]:
        number = next(self.numbers)
        if number == 150:
            raise datasets.UserError("the sampler is ill")
        return [number]


@pytest.mark.shows("a sampler raises, and what it gave before still comes")
@pytest.mark.parametrize("where", ["data workers", "fallback"])
def test_what_a_sampler_gave_before_it_raised_is_delivered_without_delay(loaders: Any, where: str) -> None:
    loader = loaders(where, datasets.Augmented(200), batch_sampler=Breaking(), batch_size=1)
    begun, passing = time.monotonic(), iter(loader)
    seen: list[list[int]] = []
    with pytest.raises(datasets.UserError, match="the sampler is ill"):
        seen.extend(ids.tolist() for _, ids in passing)
    seen += ids_of(passing)
    assert seen == [[number] for number in range(200) if number != 150]
    assert time.monotonic() - begun < 30, "no step waits for the minute after which it is late"


@pytest.mark.shows("a state that is saved after an exception goes on behind the step that raised")
@pytest.mark.parametrize("where", WHERE)
def test_after_an_exception_in_a_stream_the_state_is_behind_it(loaders: Any, where: str) -> None:
    loader = loaders(where, datasets.PoisonedLog(100), num_shards=2, batch_size=4)
    passing = iter(loader)
    with pytest.raises(datasets.UserError):
        for _ in passing:
            pass
    state = json.loads(json.dumps(loader.state_dict()))
    resumed = loaders(where, datasets.PoisonedLog(100), num_shards=2, batch_size=4)
    resumed.load_state_dict(state)
    assert ids_of(resumed) == ids_of(passing)


def test_an_endless_stream_of_samples_that_all_fail_is_an_error() -> None:
    loader = DataLoader(datasets.NoneCanBeMade(6), batch_size=2, repeat=None, on_error="skip", max_attempts=1)
    with pytest.raises(PipelineError, match="NoneCanBeMade gave no batch from its beginning"):
        next(iter(loader))
