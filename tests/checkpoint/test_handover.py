"""Seamless migration without Slurm: what both sides decide, and real processes that hand a training over."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hetstream import CheckpointOptions, FlashCheckpointer
from hetstream.base.errors import OptionsError
from hetstream.base.text import count_words
from hetstream.checkpoint.disk.directory import CheckpointDirectory
from hetstream.checkpoint.disk.ownership import Claim, JobIdentity, history, living_request, read_request
from hetstream.checkpoint.errors import DirectoryInUse
from hetstream.checkpoint.flash.ownership import (
    Action,
    AskedHandover,
    FoundDirectory,
    JobHandover,
    StartProgress,
    answer,
    decide,
)
from hetstream.checkpoint.flash.stopping import StopAgreement, steps_until_next
from hetstream.checkpoint.memory.view import find_stores
from hetstream.checkpoint.policy import Retention
from hetstream.checkpoint.record.layout import Generation
from tests.checkpoint.parts import write_checkpoint

STEPS = 60
STEP_S = 0.05
WaitUntil = Callable[..., None]
OWNER = JobIdentity("41", "node1", 1)


# Decisions


@pytest.mark.parametrize(
    ("asked", "hands_over", "reason"),
    [
        (None, False, "nobody asks"),
        (AskedHandover(3, "job 42", is_live=True), True, "hand-over to job 42"),
        (AskedHandover(3, "job 42", is_live=False), False, "job 42 asked and has died since, or gave up"),
        (AskedHandover(2, "job 42", is_live=True), False, "job 42 asks attempt 2, this is attempt 3"),
    ],
)
def test_an_owner_stops_only_for_a_living_successor_that_means_it(
    asked: AskedHandover | None, hands_over: bool, reason: str
) -> None:
    found = answer(3, asked)
    assert (found.hands_over, found.reason) == (hands_over, reason)


SEEN = FoundDirectory("41", "job 41 on node1", 3)


@pytest.mark.parametrize(
    ("taking", "seen", "action"),
    [
        (StartProgress(""), SEEN, Action.REFUSE),
        (StartProgress("40"), SEEN, Action.REFUSE),
        (StartProgress("41"), FoundDirectory(), Action.REFUSE),
        (StartProgress("41"), SEEN, Action.LATER),
        (StartProgress("41", is_ready=True), SEEN, Action.ASK),
        (StartProgress("41", True, asked_attempt=3, waited_s=5, timeout_s=10), SEEN, Action.WAIT),
        # The owner's script has started it again before it could see the request.
        (StartProgress("41", True, asked_attempt=2, waited_s=5, timeout_s=10), SEEN, Action.ASK),
        (StartProgress("41", True, asked_attempt=3, waited_s=10, timeout_s=10), SEEN, Action.GIVE_UP),
        (StartProgress("41", True), FoundDirectory("41", "job 41", 3, other_successor="job 43"), Action.REFUSE),
        (StartProgress(""), FoundDirectory(other_successor="job 43"), Action.REFUSE),
    ],
)
def test_what_a_start_does_about_a_directory_that_it_could_not_take(
    taking: StartProgress, seen: FoundDirectory, action: Action
) -> None:
    decision = decide(taking, seen)
    assert decision.action is action
    assert decision.reason


# In one process: the owner is a directory that is held


@pytest.fixture
def held(tmp_path: Path) -> Iterator[CheckpointDirectory]:
    """A checkpoint directory that job 41 owns."""
    directory = CheckpointDirectory(tmp_path / "ckpt")
    directory.acquire(OWNER)
    yield directory
    directory.release()


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait_until: WaitUntil) -> Iterator[Callable[..., Any]]:
    """A function that makes the checkpointer of job 42 for that directory."""
    memory = Path("/dev/shm") / f"hetstream-test-{os.getpid()}-{tmp_path.name}"[:100]
    memory.mkdir(mode=0o700)
    monkeypatch.setenv("SLURM_JOB_ID", "42")

    def made(takes_over: str, timeout_s: float = 60) -> FlashCheckpointer:
        monkeypatch.setenv("HETSTREAM_TAKES_OVER", takes_over)
        options = CheckpointOptions(shared_memory=memory, hand_over_timeout_s=timeout_s)
        return FlashCheckpointer(tmp_path / "ckpt", options=options)

    yield made
    wait_until(lambda: not find_stores([memory]), 60, "the end of the checkpoint writers")
    memory.rmdir()


@pytest.mark.usefixtures("held")
@pytest.mark.parametrize("takes_over", ["", "40"])
def test_a_directory_of_another_job_than_the_named_one_is_in_use(make: Any, takes_over: str) -> None:
    with pytest.raises(DirectoryInUse, match=r"in use by job 41 on node1, process 1.*choose another directory"):
        make(takes_over)


@pytest.mark.usefixtures("held")
def test_an_owner_that_does_not_answer_is_named_and_asked_no_more(make: Any, tmp_path: Path) -> None:
    with make("41", timeout_s=0.2) as checkpointer:
        assert read_request(tmp_path / "ckpt") is None, "asked before the program was initialised"
        with pytest.raises(OptionsError, match="restore"):
            checkpointer.should_save(1)
        with pytest.raises(OptionsError, match="restore"):
            checkpointer.save(1, {"w": torch.zeros(1)})
        with pytest.raises(DirectoryInUse, match=r"job 41 on node1, process 1 was asked .* s ago and still has it"):
            checkpointer.restore({"w": torch.zeros(1)})
        assert read_request(tmp_path / "ckpt") is None


def test_a_successor_that_asks_which_steps_there_are_stops_nobody(
    make: Any, held: CheckpointDirectory, tmp_path: Path
) -> None:
    path = tmp_path / "ckpt"
    with make("41") as checkpointer:
        assert checkpointer.all_steps() == []
        write_checkpoint(path, Generation(1, 20), start_id=held.lineage().start_id)
        before = (path / "history.jsonl").read_bytes(), held.owner()
        assert checkpointer.all_steps() == [20]
        assert read_request(path) is None, "the other job was asked to stop"
        assert ((path / "history.jsonl").read_bytes(), held.owner()) == before
        with pytest.raises(OptionsError, match="restore"):
            checkpointer.save(21, {"w": torch.zeros(1)})


@pytest.mark.usefixtures("held")
def test_a_second_successor_is_refused(make: Any, tmp_path: Path) -> None:
    first = Claim(tmp_path / "ckpt", JobIdentity("43", "node2", 7))
    first.ask(1, 0.0)
    with pytest.raises(DirectoryInUse, match="is being handed over to job 43 on node2, process 7"):
        make("41")
    first.withdraw()
    make("41").close()


def test_whoever_waits_comes_before_a_restart_of_the_job_that_stopped(
    make: Any, tmp_path: Path, held: CheckpointDirectory
) -> None:
    first = Claim(tmp_path / "ckpt", JobIdentity("43", "node2", 7))
    first.ask(1, 0.0)
    held.release()
    with pytest.raises(DirectoryInUse, match="handed over to job 43"):
        make("")
    first.withdraw()
    make("").close()


def test_a_free_directory_is_taken_at_once(make: Any, held: CheckpointDirectory, tmp_path: Path) -> None:
    held.release()
    with make("41") as checkpointer:
        assert checkpointer.save(1, {"w": torch.zeros(1)})
    assert [one.event for one in history(tmp_path / "ckpt")] == ["started", "ended", "started", "ended"]


# Two jobs


@dataclass
class Jobs:
    """Jobs that train on one directory, each of a few ranks; processes that a zygote forks.

    Attributes:
        zygote: see `programs/zygote.py`.
        directory: of everything.
        memory: where their stores are.
    """

    zygote: subprocess.Popen[str]
    directory: Path
    memory: Path

    @property
    def checkpoints(self) -> Path:
        return self.directory / "ckpt"

    def begin(
        self, num_ranks: int, *jobs: tuple[str, Path | None, Mapping[str, str]], last_rank: Sequence[str] = ()
    ) -> None:
        """Start jobs: of each its id, a file that it waits for in the middle of training, more of its environment.

        The second one starts when the first one has the directory. The last ranks get more arguments.
        """
        assert self.zygote.stdin
        specs = []
        for number, (job, wait_for, environ) in enumerate(jobs):
            for rank in range(num_ranks):
                argv = [str(self.checkpoints), str(self.directory / "run"), f"--steps={STEPS}", "--every=7"]
                argv += [f"--step-s={STEP_S}", f"--shared-memory={self.memory}"]
                argv += [f"--wait-for={wait_for}"] if wait_for else []
                if num_ranks > 1:
                    argv += ["--group", str(self.directory / f"group-{job}"), str(rank), str(num_ranks)]
                argv += last_rank if rank == num_ranks - 1 else ()
                after = {"HETSTREAM_TEST_AFTER": str(self.checkpoints / "owner.json")} if number else {}
                specs.append((argv, {"SLURM_JOB_ID": job, **after, **environ}))
        print(json.dumps(specs), file=self.zygote.stdin, flush=True)

    def codes(self) -> list[int]:
        """Wait for the end of all; their exit codes."""
        assert self.zygote.stdout
        found: list[int] = json.loads(self.zygote.stdout.readline())
        return found

    def ledger(self, rank: int = 0) -> list[str]:
        return (self.directory / f"run.{rank}.steps").read_text().splitlines()

    def result(self, rank: int = 0) -> Any:
        return json.loads((self.directory / f"run.{rank}.done").read_text())

    @property
    def request(self) -> Path:
        return self.checkpoints / "handover.json"

    @property
    def marker(self) -> Path:
        return self.directory / "marker"


@pytest.fixture
def jobs(zygote: subprocess.Popen[str], tmp_path: Path, left_memory: Path) -> Jobs:
    return Jobs(zygote, tmp_path, left_memory)


@pytest.fixture(scope="module")
def truth(zygote: subprocess.Popen[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], Jobs]]:
    """A function that gives the run of so many ranks that nobody disturbed."""
    known: dict[int, Jobs] = {}
    memory = Path(tempfile.mkdtemp(prefix="hetstream-test-", dir="/dev/shm"))

    def run(num_ranks: int) -> Jobs:
        if num_ranks not in known:
            known[num_ranks] = jobs = Jobs(zygote, tmp_path_factory.mktemp("truth"), memory)
            jobs.begin(num_ranks, (f"7{num_ranks}", None, {}))
            assert jobs.codes() == [0] * num_ranks
        return known[num_ranks]

    yield run
    memory.rmdir()


TAKER = {"HETSTREAM_TAKES_OVER": "41"}


@pytest.mark.shows("seamless migration: the new job goes on from the very next step")
@pytest.mark.timeout(400)
@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_training_is_handed_over_without_a_step_lost_or_made_twice(
    jobs: Jobs, truth: Callable[[int], Jobs], num_ranks: int
) -> None:
    undisturbed = truth(num_ranks)
    jobs.begin(num_ranks, ("41", jobs.request, {}), ("42", None, TAKER))
    assert jobs.codes() == [0] * 2 * num_ranks
    for rank in range(num_ranks):
        first, *lines = jobs.ledger(rank)
        start = next(line for line in lines if line.startswith("start"))
        assert int(start.split()[1]) == lines.index(start) > 0, "it trains until the new job is initialised"
        lines.remove(start)
        assert [first, *lines] == undisturbed.ledger(rank)
        assert jobs.result(rank) == undisturbed.result(rank)
    events = history(jobs.checkpoints)
    assert [one.event for one in events] == ["started", "handed over", "started", "took over", "ended"]
    handed, took = events[1], events[3]
    assert handed.step == took.step == int(start.split()[1])
    assert handed.identity == took.identity == events[2].identity
    assert took.pause_s == pytest.approx(took.time_s - handed.time_s)
    assert took.pause_s > 0
    assert CheckpointDirectory(jobs.checkpoints).past_attempts()[0].failed is False
    assert read_request(jobs.checkpoints) is None
    print(f"pause with {count_words(num_ranks, 'rank')}: {took.pause_s:.2f} s")


@pytest.mark.shows("seamless migration: the new job goes on from the very next step")
@pytest.mark.timeout(400)
@pytest.mark.slow
@pytest.mark.parametrize("point", ["handover.claimed", "handover.asked"])
def test_a_successor_that_dies_changes_nothing(
    jobs: Jobs, truth: Callable[[int], Jobs], wait_until: WaitUntil, point: str
) -> None:
    undisturbed = truth(1)
    after = jobs.directory / "after its death"
    # The owner stands still while the successor asks and dies: between the two it would rightly hand over.
    successor = TAKER | {
        "HETSTREAM_CKPT_FAULT": f"{point}:1:kill:{jobs.marker}",
        "HETSTREAM_TEST_AFTER": str(after.with_suffix(".awaited")),
    }
    jobs.begin(1, ("41", after, {}), ("42", None, successor))
    wait_until(lambda: jobs.marker.exists() and jobs.marker.read_text(), 120, "the successor's request")
    wait_until(lambda: is_dead(int(jobs.marker.read_text())), 120, "the successor's death")
    assert jobs.request.exists() == (point == "handover.asked")
    assert living_request(jobs.checkpoints) is None
    after.touch()
    assert jobs.codes() == [0, -9]
    assert jobs.ledger() == undisturbed.ledger()
    assert jobs.result() == undisturbed.result()


@pytest.mark.shows("seamless migration: the new job goes on from the very next step")
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "point",
    [
        "handover.heard",
        pytest.param("handover.saved", marks=pytest.mark.slow),
        pytest.param("handover.released", marks=pytest.mark.slow),
    ],
)
def test_an_owner_that_dies_meanwhile_is_a_crash_like_any_other(
    jobs: Jobs, truth: Callable[[int], Jobs], point: str
) -> None:
    undisturbed = truth(1)
    fault = {"HETSTREAM_CKPT_FAULT": f"{point}:1:kill:{jobs.marker}"}
    jobs.begin(1, ("41", jobs.request, fault), ("42", None, TAKER))
    assert jobs.codes() == [-9, 0]
    assert jobs.result() == undisturbed.result()
    first, *lines = jobs.ledger()
    start = next(line for line in lines if line.startswith("start"))
    done, saved = lines.index(start), int(start.split()[1])
    assert saved == done or point == "handover.heard", "saved, and lost all the same"
    _, *true_lines = undisturbed.ledger()
    assert [first, *lines] == ["start 0", *true_lines[:done], start, *true_lines[saved:]]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_successor_that_dies_when_the_owner_has_noticed_costs_no_step(
    jobs: Jobs, truth: Callable[[int], Jobs], wait_until: WaitUntil
) -> None:
    undisturbed = truth(1)
    fault = {"HETSTREAM_CKPT_FAULT": f"handover.heard:1:stop:{jobs.marker}"}
    jobs.begin(1, ("41", jobs.request, fault), ("42", None, TAKER))
    wait_until(lambda: jobs.marker.exists() and jobs.marker.read_text(), 120, "the owner's look")
    request = read_request(jobs.checkpoints)
    assert request is not None
    os.kill(request.successor.pid, signal.SIGKILL)
    wait_until(lambda: is_dead(request.successor.pid), 60, "the successor's death")
    os.kill(int(jobs.marker.read_text()), signal.SIGCONT)
    assert jobs.codes() == [0, -9]
    done = jobs.result()["step"]
    assert 0 < done < STEPS
    assert living_request(jobs.checkpoints) is None
    jobs.begin(1, ("43", None, {}))
    assert jobs.codes() == [0]
    lines = jobs.ledger()
    lines.remove(f"start {done}")
    assert lines == undisturbed.ledger()
    assert jobs.result() == undisturbed.result()


def is_dead(pid: int) -> bool:
    """Whether a process has ended; its parent need not have noticed."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


# Several ranks agree on the step


class Group:
    """Ranks that are threads."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.data = [b""] * size
        self.barrier = threading.Barrier(size, timeout=60)

    def member(self, rank: int) -> Any:
        return SimpleNamespace(rank=rank, world_size=self.size, all_gather=lambda data: self._gather(rank, data))

    def _gather(self, rank: int, data: bytes) -> list[bytes]:
        self.data[rank] = data
        self.barrier.wait()
        answers = list(self.data)
        self.barrier.wait()
        return answers


@pytest.mark.shows("on SIGTERM the newest generation gets to disk, and all ranks stop after the same step")
@pytest.mark.shows("seamless migration: the new job goes on from the very next step")
@pytest.mark.parametrize("who", ["another job", pytest.param(0, marks=pytest.mark.slow), 2])
def test_all_ranks_stop_at_the_same_step_however_far_apart_they_are(held: CheckpointDirectory, who: object) -> None:
    group, stops = Group(3), [0, 0, 0]
    asked = ["", "", ""]

    def train(rank: int) -> None:
        handover = JobHandover(held, JobIdentity("41", "node1", rank), Retention(), "", 1.0)
        watch = StopAgreement(group.member(rank), lambda: asked[rank], handover.asked)
        for step in range(1, 2000):
            if step == 500 and who == rank:
                asked[rank] = "SIGTERM came"
            if step == 500 and (who, rank) == ("another job", 0):
                claims.append(Claim(held.path, JobIdentity("42", "node2", 7)))
                claims[0].ask(held.attempt, 0.0)
            if watch.is_asked(step):
                stops[rank] = step
                assert watch.is_asked(step + 1)
                assert watch.hands_over == (who == "another job")
                assert (handover.successor is not None) == (watch.hands_over and rank == 0)
                assert watch.reason == (
                    "hand-over to job 42 on node2, process 7" if claims else f"rank {who}: SIGTERM came"
                )
                return

    claims: list[Claim] = []
    threads = [threading.Thread(target=train, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for claim in claims:
        claim.withdraw()
    assert stops[0] >= 500
    assert len({*stops}) == 1


@pytest.mark.parametrize(
    ("num_steps", "elapsed_s", "expected"),
    [(1, 0.0, 2), (4, 0.01, 8), (64, 0.1, 100), (8, 0.8, 10), (10, 5.0, 2), (1, 30.0, 1)],
)
def test_the_next_look_is_about_a_second_away(num_steps: int, elapsed_s: float, expected: int) -> None:
    assert steps_until_next(num_steps, elapsed_s) == expected


@pytest.mark.shows("on SIGTERM the newest generation gets to disk, and all ranks stop after the same step")
@pytest.mark.timeout(400)
def test_a_signal_to_one_of_two_ranks_ends_both_after_the_same_step(jobs: Jobs, truth: Callable[[int], Jobs]) -> None:
    undisturbed = truth(2)
    jobs.begin(2, ("41", None, {}), last_rank=["--term-at=20"])
    assert jobs.codes() == [0, 0]
    first, second = jobs.result(0)["step"], jobs.result(1)["step"]
    assert 20 <= first == second < STEPS
    newest = CheckpointDirectory(jobs.checkpoints).newest()
    assert newest is not None
    assert newest.step == first, "what was trained is saved"
    jobs.begin(2, ("43", None, {}))
    assert jobs.codes() == [0, 0]
    for rank in range(2):
        ledger = jobs.ledger(rank)
        ledger.remove(f"start {first}")
        assert ledger == undisturbed.ledger(rank)
        assert jobs.result(rank) == undisturbed.result(rank)
