"""A CNN, a transformer, a model with nothing to move and one of which a graph holds the beginning alone."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import Dataset

from benchmarks.partition_programs.recommenders import layers
from benchmarks.partition_programs.rows import ClickRows
from benchmarks.partition_programs.training import Program


class Images(Dataset[tuple[torch.Tensor, ...]]):
    """Made-up images as bytes, [3, 40, 40], each a function of its number."""

    def __init__(self, num_images: int) -> None:
        self._num_images = num_images
        self._places = torch.arange(3 * 40 * 40)

    def __len__(self) -> int:
        return self._num_images

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        image = (self._places * (index % 97 + 3) % 251).to(torch.uint8).view(3, 40, 40)
        return image, torch.tensor(float(index % 2))


class Sentences(Dataset[tuple[torch.Tensor, ...]]):
    """Made-up sentences as bytes, 32 each, with zeros behind their ends."""

    def __init__(self, num_sentences: int) -> None:
        self._num_sentences = num_sentences
        self._places = torch.arange(32)

    def __len__(self) -> int:
        return self._num_sentences

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        letters = 97 + (self._places * (index % 89 + 5)) % 26
        letters[self._places % 6 == index % 6] = 32
        letters[self._places >= 10 + index % 20] = 0
        return letters.to(torch.uint8), torch.tensor(float(index % 2))


class Cnn(nn.Module):
    """A CNN that flips, crops, normalises and scales its images in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor([0.485, 0.456, 0.406]).view(1, 3, 1, 1))
        self.register_buffer("std", torch.tensor([0.229, 0.224, 0.225]).view(1, 3, 1, 1))
        self.layers = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(4))
        self.head = layers(128, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits."""
        with torch.no_grad():
            values = images.float() / 255
            brightness = values.mean(dim=(1, 2, 3), keepdim=True)
            flip = images[:, :1, :1, :1] % 2 == 0  # drawn from the image itself, so that each run flips the same
            values = torch.where(flip, values.flip(3), values)[:, :, 4:36, 4:36]
            values = ((values - brightness + 0.5).clamp(0, 1) - self.mean) / self.std
            values = nn.functional.interpolate(values, size=(48, 48), mode="bilinear", align_corners=False)
        return self.head(self.layers(values).flatten(1)).squeeze(1)


class Transformer(nn.Module):
    """A transformer that parts its text into words, hashes and pads them in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5000, 16)
        self.places = nn.Parameter(torch.zeros(32, 16))
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.head = layers(16, 1)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Logits."""
        letters = text.long()
        is_word = (letters != 32) & (letters != 0)
        state = torch.zeros(letters.shape[0], dtype=torch.int64)
        rows = []
        for place in range(32):
            state = torch.where(
                is_word[:, place], (state * 257 + letters[:, place]) % 1_000_003, torch.zeros_like(state)
            )
            rows.append(state % 5000)
        begins = is_word & ~torch.cat([torch.zeros_like(is_word[:, :1]), is_word[:, :-1]], dim=1)
        order = torch.argsort((~begins).long(), dim=1, stable=True)
        tokens = torch.stack(rows, dim=1).gather(1, order)
        is_padding = torch.arange(32) >= begins.sum(1, keepdim=True).clamp(min=1)
        values = self.words(tokens) + self.places
        return self.head(self.encoder(values, src_key_padding_mask=is_padding)[:, 0]).squeeze(1)


class NothingToMove(nn.Module):
    """Layers with parameters, from the first operator on."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers(8, 64, 64, 1)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        """Logits."""
        return torch.nan_to_num(self.layers(numbers)).squeeze(1)


class DependsOnData(nn.Module):
    """Takes a decision that depends on the data, so no graph holds more than its beginning."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers(8, 64, 1)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        """Logits."""
        clean = torch.nan_to_num(numbers)
        if clean.max() > 100:
            clean = clean / 10
        return self.layers(clean).squeeze(1)


def _numbers(num_rows: int) -> Dataset[tuple[torch.Tensor, ...]]:
    return ClickRows(num_rows, 8, 1)


CNN = Program("cnn", Cnn, Images, 64, 1)
TRANSFORMER = Program("transformer", Transformer, Sentences, 64, 1)
NOTHING_TO_MOVE = Program("nothing_to_move", NothingToMove, _numbers, 64, 1)
DEPENDS_ON_DATA = Program("depends_on_data", DependsOnData, _numbers, 64, 1)
