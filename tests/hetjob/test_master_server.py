"""The job master over FakeSlurm: it starts, survives the death of its children, and leaves nothing behind."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hetstream.hetjob.errors import MasterError
from hetstream.hetjob.job.job import export_lines
from hetstream.hetjob.master.server import MasterConfig, start
from hetstream.hetjob.ports import Child
from hetstream.slurm_plugin.client.fake import FakeSlurm

PROGRAM = (sys.executable, str(Path(__file__).parent / "programs" / "stand_in.py"))
WaitUntil = Callable[..., None]


class Job:
    """A job whose batch script is the test."""

    def __init__(self, directory: Path) -> None:
        self.submit_dir = directory
        self.environ = dict(os.environ) | {
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NAME": "train",
            "SLURMD_NODENAME": "gpu0",
            "SLURM_SUBMIT_DIR": str(directory),
            "SLURM_HET_SIZE": "2",
        }
        self.slurm = FakeSlurm(directory, self.environ)
        self.directory = directory / ".hetstream" / "job-7"
        self.steps: list[Child] = []
        start_step = self.slurm.start_step

        def remember(*args: object, **kwargs: object) -> Child:
            self.steps.append(start_step(*args, **kwargs))  # type: ignore[arg-type]
            return self.steps[-1]

        self.slurm.start_step = remember  # type: ignore[method-assign]

    def start(self, data_workers: int, limit_s: float = 20, threads: int = 1) -> dict[str, str]:
        config = MasterConfig(PROGRAM, data_workers, 6, 0, (), threads)
        return start(config, self.slurm, self.environ, lambda service: {"SERVICE": service}, limit_s)

    def started(self, verb: str) -> list[int]:
        """Process ids of all starts of a verb, oldest first."""
        path = self.submit_dir / "started"
        lines = path.read_text().splitlines() if path.exists() else []
        return [int(line.split()[1]) for line in lines if line.startswith(f"{verb} ")]


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait_until: WaitUntil) -> Iterator[Job]:
    monkeypatch.chdir(tmp_path)
    job = Job(tmp_path)
    yield job
    for step in job.steps:
        step.terminate()
        wait_until(lambda step=step: step.poll() is not None, what="the end of the master's step")
    everything = [pid for verb in ("dispatcher", "worker", "master") for pid in job.started(verb)]
    wait_until(lambda: not any(is_alive(pid) for pid in everything), what="the end of every process")


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_a_job_from_start_to_end(job: Job, wait_until: WaitUntil, monkeypatch: pytest.MonkeyPatch) -> None:
    began_s = int(time.time()) - 60
    job.environ |= {"SLURM_JOB_START_TIME": str(began_s), "SLURM_JOB_END_TIME": str(began_s + 3600)}
    for name in ("SLURM_JOB_START_TIME", "SLURM_JOB_END_TIME"):
        monkeypatch.setenv(name, job.environ[name])
    variables = job.start(2)
    assert variables == {"SERVICE": f"file:{job.directory}/address"}
    assert stat.S_IMODE(job.directory.stat().st_mode) == 0o700
    wait_until(lambda: len(job.started("worker")) == 2, what="two data workers")
    step = next(words for method, words in job.slurm.calls if method == "start_step")
    assert step[:3] == ("--het-group=0", "--nodes=1", "--ntasks=1")
    assert "--nodelist=gpu0" in step
    job.steps[0].terminate()
    wait_until(lambda: job.steps[0].poll() is not None, what="the end of the master")
    assert sorted(path.name for path in job.directory.iterdir()) == [
        "data-worker-0.log", "data-worker-1.log", "dispatcher.log", "master.log", "summary.json",
    ]  # fmt: skip
    summary = json.loads((job.directory / "summary.json").read_text())
    assert summary["data_workers_seen"] == 2
    assert summary["time_limit_s"] == 3600.0
    assert summary["elapsed_s"] == pytest.approx(60.0, abs=30.0)
    assert "summary: 1 loader, 7 steps" in (job.directory / "master.log").read_text()


def test_dead_children_are_replaced(job: Job, wait_until: WaitUntil) -> None:
    job.start(2)
    wait_until(lambda: len(job.started("worker")) == 2, what="two data workers")
    os.kill(job.started("worker")[0], signal.SIGKILL)
    wait_until(lambda: len(job.started("worker")) == 3, what="a third data worker")
    os.kill(job.started("dispatcher")[0], signal.SIGKILL)
    wait_until(lambda: len(job.started("dispatcher")) == 2, what="a second dispatcher")
    assert is_alive(job.started("worker")[1])
    log = (job.directory / "master.log").read_text()
    assert re.search(r"data_worker=\d ended with -9", log)
    assert "dispatcher ended with -9" in log


def test_a_killed_master_is_started_again_and_finds_its_dispatchers_directory(job: Job, wait_until: WaitUntil) -> None:
    job.start(1)
    wait_until(lambda: len(job.started("worker")) == 1, what="a data worker")
    os.kill(job.started("master")[1], signal.SIGKILL)
    wait_until(lambda: len(job.started("worker")) == 2, what="a data worker of the second master")
    assert len(job.started("master")) == 3
    wait_until(lambda: not is_alive(job.started("dispatcher")[0]), what="the end of the first dispatcher")
    wait_until(lambda: len(job.started("dispatcher")) == 2, what="the second dispatcher")
    assert "the job master ended with -9: starting it again" in (job.directory / "master.log").read_text()


@pytest.mark.shows("after SIGKILL no process, port, socket name or shared memory is left")
def test_nothing_outlives_a_killed_keeper(job: Job, wait_until: WaitUntil) -> None:
    job.start(2)
    wait_until(lambda: len(job.started("worker")) == 2, what="two data workers")
    os.kill(job.started("master")[0], signal.SIGKILL)
    wait_until(
        lambda: not any(is_alive(pid) for verb in ("dispatcher", "worker") for pid in job.started(verb)),
        what="the end of every child",
    )


def test_what_a_killed_job_master_left_is_not_taken_for_a_running_one(job: Job) -> None:
    """Of a job of the same number, as on a cluster that was set up anew."""
    left = [
        job.directory / name for name in ("address", "elastic.json", "dispatcher/journal.sqlite", "dispatcher/lock")
    ]
    (job.directory / "dispatcher").mkdir(parents=True)
    for path in left:
        path.write_text("of before")
    with left[-1].open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(MasterError, match=r"the job master of job 7 runs already.*process id of before"):
            job.start(1)
    assert not job.started("master")
    job.start(1)
    assert (job.directory / "address").read_text() != "of before"
    assert not any(path.exists() for path in left[1:])


def test_a_journal_on_a_disk_of_the_node_and_a_job_directory_elsewhere(
    job: Job, tmp_path: Path, wait_until: WaitUntil
) -> None:
    """A dispatcher that is started again finds its journal; at the end nothing is left on that disk."""
    disk, jobs = tmp_path / "disk", tmp_path / "scratch" / "me"
    disk.mkdir()
    config = MasterConfig(PROGRAM, 1, 6, jobs_dir=jobs, journal_dir=disk)
    directory = jobs / "job-7"
    directory.mkdir(parents=True, mode=0o700)
    (directory / "dispatcher").symlink_to(tmp_path / "disk of another node")  # left by a job master that was killed
    variables = start(config, job.slurm, job.environ, lambda service: {"SERVICE": service}, 20)
    assert variables == {"SERVICE": f"file:{directory}/address"}
    (place,) = disk.iterdir()
    assert (directory / "dispatcher").readlink() == place
    assert (stat.S_IMODE(place.stat().st_mode), place.name[:20]) == (0o700, "hetstream-journal-7-")
    wait_until(lambda: len(job.started("worker")) == 1, what="a data worker")
    os.kill(job.started("dispatcher")[0], signal.SIGKILL)
    wait_until(lambda: len(job.started("dispatcher")) == 2, what="a second dispatcher")
    assert [*disk.iterdir()] == [place]
    (place / "events.jsonl").write_text("{}\n")
    job.steps[0].terminate()
    wait_until(lambda: job.steps[0].poll() is not None, what="the end of the master")
    assert [*disk.iterdir()] == []
    assert sorted(path.name for path in directory.iterdir()) == [
        "data-worker-0.log", "dispatcher.log", "events.jsonl", "master.log", "summary.json",
    ]  # fmt: skip
    assert not (job.submit_dir / ".hetstream").exists()


def test_a_disk_that_cannot_be_written_to_is_named(job: Job, tmp_path: Path) -> None:
    (tmp_path / "disk").write_text("a file")
    config = MasterConfig(PROGRAM, 1, 6, journal_dir=tmp_path / "disk")
    with pytest.raises(MasterError, match=r"the journal's directory .*/disk/hetstream-journal-7-.* on gpu0"):
        start(config, job.slurm, job.environ, lambda service: {"SERVICE": service}, 20)
    assert not job.started("master")


def test_the_job_master_knows_what_its_own_step_does_not_say(job: Job) -> None:
    job.environ |= {"SLURM_CPUS_PER_TASK_HET_GROUP_0": "6", "SLURM_JOB_NAME": "a run"}
    job.start(1)
    spec = MasterConfig.read(job.directory / "spec.json")
    assert (spec.trainer_cpus, spec.job_name) == (6, "a run")


def test_a_spec_that_cannot_be_read_is_one_error(tmp_path: Path) -> None:
    path = tmp_path / "spec.json"
    for text in (None, "{", '{"program": "x"}'):
        if text is not None:
            path.write_text(text)
        with pytest.raises(MasterError, match=r"spec\.json.*`hetstream internal master start` writes this file"):
            MasterConfig.read(path)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_data_worker_has_a_thread_for_each_of_its_cpus(job: Job, wait_until: WaitUntil, threads: int) -> None:
    job.start(data_workers=1, threads=threads)
    wait_until(lambda: job.started("worker"), what="the data worker")
    words = Path(f"/proc/{job.started('worker')[0]}/cmdline").read_bytes().decode().split("\0")[:-1]
    expected = {1: ["--processes", "6"], 3: ["--processes", "2", "--threads", "3"]}[threads]
    assert words[words.index("--processes") :] == expected


def test_a_master_that_cannot_start_is_an_error_and_leaves_nothing(job: Job) -> None:
    (job.submit_dir / "die-master").touch()
    with pytest.raises(MasterError, match=r"the step ended with 9\. See .*master.log"):
        job.start(1)


def test_a_dispatcher_that_cannot_start_is_given_up_after_the_limit(job: Job, wait_until: WaitUntil) -> None:
    (job.submit_dir / "die-dispatcher").touch()
    with pytest.raises(MasterError, match=r"no dispatcher within 1\.5 s"):
        job.start(1, limit_s=1.5)
    wait_until(lambda: job.steps[0].poll() is not None, what="the end of the master")
    assert len(job.started("dispatcher")) in (1, 2, 3)


def test_a_directory_that_cannot_be_made(job: Job) -> None:
    (job.submit_dir / ".hetstream").write_text("a file")
    with pytest.raises(MasterError, match="Submit from a directory that you can write to"):
        job.start(1)


def test_exported_variables_survive_any_shell(tmp_path: Path) -> None:
    value = 'it\'s "$HOME" `x` \\ and\nmore'
    done = subprocess.run(
        ["sh", "-c", f'{export_lines({"A": value})}printf %s "$A"'], capture_output=True, text=True, check=True
    )
    assert done.stdout == value
