"""Requests to stop as sites send them: below wrappers and launchers, several times, to some processes or to all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from hetstream.checkpoint.disk import commit
from hetstream.checkpoint.flash.stopping import task_that_sigterm_ends
from tests.checkpoint.processes import PYTHON_PATH, end_process

ROOT = Path(__file__).resolve().parents[2]
TRAINER = Path(__file__).parent / "programs" / "asked_trainer.py"
TIMEOUT_S = 90.0
WaitUntil = Callable[..., None]

STOP_REQUEST = """
import os, signal
from hetstream.checkpoint.flash.stopping import StopRequest
now_s = 100.0
died = []
request = StopRequest([signal.SIGTERM, signal.SIGUSR1], lambda: print("dies", flush=True), lambda: now_s)
request.install()
request.note_watched()
def ask(number, time_s):
    global now_s
    now_s = time_s
    os.kill(os.getpid(), number)
    print(time_s, request.reason, flush=True)
"""


def asked(*lines: str) -> tuple[int, list[str]]:
    """How a program ends that looks whether it is asked to stop, and what it says."""
    program = "\n".join([STOP_REQUEST, *lines])
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert run.stderr == ""
    return run.returncode, run.stdout.splitlines()


def test_signals_within_seconds_are_one_request_and_a_later_one_ends_the_program() -> None:
    code, said = asked("ask(signal.SIGTERM, 100)", "ask(signal.SIGTERM, 109.9)", "ask(signal.SIGTERM, 110.1)")
    assert (code, said) == (-signal.SIGTERM, ["100 SIGTERM came", "109.9 SIGTERM came", "dies"])


def test_a_warning_long_before_does_not_make_the_end_a_repeated_request() -> None:
    code, said = asked("ask(signal.SIGUSR1, 100)", "ask(signal.SIGTERM, 900)", "ask(signal.SIGTERM, 905)")
    assert (code, said) == (0, ["100 SIGUSR1 came", "900 SIGUSR1 came", "905 SIGUSR1 came"])


def test_a_request_that_comes_again_behind_the_last_save_ends_no_program_that_ends_in_order() -> None:
    lines = ["request.note_asked()", "request.remove()", "ask(signal.SIGTERM, 105)", "ask(signal.SIGTERM, 111)"]
    assert asked(*lines) == (-signal.SIGTERM, ["105 ", "dies"])
    # The next checkpointer of the same program has signals of its own.
    again = [
        *lines[:2],
        "second = StopRequest([signal.SIGTERM], lambda: None, lambda: now_s)",
        "second.install()",
        "second.note_watched()",
        "ask(signal.SIGTERM, 500)",
        "print(second.reason)",
    ]
    assert asked(*again) == (0, ["500 ", "SIGTERM came"])


def test_a_program_that_was_not_asked_gets_its_signals_back() -> None:
    code, said = asked("request.remove()", "assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL")
    assert (code, said) == (0, [])


def processes(directory: Path, *chain: tuple[str, bool]) -> None:
    """What the kernel would say of processes: each one the parent of the next, from process 10 on."""
    for number, (name, is_caught) in enumerate(chain, start=10):
        caught = 1 << (signal.SIGTERM - 1) if is_caught else 0
        parent = number - 1 if number > 10 else 1
        lines = [f"Name:\t{name}", f"PPid:\t{parent}", "SigIgn:\t0", f"SigCgt:\t{caught:016x}"]
        (directory / str(number)).mkdir()
        (directory / str(number) / "status").write_text("\n".join(lines))


@pytest.mark.parametrize(
    ("chain", "found"),
    [
        ([("slurmstepd", True), ("bash", False), ("python", False)], "bash (process 11)"),
        ([("slurmstepd", True), ("bash", False), ("time", True), ("python", True)], "bash (process 11)"),
        ([("slurmstepd", True), ("bash", True), ("python", False)], ""),
        ([("slurmstepd", True), ("python", False)], ""),
        ([("bash", False), ("python", False)], ""),
    ],
)
def test_a_wrapper_that_sigterm_ends_is_found(chain: list[tuple[str, bool]], found: str, tmp_path: Path) -> None:
    processes(tmp_path, *chain)
    assert task_that_sigterm_ends(9 + len(chain), tmp_path) == found


def test_processes_that_nobody_may_look_at_are_no_wrapper(tmp_path: Path) -> None:
    assert task_that_sigterm_ends(10, tmp_path) == ""


# --- real processes ------------------------------------------------------------------------------------------------

JOB_WRITER = """
import logging, sys
from pathlib import Path
from hetstream.checkpoint.persist.writer import serve_job
logging.basicConfig(level=logging.INFO)
serve_job("77", lambda: print("ready", flush=True), [Path(sys.argv[1])])
"""


@dataclass
class Job:
    """A job without Slurm: its checkpoint writer, and a task that is a wrapper or a launcher."""

    path: Path
    wait_until: WaitUntil
    undo: ExitStack
    environ: dict[str, str] = field(default_factory=dict)

    @property
    def memory(self) -> Path:
        return self.path / "memory"

    @property
    def directory(self) -> Path:
        return self.path / "checkpoints"

    def start(self, *argv: str | Path, **options: object) -> subprocess.Popen[bytes]:
        with open(self.path / "said", "ab") as said:
            process = subprocess.Popen(argv, cwd=self.path, env=self.environ, stderr=said, **options)  # type: ignore[call-overload]
        self.undo.callback(end_process, process)
        return process  # type: ignore[no-any-return]

    def writer(self) -> subprocess.Popen[bytes]:
        # It gives way with all of its session, which is a step's.
        argv = (sys.executable, "-c", JOB_WRITER, self.memory)
        process = self.start(*argv, stdout=subprocess.PIPE, start_new_session=True)
        assert process.stdout
        assert process.stdout.readline() == b"ready\n"
        return process

    def ledger(self, rank: int = 0) -> list[list[str]]:
        path = self.path / f"ledger.{rank}"
        return [line.split(maxsplit=2) for line in path.read_text().splitlines()] if path.exists() else []

    def until_trained(self, num_ranks: int) -> list[int]:
        """Wait until the first step of each rank is saved; their process ids."""

        def all_trained() -> bool:
            return all(["saved", "1"] in self.ledger(rank) for rank in range(num_ranks))

        try:
            self.wait_until(all_trained, TIMEOUT_S, "the first save")
        except BaseException:
            print(self.said())
            raise
        return [int(self.ledger(rank)[0][1]) for rank in range(num_ranks)]

    def said(self) -> str:
        return (self.path / "said").read_text()

    def check_saved_and_stopped_once(self, num_ranks: int) -> str:
        """All ranks saved the same last step, once, and it is on disk; the reason that the first one was given."""
        last = self.ledger()[-1][1]
        for rank in range(num_ranks):
            words = [line[:2] for line in self.ledger(rank)]
            assert words[1:] == [["from", "0"], ["saved", "1"], ["saved", last], ["stopping", last]], self.said()
        assert commit.committed(self.directory)[0].step == int(last), self.said()
        assert os.listdir(self.memory) == []
        return self.ledger()[-1][2]


@pytest.fixture
def job(tmp_path: Path, wait_until: WaitUntil) -> Iterator[Job]:
    (tmp_path / "memory").mkdir()
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "HETSTREAM_"))}
    more = {"SLURM_JOB_ID": "77", "HETSTREAM_CKPT_WRITER": "1", "PYTHONPATH": PYTHON_PATH, "OMP_NUM_THREADS": "1"}
    with ExitStack() as undo:
        job = Job(tmp_path, wait_until, undo, environ | more)
        yield job
        for rank in range(2):
            for line in job.ledger(rank):
                if line[0] == "start":
                    with suppress(ProcessLookupError):
                        os.kill(int(line[1]), signal.SIGKILL)


def test_below_a_wrapper_that_passes_nothing_on_the_jobs_writer_asks(job: Job) -> None:
    """As with proctrack/cgroup: the tasks of steps get SIGTERM, which are a shell and the writer, and nobody else."""
    writer = job.writer()
    (job.path / "wrapper.sh").write_text(
        f"trap : TERM\n{sys.executable} {TRAINER} checkpoints ledger memory\ncode=$?\nexit $code\n"
    )
    wrapper = job.start("bash", "wrapper.sh")
    job.until_trained(1)
    for _ in range(2):
        wrapper.send_signal(signal.SIGTERM)
        writer.send_signal(signal.SIGTERM)
    assert wrapper.wait(TIMEOUT_S) == 75
    assert writer.wait(TIMEOUT_S) == 0
    assert job.check_saved_and_stopped_once(1) == "SIGTERM came to the job's checkpoint writer"


def begin_to_close(job: Job) -> tuple[subprocess.Popen[bytes], subprocess.Popen[bytes]]:
    """A checkpoint writer that is stopped, and a trainer that waits for it at its end."""
    writer = job.writer()
    trainer = job.start(sys.executable, TRAINER, "checkpoints", "ledger", "memory")
    job.until_trained(1)
    # Else a trainer whose store it has not found yet starts one of its own.
    job.wait_until(lambda: job.directory.exists() and commit.committed(job.directory), TIMEOUT_S, "a step on disk")
    writer.send_signal(signal.SIGSTOP)
    trainer.send_signal(signal.SIGTERM)
    job.wait_until(lambda: job.ledger()[-1][0] == "stopping", TIMEOUT_S, "the last step")
    with pytest.raises(subprocess.TimeoutExpired):
        trainer.wait(1)
    return writer, trainer


def test_a_program_that_closes_waits_for_the_disk_of_a_jobs_writer(job: Job) -> None:
    writer, trainer = begin_to_close(job)
    writer.send_signal(signal.SIGCONT)
    assert trainer.wait(TIMEOUT_S) == 75
    assert commit.committed(job.directory)[0].step == int(job.ledger()[-1][1]), job.said()


def test_a_program_that_closes_does_not_wait_for_a_jobs_writer_that_dies(job: Job) -> None:
    writer, trainer = begin_to_close(job)
    writer.kill()
    assert trainer.wait(TIMEOUT_S / 3) == 75


def test_a_signal_behind_the_request_of_the_writer_does_not_end_what_is_closing(job: Job) -> None:
    writer = job.writer()
    marker = job.path / "marker"
    job.environ["HETSTREAM_CKPT_FAULT"] = f"store.closing:1:stop:{marker}"
    trainer = job.start(sys.executable, TRAINER, "checkpoints", "ledger", "memory")
    job.until_trained(1)
    writer.send_signal(signal.SIGTERM)
    job.wait_until(marker.exists, TIMEOUT_S, "the last save")
    trainer.send_signal(signal.SIGTERM)
    trainer.send_signal(signal.SIGCONT)
    assert trainer.wait(TIMEOUT_S) == 75
    assert writer.wait(TIMEOUT_S) == 0
    job.check_saved_and_stopped_once(1)


@pytest.mark.shows("on SIGTERM the newest generation gets to disk, and all ranks stop after the same step")
@pytest.mark.slow
@pytest.mark.parametrize("who", ["everybody", "the launcher and the checkpoint writer", "the launcher"])
@pytest.mark.parametrize(
    "launcher",
    [
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"],
        ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2"],
    ],
    ids=["torchrun", "accelerate"],
)
def test_a_launcher_passes_on_what_its_ranks_have_heard_already(job: Job, launcher: list[str], who: str) -> None:
    pytest.importorskip(launcher[1].partition(".")[0])
    writer = job.writer()
    task = job.start(sys.executable, *launcher, TRAINER, "checkpoints", "ledger", "memory")
    ranks = job.until_trained(2)
    task.send_signal(signal.SIGTERM)
    if who == "everybody":
        for pid in ranks:
            os.kill(pid, signal.SIGTERM)
    if who != "the launcher":
        writer.send_signal(signal.SIGTERM)
    # accelerate ends by the signal itself, if that comes while its ranks are ending already.
    assert task.wait(TIMEOUT_S) in (1, -signal.SIGTERM), "a launcher that was told to end says so"
    writer.send_signal(signal.SIGTERM)
    assert writer.wait(TIMEOUT_S) == 0
    job.check_saved_and_stopped_once(2)
