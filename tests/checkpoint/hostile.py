"""Checkpoint directories that somebody has made to harm: one valid directory, changed in seeded ways.

What is changed fits its checksums again for the most part, as a careful stranger would see to it: so the reader gets
past the first look, to structure, shapes and names.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import stat
import struct
from collections import deque, namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hetstream.base import typed_json
from hetstream.checkpoint.convert.weights import write_state
from hetstream.checkpoint.disk.commit import commit
from hetstream.checkpoint.disk.directory import CheckpointDirectory
from hetstream.checkpoint.disk.ownership import JobIdentity
from hetstream.checkpoint.disk.rank_file import PartSpec
from hetstream.checkpoint.disk.safetensors import STRUCTURE
from hetstream.checkpoint.errors import Damaged
from hetstream.checkpoint.record.layout import Generation, checksum

STEPS = (Generation(1, 10), Generation(1, 20))
Point = namedtuple("Point", "x y")
Chance = random.Random
_STRANGER = 54322
JsonTree = Any


def state_of(step: int) -> dict[str, Any]:
    """A small state with one value of each kind that a structure knows."""
    torch.manual_seed(step)
    weight = torch.randn(8, 4)
    return {
        "model": {"weight": weight, "tied": weight, "part": weight[1:3], "empty": torch.empty(0, 3)},
        "optimizer": {"state": {0: {"step": torch.tensor(float(step)), "avg": torch.randn(8, 4)}}, "lr": 0.1},
        "loader": {"epoch": 1, "step": step, "shards": "null", "pipeline": {"seed": "7"}, "quarantined": [3, 5]},
        "extra": {
            "point": Point(1, 2.0),
            "numbers": [10**30, float("inf"), 1 + 2j, range(5), slice(1, 2), {1, 2}, deque([1], 3)],
            "array": np.arange(4.0),
            "large": np.arange(2000.0),
            "bytes": b"x" * 5000,
            "sparse": torch.eye(3).to_sparse(),
            "words": (torch.float16, torch.Size([2]), torch.device("cpu"), torch.strided),
        },
    }


def write_valid(directory: Path, num_ranks: int = 1) -> None:
    """A directory of two good checkpoints, as a job leaves it."""
    directory.mkdir(mode=0o700, exist_ok=True)
    place = CheckpointDirectory(directory)
    place.acquire(JobIdentity("local", "here", 1))
    for generation in STEPS:
        for rank in range(num_ranks):
            part = PartSpec(generation, rank, num_ranks, metrics={"loss": 0.5})
            write_state(directory, part, state_of(generation.step), shared=("model",))
        assert commit(directory, generation, num_ranks) == ()
    place.release()


def change(directory: Path, home: Path, chance: Chance) -> list[str]:
    """Change a directory in one to three ways; their names.

    Args:
        directory: with valid checkpoints.
        home: what links lead to.
        chance: decides all.
    """
    done = []
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        act = chance.choice(_CHANGES)
        try:
            act(directory, home, chance)
        except (
            OSError,
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
            StopIteration,
            struct.error,
            Damaged,
        ) as error:
            # A change before has taken away what this one changes.
            done.append(f"not {act.__name__}: {error}")
        else:
            done.append(act.__name__)
    return done


def _files(directory: Path) -> list[Path]:
    """Regular files, but those of holes."""
    found = ((path, path.lstat()) for path in directory.rglob("*"))
    return sorted(path for path, status in found if stat.S_ISREG(status.st_mode) and status.st_size < 1 << 24)


def _read(path: Path) -> bytes:
    """What an earlier change has not made a pipe, a device or a terabyte of holes."""
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode) or status.st_size >= 1 << 24:
        raise OSError(f"{path} is no file to change")
    return path.read_bytes()


def _all(directory: Path) -> list[Path]:
    """All that is there, and what could be."""
    step = directory / chosen_step(directory)
    names = ("handover.json", "replicas", "memory", "latest", ".commit", ".lock")
    could_be = [directory / name for name in names] + [step / name for name in ("damaged.txt", ".in-use", "more")]
    return sorted({*directory.rglob("*"), *could_be})


def chosen_step(directory: Path) -> str:
    """Name of the newest checkpoint that is there, or would be."""
    found = [one.directory_name for one in reversed(STEPS) if (directory / one.directory_name).is_dir()]
    return found[0] if found else STEPS[-1].directory_name


# What a path can become


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _socket(path: Path, _home: Path) -> None:
    folder = os.open(path.parent, os.O_PATH)
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(f"/proc/self/fd/{folder}/{path.name}")
    os.close(folder)


def _holes(path: Path, _home: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def _device(path: Path, _home: Path) -> None:
    os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 5))  # /dev/zero


def _of_another(path: Path, _home: Path) -> None:
    if os.geteuid() == 0:
        os.lchown(path, _STRANGER, _STRANGER)


def _with_mode(mode: int, *, directory: bool = False) -> Callable[[Path, Path], None]:
    def make(path: Path, _home: Path) -> None:
        path.mkdir() if directory else path.write_bytes(b"{}")
        path.chmod(mode)

    return make


def _and(*acts: Callable[[Path, Path], object]) -> Callable[[Path, Path], None]:
    def make(path: Path, home: Path) -> None:
        for act in acts:
            act(path, home)

    return make


_KINDS: dict[str, Callable[[Path, Path], object]] = {
    "pipe": lambda path, _: os.mkfifo(path, 0o600),
    "socket": _socket,
    "device": _device,
    "link-to-device": lambda path, _: path.symlink_to("/dev/zero"),
    "link-to-file": lambda path, home: path.symlink_to(home / "profile"),
    "link-to-directory": lambda path, home: path.symlink_to(home),
    "link-to-checkpoint": lambda path, home: path.symlink_to(home / STEPS[0].directory_name),
    "link-to-itself": lambda path, _: path.symlink_to(path.name),
    "link-to-nothing": lambda path, _: path.symlink_to("nothing"),
    "hard-link": lambda path, home: os.link(home / "profile", path),
    "directory": lambda path, _: path.mkdir(),
    "empty": lambda path, _: path.touch(0o600),
    "holes": _holes,
    "zeros": lambda path, _: path.write_bytes(bytes(100_000)),
    "nothing": lambda _path, _home: None,
}
# Seeds choose among these: with others each of them would be another directory.
_OF_SEEDS = tuple(_KINDS)
_KINDS |= {
    "link-of-another": _and(_KINDS["link-to-file"], _of_another),
    "link-of-another-to-directory": _and(_KINDS["link-to-directory"], _of_another),
    "link-of-another-to-nothing": _and(_KINDS["link-to-nothing"], _of_another),
    "hard-link-to-checkpoint": lambda path, home: os.link(next((home / STEPS[0].directory_name).glob("rank*")), path),
    "hard-link-to-lock": lambda path, home: os.link(home / ".lock", path),
    "file-of-another": _and(_with_mode(0o644), _of_another),
    "directory-of-another": _and(_with_mode(0o755, directory=True), _of_another),
    "pipe-of-another": _and(_KINDS["pipe"], _of_another),
    "group-writable": _with_mode(0o664),
    "group-writable-directory": _with_mode(0o775, directory=True),
    "sticky-directory": _with_mode(0o1777, directory=True),
    "set-group-directory": _with_mode(0o2775, directory=True),
    "unreadable": _with_mode(0),
}
KINDS = tuple(_KINDS)


def become(path: Path, kind: str, home: Path) -> None:
    """Let a path be something else."""
    _remove(path)
    path.parent.mkdir(exist_ok=True)
    _KINDS[kind](path, home)


def _another_kind(directory: Path, home: Path, chance: Chance) -> None:
    become(chance.choice(_all(directory)), chance.choice(_OF_SEEDS), home)


# Bytes and names


def _bytes(directory: Path, _home: Path, chance: Chance) -> None:
    path = chance.choice(_files(directory))
    data = bytearray(path.read_bytes())
    for _ in range(chance.randrange(1, 5)):
        at = chance.randrange(len(data) + 1)
        data[at : at + chance.randrange(9)] = chance.randbytes(chance.randrange(9)) * chance.choice((1, 1, 1000))
    path.write_bytes(data)


def _cut(directory: Path, _home: Path, chance: Chance) -> None:
    path = chance.choice(_files(directory))
    os.truncate(path, chance.randrange(path.stat().st_size + 1))


def _swap(directory: Path, _home: Path, chance: Chance) -> None:
    one, other = chance.sample(_files(directory), 2)
    data = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(data)


_NAMES = (
    b"step-99999999999999999999.1",
    b"step-0000000030.99999999999999999999999",
    b"step-0000000030.9223372036854775807",
    b"step-9223372036854775807.9223372036854775807",
    b"step-0000000030.1.deleted",
    b"step-0000000030.1.partial",
    b"step-0000000030.0",
    b"step-0000000030.-1",
    b"step-\xd9\xa1\xd9\xa2.1",  # digits of another script
    b"step-0000000030.1\n",
    b"\x1b]0;owned\x07",
    b"a\nhetstream ckpt: all is well",
    b"\xff\xfe",
    b".owner.json.x-1.tmp",
    b"rank-00000-of-9999999.json",
    b"rank-99999-of-100000.json",
    b"rank-00000-of-00002.json",
    b"rank-00000-of-00001.pt",
    b"latest",
)


def _name(directory: Path, _home: Path, chance: Chance) -> None:
    path = chance.choice([one for one in _all(directory) if os.path.lexists(one)])
    new = os.path.join(os.fsencode(path.parent), chance.choice(_NAMES))
    if not os.path.isdir(new):
        os.rename(os.fsencode(path), new)


def _copy(directory: Path, _home: Path, chance: Chance) -> None:
    source = directory / chosen_step(directory)
    shutil.copytree(
        os.fsencode(source), os.path.join(os.fsencode(directory), chance.choice(_NAMES[:10])), symlinks=True
    )


def _mode(directory: Path, _home: Path, chance: Chance) -> None:
    path = chance.choice([one for one in _all(directory) if os.path.lexists(one) and not one.is_symlink()])
    if os.geteuid() == 0 and chance.random() < 0.5:
        os.lchown(path, _STRANGER, _STRANGER)
    else:
        path.chmod(chance.choice((0, 0o777, 0o4755, 0o020)))


# Values, with checksums that fit


def _deep(levels: int, *, brace: bool) -> str:
    return '{"a":' * levels + "1" + "}" * levels if brace else "[" * levels + "]" * levels


_EVIL: tuple[JsonTree, ...] = (
    *(None, True, -1, 0, 1, 255, 2**31, 2**53, 2**63 - 1, 2**63, 2**64, 10**30, -(10**30), 0.5, 1e308, float("nan")),
    *("", "0", "\x1b[2J\x1b]0;owned\x07", "a\nhetstream ckpt: all is well", "\ud800", "\0", "x" * 100_000, "../../x"),
    *([], {}, [[]] * 1000, [2**62] * 64, [0] * 100_000, json.loads(_deep(150, brace=False))),
    *(json.loads(_deep(190, brace=True)), json.loads(_deep(500, brace=False)), {str(n): n for n in range(2000)}),
    *({"$tensor": one} for one in (-1, 10**9, 0, "0", True, None, 2**70)),
    {"$range": [0, 2**62, 1]},
    {"$range": [0, 2**62, 0]},
    {"$int": "0x" + "f" * 200_000},
    {"$int": "ten"},
    {"$float": "nan" * 1000},
    {"$str": "////"},
    {"$bytes": "no base64"},
    {"$tuple": {"$tuple": []}},
    {"$set": [[], {}]},
    {"$dict": [[[], 1]]},
    {"$counter": [["a", 2**70]]},
    {"$default": ["eval", []]},
    {"$deque": [2**62, [1]]},
    {"$slice": [2**70, None, "x"]},
    {"$complex": [1, {"$float": "x"}]},
    {"$named": ["os:stat_result", {"x" * 1000: 1}]},
    {"$named": ["x:y.class", {"a b": 1, "def": 2}]},
    {"$data": ["subprocess:Popen", {"args": "touch owned"}]},
    {"$data": ["hetstream.checkpoint.flash.options:CheckpointOptions", {"num_slots": 2}]},
    {"$array": ["<f8", [2**40], ""]},
    {"$array": ["<f8", [2**62, 0, 2**62], ""]},
    {"$array": ["|O", [1], "AAAAAAAAAAA="]},
    {"$array": ["|V1000000000000", [0], ""]},
    {"$array": [[["a", "<f8", [1 << 40]]], [0], ""]},
    {"$scalar": ["|S1000000000", ""]},
    {"$dtype": "__class__"},
    {"$dtype": "float\x1b"},
    {"$layout": "load"},
    {"$device": "cuda:99999999999"},
    {"$device": "\x1b"},
    {"$size": [2**62] * 40},
    {"$memory_format": "save"},
    {"$sparse_coo": [[{"$tensor": 0}, {"$tensor": 1}], [2**62, 2**62], False]},
    {"$sparse_coo": [[1, 2], [1], True]},
    {"$node": ["builtins:type", "x", []]},
    {"$node": ["collections:defaultdict", ["x", ["a"]], [1]]},
    {"$node": ["collections:deque", 2**62, [1]]},
    {"$pickle": {"$bytes": "Y29zCnN5c3RlbQooUyd0b3VjaCBvd25lZCcKdFIu"}},
    {"$pickle": {"$tensor": 0}},
    {"$unknown": 1},
    {"$ordered": [1], "metadata": {"$range": [0, 9, 1]}},
)


def changed_json(tree: JsonTree, chance: Chance) -> JsonTree:
    """JSON with one to three of its values replaced, repeated, removed or exchanged."""
    root = [json.loads(json.dumps(tree))]
    for _ in range(chance.choice((1, 1, 2, 3))):
        places = [*_places(root)]
        holder, key = chance.choice(places)
        value = holder[key]
        kind = chance.randrange(10)
        if kind == 0 and holder is not root:
            del holder[key]
        elif kind == 1:
            other, its_key = chance.choice(places)
            holder[key] = json.loads(json.dumps(other[its_key]))
        elif kind == 2 and isinstance(value, list):
            holder[key] = value * chance.choice((0, 2, 1000))
        elif kind == 3 and isinstance(value, dict):
            value[chance.choice(("\x1b[2J", "__class__", "$tensor", "a.b", "", "x" * 10_000))] = chance.choice(_EVIL)
        elif kind == 4 and isinstance(value, int | float):
            holder[key] = value * chance.choice((-1, 2, 1000, 10**12)) + chance.choice((-1, 0, 1))
        else:
            holder[key] = json.loads(json.dumps(chance.choice(_EVIL)))
    return root[0]


def _places(root: JsonTree) -> Iterator[tuple[Any, Any]]:
    stack = [root]
    while stack:
        here = stack.pop()
        for key in here if isinstance(here, dict) else range(len(here)):
            yield here, key
            if isinstance(here[key], dict | list):
                stack.append(here[key])


def _own_json(directory: Path, _home: Path, chance: Chance) -> None:
    """What the directory says of its owner, or of a hand-over."""
    path = directory / chance.choice(("owner.json", "history.jsonl", "handover.json"))
    source = path if os.path.lexists(path) else directory / "owner.json"
    path.write_text(
        "\n".join(json.dumps(changed_json(json.loads(line), chance)) for line in _read(source).splitlines())
    )


def describe(step: Path, chance: Chance | None = None, **fields: Any) -> None:
    """Let the manifest of rank 0 fit its file and its own checksum, with other fields."""
    path = next(step.glob("rank-00000-of-*.json"))
    manifest = {**json.loads(_read(path)), **fields}
    if chance:
        manifest = changed_json(manifest, chance)
    if isinstance(manifest, dict):
        manifest["itself"] = ""
        try:
            # As the reader writes it down to compare: fields in its order, floats in its form.
            from hetstream.checkpoint.disk.rank_file import Manifest

            known = typed_json.decode(json.dumps(manifest), Manifest)
            manifest["itself"] = known._checksum()
        except Exception:  # noqa: BLE001, a manifest that the reader refuses at once
            manifest["itself"] = "0" * 16
    path.write_text(json.dumps(manifest))


def _manifest(directory: Path, _home: Path, chance: Chance) -> None:
    describe(directory / chosen_step(directory), chance)


def put_file(step: Path, data: bytes) -> None:
    """Replace the file of rank 0, and let its manifest fit."""
    path = next(one for one in step.glob("rank-00000-of-*") if one.suffix != ".json")
    path.write_bytes(data)
    sums = [f"{checksum(data[at : at + (64 << 20)]):016x}" for at in range(0, len(data), 64 << 20)]
    describe(step, num_bytes=len(data), checksums=sums, chunk_bytes=64 << 20)


def _structure(directory: Path, _home: Path, chance: Chance) -> None:
    """What the file of rank 0 says of its tensors, or of the state around them."""
    step = directory / chosen_step(directory)
    path = next(one for one in step.glob("rank-00000-of-*") if one.suffix != ".json")
    data = _read(path)
    put_file(step, _header_with(data, chance))


def _header_with(data: bytes, chance: Chance) -> bytes:
    (num_header,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + num_header])
    if chance.random() < 0.75:
        structure = changed_json(json.loads(header["__metadata__"][STRUCTURE]), chance)
        header["__metadata__"][STRUCTURE] = json.dumps(structure)
    else:
        header = changed_json(header, chance)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data[8 + num_header :]


_CHANGES: tuple[Callable[[Path, Path, Chance], None], ...] = (
    *(_another_kind, _another_kind, _another_kind),
    *(_bytes, _cut, _swap, _name, _copy, _mode, _own_json, _manifest, _manifest),
    *(_structure, _structure, _structure, _structure, _structure),
)
