"""`hetstream ckpt ls|verify|gc`: what they show, what they change, their exit codes, and that they start at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hetstream.checkpoint.disk.commit import partial_path, write_part
from hetstream.checkpoint.disk.directory import CheckpointDirectory
from hetstream.checkpoint.disk.rank_file import PartSpec
from hetstream.checkpoint.memory.segment import join_metadata
from hetstream.checkpoint.memory.store import Store
from hetstream.checkpoint.memory.store_files import Holder, StoreIdentity, WriterStatus
from hetstream.checkpoint.memory.view import FoundStore, StoreView, find_stores, reason_to_keep, reason_to_remove
from hetstream.checkpoint.record.layout import Generation
from hetstream.hetjob.errors import SlurmCommandError
from hetstream.slurm_plugin.cli import ckpt as ckpt_writer
from hetstream.slurm_plugin.cli import main
from hetstream.slurm_plugin.client.slurm import CommandSlurm
from tests.checkpoint import fake_trainer
from tests.checkpoint.parts import make_record, write_checkpoint

JOB = f"90{os.getpid()}"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Two committed checkpoints, one of them damaged, and one that lacks a rank."""
    path = tmp_path / "ckpt"
    path.mkdir()
    write_checkpoint(path, Generation(1, 10), world_size=2, metrics={"loss": 0.5})
    write_checkpoint(path, Generation(2, 20))
    file = next((path / "step-0000000020.2").glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    record = make_record(1)
    write_part(path, PartSpec(Generation(2, 30), 1, 2, record.layout.digest), record.plan, record.payload)
    return path


@pytest.fixture
def dead_store(directory: Path) -> Iterator[Path]:
    """What a dead trainer's memory holds: two generations, of which one is on disk."""
    store = Store.open(StoreIdentity(JOB, 0, 3, directory))
    path = store.path
    for step in (10, 20):
        with store.begin(1000, 100) as slot:
            slot.publish(Generation(2, step), join_metadata(b"{}", b"{}"), "0" * 32)
    with StoreView(path) as view:
        view.report(WriterStatus(pid=1, persisted=Generation(2, 10)))
    store.close(keep=True)
    yield path
    if path.exists():
        with StoreView(path) as view:
            assert view.remove()


def leave_as_killed(store: Store) -> None:
    """Let go of a store, with what SIGKILL would leave of it."""
    aside = store.path.with_name(f".{store.path.name}")
    store.path.rename(aside)
    store.close()  # it finds nothing to remove
    aside.rename(store.path)


def ckpt(capsys: pytest.CaptureFixture[str], *words: str | Path, code: int = 0) -> str:
    verb = "internal" if words[0] == "writer" else "ckpt"
    assert main([verb, *map(str, words)]) == code
    return capsys.readouterr().out


def ckpt_json(capsys: pytest.CaptureFixture[str], *words: str | Path, code: int = 0) -> Any:
    answer = json.loads(ckpt(capsys, *words, "--json", code=code))
    assert answer["meta"] == {"version": 1}
    return answer


@pytest.mark.shows("`hetstream ckpt ls`, `verify`, `gc`, `writer --once`, with `--json` and `--dry-run`")
def test_ls_shows_disk_and_memory(directory: Path, dead_store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer = ckpt_json(capsys, "ls", directory)
    assert [(one["step"], one["attempt"], one["state"]) for one in answer["checkpoints"]] == [
        (20, 2, "committed"),
        (10, 1, "committed"),
    ]
    assert answer["checkpoints"][1]["metrics"] == {"loss": 0.5}
    assert answer["checkpoints"][1]["num_bytes"] > 0
    assert answer["checkpoints"][1]["age_s"] < 3600
    assert [(one["step"], one["ranks"], one["world_size"]) for one in answer["partials"]] == [(30, [1], 2)]
    (memory,) = answer["memory"]
    assert (memory["job"], memory["rank"], memory["trainer_alive"], memory["closed"]) == (JOB, 3, False, False)
    assert [one["step"] for one in memory["generations"]] == [20, 10]
    assert memory["persisted"] == {"step": 10, "attempt": 2}
    text = ckpt(capsys, "ls", directory)
    assert "committed, latest" in text
    assert "partial: rank 0 of 2 missing" in text
    assert "20.2, 10.2" in text
    assert "note:" not in text
    (directory / "latest").unlink()
    (directory / "latest").mkdir()
    assert f"note: {directory / 'latest'} is a directory of somebody else's" in ckpt(capsys, "ls", directory)
    assert "died" in text


def test_ls_of_a_truncated_file_makes_up_no_size(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.truncate(directory / "step-0000000020.2/rank-00000-of-00001.safetensors", 100)
    (row,) = (line for line in ckpt(capsys, "ls", directory).splitlines() if "damaged" in line)
    assert row.split()[:5] == ["20", "2", "?", "?", "?"]


def test_ls_of_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no checkpoint\n\nnothing in memory on this host\n" in ckpt(capsys, "ls", tmp_path)
    assert main(["ckpt", "ls", str(tmp_path / "none")]) == 1
    assert "is no directory" in capsys.readouterr().err


@pytest.mark.shows("`hetstream ckpt ls`, `verify`, `gc`, `writer --once`, with `--json` and `--dry-run`")
def test_verify_finds_the_flipped_bit_and_marks_it(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer = ckpt_json(capsys, "verify", directory, code=1)
    bad, good = answer["checkpoints"]
    assert (bad["step"], good["step"], good["problems"]) == (20, 10, [])
    assert "damaged in 1 of 1 chunks" in bad["problems"][0]
    states = {one["step"]: one["state"] for one in ckpt_json(capsys, "ls", directory)["checkpoints"]}
    assert states == {20: "damaged", 10: "committed"}
    assert "damaged: " in ckpt(capsys, "ls", directory)
    assert "step-0000000010.1  good" in ckpt(capsys, "verify", directory, "--step", "10")
    assert main(["ckpt", "verify", str(directory), "--step", "11"]) == 1
    assert "has no checkpoint of step 11" in capsys.readouterr().err


@pytest.mark.shows("`hetstream ckpt ls`, `verify`, `gc`, `writer --once`, with `--json` and `--dry-run`")
@pytest.mark.shows("nothing is left after a normal end; after SIGKILL only what belongs to nobody alive is removed")
def test_gc_removes_only_what_is_nobodys(
    directory: Path, dead_store: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs: dict[str, str] | SlurmCommandError = {}

    def living_jobs(_: CommandSlurm) -> dict[str, str]:
        if isinstance(jobs, SlurmCommandError):
            raise jobs
        return jobs

    monkeypatch.setattr(CommandSlurm, "living_jobs", living_jobs)

    def found(*words: str) -> tuple[str, str]:
        rows = ckpt_json(capsys, "gc", *words)["found"]
        (row,) = (row for row in rows if row["path"] == str(dead_store))
        return row["action"], row["reason"]

    jobs = {JOB: "PENDING"}
    assert found() == ("kept", f"job {JOB} is PENDING")
    jobs = SlurmCommandError(["squeue"], 127, "", "not installed")
    assert found() == ("kept", f"Slurm did not say whether job {JOB} is over")
    jobs = {}
    assert found()[1].startswith("step 20 of attempt 2 is in memory alone")
    with StoreView(dead_store) as view:
        view.become_writer()
        assert found("--discard-unsaved") == ("kept", "its checkpoint writer lives")
    assert found("--discard-unsaved", "--dry-run") == (
        "removed",
        f"job {JOB} is over; step 20 of attempt 2 is given up",
    )
    assert dead_store.exists()
    with StoreView(dead_store) as view:
        view.report(WriterStatus(pid=1, persisted=Generation(2, 20)))
    assert "would be removed" in ckpt(capsys, "gc", "--dry-run")
    assert found() == ("removed", f"job {JOB} is over and step 20 of attempt 2 is on disk")
    assert not dead_store.exists()
    assert str(dead_store) not in ckpt(capsys, "gc")


def test_gc_keeps_the_store_of_a_living_trainer(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = Store.open(StoreIdentity("local", 0, 0, directory))

    def found(*words: str) -> dict[str, str]:
        (row,) = (row for row in ckpt_json(capsys, "gc", *words)["found"] if row["path"] == str(store.path))
        return row

    try:
        row = found("--discard-unsaved")
        assert row["action"] == "kept"
        assert row["reason"].startswith(f"its trainer lives, pid {os.getpid()}")
    finally:
        leave_as_killed(store)
    assert found()["reason"] == "its program is gone and it holds nothing"
    assert not store.path.exists()


@pytest.mark.shows("`hetstream ckpt ls`, `verify`, `gc`, `writer --once`, with `--json` and `--dry-run`")
def test_a_store_that_found_no_shared_memory_is_seen_and_collected(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (directory / ".memory").mkdir()
    store = Store.open(StoreIdentity("local", 0, 5, directory), 2, tmp_path / "none", directory / ".memory")
    leave_as_killed(store)
    assert [one["path"] for one in ckpt_json(capsys, "ls", directory)["memory"]] == [str(store.path)]
    rows = ckpt_json(capsys, "gc", directory)["found"]
    assert (str(store.path), "removed") in [(row["path"], row["action"]) for row in rows]
    assert not store.path.exists()


@pytest.mark.shows("`hetstream ckpt ls`, `verify`, `gc`, `writer --once`, with `--json` and `--dry-run`")
def test_gc_completes_what_dead_writers_left(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    older = make_record(2)
    write_part(directory, PartSpec(Generation(1, 15), 0, 2, older.layout.digest), older.plan, older.payload)

    def found(*words: str) -> list[dict[str, str]]:
        rows = ckpt_json(capsys, "gc", *words, directory)["found"]
        return [row for row in rows if row["path"].startswith(str(directory))]

    rows = found("--dry-run")
    assert [(row["action"], row["reason"]) for row in rows] == [
        ("kept", "no checkpoint is newer; a job may still complete it"),
        ("removed", "step 20 of attempt 2 is newer and complete"),
    ]
    assert partial_path(directory, Generation(1, 15)).exists()
    assert [row["action"] for row in found()] == ["kept", "removed"]
    assert not partial_path(directory, Generation(1, 15)).exists()
    record = make_record(3)
    write_part(directory, PartSpec(Generation(2, 30), 0, 2, record.layout.digest), record.plan, record.payload)
    (row,) = found()
    assert (row["action"], row["reason"]) == ("committed", "all parts are there")
    assert (directory / "step-0000000030.2").is_dir()


@pytest.mark.shows("`hetstream ckpt ls`, `verify`, `gc`, `writer --once`, with `--json` and `--dry-run`")
def test_what_a_dead_trainer_left_is_written_when_it_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stores, directory = tmp_path / "stores", tmp_path / "run"
    for path in (stores, directory):
        path.mkdir(mode=0o700)
    monkeypatch.setattr(ckpt_writer, "find_stores", lambda: find_stores([stores]))
    store = Store.open(StoreIdentity(JOB, 0, 0, directory), shared_memory=stores)
    fake_trainer.save(store, Generation(1, 40), 0, 1, 10_000)
    assert "nothing to write" in ckpt(capsys, "writer", "--once"), "its trainer lives"
    store.close(keep=True)
    assert "would write  step 40 of attempt 1 of rank 0" in ckpt(capsys, "writer", "--once", "--dry-run")
    assert os.listdir(directory) == []
    assert f"written  step 40 of attempt 1 of rank 0 to {directory}" in ckpt(capsys, "writer", "--once")
    assert CheckpointDirectory(directory).verify(Generation(1, 40)) == []
    assert "nothing to write" in ckpt(capsys, "writer", "--once")
    assert main(["internal", "writer", "--dry-run"]) == 2


def test_reasons_name_the_job() -> None:
    store = FoundStore(Path("x"), Holder(7, "h", "12", 0, 0, ""), False, False, True, [], None, 0)
    assert reason_to_keep(store, {"12": "RUNNING"}, discard_unsaved=True) == "job 12 is RUNNING"
    assert reason_to_keep(store, {"13": "RUNNING"}, discard_unsaved=False) == ""
    assert reason_to_remove(store) == "job 12 is over and it holds nothing"


@pytest.mark.parametrize("words", [["ls"], ["gc", "--dry-run"]])
def test_commands_start_without_torch(words: list[str]) -> None:
    code = (
        "import sys; from hetstream.slurm_plugin.cli import main; "
        f"assert main(['ckpt', *{words!r}]) == 0; "
        "print(sorted({'torch', 'numpy', 'zmq'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("[]\n")
