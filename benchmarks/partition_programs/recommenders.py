"""Four recommendation models that clean, bucketize and hash their features in the forward."""

from __future__ import annotations

import itertools

import torch
from torch import nn

from benchmarks.partition_programs.rows import ClickRows
from benchmarks.partition_programs.training import Program

_ROWS = 5000
_PRIME = 1_000_003
_DEEPFM_TENSORS, _DEEPFM_WORDS = 141, 133
# Bits a second that it is sent, by Table 2.
_DEEPFM_BITS_PER_S = 0.15e9


class CleanNumbers(nn.Module):
    """Numbers with gaps as features: filled, clamped, in logarithms, scaled."""

    def __init__(self, num_numbers: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.linspace(0.5, 1.5, num_numbers))
        self.register_buffer("scale", torch.linspace(1.0, 2.0, num_numbers))

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        """Features between about -3 and 3."""
        filled = torch.nan_to_num(numbers, nan=0.0)
        return (torch.log1p(filled.clamp(min=0.0)) - self.mean) / self.scale


class HashWords(nn.Module):
    """Words of bytes as rows of a table: polynomial hashes over the bytes, put together."""

    def __init__(self, num_hashes: int) -> None:
        super().__init__()
        self.num_hashes = num_hashes

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Row numbers, [batch, words]."""
        together = torch.zeros(words.shape[:2], dtype=torch.int64)
        for number in range(self.num_hashes):
            value = torch.zeros_like(together)
            for place in range(words.shape[2]):
                value = (value * (257 + 2 * number) + words[:, :, place]) % _PRIME
            together = together * 31 + (value ^ (value >> 7))
        return together % _ROWS


def layers(*sizes: int) -> nn.Sequential:
    """Linear layers with ReLU between them."""
    parts: list[nn.Module] = []
    for size, following in itertools.pairwise(sizes):
        parts += [nn.Linear(size, following), nn.ReLU()]
    return nn.Sequential(*parts[:-1])


class Dlrm(nn.Module):
    """DLRM: dense features and embeddings, and their products with each other."""

    def __init__(self) -> None:
        super().__init__()
        self.clean = CleanNumbers(13)
        self.register_buffer("borders", torch.linspace(-2, 4, 63))
        self.tables = nn.Embedding(26 * _ROWS, 8)
        self.register_buffer("first_row", torch.arange(26) * _ROWS)
        self.bottom = layers(26, 32, 8)
        self.top = layers(8 + 27 * 26 // 2, 32, 1)

    def forward(self, numbers: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Logits of a click."""
        clean = self.clean(numbers)
        bucket = torch.bucketize(clean, self.borders).float() / 63
        dense = self.bottom(torch.cat([clean, bucket], dim=1))
        rows = (ids * 2654435761 % 4_294_967_291) % _ROWS + self.first_row
        unique, inverse = torch.unique(rows, return_inverse=True)
        sparse = self.tables(unique)[inverse]
        every = torch.cat([dense.unsqueeze(1), sparse], dim=1)
        places = torch.triu_indices(27, 27, offset=1)
        products = torch.bmm(every, every.transpose(1, 2))[:, places[0], places[1]]
        return self.top(torch.cat([dense, products], dim=1)).squeeze(1)


class DeepFm(nn.Module):
    """DeepFM over hashed words: a factorisation machine beside a deep network.

    What GoldMiner's paper (PACMMOD 1, 2, article 193) says of its own: 141 tensors come out of as many feature columns
    (section 4, "Fused data transfer"), so it has 8 numbers and 133 words here. They are 0.15 Gb/s at the peak
    performance of one V100 (Table 2). If a sample has one value of 8 bytes in each, that is 16,600 samples a second, or
    15.4 ms for 256 of them: `paper_accelerator_ms`. Its batch size, the sizes of its layers and the time of its
    operators are not in the paper.
    """

    def __init__(self) -> None:
        super().__init__()
        self.clean = CleanNumbers(8)
        self.hash = HashWords(3)
        self.linear = nn.Embedding(_ROWS, 1)
        self.factors = nn.Embedding(_ROWS, 4)
        self.deep = layers(8 + _DEEPFM_WORDS * 4, 32, 1)

    def forward(self, numbers: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        """Logits of a click."""
        rows = self.hash(words)
        factors = self.factors(rows)
        pairs = (factors.sum(1) ** 2 - (factors**2).sum(1)).sum(1) / 2
        deep = self.deep(torch.cat([self.clean(numbers), factors.flatten(1)], dim=1)).squeeze(1)
        return self.linear(rows).sum((1, 2)) + pairs * 0.01 + deep


class WideAndDeep(nn.Module):
    """Wide & Deep: crossed features, hashed, beside a deep network.

    GoldMiner's paper says no more of its own than that it has the Amazon dataset (Table 1) and takes more than 12 CPUs
    for a GPU (section 5.6): neither columns nor times. So it has the same accelerator time as the other programs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.clean = CleanNumbers(8)
        self.hash = HashWords(2)
        self.wide = nn.Embedding(_ROWS, 1)
        self.table = nn.Embedding(_ROWS, 4)
        self.deep = layers(8 + 48 * 4, 32, 1)

    def forward(self, numbers: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        """Logits of a click."""
        rows = self.hash(words)
        crossed = (rows[:, :24] * 40503 + rows[:, 24:]) % _PRIME % _ROWS
        wide = self.wide(crossed).sum((1, 2))
        deep = self.deep(torch.cat([self.clean(numbers), self.table(rows).flatten(1)], dim=1))
        return wide + deep.squeeze(1)


class Din(nn.Module):
    """A model of a user's history, in the manner of DIN: attention of the last item to those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.clean = CleanNumbers(4)
        self.items = nn.Embedding(_ROWS, 8)
        self.attention = layers(24, 16, 1)
        self.top = layers(20, 16, 1)

    def forward(self, numbers: torch.Tensor, history: torch.Tensor) -> torch.Tensor:
        """Logits of a click."""
        rows = (history ^ (history >> 5)) * 2654435761 % _ROWS
        age = torch.arange(history.shape[1], dtype=torch.float32).flip(0).log1p()
        is_padding = history % 5 == 0
        items = self.items(rows)
        last = items[:, -1:, :].expand_as(items)
        score = self.attention(torch.cat([items, last, items * last], dim=2)).squeeze(2) - age
        weight = torch.softmax(score.masked_fill(is_padding, -1e9), dim=1)
        user = (weight.unsqueeze(2) * items).sum(1)
        return self.top(torch.cat([self.clean(numbers), user, items[:, -1]], dim=1)).squeeze(1)


DLRM = Program("dlrm", Dlrm, lambda rows: ClickRows(rows, 13, 26), 256, 2)
DEEPFM = Program(
    "deepfm",
    DeepFm,
    lambda rows: ClickRows(rows, 8, _DEEPFM_WORDS, with_text=True),
    256,
    2,
    paper_accelerator_ms=1e3 * 256 * _DEEPFM_TENSORS * 64 / _DEEPFM_BITS_PER_S,
)
WIDE_AND_DEEP = Program("wide_and_deep", WideAndDeep, lambda rows: ClickRows(rows, 8, 48, with_text=True), 256, 2)
DIN = Program("din", Din, lambda rows: ClickRows(rows, 4, 32), 256, 2)
