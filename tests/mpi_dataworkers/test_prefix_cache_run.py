"""The prefix cache of `hetstream run --cache=...` around a program with torch's own DataLoader."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from hetstream.mpi_dataworkers.ops import prefix_cache
from hetstream.mpi_dataworkers.ops.cache_store import store_path
from hetstream.mpi_dataworkers.process.config import parse_cache
from tests.checkpoint.mounted import mounted_memory

image_module = pytest.importorskip("PIL.Image")

PROGRAM = Path(__file__).parent / "programs" / "cached_photographs.py"
HETSTREAM = Path(sys.executable).with_name("hetstream")
NUM_FILES = 16


def write_photograph(path: Path, number: int) -> None:
    pixels = np.random.default_rng(number).integers(0, 255, (120, 160, 3), dtype=np.uint8)
    image_module.fromarray(pixels).save(path, compress_level=0)  # of one size


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "photographs"
    made.mkdir()
    for number in range(NUM_FILES):
        write_photograph(made / f"{number:02}.png", number)
    time.sleep(2 * prefix_cache._YOUNG_S)
    return made


def run(cache: object, *arguments: object) -> subprocess.CompletedProcess[str]:
    options = ["--data-workers=1", *([] if cache is None else [f"--cache={cache}"])]
    command = [str(HETSTREAM), "run", *options, "--", sys.executable, str(PROGRAM), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    return done


def entries(place: object) -> dict[str, int]:
    found = store_path(parse_cache(str(place))).rglob("*")
    return {path.name: path.stat().st_mtime_ns for path in found if len(path.name) == 32 and path.is_file()}


@pytest.mark.shows("an unmodified program has with `hetstream run --cache` the batches that it has without")
def test_a_program_as_it_is(folder: Path, tmp_path: Path) -> None:
    place, expected = tmp_path / "cache", run(None, folder).stdout
    assert run(place, folder).stdout == expected
    kept = entries(place)
    assert len(kept) == NUM_FILES
    assert run(place, folder).stdout == expected
    assert entries(place) == kept, "a later run finds them"

    changed, before = folder / "05.png", (folder / "05.png").stat()
    write_photograph(changed, 99)
    os.utime(changed, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert changed.stat().st_size == before.st_size
    time.sleep(2 * prefix_cache._YOUNG_S)
    later = run(None, folder).stdout
    assert later != expected
    assert run(place, folder).stdout == later
    assert entries(place).keys() > kept.keys()
    assert len(entries(place)) == NUM_FILES + 1


def test_off_wins_over_the_environment(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETSTREAM_CACHE", str(tmp_path / "cache"))
    run("off", folder)
    assert not entries(tmp_path / "cache")


def test_a_data_worker_that_is_killed_while_it_writes(folder: Path, tmp_path: Path) -> None:
    done = run(tmp_path / "cache", folder, tmp_path / "mark")
    assert done.stdout == run(None, folder).stdout
    assert len(entries(tmp_path / "cache")) == NUM_FILES


def test_a_full_disk(folder: Path, tmp_path: Path) -> None:
    with mounted_memory(tmp_path / "disk", "64k"):
        done = run(f"{tmp_path / 'disk'}:1G", folder)
    assert done.stdout == run(None, folder).stdout
    assert done.stderr.count("hetstream: cache: nothing is written for 60 s: No space left on device") == 1
