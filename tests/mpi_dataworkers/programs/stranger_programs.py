"""Training programs that do what partitioners do not expect: functions that give losses as exact numbers."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from kinds_of_programs import BATCH, Clean, Rows, Trainer, loss_of
from torch import nn
from torch.utils.data import DataLoader, default_collate


class Pair(NamedTuple):
    numbers: torch.Tensor
    label: torch.Tensor


@dataclass
class Record:
    numbers: torch.Tensor
    label: torch.Tensor


def as_pair(rows: list[Any]) -> Pair:
    batch = default_collate(rows)
    return Pair(batch["numbers"], batch["label"])


def as_record(rows: list[Any]) -> Record:
    batch = default_collate(rows)
    return Record(batch["numbers"], batch["label"])


class OfOneObject(Clean):
    def forward(self, batch: Any) -> torch.Tensor:
        return self.layer(self.cleaned(batch.numbers)).squeeze(-1)


def named_tuples() -> list[str]:
    trainer = Trainer(model := OfOneObject())
    for batch in DataLoader(Rows(), BATCH, collate_fn=as_pair):
        assert type(batch) is Pair
        trainer.step(loss_of(model(batch), batch.label))
    return trainer.losses


def data_classes() -> list[str]:
    trainer = Trainer(model := OfOneObject())
    for batch in DataLoader(Rows(), BATCH, collate_fn=as_record):
        trainer.step(loss_of(model(batch), batch.label))
    return trainer.losses


class KeywordOnly(Clean):
    def forward(self, *, numbers: torch.Tensor, ids: torch.Tensor, scale: float = 1.0) -> torch.Tensor:  # type: ignore[override]
        return self.layer(self.cleaned(numbers) * scale + (ids % 7)[:, :1]).squeeze(-1)


def keyword_only() -> list[str]:
    trainer = Trainer(model := KeywordOnly())
    for batch in DataLoader(Rows(), BATCH):
        trainer.step(loss_of(model(ids=batch["ids"], numbers=batch["numbers"]), batch["label"]))
    return trainer.losses


class Drops(Clean):
    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return self.layer(nn.functional.dropout(self.cleaned(numbers), 0.3, self.training)).squeeze(-1)


def called_twice_with_dropout() -> list[str]:
    trainer = Trainer(model := Drops())
    for batch in DataLoader(Rows(), BATCH):
        one, other = model(batch["numbers"]), model(batch["numbers"])
        trainer.step(loss_of(one, batch["label"]) + (one - other).square().mean())
    return trainer.losses


class TypedRows(Rows):
    """Rows of the same types whatever torch's default type is."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = super().__getitem__(index)
        return row | {name: row[name].float() for name in ("numbers", "label")}


def both_drops() -> list[str]:
    """How far apart two calls with one batch are."""
    trainer = Trainer(model := Drops())
    for batch in DataLoader(Rows(), BATCH):
        trainer.step((model(batch["numbers"]) - model(batch["numbers"])).square().mean())
    return trainer.losses


class DefaultType(Clean):
    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        steps = torch.linspace(0, 1, 24)
        return self.layer((self.cleaned(numbers) * steps).to(self.layer.weight.dtype)).squeeze(-1)


def default_type_in_mid_run() -> list[str]:
    trainer = Trainer(model := DefaultType())
    try:
        for number, batch in enumerate(DataLoader(TypedRows(), BATCH)):
            if number == 30:
                torch.set_default_dtype(torch.float64)
            trainer.step(loss_of(model(batch["numbers"]), batch["label"].to(model.layer.weight.dtype)))
    finally:
        torch.set_default_dtype(torch.float32)
    return trainer.losses


def another_default_type() -> list[str]:
    torch.set_default_dtype(torch.float64)
    try:
        trainer = Trainer(model := DefaultType())
        for batch in DataLoader(Rows(), BATCH):
            part = batch["ids"][:, :1] / 7
            trainer.step(loss_of(model(batch["numbers"]), batch["label"].double()) + 1e-9 * part.mean())
    finally:
        torch.set_default_dtype(torch.float32)
    return trainer.losses


class Divides(DefaultType):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return self.layer(torch.cat([ids / 7, (ids[:, :8] / 3).sin()], 1)).squeeze(-1)


def whole_numbers_divided_in_another_default_type() -> list[str]:
    torch.set_default_dtype(torch.float64)
    try:
        trainer = Trainer(model := Divides())
        for batch in DataLoader(Rows(), BATCH):
            trainer.step(loss_of(model(batch["ids"]), batch["label"].double()))
    finally:
        torch.set_default_dtype(torch.float32)
    return trainer.losses


def model_of_another_type_in_mid_run() -> list[str]:
    trainer = Trainer(model := DefaultType())
    for number, batch in enumerate(DataLoader(Rows(), BATCH)):
        if number == 30:
            model.double()
        trainer.step(loss_of(model(batch["numbers"]), batch["label"].to(model.layer.weight.dtype)))
    return trainer.losses


def left_early() -> list[str]:
    trainer = Trainer(model := Clean())
    loader = DataLoader(Rows(), BATCH, shuffle=True, generator=torch.Generator().manual_seed(5))
    for most in (2, 9, 25, 4, 20):
        for batch in itertools.islice(loader, most):
            trainer.step(loss_of(model(batch["numbers"]), batch["label"]))
    return trainer.losses


class Marked(torch.Tensor):
    pass


def as_marked(rows: list[Any]) -> Any:
    batch = default_collate(rows)
    return {"numbers": batch["numbers"].as_subclass(Marked), "label": batch["label"]}


def own_kind_of_tensor() -> list[str]:
    trainer = Trainer(model := Clean())
    for batch in DataLoader(Rows(), BATCH, collate_fn=as_marked):
        trainer.step(loss_of(model(batch["numbers"]), batch["label"]))
    return trainer.losses


def lone_last_row() -> list[str]:
    trainer = Trainer(model := Clean())
    loader = DataLoader(Rows(20 * BATCH + 1), BATCH)
    for _ in range(3):
        for batch in loader:
            trainer.step(loss_of(model(batch["numbers"]), batch["label"]))
    return trainer.losses


class OfGenerators(Clean):
    def parts(self, values: torch.Tensor) -> Iterator[torch.Tensor]:
        for number in range(4):
            got = yield torch.nan_to_num(values) * number
            if got is not None:
                values = values + got

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return self.layer(sum(self.parts(numbers)) + self.cleaned(numbers)).squeeze(-1)  # type: ignore[arg-type]


def generators() -> list[str]:
    trainer = Trainer(model := OfGenerators())
    for batch in DataLoader(Rows(), BATCH):
        trainer.step(loss_of(model(batch["numbers"]), batch["label"]))
    return trainer.losses


def hooks_in_mid_run() -> list[str]:
    trainer, seen = Trainer(model := Clean()), []
    for number, batch in enumerate(DataLoader(Rows(), BATCH)):
        if number == 20:
            model.register_forward_hook(lambda _, __, output: output * 0.5)
        if number == 30:
            handle = model.layer.register_forward_hook(lambda _, given, output: seen.append(given[0].mean()))
        if number == 40:
            handle.remove()
        trainer.step(loss_of(model(batch["numbers"]), batch["label"]))
    return [*trainer.losses, *(float(value).hex() for value in seen)]


def hooks_of_all_modules_in_mid_run() -> list[str]:
    trainer = Trainer(model := Clean())
    handle = None
    for number, batch in enumerate(DataLoader(Rows(), BATCH)):
        if number == 20:
            handle = nn.modules.module.register_module_forward_hook(lambda _, __, output: output * 0.5)
        if number == 40 and handle is not None:
            handle.remove()
        trainer.step(loss_of(model(batch["numbers"]), batch["label"]))
    return trainer.losses


def averaged_copy() -> list[str]:
    trainer, average = Trainer(model := Clean()), None
    for number, batch in enumerate(DataLoader(Rows(), BATCH)):
        trainer.step(loss_of(model(batch["numbers"]), batch["label"]))
        if number == 12:
            average = copy.deepcopy(model)
        if average is not None:
            with torch.no_grad():
                for mine, its in zip(model.parameters(), average.parameters(), strict=True):
                    its.lerp_(mine, 0.1)
                trainer.note(loss_of(average(batch["numbers"]), batch["label"]))
    return trainer.losses


class Catches(Clean):
    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        try:
            values = self.cleaned(numbers) @ torch.zeros(3, 3)
        except RuntimeError:
            values = self.cleaned(numbers)
        return self.layer(values).squeeze(-1)


def caught_in_forward() -> list[str]:
    trainer = Trainer(model := Catches())
    for batch in DataLoader(Rows(), BATCH):
        trainer.step(loss_of(model(batch["numbers"]), batch["label"]))
    return trainer.losses


class Refuses(Clean):
    def forward(self, numbers: torch.Tensor, limit: float = 1e9) -> torch.Tensor:
        if limit < 0:
            raise ValueError(f"a limit of {limit}")
        return self.layer(self.cleaned(numbers)).squeeze(-1)


def caught_outside() -> list[str]:
    trainer = Trainer(model := Refuses())
    for number, batch in enumerate(DataLoader(Rows(), BATCH)):
        try:
            outputs = model(batch["numbers"], -1.0 if number % 7 == 6 else 1e9)
        except ValueError as error:
            trainer.losses.append(str(error))
            continue
        trainer.step(loss_of(outputs, batch["label"]))
    return trainer.losses


def inference_mode_in_between() -> list[str]:
    trainer = Trainer(model := Clean())
    validation = DataLoader(Rows(2 * BATCH), BATCH)
    for number, batch in enumerate(DataLoader(Rows(), BATCH)):
        trainer.step(loss_of(model(batch["numbers"]), batch["label"]))
        if number % 12 == 11:
            with torch.inference_mode():
                trainer.note(loss_of(model(batch["numbers"]), batch["label"]))  # in training mode
                model.eval()
                for other in validation:
                    trainer.note(loss_of(model(other["numbers"]), other["label"]))
                model.train()
    return trainer.losses


def called_with_other_parameters() -> list[str]:
    trainer = Trainer(model := Clean())
    for number, batch in enumerate(DataLoader(Rows(), BATCH)):
        inner = loss_of(model(batch["numbers"]), batch["label"])
        if number % 3 == 2:
            names = [name for name, _ in model.named_parameters()]
            gradients = torch.autograd.grad(inner, [*model.parameters()], create_graph=True)
            fast = {
                name: value - 0.1 * gradient
                for name, value, gradient in zip(names, model.parameters(), gradients, strict=True)
            }
            inner = loss_of(torch.func.functional_call(model, fast, (batch["numbers"],)), batch["label"])
        trainer.step(inner)
    return trainer.losses


def gradients_of_each_row() -> list[str]:
    trainer = Trainer(model := Clean())
    parameters = dict(model.named_parameters())

    def row_loss(given: Any, numbers: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return loss_of(torch.func.functional_call(model, given, (numbers.unsqueeze(0),)), label.unsqueeze(0))

    for number, batch in enumerate(DataLoader(Rows(), BATCH)):
        if number % 5 == 4:
            each = torch.func.vmap(torch.func.grad(row_loss), in_dims=(None, 0, 0))
            found = each({name: value.detach() for name, value in parameters.items()}, batch["numbers"], batch["label"])
            trainer.note(sum(value.square().sum() for value in found.values()))  # type: ignore[arg-type]
        trainer.step(loss_of(model(batch["numbers"]), batch["label"]))
    return trainer.losses


def halved(forward: Callable[..., torch.Tensor], numbers: torch.Tensor) -> torch.Tensor:
    return forward(numbers) * 0.5


def own_forward_in_mid_run() -> list[str]:
    trainer = Trainer(model := Clean())
    own = model.forward
    for number, batch in enumerate(DataLoader(Rows(), BATCH)):
        if number == 25:
            own = model.forward
            model.forward = functools.partial(halved, own)  # type: ignore[method-assign]
        if number == 45:
            model.forward = own  # type: ignore[method-assign]
        trainer.step(loss_of(model(batch["numbers"]), batch["label"]))
    return trainer.losses


def closures() -> list[str]:
    model = Clean()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.01, max_iter=3)
    losses: list[str] = []
    for batch in DataLoader(Rows(), BATCH):

        def closure(batch: Any = batch) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model(batch["numbers"]), batch["label"])
            loss.backward()
            losses.append(float(loss.detach()).hex())
            return loss

        optimizer.step(closure)
    return losses


def two_optimizers() -> list[str]:
    model = Clean(2)
    first, second = torch.optim.SGD([model.layer.weight], lr=0.01), torch.optim.Adam([model.layer.bias])
    losses = []
    for number, batch in enumerate(DataLoader(Rows(), BATCH)):
        outputs = model(batch["numbers"])
        loss = loss_of(outputs[:, 0], batch["label"]) + outputs[:, 1].square().mean()
        optimizer = first if number % 2 else second
        first.zero_grad()
        second.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()).hex())
    return losses


def saliency() -> list[str]:
    trainer = Trainer(model := OfGenerators())
    for number, batch in enumerate(DataLoader(Rows(), BATCH)):
        numbers = batch["numbers"]
        if number % 6 == 5:
            numbers.requires_grad_()
        loss = loss_of(model(numbers), batch["label"])
        if number % 6 == 5:
            (gradient,) = torch.autograd.grad(loss, numbers, retain_graph=True)
            trainer.note(gradient.nan_to_num().square().sum())
        trainer.step(loss)
    return trainer.losses


class GivesItsInput(Clean):
    def forward(self, numbers: torch.Tensor) -> Any:
        clean = self.cleaned(numbers)
        return self.layer(clean).squeeze(-1), numbers[:, :2], clean


def outputs_that_are_inputs() -> list[str]:
    trainer = Trainer(model := GivesItsInput())
    for batch in DataLoader(Rows(), BATCH):
        outputs, part, clean = model(batch["numbers"])
        part.nan_to_num_().add_(1)
        trainer.step(loss_of(outputs, batch["label"]) + 1e-9 * batch["numbers"].nan_to_num().sum() + 1e-9 * clean.sum())
    return trainer.losses


class Frozen(Clean):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(24)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return self.layer(self.norm(self.cleaned(numbers))).squeeze(-1)


def a_part_in_eval_mode() -> list[str]:
    trainer = Trainer(model := Frozen())
    for number, batch in enumerate(DataLoader(Rows(), BATCH)):
        if number % 20 == 15:
            model.norm.eval()
        if number % 20 == 19:
            model.train()
        trainer.step(loss_of(model(batch["numbers"]), batch["label"]))
    return trainer.losses


PROGRAMS: tuple[Callable[[], list[str]], ...] = (
    *(named_tuples, data_classes, keyword_only, called_twice_with_dropout, default_type_in_mid_run),
    *(another_default_type, whole_numbers_divided_in_another_default_type),
    *(model_of_another_type_in_mid_run, left_early, own_kind_of_tensor, lone_last_row, generators, hooks_in_mid_run),
    hooks_of_all_modules_in_mid_run,
    *(averaged_copy, caught_in_forward, caught_outside, inference_mode_in_between, called_with_other_parameters),
    *(gradients_of_each_row, own_forward_in_mid_run, closures, two_optimizers, saliency, outputs_that_are_inputs),
    a_part_in_eval_mode,
)
