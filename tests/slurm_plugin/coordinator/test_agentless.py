"""Processes that use a shared GPU without an agent: who is one, who is let alone, and what follows from it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from hetstream.hetjob.gpu.orders import JobClass
from hetstream.slurm_plugin.coordinator.admission import Agentless, GrantedJobs, Holder, agentless
from hetstream.slurm_plugin.coordinator.decide import GpuState, Measurements
from hetstream.slurm_plugin.coordinator.gpus import GpuReading, StatedGpu
from hetstream.slurm_plugin.coordinator.table import (
    TABLE_VERSION,
    GpuRow,
    GpuTable,
    GpuWatch,
    gpu_row,
    look,
    of_user,
    read_table,
)
from hetstream.slurm_plugin.render.gpu_top import render
from tests.slurm_plugin.coordinator.conftest import MIB, TRAIN, Node
from tests.slurm_plugin.coordinator.test_decide import CAPACITY, GIB, MS, Gpu
from tests.slurm_plugin.coordinator.test_processes import alone

S = 1000 * MS
HOG = Holder("8", JobClass.OPPORTUNISTIC, 1001)
OWNER = Holder("7", JobClass.GUARANTEED, 1000)
CONTEXT = 600 * MIB


class Watched:
    """One GPU that the test looks at, at times of its own. Process 70 is the guaranteed job's, 80 a hog's."""

    def __init__(self, *, capacity_bytes: int = CAPACITY) -> None:
        self.capacity_bytes, self.now_ns = capacity_bytes, 1000 * S
        self.holders: dict[int, Holder | None] = {70: OWNER, 80: HOG}
        self.found = self._look(GpuReading(held_bytes={}), {}, None)  # as the coordinator begins

    def look(
        self,
        held_bytes: Mapping[int, int] | None,
        *,
        after_s: float = 0.5,
        with_agent: Mapping[int, bool] = {},
        computing: tuple[int, ...] = (),
    ) -> dict[int, str]:
        """Complaints, of all that are found, by the number of the process."""
        self.now_ns += int(after_s * S)
        self.found = self._look(GpuReading(held_bytes=held_bytes, computing=computing), with_agent, self.found)
        return {pid: process.complaint(self.now_ns) for pid, process in (self.found or {}).items()}

    def _look(
        self, reading: GpuReading, with_agent: Mapping[int, bool], before: dict[int, Agentless] | None
    ) -> dict[int, Agentless] | None:
        return agentless(reading, self.capacity_bytes, with_agent, before, self.holders.get, self.now_ns)


def test_who_holds_tensors_without_an_agent_for_longer_than_an_agent_takes_is_complained_of() -> None:
    gpu = Watched()
    assert gpu.look({80: 20 * GIB}) == {80: ""}
    assert gpu.look({80: 20 * GIB}, after_s=9) == {80: ""}
    complaint = gpu.look({80: 20 * GIB}, after_s=2)[80]
    assert complaint.startswith("process 80 holds 21,474,836,480 bytes of the GPU without an agent")
    assert gpu.look({}) == {}


def test_a_process_with_an_agent_and_a_guaranteed_jobs_own_are_let_alone() -> None:
    gpu = Watched()
    for _ in range(3):
        said = gpu.look({70: 20 * GIB, 80: 5 * GIB, 99: GIB}, after_s=60, with_agent={80: True}, computing=(70, 80, 99))
        assert said == {70: "", 99: ""}
    assert gpu.found is not None
    assert sum(process.held_bytes for process in gpu.found.values()) == 21 * GIB


def test_a_program_that_has_named_its_gpu_and_reads_its_data_for_an_hour_is_let_alone() -> None:
    gpu = Watched()
    assert [gpu.look({80: CONTEXT}, after_s=60)[80] for _ in range(60)] == [""] * 60
    assert gpu.look({80: CONTEXT}, computing=(80,)) == {80: ""}, "what makes a communicator computes for a moment"
    assert gpu.look({80: CONTEXT}, after_s=60) == {80: ""}
    assert gpu.look({80: 20 * GIB}, with_agent={80: True}) == {}


def test_who_computes_without_an_agent_is_complained_of_however_little_it_holds() -> None:
    gpu = Watched()
    assert gpu.look({80: CONTEXT}, computing=(80,)) == {80: ""}
    assert gpu.look({80: CONTEXT}, after_s=9, computing=(80,)) == {80: ""}
    assert "process 80 computes on the GPU without an agent" in gpu.look({80: CONTEXT}, after_s=2, computing=(80,))[80]
    assert "computes" in gpu.look({80: CONTEXT})[80], "between two samples of the driver"


def test_a_rank_may_have_a_context_on_the_gpu_of_another_rank_and_no_tensors() -> None:
    gpu = Watched()
    for _ in range(5):
        assert gpu.look({80: CONTEXT}, after_s=20, with_agent={80: False}, computing=(80,)) == {80: ""}
    gpu.look({80: 20 * GIB}, with_agent={80: False})
    assert "without an agent" in gpu.look({80: 20 * GIB}, after_s=11, with_agent={80: False})[80]


def test_who_was_there_before_the_coordinator_has_ten_minutes_to_come_back() -> None:
    gpu = Watched()
    gpu.found = None
    gpu.look({80: 20 * GIB})
    assert gpu.look({80: 20 * GIB}, after_s=590) == {80: ""}
    assert gpu.look({80: 20 * GIB}, after_s=11)[80]
    gpu.found = None
    gpu.look({80: 20 * GIB}, computing=(80,))
    assert "computes" in gpu.look({80: 20 * GIB}, after_s=11, computing=(80,))[80], "it does not wait for anybody"


def test_a_process_that_ends_slowly_and_a_number_that_is_used_again_are_no_hogs() -> None:
    gpu = Watched()
    gpu.look({80: 20 * GIB}, after_s=100, with_agent={80: True})
    assert gpu.look({80: 20 * GIB}, after_s=5) == {80: ""}, "its connection is closed before its memory is free"
    gpu.holders[80] = replace(HOG, job="9")
    assert gpu.look({80: 20 * GIB}, after_s=9) == {80: ""}
    assert gpu.look({80: 20 * GIB}, after_s=11)[80]


def test_a_job_that_has_become_guaranteed_is_complained_of_no_longer() -> None:
    gpu = Watched()
    gpu.look({80: 20 * GIB})
    assert gpu.look({80: 20 * GIB}, after_s=11)[80]
    gpu.holders[80] = replace(HOG, job_class=JobClass.GUARANTEED)
    assert gpu.look({80: 20 * GIB}, after_s=11) == {80: ""}


def test_of_a_small_gpu_a_context_is_no_more_than_a_part() -> None:
    gpu = Watched(capacity_bytes=4 * GIB)
    gpu.look({80: CONTEXT})
    assert gpu.look({80: CONTEXT}, after_s=11)[80]


def test_where_nobody_counts_nobody_is_found() -> None:
    gpu = Watched()
    assert gpu.look(None) == {}
    assert gpu.found is None


def row(*processes: Agentless, is_reserved: bool = False) -> GpuRow:
    seen = Measurements(
        CAPACITY, (), is_reserved, agentless_bytes=sum(process.held_bytes for process in processes), is_hogged=True
    )
    return gpu_row(StatedGpu("GPU-a", CAPACITY), GpuState(), seen, {}, {}, processes, 100 * S)


def hog(held_bytes: int = 20 * GIB, holder: Holder | None = HOG) -> Agentless:
    return Agentless(80, holder, held_bytes, False, tensors_ns=1 * S)


def told(seen: GpuRow) -> tuple[int, list[tuple[str, str]]]:
    """Memory that is free, and complaints, as the packer hears of them."""
    table = GpuTable(TABLE_VERSION, "g1", 0.0, (seen,))
    watch = GpuWatch("g1", {"GPU-a": 0})
    watch.see(table)
    (now,) = watch.report(table).gpus
    return now.free_bytes, [(sharing.job, sharing.complaint) for sharing in now.sharing]


def test_the_packer_hears_of_a_hog_and_places_nobody_where_the_memory_is_gone() -> None:
    free_bytes, ((job, complaint),) = told(row(hog()))
    assert (free_bytes, job) == (CAPACITY - 20 * GIB, "8")
    assert "without an agent" in complaint
    assert told(row(hog(), is_reserved=True))[0] < CAPACITY - 20 * GIB


@pytest.mark.parametrize("holder", [None, OWNER])
def test_memory_of_others_without_an_agent_is_not_free_either_and_nobody_is_complained_of(
    holder: Holder | None,
) -> None:
    assert told(row(hog(holder=holder))) == (CAPACITY - 20 * GIB, [])


def test_people_see_the_hog_its_owner_too_and_nobody_else() -> None:
    seen = row(hog())
    lines = render(GpuTable(TABLE_VERSION, "g1", 0.0, (seen,)))
    assert "12.9 GB of 34.4 GB free; " in lines[1]
    assert "21.5 GB held without an agent" in lines[1]
    assert any("disobeys" in line and "21.5 GB" in line for line in lines)
    assert lines[-1].startswith("8 (80): process 80 holds")
    assert [len(of_user([seen], uid)[0].processes) for uid in (1001, 1000)] == [1, 0]
    assert row(hog(holder=OWNER)).processes == ()


def test_a_table_of_a_coordinator_that_finds_nobody_is_read() -> None:
    text = {
        "version": 1, "host": "g1", "taken_s": 0.0, "gpus": [{
            "gpu": "GPU-a", "capacity_bytes": CAPACITY, "phase": "vacant", "reason": "", "is_reserved": False,
            "idle_share": None, "free_bytes": CAPACITY, "used_bytes": None, "utilisation": None, "is_lost": False,
            "processes": [],
        }],
    }  # fmt: skip
    (seen,) = read_table(json.dumps(text).encode()).gpus
    assert seen.agentless_bytes is None
    assert told(seen) == (CAPACITY, [])


class Hogged(Gpu):
    """A GPU of which a process without an agent has some memory."""

    agentless_bytes, is_hogged = 12 * GIB, True

    def measurements(self) -> Measurements:
        return replace(super().measurements(), agentless_bytes=self.agentless_bytes, is_hogged=self.is_hogged)


def test_what_a_hog_has_is_given_to_nobody_and_who_cannot_give_it_back_is_not_to_blame() -> None:
    gpu = Hogged()
    gpu.join("g", JobClass.GUARANTEED)
    gpu.join("o", JobClass.OPPORTUNISTIC, boundaries=5, peak_bytes=30 * GIB)
    gpu.settle("g", 10, peak_bytes=4 * GIB)
    gpu.update("g", host_bytes=GIB)
    limit_bytes = 0
    for _ in range(400):
        gpu.update("o", held_bytes=20 * GIB, is_idle=1, limit_bytes=limit_bytes)
        decision = gpu.decide(50)["o"]
        limit_bytes = decision.order.limit_bytes
        assert not decision.is_disobedient
    assert limit_bytes <= CAPACITY - 12 * GIB - 4 * GIB


def test_an_opportunistic_job_that_is_alone_with_a_hog_may_have_the_rest() -> None:
    gpu = Hogged()
    gpu.join("o", JobClass.OPPORTUNISTIC, boundaries=5, peak_bytes=4 * GIB)
    assert gpu.decide()["o"].order.limit_bytes == CAPACITY - 12 * GIB


@pytest.fixture
def grants(tmp_path: Path) -> Path:
    grants = tmp_path / "grants"
    grants.mkdir(mode=0o755)
    return grants


def grant(grants: Path, job: str, job_class: str, gpu: str, uid: int | None = None) -> None:
    text = json.dumps({"uid": os.geteuid() if uid is None else uid, "job_class": job_class, "gpus": [gpu]})
    (grants / f".{job}").write_text(text)
    (grants / f".{job}").rename(grants / f"{job}.json")


def test_whose_a_process_is_says_its_control_group_and_else_itself_as_far_as_it_is_its_users(grants: Path) -> None:
    grant(grants, "8", "opportunistic", "GPU-a")
    grant(grants, "9", "guaranteed", "GPU-a", uid=os.geteuid() + 1)
    said = {}
    for job in ("8", "9", "../8", ""):
        argv, pipe = [sys.executable, "-c", "print(flush=True); input()"], subprocess.PIPE
        with subprocess.Popen(argv, stdin=pipe, stdout=pipe, env={**os.environ, "SLURM_JOB_ID": job}) as process:
            assert process.stdout is not None
            process.stdout.readline()  # before it runs, its environment may not be there
            said[job] = GrantedJobs(grants, lambda _: None).holder_of(process.pid)
            told = GrantedJobs(grants, lambda _: "9").holder_of(process.pid)
            process.communicate(b"\n")
        assert told == Holder("9", JobClass.GUARANTEED, os.geteuid() + 1), "whatever it says, and runs as"
    assert said == {"8": Holder("8", JobClass.OPPORTUNISTIC, os.geteuid()), "9": None, "../8": None, "": None}
    assert GrantedJobs(grants).holder_of(process.pid) is None, "it has ended"


# Holds memory of an emulated GPU as a CUDA program without torch would of a real one.
PROGRAM = """
import signal, sys
from hetstream.hetjob.gpu.emulated_file import EmulatedGpuFile
gpu = EmulatedGpuFile(sys.argv[1])
assert gpu.take(int(sys.argv[2]))
signal.pause()
"""


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_real_coordinator_finds_a_process_without_an_agent_and_says_nothing_of_honest_ones(
    node: Node, grants: Path
) -> None:
    for job, job_class in (("7", "guaranteed"), ("8", "opportunistic"), ("9", "opportunistic")):
        grant(grants, job, job_class, node.gpu)
    node.coordinate("--grants", str(grants))
    words = [sys.executable, "-c", PROGRAM, str(node.gpu_file), str(100 * MIB)]
    hog = node.run("hog", words, {"SLURM_JOB_ID": "8"})

    def seen() -> GpuRow:
        (row,) = look(str(node.socket)).gpus
        return row

    node.wait_until(lambda: seen().agentless_bytes == 100 * MIB, 30, "its memory to be counted")
    assert seen().processes == ()
    assert seen().free_bytes <= 156 * MIB
    train = [sys.executable, str(TRAIN), "9999", "64", "9"]
    guaranteed = node.share("guaranteed", node.gpu, train, {"SLURM_JOB_ID": "7"})
    honest = node.share("opportunistic", node.gpu, train, {"SLURM_JOB_ID": "9"})
    node.wait_until(lambda: any(one.pid == hog.process.pid for one in seen().processes), 30, "the complaint")
    node.goes_on(guaranteed, 10)
    node.goes_on(honest, 10)
    bad = {one.job: one.reason for one in seen().processes if one.is_disobedient}
    assert bad.keys() == {"8"}
    assert f"process {hog.process.pid} holds {100 * MIB:,} bytes of the GPU without an agent" in bad["8"]
    assert node.log.read_text().count("GPU used without an agent") == 1
    hog.process.kill()
    hog.process.wait()
    node.wait_until(lambda: seen().agentless_bytes == 0, 10, "its memory to be free")
    assert not any(one.is_disobedient for one in seen().processes)
    guaranteed.process.kill()
    guaranteed.process.wait()
    assert guaranteed.losses == alone(len(guaranteed.losses), 64)
