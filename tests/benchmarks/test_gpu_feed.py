"""What `bench-gpu_feed` makes of steps. Its whole course without a GPU is a stage of `test_gpu_session.py`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

from benchmarks import gpu_feed
from benchmarks.gpu_feed import DRY, Fed, Trainer, report


def test_the_gpu_is_idle_between_steps_and_not_in_them(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(DRY, torch.device("cpu"))
    now_s = [0.0]
    monkeypatch.setattr(gpu_feed.time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(trainer._clock, "seconds", lambda first, second: second - first)

    def step(images: torch.Tensor, labels: torch.Tensor) -> tuple[float, float]:
        now_s[0] += 0.3  # computes, as all wait for all here
        return now_s[0] - 0.3, now_s[0]

    def batches() -> Iterator[list[torch.Tensor]]:
        for number in itertools.count():
            now_s[0] += 5.0 if number == 0 else 0.1  # processes start
            yield [torch.zeros(2, 8, 8, 3, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64)]

    monkeypatch.setattr(trainer, "step", step)
    fed = trainer.fed(batches(), 20.0)
    assert fed.idle_share == pytest.approx(0.25, abs=0.02)
    assert fed.images_per_s == pytest.approx(2 / 0.4, rel=0.05)


def test_each_system_stands_beside_the_bound_and_ours_beside_the_others() -> None:
    rows = {
        (row.case, row.system): row.value
        for row in report(
            {
                "batches on the GPU": Fed(2000, 0.0),
                "data workers": Fed(1900, 0.05),
                "DataLoader, 1 process": Fed(100, 0.95),
            }
        )
    }
    assert rows["photographs", "data workers / batches on the GPU"] == pytest.approx(0.95)
    assert rows["photographs", "data workers / DataLoader, 1 process"] == pytest.approx(19)
    assert rows["GPU idle", "DataLoader, 1 process"] == pytest.approx(95)
    assert report({"data workers": Fed(1900, 0.05)})[0].value == 1900
