"""Training programs of many kinds, each as its author would write it: functions that give losses as exact numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

ROWS, BATCH = 60 * 16, 16


class Rows(Dataset[dict[str, Any]]):
    """Rows as dictionaries: ids, numbers with gaps, a label and a name."""

    def __init__(self, num_rows: int = ROWS) -> None:
        self._num_rows = num_rows

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        numbers = torch.arange(24.0) * (index % 17) + index % 5
        numbers[index % 24] = float("nan") if index % 7 == 0 else index
        ids = (torch.arange(16) * (index % 31) + index) % 1000
        return {"ids": ids, "numbers": numbers, "label": torch.tensor(float(index % 2)), "name": f"row-{index}"}


class Clean(nn.Module):
    """Cleans its numbers in 30 operators, then a layer."""

    def __init__(self, num_outputs: int = 1) -> None:
        super().__init__()
        self.register_buffer("mean", torch.linspace(0, 1, 24))
        self.layer = nn.Linear(24, num_outputs)

    def cleaned(self, numbers: torch.Tensor) -> torch.Tensor:
        values = torch.nan_to_num(numbers).clamp(0, 500)
        for number in range(9):
            values = (values + number % 3).abs().log1p()
        return values - self.mean

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return self.layer(self.cleaned(numbers)).squeeze(-1)


def loss_of(logits: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return nn.functional.binary_cross_entropy_with_logits(logits, label)


class Trainer:
    """A model, its optimizer and the losses so far."""

    def __init__(self, model: nn.Module) -> None:
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        self.losses: list[str] = []

    def note(self, value: torch.Tensor) -> None:
        self.losses.append(float(value.detach()).hex())

    def step(self, loss: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.note(loss)


class LikeHuggingFace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.clean, self.head = nn.Embedding(1000, 8), Clean(8), nn.Linear(16, 1)

    def forward(
        self,
        ids: Any = None,
        numbers: Any = None,
        label: Any = None,
        mask: Any = None,
        return_dict: bool = True,
        **_: Any,
    ) -> Any:
        mask = ids != 0 if mask is None else mask
        words = (self.table(ids) * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True).clamp(min=1)
        logits = self.head(torch.cat([words, self.clean.layer(self.clean.cleaned(numbers))], 1)).squeeze(-1)
        loss = None if label is None else loss_of(logits, label)
        return {"loss": loss, "logits": logits} if return_dict else (loss, logits)


def keywords() -> list[str]:
    trainer = Trainer(model := LikeHuggingFace())
    for batch in DataLoader(Rows(), BATCH):
        del batch["name"]
        trainer.step(model(**{name: value.to("cpu") for name, value in batch.items()})["loss"])
    return trainer.losses


def names_in_keywords() -> list[str]:
    trainer = Trainer(model := LikeHuggingFace())
    for batch in DataLoader(Rows(), BATCH):
        trainer.step(model(**batch)["loss"])
    return trainer.losses


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


def wrapped() -> list[str]:
    trainer = Trainer(model := Wrapper(Clean()))
    for batch in DataLoader(Rows(), BATCH, shuffle=True, generator=torch.Generator().manual_seed(3)):
        trainer.step(loss_of(model(batch["numbers"]), batch["label"]))
    return trainer.losses


class HasDefaults(Clean):
    def forward(self, numbers: torch.Tensor, scale: float = 2.0, mask: Any = None, *, power: int = 1) -> torch.Tensor:
        values = self.cleaned(numbers) * scale**power
        return self.layer(values if mask is None else values * mask).squeeze(-1)


def defaults() -> list[str]:
    trainer = Trainer(model := HasDefaults())
    for number, batch in enumerate(DataLoader(Rows(), BATCH)):
        numbers = batch["numbers"]
        logits = model(numbers) if number < 20 else model(numbers, 3.0) if number < 35 else model(numbers, power=2)
        trainer.step(loss_of(logits, batch["label"]))
    return trainer.losses


def hooks() -> list[str]:
    trainer = Trainer(model := Clean())
    seen: list[float] = []
    model.register_forward_hook(lambda _, __, output: seen.append(float(output.detach().mean())))
    model.register_forward_pre_hook(lambda _, given: (given[0] * 1.0,) if len(seen) % 10 == 9 else None)
    model.layer.weight.register_hook(lambda gradient: gradient * 0.5)
    for batch in DataLoader(Rows(), BATCH):
        trainer.step(loss_of(model(batch["numbers"]), batch["label"]))
    return [*trainer.losses, *map(float.hex, seen)]


def hooks_inside() -> list[str]:
    trainer = Trainer(model := Clean())
    model.layer.register_forward_hook(lambda _, __, output: output * 2.0)
    for batch in DataLoader(Rows(), BATCH):
        trainer.step(loss_of(model(batch["numbers"]), batch["label"]))
    return trainer.losses


def compiled_for_any_size() -> list[str]:
    trainer = Trainer(model := Clean())
    compiled = torch.compile(model, backend="eager", dynamic=True)
    for batch in DataLoader(Rows(ROWS - 5), BATCH):
        trainer.step(loss_of(compiled(batch["numbers"]), batch["label"]))
    return trainer.losses


def autocast_in_some_steps() -> list[str]:
    trainer = Trainer(model := Clean())
    for number, batch in enumerate(DataLoader(Rows(), BATCH)):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=number % 20 < 15):
            loss = loss_of(model(batch["numbers"]).float(), batch["label"])
        trainer.step(loss)
    return trainer.losses


class ChangesItsBatch(Clean):
    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        batch["clean"] = self.cleaned(batch["numbers"])
        batch["numbers"].nan_to_num_().mul_(2)
        batch["twice"] = batch["numbers"] * 2
        del batch["ids"]
        return self.layer(batch["clean"]).squeeze(-1)


def changes_its_batch() -> list[str]:
    trainer = Trainer(model := ChangesItsBatch())
    for batch in DataLoader(Rows(), BATCH):
        loss = loss_of(model(batch), batch["label"]) + 1e-6 * batch["clean"].mean() + 1e-9 * batch["twice"].sum()
        assert "ids" not in batch
        trainer.step(loss + 1e-9 * batch["numbers"].mean())
    return trainer.losses


class ChangesANumberInPlace(Clean):
    def forward(self, numbers: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        words = torch.nan_to_num(ids.float()).log1p()[:, :1]
        numbers.nan_to_num_().mul_(2)
        return self.layer(numbers + words).squeeze(-1)


def changes_a_tensor_in_place() -> list[str]:
    trainer = Trainer(model := ChangesANumberInPlace())
    for batch in DataLoader(Rows(), BATCH):
        loss = loss_of(model(batch["numbers"], batch["ids"]), batch["label"])
        trainer.step(loss + 1e-9 * batch["numbers"].mean())
    return trainer.losses


def two_models() -> list[str]:
    trainer = Trainer(models := nn.ModuleList([Clean(), Clean()]))
    for batch in DataLoader(Rows(), BATCH):
        trainer.step(loss_of(models[0](batch["numbers"]) + models[1](batch["numbers"]), batch["label"]))
    return trainer.losses


def accumulated() -> list[str]:
    trainer = Trainer(model := Clean())
    for number, batch in enumerate(DataLoader(Rows(), BATCH)):
        halves = batch["numbers"][::2], batch["label"][::2]
        for numbers, label in ((batch["numbers"], batch["label"]), halves):
            loss = loss_of(model(numbers), label) / 2
            loss.backward()
            trainer.note(loss)
        if number % 4 == 3:
            trainer.optimizer.step()
            trainer.optimizer.zero_grad()
    return trainer.losses


class DecidesInTraining(Clean):
    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        values = self.cleaned(batch["numbers"])
        if self.training and values.max() > 1:
            values = values / 2
        return self.layer(values).squeeze(-1)


def evaluated_in_between() -> list[str]:
    trainer = Trainer(model := DecidesInTraining())
    validation = DataLoader(Rows(3 * BATCH), BATCH)
    for _ in range(2):
        for number, batch in enumerate(DataLoader(Rows(ROWS // 2), BATCH)):
            trainer.step(loss_of(model(batch), batch["label"]))
            if number % 15 == 14:
                model.eval()
                with torch.no_grad():
                    for other in validation:
                        trainer.note(loss_of(model(other), other["label"]))
                model.train()
    return trainer.losses


PROGRAMS: tuple[Callable[[], list[str]], ...] = (
    *(keywords, names_in_keywords, wrapped, defaults, hooks, hooks_inside, compiled_for_any_size),
    *(autocast_in_some_steps, changes_its_batch, changes_a_tensor_in_place, two_models, accumulated),
    evaluated_in_between,
)
