"""Jobs of both versions of the protocol at one daemon, and a daemon whose clock jumps."""

from __future__ import annotations

import json
import socket
import time
from typing import Any

import pytest
from running_daemon import RunningDaemon, WaitUntil

from hetstream.hetjob.ports import Measured, RemainingWork, SpeedPoint
from hetstream.hetjob.site.messages import LENGTH, AskPolicy, GrantLimit, ReportDemand, ShowPolicy, decode_answer
from hetstream.slurm_plugin.client.model import Gres, Job, Node, Partition, Snapshot
from hetstream.slurm_plugin.daemon.registry import Registry

DAY_S = 86400.0
KEY = "ab" * 32
# What a job of version 1 knows of an answer; it refuses one with anything else.
KEYS_OF_VERSION_1 = {"type", "limit", "reason", "next_s", "companions", "read_age_s"}
POINTS = (SpeedPoint(8, 1, 1.0), SpeedPoint(8, 4, 4.0))
MEASURED = Measured(2.0, 4.0, POINTS, remaining=RemainingWork(1000.0, 0.1, "directive"))


def answer_to_version_1(daemon: RunningDaemon, **report: Any) -> bytes:
    """As a job master of before sends it, byte by byte."""
    question = {"type": "report_demand", "wait_share": 0.4, **report}
    asked = {"version": 1, "sent_ns": time.time_ns(), "reply_key": KEY, "question": question}
    text = json.dumps(asked).encode()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(30)
        connection.connect(str(daemon.where.path))  # type: ignore[union-attr]
        connection.sendall(LENGTH.pack(len(text)) + text)
        data = b""
        while part := connection.recv(65536):
            data += part
    return data[LENGTH.size :]


@pytest.mark.shows("a daemon of protocol 1 works with jobs of 2, and the other way round")
def test_a_daemon_of_version_2_divides_among_jobs_of_both(local: RunningDaemon, wait_until: WaitUntil) -> None:
    local.start(wait_until)
    local.wait_for_reading(wait_until)
    old = {"job_id": 1, "minimum": 0, "current": 0, "wanted": 4, "cpus": 8}
    data = answer_to_version_1(local, **old)
    grant = decode_answer(data, KEY)
    assert isinstance(grant, GrantLimit)
    assert grant.limit == 4
    assert json.loads(data[32:]).keys() <= KEYS_OF_VERSION_1
    new = local.ask(ReportDemand(2, 0, 0, 4, 8, 0.4, MEASURED))
    assert isinstance(new, GrantLimit)
    # The old one has measured nothing that it could tell: it counts by the machines' ratio, and goes on.
    shown = local.ask(AskPolicy(num_decisions=0))
    assert isinstance(shown, ShowPolicy)
    assert [(job.job, job.speed is None, job.remaining_source) for job in shown.jobs] == [
        ("1", True, ""),
        ("2", False, "directive"),
    ]
    assert shown.problem == ""
    # Its job master starts again as one of version 2, and the other way round.
    again = local.ask(ReportDemand(1, 0, 0, 4, 8, 0.4, MEASURED))
    assert isinstance(again, GrantLimit)
    assert isinstance(decode_answer(answer_to_version_1(local, **{**old, "job_id": 2}), KEY), GrantLimit)
    shown = local.ask(AskPolicy(num_decisions=0))
    assert isinstance(shown, ShowPolicy)
    assert [job.speed is None for job in shown.jobs] == [False, True]
    assert local.end() == 0


def running(*job_ids: int) -> Snapshot:
    jobs = (
        Job(
            number, "train", "alice", ("gpu",), "RUNNING", "None", 1, 2, 1, 2, 1000, gres_per_node=(Gres("gpu", "", 1),)
        )
        for number in job_ids
    )
    nodes = (Node("cpu0", frozenset({"IDLE"}), ("cpu",), 32, 0, 64000, 0),)
    return Snapshot(0.0, "22.05.8", "test", tuple(jobs), nodes, (Partition("cpu", ("cpu0",)),))


@pytest.mark.shows("clocks that jump are found in exports, in the daemon and in the history")
@pytest.mark.parametrize("jump_s", [-DAY_S, -3600.0, 3600.0, 400 * DAY_S], ids=["day-", "hour-", "hour+", "year+"])
def test_a_clock_that_jumps_takes_no_data_worker_from_who_reports(jump_s: float) -> None:
    registry, now_s, sent_ns = Registry((), allocating=True), 1e9, 0

    def report(job_id: int, current: int) -> int | None:
        nonlocal sent_ns
        sent_ns += 1  # of another clock: the job's own
        answer, _ = registry.report({"alice"}, ReportDemand(job_id, 0, current, 8, 4, 0.4, MEASURED), sent_ns, now_s)
        assert isinstance(answer, GrantLimit), answer
        assert answer.read_age_s is not None
        assert answer.read_age_s >= 0
        assert answer.next_s > 0
        return answer.limit

    registry.observe(running(1, 2), now_s)
    for _ in range(3):
        for job_id in (1, 2):
            report(job_id, 0)
            now_s += 10.0
    before = [report(1, 0), report(2, 0)]
    now_s += jump_s
    after = []
    for _ in range(3):
        after.append([report(1, 0), report(2, 0)])
        registry.observe(running(1, 2), now_s)
        now_s += 10.0
    assert before == [4, 4]
    assert after == [[4, 4]] * 3
    assert registry.problem == ""
    now_s -= jump_s  # and back
    assert [report(1, 0), report(2, 0)] == [4, 4]
    assert all(status.age_s >= 0 for status in registry.status(None, now_s))
