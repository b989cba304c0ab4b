"""What nodes tell the site daemon of their GPUs: who may tell, who may see, and versions."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import msgspec
import pytest
from running_daemon import RunningDaemon, WaitUntil, answer_to_stranger

from hetstream.hetjob.errors import SiteError
from hetstream.hetjob.site.messages import (
    AskGpus,
    AskPolicy,
    AskStatus,
    GpuNow,
    RefuseGpus,
    ReportDemand,
    ReportGpus,
    SharingJobNow,
    SharingNow,
    ShowGpus,
    TakeGpus,
    decode_request,
    encode_request,
    new_request,
    version_of,
)
from hetstream.slurm_plugin.daemon.server import GpuReadings

COORDINATOR, ALICE, BOB = 990, 1000, 1001
GPU = GpuNow(
    0, "GPU-1a2b", 0.25, 1 << 30, True, ("7",), sharing=(SharingNow("8", 3.0, "it goes on"),), capacity_bytes=2 << 30,
    idle_share=0.75, jobs=(SharingJobNow("7", BOB, True, 1 << 20, 0, 0.1, 0.1), SharingJobNow("8", ALICE)),
)  # fmt: skip
REPORT = ReportGpus("g1", (GPU,))


def test_only_trusted_users_tell_and_a_job_tells_nothing_of_itself() -> None:
    readings = GpuReadings({COORDINATOR})
    refused = readings.report(ALICE, REPORT, 1.0)
    assert isinstance(refused, RefuseGpus)
    assert "--gpu-reporters=1000" in refused.reason
    for uid in (0, os.geteuid(), COORDINATOR):
        assert isinstance(readings.report(uid, REPORT, 1.0), TakeGpus)


def test_readings_are_shown_with_their_age_and_forgotten() -> None:
    readings = GpuReadings({COORDINATOR})
    readings.report(COORDINATOR, REPORT, 1.0)
    readings.report(COORDINATOR, ReportGpus("g2", ()), 9.0)
    shown = readings.show(COORDINATOR, "", {"7": 0.6}, 11.0)
    assert isinstance(shown, ShowGpus)
    assert [(node.node, node.age_s, node.gpus) for node in shown.nodes] == [("g1", 10.0, (GPU,)), ("g2", 2.0, ())]
    assert shown.wait_shares == {"7": 0.6}
    readings.report(COORDINATOR, ReportGpus("g2", ()), 700.0)
    later = readings.show(COORDINATOR, "", {}, 700.0)
    assert isinstance(later, ShowGpus)
    assert [node.node for node in later.nodes] == ["g2"]


def test_users_see_readings_where_slurm_hides_nothing_and_never_what_others_told_of_themselves() -> None:
    readings = GpuReadings()
    readings.report(0, REPORT, 1.0)
    shown = readings.show(ALICE, "", {"7": 0.6}, 2.0)
    assert isinstance(shown, ShowGpus)
    assert (len(shown.nodes), shown.wait_shares) == (1, {})
    assert [job.job for job in shown.nodes[0].gpus[0].jobs] == ["8"], "how others' jobs fare is for trusted users alone"
    seen_by_root = readings.show(0, "", {}, 2.0)
    assert isinstance(seen_by_root, ShowGpus)
    assert seen_by_root.nodes[0].gpus == (GPU,)
    hidden = readings.show(ALICE, "PrivateData=jobs shows each user another part of the cluster", {}, 2.0)
    assert isinstance(hidden, RefuseGpus)
    assert "PrivateData=jobs" in hidden.reason
    assert isinstance(readings.show(0, "PrivateData=jobs", {}, 2.0), ShowGpus)


def test_questions_say_the_version_that_has_them() -> None:
    questions = [AskStatus(), AskPolicy(), AskGpus(), REPORT]
    assert [version_of(question) for question in questions] == [1, 2, 3, 3]
    for question in questions:
        assert decode_request(encode_request(new_request(question, 1))).question == question
    old = msgspec.structs.replace(new_request(AskGpus(), 1), version=2)
    with pytest.raises(SiteError, match="a later version"):
        decode_request(encode_request(old))


@pytest.mark.parametrize(
    "change",
    [
        {"index": -1}, {"index": 64}, {"gpu": ""}, {"used_share": 1.5}, {"used_share": -0.1}, {"free_bytes": -1},
        {"closed": "x" * 257}, {"guaranteed": ["7"] * 33}, {"more": 1},
        {"idle_share": 1.5}, {"capacity_bytes": -1}, {"jobs": [{"job": "7"}]}, {"jobs": [{"job": "7", "uid": -1}]},
        {"jobs": [{"job": "7", "uid": 0, "batch_s": -1}]},
    ],
)  # fmt: skip
def test_readings_that_cannot_be_are_no_messages(change: dict[str, object]) -> None:
    request = msgspec.json.decode(encode_request(new_request(REPORT, 1)))
    request["question"]["gpus"][0] |= change
    with pytest.raises(SiteError):
        decode_request(msgspec.json.encode(request))


def test_a_real_daemon_takes_and_shows_them(local: RunningDaemon, wait_until: WaitUntil) -> None:
    with tempfile.TemporaryDirectory(prefix="hetstream-gpus-") as place:
        Path(place).chmod(0o755)
        local.address = f"unix:{place}/socket"
        local.start(wait_until)
        local.wait_for_reading(wait_until)
        assert isinstance(local.ask(REPORT), TakeGpus)
        local.ask(ReportDemand(1, 0, 0, 4, 8, 0.4))
        shown = local.ask(AskGpus())
        assert isinstance(shown, ShowGpus)
        assert shown.nodes[0].gpus == (GPU,)
        assert 0 <= shown.nodes[0].age_s < 60
        assert shown.wait_shares == {"1": 0.4}
        if os.geteuid() == 0:
            assert b"refuse_gpus" in answer_to_stranger(Path(place, "socket"), REPORT)
            assert b'"wait_shares":{}' in answer_to_stranger(Path(place, "socket"), AskGpus())
