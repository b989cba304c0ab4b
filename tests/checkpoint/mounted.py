"""A file system in memory of a test's own, as small as it likes."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def mounted_memory(place: Path, size: str) -> Iterator[Path]:
    """Mount it; a test that may not is skipped.

    Args:
        place: where; it must not exist.
        size: as mount(8) takes it, such as 128k.
    """
    place.mkdir()
    options = f"size={size},mode=1777"
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"mounting a tmpfs is not allowed here: {mounted.stderr.decode().strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def fill(place: Path) -> None:
    """Take every page of it that is free."""
    with (place / "filler").open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
