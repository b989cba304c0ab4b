"""How features stand in a batch: tensors, and named tuples of tensors.

Every transport and `pin_memory` take named tuples apart. `collate.py` makes them, or a user's own collate function;
`transform.py` takes and gives them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from hetstream.mpi_dataworkers.errors import FeatureError


class Jagged(NamedTuple):
    """A list in each row.

    Attributes:
        values: those of all rows, one row after the other.
        lengths: of each row, int64 or int32.
    """

    values: torch.Tensor
    lengths: torch.Tensor


class Nullable(NamedTuple):
    """A dense feature in which values are missing.

    Attributes:
        values: with anything where they are missing.
        valid: bool, of the same shape: whether they are there.
    """

    values: torch.Tensor
    valid: torch.Tensor


class JaggedBatch(NamedTuple):
    """Several jagged features together, in the layout of torchrec's KeyedJaggedTensor: all of one key, then the next.

    Attributes:
        keys: of the features.
        values: of all rows of the first key, of all rows of the second, and so on.
        lengths: of the lists in the same order, int64; as many as keys times rows.
    """

    keys: tuple[str, ...]
    values: torch.Tensor
    lengths: torch.Tensor

    def of(self, key: str) -> Jagged:
        """One of the features, without a copy.

        Raises:
            KeyError: there is none of that key.
        """
        if key not in self.keys:
            raise KeyError(f"{key!r} is none of {', '.join(self.keys)}")
        at, rows = self.keys.index(key), len(self.lengths) // len(self.keys)
        before = int(self.lengths[: at * rows].sum())
        lengths = self.lengths[at * rows : (at + 1) * rows]
        return Jagged(self.values[before : before + int(lengths.sum())], lengths)

    def to_torchrec(self) -> Any:
        """The same as torchrec's KeyedJaggedTensor, over the same memory.

        Raises:
            FeatureError: torchrec is not installed.
        """
        try:
            from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
        except ImportError as exc:
            raise FeatureError("a KeyedJaggedTensor needs torchrec: pip install torchrec") from exc
        return KeyedJaggedTensor(keys=list(self.keys), values=self.values, lengths=self.lengths)
