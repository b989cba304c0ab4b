"""Run apt-get, dpkg-deb and patchelf. Called by install.py and roots.py; it decides nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence

from tests.devcluster.errors import InstallFailed

OUTPUT_TAIL_LINES = 15


def has_apt() -> bool:
    """Whether this machine has apt-get."""
    return shutil.which("apt-get") is not None


def run_quietly(argv: Sequence[str]) -> str:
    """Run a packaging command without questions and return what it printed.

    Raises:
        InstallFailed: it exited with anything but 0; the message holds the end of its output.
    """
    done = subprocess.run(
        list(argv),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**os.environ, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C.UTF-8"},
    )
    if done.returncode != 0:
        tail = "\n".join(f"    {line}" for line in done.stdout.splitlines()[-OUTPUT_TAIL_LINES:])
        raise InstallFailed(f"{' '.join(argv)} exited with {done.returncode}:\n{tail}")
    return done.stdout
