"""What the operators of a graph do beside their values, found out with tensors that have no data.

torch says of each of its operators what it changes in place, whose memory its value has, and whether it draws random
numbers. A function of a graph may call several of them. So the graph is run once as torch's own compilers run it: with
tensors that know their sizes alone. Nothing of the program is touched.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import detect_fake_mode
from torch.fx import Interpreter
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from hetstream.mpi_dataworkers.partitioner.capture import Graph, quiet, reason_of
from hetstream.mpi_dataworkers.partitioner.unguarded_constants import NotCaptured

_pytree: Any = pytree
# They change the running statistics that they are given, though their schemas do not say so.
_RUNNING_STATISTICS = ("batch_norm", "instance_norm")


@dataclass(frozen=True)
class Effects:
    """What one call of a graph does.

    Attributes:
        operators: torch's operators that it calls, as `aten::log`.
        writes: names of values whose memory it changes.
        shares: the first value whose memory its value has; of several values, of each.
        random: it draws random numbers.
        is_nested: it is an operator of higher order, with a graph of its own.
        dtypes: of the tensors that go in and come out.
        gives: `tensor`, `number`, `several` or `nothing`.
    """

    operators: frozenset[str] = frozenset()
    writes: tuple[str, ...] = ()
    shares: tuple[str, ...] = ()
    random: bool = False
    is_nested: bool = False
    dtypes: frozenset[torch.dtype] = frozenset()
    gives: str = "tensor"


def effects_of(graph: Graph) -> dict[str, Effects]:
    """What each call of a graph does, by its name.

    Raises:
        NotCaptured: it does not run with tensors that have no data.
    """
    fakes = [node.meta.get("example_value") for node in graph.module.graph.nodes if node.op == "placeholder"]
    mode: Any = detect_fake_mode(fakes)
    if mode is None or mode.shape_env is None:
        raise NotCaptured("torch.compile's graph takes no tensor")
    watcher = _Watcher(graph.module)
    depth = torch._C._functorch.get_dynamic_layer_stack_depth()
    try:
        # With operators that are made of others as Python has them: some of those in C++ take no symbolic sizes.
        with quiet(), torch.no_grad(), mode, enable_python_dispatcher(), mode.shape_env.ignore_fresh_unbacked_symbols():
            watcher.run(*fakes)
    except Exception as error:
        raise NotCaptured(f"its operators cannot be run without data, and torch says {reason_of(error)}") from error
    finally:
        # What has failed within one of torch.func's transforms has not ended it.
        torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)
    return watcher.found


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes torch's operators that a call calls."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()
        self.written: set[int] = set()
        self.random = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        self.names.add(name)
        self.random |= torch.Tag.nondeterministic_seeded in func.tags
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = args[place] if place < len(args) else kwargs.get(argument.name)
                self.written.update(_memories(given))
        if any(part in name for part in _RUNNING_STATISTICS):
            self.written.update(_memories(args[3:5]))
        return func(*args, **kwargs)


class _Watcher(Interpreter):
    """Runs a graph and notes what each call does."""

    def __init__(self, module: Any) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.found: dict[str, Effects] = {}
        self._owners: dict[int, str] = {}  # the first value with some memory

    def run_node(self, n: Any) -> Any:
        """Run one, and note what it does."""
        if n.op not in ("call_function", "call_method"):
            value = super().run_node(n)
            if n.op == "get_attr" and isinstance(n.meta.get("example_value"), torch.Tensor):
                value = n.meta["example_value"]
            if n.op in ("placeholder", "get_attr"):
                for memory in _memories(value):
                    self._owners.setdefault(memory, n.name)
            return value
        inputs = [self.env[node] for node in n.all_input_nodes]
        operators = _Operators()
        is_nested = isinstance(n.target, torch._ops.HigherOrderOperator)
        if is_nested:
            value = n.meta.get("example_value")
            operators.written.update(memory for value in inputs for memory in _memories(value))
        else:
            with operators:
                value = super().run_node(n)
        self.found[n.name] = Effects(
            frozenset(operators.names),
            self._of(operators.written),
            self._of(_memories(value)),
            operators.random,
            is_nested,
            frozenset(
                tensor.dtype for tensor in _pytree.tree_leaves((inputs, value)) if isinstance(tensor, torch.Tensor)
            ),
            _gives(value),
        )
        for memory in _memories(value):
            self._owners.setdefault(memory, n.name)
        return value

    def _of(self, memories: Any) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self._owners[memory] for memory in memories if memory in self._owners))


def _gives(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, torch.Tensor):
        return "tensor"
    if isinstance(value, bool | int | float | torch.SymInt | torch.SymFloat | torch.SymBool):
        return "number"
    return "several"


def _memories(value: Any) -> list[int]:
    """Whose memory is the same has the same number here."""
    return [
        tensor.untyped_storage()._cdata
        for tensor in _pytree.tree_leaves(value)
        if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided
    ]
