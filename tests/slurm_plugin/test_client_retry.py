"""Failures that pass by themselves are tried again; nothing is ever submitted twice."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from recorded import AS_ASKED

from hetstream.hetjob.errors import SlurmCommandError
from hetstream.hetjob.ports import MarkedJob
from hetstream.slurm_plugin.client.accounting import SACCT_FIELDS, sacct_rows, usages_of
from hetstream.slurm_plugin.client.fake import FakeSlurm
from hetstream.slurm_plugin.client.parse_text import FIELD_END, JOB_FIELDS, RECORD_END, new_separators
from hetstream.slurm_plugin.client.read import SUBMISSION_FIELDS
from hetstream.slurm_plugin.client.run import DELAYS_S
from hetstream.slurm_plugin.client.slurm import CommandSlurm

FIXTURES = Path(__file__).with_name("fixtures")
BUSY = "Resource temporarily unavailable"
LOST = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"


class Tools:
    """Programs in place of Slurm's: each fails as often as its file of failures has lines, then prints its answer."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.slept: list[float] = []
        self.slurm = CommandSlurm({"PATH": f"{directory}:/usr/bin:/bin"}, self.slept.append)

    def add(self, name: str, *failures: str, answer: str = "") -> None:
        (self.directory / f"{name}.failures").write_text("".join(f"{line}\n" for line in failures))
        (self.directory / f"{name}.answer").write_text(answer)
        path = self.directory / name
        path.write_text(
            f'#!/bin/sh\ncd {self.directory}\necho "$@" >> {name}.calls\n'
            f"line=$(head -n1 {name}.failures)\nsed -i 1d {name}.failures\n"
            f'if [ -n "$line" ]; then echo "$line" >&2; exit 1; fi\ncat {name}.answer | {AS_ASKED}\n'
        )
        path.chmod(0o755)

    def prints_jobs(self, *jobs: dict[str, str]) -> None:
        """Let squeue print these records as the real one does: with the separators that it is asked for."""
        (self.directory / "jobs.json").write_text(json.dumps(jobs))
        path = self.directory / "squeue"
        path.write_text(
            f"#!{sys.executable}\nimport json, sys\n"
            f"jobs = json.load(open({str(self.directory / 'jobs.json')!r}))\n"
            "asked = [one.split(':', 1) for one in sys.argv[sys.argv.index('-O') + 1].split(',')]\n"
            "for job in jobs:\n    print(''.join(job[name] + end for name, end in asked))\n"
        )

    def calls(self, name: str) -> list[str]:
        path = self.directory / f"{name}.calls"
        return path.read_text().strip("\n").split("\n") if path.exists() else []


@pytest.fixture
def tools(tmp_path: Path) -> Tools:
    return Tools(tmp_path)


def queue(job_id: str, comment: str, fields: Sequence[str] = SUBMISSION_FIELDS) -> str:
    values = {"JobID": job_id, "NumCPUs": "1", "Comment": comment} | {"Partition": "cpu", "State": "PENDING"}
    values["UserID"] = str(os.geteuid())
    return FIELD_END.join(values.get(name, "N/A") for name in fields) + RECORD_END + "\n"


@pytest.mark.shows("a slurmctld that is busy is asked again; one that refuses is not")
def test_a_busy_controller_is_asked_again(tools: Tools) -> None:
    tools.add("scontrol", f"slurm_update error: {BUSY}", f"slurm_update error: {BUSY}")
    tools.slurm.update("7", {"Partition": "gpu", "TimeLimit": "20"})
    assert tools.calls("scontrol") == ["update JobId=7 Partition=gpu TimeLimit=20"] * 3
    assert tools.slept == list(DELAYS_S[:2])


@pytest.mark.shows("a slurmctld that is busy is asked again; one that refuses is not")
def test_a_refusal_is_final(tools: Tools) -> None:
    tools.add("scontrol", "Access/permission denied")
    with pytest.raises(SlurmCommandError, match=r"permission denied.*Check: squeue --jobs=7"):
        tools.slurm.release("7")
    assert tools.slept == []


@pytest.mark.shows("a slurmctld that is busy is asked again; one that refuses is not")
def test_a_controller_that_stays_away_is_an_error(tools: Tools) -> None:
    tools.add("scancel", *["Unable to contact slurm controller (connect failure)"] * 20)
    with pytest.raises(SlurmCommandError, match="Unable to contact"):
        tools.slurm.cancel("7")
    assert tools.slept == list(DELAYS_S)


@pytest.mark.shows("a submission's key is a word in Comment; words of others in AdminComment stay")
def test_a_submission_whose_answer_was_lost_is_found_again(tools: Tools) -> None:
    tools.add("sbatch", LOST, answer="99\n")
    tools.add("squeue", answer=queue("41", "hets:trainer=3 hetstream:key=3.w1"))
    assert tools.slurm.submit("#!/bin/sh\n", ["--comment=hets:trainer=3", "-n1"], key="3.w1") == "41"
    assert tools.calls("sbatch") == ["--parsable --comment=hets:trainer=3 hetstream:key=3.w1 -n1"]
    # Of this user alone: slurmctld is slow at this moment, and the list of all users' jobs is long.
    assert f"--user={os.geteuid()} " in tools.calls("squeue")[0]


@pytest.mark.shows("a submission whose answer was lost is found again, or made again if it never arrived")
def test_a_submission_that_never_arrived_is_made_again(tools: Tools) -> None:
    tools.add("sbatch", LOST, BUSY, answer="42\n")
    tools.add("squeue", f"slurm_load_jobs error: {LOST}", answer=queue("41", "hetstream:key=3.w10"))
    assert tools.slurm.submit("#!/bin/sh\n", [], key="3.w1") == "42"
    assert len(tools.calls("sbatch")) == 3
    assert len(tools.calls("squeue")) == 2


@pytest.mark.shows("a submission whose answer was lost is found again, or made again if it never arrived")
def test_without_a_key_a_lost_answer_is_an_error(tools: Tools) -> None:
    tools.add("sbatch", BUSY, LOST, answer="42\n")
    with pytest.raises(SlurmCommandError, match="Socket timed out"):
        tools.slurm.submit("#!/bin/sh\n", [])
    assert len(tools.calls("sbatch")) == 2


@pytest.mark.shows("an update of an array of which tasks have ended counts as done")
@pytest.mark.parametrize("version", ["22.05", "24.11", "26.05"])
def test_an_update_of_an_array_whose_tasks_have_partly_ended_has_taken_effect(tools: Tools, version: str) -> None:
    said = (FIXTURES / version / "scontrol_update_throttle.txt").read_text().splitlines()
    told = [line for line in said if not line.startswith("rc=")]
    (tools.directory / "told").write_text("".join(f"{line}\n" for line in told))
    path = tools.directory / "scontrol"
    path.write_text(f"#!/bin/sh\ncat {tools.directory}/told\nexit 1\n")
    path.chmod(0o755)
    tools.slurm.update("33", {"ArrayTaskThrottle": "5"})
    (tools.directory / "told").write_text("33_4: Invalid job id specified\n")
    with pytest.raises(SlurmCommandError, match="Invalid job id"):
        tools.slurm.update("33", {"ArrayTaskThrottle": "5"})


def test_what_could_act_twice_is_refused(tools: Tools) -> None:
    with pytest.raises(ValueError, match=r"TimeLimit\+"):
        tools.slurm.update("7", {"TimeLimit+": "20"})
    with pytest.raises(ValueError, match="submission key 'two words'"):
        tools.slurm.submit("", [], key="two words")


def test_the_fake_keeps_keys_too(tmp_path: Path, wait_until: Callable[..., None]) -> None:
    fake = FakeSlurm(tmp_path, {"PATH": "/usr/bin:/bin"})
    first = fake.submit("#!/bin/sh\n", [], key="a")
    assert fake.submit("#!/bin/sh\n", [], key="a") == fake.find("a") == first
    wait_until(lambda: all(child.poll() is not None for children in fake.jobs.values() for child in children))
    assert len(fake.jobs) == 1


@pytest.mark.shows("a submission whose answer was lost is found again, or made again if it never arrived")
@pytest.mark.slurm
@pytest.mark.every_release
def test_a_real_submission_whose_answer_is_lost(devcluster: Any, tmp_path: Path) -> None:
    """sbatch submits, and its user is told that the connection timed out."""
    real = next(Path(place, "sbatch") for place in devcluster.env["PATH"].split(":") if Path(place, "sbatch").exists())
    tool = tmp_path / "sbatch"
    tool.write_text(f'#!/bin/sh\n{real} "$@" >/dev/null\necho "Socket timed out on send/recv operation" >&2\nexit 1\n')
    tool.chmod(0o755)
    slept: list[float] = []
    environ = {**devcluster.env, "PATH": f"{tmp_path}:{devcluster.env['PATH']}"}
    slurm = CommandSlurm(environ, slept.append)
    job_id = slurm.submit("#!/bin/sh\nsleep 300\n", ["-p", "cpu", "-H", "-o", "/dev/null"], key="lost.1")
    try:
        assert len(slept) == 1
        assert [str(job.job_id) for job in slurm.snapshot().jobs if "lost.1" in job.comment] == [job_id]
    finally:
        slurm.cancel(job_id)


HOSTILE = (
    "\x1f",
    "\x1e",
    f"x{FIELD_END}/w{FIELD_END}c{RECORD_END}" + FIELD_END.join(["66"] * (len(JOB_FIELDS) - 1)) + f"{FIELD_END}forged",
    "line\nJobID=7\n\n",
    "\x1b[31m%A %T",
    "ü" * 1000,
)


@pytest.mark.parametrize("text", HOSTILE)
def test_no_text_of_a_user_is_taken_for_another_record(tools: Tools, text: str) -> None:
    # Each field that a user writes, as squeue prints it: unchanged, between separators that were drawn for the call.
    first, second = (
        dict.fromkeys(JOB_FIELDS, "N/A")
        | {"JobID": job_id, "NumCPUs": "1", "UserID": str(os.geteuid()), "UserName": "me", "State": "RUNNING"}
        | {"TimeUsed": "1:02", "TimeLeft": "UNLIMITED"}
        for job_id in ("41", "42")
    )
    first |= {"Name": text, "Comment": f"{text} hetstream:key=a", "WorkDir": f"/{text}"}
    tools.add("squeue")
    tools.prints_jobs(first, second)
    one, other = tools.slurm._reader.jobs()
    assert (one.job_id, one.name, one.uid, other.job_id) == (41, text, os.geteuid(), 42)
    assert one.comment == first["Comment"]
    assert tools.slurm.find("a") == "41"
    assert tools.slurm.living_jobs() == {"41": "RUNNING", "42": "RUNNING"}
    assert tools.slurm.marked_jobs("hetstream:key=a") == [MarkedJob("41", "RUNNING", 1, 62.0, None)]


def test_another_users_job_is_not_taken_for_the_submission_of_this_one(tools: Tools) -> None:
    tools.add("squeue")
    theirs = dict.fromkeys(JOB_FIELDS, "N/A") | {"JobID": "41", "NumCPUs": "1", "Comment": "hetstream:key=a"}
    tools.prints_jobs(theirs | {"UserID": str(os.geteuid() + 1)})
    assert tools.slurm.find("a") is None


def test_a_record_that_cannot_be_read_hides_no_other(tools: Tools, caplog: pytest.LogCaptureFixture) -> None:
    tools.add("squeue", answer=queue("no number", "", JOB_FIELDS) + queue("42", "", JOB_FIELDS))
    assert [job.job_id for job in tools.slurm._reader.jobs()] == [42]
    assert "1 of squeue's records cannot be read" in caplog.text


def test_separators_are_others_for_each_call() -> None:
    assert len({end for _ in range(100) for end in new_separators()}) == 200


def test_names_do_not_break_lines_of_sacct() -> None:
    word = "\x1fword\x1f"
    row = ["7", *("" for _ in SACCT_FIELDS[1:-1])]
    row[SACCT_FIELDS.index("Start")] = "2026-11-20T16:00:00"
    text = "".join(word.join([*row, name]) + "\n" for name in ("a\nb\x1fc\n", "plain")).replace("7", "8", 1)
    assert [(one.job, one.name) for one in usages_of(sacct_rows(text, word))] == [("8", "a\nb\x1fc"), ("7", "plain")]
