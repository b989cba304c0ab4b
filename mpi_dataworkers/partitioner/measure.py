"""Runs the operators of a forward that may move, and notes what they cost and what their values are.

Called by `partition.py` in the training process, once as the trainer runs them and once with one thread, as data
workers do.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from hetstream.mpi_dataworkers.partitioner.capture import Graph
from hetstream.mpi_dataworkers.partitioner.describe import Observed
from hetstream.mpi_dataworkers.partitioner.program import Call, OperatorProgram, Ref, called, references, replace_in

# The fastest of so many runs counts: the first pays for memory and for what is loaded at first use.
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
        seen[call.name] = _observed(value, seconds)


# What a reason begins with where an operator is right but its arguments cannot be.
FALLING_BORDERS = "its borders decrease"
# Operators that look values up among sorted ones, and which argument those are.
_SORTED_ARGUMENTS = {"bucketize": (1, "boundaries"), "searchsorted": (0, "sorted_sequence")}


def falling_borders(path: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Where the borders of a search decrease, so that torch's result means nothing; "" where they do not."""
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


def _observed(value: Any, seconds: float) -> Observed:
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
    """What a program takes as a whole."""
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
    """What a graph takes as a whole, with copies of what it may change in place."""
    with _own_random_numbers(inputs), torch.no_grad():
        best = float("inf")
        for _ in range(_NUM_RUNS):
            given = [value.clone() if isinstance(value, torch.Tensor) else value for value in inputs]
            started = time.perf_counter()
            for value in graph.module.forward(*given):
                _finish(value)
            best = min(best, time.perf_counter() - started)
    return best
