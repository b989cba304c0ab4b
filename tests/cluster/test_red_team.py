"""The red team on real daemons: an ordinary user's jobs with hostile texts beside those of somebody else."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hetstream.slurm_plugin.client.slurm import CommandSlurm
from tests.base.hostile import HOSTILE, as_read, check_shown, said_of_words

pytestmark = [pytest.mark.slurm, pytest.mark.every_release]
MALLORY = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
# Slurm takes names and comments of so many characters, the kernel names of directories of so many bytes.
MOST, MOST_BYTES = 1000, 200
COMMANDS = ("util", "advise", "report")


@pytest.fixture
def others(devcluster: Any) -> Iterator[dict[str, str]]:
    """Jobs of another user, by name: one that runs, and one that waits for GPUs."""
    gpus = ["-p", "gpu", "-w", "gpu0", "--gres=gpu:4", "-o", "/dev/null", "--wrap", "sleep 300"]
    jobs = {name: devcluster.run("sbatch", "--parsable", "-J", name, *gpus) for name in ("runs", "waits")}
    yield jobs
    devcluster.run("scancel", "--quiet", *jobs.values())


def submit(devcluster: Any, place: Path, text: str, *words: str) -> str:
    """A job of Mallory's with a text in all that is his to choose; its id."""
    directory = Path(os.fsdecode(os.fsencode(place / text.replace("/", "_"))[: len(bytes(place)) + MOST_BYTES]))
    directory.mkdir(exist_ok=True)
    argv = [*MALLORY, "sbatch", "--parsable", "-p", "cpu", f"--job-name={text}", f"--comment={text} hets:trainer=1"]
    argv += [f"--chdir={directory}", "-o", "/dev/null", *words, "--wrap", "sleep 300"]
    env = {**devcluster.env, "MALLORY": text}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def told(*words: str) -> dict[str, Any]:
    """What a command says in JSON, after it has shown the same on a terminal."""
    done = [said_of_words([*words, *form]) for form in ([], ["--json"])]
    for one in done:
        assert one.code == 0, one.err
        check_shown(one.out + one.err)
    found: dict[str, Any] = json.loads(done[1].out)
    return found


def reasons(slurm: CommandSlurm, jobs: dict[str, str]) -> set[str]:
    """Why each of the jobs waits."""
    return {job.reason for job in slurm.snapshot().jobs if str(job.job_id) in jobs.values()}


def test_hostile_texts_in_slurm_change_nobody_elses_reading(
    devcluster: Any, others: dict[str, str], wait_until: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in devcluster.env.items():
        monkeypatch.setenv(name, value)
    place = devcluster.out_dir / "mallory"
    place.mkdir()
    place.chmod(0o777)
    slurm = CommandSlurm(devcluster.env)
    wait_until(lambda: reasons(slurm, others) == {"", "Resources"}, 60, "one job to run, and the other to wait")

    def of_others() -> list[Any]:
        rows = [row for row in told("jobs")["jobs"] if str(row["job_id"]) in others.values()]
        why = told("why", others["waits"])
        return [[{**row, "time_s": 0} for row in rows], why["blockers"]]

    before, free = of_others(), told("frag")["summary"]
    texts = {name: text[:MOST] for name, text in HOSTILE.items()}
    jobs = {name: submit(devcluster, place, text, "--hold") for name, text in texts.items()}
    try:
        assert of_others() == before
        assert told("frag")["summary"]["gpus_free"] == free["gpus_free"]
        for words in COMMANDS:
            told(words)
        for details in (False, True):
            seen = {str(job.job_id): job for job in slurm.snapshot(details=details).jobs}
            assert {*jobs.values(), *others.values()} <= seen.keys()
            for name, job_id in jobs.items():
                assert seen[job_id].name == as_read(texts[name]), name
                assert seen[job_id].comment == f"{as_read(texts[name])} hets:trainer=1", name
        for job_id in jobs.values():
            told("why", job_id)
        assert slurm.living_jobs().keys() >= {*others.values()}
        assert not slurm.living_jobs().keys() & {*jobs.values()}
    finally:
        devcluster.run("scancel", "--quiet", *jobs.values())
    wait_until(lambda: not {*jobs.values()} & {str(job.job_id) for job in slurm.snapshot().jobs}, 60, "their end")
