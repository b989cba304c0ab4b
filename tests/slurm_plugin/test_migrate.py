"""`hetstream migrate` without Slurm: what is submitted, and what is said of how far it is."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hetstream.base.errors import UsageError
from hetstream.checkpoint.disk.ownership import Event, JobIdentity, Owner
from hetstream.hetjob.convert.convert import convert
from hetstream.hetjob.convert.directives import read_directives
from hetstream.hetjob.convert.render import render, without_block
from hetstream.hetjob.convert.sbatch_options import parse_words
from hetstream.hetjob.convert.spec import read_spec
from hetstream.hetjob.ports import ClusterLimits
from hetstream.slurm_plugin.cli import main, migrate
from hetstream.slurm_plugin.client.model import Job
from hetstream.slurm_plugin.submit.migration import Sight, arguments_of, export_option, stage, with_memory

OLD, NEW = JobIdentity("31", "gpu0", 5), JobIdentity("40", "gpu1", 6)


@pytest.mark.parametrize(
    ("script", "given", "value"),
    [
        ("", "", "ALL,HETSTREAM_TAKES_OVER=31"),
        ("--export=NONE", "", "HETSTREAM_TAKES_OVER=31"),
        ("--export=PATH,DATA=/d", "", "PATH,DATA=/d,HETSTREAM_TAKES_OVER=31"),
        ("--export=NONE", "--export=ALL,X=1", "ALL,X=1,HETSTREAM_TAKES_OVER=31"),
        ("", "--export=ALL,HETSTREAM_TAKES_OVER=7", "ALL,HETSTREAM_TAKES_OVER=31"),
    ],
)
def test_the_new_job_is_told_whose_training_it_takes_over(script: str, given: str, value: str) -> None:
    option = export_option("31", parse_words(script.split(), "line 2")[0], parse_words(given.split(), "here")[0])
    assert (option.value, option.words) == (value, (f"--export={value}",))


def test_arguments_are_repeated_and_never_guessed() -> None:
    assert arguments_of("/data/my train.sh", ["/data/my train.sh"], None, "31") == []
    assert arguments_of("/tmp/gone/train.sh", [], None, "31") == []
    assert arguments_of("/data/train.sh --epochs 3", ["/data/train.sh"], ["--epochs", "3"], "31") == ["--epochs", "3"]
    with pytest.raises(UsageError, match=r"arguments \(--epochs 3\).*hetstream migrate 31 \.\.\. -- --epochs 3"):
        arguments_of("/data/train.sh --epochs 3", ["/data/train.sh"], None, "31")


@pytest.mark.parametrize(
    "directives",
    ["#HETSTREAM --data-workers=2 --data-worker-partition=cpu", "#HETSTREAM --checkpoint=c --checkpoint-size=1G"],
)
def test_a_converted_script_is_the_users_own_again(directives: str) -> None:
    script = f"#!/bin/bash\n#SBATCH --gres=gpu:1 --cpus-per-task=8 --mem=4G\n{directives}\nsrun python train.py\n"
    spec = read_spec(read_directives(script, "train.sh"), "train.sh")
    assert spec
    plan = convert(spec, script, "train.sh")
    converted = render(script, plan, ["/bin/hetstream"])
    assert converted != script
    assert without_block(converted) == script
    assert without_block(script) == script


def sight(
    old_state: str = "RUNNING",
    new_state: str = "RUNNING",
    owner: JobIdentity | None = OLD,
    asked_by: str = "",
    events: tuple[str, ...] = (),
) -> Sight:
    known = {
        "handed over": Event("handed over", 1, 100.0, NEW, 60),
        "took over": Event("took over", 2, 101.5, NEW, 60, 1.5),
        "took over from the dead": Event("took over", 2, 101.5, NEW),
        "an older hand-over": Event("took over", 1, 50.0, OLD, 30, 1.0),
    }
    return Sight(
        "31", "40", old_state, new_state, asked_by,
        Owner(1, owner) if owner else None, [known[name] for name in events],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("seen", "text", "is_over", "is_done"),
    [
        (sight(new_state="PENDING"), "job 40 is pending (hetstream why 40); job 31 trains", False, False),
        (sight(), "job 40 starts its program; job 31 trains", False, False),
        (sight(events=("an older hand-over",)), "job 40 starts its program; job 31 trains", False, False),
        (sight(asked_by="40"), "job 40 is ready and has asked job 31 to hand over", False, False),
        (sight(asked_by="40", events=("handed over",)), "job 31 has saved step 60 and stopped", False, False),
        (sight(owner=NEW, events=("handed over",)), "job 40 has the checkpoints and restores", False, False),
        (
            sight("", owner=NEW, events=("handed over", "took over")),
            "job 40 has taken over after step 60: nobody trained for 1.50 s",
            True,
            True,
        ),
        (sight("", events=("took over from the dead",)), "job 40 has taken over, as job 31 died", True, True),
        (sight("", owner=NEW), "job 40 trains; job 31 had ended before it was asked", True, True),
        (sight(new_state=""), "job 40 has ended and did not take over; job 31 trains on", True, False),
        (
            sight("", new_state="", events=("handed over",)),
            "job 40 has ended and did not take over; job 31 has stopped",
            True,
            False,
        ),
        (
            sight(""),
            "job 31 has ended; job 40 starts its program and goes on from the newest checkpoint",
            False,
            False,
        ),
        (sight("", owner=None), "job 31 has ended and job 40 runs", True, True),
    ],
)
def test_how_far_a_migration_is(seen: Sight, text: str, is_over: bool, is_done: bool) -> None:
    found = stage(seen)
    assert (found.text, found.is_over, found.is_done) == (text, is_over, is_done)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "which job"),
        (["31", "train.sh"], "'train.sh' is one word too many"),
        (["31", "--array=3"], "--array makes no sense"),
        (["31", "--timeout=soon"], "a number of seconds"),
    ],
)
def test_a_wrong_command_line_is_refused(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["migrate", *words]) == 2
    assert text in capsys.readouterr().err


def test_help_names_all_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["migrate", "--help"]) == 0
    assert "--dry-run" in capsys.readouterr().out


SCRIPT = """#!/bin/bash
#SBATCH --gres=gpu:1 --cpus-per-task=4 --mem=4G
#HETSTREAM --checkpoint=checkpoints --checkpoint-size=1G
srun python train.py
"""


class FakeSlurm:
    """A cluster with job 31, whose user gave its script to `hetstream sbatch`."""

    script = SCRIPT
    state = "RUNNING"
    work_dir = ""

    def snapshot(self) -> Any:
        job = Job(31, "train", str(os.geteuid()), ("gpu",), self.state, "", 1, 4, 1, 4, 4096, work_dir=self.work_dir)
        return SimpleNamespace(jobs=[job], config={})

    def seen(self) -> Any:
        return self.snapshot()

    def command(self, job_id: str) -> str:
        return "/tmp/hetstream-gone/train.sbatch"

    def batch_script(self, job_id: str) -> bytes:
        spec = read_spec(read_directives(self.script, "train.sbatch"), "train.sbatch")
        if spec is None:
            return self.script.encode()
        return render(self.script, convert(spec, self.script, "train.sbatch"), ["/bin/hetstream"]).encode()

    def cluster(self, name: str = "") -> ClusterLimits:
        return ClusterLimits(frozenset({"gpu"}), "gpu", "sched/backfill")

    def living_jobs(self) -> dict[str, str]:
        return {"31": "RUNNING"}


@pytest.fixture
def submitted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[list[str], str, str]]:
    """What sbatch was given: words, script, directory."""
    found: list[tuple[list[str], str, str]] = []

    def submit(
        options: Sequence[str], script: Path, arguments: Sequence[str], environ: Mapping[str, str], cwd: str
    ) -> str:
        found.append(([*options, str(script), *arguments], script.read_text(), cwd))
        return "40"

    monkeypatch.setattr(FakeSlurm, "work_dir", str(tmp_path))
    monkeypatch.setattr(migrate, "CommandSlurm", FakeSlurm)
    monkeypatch.setattr(migrate, "submit_script", submit)
    return found


def test_the_script_is_submitted_once_more_from_where_it_was(
    submitted: list[tuple[list[str], str, str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["migrate", "31", "--exclude=gpu7", "--no-wait", "--json"]) == 0
    ((words, script, cwd),) = submitted
    assert words[:3] == ["--exclude=gpu7", "--job-name=train", "--export=ALL,HETSTREAM_TAKES_OVER=31"]
    assert Path(words[-1]).name == "train.sbatch"
    assert script.count("ckpt start --checkpoint=checkpoints") == 1
    assert without_block(script) == SCRIPT
    assert cwd == str(tmp_path)
    said = json.loads(capsys.readouterr().out)
    assert (said["old_job"], said["new_job"], said["checkpoints"]) == ("31", "40", str(tmp_path / "checkpoints"))


def test_a_new_job_that_ends_is_told(
    submitted: list[tuple[list[str], str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["migrate", "31"]) == 1
    assert len(submitted) == 1
    assert "job 40 has ended and did not take over; job 31 trains on" in capsys.readouterr().err


@pytest.mark.shows("what a dry run of `sbatch` or `migrate` prints works when pasted")
def test_a_dry_run_submits_nothing(
    submitted: list[tuple[list[str], str, str]], capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert main(["migrate", "31", "--dry-run", "--time=10", "--", "a b"]) == 0
    printed = capfdbinary.readouterr()
    assert submitted == []
    assert without_block(printed.out.decode()) == SCRIPT
    assert b"sbatch --time=10 --job-name=train --export=ALL,HETSTREAM_TAKES_OVER=31" in printed.err
    assert b"train.sbatch 'a b'" in printed.err


@pytest.mark.parametrize("memory", ["--mem=4G", "--mem-per-cpu=1G", "--mem-per-gpu 4G"])
def test_more_memory_takes_the_place_of_the_scripts_whatever_it_asked_by(
    submitted: list[tuple[list[str], str, str]],
    capfdbinary: pytest.CaptureFixture[bytes],
    monkeypatch: pytest.MonkeyPatch,
    memory: str,
) -> None:
    """sbatch: fatal: --mem, --mem-per-cpu, and --mem-per-gpu are mutually exclusive."""
    monkeypatch.setattr(FakeSlurm, "script", SCRIPT.replace("--mem=4G", memory))
    assert main(["migrate", "31", "--dry-run", "--mem=96G"]) == 0
    printed = capfdbinary.readouterr()
    script = printed.out.decode()
    assert without_block(script) == SCRIPT.replace("--mem=4G", "--mem=96G")
    assert set(re.findall(r"--mem\S*", script)) == {"--mem=96G", "--mem=99G"}, "with a replica of the checkpoint"
    assert b"--mem-per" not in printed.err
    assert submitted == []


@pytest.mark.parametrize(
    ("script", "changed"),
    [
        ("#SBATCH --mem-per-cpu 1G -n 2\n", "#SBATCH --mem=8G -n 2\n"),
        ("#SBATCH --mem-bind=local --mem=1\n", "#SBATCH --mem-bind=local --mem=8G\n"),
        ("#SBATCH -n 2\necho\n#SBATCH --mem=1\n", "#SBATCH -n 2\necho\n#SBATCH --mem=1\n"),
        ("#SBATCH --mem=1\n#SBATCH hetjob\n#SBATCH --mem=2\n", "#SBATCH --mem=1\n#SBATCH hetjob\n#SBATCH --mem=2\n"),
        ("# --mem=1\n", "# --mem=1\n"),
        ("", ""),
    ],
)
def test_only_options_of_sbatch_are_replaced(script: str, changed: str) -> None:
    given = parse_words(["--mem=8G", "--time=5"], "command line")[0]
    assert with_memory(f"#!/bin/sh\n{script}", given) == f"#!/bin/sh\n{changed}"
    assert with_memory(script, parse_words(["--time=5"], "command line")[0]) == script


def test_only_a_running_job_can_hand_over(
    submitted: list[tuple[list[str], str, str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(FakeSlurm, "state", "PENDING")
    assert main(["migrate", "31"]) == 2
    assert "job 31 is PENDING" in capsys.readouterr().err
    assert submitted == []


def test_a_script_that_asks_for_nothing_is_submitted_as_it_is(
    submitted: list[tuple[list[str], str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = "#!/bin/bash\n#SBATCH --export=NONE\nsrun python train.py\n"
    monkeypatch.setattr(FakeSlurm, "script", own)
    assert main(["migrate", "31", "--no-wait"]) == 0
    ((words, script, _),) = submitted
    assert words[:-1] == ["--job-name=train", "--export=HETSTREAM_TAKES_OVER=31"]
    assert script == own
