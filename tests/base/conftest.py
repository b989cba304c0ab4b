"""Places for tests with several users."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def common_place() -> Iterator[Path]:
    """A directory that every user can reach and write to, with the sticky bit, as /tmp is."""
    path = Path(tempfile.mkdtemp(prefix="hetstream-users-"))
    path.chmod(0o1777)
    yield path
    shutil.rmtree(path)
