"""What each operator of a captured forward does, in the plain words of `graph.py`. Called by `partition.py`.

It reads what torch says about its operators: which arguments they change in place, whose memory their values share, and
whether they draw random numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from hetstream.mpi_dataworkers.partitioner.capture import CapturedForward
from hetstream.mpi_dataworkers.partitioner.graph import ForwardGraph, Kind, Operator
from hetstream.mpi_dataworkers.partitioner.program import Call, references

# Products of matrices: their sums depend on the number of threads, and under autocast on its precision.
_PRODUCTS = frozenset(
    [
        *("mm", "mv", "bmm", "addmm", "addmv", "addr", "addbmm", "baddbmm", "matmul", "linear", "bilinear", "dot"),
        *("vdot", "inner", "outer", "einsum", "tensordot", "chain_matmul", "cdist", "prelu", "gru", "lstm", "rnn_tanh"),
        *("convolution", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
    ]
)
# Sums: the result depends on the number of threads where it is one number, because threads then share the sum.
_SUMS = frozenset(
    ("sum", "mean", "nansum", "nanmean", "prod", "var", "std", "var_mean", "std_mean", "norm", "logsumexp", "dist")
)
# They change the running statistics that they are given, though their schemas do not say so.
_RUNNING_STATISTICS = ("batch_norm", "instance_norm", "native_batch_norm", "cudnn_batch_norm")
_NO_CONTENT = frozenset(("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"))
# Checks that torch.export adds for itself.
_CHECKS = ("_assert_scalar", "_assert_tensor_metadata", "sym_constrain_range", "sym_constrain_range_for_size")


@dataclass(frozen=True)
class Observed:
    """What a run has shown of an operator's value.

    Attributes:
        seconds: that it took.
        num_bytes: of its tensors.
        type_name: `tensor`, `number` or `several`.
        dtype: of a tensor.
        num_elements: of a tensor.
        shares: names of the inputs whose memory it has.
    """

    seconds: float
    num_bytes: int
    type_name: str
    dtype: torch.dtype | None = None
    num_elements: int = 0
    shares: tuple[str, ...] = ()


def describe(
    captured: CapturedForward, observed: Mapping[str, Observed] | None = None, failed: Mapping[str, str] | None = None
) -> ForwardGraph:
    """The operators of a forward.

    Args:
        captured: the forward.
        observed: what a run has shown of those operators that were run.
        failed: why others could not be run.
    """
    inputs = [
        Operator(graph_input.name, graph_input.target or f"argument {graph_input.argument}", kind=graph_input.kind)
        for graph_input in captured.inputs
    ]
    calls = [_operator(call, captured, (observed or {}).get(call.name)) for call in captured.calls]
    calls = [replace(call, keeps=call.keeps or (failed or {}).get(call.name, "")) for call in calls]
    return _without_the_unneeded([*inputs, *calls], tuple(references(captured.outputs)))


def _without_the_unneeded(operators: list[Operator], outputs: tuple[str, ...]) -> ForwardGraph:
    """Leave out what leads to no output and has no effect."""
    needed = set(outputs)
    kept: list[Operator] = []
    for operator in reversed(operators):
        has_effect = bool(operator.writes or operator.random or operator.keeps) and not _is_check(operator)
        if operator.kind is not Kind.OPERATOR or operator.name in needed or has_effect:
            kept.append(operator)
            needed.update(operator.inputs)
    return ForwardGraph(tuple(reversed(kept)), outputs)


def _is_check(operator: Operator) -> bool:
    return any(operator.target.startswith(f"aten.{name}.") for name in _CHECKS)


def _operator(call: Call, captured: CapturedForward, seen: Observed | None) -> Operator:
    file, line, source = captured.lines.get(call.name, ("", 0, ""))
    effects = _effects(captured.functions[call.name], call, seen)
    return replace(
        effects,
        shares=tuple(dict.fromkeys([*effects.shares, *effects.writes, *(seen.shares if seen is not None else ())])),
        several=seen is not None and seen.type_name == "several",
        keeps=effects.keeps or ("" if call.module else f"data workers cannot find the function {call.path}"),
        line=f"{file.rsplit('/', 1)[-1]}:{line}" if file else "",
        source=source,
    )


def _effects(function: Any, call: Call, seen: Observed | None) -> Operator:
    """An operator with what torch says of it."""
    inputs = tuple(dict.fromkeys(references((call.args, call.kwargs))))
    plain = Operator(call.name, call.path, inputs)
    if isinstance(function, torch._ops.HigherOrderOperator):
        return replace(plain, target=str(function), shares=inputs, keeps="a higher-order operator, a graph of its own")
    if not isinstance(function, torch._ops.OpOverload):
        # Python's own: arithmetic on sizes, and taking one of several values.
        return replace(plain, shares=tuple(references(call.args[:1]))) if call.path == "getitem" else plain
    name = function._schema.name.split("::")[-1]
    writes, shares = _memory(function, call)
    if name in _RUNNING_STATISTICS:
        writes += references(call.args[3:5])
    random = torch.Tag.nondeterministic_seeded in function.tags
    keeps = _why_kept(function.namespace, name, seen)
    return replace(plain, writes=tuple(writes), shares=tuple(shares), random=random, keeps=keeps)


def _memory(function: Any, call: Call) -> tuple[list[str], list[str]]:
    """What an operator writes, and whose memory its value may share."""
    writes: list[str] = []
    shares: list[str] = []
    for place, argument in enumerate(function._schema.arguments):
        info = argument.alias_info
        if info is not None:
            given = call.args[place] if place < len(call.args) else call.kwargs.get(argument.name)
            (writes if info.is_write else shares).extend(references((given,)))
    returns_memory = any(returned.alias_info is not None for returned in function._schema.returns)
    return writes, shares if returns_memory else []


def _why_kept(namespace: str, name: str, seen: Observed | None) -> str:
    if namespace not in ("aten", "prims"):
        return f"a custom operator, {namespace}::{name}, which data workers may not have"
    if name in _NO_CONTENT:
        return "its value is memory without content"
    if name in _RUNNING_STATISTICS:
        return "it keeps running statistics"
    if name in _PRODUCTS or name.startswith(("linalg_", "fft_", "scaled_dot_product", "_scaled_dot", "_convolution")):
        return "a product of matrices, whose last bits depend on the number of threads"
    if seen is None or seen.dtype is None:
        return ""
    if name in _SUMS and seen.dtype.is_floating_point and seen.num_elements <= 1:
        return "a sum to one number, whose last bits depend on the number of threads"
    if seen.dtype in (torch.float16, torch.bfloat16):
        return f"its value is {str(seen.dtype).removeprefix('torch.')}, which autocast may compute in another precision"
    return ""
