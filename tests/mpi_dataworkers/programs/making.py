"""A program whose samples make something outside, and which leaves its passes early. Prints its batches.

Arguments: what samples make (an empty file, say), and how many steps of each pass are taken.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

LENGTH, BATCH_SIZE, NUM_WORKERS = 1600, 4, 2
AHEAD = 2 * NUM_WORKERS  # torch's prefetch_factor
PLACE = Path("made")


class Making(Dataset[Any]):
    """Each sample is there once, with the level of when it was made."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        place = PLACE / str(index)
        if self.kind == "database":
            return self.of_database(index)
        if not os.path.lexists(place):
            self.make(place, int(Path("level").read_text()))
        if self.kind == "file":
            return torch.tensor([index, int(place.read_text())])
        return torch.tensor([index, 0])

    def make(self, place: Path, level: int) -> None:
        if self.kind == "file":
            fresh = place.with_name(f"{place.name}.{os.getpid()}")
            fresh.write_text(str(level))
            fresh.replace(place)
        elif self.kind == "empty file":
            place.touch()
        elif self.kind == "directory":
            place.mkdir(exist_ok=True)
        elif self.kind == "link":
            with contextlib.suppress(FileExistsError):
                place.symlink_to("level")

    def of_database(self, index: int) -> Any:
        database = sqlite3.connect("made.db", timeout=60)
        try:
            database.execute("insert or ignore into made values (?, ?)", (index, int(Path("level").read_text())))
            database.commit()
            return torch.tensor(database.execute("select * from made where number = ?", (index,)).fetchone())
        finally:
            database.close()


def num_made() -> int:
    if (database := Path("made.db")).exists():
        connection = sqlite3.connect(database, timeout=60)
        try:
            return int(connection.execute("select count(*) from made").fetchone()[0])
        finally:
            connection.close()
    return sum("." not in name for name in os.listdir(PLACE))


def main() -> None:
    kind = sys.argv[1]
    PLACE.mkdir()
    if kind == "database":
        database = sqlite3.connect("made.db")
        database.execute("create table made (number integer primary key, level integer)")
        database.commit()
        database.close()
    generator = torch.Generator().manual_seed(1)
    loader = DataLoader(Making(kind), BATCH_SIZE, shuffle=True, num_workers=NUM_WORKERS, generator=generator)
    for epoch, num_steps in enumerate(map(int, sys.argv[2:])):
        Path("level").write_text(str(epoch + 3))
        before, batches = num_made(), iter(loader)
        for step in range(num_steps):
            print(epoch, step, next(batches).tolist())
        most, end = (num_steps + AHEAD) * BATCH_SIZE, time.monotonic() + 30
        while num_made() < (most if epoch == 0 else 0) and time.monotonic() < end:
            time.sleep(0.01)  # until torch's workers, too, have made all that they were asked for
        del batches
        made = num_made() - before
        print(epoch, "made no more than torch" if made <= most else f"made {made} samples, torch at most {most}")


if __name__ == "__main__":
    main()
