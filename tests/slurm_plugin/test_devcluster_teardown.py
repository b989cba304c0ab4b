"""`down` on processes and files that only look like a cluster's: no Slurm, no root."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import zlib
from dataclasses import replace
from pathlib import Path

import pytest

from tests.devcluster.errors import DevclusterError
from tests.devcluster.lock import locked
from tests.devcluster.processes import cluster_processes, start_ticks
from tests.devcluster.record import (
    MARKER_VARIABLE,
    ClusterRecord,
    read_daemons,
    read_record,
    write_record,
)
from tests.devcluster.teardown import plan_teardown, tear_down

SLEEP = ["sleep", "600"]


def record_of(state_dir: Path, *, ready: bool = True) -> ClusterRecord:
    return ClusterRecord(
        name="unit",
        cluster_name=f"unit-{zlib.crc32(str(state_dir).encode()):08x}",
        state_dir=str(state_dir),
        slurm_version="22.05.8",
        nodes=("gpu0",),
        partitions=("gpu",),
        path_prefix="",
        ready=ready,
        created_s=time.time(),
        boot_s=0.0,
    )


@pytest.fixture
def record(tmp_path: Path) -> ClusterRecord:
    state_dir = tmp_path / "cluster"
    state_dir.mkdir()
    record = record_of(state_dir)
    write_record(record)
    return record


def start(record: ClusterRecord, argv: list[str], variable: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(argv, env={"PATH": os.defpath, variable: record.cluster_name}, stdout=subprocess.PIPE)


def test_record_round_trips(record: ClusterRecord) -> None:
    assert read_record(Path(record.state_dir)) == record


def test_commands_know_which_jobs_are_opportunistic(record: ClusterRecord) -> None:
    assert "HETSTREAM_OPPORTUNISTIC_PARTITIONS" not in record.environment({})
    shared = replace(record, opportunistic="opp").environment({"HETSTREAM_OPPORTUNISTIC_PARTITIONS": "spare"})
    assert shared["HETSTREAM_OPPORTUNISTIC_PARTITIONS"] == "opp"


@pytest.mark.parametrize("text", ["", "{", "{}", '{"name": "x", "nodes": [], "partitions": []}', "[1]"])
def test_a_damaged_record_is_an_error_that_names_it_and_removes_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "cluster.json").write_text(text)
    with pytest.raises(DevclusterError, match=r"cluster\.json is damaged.*ps -ef"):
        tear_down(tmp_path)
    assert (tmp_path / "cluster.json").exists()


@pytest.mark.parametrize("text", ["{", '{"daemons": [{"name": "x"}]}', '{"daemons": [{"pid": "x"}]}', "[1]"])
def test_damaged_states_of_daemons_are_an_error_that_names_the_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "daemons.json").write_text(text)
    with pytest.raises(DevclusterError, match=r"daemons\.json is damaged"):
        read_daemons(tmp_path)


@pytest.mark.parametrize("variable", [MARKER_VARIABLE, "SLURM_CLUSTER_NAME"])
def test_kills_what_carries_the_clusters_name_and_nothing_else(record: ClusterRecord, variable: str) -> None:
    other = record_of(Path(record.state_dir).with_name("other"))
    with start(record, SLEEP, variable) as mine, start(other, SLEEP, variable) as not_mine:
        plan = tear_down(Path(record.state_dir))
        assert plan is not None
        assert [process.pid for process in plan.processes] == [mine.pid]
        assert mine.wait(10) in (-signal.SIGTERM, -signal.SIGKILL)
        assert not_mine.poll() is None
        not_mine.kill()
    assert not Path(record.state_dir).exists()


def test_finds_a_descendant_that_emptied_its_environment(record: ClusterRecord) -> None:
    script = (
        "import subprocess, sys; p = subprocess.Popen(['sleep', '600'], env={}); print(p.pid, flush=True); p.wait()"
    )
    with start(record, [sys.executable, "-c", script], "SLURM_CLUSTER_NAME") as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert {process.pid for process in cluster_processes(record)} == {parent.pid, child}
        tear_down(Path(record.state_dir))
        assert start_ticks(child) is None


def test_a_program_that_ignores_sigterm_is_killed(record: ClusterRecord) -> None:
    script = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); signal.pause()"
    with start(record, [sys.executable, "-c", script], "SLURM_CLUSTER_NAME") as stubborn:
        assert stubborn.stdout is not None
        stubborn.stdout.readline()
        tear_down(Path(record.state_dir))
        assert stubborn.wait(10) == -signal.SIGKILL


def test_a_jobs_program_may_clean_up_first(record: ClusterRecord, tmp_path: Path) -> None:
    cleaned = tmp_path / "cleaned"
    script = (
        "import pathlib, signal, sys\n"
        "def end(*_):\n    pathlib.Path(sys.argv[1]).touch()\n    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, end); print(flush=True); signal.pause()"
    )
    with start(record, [sys.executable, "-c", script, str(cleaned)], "SLURM_CLUSTER_NAME") as program:
        assert program.stdout is not None
        program.stdout.readline()
        tear_down(Path(record.state_dir))
    assert cleaned.exists()


def test_never_kills_the_shell_that_runs_it(record: ClusterRecord) -> None:
    script = (
        "from tests.devcluster.teardown import tear_down; from pathlib import Path; import sys\n"
        "print(len(tear_down(Path(sys.argv[1])).processes))"
    )
    environment = {**os.environ, "SLURM_CLUSTER_NAME": record.cluster_name}
    argv = [sys.executable, "-c", script, record.state_dir]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr


def test_plan_changes_nothing(record: ClusterRecord) -> None:
    with start(record, SLEEP, MARKER_VARIABLE) as mine:
        plan = plan_teardown(Path(record.state_dir))
        assert plan is not None
        assert [process.pid for process in plan.processes] == [mine.pid]
        assert mine.poll() is None
        mine.kill()
    assert read_record(Path(record.state_dir)) == record


def test_a_directory_that_is_no_clusters_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    assert tear_down(tmp_path) is None
    assert (tmp_path / "precious").exists()


def test_down_twice_is_no_error(record: ClusterRecord) -> None:
    assert tear_down(Path(record.state_dir)) is not None
    assert tear_down(Path(record.state_dir)) is None


def test_links_inside_are_removed_and_not_followed(record: ClusterRecord, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").touch()
    (Path(record.state_dir) / "link").symlink_to(outside)
    tear_down(Path(record.state_dir))
    assert (outside / "precious").exists()


def test_a_lock_that_never_comes_free_is_an_error_that_names_it(tmp_path: Path) -> None:
    with (
        locked(tmp_path, 1.0, "first"),
        pytest.raises(DevclusterError, match=r"fuser"),
        locked(tmp_path, 0.1, "second"),
    ):
        pytest.fail("two processes hold one lock")
