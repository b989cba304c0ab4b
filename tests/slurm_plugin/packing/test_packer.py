"""The packer's hands on a Slurm in memory: a job's whole life, what Slurm does by itself, and death at each point."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec.structs import replace as changed
from packed_slurm import NOW_S, PackedSlurm

from hetstream.hetjob.errors import SiteError, SlurmCommandError
from hetstream.hetjob.site.messages import SharingNow, ShowGpus
from hetstream.mpi_dataworkers.process.faults import FAULTS
from hetstream.slurm_plugin.client.model import Gres, HetComponent, Node
from hetstream.slurm_plugin.client.slurm_units import parse_gres
from hetstream.slurm_plugin.packing.notes import read_record
from hetstream.slurm_plugin.packing.packer import Packer
from hetstream.slurm_plugin.packing.state import PackingEvent


class Site:
    """A Slurm with a packer that can be replaced by another one at any time."""

    def __init__(self, slurm: PackedSlurm) -> None:
        self.slurm = slurm
        self.events: list[PackingEvent] = []
        self.readings: Callable[[], ShowGpus] = slurm.readings
        self.restart()

    def restart(self, *, acting: bool = True) -> None:
        self.packer = Packer(
            self.slurm, lambda: self.readings(), {"opp"}, self.events.append, acting=acting, clock=self.slurm.clock
        )

    def look(self, after_s: float = 10.0) -> list[str]:
        """One look of the packer, some seconds later; what it says."""
        self.slurm.now_s += after_s
        self.events.clear()
        self.packer.step()
        return [event.event for event in self.events]

    def run_a_job_that_is_to_leave(self) -> None:
        """Job 7 runs where it was placed, and has been paused there for too long."""
        self.slurm.submit(7)
        self.look()
        self.slurm.start()
        self.look()
        self.slurm.sharing = {("g1", 0): (SharingNow("7", 301.0),)}

    def looks(self, count: int) -> None:
        for _ in range(count):
            self.look()


@pytest.fixture
def site() -> Iterator[Site]:
    yield Site(PackedSlurm())
    FAULTS.clear()


def test_a_job_is_placed_started_taken_away_and_placed_elsewhere(site: Site) -> None:
    slurm = site.slurm
    slurm.guaranteed = {("g1", 0)}
    slurm.used_share = {("g1", 1): 0.5}
    slurm.submit(7, "mine hetstream:gpu-memory=8G")
    assert site.look() == ["placed"]
    assert slurm.calls == [
        (
            "update", "7", "ReqNodeList=g1", "Gres=opp:p0:1", "Comment=hetstream:gpu=0 mine hetstream:gpu-memory=8G",
            f"AdminComment=hetstream:guarded hetstream:placed=g1:0@{NOW_S + 10:.0f}@0 hetstream:asked=p0",
        ),
        ("release", "7"),
    ]  # fmt: skip
    assert site.look() == []  # it starts
    slurm.start()
    assert site.look() == ["started"]
    assert site.look() == []
    slurm.sharing = {("g1", 0): (SharingNow("7", 301.0),)}
    assert site.look() == ["evicted"]
    assert slurm.calls[-2:] == [
        ("requeuehold", "7"),
        (
            "update", "7", "Comment=mine hetstream:gpu-memory=8G",
            f"AdminComment=hetstream:guarded hetstream:evicted=1@{slurm.now_s:.0f}@g1:0 hetstream:asked=p0",
        ),
    ]  # fmt: skip
    slurm.sharing = {}
    assert site.look() == ["waits"]
    assert "placed again in" in site.events[0].reason
    slurm.submit(8)  # the GPU rests, too, and the other one is free
    site.look()
    assert slurm.jobs[8].comment == "hetstream:gpu=1"
    slurm.start()
    site.look()
    site.look(120)
    # What it asked for before is cleared first: 22.05 adds.
    assert [call[2:] for call in slurm.calls if call[:2] == ("update", "7")][-2][0] == "TresPerNode="
    slurm.start()
    assert site.look() == ["started"]
    assert slurm.given[7] == slurm.jobs[7].gres_per_node


def test_observing_says_what_it_would_do_and_does_nothing(site: Site) -> None:
    site.restart(acting=False)
    site.slurm.submit(7)
    assert site.look() == ["would place"]
    assert site.look() == []  # once
    assert site.slurm.calls == []


def test_what_its_owner_holds_waits_until_he_releases_it(site: Site) -> None:
    """Also if he holds it after it was placed; the guard writes the word."""
    slurm = site.slurm
    slurm.submit(7, "mine hetstream:hold")
    assert site.look() == ["waits"]
    slurm.jobs[7] = replace(slurm.jobs[7], comment="mine  ")
    assert site.look() == ["placed"]
    slurm.jobs[7] = replace(slurm.jobs[7], comment=slurm.jobs[7].comment + " hetstream:hold", priority=0)
    assert site.look(200) == []  # it was said before
    assert [call[0] for call in slurm.calls] == ["update", "release"]


def test_who_requeues_and_holds_a_running_job_holds_it(site: Site, tmp_path: Path) -> None:
    """Slurm asks no guard then. The packer's own is told apart also if it died right after."""
    slurm = site.slurm
    slurm.submit(7, "mine")
    site.look()
    slurm.start()
    site.look()
    slurm.requeue_held("7")
    assert "taken back" in site.look()
    assert slurm.jobs[7].comment == "mine hetstream:hold"
    assert "placed" not in site.look(400)
    slurm.jobs[7] = replace(slurm.jobs[7], comment="mine  ")  # as the guard does at his release
    assert "placed" in site.look(400)
    slurm.start()
    site.look()
    slurm.sharing = {("g1", 0): (SharingNow("7", 301.0),), ("g1", 1): (SharingNow("7", 301.0),)}
    FAULTS.request(f"packer.requeued:1:full:{tmp_path}/marker")
    with pytest.raises(OSError, match="No space"):
        site.look()
    slurm.sharing = {}
    site.restart()
    assert "taken back" in site.look()
    assert slurm.jobs[7].comment == "mine"
    assert "hetstream:taking" not in slurm.admin_comments[7]


def test_a_job_with_a_reservation_is_placed_inside_of_it(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = site.slurm
    slurm.num_nodes = 2
    plain = slurm._node

    def node(name: str) -> Node:
        found = plain(name)
        return replace(found, states=found.states | {"RESERVED"}, reservation="r") if name == "g2" else found

    monkeypatch.setattr(slurm, "_node", node)
    for number, reservation in ((7, "r"), (8, ""), (9, "other")):
        slurm.submit(number, reservation=reservation)
    assert sorted(site.look()) == ["placed", "placed", "waits"]
    assert (slurm.jobs[7].required_nodes, slurm.jobs[8].required_nodes) == (("g2",), ("g1",))
    assert "4 on nodes outside of its reservation (other)" in site.events[-1].reason


def test_what_an_operator_holds_stays_held(site: Site) -> None:
    site.slurm.submit(7, "mine hetstream:operators-hold")
    assert site.look() == ["waits"]
    assert site.events[0].reason == "an operator holds it, who hands it back by: scontrol uhold 7"


def test_others_jobs_are_not_touched(site: Site) -> None:
    slurm = site.slurm
    slurm.submit(6, partitions=("gpu",), priority=5, reason="Priority")
    slurm.admin_comments[6] = ""
    assert site.look() == []
    assert slurm.calls == []


def test_who_places_a_job_by_hand_writes_what_the_packer_would(site: Site) -> None:
    """Into its AdminComment, which administrators alone can; a Comment is its owner's."""
    slurm = site.slurm
    place = {"partitions": ("opp",), "priority": 5, "reason": "Priority", "required_nodes": ("g1",)}
    slurm.submit(9, "hetstream:gpu=1 by hand", gres_per_node=parse_gres("opp:p1:1"), **place)
    slurm.admin_comments[9] = f"ticket=5 hetstream:placed=g1:1@{NOW_S:.0f}@0"
    slurm.start()
    assert site.look() == ["started"]
    site.restart()
    assert site.look() == ["started"]
    assert slurm.calls == []
    slurm.submit(8, "hetstream:gpu=1 by hand", gres_per_node=parse_gres("opp:p1:1"), **place)
    slurm.admin_comments[8] = "ticket=5"
    assert site.look() == ["taken back"]


WITHOUT_A_PLACE: dict[str, dict[str, object]] = {
    "the guard was not in place": {},
    "it has GPUs of Slurm's own": {"gres_per_node": parse_gres("gpu:1")},
    "its Comment has the packer's mark": {"comment": "hetstream:gpu=0", "gres_per_node": parse_gres("opp:p0:1")},
    "it is a component": {"het": HetComponent(6, 1)},
    "it is in another partition, too": {"partitions": ("gpu", "opp")},
    "its wish is none": {"comment": "hetstream:gpus=no"},
    "it says --no-requeue": {},
    "its owner is root": {"uid": 0},
}


@pytest.mark.parametrize("admin_comment", ["", "hetstream:guarded", "ticket=5"])
@pytest.mark.parametrize("state", ["PENDING", "RUNNING", "SUSPENDED", "CONFIGURING"])
@pytest.mark.parametrize("why", WITHOUT_A_PLACE)
def test_whoever_runs_without_a_place_of_the_packers_is_taken_back(
    site: Site, why: str, state: str, admin_comment: str
) -> None:
    """Nothing of it is the guard's word: it may be absent, old, or tricked."""
    slurm = site.slurm
    fields = {"comment": "mine"} | WITHOUT_A_PLACE[why]
    if state != "PENDING":
        fields |= {"nodes": ("g1",), "partitions": ("opp",)}
    slurm.submit(7, state=state, priority=5, reason="Priority", **fields)  # type: ignore[arg-type]
    slurm.admin_comments[7] = admin_comment
    slurm.no_requeue = {7} if why == "it says --no-requeue" else set()
    slurm.given[7] = slurm.jobs[7].gres_per_node if state != "PENDING" else ()
    assert "taken back" in site.look()
    assert slurm.jobs[7].is_pending
    assert slurm.jobs[7].priority == 0
    assert "hetstream:guarded" in slurm.admin_comments[7]
    assert "hetstream:taking" not in slurm.admin_comments[7]
    assert 7 not in slurm.no_requeue
    (event,) = [event for event in site.events if event.event == "taken back"]
    assert "without a place" in event.reason
    assert ("GPUs" in event.reason) == (why == "it has GPUs of Slurm's own")
    if why != "it is a component":  # its other components have the Comment, too
        assert "hetstream:taken-back=" in slurm.jobs[7].comment
        assert "hetstream:gpu=" not in slurm.jobs[7].comment
    # It waits for a place as all do, if it may have one.
    said = site.look()
    assert "taken back" not in said
    is_closed = why in ("it has GPUs of Slurm's own", "it is a component", "its wish is none")
    can_share = not is_closed and slurm.jobs[7].partitions == ("opp",)
    assert (slurm.jobs[7].priority > 0) == can_share, said
    if can_share:
        assert "hetstream:taken-back" not in slurm.jobs[7].comment
        slurm.start()
        assert site.look() == ["started"]
        site.restart()
        assert site.look() == ["started"], "what it placed itself stays, whatever it has forgotten"


@pytest.mark.parametrize(
    ("state", "command"),
    [("PENDING", "update"), ("PENDING", "hold"), ("RUNNING", "update"), ("RUNNING", "requeuehold")],
)
def test_what_slurm_cannot_requeue_or_hold_and_has_no_place_is_cancelled(site: Site, state: str, command: str) -> None:
    """An allocation, a step that is a job, or a job of scrontab, of which Slurm changes nothing."""
    slurm = site.slurm
    slurm.submit(7, state=state, priority=5, reason="Priority", nodes=("g1",) if state == "RUNNING" else ())
    slurm.admin_comments[7] = ""
    slurm.refuse = {command: "Cannot modify scrontab jobs through scontrol"}
    assert site.look() == ["cancelled"]
    assert "Slurm cannot requeue it, or hold it" in site.events[0].reason
    assert slurm.jobs == {}


@pytest.mark.parametrize("state", ["PENDING", "RUNNING"])
def test_a_packer_without_an_administrators_rights_cancels_nothing(site: Site, state: str) -> None:
    slurm = site.slurm
    slurm.submit(7, state=state, priority=5, reason="Priority", nodes=("g1",) if state == "RUNNING" else ())
    slurm.admin_comments[7] = ""
    slurm.refuse = {"update": "Access/permission denied"}
    assert site.look() == ["refused"]
    assert 7 in slurm.jobs


def test_a_heterogeneous_job_is_taken_back_as_a_whole_and_once(site: Site) -> None:
    slurm = site.slurm
    for number, offset in ((6, 0), (7, 1)):
        slurm.submit(number, state="RUNNING", priority=5, nodes=("g1",), het=HetComponent(6, offset))
        slurm.admin_comments[number] = ""
    assert "taken back" in site.look()
    assert [call for call in slurm.calls if call[0] == "requeuehold"] == [("requeuehold", "6")]


def test_an_array_that_waits_without_a_hold_is_held_as_a_whole(site: Site) -> None:
    slurm = site.slurm
    slurm.submit(33, array_job_id=33, array_tasks="3-900%2", priority=5, reason="Priority")
    slurm.admin_comments[33] = ""
    assert "taken back" in site.look()
    assert [call for call in slurm.calls if call[0] == "hold"] == [("hold", "33_[3-900]")]


def test_who_has_gpus_later_is_looked_at_again(site: Site) -> None:
    """By Slurm's books of now: a job that can be expanded may get more than it started with."""
    slurm = site.slurm
    slurm.submit(7)
    site.look()
    slurm.start()
    assert site.look() == ["started"]
    slurm.given[7] = (*slurm.given[7], Gres("gpu", "", 1))
    slurm.jobs[7] = replace(slurm.jobs[7], gres_held=slurm.given[7])
    assert site.look() == ["evicted"]
    assert "opp:p0:1, gpu::1, and it was placed on GPU 0" in site.events[0].reason


def test_who_observes_says_whom_it_would_take_back(site: Site) -> None:
    site.restart(acting=False)
    site.slurm.submit(7, state="RUNNING", priority=5, nodes=("g1",))
    assert site.look() == ["would take back"]
    assert site.slurm.calls == []


@pytest.mark.shows("the packer's marks are refused in any word of a Comment, whatever the policy")
@pytest.mark.parametrize("comment", ["hetstream:gpu=1", "hetstream:gpu=0,1  ", "mine"])
@pytest.mark.parametrize("state", ["PENDING", "RUNNING"])
def test_only_its_own_note_tells_the_packer_that_it_has_placed_a_job(site: Site, comment: str, state: str) -> None:
    """Its owner writes the Comment, and somehow it got the packer's mark: the job was released without a place."""
    slurm = site.slurm
    where = {"nodes": ("g1",)} if state == "RUNNING" else {}
    slurm.submit(7, comment, state=state, priority=5, reason="Priority", **where)
    slurm.given[7] = ()
    assert "taken back" in site.look()
    assert slurm.jobs[7].is_pending
    assert slurm.jobs[7].priority == 0
    assert "hetstream:gpu=" not in slurm.jobs[7].comment


@pytest.mark.shows("a planned job does not starve an opportunistic one, and its planned start does not move")
@pytest.mark.parametrize("limit_s", [8 * 3600.0, 660.0, None])
def test_a_job_in_front_of_a_planned_start_begins_with_less_time_and_gets_its_own_back(
    site: Site, limit_s: float | None
) -> None:
    slurm = site.slurm
    slurm.granted_s = 600.0
    slurm.submit(7, time_limit_s=limit_s)
    site.look()
    slurm.start()
    assert slurm.jobs[7].time_limit_s == 600.0
    assert site.look() == ["started"]
    assert slurm.jobs[7].time_limit_s == limit_s
    # What its owner changes from now on is his.
    slurm.update("7", {"TimeLimit": "20"})
    site.restart()
    assert site.look() == ["started"]
    assert slurm.jobs[7].time_limit_s == 1200.0


@pytest.mark.shows("a planned job does not starve an opportunistic one, and its planned start does not move")
@pytest.mark.parametrize("point", ["packer.started", "preempted"])
def test_less_time_is_no_jobs_for_longer_than_its_start(site: Site, tmp_path: Path, point: str) -> None:
    """The packer dies before it gives the time back, or Slurm requeues the job before the packer saw it run."""
    slurm = site.slurm
    slurm.granted_s = 600.0
    slurm.submit(7, time_limit_s=3600.0)
    site.look()
    slurm.start()
    if point == "preempted":
        slurm.preempt(7)
        assert site.look() == ["taken back"]
    else:
        FAULTS.request(f"{point}:1:full:{tmp_path}/marker")
        with pytest.raises(OSError, match="No space"):
            site.look()
        site.restart()
        assert site.look() == ["started"]
    assert slurm.jobs[7].time_limit_s == 3600.0
    assert "limit" not in slurm.admin_comments[7]


def test_who_needs_less_time_than_what_is_asked_at_least_asks_for_his_own(site: Site) -> None:
    site.slurm.granted_s = 200.0
    site.slurm.submit(7, time_limit_s=600.0)
    site.look()
    site.slurm.start()
    assert site.slurm.jobs[7].is_pending
    assert site.slurm.least_s == {}


@pytest.mark.parametrize("lie", ["opp:p1:1", "opp:p0:1,opp:p1:1", "gpu:h200:1", ""])
def test_a_job_that_slurm_put_elsewhere_is_taken_away(site: Site, lie: str) -> None:
    slurm = site.slurm
    slurm.submit(7)
    site.look()
    slurm.lie = lie or "none"
    slurm.start()
    assert site.look() == ["evicted"]
    assert "was placed on GPU 0" in site.events[0].reason
    assert slurm.jobs[7].priority == 0


def test_a_comment_that_was_changed_meanwhile_counts_as_wrong(site: Site) -> None:
    slurm = site.slurm
    slurm.submit(7)
    site.look()
    slurm.jobs[7] = replace(slurm.jobs[7], comment="hetstream:gpu=1")
    slurm.start()
    assert site.look() == ["evicted"]
    assert "Comment" in site.events[0].reason


def test_a_job_that_slurm_preempts_waits_for_a_place_again(site: Site) -> None:
    slurm = site.slurm
    slurm.submit(7)
    site.look()
    slurm.start()
    site.look()
    slurm.preempt(7)
    assert site.look() == ["taken back"]
    assert slurm.jobs[7].priority == 0
    assert slurm.admin_comments[7].startswith("hetstream:guarded hetstream:evicted=1@")
    # Slurm holds it for two minutes, and delays grow with each time.
    for minutes in (2, 4, 8):
        assert "placed" not in site.look(minutes * 60 - 30)
        assert "placed" in site.look(60)
        slurm.start()
        site.look()
        slurm.preempt(7)
        assert "taken back" in site.look()


@pytest.mark.shows("an owner who requeues his opportunistic job keeps no GPU from others")
@pytest.mark.parametrize("how", ["requeued", "begins later", "evicted"])
def test_the_gpu_of_a_job_rests_after_an_eviction_and_not_after_its_owners_requeue(how: str) -> None:
    slurm = PackedSlurm(num_gpus=1)
    site = Site(slurm)
    slurm.submit(7)
    site.look()
    if how == "begins later":
        site.look(85)
    else:
        slurm.start()
        site.look(100)
    slurm.submit(8)
    if how == "requeued":
        slurm.preempt(7)
    elif how == "evicted":
        slurm.sharing = {("g1", 0): (SharingNow("7", 301.0),)}
    assert {"taken back", "evicted"} & {*site.look()}
    slurm.sharing = {}
    site.look()
    assert ("placed=" in slurm.admin_comments[8]) is (how != "evicted")
    found = read_record(slurm.admin_comments[7])
    assert found.placed is None
    assert found.evicted is not None
    assert (found.evicted.count, found.evicted.place is not None) == (1, how == "evicted")


def test_a_job_that_slurm_does_not_start_in_time_is_held_again(site: Site) -> None:
    slurm = site.slurm
    slurm.submit(7)
    site.look()
    assert site.look(85) == []
    assert site.look(10) == ["taken back"]
    assert [call[0] for call in slurm.calls[-2:]] == ["hold", "update"]
    assert "within 90 s (Priority)" in site.events[0].reason


def test_what_slurm_refuses_concerns_one_job_and_is_not_tried_at_once(site: Site) -> None:
    slurm = site.slurm
    slurm.submit(7)
    slurm.refuse = {"update": "Invalid GRES"}
    assert site.look() == ["refused"]
    slurm.refuse = {}
    slurm.submit(8)
    assert site.look() == ["placed", "waits"]
    assert [(event.job, "Invalid GRES" in event.reason) for event in site.events] == [("8", False), ("7", True)]
    assert "placed" in site.look(300)


def test_a_slurmctld_that_does_not_answer_is_not_asked_for_each_job(site: Site) -> None:
    slurm = site.slurm
    slurm.num_gpus = 4
    for number in range(7, 11):
        slurm.submit(number)
    slurm.refuse = {"update": "Unable to contact slurm controller (connect failure)"}
    with pytest.raises(SlurmCommandError, match="Unable to contact"):
        site.look()
    assert [event.event for event in site.events] == ["refused", "refused"]
    slurm.refuse = {}
    assert site.look().count("placed") == 2, "the others need not wait for five minutes"


def test_an_owner_who_has_a_placed_job_begin_later_does_not_keep_its_gpu(site: Site) -> None:
    slurm = site.slurm
    slurm.submit(7)
    site.look()
    slurm.jobs[7] = replace(slurm.jobs[7], eligible_s=NOW_S + 1e8, reason="BeginTime")
    assert site.look(95) == ["taken back"]


def test_a_job_that_never_starts_closes_no_gpu_for_others(site: Site) -> None:
    """Such as one that waits for a licence: each of its attempts ends after 90 s."""
    slurm = site.slurm
    slurm.num_gpus = 1
    slurm.submit(7)
    slurm.admin_comments[7] = f"hetstream:evicted=9@{NOW_S - 4000:.0f}@g1:0"
    assert "placed" in site.look()
    assert site.look(95) == ["taken back"]
    slurm.submit(8)
    assert "placed" in site.look(130)
    assert slurm.jobs[8].comment == "hetstream:gpu=0"


@pytest.mark.parametrize("written", ["placed=g1:0@{at:.0f}@0", "evicted=3@{at:.0f}@g1:0"])
def test_notes_of_a_clock_that_was_years_ahead_keep_nobody_waiting(site: Site, written: str) -> None:
    slurm = site.slurm
    slurm.num_gpus = 1
    slurm.submit(7)
    slurm.admin_comments[7] = f"hetstream:{written.format(at=NOW_S + 1e8)}"
    assert site.look() == ["placed"]


def test_a_job_is_not_placed_on_nodes_that_it_excludes(site: Site) -> None:
    """Slurm takes such an update, and never starts the job: the first node by name would be tried for ever."""
    slurm = site.slurm
    slurm.num_nodes = 3
    slurm.submit(7)
    slurm.submit(8)
    slurm.excluded = {7: ("g1", "g2"), 8: ("g1", "g2", "g3")}
    assert site.look() == ["placed", "waits"]
    assert slurm.jobs[7].required_nodes == ("g3",)
    assert "on nodes that it does not ask for" in site.events[1].reason


def test_a_node_complains_of_its_own_jobs_alone(site: Site) -> None:
    slurm = site.slurm
    slurm.num_nodes = 2
    slurm.submit(7)
    site.look()
    (node,) = slurm.jobs[7].required_nodes
    slurm.start()
    site.look()
    other = next(name for name in slurm.names if name != node)
    slurm.sharing = {(other, 0): (SharingNow("7", 400.0, "it goes on although it should pause"),)}
    assert site.look() == []
    slurm.sharing = {(node, 0): (SharingNow("7", 0.0, "it goes on although it should pause"),)}
    assert site.look() == ["evicted"]


def test_without_readings_nobody_is_placed_and_nobody_taken_away(site: Site) -> None:
    slurm = site.slurm
    slurm.submit(7)
    site.look()
    slurm.start()
    slurm.sharing = {("g1", 0): (SharingNow("7", 400.0, "it goes on although it should pause"),)}
    slurm.age_s = 31
    slurm.submit(8)
    assert site.look() == ["started", "waits"]

    def silent() -> ShowGpus:
        raise SiteError("the daemon does not answer")

    site.readings = silent
    assert site.look() == []
    slurm.preempt(7)  # what Slurm did is seen all the same
    assert "taken back" in site.look()


def test_a_job_of_which_the_node_knows_nothing_keeps_others_off(site: Site) -> None:
    """Slurm gave the GPU to a job, and the node has no grant of it: its coordinator would let others run freely."""
    slurm = site.slurm
    slurm.num_gpus = 1
    slurm.guaranteed = {("g1", 0)}
    slurm.submit(7)
    told = slurm.readings()
    row = told.nodes[0]
    site.readings = lambda: ShowGpus((changed(row, gpus=(changed(row.gpus[0], is_reserved=False),)),), {})
    assert site.look() == ["waits"]
    assert "of which the node knows nothing" in site.events[0].reason


@pytest.mark.shows("a GPU that vanishes, or is a part of one, is told")
def test_a_node_with_parts_of_gpus_takes_nobody(site: Site) -> None:
    slurm = site.slurm
    slurm.gpu_types = ("h200", "h200_1g.18gb")
    slurm.submit(7)
    assert site.look() == ["waits"]
    assert "MIG" in site.events[0].reason


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"comment": "hetstream:gpus=many"}, "write a number"),
        ({"comment": "hetstream:gpu-memory=big"}, "write a size such as 16G"),
        ({"comment": "hetstream:gpus=3"}, "it needs 3 GPUs of one node at once, and 2 of 2 could take it now"),
        ({"comment": "mine hetstream:hold"}, "who lets it wait for its turn by: scontrol release 7"),
        ({"reason": "JobHeldAdmin"}, "an operator holds it, who hands it back by: scontrol uhold 7"),
        ({"dependency": "afterok:3"}, "it waits for afterok:3"),
        ({"eligible_s": NOW_S + 100}, "it may begin in 90 s"),
        ({"reason": "launch_failed_requeued_held"}, "Slurm could not start it"),
        ({"required_nodes": ("g9",)}, "on nodes that it does not ask for"),
        ({"features": "a100"}, "on nodes that it does not ask for"),
        ({"num_nodes": 2}, "on each of 2 nodes"),
    ],
)  # fmt: skip
def test_a_job_that_cannot_be_placed_is_told_why(site: Site, change: dict[str, object], reason: str) -> None:
    site.slurm.submit(7, **change)  # type: ignore[arg-type]
    assert site.look() == ["waits"]
    assert reason in site.events[0].reason


@pytest.mark.shows("a job with several GPUs of a node is placed, paused and upgraded as a whole")
def test_a_job_with_several_gpus_gets_all_of_them_and_is_taken_from_all(site: Site) -> None:
    """All at once, or none; a node's word of one of them counts for the job."""
    slurm = site.slurm
    slurm.used_share = {("g1", 1): 0.9}
    slurm.submit(7, "hetstream:gpus=2")
    assert site.look() == ["waits"]
    slurm.used_share = {}
    assert site.look() == ["placed"]
    assert "Gres=opp:p0:1,opp:p1:1" in slurm.calls[0]
    assert "Comment=hetstream:gpu=0,1 hetstream:gpus=2" in slurm.calls[0]
    slurm.submit(8)  # no GPU has room for another one yet
    slurm.start()
    assert site.look() == ["started", "waits"]
    slurm.sharing = {("g1", 1): (SharingNow("7", 301.0),)}
    assert site.look() == ["evicted"]
    slurm.sharing = {}
    assert {event.place.indices for event in site.events if event.place} == {(0, 1)}


def test_slurm_that_gives_a_job_one_of_its_two_gpus_is_corrected(site: Site) -> None:
    site.slurm.submit(7, "hetstream:gpus=2")
    site.slurm.lie = "opp:p1:1"
    assert site.look() == ["placed"]
    site.slurm.start()
    assert site.look() == ["evicted"]
    assert "opp:p1:1, and it was placed on GPU 0,1" in site.events[0].reason


def test_a_job_that_cannot_be_requeued_is_not_placed(site: Site) -> None:
    site.slurm.submit(7)
    site.slurm.no_requeue.add(7)
    assert site.look() == ["waits"]
    assert "--requeue" in site.events[0].reason


def test_a_gang_over_nodes_starts_at_once_and_counts_its_room(site: Site) -> None:
    slurm = site.slurm
    slurm.num_nodes = 2
    slurm.submit(7, num_nodes=2, num_cpus=26)
    slurm.submit(8)
    site.look()
    assert slurm.calls[0][2:4] == ("ReqNodeList=g[1-2]", "Gres=opp:p0:1")
    assert slurm.jobs[8].priority == 0  # the other GPUs are free, and CPUs are not: 16 - 13
    slurm.start()
    assert "started" in site.look()


POINTS = ("packer.updated", "packer.released")


@pytest.mark.parametrize("point", POINTS)
def test_a_packer_that_dies_while_it_places_is_replaced(site: Site, tmp_path: Path, point: str) -> None:
    slurm = site.slurm
    slurm.submit(7)
    FAULTS.request(f"{point}:1:full:{tmp_path}/marker")
    with pytest.raises(OSError, match="No space"):
        site.look()
    site.restart()
    slurm.start()
    for _ in range(3):
        site.look()
        slurm.start()
    assert slurm.jobs[7].is_running
    # Not asked for twice, wherever it is now.
    place = slurm.jobs[7].comment.removeprefix("hetstream:gpu=")
    assert [gres.type for gres in slurm.given[7]] == [f"p{place}"]
    assert slurm.jobs[7].num_restarts == 0


@pytest.mark.parametrize("point", ["packer.requeued", "packer.held", "packer.cleared"])
def test_a_packer_that_dies_while_it_takes_away_is_replaced(site: Site, tmp_path: Path, point: str) -> None:
    slurm = site.slurm
    slurm.submit(7)
    site.look()
    slurm.start()
    site.look()
    FAULTS.request(f"{point}:1:full:{tmp_path}/marker")
    if point == "packer.requeued":
        slurm.sharing = {("g1", 0): (SharingNow("7", 0.0, "it goes on although it should pause"),)}
    else:
        slurm.preempt(7)
    with pytest.raises(OSError, match="No space"):
        site.looks(30)
    slurm.sharing = {}
    site.restart()
    for _ in range(30):
        site.look()
        slurm.start()
    assert slurm.jobs[7].is_running
    assert "hetstream:evicted=1@" in slurm.admin_comments[7]
    assert len(slurm.given[7]) == 1


@pytest.mark.shows("slurmctld is killed while jobs are held, placed, running or requeued, and no job is lost")
@pytest.mark.parametrize(
    ("starts", "dies"),
    [
        (False, ""), (True, ""), (False, "packer.released"), (True, "packer.released"), (False, "packer.announced"),
        (True, "packer.announced"), (False, "packer.held"), (True, "packer.requeued"),
    ],
)  # fmt: skip
def test_a_job_whose_place_slurmctld_forgot_before_it_heard_the_release_is_taken_back(
    site: Site, tmp_path: Path, starts: bool, dies: str
) -> None:
    """Whether it has started by then or not, and also if the packer dies just then."""
    slurm = site.slurm
    slurm.submit(7, "mine")
    slurm.write_down()
    slurm.dies_before = "release"
    if dies:
        FAULTS.request(f"{dies}:1:full:{tmp_path}/marker")

    def look() -> None:
        try:
            site.look()
        except OSError:  # it died
            site.restart()

    look()
    assert (slurm.jobs[7].priority, slurm.jobs[7].comment) == (100, "mine")
    if starts:
        slurm.start()
        assert slurm.jobs[7].is_running
    look()
    if dies == "packer.announced":
        look()
    assert (("requeuehold" if starts else "hold"), "7") in slurm.calls
    assert slurm.jobs[7].priority == 0
    site.look(200)
    slurm.start()
    assert site.look() == ["started"]
    assert slurm.jobs[7].comment == "hetstream:gpu=0 mine"
    assert "taking" not in slurm.admin_comments[7]


@pytest.mark.shows("slurmctld is killed while jobs are held, placed, running or requeued, and no job is lost")
@pytest.mark.parametrize("ends_as", ["FAILED", "COMPLETED"])
@pytest.mark.parametrize(("lingers", "unanswered"), [(False, False), (True, False), (False, True)])
def test_a_job_that_slurmctld_forgot_to_requeue_is_requeued_again(
    site: Site, lingers: bool, unanswered: bool, ends_as: str
) -> None:
    """The signal by which Slurm ended it looks like a failure then, or, where the program heeds it, like its end. One
    that fails by itself stays what it is.
    """
    slurm = site.slurm
    slurm.submit(7, "mine")
    slurm.submit(8)
    site.look()
    slurm.start()
    site.look()
    slurm.write_down()
    slurm.dies_after, slurm.lingers, slurm.unanswered, slurm.ends_as = "requeuehold", lingers, unanswered, ends_as
    slurm.sharing = {("g1", 0): (SharingNow("7", 301.0),)}
    assert site.look() == (["evicted"] if lingers else ["refused"])  # it can be noted as long as the job is there
    slurm.sharing = {}
    slurm.end(8)
    assert "taken back" in site.look()
    assert [call[1] for call in slurm.calls if call[0] == "requeuehold"] == ["7", "7"]
    site.look()
    assert "hetstream:hold" not in slurm.jobs[7].comment, "nobody else holds it"
    assert "placed" in site.look(400)
    slurm.start()
    assert "started" in site.look()
    assert "taking" not in slurm.admin_comments[7]
    assert slurm.jobs[8].state == "FAILED"


@pytest.mark.shows("slurmctld is killed while jobs are held, placed, running or requeued, and no job is lost")
def test_of_an_array_the_task_alone_is_requeued_again_that_slurmctld_forgot(site: Site) -> None:
    """The last task of an array has its number, by which Slurm would requeue all of its tasks, also what is done."""
    slurm = site.slurm
    slurm.submit(33, array_job_id=33, array_tasks="5")
    site.look()
    slurm.start()
    site.look()
    slurm.write_down()
    slurm.dies_after = "requeuehold"
    slurm.sharing = {("g1", 0): (SharingNow("33", 301.0),)}
    site.look()
    assert "taken back" in site.look()
    assert [call[1] for call in slurm.calls if call[0] == "requeuehold"] == ["33_5", "33_5"]


def test_a_packer_that_dies_before_it_requeues_leaves_no_announcement(site: Site, tmp_path: Path) -> None:
    slurm = site.slurm
    site.run_a_job_that_is_to_leave()
    FAULTS.request(f"packer.announced:1:full:{tmp_path}/marker")
    with pytest.raises(OSError, match="No space"):
        site.look()
    slurm.sharing = {}
    site.restart()
    site.look()
    assert "taking" not in slurm.admin_comments[7]
    slurm.requeue_held("7")
    site.look()
    assert slurm.jobs[7].comment == "hetstream:hold", "it was somebody else"


@pytest.mark.parametrize("refused", [False, True])
def test_a_job_that_was_not_requeued_after_all_may_fail(site: Site, refused: bool) -> None:
    slurm = site.slurm
    site.run_a_job_that_is_to_leave()
    if refused:
        slurm.refuse = {"requeuehold": "Requested operation is presently disabled"}
    else:  # it was killed before it told any node
        slurm.write_down()
        slurm.dies_after, slurm.lingers, slurm.unanswered = "requeuehold", True, True
    assert site.look() == ["refused"]
    slurm.refuse, slurm.sharing = {}, {}
    site.look(0 if refused else 700)
    assert "taking" not in slurm.admin_comments[7], "or an operator's requeuehold would count as the packer's"
    slurm.end(7)
    assert "taken back" not in site.look()
    assert slurm.jobs[7].state == "FAILED"


def test_a_new_packer_adopts_what_runs(site: Site) -> None:
    slurm = site.slurm
    slurm.submit(7)
    site.look()
    slurm.start()
    site.restart()
    assert site.look() == ["started"]
    slurm.submit(8)
    slurm.submit(9)
    site.look()
    site.look(30)
    assert slurm.jobs[8].comment == "hetstream:gpu=1"  # GPU 0 has one slot, which is taken
    assert slurm.jobs[9].priority == 0


def test_tasks_of_an_array_are_placed_one_by_one(site: Site) -> None:
    slurm = site.slurm
    slurm.submit(33, array_job_id=33, array_tasks="3-5%2")
    seen = site.packer.see()
    assert [job.job for job in seen.state.waiting] == ["33_3", "33_4", "33_5"]


def test_slurm_that_forgets_no_gres_is_asked_for_what_it_can_start(site: Site) -> None:
    """22.05 keeps a GRES with a count of 0, and starts the job only where one of it is free (seen on 22.05.8)."""
    slurm = site.slurm
    slurm.submit(7)
    slurm.admin_comments[7] = "hetstream:asked=gpu,p0"
    slurm.guaranteed = {("g1", 0), ("g1", 1)}
    assert site.look() == ["waits"]
    assert "starts it only where what it asked for before is free as well: gpu, p0" in site.events[0].reason
    slurm.guaranteed = {("g1", 0)}
    slurm.used_share = {("g1", 0): 0.9}
    assert site.look() == ["placed"]
    assert slurm.admin_comments[7].endswith("hetstream:asked=gpu,p0,p1")
