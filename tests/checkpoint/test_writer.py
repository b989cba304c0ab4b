"""Writers as real processes: what is on disk after each of them, their trainers, or all of them were killed."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from hetstream.checkpoint.disk import commit
from hetstream.checkpoint.disk.directory import CheckpointDirectory
from hetstream.checkpoint.disk.ownership import JobIdentity
from hetstream.checkpoint.errors import POINTS
from hetstream.checkpoint.memory.store_files import WriterStatus
from hetstream.checkpoint.memory.view import StoreView
from hetstream.checkpoint.persist.writer import spawn_writer
from hetstream.checkpoint.policy import Retention
from hetstream.checkpoint.record.layout import Generation
from tests.checkpoint import fake_trainer
from tests.checkpoint.processes import ROOT, FakeTrainer, begin_trainer, begin_writer, end_process

MIB = 1 << 20
TIMEOUT_S = 60.0
WaitUntil = Callable[..., None]


@dataclass
class Bench:
    """A checkpoint directory, stores, and the processes around them."""

    path: Path
    wait_until: WaitUntil
    undo: contextlib.ExitStack
    writers: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def directory(self) -> Path:
        return self.path / "ckpt"

    def trainer(self, rank: int = 0, world_size: int = 1, attempt: int = 1, num_bytes: int = 5 * MIB) -> FakeTrainer:
        words = self.path / "stores", self.directory, "77", rank, world_size, attempt, num_bytes
        return begin_trainer(self.undo, *words)

    def writer(
        self, store: Path, fault: str = "", count: int = 1, action: str = "kill", linger_s: float = 0.3
    ) -> subprocess.Popen[bytes]:
        marker = self.path / f"marker-{len(self.writers)}"
        request = f"{fault}:{count}:{action}:{marker}" if fault else ""
        self.writers.append(begin_writer(self.undo, store, self.directory, self.log, request, linger_s))
        return self.writers[-1]

    def job_writer(self) -> subprocess.Popen[bytes]:
        with open(self.log, "ab") as log:
            argv = [sys.executable, "-c", JOB_WRITER, str(self.path / "stores")]
            process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=log, cwd=ROOT, start_new_session=True)
        self.undo.callback(end_process, process)
        assert process.stdout
        assert process.stdout.readline() == b"ready\n"
        return process

    @property
    def log(self) -> Path:
        return self.path / "writer.log"

    def said(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def until(self, condition: Callable[[], object], what: str) -> None:
        try:
            self.wait_until(condition, TIMEOUT_S, what)
        except BaseException:
            print(self.said())
            raise

    def until_committed(self, *generations: tuple[int, int]) -> None:
        wanted = {Generation(*one) for one in generations}
        self.until(lambda: wanted <= set(commit.committed(self.directory)), f"a checkpoint of {generations}")

    def status(self, store: Path) -> WriterStatus:
        return StoreView(store).files.read_status() or WriterStatus(pid=0)

    def check_whole(self, generation: tuple[int, int], world_size: int = 1, num_bytes: int = 5 * MIB) -> None:
        """Compare every byte of a checkpoint with what was saved."""
        directory = CheckpointDirectory(self.directory)
        layout = fake_trainer.layout_of(num_bytes)
        for rank in range(world_size):
            with directory.read(Generation(*generation), rank) as file:
                wanted = {e.name for e in layout.entries if rank == 0 or not e.name.startswith("model")}
                assert {entry.name for entry in file.entries} == wanted
                for entry in file.entries:
                    expected = fake_trainer.content(Generation(*generation), rank, entry.name, entry.num_bytes)
                    assert bytes(file.bytes_of(entry)) == expected

    def left_over(self) -> list[str]:
        """Names below the directory that belong to no checkpoint."""
        return [
            str(path.relative_to(self.directory))
            for directory, _, names in os.walk(self.directory)  # which passes over what is removed meanwhile
            for path in (Path(directory), *(Path(directory, name) for name in names))
            if path.name.endswith((".tmp", ".partial", ".deleted"))
        ]


@pytest.fixture
def bench(tmp_path: Path, wait_until: WaitUntil) -> Iterator[Bench]:
    (tmp_path / "stores").mkdir()
    (tmp_path / "ckpt").mkdir()
    with contextlib.ExitStack() as undo:
        yield Bench(tmp_path, wait_until, undo)


# --- life ----------------------------------------------------------------------------------------------------------


def test_the_newest_generation_gets_to_disk_and_the_trainer_is_told(bench: Bench) -> None:
    trainer = bench.trainer()
    bench.writer(trainer.store)
    for step in (10, 20):
        trainer.say(f"save {step}")
        bench.until(lambda step=step: bench.status(trainer.store).persisted == Generation(1, step), "the status")
    bench.check_whole((1, 20))
    status = bench.status(trainer.store)
    assert (status.num_persisted, status.num_failed, status.error) == (2, 0, "")
    assert CheckpointDirectory(bench.directory).checkpoints()[0].metrics == {"loss": 1.5}


def test_a_closed_store_is_persisted_and_removed(bench: Bench) -> None:
    trainer = bench.trainer()
    writer = bench.writer(trainer.store)
    bench.until(lambda: StoreView(trainer.store).writer_alive(), "the checkpoint writer")
    trainer.say("save 10")
    trainer.end()
    assert writer.wait(TIMEOUT_S) == 0
    bench.check_whole((1, 10))
    assert not trainer.store.exists()


@pytest.mark.shows("a trainer that dies during the copy leaves no checkpoint without data")
def test_a_killed_trainers_newest_generation_gets_to_disk_and_stays_in_memory(bench: Bench) -> None:
    trainer = bench.trainer()
    writer = bench.writer(trainer.store)
    bench.until(lambda: StoreView(trainer.store).writer_alive(), "the checkpoint writer")
    writer.send_signal(signal.SIGSTOP)
    trainer.say("save 10")
    trainer.say("save 20")
    trainer.kill()
    writer.send_signal(signal.SIGCONT)
    assert writer.wait(TIMEOUT_S) == 0
    bench.check_whole((1, 20))
    assert [one.header.generation for one in StoreView(trainer.store).generations()] == [
        Generation(1, 20),
        Generation(1, 10),
    ]
    # The next trainer finds it, and its checkpoint writer knows that it is on disk.
    again = bench.trainer(attempt=2)
    assert again.store == trainer.store
    bench.writer(again.store)
    again.say("save 21")
    bench.until_committed((2, 21))
    assert commit.committed(bench.directory) == [Generation(2, 21), Generation(1, 20)]


def test_a_damaged_generation_in_memory_does_not_hide_an_older_one(bench: Bench) -> None:
    trainer = bench.trainer()
    for step in (11, 12):
        trainer.say(f"save {step}")
    newest = StoreView(trainer.store).generations()[0]
    with newest.path.open("r+b") as file:
        file.seek(4096 + 20)
        file.write(b"?")
    writer = bench.writer(trainer.store)
    bench.until_committed((1, 11))
    assert f"{newest.path}: the metadata of step 12 of attempt 1 is damaged" in bench.said()
    trainer.say("save 13")
    bench.until_committed((1, 13))
    trainer.say("close")
    trainer.kill()
    assert writer.wait(TIMEOUT_S) == 0


@pytest.mark.shows("something that is called `latest` and is no link stays, and checkpoints go on")
def test_what_is_called_latest_and_is_no_link_is_said_once_and_holds_nothing_up(bench: Bench) -> None:
    latest = bench.directory / "latest"
    latest.write_text("a user's")
    trainer = bench.trainer()
    bench.writer(trainer.store)
    for step in (10, 20):
        trainer.say(f"save {step}")
        bench.until(lambda step=step: bench.status(trainer.store).persisted == Generation(1, step), "the status")
    assert latest.read_text() == "a user's"
    assert bench.said().count(f"{latest} is a file of somebody else's and no link: it stays") == 1
    assert bench.status(trainer.store).num_failed == 0
    latest.unlink()
    trainer.say("save 30")
    # The checkpoint writer may have come by between: then it is a link to step 20 first.
    bench.until(lambda: latest.is_symlink() and os.readlink(latest) == "step-0000000030.1", "the link")


@pytest.mark.shows("on SIGTERM the newest generation gets to disk, and all ranks stop after the same step")
def test_sigterm_brings_the_newest_to_disk(bench: Bench) -> None:
    trainer = bench.trainer()
    writer = bench.writer(trainer.store)
    bench.until(lambda: StoreView(trainer.store).writer_alive(), "the checkpoint writer")
    writer.send_signal(signal.SIGSTOP)
    trainer.say("save 10")
    writer.send_signal(signal.SIGTERM)
    writer.send_signal(signal.SIGCONT)
    assert writer.wait(TIMEOUT_S) == 0
    bench.check_whole((1, 10))
    assert "told to end" in bench.said()


@pytest.mark.shows("a checkpoint with missing ranks is passed over, and a log says which are missing")
@pytest.mark.shows("on SIGTERM the newest generation gets to disk, and all ranks stop after the same step")
def test_sigterm_says_what_is_missing(bench: Bench) -> None:
    trainer = bench.trainer(rank=1, world_size=3)
    writer = bench.writer(trainer.store)
    trainer.say("save 10")
    bench.until(lambda: commit.written_by(bench.directory, 1), "the part")
    writer.send_signal(signal.SIGTERM)
    assert writer.wait(TIMEOUT_S) == 0
    assert "generation=step 10 of attempt 1 is not committed: the parts of ranks 0, 2 of 3 are missing" in bench.said()


@pytest.mark.shows("on SIGTERM the newest generation gets to disk, and all ranks stop after the same step")
def test_what_is_missing_is_said_before_slurm_kills_the_writer(bench: Bench) -> None:
    """A node is lost, and its rank's part never comes: the writer waits for it, and is killed while it does."""
    trainer = bench.trainer(rank=1, world_size=2)
    writer = bench.writer(trainer.store, linger_s=3600)
    trainer.say("save 10")
    bench.until(lambda: commit.written_by(bench.directory, 1), "the part")
    writer.send_signal(signal.SIGTERM)
    missing = "generation=step 10 of attempt 1 is not committed: the parts of rank 0 of 2 are missing"
    bench.until(lambda: missing in bench.said(), "what is missing")
    assert writer.poll() is None
    writer.kill()


@pytest.mark.shows("two checkpoint writers never write at once")
def test_the_second_writer_of_a_store_leaves(bench: Bench) -> None:
    trainer = bench.trainer()
    first = bench.writer(trainer.store)
    bench.until(lambda: StoreView(trainer.store).writer_alive(), "the checkpoint writer")
    assert bench.writer(trainer.store).wait(TIMEOUT_S) == 0
    assert "has a checkpoint writer that lives" in bench.said()
    trainer.say("save 10")
    bench.until_committed((1, 10))
    assert first.poll() is None


def test_spawned_by_a_trainer_it_is_a_session_of_its_own(bench: Bench) -> None:
    trainer = bench.trainer()
    writer = spawn_writer(trainer.store, bench.directory)
    bench.undo.callback(end_process, writer)
    bench.until(lambda: StoreView(trainer.store).writer_alive(), "the checkpoint writer")
    assert os.getsid(writer.pid) == writer.pid
    trainer.say("save 10")
    trainer.end()
    assert writer.wait(TIMEOUT_S) == 0
    bench.check_whole((1, 10))


@pytest.mark.usefixtures("own_priority")
def test_a_writer_in_the_session_of_others_leaves_it_its_share_of_the_processor(bench: Bench) -> None:
    share = Path("/proc/self/autogroup")
    if not share.exists():
        pytest.skip("this kernel does not share the processor among sessions")
    before = share.read_text()
    trainer = bench.trainer()
    bench.writer(trainer.store)  # in the session of this test
    trainer.say("save 10")
    bench.until_committed((1, 10))
    assert share.read_text() == before


def mapped_kib(pid: int, store: Path) -> Iterator[int]:
    """What a process holds in memory of a store's slots."""
    is_slot = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-", line):
            is_slot = str(store) in line
        elif is_slot and line.startswith("Rss:"):
            yield int(line.split()[1])


@pytest.mark.usefixtures("own_priority")
def test_it_is_small_and_does_without_torch(bench: Bench) -> None:
    """Its size beside the mapping, the modules that it has, and the processor time of its start."""
    trainer = bench.trainer(num_bytes=64 * MIB)
    writer = bench.writer(trainer.store)
    bench.until(lambda: StoreView(trainer.store).writer_alive(), "the checkpoint writer")
    ticks = Path(f"/proc/{writer.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    assert sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK") < 0.3
    trainer.say("save 10")
    bench.until_committed((1, 10))
    lines = Path(f"/proc/{writer.pid}/status").read_text().splitlines()
    kib = {key: int(value.split()[0]) for key, _, value in (line.partition(":") for line in lines) if "kB" in value}
    assert kib["RssAnon"] + kib["RssFile"] - sum(mapped_kib(writer.pid, trainer.store)) < 30 << 10
    maps = Path(f"/proc/{writer.pid}/maps").read_text()
    assert "/site-packages/torch/" not in maps  # the environment may be called after torch
    assert "/site-packages/numpy/" not in maps
    assert len(os.sched_getaffinity(writer.pid)) == 1
    assert os.getpriority(os.PRIO_PROCESS, writer.pid) >= 10


# --- many ranks ----------------------------------------------------------------------------------------------------


def test_ranks_settle_on_the_same_generations_without_a_barrier(bench: Bench) -> None:
    trainers = [bench.trainer(rank, 3, num_bytes=MIB) for rank in range(3)]
    for trainer in trainers:
        bench.writer(trainer.store)
    latest = []
    for step in range(1, 40):
        for trainer in trainers:
            trainer.say(f"save {step}")
        with contextlib.suppress(FileNotFoundError):
            latest.append(os.readlink(bench.directory / "latest"))
    bench.until_committed((1, 39))
    assert latest == sorted(latest)
    for generation in commit.committed(bench.directory):
        bench.check_whole(generation, 3, MIB)
    for trainer in trainers:
        trainer.end()
    for writer in bench.writers:
        assert writer.wait(TIMEOUT_S) == 0
    assert bench.left_over() == []


@pytest.mark.slow
def test_ranks_that_died_at_different_saves_still_make_a_checkpoint(bench: Bench) -> None:
    """Rank 0 had saved once more than rank 1: what both have is committed."""
    trainers = [bench.trainer(rank, 2) for rank in range(2)]
    for trainer in trainers:
        trainer.say("save 10")
    trainers[0].say("save 20")
    writers = [bench.writer(trainer.store, linger_s=5) for trainer in trainers]
    for trainer in trainers:
        trainer.kill()
    for writer in writers:
        assert writer.wait(TIMEOUT_S) == 0
    bench.check_whole((1, 10), 2)
    assert "rank=0" in bench.said()
    assert "generation=step 20 of attempt 1 is not committed: the parts of rank 1 of 2 are missing" in bench.said()


def test_signals_for_trainers_do_not_end_it(bench: Bench) -> None:
    trainer = bench.trainer()
    writer = bench.writer(trainer.store)
    trainer.say("save 10")
    bench.until_committed((1, 10))
    for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        writer.send_signal(number)
    trainer.say("save 20")
    bench.until_committed((1, 20))
    assert writer.poll() is None


@pytest.mark.shows("retention is a function of what is in the directory, and spares what is read")
def test_retention_by_the_writers(bench: Bench) -> None:
    directory = CheckpointDirectory(bench.directory)
    attempt = directory.acquire(JobIdentity("77", "here", 1), Retention(keep_last=2))
    trainers = [bench.trainer(rank, 2, attempt, MIB) for rank in range(2)]
    for trainer in trainers:
        bench.writer(trainer.store)
    for step in range(1, 6):
        for trainer in trainers:
            trainer.say(f"save {step}")
        bench.until_committed((1, step))
    bench.until(
        lambda: commit.committed(bench.directory) == [Generation(1, 5), Generation(1, 4)], "the removal of the others"
    )
    directory.release()


# --- death ---------------------------------------------------------------------------------------------------------

WRITER_POINTS = [point for point in POINTS if point.startswith(("writer.", "persist.", "commit."))]
_QUICK = ("persist.writing", "persist.named", "persist.described", "commit.renamed", "commit.synced")
SOME_POINTS = [pytest.param(one, marks=[] if one in _QUICK else [pytest.mark.slow]) for one in WRITER_POINTS]


@pytest.mark.shows("`latest` moves last, by rename, after every file was synced, and never back")
@pytest.mark.parametrize("point", SOME_POINTS)
def test_a_writer_killed_at_any_point_leaves_the_old_or_the_new_step(bench: Bench, point: str) -> None:
    num_bytes = 40 * MIB if point == "persist.writing" else MIB
    trainer = bench.trainer(num_bytes=num_bytes)
    bench.writer(trainer.store)
    trainer.say("save 10")
    bench.until_committed((1, 10))
    bench.writers[0].kill()
    bench.writers[0].wait()
    trainer.say("save 20")
    killed = bench.writer(trainer.store, point, count=2 if point == "persist.writing" else 1)
    assert killed.wait(TIMEOUT_S) == -signal.SIGKILL
    (newest, *_) = CheckpointDirectory(bench.directory).checkpoints()
    bench.check_whole(newest.generation, num_bytes=num_bytes)
    # The next checkpoint writer does what the dead one did not.
    bench.writer(trainer.store)
    bench.until_committed((1, 20))
    bench.until(lambda: os.readlink(bench.directory / "latest") == "step-0000000020.1", "latest")
    bench.until(lambda: not bench.left_over(), "the removal of what the dead one left")
    bench.check_whole((1, 20), num_bytes=num_bytes)
    bench.check_whole((1, 10), num_bytes=num_bytes)


@pytest.mark.parametrize("point", SOME_POINTS)
def test_all_of_a_job_killed_at_any_point_and_the_next_attempt_completes_what_can_be(bench: Bench, point: str) -> None:
    """Two ranks, everything dies, memory is lost as with a requeue: from disk comes the old or the new step, whole."""
    trainers = [bench.trainer(rank, 2, num_bytes=MIB) for rank in range(2)]
    first = [bench.writer(trainer.store) for trainer in trainers]
    for trainer in trainers:
        trainer.say("save 10")
    bench.until_committed((1, 10))
    for writer in first:
        writer.kill()
        writer.wait()
    for trainer in trainers:
        trainer.say("save 20")
    second = [bench.writer(trainer.store, point) for trainer in trainers]
    bench.until(lambda: any(writer.poll() is not None for writer in second), "a death")
    for writer in second:
        writer.kill()
        writer.wait()
    for trainer in trainers:
        trainer.kill()
    directory = CheckpointDirectory(bench.directory)
    assert directory.acquire(JobIdentity("77", "here", 1)) == 2
    directory.complete_partials()
    (newest, *_) = directory.checkpoints()
    bench.check_whole(newest.generation, 2, MIB)
    assert os.readlink(bench.directory / "latest") == newest.generation.directory_name
    directory.release()
    # The next attempt's first checkpoint cleans up all that is left.
    again = [bench.trainer(rank, 2, 2, MIB) for rank in range(2)]
    for trainer in again:
        bench.writer(trainer.store)
        trainer.say("save 15")
    bench.until_committed((2, 15))
    bench.until(lambda: not bench.left_over(), "the removal of what the dead ones left")


@pytest.mark.parametrize("point", [point for point in POINTS if point.startswith("remove.")])
def test_a_writer_killed_while_it_removes(bench: Bench, point: str) -> None:
    directory = CheckpointDirectory(bench.directory)
    directory.acquire(JobIdentity("77", "here", 1), Retention(keep_last=1))
    trainer = bench.trainer(num_bytes=MIB)
    killed = bench.writer(trainer.store, point)
    trainer.say("save 10")
    bench.until_committed((1, 10))
    trainer.say("save 20")
    assert killed.wait(TIMEOUT_S) == -signal.SIGKILL
    assert [one.generation for one in directory.checkpoints()] == [Generation(1, 20)]
    bench.writer(trainer.store)
    bench.until(lambda: not bench.left_over(), "the removal")
    bench.check_whole((1, 20), num_bytes=MIB)
    directory.release()


@pytest.mark.parametrize("point", ["owner.numbered", "owner.written"])
def test_an_attempt_killed_while_it_gets_its_number(bench: Bench, point: str) -> None:
    program = (
        "from hetstream.checkpoint.disk.directory import CheckpointDirectory;"
        "from hetstream.checkpoint.disk.ownership import JobIdentity;"
        f"print(CheckpointDirectory({str(bench.directory)!r}).acquire(JobIdentity('1', 'a', 1)))"
    )

    def start(**env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", program], env={**os.environ, **env}, cwd=ROOT, stdout=subprocess.PIPE, text=True
        )

    assert start().stdout.split() == ["1"]
    killed = start(HETSTREAM_CKPT_FAULT=f"{point}:1:kill:{bench.path / 'marker'}")
    assert killed.returncode == -signal.SIGKILL
    # A number that may have been used is not used again.
    assert start().stdout.split() == ["2" if point == "owner.numbered" else "3"]


@pytest.mark.shows("the disk is full: the old checkpoint is whole, and training goes on")
@pytest.mark.parametrize("point", ["persist.writing", "persist.unsynced", "persist.named"])
def test_a_disk_that_gets_full_leaves_the_old_step_and_no_garbage(bench: Bench, point: str) -> None:
    trainer = bench.trainer()
    first = bench.writer(trainer.store)
    trainer.say("save 10")
    bench.until_committed((1, 10))
    first.kill()
    first.wait()
    trainer.say("save 20")
    second = bench.writer(trainer.store, point, action="full")
    bench.until(lambda: bench.status(trainer.store).num_failed, "the failure")
    second.send_signal(signal.SIGSTOP)
    assert "No space left on device" in bench.status(trainer.store).error
    assert commit.committed(bench.directory) == [Generation(1, 10)]
    assert bench.left_over() == []
    # There is room again: it goes on by itself.
    second.send_signal(signal.SIGCONT)
    second.send_signal(signal.SIGTERM)
    assert second.wait(TIMEOUT_S) == 0
    assert bench.status(trainer.store).error == ""
    bench.check_whole((1, 20))


def test_a_stopped_writer_does_not_hold_the_trainer_up(bench: Bench) -> None:
    trainer = bench.trainer(num_bytes=40 * MIB)
    writer = bench.writer(trainer.store, "persist.writing", action="stop")
    trainer.say("save 1")
    bench.until(lambda: (bench.path / "marker-0").exists(), "the stop")
    for step in range(2, 9):
        trainer.say(f"save {step}")
    writer.send_signal(signal.SIGCONT)
    bench.until_committed((1, 1), (1, 8))
    bench.check_whole((1, 1), num_bytes=40 * MIB)
    bench.check_whole((1, 8), num_bytes=40 * MIB)
    assert bench.status(trainer.store).num_skipped == 6


# --- a job's checkpoint writer
# ---------------------------------------------------------------------------------------------------

JOB_WRITER = """
import logging, sys
from pathlib import Path
from hetstream.checkpoint.persist.writer import serve_job
logging.basicConfig(level=logging.INFO)
serve_job("77", lambda: print("ready", flush=True), [Path(sys.argv[1])])
"""


def test_a_jobs_writer_serves_all_stores_that_come_and_outlives_their_trainers(bench: Bench) -> None:
    writer = bench.job_writer()
    trainers = [bench.trainer(rank, 2) for rank in range(2)]
    for trainer in trainers:
        trainer.say("save 10")
    bench.until_committed((1, 10))
    for trainer in trainers:
        trainer.say("save 20")
        trainer.kill()
    bench.until_committed((1, 20))
    bench.check_whole((1, 20), 2)
    # The trainers are started again on the same node, and adopt their stores.
    again = [bench.trainer(rank, 2, attempt=2) for rank in range(2)]
    assert [one.store for one in again] == [one.store for one in trainers]
    for trainer in again:
        trainer.say("save 21")
    bench.until_committed((2, 21))
    again[0].end()
    again[1].kill()
    writer.send_signal(signal.SIGTERM)
    assert writer.wait(TIMEOUT_S) == 0
    # The job is over, all is on disk: its memory is free again.
    assert os.listdir(bench.path / "stores") == []


def test_a_jobs_writer_that_is_told_to_end_asks_trainers_that_have_just_come(bench: Bench) -> None:
    writer = bench.job_writer()
    writer.send_signal(signal.SIGSTOP)
    trainer = bench.trainer()
    writer.send_signal(signal.SIGTERM)
    writer.send_signal(signal.SIGCONT)
    asked = "SIGTERM came to the job's checkpoint writer"
    bench.until(lambda: StoreView(trainer.store).files.stop_reason() == asked, "the word to the trainer")
    trainer.say("save 10")
    trainer.end()
    assert writer.wait(TIMEOUT_S) == 0
    bench.check_whole((1, 10))
    assert os.listdir(bench.path / "stores") == []


def test_a_jobs_writer_passes_a_warning_on_and_waits_for_the_last_save(bench: Bench) -> None:
    writer = bench.job_writer()
    trainer = bench.trainer()
    trainer.say("save 10")
    bench.until_committed((1, 10))
    assert StoreView(trainer.store).files.stop_reason() == ""
    writer.send_signal(signal.SIGUSR1)
    bench.until(lambda: StoreView(trainer.store).files.stop_reason(), "the warning")
    writer.send_signal(signal.SIGTERM)
    bench.until(lambda: "told to end" in bench.said(), "the checkpoint writer's answer")
    assert StoreView(trainer.store).files.stop_reason() == "SIGUSR1 came to the job's checkpoint writer", (
        "and no second word"
    )
    # Slurm ends a job's checkpoint writer and its trainers at one moment: a trainer may save once more.
    trainer.say("save 11")
    trainer.kill()
    assert writer.wait(TIMEOUT_S) == 0
    bench.check_whole((1, 11))
    assert os.listdir(bench.path / "stores") == []
