"""Power saving: a node that is powered down is room, one on its way down is not, and a job waits for one to come up."""

from __future__ import annotations

from typing import Any

import pytest

from tests.devcluster.record import read_record
from tests.devcluster.sites import POWER_SAVING
from tests.devcluster.status import observe

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.every_release]
KINDS = (POWER_SAVING,)
SMALL = ("--mem=1000", "--time=60")


def state_of(site: Any, node: str) -> set[str]:
    """Base state and flags of a node."""
    (word,) = (word for word in site.run("scontrol", "--oneliner", "show", "node", node).split() if "State=" in word)
    return {*word.removeprefix("State=").split("+")}


def test_a_node_is_room_when_it_is_down_and_not_on_its_way_there(site: Any) -> None:
    """By hand, of gpu1 alone: on its way down the cluster has 80 of 96 CPUs and 4 of 8 GPUs, and down all of them.

    The job takes all GPUs of gpu0; the next one has room on gpu1, which Slurm starts for it.
    """
    site.run("scontrol", "update", "NodeName=gpu1", "State=POWER_DOWN")
    site.wait_until(lambda: "POWERING_DOWN" in state_of(site, "gpu1"), 30, "gpu1 on its way down")
    on_its_way = site.told("frag")
    if "POWERING_DOWN" in state_of(site, "gpu1"):  # else the machine was too slow to look
        summary = on_its_way["summary"]
        assert [summary[name] for name in ("cpus", "cpus_free", "gpus", "gpus_free")] == [80, 80, 4, 4]
        assert [one["node"] for one in on_its_way["left_out"]] == ["gpu1"]
    site.wait_until(lambda: "POWERED_DOWN" in state_of(site, "gpu1"), 60, "gpu1 down")
    assert site.totals("cpus", "cpus_free", "gpus", "gpus_free", "stranded_gpus", "num_left_out") == [
        96,
        96,
        8,
        8,
        0,
        0,
    ]
    status = observe(site.cluster.record)
    assert status.healthy
    assert [one.name for one in status.daemons if one.powered_down] == ["slurmd gpu1"]

    first = site.submit("-wgpu0", "--gpus=4", "-c4", *SMALL)
    site.settle(**{first: "RUNNING"})
    second = site.submit("--gpus=4", "-c4", *SMALL)
    site.wait_until(lambda: site.state(second).split()[0] != "PENDING", 30, "a node for the second job")
    # It holds what it was given, while its node is coming up as later.
    assert site.totals("cpus_free", "gpus_free", "num_left_out") == [88, 0, 0]
    assert site.blockers(second) == []
    site.settle(**{second: "RUNNING"})
    assert state_of(site, "gpu1") & {"POWERED_DOWN", "POWERING_UP"} == set()
    assert site.totals("cpus_free", "gpus_free", "num_left_out") == [88, 0, 0]
    util = {one["partition"]: one["num_jobs"] for one in site.told("util")["groups"]}
    assert util["gpu"] == 2
    status = observe(site.cluster.record)
    assert status.healthy
    assert not any(one.powered_down for one in status.daemons)


def test_a_job_for_a_node_that_goes_down_is_told_so(site: Any) -> None:
    """cpu3 is asked for by name while it goes down; when it has arrived there, Slurm starts it again for the job."""
    assert read_record(site.cluster.state_dir) is not None
    site.run("scontrol", "update", "NodeName=cpu3", "State=POWER_DOWN")
    site.wait_until(lambda: "POWERING_DOWN" in state_of(site, "cpu3"), 30, "cpu3 on its way down")
    job = site.submit("-pcpu", "-wcpu3", "-c4", *SMALL)
    told = site.told("why", job)
    if "POWERING_DOWN" in state_of(site, "cpu3"):
        assert told["summary"]["jobs"][0]["fits_on"] == []
    site.settle(**{job: "RUNNING"})
