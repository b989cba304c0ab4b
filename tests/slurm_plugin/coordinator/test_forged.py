"""Statistics that a job has made up, whatever they are: the coordinator goes on, and the guaranteed job is as alone."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import closing
from dataclasses import fields, replace

import pytest

from hetstream.base.typed_json import encode
from hetstream.hetjob.gpu.orders import FULL_SHARE, NO_LIMIT, GpuUse, JobClass, Order, Page, Statistics, make_orders
from hetstream.slurm_plugin.coordinator.decide import (
    VALID_NS,
    GpuState,
    Measurements,
    OrderDecision,
    SharingJob,
    decide_all,
)
from hetstream.slurm_plugin.coordinator.gpus import StatedGpu
from hetstream.slurm_plugin.coordinator.table import TABLE_VERSION, GpuTable, Who, gpu_row

MS = 1_000_000
GIB = 2**30
CAPACITY = 32 * GIB
GPUS = ("A", "B")
EXTREMES = (0, 1, 2, 1000, 2**31, 2**32, 2**53 + 1, 2**62, 2**63 - 1, -1, -(2**63))


@pytest.fixture
def page() -> Iterator[Page[Order]]:
    """As a process of a job has it: what does not fit into it would end the coordinator."""
    page, descriptor = make_orders()
    os.close(descriptor)
    with closing(page):
        yield page


def forged(source: random.Random, now_ns: int) -> Statistics:
    """Numbers at the borders of what a page has room for, and at those of what can be."""
    values = (*EXTREMES, now_ns, now_ns - 1, now_ns + 1, CAPACITY, CAPACITY - 1)
    record = Statistics(**{field.name: source.choice(values) for field in fields(Statistics)})
    if source.random() < 0.8:  # most of them could be
        record = replace(record, **{field.name: abs(getattr(record, field.name) + 1) - 1 for field in fields(record)})
        times = {name: min(now_ns, getattr(record, name)) for name in ("updated_ns", "boundary_ns")}
        record = replace(record, **times, is_idle=record.is_idle % 2)
    return record


class Node:
    """Two GPUs: an honest guaranteed job on the first one, or one that lies, and liars on both."""

    def __init__(self, guaranteed_lies: bool) -> None:
        self.now_ns = 10**15
        self.states = {gpu: GpuState() for gpu in GPUS}
        self.guaranteed_lies = guaranteed_lies
        self.honest = Statistics(updated_ns=self.now_ns)

    def step(self, source: random.Random) -> dict[str, dict[str, OrderDecision]]:
        self.now_ns += source.choice((1, 20, 100, 1900)) * MS
        made = self.honest.boundaries + 1
        busy = {"mini_batch_ns": 100 * MS, "gap_ns": 40 * MS, "is_idle": 0, "peak_bytes": 10 * GIB}
        self.honest = Statistics(self.now_ns, made, self.now_ns - 50 * MS, **busy)
        record = forged(source, self.now_ns) if self.guaranteed_lies else self.honest
        seen = {}
        for gpu in GPUS:
            jobs = [SharingJob("g", JobClass.GUARANTEED, 0, record, 11 * GIB)] if gpu == "A" else []
            for name, gang in ((f"ranks on {gpu}", "job"), (f"one on {gpu}", f"other on {gpu}")):
                counted = source.choice((None, 0, GIB, CAPACITY))
                liar = forged(source, self.now_ns)
                jobs.append(SharingJob(name, JobClass.OPPORTUNISTIC, 0, liar, counted, gang))
            seen[gpu] = Measurements(CAPACITY, tuple(jobs))
        self.states, decisions = decide_all(self.states, seen, self.now_ns)
        who = {job.name: Who(job.name, 1000, 1) for measured in seen.values() for job in measured.jobs}
        rows = [
            gpu_row(StatedGpu(gpu, CAPACITY), self.states[gpu], seen[gpu], decisions[gpu], who, (), self.now_ns)
            for gpu in GPUS
        ]
        assert encode(GpuTable(TABLE_VERSION, "node", 0.0, tuple(rows)))
        return decisions


@pytest.mark.shows("forged statistics and pages harm nobody")
@pytest.mark.parametrize("guaranteed_lies", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_no_statistics_end_the_coordinator_or_bind_the_guaranteed_job(
    seed: int, guaranteed_lies: bool, page: Page[Order]
) -> None:
    source, node = random.Random(seed), Node(guaranteed_lies)
    for _ in range(150):
        decisions = node.step(source)
        for gpu in GPUS:
            for name, decision in decisions[gpu].items():
                page.write(decision.order)
                assert page.read() == decision.order
                if name == "g":
                    assert decision.order == Order(node.now_ns + VALID_NS, GpuUse.RUN, NO_LIMIT, FULL_SHARE)
                else:
                    assert 0 <= decision.order.limit_bytes <= CAPACITY
            limits = [decision.order.limit_bytes for name, decision in decisions[gpu].items() if name != "g"]
            assert sum(limits) <= CAPACITY
            assert all(decision.reason for decision in decisions[gpu].values())
