"""A program that changes, between two passes and before the first one, what its samples read. Prints its batches.

What changes is read by few samples, and by late ones: steps that are compared by chance do not show it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from PIL import Image
from torch.utils.data import DataLoader, Dataset

# A module of the program, beside it.
Path("tables.py").write_text("""
import numpy
import torch

class Scale:
    FACTOR = 1

class Options:
    offset = 0

class Moved:
    options = Options()

class Rotate:
    ANGLE = 1

class Registry:
    def __init__(self, *kinds):
        self.kinds = {kind.__name__: kind for kind in kinds}

KINDS = {"scale": Scale}
REGISTRY = Registry(Rotate)
NET = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.constant_(NET.weight, 2.0)
MEAN = torch.zeros(3)
LARGE = {number: 0 for number in range(40_000)}
EARLY = torch.zeros(3)
LABELS = [0] * 40_000
ROWS = [(number, {"name": "plain"}) for number in range(20_000)]
VECTORS = numpy.zeros(18 << 20, numpy.float32)
""")

import tables  # type: ignore[import-not-found]  # noqa: E402

STEPS, BATCH = 100, 2
RARE = 2 * BATCH * STEPS // 3  # the one sample that reads what changes


class Rare(Dataset[Any]):
    def __init__(self, read: Callable[[], float]) -> None:
        self.read = read

    def __len__(self) -> int:
        return STEPS * BATCH

    def __getitem__(self, index: int) -> float:
        return index + (self.read() if index == RARE else 0.0)


class Forgetful(Rare):
    """What it is told later is not in its pickle."""

    def __init__(self) -> None:
        super().__init__(float)
        self.told: dict[int, float] = {}

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"told": {}}

    def __getitem__(self, index: int) -> float:
        return super().__getitem__(index) + (self.told or {}).get(index, 0.0)


class Late(Forgetful):
    """It opens a file late, which is no change, and is told later, which is one."""

    def __init__(self) -> None:
        super().__init__()
        self.told: dict[int, float] | None = None  # type: ignore[assignment]
        self.told_file: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"told_file": None}

    def be_told(self) -> None:
        self.told, self.told_file = {RARE: 7.0}, open(__file__)  # noqa: SIM115


def of_kind() -> float:
    return float(tables.KINDS["scale"].FACTOR)


def of_registry() -> float:
    return float(tables.REGISTRY.kinds["Rotate"].ANGLE)


def of_object() -> float:
    return float(tables.Moved.options.offset)


def of_net() -> float:
    return float(tables.NET.weight.detach().sum())


def of_tensor() -> float:
    return float(tables.MEAN.sum())


def of_table() -> float:
    return float(tables.LARGE[7])


def of_labels() -> float:
    return float(tables.LABELS[30_000])


def of_rows() -> float:
    return float(len(tables.ROWS[15_000][1]["name"]))


def of_vectors() -> float:
    return float(tables.VECTORS[-1])


def of_early() -> float:
    return float(tables.EARLY.sum())


def of_library() -> float:
    return float(math.floor(1.5))


def of_registry_elsewhere() -> float:
    return float("OWN" in Image.OPEN)


def of_made_module() -> float:
    try:
        import made_up  # type: ignore[import-not-found]
    except ImportError:
        return 0.0
    return float(made_up.VALUE)


def register_opener() -> None:
    Image.register_open("OWN", Own)  # type: ignore[arg-type]


def make_module() -> None:
    made = sys.modules["made_up"] = ModuleType("made_up")
    made.VALUE = 5  # type: ignore[attr-defined]


class Own:
    """Opens files of its own."""


def show(name: str, loader: Any) -> None:
    batches = [batch.tolist() for batch in loader]
    print(name, batches[RARE // BATCH], sum(map(sum, batches)), flush=True)


def passes(name: str, dataset: Dataset[Any], change: Callable[[], object], *, anew: bool = False) -> None:
    loader = DataLoader(dataset, batch_size=BATCH, num_workers=2)
    show(name, loader)
    change()
    show(name, DataLoader(dataset, batch_size=BATCH, num_workers=2) if anew else loader)


def put(place: Any, key: Any, value: Any) -> Callable[[], object]:
    return lambda: place.__setitem__(key, value)


if __name__ == "__main__":
    tables.EARLY += 5
    told_before = Forgetful()
    told_before.told[RARE] = 4.0
    passes("left out of the first pickle", told_before, lambda: None)
    forgetful = Forgetful()
    passes("class in a registry", Rare(of_kind), lambda: setattr(tables.Scale, "FACTOR", 3))
    passes("class in a registry's object", Rare(of_registry), lambda: setattr(tables.Rotate, "ANGLE", 3))
    passes("object of a class", Rare(of_object), lambda: setattr(tables.Moved.options, "offset", 4))
    passes("network", Rare(of_net), lambda: tables.NET.weight.data.add_(1))
    passes("tensor", Rare(of_tensor), lambda: tables.MEAN.add_(1))
    passes("tensor, a loader for each pass", Rare(of_tensor), lambda: tables.MEAN.add_(1), anew=True)
    passes("large table", Rare(of_table), put(tables.LARGE, 7, 6))
    passes("late in a list", Rare(of_labels), put(tables.LABELS, 30_000, 6))
    passes("late in a table of tables", Rare(of_rows), put(tables.ROWS[15_000][1], "name", "corrected"))
    passes("late in an array", Rare(of_vectors), put(tables.VECTORS, -1, 6))
    passes("left out", forgetful, put(forgetful.told, RARE, 9.0))
    late = Late()
    passes("opened and told late", late, late.be_told)
    floor = math.floor
    passes("library", Rare(of_library), lambda: setattr(math, "floor", lambda value: 11))
    math.floor = floor  # type: ignore[assignment]
    passes("changed before the first pass", Rare(of_early), lambda: None)
    passes("registered elsewhere", Rare(of_registry_elsewhere), register_opener)
    del Image.OPEN["OWN"]
    passes("a module that was made", Rare(of_made_module), make_module)
