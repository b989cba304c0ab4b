"""What must be as it was when a forward was captured, for its graph to be right. Called by `forward.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hetstream.mpi_dataworkers.partitioner.capture import CapturedForward, NotCaptured
from hetstream.mpi_dataworkers.partitioner.first_graph import FirstGraph
from hetstream.mpi_dataworkers.partitioner.side_effects import ModelState

# Sizes of inputs of which is known whether the graph is right for them.
_MOST_SHAPES = 1024


class Forms:
    """Types and sizes that the inputs of a graph may have.

    Args:
        inputs: what the graph was captured with; tensors among them count.
        rules: text of what must hold for sizes, over `L`; None: only those of `inputs` will do.
        names: gives `L` for other inputs.
    """

    def __init__(
        self,
        inputs: Sequence[Any],
        rules: tuple[str, ...] | None,
        names: Callable[[Sequence[Any]], Mapping[str, Any]],
    ) -> None:
        tensors = {place: value for place, value in enumerate(inputs) if isinstance(value, torch.Tensor)}
        self._forms = {place: (value.dtype, value.dim()) for place, value in tensors.items()}
        self._captured = tuple(value.shape for value in tensors.values())
        self._rules = rules
        self._names = names
        self._known: dict[tuple[torch.Size, ...], bool] = {}

    def fit(self, inputs: Sequence[Any]) -> bool:
        """Whether the graph is right for these inputs."""
        for place, (dtype, num_dimensions) in self._forms.items():
            if inputs[place].dtype != dtype or inputs[place].dim() != num_dimensions:
                return False
        key = tuple(inputs[place].shape for place in self._forms)
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= _MOST_SHAPES:  # of jagged batches each step may have its own
                self._known.clear()
            known = self._known[key] = self._rules_hold(key, inputs)
        return known

    def _rules_hold(self, shapes: tuple[torch.Size, ...], inputs: Sequence[Any]) -> bool:
        if shapes == self._captured:
            return True
        is_small = any(size < 2 for shape in shapes for size in shape)
        if self._rules is None or (is_small and not self._is_fixed(shapes)):
            return False
        names = {"L": self._names(inputs)}
        try:
            return all(eval(rule, {"__builtins__": {"min": min, "max": max}}, names) for rule in self._rules)
        except (NameError, KeyError, IndexError, TypeError, SyntaxError, ZeroDivisionError):
            return False

    def _is_fixed(self, shapes: tuple[torch.Size, ...]) -> bool:
        """Whether each size below 2, of which torch.export makes a graph of its own, is the captured one."""
        each = zip(shapes, self._captured, strict=True)
        pairs = [pair for shape, then in each for pair in zip(shape, then, strict=True)]
        return all(now == then for now, then in pairs if now < 2 or then < 2)


@dataclass(frozen=True)
class Guards:
    """What must be as it was captured.

    Attributes:
        captured: the graph.
        first: set where the graph is only the beginning of the forward.
        in_spec: how the forward's arguments were put together.
        plain_arguments: values of those that are no tensors, by number.
        unread: the types of those among them that the forward does not look at, so that they may have other values.
        leaves: the leaf of the batch that an argument is, by the number of the argument.
        forms: of the graph's inputs.
        state: of the model.
        tables: where the model's tensors are, by their qualified names.
    """

    captured: CapturedForward
    first: FirstGraph | None
    in_spec: Any
    plain_arguments: Mapping[int, Any]
    unread: Mapping[int, type]
    leaves: Mapping[int, int]
    forms: Forms
    state: ModelState
    tables: Mapping[str, tuple[dict[str, Any], str]]

    def tensor_of(self, target: str) -> torch.Tensor:
        """A tensor of the model as it is now, or one that is written in the forward."""
        if target in self.captured.constants:
            return self.captured.constants[target]
        if target not in self.tables:
            raise NotCaptured(f"the forward uses {target}, a tensor that belongs to no module")
        table, name = self.tables[target]
        found: torch.Tensor = table[name]
        return found


def owners(module: torch.nn.Module) -> dict[str, tuple[dict[str, Any], str]]:
    """Where parameters and buffers are, by their qualified names: looked up in each call, so they may be replaced."""
    found: dict[str, tuple[dict[str, Any], str]] = {}
    for prefix, owner in module.named_modules(remove_duplicate=False):
        tables: list[dict[str, Any]] = [vars(owner)["_parameters"], vars(owner)["_buffers"], vars(owner)]
        for table in tables:
            for name, value in table.items():
                if isinstance(value, torch.Tensor):
                    found[f"{prefix}.{name}".lstrip(".")] = table, name
    return found
