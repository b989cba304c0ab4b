"""Saves from a GPU: pinned slots, a stream of their own, and what the program does to its tensors meanwhile."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hetstream.checkpoint.flash import saving

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def test_a_slot_is_pinned_once_and_given_back(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.cuda.init()  # type: ignore[no-untyped-call]
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    counts = {"pinned": 0, "unpinned": 0}

    class Counting:
        def cudaHostRegister(self, *args: Any) -> Any:
            counts["pinned"] += 1
            return runtime.cudaHostRegister(*args)

        def cudaHostUnregister(self, *args: Any) -> Any:
            counts["unpinned"] += 1
            code = runtime.cudaHostUnregister(*args)
            assert int(code) == 0
            return code

    monkeypatch.setattr(saving.torch.cuda, "cudart", Counting)
    state = {"w": torch.rand(1 << 20, device="cuda"), "on the host": torch.rand(1000)}
    with make(num_slots=2) as checkpointer:
        for step in range(1, 8):
            state["w"].add_(1)
            assert checkpointer.save(step, state)
            assert checkpointer.wait(60)
        assert counts == {"pinned": 2, "unpinned": 0}
        back = checkpointer.load().state
        assert torch.equal(back["w"], state["w"].cpu())
        assert torch.equal(back["on the host"], state["on the host"])
    assert counts == {"pinned": 2, "unpinned": 2}


@pytest.mark.parametrize("how", ["save", "save_async"])
def test_the_copy_is_behind_what_was_queued_and_before_what_comes(make: Any, how: str) -> None:
    weight = torch.nn.Parameter(torch.zeros(16 << 20, device="cuda"))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    factor = torch.rand(4096, 4096, device="cuda")
    state = {"w": weight, "optimizer": optimizer}
    with make() as checkpointer:
        checkpointer.guard(optimizer)
        for step in range(1, 6):
            for _ in range(20):
                factor = (factor @ factor).clamp(0, 1)  # keeps the GPU busy: what follows is only queued
            with torch.no_grad():
                weight.add_(1)
            expected = weight.detach().clone()
            assert getattr(checkpointer, how)(step, state)
            weight.grad = torch.ones_like(weight)
            optimizer.step()
            checkpointer.fence()
            assert torch.equal(checkpointer.load().state["w"], expected.cpu())


def test_tensors_and_generators_of_a_gpu_come_back(make: Any) -> None:
    state = {"w": torch.rand(1000, device="cuda"), "t": torch.rand(8, 16, device="cuda").t()}
    saved = {name: tensor.clone() for name, tensor in state.items()}
    with make() as checkpointer:
        assert checkpointer.save(1, state)
        drawn = torch.rand(5, device="cuda")
        for tensor in state.values():
            tensor.zero_()
        assert checkpointer.restore(state) == 1
        assert torch.equal(torch.rand(5, device="cuda"), drawn)
        for name, tensor in state.items():
            assert tensor.is_cuda
            assert torch.equal(tensor, saved[name])
