"""The table of `hetstream job`, and how a service is found."""

from __future__ import annotations

import os
import re
from pathlib import Path

import msgspec
import pytest

from hetstream.base.errors import UsageError
from hetstream.base.files import temporary_place
from hetstream.hetjob.errors import ServiceNotFound
from hetstream.hetjob.job.find_service import JobPlace, find_address_file, find_directory
from hetstream.mpi_dataworkers.wire.messages import (
    DataWorkerState,
    DataWorkerStatus,
    LoaderStats,
    LoaderStatus,
    PastDecision,
    Status,
)
from hetstream.slurm_plugin.render.tables import sparkline
from hetstream.slurm_plugin.render.top import render


def loader(rank: int, **changes: object) -> LoaderStatus:
    row = LoaderStatus(
        "resnet", 0, rank, 2, "gpu1", 90, 3, 1204, 5005, 12, 64, 3, 41.25, 396.1e6, 0.02, LoaderStats(steps=9000)
    )
    return LoaderStatus(**({name: getattr(row, name) for name in row.__struct_fields__} | changes))


def worker(number: int, state: DataWorkerState = "working") -> DataWorkerStatus:
    return DataWorkerStatus(number, f"cpu{number}", 100 + number, state, 2, 1100, 27.5, 0.98, 0, 11532.0, 0.1)


def status(loaders: list[LoaderStatus], workers: list[DataWorkerStatus], lost: int = 0) -> Status:
    return Status(2, 11532.0, workers, loaders, 3, lost, 10240, 3, 512.4)


def test_the_table() -> None:
    lines = render(status([loader(0), loader(1, wait_share=0.31)], [worker(1), worker(0, "silent")], 1), "job-8123")
    assert lines == [
        "job-8123  up 3:12:12, start 2",
        "2 data worker processes, 1 lost, 2 loaders   steps/s: 55.0 made, 82.5 taken   792.2 MB/s   "
        "leases: 512/s, 3 of 10,240 revoked",
        "",
        "LOADER           HOST  EPOCH         STEP  STEPS/S   BYTES/S  WAITED  BUFFER  DATA WORKERS  LOCAL",
        "resnet rank 0/2  gpu1      3  1,204/5,005     41.2  396.1 MB      2%   12/64             3      0",
        "resnet rank 1/2  gpu1      3  1,204/5,005     41.2  396.1 MB     31%   12/64             3      0",
        "",
        "DATA WORKER  HOST  PID  STATE    LEASES  STEPS/S  BUSY  STEPS  REVOKED       UP",
        "0            cpu0  100  silent        2     27.5   98%  1,100        0  3:12:12",
        "1            cpu1  101  working       2     27.5   98%  1,100        0  3:12:12",
    ]


def test_the_elastic_controllers_last_words_and_changes() -> None:
    one = msgspec.structs.replace(
        status([], []), elastic="1 data workers, allowed 0-4", decisions=[PastDecision(65.2, "grow", 3, "it waits 61%")]
    )
    lines = render(one, "x")
    assert lines[2:4] == ["elastic: 1 data workers, allowed 0-4", "  0:01:05 ago: grow 3, because it waits 61%"]


def test_two_stages_have_a_line_each() -> None:
    busy, waiting = worker(0), msgspec.structs.replace(worker(1), device="gpu", busy_share=0.2, wait_share=0.6)
    taker = msgspec.structs.replace(loader(0, wait_share=0.5), device="gpu")
    decisions = [PastDecision(65.2, "grow", 1, "it waits 50%", "gpu")]
    two = msgspec.structs.replace(status([taker], [busy, waiting]), elastic_gpu="1 data workers", decisions=decisions)
    lines = render(two, "x")
    assert lines[2:6] == [
        "stage on CPUs: 1 process, 27.5 steps/s taken, busy 98%, missed 50% of the time",
        "stage on GPUs: 1 process, 41.2 steps/s taken, busy 20%, missed 50% of the time, "
        "waits 60% for the stage before",
        "elastic, stage on GPUs: 1 data workers",
        "  0:01:05 ago: grow 1 with a GPU, because it waits 50%",
    ]
    assert lines[-2:] == [
        "0            cpu0  100  working  cpu         0%       2     27.5   98%  1,100        0  3:12:12",
        "1            cpu1  101  working  gpu        60%       2     27.5   20%  1,100        0  3:12:12",
    ]


def test_colour_marks_what_needs_attention_and_moves_nothing() -> None:
    one = status([loader(0, wait_share=0.9)], [worker(0, "unreachable"), worker(1)])
    plain, colored = render(one, "x"), render(one, "x", color=True)
    assert [re.sub(r"\x1b\[\d+m", "", line).rstrip() for line in colored] == plain
    assert re.findall(r"\x1b\[31m(.*?)\x1b", "\n".join(colored)) == ["   90%", "unreachable"]


def test_a_service_without_anybody() -> None:
    text = "\n".join(render(status([], []), "x"))
    assert "no loader is connected" in text
    assert "no data worker is registered" in text
    assert "-" in render(status([loader(0, epoch=-1)], []), "x")[4].split()


def nowhere(job_id: str) -> JobPlace:
    raise UsageError(f"Slurm does not know {job_id}")


def test_a_service_is_found_by_name_number_directory_or_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()

    def find(job: str | None = None, service: str | None = None, **environ: str) -> Path:
        return find_address_file(job, service, environ, tmp_path, nowhere)

    with pytest.raises(UsageError, match="no running service found"):
        find()
    first, again = tmp_path / ".hetstream/job-12", tmp_path / ".hetstream/job-12-restart-10"
    other = tmp_path / ".hetstream/job-123"
    for directory in (first, tmp_path / ".hetstream/job-12-restart-9", again, other):
        directory.mkdir(parents=True)
    (other / "address").touch()
    assert find() == other / "address"
    assert find("12") == find("12+1") == again / "address"
    assert find(str(first)) == first / "address"
    assert find(service="file:/a/b") == find(HETSTREAM_SERVICE="file:/a/b") == Path("/a/b")
    assert find("123", HETSTREAM_SERVICE="file:/a/b") == other / "address"
    linked, link = tmp_path / ".hetstream/job-13", tmp_path / ".hetstream/job-14"
    linked.mkdir()
    (linked / "address").symlink_to(other / "address")
    link.symlink_to(other)
    assert find() == other / "address", "a link is no service: anybody may have made it"
    (first / "address").touch()
    with pytest.raises(UsageError, match="which one"):
        find()
    with pytest.raises(UsageError, match="not both"):
        find("12", "file:/a/b")
    with pytest.raises(UsageError, match="neither a directory nor a job id"):
        find("x")
    with pytest.raises(UsageError, match="Slurm does not know 99"):
        find("99")


def test_looking_for_the_only_service_makes_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetstream.base.files.unsafe_below", lambda place: f"anybody can write to {place}")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(UsageError, match="no running service found"):
        find_address_file(None, None, {}, tmp_path / "here", nowhere)
    assert os.listdir(tmp_path) == []
    service = temporary_place() / "hetstream-x"
    service.mkdir()
    (service / "address").touch()
    assert find_address_file(None, None, {}, tmp_path / "here", nowhere) == service / "address"


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ("PENDING", "job 99 is pending: it has a directory when it starts. See: hetstream why 98"),
        ("RUNNING", "no directory .hetstream/job-98 in /x, where job 99 works: give the path"),
        ("COMPLETED", "where job 99 works (COMPLETED): give the path of that directory"),
    ],
)
def test_a_job_without_a_directory_is_told_by_what_slurm_knows(tmp_path: Path, state: str, said: str) -> None:
    with pytest.raises(ServiceNotFound) as told:
        find_directory("99", tmp_path, lambda _: JobPlace("98", Path("/x"), state))
    assert said in str(told.value)


def test_any_number_of_a_job_names_it_from_any_directory(tmp_path: Path) -> None:
    there = tmp_path / "there"
    directory = there / ".hetstream" / "job-98"
    directory.mkdir(parents=True)
    asked = []

    def ask(job: str) -> JobPlace:
        asked.append(job)
        return JobPlace("98", there, "COMPLETED")

    for number in ("98", "98+1", "99", "98_4"):
        assert find_directory(number, tmp_path, ask) == directory
    assert asked == ["98", "98+1", "99", "98_4"]
    assert find_directory("98+1", there, nowhere) == directory, "from there nobody is asked"


def test_the_course_of_the_speed_is_drawn_once_there_is_one() -> None:
    assert (sparkline([0.0, 1.0, 2.0, 4.0]), sparkline([0.0, 0.0]), sparkline([])) == ("▁▂▄█", "▁▁", "")
    seen = status([loader(0)], [worker(1)])
    assert not any("until now" in line for line in render(seen, "x", speeds=(1.0, 2.0)))
    assert "steps/s taken until now  ▁▂▄▆█" in render(seen, "x", speeds=(0.0, 1.0, 2.0, 3.0, 4.0))
