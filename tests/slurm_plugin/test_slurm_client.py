"""The Slurm client: its parsing on recorded output, its commands on a real cluster."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hetstream.hetjob.convert.sbatch_options import LETTERS, TAKES_VALUE
from hetstream.hetjob.errors import SlurmCommandError
from hetstream.slurm_plugin.client.slurm import CommandSlurm, run_sbatch


def tool(directory: Path, name: str, text: str) -> None:
    path = directory / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def client(directory: Path, **environ: str) -> CommandSlurm:
    return CommandSlurm({"PATH": f"{directory}:/usr/bin:/bin", **environ})


def test_the_environment_of_a_step_does_not_inherit_the_batch_scripts_options(
    tmp_path: Path, wait_until: Callable[..., None]
) -> None:
    tool(tmp_path, "srun", 'echo "$@"; env | sort')
    slurm = client(
        tmp_path, SLURM_JOB_ID="7", SLURM_HET_SIZE="2", SLURM_JOB_ID_HET_GROUP_0="7", SLURM_JOB_ID_HET_GROUP_1="8",
        SLURM_CONF="/x", HOME="/root",
        SLURM_NTASKS="4", SLURM_CPUS_PER_TASK="2", SLURM_EXPORT_ENV="NONE", SRUN_CPUS_PER_TASK="2", SLURM_STEP_ID="0",
    )  # fmt: skip
    log = tmp_path / "log"
    step = slurm.start_step(["--exact"], ["program", "an argument"], log)
    wait_until(lambda: step.poll() is not None)
    lines = log.read_text().splitlines()
    assert lines[0] == "--exact program an argument"
    names = {line.split("=")[0] for line in lines[1:]}
    assert {"SLURM_JOB_ID", "SLURM_HET_SIZE", "SLURM_JOB_ID_HET_GROUP_1", "SLURM_CONF", "HOME"} <= names
    assert not names & {
        "SLURM_NTASKS",
        "SLURM_CPUS_PER_TASK",
        "SLURM_EXPORT_ENV",
        "SRUN_CPUS_PER_TASK",
        "SLURM_STEP_ID",
    }


def test_search_paths_of_a_step_begin_at_the_root(
    tmp_path: Path, wait_until: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the job's directory is missing on a node the step works in /tmp, and anybody's modules are there."""
    monkeypatch.setattr("hetstream.slurm_plugin.client.slurm.is_in_common", lambda _: False)  # tests work in /tmp
    tool(tmp_path, "srun", "env")
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    slurm = client(tmp_path, PYTHONPATH=".:/mine:src:", LD_LIBRARY_PATH=":/opt/x")

    def paths_of(log: Path) -> dict[str, str]:
        step = slurm.start_step(["-n1"], ["x"], log)
        wait_until(lambda: step.poll() is not None)
        found = dict(line.split("=", 1) for line in log.read_text().splitlines() if "=" in line)
        return {name: found.get(name, "") for name in ("PYTHONPATH", "LD_LIBRARY_PATH", "PATH")}

    here = tmp_path / "gone"
    assert paths_of(tmp_path / "log") == {
        "PYTHONPATH": f"{here}:/mine:{here}/src:{here}", "LD_LIBRARY_PATH": f"{here}:/opt/x",
        "PATH": f"{tmp_path}:/usr/bin:/bin",
    }  # fmt: skip
    here.rmdir()
    assert paths_of(tmp_path / "other")["PYTHONPATH"] == "/mine"


def test_a_process_elsewhere_starts_without_what_may_be_a_strangers_there(
    tmp_path: Path, wait_until: Callable[..., None]
) -> None:
    """The loader and Python follow these before any check: on another node anybody may own /dev/shm/mine."""
    tool(tmp_path, "srun", "env")
    given = {
        "PYTHONPATH": "/dev/shm/mine:/opt/mine:/tmp/a/b",
        "PYTHONPYCACHEPREFIX": "/var/tmp/cache",
        "PYTHONHASHSEED": "3",
        "LD_PRELOAD": "/dev/shm/none.so libnone.so",
        "LD_LIBRARY_PATH": "/dev/shm/x",
    }
    step = client(tmp_path, **given).start_step(["-n1"], ["x"], tmp_path / "log")
    wait_until(lambda: step.poll() is not None)
    found = dict(line.split("=", 1) for line in (tmp_path / "log").read_text().splitlines() if "=" in line)
    assert {name: found[name] for name in given if name in found} == {
        "PYTHONPATH": "/opt/mine", "PYTHONHASHSEED": "3", "LD_PRELOAD": "libnone.so",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("version", "option"),
    [("slurm-wlm 22.05.8", "--overlap"), ("slurm 23.02.1", "--overlap"), ("slurm 24.11.5", "--external-launcher")],
)
def test_a_background_step_leaves_the_others_alone(
    tmp_path: Path, wait_until: Callable[..., None], version: str, option: str
) -> None:
    tool(tmp_path, "srun", f'[ "$1" = --version ] && echo "{version}" || echo "$@"')
    step = client(tmp_path).start_step(["-n1"], ["program"], tmp_path / "log", in_background=True)
    wait_until(lambda: step.poll() is not None)
    assert (tmp_path / "log").read_text() == f"{option} -n1 program\n"


def test_odd_answers_are_errors_with_their_text(tmp_path: Path) -> None:
    tool(tmp_path, "sbatch", "echo queued")
    tool(tmp_path, "scontrol", "echo NodeName=x")
    with pytest.raises(SlurmCommandError, match=r"queued.*no job id"):
        client(tmp_path).submit("#!/bin/sh\n", [])
    with pytest.raises(SlurmCommandError, match="no NodeAddr"):
        client(tmp_path).node_address("x")


def test_missing_commands_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SlurmCommandError, match="srun"):
        CommandSlurm({"PATH": str(tmp_path)}).start_step([], ["x"], tmp_path / "log")
    with pytest.raises(SlurmCommandError, match="sbatch"):
        run_sbatch([], os.environ)


def test_a_signal_that_ends_sbatch_is_its_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool(tmp_path, "sbatch", "kill -TERM $$")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert run_sbatch([], os.environ) == 143


def test_hidden_partitions_and_own_defaults(tmp_path: Path) -> None:
    """Without --all Slurm leaves hidden partitions out, and SINFO_* and the like change what is printed."""
    for name, program in {
        "sinfo": '[ -n "$SINFO_FORMAT$SINFO_SORT" ] && exit 9; echo "gpu*|up"; '
        'case "$*" in *--all*) echo "secret|up";; esac',
        "scontrol": "exit 0",
    }.items():
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{program}\n")
        path.chmod(0o755)
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SINFO_FORMAT": "%N", "SINFO_SORT": "N"}
    cluster = CommandSlurm(environ).cluster()
    assert (cluster.partitions, cluster.default_partition) == ({"gpu", "secret"}, "gpu")


@pytest.mark.slurm
@pytest.mark.every_release
def test_on_a_real_cluster(devcluster: Any, wait_until: Callable[..., None]) -> None:
    slurm = CommandSlurm(devcluster.env)
    cluster = slurm.cluster()
    assert (cluster.partitions, cluster.default_partition, cluster.scheduler) == (
        {"gpu", "cpu"}, "gpu", "sched/backfill",
    )  # fmt: skip
    of_gpu, of_cpu = cluster.limits["gpu"], cluster.limits["cpu"]
    assert [(node.cpus, node.has_gpus) for node in (*of_gpu.nodes, *of_cpu.nodes)] == [(16, True), (16, False)]
    assert of_cpu.nodes[0].holds(4, 1000.0) == 4 * of_cpu.nodes[0].count
    assert of_cpu.max_mb_per_cpu is None
    assert slurm.node_address("cpu0") == "127.0.0.1"
    job_id = slurm.submit("#!/bin/sh\nsleep 300\n", ["--partition=cpu", "--array=0-1", "--output=/dev/null"])
    slurm.cancel(job_id)
    wait_until(
        lambda: not devcluster.run("squeue", "--noheader", f"--jobs={job_id}", "--states=PD,R,CG"),
        timeout_s=30,
    )
    slurm.cancel(job_id)
    with pytest.raises(SlurmCommandError, match="no-such-node"):
        slurm.node_address("no-such-node")


@pytest.mark.slurm
@pytest.mark.every_release
def test_every_option_of_this_sbatch_is_known(devcluster: Any) -> None:
    text = subprocess.run(["sbatch", "--help"], env=dict(devcluster.env), capture_output=True, text=True, check=True)
    found = re.findall(r"^ {2,8}(?:-(\w), )?--([a-z0-9-]+)(\[?=)?", text.stdout, re.MULTILINE)
    # They take a value, which the help of 22.05, and of container-id that of 24.11, does not say.
    badly_documented = {"container", "container-id", "export", "wrap"}
    assert len(found) > 90
    for letter, name, equals in found:
        assert TAKES_VALUE[name] == (equals == "=" or name in badly_documented), name
        assert not letter or LETTERS[letter] == name
