"""The dispatcher's journal: what survives a death at any byte, what is refused, how large it gets."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from hetstream.mpi_dataworkers.dispatcher import server as journal_module
from hetstream.mpi_dataworkers.dispatcher.server import Journal
from hetstream.mpi_dataworkers.errors import ServiceError
from hetstream.mpi_dataworkers.wire.messages import LoaderStats, Program, ProvidePipeline, RegisterLoader

LOADER = RegisterLoader("job", 0, 0, 1, "host", 1, "d", {})


def write(directory: Path, groups: int = 1) -> None:
    """A start, `groups` groups of changes, and no orderly end."""
    journal = Journal(directory)
    for number in range(groups):
        journal.begin()
        journal.remember_pipeline(ProvidePipeline(f"d{number}", Program("/", []), b"", b"blob" * 100))
        journal.remember_worker(f"w{number}")
        journal.remember_stats(LOADER, LoaderStats(epochs=number))
        journal.commit()
    copies = {path.name: path.read_bytes() for path in directory.glob("journal.sqlite*")}
    journal.close()  # which writes the log back: put the files back as a death would leave them
    for name, content in copies.items():
        (directory / name).write_bytes(content)


def test_a_disk_that_holds_up_the_dispatcher_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    journal = Journal(tmp_path)
    took_s = 0.5
    for _ in range(2):
        moments = iter((100.0, 100.0 + took_s))
        with monkeypatch.context() as clock:
            clock.setattr("time.monotonic", moments.__next__)
            journal.begin()
            journal.commit()
        took_s = 6.2
    journal.close()
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith(f"the disk of {journal.path} took 6.2 s for a commit, and nobody was answered meanwhile")


def test_what_was_committed_is_there_after_a_death(tmp_path: Path) -> None:
    write(tmp_path, groups=3)
    journal = Journal(tmp_path)
    assert journal.incarnation == 2
    assert [one.pipeline_id for one in journal.pipelines] == ["d0", "d1", "d2"]
    assert journal.workers == {"w0", "w1", "w2"}
    assert journal.loaders()[0]["epochs"] == 2
    journal.close()


@pytest.mark.shows("damaged state is refused, the file named; a torn last record is dropped")
@pytest.mark.parametrize("cut", [1, 17, 500, 4000, 4120, 9000])
def test_a_torn_last_record_is_dropped_with_its_group_and_nothing_else(tmp_path: Path, cut: int) -> None:
    write(tmp_path, groups=5)
    log = tmp_path / "journal.sqlite-wal"
    log.write_bytes(log.read_bytes()[:-cut])
    journal = Journal(tmp_path)
    names = sorted(one.pipeline_id for one in journal.pipelines)
    assert names in (["d0", "d1", "d2", "d3"], ["d0", "d1", "d2"]), "groups are there or not, and in order"
    assert journal.workers == {name.replace("d", "w") for name in names}, "a group is there whole or not at all"
    journal.close()


def test_rubbish_behind_the_last_record_is_dropped(tmp_path: Path) -> None:
    write(tmp_path, groups=2)
    with (tmp_path / "journal.sqlite-wal").open("ab") as log:
        log.write(b"rubbish" * 1000)
    journal = Journal(tmp_path)
    assert journal.workers == {"w0", "w1"}
    journal.close()


def sql(statement: str) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        database = sqlite3.connect(path)
        database.executescript(statement)
        database.close()

    return damage


def overwrite_a_page(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xa5" * 4096)


def duplicate_a_row(path: Path) -> None:
    """A row twice, as after a write that went astray: the index that forbids it is damaged first."""
    sql(
        "pragma writable_schema=on;"
        "update sqlite_master set sql = 'create table workers (peer text)', type = 'table' where name = 'workers';"
        "delete from sqlite_master where name = 'sqlite_autoindex_workers_1';"
        "pragma writable_schema=off;"
    )(path)


@pytest.mark.shows("damaged state is refused, the file named; a torn last record is dropped")
@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda path: path.write_bytes(b"rubbish" * 4000), "file is not a database"),
        (overwrite_a_page, "malformed|btree|Tree|page"),
        (duplicate_a_row, "never used|Freelist|malformed"),
        (sql("delete from facts where name = 'schema_version'"), "schema version is missing, and 'incarnation'"),
        (sql("update facts set value = '1' where name = 'schema_version'"), "schema version 1, this release reads 3"),
        (sql("delete from facts where name = 'incarnation'"), "'missing'"),
        (sql("update facts set value = 'x' where name = 'incarnation'"), "'x'"),
        (sql("insert into facts values ('keys', '[\"a\"]')"), "1 keys instead of 5"),
        (sql("insert into facts values ('keys', '[')"), "truncated"),
        (sql("insert into facts values ('port', '70000')"), "port 70000"),
        (sql("update pipelines set id = 'other'"), "the pipeline d0 is filed as other"),
        (sql("update pipelines set message = x'00'"), "Expected `object`"),
        (sql("update loaders set stats = x'00'"), "Expected `object`"),
    ],
    ids=range(13),
)
def test_damage_is_refused_and_the_file_named(tmp_path: Path, damage: Callable[[Path], None], says: str) -> None:
    journal = Journal(tmp_path)
    journal.begin()
    journal.remember_pipeline(ProvidePipeline("d0", Program("/", []), b"", b"blob"))
    journal.remember_worker("w0")
    journal.remember_stats(LOADER, LoaderStats())
    journal.commit()
    journal.close()
    damage(journal.path)
    with pytest.raises(ServiceError, match=rf"(?s)journal {journal.path} cannot be used: .*({says})"):
        Journal(tmp_path)


def test_a_large_pipeline_is_stored_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "_PART_BYTES", 1000)
    large = [
        ProvidePipeline(name, Program("/", []), b"", name.encode() * size) for name, size in (("d0", 3000), ("d1", 500))
    ]
    journal = Journal(tmp_path)
    for pipeline in (*large, large[0]):
        journal.remember_pipeline(pipeline)
    journal.close()
    journal = Journal(tmp_path)
    assert journal.pipelines == large
    journal.forget_pipeline("d0")
    journal.close()
    journal = Journal(tmp_path)
    assert journal.pipelines == large[1:]
    journal.close()


def test_it_stays_small_however_long_the_service_runs(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for number in range(1000):
        journal.begin()
        journal.remember_stats(LOADER, LoaderStats(epochs=number, steps=1000 * number))
        journal.remember_worker(f"w{number}")
        journal.forget_worker(f"w{number - 8}")
        journal.forget_pipeline(f"d{number - 1}")
        journal.remember_pipeline(ProvidePipeline(f"d{number}", Program("/", []), b"", b"x" * 20_000))
        journal.commit()
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 6 << 20
    journal.close()
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 1 << 20
