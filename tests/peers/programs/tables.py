"""Hugging Face data sets in torch's DataLoader: tables.py FILE. Writes digests of what each loader gave."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import (
    Dataset,
    Features,
    Image,
    IterableDataset,
    List,
    Value,
    concatenate_datasets,
    interleave_datasets,
    load_from_disk,
)
from datasets.distributed import split_dataset_by_node
from torch.utils.data import DataLoader

RANK, WORLD_SIZE = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
ROWS = 48


def _rows(first: int = 0) -> Iterator[dict[str, Any]]:
    for number in range(first, first + ROWS):
        pixels = np.full((4, 4, 3), number, dtype=np.uint8)
        yield {"n": number, "x": [number / 3.0, 1.0], "words": ["a"] * (number % 3 + 1), "picture": pixels}


def _table(first: int = 0) -> Dataset:
    features = Features({"n": Value("int64"), "x": List(Value("float64")), "words": List(Value("string"))})
    features["picture"] = Image()
    return Dataset.from_list(list(_rows(first)), features=features)


def _listed(samples: list[Any]) -> list[Any]:
    """A collate function for rows of unequal lengths."""
    return samples


def _noisy(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """A transform for set_transform, with torch's and numpy's random numbers."""
    return {"x": [torch.tensor(x) + torch.rand(2) + np.random.rand() for x in batch["x"]]}


def _seeded(worker: int) -> None:
    np.random.seed(100 * RANK + worker)


def numbers() -> Dataset:
    return _table().select_columns(["n", "x"])


def parts() -> list[Dataset]:
    return [numbers(), _table(100).select_columns(["n", "x"])]


def stream() -> IterableDataset:
    return numbers().to_iterable_dataset(num_shards=4).shuffle(seed=1, buffer_size=8).with_format("torch")


def mapped() -> Dataset:
    table = numbers().map(lambda row: {"y": row["n"] ** 2}).filter(lambda row: row["n"] % 3 != 1)
    return table.rename_column("n", "m").with_format("torch")


def on_disk() -> Dataset:
    """A file of which each process maps the memory, with indices that shuffle it."""
    directory = tempfile.mkdtemp()
    numbers().save_to_disk(directory)
    return load_from_disk(directory).shuffle(seed=3).with_format("numpy")


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "python": lambda: DataLoader(numbers().select_columns("n"), 4, num_workers=2),
    "torch": lambda: DataLoader(numbers().with_format("torch"), 4, num_workers=2),
    "torch dtype": lambda: DataLoader(numbers().with_format("torch", dtype=torch.float32), 5, num_workers=2),
    "a column": lambda: DataLoader(numbers().with_format("torch", columns=["x"])["x"], 4, num_workers=2),
    "shuffled": lambda: DataLoader(numbers().with_format("torch"), 4, shuffle=True, drop_last=True, num_workers=2),
    "rows": lambda: DataLoader(_table(), 4, num_workers=2, collate_fn=_listed),
    "pictures": lambda: DataLoader(_table().with_format("torch").select_columns(["picture"]), 4, num_workers=2),
    "mapped": lambda: DataLoader(mapped(), 3, num_workers=2),
    "on disk": lambda: DataLoader(on_disk(), 4, num_workers=2),
    "joined": lambda: DataLoader(concatenate_datasets(parts()).with_format("torch"), 8, num_workers=2),
    "interleaved": lambda: DataLoader(
        interleave_datasets(parts(), [0.3, 0.7], seed=5).with_format("torch"), 4, num_workers=2
    ),
    "of a rank": lambda: DataLoader(
        split_dataset_by_node(numbers().with_format("torch"), RANK, WORLD_SIZE), 4, num_workers=2
    ),
    "arrow": lambda: DataLoader(numbers().with_format("arrow"), batch_size=None, num_workers=2),
    "pandas": lambda: DataLoader(numbers().with_format("pandas"), batch_size=None, num_workers=2),
    # Random numbers: two runs with hetstream are compared with each other, as they are not torch's.
    "noisy": lambda: DataLoader(numbers().with_transform(_noisy), 4, num_workers=2, worker_init_fn=_seeded),
    # Streams stay local.
    "stream": lambda: DataLoader(stream(), 4, num_workers=2),
}


def _plain(value: Any) -> Any:
    """What is compared of a batch: types, dtypes, shapes, strides and bytes."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.stride(), value.contiguous().numpy().tobytes()
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, dict):
        return [type(value).__name__, *((key, _plain(item)) for key, item in value.items())]
    if isinstance(value, list | tuple):
        return [type(value).__name__, *map(_plain, value)]
    if hasattr(value, "to_pydict"):
        return ["arrow", value.schema.to_string(), value.to_pydict()]
    if hasattr(value, "to_dict"):
        return ["pandas", str(value.dtypes.to_dict()), str(value.to_dict())]
    if hasattr(value, "tobytes"):
        return ["picture", value.size, value.mode, value.tobytes()]
    return type(value).__name__, value


def main() -> None:
    torch.manual_seed(0)
    found = {}
    for name, make in LOADERS.items():
        loader = make()
        passes = [[hashlib.sha256(pickle.dumps(_plain(batch))).hexdigest() for batch in loader] for _ in range(2)]
        found[name] = passes
    Path(f"{sys.argv[1]}.{RANK}").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
