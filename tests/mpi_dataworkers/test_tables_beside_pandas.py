"""The same files read by pandas and by a loader: each value, each gap and each list, and what torchrec gets of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from hetstream import DataLoader
from hetstream.mpi_dataworkers.features.batches import Jagged, JaggedBatch, Nullable, collate_rows
from hetstream.mpi_dataworkers.features.graph import FeatureGraph, jagged
from hetstream.mpi_dataworkers.features.operators import FirstX
from hetstream.mpi_dataworkers.features.transform import FeatureTransform
from hetstream.mpi_dataworkers.sources.tables import CsvDataset, ParquetDataset

pd = pytest.importorskip("pandas")
ROWS, BATCH_SIZE = 1000, 64
DENSE = {"row": "int64", "price": "float32?", "count": "int32?", "share": "float64"}
LISTS = {"clicks": "list<int64>", "weights": "list<float32>"}


@pytest.fixture(scope="module")
def columns() -> dict[str, Any]:
    draw = np.random.default_rng(7)

    def with_gaps(values: Any) -> list[Any]:
        return [None if gap else value for value, gap in zip(values.tolist(), draw.random(ROWS) < 0.2, strict=True)]

    lists = [None if row % 11 == 0 else draw.integers(0, 99, row % 6).tolist() for row in range(ROWS)]
    return {
        "row": pa.array(draw.permutation(ROWS)),
        "price": pa.array(with_gaps(draw.normal(size=ROWS).astype(np.float32)), pa.float32()),
        "count": pa.array(with_gaps(draw.integers(-(2**31), 2**31, ROWS)), pa.int32()),
        "share": pa.array(draw.random(ROWS)),
        "clicks": pa.array(lists, pa.list_(pa.int64())),
        "weights": pa.array([None if one is None else [x / 7 for x in one] for one in lists], pa.list_(pa.float32())),
    }


@pytest.fixture(scope="module")
def parquet(columns: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tables") / "rows.parquet"
    pq.write_table(pa.table(columns), path, row_group_size=150)
    return path


def batches_of(dataset: Any, stage: Any = None) -> tuple[list[Any], list[int]]:
    """Batches in a shuffled order, and which rows of the file they are of."""
    options = {"batch_size": BATCH_SIZE, "shuffle": True, "seed": 3}
    with DataLoader(dataset, collate_fn=collate_rows, batch_stage=stage, **options) as loader:
        batches = list(loader)
    with DataLoader(range(ROWS), **options) as loader:
        return batches, [index for batch in loader for index in batch.tolist()]


def assert_dense(batches: list[Any], frame: Any, order: list[int]) -> None:
    for name, kind in DENSE.items():
        found = [batch[name] for batch in batches]
        values = torch.cat([part.values if isinstance(part, Nullable) else part for part in found]).numpy()
        valid = torch.cat([part.valid if isinstance(part, Nullable) else torch.ones_like(part) for part in found])
        wanted = frame[name].iloc[order]
        assert values.dtype == kind.rstrip("?")
        assert (valid.numpy().astype(bool) == wanted.notna().to_numpy()).all(), name
        there = wanted.notna().to_numpy()
        assert (values[there] == wanted[there].to_numpy().astype(values.dtype)).all(), name


def test_parquet(parquet: Path) -> None:
    batches, order = batches_of(ParquetDataset(parquet, DENSE | LISTS))
    frame = pd.read_parquet(parquet)
    assert_dense(batches, frame, order)
    for name in LISTS:
        wanted = [np.asarray([] if one is None else one) for one in frame[name].iloc[order]]
        found = [batch[name] for batch in batches]
        assert all(isinstance(one, Jagged) for one in found)
        assert torch.cat([one.lengths for one in found]).tolist() == [*map(len, wanted)]
        assert (torch.cat([one.values for one in found]).numpy() == np.concatenate(wanted)).all()


def test_csv(columns: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    frame = pd.DataFrame({name: columns[name].to_pandas(integer_object_nulls=True) for name in DENSE})
    frame.to_csv(path, index=False)
    batches, order = batches_of(CsvDataset(path, DENSE, group_rows=128))
    read = pd.read_csv(path, dtype={"count": "Int32", "price": "float32"})
    assert_dense(batches, read, order)


def test_what_torchrec_gets_of_a_file(parquet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A KeyedJaggedTensor is made of keys, of values key by key, and of the lengths in the same order."""
    graph = FeatureGraph.of({"sparse": [jagged("clicks") >> FirstX(2), jagged("clicks").named("all")]})
    transform = FeatureTransform(graph)
    batches, order = batches_of(ParquetDataset(parquet, {"clicks": "list<int64>"}), transform)
    frame = pd.read_parquet(parquet, columns=["clicks"])
    lists = [[] if one is None else one.tolist() for one in frame["clicks"].iloc[order]]
    for number, batch in enumerate(batches):
        rows = lists[number * BATCH_SIZE : (number + 1) * BATCH_SIZE]
        sparse = batch["sparse"]
        assert isinstance(sparse, JaggedBatch)
        both = [one[:2] for one in rows] + rows
        assert sparse.keys == ("clicks", "all")
        assert sparse.lengths.tolist() == [*map(len, both)]
        assert sparse.values.tolist() == [value for one in both for value in one]
