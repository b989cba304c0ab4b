"""A second Python environment for tests: the packages of this one, and a module that is installed nowhere else."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

ONLY_THERE = '''
import json
import os
import sys

import torch


class Places(torch.utils.data.Dataset):
    """Each sample says which process made it, and where."""

    def __len__(self):
        return 400

    def __getitem__(self, index):
        place = {"pid": os.getpid(), "prefix": sys.prefix, "path": os.environ["PATH"].split(":")[0]}
        place |= {"image": os.environ.get("APPTAINER_CONTAINER", "")}
        return torch.tensor(list(json.dumps(place).ljust(400).encode()), dtype=torch.uint8)


class Numbers(torch.utils.data.Dataset):
    """Samples whose bytes do not depend on who makes them."""

    def __len__(self):
        return 50

    def __getitem__(self, index):
        return torch.arange(index, index + 16, dtype=torch.float32).sqrt()


def text_of(sample):
    return bytes(sample.tolist()).decode()
'''


def make_environment(directory: Path) -> Path:
    """Make a virtual environment that finds this one's packages; returns its directory."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(directory)], check=True, timeout=60)
    share_packages(directory)
    return directory


def share_packages(environment: Path) -> None:
    """Let a Python environment find this one's packages, and add the module that is installed nowhere else."""
    (library,) = environment.glob("lib/python3*")
    site = library / "site-packages"
    site.mkdir(exist_ok=True)
    (site / "shared.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    (site / "only_there.py").write_text(ONLY_THERE)
