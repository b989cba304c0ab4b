"""Which tasks of an array a record of squeue stands for: `4`, `3-5,9%3`, `0-9:3`. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator

# Ends a list of indices that Slurm's commands have cut, perhaps within a number.
CUT = "..."
_PART = re.compile(r"(\d+)(?:-(\d+)(?::(\d+))?)?")


def num_tasks(text: str) -> int:
    """How many tasks these are, one at least; of indices that are cut as many as are there."""
    return sum(1 if part.endswith(CUT) else _length(_numbers(part)) for part in _parts(text)) or 1


def has_task(text: str, number: int) -> bool:
    """Whether this is one of them; of indices that are cut those are known that are there."""
    return any(number in _numbers(part) for part in _parts(text))


def _parts(text: str) -> Iterator[str]:
    return iter(text.split("%")[0].split(","))


def _numbers(part: str) -> range:
    found = _PART.fullmatch(part)
    if not found:
        return range(0)
    return range(int(found[1]), int(found[2] or found[1]) + 1, max(1, int(found[3] or 1)))


def _length(numbers: range) -> int:
    """`len` of a range that may be longer than any list."""
    return max(0, (numbers.stop - numbers.start + numbers.step - 1) // numbers.step)
