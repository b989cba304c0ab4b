"""Forms of requests, generated, and Slurm's own answers to them: what it takes can start, whatever `why` thinks of it.

Nodes beside those of `gpu-kinds`: ht0 to ht3 have 2 sockets of 4 cores with 2 threads, big0 4 times as many cores, and
of core0 Slurm counts the 8 cores as CPUs. They are nodes of a cloud that nobody boots: jobs get them all the same.
"""

from __future__ import annotations

import contextlib
import random
import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest

from hetstream.hetjob.errors import SlurmCommandError
from hetstream.slurm_plugin.client.model import Job, Snapshot
from hetstream.slurm_plugin.client.slurm import CommandSlurm
from hetstream.slurm_plugin.insight.why import Explainer
from tests.devcluster.sites import GPU_KINDS
from tests.devcluster.spec import ClusterShape
from tests.sites.conftest import HETSTREAM

pytestmark = [pytest.mark.slurm, pytest.mark.every_release]
KINDS = (GPU_KINDS,)
SHAPE = ClusterShape(4, 4, 1, 16)
_CLOUD = "NodeAddr=127.0.0.1 ThreadsPerCore=2 State=CLOUD"
SETTINGS = (
    "PrivateData=cloud", "ResumeProgram=/bin/true", "SuspendProgram=/bin/true", "SuspendTime=-1", "ResumeTimeout=3600",
    f"NodeName=ht[0-3] Port=19999 Sockets=2 CoresPerSocket=4 CPUs=16 RealMemory=64000 Feature=fast Gres=gpu:4 {_CLOUD}",
    f"NodeName=big0 Port=19998 Sockets=2 CoresPerSocket=16 CPUs=64 RealMemory=256000 {_CLOUD}",
    f"NodeName=core0 Port=19997 Sockets=1 CoresPerSocket=8 CPUs=8 RealMemory=64000 {_CLOUD}",
    "PartitionName=ht Nodes=ht[0-3] MaxTime=INFINITE State=UP",
    "PartitionName=mix Nodes=ht[0-3],big0,core0 MaxTime=INFINITE State=UP",
)  # fmt: skip
SOON_S = 60.0
# Only Slurm knows, and `why` says so.
DOUBTS = ("GRES", "sockets", "node count")
# What each option says, and how often in a hundred requests it is there.
OPTIONS: tuple[tuple[int, tuple[str, ...]], ...] = (
    (100, ("-pht", "-pht", "-pmix", "-pgpu", "-pgpu", "-pcpu", "-pht,mix")),
    (50, ("-N1", "-N2", "-N3", "-N1-2", "-N1-4", "-N2-3", "-N2-4")),
    (60, tuple(f"-n{number}" for number in (1, 2, 3, 4, 5, 8, 9, 12, 16, 20, 30, 33, 48, 62))),
    (40, tuple(f"-c{number}" for number in (1, 2, 3, 4, 5, 6, 8, 12, 16))),
    (20, tuple(f"--ntasks-per-node={number}" for number in (1, 2, 4, 8))),
    (12, ("--ntasks-per-core=1", "--ntasks-per-core=2", "--ntasks-per-socket=2", "--ntasks-per-socket=4")),
    (25, ("--hint=nomultithread", "--hint=compute_bound", "--threads-per-core=1", "--threads-per-core=2", "-B2:4:1",
          "-B*:4:2", "-B2:*:*")),
    (8, ("--mincpus=2", "--mincpus=8", "--mincpus=16")),
    (60, ("--gpus=1", "--gpus=3", "--gpus=9", "--gpus=a100:2", "--gpus-per-node=2", "--gpus-per-node=v100:1",
          "--gpus-per-task=1", "--gpus-per-task=4", "--gpus-per-task=a100:1", "--gpus-per-socket=1",
          "--gres=gpu:a100:1,gpu:v100:2", "--gpus=a100:2,v100:2", "--gpus=a100:3,v100:3", "--gres=shard:2",
          "--gres=shard:4", "--ntasks-per-gpu=2")),
    (10, ("--cpus-per-gpu=3", "--mem-per-gpu=8000")),
    (25, ("--mem=0", "--mem=100", "--mem=20000", "--mem=60000", "--mem-per-cpu=100", "--mem-per-cpu=8000")),
    (10, ("--exclusive", "-Cfast", "--overcommit", "--use-min-nodes")),
)  # fmt: skip


def forms(seed: int) -> Iterator[list[str]]:
    """Requests without end, the same for the same seed; first those that were once said never to start."""
    yield from (["-pht", "-N1-2", "-n30"], ["-pht", "-N2-4", "-n62"], ["-pht", "-n9", "--gpus=9"])
    yield from (["-pht", "-n2", "--gpus-per-task=4"], ["-pgpu", "--gres=gpu:a100:2,gpu:v100:2"])
    yield ["-pgpu", "--gres=gpu:a100:2,gpu:v100:2", "--mem-per-gpu=20000"]
    # Then those that had room in uneven parts alone, or by other memory than Slurm wants.
    yield from (["-pgpu", "-n48"], ["-pmix", "-N1-2", "-n5", "-c4"], ["-pmix", "-n33", "--gpus=9"])
    yield from (["-pmix", "-n8", "--mem=0"], ["-pmix", "-n9", "-c2", "--ntasks-per-node=4", "--mem-per-cpu=8000"])
    draw = random.Random(seed)
    while True:
        yield [draw.choice(choices) for often, choices in OPTIONS if draw.randrange(100) < often]


def submitted(site: Any, number: int, seed: int, *options: str) -> dict[str, list[str]]:
    """The first so many of these requests that Slurm takes, by the numbers of their jobs."""
    found: dict[str, list[str]] = {}
    for form in forms(seed):
        try:
            found[site.submit("--time=10", *options, *form)] = form
        except SlurmCommandError:
            continue  # it can never start, and Slurm says so itself
        if len(found) == number:
            return found
    raise AssertionError


def causes(snapshot: Snapshot, job: Job) -> tuple[str, ...]:
    """What a job waits for, if nobody else did."""
    others = tuple(other for other in snapshot.jobs if not other.is_pending)
    return Explainer(replace(snapshot, jobs=(*others, job))).causes(job)


def start_s(site: Any, form: list[str]) -> float | None:
    """When Slurm would start a request, in seconds from now; None if never."""
    found = []
    # Of several partitions --test-only does not always name the one where it starts first.
    for partition in form[0].removeprefix("-p").split(","):
        asked = ["sbatch", "--test-only", "--time=10", f"-p{partition}", *form[1:], "--wrap=true"]
        with contextlib.suppress(SlurmCommandError):
            at = re.search(r"to start at (\S+)", site.cluster.attempt(*asked).stderr)
            found += [datetime.fromisoformat(at[1]).timestamp() - time.time()] if at else []
    return min(found, default=None)


def sizes(number: int) -> Any:
    return pytest.mark.parametrize("number", [80, pytest.param(number, marks=pytest.mark.slow)])


@sizes(400)
def test_nothing_that_slurm_takes_can_never_start(site: Any, number: int) -> None:
    """All nodes are full: who waits is who Slurm would start on empty ones."""
    full = [site.submit("-pmix", "-N6", "--exclusive", "--mem=100"), site.submit("-pgpu", "-N4", "--exclusive")]
    full.append(site.submit("-pcpu", "-N1", "--exclusive", "--mem=100"))
    site.settle(**{full[0]: "CONFIGURING", full[1]: "RUNNING", full[2]: "RUNNING"})
    asked = submitted(site, number, 5 + number)
    snapshot = CommandSlurm(site.cluster.env).snapshot()
    jobs = {str(job.job_id): job for job in snapshot.jobs if job.is_pending}
    assert jobs.keys() == asked.keys()
    said = {name: causes(snapshot, replace(job, reason="Resources")) for name, job in jobs.items()}
    # Slurm takes some that more nodes would be needed for, and would start them when there are.
    never = {name for name, kinds in said.items() if kinds == ("size",)}
    assert [asked[name] for name in never if start_s(site, asked[name]) is not None] == []
    # The others wait for what is full.
    kinds = Counter(kinds[0] for name, kinds in said.items() if name not in never)
    assert kinds.keys() <= {"CPUs", "GPUs", "memory", "GRES", "whole nodes"}
    assert kinds.total() > number / 2


@sizes(300)
def test_there_is_room_where_slurm_would_start_it(site: Any, number: int) -> None:
    """Some of each node is taken, with threads, whole cores, memory and types of GPUs."""
    loads = ("-pht -wht0 -n8", "-pht -wht1 -c3 --hint=nomultithread", "-pht -wht2 -n3", "-pmix -wcore0 -n3",
             "-pmix -wbig0 -n50", "-pgpu -wgpu0 -n3 --gpus=3", "-pgpu -wgpu1 -n8 --gpus=a100:1", "-pgpu -wgpu2 -n1",
             )  # fmt: skip
    running = [site.submit("-N1", "--time=60", "--mem-per-cpu=500", *load.split()) for load in loads]
    site.wait_until(lambda: all(site.state(job).split()[0] in ("RUNNING", "CONFIGURING") for job in running), 60)
    held = submitted(site, number, 7 + number, "--hold")
    snapshot = CommandSlurm(site.cluster.env).snapshot()
    agreed, wrong, different = Counter[tuple[bool, bool]](), [], []
    for job in snapshot.jobs:
        form = held.get(str(job.job_id))
        # 26.05 says of jobs that wait for resources alone whether they want whole nodes.
        if form is None or "--exclusive" in form:
            continue
        kind = causes(snapshot, replace(job, reason="Priority"))[0]
        planned_s = start_s(site, form)
        # A request that contradicts itself may wait in the queue when it is held, and is refused otherwise.
        if planned_s is None:
            continue
        agreed[kind == "scheduler", planned_s < SOON_S] += 1
        if kind == "size" or (kind == "scheduler" and planned_s > SOON_S):
            wrong.append((form, kind))
        if kind not in ("scheduler", *DOUBTS) and planned_s < SOON_S:
            different.append((form, kind))
    assert not wrong, wrong
    assert len(different) <= number / 50, different
    assert agreed[True, True] > 4 * agreed[False, True], agreed


def test_one_thread_of_each_core_takes_the_other_too(site: Any) -> None:
    """Of 16 CPUs 10 are free: 6 cores have 12."""
    site.settle(**{site.submit("-pht", "-wht0", "-N1", "-n6", "--mem=100"): "CONFIGURING"})
    job = site.submit("-pht", "-wht0", "-N1", "-n1", "-c6", "--hint=nomultithread", "--mem=100")
    site.settle(**{job: "PENDING Resources"})
    assert site.blockers(job) == [
        ("CPUs", "it needs 12 CPUs (6 and what is beside them) on a node; of 1 node with enough memory the most "
                 "free is 10 (ht0)")
    ]  # fmt: skip


def test_cpus_that_come_with_gpus_are_a_pending_jobs_own(site: Any) -> None:
    """They are not in what squeue says of it; what it then holds has them."""
    forms = (
        ("-pgpu", "--gpus=2", "--cpus-per-gpu=3"),
        ("-pgpu", "--gpus-per-node=1", "-N2", "--cpus-per-gpu=2"),
        ("-pgpu", "--gpus=1", "--cpus-per-gpu=4", "--mem=100"),
    )
    jobs = [site.submit("--hold", *form) for form in forms]
    site.settle(**dict.fromkeys(jobs, "PENDING JobHeldUser"))

    def sizes_of() -> list[tuple[int, int]]:
        rows = {row["job"]: row for row in site.told("jobs")["jobs"]}
        return [(rows[job]["cpus"], rows[job]["memory_mb"]) for job in jobs]

    pending = sizes_of()
    assert [cpus for cpus, _ in pending] == [6, 4, 4]
    assert 'hetstream_pending_cpus{cause="held"} 14' in site.run(str(HETSTREAM), "exporter", "--print")
    site.run("scontrol", "release", *jobs)
    site.settle(**dict.fromkeys(jobs, "RUNNING"))
    assert sizes_of() == pending


def test_a_time_limit_above_a_year_is_read_without_a_word(site: Any, caplog: pytest.LogCaptureFixture) -> None:
    """squeue has no word for it."""
    job = site.submit("-pcpu", "--hold", "--time=400-0")
    site.settle(**{job: "PENDING JobHeldUser"})
    row = next(row for row in site.told("jobs")["jobs"] if row["job"] == job)
    assert row["time_limit_s"] is None
    assert [kind for kind, _ in site.blockers(job)] == ["held"]
    assert caplog.messages == []


def test_all_memory_of_a_node_is_that_of_any(site: Any) -> None:
    """Slurm counts that of big0 for it while it waits, and it gets core0, which has less."""
    for name in ("ht0", "ht1", "ht2", "ht3", "big0", "core0"):
        last = site.submit("-pmix", f"-w{name}", "--mem=100")
        site.settle(**{last: "CONFIGURING"})
    job = site.submit("-pmix", "--mem=0", "--time=10")
    site.settle(**{job: "PENDING Resources"})
    assert site.blockers(job) == [
        ("memory", "it needs all memory of a node (--mem=0); of 6 nodes with enough CPUs 0 have all of it free")
    ]
    held = site.submit("-pmix", "--mem=0", "--hold", "--time=10")
    site.run("scancel", job, last)
    site.wait_until(lambda: site.facts(held)["fits_on"] == ["core0"], 60, "room on core0")
    site.run("scontrol", "release", held)
    site.settle(**{held: "CONFIGURING"})
    assert site.run("squeue", "--noheader", f"--jobs={held}", "--format=%N") == "core0"


def test_shards_are_no_room_on_nodes_without_them(site: Any) -> None:
    """Of gpu2 alone; 5 are more than one GPU has, which `why` does not count, and says so."""
    job = site.submit("-pgpu", "-wgpu0", "--gres=gpu:1", "-N1")
    site.settle(**{job: "RUNNING"})
    waiting = site.submit("-pgpu", "--gres=shard:5", "--mem=100")
    site.settle(**{waiting: "PENDING Resources"})
    assert site.facts(waiting)["fits_on"] == ["gpu2"]
    ((kind, text),) = site.blockers(waiting)
    assert (kind, text) == (
        "GRES", "there is room now, but for its shard:5, which is not counted GPU by GPU; no job is ahead"
    )  # fmt: skip
    assert {row["job"]: row["waits_for"] for row in site.told("jobs")["jobs"]}[waiting] == "GRES"
