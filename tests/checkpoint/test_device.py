"""The copy of a save in main memory: any tensor, in any number of pieces, by any number of threads."""

from __future__ import annotations

import threading

import pytest
import torch

from checkpoint.flash import device
from checkpoint.flash.device import Copier


@pytest.mark.parametrize("num_threads", [1, 3])
def test_every_byte_is_copied_however_it_is_cut(num_threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_SHARED_BYTES", 400)
    monkeypatch.setattr(device, "_PIECE_BYTES", 4097)
    monkeypatch.setattr(device, "_THREAD_BYTES", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    wide = torch.randn(300, 200)
    tensors = [
        wide,
        wide.t(),
        torch.randn(5),
        torch.tensor(3.5),
        torch.empty(0),
        torch.randn(40_000).to(torch.bfloat16),
        torch.randn(4000, dtype=torch.complex64).conj(),
        torch.randn(4000, dtype=torch.complex64).conj().imag,
        torch.randn(1000, requires_grad=True),
        torch.arange(70_001, dtype=torch.uint8),
    ]
    destinations = [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in tensors]
    Copier().copy(destinations, tensors)
    for destination, tensor in zip(destinations, tensors, strict=True):
        assert torch.equal(destination, tensor)
    assert not [thread for thread in threading.enumerate() if thread.name == "checkpoint copy"]
