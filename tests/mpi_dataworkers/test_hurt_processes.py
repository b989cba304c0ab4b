"""What user code and a full system do to the processes of a data worker, and to the one that they are forked from."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import hurt_datasets as datasets
import pytest

from hetstream import DataLoader
from hetstream.mpi_dataworkers.ops import process_memory
from hetstream.mpi_dataworkers.worker import fork_server
from hetstream.mpi_dataworkers.worker.fork_server import Exchange, ForkServers
from hetstream.mpi_dataworkers.worker.process import LoadAnswer
from tests.processes import children_of

# Of words, so many that their pickle is above the threshold from which processes are forked with them.
LARGE = 3000
SMALL = 200


def loader_of(service: Any, dataset: Any, **options: Any) -> DataLoader[Any]:
    return DataLoader(dataset, batch_size=100, collate_fn=list, service=service.name, **options)


def makers(loader: DataLoader[Any]) -> set[int]:
    """The processes that make an epoch, which is made by data workers and complete."""
    before = loader.stats()["local_steps"]
    samples = [sample for batch in loader for sample in batch]
    assert [sample[1] for sample in samples] == list(range(len(samples)))
    assert loader.stats()["local_steps"] == before
    return {sample[0] for sample in samples}


# --- a fork server --------------------------------------------------------------------------------------------------


def test_a_dataset_that_takes_sigchld_is_still_loaded_once(service: Any, tmp_path: Path) -> None:
    service.start_workers(3)
    dataset = datasets.TakesChildren(LARGE, tmp_path / "note")
    with loader_of(service, dataset) as loader:
        assert makers(loader)
    assert len(dataset.loaders()) == 1
    assert "is loaded in each process" not in service.log("worker")


def test_a_load_that_its_pass_does_not_wait_for_comes_to_its_end_and_is_the_only_one(
    service: Any, tmp_path: Path, wait_until: Any
) -> None:
    supervisor = service.start_workers(3)
    dataset = datasets.WaitsForAFile(LARGE, tmp_path / "note")
    with loader_of(service, dataset) as loader:
        passing = iter(loader)
        wait_until(dataset.loaders, what="the begin of a load")
        del passing
        wait_until(lambda: "the program left the loop" in service.log("dispatcher"), what="the end of the pass")
        dataset.may_go_on.touch()
        wait_until(lambda: "loaded once for this host" in service.log("worker"), what="the end of the load")
        for _ in range(3):
            assert makers(loader)
    assert len(dataset.loaders()) == 1
    assert len(children_of(supervisor.pid)) == 4


def test_while_the_supervisor_is_stopped_processes_load_for_themselves(
    service: Any, tmp_path: Path, wait_until: Any
) -> None:
    supervisor = service.start_workers(2)
    first = children_of(supervisor.pid)
    dataset = datasets.Words(LARGE, tmp_path / "note")
    with loader_of(service, dataset) as loader:
        os.kill(supervisor.pid, signal.SIGSTOP)
        try:
            assert makers(loader) <= set(dataset.loaders()) <= first
        finally:
            os.kill(supervisor.pid, signal.SIGCONT)
        gone = dataset.loaders()[0]
        os.kill(gone, signal.SIGKILL)
        wait_until(lambda: makers(loader) - first, what="an epoch in which the dead one's replacement takes part")
    assert len(children_of(supervisor.pid) & first) == 1


@pytest.mark.slow
def test_a_process_that_takes_long_to_fork_because_it_is_large_is_waited_for(service: Any, tmp_path: Path) -> None:
    service.start_workers(2)
    dataset = datasets.ForksSlowly(LARGE, tmp_path / "note")
    with loader_of(service, dataset) as loader:
        for _ in range(2):  # while a pass waits for its processes, the trainer makes steps
            assert [sample[1] for batch in loader for sample in batch] == list(range(len(dataset)))
    assert len({*dataset.loaders()} - {os.getpid()}) == 1


def test_refusals_are_remembered_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = os.fork()
    if not ended:
        os._exit(0)
    monkeypatch.setattr(fork_server, "fork_child", lambda _: ended)
    exchange = Exchange(num_slots=0)
    servers = ForkServers(exchange, lambda: None, lambda *_: 0, time.monotonic)
    try:
        for number in range(1000):
            assert servers.answer(f"pickled pipeline {number}", 1.0) is LoadAnswer.WAIT
            assert servers.forget(ended, "ended with code 3")
        assert servers.answer("pickled pipeline 999", 1.0) is LoadAnswer.LOAD
        assert servers.answer("pickled pipeline 0", 1.0) is LoadAnswer.WAIT, "it is of a program that is long over"
    finally:
        servers.close()
        exchange.close()


# --- processes ------------------------------------------------------------------------------------------------------


def test_a_process_whose_streams_user_code_has_closed_ends_as_others_do(
    service: Any, tmp_path: Path, wait_until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor = service.start_workers(1)
    with loader_of(service, datasets.ClosesItsOutput(SMALL, tmp_path / "note")) as loader:
        (first,) = makers(loader)
    monkeypatch.chdir(tmp_path)  # so this is another program
    with loader_of(service, datasets.Words(SMALL, tmp_path / "other")) as loader:
        wait_until(lambda: makers(loader) - {first}, what="an epoch from a fresh process")
    assert len(children_of(supervisor.pid)) == 1
    assert "Traceback" not in service.log("worker")


@pytest.mark.usefixtures("commands")
def test_what_samples_print_is_not_lost_with_their_process(
    service: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    service.start_workers(2)
    with loader_of(service, datasets.Prints(SMALL, tmp_path / "note")) as loader:
        assert makers(loader)
    service.stop()
    printed = [line for line in service.log("worker").splitlines() if line.startswith("printed")]
    assert {*printed} == {f"printed {index}" for index in range(SMALL)}
    assert len(printed) == SMALL + 2, "one sample of the first step is made twice more"


def test_a_forked_process_that_comes_back_with_a_sample_writes_into_nobodys_batch(
    service: Any, tmp_path: Path, wait_until: Any
) -> None:
    service.start_workers(1)
    dataset = datasets.ForkGoesOn(tmp_path / "go")
    with DataLoader(dataset, batch_size=4, service=service.name) as loader:
        passing = iter(loader)
        wait_until(lambda: loader.stats()["batches_waiting"], what="the batch")
        dataset.until.touch()
        forked = Path(f"/proc/{dataset.until.with_suffix('.pid').read_text()}/stat")
        wait_until(lambda: not forked.exists() or ") Z" in forked.read_text(), what="the end of the forked process")
        assert [batch.tolist() for batch in passing] == [[0, 1, 2, 3]]


def test_a_forked_process_ends_by_an_error_that_is_its_own_cause(three: Any) -> None:
    with DataLoader(datasets.ForkRaises(), batch_size=2, service=three.name) as loader:
        assert [batch.tolist() for batch in loader] == [[1, 1]]
        assert loader.stats()["local_steps"] == 0


def test_a_job_that_is_suspended_for_longer_than_a_sample_may_take_has_no_hung_process(
    service: Any, tmp_path: Path, wait_until: Any
) -> None:
    supervisor = service.start_workers(1)
    dataset = datasets.SampleWaits(SMALL, tmp_path / "note")
    with loader_of(service, dataset, sample_timeout_s=3.0) as loader:
        passing = iter(loader)
        wait_until(dataset.began.exists, what="the begin of a sample")
        (process,) = children_of(supervisor.pid)
        for pid in (supervisor.pid, process):
            os.kill(pid, signal.SIGSTOP)
        began = time.monotonic()
        wait_until(lambda: time.monotonic() - began > 3.2, what="the end of the suspension")
        for pid in (supervisor.pid, process):
            os.kill(pid, signal.SIGCONT)
        wait_until(lambda: time.monotonic() - began > 4.2, what="the time in which it would be killed")
        dataset.may_go_on.touch()
        assert {sample[0] for batch in passing for sample in batch} == {process}
    assert "hung" not in service.log("worker")


# --- the system -----------------------------------------------------------------------------------------------------


def test_a_supervisor_without_descriptors_starts_processes_later(service: Any, tmp_path: Path, wait_until: Any) -> None:
    supervisor = service.start_workers(2)
    limits = resource.prlimit(supervisor.pid, resource.RLIMIT_NOFILE)
    with loader_of(service, datasets.Words(SMALL, tmp_path / "note")) as loader:
        assert makers(loader)
        first = children_of(supervisor.pid)
        resource.prlimit(supervisor.pid, resource.RLIMIT_NOFILE, (5, limits[1]))
        os.kill(min(first), signal.SIGKILL)
        wait_until(lambda: "can be started now" in service.log("worker"), what="the warning")
        assert makers(loader) == {max(first)}
        resource.prlimit(supervisor.pid, resource.RLIMIT_NOFILE, limits)
        wait_until(lambda: len(children_of(supervisor.pid)) == 2, what="the process in the dead one's place")
        wait_until(lambda: makers(loader) - first, what="an epoch in which it takes part")
    assert service.log("worker").count("can be started now") == 1


def test_more_processes_than_the_soft_limit_of_open_files_has_room_for(zygote: Any, service: Any) -> None:
    limits = resource.prlimit(zygote.process.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(zygote.process.pid, resource.RLIMIT_NOFILE, (40, limits[1]))
    try:
        supervisor = service.start_workers(12)
    finally:
        resource.prlimit(zygote.process.pid, resource.RLIMIT_NOFILE, limits)
    for child in children_of(supervisor.pid):
        assert resource.prlimit(child, resource.RLIMIT_NOFILE)[0] == 40, "user code has the user's limit"


def test_mapped_files_may_have_any_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    maps = tmp_path / "maps"
    lines = [
        "7f00-7f10 rw-s 00000000 00:01 7 /data/a\u2028b\x0cc",
        "7f20-7f30 rw-p 00000000 00:00 0",
        "7f40-7f50 rw-s x",
    ]
    maps.write_text("".join(f"{line}\n" for line in lines))
    monkeypatch.setattr(process_memory, "_MAPS", maps)
    assert process_memory.shared_mappings() == {lines[0], lines[2]}


PROGRAM = """
import os, sys
from pathlib import Path
from hetstream import DataLoader
import rows

if __name__ == "__main__":
    with DataLoader(rows.Rows(), batch_size=4, collate_fn=list, service=sys.argv[1]) as loader:
        samples = [sample for batch in loader for sample in batch]
        assert samples == ["row"] * 8, samples
        assert loader.stats()["local_steps"] == 0
    sys.path.clear()
"""
ROWS = """
from pathlib import Path

class Rows:
    def __len__(self): return 8
    def __getitem__(self, index): return Path("rows.txt").read_text()
"""


def test_a_program_in_a_directory_that_is_not_in_utf_8(service: Any, tmp_path: Path) -> None:
    service.start_workers(2)
    folder = Path(os.fsdecode(os.fsencode(tmp_path / "caf") + b"\xe9"))
    folder.mkdir()
    for name, text in (("train.py", PROGRAM), ("rows.py", ROWS), ("rows.txt", "row")):
        (folder / name).write_text(text)
    words = [sys.executable, "train.py", service.name]
    ended = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
