"""From indices to a batch: the same bytes whoever makes it, and errors that name what is wrong."""

from __future__ import annotations

import collections.abc
import functools
import importlib
import os
import random
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any, NewType

import cloudpickle
import h5py
import numpy as np
import pytest
import sample_datasets as datasets
import torch
from torch.utils.data import default_collate, get_worker_info
from torch.utils.data._utils import pin_memory as torch_pin
from torch.utils.data._utils import worker as torch_worker

from hetstream.mpi_dataworkers.errors import PipelineError
from hetstream.mpi_dataworkers.ops.origins import PassSeeds
from hetstream.mpi_dataworkers.ops.pickled_pipeline import (
    PickledPipeline,
    copy_of,
    find_unpicklable,
    load_pipeline,
    pickle_pipeline,
)
from hetstream.mpi_dataworkers.ops.pipeline import MadeStep, Pipeline, SampleError, generators_kept, seed_generators
from hetstream.mpi_dataworkers.ops.worker_context import EnteredPipeline
from hetstream.mpi_dataworkers.order.sharding import SampleSeeds
from hetstream.mpi_dataworkers.sources.hdf5 import Hdf5Dataset


def drawn() -> list[float]:
    python = random.random(), random.gauss(0, 1), random.randrange(10**30)
    return [*python, np.random.rand(), np.random.normal(), torch.rand(()).item()]


def test_generators_are_seeded_as_a_program_seeds_them() -> None:
    seed = 2**64 - 3
    with generators_kept():
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed % 2**63)
        random.gauss(0, 1)  # its second number is kept for the next call, until the generator is seeded
        random.seed(seed)
        expected = drawn()
        random.gauss(0, 1)
        seed_generators(seed)
        assert drawn() == expected


def pipeline_of(dataset: Any, **options: Any) -> Pipeline:
    return Pipeline(dataset, default_collate, len(dataset), **options)


def batch_of(pipeline: Pipeline, indices: list[int], seed: int, epoch: int) -> Any:
    return pipeline.make_batch(np.array(indices), SampleSeeds(np.array(indices), seed, epoch))


@pytest.mark.shows("a resumed run with shuffling and random transforms is the uninterrupted one")
def test_a_sample_is_the_same_in_any_batch_and_differs_by_epoch_and_seed() -> None:
    pipeline = pipeline_of(datasets.Augmented(50))
    alone = batch_of(pipeline, [7], 1, 2)[0][0]
    among = batch_of(pipeline, [3, 7, 9], 1, 2)[0][1]
    assert torch.equal(alone, among)
    assert not torch.equal(alone, batch_of(pipeline, [7], 1, 3)[0][0])
    assert not torch.equal(alone, batch_of(pipeline, [7], 2, 2)[0][0])


def add_noise(row: np.ndarray[Any, np.dtype[np.float32]]) -> np.ndarray[Any, np.dtype[np.float32]]:
    return row + np.float32(random.random())


def test_a_source_is_read_for_the_batch_and_seeded_for_each_sample(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "rows.h5", "w") as file:
        file["rows"] = np.arange(40, dtype=np.float32).reshape(20, 2)
    dataset = Hdf5Dataset(tmp_path / "rows.h5", "rows", transform=add_noise)
    pipeline = pipeline_of(dataset)
    alone = batch_of(pipeline, [7], 1, 2)[0]
    assert torch.equal(alone, batch_of(pipeline, [3, 7, 9], 1, 2)[1])
    dataset.close()


def test_the_trainers_own_random_state_is_kept() -> None:
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = random.random(), np.random.rand(), torch.rand(1).item()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    with generators_kept():
        batch_of(pipeline_of(datasets.Augmented(5)), [1, 2], 0, 0)
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == expected


def test_user_errors_name_the_sample() -> None:
    with pytest.raises(SampleError) as caught:
        batch_of(pipeline_of(datasets.Poisoned(50)), [36, 37], 0, 0)
    assert caught.value.sample_index == 37
    assert isinstance(caught.value.user_error(), datasets.UserError)
    with pytest.raises(SampleError) as caught:
        batch_of(Pipeline(datasets.Augmented(5), lambda _: 1 / 0, 5), [1], 0, 0)
    assert (caught.value.sample_index, type(caught.value.user_error())) == (-1, ZeroDivisionError)


def test_pickled_pipeline_travels_by_value_and_checks_the_length() -> None:
    pipeline = Pipeline(datasets.Augmented(5), lambda samples: [index for _, index in samples], 5)
    pickled = pickle_pipeline(pipeline)
    assert pickled.program.working_dir
    loaded = load_pipeline(pickled)
    assert batch_of(loaded, [4, 2], 0, 0) == [4, 2]
    wrong = pickle_pipeline(Pipeline(datasets.Augmented(5), default_collate, 6))
    with pytest.raises(PipelineError, match="has 5 samples in a data worker and 6 in the trainer"):
        load_pipeline(wrong)


def script_class() -> Any:
    """A dataset whose class travels by value, as those of a script do."""

    class Scaled(collections.abc.Sized):
        scale = 1
        words = frozenset({"a", "b", "c"})

        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> tuple[int, int]:
            return index * Scaled.scale, self.doubled

        @functools.cached_property
        def doubled(self) -> int:
            return 2 * type(self).scale

    return Scaled


def test_each_pickled_pipeline_has_the_classes_of_its_time() -> None:
    kind = script_class()
    loaded = {}
    for scale in (1, 3):
        kind.scale = scale
        loaded[scale] = load_in_another_process(pickle_pipeline(Pipeline(kind(), list, 4)), kind)
    for scale, pipeline in loaded.items():
        assert batch_of(pipeline, [1, 2], 0, 0) == [(scale, 2 * scale), (2 * scale, 2 * scale)]


def load_in_another_process(pickled: PickledPipeline, kind: type) -> Pipeline:
    """Load a pipeline where nobody has defined its class: cloudpickle does not know it there."""
    ids = cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID
    class_id = cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS[kind]
    own = ids.pop(class_id)
    try:
        return load_pipeline(pickled)
    finally:
        ids[class_id] = own


def test_a_copy_leaves_the_programs_own_classes_as_they_are_and_tells_of_changed_ones() -> None:
    kind = script_class()
    pickled = pickle_pipeline(Pipeline(kind(), list, 4))
    method = kind.__getitem__
    assert copy_of(pickled.in_private())[1] == []
    kind.scale = 3
    copied, changed = copy_of(pickled.in_private())
    assert (changed, kind.scale) == ([kind], 3)
    assert kind.__getitem__ is method
    assert type(copied.dataset) is kind
    kind.scale, kind.__len__ = 1, lambda _: 4
    assert copy_of(pickled.in_private())[1] == [kind]


def test_what_cloudpickle_cannot_write_or_would_write_by_name_travels_with_the_script() -> None:
    Number = NewType("Number", int)

    @functools.lru_cache(maxsize=5)
    def fibonacci(n: Number) -> int:
        return int(n) if n < 2 else fibonacci(Number(n - 1)) + fibonacci(Number(n - 2))

    class Cached:
        def __len__(self) -> int:
            return 10

        def __getitem__(self, index: int) -> tuple[int, int, int]:
            return fibonacci(Number(index)), self.doubled(index), self.length

        @functools.cache  # noqa: B019, as scripts do
        def doubled(self, index: int) -> int:
            return 2 * index

        @functools.cached_property
        def length(self) -> int:
            return len(self)

    def seed_all(_: int) -> None:
        torch.backends.cudnn.deterministic = True  # a module of a class of its own

    pipeline = Pipeline(Cached(), list, 10, seed_all)
    loaded = load_in_another_process(pickle_pipeline(pipeline), Cached)
    assert batch_of(loaded, [9, 3], 0, 0) == [(34, 18, 10), (2, 6, 10)]
    assert loaded.worker_init_fn is not None
    copies = load_in_another_process(pickle_pipeline(replace(pipeline, collate_fn=fibonacci)), Cached)
    assert copies.collate_fn(20) == 6765
    assert copies.collate_fn.cache_parameters() == fibonacci.cache_parameters()  # type: ignore[attr-defined]


# What cloudpickle sends by value, as of a script.
SCRIPT = """
class Guarded:
    def __len__(self): return 1
    def __getitem__(self, index):
        with LOCK: return helper(index)

def helper(index): return index

def collate(samples): return collate.__name__, through(samples)

def through(samples): return LOCK
"""


def test_what_cannot_be_pickled_is_named() -> None:
    lock = threading.Lock()
    script: dict[str, Any] = {"__name__": "__main__", "LOCK": lock}
    exec(SCRIPT, script)
    cases: list[tuple[Any, str]] = [
        (Pipeline([lock], default_collate, 1), "dataset[0] (_thread.lock)"),
        (Pipeline({"a": {"b": lock}}, default_collate, 1), "dataset['a']['b'] (_thread.lock)"),
        (Pipeline([1], lambda _: lock, 1), "collate_fn.<closure>.lock (_thread.lock)"),
        (Pipeline(datasets.Holding(3), default_collate, 3), "dataset.transform['crop'].lock (_thread.lock)"),
        (Pipeline(script["Guarded"](), list, 1), "dataset.__getitem__ -> global LOCK (_thread.lock)"),
        (Pipeline([1], script["collate"], 1), "collate_fn -> global through -> global LOCK (_thread.lock)"),
    ]
    for pipeline, name in cases:
        assert find_unpicklable(pipeline) == name
        with pytest.raises(PipelineError, match="cannot be sent to data workers"):
            pickle_pipeline(pipeline)


# A proxy without an object, as of a web framework outside of a request.
UNBOUND = """
class Unbound:
    @property
    def __class__(self): raise RuntimeError("no object")

PROXY = Unbound()
def collate(samples): return PROXY
"""


def test_a_proxy_without_an_object_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script: dict[str, Any] = {"__name__": "__main__"}
    exec(UNBOUND, script)
    with pytest.raises(PipelineError, match=r"collate_fn -> global PROXY \(__main__\.Unbound\) cannot be pickled"):
        pickle_pipeline(Pipeline([1], script["collate"], 1))
    (tmp_path / "unbound_proxy.py").write_text(UNBOUND)
    monkeypatch.syspath_prepend(tmp_path)
    collate = importlib.import_module("unbound_proxy").collate
    with pytest.raises(PipelineError, match=r"its code names cannot be looked at \(RuntimeError\('no object'\)\)"):
        pickle_pipeline(Pipeline([1], collate, 1))


def test_a_program_whose_directory_is_gone_is_pickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scratch").mkdir()
    monkeypatch.chdir(tmp_path / "scratch")
    monkeypatch.setattr("sys.path", ["", "lib", *sys.path])
    (tmp_path / "scratch").rmdir()
    program = pickle_pipeline(Pipeline([1], list, 1)).program
    monkeypatch.chdir(tmp_path)
    assert program.working_dir.startswith(str(tmp_path / "scratch"))
    assert os.path.join(program.working_dir, "lib") in program.sys_path


def test_description_tells_pipelines_apart() -> None:
    assert pipeline_of(datasets.Augmented(5)).description() == {
        "dataset": "sample_datasets.Augmented",
        "length": "5",
        "collate_fn": "torch.utils.data._utils.collate.default_collate",
        "batched": "True",
    }


def number_of_worker(_: int) -> None:
    """Stands for the user's worker_init_fn."""
    seen.append(get_worker_info().id)


seen: list[int] = []


def test_in_a_data_worker_batches_are_private_memory_and_samples_know_their_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch_worker, "_worker_info", None)
    loaded = pipeline_of(datasets.Where(9), worker_init_fn=number_of_worker, num_workers=4)
    pipeline = EnteredPipeline(loaded, 7).enter(PassSeeds(5, 0), 0)
    _, _, numbers = batch_of(pipeline, [1, 2], 0, 0)
    assert (numbers.tolist(), seen) == ([3, 3], [3])
    assert not numbers.is_shared(), "a shared-memory segment for each batch costs more than the transport"


def test_what_samples_see_of_their_worker_is_made_once_for_all_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_worker, "_worker_info", None)
    made: list[int] = []

    class CountedInfo(torch_worker.WorkerInfo):  # type: ignore[misc]
        def __init__(self, **parts: Any) -> None:
            made.append(parts["seed"])
            super().__init__(**parts)

    monkeypatch.setattr(torch_worker, "WorkerInfo", CountedInfo)
    one, other = (EnteredPipeline(pipeline_of(datasets.Where(9), num_workers=4), number) for number in (1, 2))
    first = one.enter(PassSeeds(5, 0), 0)
    seen_first = get_worker_info()
    for _ in range(20):
        assert one.enter(PassSeeds(5, 0), 0) is first
    assert (made, get_worker_info()) == ([6], seen_first)
    other.enter(PassSeeds(5, 0), 0)
    assert get_worker_info().id == 2
    one.enter(PassSeeds(5, 0), 0)
    assert get_worker_info() is seen_first, "another pipeline's steps came in between"
    one.enter(PassSeeds(8, 0), 0)
    one.enter(PassSeeds(5, 0), 0)
    assert (made, get_worker_info().seed) == ([6, 7, 9], 6), "two passes take turns"


class EndsTheProcess(datasets.Augmented):
    """Raises what Python takes for the end of an iteration."""

    def __getitem__(self, index: int) -> Any:
        return next(iter([]))


@pytest.mark.shows("a StopIteration of user code is an error of `hetstream.DataLoader`")
def test_user_code_cannot_end_the_epoch_by_a_stray_stop_iteration() -> None:
    with pytest.raises(SampleError) as caught:
        batch_of(pipeline_of(EndsTheProcess(3)), [1], 0, 0)
    assert isinstance(caught.value.user_error(), RuntimeError)


def test_a_sample_drawn_twice_in_a_listed_order_is_augmented_differently() -> None:
    seeds = SampleSeeds(np.array([7, 7]), 1, 2, listed_step=0)
    assert len({*seeds, *SampleSeeds(np.array([7, 7]), 1, 2, listed_step=1)}) == 4


class Pinnable:
    def pin_memory(self) -> str:
        return "pinned"


def test_a_step_that_torch_pins_pins_its_batch() -> None:
    pinned, _ = torch_pin.pin_memory((MadeStep({"x": Pinnable()}, 1, 0, []), b""))
    assert pinned == MadeStep({"x": "pinned"}, 1, 0, [])
