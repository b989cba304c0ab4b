"""The feature kernel in Triton's interpreter; TRITON_INTERPRET must be set when the kernel is imported first."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def interpreted_launch(*arguments: Any) -> None:
    """NumPy carries it out, which warns of infinity and NaN where a GPU does not."""
    from hetstream.mpi_dataworkers.gpu_features.kernel import launch

    with np.errstate(all="ignore"):
        launch(*arguments)


def same(found: Any, expected: Any) -> None:
    """Two outputs of a graph: integers have the same bits."""
    if isinstance(expected, tuple):
        assert type(found) is type(expected)
        for mine, other in zip(found, expected, strict=True):
            same(mine, other) if isinstance(other, torch.Tensor) else None
        return
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, equal_nan=True)
