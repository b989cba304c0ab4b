"""What past jobs propose for a new one, and how it comes into a script."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hetstream.hetjob.convert import script_options
from hetstream.hetjob.directives import Directive
from hetstream.hetjob.sbatch_options import SbatchOptions
from hetstream.slurm_plugin.insight.past_jobs import past_jobs
from hetstream.slurm_plugin.insight.proposals import Remembered, as_directives, for_script, next_submissions, remember
from hetstream.slurm_plugin.model.alike import accuracy, last_batch, likeness, most_alike, pace, propose, smoothed
from hetstream.slurm_plugin.model.past_job import Features, PastJob


def past(job: str, name: str = "train", gpus: int = 2, data_workers: int = 6, **more: Any) -> PastJob:
    user, ended_s = more.pop("user", "u"), more.pop("ended_s", float(job))
    values: dict[str, Any] = {"data_worker_cpus": 4, "trainer_cpus": 3, "steps_per_s": 9.0, "wait_share": 0.02} | more
    return PastJob(job, ended_s, Features(name, gpus, user), data_workers, **values)


def test_the_most_similar_job_comes_last_and_strangers_are_left_out() -> None:
    found = most_alike(
        Features("resnet50", 2, "u"),
        [past("1", "resnet50"), past("2", "bert-large"), past("3", "resnet50", gpus=8), past("4", "resnet18")],
    )
    assert [one.job for one in found][-1] == "1"
    assert "2" not in [one.job for one in found]


def test_what_is_not_known_of_both_does_not_count() -> None:
    assert likeness(Features("a"), Features("a", 8, "u", "d", 64)) == 1.0
    assert likeness(Features("a", batch=64), Features("a", batch=128)) < 1.0
    assert likeness(Features("a", user="u"), Features("a", user="v")) < 1.0


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.floats(0, 100), min_size=1, max_size=8))
def test_smoothing_stays_between_the_values(values: list[float]) -> None:
    assert min(values) - 1e-9 <= smoothed(values) <= max(values) + 1e-9


def test_the_last_value_counts_half() -> None:
    assert smoothed([4.0, 8.0]) == 6.0
    with pytest.raises(ValueError, match="nothing to smooth"):
        smoothed([])


def test_accuracy_is_one_less_the_relative_error() -> None:
    assert [accuracy(first, 10) for first in (10, 9, 11, 30)] == [1.0, 0.9, 0.9, 0.0]
    assert accuracy(0, 0) == 1.0


def test_a_proposal_counts_data_workers_by_gpu() -> None:
    history = [past(str(number)) for number in range(1, 8)]
    two, four = (propose(Features("train", gpus, "u"), history) for gpus in (2, 4))
    assert two is not None
    assert four is not None
    assert (two.data_workers, four.data_workers, two.num_jobs) == (8, 15, 5)
    assert two.directive == "#HETSTREAM --data-workers=0-8 --data-worker-cpus=4 --trainer-cpus=3"
    assert "5 past job(s)" in two.reason


def test_memory_is_proposed_where_it_was_measured() -> None:
    proposal = propose(Features("train", 2, "u"), [past("1", data_worker_mb=4000), past("2")])
    assert proposal is not None
    assert proposal.options["data-worker-mem"] == "5256M"


def test_jobs_that_gained_nothing_propose_nothing() -> None:
    proposal = propose(Features("train", 2, "u"), [past("1", data_workers=0), past("2", data_workers=0)])
    assert proposal is not None
    assert proposal.options == {}
    assert propose(Features("other", 2, "u"), [past("1")]) is None


def test_a_larger_batch_needs_more_data_workers_by_what_updating_takes() -> None:
    def job(batch: int, **parts: float) -> PastJob:
        return PastJob("1", 1.0, Features("train", 2, "u", batch=batch), 8, 4, None, 9.0, 0.0, **parts)

    new = Features("train", 2, "u", batch=128)
    # 30 ms for the gradients of 64 samples and 10 ms for the update: 128 take 70 ms, not 80.
    told_apart = job(64, gradient_s=0.030, update_s=0.010)
    assert pace(new, told_apart) == pytest.approx(2 * 40 / 70)
    # Embeddings are looked up for each sample.
    assert pace(new, job(64, gradient_s=0.020, update_s=0.010, embedding_s=0.010)) == pytest.approx(2 * 40 / 70)
    assert pace(new, job(64)) == pace(new, job(0, gradient_s=0.03, update_s=0.01)) == 1.0
    assert pace(Features("train"), told_apart) == 1.0
    more, same = propose(new, [told_apart]), propose(new, [job(64)])
    assert more is not None
    assert same is not None
    assert (same.data_workers, more.data_workers) == (10, 12)
    assert "a GPU takes 1.14 times as many samples in batches of 128 as of 64" in more.reason
    assert "times as many" not in same.reason


def test_a_script_is_taken_to_have_the_batch_that_it_had_last() -> None:
    parts = {"gradient_s": 0.030, "update_s": 0.010}
    jobs = tuple(
        PastJob(str(number), float(number), Features(name, 1, user, batch=batch), 8, 4, None, 9.0, 0.0, **parts)
        for number, (name, user, batch) in enumerate(
            [("train", "u", 32), ("train.sbatch", "u", 128), ("other", "u", 16), ("train", "v", 32)]
        )
    )
    assert last_batch("train", "u", jobs) == 128
    assert last_batch("train", "", jobs) == last_batch("new", "u", jobs) == 0
    proposal = for_script(Remembered(jobs, "u"), "train.sbatch", SbatchOptions(script_options(SCRIPT, "train.sbatch")))
    assert proposal is not None
    assert "the most similar, job 1," in proposal.reason


def test_what_the_script_says_itself_is_not_proposed() -> None:
    proposal = propose(Features("train", 2, "u"), [past("1", data_worker_mb=4000)])
    assert proposal is not None
    given_names = [Directive("data-worker-cpus", "8", "line 3")]
    assert [one.name for one in as_directives(proposal, given_names)] == ["data-workers", "trainer-cpus"]
    threaded = as_directives(proposal, [Directive("data-worker-threads", "3", "line 3")])
    assert [one.name for one in threaded] == ["data-workers", "trainer-cpus"]


def test_the_next_submissions_are_those_of_this_user_of_late() -> None:
    day = 86400.0
    jobs = (
        past("1", "old", ended_s=0.0), past("2", "mine", ended_s=40 * day),
        past("3", "theirs", ended_s=40 * day, user="v"),
    )  # fmt: skip
    assert [one.name for one in next_submissions(Remembered(jobs, "u"), 41 * day)] == ["mine"]
    assert next_submissions(Remembered(jobs, ""), 41 * day) == []


def leave(place: Path, job: str, name: str = "train.sbatch", data_workers: int = 6) -> Path:
    """Leave a job's record as the job master does."""
    directory = place / ".hetstream" / f"job-{job}"
    directory.mkdir(parents=True)
    loaders = [{"rank": 0, "title": "Folder train.py:3", "steps": 100, "samples": 6400}]
    elastic = {"data_workers": data_workers, "data_worker_cpus": 4, "trainer_cpus_recommended": 3}
    (directory / "summary.json").write_text(json.dumps({"job_name": name, "loaders": loaders, "elastic": elastic}))
    return directory


def test_records_are_remembered_once(tmp_path: Path) -> None:
    leave(tmp_path, "12-restart-2")
    (leave(tmp_path, "13") / "summary.json").write_text("[]")
    leave(tmp_path, "14").joinpath("summary.json").unlink()
    places = [tmp_path / ".hetstream", tmp_path / "nowhere"]
    assert [one.job for one in past_jobs(places)] == ["12"]
    environ = {"HETSTREAM_JOB_HISTORY": str(tmp_path / "history")}
    now_s = os.stat(tmp_path).st_mtime
    for _ in range(2):
        history = remember(places, environ, now_s)
        assert [one.job for one in history.jobs] == ["12"]
    assert [one.name for one in next_submissions(history, now_s)] == ["train.sbatch"]


def test_without_a_past_job_no_file_is_made_and_a_bad_one_costs_only_the_proposals(tmp_path: Path) -> None:
    environ = {"HETSTREAM_JOB_HISTORY": str(tmp_path / "history")}
    assert remember([tmp_path / ".hetstream"], environ, 0.0) == Remembered()
    assert not (tmp_path / "history").exists()
    (tmp_path / "history").write_text("a file")
    leave(tmp_path, "12")
    assert "job history" in remember([tmp_path / ".hetstream"], environ, 0.0).problem


def convert(place: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environ = {"PATH": "/usr/bin:/bin", "HETSTREAM_JOB_HISTORY": str(place / "history")}
    program = Path(sys.executable).with_name("hetstream")
    return subprocess.run([program, "convert", "--auto", *words], cwd=place, env=environ, capture_output=True,
                          text=True, check=False)  # fmt: skip


SCRIPT = "#!/bin/bash\n#SBATCH --gres=gpu:1 --cpus-per-task=16\nsrun python train.py\n"


def test_convert_auto_adds_what_past_jobs_had(tmp_path: Path) -> None:
    (tmp_path / "train.sbatch").write_text(SCRIPT)
    first = convert(tmp_path, "train.sbatch")
    assert first.returncode == 0
    assert first.stdout == SCRIPT
    assert "nothing is proposed from history" in first.stderr
    leave(tmp_path, "12")
    (tmp_path / "other.sbatch").write_text(SCRIPT)
    unlike = convert(tmp_path, "other.sbatch")
    assert "none of 1 past job(s) is like other.sbatch" in unlike.stderr
    assert unlike.stdout == SCRIPT
    found = convert(tmp_path, "--data-worker-partition=cpu", "train.sbatch")
    assert found.returncode == 0
    assert "--auto: --data-workers=0-8 --data-worker-cpus=4 --trainer-cpus=3" in found.stderr
    assert "1 past job(s) like it (train.sbatch)" in found.stderr
    assert "--companions=8" in found.stdout
    own = convert(tmp_path, "--data-worker-partition=cpu", "--data-workers=0-3", "train.sbatch")
    assert "--companions=3" in own.stdout


def test_convert_auto_says_when_data_workers_brought_nothing(tmp_path: Path) -> None:
    (tmp_path / "train.sbatch").write_text(SCRIPT)
    leave(tmp_path, "12", data_workers=0)
    found = convert(tmp_path, "train.sbatch")
    assert found.stdout == SCRIPT
    assert "no data workers are proposed" in found.stderr
