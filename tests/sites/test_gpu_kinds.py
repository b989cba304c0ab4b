"""GPUs as sites have them: near cores, untyped (gpu0), of two types (gpu1), with shards (gpu2), divided by MIG (gpu3).

Each has 4: gpu1 and gpu2 two `a100` and two `v100`, gpu3 two instances of 3 and two of 1 slice in 7.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.devcluster.sites import ACCOUNTING, GPU_KINDS
from tests.devcluster.spec import ClusterShape

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.every_release]
KINDS = (ACCOUNTING, GPU_KINDS)
SHAPE = ClusterShape(4, 4, 1, 16)
SMALL = ("--mem=1000", "--time=60")
HETSTREAM = Path(sys.executable).with_name("hetstream")


def free_by_node(site: Any) -> dict[str, int]:
    return {node["node"]: node["gpus_free"] for node in site.told("frag")["nodes"] if node["gpus"]}


def exported(site: Any) -> dict[str, int]:
    text = site.run(str(HETSTREAM), "exporter", "--print")
    found = re.findall(r'^hetstream_node_gpus_free\{node="(gpu[0-2])"\} (\S+)', text, re.M)
    return {node: int(float(value)) for node, value in found}


def findings(site: Any) -> list[str]:
    return [finding["seen"] for finding in site.told("doctor")["findings"] if finding["check"] == "GPUs in use"]


@pytest.mark.shows("untyped and typed GPUs near cores are counted alike by all commands")
def test_gpus_near_cores_are_counted_on_idle_mixed_and_full_nodes(site: Any, wait_until: Any) -> None:
    assert free_by_node(site) == exported(site) == {"gpu0": 4, "gpu1": 4, "gpu2": 4}
    assert findings(site) == []
    some = site.submit("-wgpu0", "--gpus=3", "-c14", *SMALL)
    typed = site.submit("-wgpu1", "--gpus=a100:1", "-c2", *SMALL)
    site.settle(**{some: "RUNNING", typed: "RUNNING"})
    assert free_by_node(site) == exported(site) == {"gpu0": 1, "gpu1": 3, "gpu2": 4}
    starved = site.submit("-wgpu0", "--gpus=1", "-c4", *SMALL)
    site.settle(**{starved: "PENDING Resources"})
    assert site.blockers(starved) == [
        ("CPUs", "it needs 4 CPUs on a node; of 1 node with enough GPUs and memory the most free is 2 (gpu0)")
    ]
    short = ("--mem=1000", "--time=30")  # before the one that waits
    others = [site.submit("-wgpu0", "--gpus=1", "-c1", *short), site.submit("-wgpu1", "--gpus=3", "-c1", *short)]
    site.settle(**dict.fromkeys(others, "RUNNING"))
    assert free_by_node(site) == exported(site) == {"gpu0": 0, "gpu1": 0, "gpu2": 4}
    hungry = site.submit("-wgpu1", "--gpus=v100:1", "-c1", *SMALL)
    site.settle(**{hungry: "PENDING Resources"})
    assert [kind for kind, _ in site.blockers(hungry)] == ["GPUs"]
    assert findings(site) == []
    held = {row["job"]: row["gpus"] for row in site.told("jobs", "--state", "RUNNING")["jobs"]}
    assert held == {some: 3, typed: 1, others[0]: 1, others[1]: 3}
    assert site.told("jobs")["summary"]["gpus_held"] == 8

    def hours() -> float:
        (group,) = site.told("util", "-S", "now-1hour")["groups"]
        return float(group["gpu_hours"])

    # As many as jobs hold: 8 for each second, where one untyped job of 3 was once read as of 1.
    wait_until(lambda: hours() > 8 * 3 / 3600, 60, "three seconds of eight GPUs")


@pytest.mark.shows("shards of a typed GPU count against that type")
def test_shards_count_against_the_type_of_their_gpu(site: Any) -> None:
    """A shard of an a100 leaves one whole a100, and both v100."""

    def free() -> dict[str, int]:
        return {kind["type"]: kind["num_free"] for kind in site.told("frag", "--nodelist=gpu2")["gpu_types"]}

    assert free() == {"a100": 2, "v100": 2}
    shard = site.submit("-wgpu2", "--gres=shard:3", "-c1", *SMALL)
    site.settle(**{shard: "RUNNING"})
    (shared,) = (kind for kind, left in free().items() if left == 1)
    other = "v100" if shared == "a100" else "a100"
    assert free() == {shared: 1, other: 2}
    assert free_by_node(site)["gpu2"] == exported(site)["gpu2"] == 3
    room = site.submit("-wgpu2", f"--gpus={other}:2", "-N1", "-c1", *SMALL)
    site.settle(**{room: "RUNNING"})
    assert free() == {shared: 1, other: 0}
    waiting = site.submit("-wgpu2", f"--gpus={shared}:2", "-N1", "-c1", *SMALL)
    site.settle(**{waiting: "PENDING Resources"})
    assert site.blockers(waiting) == [
        ("GPUs", "it needs 2 GPUs on a node; of 1 node with enough CPUs and memory the most free is 1 (gpu2)")
    ]


@pytest.mark.shows("an instance of MIG is its part of a GPU in `jobs` and `util`, now and afterwards")
def test_instances_of_mig_are_parts_of_gpus_though_no_type_is_accounted_for(site: Any, wait_until: Any) -> None:
    """Three of the four instances, two large ones and a small one, are 7 sevenths, also on a drained node.

    After the job's end, too: slurmctld is asked what the job had.
    """
    # An account of its own, as jobs of other tests may have ended less than a minute ago.
    job = site.submit("--account=one-job", "-wgpu3", "--gpus=h100_3g.40gb:2,h100_1g.10gb:1", "-N1", "-c1", *SMALL)
    site.settle(**{job: "RUNNING"})
    assert site.told("jobs")["summary"]["gpus_held"] == 1
    site.run("scontrol", "update", "NodeName=gpu3", "State=DRAIN", "Reason=test")
    try:
        told = site.told("jobs", "--details")
        assert (told["summary"]["gpus_held"], told["notes"]) == (1, [])

        def hours() -> tuple[float, float]:
            groups = site.told("util", "-S", "now-10minutes", "--by", "account")["groups"]
            own = [group for group in groups if group["account"] == "one-job"]  # slurmdbd hears of it later
            return sum(group["gpu_hours"] for group in own), sum(group["cpu_hours"] for group in own)

        # As many GPU hours as CPU hours: the job has one of each.
        wait_until(lambda: hours()[1] > 0.002, 60, "seven seconds on record")
        gpu_hours, cpu_hours = hours()
        assert gpu_hours == pytest.approx(cpu_hours, rel=0.01)
        site.run("scancel", job)
        wait_until(lambda: not site.run("squeue", "--noheader", f"--jobs={job}"), 60, "its end")
        gpu_hours, cpu_hours = hours()
        assert gpu_hours == pytest.approx(cpu_hours, rel=0.01)
    finally:
        site.run("scontrol", "update", "NodeName=gpu3", "State=RESUME")
        # Until slurmctld has heard of it again it is IDLE+NOT_RESPONDING, and of no use.
        wait_until(lambda: "NOT_RESPONDING" not in site.run("scontrol", "show", "node", "gpu3"), 60, "its answer")


def test_gpus_that_slurm_works_out_itself_are_counted(site: Any) -> None:
    """No text of the request names the four GPUs of a job with two tasks for each, or the two of two sockets."""
    tasks = site.submit("--hold", "--ntasks-per-gpu=2", "-n8", *SMALL)
    sockets = site.submit("--hold", "--gpus-per-socket=1", "--sockets-per-node=2", *SMALL)
    assert {row["job"]: row["gpus"] for row in site.told("jobs")["jobs"]} == {tasks: 4, sockets: 2}


def test_a_simulation_of_the_site_knows_whole_gpus(site: Any, tmp_path: Path) -> None:
    """The instances of gpu3 make up 8 slices of 7: two GPUs, beside the twelve of the others."""
    jobs = tmp_path / "jobs.csv"
    jobs.write_text("submit_s,run_s,num_gpus\n0,60,1\n")
    found = site.told("simulate", str(jobs), "--from-slurm", "--policies=fixed", "--disciplines=fifo")
    assert found["summary"]["gpus"] == 14
    assert any(note.startswith("4 MIG instances of 1 node count as the whole GPUs") for note in found["notes"])
