"""The processes of a data worker are forked from one that has loaded a large dataset, where that is safe."""

from __future__ import annotations

import importlib
import mmap
import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import large_datasets as datasets
import pytest

from hetstream import DataLoader
from hetstream.mpi_dataworkers.ops.fork_safety import Holdings
from hetstream.mpi_dataworkers.worker.process import LoadAnswer, WorkPage
from tests.processes import children_of, pss_of_all

# Of words, so many that their pickle is above the threshold.
LENGTH = 3000


def pickled_bytes(pid: int) -> int:
    """Memory in which a data worker holds pickled pipelines as they came."""
    files = [one for one in Path(f"/proc/{pid}/fd").iterdir() if "hetstream-pipeline" in os.readlink(one)]
    assert files
    return sum(one.stat().st_size for one in files)


def loader_of(service: Any, dataset: Any, **options: Any) -> DataLoader[Any]:
    return DataLoader(dataset, batch_size=100, collate_fn=list, service=service.name, **options)


@pytest.fixture
def epoch_of(wait_until: Callable[..., None]) -> Callable[..., list[Any]]:
    """Iterate until data workers make all samples of an epoch; which are those of `range(LENGTH)`, in order."""

    def made(loader: Any, indices: range = range(LENGTH)) -> list[Any]:
        samples: list[Any] = []

        def streamed() -> bool:
            before = loader.stats()["local_steps"]
            samples[:] = [sample for batch in loader for sample in batch]
            assert [sample[1] for sample in samples] == list(indices)
            return bool(loader.stats()["local_steps"] == before)

        wait_until(streamed, timeout_s=60, what="an epoch from data workers")
        return samples

    return made


def makers(samples: list[Any]) -> set[int]:
    return {sample[0] for sample in samples}


def server_of(service: Any) -> int:
    """The fork server that was begun last."""
    return int(re.findall(r"loaded once for this host, in process (\d+)", service.log("worker"))[-1])


@pytest.mark.usefixtures("commands")
def test_four_processes_hold_one_copy_of_many_strings(
    service: Any, tmp_path: Path, epoch_of: Any, wait_until: Any
) -> None:
    dataset = datasets.Words(100_000, tmp_path / "note")
    some = range(0, len(dataset), 25)
    worker = service.start_workers(4)
    empty = pss_of_all(worker.pid)
    made_by: set[int] = set()
    with loader_of(service, dataset, sampler=some) as loader:

        def all_take_part() -> bool:
            made_by.update(makers(epoch_of(loader, some)))
            return made_by >= set(children_of(worker.pid)) - {server_of(service)}

        wait_until(all_take_part, 60, "batches from all four")
        grown, num_bytes = pss_of_all(worker.pid) - empty, len(dataset) * dataset.WORD_BYTES
        wait_until(lambda: pickled_bytes(worker.pid) == 0, 10, "the bytes as they came to be given back")
    assert dataset.loaders() == [server_of(service)]
    # Once as objects, and what each has read of them; without the fork server it is nine times.
    assert grown < 3 * num_bytes, f"{grown / num_bytes:.2f} times the strings"


def test_who_is_killed_is_forked_again_and_without_a_fork_server_loads_for_itself(
    service: Any, tmp_path: Path, epoch_of: Any, wait_until: Any
) -> None:
    supervisor = service.start_workers(3)
    dataset = datasets.Words(LENGTH, tmp_path / "note")
    with loader_of(service, dataset) as loader:
        made_by = makers(epoch_of(loader))
        server = server_of(service)
        assert dataset.loaders() == [server]
        first = set(children_of(supervisor.pid)) - {server}
        assert made_by <= first, "all are the supervisor's own"
        os.kill(first.pop(), signal.SIGKILL)
        wait_until(lambda: makers(epoch_of(loader)) - first, 60, "its replacement")
        assert dataset.loaders() == [server], "it was forked again"

        os.kill(server, signal.SIGKILL)
        wait_until(lambda: server not in children_of(supervisor.pid), 30, "the end of the fork server")
        assert makers(epoch_of(loader)), "the others go on"
        assert dataset.loaders() == [server]
        os.kill(first.pop(), signal.SIGKILL)
        wait_until(lambda: epoch_of(loader) and len(dataset.loaders()) == 2, 60, "the load by a fresh process")
    assert "is loaded in each process, and in each pass: its fork server" in service.log("worker")
    assert len(children_of(supervisor.pid)) == 3


def test_a_stopped_fork_server_is_not_waited_for_and_nothing_outlives_the_supervisor(
    service: Any, tmp_path: Path, epoch_of: Any, wait_until: Any
) -> None:
    supervisor = service.start_workers(2)
    dataset = datasets.Words(LENGTH, tmp_path / "note")
    with loader_of(service, dataset) as loader:
        assert makers(epoch_of(loader))
        server = server_of(service)
        first = set(children_of(supervisor.pid)) - {server}
        os.kill(server, signal.SIGSTOP)
        began = time.monotonic()
        os.kill(first.pop(), signal.SIGKILL)
        wait_until(lambda: epoch_of(loader) and len(dataset.loaders()) == 2, 60, "the load by a fresh process")
        assert time.monotonic() - began < 10
        assert server not in children_of(supervisor.pid)
        assert makers(epoch_of(loader))

        other = datasets.Words(2 * LENGTH, tmp_path / "other")  # has a fork server of its own
        with loader_of(service, other, job_name="other") as another:
            assert makers(epoch_of(another, range(2 * LENGTH)))
            everyone = children_of(supervisor.pid)
            assert other.loaders() == [server_of(service)]
            assert server_of(service) in everyone
            supervisor.kill()
            supervisor.wait()
            wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in everyone), 30, "the end of all")


REASONS = {
    datasets.StartsAThread: "loading it started a thread",
    datasets.StartsAProcess: "loading it started a process",
    datasets.MapsMemory: "loading it mapped shared memory: .*",
    datasets.OpensAFile: "loading it opened .*note",
    datasets.EndsItsProcess: "its fork server [0-9]+ ended with code 3",
    datasets.StopsItsProcess: "its fork server is stopped",
    datasets.HangsItsProcess: "its fork server has not loaded it in 2 s",
}
KINDS = list(REASONS)


@pytest.mark.parametrize("kind", KINDS)
def test_what_cannot_be_forked_is_loaded_in_each_process(three: Any, tmp_path: Path, epoch_of: Any, kind: Any) -> None:
    # Each larger than the one before: a process that was refused once does not ask for another one of the size.
    indices = range(LENGTH + 100 * KINDS.index(kind))
    dataset = kind(len(indices), tmp_path / "note")
    options = {"sample_timeout_s": 2} if kind is datasets.HangsItsProcess else {}
    with loader_of(three, dataset, job_name=kind.__name__, **options) as loader:
        samples = epoch_of(loader, indices)
    assert re.search(f"is loaded in each process, and in each pass: {REASONS[kind]}\n", three.log("worker"))
    assert all(is_own for _, _, is_own in samples)
    _, *others = dataset.loaders()
    assert makers(samples) <= set(others), "none was forked from the first one that has loaded it"
    assert len(others) == len(set(others))


def test_threads_that_a_library_ends_before_each_fork_are_in_nobodys_way(
    three: Any, tmp_path: Path, epoch_of: Any
) -> None:
    # Larger than those above: a process that was refused once does not ask for another one of the size.
    dataset = datasets.Multiplies(LENGTH + 100 * len(KINDS), tmp_path / "note")
    some = range(0, len(dataset), 50)
    with loader_of(three, dataset, sampler=some) as loader:
        assert epoch_of(loader, some)
    assert dataset.loaders() == [server_of(three)]
    if int((tmp_path / "threads").read_text()) == 1:
        pytest.skip("OpenBLAS starts no thread where it may use one CPU")


def test_each_process_is_a_worker_of_its_own(three: Any, tmp_path: Path, epoch_of: Any) -> None:
    dataset = datasets.Entered(2 * LENGTH, tmp_path / "note")
    options = {"num_workers": 2, "worker_init_fn": datasets.enter, "job_name": "entered"}
    with loader_of(three, dataset, **options) as loader:
        samples = epoch_of(loader, range(2 * LENGTH))
    assert len(dataset.loaders()) == 1
    workers = {(pid, worker_id) for pid, _, worker_id, _ in samples}
    assert len(workers) == len(makers(samples))
    assert {worker_id for _, worker_id in workers} <= {0, 1}
    assert {times for *_, times in samples} == {1}


def test_a_larger_dataset_is_loaded_once_too_and_the_fork_server_of_the_smaller_one_ends(
    service: Any, tmp_path: Path, epoch_of: Any, wait_until: Any
) -> None:
    supervisor = service.start_workers(2)
    small = datasets.Words(LENGTH, tmp_path / "small")
    large = datasets.Words(2 * LENGTH, tmp_path / "large")
    with loader_of(service, small, job_name="validation") as validation, loader_of(service, large) as training:
        epoch_of(validation)
        of_small = server_of(service)
        for _ in range(2):
            epoch_of(training, range(2 * LENGTH))
            epoch_of(validation)
        assert len(large.loaders()) == 1, large.loaders()
        assert of_small in small.loaders()
        wait_until(lambda: of_small not in children_of(supervisor.pid), what="the end of the first fork server")
        assert len(children_of(supervisor.pid)) == 3


IMPORTED = """
import os, threading
from large_datasets import Words
if os.getpid() != TRAINER:
    threading.Thread(target=threading.Event().wait, daemon=True).start()
class Data(Words): pass
"""


def test_threads_that_imports_have_started_are_missing_as_in_torchs_workers(
    three: Any, tmp_path: Path, epoch_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As pyarrow starts one, which every program with Hugging Face's datasets imports."""
    (tmp_path / "starts_a_thread_of_its_own.py").write_text(IMPORTED.replace("TRAINER", str(os.getpid())))
    monkeypatch.syspath_prepend(tmp_path)
    kind = importlib.import_module("starts_a_thread_of_its_own").Data
    dataset = kind(LENGTH, tmp_path / "note")
    said = len(three.log("worker"))
    with loader_of(three, dataset) as loader:
        made_by = makers(epoch_of(loader))
    assert "is loaded in each process" not in three.log("worker")[said:]
    [server] = dataset.loaders()
    assert server not in made_by, "all were forked from it"


@pytest.mark.parametrize(
    ("later", "reason"),
    [
        ({}, ""),
        ({"descriptors": frozenset({(5, "/data/a.h5"), (3, "socket:[1]")})}, "opened /data/a.h5"),
        ({"descriptors": frozenset()}, ""),
        ({"threads": frozenset({"1", "2"})}, "started a thread"),
        ({"has_children": True}, "started a process"),
        ({"shared": frozenset({"7f00-7f10 rw-s /dev/zero"})}, "mapped shared memory: 7f00-7f10 rw-s /dev/zero"),
        ({"uses_gpu": True}, "began to use CUDA"),
    ],
)
def test_what_keeps_a_process_from_being_forked(later: dict[str, Any], reason: str) -> None:
    before = Holdings(frozenset({(3, "socket:[1]")}), frozenset({"1"}), False, frozenset(), False)
    assert replace(before, **later).why_not_fork(before) == reason


def test_what_this_process_holds_is_found(tmp_path: Path) -> None:
    before = Holdings.now()
    with (tmp_path / "records").open("w") as file, mmap.mmap(-1, mmap.PAGESIZE):
        now = Holdings.now()
        assert now.descriptors - before.descriptors == {(file.fileno(), str(tmp_path / "records"))}
        assert len(now.shared - before.shared) == 1
    child = os.fork()
    if not child:
        os._exit(0)
    assert Holdings.now().has_children
    os.waitpid(child, 0)


def test_what_a_process_wants_and_who_it_is_is_on_a_page_that_can_be_passed_on() -> None:
    page = WorkPage()
    other = WorkPage(os.dup(page.descriptor))
    page.wish("d" * 32, 2.5)
    assert (other.wished, other.answer) == (("d" * 32, 2.5), LoadAnswer.WAIT)
    other.answer = LoadAnswer.LEAVE
    assert page.answer is LoadAnswer.LEAVE
    page.wish("")
    assert (other.wished, other.answer) == (("", 0.0), LoadAnswer.WAIT)
    assert (page.pid, page.is_known, page.shares) == (0, False, "")
    other.pid, other.shares = 123, "d" * 32
    other.note_known()
    assert (page.pid, page.is_known, page.shares) == (123, True, "d" * 32)
    assert (page.read(), page.num_asked, page.made_at) == (None, 0, 0.0)
    page.close()
    other.close()
