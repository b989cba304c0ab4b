"""Loss of a node, with real trainers and writers: two "hosts" are two shared-memory directories, two addresses."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from hetstream.checkpoint.disk import commit
from hetstream.checkpoint.memory.view import FoundStore, StoreView, find_stores
from hetstream.checkpoint.record.layout import Generation
from tests.checkpoint.processes import end_process

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 120.0
WaitUntil = Callable[..., None]
Answer = tuple[int, str]


@dataclass
class Job:
    """A checkpoint directory, two hosts, and trainers that are started on them."""

    path: Path
    wait_until: WaitUntil
    undo: contextlib.ExitStack
    trainers: list[subprocess.Popen[str]] = field(default_factory=list)
    num_starts: int = 0

    @property
    def directory(self) -> Path:
        return self.path / "ckpt"

    def start(self, hosts: tuple[int, int], *, with_replicas: bool) -> list[Answer]:
        """Start rank 0 and rank 1; what each restored."""
        self.num_starts += 1
        self.trainers = []
        for rank, host in enumerate(hosts):
            memory = self.path / f"host-{host}"
            memory.mkdir(exist_ok=True)
            words = [self.directory, rank, memory, self.path / f"meeting-{self.num_starts}", with_replicas]
            with open(self.log(rank), "ab") as log:
                process = subprocess.Popen(
                    [sys.executable, "-m", "tests.checkpoint.programs.replica_trainer", *map(str, words)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    cwd=ROOT,
                    env={**os.environ, "HETSTREAM_CKPT_HOST": f"127.0.0.{host + 1}", "OMP_NUM_THREADS": "1"},
                )
            self.undo.callback(end_process, process)
            self.trainers.append(process)
        return self._answers()

    def say(self, line: str) -> list[Answer]:
        for trainer in self.trainers:
            assert trainer.stdin
            trainer.stdin.write(line + "\n")
            trainer.stdin.flush()
        return self._answers()

    def end(self) -> None:
        for trainer in self.trainers:
            assert trainer.stdin
            trainer.stdin.write("end\n")
            trainer.stdin.close()
        assert [trainer.wait(TIMEOUT_S) for trainer in self.trainers] == [0, 0]

    def lose(self, host: int) -> None:
        """All trainers die; with one host its checkpoint writer and its memory go too."""
        writers = {store.path: StoreView(store.path).files.read_status() for store in self.stores()}
        for trainer in self.trainers:
            trainer.kill()
            trainer.wait()
        for path, status in writers.items():
            assert status is not None
            if path.parent.name == f"host-{host}":
                with contextlib.suppress(ProcessLookupError):
                    os.kill(status.pid, signal.SIGKILL)
        shutil.rmtree(self.path / f"host-{host}")
        self.wait_until(
            lambda: not any(one.writer_alive for one in self.stores()), TIMEOUT_S, "the end of checkpoint writers"
        )

    def stores(self) -> list[FoundStore]:
        return list(find_stores([self.path / f"host-{host}" for host in range(3)]))

    def log(self, rank: int) -> Path:
        return self.path / f"rank-{rank}.log"

    def forget_on_disk(self, after: int) -> None:
        """The disk is behind: only checkpoints up to a step are there, and no writer has ever seen another."""
        for store in self.stores():
            with StoreView(store.path) as view:
                status = view.files.read_status()
                assert status is not None
                view.report(msgspec.structs.replace(status, persisted=Generation(1, after)))
        for generation in commit.committed(self.directory):
            if generation.step > after:
                shutil.rmtree(self.directory / generation.directory_name)
        for partial in self.directory.glob("*.partial"):
            shutil.rmtree(partial)
        (self.directory / "latest").unlink(missing_ok=True)

    def _answers(self) -> list[Answer]:
        answers = []
        for rank, trainer in enumerate(self.trainers):
            assert trainer.stdout
            line = trainer.stdout.readline()
            assert line, self.log(rank).read_text()[-4000:]
            step, digest = json.loads(line)
            answers.append((step, digest))
        return answers


@pytest.fixture
def job(tmp_path: Path, wait_until: WaitUntil) -> Iterator[Job]:
    with contextlib.ExitStack() as undo:
        yield Job(tmp_path, wait_until, undo)


@pytest.mark.shows("after the loss of a host, replicas restore the newest common generation bit by bit")
@pytest.mark.parametrize(
    ("with_replicas", "lost", "hosts", "sources"),
    [
        (True, 1, (0, 1), "memory, replica"),
        # The spare node is the last one now: both ranks have moved, and both come from what their old hosts hold.
        pytest.param(True, 0, (1, 2), "replica", marks=pytest.mark.slow),
        pytest.param(False, 1, (0, 1), "disk", marks=pytest.mark.slow),
    ],
)
def test_after_the_loss_of_a_host(
    job: Job, with_replicas: bool, lost: int, hosts: tuple[int, int], sources: str
) -> None:
    job.start((0, 1), with_replicas=with_replicas)
    job.say("train")
    on_disk = job.say("committed")
    for _ in range(3):
        job.say("train")
    newest = job.say("committed")
    if with_replicas:
        assert job.say("replicated") == newest
    job.lose(lost)
    job.forget_on_disk(after=1)
    assert commit.committed(job.directory) == [Generation(1, 1)]

    restored = job.start(hosts, with_replicas=with_replicas)
    assert restored == (newest if with_replicas else on_disk)
    assert f"restored step {restored[0][0]} of attempt 1 from {sources}\n" in job.log(0).read_text()
    # And it goes on, with replicas of its own.
    after = job.say("train")
    if with_replicas:
        assert job.say("replicated") == after
    job.say("committed")
    job.end()
    job.wait_until(
        lambda: not any(one.writer_alive for one in job.stores()), TIMEOUT_S, "the end of checkpoint writers"
    )
    alive = [memory for memory in hosts if list((job.path / f"host-{memory}").iterdir())]
    # The store of rank 1 that its dead trainer left on host 1 is for `hetstream ckpt gc`, as after any move.
    assert alive == ([1] if hosts == (1, 2) else [])
    assert not (job.directory / "replicas").exists()


@pytest.mark.slow
def test_ranks_that_go_back_have_replicas_of_what_they_save_then(job: Job) -> None:
    job.start((0, 1), with_replicas=True)
    job.say("train")
    first = job.say("committed")
    job.say("train")
    job.say("replicated")
    assert job.say("back 1") == first
    job.say("train")
    newest = job.say("replicated")
    job.say("committed")
    job.lose(1)
    job.forget_on_disk(after=1)
    assert job.start((0, 1), with_replicas=True) == newest
    assert "restored step 2 of attempt 2 from memory, replica" in job.log(0).read_text()
    job.end()
