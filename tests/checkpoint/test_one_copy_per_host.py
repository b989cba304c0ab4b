"""What is equal on all ranks lies once in the memory of each host, and survives like each rank's own. Real ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from hetstream.checkpoint.errors import NoCheckpoint
from hetstream.checkpoint.flash.ranks import Host
from hetstream.checkpoint.flash.sources import MemorySource
from hetstream.checkpoint.memory.view import find_stores
from tests.checkpoint.programs.host_ranks import SIZE, came_to, trained

ROOT = Path(__file__).resolve().parents[2]
KILLED = -9


class Restored(NamedTuple):
    """What a rank says."""

    rank: int
    step: int | None
    sources: list[str]
    came_to: str
    num_compared_bytes: int


class Start(NamedTuple):
    """Of a job: a host for each rank, what they do, and what they end with."""

    hosts: list[Path]
    commands: str
    codes: list[int]


def start(hosts: list[Path], commands: str, code: int = 0) -> Start:
    return Start(hosts, commands, [code] * len(hosts))


def run(directory: Path, *starts: Start) -> list[Restored]:
    """Start a job again and again; what the ranks that restored say."""
    words = [word for one in starts for word in (",".join(map(str, one.hosts)), one.commands)]
    argv = [sys.executable, "-m", "tests.checkpoint.programs.host_ranks", str(directory), *words]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=150, env=environ)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    codes = [line for line in lines if all(type(one) is int for one in line)]
    assert codes == [one.codes for one in starts], done.stderr
    return sorted(Restored(*line) for line in lines if line not in codes)


def expected(step: int, rank: int) -> str:
    return came_to(trained(step, rank))


def sizes(memory: Path) -> list[int]:
    """Memory that the slots of each rank take, by rank."""
    return [one.num_bytes for one in sorted(find_stores([memory]), key=lambda one: one.holder.rank)]


# The weights and two moments of each, and what BatchNorm keeps.
SHARED_BYTES = 3 * 4 * (SIZE * SIZE + 3 * SIZE) + 2 * 4 * SIZE


@pytest.mark.parametrize("num_ranks", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_memory_has_one_copy_for_each_slot(tmp_path: Path, memory: Path, num_ranks: int) -> None:
    hosts = [memory] * num_ranks
    saves = start(hosts, "save 1 save 2 save 3 crash", KILLED)
    restored = run(tmp_path / "ckpt", saves, start(hosts, "restore crash", KILLED))
    first, *others = sizes(memory)
    assert 3 * SHARED_BYTES < first < 3.2 * SHARED_BYTES
    assert max(others) < 0.1 * SHARED_BYTES
    assert [one.rank for one in restored] == [*range(num_ranks)]
    for one in restored:
        assert (one.step, one.sources) == (3, ["memory"] * num_ranks)
        assert one.came_to == expected(3, one.rank)
    run(tmp_path / "ckpt", start(hosts, "restore wait"))
    disk = sum(file.stat().st_size for file in (tmp_path / "ckpt" / "step-0000000003.1").glob("*.safetensors"))
    assert SHARED_BYTES < disk < 1.3 * SHARED_BYTES


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_rank_loses_nothing_for_the_others(tmp_path: Path, memory: Path, killed: int) -> None:
    codes = [KILLED if rank == killed else 1 for rank in range(2)]
    saves = Start([memory] * 2, f"save 1 wait save 2 save 3 kill {killed}", codes)
    for one in run(tmp_path / "ckpt", saves, start([memory] * 2, "restore")):
        assert (one.step, one.sources) == (3, ["memory"] * 2)
        assert one.came_to == expected(3, one.rank)


@pytest.fixture
def hosts(tmp_path: Path, wait_until: Any) -> Iterator[list[Path]]:
    """Two directories, each in place of a host's /dev/shm, whose checkpoint writers have ended when the test has."""
    roots = [tmp_path / "host-a", tmp_path / "host-b"]
    for root in roots:
        root.mkdir(mode=0o700)
    yield roots
    wait_until(lambda: not any(one.writer_alive for one in find_stores(roots)), 60, "the end of all checkpoint writers")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "source"),
    [([0, 0, 1, 1], "memory"), ([1, 1, 0, 0], "disk")],
    ids=["on the same hosts", "on each other's hosts"],
)
def test_each_host_has_a_copy(tmp_path: Path, hosts: list[Path], layout: list[int], source: str) -> None:
    a, b = hosts
    saves = start([a, a, b, b], "save 1 save 2 wait crash", KILLED)
    again = start([hosts[place] for place in layout], "restore save 3 save 4 crash", KILLED)
    restored = run(tmp_path / "ckpt", saves, again)
    for one in restored:
        assert (one.step, one.sources) == (2, [source] * 4)
        assert one.came_to == expected(2, one.rank)
    for host in hosts:
        holder, other = sorted(sizes(host)[:2], reverse=True)
        assert holder > 2 * SHARED_BYTES > 20 * other


def test_a_store_that_is_out_of_reach_is_no_error_of_the_program(make: Any, tmp_path: Path) -> None:
    with make() as checkpointer:
        checkpointer.save(1, {"w": torch.ones(3)})
        generation = checkpointer.stats().saved
        memory = MemorySource(checkpointer._storage.store, Host("here", 1, {0: tmp_path / "gone"}))
        with pytest.raises(NoCheckpoint, match="equal on all ranks is out of reach"), memory.open(generation, 0):
            pass


PAIRS = [(2, 2), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in ((4, 4), (8, 8), (2, 4), (4, 2), (8, 1)))]


@pytest.mark.parametrize(("num_saved", "num_ranks"), PAIRS)
def test_each_byte_on_disk_is_read_once_for_a_host(
    tmp_path: Path, memory: Path, num_saved: int, num_ranks: int
) -> None:
    saves = start([memory] * num_saved, "save 1 wait")
    restored = run(tmp_path / "ckpt", saves, start([memory] * num_ranks, "restore"))
    total = sum(file.stat().st_size for file in (tmp_path / "ckpt" / "step-0000000001.1").glob("*.safetensors"))
    assert [one.sources for one in restored] == [["disk"] * num_ranks] * num_ranks
    assert sum(one.num_compared_bytes for one in restored) == total
    for one in restored[:num_saved]:
        assert one.came_to == expected(1, one.rank)


@pytest.mark.slow
def test_damage_that_another_rank_finds_is_every_ranks(tmp_path: Path, memory: Path) -> None:
    run(tmp_path / "ckpt", start([memory] * 2, "save 1 wait save 2 wait"))
    file = tmp_path / "ckpt" / "step-0000000002.1" / "rank-00001-of-00002.safetensors"
    data = bytearray(file.read_bytes())
    data[-2000] ^= 4
    file.write_bytes(data)
    for one in run(tmp_path / "ckpt", start([memory] * 2, "restore")):
        assert (one.step, one.sources) == (1, ["disk"] * 2)
        assert one.came_to == expected(1, one.rank)
    assert "own.noise" in file.with_name("damaged.txt").read_text()
