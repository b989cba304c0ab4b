"""How rows of an embedding table are updated: torch's own arithmetic, on the rows of one step.

An update of a row depends on the row, its gradient and the number of the update alone, so it is the same wherever the
row lies and whichever rows are updated with it.
"""

from __future__ import annotations

import abc
import collections
import math
from types import SimpleNamespace
from typing import Any, cast

import torch

from hetstream.base.errors import ConfigError


class RowOptimizer(abc.ABC):
    """Updates rows where `backward` ends.

    Attributes:
        lr: the learning rate; a schedule may set it between steps.
        scaler: the `torch.amp.GradScaler` by which the loss is scaled, if there is one. Rows get the gradients without
            the scale, and stay as they are where one is infinite or no number, as torch's parameters do.
        sparse_grads: whether a row's gradients are added up as torch does it with `sparse=True`.
    """

    scaler: torch.amp.GradScaler | None = None
    sparse_grads = True

    def __init__(self, lr: float) -> None:
        if not 0.0 <= lr < math.inf:
            raise ConfigError(f"lr={lr!r}: a learning rate is a number from 0 on, such as 0.01")
        self.lr = lr
        # A scaler knows what it was told by its address, until it is updated.
        self._told_scaler: collections.deque[SimpleNamespace] = collections.deque(maxlen=1 << 10)

    def tell_scaler(self, is_finite: bool, device: torch.device) -> None:
        """Have the scaler count gradients of this device as it counts those of a torch optimizer."""
        assert self.scaler is not None
        weight = torch.zeros(1, device=device, requires_grad=True)
        weight.grad = torch.full_like(weight, 0.0 if is_finite else math.inf)
        self._told_scaler.append(SimpleNamespace(param_groups=[{"params": [weight]}]))
        self.scaler.unscale_(cast(Any, self._told_scaler[-1]))

    @abc.abstractmethod
    def state_width(self, dim: int) -> int:
        """Return how many float32 of state a row of `dim` weights has."""

    @abc.abstractmethod
    def update(self, weights: torch.Tensor, state: torch.Tensor, grads: torch.Tensor, step: int) -> None:
        """Update rows in place.

        Args:
            weights: [rows, dim], float32.
            state: [rows, state_width(dim)], float32; zeros before a row's first update.
            grads: [rows, dim], float32.
            step: number of this update of the table, from 1.
        """


class RowSGD(RowOptimizer):
    """As `torch.optim.SGD` without momentum on a dense gradient.

    Args:
        lr: the learning rate.
    """

    sparse_grads = False

    def state_width(self, dim: int) -> int:  # noqa: ARG002, it has none
        return 0

    def update(self, weights: torch.Tensor, state: torch.Tensor, grads: torch.Tensor, step: int) -> None:  # noqa: ARG002
        weights.add_(grads, alpha=-self.lr)


class RowWiseAdagrad(RowOptimizer):
    """Adagrad with one sum for each row: the mean of the squares of its gradient (fbgemm's `EXACT_ROWWISE_ADAGRAD`).

    Args:
        lr: the learning rate.
        eps: added to the root.
    """

    def __init__(self, lr: float, eps: float = 1e-8) -> None:
        super().__init__(lr)
        self.eps = _positive("eps", eps)

    def state_width(self, dim: int) -> int:  # noqa: ARG002, whatever the width
        return 1

    def update(self, weights: torch.Tensor, state: torch.Tensor, grads: torch.Tensor, step: int) -> None:  # noqa: ARG002
        state.add_(grads.pow(2).mean(dim=1, keepdim=True))
        weights.sub_(grads.mul(self.lr).div_(state.sqrt().add_(self.eps)))


class RowAdam(RowOptimizer):
    """As `torch.optim.SparseAdam`: only rows of the step are updated, with a number of steps that all rows share.

    Args:
        lr: the learning rate.
        betas: decay of the means of gradients and of their squares.
        eps: added to the root.
    """

    def __init__(self, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8) -> None:
        super().__init__(lr)
        if not all(0.0 <= beta < 1.0 for beta in betas):
            raise ConfigError(f"betas={betas!r}: both are from 0 to below 1, such as (0.9, 0.999)")
        self.betas = betas
        self.eps = _positive("eps", eps)

    def state_width(self, dim: int) -> int:
        return 2 * dim

    def update(self, weights: torch.Tensor, state: torch.Tensor, grads: torch.Tensor, step: int) -> None:
        # The order of operations is torch's, so that each bit is (torch.optim._functional.sparse_adam).
        beta1, beta2 = self.betas
        mean, square = torch.split(state, weights.shape[1], dim=1)
        mean_change = grads.sub(mean).mul_(1 - beta1)
        square_change = grads.pow(2).sub_(square).mul_(1 - beta2)
        numerator, root = mean_change + mean, square_change + square
        mean.add_(mean_change)
        square.add_(square_change)
        step_size = self.lr * math.sqrt(1 - beta2**step) / (1 - beta1**step)
        weights.add_(-step_size * numerator.div_(root.sqrt_().add_(self.eps)))


def _positive(name: str, value: float) -> float:
    if not 0.0 < value < math.inf:
        raise ConfigError(f"{name}={value!r}: a number above 0, such as 1e-8")
    return value
