"""The operators against their definitions, in NumPy of this file alone: `features_reference.py` has no part in it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from hetstream.mpi_dataworkers.errors import FeatureError
from hetstream.mpi_dataworkers.features import native
from hetstream.mpi_dataworkers.features import operators as ops
from hetstream.mpi_dataworkers.features.batches import Jagged, collate_rows
from hetstream.mpi_dataworkers.features.graph import Feature, FeatureGraph, dense, jagged
from hetstream.mpi_dataworkers.features.transform import FeatureTransform

KINDS = [False, True] if native.compiler() else [False]  # in torch, and in native code where it can be compiled


def made_of(feature: Feature, value: object, native_code: bool) -> object:
    return FeatureTransform(FeatureGraph.of({"y": feature}), native=native_code)({"x": value})["y"]


def exact_logit(values: npt.NDArray[np.float32], eps: float) -> npt.NDArray[np.float64]:
    """By definition, in float64, whose differences from 0.5 are exact here."""
    clamped = np.clip(values.astype(np.float64), np.float32(eps), np.float32(1) - np.float32(eps))
    return np.log1p((2 * clamped - 1) / (1 - clamped))


@pytest.mark.parametrize("native_code", KINDS)
def test_logit_is_its_definition_and_near_a_half_within_a_step_of_float32(native_code: bool) -> None:
    near = np.float32(0.5) + np.arange(-4000, 4000, dtype=np.float32) * np.float32(2**-24)
    far = np.random.default_rng(0).random(8000, dtype=np.float32)
    for values in (near, far):
        found = made_of(dense("x") >> ops.Logit(1e-3), torch.from_numpy(values), native_code)
        expected = exact_logit(values, 1e-3)
        np.testing.assert_allclose(np.asarray(found, np.float64).ravel(), expected, rtol=1e-6, atol=2e-7)


def windows_of(row: list[int], size: int) -> list[int]:
    taken = np.asarray(row[: len(row)], np.int64)
    if len(taken) <= size:
        return [int(value) for value in taken]
    return np.lib.stride_tricks.sliding_window_view(taken, size).ravel().tolist()


@pytest.mark.parametrize("native_code", KINDS)
def test_windows_are_those_that_numpy_slides_over_a_list(native_code: bool) -> None:
    draws = np.random.default_rng(1)
    rows = [draws.integers(-9, 9, int(length)).tolist() for length in draws.integers(0, 7, 200)]
    given = Jagged(torch.tensor([value for row in rows for value in row]), torch.tensor([len(row) for row in rows]))
    for size in (1, 2, 3, 6):
        found = made_of(jagged("x") >> ops.Ngram(size), given, native_code)
        assert isinstance(found, Jagged)
        expected = [windows_of(row, size) for row in rows]
        assert found.lengths.tolist() == [len(row) for row in expected]
        assert found.values.tolist() == [value for row in expected for value in row]


@pytest.mark.parametrize("native_code", KINDS)
def test_windows_for_which_there_is_no_memory_are_an_error_with_the_features_name(native_code: bool) -> None:
    """18 TB, more than any host of ours has."""
    given = Jagged(torch.zeros(3_000_000, dtype=torch.int64), torch.tensor([3_000_000]))
    with pytest.raises(FeatureError, match=r"Ngram'?: there is no memory for what it makes of 1 rows"):
        made_of(jagged("x") >> ops.Ngram(1_500_000), given, native_code)


@pytest.mark.parametrize("native_code", KINDS)
def test_a_list_that_is_missing_is_an_empty_one_whatever_its_memory_has(native_code: bool, tmp_path: Path) -> None:
    """The file is written of an array whose second list is missing, and has two values in memory all the same."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    from hetstream.mpi_dataworkers.sources.tables import ParquetDataset

    starts, values = pa.array([0, 2, 4, 4, 5], pa.int32()), pa.array([7, 8, 90, 91, 5], pa.int64())
    missing = pa.array([False, True, False, False])
    path = tmp_path / "lists.parquet"
    pq.write_table(pa.table({"x": pa.ListArray.from_arrays(starts, values, mask=missing)}), path)
    dataset = ParquetDataset(path, {"x": "list<int64>"})
    batch = collate_rows(dataset.__getitems__([0, 1, 2, 3]))
    found = made_of(jagged("x") >> ops.Ngram(2), batch["x"], native_code)
    assert isinstance(found, Jagged)
    expected = [windows_of(row, 2) for row in ([7, 8], [], [], [5])]
    assert found.lengths.tolist() == [len(row) for row in expected]
    assert found.values.tolist() == [value for row in expected for value in row]
