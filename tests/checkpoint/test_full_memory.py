"""Shared memory without a free page: real file systems in memory, filled by somebody else."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from checkpoint import FlashCheckpointer, Options
from tests.checkpoint.mounted import fill, mounted_memory

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: mounts a file system")


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """Shared memory of 128 KiB."""
    with mounted_memory(tmp_path / "small", "128k") as place:
        yield place
        assert os.listdir(place) == ["filler"]


@pytest.mark.parametrize("is_full_before", [True, False], ids=["before", "meanwhile"])
def test_checkpoints_get_to_disk_where_shared_memory_has_no_free_page(
    small: Path, tmp_path: Path, is_full_before: bool, caplog: pytest.LogCaptureFixture
) -> None:
    if is_full_before:
        fill(small)
    with FlashCheckpointer(tmp_path / "ckpt", options=Options(shared_memory=small)) as checkpointer:
        if not is_full_before:
            fill(small)
        for step in (1, 2):
            assert checkpointer.save(step, {"w": torch.full((1000,), float(step))})
            assert checkpointer.wait(60)
        assert checkpointer.stats().persisted.step == 2
    assert caplog.text.count("checkpoints leave shared memory") == 1
    assert "another is started" not in caplog.text
