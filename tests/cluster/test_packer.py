"""The packer on a real Slurm: placed, compared, taken away and placed elsewhere; and death at each point."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from hetstream.hetjob.site.messages import GpuNow, NodeGpus, SharingNow, ShowGpus
from hetstream.mpi_dataworkers.process.faults import FAULTS
from hetstream.slurm_plugin.client.packing_slurm import PackingSlurm
from hetstream.slurm_plugin.client.slurm_units import parse_gres
from hetstream.slurm_plugin.packing.packer import Packer
from hetstream.slurm_plugin.packing.state import PackingEvent, PackingRules
from tests.clusters import Devcluster
from tests.conftest import WaitUntil

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.every_release, pytest.mark.timeout(400)]
OWNER = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
GIB = 1 << 30
# Nobody rests: the test is not to wait for minutes.
RULES = PackingRules(settle_s=0.0, first_delay_s=0.0)
# A job that is ended while it starts is COMPLETING until slurmctld asks the node again, half a minute later or more.
END_S = 120.0
# Slurm starts no job within `cred_expire` (11 s here) after it was requeued. `StartTime=now` would shorten that, but a
# node refuses a start in the second in which it ended the one before: "Job credential revoked", and the job FAILED.
RESTART_S = 90.0


@dataclass
class Site(Devcluster):
    """A cluster, what its nodes would tell, and a packer that can be replaced by another one."""

    used: dict[int, float] = field(default_factory=lambda: {0: 0.2, 1: 0.4})
    sharing: dict[int, tuple[SharingNow, ...]] = field(default_factory=dict)
    events: list[PackingEvent] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.slurm = PackingSlurm(self.env)
        self.restart()

    def restart(self) -> None:
        self.packer = Packer(self.slurm, self.readings, {"opp"}, self.events.append, acting=True, rules=RULES)

    def readings(self) -> ShowGpus:
        gpus = [
            GpuNow(index, f"GPU-{index}", used, 40 * GIB, sharing=self.sharing.get(index, ()))
            for index, used in self.used.items()
        ]
        return ShowGpus((NodeGpus("gpu0", 1.0, tuple(gpus)),), {})

    def submit(self, *words: str) -> str:
        return self.run(*OWNER, "sbatch", "--parsable", "--time=5", "--mem=100", "-popp", *words, "job.sh")

    def show(self, job: str) -> str:
        return self.run("scontrol", "--details", "--oneliner", "show", "job", job)

    def has(self, event: str, job: str) -> bool:
        """Whether the packer says something of a job by now; it looks again."""
        self.packer.step()
        return any((found.event, found.job) == (event, job) for found in self.events)

    def runs_on(self, job: str) -> str:
        """The GRES of a job that runs."""
        shown = self.show(job)
        found = re.search(r" GRES=(\S+)", shown) if "JobState=RUNNING" in shown else None
        return ",".join(
            f"{gres.name}:{gres.type}:{gres.count}" for gres in parse_gres(found[1] if found else "") if gres.count
        )


@pytest.fixture
def site(packing: Devcluster, request: pytest.FixtureRequest, wait_until: WaitUntil) -> Iterator[Site]:
    site = Site(packing.record, packing.directory(request.node.name))
    (site.out_dir / "job.sh").write_text("#!/bin/bash\nexec sleep 300\n")
    yield site
    FAULTS.clear()
    print(*site.events, sep="\n")  # all that is printed is shown if the test failed
    print(site.run("scontrol", "show", "job"), site.run("scontrol", "show", "node"), sep="\n")
    site.clear(wait_until)


@pytest.mark.shows("the packer places, compares, takes away and places again; it may die at each point")
def test_a_job_is_placed_compared_taken_away_and_placed_elsewhere(site: Site, wait_until: WaitUntil) -> None:
    job = site.submit("--comment=mine hetstream:gpu-memory=8G")
    wait_until(lambda: site.has("started", job), 60, "the start")
    assert site.runs_on(job) == "opp:p0:1"
    assert "Comment=hetstream:gpu=0 mine hetstream:gpu-memory=8G" in site.show(job)
    # Its GPU's node reports it; the other GPU is the better one by now.
    site.sharing, site.used = {0: (SharingNow(job, 0.0, "it goes on although it should pause"),)}, {0: 0.9, 1: 0.4}
    assert site.has("evicted", job)
    site.sharing = {}
    wait_until(lambda: "JobState=PENDING" in site.show(job), END_S, "the requeue")
    shown = site.show(job)
    assert "Priority=0 " in shown
    assert re.search(r"AdminComment=hetstream:guarded hetstream:evicted=1@\d+@gpu0:0 ", shown), shown
    site.events.clear()
    wait_until(lambda: site.has("started", job), RESTART_S, "the second start")
    assert site.runs_on(job) == "opp:p1:1"


def test_what_slurm_gives_is_compared(site: Site, wait_until: WaitUntil) -> None:
    """Root gives the job another GPU between the packer's update and its start."""
    job = site.submit()
    site.used = {0: 0.2}
    assert site.has("placed", job)
    wait_until(lambda: site.runs_on(job), 60, "the start")
    site.run("scontrol", "update", f"JobId={job}", "AdminComment=hetstream:placed=gpu0:1@1795000000@0")
    assert site.has("evicted", job)
    assert "was placed on GPU 1" in site.events[-1].reason


def test_a_job_that_root_releases_without_a_place_is_taken_back_and_placed(site: Site, wait_until: WaitUntil) -> None:
    """It waits for that in the TaskProlog, and its program does not begin."""
    directory = site.out_dir
    (directory / "job.sh").write_text(f"#!/bin/bash\necho $CUDA_VISIBLE_DEVICES >>{directory}/began\nexec sleep 300\n")
    job = site.submit()
    site.run("scontrol", "release", job)
    wait_until(lambda: "JobState=RUNNING" in site.show(job), 60, "the start")
    assert site.has("taken back", job)
    wait_until(lambda: site.has("started", job), END_S + RESTART_S, "the start on a GPU")
    wait_until((directory / "began").exists, 30, "its program")
    assert (directory / "began").read_text() == "0\n"


@pytest.mark.shows("opportunistic jobs with a reservation are placed inside of it, others are not")
def test_a_job_with_a_reservation_is_placed_there_and_no_other(site: Site, wait_until: WaitUntil) -> None:
    options = ("Nodes=gpu0", "Users=65534", "StartTime=now", "Duration=10")
    site.run("scontrol", "create", "reservation", "ReservationName=course", *options)
    try:
        outside, inside = site.submit(), site.submit("--reservation=course")
        wait_until(lambda: site.has("started", inside), 60, "the start inside")
        assert not site.has("placed", outside)
        assert site.has("waits", outside)
        site.run("scancel", inside)
        wait_until(lambda: inside not in site.run("squeue", "-h", "-o", "%A").split(), END_S, "its end")
    finally:
        site.run("scontrol", "delete", "ReservationName=course")
    wait_until(lambda: site.has("started", outside), 60, "the start of the other one")


@pytest.mark.shows("the packer places, compares, takes away and places again; it may die at each point")
@pytest.mark.parametrize("point", ["packer.updated", "packer.released", "packer.requeued"])
def test_a_packer_that_dies_leaves_nothing_that_the_next_one_does_not_repair(
    site: Site, tmp_path: Path, wait_until: WaitUntil, point: str
) -> None:
    job = site.submit()
    FAULTS.clear()
    if point == "packer.requeued":
        wait_until(lambda: site.has("started", job), 60, "the start")
        site.sharing = {0: (SharingNow(job, 0.0, "it goes on although it should pause"),)}
    FAULTS.request(f"{point}:1:full:{tmp_path}/marker")
    with pytest.raises(OSError, match="No space"):
        site.packer.step()
    site.sharing, site.events = {}, []
    site.restart()
    if point == "packer.requeued":
        wait_until(lambda: site.has("taken back", job), END_S, "the note")
    wait_until(lambda: site.has("started", job), RESTART_S, "the start by another packer")
    assert re.fullmatch(r"opp:p[01]:1", site.runs_on(job))
