"""Every optimizer and scheduler of torch goes on after a restore as if nothing had happened, bit by bit."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim import lr_scheduler

# It takes sparse gradients alone.
LEFT_OUT = {"Optimizer", "SparseAdam"}
SCHEDULERS: dict[str, Any] = {
    "LambdaLR": lambda one: lr_scheduler.LambdaLR(one, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda one: lr_scheduler.MultiplicativeLR(one, lambda _: 0.9),
    "StepLR": lambda one: lr_scheduler.StepLR(one, 2),
    "MultiStepLR": lambda one: lr_scheduler.MultiStepLR(one, [1, 3]),
    "LinearLR": lr_scheduler.LinearLR,
    "PolynomialLR": lr_scheduler.PolynomialLR,
    "CosineAnnealingLR": lambda one: lr_scheduler.CosineAnnealingLR(one, 10),
    "CosineAnnealingWarmRestarts": lambda one: lr_scheduler.CosineAnnealingWarmRestarts(one, 2),
    "CyclicLR": lambda one: lr_scheduler.CyclicLR(one, 0.01, 0.1, step_size_up=2, cycle_momentum=False),
    "OneCycleLR": lambda one: lr_scheduler.OneCycleLR(one, 0.1, total_steps=20),
    "ReduceLROnPlateau": lambda one: lr_scheduler.ReduceLROnPlateau(one, patience=0),
    "SequentialLR": lambda one: lr_scheduler.SequentialLR(
        one, [lr_scheduler.ConstantLR(one), lr_scheduler.ExponentialLR(one, 0.9)], [2]
    ),
    "ChainedScheduler": lambda one: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(one), lr_scheduler.ExponentialLR(one, 0.9)]
    ),
}


def make_state() -> dict[str, Any]:
    """A small model with each optimizer, and with each scheduler."""
    torch.manual_seed(1)
    kinds = {name: kind for name, kind in vars(optim).items() if inspect.isclass(kind) and name not in LEFT_OUT}
    state: dict[str, Any] = {}
    for name, kind in kinds.items():
        model = state[f"{name} model"] = nn.Linear(4, 4, bias=name != "Muon")  # Muon takes matrices alone
        state[f"{name} optimizer"] = kind(model.parameters(), lr=0.01)
    for name, schedule in SCHEDULERS.items():
        model = state[f"{name} model"] = nn.Linear(4, 4)
        state[f"{name} optimizer"] = optim.SGD(model.parameters(), lr=0.01)
        state[f"{name} scheduler"] = schedule(state[f"{name} optimizer"])
    return state


def train(state: dict[str, Any], steps: range) -> None:
    names = [key.removesuffix(" model") for key in state if key.endswith(" model")]
    for step in steps:
        batch = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))
        for name in names:
            model, optimizer = state[f"{name} model"], state[f"{name} optimizer"]

            def closure(model: nn.Module = model, optimizer: Any = optimizer) -> torch.Tensor:
                optimizer.zero_grad()
                loss: torch.Tensor = model(batch).square().sum()  # noqa: B023
                loss.backward()
                return loss

            loss = optimizer.step(closure)
            if scheduler := state.get(f"{name} scheduler"):
                scheduler.step(*([float(loss)] if name == "ReduceLROnPlateau" else []))


@pytest.mark.shows("all of torch's optimizers (but SparseAdam) and schedulers go on bit by bit")
def test_every_optimizer_and_scheduler_goes_on(make: Any) -> None:
    with warnings.catch_warnings():
        # Some schedulers warn of their own way to use others.
        warnings.simplefilter("ignore")
        whole, resumed = make_state(), make_state()
        with make() as checkpointer:
            train(whole, range(3))
            checkpointer.save(3, whole)
            assert checkpointer.restore(resumed) == 3
        for state in (whole, resumed):
            train(state, range(3, 6))
    models = [key for key in whole if key.endswith(" model")]
    assert len(models) >= 12 + len(SCHEDULERS)
    assert [key for key in models if not torch.equal(whole[key].weight, resumed[key].weight)] == []


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": False, "lr": torch.tensor(0.01)}], ids=str)
def test_an_optimizer_works_on_the_tensors_that_it_had(make: Any, options: dict[str, Any]) -> None:
    """A CUDA graph of its step has their addresses."""
    torch.manual_seed(1)
    model = nn.Linear(4, 4)
    optimizer = optim.Adam(model.parameters(), **options)
    state = {"toy model": model, "toy optimizer": optimizer}
    train(state, range(2))
    groups = optimizer.param_groups

    def tensors() -> list[torch.Tensor]:
        found = [one for of in optimizer.state.values() for one in of.values()]
        return found + [value for group in groups for value in group.values() if isinstance(value, torch.Tensor)]

    before, saved = tensors(), [one.clone() for one in tensors()]
    with make() as checkpointer:
        checkpointer.save(2, state)
        train(state, range(2, 4))
        assert not torch.equal(before[1], saved[1])
        assert checkpointer.restore(state) == 2
    groups = optimizer.param_groups
    assert len(before) >= 6
    assert [*map(id, tensors())] == [*map(id, before)]
    assert all(map(torch.equal, before, saved))
