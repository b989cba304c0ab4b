"""The job history: what is kept, of whom, for how long, and who may read it."""

from __future__ import annotations

import json
import math
import os
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hetstream.slurm_plugin.errors import HistoryError
from hetstream.slurm_plugin.past_jobs import (
    HISTORY_FILE,
    KEY_FILE,
    Features,
    JobHistory,
    PastJob,
    history_directory,
    past_job_of,
    within_bounds,
)


def past(job: str, ended_s: float = 1000.0, user: str = "alice", **more: Any) -> PastJob:
    values: dict[str, Any] = {"data_workers": 4, "data_worker_cpus": 2, "trainer_cpus": 3, "steps_per_s": 9.0,
                              "wait_share": 0.01} | more  # fmt: skip
    return PastJob(job, ended_s, Features("train", 2, user, "ImageFolder train.py:3", 64), **values)


def test_jobs_come_back_and_none_comes_twice(tmp_path: Path) -> None:
    with JobHistory(tmp_path / "new", plain_names=True) as history:
        assert history.add([past("1"), past("2", 2000.0)], 3000.0) == 2
        assert history.add([past("1"), past("3", 500.0)], 3000.0) == 1
    with JobHistory(tmp_path / "new", plain_names=True) as history:
        assert [one.job for one in history.jobs()] == ["3", "1", "2"]
        assert history.jobs()[1] == past("1")


@pytest.mark.shows("past jobs are kept for a year, with hashed names, and the most similar ones propose")
@pytest.mark.shows("the next submission of a script is proposed from the most similar past jobs")
def test_names_are_hashed_with_a_key_of_the_place(tmp_path: Path) -> None:
    with JobHistory(tmp_path / "one") as one, JobHistory(tmp_path / "two") as two:
        one.add([past("1", user="alice"), past("2", user="bob"), past("3", user="alice")], 1000.0)
        alice, bob, again = (job.features.user for job in one.jobs())
        assert alice == again == one.kept_name("alice") != bob
        assert two.kept_name("alice") != alice
    for name in (HISTORY_FILE, KEY_FILE):
        path = tmp_path / "one" / name
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert b"alice" not in (tmp_path / "one" / HISTORY_FILE).read_bytes()
    assert stat.S_IMODE((tmp_path / "one").stat().st_mode) == 0o700


@pytest.mark.shows("past jobs are kept for a year, with hashed names, and the most similar ones propose")
def test_what_is_old_or_too_much_goes(tmp_path: Path) -> None:
    with JobHistory(tmp_path, keep_s=100.0, keep_jobs=3) as history:
        history.add([past(str(number), 1000.0 + number) for number in range(5)], 1000.0)
        assert [one.job for one in history.jobs()] == ["2", "3", "4"]
        history.add([past("9", 1200.0)], 1200.0)
        assert [one.job for one in history.jobs()] == ["9"]


@pytest.mark.shows("clocks that jump are found in exports, in the daemon and in the history")
def test_a_clock_that_is_a_year_ahead_takes_nothing(tmp_path: Path) -> None:
    with JobHistory(tmp_path, keep_s=100.0) as history:
        history.add([past("1")], 1000.0)
        assert history.add([past("2", 1050.0)], 1e9) == 1
        assert [one.job for one in history.jobs()] == ["1", "2"]


@pytest.mark.parametrize("left", [b"", b"short"])
def test_a_key_that_a_crash_cut_off_is_made_again(tmp_path: Path, left: bytes) -> None:
    (tmp_path / KEY_FILE).write_bytes(left)
    (tmp_path / KEY_FILE).chmod(0o600)
    with JobHistory(tmp_path) as history:
        name = history.kept_name("alice")
        assert name
    with JobHistory(tmp_path) as again:
        assert again.kept_name("alice") == name
    assert stat.S_IMODE((tmp_path / KEY_FILE).stat().st_mode) == 0o600


def test_a_key_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(HistoryError, match="No space left"):
            JobHistory(tmp_path)
    assert not (tmp_path / KEY_FILE).exists()
    with JobHistory(tmp_path) as history:
        assert history.kept_name("alice")


def test_a_damaged_record_costs_itself_alone(tmp_path: Path) -> None:
    with JobHistory(tmp_path) as history:
        history.add([past("1"), past("2"), past("3"), past("4")], 1000.0)
    with sqlite3.connect(tmp_path / HISTORY_FILE) as database:
        database.execute("update jobs set record = '{' where job = '1'")
        database.execute("update jobs set record = cast(x'ff22' as text) where job = '2'")
    database.close()
    with JobHistory(tmp_path) as history:
        assert [one.job for one in history.jobs()] == ["3", "4"]
        assert history.num_unreadable == 2


def test_no_more_is_read_than_a_history_has(tmp_path: Path) -> None:
    """The file may be another user's: the newest jobs count, and no record of megabytes."""
    with JobHistory(tmp_path) as history:
        history.add([past(str(number), 1000.0 + number) for number in range(9)], 2000.0)
    with sqlite3.connect(tmp_path / HISTORY_FILE) as database:
        database.execute("update jobs set record = json_set(record, '$.job', hex(zeroblob(1000000))) where job = '7'")
    database.close()
    with JobHistory(tmp_path, keep_jobs=4) as history:
        assert [one.job for one in history.jobs()] == ["5", "6", "8"]
        assert history.num_unreadable == 1


def test_it_is_in_wal_mode_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    with JobHistory(tmp_path) as history:
        history.add([past("1")], 1000.0)
    with sqlite3.connect(tmp_path / HISTORY_FILE) as database:
        assert database.execute("pragma journal_mode").fetchone() == ("wal",)
    database.close()
    assert {path.name for path in tmp_path.iterdir()} <= {HISTORY_FILE, KEY_FILE, *(f"{HISTORY_FILE}-{end}" for end in ("wal", "shm"))}  # fmt: skip # noqa: E501


def test_a_killed_writer_leaves_what_was_committed(tmp_path: Path) -> None:
    program = f"""
import os, signal
from pathlib import Path
from hetstream.slurm_plugin.past_jobs import JobHistory
from hetstream.slurm_plugin.past_jobs import Features, PastJob
history = JobHistory(Path({str(tmp_path)!r}))
history.add([PastJob("1", 1.0, Features("train"), 1, 1, None, 0.0, 0.0)], 1.0)
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -9
    with JobHistory(tmp_path) as history:
        assert [one.job for one in history.jobs()] == ["1"]


@pytest.mark.parametrize("content", [b"no database at all, but long enough to look like one" * 40, "tables"])
def test_another_programs_file_is_left_alone(tmp_path: Path, content: bytes | str) -> None:
    path = tmp_path / HISTORY_FILE
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        with sqlite3.connect(path) as database:
            database.execute("create table notes (text)")
        database.close()
    path.chmod(0o600)
    before = path.read_bytes()
    with pytest.raises(HistoryError, match="job history"):
        JobHistory(tmp_path)
    assert path.read_bytes() == before


def test_a_file_that_others_can_write_to_is_not_used(tmp_path: Path) -> None:
    (tmp_path / HISTORY_FILE).touch()
    (tmp_path / HISTORY_FILE).chmod(0o666)
    with pytest.raises(HistoryError, match="not used"):
        JobHistory(tmp_path)


def test_who_may_only_read_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with JobHistory(tmp_path) as history:
        history.add([past("1")], 1000.0)
    real = os.access
    # Root may write everything, and tests may run as root.
    monkeypatch.setattr(os, "access", lambda path, mode, **more: mode != os.W_OK and real(path, mode, **more))
    with JobHistory(tmp_path) as history:
        assert history.is_read_only
        assert history.add([past("2")], 1000.0) == 0
        assert [one.job for one in history.jobs()] == ["1"]


def test_where_it_is(tmp_path: Path) -> None:
    assert history_directory({"XDG_STATE_HOME": str(tmp_path)}) == tmp_path / "hetstream"
    assert history_directory({"HETSTREAM_JOB_HISTORY": "/srv/history"}) == Path("/srv/history")
    assert "%u" not in str(history_directory({"HETSTREAM_JOB_HISTORY": "/srv/%u"}))


SUMMARY: dict[str, Any] = {
    "job_name": "train",
    "loaders": [
        {"rank": rank, "title": "ImageFolder train.py:3", "steps": 100, "samples": 6400} for rank in (0, 1)
    ],
    "elastic": {"data_workers": 4, "data_worker_cpus": 2, "trainer_cpus_recommended": 3, "steps_per_s": 9.0,
                "wait_share": 0.01},
}  # fmt: skip


def test_a_record_becomes_a_past_job() -> None:
    assert past_job_of(SUMMARY, "1", "alice", 1000.0) == past("1")


def test_the_parts_of_a_step_are_kept_where_they_were_told_apart() -> None:
    def parts(*terms: tuple[str, object]) -> tuple[float | None, ...]:
        told = [{"name": name, "seconds": seconds, "error_s": None, "reason": ""} for name, seconds in terms]
        found = past_job_of({**SUMMARY, "elastic": {**SUMMARY["elastic"], "step_terms": told}}, "1", "alice", 1000.0)
        assert found is not None
        return found.gradient_s, found.update_s, found.embedding_s

    both = ("T_upd", 0.01), ("T_grad", 0.03)
    assert parts(*both) == parts(("T_grad + T_upd", 0.04), *both, ("T_sync", 0.0)) == (0.03, 0.01, None)
    assert parts(("T_upd", 0.01), ("T_grad + T_sync", 0.04), ("T_grad", None)) == (0.04, 0.01, None)
    assert parts() == parts(both[0]) == parts(both[1]) == (None, None, None)
    assert parts(("T_upd", -1.0), both[1]) == parts(("T_upd", 1e400), both[1]) == (None, None, None)
    assert parts(("T_grad + T_emb + T_upd", 0.05), *both, ("T_emb", 0.01)) == (0.03, 0.01, 0.01)
    assert parts(both[0], ("T_grad + T_emb", 0.04), ("T_emb", None)) == (0.04, 0.01, None)
    assert parts(*both, ("T_emb", -1.0)) == parts(*both, ("T_emb", 1e400)) == (0.03, 0.01, None)


@pytest.mark.parametrize(
    "summary",
    [
        {},
        {"elastic": 3},
        {**SUMMARY, "loaders": []},
        {**SUMMARY, "loaders": [{"rank": 0, "steps": 3, "samples": 3}]},
        {**SUMMARY, "loaders": [{"rank": 0, "steps": "many"}]},
        {**SUMMARY, "elastic": {"data_workers": None, "data_worker_cpus": 2}},
        {**SUMMARY, "elastic": {"data_workers": 1e400, "data_worker_cpus": 2}},
    ],
)
def test_what_is_no_record_is_no_past_job(summary: dict[str, Any]) -> None:
    assert past_job_of(summary, "1", "alice", 1000.0) is None


def test_names_that_are_no_text_can_be_kept(tmp_path: Path) -> None:
    found = past_job_of({**SUMMARY, "job_name": "tr\udce4n"}, "1", "alice", 1000.0, "/home/al\udce4x")
    assert found is not None
    with JobHistory(tmp_path) as history:
        assert history.add([found], 1000.0) == 1
        assert [one.features.name for one in history.jobs()] == ["tr?n"]


@pytest.mark.shows("one job of five decides nothing, and proposals fit the nodes that there are")
@pytest.mark.parametrize("value", [100_001, 10**9, 10**30, -5, math.nan, math.inf])
@pytest.mark.parametrize(
    "name",
    ["data_workers", "data_worker_cpus", "trainer_cpus_recommended", "data_worker_mb", "most_data_workers",
     "wait_share", "steps_per_s"],
)  # fmt: skip
def test_numbers_of_no_job_are_dropped_on_the_way_in_and_out(tmp_path: Path, name: str, value: float) -> None:
    summary = {**SUMMARY, "elastic": {**SUMMARY["elastic"], name: value}}
    found = past_job_of(summary, "1", "alice", 1000.0)
    raw = past("1")
    if found is not None:
        bounds = {"data_worker_mb": 100_000_000}
        for field, kept in msgspec.structs.asdict(found).items():
            assert not isinstance(kept, int | float) or field == "ended_s" or 0 <= kept <= bounds.get(field, 100_000)
    own_name = {"trainer_cpus_recommended": "trainer_cpus"}.get(name, name)
    if math.isfinite(value):
        raw = msgspec.structs.replace(raw, **{own_name: value if name in ("wait_share", "steps_per_s") else int(value)})
        with JobHistory(tmp_path, plain_names=True) as history:
            history.add([raw], 1000.0)  # as a release that bounded less
            for job in history.jobs():
                assert job == within_bounds(job) == within_bounds(raw)


def test_memory_of_a_large_node_is_kept_and_more_is_not() -> None:
    for mb, kept in ((4_000_000, 4_000_000), (10**12, None)):
        found = past_job_of({**SUMMARY, "elastic": {**SUMMARY["elastic"], "data_worker_mb": mb}}, "1", "alice", 1.0)
        assert found is not None
        assert found.data_worker_mb == kept


@pytest.mark.shows("without a proposal `convert --auto` says so; a copied record is one job")
def test_a_copy_of_a_record_is_the_same_job_and_the_earlier_date_counts(tmp_path: Path) -> None:
    def record(ended_s: float, directory: str, **more: Any) -> PastJob:
        job = past("7", ended_s, limit_share=0.31, **more)
        return msgspec.structs.replace(job, features=msgspec.structs.replace(job.features, directory=directory))

    with JobHistory(tmp_path, plain_names=True) as history:
        assert history.add([record(5000.0, "/copy")], 9000.0) == 1
        assert history.add([record(1000.0, "/home"), record(7000.0, "/copy/of/copy")], 9000.0) == 0
        (job,) = history.jobs()
        assert (job.ended_s, job.features.directory) == (1000.0, "/home")
        assert history.add([record(1000.0, "/home", wait_share=0.4)], 9000.0) == 0, "one row for a job and a time"
        assert history.add([record(1000.5, "/home", wait_share=0.4)], 9000.0) == 1, "it ran again under this number"


def test_what_says_more_of_a_job_takes_the_place_of_what_was_kept_before(tmp_path: Path) -> None:
    def record(ended_s: float, **known: str) -> PastJob:
        job = past("7", ended_s, limit_share=0.31)
        return msgspec.structs.replace(job, features=msgspec.structs.replace(job.features, **known))

    with JobHistory(tmp_path, plain_names=True) as history:
        history.add([record(1000.0)], 9000.0)  # as an older release kept it
        assert history.add([record(1000.0, directory="/home")], 9000.0) == 0
        assert history.add([record(4000.0, directory="/home", commands="1", files="2")], 9000.0) == 0
        assert history.add([record(5000.0)], 9000.0) == 0, "what says less takes nothing away"
        (job,) = history.jobs()
    assert job == record(1000.0, directory="/home", commands="1", files="2")


def test_copies_that_an_older_release_kept_count_once(tmp_path: Path) -> None:
    with JobHistory(tmp_path) as history:
        history.add([past("7", 1000.0)], 9000.0)
    with sqlite3.connect(tmp_path / HISTORY_FILE) as database:
        ((record,),) = database.execute("select record from jobs")
        # Without the fields that are new since, and with the copy's time.
        old = {name: value for name, value in json.loads(record).items() if name != "most_data_workers"}
        for name in ("directory", "commands", "files"):
            old["features"].pop(name)
        database.execute("delete from jobs")
        for ended_s in (1000.0, 4000.0):
            database.execute("insert into jobs values ('7', ?, ?)", (ended_s, json.dumps({**old, "ended_s": ended_s})))
    database.close()
    with JobHistory(tmp_path) as history:
        assert [(job.job, job.ended_s) for job in history.jobs()] == [("7", 1000.0)]
        assert history.num_unreadable == 0


@pytest.mark.shows("without a proposal `convert --auto` says so; a copied record is one job")
def test_a_record_that_is_dated_ahead_has_no_date_and_never_gets_one(tmp_path: Path) -> None:
    year_s = 365 * 86400.0
    with JobHistory(tmp_path) as history:
        history.add([past("1", 1000.0), past("9", 2000.0 + year_s), past("2", 2000.0 + 60)], 2000.0)
        assert [job.job for job in history.jobs(2000.0)] == ["9", "1", "2"], "a minute is a difference of clocks"
        history.add([past("9", 2000.0 + year_s)], 3000.0 + year_s)
        assert [job.job for job in history.jobs(3000.0 + year_s)] == ["9", "1", "2"]
    with sqlite3.connect(tmp_path / HISTORY_FILE) as database:
        kept = past("8", 5000.0 + year_s, steps_per_s=3.0)
        database.execute("insert into jobs values ('8', ?, ?)", (kept.ended_s, msgspec.json.encode(kept).decode()))
    database.close()
    with JobHistory(tmp_path) as history:
        assert [job.job for job in history.jobs(3000.0)] == ["8", "9", "1", "2"], "as an older release kept it"


def seen(*rows: tuple[float, float, float], **more: Any) -> tuple[int, float]:
    """What a record with these numbers of data workers, seconds and waits tells."""
    told = [{"data_workers": number, "seconds": s, "wait_share": share} for number, s, share in rows]
    elastic = {**SUMMARY["elastic"], "waits_by_data_workers": told, **more}
    found = past_job_of({**SUMMARY, "elastic": elastic}, "1", "alice", 1000.0)
    assert found is not None
    return found.data_workers, found.wait_share


def test_what_was_there_counts_and_not_what_was_asked_for() -> None:
    assert seen((0, 900.0, 0.95), data_workers=4, wait_share=0.95) == (0, 0.95)
    assert seen((0, 900.0, 0.95), (6, 600.0, 0.02), (8, 300.0, 0.0)) == (6, 0.02), "an hour in the queue says nothing"
    assert seen((0, 30.0, 0.9), (2, 600.0, 0.7), (4, 900.0, 0.4)) == (4, 0.4), "it waited least with the most"
    assert seen((0, 900.0, 0.5), (3, 2.0, 0.0)) == (0, 0.5), "two seconds say nothing"
    assert seen(data_workers=4, wait_share=0.01) == (4, 0.01)


def test_an_old_record_of_a_job_whose_companions_never_started_has_none() -> None:
    # As a job on Slurm 22.05 left it, whose companion stayed PENDING.
    elastic = {"data_workers": 1, "wait_share": 0.9485594874435159, "steps_per_s": 7.5, "data_worker_cpus": 1,
               "trainer_cpus_recommended": None, "companions": 0, "companion_cpu_s": 0.0}  # fmt: skip
    found = past_job_of({**SUMMARY, "elastic": elastic, "data_workers_seen": 0}, "2", "alice", 1.0)
    assert found is not None
    assert (found.data_workers, found.had_enough) == (0, False)
    fixed = past_job_of({**SUMMARY, "elastic": elastic, "data_workers_seen": 1}, "2", "alice", 1.0)
    assert fixed is not None
    assert fixed.data_workers == 1, "of component 1"
