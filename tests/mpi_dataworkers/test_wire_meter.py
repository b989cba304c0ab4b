"""How fast batches come: what the transports see of their way, and the rate that a cut is decided with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from hetstream.mpi_dataworkers.loader.statistics import WireMeter
from hetstream.mpi_dataworkers.partitioner.cut import Rates
from hetstream.mpi_dataworkers.partitioner.partition import is_other, with_wire

LOADER_OPTIONS: dict[str, Any] = {}


class Large(Dataset[torch.Tensor]):
    """Samples of 4 MiB."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((1 << 20,), float(index))


def test_batches_that_come_at_the_same_time_share_that_time() -> None:
    meter = WireMeter()
    assert meter.bytes_per_s is None
    meter.note(10 << 20, 0.0, 1.0)
    meter.note(10 << 20, 0.5, 1.5)
    assert meter.bytes_per_s == pytest.approx(20 * (1 << 20) / 1.5, rel=0.01)


def test_what_is_long_ago_counts_less() -> None:
    meter = WireMeter()
    for second in range(8):
        meter.note(1 << 30, float(second), second + 1.0)
    for step in range(8):
        meter.note(1 << 30, 8 + step / 4, 8 + (step + 1) / 4)
    assert meter.bytes_per_s == pytest.approx(4 << 30, rel=0.02)


def test_another_rate_of_the_wire_is_a_reason_to_decide_again() -> None:
    before = Rates(0.1, 0.1, 2, wire_bytes_per_s=1e9)
    assert not is_other(replace(before, wire_bytes_per_s=1.3e9), before)
    for other in (2e9, 5e8):
        assert is_other(replace(before, wire_bytes_per_s=other), before)


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_loader_knows_how_fast_its_batches_come(
    transport: str, loaders: Callable[..., Any], three: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HETSTREAM_TRANSPORT", transport)
    loader = loaders(Large(), batch_size=2, service=three.name)
    assert len(list(loader)) == 6
    client = loader._connection.client
    assert {*client.batches_by_transport} == {transport}
    assert (client.wire.bytes_per_s is None) == (transport == "shm")
    rates = with_wire(Rates(0.1, 0.1, 3), loader._connection)
    assert 1e7 < rates.wire_bytes_per_s < 1e12
    assert rates.wire_bytes_per_s != Rates(0.1, 0.1, 3).wire_bytes_per_s
