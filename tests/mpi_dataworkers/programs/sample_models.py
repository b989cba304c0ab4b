"""Models of the tests that a partitioner meets, in a module beside the programs as a user's would be."""

from __future__ import annotations

import random
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

FACTOR = 2.0
SETTINGS = {"scale": 3.0}
OTHER = object()
DRAWN = []


class Rows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Rows of four numbers with a gap now and then, and a label."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        values = torch.arange(4.0) + index % 13
        values[index % 4] = float("nan") if index % 5 == 0 else index
        return values, torch.tensor([float(index % 2)])


class Clean(nn.Module):
    """Cleans its numbers, then a layer: what other models here do beside that is in `also`."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.linspace(0.0, 1.0, 4))
        self.layer = nn.Linear(4, 1)
        self.factor = 1.5

    def also(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        clean = torch.nan_to_num(values).clamp(0, 50).log1p() - self.mean
        return self.layer(self.also(clean * self.factor))


class InPlace(Clean):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        values.nan_to_num_()
        return self.layer(values - self.mean)


class DecidesByData(Clean):
    def also(self, values: torch.Tensor) -> torch.Tensor:
        return values / 2 if values.sum() > 0 else values


class ReadsFile(Clean):
    path = Path(__file__)

    def also(self, values: torch.Tensor) -> torch.Tensor:
        return values * len(self.path.read_text())


class ReadsTime(Clean):
    def also(self, values: torch.Tensor) -> torch.Tensor:
        return values + 0 * time.time()


class DrawsPythonNumbers(Clean):
    def also(self, values: torch.Tensor) -> torch.Tensor:
        return values * random.random()


class UsesNumpy(Clean):
    def also(self, values: torch.Tensor) -> torch.Tensor:
        return values * float(np.sqrt(2.0))


class ReadsObject(Clean):
    def also(self, values: torch.Tensor) -> torch.Tensor:
        return values if OTHER else values * 2


def doubled(values: torch.Tensor) -> torch.Tensor:
    return values * 2


class Gain:
    """An object that a forward calls."""

    def __init__(self) -> None:
        self.gain = 1.0

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        return values * self.gain


GAIN = Gain()


class ReadsGlobals(Clean):
    offset = 0.0

    def __init__(self) -> None:
        super().__init__()
        self._gain = 1.0

    def also(self, values: torch.Tensor) -> torch.Tensor:
        values = GAIN(doubled(values)) * self._gain + self.offset
        return values * FACTOR * SETTINGS["scale"]


class WritesGlobal(Clean):
    def also(self, values: torch.Tensor) -> torch.Tensor:
        global FACTOR
        FACTOR = 2.0
        return values


class Counts(Clean):
    """Changes an attribute of its own in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def also(self, values: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return values * self.calls


class CountsPrivately(Clean):
    """Counts its calls for itself; its result does not depend on them."""

    def __init__(self) -> None:
        super().__init__()
        self._calls = 0

    def also(self, values: torch.Tensor) -> torch.Tensor:
        self._calls += 1
        return values


class Prints(Clean):
    def also(self, values: torch.Tensor) -> torch.Tensor:
        print(end="")
        return values


@torch.library.custom_op("hetstream_tests::twice", mutates_args=())
def twice(values: torch.Tensor) -> torch.Tensor:
    return values * 2


@twice.register_fake
def _(values: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(values)


class OwnOperator(Clean):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.layer(twice(torch.nan_to_num(values)) - self.mean)


class Noisy(Clean):
    def also(self, values: torch.Tensor) -> torch.Tensor:
        return values + 0.1 * torch.rand_like(values)


class Drops(Clean):
    def also(self, values: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(values, 0.5, self.training)


class Normalises(Clean):
    """Running statistics without parameters, which no schema names."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4, affine=False)

    def also(self, values: torch.Tensor) -> torch.Tensor:
        return self.norm(values)


class Jagged(Clean):
    """Ids with lengths: unique ones are looked up, and empty rows give zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(64, 4)

    def also(self, values: torch.Tensor) -> torch.Tensor:
        ids = values.long() % 8
        kept = ids[ids > 2]
        unique, inverse = torch.unique(kept, return_inverse=True)
        return values + self.table(unique)[inverse].sum(0)


class TakesAnything(Clean):
    """Arguments that are no tensors."""

    def forward(self, values: torch.Tensor, how: Any = 1) -> torch.Tensor:
        return super().forward(values * (how if isinstance(how, int) else 1))


class LooksUp(Clean):
    """Ids outside of the table are an error of the program's own."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(100, 4)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.layer(self.table(torch.nan_to_num(values)[:, 0].long()))


class HoldsLambda(Clean):
    """Has what cannot be pickled; its operators can."""

    def __init__(self) -> None:
        super().__init__()
        self.scaled = lambda values: values * 2

    def also(self, values: torch.Tensor) -> torch.Tensor:
        return self.scaled(values)


class FallingBorders(Clean):
    """Borders that decrease: what torch makes of them is no sense, and the same everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("borders", torch.tensor([5.0, 3.0, 1.0]))

    def also(self, values: torch.Tensor) -> torch.Tensor:
        return values + torch.bucketize(values, self.borders)


class EmptyJagged(Clean):
    """No id is kept, so a table is looked up with no id at all."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(64, 4)

    def also(self, values: torch.Tensor) -> torch.Tensor:
        kept = values.long()[values.long() > 1000]
        unique, inverse = torch.unique(kept, return_inverse=True)
        return values + self.table(unique)[inverse].sum(0)


class DecidesByGlobals(DecidesByData):
    """Reads a global and attributes before the decision."""

    def __init__(self) -> None:
        super().__init__()
        self.settings = SimpleNamespace(scaling=SimpleNamespace(scale=2.0))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        clean = (torch.nan_to_num(values).clamp(0, 50).log1p() - self.mean) * self.factor * FACTOR
        return self.layer(self.also(clean * self.settings.scaling.scale))


class DecidesInside(nn.Module):
    """Hands on to a model that decides by the data."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = DecidesByData()

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.inner(values)


class DecidesTwice(DecidesByData):
    """Cleans by the same code before and after the decision."""

    def cleaned(self, values: torch.Tensor) -> torch.Tensor:
        clean = torch.nan_to_num(values).clamp(0, 50).log1p() - self.mean
        return clean / 2 if clean.sum() > 0 else clean

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.layer(self.cleaned(values) + self.cleaned(values * 2))


class ChangesInPlaceLater(Clean):
    """Changes a value that was computed before the decision, and the batch."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        clean = torch.nan_to_num(values).clamp(0, 50)
        if clean.max() > 3:
            clean.mul_(0.5)
            values.add_(1)
        return self.layer(clean + torch.nan_to_num(values))


class ChangesAPartLater(Clean):
    """Changes a part of a value that was computed before the decision."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        clean = torch.nan_to_num(values).clamp(0, 50)
        first, scaled = clean[:, :1], clean.log1p() - self.mean
        if scaled.max() > 1:
            first.zero_()
        return self.layer(clean + scaled)


class DecidesAndNormalises(DecidesByData):
    """Draws numbers and keeps running statistics behind the decision."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(1)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.norm(nn.functional.dropout(super().forward(values), 0.5, self.training))


class DecidesAtOnce(Clean):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        if values.sum() > 5:
            values = values / 2
        return super().forward(values)


class Scaled(Rows):
    """A dataset that the program changes between two epochs."""

    scale = 1.0

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        values, label = super().__getitem__(index)
        return values * self.scale, label
