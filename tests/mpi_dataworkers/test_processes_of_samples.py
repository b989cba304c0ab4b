"""Samples that start processes of their own, which `multiprocessing` ends by signals."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from typing import Any

import pytest

from hetstream import DataLoader

FORK = multiprocessing.get_context("fork")


class Processes:
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        process = FORK.Process(target=time.sleep, args=(600,))
        process.start()
        process.terminate()
        process.join()
        return process.exitcode


class Pools:
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        with FORK.Pool(2) as pool:  # which it ends by `terminate`
            return pool.map(abs, [-index, index])


class Handling:
    """A process of a sample keeps the handlers that it sets, in its own children too."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        ours, theirs = FORK.Pipe()
        process = FORK.Process(target=handle, args=(theirs,))
        process.start()
        found = ours.recv()
        process.join()
        return found


def handle(channel: Any) -> None:
    def own(*_: object) -> None: ...

    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    signal.signal(signal.SIGTERM, own)
    if (child := os.fork()) == 0:
        os._exit(int(signal.getsignal(signal.SIGTERM) is own))
    kept = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    channel.send([before == [signal.SIG_DFL, signal.default_int_handler], bool(kept)])


def batches(dataset: Any, service: str) -> list[Any]:
    with DataLoader(dataset, batch_size=2, service=service, collate_fn=list) as loader:
        return list(loader)


@pytest.mark.shows("processes and pools that samples start have Python's own signal handlers")
def test_a_process_that_a_sample_starts_ends_when_it_is_told(three: Any) -> None:
    started = time.monotonic()
    assert batches(Processes(), three.name) == [[-signal.SIGTERM] * 2] * 3
    assert time.monotonic() - started < 300  # they sleep for 600 s


@pytest.mark.shows("processes and pools that samples start have Python's own signal handlers")
def test_a_pool_of_a_sample_comes_to_its_end(three: Any) -> None:
    assert batches(Pools(), three.name) == [[[0, 0], [1, 1]], [[2, 2], [3, 3]], [[4, 4], [5, 5]]]


def test_processes_of_samples_have_pythons_handlers_and_keep_their_own(three: Any) -> None:
    assert batches(Handling(), three.name) == [[[True, True]] * 2]
