"""A program that notes in its samples which of its objects has made them, and looks for it in its batches, as MONAI's
inverse transforms do. Prints what it finds."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset


class Step:
    """One object of the dataset's."""

    def __init__(self, factor: int) -> None:
        self.factor = factor


class Samples(Dataset[Any]):
    def __init__(self, how: str) -> None:
        self.how = how
        self.steps = [Step(1), Step(2)]

    def __len__(self) -> int:
        return 12

    def note(self, step: Step) -> Any:
        forms: dict[str, Any] = {
            "number": id(step),
            "tensor": torch.tensor(id(step)),
            "text": f"made by {step!r}",
            "hash": {"steps": (hash(step), step.factor)},
            "class": id(type(step)),
        }
        return forms[self.how]

    def __getitem__(self, index: int) -> Any:
        return index, self.note(self.steps[index % 2])


def as_they_are(samples: list[Any]) -> list[Any]:
    return samples


def main() -> None:
    for how in ("number", "tensor", "text", "hash", "class"):
        dataset = Samples(how)
        for is_kept in (False, True) if how == "number" else (False,):
            loader = DataLoader(dataset, 2, collate_fn=as_they_are, num_workers=2, persistent_workers=is_kept)
            for _ in range(2):
                pairs = [pair for batch in loader for pair in batch]
                found = [str(note) == str(dataset.note(dataset.steps[index % 2])) for index, note in pairs]
                print(how, len(found), all(found))


if __name__ == "__main__":
    main()
