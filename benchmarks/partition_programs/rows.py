"""Made-up rows of a click log: numbers with gaps, and ids of categories. Each row is a function of its number."""

from __future__ import annotations

import torch
from torch.utils.data import Dataset


class ClickRows(Dataset[tuple[torch.Tensor, ...]]):
    """Rows of numbers, ids and a label.

    Args:
        num_rows: how many.
        num_numbers: numbers of a row.
        num_ids: ids of a row.
        with_text: the ids are words of bytes, padded with zeros to 12 bytes each.
    """

    def __init__(self, num_rows: int, num_numbers: int, num_ids: int, with_text: bool = False) -> None:
        self._num_rows, self._num_numbers, self._num_ids, self._with_text = num_rows, num_numbers, num_ids, with_text

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        return tuple(column[0] for column in self.__getitems_as_batch([index]))

    def __getitems__(self, indices: list[int]) -> list[tuple[torch.Tensor, ...]]:
        return list(zip(*self.__getitems_as_batch(indices), strict=True))

    def __getitems_as_batch(self, indices: list[int]) -> tuple[torch.Tensor, ...]:
        index = torch.tensor(indices).unsqueeze(1)
        places = torch.arange(self._num_numbers)
        numbers = ((index * 7919 + places * 104729) % 1000).float() / 7 - 20
        numbers[(index + places) % 11 == 0] = float("nan")
        label = ((index * 31 + 7) % 3 == 0).float()[:, 0]
        ids = (index * 2654435761 + torch.arange(self._num_ids) * 40503) % 1_000_003
        if self._with_text:
            ids = ids.unsqueeze(2) // 7 ** torch.arange(12) % 26 + 97
            ids = ids.to(torch.uint8)
        return numbers, ids, label
