"""Memory that will be full soon: what the job keeps of it, what is done about it, and what `hetstream why` shows."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from hetstream.hetjob.convert.convert import convert
from hetstream.hetjob.convert.spec import JobSpec
from hetstream.hetjob.elastic.controller import ControllerState
from hetstream.hetjob.errors import DirectiveError
from hetstream.hetjob.job.job import CONTROLLER_STATE_FILE
from hetstream.hetjob.master.controller_state_file import ControllerStateFile, JobReport, MemoryWarning, told_by
from hetstream.hetjob.master.memory import CompanionMemory, MemoryReading, MemoryWatch, Migration, TrainerMemory
from hetstream.mpi_dataworkers.wire.messages import DataWorkerStatus, LoaderStats, LoaderStatus
from hetstream.slurm_plugin.cli.why import report_of
from hetstream.slurm_plugin.client.model import Job, Node, Partition, Snapshot
from hetstream.slurm_plugin.insight.proposals import told_by_job

GIB, MB = 1 << 30, 1 << 20


class Commands:
    """Starts nothing, and notes what it was to start. Each command is a child that ends when a test says so."""

    def __init__(self) -> None:
        self.started: list[tuple[Sequence[str], Mapping[str, str], Path]] = []
        self.code: int | None = None
        self.problem: OSError | None = None

    def __call__(self, argv: Sequence[str], environ: Mapping[str, str], log_file: Path) -> Commands:
        if self.problem:
            raise self.problem
        assert log_file.exists(), "written down before it is done"
        self.started.append((argv, environ, log_file))
        return self

    pid = 1

    def poll(self) -> int | None:
        return self.code

    def terminate(self) -> None:
        raise AssertionError

    def kill(self) -> None:
        raise AssertionError

    def send_signal(self, sig: int) -> None:
        raise AssertionError


def migration(directory: Path, commands: Commands) -> Migration:
    environ = {
        "HOME": "/home/me", "SLURM_CONF": "/etc/slurm.conf", "SLURM_JOB_ID": "8123", "SLURM_MEM_PER_NODE": "4096",
        "SLURMD_NODENAME": "gpu0", "PMI_RANK": "0", "CUDA_VISIBLE_DEVICES": "", "MY_SLURM": "kept",
    }  # fmt: skip
    return Migration(["/bin/hetstream"], "8123", directory / "migrate.log", environ, commands)


def growing_trainer(now: list[float]) -> TrainerMemory:
    return TrainerMemory("8123", lambda: MemoryReading(32 * GIB + int(now[0]) * 8 * MB, 64 * GIB))


def until_warned(watch: MemoryWatch, now: list[float]) -> None:
    while not watch.trainer.warning:
        now[0] += 10.0
        assert now[0] < 7200
        watch.look_at_trainer(None, now[0])


@pytest.mark.shows("before memory runs out, a companion is replaced, and a trainer warned or migrated")
def test_a_trainer_moves_once_and_outside_of_its_job(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    now, commands = [0.0], Commands()
    watch = MemoryWatch(growing_trainer(now), CompanionMemory(None))
    watch.migration = migration(tmp_path, commands)
    until_warned(watch, now)
    ((argv, environ, log_file),) = commands.started
    assert argv[:3] == ["/bin/hetstream", "migrate", "8123"]
    assert re.fullmatch(r"--mem=\d+G", argv[3])
    assert argv[4:] == ["--no-wait"]
    assert watch.trainer.warning.endswith(f"hetstream migrate 8123 {argv[3]}"), "what is said is what is done"
    assert environ == {"HOME": "/home/me", "SLURM_CONF": "/etc/slurm.conf", "MY_SLURM": "kept"}
    assert log_file.stat().st_mode & 0o777 == 0o600
    commands.code = 0
    for _ in range(20):
        now[0] += 10.0
        watch.look_at_trainer(None, now[0])
    assert len(commands.started) == 1
    assert caplog.text.count("the job that takes over is submitted: see ") == 1
    # The next job master knows nothing of the first warning, and warns again.
    again = MemoryWatch(growing_trainer(now), CompanionMemory(None))
    again.migration = migration(tmp_path, commands)
    until_warned(again, now)
    assert len(commands.started) == 1
    assert "the training is not moved again" in caplog.text


def test_a_migration_that_fails_is_said_and_leaves_the_job_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    commands = Commands()
    commands.code = 2
    move = migration(tmp_path, commands)
    move.begin("96G")
    move.look()
    move.look()
    assert caplog.text.count("hetstream migrate ended with exit code 2, nothing has moved: see ") == 1
    commands.problem = OSError(13, "Permission denied")
    (tmp_path / "migrate.log").unlink()
    other = migration(tmp_path, commands)
    other.begin("96G")
    other.look()
    assert "the training is not moved to more memory: [Errno 13] Permission denied" in caplog.text


def epochs(now: float) -> LoaderStatus:
    """A loader whose epochs of 1200 steps take 20 minutes each."""
    steps = int(now)
    epoch, step = divmod(steps, 1200)
    return LoaderStatus(
        "j", 0, 0, 1, "gpu0", 1, epoch, step, 1200, 0, 8, 2, 4.0, 2e6, 0.2, LoaderStats(steps=steps)
    )  # fmt: skip


@pytest.mark.parametrize("is_leak", [False, True], ids=["a first epoch that fills a cache", "a leak"])
def test_of_a_first_epoch_and_a_leak_only_the_leak_moves_a_job(tmp_path: Path, is_leak: bool) -> None:
    """Both fill memory to 60 % in the first epoch; the leak goes on."""
    now, commands = [0.0], Commands()

    def reading() -> MemoryReading:
        share = 0.1 + 0.5 * (now[0] / 1200 if is_leak else min(1.0, now[0] / 1200))
        return MemoryReading(int(share * 64 * GIB), 64 * GIB)

    watch = MemoryWatch(TrainerMemory("8123", reading), CompanionMemory(None))
    watch.migration = migration(tmp_path, commands)
    for now[0] in range(0, 2100 if is_leak else 12_000, 10):
        watch.look_at_trainer(None, now[0], [epochs(now[0])])
        if watch.trainer.warning:
            break
    assert bool(watch.trainer.warning) == is_leak
    assert len(commands.started) == is_leak


def test_without_the_wish_a_warning_is_only_said() -> None:
    now = [0.0]
    watch = MemoryWatch(growing_trainer(now), CompanionMemory(None))
    until_warned(watch, now)
    (warning,) = watch.warnings(4, now[0])
    assert warning.job == "8123"
    assert 300 < warning.full_at_s - time.time() <= 1810


def test_companions_are_warned_of_with_what_was_done_and_what_helps_next_time() -> None:
    memory = CompanionMemory(2048.0)
    for now in range(0, 1800, 10):
        rows = [DataWorkerStatus(0, "h", 1, "working", 1, 9, 2.0, 0.5, 0, 9.0, 0.1, "8130", (500 + 3 * now) * MB)]
        memory.take_in(rows, {"8130": 2}, float(now))
        if memory.warnings(4):
            break
    (warning,) = memory.warnings(4)
    done = memory.replacement()
    assert done is not None
    assert (warning.job, warning.command) == ("8130", f"#HETSTREAM --data-worker-mem={4 * done.mb_per_cpu}M")
    assert warning.text.endswith("; it is to be replaced")
    assert 0 < warning.full_at_s - now <= 480
    memory.not_replaced(done)
    assert memory.warnings(4)[0].text.endswith("; Slurm takes none with more in its place")
    memory.replaced(done)
    (warning,) = memory.warnings(4)
    assert warning.text.endswith(f"; one with {done.mb_per_cpu} MB a CPU takes its place when it works")
    memory.take_in([], {}, 1e6)
    assert memory.warnings(4) == [], "it is gone"


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """A running job of this user; its directory is there."""
    (tmp_path / ".hetstream" / "job-7").mkdir(parents=True, mode=0o700)
    return Job(
        7, "train", "me", ("gpu",), "RUNNING", "", 1, 4, 1, 4, 100, uid=os.geteuid(), work_dir=str(tmp_path),
        nodes=("g0",),
    )  # fmt: skip


def keep(job: Job, *warnings: MemoryWarning) -> Path:
    path = Path(job.work_dir) / ".hetstream" / "job-7" / CONTROLLER_STATE_FILE
    ControllerStateFile(path).write(ControllerState(), warnings)
    return path


def test_why_shows_the_warnings_of_a_running_job_with_lead_time_and_remedy(job: Job) -> None:
    trainer = MemoryWarning(
        "7", "the trainer runs out of memory: 51.2 of 64.0 GiB: full in 20 min", "hetstream migrate 7 --mem=96G", 2e9
    )
    companion = MemoryWarning("8", "companion 8 \x1b[31mruns out", "#HETSTREAM --data-worker-mem=9M", 2e9)
    assert told_by_job(job) == JobReport()
    keep(job, trainer, companion)
    found = told_by_job(job)
    assert found.warnings == (trainer, companion)
    nodes = (Node("g0", frozenset({"MIXED"}), ("gpu",), 16, 4, 1000, 100),)
    report = report_of(
        "7", [job], Snapshot(1e6, "22.05.8", "test", (job,), nodes, (Partition("gpu", ()),)), {"7": found}
    )
    assert report.lines[1:] == [
        "memory    the trainer runs out of memory: 51.2 of 64.0 GiB: full in 20 min",
        "          what helps: hetstream migrate 7 --mem=96G",
        "memory    companion 8 \\x1b[31mruns out",
        "          what helps: next time #HETSTREAM --data-worker-mem=9M",
    ]
    (facts,) = json.loads(json.dumps(report.summary))["jobs"]
    assert [one["full_at_s"] for one in facts["memory_warnings"]] == [2e9, 2e9]


def test_why_says_nothing_where_nothing_is_kept_or_may_be_read(job: Job, tmp_path: Path) -> None:
    path = keep(job, MemoryWarning("7", "x", "y", 1.0))
    assert told_by(path.parent).warnings
    path.write_text("{}")
    assert told_by_job(job) == JobReport()
    path.unlink()
    secret = tmp_path / "secret"
    secret.write_text("{}")
    path.symlink_to(secret)
    assert told_by_job(job) == JobReport()
    assert told_by_job(Job(7, "train", "me", ("gpu",), "PENDING", "", 1, 4, 1, 4, 100)) == JobReport()


def test_only_a_job_with_checkpoints_and_a_range_may_move_by_itself() -> None:
    for spec in ({"checkpoint": None}, {"data_workers_max": 0, "checkpoint": "c"}):
        given = {"data_workers_max": 2, "checkpoint_size": "1G" if spec["checkpoint"] else None, **spec}
        with pytest.raises(DirectiveError, match="only with --checkpoint=DIR, from which the new job goes on, and"):
            JobSpec(on_memory_warning="migrate", **given)  # type: ignore[arg-type]
    with pytest.raises(DirectiveError, match="--on-memory-warning='kill': warn or migrate"):
        JobSpec(0, 2, on_memory_warning="kill")
    script = "#!/bin/bash\n#SBATCH --gres=gpu:1 --mem=4G\ntrue\n"
    moves = JobSpec(
        0, 2, checkpoint="c", checkpoint_size="1G", on_memory_warning="migrate", data_worker_partition="cpu"
    )
    plan = convert(moves, script, "train.sbatch")
    assert "--on-memory-warning=migrate" in (plan.master_options or ())
    assert any("moves" in change.change for change in plan.changes)
    warns = JobSpec(0, 2, on_memory_warning="warn", data_worker_partition="cpu")
    assert not [word for word in convert(warns, script, "train.sbatch").master_options or () if "warning" in word]
