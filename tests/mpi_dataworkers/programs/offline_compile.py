"""Compile Triton kernels for GPUs that are not here: in a process of its own, where nothing is interpreted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def compile_offline(program: str, cache: str) -> str:
    """What a program prints that compiles something; Triton keeps what it has compiled in the folder `cache`."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = cache
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
