"""Files and directories of other formats that somebody has made to harm who converts them."""

from __future__ import annotations

import os
import pickle
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from tests.checkpoint.hostile import Chance

NAME = "step-0000000010.1"


def write_torch(path: Path) -> None:
    """A good one, as the others here."""
    torch.save({"model": {"weight": torch.ones(8, 4)}, "names": [1, "x"]}, path)


def write_dcp(path: Path) -> None:
    dcp.save({"model": {"weight": torch.ones(8, 4)}, "names": [1, "x"]}, checkpoint_id=path)


def write_safetensors(path: Path) -> None:
    header = b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))


GOOD: dict[str, Callable[[Path], None]] = {
    "torch": write_torch,
    "dcp": write_dcp,
    "safetensors": write_safetensors,
}


def damage(path: Path, chance: Chance) -> None:
    """Change some bytes of a file, or of one in a directory."""
    file = chance.choice(sorted(path.iterdir())) if path.is_dir() else path
    data = bytearray(file.read_bytes())
    for _ in range(chance.choice((1, 1, 2, 8))):
        at = chance.randrange(len(data))
        kind = chance.randrange(4)
        if kind == 0:
            data[at] ^= 1 << chance.randrange(8)
        elif kind == 1:
            data[at : at + 8] = chance.choice((b"\xff" * 8, bytes(8), struct.pack("<Q", 1 << 40)))
        elif kind == 2:
            del data[at : at + chance.randrange(1, 64)]
        else:
            data[at:at] = data[max(0, at - 64) : at] * chance.choice((1, 100))
        data = data or bytearray(b"\0")
    file.write_bytes(data)


# Zip archives


def _zip(path: Path, pickled: bytes, storage: bytes = bytes(64)) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/byteorder", b"little")
        archive.writestr("archive/data/0", storage)
        archive.writestr("archive/version", b"3\n")


def _announced(path: Path) -> None:
    """Members that are said to be 8 GB when they are unpacked."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in ("data.pkl", "data/0", "version"):
            archive.writestr(f"archive/{name}", bytes(1 << 20))
    data = path.read_bytes()
    path.write_bytes(data.replace(struct.pack("<I", 1 << 20), struct.pack("<I", 0xFFFFFFF0)))


def _compressed(path: Path) -> None:
    """A member of 64 MB in some kilobytes."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in ("data.pkl", "version", "byteorder"):
            archive.writestr(f"archive/{name}", bytes(64 << 20))


def _nested_zip(path: Path) -> None:
    inner = path.with_name(path.name + ".inner")
    write_torch(inner)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(inner, "archive/data.pkl")
        archive.writestr("archive/version", b"3\n")
    inner.unlink()


def _tensor(shape: tuple[int, ...], strides: tuple[int, ...], num_elements: int = 16) -> bytes:
    """A pickle of one tensor over a storage of 16 floats."""
    numbers = {"shape": shape, "strides": strides}
    parts = {name: b"(" + b"".join(pickle.dumps(one, 2)[2:-1] for one in ones) + b"t" for name, ones in numbers.items()}
    size = pickle.dumps(num_elements, 2)[2:-1]
    return (
        b"\x80\x02}X\x01\x00\x00\x00actorch._utils\n_rebuild_tensor_v2\n(("
        b"X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpu" + size + b"tQK\x00"
        + parts["shape"]
        + parts["strides"]
        + b"\x89ccollections\nOrderedDict\n)RtRs."
    )  # fmt: skip


# DCP


def _metadata(path: Path, change: Callable[[Any], None]) -> None:
    write_dcp(path)
    found = pickle.loads((path / ".metadata").read_bytes())
    change(found)
    (path / ".metadata").write_bytes(pickle.dumps(found))


def _grown(found: Any) -> None:
    one = next(one for one in found.state_dict_metadata.values() if hasattr(one, "size"))
    one.size = torch.Size([1 << 40, 4])


def _long(found: Any) -> None:
    for one in found.storage_data.values():
        one.length = 1 << 60


def _far(found: Any) -> None:
    for one in found.storage_data.values():
        one.offset = 1 << 60


def _deep_path(found: Any) -> None:
    found.planner_data = dict.fromkeys(found.state_dict_metadata, ("a",) * 10000)


def _high_place(found: Any) -> None:
    found.planner_data = dict.fromkeys(found.state_dict_metadata, ("a", 1 << 40))


def _elsewhere(name: str) -> Callable[[Any], None]:
    def change(found: Any) -> None:
        for one in found.storage_data.values():
            one.relative_path = name

    return change


def _file_becomes(kind: str) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        write_dcp(path)
        file = next(path.glob("*.distcp"))
        file.unlink()
        if kind == "pipe":
            os.mkfifo(file)
        elif kind == "link":
            file.symlink_to("/dev/zero")
        else:
            with file.open("wb") as opened:
                opened.truncate(1 << 40)

    return make


MADE: dict[str, Callable[[Path], None]] = {
    "zip-of-announced-sizes": _announced,
    "zip-of-zeros": _compressed,
    "zip-in-zip": _nested_zip,
    "zip-of-numpy": lambda path: _zip(path, b"\x93NUMPY"),
    "tensor-of-terabytes": lambda path: _zip(path, _tensor((1 << 40,), (1,))),
    "tensor-of-one-element-repeated": lambda path: _zip(path, _tensor((1 << 40,), (0,))),
    "storage-of-terabytes": lambda path: _zip(path, _tensor((4,), (1,), 1 << 40)),
    "pickle-of-a-high-memo": lambda path: _zip(path, b"\x80\x02}r\xff\xff\xff\x7f."),
    "pickle-of-a-long-text": lambda path: _zip(path, b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x0fx."),
    "pickle-of-a-long-number": lambda path: _zip(path, b"\x80\x02\x8b\xff\xff\xff\x7fx."),
    "pickle-of-many-levels": lambda path: _zip(path, b"\x80\x02" + b"]" * 500_000 + b"a" * 499_999 + b"."),
    "dcp-of-terabytes": lambda path: _metadata(path, _grown),
    "dcp-of-a-long-piece": lambda path: _metadata(path, _long),
    "dcp-of-a-far-piece": lambda path: _metadata(path, _far),
    "dcp-of-a-deep-path": lambda path: _metadata(path, _deep_path),
    "dcp-of-a-high-place": lambda path: _metadata(path, _high_place),
    "dcp-above": lambda path: _metadata(path, _elsewhere("../home/profile")),
    "dcp-far-above": lambda path: _metadata(path, _elsewhere("../" * 100_000 + "etc/passwd")),
    "dcp-pipe": _file_becomes("pipe"),
    "dcp-link": _file_becomes("link"),
    "dcp-holes": _file_becomes("holes"),
}


def write_damaged(path: Path, good: Path, chance: Chance) -> None:
    """A copy of a good source, damaged."""
    if good.is_dir():
        shutil.copytree(good, path)
    else:
        shutil.copyfile(good, path)
    damage(path, chance)
