"""Directories that were made to fill memory, to take time, or to reach elsewhere: each command ends soon, takes little,
says in a line what is wrong, and touches nothing else."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hetstream.checkpoint.disk.rank_file import MAX_RANKS, bounded, bytes_on_disk, read_manifest
from hetstream.checkpoint.disk.safetensors import read_header
from hetstream.checkpoint.errors import DamagedCheckpoint
from hetstream.checkpoint.record.layout import Generation, checksum
from hetstream.slurm_plugin.cli import main
from tests.checkpoint.parts import write_checkpoint
from tests.checkpoint.programs.commands import Result

ROOT = Path(__file__).parents[2]
STEP = Generation(1, 10)
NAME = STEP.directory_name
FILE, MANIFEST = "rank-00000-of-00001.safetensors", "rank-00000-of-00001.json"
# Of a process that has the commands loaded already.
MAX_MORE_BYTES = 700 << 20
MAX_TIME_S = 60.0


def grow(path: Path) -> None:
    """Make a file a terabyte of holes."""
    with path.open("ab") as file:
        file.truncate(1 << 40)


def replace_by_pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def replace_by_device(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


def describe(directory: Path, **changes: object) -> None:
    """Write a manifest that fits its own checksum, of another content and under the name that goes with it."""
    path = directory / NAME / MANIFEST
    fields = {**json.loads(path.read_text()), **changes, "itself": ""}
    fields["itself"] = f"{checksum(json.dumps(fields, separators=(',', ':')).encode()):016x}"
    path.unlink()
    world_size = fields["world_size"]
    path.with_name(f"rank-00000-of-{world_size:05}.json").write_text(json.dumps(fields))
    (directory / NAME / FILE).rename(directory / NAME / f"rank-00000-of-{world_size:05}.safetensors")


def announce(directory: Path, num_ranks: int) -> None:
    partial = directory / "step-0000000020.1.partial"
    partial.mkdir()
    (partial / f"rank-00000-of-{num_ranks:05}.json").write_text("{}")


def put_header(directory: Path, header: bytes) -> None:
    """Replace the rank's file by one with another header, and its manifest by one that fits it."""
    data = len(header).to_bytes(8, "little") + header
    (directory / NAME / FILE).write_bytes(data)
    describe(directory, num_bytes=len(data), checksums=[f"{checksum(data):016x}"], chunk_bytes=64 << 20)


def damage(directory: Path, seed: int) -> None:
    """Change, cut or repeat bytes of every small file."""
    chance = random.Random(seed)
    for path in sorted(one for one in directory.rglob("*") if one.is_file() and not one.is_symlink()):
        data = bytearray(path.read_bytes())
        for _ in range(chance.randrange(4)):
            at = chance.randrange(len(data) + 1)
            data[at : at + chance.randrange(9)] = chance.randbytes(chance.randrange(9)) * chance.choice((1, 1, 1000))
        path.write_bytes(data)


CORPUS: dict[str, Callable[[Path], object]] = {
    **{f"pipe-{name}": lambda d, name=name: replace_by_pipe(d / name) for name in ("owner.json", "history.jsonl")},
    **{f"pipe-in-{name}": lambda d, name=name: replace_by_pipe(d / NAME / name) for name in (FILE, MANIFEST)},
    **{f"device-in-{name}": lambda d, name=name: replace_by_device(d / NAME / name) for name in (FILE, MANIFEST)},
    "pipe-damaged": lambda d: replace_by_pipe(d / NAME / "damaged.txt"),
    "pipe-lock": lambda d: replace_by_pipe(d / NAME / ".in-use"),
    "pipe-commit": lambda d: replace_by_pipe(d / ".commit"),
    "device-damaged": lambda d: replace_by_device(d / NAME / "damaged.txt"),
    "huge-damaged": lambda d: grow(d / NAME / "damaged.txt"),
    "huge-manifest": lambda d: grow(d / NAME / MANIFEST),
    "huge-file": lambda d: grow(d / NAME / FILE),
    "huge-owner": lambda d: grow(d / "owner.json"),
    "huge-history": lambda d: grow(d / "history.jsonl"),
    "many-ranks": lambda d: describe(d, world_size=MAX_RANKS),
    "too-many-ranks": lambda d: describe(d, world_size=10**12),
    "many-ranks-announced": lambda d: announce(d, MAX_RANKS),
    "too-many-ranks-announced": lambda d: announce(d, 10**15),
    "nested-manifest": lambda d: (d / NAME / MANIFEST).write_text("[" * 1_000_000),
    "nested-owner": lambda d: (d / "owner.json").write_text("[" * 60_000),
    "nested-header": lambda d: put_header(d, b"[" * 30_000_000),
    "header-of-many-values": lambda d: put_header(d, b'{"a":[' + b"{}," * 10_000_000 + b"{}]}"),
    "header-of-many-names": lambda d: put_header(
        d, b"{" + b",".join(b'"%d":{}' % number for number in range(1_000_000)) + b"}"
    ),
    "header-of-many-sizes": lambda d: put_header(
        d, b'{"a":{"dtype":"U8","data_offsets":[0,0],"shape":[' + b"1," * 10_000_000 + b"0]}}"
    ),
    "escapes": lambda d: (d / NAME / "damaged.txt").write_text("\x1b]0;owned\x07\x1b[2J"),
    **{f"random-{seed}": lambda d, seed=seed: damage(d, seed) for seed in range(12)},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory for each case, and a home that none of them may touch."""
    place = tmp_path_factory.mktemp("corpus")
    (place / "home").mkdir()
    (place / "home" / "profile").write_text("mine")
    for case, change in {**CORPUS, "whole": lambda _: None}.items():
        directory = place / case
        directory.mkdir(mode=0o700)
        write_checkpoint(directory, STEP)
        change(directory)
    return place


@pytest.fixture(scope="module")
def results(place: Path) -> dict[str, Result]:
    """What the commands came to in each directory; one process after the other."""
    directories = [str(place / case) for case in (*CORPUS, "whole")]
    argv = [sys.executable, "-m", "tests.checkpoint.programs.commands", str(place / "home"), *directories]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=280, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = (Result(*json.loads(line)) for line in done.stdout.splitlines())
    return {Path(one.directory).name: one for one in found}


@pytest.mark.slow
@pytest.mark.parametrize("case", CORPUS)
def test_no_directory_fills_memory_hangs_a_command_or_reaches_elsewhere(
    place: Path, results: dict[str, Result], case: str
) -> None:
    text = (place / f"{case}.said").read_text()
    result = results[case]
    assert result.exit_code == 0, text[-3000:]
    assert "Traceback" not in text
    assert "\x1b" not in text
    assert sum(took_s for _, _, took_s, _, _ in result.acts) < MAX_TIME_S
    assert result.num_bytes < MAX_MORE_BYTES
    assert result.touched == []


@pytest.mark.slow
def test_a_directory_without_damage_is_good(place: Path, results: dict[str, Result]) -> None:
    assert results["whole"].exit_code == 0
    assert "good" in (place / "whole.said").read_text()


def test_a_manifest_of_too_many_ranks_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, STEP)
    describe(tmp_path, world_size=MAX_RANKS)
    path = tmp_path / NAME / f"rank-00000-of-{MAX_RANKS:05}.json"
    assert read_manifest(path.read_bytes(), "it").world_size == MAX_RANKS
    with pytest.raises(DamagedCheckpoint, match="world_size"):
        read_manifest(re.sub(rb"1000000", b"1000001", path.read_bytes()), "it")


def test_memory_in_proportion_to_what_lies_on_disk(tmp_path: Path) -> None:
    file = tmp_path / "file"
    grow(file)
    (tmp_path / "link").symlink_to("/dev/zero")
    assert bytes_on_disk(tmp_path) == bytes_on_disk(file) == 0
    with pytest.raises(DamagedCheckpoint, match="bytes of memory to read: it is damaged, or a trap"), bounded(file):
        bytearray(1 << 40)


@pytest.mark.parametrize("header", [b"[]", b"{", b'{"a":1}', b'{"__metadata__":{"a":1}}', b'{"a":{"dtype":"U8"}}'])
def test_a_header_of_another_form_is_refused(header: bytes) -> None:
    data = memoryview(len(header).to_bytes(8, "little") + header)
    with pytest.raises(DamagedCheckpoint, match="cannot be read"):
        read_header(data, "it")


@pytest.mark.parametrize("kind", ["pipe", "device", "folder-of-pipes"])
def test_convert_waits_for_no_pipe_and_reads_no_device(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "source"
    if kind == "pipe":
        os.mkfifo(source)
    elif kind == "device":
        source = Path("/dev/zero")
    else:
        source.mkdir()
        write_checkpoint(source, STEP)
        replace_by_pipe(source / NAME / FILE)
    assert main(["ckpt", "convert", str(source), str(tmp_path / "out.pt"), "--to", "torch", "--dry-run"]) == 1
    assert re.search("regular file|has no good checkpoint", capsys.readouterr().err)
