"""What ended jobs have left beside where they were submitted, and what `hetstream advise` makes of it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from recorded import Recorded

from hetstream.hetjob.job.ended_job import EndedJob, read_ended
from hetstream.slurm_plugin.insight.proposals import ended_jobs
from tests.base.users import STRANGER, needs_root


def leave(
    place: Path, job: str, needed: int | None = 3, held: int | None = 8, name: str = "train", ranks: int = 2
) -> Path:
    """Leave a job's record as the job master does."""
    directory = place / ".hetstream" / f"job-{job}"
    directory.mkdir(parents=True)
    record: dict[str, Any] = {"loaders": [{"rank": rank} for rank in (*range(ranks), 0)], "job_name": name}
    record["elastic"] = {"trainer_cpus_recommended": needed, "trainer_cpus": held}
    (directory / "summary.json").write_text(json.dumps(record))
    return directory


def test_a_record_tells_what_the_trainers_needed(tmp_path: Path) -> None:
    found = read_ended(leave(tmp_path, "12-restart-2"))
    assert found is not None
    assert (found.job, found.name, found.num_ranks, found.trainer_cpus, found.needed_cpus) == ("12", "train", 2, 8, 3)
    assert found.advice == "its busiest trainer task needs 3 of its 8 CPUs besides data workers"


@pytest.mark.parametrize(("held", "advice"), [(3, False), (2, False), (4, True), (None, True)])
def test_there_is_advice_where_something_can_be_given_back(held: int | None, advice: bool) -> None:
    assert bool(EndedJob("7", "train", "alice", 0.0, 1, held, 3).advice) == advice


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"elastic": 3}', '{"elastic": {"trainer_cpus_recommended": "x"}}'])
def test_what_is_no_record_says_nothing(tmp_path: Path, text: str) -> None:
    directory = leave(tmp_path, "1")
    (directory / "summary.json").write_text(text)
    assert read_ended(directory) is None
    (directory / "summary.json").unlink()
    assert read_ended(directory) is None


@needs_root
def test_a_record_of_somebody_else_advises_nobody(tmp_path: Path) -> None:
    """A directory that many can write to holds a forged one, which is newer."""
    leave(tmp_path, "1")
    os.chown(leave(tmp_path, "2") / "summary.json", STRANGER, STRANGER)
    assert [job.job for job in ended_jobs([tmp_path / ".hetstream"], 0.0, float("inf"))] == ["1"]
    with pytest.raises(PermissionError, match=f"belongs to user {STRANGER}"):
        read_ended(tmp_path / ".hetstream/job-2")


def test_of_each_script_the_newest_job_counts(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for number, (place, job, name) in enumerate(
        [(here, "1", "train"), (here, "2", "train"), (here, "3", "other"), (there, "4", "train")]
    ):
        os.utime(leave(place, job, name=name) / "summary.json", (1000 + number, 1000 + number))
    leave(here, "5", needed=None)
    places = [path / ".hetstream" for path in (here, there)]
    found = ended_jobs([*places, places[0], tmp_path / "nowhere"], 900, 2000)
    assert [one.job for one in found] == ["2", "3", "4"]
    assert [one.job for one in ended_jobs(places, 1002, 2000)] == ["3", "4"]


@pytest.mark.shows("`advise` names jobs that would gain, with the basis of each estimate")
def test_advise_shows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Recorded(tmp_path)
    leave(tmp_path, "31")
    monkeypatch.chdir(tmp_path)
    (row,) = [one for one in json.loads(cluster.run("advise --json").stdout)["advice"] if one["state"] == "ended"]
    assert (row["job"], row["basis"], row["cpus_freed"]) == ("31", "measured", 10)
    assert row["step"] == "next time: #HETSTREAM --trainer-cpus=3"
    assert "#HETSTREAM --trainer-cpus=3" in cluster.run("advise").stdout
