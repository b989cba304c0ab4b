"""The elastic controller's I/O over FakeSlurm and a list for a dispatcher: what it asks, submits, drains, cancels."""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

from hetstream.hetjob.elastic.companions import Holes, TimeRequest
from hetstream.hetjob.elastic.controller import Controller, ControllerState
from hetstream.hetjob.elastic.snapshot import Action, CompanionState, Decision, Limits, Snapshot, job_ids
from hetstream.hetjob.elastic.tuning import LocalLoading
from hetstream.hetjob.errors import SlurmCommandError
from hetstream.hetjob.job.job import JobEnvironment
from hetstream.hetjob.master.companions import CompanionJobs
from hetstream.hetjob.master.controller_state_file import MOST_CHANGES, CompanionTime, ControllerStateFile
from hetstream.hetjob.master.elastic import Elastic, PollBackoff, TrainerCpus, WorkerRates
from hetstream.hetjob.master.memory import MemoryReading, TrainerMemory
from hetstream.hetjob.ports import JobDemand, MarkedJob, SiteReading
from hetstream.mpi_dataworkers.errors import ServiceUnavailable
from hetstream.mpi_dataworkers.wire.messages import (
    DataWorkerStatus,
    LoaderStats,
    LoaderStatus,
    Status,
    SteerDataWorkers,
)
from hetstream.slurm_plugin.client.fake import FakeSlurm

WaitUntil = Callable[..., None]
LOOK = ("marked_jobs", ("hets:start=7.0",))


def loader(wait_share: float, pid: int = 1) -> LoaderStatus:
    return LoaderStatus("job", 0, 0, 1, "h", pid, 0, 5, 90, 0, 8, 1, 4.0, 1e3, wait_share, LoaderStats())


class Dispatcher:
    """Hears orders; says that every companion that runs is a data worker, until it is told to drain it."""

    def __init__(self, slurm: FakeSlurm) -> None:
        self.slurm = slurm
        self.orders: list[SteerDataWorkers] = []
        self.away = False
        self.deaf = False
        self.drained: set[str] = set()
        self.hosts: dict[str, str] = {}
        self.memory: dict[str, int] = {}

    def steer(self, order: SteerDataWorkers) -> Status:
        if self.away:
            raise ServiceUnavailable("away")
        self.orders.append(order)
        for job_id in order.drain:
            self.drained.add(job_id)
            for child in self.slurm.jobs[job_id]:
                child.terminate()
        workers = [
            DataWorkerStatus(
                0,
                self.hosts.get(job_id, "h"),
                int(job_id),
                "working",
                1,
                9,
                1.0 if job_id in self.hosts else 2.0,
                0.5,
                0,
                9.0,
                0.1,
                job_id,
                self.memory.get(job_id, 0),
            )
            for job_id in list(self.slurm.jobs)
            if job_id not in self.drained | self.slurm.waiting and not self.deaf
        ]
        return Status(1, 9.0, workers, [loader(0.5)], len(workers), 0, 1, 0, 1.0)

    def close(self) -> None:
        pass


class NoLimit:
    """A site daemon that says nothing."""

    def report(self, demand: JobDemand) -> None:
        pass

    def data_workers(self) -> int | None:
        return None

    def preferred_nodes(self) -> tuple[str, ...]:
        return ()

    def marked(self, mark: str) -> SiteReading | None:
        return None


class Script(Controller):
    """A controller that decides what a test has written down, and notes what it sees."""

    def __init__(self, *decisions: Decision) -> None:
        super().__init__(Limits(0, 4))
        self.script = list(decisions)
        self.seen: list[Snapshot] = []
        self.refusals = 0
        self.go_on = threading.Event()

    def decide(self, snapshot: Snapshot, now: float) -> Decision:
        self.seen.append(snapshot)
        self.go_on.wait(20)
        return self.script.pop(0) if self.script else Decision(Action.HOLD, 0, "the script is over")

    def refused(self, now: float) -> float:
        self.refusals += 1
        return 1.0


class World:
    def __init__(self, directory: Path) -> None:
        self.job = JobEnvironment("7", "train", "gpu0", directory, 1, 0)
        self.job.directory.mkdir(parents=True)
        self.job.address_file.touch()
        self.slurm = FakeSlurm(directory, dict(os.environ))
        self.dispatcher = Dispatcher(self.slurm)
        self.companions = CompanionJobs(
            self.slurm, self.job, ["--partition=cpu"], lambda cpus: f"sleep 60{cpus}", None, ["--nice=9"]
        )
        self.elastic: Elastic | None = None

    def run(
        self,
        controller: Controller,
        site: object = None,
        clock: Callable[[], float] = time.monotonic,
        measuring: object = None,
        holes: Holes | None = None,
        left_s: float = 10_000.0,
    ) -> Elastic:
        controller.go_on.set() if isinstance(controller, Script) else None
        controller_state_file = ControllerStateFile(self.job.controller_state_file)
        connect = lambda: self.dispatcher  # noqa: E731
        self.companions.time = CompanionTime(holes, None, time.time() + left_s)
        self.elastic = Elastic(controller, self.companions, 0, connect, controller_state_file, site, clock, measuring)  # type: ignore[arg-type]
        self.elastic.begin()
        return self.elastic

    def submissions(self) -> list[tuple[str, ...]]:
        return [words for method, words in self.slurm.calls if method == "submit"]

    def alive(self) -> list[str]:
        return [one.job_id for one in self.companions.listed()]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait_until: WaitUntil) -> Iterator[World]:
    monkeypatch.setattr("hetstream.hetjob.master.elastic._EVERY_S", 0.02)
    monkeypatch.setattr("hetstream.hetjob.master.elastic._SOONEST_S", 0.0)
    world = World(tmp_path)
    yield world
    if world.elastic is not None:
        world.elastic.stop()
        world.elastic.join()
    wait_until(lambda: not world.alive(), what="the end of the companions")


def grow(count: int) -> Decision:
    return Decision(Action.GROW, count, "it starves", cpus=2)


def test_each_companion_is_a_job_of_its_own_with_a_key(world: World, wait_until: WaitUntil) -> None:
    elastic = world.run(Script(grow(2)))
    wait_until(lambda: len(world.alive()) == 2, what="two companions")
    assert list(world.slurm.keys) == ["7.0.companion-0", "7.0.companion-1"]
    words = world.submissions()[0]
    assert words[:4] == ("--partition=cpu", "--nodes=1", "--ntasks=1", "--cpus-per-task=2")
    assert {"--dependency=after:7", "--kill-on-invalid-dep=yes", "--comment=hets:trainer=7 hets:start=7.0"} <= {*words}
    assert next(order for order in world.dispatcher.orders if order.action).reason == "it starves"
    elastic.stop()
    elastic.join()
    wait_until(lambda: not world.alive(), what="the end of the companions")
    decisions = elastic.summary()["decisions"]
    assert [(one["action"], one["count"], one["data_workers_before"]) for one in decisions] == [("grow", 2, 0)]


@pytest.mark.shows("shrinking cancels companions, each by its own job id; no component of the job is touched")
def test_drained_companions_leave_and_cancelled_ones_are_cancelled_by_their_own_id(
    world: World, wait_until: WaitUntil
) -> None:
    script = Script(grow(3), Decision(Action.DRAIN, 1, "enough", ("1000",)), Decision(Action.CANCEL, 1, "x", ("1001",)))
    world.run(script)
    wait_until(lambda: world.alive() == ["1002"], what="one companion")
    assert [words for method, words in world.slurm.calls if method == "cancel"] == [("1001",)]
    assert world.dispatcher.drained == {"1000"}
    wait_until(lambda: script.seen[-1].num_companions == 1, what="the controller to see it")
    assert script.seen[-1].companions[0].rate_per_s == 4.0


@pytest.mark.shows("preferred nodes are wishes of the job that submits (`--nodelist`), and Slurm decides")
def test_a_preferred_node_is_a_wish_and_slurm_has_the_last_word(world: World, wait_until: WaitUntil) -> None:
    class Site(NoLimit):
        def preferred_nodes(self) -> tuple[str, ...]:
            return ("cpu1", "cpu2")

    def nodes_of(words: tuple[str, ...]) -> list[str]:
        return [word for word in words if word.startswith("--nodelist")]

    now = [0.0]
    world.slurm.full = {"cpu2"}
    world.run(Script(grow(3)), Site(), clock=lambda: now[0])
    wait_until(lambda: len(world.alive()) == 3, what="three companions")
    assert [nodes_of(words) for words in world.submissions()] == [["--nodelist=cpu1"], ["--nodelist=cpu2"], []]
    now[0] = 29.0
    turns = len(world.dispatcher.orders)
    wait_until(lambda: len(world.dispatcher.orders) > turns + 2, what="two turns")
    assert world.slurm.waiting == {"1001"}
    now[0] = 31.0
    wait_until(lambda: len(world.submissions()) == 4, what="another submission")
    wait_until(lambda: world.alive() == ["1000", "1002", "1003"], what="three that run")
    assert nodes_of(world.submissions()[3]) == []
    assert world.slurm.waiting == set()


def test_a_companion_that_runs_out_of_memory_leaves_when_the_larger_one_works(
    world: World, wait_until: WaitUntil
) -> None:
    """It has 4,000 MB and takes 20 MB more each time that memory is read, which is every ten seconds."""
    now = [0.0]
    world.companions = CompanionJobs(world.slurm, world.job, ["--mem-per-cpu=2000"], lambda cpus: f"sleep 60{cpus}")
    script = Script(grow(1))

    def clock() -> float:
        now[0] += 10.0
        world.dispatcher.memory["1000"] = (2000 << 20) + int(now[0]) * (2 << 20)
        return now[0]

    world.run(script, clock=clock)
    wait_until(lambda: world.dispatcher.drained == {"1000"}, what="the drain")
    (memory,) = [word for word in world.submissions()[1] if word.startswith("--mem-per-cpu=") and word.endswith("M")]
    assert int(memory.removeprefix("--mem-per-cpu=")[:-1]) >= 3000
    wait_until(lambda: world.alive() == ["1001"], what="the larger one alone")
    assert len(world.submissions()) == 2


def test_a_trainer_that_runs_out_of_memory_is_told_of_in_the_log_the_headline_and_the_summary(
    world: World, wait_until: WaitUntil, caplog: pytest.LogCaptureFixture
) -> None:
    now = [0.0]
    script = Script()
    elastic = world.run(script, clock=lambda: now[0])
    elastic.memory_watch.trainer = TrainerMemory(
        "7", lambda: MemoryReading((32 << 30) + int(now[0]) * (8 << 20), 64 << 30)
    )

    def goes_on() -> bool:
        now[0] += 10.0
        orders = world.dispatcher.orders
        return bool(orders) and "the trainer runs out of memory" in orders[-1].elastic

    wait_until(goes_on, what="the warning")
    line = elastic.summary()["trainer_memory"]
    assert line.startswith("the trainer runs out of memory: ")
    assert "hetstream migrate 7 --mem=" in line
    warnings = [record for record in caplog.records if "the trainer runs out of memory" in record.getMessage()]
    assert len(warnings) == 1, "once"
    assert script.seen[-1].num_companions == 0, "nothing is done about it"


def test_a_companion_in_a_hole_leaves_before_its_end_and_another_takes_its_place(
    world: World, wait_until: WaitUntil
) -> None:
    now, script = [0.0], Script(grow(1))
    script.wanted = lambda snapshot, now: 1  # type: ignore[method-assign]
    world.slurm.times["1000"] = 5.0, 115.0
    elastic = world.run(script, clock=lambda: now[0], holes=Holes(120))
    wait_until(lambda: len(script.seen) > 4 and script.seen[-1].of(CompanionState.WORKING), what="a data worker")
    assert {"--time=60", "--time-min=2", "--nice=9"} <= {*world.submissions()[0]}
    now[0] = 104.0
    turns = len(script.seen)
    wait_until(lambda: len(script.seen) > turns + 2, what="turns")
    assert world.dispatcher.drained == set()
    now[0] = 106.0
    wait_until(lambda: world.alive() == ["1001"], what="its successor alone")
    assert world.dispatcher.drained == {"1000"}
    assert "--time-min=4" in world.submissions()[1], "the hole was as long as what was asked for, or longer"
    told = next(order for order in world.dispatcher.orders if order.action == "drain")
    assert told.reason == "the time of 1 companion ends in 9 s: they leave, 1 more take their places"
    wait_until(lambda: job_ids(script.seen[-1].of(CompanionState.WORKING)) == ("1001",), what="it to work alone")
    elastic.stop()
    elastic.join()
    summary = elastic.summary()
    assert (summary["companions"], summary["companions_in_holes"]) == (2, 1)
    assert summary["companion_cpu_s_in_holes"] == 2 * 111.0
    assert [one["action"] for one in summary["decisions"]] == ["grow", "drain"]
    wait_until(lambda: not world.alive(), what="the end of the companions")


def test_a_companion_that_is_not_wanted_any_more_has_no_successor(world: World, wait_until: WaitUntil) -> None:
    script = Script(grow(2))
    script.wanted = lambda snapshot, now: 1  # type: ignore[method-assign]
    world.slurm.times |= {"1000": (5.0, 5.0), "1001": (5.0, 3000.0)}
    world.run(script, holes=Holes(60))
    wait_until(lambda: world.alive() == ["1001"], what="the end of one")
    reasons = [order.reason for order in world.dispatcher.orders if order.action == "drain"]
    assert reasons[0].endswith("they leave, no other takes their places")


def test_a_companion_that_waits_asks_for_a_shorter_hole(world: World, wait_until: WaitUntil) -> None:
    holes, now = Holes(60), [0.0]
    holes.lasted(120, 120)
    world.dispatcher.deaf = True
    world.slurm.full = {"cpu1"}
    world.companions.submit(1, node="cpu1")  # one of before: what it asks for is not known

    class Site(NoLimit):
        def preferred_nodes(self) -> tuple[str, ...]:
            return ("cpu1",)

    script = Script(grow(1))
    world.run(script, Site(), lambda: now[0], holes=holes)
    wait_until(lambda: script.seen and script.seen[-1].num_companions == 2, what="both")
    now[0] = 29.0
    turns = len(script.seen)
    wait_until(lambda: len(script.seen) > turns + 2, what="turns")
    world.elastic._tracked["1001"].node = ""  # type: ignore[union-attr]
    now[0] = 46.0
    wait_until(lambda: any(method == "update" for method, _ in world.slurm.calls), what="the update")
    assert [words for method, words in world.slurm.calls if method == "update"] == [("1001", "TimeMin=2")]
    now[0] = 95.0
    wait_until(lambda: ("update", ("1001", "TimeMin=1")) in world.slurm.calls, what="the next")


def test_no_companion_is_submitted_for_a_job_that_ends_before_it_is_of_use(
    world: World, wait_until: WaitUntil, caplog: pytest.LogCaptureFixture
) -> None:
    script = Script(grow(1))
    world.run(script, holes=Holes(180), left_s=100.0)
    wait_until(lambda: script.refusals, what="the refusal")
    assert not world.submissions()
    assert "a companion is worth a hole of 180 s (it takes 10 s to start and leaves 10 s before its end)" in caplog.text


def test_a_node_that_slurm_refuses_is_left_out(world: World, wait_until: WaitUntil) -> None:
    class Site(NoLimit):
        def preferred_nodes(self) -> tuple[str, ...]:
            return ("no-such-node",)

    submit = world.companions.submit

    def choosy(cpus: int, mb_per_cpu: int | None = None, node: str = "", asked: TimeRequest | None = None) -> str:
        if node:
            raise SlurmCommandError(["sbatch"], 1, "", "Invalid node name specified")
        return submit(cpus, mb_per_cpu)

    world.companions.submit = choosy  # type: ignore[method-assign]
    script = Script(grow(1))
    world.run(script, Site())
    wait_until(lambda: len(world.alive()) == 1, what="a companion on any node")
    assert script.refusals == 0


def test_a_refused_submission_is_the_controllers_to_know(world: World, wait_until: WaitUntil) -> None:
    world.slurm.refuse.add("submit")
    script = Script(grow(3))
    world.run(script)
    wait_until(lambda: script.refusals, what="the refusal")
    assert script.refusals == 1
    assert len(world.submissions()) == 1


def test_companions_of_a_job_master_of_before_are_taken_over(world: World, wait_until: WaitUntil) -> None:
    world.companions.submit(1)
    world.companions = CompanionJobs(world.slurm, world.job, [], lambda cpus: f"sleep 60{cpus}")
    script = Script(grow(1))
    world.run(script)
    wait_until(lambda: script.seen and script.seen[-1].num_companions == 2, what="both companions")
    assert list(world.slurm.keys) == ["7.0.companion-0", "7.0.companion-1"]


def test_slurm_is_asked_seldom_about_companions_that_wait_for_long(world: World, wait_until: WaitUntil) -> None:
    now = [0.0]
    world.dispatcher.deaf = True
    world.run(Script(grow(1)), clock=lambda: now[0])

    def asked_in_20_turns() -> int:
        before, turns = world.slurm.calls.count(LOOK), len(world.dispatcher.orders)
        wait_until(lambda: len(world.dispatcher.orders) > turns + 20, what="20 turns")
        return world.slurm.calls.count(LOOK) - before

    wait_until(world.alive, what="a companion")
    assert asked_in_20_turns() >= 20
    for time_s in (61.0, 92.0, 1000.0):
        now[0] = time_s
        asked_in_20_turns()
        assert asked_in_20_turns() == 0
    now[0] = 1590.0
    assert asked_in_20_turns() == 0
    now[0] = 1601.0
    assert asked_in_20_turns() == 1


@pytest.mark.shows("where a site daemon answers, its reading of a job's companions stands for `squeue`")
def test_slurm_is_not_asked_where_the_site_daemon_has_read_since(world: World, wait_until: WaitUntil) -> None:
    class Site(NoLimit):
        reading: SiteReading | None = None

        def marked(self, mark: str) -> SiteReading | None:
            assert mark == "hets:start=7.0"
            return self.reading

    now, site, script = [10.0], Site(), Script(grow(1))
    world.dispatcher.deaf = True
    site.reading = SiteReading(9.0, [])
    world.run(script, site, clock=lambda: now[0])

    def asked_in_20_turns() -> int:
        before, turns = world.slurm.calls.count(LOOK), len(world.dispatcher.orders)
        wait_until(lambda: len(world.dispatcher.orders) > turns + 20, what="20 turns")
        return world.slurm.calls.count(LOOK) - before

    wait_until(world.alive, what="a companion")
    asked_in_20_turns()
    assert script.seen[-1].num_companions == 1, "a reading of before its submission does not end it"
    site.reading = SiteReading(99.0, [MarkedJob("1000", "RUNNING", 2)])
    now[0] = 110.0
    assert asked_in_20_turns() == 0
    assert script.seen[-1].num_companions == 1
    now[0] = 600.0
    assert asked_in_20_turns() == 1, "the daemon has not read for long"
    site.reading = SiteReading(1999.0, [MarkedJob("1000", "COMPLETING", 2)])
    now[0] = 2000.0
    assert asked_in_20_turns() == 0
    assert script.seen[-1].num_companions == 0


def test_slurm_is_not_asked_about_companions_that_work(world: World, wait_until: WaitUntil) -> None:
    world.run(Script(grow(2)))
    wait_until(lambda: len(world.alive()) == 2, what="two companions")

    def turns(count: int) -> None:
        before = len(world.dispatcher.orders)
        wait_until(lambda: len(world.dispatcher.orders) > before + count, what="turns")

    turns(5)  # until the dispatcher has shown both
    before = world.slurm.calls.count(LOOK)
    turns(20)
    assert world.slurm.calls.count(LOOK) == before
    # One that the dispatcher does not show any more is looked for at once.
    for child in world.slurm.jobs["1000"]:
        child.terminate()
    world.dispatcher.drained.add("1000")
    wait_until(lambda: world.slurm.calls.count(LOOK) > before, what="a question to Slurm")


def test_how_often_a_thousand_jobs_ask_slurm() -> None:
    """Each has a companion that waits in the queue; the questions of an hour, of which the last half hour counts."""
    looks, asked = PollBackoff(), []
    for now in range(3600):
        if looks.is_due("one waits", is_settled=False, now=float(now)):
            asked.append(now)
    assert asked[:6] == [0, 2, 4, 8, 16, 32]
    rpcs_per_s = 1000 * 2 * sum(now >= 1800 for now in asked) / 1800  # one squeue is two requests
    assert rpcs_per_s <= 5
    assert not any(looks.is_due("all work", is_settled=True, now=float(now)) for now in range(3600, 90_000))


def test_what_is_known_outlives_the_job_master(world: World, wait_until: WaitUntil) -> None:
    script = Script(grow(1))
    script.local = LocalLoading(0.25)
    world.run(script)
    wait_until(world.job.controller_state_file.exists, what="the controller_state_file")
    assert stat.S_IMODE(world.job.controller_state_file.stat().st_mode) == 0o600
    wait_until(lambda: len(script.seen) > 2, what="turns")
    found = ControllerStateFile(world.job.controller_state_file)
    assert found.memory is not None
    assert found.memory.local == LocalLoading(0.25)
    assert [change["reason"] for change in found.changes] == ["it starves"]
    assert Controller(Limits(0, 4), found.memory).memory() == found.memory


@pytest.mark.parametrize("text", ["", "{", '{"memory": {"stage": "dancing"}, "changes": []}', "\xff"])
def test_a_controller_state_file_that_says_nothing_is_no_reason_to_fail(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "elastic.json"
    path.write_bytes(text.encode("latin-1"))
    assert ControllerStateFile(path).memory is None
    assert "the elastic controller begins anew" in caplog.text
    controller_state_file = ControllerStateFile(tmp_path / "nowhere" / "elastic.json")
    controller_state_file.changes.extend({"count": number} for number in range(MOST_CHANGES + 1))
    for _ in range(2):
        controller_state_file.write(ControllerState())
    assert caplog.text.count("cannot be written") == 1
    assert controller_state_file.changes[0] == {"count": 1}


def test_a_dispatcher_that_is_away_and_a_slurm_that_does_not_answer_end_nothing(
    world: World, wait_until: WaitUntil
) -> None:
    script = Script(grow(1))
    world.dispatcher.away = True
    world.slurm.refuse.add("marked_jobs")
    world.run(script)
    wait_until(lambda: LOOK not in world.slurm.calls, what="nothing")
    world.dispatcher.away = False
    wait_until(lambda: LOOK in world.slurm.calls, what="a question to Slurm")
    world.slurm.refuse.clear()
    wait_until(lambda: len(world.alive()) == 1, what="a companion")


def test_the_site_limit_reaches_the_controller(world: World, wait_until: WaitUntil) -> None:
    class Site(NoLimit):
        reports: ClassVar[list[JobDemand]] = []

        def report(self, demand: JobDemand) -> None:
            self.reports.append(demand)

        def data_workers(self) -> int | None:
            return 3

    script = Script()
    world.run(script, Site())
    wait_until(lambda: script.seen, what="a turn")
    assert script.seen[0].site_limit == 3
    wait_until(lambda: Site.reports, what="a report")
    assert replace(Site.reports[0], measured=None) == JobDemand(0, 0, 1, 1, 0.5)
    wait_until(lambda: any("by the site 3" in order.elastic for order in world.dispatcher.orders), what="it to be said")


def test_a_companion_that_starts_when_the_job_is_over_ends_at_once(world: World, wait_until: WaitUntil) -> None:
    world.job.address_file.unlink()
    job_id = world.companions.submit(1)
    wait_until(lambda: world.slurm.jobs[job_id][0].poll() == 0, what="its end")


def test_a_data_worker_that_is_idle_is_as_fast_as_it_was() -> None:
    """With a deep buffer it makes an epoch in a burst, and nothing while the trainer takes its steps."""

    def process(pid: int, steps_per_s: float, busy_share: float, job: str = "8") -> DataWorkerStatus:
        return DataWorkerStatus(0, "h", pid, "working", 1, 9, steps_per_s, busy_share, 0, 9.0, 0.1, job)

    rates = WorkerRates()
    assert rates.by_job([process(1, 0, 0), process(2, 6, 1.0)]) == {"8": 6.0}
    assert rates.by_job([process(1, 2, 0.5), process(2, 6, 1.0)]) == {"8": 10.0}
    assert rates.by_job([process(1, 0, 0), process(2, 3, 0.5), process(3, 1, 1.0, "9")]) == {"8": 10.0, "9": 1.0}
    assert rates.by_job([process(1, 0, 0)]) == {"8": 4.0}
    assert rates.by_job([process(2, 0, 0)]) == {"8": 0.0}, "it has gone, and another one has its number"


def test_cpus_of_a_trainer_on_this_host() -> None:
    import socket

    cpus = TrainerCpus()
    here = LoaderStatus(
        "job", 0, 0, 1, socket.gethostname(), os.getpid(), 0, 5, 90, 0, 8, 1, 4.0, 1e3, 0.0, LoaderStats()
    )
    assert cpus.used([here], 0.0) is None
    until = time.process_time() + 0.1
    while time.process_time() < until:
        pass
    used = cpus.used([here, loader(0.0)], 1.0)
    assert used is not None
    assert 0.08 < used < 3  # the kernel counts hundredths of a second
    assert cpus.used([loader(0.0, 1)], 2.0) is None
