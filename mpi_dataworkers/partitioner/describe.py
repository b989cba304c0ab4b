"""What each operator of a captured forward does, in the plain words of `graph.py`. Called by `analysis.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from hetstream.mpi_dataworkers.partitioner.effects import Effects
from hetstream.mpi_dataworkers.partitioner.forward_graph import CapturedForward, on_both_sides
from hetstream.mpi_dataworkers.partitioner.graph import ForwardGraph, Kind, Operator
from hetstream.mpi_dataworkers.partitioner.program import Call, references

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
    """The operators of a forward.

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
        _operator(call, captured, effects.get(call.name, sizes), (observed or {}).get(call.name), call.name in twice)
        for call in captured.calls
    ]
    calls = [replace(call, keeps=call.keeps or (failed or {}).get(call.name, "")) for call in calls]
    removable = {name for name, effect in effects.items() if effect.operators and effect.operators <= _CHECKS}
    return _without_the_unneeded([*inputs, *calls], tuple(references(captured.outputs)), removable)


def is_bounded(effect: Effects) -> bool:
    """Whether an operator's last bits depend on the number of threads, from `program.GRAIN_SIZE` elements on."""
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


def _operator(
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
