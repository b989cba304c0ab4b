"""The same graph with and without torch.compile, on batches of several sizes: prints `the same`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hetstream.mpi_dataworkers.features import operators as ops
from hetstream.mpi_dataworkers.features.batches import Jagged
from hetstream.mpi_dataworkers.features.graph import FeatureGraph, dense, jagged
from hetstream.mpi_dataworkers.features.transform import FeatureTransform

os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path.cwd())


def batch_of(rows: int, draw: np.random.Generator) -> dict[str, Any]:
    """Ids of all int64, reals with NaN, lists."""
    batch: dict[str, Any] = {f"i{at}": draw.integers(-(2**63), 2**63 - 1, rows) for at in range(3)}
    batch |= {f"f{at}": draw.normal(0, 2, rows).astype(np.float32) for at in range(3)}
    batch["f0"][0] = np.nan
    lengths = torch.from_numpy(draw.integers(0, 5, rows))
    batch["j"] = Jagged(torch.from_numpy(draw.integers(0, 2**40, int(lengths.sum()))), lengths)
    return batch


def main() -> None:
    """Compare."""
    ids = [
        dense(f"i{at}", "int64") >> ops.SigridHash(at, 1000 + at) >> ops.MapId(tuple(range(7, 900))) for at in range(3)
    ]
    reals = [
        dense(f"f{at}") >> ops.FillNull(0.5, nan=True) >> ops.Clamp(0.01, 3.0 + at) >> ops.Logit() for at in range(3)
    ]
    buckets = [dense(f"f{at}") >> ops.Bucketize((0.0, 1.0, 1.0)) >> ops.Cast("int64") for at in range(3)]
    lists = jagged("j") >> ops.FirstX(3) >> ops.SigridHash(0, 99)
    graph = FeatureGraph.of(
        {"ids": ids, "reals": reals, "buckets": buckets, "j": lists, "box": dense("f0") >> ops.BoxCox(0.3)}
    )
    plain, compiled = FeatureTransform(graph), FeatureTransform(graph, compiled=True)
    draw = np.random.default_rng(1)
    for rows in (5, 300, 1000):
        batch = batch_of(rows, draw)
        expected, found = plain(batch), compiled(batch)
        for name in ("ids", "buckets"):
            assert torch.equal(found[name], expected[name]), name
        assert torch.equal(found["j"].values, expected["j"].values)
        for name in ("reals", "box"):
            torch.testing.assert_close(found[name], expected[name], rtol=1e-6, atol=1e-6, equal_nan=True)
    print("the same")


if __name__ == "__main__":
    main()
