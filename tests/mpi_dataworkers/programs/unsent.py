"""A program that sets up, in many ways, what a process that has only its pickles does not have. Prints its batches."""

from __future__ import annotations

import codecs
import contextvars
import csv
import decimal
import io
import json
import math
import mimetypes
import os
import pathlib
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils.collate import default_collate_fn_map

CONTEXT: contextvars.ContextVar[int] = contextvars.ContextVar("CONTEXT", default=0)
LOCAL = threading.local()
LARGE = ["plain"] * 40_000
KINDS = {"plain": 1}


class Point:
    def __init__(self, x: int) -> None:
        self.x = x


class Each(Dataset[Any]):
    """Calls a function for each index."""

    def __init__(self, item: Callable[[int], Any]) -> None:
        self.item = item

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return self.item(index)


class Forgetful(Each):
    """What it has found out is not in its pickle."""

    def __init__(self) -> None:
        super().__init__(int)
        self.found: list[int] | None = [7, 8, 9]

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"found": None}

    def __getitem__(self, index: int) -> Any:
        return index if self.found is None else index + len(self.found)


class Stubborn(Each):
    """Its pickle is another object."""

    def __init__(self, factor: int) -> None:
        super().__init__(int)
        self.factor = factor

    def __reduce__(self) -> Any:
        return Stubborn, (1,)

    def __getitem__(self, index: int) -> Any:
        return index * self.factor


@contextmanager
def changed(holder: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(holder, name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, before)


@contextmanager
def called(function: Callable[[Any], Any], value: Any, before: Any) -> Iterator[None]:
    function(value)
    try:
        yield
    finally:
        function(before)


@contextmanager
def added(table: dict[Any, Any], key: Any, value: Any) -> Iterator[None]:
    table[key] = value
    try:
        yield
    finally:
        del table[key]


@contextmanager
def warned() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@contextmanager
def once(function: Callable[[], Any]) -> Iterator[None]:
    function()
    yield


def file_mode(index: int) -> int:
    place = pathlib.Path(f"made-{os.getpid()}-{index}")
    place.write_text("x")
    try:
        return place.stat().st_mode & 0o777
    finally:
        place.unlink()


def warning(index: int) -> int:
    warnings.warn("hm", UserWarning, stacklevel=1)
    return index


def deep(depth: int) -> int:
    return 0 if depth == 0 else 1 + deep(depth - 1)


def by_name(index: int) -> int:
    return int(globals()["KI" + "NDS"].get("later", 0)) + index


def of_module(index: int) -> int:
    import made_up  # type: ignore[import-not-found]

    return int(made_up.VALUE) + index


def open_own(file: Any, _: str) -> Image.Image:
    return Image.new("L", (1, 1), file.read(4)[3])


def register_opener() -> None:
    Image.register_open("OWN", open_own, lambda prefix: prefix[:3] == b"OWN")  # type: ignore[arg-type]


def numbers_of(batch: Any) -> Any:
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


def points(batch: list[Point], *, collate_fn_map: Any = None) -> list[int]:
    return [point.x for point in batch]


def as_list(samples: list[Any]) -> list[Any]:
    return samples


def cases() -> Iterator[tuple[str, Any, Any, Any]]:
    """Names, what is set up, the dataset, and how it is collated (None: as torch does)."""
    made_up = types.ModuleType("made_up")
    made_up.VALUE = 5  # type: ignore[attr-defined]
    yield "decimals", changed(decimal.getcontext(), "prec", 50), Each(lambda i: str(decimal.Decimal(i) / 3)), as_list
    yield (
        "denormals",
        called(torch.set_flush_denormal, True, False),
        Each(lambda i: torch.tensor(1e-40) * (i + 1)),
        None,
    )
    yield "umask", called(os.umask, 0o077, 0o022), Each(file_mode), as_list
    yield "collate", added(default_collate_fn_map, Point, points), Each(Point), None
    yield (
        "dialect",
        once(lambda: csv.register_dialect("own", delimiter=";")),
        Each(lambda i: next(csv.reader([f"{i};2"], "own"))),
        as_list,
    )
    yield (
        "field size",
        called(csv.field_size_limit, 10**6, 131072),
        Each(lambda i: len(next(csv.reader(["x" * 200_000]))[0]) + i),
        as_list,
    )
    yield (
        "codec errors",
        once(lambda: codecs.register_error("own", lambda e: ("?", e.end))),
        Each(lambda i: f"é{i}".encode("ascii", "own")),
        as_list,
    )
    yield (
        "image opener",
        once(register_opener),
        Each(lambda i: Image.open(io.BytesIO(b"OWN" + bytes([i]))).getpixel((0, 0))),
        as_list,
    )
    yield (
        "type of file",
        once(lambda: mimetypes.add_type("application/own", ".own")),
        Each(lambda i: mimetypes.guess_type(f"{i}.own")),
        as_list,
    )
    yield (
        "json",
        changed(json.JSONEncoder, "default", lambda _, value: sorted(value)),
        Each(lambda i: json.dumps({i})),
        as_list,
    )
    yield "recursion", called(sys.setrecursionlimit, 20_000, 1000), Each(lambda i: deep(3000) + i), as_list
    yield "standard library", changed(math, "sqrt", lambda value: -value), Each(lambda i: math.sqrt(i)), as_list
    yield (
        "print options",
        once(lambda: np.set_printoptions(precision=2)),
        Each(lambda i: str(np.array([i / 3]))),
        as_list,
    )
    yield "warnings", warned(), Each(warning), as_list
    yield "left out", once(int), Forgetful(), None
    yield "another pickle", once(int), Stubborn(3), None
    yield "a made-up name", added(KINDS, "later", 10), Each(by_name), as_list
    yield (
        "a large global",
        changed(sys.modules[__name__], "LARGE", ["other"] * 40_000),
        Each(lambda i: LARGE[i]),
        as_list,
    )
    yield "a module that is no file", added(sys.modules, "made_up", made_up), Each(of_module), as_list
    yield "a context", once(lambda: CONTEXT.set(4)), Each(lambda i: CONTEXT.get() + i), as_list
    yield (
        "of a thread",
        changed(LOCAL, "value", 3) if hasattr(LOCAL, "value") else once(lambda: setattr(LOCAL, "value", 3)),
        Each(lambda i: getattr(LOCAL, "value", 0) + i),
        as_list,
    )


if __name__ == "__main__":
    for name, set_up, dataset, collate in cases():
        with set_up:
            batches = []
            loader = iter(DataLoader(dataset, batch_size=2, num_workers=1, collate_fn=collate))
            while True:
                try:
                    batches.append(numbers_of(next(loader)))
                except StopIteration:
                    break
                except Exception as error:  # noqa: BLE001, whatever the sample raises
                    batches.append(type(error).__name__)
            del loader
        print(f"{name}: {batches}", flush=True)
