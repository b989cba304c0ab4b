"""A program with torch's DataLoader over photographs, whose reading it calls deterministic. Prints a digest an epoch.

Usage: cached_photographs.py FOLDER [MARK]. The first process that makes a sample and finds no file MARK makes it, and
is killed when an entry of the cache is to get its name.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from hetstream import deterministic
from hetstream.base.files import Directory


@deterministic
def decoded(path):
    return np.array(Image.open(path).convert("RGB").resize((48, 48)))


class Photographs(Dataset):
    def __init__(self, folder, mark):
        self.paths, self.mark = sorted(map(str, Path(folder).glob("*.png"))), mark

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        if self.mark and not os.path.exists(self.mark):
            Path(self.mark).touch()
            Directory.rename = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        image = decoded(self.paths[index])
        top, left = torch.randint(16, (2,)).tolist()
        image += np.random.randint(9)
        return torch.from_numpy(image)[top : top + 32, left : left + 32]


torch.manual_seed(3)
np.random.seed(3)
loader = DataLoader(Photographs(sys.argv[1], sys.argv[2] if sys.argv[2:] else ""), 4, shuffle=True, num_workers=2)
for _ in range(2):
    print(hashlib.sha256(b"".join(batch.numpy().tobytes() for batch in loader)).hexdigest())
