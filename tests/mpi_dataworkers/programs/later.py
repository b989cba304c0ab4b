"""A program that changes between two passes what its processes inherit, and data workers do not. Prints its batches."""

from __future__ import annotations

import codecs
import json
import mimetypes
from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader, Dataset

STEPS, PASSES, CHANGED_BEFORE = 40, 5, 3  # by then more steps were compared than those of a first pass


class Each(Dataset[Any]):
    """Calls a function for each index."""

    def __init__(self, item: Callable[[int], Any]) -> None:
        self.item = item

    def __len__(self) -> int:
        return 2 * STEPS

    def __getitem__(self, index: int) -> Any:
        return index, self.item(index)


def kind_of_file(index: int) -> str | None:
    return mimetypes.guess_type(f"{index}.own")[0]


def written(_: int) -> str:
    try:
        return json.dumps({1})
    except TypeError:
        return "no JSON"


def coded(_: int) -> bytes:
    try:
        return "é".encode("ascii", "own")
    except LookupError:
        return b"no such handler"


def set_default() -> None:
    json.JSONEncoder.default = lambda _, value: sorted(value)  # type: ignore[method-assign]


KINDS: list[tuple[Callable[[int], Any], Callable[[], Any]]] = [
    (kind_of_file, lambda: mimetypes.add_type("application/own", ".own")),
    (written, set_default),
    (coded, lambda: codecs.register_error("own", lambda error: ("?", error.end))),
]


def as_list(samples: list[Any]) -> list[Any]:
    return samples


if __name__ == "__main__":
    for item, change in KINDS:
        loader = DataLoader(Each(item), batch_size=2, num_workers=1, collate_fn=as_list)
        for number in range(PASSES):
            if number == CHANGED_BEFORE:
                change()
            print(item.__name__, number, list(loader), flush=True)
