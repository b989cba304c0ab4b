"""Quotas on a Slurm in memory: who is released, moved, and upgraded; death at each point; and what users may try."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec.structs import replace as changed
from tenant_slurm import GPU, NOW_S, TenantSlurm, names

from hetstream.hetjob.errors import SlurmCommandError
from hetstream.hetjob.site.messages import ShowGpus
from hetstream.mpi_dataworkers.process.faults import FAULTS
from hetstream.slurm_plugin.cli.packing_arguments import upgrade_in_words
from hetstream.slurm_plugin.client.model import Gres, Reservation, Snapshot
from hetstream.slurm_plugin.errors import QuotaError
from hetstream.slurm_plugin.packing.jobs import served_jobs
from hetstream.slurm_plugin.packing.notes import read_record
from hetstream.slurm_plugin.packing.packer import Packer
from hetstream.slurm_plugin.packing.quota import Quotas
from hetstream.slurm_plugin.packing.quota_file import QuotaFile
from hetstream.slurm_plugin.packing.state import PackingEvent, PackingRules

WISH = "hetstream:class=guaranteed hetstream:opportunistic-after=60"
RULES = PackingRules(settle_s=0.0)


class Site:
    """A Slurm with tenants, and a packer that can be replaced by another one at any time."""

    def __init__(self, slurm: TenantSlurm, **tenants: int) -> None:
        self.slurm = slurm
        self.quotas = Quotas(tenants, 600.0, ("gpu",))
        self.events: list[PackingEvent] = []
        self.restart()

    def restart(self, qos: tuple[str, ...] = ()) -> None:
        self.packer = Packer(
            self.slurm, lambda: self.readings(), {"opp"}, self.events.append, acting=True, quotas=lambda _: self.quotas,
            qos=qos, rules=RULES, clock=self.slurm.clock,
        )  # fmt: skip

    def readings(self) -> ShowGpus:
        return ShowGpus((), {}) if self.slurm.silent else self.slurm.readings()

    def look(self, after_s: float = 10.0) -> list[str]:
        """One look, some seconds later, and then Slurm starts what it was let start; what the packer says."""
        self.slurm.now_s += after_s
        self.events.clear()
        self.packer.step()
        self.slurm.start_all()
        self.slurm.run_prologs()
        return [f"{event.event} {event.job}" for event in self.events]

    def looks_until(self, event: str, most: int = 12) -> None:
        for _ in range(most):
            if event in self.look():
                return
        pytest.fail(f"{event} did not come: {self.events} {self.slurm.calls}")

    def is_guaranteed(self, number: int) -> bool:
        """By Slurm's books, the node's word and the packer's note, which agree."""
        noted = "hetstream:upgraded=" in self.slurm.admin_comments[number]
        assert not noted or number in self.slurm.upgraded
        assert not noted or self.slurm.holders(number)
        return noted


@pytest.fixture
def site() -> Iterator[Site]:
    yield Site(TenantSlurm(), a=1, b=1)
    FAULTS.clear()


@pytest.fixture
def sharing(site: Site) -> Site:
    """Job 2 shares GPU 0 with job 1 of the same tenant, and would rather be guaranteed."""
    site.slurm.ask(1)
    site.look()
    site.slurm.ask(2, comment=WISH, submit_s=site.slurm.now_s)
    site.looks_until("moved 2")
    site.looks_until("started 2")
    return site


def test_the_line_is_released_by_quota(site: Site) -> None:
    for number, account in ((1, "a"), (2, "a"), (3, "b"), (4, "nobody"), (5, "")):
        site.slurm.ask(number, account)
    assert site.look() == ["granted 1", "granted 3", "offered 2", "offered 4", "offered 5"]
    assert [call for call in site.slurm.calls if call[0] == "release"] == [("release", "1"), ("release", "3")]
    reasons = {event.job: event.reason for event in site.events}
    assert "tenant a has 0 of its 1 GPU left" in reasons["2"]
    assert "tenant nobody has a quota of 0: it can never be guaranteed" in reasons["4"]
    assert "(no account)" in reasons["5"]
    site.slurm.end(1)
    assert site.look() == ["granted 2"]


@pytest.mark.shows("quotas of tenants hold; upgrades come before starts, and gangs are started as a whole")
def test_a_job_that_waits_long_is_told_that_it_could_share(site: Site) -> None:
    site.slurm.ask(1)
    site.slurm.ask(2, submit_s=NOW_S)
    site.look()
    assert site.look(601) == ["offered 2"]
    assert "with --opportunistic-after" in site.events[0].reason


@pytest.mark.shows("quotas of tenants hold; upgrades come before starts, and gangs are started as a whole")
def test_a_partial_gang_keeps_gpus_and_opportunistic_jobs_use_them(site: Site) -> None:
    site.quotas = Quotas({"a": 2, "b": 1}, 600.0, ("gpu",))
    site.slurm.ask(1, "b")
    site.look()
    site.slurm.ask(2, "a", gres_per_node=(replace(site.slurm.jobs[1].gres_per_node[0], count=2),))
    site.slurm.ask(3, "b", submit_s=NOW_S)
    site.slurm.submit(4)
    assert {"reserved 2", "waits 3", "placed 4"} <= {*site.look()}
    site.slurm.end(1)
    assert "granted 2" in site.look()


def test_what_somebody_holds_waits_outside_the_line(site: Site) -> None:
    site.slurm.ask(1, comment="hetstream:hold")
    site.slurm.ask(2, reason="JobHeldAdmin")
    site.slurm.submit(3, "hetstream:class=guaranteed hetstream:hold", account="a")
    site.slurm.ask(4)
    assert set(site.look()) == {"waits 1", "waits 2", "waits 3", "granted 4"}
    reasons = {event.job: event.reason for event in site.events}
    assert reasons["1"].endswith("scontrol release 1")
    assert reasons["2"].endswith("scontrol uhold 2")
    assert reasons["3"].endswith("scontrol release 3")


def test_who_requeues_and_holds_a_guaranteed_job_holds_it(site: Site) -> None:
    """Of that no guard hears, so the packer writes the word that his release takes away: once for each start."""
    slurm = site.slurm
    for start in (1, 2):
        if start == 1:
            slurm.ask(1, comment="mine")
        else:  # as the guard answers his release
            slurm.jobs[1] = replace(slurm.jobs[1], comment=slurm.jobs[1].comment.replace(" hetstream:hold", "  "))
        assert site.look() == ["granted 1"]
        slurm.requeue_held("1")
        del slurm.gpus_of[1]
        assert site.look() == ["held 1", "waits 1"]
        assert slurm.jobs[1].comment == f"mine hetstream:held-at={start} hetstream:hold"
        assert site.look() == ["waits 1"]
        assert site.events[0].reason.endswith("scontrol release 1")
    # His hold of a job that Slurm itself has requeued is the guard's to hear, and he lets it go at once.
    slurm.jobs[1] = replace(slurm.jobs[1], num_restarts=9, comment="mine", reason="JobHeldUser")
    assert site.look() == ["granted 1"]


def test_what_cannot_share_waits_and_says_why(site: Site) -> None:
    site.slurm.ask(1)
    three = replace(site.slurm.jobs[1].gres_per_node[0], count=3)
    site.slurm.ask(2, comment=WISH, gres_per_node=(), gres_per_job=(three,), num_nodes=2)
    site.slurm.ask(3, comment=WISH, cpus_per_gpu=4)
    site.slurm.ask(4, comment=WISH, reason="JobHeldAdmin")
    site.slurm.ask(5, comment=WISH, dependency="afterok:1")
    site.slurm.ask(6, comment=WISH, reason="launch failed requeued held")
    assert site.look(700) == ["granted 1", "waits 2", "waits 3", "waits 4", "waits 5", "waits 6"]
    reasons = [event.reason for event in site.events]
    for text, reason in zip(
        ("3 GPUs on 2 nodes", "--cpus-per-gpu", "operator", "afterok", "slurmd's log"), reasons[1:], strict=True
    ):
        assert text in reason
    assert [call[1] for call in site.slurm.calls if call[0] == "update"] == ["1"]


def test_a_job_with_several_gpus_of_a_node_shares_as_many_and_is_upgraded_on_all() -> None:
    site = Site(TenantSlurm(num_gpus=2), a=2)
    site.slurm.ask(1)
    site.look()
    two = replace(site.slurm.jobs[1].gres_per_node[0], count=2)
    site.slurm.ask(2, comment=WISH, submit_s=site.slurm.now_s, gres_per_node=(two,))
    site.looks_until("moved 2")
    assert site.slurm.jobs[2].comment == f"{WISH} hetstream:gpus=2"
    site.looks_until("started 2")
    assert {gres.type for gres in site.slurm.given[2]} == {"p0", "p1"}
    site.slurm.end(1)
    site.looks_until("upgraded 2")
    assert sorted(site.slurm.holders(2)) == [("g1", 0), ("g1", 1)]
    assert site.is_guaranteed(2)


def test_a_job_is_upgraded_where_it_runs_when_quota_is_free(sharing: Site) -> None:
    slurm = sharing.slurm
    calls = [call for call in slurm.calls if call[1] == "2"]
    assert calls[0] == ("update", "2", "Partition=opp", "Requeue=1", "TresPerNode=")
    assert slurm.jobs[2].gres_per_node[0].name == "opp"
    assert slurm.given[2] == slurm.jobs[2].gres_per_node
    spot = slurm.jobs[2].gres_per_node[0].type
    slurm.ask(3, submit_s=slurm.now_s)  # another of the tenant's, which comes after it
    sharing.look()
    slurm.end(1)
    slurm.num_gpus = 2
    sharing.looks_until("upgraded 2")
    assert sharing.is_guaranteed(2)
    assert names(slurm.holders(2)) == [f"g1:{spot[1:]}"], "GPUs of others are kept, too"
    assert slurm.jobs[2].num_restarts == 0
    assert sharing.look() == []
    assert slurm.jobs[3].priority == 0, "a quota of one GPU is for one job"
    # It ends, and with it what kept its GPU.
    slurm.end(2)
    assert sharing.look() == ["granted 3"]
    assert not [job for job in slurm.jobs.values() if "holds" in job.comment]


@pytest.mark.parametrize(
    "point",
    [
        "packer.kept",
        "packer.dropped",
        "packer.began",
        "packer.upgraded",
        "packer.noted",
        "packer.moved",
        "packer.granted",
    ],
)
def test_a_packer_that_dies_is_followed_by_one_that_goes_on(site: Site, tmp_path: Path, point: str) -> None:
    slurm = site.slurm
    FAULTS.request(f"{point}:1:full:{tmp_path}/marker")

    def go_on(after_s: float = 10.0) -> None:
        try:
            site.look(after_s)
        except OSError:
            slurm.start_all()
            slurm.run_prologs()
            site.restart()

    slurm.ask(1)
    go_on()
    slurm.ask(2, comment=WISH, submit_s=slurm.now_s)
    for _ in range(12):
        go_on()
    assert "opp" in slurm.jobs[2].partitions
    slurm.end(1)
    for _ in range(12):
        go_on(31)
    assert (tmp_path / "marker").exists(), "nobody died"
    assert site.is_guaranteed(2)
    assert len(slurm.holders(2)) == 1
    assert slurm.jobs[2].num_restarts == 0


@pytest.mark.shows("quotas of tenants hold; upgrades come before starts, and gangs are started as a whole")
def test_a_gang_is_held_as_a_whole_before_any_of_its_nodes_hears_of_it() -> None:
    site = Site(TenantSlurm(num_nodes=2, num_gpus=2), a=2)
    slurm = site.slurm
    slurm.submit(7, WISH, num_nodes=2, num_cpus=8, account="a")
    site.quotas = Quotas({}, 600.0, ("gpu",))
    site.looks_until("started 7")
    # Somebody has all GPUs of the second node but the one it shares, and takes that one, too.
    index = int(slurm.jobs[7].gres_per_node[0].type[1:])
    slurm.gpus_of[1] = (("g2", index),)
    slurm.jobs[1] = replace(slurm.jobs[7], job_id=1, partitions=("gpu",), comment="", nodes=("g2",), num_nodes=1)
    slurm.admin_comments[1] = "hetstream:guarded"
    site.quotas = Quotas({"a": 4}, 600.0, ("gpu",))
    for _ in range(5):
        site.look()
    assert slurm.upgraded == set()
    slurm.end(1)
    site.looks_until("upgraded 7", 60)
    assert names(slurm.holders(7)) == [f"g1:{index}", f"g2:{index}"]


def test_nodes_that_do_not_hear_are_told_again_and_then_left_alone(sharing: Site) -> None:
    slurm = sharing.slurm
    slurm.end(1)
    slurm.deaf = {"g1"}
    for _ in range(20):
        sharing.look(31)
        if any(event.event == "not upgraded" for event in sharing.events):
            break
    else:
        pytest.fail("it goes on for ever")
    assert "hetstream-prolog" in sharing.events[-1].reason
    sharing.look()
    assert slurm.holders(2) == [], "it keeps a GPU that it does not get"
    slurm.deaf = set()
    sharing.looks_until("upgraded 2", 60)


@pytest.mark.parametrize("is_submitted", [False, True])
def test_a_node_that_takes_no_more_jobs_ends_the_upgrade(sharing: Site, is_submitted: bool) -> None:
    slurm = sharing.slurm
    slurm.end(1)
    sharing.look()
    assert slurm.holders(2)
    if is_submitted:
        for _ in range(3):  # Slurm starts nothing meanwhile
            slurm.now_s += 10
            sharing.packer.step()
        assert any(job.comment.startswith("hetstream:upgrade=2:") for job in slurm.jobs.values())
    slurm.drained.add("g1")
    for _ in range(20):
        sharing.look(61)
        if not any(job.name.startswith("hetstream-") for job in slurm.jobs.values()):
            break
    else:
        pytest.fail(f"GPUs are kept for ever: {slurm.jobs}")
    assert slurm.jobs[2].num_restarts == 0
    slurm.drained.clear()
    sharing.looks_until("upgraded 2", 60)


def test_where_nothing_is_read_nothing_is_given_up(sharing: Site) -> None:
    slurm = sharing.slurm
    slurm.end(1)
    sharing.looks_until("upgraded 2")
    slurm.silent = True
    for _ in range(5):
        sharing.look()
    assert len(slurm.holders(2)) == 1
    assert sharing.is_guaranteed(2)


def test_what_kept_its_gpu_is_cancelled_by_hand_and_comes_again(sharing: Site) -> None:
    slurm = sharing.slurm
    slurm.end(1)
    sharing.looks_until("upgraded 2")
    number = next(number for number, job in slurm.jobs.items() if "holds" in job.comment)
    slurm.end(number)
    for _ in range(4):
        sharing.look()
    assert len(slurm.holders(2)) == 1
    # Next time another guaranteed job is faster: never two of them on a GPU.
    number = next(number for number, job in slurm.jobs.items() if "holds" in job.comment)
    (spot,) = slurm.gpus_of[number]
    slurm.end(number)
    slurm.gpus_of[9] = (spot,)
    slurm.jobs[9] = replace(slurm.jobs[2], job_id=9, partitions=("gpu",), comment="", account="b")
    slurm.admin_comments[9] = "hetstream:guarded"
    assert "evicted 2" in sharing.look()
    assert "guaranteed job 9" in sharing.events[0].reason


def test_who_has_become_guaranteed_has_quota_whatever_the_comment_says_then(sharing: Site) -> None:
    slurm = sharing.slurm
    slurm.end(1)
    sharing.looks_until("upgraded 2")
    slurm.jobs[2] = replace(slurm.jobs[2], comment=slurm.jobs[2].comment.replace("class=guaranteed", "class=none"))
    slurm.num_gpus = 2
    slurm.ask(3)
    assert "offered 3" in sharing.look(700), "a quota of one GPU is for one job"


def test_a_lowered_quota_takes_nothing_from_who_has_it(sharing: Site, caplog: pytest.LogCaptureFixture) -> None:
    slurm = sharing.slurm
    slurm.end(1)
    sharing.looks_until("upgraded 2")
    sharing.quotas = Quotas({"a": 0}, 600.0, ("gpu",))
    for _ in range(3):
        sharing.look()
    assert sharing.is_guaranteed(2)
    assert [record.message for record in caplog.records if "above its quota" in record.message] == [
        "tenant=a holds 1 GPUs above its quota: nobody new becomes guaranteed"
    ]


def test_an_upgraded_job_that_is_requeued_shares_again_and_is_upgraded_again(sharing: Site) -> None:
    slurm = sharing.slurm
    slurm.end(1)
    sharing.looks_until("upgraded 2")
    slurm.preempt(2)
    assert "taken back 2" in sharing.look()
    assert "upgraded" not in slurm.admin_comments[2]
    assert slurm.holders(2) == []
    sharing.look(130)
    sharing.looks_until("upgraded 2")


def test_slurm_preempts_no_upgraded_job_where_the_site_has_a_number_for_that(sharing: Site) -> None:
    slurm = sharing.slurm
    slurm.config = {"PreemptParameters": "youngest_first,min_exempt_priority=4294967000"}
    before = slurm.jobs[2].priority
    slurm.end(1)
    sharing.looks_until("upgraded 2")
    assert (before, slurm.jobs[2].priority) == (100, 4294967001)
    slurm.preempt(2)  # its node was lost; and Slurm starts it again by itself, before anybody looks
    slurm.jobs[2] = replace(slurm.jobs[2], state="RUNNING", nodes=("g1",))
    slurm.given[2] = (Gres("opp", "p0", 1),)
    sharing.look()
    assert slurm.jobs[2].priority == 4294967000, "it is opportunistic by now, and would give way to nobody"


def test_why_an_upgrade_was_given_up_stands_in_the_job(sharing: Site) -> None:
    """For users, who are not the packer, and for the next packer, which does not try again at once."""
    slurm = sharing.slurm
    slurm.deaf = {"g1"}
    slurm.end(1)
    sharing.looks_until("not upgraded 2", 40)
    record = read_record(slurm.admin_comments[2])
    assert record.upgraded is None
    assert record.given_up is not None
    assert record.given_up.reason.startswith("its nodes do not call it guaranteed. Look there: journalctl -t")
    (job,) = served_jobs(slurm.snapshot(), slurm.notes(["opp"]), ["opp"], slurm.now_s)
    assert upgrade_in_words(job).startswith("its upgrade was given up, and is tried again: its nodes do not call it")
    slurm.deaf = set()
    sharing.restart()
    num_calls = len(slurm.calls)
    sharing.look()
    assert not [call for call in slurm.calls[num_calls:] if call[0] == "submit"]
    sharing.look(300)
    sharing.looks_until("upgraded 2")
    assert "not-upgraded" not in slurm.admin_comments[2]


def test_an_operators_words_stay_when_a_job_is_moved(site: Site) -> None:
    slurm = site.slurm
    slurm.version = "22.05.8"  # which needs a note, as it forgets no GRES
    slurm.ask(1)
    site.look()
    slurm.ask(2, comment=WISH, submit_s=slurm.now_s)
    slurm.admin_comments[2] = "ticket=5 hetstream:guarded"
    site.looks_until("moved 2")
    assert slurm.admin_comments[2] == "ticket=5 hetstream:guarded hetstream:asked=gpu"


# What the record of a job says of GPUs to which it came without the guard.
AROUND_THE_GUARD = {
    "named": {"gres_per_node": GPU},
    "of tasks": {"gres_per_node": ()},
    "shares": {"gres_per_node": (Gres("shard", "", 4),)},
}


def around(site: Site, number: int, how: str, *, runs: bool, **more: object) -> None:
    """A job that the guard has not seen, on GPU 0 if it runs."""
    there = {"state": "RUNNING", "nodes": ("g1",)} if runs else {}
    site.slurm.ask(number, priority=5, reason="None", **{**AROUND_THE_GUARD[how], **there, **more})
    site.slurm.admin_comments[number] = "ticket=5"
    if runs:
        site.slurm.gpus_of[number] = (("g1", 0),)
        site.slurm.given[number] = () if how == "named" else GPU


@pytest.mark.shows("the packer holds what has GPUs of a quota partition without the guard's mark")
@pytest.mark.parametrize("how", AROUND_THE_GUARD)
@pytest.mark.parametrize("comment", ["mine", "x" * 1024, "a " * 512])
def test_who_runs_with_gpus_that_the_guard_has_not_seen_waits_for_quota(site: Site, how: str, comment: str) -> None:
    slurm = site.slurm
    around(site, 1, how, runs=True, comment=comment)
    assert "held 1" in site.look()
    assert ("requeuehold", "1") in slurm.calls
    assert slurm.admin_comments[1] == "ticket=5 hetstream:guarded"
    assert len(slurm.jobs[1].comment) <= 1024
    assert "hetstream:hold" not in slurm.jobs[1].comment.split(), "its owner does not hold it"
    slurm.gpus_of.pop(1, None)
    if how != "named":
        assert "waits 1" in site.look()
        assert site.events[-1].reason.startswith("its record does not say how many GPUs")
        assert site.look() == [], "said once"
    else:
        site.looks_until("granted 1")


def test_who_waits_with_gpus_that_the_guard_has_not_seen_waits_for_quota(site: Site) -> None:
    around(site, 1, "named", runs=False)
    around(site, 2, "named", runs=False, account="nobody")
    assert {"held 1", "held 2"} <= {*site.look()}
    assert site.slurm.jobs[1].priority == 0
    assert "hetstream:taking" not in site.slurm.admin_comments[1]
    assert "granted 1" in site.look()


@pytest.mark.parametrize("point", ["packer.announced", "packer.held"])
@pytest.mark.parametrize("runs", [True, False])
def test_the_packer_dies_while_it_holds_what_went_round_the_guard(
    site: Site, tmp_path: Path, point: str, runs: bool
) -> None:
    around(site, 1, "named", runs=runs)
    FAULTS.request(f"{point}:1:full:{tmp_path}/marker")
    with pytest.raises(OSError, match="No space left"):
        site.look()
    site.restart()
    site.looks_until("held 1")
    site.slurm.gpus_of.pop(1, None)
    site.looks_until("granted 1")
    assert site.slurm.admin_comments[1].split().count("hetstream:guarded") == 1


@pytest.mark.parametrize(
    ("runs", "command"), [(True, "requeuehold"), (True, "update"), (False, "update"), (False, "hold")]
)
def test_what_cannot_be_requeued_and_went_round_the_guard_is_cancelled(site: Site, runs: bool, command: str) -> None:
    """Such as an allocation, or a job of scrontab, of which Slurm changes nothing."""
    around(site, 1, "of tasks" if runs else "named", runs=runs)
    site.slurm.refuse[command] = "Cannot modify scrontab jobs through scontrol"
    assert "cancelled 1" in site.look()
    assert 1 not in site.slurm.jobs


def test_what_is_given_to_a_job_that_the_guard_has_not_seen_is_asked_once(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    around(site, 1, "of tasks", runs=True, uid=0)  # root's
    around(site, 2, "of tasks", runs=True)  # without a GPU
    site.slurm.given[2] = ()
    asked = []
    got = site.slurm.got
    monkeypatch.setattr(site.slurm, "got", lambda job_id: asked.append(job_id) or got(job_id))
    for _ in range(3):
        site.look()
    assert asked == ["2"]
    assert not [call for call in site.slurm.calls if call[0] != "update"]
    site.slurm.given[3] = None  # type: ignore[assignment]
    around(site, 3, "of tasks", runs=True)
    monkeypatch.setattr(site.slurm, "got", lambda _: None)  # in doubt: a job's name can look like a record
    assert "held 3" in site.look()


def holds(site: Site, number: int, gpus: int) -> None:
    """Slurm has given a job so many GPUs, on as many nodes."""
    site.slurm.gpus_of[number] = tuple((f"g{node + 1}", number % 2) for node in range(gpus))
    site.slurm.jobs[number] = replace(
        site.slurm.jobs[number], nodes=tuple(f"g{node + 1}" for node in range(gpus)), num_nodes=1, gres_held=None
    )


def test_who_holds_more_gpus_than_were_granted_is_taken_back_by_name(site: Site) -> None:
    slurm = site.slurm
    slurm.ask(1, comment="mine")
    slurm.ask(2, "b")
    assert {"granted 1", "granted 2"} <= {*site.look()}
    assert "hetstream:granted=1" in slurm.admin_comments[1].split()
    holds(site, 1, 2)
    assert site.look() == [], "one look is no proof"
    holds(site, 1, 1)
    assert site.look() == []
    holds(site, 1, 2)
    assert site.look() == []
    assert "taken back 1" in site.look()
    (reason,) = [event.reason for event in site.events if event.event == "taken back"]
    assert reason == (
        "it holds 2 GPUs, and 1 were granted: tenant a has 0 of its 1 GPU left. Submit it again with --nodes=N and "
        "--ntasks=N"
    )
    assert [call for call in slurm.calls if call[0] == "requeuehold"] == [("requeuehold", "1")]
    assert slurm.jobs[2].is_running, "nobody else's job is touched"
    assert "hetstream:taken-back=it-held-2-GPUs-and-1-were-granted" in slurm.jobs[1].comment
    assert "hetstream:hold" not in slurm.jobs[1].comment.split(), "its owner does not hold it"
    slurm.gpus_of.pop(1, None)
    assert "offered 1" in site.look(601)
    reasons = {event.job: event.reason for event in site.events}
    assert reasons["1"].startswith("it took 2 GPUs when it was started, and tenant a has a quota of 1: it can never be")
    site.quotas = Quotas({"a": 2}, 600.0, ("gpu",))
    slurm.end(2)
    site.looks_until("granted 1")
    assert "hetstream:granted=2" in slurm.admin_comments[1].split()
    slurm.jobs[1] = replace(slurm.jobs[1], state="RUNNING", reason="None")
    holds(site, 1, 2)
    assert site.look() == site.look() == [], "so many it was granted now"


def test_what_a_job_holds_beyond_its_grant_is_granted_where_its_tenant_has_room(site: Site) -> None:
    slurm = site.slurm
    site.quotas = Quotas({"a": 3}, 600.0, ("gpu",))
    for number in (1, 2):
        slurm.ask(number)
    site.looks_until("granted 2")
    for number in (1, 2):
        holds(site, number, 2)
    assert site.look() == ["granted 1"], "the first in its line has the one that is left"
    assert "taken back 2" in site.look()
    assert slurm.jobs[1].is_running
    site.quotas = Quotas({"a": 0}, 600.0, ("gpu",))
    for _ in range(3):
        assert "taken back 1" not in site.look(), "a lowered quota takes nothing from who has it"


@pytest.mark.parametrize("how", ["shrank", "released by an operator", "as it was granted"])
def test_who_holds_no_more_than_was_granted_runs_on(site: Site, how: str) -> None:
    slurm = site.slurm
    site.quotas = Quotas({"a": 2}, 600.0, ("gpu",))
    slurm.ask(1, gres_per_node=(Gres("gpu", "", 2),))
    if how == "released by an operator":
        slurm.release("1")
        slurm.start_all()
        site.quotas = Quotas({"a": 1}, 600.0, ("gpu",))
    else:
        site.looks_until("granted 1")
    if how == "shrank":
        holds(site, 1, 1)
    for _ in range(3):
        assert not {"taken back 1", "cancelled 1", "granted 1"} & {*site.look()}
    assert slurm.jobs[1].is_running


@pytest.mark.parametrize("command", ["update", "requeuehold"])
def test_who_holds_too_much_and_cannot_be_requeued_is_cancelled(site: Site, command: str) -> None:
    site.slurm.ask(1)
    site.look()
    holds(site, 1, 2)
    site.look()
    site.slurm.refuse[command] = "Cannot modify scrontab jobs through scontrol"
    assert "cancelled 1" in site.look()


@pytest.mark.parametrize("point", ["packer.announced", "packer.held", "packer.noted"])
def test_a_packer_that_dies_while_it_takes_back_is_followed_by_one_that_goes_on(
    site: Site, tmp_path: Path, point: str
) -> None:
    FAULTS.request(f"{point}:1:full:{tmp_path}/marker")
    site.slurm.ask(1)
    for _ in range(3):
        try:
            site.look()
        except OSError:
            site.restart()
            site.slurm.start_all()
        if site.slurm.jobs[1].is_running:
            holds(site, 1, 2)
    assert (tmp_path / "marker").exists()
    site.look()
    site.look()
    site.look()
    assert site.slurm.jobs[1].is_pending
    assert "hetstream:took=2" in site.slurm.admin_comments[1].split()
    assert site.slurm.admin_comments[1].count("hetstream:granted=") == 1


def test_a_job_whose_record_looks_doubtful_counts_with_all_that_is_there(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name with a record in it hides nothing."""
    site.slurm.ask(1)
    site.look()
    monkeypatch.setattr(site.slurm, "got", lambda _: None)
    site.look()
    assert "taken back 1" in site.look()


def test_a_job_that_slurm_itself_holds_keeps_no_quota(site: Site) -> None:
    """Released, it would be held anew, at each look."""
    site.slurm.ask(1, reason="BadConstraints")
    site.slurm.ask(2)
    assert site.look() == ["granted 2", "waits 1"]
    (reason,) = [event.reason for event in site.events if event.job == "1"]
    assert reason.startswith(
        "Slurm holds it, and says that it cannot start (BadConstraints). scancel it, and submit it"
    )


def test_what_no_partition_can_start_gives_its_quota_back_for_a_while(site: Site) -> None:
    slurm = site.slurm
    slurm.ask(1, gres_per_node=(Gres("gpu", "", 3),))  # more than there are
    site.quotas = Quotas({"a": 3}, 600.0, ("gpu",))
    slurm.admin_comments[1] = "ticket=5 hetstream:guarded hetstream:granted=3"
    slurm.jobs[1] = replace(slurm.jobs[1], priority=9, reason="PartitionConfig")
    slurm.ask(2)
    assert "held 1" in site.look()
    assert slurm.jobs[1].priority == 0
    assert slurm.admin_comments[1].split() == ["ticket=5", "hetstream:granted=3", "hetstream:guarded"]
    assert "granted 2" in site.look()
    assert site.look() == []
    slurm.end(2)
    assert "reserved 1" in site.look(RULES.refused_s), "after a while it is tried again"


def test_who_only_observes_says_what_it_would_hold(site: Site) -> None:
    around(site, 1, "named", runs=True)
    site.packer = Packer(
        site.slurm, site.readings, {"opp"}, site.events.append, acting=False, quotas=lambda _: site.quotas, rules=RULES,
        clock=site.slurm.clock,
    )  # fmt: skip
    assert site.look() == ["would hold 1"]
    assert site.slurm.calls == []


@pytest.mark.parametrize("how", ["its own", "its partition's", "one of several"])
@pytest.mark.parametrize("runs", [True, False])
@pytest.mark.parametrize("gpus", [(), GPU])
def test_who_came_past_the_guard_into_an_opportunistic_qos_is_held(
    site: Site, how: str, runs: bool, gpus: tuple[Gres, ...]
) -> None:
    """No partition says it; the packer knows the QOS by the site's file."""
    slurm = site.slurm
    site.quotas = Quotas()
    site.restart(qos=("OppQ",))
    qos = {"its own": "oppq", "its partition's": "normal", "one of several": "normal,OPPQ"}[how]
    slurm.partition_qos = "oppq" if how == "its partition's" else ""
    there = {"state": "RUNNING", "nodes": ("g1",)} if runs else {}
    for number in (1, 2, 3):
        slurm.ask(number, priority=5, reason="None", qos=qos, gres_per_node=gpus, **there)
        slurm.given[number] = gpus if runs else ()
        slurm.admin_comments[number] = "" if number == 1 else "hetstream:guarded"
    slurm.jobs[3] = replace(slurm.jobs[3], uid=0)
    found = {event for event in site.look() if event.startswith("held")}
    assert found == ({"held 1", "held 2"} if gpus else {"held 1"}), "who let the others go is an operator"
    assert (slurm.jobs[1].priority, slurm.jobs[1].is_pending) == (0, True)
    assert "hetstream:guarded" in slurm.admin_comments[1]
    assert not [event for event in site.look() if event.startswith("held")]


def test_without_a_named_qos_none_is_opportunistic(site: Site) -> None:
    site.quotas = Quotas()
    site.slurm.ask(1, priority=5, reason="None", qos="oppq")
    site.slurm.admin_comments[1] = ""
    assert site.look() == []


def test_an_array_that_went_round_the_guard_is_held_as_a_whole(site: Site) -> None:
    around(site, 33, "named", runs=False, array_job_id=33, array_tasks="3-900%2")
    assert "held 33_[3-900]" in site.look()


def test_what_slurm_has_not_decided_is_tried_again_soon(site: Site) -> None:
    slurm = site.slurm
    slurm.ask(1)
    site.look()
    slurm.ask(2, comment=WISH, submit_s=slurm.now_s)
    slurm.refuse = {"update": "Resource temporarily unavailable for job 2"}
    site.looks_until("refused 2")
    slurm.refuse = {}
    assert "moved 2" in site.look(31)


def test_a_job_with_a_reservation_takes_its_gpus_and_no_others(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm, begun = site.slurm, False

    def snapshot() -> Snapshot:
        read = TenantSlurm.snapshot(slurm)
        states = frozenset({"IDLE", "RESERVED"}) if begun else frozenset({"IDLE"})
        nodes = tuple(replace(node, states=states, reservation="r" if begun else "") for node in read.nodes)
        return replace(read, nodes=nodes, reservations=(Reservation("r", ("g1",), 0.0, 9e9, begun),))

    monkeypatch.setattr(slurm, "snapshot", snapshot)
    slurm.ask(1, reservation="r")
    assert site.look() == ["waits 1"]
    assert "its reservation has not begun: r" in site.events[0].reason
    begun = True
    slurm.ask(2, "b")  # without one, it has no GPU there
    slurm.ask(3, reservation="r", gres_per_node=(replace(GPU[0], count=3),))
    slurm.ask(4, reservation="r", num_nodes=2)  # released, they would keep quota for ever
    site.quotas = Quotas({"a": 9, "b": 9}, 600.0, ("gpu",))
    assert site.look() == ["granted 1", "reserved 2", "waits 3", "waits 4"]
    assert "it asks for 3 GPUs on 1 node or more, and its reservation has 2 on 1: r" in site.events[2].reason


def test_an_upgraded_job_is_protected_later_where_the_number_comes_later(sharing: Site) -> None:
    slurm = sharing.slurm
    slurm.end(1)
    sharing.looks_until("upgraded 2")
    sharing.restart()
    slurm.config = {"PreemptParameters": "min_exempt_priority=500"}
    slurm.version = "22.05.8"  # which does not know it
    sharing.look()
    assert slurm.jobs[2].priority == 100
    slurm.version = "23.02.1"
    sharing.look()
    assert slurm.jobs[2].priority == 501
    assert [call for call in slurm.calls if "Priority=501" in call] == [("update", "2", "Priority=501")]
    sharing.look()
    assert sum("Priority=501" in call for call in slurm.calls) == 1


@pytest.mark.parametrize("comment", ["hetstream:holds=2@0", "hetstream:upgrade=2:0@9999999999"])
def test_a_comment_by_which_a_job_calls_itself_the_packers_is_nobodys(sharing: Site, comment: str) -> None:
    """Where the guard is not in place. Nobody is guaranteed by it, and nobody's job is cancelled."""
    slurm = sharing.slurm
    slurm.submit(30, comment, partitions=("gpu",), uid=1000, priority=5, account="a")
    sharing.look()
    sharing.look()
    assert not sharing.is_guaranteed(2)
    assert 30 in slurm.jobs


def test_an_owner_who_gives_up_his_wish_or_account_is_not_upgraded(sharing: Site) -> None:
    slurm = sharing.slurm
    slurm.jobs[2] = replace(slurm.jobs[2], account="nobody")
    slurm.end(1)
    for _ in range(4):
        sharing.look()
    assert not sharing.is_guaranteed(2)
    slurm.jobs[2] = replace(slurm.jobs[2], account="a", comment="hetstream:gpu=0")
    for _ in range(4):
        sharing.look()
    assert not sharing.is_guaranteed(2)


def test_a_clock_that_jumps_upgrades_nobody_twice_and_starts_nobody_early(sharing: Site) -> None:
    slurm = sharing.slurm
    slurm.end(1)
    sharing.look(-100_000)
    sharing.look(200_000)
    sharing.looks_until("upgraded 2", 60)
    assert len(slurm.holders(2)) == 1


def test_slurm_that_refuses_an_upgrade_is_left_alone_for_a_while(sharing: Site) -> None:
    """The packer's user has no association with the tenant's account."""
    slurm = sharing.slurm
    slurm.end(1)
    slurm.refuse["submit"] = "Invalid account or account/partition combination specified"
    assert sharing.look() == ["refused 2"]
    assert sharing.look() == []
    del slurm.refuse["submit"]
    sharing.look(300)
    sharing.looks_until("upgraded 2")


class TestFile:
    """The site's file, written anew while the packer runs."""

    def test_garbage_leaves_the_last_good_one_in_place_and_is_said_once(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO)
        path, snapshot = tmp_path / "quotas.json", TenantSlurm().snapshot()
        good = {"partitions": ["gpu"], "tenants": {"a": 1}}
        path.write_text(json.dumps(good))
        is_down: list[bool] = []

        def accounts(_: Snapshot) -> tuple[str, ...]:
            if is_down:
                raise SlurmCommandError(["sacctmgr"], 1, "", "slurmdbd: Connection refused")
            return "a", "b"

        file = QuotaFile(path, ["opp"], accounts)
        assert file.first(snapshot).of("a") == 1
        for garbage in ('{"tenants"', '{"partitions": ["gpu"], "tenants": {"c": 1}}', "\0", "[" * 100_000):
            caplog.clear()
            path.write_text(garbage)
            assert [file.now(snapshot).of("a") for _ in range(3)] == [1, 1, 1]
            assert [record.levelname for record in caplog.records] == ["WARNING"], garbage
        path.write_text(json.dumps({**good, "tenants": {"a": 3}}))
        is_down.append(True)
        assert file.now(snapshot).of("a") == 1
        is_down.clear()
        path.unlink()
        os.mkfifo(path)  # nobody ever writes into it
        assert file.now(snapshot).of("a") == 1
        path.unlink()
        assert file.now(snapshot).of("a") == 1
        caplog.clear()
        path.write_text(json.dumps({**good, "tenants": {"a": 2}}))
        assert file.now(snapshot).of("a") == 2
        assert "hold from now on" in caplog.text

    def test_at_the_start_it_must_be_good(self, tmp_path: Path) -> None:
        snapshot = TenantSlurm().snapshot()
        path = tmp_path / "quotas.json"
        with pytest.raises(QuotaError, match="cannot be read: No such file"):
            QuotaFile(path, ["opp"], lambda _: None).first(snapshot)
        path.write_text(json.dumps({"partitions": ["gpu", "opp", "x"], "tenants": {"a": 3, "c": 1}}))
        with pytest.raises(QuotaError) as caught:
            QuotaFile(path, ["opp"], lambda _: ("a",)).first(snapshot)
        for text in ("'opp' is for opportunistic", "no partition 'x'", "4 GPUs together", "'c' is no account"):
            assert text in str(caught.value)


def test_slurm_that_does_not_answer_changes_nothing(sharing: Site) -> None:
    slurm = sharing.slurm
    slurm.end(1)
    slurm.refuse["submit"] = "Unable to contact slurm controller (connect failure)"
    slurm.refuse["release"] = slurm.refuse["update"] = slurm.refuse["submit"]
    slurm.ask(40, "b")
    before = dict(slurm.admin_comments)
    with pytest.raises(SlurmCommandError):
        sharing.look()
    assert slurm.admin_comments == before
    slurm.refuse.clear()
    sharing.look(300)
    sharing.looks_until("upgraded 2")
    assert slurm.jobs[40].state == "RUNNING"


def test_what_keeps_a_gpu_takes_no_cpu_of_the_job_that_it_is_for(sharing: Site) -> None:
    """It is of the partition above: without a free CPU, Slurm would preempt that job (seen on 22.05.8)."""
    slurm = sharing.slurm
    slurm.end(1)
    slurm.jobs[2] = replace(slurm.jobs[2], num_cpus=15)  # of 16
    assert sharing.look() == ["not upgraded 2"]
    assert "lacks a GPU or 2 CPUs" in sharing.events[0].reason
    assert sharing.look() == []
    assert slurm.holders(2) == []
    # Meanwhile it does not keep its quota from others.
    slurm.num_gpus = 2
    slurm.ask(3)
    sharing.looks_until("granted 3")
    slurm.end(3)
    slurm.jobs[2] = replace(slurm.jobs[2], num_cpus=14)
    sharing.looks_until("upgraded 2")


def test_a_gpu_that_somebody_else_gets_first_is_given_up(sharing: Site) -> None:
    slurm = sharing.slurm
    slurm.end(1)
    spot = ("g1", int(slurm.jobs[2].gres_per_node[0].type[1:]))
    slurm.gpus_of[9] = (spot,)
    slurm.jobs[9] = replace(slurm.jobs[2], job_id=9, partitions=("cpu",), comment="", account="b")
    slurm.deaf = {"g1"}
    sharing.readings = lambda: replace_reserved(slurm.readings())  # type: ignore[method-assign]
    for _ in range(4):
        sharing.look()
    assert slurm.holders(2) == [], "it keeps others' GPUs"
    assert slurm.upgraded == set()


def replace_reserved(readings: ShowGpus) -> ShowGpus:
    """What nodes say before the Prolog of a job that has just started."""
    nodes = [
        changed(node, gpus=tuple(changed(gpu, is_reserved=False, guaranteed=()) for gpu in node.gpus))
        for node in readings.nodes
    ]
    return ShowGpus(tuple(nodes), {})


def test_an_upgrade_that_nodes_were_told_of_is_not_given_up(sharing: Site) -> None:
    """The last reading is older than the upgrade, and quota, CPU and wish are gone meanwhile: it may be guaranteed."""
    slurm = sharing.slurm
    slurm.end(1)
    old = slurm.readings()
    while "upgrading=" not in slurm.admin_comments[2]:
        sharing.look()
    assert slurm.upgraded == {2}
    sharing.readings = lambda: old  # type: ignore[method-assign]
    slurm.jobs[2] = replace(slurm.jobs[2], num_cpus=16)
    sharing.quotas = Quotas({}, 600.0, ("gpu",))
    for _ in range(5):
        sharing.look()
        assert len(slurm.holders(2)) == 1
    del sharing.readings
    sharing.looks_until("upgraded 2")


def test_two_jobs_of_a_node_are_upgraded_one_after_the_other(site: Site) -> None:
    """Both would count the same free CPUs, and what keeps their GPUs would preempt one of them."""
    slurm = site.slurm
    site.quotas = Quotas({}, 600.0, ("gpu",))
    for number in (7, 8):
        slurm.submit(number, WISH, account="a", num_cpus=6)
        site.looks_until(f"started {number}")
    site.quotas = Quotas({"a": 2}, 600.0, ("gpu",))
    most = 0
    for _ in range(12):
        site.look()
        most = max(most, sum("holds" in job.comment for job in slurm.jobs.values()))
    assert most == 2
    assert site.is_guaranteed(7)
    assert site.is_guaranteed(8)
    assert len({*slurm.holders(7), *slurm.holders(8)}) == 2


def test_a_packer_of_another_partition_cancels_nothing_that_keeps_a_gpu(sharing: Site) -> None:
    slurm = sharing.slurm
    slurm.end(1)
    sharing.looks_until("upgraded 2")
    other = Packer(slurm, sharing.readings, {"spare"}, sharing.events.append, acting=True, clock=slurm.clock)
    other.step()
    assert len(slurm.holders(2)) == 1
