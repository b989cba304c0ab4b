"""Data workers of this host for the loaders of a block, as in a notebook: `with hetstream.data_workers(2):`.

The service is that of `hetstream run`. It is kept in a thread, as the main thread runs the block.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from hetstream.base.errors import UsageError
from hetstream.base.files import make_private
from hetstream.base.process import with_job
from hetstream.hetjob.errors import MasterError
from hetstream.hetjob.job.processes import signals_held, temporary_directory
from hetstream.hetjob.master.children import Service
from hetstream.hetjob.master.local import MOST_DATA_WORKERS, READY_LIMIT_S, LocalConfig, LocalLauncher, not_ready
from hetstream.hetjob.master.state import MasterState, Phase
from hetstream.mpi_dataworkers.process.config import service_from_environment

# How long the thread may be late to see the end of the block; a child that ends wakes nobody here.
_LOOK_S = 0.2


@contextmanager
def data_workers(count: int, processes: int = 1) -> Iterator[None]:
    """Have data workers on this host make the batches of `hetstream.DataLoader`s that are made in a block.

        with hetstream.data_workers(2):
            for batch in DataLoader(dataset, batch_size=64): ...

    Batches are the same as without. Nothing is left running behind the block, nor when the process is killed.

    Args:
        count: data workers, at least 1.
        processes: of each.

    Raises:
        UsageError: the numbers cannot be meant.
        MasterError: the service did not start, or there is one already.
    """
    if service_from_environment() is not None:
        raise MasterError("this program has data workers already (HETSTREAM_SERVICE is set): leave out `data_workers`")
    for name, number in (("count", count), ("processes", processes)):
        if type(number) is not int or not 1 <= number <= MOST_DATA_WORKERS:
            raise UsageError(f"data_workers({name}={number!r}): a whole number from 1 to {MOST_DATA_WORKERS}")
    config = LocalConfig((sys.executable, "-m", "hetstream"), (sys.executable,), count, processes)
    with temporary_directory() as directory:
        make_private(directory)
        launcher = LocalLauncher(config, directory)
        service = Service(MasterState(config.data_workers), launcher, directory / "address")
        is_over, is_ready = threading.Event(), threading.Event()
        thread = threading.Thread(target=_keep, args=(service, is_over, is_ready), name="hetstream-service")
        try:
            thread.start()
            if not is_ready.wait(READY_LIMIT_S) or service.phase is not Phase.RUNNING:
                raise not_ready(launcher)
            with _variables(with_job({"HETSTREAM_SERVICE": f"file:{directory / 'address'}"}, os.environ)):
                yield
        finally:
            is_over.set()
            if thread.ident is not None:
                thread.join()


@contextmanager
def _variables(variables: Mapping[str, str]) -> Iterator[None]:
    """Have variables in the environment, and then those of before."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _keep(service: Service, is_over: threading.Event, is_ready: threading.Event) -> None:
    """Start the children, replace those that die, and end them all. They die with this thread, should it ever end."""
    with signals_held(()):
        service.begin()
        while not is_over.is_set():
            service.wait((), _LOOK_S)
            if service.phase is not Phase.STARTING:
                is_ready.set()
        service.finish("the block is over")
