"""`hetstream job`: what a job has left, found by any of its numbers, and removed by age."""

from __future__ import annotations

import getpass
import gzip
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from hetstream.hetjob.job.ended_job import EMBEDDING_DIR, load_own_summary
from hetstream.hetjob.job.find_service import JobPlace, job_directory
from hetstream.mpi_dataworkers.embedding.log import Log
from hetstream.mpi_dataworkers.embedding.parts import Parts
from hetstream.mpi_dataworkers.wire.messages import EMBEDDING_PARTS, EmbeddingTable, MarkGeneration, OpenTables
from hetstream.slurm_plugin.client.accounting import job_place, parse_place
from tests.base.users import STRANGER, needs_root, run_as

HETSTREAM = str(Path(sys.executable).with_name("hetstream"))
LOADER = {
    "job_name": "7.2.0123456789ab.ba9876543210", "title": "Pictures train.py:38", "ordinal": 0, "rank": 0, "pid": 9,
    "host": "gpu0", "epochs": 2, "steps": 1200, "samples": 19200, "bytes": 5_000_000, "wait_s": 1.0, "elapsed_s": 4.0,
    "local_steps": 30, "skipped": 2,
}  # fmt: skip
SUMMARY = {
    "loaders": [LOADER], "data_workers_seen": 3, "data_workers_replaced": 1, "job_name": "resnet\x1b[2J",
    "elastic": {"decisions": [{"time": 100.0, "action": "grow", "count": 2, "reason": "it waits"}]},
}  # fmt: skip


class Site:
    """A directory with a job's, and a PATH whose Slurm knows what a test says."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.tools = place / "tools"
        self.tools.mkdir()
        self.job = place / "submitted" / ".hetstream" / "job-7"
        self.job.mkdir(parents=True)
        (self.job / "summary.json").write_text(json.dumps(SUMMARY))
        (self.job / "master.log").write_text("".join(f"line {number}\n" for number in range(30)))
        (self.job / "data-worker-0.log").write_text("registered \x1b]0;x\x07\n")
        self.environ = os.environ | {"PATH": f"{self.tools}:/usr/bin:/bin"}

    def tool(self, name: str, text: str) -> None:
        (self.tools / name).write_text(f"#!/bin/sh\n{text}\n")
        (self.tools / name).chmod(0o755)

    def run(self, *words: str, returncode: int = 0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [HETSTREAM, *words], cwd=self.place, env=self.environ, capture_output=True, text=True, check=False
        )
        assert done.returncode == returncode, done.stderr
        return done


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


# --- where a job is -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "place"),
    [
        ("7 7 RUNNING me /home/u/my runs\n", JobPlace("7", Path("/home/u/my runs"), "RUNNING", "me")),
        ("7+1 8 PENDING me /w\n7+0 7 PENDING me /w\n", JobPlace("7", Path("/w"), "PENDING", "me")),
        ("33_4 41 COMPLETED me /w\n", JobPlace("41", Path("/w"), "COMPLETED", "me")),
        ("33_[5-9] 33 PENDING me /w\n", JobPlace("33", Path("/w"), "PENDING", "me")),
        ("", None),
        ("no job\n", None),
    ],
)
def test_where_a_job_is_in_slurms_words(lines: str, place: JobPlace | None) -> None:
    assert parse_place(lines) == place


def test_a_companion_leads_to_its_job_and_accounting_knows_what_squeue_has_forgotten(site: Site) -> None:
    site.tool(
        "squeue", 'case "$*" in *%k*) echo "hets:trainer=7 hets:start=7.0";; *) echo "12 12 RUNNING me /w";; esac'
    )
    assert job_place("12", site.environ) == JobPlace("7", Path("/w"), "RUNNING", "me")
    site.tool("squeue", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    site.tool("sacct", 'echo "7+0 7 CANCELLED by 1000 me /w"; echo "7+1 8 CANCELLED by 1000 me /w"')
    assert job_place("8", site.environ) == JobPlace("7", Path("/w"), "CANCELLED", "me")


# --- what it left ---------------------------------------------------------------------------------------------------


def test_the_logs_of_a_job_from_any_directory(site: Site) -> None:
    site.tool("squeue", f'case "$*" in *%k*) ;; *) echo "7+1 8 COMPLETED me {site.job.parents[1]}";; esac')
    shown = site.run("job", "--logs", "8").stdout
    assert shown.startswith(f"==> {site.job / 'master.log'} <==\nline 10\n")
    assert shown.endswith("<==\nregistered \\x1b]0;x\\x07\n"), "what a log holds does nothing to a terminal"
    assert site.run("job", "--logs", "8", "master").stdout.splitlines()[0] == "line 0"
    assert site.run("job", "8", "--logs", "master").stdout.splitlines()[0] == "line 0"
    assert site.run("job", "--logs", "-n", "1", "7+1", "master.log").stdout == "line 29\n"
    assert site.run("job", "--logs", "--path", "7", "data-worker-0").stdout == f"{site.job / 'data-worker-0.log'}\n"
    wrong = site.run("job", "--logs", "8", "nothing", returncode=2).stderr
    assert "no log 'nothing'" in wrong
    assert "It has: master, data-worker-0" in wrong


def test_the_end_of_a_step_with_its_job_reads_as_no_failure(site: Site) -> None:
    ending = (
        "srun: Job step aborted: Waiting up to 32 seconds for job step to finish.\nsrun: got SIGCONT\n"
        "slurmstepd-cpu0: error: *** STEP 2.1 ON cpu0 CANCELLED AT 2026-11-29T07:58:24{} ***\n"
    )
    site.tool("squeue", f'case "$*" in *%k*) ;; *) echo "7+1 8 COMPLETED me {site.job.parents[1]}";; esac')
    log = site.job / "master.log"
    log.write_text("a\n" + ending.format("") + "b\nsrun: forcing job termination\n")
    assert site.run("job", "--logs", "8", "master").stdout == "a\n(Slurm has ended the step)\nb\n"
    log.write_text(ending.format(" DUE TO TIME LIMIT"))
    shown = site.run("job", "--logs", "8", "master").stdout.splitlines()
    assert shown[0] == "(Slurm has ended the step)"
    assert "DUE TO TIME LIMIT" in shown[1], "a reason of its own is shown as Slurm says it"


@needs_root
@pytest.mark.parametrize("kind", ["a link", "a directory"])
def test_logs_of_another_place_are_not_shown_as_a_jobs(kind: str) -> None:
    """In a job's directory that all can write to, a stranger makes `writers` lead to what only this user may read, or
    puts logs of his own there."""
    with TemporaryDirectory(prefix="shared-") as temporary:
        place = Path(temporary)
        place.chmod(0o755)
        site, private = Site(place), place / "private"
        private.mkdir(mode=0o700)
        (private / "diary.log").write_text("secret\n")
        site.job.chmod(0o777)

        def plant() -> None:
            if kind == "a link":
                (site.job / "writers").symlink_to(private)
            else:
                (site.job / "writers").mkdir()
                (site.job / "writers" / "diary.log").write_text("secret\n")

        run_as(STRANGER, plant)
        shown = site.run("job", "--logs", str(site.job))
        assert "secret" not in shown.stdout
        assert "diary" not in shown.stdout
        assert "line 29" in shown.stdout
        assert "logs of checkpoint writers are not shown:" in shown.stderr


@needs_root
def test_a_link_is_no_directory_of_a_job() -> None:
    """In a place where jobs of several users have their directories, a stranger's link has the number of a job."""
    with TemporaryDirectory(prefix="shared-") as temporary:
        place = Path(temporary)
        place.chmod(0o755)
        site = Site(place)
        jobs = place / "jobs"
        jobs.mkdir()
        jobs.chmod(0o1777)
        run_as(STRANGER, lambda: (jobs / "job-9").symlink_to(site.job))
        assert job_directory([jobs], "9") is None
        assert job_directory([site.job.parent], "7") == site.job
        assert load_own_summary(site.job)[0] == SUMMARY
        with pytest.raises(NotADirectoryError):  # so past jobs are without this record of another project
            load_own_summary(jobs / "job-9")


def test_the_summary_of_a_job_is_for_people(site: Site) -> None:
    shown = site.run("job", str(site.job)).stdout
    assert "job-7 (resnet\\x1b[2J) has ended: 1 loader, 1200 steps" in shown
    assert "Pictures train.py:38" in shown
    assert "ba9876543210" not in shown
    row = next(line for line in shown.splitlines() if line.startswith("Pictures"))
    assert row.split()[2:] == ["0", "gpu0", "2", "1,200", "19,200", "5.0", "MB", "25%", "30", "2"]
    assert "grow 2, because it waits" in shown
    assert json.loads(site.run("job", "--json", str(site.job)).stdout) == {"record": SUMMARY}
    (site.job / "summary.json").unlink()
    assert "no address" in site.run("job", str(site.job), returncode=1).stderr


def test_what_old_jobs_left_goes_by_age_and_only_when_told(site: Site) -> None:
    old_s = time.time() - 20 * 86400
    submitted = site.job.parents[1]

    def make(name: str, age_s: float) -> Path:
        directory = submitted / ".hetstream" / name
        (directory / "writers").mkdir(parents=True)
        for path in (directory / "writers" / "gpu0.log", directory / "writers", directory):
            path.touch()
            os.utime(path, (age_s, age_s))
        return directory

    old, alive = make("job-5-restart-1", old_s), make("job-6", old_s)
    other = make("notes", old_s)
    reader = "hetstream.slurm_plugin.client.read.CommandReader.living_jobs"
    words = [sys.executable, "-c", f"""
import sys
from unittest import mock
from hetstream.slurm_plugin.cli import main
with mock.patch("{reader}", return_value={{"6": "RUNNING"}}):
    sys.exit(main(sys.argv[1:]))
""", "job", "--clean", str(submitted)]  # fmt: skip

    def clean(*more: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run([*words, *more], capture_output=True, text=True, check=True, cwd=site.place)
        return done

    dry = clean()
    assert [line.split(": ")[1] for line in dry.stdout.splitlines()] == [
        "would be removed", "kept (its job is not over)", "kept (younger than 14d)"
    ]  # fmt: skip
    assert "1 of 3 directories" in dry.stderr
    assert old.exists()
    assert "0 of 3 directories" in clean("--older-than", "30d").stderr
    rows = json.loads(clean("--remove", "--json").stdout)["directories"]
    assert [row["done"] for row in rows] == ["removed", "kept", "kept"]
    assert not old.exists()
    assert alive.exists()
    assert other.exists(), "not a job's"
    assert site.job.exists()
    assert site.run("job", "--clean", "--older-than", "soon", returncode=2).stderr.count("such as 30d") == 1


def test_rows_of_tables_go_that_no_checkpoint_can_need(site: Site) -> None:
    """Logs of embedding servers: of a start without a generation, and of one that no checkpoint names."""
    place = site.place / EMBEDDING_DIR
    table, all_parts = EmbeddingTable("t", 10, 8), [*range(EMBEDDING_PARTS)]

    def make(start: str, generation: str = "") -> Log:
        log = Log(place / start / "server-0", lambda: None)
        parts = next(said for said, _, _ in log.recover() if isinstance(said, Parts))
        opening = OpenTables("c" * 32, 0, (), [table], all_parts)
        parts.apply(opening, log.append(opening))
        if generation:
            log.mark(MarkGeneration("c" * 32, 1, generation, 1, [str(place / start / "server-0")]), parts)
        return log

    run = "run-2026-01-01-120000-0123abcd"
    for start, generation in ((run, ""), ("job-7", ""), ("job-8", "g"), ("job-80-restart-1", "g"), ("job-9", "")):
        make(start, generation).close()
    in_use = make("run-2026-01-01-120000-00000000")
    (place / "notes-1").mkdir()
    reader = "hetstream.slurm_plugin.client.read.CommandReader.living_jobs"
    words = [sys.executable, "-c", f"""
import sys
from unittest import mock
from hetstream.slurm_plugin.cli import main
with mock.patch("{reader}", return_value={{"9": "RUNNING"}}):
    sys.exit(main(sys.argv[1:]))
""", "job", "--clean", "--json", "--older-than", "0h"]  # fmt: skip

    def clean(*more: str) -> dict[str, tuple[str, str]]:
        done = subprocess.run([*words, *more], capture_output=True, text=True, check=True, cwd=site.place)
        rows = json.loads(done.stdout)["directories"]
        return {Path(row["directory"]).name: (row["done"], row["reason"]) for row in rows}

    may_be_needed = "a checkpoint may need one of its 1 generation: say with --checkpoints where all are that you keep"
    kept = {
        "job-8": ("kept", may_be_needed), "job-80-restart-1": ("kept", may_be_needed),
        "job-9": ("kept", "its job is not over"), "run-2026-01-01-120000-00000000": ("kept", "it is in use"),
    }  # fmt: skip
    assert clean("--remove") == {run: ("removed", ""), "job-7": ("removed", ""), **kept}
    assert clean() == kept
    saved = site.place / "saved" / "step-1" / "rank"
    saved.parent.mkdir(parents=True)
    saved.write_text(f'{{"generation": "g", "log": "{place}/job-8/server-0"}}')
    (saved.parent / "latest").symlink_to("nowhere")
    found = clean("--checkpoints", str(site.place / "saved"), "--remove")
    assert found == kept | {"job-8": ("kept", f"{saved} needs it"), "job-80-restart-1": ("removed", "")}
    in_use.close()
    said = "a checkpoint may need one of its 1 generation: "
    packed, elsewhere = saved.with_name("rank.gz"), site.place / "elsewhere"
    packed.write_bytes(gzip.compress(saved.read_bytes()))
    elsewhere.mkdir()
    saved.rename(elsewhere / "rank")
    found = clean("--checkpoints", str(site.place / "saved"), "--remove")
    assert found["job-8"] == ("kept", f"{said}{packed} is compressed, and cannot be searched")
    packed.write_bytes(b"encrypted")
    found = clean("--checkpoints", str(site.place / "saved"), "--remove")
    assert found["job-8"][0] == "kept"
    assert "names embedding servers, so it has other checkpoints" in found["job-8"][1]
    (saved.parent / "old").symlink_to(elsewhere)
    (saved.parent / "self").symlink_to(saved.parent)
    found = clean("--checkpoints", str(site.place / "saved"), "--remove")
    assert found["job-8"] == ("kept", f"{saved.parent / 'old' / 'rank'} needs it")
    (elsewhere / "rank").unlink()
    packed.unlink()
    clean("--checkpoints", str(site.place / "saved"), "--remove")
    assert {path.name for path in place.iterdir()} == {"job-9", "notes-1"}


def test_nothing_is_removed_while_slurm_does_not_answer(site: Site) -> None:
    site.tool("squeue", "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1")
    for path in (site.job, *site.job.iterdir()):
        os.utime(path, (0, 0))
    site.run("job", "--clean", "--remove", str(site.job.parents[1]), returncode=1)
    assert site.job.exists()


# --- directories of jobs in a place of their own --------------------------------------------------------------------


@pytest.fixture
def elsewhere(site: Site) -> Path:
    """The job's directory, moved to `/PLACE/USER/jobs`; returns the pattern of that place."""
    own = site.place / "scratch" / getpass.getuser() / "jobs"
    own.mkdir(parents=True)
    site.job = site.job.rename(own / "job-7")
    return site.place / "scratch" / "%u" / "jobs"


@pytest.mark.parametrize("knows", ["the environment", "the job's script"])
def test_the_trail_of_a_job_whose_directory_is_elsewhere(site: Site, elsewhere: Path, knows: str) -> None:
    place = f"7 7 COMPLETED {getpass.getuser()} {site.place / 'submitted'}"
    site.tool("squeue", f'case "$*" in *%k*) ;; *) echo "{place}";; esac')
    if knows == "the environment":
        site.tool("scontrol", "exit 1")
        site.environ["HETSTREAM_JOBS_DIR"] = str(elsewhere)
    else:
        options = f"--data-workers=1 --jobs-dir={elsewhere} -- --partition=a"
        line = f"_hetstream=$(/opt/hetstream internal master start {options}) ||"
        site.tool("scontrol", f'[ "$*" = "write batch_script 7 -" ] || exit 1\ncat <<"END"\n#!/bin/bash\n{line}\nEND')
    assert site.run("job", "--logs", "--path", "7+0", "master").stdout == f"{site.job / 'master.log'}\n"
    assert json.loads(site.run("job", "--json", "7").stdout)["record"] == SUMMARY
    site.job.rename(site.job.with_name("job-9"))
    expected = f"no directory .hetstream/job-7 in {site.place / 'submitted'}, where job 7 works (COMPLETED), nor in "
    assert expected + str(site.job.parent) in site.run("job", "--logs", "7", returncode=1).stderr


def test_old_directories_go_from_the_place_of_their_own_alone(site: Site, elsewhere: Path) -> None:
    site.tool("squeue", "exit 0")
    mine = site.place / "job-5"  # a directory of the user's that happens to have such a name
    mine.mkdir()
    os.utime(mine, (0, 0))
    for path in (*site.job.iterdir(), site.job):
        os.utime(path, (0, 0))
    assert "0 of 0" in site.run("job", "--clean", str(site.place)).stderr
    assert "would be removed" in site.run("job", "--clean", "--jobs-dir", str(elsewhere)).stdout
    site.environ["HETSTREAM_JOBS_DIR"] = str(elsewhere)
    assert "1 of 1 directories" in site.run("job", "--clean", "--remove").stderr
    assert not site.job.exists()
    assert site.job.parent.is_dir(), "the place stays: who made it is not known"
    assert mine.is_dir()
    for wrong in ("scratch/%u", "/scratch/%j", "/a\nb"):
        assert "must be an absolute path" in site.run("job", "--clean", "--jobs-dir", wrong, returncode=2).stderr
        site.environ["HETSTREAM_JOBS_DIR"] = wrong
        assert "HETSTREAM_JOBS_DIR=" in site.run("job", "--logs", "7", returncode=1).stderr
