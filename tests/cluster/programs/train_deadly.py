"""A training loop over a sample for which Slurm kills the job step of whoever makes it. It knows nothing of hetstream.

train_deadly.py LOG: who has made that sample, a line each.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset


class Deadly(Dataset):
    def __init__(self, log):
        self.log, self.trainer = log, os.getpid()

    def __len__(self):
        return 64

    def __getitem__(self, index):
        time.sleep(0.1)  # data workers come in time
        if index == 41:
            self.end()
        return torch.tensor(index)

    def end(self):
        mine = os.getpid(), os.getppid()
        who = {0: "trainer", 1: "child"}.get(mine.index(self.trainer) if self.trainer in mine else -1, "data worker")
        with open(self.log, "a") as noted:
            noted.write(f"{who}\n")
        if who == "data worker":
            step = f"{os.environ['SLURM_JOB_ID']}.{os.environ['SLURM_STEP_ID']}"
            subprocess.run(["scancel", "--signal=KILL", step], check=True)
            time.sleep(60)  # it comes
        os.kill(os.getpid(), signal.SIGKILL)


def wait_for_a_data_worker(log):
    """They make steps ahead of the program: on a busy machine they may come later than it does."""
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and not (os.path.exists(log) and "data worker" in Path(log).read_text()):
        time.sleep(0.1)


if __name__ == "__main__":
    seen = []
    try:
        for batch in DataLoader(Deadly(sys.argv[1]), 4, num_workers=2):
            seen += batch.tolist()
            if len(seen) == 40:
                wait_for_a_data_worker(sys.argv[1])
    except RuntimeError as error:
        print(f"{len(seen)} samples, then: {str(error).splitlines()[0]}")
    print("the trainer ends by itself")
