"""What srun in a converted script becomes, and what the shells around it do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hetstream.hetjob.convert.step_command import is_of_tasks, name_for_shell, step_command
from hetstream.hetjob.job.job import STEP_PYTHON, submitting

COMMANDS = Path(submitting.__code__.co_filename).parents[1] / "commands"
ONE_NODE = {
    **{"SLURM_HET_SIZE": "2", "SLURM_JOB_ID": "17", "SLURM_JOB_ID_HET_GROUP_0": "17", "SLURM_JOB_NAME": "my job"},
    **{"SLURM_JOB_NUM_NODES_HET_GROUP_0": "1", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "gpu0"},
}
TWO_NODES = {
    **ONE_NODE,
    **{"SLURM_JOB_NUM_NODES_HET_GROUP_0": "2", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "gpu[0-1]"},
    **{"SLURM_NODELIST": "gpu[0-1]", "SLURM_NNODES": "2", "SLURM_TASKS_PER_NODE": "1(x2)"},
}
TASK = {"SLURM_PROCID": "3", "SLURM_NODEID": "1", "SLURM_STEP_ID": "5", "SLURM_STEP_NUM_TASKS": "4"}


@pytest.mark.parametrize(
    ("name", "is_theirs"),
    [
        *[("rank-%t", True), ("%4t", True), ("a/%x-%N-%t.txt", True), ("0", True), (" 12 ", True), ("%%%t", True)],
        *[("rank-%n", False), ("%j-%s", False), ("%%t", False), ("none", False), ("all", False), ("1.txt", False)],
        *[("a\\%t", False), ("", False), ("100%", False), ("%T", False)],
    ],
)
def test_names_of_files_that_depend_on_the_task(name: str, is_theirs: bool) -> None:
    assert is_of_tasks(name) == is_theirs


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("rank-%t.txt", "rank-3.txt"),
        ("%4t-%2n-%12t", "0003-01-0000000003"),
        ("%x %j.%s %J %A", "my job 17.5 17.5 17"),
        ("%%t %z 5% $HOME `id` ' \" ~", "%t %z 5% $HOME `id` ' \" ~"),
        ("%a-%b", "4294967294-4"),
        ("%u@%N", "user@gpu1"),
    ],
)
def test_a_tasks_file_has_the_name_that_srun_says(name: str, expected: str) -> None:
    environ = {**ONE_NODE, **TASK, "SLURMD_NODENAME": "gpu1", "SLURM_JOB_USER": "user"}
    text = f'file={name_for_shell(name, ONE_NODE)}; printf %s "$file"'
    assert (
        subprocess.run(["sh", "-c", text], env=environ, capture_output=True, text=True, check=True).stdout == expected
    )


def run_task(words: tuple[str, ...], directory: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """What slurmstepd does with the words behind `--`."""
    environ = {**ONE_NODE, **TASK, "PATH": os.defpath, **more}
    return subprocess.run(
        words[words.index("--") + 1 :],
        cwd=directory,
        env=environ,
        input="in",
        capture_output=True,
        text=True,
        check=False,
    )


PROGRAM = ("sh", "-c", "echo out; echo err >&2; cat; echo $SLURM_JOB_NAME", "-t", "a b")


@pytest.mark.parametrize(
    ("words", "out", "err", "files"),
    [
        (["-o", "new/r-%t"], "", "", {"new/r-3": "out\nerr\ninmy job\n"}),
        (["--output=r-%t", "-ee-%t"], "", "", {"r-3": "out\ninmy job\n", "e-3": "err\n"}),
        (["-e", "e-%t"], "out\ninmy job\n", "", {"e-3": "err\n"}),
        (["-o3"], "out\nerr\ninmy job\n", "", {}),
        (["-o", "2"], "", "", {}),
        (["-i", "2"], "out\nmy job\n", "err\n", {}),
        (["--input=3"], "out\ninmy job\n", "err\n", {}),
        (["-e", "1"], "out\ninmy job\n", "", {}),
        (["-o", "7"], "", "", {"7": "out\nerr\ninmy job\n"}),
        (["-o", "old-%t"], "", "", {"old-3": "out\nerr\ninmy job\n"}),
        (["-o", "old-%t", "--open-mode=append"], "", "", {"old-3": "old\nout\nerr\ninmy job\n"}),
    ],
)
def test_a_task_opens_its_files(tmp_path: Path, words: list[str], out: str, err: str, files: dict[str, str]) -> None:
    (tmp_path / "old-3").write_text("old\n")
    command = step_command([*words, *PROGRAM], ONE_NODE)
    assert command.arguments is not None
    assert not command.note
    done = run_task(command.arguments, tmp_path)
    assert (done.stdout, done.stderr) == (out, err)
    found = {str(path.relative_to(tmp_path)): path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    assert found == {"old-3": "old\n"} | files
    # srun itself opens none of them, and the step has the program's name.
    options = command.arguments[: command.arguments.index("--")]
    assert "--job-name=sh" in options
    assert not [word for word in options if "%t" in word or word[-1].isdigit()]


def test_a_site_whose_steps_append_keeps_what_a_file_has(tmp_path: Path) -> None:
    (tmp_path / "r-3").write_text("old\n")
    command = step_command(["-o", "r-%t", "echo", "new"], ONE_NODE, appends=True)
    run_task(command.arguments or (), tmp_path)
    assert (tmp_path / "r-3").read_text() == "old\nnew\n"


def test_a_program_keeps_its_exit_code_and_environment(tmp_path: Path) -> None:
    of_shell = {"BASH_FUNC_module%%": "() {  echo loaded\n}", "odd.name": "1"}
    command = step_command(["-o", "r-%t", "bash", "-p", "-c", "env; exit 7"], ONE_NODE)
    assert run_task(command.arguments or (), tmp_path, **of_shell).returncode == 7
    assert "BASH_FUNC_module%%=() {  echo loaded" in (tmp_path / "r-3").read_text()
    command = step_command(["-o", "r-%t", "no-such-program"], ONE_NODE)
    assert run_task(command.arguments or (), tmp_path).returncode == 2
    assert "execve(): no-such-program: No such file" in (tmp_path / "r-3").read_text()


@pytest.mark.parametrize(
    "words",
    [
        ["-n4", "python", "train.py", "-o", "rank-%t"],
        ["-o", "common.txt", "-e", "none", "python"],
        ["--het-group=1", "-o", "r-%t", "worker"],
        ["--het-group=0", "a", ":", "--het-group=1", "b"],
        ["--pty", "-o", "r-%t", "bash"],
        ["--of-a-plugin", "-o", "r-%t", "python"],
        ["--version"],
        ["-o"],
    ],
)
def test_what_is_right_stays_as_it_is(words: list[str]) -> None:
    command = step_command(words, ONE_NODE)
    assert (command.arguments, command.variables, command.note) == (tuple(words), {}, "")


def test_variables_name_files_too(tmp_path: Path) -> None:
    by_variable = {**ONE_NODE, "SLURM_STDOUTMODE": "v-%t", "SLURM_OPEN_MODE": "a"}
    run_task(step_command(["echo", "x"], by_variable).arguments or (), tmp_path)
    run_task(step_command(["echo", "y"], by_variable).arguments or (), tmp_path)
    assert (tmp_path / "v-3").read_text() == "x\ny\n"
    assert step_command(["-o", "common", "echo"], by_variable).arguments == ("-o", "common", "echo")


@pytest.mark.parametrize("option", ["--label", "--multi-prog", "--bcast", "--container=x"])
def test_what_cannot_be_put_right_is_said(option: str) -> None:
    command = step_command([option, "-o", "r-%t", "python"], ONE_NODE)
    assert command.arguments == (option, "-o", "r-%t", "python")
    assert "counts tasks from -1" in command.note
    refused = step_command([option, "--input=0", "python"], ONE_NODE)
    assert refused.arguments is None
    assert option.partition("=")[0] in refused.note


def test_two_programs_are_not_started_on_the_data_workers_nodes() -> None:
    command = step_command(["-n1", "head", ":", "-n3", "workers"], ONE_NODE)
    assert command.arguments is None
    assert "component 1" in command.note


def test_tasks_on_part_of_the_nodes_have_the_variables_of_the_job() -> None:
    command = step_command(["-N1", "-n1", "--task-prolog=own", "python"], TWO_NODES)
    prolog = str(COMMANDS / "task_prolog")
    assert command.arguments == ("--nodes=1", "--ntasks=1", f"--task-prolog={prolog}", "--", "python")
    environ = {**os.environ, **command.variables, "SLURM_JOB_NUM_NODES": "1"}
    environ["SLURM_HETSTREAM_TASK_PROLOG"] = str(COMMANDS.parent / "missing")
    said = subprocess.run([prolog], env=environ, capture_output=True, text=True, check=False).stdout.splitlines()
    assert {"export SLURM_JOB_NUM_NODES=2", "export SLURM_JOB_NODELIST=gpu[0-1]"} <= {*said}
    assert not [line for line in said if "SLURM_NNODES" in line]
    preserved = step_command(["-E", "-N1", "python"], TWO_NODES)
    assert "SLURM_NNODES=2 SLURM_TASKS_PER_NODE=1(x2)" in preserved.variables["SLURM_HETSTREAM_OF_JOB"]
    by_script = step_command(["python"], TWO_NODES | {"SLURM_JOB_NUM_NODES": "1"})
    assert by_script.variables["SLURM_JOB_NUM_NODES_HET_GROUP_0"] == "1"


def test_in_a_container_tasks_have_the_variables_without_a_file_of_the_host(tmp_path: Path) -> None:
    options = {"container-image": True, "flag": False}
    command = step_command(["--container-image", "x", "--flag", "-N1", "env"], TWO_NODES, options)
    assert command.arguments is not None
    assert not any("task-prolog" in word for word in command.arguments)
    assert {"SLURM_JOB_NUM_NODES=2", "SLURM_JOB_NODELIST=gpu[0-1]"} <= {
        *run_task(command.arguments, tmp_path).stdout.splitlines()
    }


def test_srun_in_the_path_of_a_script_calls_slurms(tmp_path: Path) -> None:
    real = tmp_path / "a b" / "srun"
    real.parent.mkdir()
    real.write_text('#!/bin/bash -p\nprintf "<%s>" "$@"; echo; env\n')
    real.chmod(0o755)
    functions = {"BASH_FUNC_module%%": "() {  echo loaded\n}"}
    environ = {**TWO_NODES, **functions, "PATH": f"{real.parent}:/usr/bin:/bin"}
    environ |= submitting(environ)
    assert environ[STEP_PYTHON] == sys.executable

    def call(*words: str, **more: str) -> tuple[str, set[str]]:
        done = subprocess.run(["srun", *words], env=environ | more, capture_output=True, text=True, check=True)
        first, *others = done.stdout.splitlines()
        return first, {*others}

    said, found = call("-n1", "a b", "")
    assert said == f"<--ntasks=1><--task-prolog={COMMANDS / 'task_prolog'}><--><a b><>"
    assert {f"PATH={environ['PATH']}", "BASH_FUNC_module%%=() {  echo loaded"} <= found
    assert not [line for line in found if line.startswith("LC_CTYPE")]
    # Of a job of one node nothing is changed, nor in a job that this one has submitted, nor for hetstream's own steps.
    for other in ({"SLURM_JOB_NUM_NODES_HET_GROUP_0": "1"}, {"SLURM_JOB_ID": "20"}, {STEP_PYTHON: ""}):
        assert call("-n1", "a b", "", **other)[0] == "<-n1><a b><>"
    assert "<--output=all>" in call("-n1", "-o%t", "a", SLURM_JOB_NUM_NODES_HET_GROUP_0="1")[0]
    # It is called by its name, as a shell would call it.
    real.unlink()
    real.symlink_to("/bin/sh")
    for nodes in ("1", "2"):
        more = {"SLURM_JOB_NUM_NODES_HET_GROUP_0": nodes}
        done = subprocess.run(["srun", "--version"], env=environ | more, capture_output=True, text=True, check=False)
        assert done.stderr.startswith("srun: "), done.stderr
