"""The graph of a forward, as torch.compile traces it, and what its operators do beside their values.

torch.compile looks at a forward before it runs. It notes every object that the forward reads, as a guard, and puts the
operators in a graph, up to the first place that it cannot trace, as a decision by the data. In each later call it asks
the guards. Where they hold it calls the function that stands for the graph, which is one of ours; where they do not, it
traces anew. Nothing is compiled here: the graph's operators are the program's own, and run one by one. Called by
`analysis.py` and, in each step, by `forward.py`.

torch says of each of its operators what it changes in place, whose memory its value has, and whether it draws random
numbers. A function of a graph may call several of them. So the graph is run once as torch's own compilers run it: with
tensors that know their sizes alone. Nothing of the program is touched.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import io
import logging
import re
import sys
import threading
import traceback
import types
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import detect_fake_mode
from torch.fx import Interpreter
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from hetstream.mpi_dataworkers.loader.step_times import pause_all
from hetstream.mpi_dataworkers.partitioner.program import METHOD, Call, Kind, Ref, place_of, references, replace_in
from hetstream.mpi_dataworkers.partitioner.unguarded_constants import NOT_THE_PROGRAM, NotCaptured, Unseen

# Keeps what torch says while it traces from the user, and the warnings of the program as they were. No side effects.
#
# Python shows a warning once for each line, and forgets which it has shown as soon as anybody changes the filters.
# torch changes them as it traces, so that a program would show all of its warnings once more.

_LOGGERS = tuple(logging.getLogger(name) for name in ("torch", "torch._dynamo", "torch.fx"))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep torch's own words to itself: what it cannot do is no warning of the program's."""
    levels = [logger.level for logger in _LOGGERS]
    stream = sys.stderr
    for logger in _LOGGERS:
        logger.setLevel(logging.CRITICAL)
    try:
        with unwarned(), contextlib.redirect_stderr(_OfOthers(stream)):
            yield
    finally:
        for logger, level in zip(_LOGGERS, levels, strict=True):
            logger.setLevel(level)


@contextlib.contextmanager
def unwarned() -> Iterator[None]:
    """Show no warning; afterwards the filters are as they were, and what was shown before is known as such."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(_ignoring())
        inside = _version()
        with _ignoring():
            nested = _version()
        to_leave = _version() - nested
        before = inside - (nested - inside)
        shown = [(table, dict(table)) for table in _tables() if table.get("version") == before]
        try:
            yield
        finally:
            warnings.simplefilter("ignore")  # whatever was left there
            after = _version() + to_leave
            stack.close()
            for table, entries in shown:
                table.clear()
                table.update(entries, version=after)


@contextlib.contextmanager
def _ignoring() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _version() -> Any:
    """The number of times that filters have changed: Python notes it in each table of what was shown."""
    table: dict[Any, Any] = {}
    warnings.warn_explicit("", UserWarning, "", 0, registry=table)
    return table["version"]


def _tables() -> list[dict[Any, Any]]:
    """Python's tables of the warnings that were shown: one for each module, and one for all."""
    modules = [vars(module) for module in list(sys.modules.values()) if hasattr(module, "__dict__")]
    found = [names.get("__warningregistry__") for names in modules]
    found.append(getattr(warnings, "onceregistry", None))
    return [table for table in found if isinstance(table, dict)]


class _OfOthers(io.TextIOBase):
    """Standard error without what this thread writes: torch tells at length what it cannot trace."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._thread = stream, threading.get_ident()

    def write(self, text: str) -> int:
        """Write it, or not."""
        return len(text) if threading.get_ident() == self._thread else self._stream.write(text)


_pytree: Any = pytree
PLACE = re.compile(r'File "([^"]+)", line (\d+), in (\w+)')
# What torch.compile is told while it traces. It guards everything that it can, and leaves NumPy to NumPy, whose bits
# are not torch's.
_SETTINGS = {
    "capture_dynamic_output_shape_ops": True,
    "capture_scalar_outputs": True,
    "allow_unspec_int_on_nn_module": True,
    "trace_numpy": False,
    "optimize_ddp": False,
    "skip_nnmodule_hook_guards": False,
    "skip_no_tensor_aliasing_guards_on_parameters": False,
    "skip_tensor_guards_with_matching_dict_tags": False,
    "skip_fsdp_guards": False,
    "assume_dunder_attributes_remain_unchanged": False,
    "suppress_errors": False,
    "recompile_limit": 1_000_000,
    "accumulated_recompile_limit": 1_000_000,
}
# Graphs that are made of one forward. A program whose guards fail more often runs as it is written.
MOST_GRAPHS = 12


class _Traced(Exception):
    """Ends a call in which a graph is made, or in which there is none, before any of it runs."""


@dataclass(frozen=True, eq=False)
class Graph:
    """A graph as torch.compile has made it.

    Attributes:
        module: runs it.
        unseen: what torch.compile has taken for constant.
        sizes: of the inputs that are sizes of tensors, by number: the tensor's number and its dimension.
        numbers: the inputs that are tensors made of Python's numbers.
    """

    module: Any
    unseen: Unseen
    sizes: Mapping[int, tuple[int, int]]
    numbers: frozenset[int]

    @functools.cached_property
    def text(self) -> str:
        """What it computes of its inputs: graphs of the same text do the same, if their constants are the same."""
        return f"{self.module.graph}{[*self.sizes.items()]}"

    @functools.cached_property
    def constants(self) -> dict[str, torch.Tensor]:
        """Tensors that are written in it."""
        targets = [node.target for node in self.module.graph.nodes if node.op == "get_attr"]
        found = {target: functools.reduce(getattr, target.split("."), self.module) for target in targets}
        return {target: value for target, value in found.items() if isinstance(value, torch.Tensor)}


def _called(module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return module._call_impl(*args, **kwargs)


def _forward(module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return module.forward(*args, **kwargs)


class TraceMode(enum.Enum):
    """How a forward is traced; each is tried where those before it give no graph. Older torch has not the last one."""

    WHOLE = "what calls the forward, with its hooks"
    FORWARD = "the forward itself, as its class has it, to the first function that cannot be traced"
    INTO_CALLS = "what calls the forward, to the first place in any function that cannot be traced"


class Tracer:
    """Has torch.compile trace one module's forward.

    Args:
        module: the module.
        way: how.
        instead: what is called with a graph and its inputs, in the place of the graph.

    Attributes:
        graphs: that were made.
    """

    def __init__(self, module: torch.nn.Module, way: TraceMode, instead: Callable[[Graph, Sequence[Any]], Any]) -> None:
        self._way = way
        self.graphs: list[Graph] = []
        self._module, self._instead, self._refusal = module, instead, ""
        self._only_traces = self._is_done = False
        self._traced: tuple[Graph, tuple[Any, ...]] | None = None
        # torch.compile keeps what it makes of a function with the function's code: so each tracer has its own.
        copied = types.FunctionType(_called.__code__.replace(co_name=f"call_{id(self)}"), globals())
        self._call = functools.partial(copied, module)
        self._code = getattr(module.forward, "__code__", None) if way is TraceMode.FORWARD else copied.__code__
        self._forward = functools.partial(_forward, module)
        self._given: tuple[Any, Any] = (), {}

        # torch keeps these functions for good, and with them what they hold.
        me = weakref.ref(self)

        def compiles(graph: Any, given: Any) -> Callable[..., Any]:
            tracer = me()
            return graph.forward if tracer is None else tracer._compiled(graph, given)

        context: Any = torch._dynamo.optimize(backend=compiles)
        self._convert = context.callback

        def looks(frame: Any, entry: Any, state: Any) -> Any:
            tracer = me()
            assert tracer is not None  # it has been set by the call that runs
            return tracer._looked(frame, entry, state)

        self._looks: Any = looks
        # Of a function that has no graph whose guards hold: it runs as it is written, and so do, or do not, the
        # functions that it calls.
        kinds: Any = torch._dynamo.types
        skip, default = kinds.FrameAction.SKIP, kinds.FrameAction.DEFAULT
        self._all_as_written, self._as_written = (
            kinds.ConvertFrameReturn(frame_exec_strategy=kinds.FrameExecStrategy(skip, inside), apply_to_code=False)
            for inside in (skip, default)
        )

    def change(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        """Return what torch.compile took for constant and is not as it was; "" where all is."""
        return next(filter(None, (graph.unseen.change(args, kwargs) for graph in self.graphs)), "")

    def trace(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Graph, tuple[Any, ...]]:
        """Return the graph of the forward for these arguments, and what it is given; nothing of it runs.

        Raises:
            NotCaptured: there is none.
        """
        self._only_traces, self._traced, self._refusal = True, None, ""
        try:
            self._run(self._forward if self._way is TraceMode.FORWARD else self._call, args, kwargs)
        except _Traced:
            pass
        except Exception as error:
            if self._traced is None:
                reason = self._refusal or f"torch.compile cannot trace it, and says {reason_of(error)}"
                raise NotCaptured(reason) from error
        finally:
            self._only_traces = False
        if self._traced is None:
            raise NotCaptured("torch.compile makes no graph of its beginning")
        return self._traced

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The module's result, with `instead` in the place of its first graph. What comes behind it is as written."""
        self._is_done = False
        return self._run(self._call, args, kwargs)

    def _run(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        self._given = args, kwargs
        self._looks._torchdynamo_orig_backend = self._convert
        set_eval_frame = torch._C._dynamo.eval_frame.set_eval_frame
        before = set_eval_frame(self._looks)
        try:
            return call(args, kwargs)
        finally:
            set_eval_frame(before)
            self._given = (), {}

    def _looked(self, frame: Any, entry: Any, state: Any) -> Any:
        """Called by torch for each function that has no graph whose guards hold."""
        if self._is_done:
            return self._all_as_written
        if frame.f_code is not self._code or len(self.graphs) >= MOST_GRAPHS:
            return self._as_written
        try:
            tensors = [value for value in _pytree.tree_leaves(self._given) if type(value) is torch.Tensor]
            with _tracing(tensors, self._way is TraceMode.INTO_CALLS):
                found = self._convert(frame, entry, state)
        except Exception:
            if self._only_traces:
                raise
            found = None
        if self._only_traces:
            raise _Traced
        return self._as_written if found is None or found.guarded_code is None else found

    def _compiled(self, module: Any, given: Sequence[Any]) -> Callable[..., Any]:
        context: Any = torch._guards.TracingContext.try_get()
        try:
            unseen = Unseen(self._module, module.graph, getattr(context, "traced_code", None) or (), self._given)
        except NotCaptured as reason:
            self._refusal = str(reason)
            raise
        graph = Graph(module, unseen, *_inputs(module))
        self._traced = graph, tuple(map(_number, given))
        self.graphs.append(graph)
        if self._only_traces:
            raise _Traced

        me = weakref.ref(self)

        def runs(*inputs: Any) -> Any:
            tracer = me()
            if tracer is None or tracer._is_done:
                return module.forward(*inputs)
            tracer._is_done = True
            tracer._looks._torchdynamo_orig_backend = None  # what comes behind the graph runs as it is written
            return tracer._instead(graph, inputs)

        if not self._only_traces:
            self._traced = None  # which holds a batch
        return runs


@functools.cache
def _begin() -> None:
    """Have torch.compile set up what it needs in a call of its own: else each later call takes 0.1 ms more."""
    with quiet():
        torch.compile(_itself, backend="eager")(torch.zeros(1))


def _itself(value: torch.Tensor) -> torch.Tensor:
    return value + 0


def traced(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Graph, tuple[Any, ...], TraceMode]:
    """Return the graph of a forward, or of its beginning; nothing of it runs.

    Returns:
        It, what it is given, and in which way a `Tracer` gives it.

    Raises:
        NotCaptured: there is none.
    """
    _begin()
    problems: list[str] = []
    for way in TraceMode:
        try:
            return *Tracer(module, way, _nothing).trace(args, kwargs), way
        except NotCaptured as problem:
            problems.append(str(problem))
    raise NotCaptured(problems[0])


def _nothing(graph: Graph, _: Sequence[Any]) -> Any:
    raise AssertionError(graph)


def _inputs(module: Any) -> tuple[dict[int, tuple[int, int]], frozenset[int]]:
    """The inputs of a graph that are sizes of tensors among them, and those that are made of Python's numbers."""
    nodes = [node for node in module.graph.nodes if node.op == "placeholder"]
    values = [node.meta.get("example_value") for node in nodes]
    wrapped = [getattr(node.meta.get("grapharg"), "pass_arg_as_tensor", False) for node in nodes]
    places: dict[str, tuple[int, int]] = {}
    for number, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            for dimension, length in enumerate(value.shape):
                places.setdefault(str(length), (number, dimension))
    sizes = {number: str(value) for number, value in enumerate(values) if isinstance(value, torch.SymInt)}
    found = {number: places[text] for number, text in sizes.items() if text in places}
    return found, frozenset(place for place, is_wrapped in enumerate(wrapped) if is_wrapped)


def _number(value: Any) -> Any:
    """A size as it is in the call that was traced."""
    return value.node.hint if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool) else value


@contextlib.contextmanager
def _tracing(tensors: Sequence[torch.Tensor], into_calls: bool) -> Iterator[None]:
    """As torch.compile is to trace: for tensors of any size, and what the program would do if nothing traced it."""
    pause_all()
    before = [dict(vars(tensor)) for tensor in tensors]
    for tensor in tensors:
        torch._dynamo.maybe_mark_dynamic(tensor, [*range(tensor.dim())])
    config: Any = torch._dynamo.config
    settings = _SETTINGS | {"nested_graph_breaks": into_calls}
    settings = {name: value for name, value in settings.items() if hasattr(config, name)}
    table: dict[Any, Any] = getattr(torch._dynamo.variables.torch, "tracing_state_functions", dict)()
    answers = dict(table)
    table.update({function: False for function, answer in answers.items() if answer})
    # What a processor can do never changes, and torchvision asks for it.
    constants: Any = getattr(torch._dynamo.variables.torch, "constant_fold_functions", None)
    asks: Any = torch.backends.cpu.get_cpu_capability
    is_new = isinstance(constants, dict) and asks not in constants
    if is_new:
        constants[asks] = None
    try:
        with config.patch(settings), quiet():
            yield
    finally:
        table.update(answers)
        if is_new:
            del constants[asks]
        for tensor, attributes in zip(tensors, before, strict=True):
            vars(tensor).clear()
            vars(tensor).update(attributes)


def reason_of(error: BaseException) -> str:
    """Return an error of torch.compile in one line, with the place in the program."""
    text = str(error)
    places = [(file, int(line)) for file, line, _ in PLACE.findall(text)]
    places += [(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)]
    own = [place for place in places if not NOT_THE_PROGRAM.search(place[0]) and "<" not in place[0]]
    where = f" ({own[-1][0].rsplit('/', 1)[-1]}:{own[-1][1]})" if own else ""
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first[:200]}{where}"


# Reads a graph of torch.compile into plain values: what goes in, what is called, what comes out.


@dataclass(frozen=True)
class GraphInput:
    """What goes into the graph.

    Attributes:
        name: of the value.
        kind: what it is.
        target: where torch.compile has it from, as text; of a constant its name in the graph.
        argument: its number among the graph's inputs; -1 of a constant.
    """

    name: str
    kind: Kind
    target: str
    argument: int


@dataclass(frozen=True)
class CapturedForward:
    """The graph of a forward.

    Attributes:
        inputs: what goes in.
        calls: its operators in the order in which they run.
        lines: where the program calls each of them: file, line, text.
        outputs: what comes out: a `Ref` or a plain value each.
    """

    inputs: tuple[GraphInput, ...]
    calls: tuple[Call, ...]
    lines: Mapping[str, tuple[str, int, str]]
    outputs: tuple[Any, ...]


def read(graph: Graph, kinds: Mapping[int, Kind], constant: Kind) -> CapturedForward:
    """Return the graph as plain values.

    Args:
        graph: as it was traced.
        kinds: of its inputs, by number.
        constant: what tensors that are written in it are.

    Raises:
        NotCaptured: it has something that is no plain value.
    """
    inputs: list[GraphInput] = []
    calls: list[Call] = []
    lines: dict[str, tuple[str, int, str]] = {}
    outputs: tuple[Any, ...] = ()
    placeholders = [node for node in graph.module.graph.nodes if node.op == "placeholder"]
    for number, node in enumerate(placeholders):
        if number in graph.sizes:
            tensor, dimension = graph.sizes[number]
            calls.append(Call(node.name, METHOD, "size", (Ref(placeholders[tensor].name), dimension), {}))
        else:
            inputs.append(GraphInput(node.name, kinds[number], _source(node), number))
    for node in graph.module.graph.nodes:
        if node.op in ("call_function", "call_method"):
            calls.append(_call(node, graph))
            if place := _place(node.meta.get("stack_trace") or ""):
                lines[node.name] = place
        elif node.op == "get_attr" and node.target in graph.constants:
            inputs.append(GraphInput(node.name, constant, node.target, -1))
        elif node.op == "output":
            outputs = tuple(_values(value, graph) for value in node.args[0])
        elif node.op not in ("placeholder", "get_attr"):
            raise NotCaptured(f"a node {node.op} {node.target} in the graph of torch.compile")
    return CapturedForward(tuple(inputs), tuple(calls), lines, outputs)


def _call(node: Any, graph: Graph) -> Call:
    args, kwargs = _values(tuple(node.args), graph), _values(dict(node.kwargs), graph)
    if node.op == "call_method":
        return Call(node.name, METHOD, node.target, args, kwargs)
    place = place_of(node.target)
    if place is None:
        return Call(node.name, "", _name(node.target), args, kwargs, node.target)
    return Call(node.name, *place, args, kwargs)


def _name(function: Any) -> str:
    return str(getattr(function, "__qualname__", None) or function)


def _source(node: Any) -> str:
    source = getattr(node.meta.get("grapharg"), "source", None)
    name = getattr(source, "name", "")
    return str(name() if callable(name) else name) or str(node.name)


def _values(argument: Any, graph: Graph) -> Any:
    def value_of(item: Any) -> Any:
        if isinstance(item, torch.fx.Node):
            if item.op == "get_attr" and item.target not in graph.constants:
                return getattr(graph.module, str(item.target))  # a graph of its own, for an operator of higher order
            return Ref(item.name)
        if isinstance(item, torch.SymInt | torch.SymFloat | torch.SymBool):
            raise NotCaptured("a size in the graph of torch.compile that nothing in it gives")
        return item

    return replace_in(_plain_containers(argument), value_of)


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
    places = [(match, index) for index, line in enumerate(lines) if (match := PLACE.search(line))]
    own = [place for place in places if not NOT_THE_PROGRAM.search(place[0].group(1))] or places
    if not own:
        return None
    match, number = own[-1]
    text = lines[number + 1].strip() if number + 1 < len(lines) else ""
    return match.group(1), int(match.group(2)), text


def on_both_sides(captured: CapturedForward) -> frozenset[str]:
    """Return numbers that follow from the sizes of what comes with the batch: each side finds them out itself."""
    known = {each.name for each in captured.inputs if each.kind is Kind.LEAF}
    found: set[str] = set()
    for call in captured.calls:
        names = references((call.args, call.kwargs))
        of_size = (call.module, call.path) in ((METHOD, "size"), ("torch.ops", "aten.sym_size.int"))
        of_numbers = call.module in ("_operator", "math") or call.path == "Size"
        if (of_size and known.issuperset(names)) or (of_numbers and names and found.issuperset(names)):
            found.add(call.name)
    return frozenset(found)


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
    """Return what each call of a graph does, by its name.

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
