"""What past jobs propose for a new one, and how it comes into a script."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from hetstream.hetjob.convert.convert import script_options
from hetstream.hetjob.convert.directives import Directive
from hetstream.hetjob.convert.render import what_runs
from hetstream.hetjob.convert.sbatch_options import SbatchOptions
from hetstream.hetjob.ports import NodeSize
from hetstream.slurm_plugin.insight.proposals import (
    Remembered,
    as_directives,
    for_script,
    next_submissions,
    past_jobs,
    remember,
)
from hetstream.slurm_plugin.past_jobs import (
    LEAST_LIKENESS,
    Features,
    PastJob,
    last_batch,
    likeness,
    most_alike,
    pace,
    propose,
    smoothed,
    within_nodes,
)


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


def test_a_proposal_counts_data_workers_by_gpu() -> None:
    history = [past(str(number)) for number in range(1, 8)]
    two, four = (propose(Features("train", gpus, "u"), history) for gpus in (2, 4))
    assert two is not None
    assert four is not None
    assert (two.data_workers, four.data_workers, two.num_jobs) == (8, 15, 5)
    assert two.directive == "#HETSTREAM --data-workers=0-8 --data-worker-cpus=4 --trainer-cpus=3"
    assert "5 past jobs" in two.reason


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


def test_a_past_job_on_one_gpu_tells_what_synchronising_takes() -> None:
    def job(gpus: int, batch: int, gradient_s: float, embedding_s: float | None = None) -> PastJob:
        features = Features("train", gpus, "u", batch=batch)
        return PastJob("1", 1.0, features, 8, 4, None, 9.0, 0.0, None, None, gradient_s, 0.010, embedding_s)

    new, several = Features("train", 4, "u", batch=128), job(4, 64, 0.030)
    # Of 30 ms 10 are for synchronising: 128 samples take 40 + 10 + 10 ms, and not 70.
    assert pace(new, several, [job(1, 64, 0.020), several]) == pytest.approx(2 * 40 / 60)
    as_before = pytest.approx(2 * 40 / 70)
    assert pace(new, several, [job(1, 32, 0.010), job(1, 64, 0.025, 0.005), several]) == as_before
    assert pace(new, several, [job(1, 64, 0.040)]) == as_before, "that one was slower"
    proposal = propose(new, [job(1, 64, 0.020), several])
    assert proposal is not None
    assert "a GPU takes 1.33 times as many samples" in proposal.reason


def test_a_script_is_taken_to_have_the_batch_that_it_had_last() -> None:
    parts = {"gradient_s": 0.030, "update_s": 0.010}
    jobs = tuple(
        PastJob(str(number), float(number), Features(name, 1, user, batch=batch), 8, 4, None, 9.0, 0.0, **parts)
        for number, (name, user, batch) in enumerate(
            [("train", "u", 32), ("train.sbatch", "u", 128), ("other", "u", 16), ("train", "v", 32)]
        )
    )
    assert last_batch(Features("train", user="u"), jobs) == 128
    assert last_batch(Features("train"), jobs) == last_batch(Features("new", user="u"), jobs) == 0
    options = SbatchOptions(script_options(SCRIPT, "train.sbatch"))
    proposal = for_script(Remembered(jobs, "u"), "train.sbatch", SCRIPT, options)
    assert proposal is not None
    assert "the most similar, job 1," in proposal.reason


def test_what_the_script_says_itself_is_not_proposed() -> None:
    proposal = propose(Features("train", 2, "u"), [past("1", data_worker_mb=4000)])
    assert proposal is not None
    given_names = [Directive("data-worker-cpus", "8", "line 3")]
    assert [one.name for one in as_directives(proposal, given_names)] == ["data-workers", "trainer-cpus"]
    threaded = as_directives(proposal, [Directive("data-worker-threads", "3", "line 3")])
    assert [one.name for one in threaded] == ["data-workers", "trainer-cpus"]


def starved(job: str, data_workers: int, wait_share: float, **more: Any) -> PastJob:
    return past(job, data_workers=data_workers, wait_share=wait_share, **more)


def proposed(*jobs: PastJob, gpus: int = 2) -> int:
    proposal = propose(Features("train", gpus, "u"), jobs)
    assert proposal is not None
    return proposal.data_workers


@pytest.mark.shows("a job that waited much never lowers the next range; data workers that never came do not count")
@pytest.mark.parametrize(("data_workers", "wait_share"), [(1, 0.95), (2, 0.9), (4, 0.8), (8, 0.8), (0, 0.9)])
def test_jobs_that_waited_say_at_least_and_not_enough(data_workers: int, wait_share: float) -> None:
    jobs = [starved(str(number), data_workers, wait_share) for number in range(5)]
    assert proposed(*jobs) >= 2 * max(1, data_workers)
    proposal = propose(Features("train", 2, "u"), jobs)
    assert proposal is not None
    assert "waited so much that what they had was not enough" in proposal.reason
    allowed = [starved(str(number), data_workers, wait_share, most_data_workers=30) for number in range(5)]
    assert proposed(*allowed) >= 30, "what the script allowed is never too much for a job that waited"


@pytest.mark.shows("a job that waited much never lowers the next range; data workers that never came do not count")
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_a_job_that_waited_never_lowers_the_next_range(data: st.DataObject) -> None:
    kinds = st.tuples(st.integers(0, 60), st.sampled_from([0.0, 0.02, 0.09, 0.3, 0.8, 0.99]), st.sampled_from([1, 4]))
    jobs = [
        past(str(number), data_workers=count, wait_share=share, data_worker_cpus=4)
        for number, (count, share, _) in enumerate(data.draw(st.lists(kinds, min_size=3, max_size=9)))
    ]
    count = data.draw(st.integers(0, 60))
    later = starved("99", count, 0.8)
    if sum(not job.had_enough for job in jobs[-5:]) < 5:
        assert proposed(*jobs, later) >= proposed(*jobs)


GOOD = {"data_worker_mb": 4000}
WRONG: list[dict[str, Any]] = [
    {"data_workers": 200}, {"data_workers": 100_000}, {"data_workers": 0}, {"data_workers": 1, "wait_share": 0.97},
    {"data_workers": 90_000, "wait_share": 0.97}, {"data_worker_cpus": 512}, {"data_worker_cpus": 100_000},
    {"data_worker_cpus": 1}, {"data_worker_mb": 2_000_000}, {"data_worker_mb": 200_000}, {"data_worker_mb": 1},
    {"trainer_cpus": 64}, {"trainer_cpus": 100_000}, {"trainer_cpus": 1}, {"trainer_cpus": None},
    {"data_workers": 50, "most_data_workers": 100_000, "wait_share": 1.0},
]  # fmt: skip


@pytest.mark.shows("one job of five decides nothing, and proposals fit the nodes that there are")
@pytest.mark.parametrize("wrong", WRONG, ids=str)
@pytest.mark.parametrize("place", range(5))
def test_what_one_job_of_five_says_does_not_decide(wrong: dict[str, Any], place: int) -> None:
    jobs = [past(str(number), **(GOOD | (wrong if number == place else {}))) for number in range(5)]
    found = propose(Features("train", 2, "u"), jobs)
    assert found is not None
    assert found.options == {
        "data-workers": "0-8", "data-worker-cpus": "4", "data-worker-mem": "5256M", "trainer-cpus": "3"
    }  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=5))
def test_memory_is_enough_for_the_usual_peak(peaks: list[int]) -> None:
    jobs = [past(str(number), data_worker_mb=mb) for number, mb in enumerate(peaks)]
    found = propose(Features("train", 2, "u"), jobs)
    assert found is not None
    assert found.data_worker_mb is not None
    enough_for = sum(mb <= found.data_worker_mb for mb in peaks)
    assert enough_for >= len(peaks) - (len(peaks) >= 3), "all jobs, or all but one that is far above the others"


def test_two_jobs_that_disagree_get_the_larger_memory_and_the_newer_size() -> None:
    jobs = [past("1", data_worker_mb=8000), past("2", data_worker_mb=2000, data_worker_cpus=2)]
    found = propose(Features("train", 2, "u"), jobs)
    assert found is not None
    assert (found.data_worker_cpus, found.data_worker_mb) == (2, 4000 * 5 // 4 + 256)


def test_a_proposal_fits_the_nodes_that_there_are() -> None:
    nodes = [NodeSize(16, 64_000, False, 4), NodeSize(8, 4_000, False)]
    small = propose(Features("train", 2, "u"), [past("1", data_worker_mb=4000)])
    assert small is not None
    assert within_nodes(small, nodes) == within_nodes(small, []) == small
    wide = propose(Features("train", 2, "u"), [past("1", data_worker_cpus=64, data_worker_mb=32_000)])
    assert wide is not None
    fitted = within_nodes(wide, nodes)
    assert (fitted.data_worker_cpus, fitted.data_workers) == (16, 4), "no more than have room"
    assert fitted.data_worker_mb is not None
    assert 8_000 < fitted.data_worker_mb <= 64_000
    large = propose(Features("train", 2, "u"), [past("1", data_worker_mb=60_000)])
    assert large is not None
    assert within_nodes(large, nodes).data_worker_mb == 64_000, "headroom gives way, and the usual peak does not"
    huge = propose(Features("train", 2, "u"), [past("1", data_worker_mb=200_000)])
    assert huge is not None
    assert within_nodes(huge, nodes).data_worker_mb == 200_256, "conversion says that it fits no node"


A, B = Features("train.sbatch", 2, "u", directory="/a"), Features("train.sbatch", 2, "u", directory="/b")


@pytest.mark.parametrize(
    ("new", "other", "are_alike"),
    [
        (A, A, True),
        (A, B, False),
        (A, replace(B, directory=""), True),
        (replace(A, commands="1"), replace(B, commands="1", name="other"), True),
        (replace(A, commands="1", files="x"), replace(A, commands="2", files="x"), True),
        (replace(A, commands="1", files="x"), replace(A, commands="2", files="y"), False),
        (replace(A, commands="1", files="x"), replace(B, commands="2", files="x"), False),
        *[
            (replace(A, name=f"{name}.sbatch"), replace(A, name=f"{other}.sbatch"), False)
            for name, other in [("exp1", "exp2"), ("run", "run2"), ("job_a", "job_b"), ("submit", "submit_big"),
                                ("finetune_bert", "finetune_vit"), ("train", "train_v2")]
        ],
    ],
)  # fmt: skip
def test_jobs_are_alike_that_run_the_same(new: Features, other: Features, are_alike: bool) -> None:
    assert (likeness(new, other) >= LEAST_LIKENESS) == are_alike
    assert likeness(new, other) == likeness(other, new)


def test_ones_own_older_jobs_decide_over_a_copys() -> None:
    jobs = [past(str(number), data_workers=2) for number in range(5)]
    jobs = [replace(job, features=replace(job.features, directory="/b", commands="1")) for job in jobs]
    copies = [past(str(number), data_workers=60) for number in range(10, 15)]
    copies = [replace(job, features=replace(job.features, directory="/a", commands="1")) for job in copies]
    new = Features("train", 2, "u", directory="/b", commands="1")
    assert {job.features.directory for job in most_alike(new, [*jobs, *copies])} == {"/b"}
    assert {job.features.directory for job in most_alike(new, copies)} == {"/a"}, "a sweep's other directories do count"


@pytest.mark.shows("past jobs are kept for a year, with hashed names, and the most similar ones propose")
def test_the_next_submissions_are_those_of_this_user_of_late() -> None:
    day = 86400.0
    jobs = (
        past("1", "old", ended_s=0.0), past("2", "mine", ended_s=40 * day),
        past("3", "theirs", ended_s=40 * day, user="v"),
    )  # fmt: skip
    assert [one.name for one in next_submissions(Remembered(jobs, "u"), 41 * day)] == ["mine"]
    assert next_submissions(Remembered(jobs, ""), 41 * day) == []


def test_scripts_of_one_name_are_told_apart_by_where_they_were_submitted(tmp_path: Path) -> None:
    places = [tmp_path / "a", tmp_path / "b"]
    for number, place in enumerate(places, start=1):
        leave(place, str(number), script=SCRIPT.replace("train.py", f"{place.name}.py"))
    environ = {"HETSTREAM_JOB_HISTORY": str(tmp_path / "history")}
    now_s = os.stat(tmp_path).st_mtime
    history = remember([place / ".hetstream" for place in places], environ, now_s)
    found = next_submissions(history, now_s)
    assert [(one.name, one.directory) for one in found] == [("train.sbatch", str(place)) for place in places]
    # Without the records of the jobs themselves a digest is known, which names no directory.
    assert {one.directory for one in next_submissions(remember([], environ, now_s), now_s)} == {""}


def leave(
    place: Path, job: str, name: str = "train.sbatch", script: str | None = None, **elastic: Any
) -> Path:  # fmt: skip
    """Leave a job's record as the job master does; without its script as older releases did."""
    directory = place / ".hetstream" / f"job-{job}"
    directory.mkdir(parents=True)
    loaders = [{"rank": 0, "title": "Folder train.py:3", "steps": 100, "samples": 6400}]
    elastic = {"data_workers": 6, "data_worker_cpus": 4, "trainer_cpus_recommended": 3} | elastic
    summary: dict[str, Any] = {"job_name": name, "loaders": loaders, "elastic": elastic}
    if script is not None:
        summary |= {"submit_dir": str(place), "what_runs": asdict(what_runs(script))}
    (directory / "summary.json").write_text(json.dumps(summary))
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


def convert(
    place: Path, *words: str, history: Path | None = None, path: str = "/usr/bin:/bin"
) -> subprocess.CompletedProcess[str]:
    environ = {"PATH": path, "HETSTREAM_JOB_HISTORY": str((history or place) / "history")}
    program = Path(sys.executable).with_name("hetstream")
    return subprocess.run([program, "convert", "--auto", *words], cwd=place, env=environ, capture_output=True,
                          text=True, check=False)  # fmt: skip


SCRIPT = "#!/bin/bash\n#SBATCH --gres=gpu:1 --cpus-per-task=16\nsrun python train.py\n"


@pytest.mark.shows("past jobs are kept for a year, with hashed names, and the most similar ones propose")
@pytest.mark.shows("the next submission of a script is proposed from the most similar past jobs")
def test_convert_auto_adds_what_past_jobs_had(tmp_path: Path) -> None:
    (tmp_path / "train.sbatch").write_text(SCRIPT)
    first = convert(tmp_path, "train.sbatch")
    assert first.returncode == 0
    assert first.stdout == SCRIPT
    assert "nothing is proposed from history" in first.stderr
    leave(tmp_path, "12")
    (tmp_path / "other.sbatch").write_text(SCRIPT)
    unlike = convert(tmp_path, "other.sbatch")
    assert "of 1 past job none is like other.sbatch" in unlike.stderr
    assert unlike.stdout == SCRIPT
    found = convert(tmp_path, "--data-worker-partition=cpu", "train.sbatch")
    assert found.returncode == 0
    assert "--auto: --data-workers=0-8 --data-worker-cpus=4 --trainer-cpus=3" in found.stderr
    assert "1 past job like it (train.sbatch)" in found.stderr
    assert "--companions=8" in found.stdout
    own = convert(tmp_path, "--data-worker-partition=cpu", "--data-workers=0-3", "train.sbatch")
    assert "--companions=3" in own.stdout
    # The number is the one that `hetstream advise` shows, and the script's own holds.
    assert "--auto: --data-workers=0-8 --data-worker-cpus=4 --trainer-cpus=3, but" in own.stderr
    assert "what the script says itself holds: --data-workers=0-3\n" in own.stderr


@pytest.mark.shows("another project's script of the same name proposes nothing")
def test_the_script_of_another_project_does_not_decide(tmp_path: Path) -> None:
    ours, theirs, copy = tmp_path / "ours", tmp_path / "theirs", tmp_path / "copy"
    tiny = SCRIPT.replace("train.py", "tiny_mnist.py")
    for place, text in ((ours, SCRIPT), (theirs, tiny), (copy, SCRIPT)):
        place.mkdir()
        (place / "train.sbatch").write_text(text)
    for number in range(5):
        leave(ours, str(100 + number), script=SCRIPT, data_workers=60, data_worker_cpus=8, data_worker_mb=60_000)
    found = convert(ours, "--data-worker-partition=cpu", "train.sbatch", history=tmp_path)
    assert "--data-workers=0-75" in found.stderr
    stranger = convert(theirs, "train.sbatch", history=tmp_path)
    assert (stranger.returncode, stranger.stdout) == (0, tiny)
    assert "of 5 past jobs none is like train.sbatch" in stranger.stderr
    leave(theirs, "99", data_workers=2)  # an older release says less, and where it lies is known
    own = convert(theirs, "--data-worker-partition=cpu", "train.sbatch", history=tmp_path)
    assert "--data-workers=0-3 " in own.stderr
    assert (
        "--data-workers=0-75" in convert(copy, "--data-worker-partition=cpu", "train.sbatch", history=tmp_path).stderr
    )


WITH_PARTITION = SCRIPT.replace("srun", "#HETSTREAM --data-worker-partition=cpu\nsrun")


@pytest.mark.shows("without a proposal `convert --auto` says so; a copied record is one job")
@pytest.mark.parametrize("past_job", ["none", "unlike", "nothing gained"])
@pytest.mark.parametrize("where", ["script", "command line"])
def test_without_a_proposal_auto_says_so_and_leaves_the_script_alone(tmp_path: Path, past_job: str, where: str) -> None:
    body = WITH_PARTITION if where == "script" else SCRIPT
    (tmp_path / "train.sbatch").write_text(body)
    if past_job != "none":
        leave(tmp_path, "1", "bert.sbatch" if past_job == "unlike" else "train.sbatch", data_workers=0)
    options = [] if where == "script" else ["--data-worker-partition=cpu"]
    found = convert(tmp_path, *options, "train.sbatch")
    assert (found.returncode, found.stdout) == (0, body)
    said = {"none": "nothing is proposed from history", "unlike": "of 1 past job none is like train.sbatch",
            "nothing gained": "no data workers are proposed"}[past_job]  # fmt: skip
    assert said in found.stderr
    assert "--data-workers=MIN[-MAX] is missing" in found.stderr
    assert ("has no #HETSTREAM line" in found.stderr) == (where != "script")
    wrong = convert(tmp_path, "--data-worker-partitoin=cpu", "train.sbatch")
    assert wrong.returncode == 2
    assert said in wrong.stderr, "notes are not lost"


SINFO = "#!/bin/sh\necho 'cpu*|16|64000|4|(null)|1'\necho 'gpu|16|128000|2|gpu:2|1'\n"
SCONTROL = "#!/bin/sh\necho 'SLURM_VERSION           = 22.05.8'\necho 'SelectTypeParameters    = CR_CORE_MEMORY'\n"


@pytest.mark.shows("one job of five decides nothing, and proposals fit the nodes that there are")
def test_a_proposal_stays_within_the_cluster_and_history_is_named_where_it_cannot(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    for name, text in (("sinfo", SINFO), ("scontrol", SCONTROL)):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "train.sbatch").write_text(SCRIPT)
    leave(tmp_path, "1", data_worker_cpus=64, data_workers=6)
    found = convert(tmp_path, "train.sbatch", path=f"{tmp_path}/bin:/usr/bin:/bin")
    assert found.returncode == 0
    assert "--auto: --data-workers=0-4 --data-worker-cpus=16" in found.stderr
    leave(tmp_path, "2", data_worker_mb=200_000)
    found = convert(tmp_path, "train.sbatch", path=f"{tmp_path}/bin:/usr/bin:/bin")
    assert found.returncode == 2
    assert "fits no node of partition cpu" in found.stderr
    assert "--data-worker-mem=200256M comes from past jobs (--auto)" in found.stderr
    assert "note: --auto: " in found.stderr
    own = convert(tmp_path, "--data-worker-mem=4G", "train.sbatch", path=f"{tmp_path}/bin:/usr/bin:/bin")
    assert own.returncode == 0


@pytest.mark.shows("the next submission of a script is proposed from the most similar past jobs")
def test_convert_auto_says_when_data_workers_brought_nothing(tmp_path: Path) -> None:
    (tmp_path / "train.sbatch").write_text(SCRIPT)
    leave(tmp_path, "12", data_workers=0)
    found = convert(tmp_path, "train.sbatch")
    assert found.stdout == SCRIPT
    assert "no data workers are proposed" in found.stderr
