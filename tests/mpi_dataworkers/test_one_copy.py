"""The processes of a data worker share one copy of a large dataset, which is fetched once."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sample_datasets as datasets

from mpi_dataworkers import DataLoader
from mpi_dataworkers.errors import PipelineError
from mpi_dataworkers.exchange import LARGE_BYTES, Exchange, Renew
from mpi_dataworkers.ops.pipeline import Definition


def pss_bytes(pid: int) -> int:
    """Memory of a process, what it shares divided by those who share it, from /proc/PID/smaps_rollup (proc(5))."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def pss_of_all(pid: int) -> int:
    return sum(pss_bytes(one) for one in (pid, *children_of(pid)))


@pytest.mark.usefixtures("commands")
def test_four_processes_hold_one_copy_of_a_large_array(service: Any, wait_until: Any) -> None:
    worker = service.start_workers(4)
    empty = pss_of_all(worker.pid)
    array = np.arange(12_500_000, dtype=np.int64)
    with DataLoader(datasets.InMemory(array), batch_size=4, service=service.name) as loader:

        def streamed_epoch() -> bool:
            before = loader.stats()["local_steps"]
            rows = [row for batch in loader for row in batch.tolist()]
            assert rows == array[:: len(array) // 400][:400].tolist()
            return bool(loader.stats()["local_steps"] == before)

        # Until it has come to them, the loader may make steps itself.
        wait_until(streamed_epoch, timeout_s=60, what="an epoch from data workers")
        # Each is renewed to have the copy; the last may be on its way.
        wait_until(lambda: len(children_of(worker.pid)) == 4, timeout_s=30, what="four processes")
        grown = pss_of_all(worker.pid) - empty
        assert grown < 1.6 * array.nbytes, f"{grown / array.nbytes:.2f} copies"
    assert service.log("worker").count("loaded a pipeline of") == 1


def test_a_large_dataset_that_cannot_be_loaded_is_reported(service: Any) -> None:
    service.start_workers(2)
    with (
        DataLoader(datasets.LargeOnlyHere(), batch_size=4, service=service.name) as loader,
        pytest.raises(PipelineError, match="cannot be rebuilt in a data worker: UserError: not here"),
    ):
        next(iter(loader))


def test_what_was_left_is_taken_once_and_small_pipelines_are_not_left() -> None:
    exchange = Exchange()
    try:
        exchange.leave(Definition("small", [], "/", b"x"))
        assert exchange.take() is None
        large = Definition("large", ["/a"], "/", bytes(LARGE_BYTES))
        with exchange.alone("large", lambda: False) as to_fetch:
            assert to_fetch
            with pytest.raises(Renew):
                exchange.leave(large)
        assert exchange.take() == large
        with exchange.alone("large", lambda: True) as to_fetch:
            assert not to_fetch, "the supervisor has it"
        exchange.empty()
        assert exchange.take() is None
    finally:
        exchange.close()


def test_a_data_worker_whose_dataset_never_loads_ends_when_told(service: Any, tmp_path: Path, wait_until: Any) -> None:
    worker = service.start_workers(2)
    flag = tmp_path / "loading"
    with DataLoader(datasets.NeverLoaded(8, flag), batch_size=8, service=service.name) as loader:
        passing = iter(loader)
        wait_until(flag.exists, timeout_s=30, what="the load in the supervisor")
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(timeout=10) == -signal.SIGTERM
        assert sum(1 for _ in passing) == 1, "the trainer makes it itself"
