"""What is known of a model's forward: its operators, what may move, what each costs. Called by `partition.py`."""

from __future__ import annotations

import contextlib
import enum
import functools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from hetstream.mpi_dataworkers.partitioner.capture import (
    CapturedForward,
    Effects,
    Graph,
    TraceMode,
    effects_of,
    on_both_sides,
    read,
    traced,
    unwarned,
)
from hetstream.mpi_dataworkers.partitioner.cut import CutDecision, Cutter, OperatorCost, Rates
from hetstream.mpi_dataworkers.partitioner.leaves import same_bytes
from hetstream.mpi_dataworkers.partitioner.program import (
    GRAIN_SIZE,
    Call,
    ForwardGraph,
    Kind,
    Operator,
    OperatorProgram,
    Ref,
    called,
    references,
    replace_in,
)
from hetstream.mpi_dataworkers.partitioner.split import LeafForm, Split, StageInputs, split
from hetstream.mpi_dataworkers.partitioner.unguarded_constants import NotCaptured

# Which operators of a forward may run in a data worker, and why the others may not. Pure; called by `partition.py`.
#
# An operator moves when its value is the same wherever and whenever it is computed: when nothing that leads to it is a
# parameter, a buffer that the forward changes, a value that is changed in place, or random.


class Offload(enum.Enum):
    """What may move."""

    AUTO = "auto"  # deterministic operators, where that pays
    ALL = "all"  # every operator without state, and what draws random numbers too
    OFF = "off"


@dataclass(frozen=True)
class Movable:
    """What becomes of an operator.

    Attributes:
        moves: whether a data worker may run it.
        reason: why.
    """

    moves: bool
    reason: str


_INPUT_REASONS = {
    Kind.LEAF: Movable(True, "comes with the batch"),
    Kind.PLAIN: Movable(False, "an argument that does not come from the batch"),
    Kind.PARAMETER: Movable(False, "a parameter, which each step changes"),
    Kind.BUFFER: Movable(True, "a buffer that the forward only reads: a copy goes along"),
}


def classify(graph: ForwardGraph, offload: Offload) -> dict[str, Movable]:
    """Say for each operator whether it may move.

    Args:
        graph: the forward.
        offload: what may move.

    Returns:
        The verdict of each value by its name. What moves is closed: whatever leads to it moves, too.
    """
    changed = _changed_in_place(graph)
    verdicts: dict[str, Movable] = {}
    for operator in graph.operators:
        verdicts[operator.name] = _verdict(operator, offload, changed, verdicts)
    return verdicts


def _verdict(
    operator: Operator, offload: Offload, changed: dict[str, Operator], verdicts: dict[str, Movable]
) -> Movable:
    if offload is Offload.OFF:
        return Movable(False, "offloading is off")
    if operator.name in changed:
        writer = changed[operator.name]
        where = f" ({writer.line})" if writer.line else ""
        return Movable(False, f"{writer.target}{where} changes it in place")
    if operator.kind is not Kind.OPERATOR:
        return _INPUT_REASONS[operator.kind]
    if operator.keeps:
        return Movable(False, operator.keeps)
    if operator.writes:
        return Movable(False, "it changes a value in place")
    if operator.random and offload is not Offload.ALL:
        return Movable(False, "it draws random numbers; --offload=all moves it, too")
    for name in operator.inputs:
        if not verdicts[name].moves:
            return Movable(False, f"it needs {name}: {_first_reason(name, verdicts)}")
    return Movable(True, "depends on no state")


def _first_reason(name: str, verdicts: dict[str, Movable]) -> str:
    """The reason at the root: what stands between says nothing more."""
    return (
        verdicts[name].reason.split(": ")[-1]
        if verdicts[name].reason.startswith("it needs ")
        else verdicts[name].reason
    )


def with_open_outputs(graph: ForwardGraph) -> ForwardGraph:
    """Return a graph whose outputs may be changed in place: by the program, or by the rest of a forward of which it is
    a part.

    So an output that shares memory with another one, or with an input, stays: sent, it would have memory of its own.
    """
    root = _memory(graph)
    groups: dict[str, list[Operator]] = {}
    for operator in graph.operators:
        groups.setdefault(root(operator.name), []).append(operator)
    outputs = set(graph.outputs)
    shared: set[str] = set()
    for group in groups.values():
        num_visible = sum(operator.name in outputs or operator.kind is not Kind.OPERATOR for operator in group)
        if num_visible > 1 and any(operator.name in outputs for operator in group):
            shared.update(operator.name for operator in group)
    reason = "what comes behind may change it in place, and with it what shares its memory"
    operators = (
        replace(operator, keeps=operator.keeps or reason)
        if operator.name in shared and operator.kind is Kind.OPERATOR
        else operator
        for operator in graph.operators
    )
    return ForwardGraph(tuple(operators), graph.outputs)


def _memory(graph: ForwardGraph) -> Callable[[str], str]:
    """Gives one name for all values that may share their memory."""
    together: dict[str, str] = {}

    def root(name: str) -> str:
        while together.get(name, name) != name:
            name = together[name]
        return name

    for operator in graph.operators:
        for name in operator.shares:
            together[root(name)] = root(operator.name)
    return root


def _changed_in_place(graph: ForwardGraph) -> dict[str, Operator]:
    """Every value whose memory an operator writes, with that operator."""
    root = _memory(graph)
    writers: dict[str, Operator] = {}
    for operator in graph.operators:
        for name in operator.writes:
            writers.setdefault(root(name), operator)
    return {
        operator.name: writers[root(operator.name)] for operator in graph.operators if root(operator.name) in writers
    }


# What each operator of a captured forward does, in the plain words of `program.py`.

# Products of matrices: their sums depend on the number of threads, and under autocast on its precision.
_PRODUCTS = frozenset(
    [
        *("mm", "mv", "bmm", "addmm", "addmv", "addr", "addbmm", "baddbmm", "matmul", "linear", "bilinear", "dot"),
        *("vdot", "inner", "outer", "einsum", "tensordot", "chain_matmul", "_cdist_forward", "_prelu_kernel", "gru"),
        *("lstm", "rnn_tanh", "convolution", "_euclidean_dist", "_trilinear", "ger"),
    ]
)
_PRODUCT_FAMILIES = (
    "linalg_",
    "_linalg",
    "fft_",
    "_fft",
    "scaled_dot_product",
    "_scaled_dot",
    "_convolution",
    "mkldnn",
)
# Sums: the result depends on the number of threads where it is one number, because threads then share the sum.
_SUMS = frozenset(
    ("sum", "mean", "nansum", "nanmean", "prod", "var", "std", "var_mean", "std_mean", "norm", "logsumexp", "dist")
)
# Operators on floating-point numbers whose bits are the same however torch cuts them into pieces: those that are right
# to the last bit, those that only move numbers, and those that work on whole vectors to the very end of a piece.
ALIKE_IN_PIECES = frozenset(
    [
        *("add", "sub", "rsub", "mul", "div", "neg", "abs", "sqrt", "reciprocal", "floor", "ceil", "trunc", "round"),
        *("clamp", "clamp_min", "clamp_max", "minimum", "maximum", "where", "eq", "ne", "lt", "le", "gt", "ge"),
        *("nan_to_num", "sign", "sgn", "isnan", "isinf", "isfinite", "signbit", "relu", "hardtanh", "logical_not"),
        *("logical_and", "logical_or", "logical_xor", "masked_fill", "amax", "amin", "any", "all", "_to_copy", "clone"),
        *("copy", "detach", "alias", "lift_fresh", "view", "_unsafe_view", "reshape", "expand", "permute", "transpose"),
        *("t", "squeeze", "unsqueeze", "select", "slice", "split", "split_with_sizes", "unbind", "as_strided", "flip"),
        *("cat", "stack", "index", "index_select", "gather", "embedding", "constant_pad_nd", "repeat", "roll", "tril"),
        *(
            "triu",
            "diagonal",
            "unfold",
            "_reshape_alias",
            "view_as_real",
            "movedim",
            "masked_select",
            "nonzero",
            "take",
        ),
        *("zeros", "ones", "full", "zeros_like", "ones_like", "full_like", "scalar_tensor", "new_zeros", "new_ones"),
        *("new_full", "bucketize", "searchsorted", "_unique2", "unique_dim", "sort", "_local_scalar_dense", "sym_size"),
        *("exp", "log", "log1p", "log2", "log10", "expm1", "sin", "cos", "tanh", "erf", "rsqrt", "_assert_scalar"),
    ]
)
_NO_CONTENT = frozenset(("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"))
# Checks that torch.compile adds for itself.
_CHECKS = frozenset(("aten::_assert_scalar", "aten::_assert_async", "aten::sym_constrain_range"))
_HALVES = frozenset((torch.float16, torch.bfloat16))
# Modules of functions that work on no tensor.
_PYTHON = frozenset(("_operator", "operator", "builtins", "math", "method"))


@dataclass(frozen=True)
class Observed:
    """What a run has shown of an operator's value.

    Attributes:
        seconds: that it took.
        num_bytes: of its tensors.
        type_name: `tensor`, `number` or `several`.
        dtype: of a tensor.
        num_elements: of a tensor.
        device: of a tensor.
        is_dense: it fills its memory, so that it can be sent as it lies there.
    """

    seconds: float
    num_bytes: int
    type_name: str
    dtype: torch.dtype | None = None
    num_elements: int = 0
    device: torch.device | None = None
    is_dense: bool = True


def describe(
    captured: CapturedForward,
    effects: Mapping[str, Effects],
    observed: Mapping[str, Observed] | None = None,
    failed: Mapping[str, str] | None = None,
) -> ForwardGraph:
    """Return the operators of a forward.

    Args:
        captured: the forward.
        effects: what each of its calls does.
        observed: what a run has shown of those operators that were run.
        failed: why others could not be run.
    """
    inputs = [Operator(each.name, each.target, kind=each.kind) for each in captured.inputs]
    sizes = Effects(gives="number")
    twice = on_both_sides(captured)
    calls = [
        _described_operator(
            call, captured, effects.get(call.name, sizes), (observed or {}).get(call.name), call.name in twice
        )
        for call in captured.calls
    ]
    calls = [replace(call, keeps=call.keeps or (failed or {}).get(call.name, "")) for call in calls]
    removable = {name for name, effect in effects.items() if effect.operators and effect.operators <= _CHECKS}
    return _without_the_unneeded([*inputs, *calls], tuple(references(captured.outputs)), removable)


def is_bounded(effect: Effects) -> bool:
    """Return whether an operator's last bits depend on the number of threads, from `program.GRAIN_SIZE` elements on."""
    if not any(dtype.is_floating_point or dtype.is_complex for dtype in effect.dtypes):
        return False
    return not {name.split("::")[-1].rstrip("_") for name in effect.operators} <= ALIKE_IN_PIECES


def _without_the_unneeded(operators: list[Operator], outputs: tuple[str, ...], removable: set[str]) -> ForwardGraph:
    """Leave out what leads to no output and has no effect."""
    needed = set(outputs)
    kept: list[Operator] = []
    for operator in reversed(operators):
        has_effect = bool(operator.writes or operator.random or operator.keeps) and operator.name not in removable
        if operator.kind is not Kind.OPERATOR or operator.name in needed or has_effect:
            kept.append(operator)
            needed.update((*operator.inputs, *operator.shares, *operator.writes))
    return ForwardGraph(tuple(reversed(kept)), outputs)


def _described_operator(
    call: Call, captured: CapturedForward, effect: Effects, seen: Observed | None, is_twice: bool
) -> Operator:
    file, line, source = captured.lines.get(call.name, ("", 0, ""))
    target = f"{call.module}.{call.path}" if call.module not in ("", "torch.ops", "method") else call.path
    return Operator(
        call.name,
        target.removeprefix("torch.nn.functional.").removeprefix("torch.").removeprefix("_operator."),
        tuple(dict.fromkeys(references((call.args, call.kwargs)))),
        writes=effect.writes,
        shares=tuple(dict.fromkeys([*effect.shares, *effect.writes])),
        several=not is_twice and (effect.gives == "several" or (seen is not None and not seen.is_dense)),
        random=effect.random,
        keeps=_why_kept(call, effect, seen),
        line=f"{file.rsplit('/', 1)[-1]}:{line}" if file else "",
        source=source,
    )


def _why_kept(call: Call, effect: Effects, seen: Observed | None) -> str:
    if effect.is_nested:
        return "a higher-order operator, a graph of its own"
    names = {name.split("::")[-1].rstrip("_") for name in effect.operators}
    if others := sorted(name for name in effect.operators if not name.startswith(("aten::", "prims::", "prim::"))):
        return f"a custom operator, {others[0]}, which data workers may not have"
    if not call.module or call.path == "cuda":
        return f"data workers cannot find the function {call.path}"
    is_plain = call.module in _PYTHON or call.path == "Size" or "sym_" in call.path
    if effect.gives == "nothing" or not (names or effect.shares or is_plain):
        return "what it does is not known"
    if names & _NO_CONTENT and len(names) == 1:
        return "its value is memory without content"
    if any("batch_norm" in name or "instance_norm" in name for name in names):
        return "it keeps running statistics"
    if names & _PRODUCTS or any(name.startswith(_PRODUCT_FAMILIES) for name in names):
        return "a product of matrices, whose last bits depend on the number of threads"
    if half := sorted(map(str, effect.dtypes & _HALVES)):
        return f"its value is {half[0].removeprefix('torch.')}, which autocast may compute in another precision"
    is_float = seen is not None and seen.dtype is not None and seen.dtype.is_floating_point
    if is_float and seen is not None and seen.num_elements <= 1 and names & _SUMS:
        return "a sum to one number, whose last bits depend on the number of threads"
    return ""


# Runs the operators of a forward that may move, and notes what they cost and what their values are.
#
# Called by `partition.py` in the training process, once as the trainer runs them and once with one thread, as data
# workers do.

# Runs of which the fastest counts: the first pays for memory and for what is loaded at first use.
_NUM_RUNS = 3


def observe(calls: Sequence[Call], values: Mapping[str, Any]) -> tuple[dict[str, Observed], float, dict[str, str]]:
    """Run operators one by one.

    Args:
        calls: in the order in which they run.
        values: what goes in, by name.

    Returns:
        What was seen of each; the share of the sum of their times that they take together; and of those that failed,
        and of what needs them, why.
    """
    seen: dict[str, Observed] = {}
    failed: dict[str, str] = {}
    last_users = {name: call.name for call in calls for name in references((call.args, call.kwargs))}
    with _own_random_numbers(values.values()), torch.no_grad():
        for _ in range(_NUM_RUNS):
            known = dict(values)
            for call in calls:
                _run(call, known, seen, failed)
                # Dropped as in a forward: an operator that gets fresh memory each time takes several times as long.
                for name in references((call.args, call.kwargs)):
                    if last_users[name] == call.name and name in known and name not in values:
                        del known[name]
    return seen, _of_the_whole(calls, seen, failed, values), failed


def _of_the_whole(
    calls: Sequence[Call], seen: Mapping[str, Observed], failed: Mapping[str, str], values: Mapping[str, Any]
) -> float:
    """What operators take together, in parts of the sum of their own times, which has the clock's in it."""
    run = tuple(call for call in calls if call.name in seen and call.name not in failed and call.module)
    used = {name for call in run for name in references((call.args, call.kwargs))}
    total_s = sum(seen[call.name].seconds for call in run)
    if not total_s or not used <= {*values, *(call.name for call in run)}:
        return 1.0
    inputs = tuple(name for name in values if name in used)
    program = OperatorProgram(inputs, run, tuple(Ref(call.name) for call in run if call.name not in used))
    return min(1.0, seconds_of(program, [values[name] for name in inputs]) / total_s)


def _run(call: Call, known: dict[str, Any], seen: dict[str, Observed], failed: dict[str, str]) -> None:
    names = references((call.args, call.kwargs))
    if any(name not in known for name in names):
        failed.setdefault(call.name, "what it needs cannot run by itself")
        return

    def value_of(item: Any) -> Any:
        return known[item.name] if isinstance(item, Ref) else item

    args, kwargs = replace_in(call.args, value_of), replace_in(call.kwargs, value_of)
    function = called(call)
    if problem := falling_borders(call.path, args, kwargs):
        failed[call.name] = problem
        return
    started = time.perf_counter()
    try:
        value = function(*args, **kwargs)
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError) as error:
        failed[call.name] = f"it cannot run by itself: {error}"
        return
    _finish(value)
    seconds = time.perf_counter() - started
    known[call.name] = value
    before = seen.get(call.name)
    if before is None or seconds < before.seconds:
        seen[call.name] = _observation(value, seconds)


# What a reason begins with where an operator is right but its arguments cannot be.
FALLING_BORDERS = "its borders decrease"
# Operators that look values up among sorted ones, and which argument those are.
_SORTED_ARGUMENTS = {"bucketize": (1, "boundaries"), "searchsorted": (0, "sorted_sequence")}


def falling_borders(path: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return where the borders of a search decrease, so that torch's result means nothing; "" where they do not."""
    place, name = _SORTED_ARGUMENTS.get(path.rsplit(".", 1)[-1], (0, ""))
    borders = args[place] if name and place < len(args) else kwargs.get(name)
    if not isinstance(borders, torch.Tensor) or kwargs.get("sorter") is not None:
        return ""
    falls = (borders[..., 1:] < borders[..., :-1]).nonzero()
    if not len(falls):
        return ""
    *row, at = falls[0].tolist()
    first, second = borders[tuple(row)][at : at + 2].tolist()
    return f"{FALLING_BORDERS}: {second:g}, at place {at + 1}, is below {first:g}"


def _observation(value: Any, seconds: float) -> Observed:
    if isinstance(value, torch.Tensor):
        num_bytes = value.numel() * value.element_size()
        return Observed(seconds, num_bytes, "tensor", value.dtype, value.numel(), value.device, _is_dense(value))
    if isinstance(value, bool | int | float):
        return Observed(seconds, 8, "number")
    return Observed(seconds, 0, "several")


def _is_dense(value: torch.Tensor) -> bool:
    """Whether a tensor fills its memory, in some order of its dimensions, so that it can be sent as it lies there."""
    if value.layout is not torch.strided:
        return False
    strides = value.stride()
    order = sorted(range(value.dim()), key=lambda place: (-strides[place], place))
    return value.numel() == 0 or value.permute(order).is_contiguous()


def _finish(value: Any) -> None:
    """Wait for an accelerator: it works on when the call has returned."""
    if isinstance(value, torch.Tensor) and value.is_cuda:
        torch.cuda.synchronize(value.device)


@contextlib.contextmanager
def _own_random_numbers(values: Any) -> Iterator[None]:
    """Leave the program's random numbers as they are."""
    devices = {value.device.index for value in values if isinstance(value, torch.Tensor) and value.is_cuda}
    with torch.random.fork_rng(devices=sorted(devices)):
        yield


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Run as a data worker does, which has one CPU."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def seconds_of(program: OperatorProgram, inputs: Sequence[Any]) -> float:
    """Return what a program takes as a whole."""
    best = float("inf")
    with _own_random_numbers(inputs), torch.no_grad():
        for _ in range(_NUM_RUNS):
            started = time.perf_counter()
            values = program(*inputs)
            for value in values:
                _finish(value)
            best = min(best, time.perf_counter() - started)
    return best


def seconds_of_graph(graph: Graph, inputs: Sequence[Any]) -> float:
    """Return what a graph takes as a whole, with copies of what it may change in place."""
    with _own_random_numbers(inputs), torch.no_grad():
        best = float("inf")
        for _ in range(_NUM_RUNS):
            given = [value.clone() if isinstance(value, torch.Tensor) else value for value in inputs]
            started = time.perf_counter()
            for value in graph.module.forward(*given):
                _finish(value)
            best = min(best, time.perf_counter() - started)
    return best


_pytree: Any = pytree
# A buffer of which data workers get a copy is compared with it in each step, so it may not be larger.
_MOST_BYTES_TO_COMPARE = 1 << 20


@dataclass(frozen=True)
class Analysis:
    """What is known of a forward; `partition` decides with it, and `hetstream run --explain` prints it.

    Attributes:
        traced: torch.compile's graph.
        way: of the `Tracer` that gives it.
        captured: the same as plain values.
        graph: its operators.
        verdicts: which of them may move, and why not.
        costs: what they take.
        leaves: the leaf of the batch that an input of the graph is, by name.
        buffers: tensors that the forward only reads, by the name of the input.
        seconds: that the graph takes in the trainer.
        why_not_all: why the graph is only the beginning of the forward; "" where it is all of it.
        observed: what a run has shown of operators.
        bounded: names of the values that depend on the number of threads from some size on.
        num_threads: of the trainer.
    """

    traced: Graph
    way: TraceMode
    captured: CapturedForward
    graph: ForwardGraph
    verdicts: Mapping[str, Movable]
    costs: Mapping[str, OperatorCost]
    leaves: Mapping[str, LeafForm]
    buffers: Mapping[str, torch.Tensor]
    seconds: float
    why_not_all: str
    observed: Mapping[str, Observed]
    bounded: frozenset[str]
    num_threads: int

    @functools.cached_property
    def keeps_state(self) -> bool:
        """Whether the graph changes something in place that is not its own."""
        own = {operator.name for operator in self.graph.operators if operator.kind is Kind.OPERATOR}
        return not all(own.issuperset(operator.writes) for operator in self.graph.operators)

    @functools.cached_property
    def draws(self) -> bool:
        """Whether the graph draws random numbers."""
        return any(operator.random for operator in self.graph.operators)

    def decide(self, offload: Offload, rates: Rates, gain: float = 1.0) -> CutDecision:
        """Return where to cut.

        Args:
            offload: what may move.
            rates: what the decision depends on.
            gain: what the trainer gains, in parts of what the operators' own times say.
        """
        movable = frozenset(name for name, verdict in self.verdicts.items() if verdict.moves)
        costs = {name: replace(cost, trainer_s=gain * cost.trainer_s) for name, cost in self.costs.items()}
        cutter = Cutter(self.graph, movable, costs)
        if offload is Offload.OFF:
            return cutter.nothing(rates, "offloading is off")
        if why := self._why_nothing_may():
            return cutter.nothing(rates, why)
        return cutter.largest(rates) if offload is Offload.ALL else cutter.decide(rates)

    def _why_nothing_may(self) -> str:
        """Why no operator may move, by the first of them; "" where one may."""
        operators = [operator for operator in self.graph.operators if operator.kind is Kind.OPERATOR]
        if not operators or any(self.verdicts[operator.name].moves for operator in operators):
            return ""
        first = operators[0]
        where = f"{first.target} ({first.line})" if first.line else first.target
        return f"no operator of the forward may move; the first is {where}: {self.verdicts[first.name].reason}"

    def cut(self, decision: CutDecision, num_leaves: int, generation: int) -> Split:
        """Return the two sides.

        Args:
            decision: which operators move.
            num_leaves: of a batch.
            generation: number of the cut.
        """
        made_with = StageInputs(
            self.leaves,
            self.buffers,
            num_leaves,
            generation,
            frozenset(name for name, seen in self.observed.items() if seen.type_name == "number"),
            {name: seen.device for name, seen in self.observed.items()},
            self.bounded,
        )
        return split(self.captured, self.graph, decision, made_with)


def analyse(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    batch: Sequence[Any],
    offload: Offload,
) -> Analysis:
    """Capture a forward and find what of it may move. Nothing of the forward runs but operators that may move.

    Args:
        module: the model.
        args, kwargs: of its forward.
        batch: the leaves of the batch, of which tensors are among the arguments.
        offload: what may move.

    Raises:
        NotCaptured: nothing can be said of it; the message is the reason.
    """
    with unwarned():
        breaks = _graph_breaks()
        try:
            graph, given, way = traced(module, args, kwargs)
        except NotCaptured as problem:
            if _graph_breaks() == breaks:
                raise
            raise NotCaptured(f"{problem}: {_why_not_all(breaks)}") from problem
    why_not_all = _why_not_all(breaks) if way is not TraceMode.WHOLE else ""
    arguments = [value for value in _pytree.tree_leaves((args, dict(kwargs))) if isinstance(value, torch.Tensor)]
    return analysis_of(graph, given, arguments, batch, offload, way, why_not_all)


@unwarned()
def analysis_of(
    graph: Graph,
    given: Sequence[Any],
    arguments: Sequence[torch.Tensor],
    batch: Sequence[Any],
    offload: Offload,
    way: TraceMode,
    why_not_all: str,
) -> Analysis:
    """Return what of a graph may move.

    Args:
        graph, given: as traced, and what it is given.
        arguments: the tensors among the forward's.
        batch, offload: as of `analyse`.
        way, why_not_all: as of `Analysis`.

    Raises:
        NotCaptured: nothing can be said of it; the message is the reason.
    """
    numbers = _leaves_among(given, batch)
    if not numbers:
        raise NotCaptured(
            "no argument of the forward is a tensor of the loader: what stands between them does more than to move it"
            + (f"; and the graph is the forward's beginning alone: {why_not_all}" if why_not_all else "")
        )
    own = {*map(id, arguments)}
    kinds = {
        place: _kind(value, place in numbers, id(value) in own or place in graph.numbers)
        for place, value in enumerate(given)
    }
    captured, effects = read(graph, kinds, Kind.BUFFER), effects_of(graph)
    _check_catches(graph, captured, effects)
    buffers = _tensors(graph, given, captured)
    leaves = {each.name: each.argument for each in captured.inputs if each.kind is Kind.LEAF}
    known = {name: given[place] for name, place in leaves.items()} | buffers
    candidates = _candidates(captured, effects)
    (seen, share, failed), (by_worker, share_there, failed_there) = _observed(candidates, known)
    bounded = _bounded(effects, known)
    failed |= _too_large(candidates, bounded, seen, known)
    described = with_open_outputs(describe(captured, effects, seen, failed | failed_there))
    return Analysis(
        traced=graph,
        way=way,
        captured=captured,
        graph=described,
        verdicts=classify(described, offload),
        costs=_costs(seen, by_worker, known, (share, share_there)),
        leaves={name: LeafForm(numbers[at], given[at].dtype, given[at].dim()) for name, at in leaves.items()},
        buffers=buffers,
        seconds=seconds_of_graph(graph, given),
        why_not_all=why_not_all,
        observed=seen,
        bounded=bounded,
        num_threads=torch.get_num_threads(),
    )


def _check_catches(graph: Graph, captured: CapturedForward, effects: Mapping[str, Effects]) -> None:
    """Refuse a forward that cannot begin anew where an operator raises what its own code would catch.

    Raises:
        NotCaptured: naming where it catches exceptions.
    """
    own = {call.name for call in captured.calls}
    if (where := graph.unseen.catches) and not all(own.issuperset(effect.writes) for effect in effects.values()):
        raise NotCaptured(
            f"the forward catches exceptions ({where}), and changes tensors in place: it cannot begin anew"
        )


def _candidates(captured: CapturedForward, effects: Mapping[str, Effects]) -> list[Call]:
    """What may move as far as that is known before it has run."""
    everything = classify(describe(captured, effects), Offload.ALL)
    return [call for call in captured.calls if call.name in everything and everything[call.name].moves]


def _observed(calls: Sequence[Call], known: Mapping[str, torch.Tensor]) -> tuple[Any, Any]:
    """What `observe` says, as the trainer runs them and as a data worker does."""
    here = observe(calls, known)
    with one_thread():
        return here, observe(calls, {name: value.cpu() for name, value in known.items()})


def _bounded(effects: Mapping[str, Effects], known: Mapping[str, torch.Tensor]) -> frozenset[str]:
    """The values whose last bits depend on the trainer's number of threads, from some size on."""
    if torch.get_num_threads() == 1 or any(value.is_cuda for value in known.values()):
        return frozenset()
    return frozenset(name for name, effect in effects.items() if is_bounded(effect))


def _too_large(
    calls: Sequence[Call], bounded: frozenset[str], seen: Mapping[str, Observed], known: Mapping[str, torch.Tensor]
) -> dict[str, str]:
    """Those of the values that are of that size."""
    sizes = {name: observed.num_elements for name, observed in seen.items()}
    sizes |= {name: value.numel() for name, value in known.items()}
    taken = {call.name: (call.name, *references((call.args, call.kwargs))) for call in calls if call.name in bounded}
    text = f"its last bits depend on the number of threads, from {GRAIN_SIZE:,} elements on"
    return {name: text for name, names in taken.items() if max(sizes.get(each, 0) for each in names) >= GRAIN_SIZE}


def _graph_breaks() -> dict[str, int]:
    return dict(torch._dynamo.utils.counters["graph_break"])


def _why_not_all(before: Mapping[str, int]) -> str:
    """The first reason for which torch.compile could trace no further since."""
    found = next((text for text, number in _graph_breaks().items() if number != before.get(text, 0)), "")
    lines = [line.strip() for line in found.splitlines() if line.strip()]
    explained = next((line for line in lines if line.startswith("Explanation:")), "")
    text = (explained.removeprefix("Explanation:").strip() or (lines[0] if lines else ""))[:160]
    return f"torch.compile traces no further, and says: {text}" if text else "torch.compile cannot trace all of it"


def _leaves_among(given: Sequence[Any], batch: Sequence[Any]) -> dict[int, int]:
    """The inputs of a graph that are leaves of a batch: the very same, or with the same bytes, as on another device."""
    tensors = {number: leaf for number, leaf in enumerate(batch) if type(leaf) is torch.Tensor}
    same = {id(leaf): number for number, leaf in tensors.items()}
    found: dict[int, int] = {}
    for place, value in enumerate(given):
        if type(value) is not torch.Tensor or value.requires_grad or value.layout is not torch.strided:
            continue
        number = same.get(id(value))
        if number is None:
            number = next(
                (number for number, leaf in tensors.items() if leaf.numel() and same_bytes(value, leaf)), None
            )
        if number is not None:
            found[place] = number
    return found


def _kind(value: Any, is_leaf: bool, is_argument: bool) -> Kind:
    if is_leaf:
        return Kind.LEAF
    if isinstance(value, torch.nn.Parameter) or (isinstance(value, torch.Tensor) and value.requires_grad):
        return Kind.PARAMETER
    is_small = type(value) is torch.Tensor and value.layout is torch.strided and value.nbytes <= _MOST_BYTES_TO_COMPARE
    return Kind.BUFFER if is_small and not is_argument else Kind.PLAIN


def _tensors(graph: Graph, given: Sequence[Any], captured: CapturedForward) -> dict[str, torch.Tensor]:
    """Buffers and constants by the names of the inputs."""
    return {
        each.name: graph.constants[each.target] if each.argument < 0 else given[each.argument]
        for each in captured.inputs
        if each.kind is Kind.BUFFER
    }


def _costs(
    seen: Mapping[str, Observed],
    by_worker: Mapping[str, Observed],
    known: Mapping[str, torch.Tensor],
    shares: tuple[float, float],
) -> dict[str, OperatorCost]:
    costs = {name: OperatorCost(value_bytes=value.numel() * value.element_size()) for name, value in known.items()}
    for name, observed in seen.items():
        there = by_worker.get(name, observed)
        costs[name] = OperatorCost(shares[0] * observed.seconds, shares[1] * there.seconds, observed.num_bytes)
    return costs


# What was found out about a forward, as a file: written where the program runs, read by `run --explain`. Pure.


@dataclass(frozen=True)
class Findings:
    """What is known of a forward.

    Attributes:
        module: name of the model's class.
        reason: why nothing is known; "" when something is.
        graph: the operators.
        verdicts: which of them may move.
        costs: what they take.
        rates: as they were measured, without data workers.
        why_not_all: why the graph is only the beginning of the forward; "" where it is all of it.
    """

    module: str
    reason: str = ""
    graph: ForwardGraph = field(default_factory=lambda: ForwardGraph((), ()))
    verdicts: Mapping[str, Movable] = field(default_factory=dict)
    costs: Mapping[str, OperatorCost] = field(default_factory=dict)
    rates: Rates = field(default_factory=lambda: Rates(0.0, 0.0, 0))
    why_not_all: str = ""

    def decide(self, num_data_workers: int, everything: bool) -> CutDecision:
        """Return where the forward would be cut.

        Args:
            num_data_workers: processes that would make batches.
            everything: whether all that may move does, as with `--offload=all`.
        """
        movable = frozenset(name for name, verdict in self.verdicts.items() if verdict.moves)
        cutter = Cutter(self.graph, movable, self.costs)
        rates = replace(self.rates, num_data_workers=num_data_workers)
        return cutter.largest(rates) if everything else cutter.decide(rates)

    def to_json(self) -> str:
        """As text."""
        operators = [asdict(operator) | {"kind": operator.kind.value} for operator in self.graph.operators]
        document = {
            "module": self.module,
            "reason": self.reason,
            "operators": operators,
            "outputs": self.graph.outputs,
            "verdicts": {name: asdict(verdict) for name, verdict in self.verdicts.items()},
            "costs": {name: asdict(cost) for name, cost in self.costs.items()},
            "rates": asdict(self.rates),
            "why_not_all": self.why_not_all,
        }
        return json.dumps(document)

    @classmethod
    def from_json(cls, text: str) -> Findings:
        """Read what `to_json` has written."""
        document = json.loads(text)
        operators = tuple(_operator(operator) for operator in document["operators"])
        return cls(
            document["module"],
            document["reason"],
            ForwardGraph(operators, tuple(document["outputs"])),
            {name: Movable(**verdict) for name, verdict in document["verdicts"].items()},
            {name: OperatorCost(**cost) for name, cost in document["costs"].items()},
            Rates(**document["rates"]),
            document["why_not_all"],
        )


def _operator(fields: dict[str, Any]) -> Operator:
    names = ("inputs", "writes", "shares")
    return Operator(**fields | {name: tuple(fields[name]) for name in names} | {"kind": Kind(fields["kind"])})
