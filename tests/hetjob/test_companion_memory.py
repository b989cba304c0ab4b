"""Companions that run out of memory are replaced before they do, one at a time, by some with more."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hetstream.hetjob.elastic.controller import Controller
from hetstream.hetjob.elastic.snapshot import Action, Decision, Limits, Snapshot
from hetstream.hetjob.job.job import JobEnvironment
from hetstream.hetjob.master.companions import CompanionJobs
from hetstream.hetjob.master.controller_state_file import ControllerStateFile
from hetstream.hetjob.master.elastic import Elastic
from hetstream.hetjob.master.memory import CompanionMemory, Replacement
from hetstream.mpi_dataworkers.wire.messages import (
    DataWorkerStatus,
    LoaderStats,
    LoaderStatus,
    Status,
    SteerDataWorkers,
)
from hetstream.slurm_plugin.client.fake import FakeSlurm

WaitUntil = Callable[..., None]
MB = 1 << 20


def process(job_id: str, mb: float) -> DataWorkerStatus:
    return DataWorkerStatus(0, "h", 1, "working", 1, 9, 2.0, 0.5, 0, 9.0, 0.1, job_id, int(mb * MB))


def grown(memory: CompanionMemory, until_s: float, cpus: int = 2, **mb_per_s: float) -> Replacement | None:
    """Companions that grow from 500 MB in two processes each; the first replacement that is asked for."""
    for now in range(0, int(until_s), 10):
        rows = [process(job_id, (500 + rate * now) / 2) for job_id, rate in mb_per_s.items() for _ in range(2)]
        memory.take_in(rows, dict.fromkeys(mb_per_s, cpus), float(now))
        found = memory.replacement()
        if found is not None:
            return found
    return None


def test_the_one_that_runs_out_first_is_replaced_first_and_the_next_one_after_it() -> None:
    memory = CompanionMemory(2048.0)
    first = grown(memory, 1800, slow=3.0, fast=3.5)
    assert first is not None
    assert (first.job_id, first.cpus) == ("fast", 2)
    assert first.mb_per_cpu >= 1.5 * 2048
    assert first.reason.startswith("companion fast runs out of memory: ")
    memory.replaced(first)
    assert memory.mb_per_cpu == first.mb_per_cpu
    second = memory.replacement()
    assert second is None or second.job_id == "slow"


def test_what_is_not_growing_or_has_no_known_limit_stays() -> None:
    assert grown(CompanionMemory(2048.0), 3600, level=0.0) is None
    unknown = CompanionMemory(None)
    assert grown(unknown, 1200, fast=3.0) is None
    assert unknown.most_mb(2) == 500 + 3 * 1190
    assert unknown.most_mb(4) is None


def test_one_that_cannot_be_replaced_is_left_alone() -> None:
    memory = CompanionMemory(2048.0)
    found = grown(memory, 1800, fast=3.0)
    assert found is not None
    memory.not_replaced(found)
    assert memory.replacement() is None
    assert memory.mb_per_cpu is None


def test_a_companion_with_more_memory_has_the_limit_that_it_was_given() -> None:
    memory = CompanionMemory(1024.0)
    memory.submitted("roomy", 2, 8192)
    assert grown(memory, 1200, roomy=3.0) is None


class Leaking:
    """A dispatcher whose data workers grow with the clock, those with little memory alone."""

    def __init__(self, slurm: FakeSlurm, clock: list[float]) -> None:
        self.slurm, self.clock = slurm, clock
        self.drained: list[str] = []

    def steer(self, order: SteerDataWorkers) -> Status:
        self.clock[0] += 10.0
        for job_id in order.drain:
            if job_id not in self.drained:
                self.drained.append(job_id)
                for child in self.slurm.jobs[job_id]:
                    child.terminate()
        rows = [
            process(job_id, 500 + (3 * self.clock[0] if job_id == "1000" else 0))
            for job_id in self.slurm.jobs
            if job_id not in self.drained
        ]
        loader = LoaderStatus("job", 0, 0, 1, "h", 1, 0, 5, 90, 0, 8, 1, 4.0, 1e3, 0.5, LoaderStats())
        return Status(1, 9.0, rows, [loader], len(rows), 0, 1, 0, 1.0)

    def close(self) -> None:
        pass


class GrowOnce(Controller):
    """Wants one companion, then holds."""

    def __init__(self) -> None:
        super().__init__(Limits(0, 4))
        self.seen: list[Snapshot] = []

    def decide(self, snapshot: Snapshot, now: float) -> Decision:
        self.seen.append(snapshot)
        first = len(self.seen) == 1
        return Decision(Action.GROW, 1, "it starves", cpus=1) if first else Decision(Action.HOLD, 0, "enough")


@pytest.fixture
def leaking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait_until: WaitUntil
) -> Iterator[tuple[Elastic, FakeSlurm, Leaking]]:
    monkeypatch.setattr("hetstream.hetjob.master.elastic._EVERY_S", 0.01)
    monkeypatch.setattr("hetstream.hetjob.master.elastic._SOONEST_S", 0.0)
    job = JobEnvironment("7", "train", "gpu0", tmp_path, 1, 0)
    job.directory.mkdir(parents=True)
    job.address_file.touch()
    slurm, clock = FakeSlurm(tmp_path, dict(os.environ)), [0.0]
    companions = CompanionJobs(slurm, job, ["--partition=cpu", "--mem-per-cpu=4G"], lambda cpus: "sleep 600")
    dispatcher = Leaking(slurm, clock)
    state_file = ControllerStateFile(job.controller_state_file)
    elastic = Elastic(GrowOnce(), companions, 0, lambda: dispatcher, state_file, None, lambda: clock[0])
    elastic.begin()
    yield elastic, slurm, dispatcher
    elastic.stop()
    elastic.join()
    wait_until(lambda: not companions.listed(), what="the end of the companions")


@pytest.mark.shows("a companion that will run out of memory is replaced by one with more before")
@pytest.mark.shows("before memory runs out, a companion is replaced, and a trainer warned or migrated")
def test_the_job_master_drains_it_and_submits_one_with_more_memory(
    leaking: tuple[Elastic, FakeSlurm, Leaking], wait_until: WaitUntil
) -> None:
    elastic, slurm, dispatcher = leaking
    wait_until(lambda: dispatcher.drained == ["1000"], what="the one that leaks to be drained")
    submitted = [words for method, words in slurm.calls if method == "submit"]
    assert len(submitted) == 2
    memory = [[word for word in words if word.startswith("--mem-per-cpu")] for words in submitted]
    assert memory[0] == ["--mem-per-cpu=4G"]
    # Of two with one name sbatch takes the last.
    assert memory[1][0] == "--mem-per-cpu=4G"
    assert int(memory[1][1].removeprefix("--mem-per-cpu=").removesuffix("M")) >= 1.5 * 4096
    change = elastic.summary()["decisions"][-1]
    assert (change["action"], change["count"]) == ("drain", 1)
    assert "companion 1000 runs out of memory" in change["reason"]
    assert "MB a CPU are asked for; companion 1001 works in its place" in change["reason"]
    assert elastic.summary()["data_worker_mb"] > 500


def test_when_slurm_refuses_the_one_that_leaks_goes_on(
    leaking: tuple[Elastic, FakeSlurm, Leaking], wait_until: WaitUntil
) -> None:
    _, slurm, dispatcher = leaking
    wait_until(lambda: slurm.jobs, what="the first companion")
    slurm.refuse.add("submit")
    wait_until(lambda: len([1 for method, _ in slurm.calls if method == "submit"]) == 2, what="the refused one")
    at = dispatcher.clock[0]
    wait_until(lambda: dispatcher.clock[0] > at + 500, what="some more looks")
    assert len([1 for method, _ in slurm.calls if method == "submit"]) == 2
    assert dispatcher.drained == []
    slurm.refuse.clear()
