"""Which saved record is which, and what its directory on disk is called. Pure."""

from __future__ import annotations

import re
from typing import NamedTuple

_NAME = re.compile(r"step-(\d{10,19})\.(\d{1,19})(?:\.(\d{1,19}))?", re.ASCII)
# Of a step, an attempt and a repeat: one more still fits into a word of 64 bits, with and without a sign.
MAX_NUMBER = 2**63 - 2


class Generation(NamedTuple):
    """One saved record. A later attempt's step 60 is newer than an earlier attempt's step 100.

    Attributes:
        attempt: number of the start of the training job on its checkpoint directory, from 1.
        step: of training.
        repeat: how often the attempt had saved this step before. Ranks save the same steps in the same order, so all of
            them count the same.
    """

    attempt: int
    step: int
    repeat: int = 0

    @property
    def directory_name(self) -> str:
        """What the checkpoint of this generation is called; names of one attempt sort by step."""
        return f"step-{self.step:010}.{self.attempt}" + (f".{self.repeat}" if self.repeat else "")

    @staticmethod
    def of_directory(name: str) -> Generation | None:
        """The generation that a directory of this name holds, or None if it is no checkpoint's name."""
        match = _NAME.fullmatch(name)
        found = Generation(int(match[2]), int(match[1]), int(match[3] or 0)) if match else None
        # Only the one spelling that `directory_name` writes.
        return found if found and found.directory_name == name and max(found) <= MAX_NUMBER else None

    def __str__(self) -> str:
        again = f" (saved {self.repeat + 1} times)" if self.repeat else ""
        return f"step {self.step} of attempt {self.attempt}{again}"
