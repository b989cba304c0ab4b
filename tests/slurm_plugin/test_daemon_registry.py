"""The daemon's registry and store: who is known, who is refused, what is remembered. Pure, but for SQLite's file."""

from __future__ import annotations

import os
import sqlite3
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from hetstream.hetjob.ports import Measured, SpeedPoint
from hetstream.hetjob.site.messages import CompanionSeen, GrantLimit, RefuseReport, ReportDemand
from hetstream.slurm_plugin.client.model import Gres, HetComponent, Job, Node, Partition, Snapshot
from hetstream.slurm_plugin.daemon.nodes import WorkerSize, pool_partitions, pool_room_of, usable_cpus
from hetstream.slurm_plugin.daemon.registry import Registry, Times
from hetstream.slurm_plugin.daemon.settings import PolicySettings, ReportIntervals
from hetstream.slurm_plugin.daemon.store import Store, remembered_jobs
from hetstream.slurm_plugin.errors import DaemonStateError
from hetstream.slurm_plugin.policy.policies import MoveCost
from hetstream.slurm_plugin.policy.table import Allocation, JobTable, Pool, allocation

ALICE, BOB = ("alice", "1000"), ("bob", "1001")


def job(job_id: int, user: str = "alice", gpus: int = 1, state: str = "RUNNING", **more: object) -> Job:
    gres = (Gres("gpu", "", gpus),) if gpus else ()
    base = Job(job_id, "train", user, ("gpu",), state, "None", 1, 2, 1, 2, 1000, gres_per_node=gres)
    return replace(base, **more)  # type: ignore[arg-type]


def node(name: str, partition: str, cpus: int, allocated: int = 0, gpus: int = 0, state: str = "IDLE") -> Node:
    gres = (Gres("gpu", "", gpus),) if gpus else ()
    return Node(name, frozenset({state}), (partition,), cpus, allocated, 64000, 0, gres)


def snapshot(*jobs: Job, cpus: int = 32, taken_s: float = 0.0) -> Snapshot:
    nodes = (node("gpu0", "gpu", 16, 2, 4), node("cpu0", "cpu", cpus))
    partitions = (Partition("gpu", ("gpu0",)), Partition("cpu", ("cpu0",)))
    return Snapshot(taken_s, "22.05.8", "test", jobs, nodes, partitions)


def demand(job_id: int, wanted: int = 8, minimum: int = 0, cpus: int = 4, current: int = 0) -> ReportDemand:
    return ReportDemand(job_id, minimum, current, wanted, cpus, 0.5)


def granted(registry: Registry, job_id: int, sent_ns: int, now_s: float, **what: int) -> GrantLimit:
    answer, _ = registry.report(ALICE, demand(job_id, **what), sent_ns, now_s)
    assert isinstance(answer, GrantLimit), answer
    return answer


@pytest.fixture
def registry() -> Registry:
    registry = Registry((), allocating=True)
    registry.observe(snapshot(job(1, gpus=1), job(2, gpus=3), job(3, "bob")), 100.0)
    return registry


def test_shares_follow_the_weights_and_change_at_most_once_a_second(registry: Registry) -> None:
    assert granted(registry, 1, 1, 200.0).limit == 8
    second = granted(registry, 2, 1, 200.5, current=3)
    assert (second.limit, second.next_s) == (0, 1.0)  # Slurm knows of none
    assert "until the shares are divided anew" in second.reason
    assert granted(registry, 1, 2, 201.1).limit == 2
    answer = granted(registry, 2, 2, 201.1)
    assert (answer.limit, answer.next_s) == (6, ReportIntervals.report_s)
    assert answer.reason == "6 of 8: 32 CPUs are shared by 2 jobs, its weight is 3"
    assert registry.wait_shares() == {"1": 0.5, "2": 0.5}


def companion(job_id: int, of: int, cpus: int = 4, **more: object) -> Job:
    return job(job_id, gpus=0, partitions=("cpu",), num_cpus=cpus, comment=f"hets:trainer={of}", **more)


@pytest.mark.shows("where a site daemon answers, its reading of a job's companions stands for `squeue`")
def test_a_job_is_told_its_companions_and_how_old_that_is(registry: Registry) -> None:
    assert granted(registry, 1, 1, 130.0).companions == ()
    own = companion(10, 1, state="PENDING")
    registry.observe(
        snapshot(
            job(1), replace(own, comment="hets:trainer=1 hets:start=1.2"), job(2),
            companion(11, 1, user="bob"), companion(12, 2), taken_s=149.0,
        ),
        150.0,
    )  # fmt: skip
    answer = granted(registry, 1, 2, 160.0)
    assert answer.companions == (CompanionSeen("10", "hets:start=1.2", "PENDING", 4),)
    assert answer.read_age_s == 11.0


def test_what_slurm_does_not_bear_out_takes_nothing_from_others(registry: Registry) -> None:
    """The pool has 32 CPUs; both jobs want 8 data workers of 4 CPUs, and have 1 and 3 GPUs."""
    seen = snapshot(job(1, gpus=1), job(2, gpus=3))
    registry.observe(seen, 150.0)
    granted(registry, 2, 1, 200.0)
    for number, lie in enumerate(
        (
            {"minimum": 100_000, "wanted": 100_000},
            {"minimum": 100_000, "wanted": 100_000, "cpus": 1, "current": 100_000},
            {"current": 100_000, "wanted": 0},
        )
    ):
        said = granted(registry, 1, number + 1, 202.0 + 2 * number, **lie)
        registry.observe(seen, 203.0 + 2 * number)
        assert registry.jobs["2"].limit == (8 if lie["wanted"] == 0 else 6), lie
        assert (registry.jobs["1"].limit or 0) * lie.get("cpus", 4) <= 8, lie
        assert said.limit is not None
        assert said.limit * lie.get("cpus", 4) <= 8, lie


def test_before_the_shares_are_divided_a_job_has_what_slurm_knows_of(registry: Registry) -> None:
    registry.observe(snapshot(job(1), job(2), companion(11, 1), companion(12, 1, state="PENDING")), 150.0)
    granted(registry, 2, 1, 200.0)
    first = granted(registry, 1, 1, 200.1, current=50, minimum=50, wanted=50)
    assert (first.limit, first.reason) == (2, "what it has, until the shares are divided anew")


def test_a_minimum_counts_as_far_as_there_are_components(registry: Registry) -> None:
    trainer, workers = job(5, het=HetComponent(5, 0)), job(6, gpus=0, het=HetComponent(5, 1), partitions=("cpu",))
    registry.observe(snapshot(trainer, replace(workers, num_cpus=12), job(2, gpus=9)), 150.0)
    granted(registry, 2, 1, 200.0, wanted=100)
    assert granted(registry, 5, 1, 202.0, minimum=8).limit == 3
    # Others' components and companions do not count for it.
    stranger = replace(workers, num_cpus=32, user="bob", uid=1001)
    registry.observe(snapshot(trainer, stranger, companion(9, 5, user="bob", uid=1001), job(2, gpus=9)), 210.0)
    assert granted(registry, 5, 2, 212.0, minimum=8).limit == 1  # its share: a tenth of the weight


def test_companions_that_are_larger_than_a_job_says_count_as_large_as_they_are(registry: Registry) -> None:
    registry.observe(snapshot(job(1), job(2), companion(11, 1, cpus=16)), 150.0)
    granted(registry, 2, 1, 200.0)
    # Of 48 CPUs: 2 of 16 and 4 of 4. As small as it says, it would be told 24.
    assert granted(registry, 1, 1, 202.0, cpus=1, current=1, wanted=30).limit == 2
    assert registry.jobs["2"].limit in (4, 8)


def test_a_silent_job_keeps_what_it_has_and_no_more(registry: Registry) -> None:
    seen = snapshot(job(1), job(2), companion(11, 1), cpus=28)
    registry.observe(seen, 150.0)
    granted(registry, 1, 1, 200.0)
    granted(registry, 2, 1, 200.0)
    registry.observe(seen, 260.0)
    assert [registry.jobs[name].limit for name in ("1", "2")] == [4, 4]
    granted(registry, 2, 2, 590.0)
    registry.observe(seen, 600.0)
    assert [registry.jobs[name].limit for name in ("1", "2")] == [1, 7]
    granted(registry, 1, 2, 602.0)
    registry.observe(seen, 603.0)
    assert [registry.jobs[name].limit for name in ("1", "2")] == [4, 4]


def test_owners_are_compared_by_number_where_slurm_says_it(registry: Registry) -> None:
    registry.observe(snapshot(job(1, uid=1001)), 150.0)
    assert isinstance(registry.report(ALICE, demand(1), 1, 200.0)[0], RefuseReport), "the same name on another host"
    assert isinstance(registry.report(BOB, demand(1), 2, 200.0)[0], GrantLimit)


@pytest.mark.shows("the site daemon divides data workers, survives its death, and believes what Slurm confirms")
def test_only_its_user_reports_for_a_job(registry: Registry) -> None:
    answer, changes = registry.report(BOB, demand(1), 1, 200.0)
    assert answer == RefuseReport("job 1 is not yours")
    assert (changes, registry.jobs, registry.touched, registry.wants_reading) == ((), {}, set(), False)
    granted(registry, 1, 1, 200.0)
    assert isinstance(registry.report(BOB, demand(1), 2, 201.0)[0], RefuseReport)
    assert isinstance(registry.report(("root", "0"), demand(1), 2, 201.0)[0], RefuseReport)


def test_a_report_counts_once_also_in_the_next_life(registry: Registry) -> None:
    granted(registry, 1, 5, 200.0)
    for again in (registry, Registry(registry.jobs.values(), allocating=True)):
        for sent_ns in (5, 4):
            answer, _ = again.report(ALICE, demand(1, wanted=1), sent_ns, 300.0)
            assert isinstance(answer, RefuseReport)
            assert "a clock that was set back, or a replay" in answer.reason
        assert again.jobs["1"].report.wanted == 8


def test_a_job_that_slurm_does_not_know_is_asked_for_and_not_limited(registry: Registry) -> None:
    answer = granted(registry, 9, 1, 200.0)
    assert (answer.limit, registry.wants_reading) == (None, True)
    assert "9" not in registry.jobs
    registry.observe(snapshot(job(9)), 205.0)
    assert not registry.wants_reading
    assert granted(registry, 9, 2, 206.0).limit == 8
    registry.observe(snapshot(job(9, state="PENDING")), 210.0)
    assert registry.jobs == {}
    assert "9" in registry.touched


def test_without_slurm_nobody_is_forgotten_and_nobody_is_new() -> None:
    before = Registry((), allocating=True)
    before.observe(snapshot(job(1)), 100.0)
    granted(before, 1, 1, 102.0)
    after = Registry(before.jobs.values(), allocating=True)
    answer = granted(after, 1, 2, 200.0, wanted=20)
    assert (answer.limit, answer.reason) == (8, "all that it wants: 8")
    assert granted(after, 2, 1, 200.0).limit is None
    assert isinstance(after.report(BOB, demand(1), 3, 200.0)[0], RefuseReport)


def test_observing_decides_and_tells_nobody() -> None:
    registry = Registry((), allocating=False)
    registry.observe(snapshot(job(1)), 100.0)
    answer = granted(registry, 1, 1, 200.0)
    assert (answer.limit, answer.reason) == (None, "the site daemon only observes")
    (status,) = registry.status(None, 203.0)
    assert (status.limit, status.age_s) == (8, 3.0)
    assert registry.status(BOB, 203.0) == ()


def test_many_jobs_report_less_often() -> None:
    registry = Registry((), allocating=True)
    registry.observe(snapshot(*(job(number) for number in range(1, 1001))), 100.0)
    for number in range(1, 1001):
        answer = granted(registry, number, 1, 200.0)
    assert granted(registry, 1, 2, 300.0).next_s == 1000 / ReportIntervals.max_reports_per_s
    assert answer.limit == 0


def test_all_times_follow_its_pace() -> None:
    registry = Registry((), allocating=True, pace=ReportIntervals(report_s=2.0, round_s=0.25, unknown_s=0.75))
    assert granted(registry, 1, 1, 99.0).next_s == 0.75
    registry.observe(snapshot(job(1), job(2)), 100.0)
    assert granted(registry, 1, 2, 100.1).next_s == 2.0
    assert granted(registry, 2, 1, 100.2, current=3).next_s == 0.25, "the next round is as soon as that"
    assert granted(registry, 2, 2, 100.4).limit == 4


@pytest.mark.parametrize(("move", "limit"), [(MoveCost(), 1), (MoveCost(0, 0, 0, 0, 0), 8)])
def test_what_a_change_costs_follows_its_pace(move: MoveCost, limit: int) -> None:
    """There was room for one data worker, and soon after there is for all."""
    registry = Registry((), allocating=True, pace=ReportIntervals(move=move))
    registry.observe(snapshot(job(1), companion(11, 1), cpus=0), 100.0)
    assert granted(registry, 1, 1, 101.0, current=1).limit == 1
    registry.observe(snapshot(job(1), companion(11, 1)), 105.0)
    assert registry.jobs["1"].limit == limit


@pytest.mark.shows("a report to the daemon carries measured speeds, a grant a number, nodes and the reason")
def test_a_job_that_may_grow_is_told_where_it_would_be_best() -> None:
    nodes = (node("gpu0", "gpu", 16, 2, 4), node("cpu0", "cpu", 8), node("cpu1", "cpu", 8), node("cpu2", "cpu", 8))
    trainer = job(1, nodes=("gpu0",))
    cluster = snapshot(trainer, companion(11, 7, nodes=("cpu0",)), taken_s=100.0)
    registry = Registry((), allocating=True)
    registry.observe(replace(cluster, nodes=nodes), 100.0)
    assert granted(registry, 1, 1, 200.0, wanted=5).nodes == (), "a job of version 1"
    measured = Measured(1.0, 2.0, (SpeedPoint(4, 1, 0.4),))
    answer, _ = registry.report(ALICE, msgspec.structs.replace(demand(1, wanted=5), measured=measured), 2, 202.0)
    assert isinstance(answer, GrantLimit)
    # cpu0 has the data worker of another job already.
    assert answer.nodes == ("cpu1", "cpu1", "cpu2", "cpu2", "cpu0")
    settled = msgspec.structs.replace(demand(1, wanted=5, current=5), measured=measured)
    answer, _ = registry.report(ALICE, settled, 3, 204.0)
    assert isinstance(answer, GrantLimit)
    assert answer.nodes == ()


MEMORY = {"SelectTypeParameters": "CR_Core_Memory"}


def big_demand(job_id: int, worker_memory_mb: int | None, wanted: int = 8, step_bytes: float = 0.0) -> ReportDemand:
    measured = Measured(10.0, 20.0, (SpeedPoint(4, 1, 5.0),), step_bytes=step_bytes, worker_memory_mb=worker_memory_mb)
    return msgspec.structs.replace(demand(job_id, wanted=wanted), measured=measured)


@pytest.mark.parametrize(
    ("worker_memory_mb", "config", "limit"),
    [
        (None, MEMORY, 4),
        (8000, MEMORY, 4),
        (30_000, MEMORY, 2),  # of 64,000 MB
        (65_000, MEMORY, 0),
        (65_000, {"SelectTypeParameters": "CR_CORE_MEMORY"}, 0),  # as 24.11 writes it
        (1 << 40, MEMORY, 0),
        (65_000, {}, 4),  # Slurm does not count memory there
        (65_000, {"SelectTypeParameters": "CR_CPU"}, 4),
    ],
)
def test_a_data_worker_counts_where_its_memory_fits(
    worker_memory_mb: int | None, config: dict[str, str], limit: int
) -> None:
    registry = Registry((), allocating=True)
    registry.observe(replace(snapshot(job(1)), config=config), 100.0)
    # Four are as fast as the trainer.
    answer, _ = registry.report(ALICE, big_demand(1, worker_memory_mb), 1, 200.0)
    assert isinstance(answer, GrantLimit)
    assert answer.limit == limit
    assert registry.problem == ""


def test_memory_that_companions_hold_is_the_jobs_own_and_as_large_as_slurm_says() -> None:
    held = companion(11, 1, nodes=("cpu0",), memory_mb=40_000)
    cluster = snapshot(job(1), held)
    nodes = (cluster.nodes[0], replace(cluster.nodes[1], cpus_allocated=4, memory_allocated_mb=40_000))
    cluster = replace(cluster, nodes=nodes, config=MEMORY)
    room = pool_room_of(cluster, ("cpu",), {"1": "alice"})
    assert [room.num_workers(WorkerSize(4, memory_mb)) for memory_mb in (0, 24_000, 40_000, 64_001)] == [8, 2, 1, 0]
    assert room.cpus({WorkerSize(4, 24_000)}) == 4 + 4
    assert room.cpus({WorkerSize(4, 25_000)}) == 4
    registry = Registry((), allocating=True)
    registry.observe(cluster, 100.0)
    answer, _ = registry.report(ALICE, msgspec.structs.replace(big_demand(1, 1), current=1), 1, 200.0)
    assert isinstance(answer, GrantLimit)
    assert answer.limit == 1, "it says 1 MB, and its companion has 40,000"


@pytest.mark.shows("data workers go to the trainer's node first, then where least other traffic is")
def test_no_node_is_preferred_whose_memory_is_too_small_or_whose_link_is_full() -> None:
    nodes = tuple(replace(node(f"cpu{number}", "cpu", 8), memory_mb=64_000) for number in range(4))
    nodes = (node("gpu0", "gpu", 16, 2, 4), replace(nodes[0], memory_mb=7_000), *nodes[1:])
    # Another job's data worker sends 10 Gb/s from cpu1.
    other = companion(21, 2, nodes=("cpu1",))
    cluster = snapshot(job(1, nodes=("gpu0",)), job(2, nodes=("gpu1",)), other)
    cluster = replace(cluster, nodes=(*nodes, node("gpu1", "gpu", 16, 2, 4)), config=MEMORY)

    def preferred(settings: PolicySettings) -> tuple[str, ...]:
        registry = Registry((), allocating=True, settings=settings)
        registry.observe(cluster, 100.0)
        registry.report(ALICE, msgspec.structs.replace(big_demand(2, None, 1, 1.25e8), current=1), 1, 150.0)
        # 5 steps a second of 0.05 GB: 2 Gb/s for each data worker.
        answer, _ = registry.report(ALICE, big_demand(1, 8000, 4, 5e7), 1, 200.0)
        assert isinstance(answer, GrantLimit)
        assert answer.limit == 4
        return answer.nodes

    assert preferred(PolicySettings()) == ("cpu2", "cpu2", "cpu3", "cpu3")
    assert preferred(PolicySettings(network_gbps=20.0)) == ("cpu2", "cpu2", "cpu3", "cpu3"), "8 of 10 Gb/s"
    assert preferred(PolicySettings(network_gbps=10.0)) == ("cpu2", "cpu2"), "5 Gb/s go into the trainer's node"
    assert preferred(PolicySettings(network_gbps=5.0)) == ("cpu2",)
    assert preferred(PolicySettings(network_gbps=5.0, network_share=0.0)) == ()
    wide = PolicySettings(network_gbps=20.0, network_share=1.0)
    assert preferred(wide) == ("cpu2", "cpu2", "cpu3", "cpu3")
    # Where others have a node for themselves, it would stay empty.
    owned = [replace(each, owner="bob") if each.name == "cpu2" else each for each in cluster.nodes]
    cluster = replace(cluster, nodes=tuple(owned))
    assert sorted(preferred(PolicySettings())) == ["cpu1", "cpu1", "cpu3", "cpu3"]


def test_a_change_is_told_once(registry: Registry) -> None:
    _, changes = registry.report(ALICE, demand(1), 1, 200.0)
    assert [(change.job, change.before, change.after) for change in changes] == [("1", None, 8)]
    assert registry.report(ALICE, demand(1), 2, 202.0)[1] == ()
    assert registry.observe(snapshot(job(1), cpus=12), 203.0)[0].after == 3


def test_another_policy_takes_the_place_of_the_default() -> None:
    def never_grow(table: JobTable, pool: Pool, now_s: float) -> Allocation:
        return allocation(table.minimum.copy())

    registry = Registry((), allocating=True, policy=never_grow, settings=PolicySettings(floor=0.0))
    registry.observe(snapshot(job(1)), 100.0)
    assert granted(registry, 1, 1, 200.0).limit == 0


@pytest.mark.shows("a policy that gives out too much ends at the event at which it does")
@pytest.mark.parametrize("fault", ["gives too much", "fails"])
def test_a_policy_at_fault_changes_nothing_and_is_told_of(fault: str) -> None:
    is_broken = False

    def sometimes(table: JobTable, pool: Pool, now_s: float) -> Allocation:
        if is_broken and fault == "fails":
            raise ZeroDivisionError("no job at all")
        return allocation(np.full(len(table), 100 if is_broken else 3, np.int64))

    registry = Registry((), allocating=True, policy=sometimes, settings=PolicySettings(floor=0.0))
    registry.observe(snapshot(job(1), job(2)), 100.0)
    assert granted(registry, 1, 1, 200.0).limit == 3
    is_broken = True
    assert granted(registry, 1, 2, 202.0, wanted=100).limit == 3
    assert "a policy gives out" in registry.problem or "ZeroDivisionError: no job at all" in registry.problem
    first = granted(registry, 2, 1, 204.0, current=3)
    assert (first.limit, first.reason) == (0, "what it has, until the shares are divided anew")
    is_broken = False
    assert granted(registry, 1, 3, 206.0).limit == 3
    assert registry.problem == ""


def test_the_pool_is_what_is_free_and_what_these_jobs_hold() -> None:
    companion = job(11, gpus=0, partitions=("cpu",), num_cpus=8, comment="x hets:trainer=1")
    component = job(13, gpus=0, partitions=("cpu",), num_cpus=4, het=HetComponent(12, 1))
    others = (
        replace(companion, job_id=20, user="bob"),
        replace(companion, job_id=21, comment="hets:trainer=7"),
        replace(companion, job_id=22, state="PENDING"),
        replace(companion, job_id=23, partitions=("gpu",)),
    )
    cluster = replace(
        snapshot(companion, component, *others),
        nodes=(node("gpu0", "gpu", 16, gpus=4), node("c0", "cpu", 32, 20), node("c1", "cpu", 32, state="DOWN")),
    )
    assert pool_partitions(cluster, None) == ("cpu",)
    assert pool_partitions(cluster, ("gpu", "none")) == ("gpu",)
    only_gpus = replace(cluster, partitions=cluster.partitions[:1])
    assert pool_partitions(only_gpus, None) == ("gpu",)
    owners = {"1": "alice", "12": "alice"}
    assert pool_room_of(cluster, ("cpu",), owners).cpus(()) == 12 + 8 + 4
    assert pool_room_of(cluster, ("cpu",), {}).cpus(()) == 12
    assert pool_room_of(cluster, ("cpu",), owners).cpus({WorkerSize(8)}) == 8 + 8 + 4
    assert pool_room_of(cluster, ("cpu",), owners).cpus({WorkerSize(16)}) == 8 + 4
    # The component's CPUs come back with its job; the companion's could be another's.
    on_c0 = replace(cluster, jobs=(replace(companion, nodes=("c0",)), component))
    assert pool_room_of(on_c0, ("cpu",), owners).num_workers(WorkerSize(10)) == 2
    assert pool_room_of(cluster, ("cpu",), owners).num_workers(WorkerSize(10)) == 1


@pytest.mark.shows("a report to the daemon carries measured speeds, a grant a number, nodes and the reason")
@pytest.mark.parametrize(
    ("free", "sizes", "usable"),
    [
        ([30, 3, 3, 3], [8], 24),
        ([30, 3, 3, 3], [8, 3], 30 + 9),
        ([10], [6, 4], 10),
        ([10], [6], 6),
        ([7, -2], [8, 64], 0),
        ([7, 5], [], 12),
        ([], [4], 0),
        ([1024] * 3, [1000, 7], 3 * 1022),
    ],
)
def test_cpus_count_where_a_data_worker_fits(free: list[int], sizes: list[int], usable: int) -> None:
    assert usable_cpus(free, sizes) == usable


def test_without_jobs_the_pool_is_what_is_free() -> None:
    registry = Registry((), allocating=True)
    assert registry.observe(snapshot(job(1)), 100.0) == ()
    assert (registry.pool_cpus, registry.problem) == (32, "")


def test_a_pool_of_crumbs_is_none_for_large_data_workers() -> None:
    nodes = tuple(node(f"c{number}", "cpu", 3) for number in range(10))
    registry = Registry((), allocating=True)
    registry.observe(replace(snapshot(job(1), job(2)), nodes=nodes), 100.0)
    assert granted(registry, 1, 1, 200.0, cpus=4).limit == 0
    assert registry.pool_cpus == 0
    assert granted(registry, 2, 1, 202.0, cpus=3).limit == 8
    assert registry.pool_cpus == 30


def test_components_of_one_job_weigh_together() -> None:
    trainer = job(12, gpus=2, het=HetComponent(12, 0))
    second = job(13, gpus=2, het=HetComponent(12, 1))
    registry = Registry((), allocating=True)
    registry.observe(snapshot(trainer, second, job(14, gpus=0)), 100.0)
    granted(registry, 12, 1, 100.0)
    granted(registry, 14, 1, 100.0)
    assert [registry.jobs[name].weight for name in ("12", "14")] == [4.0, 1.0]


def test_a_store_keeps_what_it_is_given(tmp_path: Path) -> None:
    registry = Registry((), allocating=True)
    registry.observe(snapshot(job(1), job(2, gpus=2)), 100.0)
    granted(registry, 1, 1 << 60, 200.0)
    granted(registry, 2, 7, 202.0)
    directory = tmp_path / "state"
    with Store(directory) as store:
        store.save(dict(registry.jobs))
        assert remembered_jobs(directory) == list(registry.jobs.values())
        store.save({"1": None, "9": None})
    assert (directory / "daemon.sqlite").stat().st_mode & 0o777 == 0o600
    assert directory.stat().st_mode & 0o777 == 0o700
    with Store(directory) as store:
        assert store.jobs() == [registry.jobs["2"]]
    assert remembered_jobs(tmp_path / "nowhere") == []


def test_a_daemon_goes_on_counting_since_when_a_job_starves_and_has_what_it_has(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[tuple[float, float]] = []

    def noting(table: JobTable, pool: Pool, now_s: float) -> Allocation:
        seen.append((float(table.starved_s[0]), float(table.held_s[0])))
        return allocation(np.zeros(len(table), np.int64))

    def life(store: Store, now_s: float) -> None:
        registry = Registry(store.jobs(), allocating=True, policy=noting, times=store.times())
        registry.observe(snapshot(job(1), cpus=0), now_s)
        for number in range(3):
            registry.report(ALICE, demand(1), int(1e9 * now_s) + number, now_s + 2 * number)
        store.save({name: registry.jobs[name] for name in registry.touched}, times=registry.times(registry.touched))

    with Store(tmp_path) as store:
        life(store, 100.0)
        assert store.times() == {"1": Times(100.0, 100.0)}
        life(store, 500.0)
        assert store.times() == {"1": Times(100.0, 100.0)}
    assert seen[0] == (0.0, np.inf)
    assert seen[-1] == (400.0, 400.0)
    database = sqlite3.connect(tmp_path / "daemon.sqlite")
    with database:
        database.execute("update times set starved_s = 'x', changed_s = 9e999")
        database.execute("insert into times values ('7', 1.0, 1.0)")  # of no job
    database.close()
    with Store(tmp_path) as store:
        assert store.times() == {"1": Times()}
        store.save({"1": None})
        assert store.times() == {}
    assert "of 1 job a time that is kept is none: job='1'" in caplog.text


def test_a_store_that_cannot_be_used_is_one_clear_error(tmp_path: Path) -> None:
    with Store(tmp_path), pytest.raises(DaemonStateError, match=f"in use by the daemon with process id {os.getpid()}"):
        Store(tmp_path)
    (tmp_path / "daemon.sqlite").write_bytes(b"no database at all, but long enough to be looked at" * 100)
    with pytest.raises(DaemonStateError, match="If it is damaged, move it away"):
        Store(tmp_path)
    with pytest.raises(DaemonStateError, match="If it is damaged, move it away"):
        remembered_jobs(tmp_path)
    (tmp_path / "daemon.sqlite").unlink()
    database = sqlite3.connect(tmp_path / "daemon.sqlite")
    database.execute("create table other (x)")
    database.close()
    with pytest.raises(DaemonStateError, match=r"is another program's\. Give another --state-dir"):
        Store(tmp_path)
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "lock").symlink_to(tmp_path / "lock")
    with pytest.raises(DaemonStateError, match=r"cannot be opened: .*lock is a link, which is not followed"):
        Store(tmp_path / "linked")
    (tmp_path / "file").write_text("")
    with pytest.raises(DaemonStateError, match=r"cannot be opened: (Not a directory|File exists)"):
        Store(tmp_path / "file")
