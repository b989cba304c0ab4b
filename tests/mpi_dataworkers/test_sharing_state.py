"""Jobs that share data workers, in the dispatcher's decisions and the worker's cache: no sockets, no clock."""

from __future__ import annotations

import pytest

from hetstream.mpi_dataworkers.dispatcher.sharing import ShareGroup
from hetstream.mpi_dataworkers.dispatcher.state import DispatcherState
from hetstream.mpi_dataworkers.dispatcher.tables import LEASES_PER_WORKER, Instruction, Send
from hetstream.mpi_dataworkers.wire.messages import (
    CloseSession,
    FinishLease,
    GrantLease,
    HeldLease,
    LoaderStats,
    Notice,
    OpenSession,
    PlannedOrder,
    Program,
    ProvidePipeline,
    Refused,
    RegisterLoader,
    RegisterWorker,
    ReportProgress,
    SessionSpec,
    Sharing,
)
from hetstream.mpi_dataworkers.worker.steps import BatchCache, CachedBatch

STATS = LoaderStats()
STEPS = 100


class Jobs:
    """A dispatcher with workers w0, w1, ... and one loader for each job, whose session has the job's name."""

    def __init__(self, workers: int, mode: str = "lossless", incarnation: int = 1) -> None:
        self.state = DispatcherState(incarnation, 0.0, {"w0", "w1"} if incarnation > 1 else ())
        self.mode = mode
        self.now = 0.0
        self.grants: list[tuple[str, GrantLease]] = []
        for number in range(workers):
            self.take(self.state.handle(f"w{number}", RegisterWorker("host", number, "", []), 0.0))

    def take(self, instructions: list[Instruction]) -> list[GrantLease]:
        new = [(i.peer, i.message) for i in instructions if isinstance(i, Send) and isinstance(i.message, GrantLease)]
        self.grants += new
        self.state.validate()
        return [grant for _, grant in new]

    def open(self, job: str, consumed: int = 0, epoch: int = 0, window: int = 4, shift: int = 0) -> list[GrantLease]:
        peer = f"loader-{job}"
        if peer not in self.state.tables.loaders:
            registration = RegisterLoader(job, 0, 0, 1, "host", 1, "d", {})
            self.take(self.state.handle(peer, registration, 0.0))
        order = PlannedOrder(STEPS, 1, 1, 0, False, False, 0)
        session = SessionSpec(job, "d", epoch, 0, order, "tcp://loader:1", Sharing("key", self.mode, STEPS))  # type: ignore[arg-type]
        return self.take(self.state.handle(peer, OpenSession(session, STEPS, consumed, [], window, None, shift), 0.0))

    def finish_all(self, **dropped: list[tuple[int, int]]) -> None:
        """Let the workers send all that they hold, and say what their caches dropped (one worker: key is `key`)."""
        for worker, record in list(self.state.tables.workers.items()):
            for token in sorted(record.tokens):
                self.take(self.state.handle(worker, FinishLease(token, 0.1, dict(dropped)), self.now))

    def consume(self, job: str, consumed: int, window: int = 4) -> list[GrantLease]:
        report = ReportProgress(job, consumed, [], window, STATS)
        return self.take(self.state.handle(f"loader-{job}", report, 0.0))

    def makers(self, job: str) -> dict[int, str]:
        """Which worker each position of the common stream was leased to for this job, last lease first."""
        return {
            grant.session.epoch * STEPS + step + grant.shift: worker
            for worker, grant in self.grants
            if grant.session.session_id == job
            for step in range(grant.first_step, grant.stop_step)
        }


def test_a_second_job_is_served_by_the_worker_that_makes_the_step_beyond_its_share_of_leases() -> None:
    jobs = Jobs(workers=2)
    jobs.open("a")
    jobs.open("b")
    assert jobs.makers("a") == jobs.makers("b")
    assert sorted(jobs.makers("a")) == [0, 1, 2, 3]
    assert all(len(worker.tokens) > LEASES_PER_WORKER for worker in jobs.state.tables.workers.values())
    assert all(worker.num_making == LEASES_PER_WORKER for worker in jobs.state.tables.workers.values())


def test_jobs_that_take_turns_in_front_make_each_step_once() -> None:
    jobs = Jobs(workers=3)
    jobs.open("a")
    jobs.open("b")
    for step, (first, second) in enumerate([("a", "b"), ("b", "a")] * 20, 1):
        jobs.finish_all()
        jobs.consume(first, step)
        jobs.consume(second, step)
    made = [grant for _, grant in jobs.grants if not grant.again]
    steps = [step for grant in made for step in range(grant.first_step, grant.stop_step)]
    assert sorted(steps) == list(range(len(steps))), "each position is leased for the first time once"
    assert jobs.makers("a") == jobs.makers("b")


def test_what_left_the_cache_is_leased_to_anyone_again_and_marked() -> None:
    jobs = Jobs(workers=1)
    jobs.open("a")
    jobs.finish_all(key=[(0, 1)])
    jobs.open("b")
    for _ in range(3):
        jobs.finish_all()
    leases = [(one.first_step, one.stop_step, one.again) for _, one in jobs.grants if one.session.session_id == "b"]
    assert leases[0] == (0, 1, True), "lossless: nothing is skipped"
    assert sorted(jobs.makers("b")) == [0, 1, 2, 3]


def test_a_lost_workers_cache_is_not_counted_on() -> None:
    jobs = Jobs(workers=2)
    jobs.open("a")
    jobs.finish_all()
    jobs.take(jobs.state.peer_gone("w0", 1.0))
    jobs.open("b")
    for _ in range(4):
        jobs.finish_all()
    assert set(jobs.makers("b")) == {0, 1, 2, 3}
    assert {worker for worker, grant in jobs.grants if grant.session.session_id == "b"} == {"w1"}


def test_after_a_dispatchers_restart_leases_that_workers_hold_are_shared_again() -> None:
    jobs = Jobs(workers=0, incarnation=2)
    jobs.take(jobs.state.handle("w0", RegisterWorker("host", 0, "", [HeldLease(7, "a", 10, 14)]), 0.1))
    jobs.take(jobs.state.handle("w1", RegisterWorker("host", 1, "", []), 0.1))
    jobs.open("a", consumed=10)
    jobs.open("b", consumed=10)
    jobs.take(jobs.state.tick(3.0))
    assert jobs.makers("b") == dict.fromkeys(range(10, 14), "w0")


def test_the_group_is_forgotten_with_its_last_session() -> None:
    jobs = Jobs(workers=1)
    jobs.open("a")
    jobs.take(jobs.state.handle("loader-a", CloseSession("a", 4, STATS), 1.0))
    assert len(jobs.state.leasing.streams.groups) == 0
    assert not any(grant.again for grant in jobs.open("b"))


def test_in_window_mode_a_late_job_begins_inside_the_window() -> None:
    jobs = Jobs(workers=1, mode="window")
    jobs.open("a")
    for step in range(1, 30):
        jobs.finish_all()
        jobs.consume("a", step)
    jobs.finish_all(key=[(0, 20)])
    (first, *_) = jobs.open("b")
    assert (first.first_step, first.shift, first.again) == (0, 20, True)


def test_in_window_mode_a_slow_job_skips_and_an_early_one_does_not_run_ahead() -> None:
    jobs = Jobs(workers=1, mode="window")
    jobs.open("fast")
    jobs.open("slow")
    for step in range(1, 30):
        jobs.finish_all(key=[(max(0, step - 9), max(0, step - 8))])
        jobs.consume("fast", step)
    shifts = [grant.shift for grant in jobs.consume("slow", 4)]
    assert shifts[0] > 0
    assert sorted(jobs.makers("slow"))[:4] == [0, 1, 2, 3], "what was leased to it before it keeps"
    ahead = jobs.open("later", epoch=5)
    assert ahead[0].shift < 0
    assert 500 + ahead[0].shift <= 40


def test_in_window_mode_nobody_goes_back_when_the_dispatcher_was_restarted() -> None:
    jobs = Jobs(workers=1, mode="window", incarnation=2)
    jobs.open("slow", consumed=5, shift=20)
    jobs.open("fast", consumed=30)
    jobs.now = 3.0
    jobs.take(jobs.state.tick(jobs.now))
    for _ in range(4):
        jobs.finish_all()
    slow, fast = sorted(jobs.makers("slow")), sorted(jobs.makers("fast"))
    assert min(slow) >= 25
    assert fast == [30, 31, 32, 33]


@pytest.mark.parametrize(("position", "goes_to"), [(3, 6), (6, 6), (9, 9), (12, 12)])
def test_a_reader_in_window_mode_follows(position: int, goes_to: int) -> None:
    group = ShareGroup()
    group.lease(0, 10, "w")
    group.drop("w", [(0, 6)])
    assert group.follow(position) == goes_to


def test_jobs_that_do_not_share_get_equal_shares_of_the_workers() -> None:
    state = DispatcherState(1, 0.0)
    for number in range(4):
        state.handle(f"w{number}", RegisterWorker("host", number, "", []), 0.0)
    order = PlannedOrder(STEPS, 1, 1, 0, False, False, 0)
    for job in ("a", "b"):
        state.handle(f"loader-{job}", RegisterLoader(job, 0, 0, 1, "host", 1, "d", {}), 0.0)
        session = SessionSpec(job, "d", 0, 0, order, "tcp://loader:1")
        state.handle(f"loader-{job}", OpenSession(session, STEPS, 0, [], 16, None), 0.0)
    done = {"a": 0, "b": 0}
    for now in range(1, 20):
        for lease in list(state.tables.leases.values()):
            if lease.worker in state.tables.workers and lease.token in state.tables.workers[lease.worker].tokens:
                state.handle(lease.worker, FinishLease(lease.token, 0.02 * (lease.stop - lease.first)), float(now))
                done[lease.session_id] = max(done[lease.session_id], lease.stop)
        for job, stop in done.items():
            state.handle(f"loader-{job}", ReportProgress(job, stop, [], 16, STATS), float(now))
    assert abs(done["a"] - done["b"]) <= 16


@pytest.mark.shows("two loaders with one `pipeline_name` have one pipeline; a dataset of another structure is refused")
def test_one_pipeline_name_for_two_pipelines_is_refused() -> None:
    state = DispatcherState(1, 0.0)
    one = {"pipeline_name": "images", "dataset": "A", "length": "10"}
    state.handle("x", RegisterLoader("job-x", 0, 0, 1, "host", 1, "d", one), 0.0)
    _, out = state.handle("y", RegisterLoader("job-y", 0, 0, 1, "host", 2, "e", one | {"dataset": "B"}), 0.0)
    assert isinstance(out, Send)
    assert isinstance(out.message, Refused)
    assert "pipeline name 'images' is in use for another pipeline (dataset: A there, B here)" in out.message.text
    _, out = state.handle("z", RegisterLoader("job-z", 0, 0, 1, "host", 3, "e", one), 0.0)
    assert isinstance(out, Send)
    assert not isinstance(out.message, Refused)


def told(state: DispatcherState, job: str, pipeline: ProvidePipeline, key: str, **described: str) -> list[str]:
    """What a loader of a job hears when it begins a pass."""
    description = {"dataset": "A", "length": "10", "sharing": "lossless", "pipeline_name": ""} | described
    registration = RegisterLoader(job, 0, 0, 1, "host", ord(job), pipeline.pipeline_id, description)
    order = PlannedOrder(STEPS, 1, 1, 0, False, False, 0)
    session = SessionSpec(job, pipeline.pipeline_id, 0, 0, order, "tcp://loader:1", Sharing(key, "lossless", STEPS))
    out: list[Instruction] = []
    for message in (registration, pipeline, OpenSession(session, STEPS, 0, [], 4, None, 0)):
        out += state.handle(job, message, 0.0)
    return [one.message.text for one in out if isinstance(one, Send) and isinstance(one.message, Notice)]


def test_who_is_to_share_and_does_not_is_told_why_once() -> None:
    state = DispatcherState(1, 0.0)
    here = Program("/here", ["/modules"])
    first = ProvidePipeline("first", here, b"lr=1", b"A")
    assert told(state, "a", first, "key") == []
    (text,) = told(state, "b", ProvidePipeline("second", here, b"lr=2", b"A"), "other key")
    assert text.startswith("the loader of job 'b' shares no batches with the one of job 'a'")
    assert "their command lines, their environment or other settings differ. If the two read the same data" in text
    (text,) = told(state, "c", ProvidePipeline("third", Program("/there", []), b"", b""), "third key")
    assert "they run in /here there, in /there here" in text
    assert told(state, "d", first, "key") == [], "it shares with the first"
    assert told(state, "e", ProvidePipeline("e", here, b"", b"A"), "e", pipeline_name="mine") == []
    assert told(state, "f", ProvidePipeline("f", here, b"", b"A"), "f", length="11") == [], "it looks different"
    assert told(state, "b", ProvidePipeline("second", here, b"lr=2", b"A"), "other key") == [], "it has been told"


def batch(num_bytes: int) -> CachedBatch:
    return CachedBatch(1, b"", [], [bytes(num_bytes)])


def test_the_cache_holds_the_newest_batches_and_says_what_it_dropped() -> None:
    cache = BatchCache(100)
    for position in range(6):
        cache.put("key", position, batch(30))
        assert cache.num_bytes <= 100
    assert [position for position in range(6) if cache.get("key", position)] == [3, 4, 5]
    assert cache.get("other", 5) is None
    assert cache.take_dropped() == {"key": [(0, 3)]}
    assert cache.take_dropped() == {}


def test_a_batch_larger_than_the_cache_is_not_kept() -> None:
    cache = BatchCache(100)
    cache.put("key", 0, batch(101))
    assert len(cache) == cache.num_bytes == 0
    assert cache.take_dropped() == {"key": [(0, 1)]}
