"""`hetstream site policy` and a real daemon: who may set what, what is told of it, and what is remembered."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from recorded import Recorded
from running_daemon import RunningDaemon, answer_to_stranger

from hetstream.base.errors import UsageError
from hetstream.hetjob.ports import Measured, RemainingWork, SpeedPoint
from hetstream.hetjob.site.messages import (
    AskPolicy,
    DecisionTaken,
    GrantLimit,
    JobNow,
    RefusePolicy,
    ReportDemand,
    SetPolicy,
    ShowPolicy,
)
from hetstream.slurm_plugin.cli import build_parser, main
from hetstream.slurm_plugin.cli.daemon import changed
from hetstream.slurm_plugin.daemon.registry import Registered
from hetstream.slurm_plugin.daemon.settings import PolicySettings, decode_settings
from hetstream.slurm_plugin.daemon.store import MAX_DECISIONS, STATE_FILE, Store, remembered_jobs, remembered_settings
from hetstream.slurm_plugin.errors import DaemonStateError, PolicyError
from hetstream.slurm_plugin.policy.policies import POLICIES
from hetstream.slurm_plugin.render.tables import remaining_words

WaitUntil = Callable[..., None]


def report(job_id: int, wanted: int, points: tuple[SpeedPoint, ...] = (), steps: float = 1000.0) -> ReportDemand:
    measured = Measured(1.0, 10.0, points, remaining=RemainingWork(steps, 0.0, "directive", 2 * steps))
    return ReportDemand(job_id, 0, 0, wanted, 8, 0.4, measured if points else None)


def limit(daemon: RunningDaemon, question: ReportDemand) -> int | None:
    answer = daemon.ask(question)
    assert isinstance(answer, GrantLimit), answer
    return answer.limit


def policy(slurm: Recorded, daemon: RunningDaemon, words: str) -> subprocess.CompletedProcess[str]:
    done: subprocess.CompletedProcess[str] = slurm.run(f"site policy {words} --address {daemon.address}")
    return done


@pytest.mark.shows("in observe mode a policy's decisions are kept and told to nobody")
def test_a_policy_is_shown_set_and_explained_and_outlives_the_daemon(
    local: RunningDaemon, wait_until: WaitUntil, slurm: Recorded
) -> None:
    """Two jobs want all 88 CPUs, 11 data workers of 8; job 2 has one GPU and little work left."""
    local.start(wait_until)
    local.wait_for_reading(wait_until)
    one = report(1, 11, (SpeedPoint(8, 11, 10.0),), steps=100_000.0)
    two = report(2, 11, (SpeedPoint(8, 11, 10.0),), steps=100.0)
    wait_until(lambda: (limit(local, one), limit(local, two)) == (9, 2))
    shown = json.loads(policy(slurm, local, "--json").stdout)
    assert shown["summary"]["settings"]["policy"] == "share"
    assert {row["job"]: (row["limit"], row["remaining_source"]) for row in shown["jobs"]} == {
        "1": (9, "directive"), "2": (2, "directive"),
    }  # fmt: skip

    planned = policy(slurm, local, "srtf --floor 0 --dry-run")
    assert planned.returncode == 0, planned.stderr
    assert "policy srtf, if it were set: 88 CPUs; jobs are told" in planned.stdout
    assert [limit(local, one), limit(local, two)] == [9, 2]
    assert local.log.count("policy=srtf: set") == 0

    done = json.loads(policy(slurm, local, "srtf --floor 0 --json").stdout)
    assert {row["job"]: (row["before"], row["after"]) for row in done["decisions"]} == {"1": (9, 0), "2": (2, 11)}
    assert [limit(local, one), limit(local, two)] == [0, 11]
    assert "policy=srtf: set" in local.log

    local.kill()
    local.start(wait_until)
    local.wait_for_reading(wait_until)
    assert remembered_settings(local.directory / "state") == PolicySettings("srtf", 0.0)
    story = json.loads(policy(slurm, local, "--job 2 --json").stdout)
    assert story["decisions"][0]["policy"] == "srtf"
    assert [(row["before"], row["after"]) for row in story["decisions"]] == [(2, 11), (None, 2)]
    text = policy(slurm, local, "--job 2").stdout
    assert "remaining work: 0:00:10 at full speed by --total-steps of the script" in text
    assert "all that it wants: 11" in text
    assert "2 of 11: 88 CPUs are shared by 2 jobs, its weight is 1" in text

    done = policy(slurm, local, "srtf --user-cap 16 --tenant-cap nobody=8 --network-gbps 25")
    assert "network: data workers may use 50% of each node's 25 Gb/s" in done.stdout
    assert "caps: user each at most 16 CPUs; tenant nobody at most 8 CPUs" in done.stdout
    wait_until(lambda: (limit(local, one), limit(local, two)) == (0, 2))
    assert "its user may have 16 CPUs" in policy(slurm, local, "--job 2").stdout
    assert "caps: none" in policy(slurm, local, "srtf --user-cap none --tenant-cap nobody=none").stdout

    for words, code, said in (
        ("srtf --floor 7", 2, "floor"),
        ("srtf --network-share 7", 2, "network_share"),
        ("srtf --network-gbps nan", 2, "--network-gbps=nan: must be a finite number"),
        ("srtf --user-cap all", 2, "--user-cap=all: must be CPUS, NAME=CPUS, NAME=none or none"),
        ("--job 9", 1, "knows nothing of job 9"),
        ("--job 9+1", 2, "is no job id"),
        ("srtf --job 2", 2, "--job=2: a policy is set for all jobs"),
        ("--floor 0.2", 2, "--floor: name the policy that it is for"),
        ("--last 5000", 2, "--last=5000: must be 0 to 1000"),
    ):
        done = policy(slurm, local, words)
        assert done.returncode == code, (words, done.stderr)
        assert said in done.stderr
    assert local.end() == 0
    assert policy(slurm, local, "").returncode == 1


@pytest.mark.parametrize(
    ("job", "said"),
    [
        ({"claimed_s": 7200.0, "claimed_sigma": 0.2, "remaining_s": 7200.0, "remaining_source": "integration"},
         "remaining work: 2:00:00 at full speed by the callback for its framework, right within a factor of 1.2 two "
         "times of three"),
        ({"claimed_s": 60.0, "claimed_sigma": 0.0, "remaining_s": 7200.0, "remaining_source": "directive"},
         "remaining work: 0:01:00 at full speed by --total-steps of the script; believed: 2:00:00, as it is still "
         "there after what it claimed before"),
        ({"claimed_s": 1e30, "claimed_sigma": 0.0, "remaining_s": 3600.0, "remaining_source": "directive"},
         "remaining work: 11574074 days, 1:46:40 at full speed by --total-steps of the script; believed: 1:00:00, when "
         "its time limit ends it"),
        ({}, "remaining work: nobody says how much, so it counts as the median of the others"),
    ],
)  # fmt: skip
def test_what_is_left_is_told_with_who_says_so(job: dict[str, float | str], said: str) -> None:
    empty = {"remaining_s": None, "remaining_source": "", "speed": None, "limit": None}
    values = {"job": "1", "user": "u", "tenant": "", "minimum": 0, "wanted": 1, "current": 0, "cpus": 4, "gpus": 1.0}
    assert remaining_words(msgspec.convert({**values, **empty, "reason": "", **job}, JobNow)) == said


@pytest.mark.shows("in observe mode a policy's decisions are kept and told to nobody")
def test_a_daemon_that_observes_says_what_it_would_have_done(
    local: RunningDaemon, wait_until: WaitUntil, slurm: Recorded
) -> None:
    local.words = ()
    local.start(wait_until)
    local.wait_for_reading(wait_until)
    assert limit(local, report(1, 20)) is None
    answer = local.ask(AskPolicy())
    assert isinstance(answer, ShowPolicy)
    assert [(one.job, one.after, one.is_told) for one in answer.decisions] == [("1", 11, False)]
    assert "job=1 would-be-limit=11 before=None: 11 of 20" in local.log
    assert "jobs are not told: the daemon observes" in policy(slurm, local, "").stdout
    assert local.end() == 0


# Asks as another user, and prints the answer behind its HMAC.
@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
def test_a_stranger_sets_nothing_and_sees_his_own_jobs(local: RunningDaemon, wait_until: WaitUntil) -> None:
    with tempfile.TemporaryDirectory(prefix="hetstream-policy-") as place:
        Path(place).chmod(0o755)
        local.address = f"unix:{place}/socket"
        local.start(wait_until)
        local.wait_for_reading(wait_until)
        assert limit(local, report(1, 20)) == 11

        def as_stranger(question: AskPolicy | SetPolicy) -> bytes:
            return answer_to_stranger(Path(place, "socket"), question)

        said = as_stranger(SetPolicy('{"policy":"srtf"}'))
        assert b"only root and the daemon's own user" in said
        seen = msgspec.json.decode(as_stranger(AskPolicy()))
        assert (seen["jobs"], seen["decisions"]) == ([], [])
        assert local.ask(SetPolicy('{"policy":"best"}')) == RefusePolicy(
            f"no policy 'best': there are {', '.join(POLICIES)}"
        )
        answer = local.ask(SetPolicy('{"polcy":"srtf"}'))
        assert isinstance(answer, RefusePolicy)
        assert "not the settings of a policy" in answer.reason
        assert local.end() == 0


def decision(number: int) -> DecisionTaken:
    return DecisionTaken(float(number), str(number % 7), "alice", None, number, "share", True, "why")


def test_decisions_are_bounded_and_told_by_job_and_user(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        store.save({}, [decision(number) for number in range(MAX_DECISIONS + 50)])
        rows = store.decisions(None, "", 2 * MAX_DECISIONS)
        assert len(rows) == MAX_DECISIONS
        assert rows[0] == decision(MAX_DECISIONS + 49)
        assert store.decisions(None, "", 1) == rows[:1]
        assert {one.job for one in store.decisions(("alice", "1000"), "3", 100)} == {"3"}
        assert store.decisions(("bob",), "", 100) == ()


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("--user-cap=²", "--user-cap=²: must be CPUS"),
        (f"--user-cap={'9' * 5000}", "4,744 more characters): must be CPUS"),
        (f"--user-cap={'9' * 10}", "Expected `int` <= 1073741824"),
        ("--tenant-cap=x\udcff=5", "all of them printable"),
        ("--tenant-cap=a\nb=5", "all of them printable"),
        (f"--tenant-cap={'x' * 257}=5", "the name must have at most 256 characters"),
        ("--floor=inf", "--floor=inf: must be a finite number"),
    ],
)
def test_settings_that_no_daemon_could_read_are_refused(word: str, said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        changed(PolicySettings(), build_parser("site", "policy").parse_args(["site", "policy", "srtf", word]))


@pytest.mark.parametrize("job", ["²", "9" * 20, "-", "1+0", ""])
def test_what_is_no_job_id_is_not_asked_for(job: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["site", "policy", "--address", "unix:/nowhere/daemon.sock", f"--job={job}"]) == 2
    assert "is no job id: write the number alone" in capsys.readouterr().err


def test_settings_of_no_policy_are_refused(tmp_path: Path) -> None:
    for text in ("{", '{"policy":"none"}', '{"floor":2}', '{"user_caps":{"a":-1}}', '{"more":1}'):
        with pytest.raises(PolicyError):
            decode_settings(text)
    with Store(tmp_path) as store:
        assert store.settings() == PolicySettings()
        store.save_settings(msgspec.structs.replace(PolicySettings(), policy="of-another-release"))
        with pytest.raises(DaemonStateError, match="no policy 'of-another-release'"):
            store.settings()
    with pytest.raises(DaemonStateError, match="set another policy, or move the file away"):
        remembered_settings(tmp_path)


def damage(directory: Path, statement: str) -> None:
    database = sqlite3.connect(directory / STATE_FILE)
    with database:
        database.execute(statement)
    database.close()


@pytest.mark.parametrize(
    "change",
    ["seen_s = 'x'", "sent_ns = 1e300", "weight = 9e999", "max_workers = 'all'", "user = x'00'", "report = '[]'"],
)
def test_a_job_in_the_file_that_can_be_none_is_one_clear_error(change: str, tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        store.save({"1": Registered("alice", report(1, 4), 1, 2.0)})
    damage(tmp_path, f"update jobs set {change}")
    with Store(tmp_path) as store, pytest.raises(DaemonStateError, match=r"cannot be used: Expected .* move it away"):
        store.jobs()
    with pytest.raises(DaemonStateError, match=r"cannot be used: Expected .* move it away"):
        remembered_jobs(tmp_path)


@pytest.mark.parametrize(
    "change", ["time_s = 9e999", "job = x'ff'", "after = 'many'", "is_told = 'yes'", "reason = x''"]
)
def test_a_decision_in_the_file_that_can_be_none_is_left_out_and_said_once(
    change: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Store(tmp_path) as store:
        store.save({}, [decision(1), decision(2)])
        damage(tmp_path, f"update decisions set {change} where number = 2")
        for _ in range(2):
            assert store.decisions(None, "", 10) == (decision(1),)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "a decision that is kept there is none, and is not shown: Expected" in caplog.text


def test_reports_of_both_versions_are_kept(tmp_path: Path) -> None:
    old, new = report(1, 4), report(2, 4, (SpeedPoint(8, 2, 3.0),))
    with Store(tmp_path) as store:
        jobs = [replace(Registered("alice", one, 1, 2.0), limit=3) for one in (old, new)]
        store.save({one.job: one for one in jobs})
        assert store.jobs() == jobs
