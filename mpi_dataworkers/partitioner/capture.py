"""The graph of a module's forward, or the reason why there is none. Called by `partition.py`; runs torch.export.

torch.export runs the forward once with tensors that have no data, so whatever depends on the data is an error there.
It does not see what a forward does beside its tensors: `side_effects.py` looks for that before.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import re
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TextIO

import torch
from torch.utils import _pytree as pytree

from hetstream.mpi_dataworkers.partitioner.graph import Kind
from hetstream.mpi_dataworkers.partitioner.leaves import flatten_call
from hetstream.mpi_dataworkers.partitioner.program import Call, Ref, place_of, references, replace_in

_pytree: Any = pytree
# Files of torch, and of this package: what a user asks about is neither.
_NOT_THE_PROGRAM = re.compile(r"/(site|dist)-packages/torch/|/torch/(nn|fx|export|_[a-z]+)/|/partitioner/")
_PLACE = re.compile(r'File "([^"]+)", line (\d+), in (\w+)')


class NotCaptured(Exception):
    """There is no graph; the message is the reason, for the user. Internal to this package."""


@dataclass(frozen=True)
class GraphInput:
    """What goes into the graph.

    Attributes:
        name: of the value.
        kind: what it is.
        target: the qualified name of a parameter or buffer; "" for an argument.
        argument: the number of the argument among the flattened ones; -1 for parameters and buffers.
    """

    name: str
    kind: Kind
    target: str = ""
    argument: int = -1


@dataclass(frozen=True)
class CapturedForward:
    """The graph of a forward.

    Attributes:
        inputs: what goes in.
        calls: its operators in the order in which they run.
        functions: what each of them calls.
        lines: where the program calls each of them: file, line, text.
        outputs: what comes out, flattened: a `Ref` or a plain value.
        out_spec: how the outputs are put together.
        shape_rules: text of what must hold for the sizes of arguments, over `L`.
        constants: tensors that are written in the forward itself.
        how: what captured it.
    """

    inputs: tuple[GraphInput, ...]
    calls: tuple[Call, ...]
    functions: Mapping[str, Callable[..., Any]]
    lines: Mapping[str, tuple[str, int, str]]
    outputs: tuple[Any, ...]
    out_spec: Any
    shape_rules: tuple[str, ...] | None
    constants: Mapping[str, torch.Tensor]
    how: str


def capture(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    may_change: frozenset[int] | None = None,
) -> CapturedForward:
    """The graph of a module's forward.

    Args:
        module: in the mode (training or not) in which it is used.
        args, kwargs: what it is called with.
        may_change: numbers of the flattened arguments whose sizes may change; None for all.

    Raises:
        NotCaptured: there is none; the message says why, with file and line where they are known.
    """
    if not hasattr(getattr(getattr(torch, "export", None), "Dim", None), "AUTO"):
        raise NotCaptured(f"torch {torch.__version__} cannot export a forward with sizes that change")
    problems: list[str] = []
    for strict in (False, True):
        try:
            with quiet():
                return _exported(module, (args, dict(kwargs)), strict, may_change)
        except NotCaptured:
            raise
        except Exception as error:  # noqa: BLE001, the program's own forward runs here, and torch's compiler
            problems.append(reason_of(error))
    raise NotCaptured(problems[0])


class _OfOthers(io.TextIOBase):
    """Standard error without what this thread writes: torch prints the graph of a forward that it cannot export."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._thread = stream, threading.get_ident()

    def write(self, text: str) -> int:
        """Write it, or not."""
        return len(text) if threading.get_ident() == self._thread else self._stream.write(text)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep torch's own words to itself: what it cannot do is no warning of the program's."""
    loggers = [logging.getLogger(name) for name in ("torch", "torch._dynamo", "torch.export", "torch.fx")]
    levels = [logger.level for logger in loggers]
    stream = sys.stderr
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(_OfOthers(stream)):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def reason_of(error: BaseException) -> str:
    """An error of torch.export in one line, with the place in the program."""
    text = str(error)
    places = [(file, int(line)) for file, line, _ in _PLACE.findall(text)]
    places += [(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)]
    own = [place for place in places if not _NOT_THE_PROGRAM.search(place[0]) and "<" not in place[0]]
    where = f" ({own[-1][0].rsplit('/', 1)[-1]}:{own[-1][1]})" if own else ""
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")
    if "data-dependent" in text.lower() or "DataDependent" in type(error).__name__:
        first = "the forward takes a decision that depends on the data"
    return f"{type(error).__name__}: {first[:200]}{where}"


def _exported(
    module: torch.nn.Module,
    call_with: tuple[tuple[Any, ...], dict[str, Any]],
    strict: bool,
    may_change: frozenset[int] | None,
) -> CapturedForward:
    dimension: Any = torch.export.Dim.AUTO
    args, kwargs = call_with
    flat, spec = _pytree.tree_flatten(call_with)

    def dynamic(place: int, leaf: Any) -> Any:
        changes = isinstance(leaf, torch.Tensor) and (may_change is None or place in may_change)
        return dict.fromkeys(range(leaf.dim()), dimension) if changes else None

    of_args, of_kwargs = _pytree.tree_unflatten([dynamic(*each) for each in enumerate(flat)], spec)
    shapes = dict(inspect.signature(module.forward).bind(*of_args, **of_kwargs).arguments)
    exported: Any = torch.export.export(module, args, kwargs, dynamic_shapes=shapes, strict=strict)
    return _Reader(exported, "torch.export").read(args, kwargs)


class _Reader:
    """Reads what torch.export gives into plain values."""

    def __init__(self, exported: Any, how: str) -> None:
        self._exported = exported
        self._how = how
        self._renamed: dict[Any, Any] = {}  # from a node of the graph to the Ref, or plain value, that stands for it
        self._calls: list[Call] = []
        self._functions: dict[str, Callable[..., Any]] = {}
        self._lines: dict[str, tuple[str, int, str]] = {}

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CapturedForward:
        flat = _pytree.tree_leaves((args, kwargs))
        # torch.export takes lists of plain values apart, which are one leaf here.
        places = [place for place, leaf in enumerate(flatten_call(args, kwargs)[0]) for _ in _pytree.tree_leaves(leaf)]
        signature = self._exported.graph_signature
        mutated = {*signature.buffers_to_mutate.values(), *getattr(signature, "user_inputs_to_mutate", {}).values()}
        if mutated:
            raise NotCaptured(f"torch.export has made a graph without updates in place, of {sorted(mutated)[0]}")
        nodes = [node for node in self._exported.graph.nodes if node.op == "placeholder"]
        inputs: list[GraphInput] = []
        argument = 0
        for node, spec in zip(nodes, signature.input_specs, strict=True):
            self._renamed[node] = Ref(node.name)
            kind = spec.kind.name
            if kind == "USER_INPUT":
                leaf = isinstance(flat[argument], torch.Tensor)
                inputs.append(GraphInput(node.name, Kind.LEAF if leaf else Kind.PLAIN, "", places[argument]))
                argument += 1
            elif kind in ("PARAMETER", "BUFFER", "CONSTANT_TENSOR"):
                is_parameter = kind == "PARAMETER"
                inputs.append(GraphInput(node.name, Kind.PARAMETER if is_parameter else Kind.BUFFER, spec.target))
            else:
                raise NotCaptured(f"the forward uses an object that no graph can hold: {spec.target}")
        self._read_nodes(self._exported.graph)
        output = next(node for node in self._exported.graph.nodes if node.op == "output")
        outputs = tuple(self._values(value) for value in output.args[0])
        rules = getattr(self._exported, "_guards_code", None)
        return CapturedForward(
            inputs=tuple(inputs),
            calls=tuple(self._calls),
            functions=self._functions,
            lines=self._lines,
            outputs=outputs,
            out_spec=self._exported.call_spec.out_spec,
            shape_rules=None if rules is None else tuple(rules),
            constants=self._constants(),
            how=self._how,
        )

    def _constants(self) -> dict[str, torch.Tensor]:
        found = {
            name: value
            for name, value in self._exported.constants.items()
            if isinstance(value, torch.Tensor) and name.startswith("lifted_tensor")
        }
        if any(type(value) is not torch.Tensor for value in found.values()):
            raise NotCaptured("the forward makes a tensor out of what it is called with")
        return found

    def _values(self, argument: Any) -> Any:
        def value_of(item: Any) -> Any:
            return self._renamed.get(item, item) if isinstance(item, torch.fx.Node) else item

        return replace_in(_plain_containers(argument), value_of)

    def _read_nodes(self, graph: Any, prefix: str = "") -> None:
        for node in graph.nodes:
            if node in self._renamed:
                continue
            if node.op == "call_function":
                if not self._is_inlined(node):
                    self._add(node, prefix)
            elif node.op == "get_attr":
                self._renamed[node] = getattr(graph.owning_module, node.target)
            elif node.op not in ("placeholder", "output"):
                raise NotCaptured(f"a node {node.op} {node.target} in the graph of torch.export")

    def _add(self, node: Any, prefix: str) -> None:
        name = prefix + node.name
        module, path = place_of(node.target) or ("", str(node.target))
        args, kwargs = self._values(tuple(node.args)), self._values(dict(node.kwargs))
        self._calls.append(Call(name, module, path, args, kwargs))
        self._functions[name] = node.target
        self._renamed[node] = Ref(name)
        if place := _place(node.meta.get("stack_trace") or ""):
            self._lines[name] = place

    def _is_inlined(self, node: Any) -> bool:
        """Read a block under `torch.no_grad` as if it stood in the forward itself; whether it is one.

        `describe.py` keeps it on the training side when it has anything to do with gradients.
        """
        if getattr(node.target, "__name__", "") != "wrap_with_set_grad_enabled":
            return False
        enabled, block, *arguments = self._values(tuple(node.args))
        inside = [item for item in block.graph.nodes if item.op == "placeholder"]
        if not enabled and any(self._has_gradient(argument) for argument in arguments):
            return False
        for placeholder, argument in zip(inside, arguments, strict=True):
            self._renamed[placeholder] = argument
        self._read_nodes(block.graph, f"{node.name}_")
        output = next(item for item in block.graph.nodes if item.op == "output")
        values = self._values(tuple(output.args[0]))
        for user in node.users:  # each takes one of the values
            self._renamed[user] = values[user.args[1]]
        return True

    def _has_gradient(self, argument: Any) -> bool:
        """Whether a parameter leads to a value."""
        if not isinstance(argument, Ref):
            return False
        specs = self._exported.graph_signature.input_specs
        parameters = {spec.arg.name for spec in specs if spec.kind.name == "PARAMETER"}
        makers = {call.name: call for call in self._calls}
        waiting, seen = [argument.name], set()
        while waiting:
            name = waiting.pop()
            if name in parameters:
                return True
            if name in makers and name not in seen:
                seen.add(name)
                waiting += references((makers[name].args, makers[name].kwargs))
        return False


def _plain_containers(value: Any) -> Any:
    """Arguments of a node in Python's own containers."""
    if isinstance(value, tuple | list):
        items = [_plain_containers(item) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, dict):
        return {key: _plain_containers(item) for key, item in value.items()}
    return value


def _place(stack: str) -> tuple[str, int, str] | None:
    """The last place of the program in a stack, as torch.fx writes it; torch's own where there is no other."""
    lines = stack.splitlines()
    places = [(match, index) for index, line in enumerate(lines) if (match := _PLACE.search(line))]
    own = [place for place in places if not _NOT_THE_PROGRAM.search(place[0].group(1))] or places
    if not own:
        return None
    match, number = own[-1]
    text = lines[number + 1].strip() if number + 1 < len(lines) else ""
    return match.group(1), int(match.group(2)), text
