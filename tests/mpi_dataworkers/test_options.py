"""Keywords of the loader: each works or is refused by name, and all problems are told at once."""

from __future__ import annotations

import gc
import inspect
import multiprocessing
import os
import re
import typing
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import sample_datasets as datasets
import torch
import torch.utils.data

from hetstream import DataLoader
from hetstream.base.errors import ConfigError, OptionsError
from hetstream.mpi_dataworkers.loader import options as loader_options
from hetstream.mpi_dataworkers.loader.options import LoaderOptions

DATA = datasets.Augmented(12)


@pytest.mark.shows("`lengths` needs `bucket_boundaries`, and `rank` needs `world_size`")
@pytest.mark.shows("every setting is checked at construction, all problems at once")
@pytest.mark.shows("torch's keywords have torch's places and defaults; what is not supported is refused by name")
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"batch_size": 0}, "batch_size=0: must be a whole number of at least 1 or None"),
        ({"batch_size": True}, "batch_size=True: must be a whole number"),
        ({"batch_size": "8"}, "batch_size='8': must be a whole number"),
        ({"num_workers": -1}, "num_workers=-1: must be a whole number of at least 0"),
        ({"seed": -1}, "seed=-1: must be a whole number from 0 to"),
        ({"seed": 2**63}, "must be a whole number from 0 to"),
        ({"seed": 1.5}, "seed=1.5: must be a whole number"),
        ({"shuffle": "yes"}, "shuffle='yes': must be True, False or None"),
        ({"drop_last": 1}, "drop_last=1: must be True or False"),
        ({"timeout": -1}, "timeout=-1: must be a number of seconds of at least 0"),
        ({"timeout": float("nan")}, "timeout=nan: must be a number of seconds"),
        ({"timeout": float("inf"), "num_workers": 1}, "timeout=inf: must be a number of seconds"),
        ({"num_shards": 10**9, "sharding": "data"}, "num_shards=1000000000: must be a whole number from 1 to 4096"),
        ({"repeat": 2**40}, "repeat=1099511627776: must be a whole number from 1 to 2147483647 or None"),
        ({"repeat": 0}, "repeat=0: must be a whole number from 1 to 2147483647 or None"),
        ({"collate_fn": 3}, "collate_fn=3: must be a function or None"),
        ({"worker_init_fn": "f"}, "worker_init_fn='f': must be a function or None"),
        ({"sampler": 3}, "sampler=3: must be something to iterate"),
        ({"generator": 3}, "generator=3: must be a torch.Generator or None"),
        ({"buffer_bytes": 0}, "buffer_bytes=0: must be a whole number of at least 1 or None"),
        ({"job_name": ""}, "job_name='': must be non-empty printable text or None"),
        ({"job_name": 5}, "job_name=5: must be non-empty printable text or None"),
        ({"service": ""}, "service '': the form is file:PATH"),
        ({"service": "tcp://host:1"}, "service 'tcp://host:1': the form is file:PATH"),
        ({"service": 5}, "service=5: must be the text file:PATH"),
        ({"sampler": [1], "shuffle": True}, "sampler and shuffle=True"),
        ({"batch_sampler": [[1]], "batch_size": 4, "drop_last": True}, "batch_sampler with batch_size, drop_last"),
        ({"batch_size": None, "drop_last": True}, "drop_last=True with batch_size=None"),
        ({"prefetch_factor": 2}, "prefetch_factor=2 needs num_workers"),
        ({"prefetch_factor": 0, "num_workers": 1}, "prefetch_factor=0: must be a whole number of at least 1"),
        ({"persistent_workers": True}, "persistent_workers=True needs num_workers"),
        ({"timeout": 5}, "timeout=5 without a service needs num_workers of at least 1"),
        ({"rank": 0}, "rank=0 with world_size=None: they must be given together"),
        ({"world_size": 2}, "rank=None with world_size=2: they must be given together"),
        ({"rank": 2, "world_size": 2}, "rank 2 of world size 2"),
        ({"pin_memory_device": "cuda"}, "pin_memory_device='cuda'.* leave it out"),
    ],
    ids=str,
)
def test_what_breaks_its_rule_is_refused_by_name(options: dict[str, Any], says: str) -> None:
    with pytest.raises(OptionsError, match=says) as caught:
        DataLoader(DATA, **options)
    assert isinstance(caught.value, ConfigError)
    assert isinstance(caught.value, ValueError), "as torch raises"


@pytest.mark.shows("every setting is checked at construction, all problems at once")
@pytest.mark.parametrize("given", [torch.utils.data.TensorDataset, torch.utils.data.IterableDataset, list])
def test_a_class_in_the_place_of_a_dataset_is_told_as_that(given: type) -> None:
    with pytest.raises(OptionsError, match="is a class: give an instance of it"):
        DataLoader(given)


@pytest.mark.shows("every setting is checked at construction, all problems at once")
def test_every_problem_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETSTREAM_BUFFER_BYTES", "none")
    monkeypatch.setenv("RANK", "x")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(OptionsError) as caught:
        DataLoader(5, batch_size=0, seed=-1, job_name="", service="tcp:", sharing="all", pin_memory_device="cuda:1")
    text = str(caught.value)
    expected = (
        "dataset=5: a map-style dataset",
        "batch_size=0",
        "seed=-1",
        "job_name=''",
        "service 'tcp:'",
        "sharing='all': must be 'lossless', 'window' or None",
        "pin_memory_device='cuda:1'",
        "HETSTREAM_BUFFER_BYTES='none'",
        "RANK='x'",
    )
    assert [part for part in expected if part not in text] == []
    assert text.count(";") >= len(expected) - 1
    assert text.count("non-empty printable text") == 1, "none of them twice"
    with pytest.raises(OptionsError, match=r"dataset=5: .*; batch_size=0"):
        DataLoader(5, batch_size=0, lengths=[1], bucket_boundaries=[3])


@pytest.mark.shows("torch's keywords have torch's places and defaults; what is not supported is refused by name")
def test_every_keyword_of_torch_is_a_keyword_here_in_the_same_place() -> None:
    ours = inspect.signature(DataLoader.__init__).parameters
    theirs = inspect.signature(torch.utils.data.DataLoader.__init__).parameters
    assert [name for name in ours if name in theirs] == list(theirs)
    assert all(ours[name].kind == theirs[name].kind for name in theirs)
    assert {name: one.default for name, one in ours.items() if name in theirs} == {
        name: one.default for name, one in theirs.items()
    }
    assert {declared.name for declared in fields(LoaderOptions)} == set(ours) - {"self"}


def own_keywords() -> set[str]:
    theirs = inspect.signature(torch.utils.data.DataLoader.__init__).parameters
    return {declared.name for declared in fields(LoaderOptions)} - set(theirs)


def test_help_and_the_reference_say_what_each_keyword_means() -> None:
    own = own_keywords()
    meanings = inspect.getdoc(DataLoader.__init__) or ""
    explained = re.findall(r"^    ([a-z_, ]+): \S", meanings, re.M)
    assert {name for names in explained for name in names.split(", ")} >= own
    reference = (Path(__file__).parents[2] / "docs" / "reference.md").read_text()
    tables = re.findall(r"\| keyword \| meaning \| default \|\n\|[-|]+\|\n((?:\|.*\n)+)", reference)
    named = [
        name for table in tables for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1])
    ]
    assert sorted(named) == sorted(own), "each of hetstream's own keywords once"


@pytest.mark.shows("torch's keywords have torch's places and defaults; what is not supported is refused by name")
def test_an_unknown_keyword_or_a_missing_dataset_is_told_by_the_name_of_the_loader() -> None:
    with pytest.raises(TypeError, match=r"^DataLoader: got an unexpected keyword argument 'lenghts'"):
        DataLoader(DATA, lenghts=[1])  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"^DataLoader: missing a required argument: 'dataset'"):
        DataLoader(batch_size=3)  # type: ignore[call-arg]


@pytest.mark.shows("rank and world size come from torch, torchrun or Slurm; explicit ones win")
def test_rank_and_world_size_can_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    second = DataLoader(DATA, batch_size=2, rank=1, world_size=2)
    assert [ids.tolist() for _, ids in second] == [[2, 3], [6, 7], [10, 11]]


def test_what_is_harmless_is_accepted_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    loader_options._say_once.cache_clear()
    for _ in range(2):
        loader = DataLoader(datasets.Log(20), 4, num_workers=2, persistent_workers=True, multiprocessing_context="fork")
        assert sorted(index for _, ids in loader for index in ids.tolist()) == list(range(20))
    assert [one.message for one in caplog.records if "persistent_workers has no effect" in one.message] == [
        "hetstream: persistent_workers has no effect without a service for an IterableDataset, sharding, visitation or "
        "in_order: each pass has a process of its own"
    ]
    streamed = LoaderOptions(DATA, num_workers=1, multiprocessing_context="spawn")
    for _ in range(2):
        streamed.say_what_has_no_effect(is_streamed=True)
    assert caplog.text.count("multiprocessing_context has no effect with a service") == 1
    with pytest.raises(ValueError, match="should specify a valid start method"):  # torch's own rule
        DataLoader(DATA, num_workers=1, multiprocessing_context="threads")
    generator = torch.Generator()
    assert len(list(DataLoader(datasets.Log(4), generator=generator))) == 4, "an IterableDataset has its own order"


def test_the_loader_is_generic_as_torchs_is() -> None:
    assert typing.get_origin(DataLoader[int]) is DataLoader
    assert issubclass(DataLoader, torch.utils.data.DataLoader)
    assert len(list(DataLoader[Any](DATA, batch_size=3))) == 4


def pids_of(passing: Any) -> set[int]:
    return {int(pid) for values in passing for pid in values[2]}


def test_persistent_workers_live_from_epoch_to_epoch_and_make_the_same_batches() -> None:
    data = WithPid(48)
    kept, anew = (DataLoader(data, 4, True, num_workers=2, persistent_workers=keep) for keep in (True, False))
    assert pids_of(anew).isdisjoint(pids_of(anew))
    first = pids_of(kept)
    assert len(first) == 2
    unfinished = iter(kept)
    next(unfinished)
    taken = [(values.tolist(), ids.tolist()) for values, ids, _ in kept]
    assert taken == [(values.tolist(), ids.tolist()) for values, ids, _ in anew], "the third epoch of both"
    state = kept.state_dict()
    with pytest.raises(RuntimeError, match="another iteration of this DataLoader has begun"):
        next(unfinished)
    again = DataLoader(data, 4, True, num_workers=2, persistent_workers=True)
    again.load_state_dict(state)
    assert [ids.tolist() for _, ids, _ in again] == [ids.tolist() for _, ids, _ in kept]
    assert pids_of(kept) == first


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_persistent_workers_end_by_themselves_with_the_last_reference_to_their_loader(num_steps: int) -> None:
    gc.disable()
    try:
        loader = DataLoader(datasets.Augmented(12), 4, num_workers=2, persistent_workers=True)
        before = set(multiprocessing.active_children())
        steps = iter(loader)
        for _ in range(num_steps):
            next(steps)
        workers = set(multiprocessing.active_children()) - before
        assert len(workers) == 2
        del loader, steps
        assert [worker.exitcode for worker in workers] == [0, 0], "torch ended them by force, after 5 s each"
    finally:
        gc.enable()


class WithPid(datasets.Augmented):
    """Samples that tell which process made them."""

    def __getitem__(self, index: int) -> Any:
        return *super().__getitem__(index), os.getpid()


def test_pin_memory_without_a_gpu_is_told() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU: nothing to tell")
    with pytest.warns(UserWarning, match="pin_memory=True has no effect: this process has no GPU") as warned:
        loader = DataLoader(DATA, pin_memory=True)
    assert [warning.filename for warning in warned] == [__file__]
    assert not next(iter(loader))[0].is_pinned()


@pytest.mark.shows("`__iter__` may be called again, and `__len__` gives batches or TypeError")
@pytest.mark.parametrize("epoch", [-1, 1.5, "x", None, True, 2**31])
def test_an_epoch_is_a_whole_number(epoch: Any) -> None:
    loader = DataLoader(DATA)
    with pytest.raises(OptionsError, match=r"set_epoch\(.*\): must be a whole number from 0 to 2147483647"):
        loader.set_epoch(epoch)
    loader.set_epoch(2**31 - 1)
    assert len(list(loader)) == 12


@pytest.mark.shows("dynamic sharding gives each element once, also with fewer elements than data workers")
@pytest.mark.parametrize("order", [{}, {"generator": torch.Generator()}, {"drop_last": True}], ids=",".join)
def test_an_empty_dataset_may_be_shuffled(order: dict[str, Any]) -> None:
    assert list(DataLoader(datasets.Augmented(0), shuffle=True, **order)) == []


def test_a_quarantine_folder_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        OptionsError, match=r"batch_size=0.*; quarantine_dir='.*/file': .* cannot be written: File exist"
    ):
        DataLoader(DATA, batch_size=0, on_error="quarantine", quarantine_dir=tmp_path / "file")
    with pytest.raises(OptionsError, match=r"cannot be written: File exists"):
        DataLoader(DATA, on_error="quarantine", quarantine_dir=tmp_path / "file")
    with pytest.raises(OptionsError, match="cannot be written: Not a directory"):
        DataLoader(DATA, on_error="quarantine", quarantine_dir=tmp_path / "file" / "below")
    DataLoader(DATA, on_error="skip")
    # A folder that lets nobody make a file, whoever asks: only trying shows it.
    with pytest.raises(OptionsError, match=r"quarantine_dir='/proc': /proc/one.rank0.jsonl cannot be written: "):
        DataLoader(DATA, on_error="quarantine", quarantine_dir="/proc", job_name="one")
    with pytest.raises(OptionsError, match="quarantine_dir='': must be the path of a folder"):
        DataLoader(DATA, on_error="quarantine", quarantine_dir="")
    (tmp_path / "folder" / "one.rank0.jsonl").mkdir(parents=True)
    with pytest.raises(OptionsError, match=r"one.rank0.jsonl cannot be written: .* is no regular file"):
        DataLoader(DATA, on_error="quarantine", quarantine_dir=tmp_path / "folder", job_name="one")
    DataLoader(DATA, on_error="quarantine", quarantine_dir=tmp_path / "folder", job_name="two")
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["one.rank0.jsonl"], "no trace of the trial"


@pytest.mark.shows("every setting is checked at construction, all problems at once")
def test_the_service_of_the_environment_is_checked_with_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETSTREAM_SERVICE", "tcp://host:1")
    with pytest.raises(OptionsError, match=r"batch_size=0.*; environment variable HETSTREAM_SERVICE: service 'tcp://"):
        DataLoader(DATA, batch_size=0)
