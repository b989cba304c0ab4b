"""Shared memory without a free page: real file systems in memory, filled by somebody else."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hetstream import CheckpointOptions, FlashCheckpointer
from tests.checkpoint.mounted import fill, mounted_memory

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: mounts a file system")


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """Shared memory of 128 KiB."""
    with mounted_memory(tmp_path / "small", "128k") as place:
        yield place
        assert os.listdir(place) == ["filler"]


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A directory of which a file's path has less than the 128 bytes from which tmpfs gives a link's target a page."""
    with tempfile.TemporaryDirectory(prefix="hets-") as made:
        yield Path(made)


def test_a_long_path_needs_a_page_for_each_link_and_a_save_without_it_is_an_error_in_the_log(
    small: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / ("long" * 32)
    with FlashCheckpointer(directory, options=CheckpointOptions(shared_memory=small)) as checkpointer:
        fill(small)
        assert not checkpointer.save(1, {"w": torch.zeros(1000)})
        assert list((directory / ".memory").iterdir()) == []
    assert "Nor is there room for a link to" in caplog.text


@pytest.mark.shows("`/dev/shm` is full: refused before a byte is written, and training goes on")
@pytest.mark.shows("shared memory that is too small is refused before a byte is written, and a file takes its place")
@pytest.mark.parametrize("is_full_before", [True, False], ids=["before", "meanwhile"])
def test_checkpoints_get_to_disk_where_shared_memory_has_no_free_page(
    small: Path, short_path: Path, is_full_before: bool, caplog: pytest.LogCaptureFixture
) -> None:
    if is_full_before:
        fill(small)
    with FlashCheckpointer(short_path / "ckpt", options=CheckpointOptions(shared_memory=small)) as checkpointer:
        if not is_full_before:
            fill(small)
        for step in (1, 2):
            assert checkpointer.save(step, {"w": torch.full((1000,), float(step))})
            assert checkpointer.wait(60)
        assert checkpointer.stats().persisted.step == 2
    assert caplog.text.count("checkpoints leave shared memory") == 1
    assert "another is started" not in caplog.text
