"""The beginning of a forward that torch.export cannot take as a whole: the first graph that torch.compile makes of it.

torch.compile parts a forward where it cannot trace on, as where a decision depends on the data. What runs before is a
graph. torch.compile calls it when its guards hold: when everything that it took for given while tracing (sizes, Python
values, globals, the model's structure) still is so. Here something else is called in that graph's place, and nothing
else is compiled: the rest of the forward runs as it is written. Where a guard does not hold, all of it does.

Called by `analysis.py`, which has torch.export read the graph, and by `forward.py` in each step.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from hetstream.mpi_dataworkers.partitioner.capture import CapturedForward, NotCaptured, capture, quiet, reason_of

# Each capture of one forward is an entry of its own in torch.compile's cache, which else ends at 8.
_MOST_ENTRIES = 1_000_000


class RanAsWritten(Exception):
    """The graph was not called, so all of the forward has run as it is written. Internal to this package.

    Attributes:
        result: what it returned.
    """

    def __init__(self, result: Any) -> None:
        super().__init__("what torch.compile took for given of the forward does not hold")
        self.result = result


class DoesNotFit(Exception):
    """The graph was called with other tensors or sizes than it is for, and nothing has run; says which."""


class _Reached(Exception):
    """Ends the call in which the graph is made, before any of it runs."""


@dataclass(frozen=True)
class FirstGraph:
    """The beginning of a forward.

    Attributes:
        captured: the graph; arguments in it are numbers of its own inputs.
        places: the flattened arguments of the forward that are among these, by the number of the input.
        taken: which of the things that torch.compile gives to the graph the inputs are.
        switch: calls something else in the graph's place.
    """

    captured: CapturedForward
    places: Mapping[int, int]
    taken: tuple[int, ...]
    switch: Switch

    def run(self, forward: Callable[[], Any], values: Sequence[Any], instead: Callable[[Sequence[Any]], Any]) -> Any:
        """Call the forward, with something else in the graph's place.

        Args:
            forward: calls the program's own.
            values: its arguments, flattened.
            instead: what is called with the graph's inputs, and gives its outputs.

        Raises:
            RanAsWritten: the graph was not called.
            DoesNotFit: it was given another tensor than the argument that it had.
        """

        def body(given: Sequence[Any]) -> Any:
            inputs = [given[number] for number in self.taken]
            if any(inputs[number] is not values[place] for number, place in self.places.items()):
                raise DoesNotFit("torch.compile's first graph is called with another tensor than the forward")
            return instead(inputs)

        return self.switch.run(forward, body)


class Switch:
    """Has torch.compile make one graph, and then calls something else in its place.

    Attributes:
        graph: as torch.compile has made it; None before.
        given: what torch.compile gave it then.
    """

    def __init__(self) -> None:
        self.graph: Any = None
        self.given: tuple[Any, ...] = ()
        self._body: Callable[[Sequence[Any]], Any] | None = None
        context: Any = torch._dynamo.optimize(backend=self._compile)
        self._compiles = context.callback

        # Of a function that has no graph of this switch whose guards hold: it runs as it is written, and so do, or do
        # not, the functions that it calls. Made here, where a torch that has them not ends the capture.
        types: Any = torch._dynamo.types
        skip, default = types.FrameAction.SKIP, types.FrameAction.DEFAULT
        self._all_as_written, self._as_written = (
            types.ConvertFrameReturn(frame_exec_strategy=types.FrameExecStrategy(skip, inside), apply_to_code=False)
            for inside in (skip, default)
        )

        def uses(*_: Any) -> Any:
            return self._all_as_written if self._body is None else self._as_written

        self._uses: Any = uses

    def make(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Have torch.compile make the graph; neither it nor what comes behind it runs."""
        with contextlib.suppress(_Reached):
            _looking_at_frames(self._compiles, functools.partial(forward, *args, **kwargs))

    def run(self, forward: Callable[[], Any], body: Callable[[Sequence[Any]], Any]) -> Any:
        """Call the forward with `body` in the graph's place; see `FirstGraph.run`."""
        self._body = body
        self._uses._torchdynamo_orig_backend = self._compiles  # of all that was compiled, this switch's graph is used
        try:
            result = _looking_at_frames(self._uses, forward)
            if self._body is not None:
                raise RanAsWritten(result)
            return result
        finally:
            self._body = None

    def _compile(self, graph: Any, _: Any) -> Callable[..., Any]:
        self.graph = graph
        return self._called

    def _called(self, *given: Any) -> Any:
        body, self._body = self._body, None
        if body is None:
            self.given = given
            raise _Reached
        self._uses._torchdynamo_orig_backend = None  # what comes behind the graph runs as it is written
        return body(given)


def _looking_at_frames(callback: Any, call: Callable[[], Any]) -> Any:
    """Call a function, and have torch.compile look at each function that this thread begins meanwhile.

    Nothing may be called between the two changes but the function: what looks at frames is put back when one ends.
    """
    set_callback = torch._C._dynamo.eval_frame.set_eval_frame
    before = set_callback(callback)
    if before is not None:
        set_callback(before)
        raise DoesNotFit("the forward is called by a function that torch.compile compiles")
    try:
        return call()
    finally:
        set_callback(None)


class _Interpreted(torch.nn.Module):
    """A graph as a module, of which torch.export keeps the lines of the program."""

    def __init__(self, graph: torch.fx.GraphModule) -> None:
        super().__init__()
        self._graph = graph

    def forward(self, *inputs: Any) -> Any:
        """What the graph gives."""
        with torch.fx.traceback.preserve_node_meta():
            return torch.fx.Interpreter(self._graph).run(*inputs)


def first_graph(
    module: torch.nn.Module,
    call_with: tuple[tuple[Any, ...], Mapping[str, Any]],
    values: Sequence[Any],
    leaves: frozenset[int],
) -> tuple[FirstGraph, tuple[Any, ...]]:
    """The beginning of a forward.

    Args:
        module: the model.
        call_with: the forward's arguments.
        values: the same, flattened.
        leaves: numbers of those that are of the batch, whose sizes may change.

    Returns:
        It, and what it was given when it was made.

    Raises:
        NotCaptured: there is none; the message says why.
    """
    problems: list[str] = []
    for may_change in (leaves, frozenset[int]()):
        try:
            with quiet():
                return _made(module, call_with, values, may_change)
        except NotCaptured as reason:
            problems.append(str(reason))
        except Exception as error:  # noqa: BLE001, the program's own forward runs here, and torch's compiler
            problems.append(reason_of(error))
    raise NotCaptured(problems[0])


def _made(
    module: torch.nn.Module,
    call_with: tuple[tuple[Any, ...], Mapping[str, Any]],
    values: Sequence[Any],
    may_change: frozenset[int],
) -> tuple[FirstGraph, tuple[Any, ...]]:
    switch = Switch()
    for place in may_change:
        torch._dynamo.maybe_mark_dynamic(values[place], [*range(values[place].dim())])
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, recompile_limit=_MOST_ENTRIES):
        switch.make(module.forward, *call_with)
    graph, given = switch.graph, switch.given
    switch.graph, switch.given = None, ()
    if graph is None or not any(node.op.startswith("call") for node in graph.graph.nodes):
        raise NotCaptured("torch.compile makes no graph of its beginning")
    if [*graph.parameters(), *graph.buffers()]:
        raise NotCaptured("torch.compile's first graph has tensors of its own")
    taken = _with_sizes_inside(graph)
    inputs = tuple(given[number] for number in taken)
    arguments = {id(value): place for place, value in enumerate(values) if isinstance(value, torch.Tensor)}
    places = {number: arguments[id(value)] for number, value in enumerate(inputs) if id(value) in arguments}
    dynamic = frozenset(number for number, place in places.items() if place in may_change)
    captured = replace(capture(_Interpreted(graph), inputs, {}, dynamic), how="torch.compile's first graph")
    return FirstGraph(captured, places, taken, switch), inputs


def _with_sizes_inside(graph: torch.fx.GraphModule) -> tuple[int, ...]:
    """Have a graph find out sizes itself that it was given as numbers.

    Returns:
        Which of its inputs are left.

    Raises:
        NotCaptured: a number is no size of an input.
    """
    nodes = [node for node in graph.graph.nodes if node.op == "placeholder"]
    examples = [node.meta.get("example_value") for node in nodes]
    sizes: dict[str, tuple[Any, int]] = {}
    for node, example in zip(nodes, examples, strict=True):
        if isinstance(example, torch.Tensor):
            for dimension, length in enumerate(example.shape):
                sizes.setdefault(str(length), (node, dimension))
    taken = []
    first = next(node for node in graph.graph.nodes if node.op != "placeholder")
    for number, (node, example) in enumerate(zip(nodes, examples, strict=True)):
        if isinstance(example, torch.Tensor):
            taken.append(number)
            continue
        if str(example) not in sizes:
            raise NotCaptured("torch.compile's first graph takes a number that is no size of a tensor")
        with graph.graph.inserting_before(first):
            size = graph.graph.call_function(torch.ops.aten.sym_size.int, sizes[str(example)])
        node.replace_all_uses_with(size)
        graph.graph.erase_node(node)
    graph.recompile()
    return tuple(taken)
