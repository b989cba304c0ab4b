"""Shares of waiting are looked for beside the readings: a file system that does not answer holds up nobody."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from hetstream.slurm_plugin.client.model import Job, Node, Partition, Snapshot
from hetstream.slurm_plugin.insight.observation import Monitor
from hetstream.slurm_plugin.insight.utilisation import SharesAside

WaitUntil = Callable[..., None]


def job(job_id: int, work_dir: str) -> Job:
    return Job(
        job_id, "train", "me", ("gpu",), "RUNNING", "", 1, 4, 1, 4, 100, uid=os.geteuid(), work_dir=work_dir,
        nodes=("g0",),
    )  # fmt: skip


@dataclass
class Disks:
    """Below /dead nobody is ever answered; elsewhere jobs tell a share."""

    mounts: tuple[str, ...] = ("/", "/dead", "/home")
    asked: list[str] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    def look(self, job: Job) -> float | None:
        self.asked.append(job.work_dir)
        if job.work_dir.startswith("/dead/"):
            self.over.wait(60)
            return None
        return 0.25


@pytest.fixture
def disks(wait_until: WaitUntil) -> Iterator[Disks]:
    disks = Disks()
    yield disks
    disks.over.set()
    wait_until(lambda: not any(thread.name == "hetstream-shares" for thread in threading.enumerate()))


def test_a_dead_file_system_keeps_one_thread_and_no_reading(disks: Disks, wait_until: WaitUntil) -> None:
    jobs = (job(1, "/dead/a"), job(2, "/home/b"), job(3, "/dead/c"), job(4, "/deadly"))

    class Cluster:
        def snapshot(self) -> Snapshot:
            nodes = (Node("g0", frozenset({"MIXED"}), ("gpu",), 16, 4, 1000, 100),)
            return Snapshot(1e6, "22.05.8", "test", jobs, nodes, (Partition("gpu", ()),))

    monitor = Monitor(Cluster(), SharesAside(disks.look, lambda: disks.mounts, patience_s=0.2), None)
    for _ in range(3):
        reading = monitor.read()
        assert reading.error == ""
        assert reading.observation is not None
        wait_until(lambda: disks.asked.count("/home/b") >= 1, what="a look at /home")
    wait_until(lambda: dict(monitor.read().observation.wait_shares) == {"2": 0.25, "4": 0.25}, what="the shares")  # type: ignore[union-attr]
    assert disks.asked.count("/dead/a") == 1  # who waits there waits once, and the other one there is not asked
    assert "/dead/c" not in disks.asked
    threads = [thread for thread in threading.enumerate() if thread.name == "hetstream-shares"]
    assert len(threads) <= 3


def test_a_file_system_that_comes_back_is_looked_at_again(disks: Disks, wait_until: WaitUntil) -> None:
    shares = SharesAside(disks.look, lambda: disks.mounts, patience_s=0.1)
    shares([job(1, "/dead/a")])
    disks.over.set()
    wait_until(lambda: shares([job(1, "/dead/a"), job(2, "/home/b")]) == {"2": 0.25}, what="the share")
    wait_until(lambda: shares([job(3, "/dead/a")]) == {} and disks.asked.count("/dead/a") > 1, what="another look")
    assert shares([]) == {}
