"""Prolog, Epilog and TaskProlog of nodes whose GPUs are shared: as Slurm runs them, with another /run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from hetstream.hetjob.gpu import STARTUP_DIRECTORY
from hetstream.hetjob.gpu.config import settings_from_environment
from hetstream.slurm_plugin.coordinator.admission import GrantedJobs
from hetstream.slurm_plugin.install.units import SCRIPTS, SCRIPTS_VERSION, node_script, script_version
from tests.base.users import STRANGER, needs_root, run_as

SETTINGS = """\
HETSTREAM_OPPORTUNISTIC_PARTITIONS="opp spare"
HETSTREAM_SHARED_PARTITIONS="gpu"
HETSTREAM_GPUS="0=GPU-0a 1=GPU-1b"
HETSTREAM_UNPLACED_S=0
"""
GUARANTEED = {"SLURM_JOB_GPUS": "0", "SLURM_JOB_PARTITION": "gpu"}
OPPORTUNISTIC = {"SLURM_JOB_COMMENT": "hetstream:gpu=1 mine", "SLURM_JOB_PARTITION": "opp"}


@dataclass
class Node:
    """A node's directories."""

    directory: Path

    @property
    def run_dir(self) -> Path:
        return self.directory / "run"

    @property
    def settings(self) -> Path:
        return self.directory / "packing.env"

    def make(self) -> None:
        self.settings.write_text(SETTINGS)
        for option, name in SCRIPTS.items():
            text = node_script(option, self.settings, run_dir=str(self.run_dir))
            (self.directory / name).write_text(text.replace("/proc/driver/nvidia/gpus", f"{self.directory}/driver"))

    def call(self, option: str, environ: Mapping[str, str], job: str = "7", uid: str = "1000") -> list[str]:
        """Run a script; what it prints. It may never fail: Slurm would drain the node."""
        fixed = {"SLURM_JOB_ID": job, "SLURM_JOB_UID": uid, "LOGGED": str(self.directory / "logged")}
        done = subprocess.run(
            ["/bin/sh", self.directory / SCRIPTS[option]], env={**fixed, **environ}, capture_output=True, text=True,
            check=True, timeout=20,
        )  # fmt: skip
        return done.stdout.splitlines()

    def grant(self, job: str = "7") -> object:
        path = self.run_dir / "grants" / f"{job}.json"
        return json.loads(path.read_text()) if path.exists() else None

    def left(self) -> list[str]:
        return sorted(str(path.relative_to(self.run_dir)) for path in self.run_dir.rglob("*") if path.is_file())


@pytest.fixture
def node(tmp_path: Path) -> Node:
    node = Node(tmp_path)
    node.make()
    return node


def test_a_guaranteed_jobs_gpu_is_written_down_and_its_agent_started(node: Node) -> None:
    assert node.call("Prolog", GUARANTEED) == []
    assert node.grant() == {"uid": 1000, "job_class": "guaranteed", "gpus": ["GPU-0a"]}
    assert GrantedJobs(node.run_dir / "grants").is_reserved("GPU-0a")
    assert node.call("TaskProlog", {"PYTHONPATH": "/mine"}) == [
        "export HETSTREAM_GPU=GPU-0a",
        "export HETSTREAM_GPU_OF_JOB=7 GPU-0a",
        "export HETSTREAM_JOB_CLASS=guaranteed",
        "export HETSTREAM_JOB_CLASS_OF_JOB=7 guaranteed",
        f"export PYTHONPATH={STARTUP_DIRECTORY}:/mine",
    ]
    assert node.call("Epilog", {}) == []
    assert node.left() == []


@pytest.mark.shows("opportunistic jobs have CUDA_VISIBLE_DEVICES by UUID; a job without a place sees no GPU")
def test_an_opportunistic_job_has_the_gpu_that_the_packer_chose(node: Node) -> None:
    node.call("Prolog", OPPORTUNISTIC)
    assert node.grant() == {"uid": 1000, "job_class": "opportunistic", "gpus": ["GPU-1b"]}
    told = [
        "export CUDA_VISIBLE_DEVICES=GPU-1b",
        "export HETSTREAM_GPU=GPU-1b",
        "export HETSTREAM_GPU_OF_JOB=7 GPU-1b",
        "export HETSTREAM_JOB_CLASS=opportunistic",
        "export HETSTREAM_JOB_CLASS_OF_JOB=7 opportunistic",
        f"export PYTHONPATH={STARTUP_DIRECTORY}",
    ]
    assert node.call("TaskProlog", {"SLURM_JOB_PARTITION": "opp"}) == told
    # A step of the batch script has that path already.
    assert node.call("TaskProlog", {"PYTHONPATH": f"{STARTUP_DIRECTORY}:/mine"}) == told[:-1]


@pytest.mark.parametrize("environ", [GUARANTEED, OPPORTUNISTIC])
def test_a_job_that_is_submitted_from_one_with_a_gpu_shares_none(
    node: Node, environ: Mapping[str, str], tmp_path: Path
) -> None:
    """sbatch hands on all that the TaskProlog has exported, also into a job and onto a node without one."""
    node.call("Prolog", environ)
    told = dict(line.removeprefix("export ").split("=", 1) for line in node.call("TaskProlog", {}))
    assert settings_from_environment({**told, "SLURM_JOB_ID": "7"}) is not None
    for child in ({"SLURM_JOB_ID": "8"}, {"SLURM_JOB_ID": "77"}):
        assert settings_from_environment({**told, **child}) is None
    assert settings_from_environment({**told, "SLURM_JOB_ID": "8", "HETSTREAM_GPU": "GPU-1b,"}) is not None, "its own"
    (tmp_path / "torch.py").write_text("print('trains')\n")
    (tmp_path / "hetstream.py").write_text("")  # hides the package
    told["PYTHONPATH"] = f"{STARTUP_DIRECTORY}:{tmp_path}"
    for job, trains in (("7", told["HETSTREAM_JOB_CLASS"] == "guaranteed"), ("8", True)):
        done = subprocess.run(
            [sys.executable, "-c", "import torch"], env={**told, "SLURM_JOB_ID": job}, capture_output=True, check=False,
            timeout=60,
        )  # fmt: skip
        assert (done.returncode == 0) == trains, (job, done.stderr)


@pytest.mark.shows("opportunistic jobs have CUDA_VISIBLE_DEVICES by UUID; a job without a place sees no GPU")
def test_other_jobs_are_left_alone(node: Node) -> None:
    node.call("Prolog", {"SLURM_JOB_PARTITION": "cpu", "SLURM_JOB_COMMENT": "gpu=1"})
    assert node.call("TaskProlog", {"SLURM_JOB_PARTITION": "cpu"}) == []
    assert not node.run_dir.exists()
    # It counts, as nobody else may launch on its GPU. But nobody has asked to share it.
    node.call("Prolog", {**GUARANTEED, "SLURM_JOB_PARTITION": "private"})
    assert node.call("TaskProlog", {"SLURM_JOB_PARTITION": "private"}) == []
    assert GrantedJobs(node.run_dir / "grants").is_reserved("GPU-0a")


@pytest.mark.parametrize("partition", ["gpu", "private", "op", "opp spare", "opp,spare", "*", ""])
@pytest.mark.parametrize("settings", [SETTINGS, 'HETSTREAM_GPUS="0=GPU-0a 1=GPU-1b"\n', "HETSTREAM_GPUS=(\n", None])
def test_a_mark_counts_in_an_opportunistic_partition_alone(node: Node, partition: str, settings: str | None) -> None:
    """Whoever got a Comment past the guard, or came while it was not in place, has no GPU by it."""
    node.settings.unlink() if settings is None else node.settings.write_text(settings)
    marked = {**OPPORTUNISTIC, "SLURM_JOB_PARTITION": partition}
    for environ in (marked, {name: value for name, value in marked.items() if name != "SLURM_JOB_PARTITION" or value}):
        node.call("Prolog", environ)
        assert node.left() == []


def test_gpus_of_slurms_own_are_no_grant_in_an_opportunistic_partition(node: Node) -> None:
    node.call("Prolog", {**GUARANTEED, "SLURM_JOB_GPUS": "0,1", "SLURM_JOB_PARTITION": "gpu"}, "6")
    node.call("Prolog", {**OPPORTUNISTIC, "SLURM_JOB_GPUS": "0,1"})
    assert node.grant() is None
    assert node.grant("6") is not None, "others go on as they are"
    assert not (node.run_dir / "grants-incomplete").exists()


@pytest.mark.parametrize("job_class", ["guaranteed", "opportunistic"])
def test_a_job_with_several_gpus_has_all_of_them_and_each_process_takes_its_own(node: Node, job_class: str) -> None:
    several = {
        "guaranteed": {**GUARANTEED, "SLURM_JOB_GPUS": "1,0"},
        "opportunistic": {**OPPORTUNISTIC, "SLURM_JOB_COMMENT": "hetstream:gpu=1,0 hetstream:gpus=2"},
    }
    node.call("Prolog", several[job_class])
    assert node.grant() == {"uid": 1000, "job_class": job_class, "gpus": ["GPU-1b", "GPU-0a"]}
    lines = node.call("TaskProlog", {})
    told = dict(line.removeprefix("export ").split("=", 1) for line in lines)
    assert told["HETSTREAM_GPU"] == "GPU-1b,GPU-0a"
    assert told["HETSTREAM_GPU_NUMBERS"] == "1,0"
    assert told.get("CUDA_VISIBLE_DEVICES") == ("GPU-1b,GPU-0a" if job_class == "opportunistic" else None)
    for rank, gpu in (("0", "GPU-1b"), ("1", "GPU-0a")):
        settings = settings_from_environment({**told, "SLURM_LOCALID": rank})
        assert settings is not None
        assert (settings.gpu, settings.job_class.value) == (gpu, job_class)


def test_names_of_gpus_are_the_drivers(node: Node) -> None:
    node.settings.write_text('HETSTREAM_SHARED_PARTITIONS="gpu"\n')
    for bus, number in (("0000:01:00.0", 1), ("0000:02:00.0", 0)):
        directory = node.directory / "driver" / bus
        directory.mkdir(parents=True)
        text = f"Model: \t\t NVIDIA H200\nGPU UUID: \t GPU-{number}f\nDevice Minor: \t {number}\n"
        (directory / "information").write_text(text)
    node.call("Prolog", {**GUARANTEED, "SLURM_JOB_GPUS": "1,0"})
    assert node.grant() == {"uid": 1000, "job_class": "guaranteed", "gpus": ["GPU-1f", "GPU-0f"]}


GUARANTEED_GRANT = {"uid": 1000, "job_class": "guaranteed", "gpus": ["GPU-1b"]}
OPPORTUNISTIC_GRANT = {**GUARANTEED_GRANT, "job_class": "opportunistic"}
UPGRADE = {"SLURM_JOB_COMMENT": "hetstream:upgrade=7:1@9999999999", "SLURM_JOB_PARTITION": "gpu"}


def test_the_packers_job_makes_another_one_guaranteed_where_it_is(node: Node) -> None:
    node.settings.write_text(SETTINGS + "HETSTREAM_PACKER_UID=999\n")
    node.call("Prolog", OPPORTUNISTIC)
    before = node.left()
    for uid in ("1000", "0x0", ""):  # whoever else writes such a comment
        node.call("Prolog", UPGRADE, "8", uid)
        assert node.grant() == OPPORTUNISTIC_GRANT
    node.call("Prolog", UPGRADE, "8", "999")
    assert node.grant() == GUARANTEED_GRANT
    assert node.left() == before
    node.call("Epilog", {}, "8")
    assert node.left() == before
    node.call("Prolog", UPGRADE, "9", "999")  # twice
    assert node.grant() == GUARANTEED_GRANT
    node.call("Epilog", {})
    assert node.left() == []


@pytest.mark.parametrize(
    "comment",
    [
        "hetstream:upgrade=7:0@9999999999", "hetstream:upgrade=7:1,0@9999999999", "hetstream:upgrade=7:1@1795000000",
        "hetstream:upgrade=8:1@9999999999", "hetstream:upgrade=", "hetstream:upgrade=7", "hetstream:upgrade=7:1",
        "hetstream:upgrade=../7:1@9999999999", "hetstream:upgrade=7:$(touch pwned)@9999999999",
        "hetstream:upgrade=7:1@", "hetstream:upgrade=7:*@9999999999",
    ],
)  # fmt: skip
def test_what_is_late_for_another_gpu_or_no_upgrade_makes_nobody_guaranteed(
    node: Node, comment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(node.directory)
    node.call("Prolog", OPPORTUNISTIC)
    before = node.left()
    node.call("Prolog", {**UPGRADE, "SLURM_JOB_COMMENT": comment}, "9", "0")
    assert node.grant() == OPPORTUNISTIC_GRANT
    assert node.left() == before
    assert not (node.directory / "pwned").exists()


def test_a_job_that_has_ended_is_not_upgraded(node: Node) -> None:
    node.call("Prolog", OPPORTUNISTIC)
    node.call("Epilog", {})
    node.call("Prolog", UPGRADE, "9", "0")
    assert node.left() == []
    # It ends while its grant is written: the Epilog has taken the first of the two files.
    node.call("Prolog", OPPORTUNISTIC)
    (node.run_dir / "environment" / "7").unlink()
    node.call("Prolog", UPGRADE, "9", "0")
    assert node.left() == []


def test_a_job_that_keeps_a_gpu_for_another_one_has_no_grant_of_its_own(node: Node) -> None:
    environ = {**GUARANTEED, "SLURM_JOB_COMMENT": "hetstream:holds=7@0"}
    node.call("Prolog", environ, "8", "0")
    assert node.left() == []
    node.call("Prolog", environ, "8")  # somebody else's is a guaranteed job like others
    assert GrantedJobs(node.run_dir / "grants").is_reserved("GPU-0a")


def test_steps_of_a_job_that_shares_do_not_ask_for_the_gpus_that_it_once_asked_for(node: Node) -> None:
    asked = {"SLURM_GPUS": "1", "SLURM_GPUS_PER_NODE": "1", "SLURM_JOB_PARTITION": "opp"}
    node.call("Prolog", OPPORTUNISTIC)
    lines = node.call("TaskProlog", {**asked, "PATH": os.environ["PATH"]})
    assert {"unset SLURM_GPUS", "unset SLURM_GPUS_PER_NODE"} == {line for line in lines if line.startswith("unset")}
    node.call("Prolog", GUARANTEED)
    assert not [line for line in node.call("TaskProlog", asked) if line.startswith("unset")]


HOSTILE = [
    "hetstream:gpu=$(touch pwned)", "hetstream:gpu=0;touch pwned", "hetstream:gpu=`touch pwned`", "hetstream:gpu=",
    "hetstream:gpu=,", 'hetstream:gpu=0"', "hetstream:gpu=0\n1", "hetstream:gpu=*", "hetstream:gpu=../0",
    "hetstream:gpu=-1", "hetstream:gpu=7", "hetstream:gpu=0,7", "hetstream:gpu=" + "1" * 5000,
]  # fmt: skip


@pytest.mark.parametrize("comment", HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_comment_runs_nothing_and_gives_nothing(
    node: Node, comment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(node.directory)
    names = {
        f"SLURM_JOB_{name}": "$(touch pwned)`touch pwned`'\"\n;touch pwned" for name in ("NAME", "USER", "ACCOUNT")
    }
    node.call("Prolog", {**OPPORTUNISTIC, **names, "SLURM_JOB_COMMENT": comment, "PATH": str(node.directory)})
    assert not (node.directory / "pwned").exists()
    assert node.left() == []
    assert node.call("TaskProlog", {"SLURM_JOB_PARTITION": "opp"}) == ["export CUDA_VISIBLE_DEVICES=NoDevFiles"]


def test_a_batch_script_without_a_grant_waits_for_the_packer_to_take_its_job_back(node: Node) -> None:
    node.settings.write_text(SETTINGS.replace("_UNPLACED_S=0", "_UNPLACED_S=7"))
    told = node.directory / "slept"
    (node.directory / "sleep").write_text(f'#!/bin/sh\necho "$1" >>{told}\n')
    (node.directory / "sleep").chmod(0o755)
    batch = {"SLURM_JOB_PARTITION": "opp", "PATH": f"{node.directory}:{os.environ['PATH']}"}
    for number in ({}, {"SLURM_STEP_ID": "-5"}):  # 26.05 has one for batch scripts
        assert node.call("TaskProlog", {**batch, **number}) == ["export CUDA_VISIBLE_DEVICES=NoDevFiles"]
    assert told.read_text() == "7\n7\n"
    node.call("TaskProlog", {**batch, "SLURM_STEP_ID": "0"})  # its steps have waited then
    node.call("TaskProlog", {**batch, "SLURM_JOB_PARTITION": "cpu"})
    node.call("Prolog", OPPORTUNISTIC)
    assert "export CUDA_VISIBLE_DEVICES=GPU-1b" in node.call("TaskProlog", batch)
    assert told.read_text() == "7\n7\n"


def test_a_job_without_a_number_is_not_written_down(node: Node) -> None:
    for job, uid in (("../7", "1000"), ("", "1000"), ("7", "0x0"), ("7", "")):
        node.call("Prolog", GUARANTEED, job, uid)
        node.call("Epilog", {}, job, uid)
        assert node.call("TaskProlog", {"SLURM_JOB_PARTITION": "opp"}, job) in (
            [],
            ["export CUDA_VISIBLE_DEVICES=NoDevFiles"],
        )
    assert not node.run_dir.exists()


@pytest.mark.parametrize("wrong", ["a GPU without a name", "settings with an error", "a directory in its place"])
def test_where_a_guaranteed_job_cannot_be_written_down_nobody_shares(node: Node, wrong: str) -> None:
    node.call("Prolog", {**OPPORTUNISTIC, "SLURM_JOB_COMMENT": "hetstream:gpu=0"}, "6")
    environ = dict(GUARANTEED)
    if wrong == "a GPU without a name":
        environ["SLURM_JOB_GPUS"] = "5"
    elif wrong == "settings with an error":
        node.settings.write_text(SETTINGS + "if then (\n")
    else:
        (node.run_dir / "grants" / "7.json.new").mkdir(parents=True)
    node.call("Prolog", environ)
    grants = GrantedJobs(node.run_dir / "grants")
    assert grants.is_reserved("GPU-0a")
    assert grants.is_reserved("GPU-1b")
    # It stays so until somebody has looked, whatever jobs come and go.
    node.settings.write_text(SETTINGS)
    for job, environ in (("8", GUARANTEED), ("9", OPPORTUNISTIC)):
        node.call("Prolog", environ, job)
        assert node.grant(job) is None
        node.call("Epilog", {}, job)
    assert grants.is_reserved("GPU-1b")
    shutil.rmtree(node.run_dir / "grants-incomplete")
    node.call("Prolog", OPPORTUNISTIC, "10")
    assert not grants.is_reserved("GPU-1b")


def test_where_settings_cannot_be_read_jobs_without_a_gpu_of_slurms_see_none(node: Node) -> None:
    node.settings.write_text("if then (\n")
    hidden = ["export CUDA_VISIBLE_DEVICES=NoDevFiles"]
    assert node.call("TaskProlog", {"SLURM_JOB_PARTITION": "opp"}) == hidden
    assert node.call("TaskProlog", GUARANTEED) == []
    node.call("Prolog", OPPORTUNISTIC)
    assert node.left() == []


@needs_root
def test_another_user_can_read_what_the_prolog_wrote_and_change_nothing(node: Node) -> None:
    node.call("Prolog", OPPORTUNISTIC)
    for directory in (node.run_dir, *node.run_dir.parents):
        if directory.stat().st_mode & 0o005 != 0o005 and directory != directory.parent:
            directory.chmod(directory.stat().st_mode | 0o005)

    def look() -> None:
        assert (node.run_dir / "environment" / "7").read_text()
        for path in (node.run_dir, node.run_dir / "grants", node.run_dir / "grants" / "7.json"):
            assert not os.access(path, os.W_OK)

    run_as(STRANGER, look)


def evil_run_dir(path: Path, precious: Path) -> None:
    """Of a stranger's: every name that the Prolog writes is a link, and a job has an environment already."""
    for name in ("grants", "environment"):
        (path / name).mkdir(parents=True)
    for name in ("grants/7.json", "grants/7.json.new", "environment/7.new"):
        (path / name).symlink_to(precious)
    (path / "environment" / "7").write_text("LD_PRELOAD=/evil.so\n")
    for one in (path, *path.rglob("*")):
        os.chown(one, STRANGER, STRANGER, follow_symlinks=False)


@needs_root
@pytest.mark.parametrize(
    "dirt", ["foreign", "linked", "open", "swapped", "foreign grants", "linked grants", "open environment"]
)
def test_where_somebody_else_has_a_hand_in_the_run_directory_root_writes_and_removes_nothing(
    node: Node, dirt: str, tmp_path: Path
) -> None:
    precious = tmp_path / "precious"
    precious.write_text("root's")
    evil = tmp_path / "evil"
    evil_run_dir(evil, precious)
    if dirt == "foreign":
        evil.rename(node.run_dir)
    elif dirt == "linked":
        node.run_dir.symlink_to(evil)
    else:
        node.run_dir.mkdir()
        for name in ("grants", "environment"):
            (node.run_dir / name).mkdir()
    if dirt == "foreign grants":
        (node.run_dir / "grants").rmdir()
        (evil / "grants").rename(node.run_dir / "grants")
    elif dirt == "linked grants":
        (node.run_dir / "grants").rmdir()
        (node.run_dir / "grants").symlink_to(evil / "grants")
    elif dirt == "open":
        node.run_dir.chmod(0o777)
    elif dirt == "open environment":
        (node.run_dir / "environment").chmod(0o777)
    elif dirt == "swapped":  # at any moment, by whoever can rename it
        tmp_path.chmod(0o777)
    before = {str(path): path.lstat().st_mtime_ns for path in [*evil.rglob("*"), *node.run_dir.rglob("*")]}
    for environ in (GUARANTEED, OPPORTUNISTIC):
        assert node.call("Prolog", environ) == []
        assert "LD_PRELOAD" not in "".join(node.call("TaskProlog", environ))
        assert node.call("Epilog", {}) == []
    assert precious.read_text() == "root's"
    assert before == {str(path): path.lstat().st_mtime_ns for path in [*evil.rglob("*"), *node.run_dir.rglob("*")]}


def test_the_scripts_say_which_version_they_are(node: Node) -> None:
    for name in SCRIPTS.values():
        assert script_version((node.directory / name).read_text()) == SCRIPTS_VERSION
    assert script_version("#!/bin/sh\nexit 0\n") is None


@pytest.mark.parametrize("job_class", ["guaranteed", "opportunistic"])
def test_a_python_without_hetstream_lets_no_opportunistic_program_train(tmp_path: Path, job_class: str) -> None:
    (tmp_path / "torch.py").write_text("print('trains')\n")
    (tmp_path / "hetstream.py").write_text("")  # hides the package
    environ = {"HETSTREAM_GPU": "GPU-0a", "HETSTREAM_JOB_CLASS": job_class}
    environ["PYTHONPATH"] = f"{STARTUP_DIRECTORY}:{tmp_path}"
    done = subprocess.run(
        [sys.executable, "-c", "print('begins'); import torch"], env=environ, capture_output=True, text=True,
        check=False, timeout=60,
    )  # fmt: skip
    if job_class == "guaranteed":
        assert (done.returncode, done.stdout, done.stderr) == (0, "begins\ntrains\n", "")
    else:
        assert (done.returncode, done.stdout) == (1, "begins\n")
        assert "has no hetstream, which an opportunistic job needs" in done.stderr
