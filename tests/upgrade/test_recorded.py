"""What earlier releases left on disk is read, and what is of another version is refused with both numbers.

`recorded/RELEASE` holds what each release wrote (`record.py`); docs/upgrade.md says what is promised of it.
"""

from __future__ import annotations

import json
import re
import shutil
import sqlite3
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

from hetstream import CheckpointReader, FlashCheckpointer, Retention
from hetstream.checkpoint.disk.directory import CheckpointDirectory
from hetstream.checkpoint.errors import OtherRelease
from hetstream.hetjob.errors import SiteError
from hetstream.hetjob.site.messages import VERSION as SITE_VERSION
from hetstream.hetjob.site.messages import decode_answer, decode_request
from hetstream.mpi_dataworkers.dispatcher.server import Journal
from hetstream.mpi_dataworkers.errors import ProtocolError, ServiceError, StateError
from hetstream.mpi_dataworkers.wire import codec
from hetstream.mpi_dataworkers.wire.address import read_address_file
from hetstream.mpi_dataworkers.wire.messages import PROTOCOL_VERSION
from hetstream.slurm_plugin.cli import main
from hetstream.slurm_plugin.daemon.store import Store, remembered_jobs
from hetstream.slurm_plugin.errors import DaemonStateError, DamagedRecord, HistoryError
from hetstream.slurm_plugin.insight.observation import History
from hetstream.slurm_plugin.install.installation import read_record
from tests.upgrade.record import (
    KEYS,
    LOADER,
    NOW_S,
    RECORDED,
    REGISTERED,
    REPLY_KEY,
    REPORT,
    SAMPLE,
    STATS,
    loaders,
    training,
    values_of,
)

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "upgrade.md").read_text()
RELEASES = sorted(path.name for path in RECORDED.iterdir())
# What this release reads of the releases before; another number is another test and another row of docs/upgrade.md.
READ_BY_THIS = ("0.1",)


@pytest.fixture(params=RELEASES)
def recorded(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """What a release left, as it lies on the disk of its user: Git keeps no modes."""
    return copy_of(request.param, tmp_path)


def copy_of(release: str, tmp_path: Path) -> Path:
    place = tmp_path / "left"
    shutil.copytree(RECORDED / release, place, symlinks=True)
    for path in (place, *place.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o700 if path.is_dir() else 0o600)
    return place


def test_this_release_is_recorded() -> None:
    assert ".".join(version("hetstream").split(".")[:2]) in RELEASES, "make record-release"
    assert tuple(RELEASES) == READ_BY_THIS, "say in docs/upgrade.md what is read of which release"


@pytest.mark.shows("what each release left is read; another number is refused with the next step")
@pytest.mark.parametrize("name", ["map", "stream", "mixture"])
def test_states_of_loaders_go_on(recorded: Path, name: str) -> None:
    states = json.loads((recorded / "loaders.json").read_text())
    loader = loaders()[name]
    loader.load_state_dict(states[name]["state"])
    assert values_of(list(loader)) == states[name]["rest"]


def training_state() -> dict[str, Any]:
    """What was saved, as a program has it before it restores."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    note = {"epoch": 0, "lr": [0.0, None]}
    return {"model": model, "optimizer": optimizer, "loader": loaders()["map"], "note": note}


@pytest.mark.shows("what each release left is read; another number is refused with the next step")
def test_checkpoints_are_restored(recorded: Path) -> None:
    directory = recorded / "checkpoints"
    assert main(["ckpt", "verify", str(directory)]) == 0
    wanted, _ = training()
    state = training_state()
    with FlashCheckpointer(directory) as checkpointer:
        assert checkpointer.restore(state) == 7
    assert state["note"] == {"epoch": 1, "lr": [0.5, None]}
    assert torch.equal(state["model"].weight, wanted.weight)
    assert len(state["optimizer"].state) == 2
    assert len(list(state["loader"])) == 5
    assert CheckpointReader(directory).load().step == 7


def test_the_dispatchers_journal_goes_on(recorded: Path) -> None:
    journal = Journal(recorded / "dispatcher")
    assert (journal.incarnation, journal.keys, journal.fact("port")) == (2, KEYS, "40123")
    assert [one.pipeline_id for one in journal.pipelines] == ["d0"]
    assert journal.workers == {"w0"}
    assert journal.loaders()[0]["steps"] == STATS.steps
    journal.close()
    assert read_address_file(recorded / "address").address == "tcp://10.0.0.1:40123"


def test_the_daemon_goes_on(recorded: Path) -> None:
    assert remembered_jobs(recorded / "daemon") == [REGISTERED]
    with Store(recorded / "daemon") as store:
        assert store.jobs() == [REGISTERED]
    with History(recorded / "history.sqlite") as history:
        assert history.since(NOW_S - 1) == [SAMPLE]


def test_messages_are_understood(recorded: Path) -> None:
    wire = json.loads((recorded / "wire.json").read_text())
    assert codec.decode(bytes.fromhex(wire["data plane"])) == LOADER
    assert decode_request(wire["daemon question"].encode()).question == REPORT
    assert getattr(decode_answer(bytes.fromhex(wire["daemon answer"]), REPLY_KEY), "limit", None) == 4


def test_the_record_of_an_installation_is_read(recorded: Path) -> None:
    prefix = recorded / "prefix"
    path = prefix / "share/hetstream/install.json"
    # It names only what is below its prefix, which was elsewhere.
    path.write_text(re.sub(r"/tmp/hetstream-record-\w+/prefix", str(prefix), path.read_text()))
    record = read_record(prefix)
    assert record is not None
    assert [Path(path).name for path in record.files] == ["cli_filter.lua"]


# Of another version


def text(path: Path, before: str, after: str) -> None:
    content = path.read_text()
    assert content.count(before) == 1
    path.write_text(content.replace(before, after))


def sql(path: Path, statement: str) -> None:
    database = sqlite3.connect(path)
    database.executescript(statement)
    database.close()


def load(path: Path, name: str, number: int) -> None:
    state = json.loads((path / "loaders.json").read_text())[name]["state"]
    loaders()[name].load_state_dict(state | {"version": number})


def ask(path: Path, number: int) -> None:
    question = json.loads((path / "wire.json").read_text())["daemon question"].replace(
        '"version":1', f'"version":{number}'
    )
    decode_request(question.encode())


def listen(path: Path, number: int) -> None:
    frame = bytearray.fromhex(json.loads((path / "wire.json").read_text())["data plane"])
    frame[3] = number
    codec.decode(frame)


def journal(path: Path, number: int) -> None:
    sql(path / "dispatcher/journal.sqlite", f"update facts set value = {number} where name = 'schema_version'")
    Journal(path / "dispatcher")


def address(path: Path, number: int) -> None:
    text(path / "address", '"format": 1', f'"format": {number}')
    read_address_file(path / "address")


def daemon(path: Path, number: int) -> None:
    sql(path / "daemon/daemon.sqlite", f"pragma user_version={number}")
    Store(path / "daemon")


def history(path: Path, number: int) -> None:
    sql(path / "history.sqlite", f"pragma user_version={number}")
    History(path / "history.sqlite")


def installed(path: Path, number: int) -> None:
    text(path / "prefix/share/hetstream/install.json", '"version": 1', f'"version": {number}')
    read_record(path / "prefix")


def other_manifest(path: Path, number: int) -> Path:
    """A checkpoint whose manifest is of another version, and of another form."""
    directory = path / "checkpoints"
    (manifest,) = directory.glob("step-*/rank-*.json")
    fields = json.loads(manifest.read_text()) | {"version": number, "checksums": {"new": "form"}}
    manifest.write_text(json.dumps(fields))
    return directory


def restored(path: Path, number: int) -> None:
    CheckpointReader(other_manifest(path, number)).load()


@pytest.mark.shows("what each release left is read; another number is refused with the next step")
@pytest.mark.parametrize("newer", [True, False], ids=["newer", "older"])
@pytest.mark.parametrize(
    ("use", "own", "error", "next_step"),
    [
        (lambda path, number: load(path, "map", number), 4, StateError, "go on with the release"),
        (lambda path, number: load(path, "mixture", number), 1, StateError, "go on with the release"),
        (listen, PROTOCOL_VERSION, ProtocolError, "Install the same hetstream release"),
        (ask, SITE_VERSION, SiteError, "install one release of hetstream for the daemon and the job masters"),
        (journal, 3, ServiceError, "Move it away and start the dispatcher again"),
        (address, 1, ServiceError, "install one release of hetstream in all environments of a job"),
        (daemon, 1, DaemonStateError, "move it away: jobs report again by themselves"),
        (history, 1, HistoryError, "or give another file"),
        (installed, 1, DamagedRecord, "uninstall with the release of hetstream that installed"),
        (restored, 1, OtherRelease, "go on with the release of hetstream that wrote it"),
    ],
    ids=[
        "loader", "mixture", "data plane", "daemon protocol", "journal", "address file", "daemon", "history",
        "installation", "checkpoint",
    ],
)  # fmt: skip
def test_another_version_is_refused_with_both_numbers_and_the_next_step(
    tmp_path: Path, use: Callable[[Path, int], None], own: int, error: type[Exception], next_step: str, newer: bool
) -> None:
    older = 0 if use is ask else own - 1  # all earlier versions of the daemon's protocol are answered
    number = own + 1 if newer else older
    with pytest.raises(error) as told:
        use(copy_of(RELEASES[-1], tmp_path), number)
    said = str(told.value)
    assert {str(own), str(number)} <= set(re.findall(r"\d+", said)), said
    assert next_step in said
    assert "docs/upgrade.md" in said
    assert "\n" not in said


@pytest.mark.shows("what each release left is read; another number is refused with the next step")
def test_a_checkpoint_of_another_release_is_neither_passed_over_nor_marked_nor_removed(tmp_path: Path) -> None:
    """After a rollback: a training that goes on from an older one in its place would lose steps in silence."""
    directory = copy_of(RELEASES[-1], tmp_path) / "checkpoints"
    state = training_state()
    with FlashCheckpointer(directory) as checkpointer:
        checkpointer.restore(state)
        checkpointer.save(9, state)
    (newest,) = directory.glob("step-0000000009.*")
    (newest / "rank-00000-of-00001.json").write_text(json.dumps({"version": 2}))
    with (
        FlashCheckpointer(directory) as checkpointer,
        pytest.raises(OtherRelease, match=r"step-0000000009.* version 2"),
    ):
        checkpointer.restore(state)
    assert main(["ckpt", "verify", str(directory)]) != 0
    assert [path.name for path in newest.glob("damaged*")] == []
    verdicts = CheckpointDirectory(directory).retain(Retention(keep_last=1))
    assert [one.saved.step for one in verdicts] == [7]
    assert newest.is_dir()
    # Who wants the older one says so.
    assert CheckpointReader(directory).load(step=7).step == 7


def test_the_page_names_every_version() -> None:
    for number, what in (
        (PROTOCOL_VERSION, "data plane"), (SITE_VERSION, "site daemon"), (3, "journal"), (4, "state of a loader"),
        (1, "manifest"), (2, "memory of a checkpoint"),
    ):  # fmt: skip
        assert re.search(rf"^\| [^|\n]*{what}[^|\n]* \| {number} \|", PAGE, re.MULTILINE), what
