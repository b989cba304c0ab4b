"""The eleven operators as a program writes them for one feature after the other: with torch, with NumPy, with pandas.

What `benchmarks.features` compares feature graphs with. Each function takes a feature's values (and lengths, of lists)
and a number that differs from feature to feature, and returns the new values. Where pandas has no function of the kind
there is none. Called in the benchmark's own process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

BORDERS = tuple(float(place) / 16 for place in range(33))
TABLE = tuple(range(1000, 3000))
NUM_CLASSES, FIRST, WINDOW = 16, 4, 2
EPS, LMBDA = 1e-3, 0.3
FACTOR = 0x9DDFEA08EB382D69
Loop = Callable[[Any, Any, int], Any]


def torch_hash(x: torch.Tensor, _lengths: Any, number: int) -> torch.Tensor:
    """As folly writes it, with masks in the place of unsigned shifts."""
    factor = FACTOR - 2**64
    x = ~x + (x << 21)
    x = x ^ ((x >> 24) & (2**40 - 1))
    x = x + (x << 3) + (x << 8)
    x = x ^ ((x >> 14) & (2**50 - 1))
    x = x + (x << 2) + (x << 4)
    x = x ^ ((x >> 28) & (2**36 - 1))
    x = x + (x << 31)
    a = (x ^ number) * factor
    a = a ^ ((a >> 47) & (2**17 - 1))
    b = (a ^ number) * factor
    b = b ^ ((b >> 47) & (2**17 - 1))
    return b * factor % (1000 + number)


def numpy_hash(x: np.ndarray, _lengths: Any, number: int) -> np.ndarray:
    """The same with unsigned words."""
    word = np.uint64
    x = x.view(word)
    x = ~x + (x << word(21))
    x = x ^ (x >> word(24))
    x = x + (x << word(3)) + (x << word(8))
    x = x ^ (x >> word(14))
    x = x + (x << word(2)) + (x << word(4))
    x = x ^ (x >> word(28))
    x = x + (x << word(31))
    a = (x ^ word(number)) * word(FACTOR)
    a = a ^ (a >> word(47))
    b = (a ^ word(number)) * word(FACTOR)
    b = b ^ (b >> word(47))
    return (b * word(FACTOR)).view(np.int64) % (1000 + number)


def torch_box_cox(x: torch.Tensor, _lengths: Any, _number: int) -> torch.Tensor:
    return torch.where(x > 0, (x**LMBDA - 1) / LMBDA, x)


def torch_onehot(x: torch.Tensor, _lengths: Any, _number: int) -> torch.Tensor:
    place = x[:, 0] * NUM_CLASSES / 2 if x.dim() > 1 else x * NUM_CLASSES / 2
    place = torch.where((place >= 0) & (place < NUM_CLASSES), place, 0).long()
    return torch.nn.functional.one_hot(place, NUM_CLASSES).float()


def torch_first(x: torch.Tensor, lengths: torch.Tensor, _number: int) -> torch.Tensor:
    starts = torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
    return x[torch.arange(len(x)) - starts < FIRST]


def torch_windows(x: torch.Tensor, lengths: torch.Tensor, _number: int) -> torch.Tensor:
    """For windows of 2: each value but a list's last one, and the one behind it; lists of one value stay."""
    ends = lengths.cumsum(0)
    is_last = torch.zeros(len(x), dtype=torch.bool)
    is_last[(ends - 1)[lengths > 0]] = True
    alone = torch.zeros(len(x), dtype=torch.bool)
    alone[(ends - 1)[lengths == 1]] = True
    both = torch.stack([x, x.roll(-1)], dim=1)
    keep = torch.stack([~is_last | alone, ~is_last], dim=1)
    return both[keep]


def torch_map(x: torch.Tensor, _lengths: Any, _number: int) -> torch.Tensor:
    table = _TORCH_TABLE
    inside = (x >= 0) & (x < len(table))
    return torch.where(inside, table[x.clamp(0, len(table) - 1)], 0)


def numpy_map(x: np.ndarray, _lengths: Any, _number: int) -> np.ndarray:
    inside = (x >= 0) & (x < len(_TABLE))
    return np.where(inside, _TABLE[np.clip(x, 0, len(_TABLE) - 1)], 0)


def numpy_logit(x: np.ndarray, _lengths: Any, _number: int) -> np.ndarray:
    t = np.clip(x, np.float32(EPS), np.float32(1 - EPS))
    return np.log(t / (1 - t))


def numpy_box_cox(x: np.ndarray, _lengths: Any, _number: int) -> np.ndarray:
    with np.errstate(all="ignore"):
        return np.where(x > 0, (x**LMBDA - 1) / LMBDA, x)


def numpy_onehot(x: np.ndarray, _lengths: Any, _number: int) -> np.ndarray:
    place = (x[:, 0] if x.ndim > 1 else x) * NUM_CLASSES / 2
    place = np.where((place >= 0) & (place < NUM_CLASSES), place, 0).astype(np.int64)
    return np.eye(NUM_CLASSES, dtype=np.float32)[place]


def numpy_first(x: np.ndarray, lengths: np.ndarray, _number: int) -> np.ndarray:
    starts = np.repeat(np.cumsum(lengths) - lengths, lengths)
    return x[np.arange(len(x)) - starts < FIRST]


def numpy_windows(x: np.ndarray, lengths: np.ndarray, _number: int) -> np.ndarray:
    ends = np.cumsum(lengths)
    is_last, alone = np.zeros((2, len(x)), dtype=bool)
    is_last[(ends - 1)[lengths > 0]] = True
    alone[(ends - 1)[lengths == 1]] = True
    return np.stack([x, np.roll(x, -1)], axis=1)[np.stack([~is_last | alone, ~is_last], axis=1)]


_TORCH_TABLE = torch.tensor(TABLE)
_TABLE = np.asarray(TABLE)
_TORCH_BORDERS = torch.tensor(BORDERS)
_NUMPY_BORDERS = np.asarray(BORDERS, dtype=np.float32)

TORCH: Mapping[str, Loop] = {
    "Logit": lambda x, _, __: torch.logit(x, EPS),
    "BoxCox": torch_box_cox,
    "Onehot": torch_onehot,
    "SigridHash": torch_hash,
    "FirstX": torch_first,
    "Clamp": lambda x, _, number: x.clamp(0.1, 0.5 + number),
    "Bucketize": lambda x, _, __: torch.bucketize(x, _TORCH_BORDERS, out_int32=True),
    "Ngram": torch_windows,
    "MapId": torch_map,
    "FillNull": lambda x, _, number: torch.nan_to_num(x, nan=float(number)),  # as most do; it changes infinity, too
    "Cast": lambda x, _, __: x.long(),
}
NUMPY: Mapping[str, Loop] = {
    "Logit": numpy_logit,
    "BoxCox": numpy_box_cox,
    "Onehot": numpy_onehot,
    "SigridHash": numpy_hash,
    "FirstX": numpy_first,
    "Clamp": lambda x, _, number: np.clip(x, np.float32(0.1), np.float32(0.5 + number)),
    "Bucketize": lambda x, _, __: np.searchsorted(_NUMPY_BORDERS, x).astype(np.int32),
    "Ngram": numpy_windows,
    "MapId": numpy_map,
    "FillNull": lambda x, _, number: np.where(np.isnan(x), np.float32(number), x),
    "Cast": lambda x, _, __: x.astype(np.int64),
}


def pandas_loops() -> Mapping[str, Loop]:
    """Those that pandas has; none where it is not installed. Values are Series, lists have the row as their index."""
    try:
        import pandas as pd
    except ImportError:
        return {}
    table = pd.Series(TABLE)
    edges = [-np.inf, *BORDERS, np.inf]
    return {
        "FirstX": lambda x, _, __: x.groupby(level=0).head(FIRST),
        "Clamp": lambda x, _, number: x.clip(0.1, 0.5 + number),
        "Bucketize": lambda x, _, __: pd.cut(x, edges, labels=False),
        "MapId": lambda x, _, __: table.reindex(x, fill_value=0),
        "FillNull": lambda x, _, number: x.fillna(float(number)),
        "Cast": lambda x, _, __: x.astype(np.int64),
    }
