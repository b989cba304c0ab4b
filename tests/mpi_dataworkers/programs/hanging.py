"""A program that only knows torch; one sample hangs or ends its process. Says what it gets, without numbers of
processes."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from typing import Any

from torch.utils.data import DataLoader, Dataset

PART, AT, BATCH = sys.argv[1], int(sys.argv[2]), 4


class Some(Dataset[Any]):
    def __len__(self) -> int:
        return 800

    def __getitem__(self, index: int) -> Any:
        if index == AT:
            time.sleep(6 if PART == "hangs" else 0.7)  # until the program waits
            if PART == "exits":
                os._exit(3)
            if PART == "is killed":
                os.kill(os.getpid(), signal.SIGSEGV)
        return index


if __name__ == "__main__":
    given = []
    try:
        for batch in DataLoader(Some(), BATCH, num_workers=2, timeout=2 if PART == "hangs" else 0):
            given += batch.tolist()
    except RuntimeError as error:
        print(type(error).__name__, *[re.sub(r"\d+", "N", str(one)) for one in (error, error.__cause__)])
    print(given == [*range(AT // BATCH * BATCH)], len(given))
