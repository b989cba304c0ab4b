"""For all tests of the partitioner."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _no_progress_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """The progress bar of torch's compiler starts a thread that stays."""
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)
