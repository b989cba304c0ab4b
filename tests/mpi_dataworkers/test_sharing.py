"""Jobs that share data workers, with real processes: how often samples are computed, and what each job gets."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sample_datasets as datasets
import torch

from hetstream import DataLoader
from hetstream.base.errors import OptionsError
from hetstream.mpi_dataworkers.errors import PipelineError

Batches = list[tuple[bytes, list[int]]]


def as_bytes(batch: Any) -> tuple[bytes, list[int]]:
    return batch[0].numpy().tobytes(), batch[1].tolist()


def ids_of(batches: Batches) -> list[int]:
    return [index for _, ids in batches for index in ids]


def read_together(service: Any, loaders: list[Any]) -> list[Batches]:
    """What loaders read in step with each other, while the dispatcher is killed and started again."""
    seen: list[Batches] = [[] for _ in loaders]
    for number, batches in enumerate(zip(*loaders, strict=True)):
        for one, batch in zip(seen, batches, strict=True):
            one.append(as_bytes(batch))
        if number == 40:
            service.kill_dispatcher()
            service.start_dispatcher()
    return seen


def in_step(loaders: list[DataLoader]) -> list[Batches]:
    """One epoch of several jobs that take a batch each in turn."""
    seen: list[Batches] = [[] for _ in loaders]
    for batches in zip(*loaders, strict=True):
        for one, batch in zip(seen, batches, strict=True):
            one.append(as_bytes(batch))
    return seen


@pytest.fixture
def jobs(service: Any) -> Iterator[Callable[..., DataLoader]]:
    """Make loaders of different jobs, closed after the test."""
    made: list[DataLoader] = []

    def make(dataset: Any, sharing: str | None = "lossless", **options: Any) -> DataLoader:
        name = f"job-{len(made)}"
        common = {"batch_size": 8, "shuffle": True, "seed": 5, "service": service.name, "job_name": name}
        made.append(DataLoader(dataset, **(common | options), sharing=sharing))
        return made[-1]

    yield make
    for loader in made:
        loader.close()


@pytest.fixture
def alone() -> Callable[[Any], Batches]:
    """What one job would get by itself, in one epoch."""

    def read(dataset: Any) -> Batches:
        return [as_bytes(batch) for batch in DataLoader(dataset, batch_size=8, shuffle=True, seed=5)]

    return read


@pytest.mark.shows("with `sharing` a second job sees what the first saw, also shuffled")
@pytest.mark.parametrize("processes", [1, 3])
def test_three_jobs_in_step_compute_each_sample_once(
    service: Any, jobs: Any, alone: Any, tmp_path: Path, processes: int
) -> None:
    service.start_workers(processes)
    log = tmp_path / "read"
    three = [jobs(datasets.Logged(203, log)) for _ in range(3)]
    for epoch in range(2):
        seen = in_step(three)
        assert seen[0] == seen[1] == seen[2]
        if epoch == 0:
            assert seen[0] == alone(datasets.Augmented(203))
    reads = Counter(int(line) for line in log.read_text().split())
    assert reads == dict.fromkeys(range(203), 2), "twice: once in each of two epochs"
    stats = [loader.stats() for loader in three]
    assert sum(one["shared_steps"] for one in stats) == 2 * sum(one["steps"] for one in stats) / 3
    assert not any(one["repeated_steps"] or one["skipped_steps"] for one in stats)


@pytest.mark.shows("the ranks of one job name divide one stream; other names are independent")
@pytest.mark.shows("with `sharing` a second job sees what the first saw, also shuffled")
def test_jobs_do_not_share_unless_they_are_told_to(service: Any, jobs: Any, tmp_path: Path) -> None:
    service.start_workers()
    log = tmp_path / "read"
    in_step([jobs(datasets.Logged(40, log), sharing=None) for _ in range(2)])
    read = Counter(log.read_text().split())
    assert sorted(read.values())[:38] == [2] * 38, "one of each step 0 is made twice more"


@pytest.mark.parametrize("other", [{"seed": 6}, {"batch_size": 4}, {"shuffle": False}, {"sharing": "window"}])
def test_jobs_with_another_order_do_not_share(service: Any, jobs: Any, tmp_path: Path, other: dict[str, Any]) -> None:
    service.start_workers()
    dataset = datasets.Logged(40, tmp_path / "read")
    one, two = jobs(dataset), jobs(dataset, **other)
    assert sorted(ids_of([as_bytes(batch) for batch in one])) == list(range(40))
    assert sorted(ids_of([as_bytes(batch) for batch in two])) == list(range(40))
    assert one.stats()["shared_steps"] == two.stats()["shared_steps"] == 0


@pytest.mark.shows("a slow job skips batches with `window` and still gets as many as an epoch has")
def test_a_slow_job_gets_every_batch_and_what_had_to_be_made_again_is_counted(
    service: Any, jobs: Any, alone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HETSTREAM_CACHE_BYTES", "8000")  # some ten batches
    monkeypatch.setenv("HETSTREAM_BUFFER_BYTES", "2000")
    service.start_workers(2)
    fast, slow = jobs(datasets.Augmented(2000)), jobs(datasets.Augmented(2000))
    slowly = iter(slow)
    seen = [as_bytes(next(slowly))]
    assert [as_bytes(batch) for batch in fast] == alone(datasets.Augmented(2000))
    seen += [as_bytes(batch) for batch in slowly]
    assert seen == alone(datasets.Augmented(2000))
    assert slow.stats()["repeated_steps"] > 0
    assert slow.stats()["skipped_steps"] == fast.stats()["skipped_steps"] == 0


@pytest.mark.shows("a slow job skips batches with `window` and still gets as many as an epoch has")
def test_in_window_mode_a_slow_job_skips_and_still_gets_its_count(
    service: Any, jobs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HETSTREAM_CACHE_BYTES", "8000")
    monkeypatch.setenv("HETSTREAM_BUFFER_BYTES", "2000")
    service.start_workers(2)
    fast, slow = (jobs(datasets.Augmented(4000), sharing="window") for _ in range(2))
    passing = iter(slow)
    seen = [as_bytes(next(passing))]
    quickly = iter(fast)
    leading = [as_bytes(next(quickly)) for _ in range(400)]
    seen += [as_bytes(next(passing)) for _ in range(60)]
    assert slow.stats()["skipped_steps"] > 100
    stream = [ids[0] for _, ids in leading]
    places = [stream.index(ids[0]) for _, ids in seen if ids[0] in stream]
    assert places == sorted(set(places)), "in the order of the common stream, nothing twice"
    assert len(seen) + sum(1 for _ in passing) == len(slow)
    for left in quickly:
        del left


@pytest.mark.shows("twenty jobs that read in step share each batch")
def test_twenty_jobs_read_the_same_in_step(service: Any, jobs: Any, alone: Any, tmp_path: Path) -> None:
    service.start_workers(2)
    log = tmp_path / "read"
    seen = in_step([jobs(datasets.Logged(80, log)) for _ in range(20)])
    assert all(one == alone(datasets.Augmented(80)) for one in seen)
    assert len(log.read_text().split()) == 80


@pytest.mark.shows("sharing goes on when data workers and the dispatcher restart")
def test_sharing_survives_the_death_of_a_data_worker_and_of_the_dispatcher(
    service: Any, jobs: Any, alone: Any, tmp_path: Path
) -> None:
    service.start_workers(2)
    flag = tmp_path / "struck"
    three = [jobs(datasets.Striking(800, 77, flag, signal.SIGKILL)) for _ in range(3)]
    seen = read_together(service, three)
    assert flag.exists()
    assert seen == [alone(datasets.Augmented(800))] * 3
    assert sum(loader.stats()["shared_steps"] for loader in three) > 100, "of 300; two thirds if nobody had died"


def test_a_job_that_dies_does_not_disturb_the_others(service: Any, jobs: Any, alone: Any) -> None:
    service.start_workers(2)
    first, second = jobs(datasets.Augmented(400)), jobs(datasets.Augmented(400))
    passing = iter(first)
    seen = [as_bytes(next(passing))]
    next(iter(second))
    second.close()
    assert seen + [as_bytes(batch) for batch in passing] == alone(datasets.Augmented(400))


@pytest.mark.shows("`buffer_bytes` bounds the loader's memory, `HETSTREAM_CACHE_BYTES` the data worker's")
def test_the_cache_of_a_data_worker_is_bounded(service: Any, jobs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETSTREAM_CACHE_BYTES", str(8 << 20))
    monkeypatch.setenv("HETSTREAM_BUFFER_BYTES", str(4 << 20))
    supervisor = service.start_workers()
    (worker,) = Path(f"/proc/{supervisor.pid}/task/{supervisor.pid}/children").read_text().split()
    loader = jobs(datasets.Large(4000))
    passing = iter(loader)
    next(passing)

    def resident_bytes() -> int:
        return int(Path(f"/proc/{worker}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident_bytes()
    assert sum(1 for _ in passing) == 499
    grown = resident_bytes() - before
    assert grown < 64 << 20, f"{grown} bytes for 250 MiB that went through a cache of 8 MiB"


PROGRAM = """
from hetstream.mpi_dataworkers.ops.pickled_pipeline import pickle_pipeline
from hetstream.mpi_dataworkers.ops.pipeline import Pipeline
scale = 3

class Base: pass

class Mine(Base):
    names = {"b": 1, "a": 2}
    def __len__(self): return 10
    def __getitem__(self, index): return index * scale

class Changed(Mine):
    def __getitem__(self, index): return index

for one in (Mine(), Changed()):
    print(pickle_pipeline(Pipeline([one, Mine()], lambda batch: scale * batch[0], 10)).pipeline_id)
"""


def test_two_runs_of_a_program_have_one_fingerprint_and_another_pipeline_another(
    run_program: Any, tmp_path: Path
) -> None:
    said = [run_program(PROGRAM, tmp_path, PYTHONHASHSEED=seed).stdout.split() for seed in "12"]
    assert said[0] == said[1]
    assert len(set(said[0])) == 2


TWO_RUNS = """
import hashlib, os, sys, time
from pathlib import Path
import torch
from hetstream import DataLoader

class Images(torch.utils.data.Dataset):
    def __len__(self): return 200
    def __getitem__(self, index):
        with open("computed", "a") as log: log.write(".")
        time.sleep(0.002)
        return torch.rand(3) + index

loader = DataLoader(Images(), batch_size=8, shuffle=True, service=sys.argv[1], sharing="lossless")
Path(f"ready-{os.getpid()}").touch()
while len(list(Path(".").glob("ready-*"))) < 2:
    time.sleep(0.01)
digest = hashlib.sha256()
for batch in loader:
    digest.update(batch.numpy().tobytes())
loader.close()
print(digest.hexdigest())
"""


def test_two_runs_of_a_program_share(service: Any, tmp_path: Path) -> None:
    service.start_workers()
    script = tmp_path / "train.py"
    script.write_text(TWO_RUNS)
    programs = [
        subprocess.Popen(
            [sys.executable, str(script), service.name],
            cwd=tmp_path,
            env=os.environ | {"PYTHONHASHSEED": str(seed)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in (1, 2)
    ]
    said = [one.communicate(timeout=60)[0] for one in programs]
    assert said[0] == said[1] != ""
    assert 200 <= len((tmp_path / "computed").read_text()) < 300, "400 if they did not share"


@pytest.mark.shows("sharing goes on when data workers and the dispatcher restart")
def test_in_window_mode_jobs_get_their_count_through_every_death(service: Any, jobs: Any, tmp_path: Path) -> None:
    service.start_workers(2)
    flag = tmp_path / "struck"
    two = [jobs(datasets.Striking(800, 77, flag, signal.SIGKILL), sharing="window") for _ in range(2)]
    seen = read_together(service, two)
    assert flag.exists()
    assert [len(one) for one in seen] == [100, 100]


def test_programs_in_different_directories_do_not_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hetstream.mpi_dataworkers.ops.pickled_pipeline import pickle_pipeline
    from hetstream.mpi_dataworkers.ops.pipeline import Pipeline

    found = set()
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        found.add(pickle_pipeline(Pipeline(datasets.Augmented(3), list, 3)).pipeline_id)
    assert len(found) == 2, "a relative path in the dataset would be another file"


@pytest.mark.shows("two loaders with one `pipeline_name` have one pipeline; a dataset of another structure is refused")
def test_pipelines_can_be_named(service: Any, jobs: Any, tmp_path: Path) -> None:
    service.start_workers()
    one, two = (jobs(datasets.Logged(40, tmp_path / name), pipeline_name="mine") for name in ("a", "b"))
    in_step([one, two])
    assert one.stats()["shared_steps"] + two.stats()["shared_steps"] == 5
    with pytest.raises(PipelineError, match=r"pipeline name 'mine' is in use for another pipeline \(length: 40 there"):
        jobs(datasets.Logged(41, tmp_path / "a"), pipeline_name="mine")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"sharing": "all"}, "sharing='all': must be 'lossless'"),
        ({"sharing": "lossless", "sampler": [1, 2]}, "with a sampler"),
        ({"sharing": None, "pipeline_name": "x"}, "goes with sharing="),
        ({"pipeline_name": ""}, "must be non-empty printable text"),
    ],
)
def test_what_cannot_be_shared_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(OptionsError, match=says):
        DataLoader(datasets.Augmented(8), **({"sharing": "lossless"} | options))


def test_sharing_without_a_service_is_a_plain_loader() -> None:
    (batch,) = DataLoader(datasets.Augmented(4), batch_size=4, sharing="lossless")
    assert torch.equal(batch[1], torch.arange(4))
