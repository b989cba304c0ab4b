"""The copy of a save in main memory: any tensor, in any number of pieces, by any number of threads."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from hetstream.checkpoint.flash.saving import Copier
from hetstream.checkpoint.flash.sources import Copies
from hetstream.checkpoint.tensors import copy_plan
from hetstream.checkpoint.tensors.copy_plan import make_plan
from hetstream.checkpoint.tensors.leaves import Flattener


@pytest.mark.parametrize("num_threads", [1, 3])
def test_every_byte_is_copied_however_it_is_cut(num_threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_plan, "_SHARED_BYTES", 400)
    monkeypatch.setattr(copy_plan, "_PIECE_BYTES", 4097)
    monkeypatch.setattr(copy_plan, "_THREAD_BYTES", 1)
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


class Elsewhere(torch.Tensor):
    """A tensor of an accelerator that is not CUDA: its values are there, and its address is none of this process."""

    values: torch.Tensor

    @staticmethod
    def __new__(cls, values: torch.Tensor, kind: str) -> Elsewhere:
        made: Elsewhere = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, values.shape, dtype=values.dtype, device=kind
        )
        made.values = values
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten._to_copy.default:
            assert kwargs["device"] == torch.device("cpu")
            return args[0].values.clone()
        if function is torch.ops.aten._foreach_copy_.default:
            for one, other in zip(*args[:2], strict=True):
                one.values.copy_(other)
            return None
        if function is torch.ops.aten.detach.default:
            return args[0]
        raise AssertionError(f"{function}: nothing else is asked of an accelerator")


@pytest.mark.parametrize("kind", ["xpu", "hpu", "mps"])
def test_tensors_of_other_accelerators_are_left_to_torch(kind: str) -> None:
    values = [torch.randn(30_000), torch.arange(5)]
    tensors = [Elsewhere(values[0], kind), values[1]]
    destinations = [torch.empty_like(one) for one in values]
    copier = Copier()
    copier.begin(tensors)
    copier.copy(destinations, tensors)
    assert all(map(torch.equal, destinations, values))
    plan = make_plan(Flattener().flatten({"values": values[1]}))
    assert plan.are_plain.tolist() == [True]
    copies = Copies()
    copies.add(tensors[0], torch.zeros(30_000))
    copies.run()
    assert not values[0].any()
