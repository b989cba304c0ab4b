"""A data worker that a launcher started as a rank of an MPI world. Called by `hetstream worker --mpi`.

One process: what has called MPI_Init must not fork. When it dies, the launcher ends the whole step; so when it only
cannot work, it stays until the trainers have ended, and they load their own data.
"""

from __future__ import annotations

import logging
import secrets
import sys
import threading
import traceback
from functools import partial
from pathlib import Path

from hetstream.base.errors import HetstreamError
from hetstream.mpi_dataworkers.children import stop_at_signals
from hetstream.mpi_dataworkers.errors import ServiceEnded, ServiceError
from hetstream.mpi_dataworkers.memory import keep_freed_memory
from hetstream.mpi_dataworkers.ops.pipeline import use_one_thread
from hetstream.mpi_dataworkers.wire.address import has_ended, wait_for_address_file
from hetstream.mpi_dataworkers.worker.connection import CONNECT_TIMEOUT_S
from hetstream.mpi_dataworkers.worker.start import WorkerOptions, WorkerStart
from hetstream.mpi_dataworkers.worker.worker import DataWorker

_log = logging.getLogger(__name__)


def run_mpi_data_worker(address_file: Path, cache_bytes: int, num_threads: int = 1) -> int:
    """Work until the service ends or all trainers of this MPI world have; then wait for them.

    Args:
        address_file: the dispatcher's address file.
        cache_bytes: finished batches to keep for other loaders that share them.
        num_threads: that make the samples of a batch, where the dataset is thread-safe.

    Returns:
        Exit code: 0 after an orderly end, 1 when it could not work, 2 for an error inside.

    Raises:
        ServiceError: there is no MPI here, or no other rank.
    """
    from hetstream.mpi_dataworkers.transports.mpi import ONE_LAUNCH, enter_world, is_alone

    if is_alone():
        raise ServiceError(
            f"hetstream worker --mpi: this data worker is alone in its MPI world, so no trainer is in it. {ONE_LAUNCH}"
        )

    trainers = _Trainers()
    watcher = threading.Thread(
        target=enter_world(is_trainer=False).wait_for_end,
        args=(trainers.have_ended,),
        name="hetstream-world",
        daemon=True,
    )
    watcher.start()
    code = 0
    try:
        _work(address_file, cache_bytes, num_threads, trainers)
    except ServiceEnded as ended:
        _log.info("%s", ended)
    except HetstreamError as error:
        sys.stderr.write(f"hetstream worker: {type(error).__name__}: {error}\n")
        code = 1
    except Exception:  # noqa: BLE001, the process's boundary: say it, but do not end the step
        traceback.print_exc()
        code = 2
    watcher.join()
    return code


class _Trainers:
    """Whether they have ended, and the data worker that is to be told."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._worker: DataWorker | None = None
        self._have_ended = False

    def have_ended(self) -> None:
        with self._lock:
            self._have_ended = True
            if self._worker is not None:
                self._worker.stop()

    def tell(self, worker: DataWorker) -> None:
        with self._lock:
            self._worker = worker
            if self._have_ended:
                worker.stop()


def _work(address_file: Path, cache_bytes: int, num_threads: int, trainers: _Trainers) -> None:
    use_one_thread()
    keep_freed_memory()
    service = wait_for_address_file(address_file, CONNECT_TIMEOUT_S)
    options = WorkerOptions(cache_bytes, num_threads, over_mpi=True)
    worker = DataWorker(service, WorkerStart(secrets.token_hex(16)), options, partial(has_ended, address_file))
    stop_at_signals(worker.stop)
    trainers.tell(worker)
    worker.run()
