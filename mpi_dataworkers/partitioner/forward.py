"""The forward of a partitioned model: what data workers have not done, or the program's own forward.

It stands where torch's own `Module.compile` puts a compiled call, so that the model has its own `forward`, signature
and attributes, and copies of it have none of this. torch.compile's guards are asked in each call. Where they hold, its
graph is called, and takes what data workers have computed if it gets the very bytes that they computed from.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils.checkpoint
from torch.utils import _pytree as pytree

from hetstream.mpi_dataworkers.partitioner.analysis import Analysis
from hetstream.mpi_dataworkers.partitioner.capture import Graph, Tracer
from hetstream.mpi_dataworkers.partitioner.leaves import Deliveries, Delivery, same_bytes
from hetstream.mpi_dataworkers.partitioner.split import LeafForm, Split

_log = logging.getLogger(__name__)
_StopsRecomputation: type[Exception] = torch.utils.checkpoint._StopRecomputationError
# So many calls in a row, in training, that data workers have worked for in vain: they work for it no more.
_MOST_MISSES = 50
# Calls in a row that another graph has, until that is analysed in turn.
_MOST_OF_ANOTHER_GRAPH = 3
# Most sizes of which the first batch is checked.
_MOST_SIZES = 64
_NO_GUARD_HOLDS = "what the forward reads is not as it was when torch.compile traced it"
_NOT_THE_BATCH = "data workers have computed nothing of what it is given now"
_DRAWS_ANEW = "it is called once more with a batch, for other random numbers than those that data workers have drawn"
_ANOTHER_GRAPH = "torch.compile has traced it anew, and its graph is another one"
# How near values must be where the trainer has an accelerator: (relative, absolute), by the size of a number.
_TOLERANCE = {2: (1e-2, 1e-3), 4: (1e-4, 1e-5), 8: (1e-7, 1e-7)}


@dataclass
class Counts:
    """How the calls of a forward went.

    Attributes:
        partitioned, original: calls that took what data workers have computed, and that computed all.
        checked: calls that did both, and both were the same.
        reasons: why calls computed all, with their number.
    """

    partitioned: int = 0
    original: int = 0
    checked: int = 0
    reasons: dict[str, int] = field(default_factory=dict)


class _GraphFailed(Exception):
    """The graph has raised an error, and changed nothing: the forward runs as it is written, with its own lines."""


class PartitionedForward:
    """Stands in for the call of a module.

    Args:
        module: the module.
        analysis: of its forward.
        num_checked: batches that are computed both ways and compared.
        withdraw: called with a reason when data workers work in vain.
        analyse_again: called with another graph that torch.compile has, what it is given, and the arguments.

    Attributes:
        counts: how the calls went.
        split: the cut now; None: the program's own forward runs.
        is_paused: batches come as if there were no cut, for a comparison.
        deliveries: the last batches.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        analysis: Analysis,
        num_checked: int,
        withdraw: Callable[[str], None],
        analyse_again: Callable[..., None],
    ) -> None:
        self.counts = Counts()
        self.split: Split | None = None
        self.is_paused = False
        self.deliveries = Deliveries()
        self.withdraw = withdraw
        self._before: Split | None = None  # of the batches that were on their way when the cut changed
        self._module = module
        self._analysis = analysis
        self._analyse_again = analyse_again
        self._tracer = Tracer(module, analysis.way, self._instead)
        self._to_check = self._num_checked = num_checked
        self._misses = self._of_another_graph = 0
        self._sizes: set[Any] = set()
        self._is_same: dict[Graph, bool] = {}
        self._outcome = ""
        self._is_running = False
        self._other: Any = None  # the graph of the last call, and what it was given

    def install(self) -> bool:
        """Stand in; whether that may be: not where the program has put something else there."""
        if self._module._compiled_call_impl not in (self, None):
            return False
        vars(self._module)["_compiled_call_impl"] = self
        if "_compiled_call_impl" not in torch.jit._recursive.ignored_attributes:
            torch.jit._recursive.ignored_attributes.append("_compiled_call_impl")  # else torch.jit.script refuses it
        return True

    def uninstall(self) -> None:
        """Have the module called as torch does it."""
        if vars(self._module).get("_compiled_call_impl") is self:
            del vars(self._module)["_compiled_call_impl"]

    @property
    def is_checked(self) -> bool:
        """Whether the cut has been checked."""
        return self._to_check == 0

    def analysed(self, analysis: Analysis) -> None:
        """Another graph is the forward's now; no cut of the one before is used any more."""
        self._analysis, self.split, self._before = analysis, None, None
        self._is_same.clear()
        self._of_another_graph = 0

    def use(self, split: Split | None, is_checked: bool = False) -> None:
        """Use another cut, whose first batches are checked.

        Args:
            split: the cut, or None for the program's own forward.
            is_checked: its operators are those of the cut before.
        """
        self._before, self.split = self.split, split
        self._to_check, self._misses = 0 if is_checked else self._num_checked, 0
        self._sizes.clear()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the module's own call would return."""
        own: Any = self._module._call_impl
        if torch.compiler.is_compiling() or self.split is None or self.is_paused or self._is_running:
            return own(*args, **kwargs)
        if not self._may_be_used() or not self.deliveries.any_for(self._generations()):
            return own(*args, **kwargs)
        if change := self._tracer.change(args, kwargs):
            self._missed(change)
            return own(*args, **kwargs)
        self._outcome, self._is_running = _NO_GUARD_HOLDS, True
        try:
            result = self._tracer(args, kwargs)
        except _GraphFailed as failed:
            result = own(*args, **kwargs)
            self.withdraw(f"its graph raised {failed.__cause__!r}, and the program's own forward did not")
            return result
        finally:
            self._is_running = False
        if not self._outcome:
            self._misses = self._of_another_graph = 0
            return result
        if self._outcome == _DRAWS_ANEW:
            self.withdraw(_DRAWS_ANEW)
            return result
        self._missed(self._outcome)
        self._of_another_graph = self._of_another_graph + 1 if self._outcome == _ANOTHER_GRAPH else 0
        if self._of_another_graph >= _MOST_OF_ANOTHER_GRAPH:
            self._of_another_graph = 0
            leaves = pytree.tree_leaves((args, kwargs))
            self._analyse_again(*self._other, [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)])
        self._other = None
        return result

    def _may_be_used(self) -> bool:
        """Whether the program trains, and looks at no operator, as a compiler or a counter of operators does."""
        return (
            self._module.training
            and torch.is_grad_enabled()
            and torch._C._get_tracing_state() is None
            and not torch._C._len_torch_dispatch_stack()
            and not torch._C._len_torch_function_stack()
            and torch._C._functorch.peek_interpreter_stack() is None
        )

    def forms(self, generation: int) -> tuple[LeafForm, ...]:
        """Return the leaves of the batch that a cut takes; none where it is used no more."""
        cuts = (cut for cut in (self.split, self._before) if cut is not None and cut.stage.generation == generation)
        return next((cut.stage.forms for cut in cuts), ())

    def _generations(self) -> tuple[int, ...]:
        return tuple(cut.stage.generation for cut in (self.split, self._before) if cut is not None)

    def _missed(self, reason: str) -> None:
        counts = self.counts
        counts.original += 1
        if reason not in counts.reasons:
            _log.warning("hetstream: the forward of %s runs as it is: %s", type(self._module).__name__, reason)
        counts.reasons[reason] = counts.reasons.get(reason, 0) + 1
        self._misses += 1
        if self._misses >= _MOST_MISSES:
            self.withdraw(f"{self._misses} steps in a row could not use it: {reason}")

    def _instead(self, graph: Graph, inputs: Sequence[Any]) -> Any:
        """Called by torch.compile in the place of a graph: what the graph gives."""
        found, self._outcome = self._found(graph, inputs)
        if found is None:
            self._other = graph, inputs
            return self._run(graph.module.forward, inputs, self._analysis)
        delivery, split = found
        values: list[Any] = [
            value.item() if place in split.numbers else value if device is None else value.to(device, non_blocking=True)
            for place, (value, device) in enumerate(zip(delivery.values, split.devices, strict=True))
        ]
        if self._is_to_be_checked(split, inputs):
            with torch.no_grad():
                own = split.here(*(inputs[place] for place in split.taken))
            if problem := _difference(values, own):
                self.withdraw(f"the check of a batch failed: {problem}")
                self._to_check = self._num_checked
            else:
                self.counts.checked += 1
                self._to_check = max(0, self._to_check - 1)
            return self._run(split.training, [*(inputs[place] for place in split.given), *own], self._analysis)
        result = self._run(split.training, [*(inputs[place] for place in split.given), *values], self._analysis)
        self.counts.partitioned += 1
        return result

    def _found(self, graph: Graph, inputs: Sequence[Any]) -> tuple[tuple[Delivery, Split] | None, str]:
        """The batch whose leaves a graph gets, and its cut; else why there is none."""
        if not self._is_known(graph):
            return None, _ANOTHER_GRAPH
        if torch.get_num_threads() != self._analysis.num_threads:
            return None, "torch computes with another number of threads"
        for split in (self.split, self._before):
            if split is None:
                continue
            tensors = [inputs[place] for place in split.taken]
            if any(inputs[place].requires_grad for place in (*split.taken, *(place for place, _ in split.copied))):
                return None, "the program asks for gradients of its arguments"
            numbers = [form.number for form in split.stage.forms]
            delivery = self.deliveries.find(split.stage.generation, numbers, tensors)
            if delivery is None:
                continue
            if any(not same_bytes(inputs[place], copy) for place, copy in split.copied):
                return None, "a tensor that the forward reads, of which data workers have a copy, has changed"
            if delivery.was_used and not _recomputes():
                return None, _DRAWS_ANEW if split.draws else "it is called once more with a batch"
            if not delivery.is_as_sent():
                return None, "a value that it has given was changed in place"
            delivery.was_used = True
            return (delivery, split), ""
        return None, _NOT_THE_BATCH

    def _is_known(self, graph: Graph) -> bool:
        """Whether a graph is the one that was analysed, or computes the same."""
        known = self._is_same.get(graph)
        if known is None:
            own = self._analysis.traced
            is_same = graph.text == own.text and graph.constants.keys() == own.constants.keys()
            known = self._is_same[graph] = is_same and all(
                same_bytes(value, own.constants[name]) for name, value in graph.constants.items()
            )
        return known

    def _run(self, function: Callable[..., Any], inputs: Sequence[Any], analysis: Analysis) -> Any:
        """A graph's outputs; where it raises and has changed nothing, the forward begins anew."""
        generator = torch.get_rng_state() if analysis.draws and not analysis.keeps_state else None
        try:
            return function(*inputs)
        except _StopsRecomputation:
            raise  # activation checkpointing has what it wants
        except Exception as error:
            if analysis.keeps_state or _recomputes():
                raise
            if generator is not None:
                torch.set_rng_state(generator)
            raise _GraphFailed from error

    def _is_to_be_checked(self, split: Split, inputs: Sequence[Any]) -> bool:
        if split.draws or not self._num_checked:
            return False  # numbers that are drawn elsewhere are others than the program's own
        sizes = tuple(inputs[place].shape for place in split.taken)
        is_new = sizes not in self._sizes and len(self._sizes) < _MOST_SIZES
        self._sizes.add(sizes) if is_new else None
        return is_new or self._to_check > 0


def _recomputes() -> bool:
    """Whether a backward pass is under way, which wants what the forward had."""
    return bool(torch._C._current_graph_task_id() != -1)


def _difference(found: Sequence[Any], expected: Sequence[Any]) -> str:
    """How values differ from those of the trainer itself; "" when they do not.

    In host memory each byte must be the same; on an accelerator, numbers must be as near as `_TOLERANCE` says.
    """
    for index, (actual, other) in enumerate(zip(found, expected, strict=True)):
        if not isinstance(other, torch.Tensor):
            if actual != other:
                return f"value {index} is {actual!r} instead of {other!r}"
            continue
        if actual.dtype != other.dtype or actual.shape != other.shape or actual.device != other.device:
            return f"value {index} has another type or size"
        if _strides(actual) != _strides(other):
            return f"value {index} lies otherwise in memory"
        if not _alike(actual, other):
            return f"value {index} differs"
    return ""


def _strides(value: torch.Tensor) -> list[int]:
    return [stride for stride, size in zip(value.stride(), value.shape, strict=True) if size > 1]


def _alike(actual: torch.Tensor, other: torch.Tensor) -> bool:
    if actual.is_cuda and actual.dtype.is_floating_point:
        relative, absolute = _TOLERANCE[actual.element_size()]
        return torch.allclose(actual, other, relative, absolute, equal_nan=True)
    return same_bytes(actual, other)
