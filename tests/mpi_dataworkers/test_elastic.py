"""Data workers that come and go in mid-epoch: nothing lost, nothing made twice without need, the same bytes."""

from __future__ import annotations

import os
import re
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import sample_datasets as datasets

LOADER_OPTIONS: dict[str, Any] = {"batch_size": 4, "shuffle": True, "seed": 5}


def as_bytes(batch: Any) -> tuple[bytes, list[int]]:
    values, ids = batch
    return values.numpy().tobytes(), ids.tolist()


def stolen(log: str) -> set[int]:
    """Steps that went to an idle data worker."""
    taken = re.findall(r"steps=(\d+)-(\d+) go to idle", log)
    return {step for first, stop in taken for step in range(int(first), int(stop))}


def made_again(seen: list[tuple[bytes, list[int]]], log: str, directory: Path) -> set[int]:
    """Samples read more than once, but for those of steps that went to an idle data worker as theirs began them.

    One sample of the first step shows whether samples change what makes them: it is made twice more.
    """
    reads = Counter(index for index, _ in datasets.reads(directory))
    assert set(reads) == {index for _, ids in seen for index in ids}
    excused = {index for step in stolen(log) for index in seen[step][1]} | {seen[0][1][0]}
    return {index for index, times in reads.items() if times > 1} - excused


@pytest.mark.shows("when a data worker drains, nothing is computed twice")
def test_a_data_worker_that_drains_leaves_nothing_to_make_again(service: Any, loaders: Any, tmp_path: Path) -> None:
    service.start_workers(1)
    leaving = service.start_workers(2)
    loader = loaders(datasets.Counted(1200, tmp_path, 0.001), service=service.name)
    seen = []
    for batch in loader:
        seen.append(as_bytes(batch))
        if len(seen) == 60:
            leaving.send_signal(signal.SIGTERM)
    assert leaving.wait(timeout=10) == 0
    assert seen == [as_bytes(batch) for batch in loaders(datasets.Augmented(1200))]
    assert made_again(seen, service.log("dispatcher"), tmp_path) == set()
    assert service.log("dispatcher").count("drains") == 2
    assert loader.stats()["duplicates_dropped"] <= len(stolen(service.log("dispatcher")))


def test_an_idle_data_worker_takes_what_a_slow_one_has_not_begun(service: Any, loaders: Any, tmp_path: Path) -> None:
    service.start_workers(2)
    # All of the epoch fits the window, so all is leased before it shows that one worker has become slow.
    loader = loaders(datasets.Counted(800, tmp_path, 0.002), service=service.name)
    passing = iter(loader)
    seen = [as_bytes(next(passing)) for _ in range(40)]
    slow = datasets.reads(tmp_path)[-1][1]
    (tmp_path / "pace").write_text("0.2")
    (tmp_path / "pace").rename(tmp_path / f"pace.{slow}")
    seen += [as_bytes(batch) for batch in passing]
    assert seen == [as_bytes(batch) for batch in loaders(datasets.Augmented(800))]
    assert "go to idle data_worker" in service.log("dispatcher")


@pytest.mark.shows("growing from 1 to 8 data workers and back changes no byte")
def test_growing_to_eight_and_shrinking_to_one_changes_no_byte(
    service: Any, loaders: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HETSTREAM_BUFFER_BYTES", "4000")  # a short window, so that who comes gets steps at once
    service.start_workers(1)
    loader = loaders(datasets.Counted(4000, tmp_path, 0.001), service=service.name)
    seen: list[tuple[bytes, list[int]]] = []
    others: list[Any] = []
    for batch in loader:
        seen.append(as_bytes(batch))
        if len(seen) == 40:
            others = [service.start_workers(3), service.start_workers(4)]
        elif others and len(seen) % 20 == 0 and len({process for _, process in datasets.reads(tmp_path)}) == 8:
            others.pop().send_signal(signal.SIGTERM)
    assert not others, "not all eight came to make batches"
    assert seen == [as_bytes(batch) for batch in loaders(datasets.Augmented(4000))]
    assert made_again(seen, service.log("dispatcher"), tmp_path) == set()
    assert loader.stats()["local_steps"] == 0


@pytest.mark.shows("a data worker that joins gets its first lease when it registers, and soon delivers a batch")
def test_the_first_batch_of_a_data_worker_that_joins(service: Any, loaders: Any, tmp_path: Path) -> None:
    """Bound: a second from its registration; before that, its command imports torch, which the zygote has done."""
    service.start_workers(1)
    loader = loaders(datasets.Counted(1_000_000, tmp_path, 0.01), service=service.name, batch_size=1)
    passing = iter(loader)
    next(passing)
    started = time.monotonic()
    joiner = service.start_workers(1)
    registered_s = time.monotonic() - started
    for _ in passing:
        if len({process for _, process in datasets.reads(tmp_path)}) == 2:
            break
    first_s = time.monotonic() - started
    print(f"joiner: registered after {registered_s:.2f} s, first sample seen after {first_s:.2f} s")
    assert first_s - registered_s < 5.0, "a loaded machine may take its time, but not this much"
    assert joiner.poll() is None


def test_a_dispatcher_that_comes_back_costs_the_trainer_less_than_a_second(
    service: Any, loaders: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a million steps behind: recovery depends on who is there, not on how far they are."""
    monkeypatch.setenv("HETSTREAM_BUFFER_BYTES", "4000")  # about 16 steps, so that new leases are soon needed
    service.start_workers(2)
    loader = loaders(datasets.Counted(8_000_000, tmp_path, 0.001), service=service.name)
    loader.load_state_dict(loader.state_dict() | {"step": 1_000_000})
    waits, batches = [], []
    passing = iter(loader)
    for number in range(300):
        begun = time.monotonic()
        batches.append(as_bytes(next(passing)))
        waits.append(time.monotonic() - begun)
        if number == 50:
            service.kill_dispatcher()
            service.start_dispatcher()
    print(f"longest wait with a dispatcher killed and started again: {max(waits[10:]):.2f} s")
    assert max(waits[10:]) < 5.0, "the silence after which a loader works locally"
    assert loader.stats()["local_steps"] == 0
    local = loaders(datasets.Augmented(8_000_000))
    local.load_state_dict(local.state_dict() | {"step": 1_000_000})
    assert batches == [as_bytes(batch) for batch, _ in zip(local, range(300), strict=False)]


@pytest.mark.shows("while the dispatcher is away, data workers go on with the leases that they hold")
def test_data_workers_serve_what_they_hold_while_the_dispatcher_is_away(
    service: Any, loaders: Any, tmp_path: Path, wait_until: Any
) -> None:
    service.start_workers(1)
    loader = loaders(datasets.Counted(400, tmp_path, 0.05), service=service.name)
    passing = iter(loader)
    begin = [as_bytes(next(passing))]
    service.kill_dispatcher()
    read = len(datasets.reads(tmp_path))
    begin.append(as_bytes(next(passing)))
    assert len(datasets.reads(tmp_path)) > read, "made while there was no dispatcher"
    assert loader.stats()["local_steps"] == 0
    service.start_dispatcher()
    wait_until(lambda: service.log("dispatcher").count(" registered") == 2, timeout_s=30, what="its coming back")
    assert begin == [as_bytes(batch) for batch, _ in zip(loaders(datasets.Augmented(400)), range(2), strict=False)]


@pytest.mark.shows("the dispatcher may restart before, within and between epochs")
@pytest.mark.shows("the dispatcher may restart many times, with several datasets, and data workers may, too")
def test_restarts_before_within_and_between_epochs_of_several_datasets(
    service: Any, loaders: Any, wait_until: Any
) -> None:
    worker = service.start_workers(1)
    one, two = (loaders(datasets.Augmented(length), service=service.name) for length in (203, 120))

    def restart() -> None:
        service.kill_dispatcher()
        service.start_dispatcher()

    seen: list[list[Any]] = [[], []]
    restart()
    for epoch in range(3):
        for loader, mine in ((one, seen[0]), (two, seen[1])):
            for number, batch in enumerate(loader):
                mine.append(as_bytes(batch))
                if number == 9 and epoch == 1:
                    restart()
                    if loader is two:
                        worker.kill()
                        worker.wait()
                        worker = service.start_workers(1)
        restart()
    for length, mine in ((203, seen[0]), (120, seen[1])):
        local = loaders(datasets.Augmented(length))
        assert mine == [as_bytes(batch) for _ in range(3) for batch in local]
    # One that is not connected when the service ends is not told of the end.
    wait_until(lambda: one.stats()["num_data_workers"] == 1, timeout_s=30, what="the data worker's return")


@pytest.mark.shows("four of five data workers end with one step under way, and reading goes on")
def test_four_of_five_data_workers_end_and_reading_goes_on_with_one_step_outstanding(
    service: Any, loaders: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HETSTREAM_BUFFER_BYTES", "1")
    service.start_workers(1)
    four = service.start_workers(4)
    loader = loaders(datasets.Augmented(1100), service=service.name, batch_size=1, shuffle=False)
    seen = []
    for _, ids in loader:
        seen += ids.tolist()
        if len(seen) == 100:
            four.kill()
    assert seen == list(range(1100))


@pytest.mark.shows("a process that comes before the others waits for them, 30 s at most")
def test_who_comes_first_waits_for_the_others(service: Any, tmp_path: Path, loaders: Any, wait_until: Any) -> None:
    (tmp_path / "late").mkdir()
    late = type(service)(tmp_path / "late")
    worker = late._start("worker.log", "internal", "worker", "--service", late.name, "--processes", "1")
    late.workers.append(worker)
    late.start_dispatcher()
    try:
        assert not late.address_file.exists()
        loader = loaders(datasets.Augmented(40), service=late.name, shuffle=False)
        assert [index for _, ids in loader for index in ids.tolist()] == list(range(40))
        loader.close()
        wait_until(lambda: "registered" in late.log("dispatcher"), timeout_s=30)
    finally:
        late.stop()


def test_a_data_worker_that_is_not_connected_ends_with_its_service(service: Any, wait_until: Any) -> None:
    connected = service.start_workers(1)
    service.kill_dispatcher()
    words = ("internal", "worker", "--service", service.name)
    connecting = service._start("connecting.log", *words)
    service.workers.append(connecting)
    children = Path(f"/proc/{connecting.pid}/task/{connecting.pid}/children")
    wait_until(children.read_text, 30, "its process")
    # A dispatcher that was killed leaves its file to the next one, and data workers wait for that.
    assert service.address_file.exists()
    assert (connected.poll(), connecting.poll()) == (None, None)
    service.address_file.unlink()
    # They would give up after 60 s and 30 s.
    assert connected.wait(timeout=15) == 0
    assert connecting.wait(timeout=15) == 0
    assert "the service has ended" in service.log("worker")
    assert "ended before it let this process in" in service.log("connecting")


def test_a_dispatcher_takes_its_own_address_file_away(service: Any, wait_until: Any) -> None:
    wait_until(service.address_file.exists, 30, "the address file")
    keys = service.address_file.read_bytes()
    service.dispatcher.send_signal(signal.SIGTERM)
    assert service.dispatcher.wait(timeout=15) == 0
    assert not service.address_file.exists()
    service.start_dispatcher()
    wait_until(service.address_file.exists, 30, "the address file again")
    assert service.address_file.read_bytes() == keys
    service.address_file.write_bytes(another := keys.replace(b"tcp://", b"tcp://1"))
    service.dispatcher.send_signal(signal.SIGTERM)
    assert service.dispatcher.wait(timeout=15) == 0
    assert service.address_file.read_bytes() == another


@pytest.mark.shows("a dataset of 6 MiB reaches a data worker that comes later")
def test_a_large_dataset_reaches_a_data_worker_that_comes_later(service: Any, loaders: Any, tmp_path: Path) -> None:
    dataset = datasets.Counted(400, tmp_path)
    dataset.payload = os.urandom(6 << 20)
    passing = iter(loaders(dataset, service=service.name))
    service.start_workers(1)
    next(passing)
    for _ in passing:
        pass
    assert any(process != os.getpid() for _, process in datasets.reads(tmp_path))


@pytest.mark.shows("an abandoned iterator frees its leases; one job may come and go three times")
def test_the_same_job_may_come_and_go_three_times_and_an_abandoned_iterator_frees_its_leases(
    service: Any, loaders: Any, wait_until: Any
) -> None:
    service.start_workers(1)
    for number in range(3):
        loader = loaders(datasets.Augmented(4000), service=service.name, job_name="mine")
        passing = iter(loader)
        next(passing)
        del passing
        wait_until(lambda number=number: service.log("dispatcher").count("closed at step 1 of 1000") == number + 1)
        assert len(list(loader)) == 1000
        loader.close()


@pytest.mark.slow
def test_a_data_worker_holds_nothing_for_loaders_that_are_gone(service: Any, loaders: Any, wait_until: Any) -> None:
    worker = service.start_workers(1)

    def descriptors() -> int:
        (process,) = Path(f"/proc/{worker.pid}/task/{worker.pid}/children").read_text().split()
        return len(list(Path(f"/proc/{process}/fd").iterdir()))

    before = descriptors()
    for _ in range(6):
        loader = loaders(datasets.Augmented(40), service=service.name)
        assert len(list(loader)) == 10
        loader.close()
    assert descriptors() > before + 6
    wait_until(lambda: descriptors() <= before + 3, timeout_s=30, what="the end of the connections")
