"""The two sides of a forward that was cut: a stage for data workers, and what is left for the trainer.

Called by `partition.py`. Both are `OperatorProgram`s, which need no module of the user's program.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from hetstream.mpi_dataworkers.ops.staged import StagedBatch
from hetstream.mpi_dataworkers.partitioner.capture import CapturedForward
from hetstream.mpi_dataworkers.partitioner.cut import Decision
from hetstream.mpi_dataworkers.partitioner.graph import ForwardGraph
from hetstream.mpi_dataworkers.partitioner.leaves import flatten
from hetstream.mpi_dataworkers.partitioner.program import Call, OperatorProgram, Ref, references, replace_in

_pytree: Any = pytree
# What an operator raises for data that it cannot work with. The trainer then runs the forward itself, and raises it.
_OPERATOR_ERRORS = (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError)
# The batch is made once more, for a leaf that was not sent.
_sends_all: ContextVar[bool] = ContextVar("hetstream_sends_all", default=False)


@dataclass(frozen=True)
class LeafForm:
    """What a leaf of the batch must be like.

    Attributes:
        number: which leaf of the batch.
        dtype, num_dimensions: as it was when the forward was captured.
    """

    number: int
    dtype: torch.dtype
    num_dimensions: int

    def fits(self, leaf: Any) -> bool:
        """Whether it is."""
        return isinstance(leaf, torch.Tensor) and leaf.dtype == self.dtype and leaf.dim() == self.num_dimensions


@dataclass(frozen=True)
class DataStage:
    """The moved operators, as a stage of the pipeline: adds their values to each batch.

    A batch of another form, or one that the operators cannot work with, goes without; then the trainer does all.

    Attributes:
        program: the operators.
        forms: the leaves of the batch that they take, in the order of the program's inputs.
        num_leaves: of a batch.
        generation: which cut this is; the trainer does not use the values of another one.
        spared: numbers of the leaves that are not sent, if they are contiguous: nothing takes them but the operators.
    """

    program: OperatorProgram
    forms: tuple[LeafForm, ...]
    num_leaves: int
    generation: int
    spared: tuple[int, ...] = ()

    def __call__(self, batch: Any) -> Any:
        """Run for one batch."""
        leaves, spec = flatten(batch)
        if len(leaves) != self.num_leaves or not all(form.fits(leaves[form.number]) for form in self.forms):
            return StagedBatch(batch, ())
        try:
            values = self.program(*(leaves[form.number] for form in self.forms))
        except _OPERATOR_ERRORS:
            return StagedBatch(batch, ())
        # What stands in a leaf's place says that it fills its memory in the order of its dimensions.
        spared = () if _sends_all.get() else [number for number in self.spared if leaves[number].is_contiguous()]
        shapes = {number: tuple(leaves[number].shape) for number in spared}
        for number in spared:
            leaves[number] = leaves[number].new_empty(0)
        return StagedBatch(
            _pytree.tree_unflatten(leaves, spec) if spared else batch, pack(values, self.generation, shapes)
        )


@contextlib.contextmanager
def sending_all() -> Iterator[None]:
    """Have the stages of this context spare no leaf."""
    token = _sends_all.set(True)
    try:
        yield
    finally:
        _sends_all.reset(token)


def pack(values: Sequence[Any], generation: int, shapes: Mapping[int, tuple[int, ...]]) -> list[torch.Tensor]:
    """Values of one step as tensors, with a header: the sizes of leaves that are not sent, and how memory was laid out.

    Args:
        values: of the cut.
        generation: of the cut.
        shapes: of those leaves, by number.
    """
    header = [generation, len(shapes)]
    for number, shape in shapes.items():
        header += [number, len(shape), *shape]
    packed: list[torch.Tensor] = []
    for value in values:
        tensor = value if isinstance(value, torch.Tensor) else torch.tensor(value)
        order = sorted(range(tensor.dim()), key=lambda place, of=tensor: (-of.stride(place), place))  # type: ignore[misc]
        if not tensor.permute(order).is_contiguous():
            order = list(range(tensor.dim()))
        header += [len(order), *order]
        packed.append(tensor.permute(order).contiguous())
    return [torch.tensor(header), *packed]


def unpack(tensors: Sequence[torch.Tensor]) -> tuple[int, list[torch.Tensor], dict[int, tuple[int, ...]]]:
    """The generation, the values and the shapes that `pack` was given, each value laid out in memory as it was."""
    header = tensors[0].tolist()
    shapes: dict[int, tuple[int, ...]] = {}
    place = 2
    for _ in range(header[1]):
        number, num_dimensions = header[place : place + 2]
        shapes[number] = tuple(header[place + 2 : place + 2 + num_dimensions])
        place += 2 + num_dimensions
    values: list[torch.Tensor] = []
    for tensor in tensors[1:]:
        order = header[place + 1 : place + 1 + header[place]]
        place += 1 + len(order)
        values.append(tensor if order == sorted(order) else tensor.permute(_inverse(order)))
    return header[0], values, shapes


def _inverse(order: list[int]) -> list[int]:
    return [order.index(place) for place in range(len(order))]


@dataclass(frozen=True)
class Split:
    """A forward that was cut.

    Attributes:
        stage: for the data workers.
        training: what is left: its inputs are `given`, then the sent values.
        given: the graph's inputs that the training side takes, by name.
        sent: names of the values that come from the data workers.
        numbers: those of them that are no tensors.
        draws: data workers draw random numbers for it.
    """

    stage: DataStage
    training: OperatorProgram
    given: tuple[str, ...]
    sent: tuple[str, ...]
    numbers: frozenset[str]
    draws: bool


def split(
    captured: CapturedForward,
    graph: ForwardGraph,
    decision: Decision,
    stage_of: StageInputs,
    numbers: frozenset[str],
) -> Split:
    """Make the two sides.

    Args:
        captured: the forward.
        graph: its operators; what is not among them is not needed.
        decision: which of them move.
        stage_of: what the batch stage takes.
        numbers: names of the values that are no tensors.
    """
    needed = {operator.name for operator in graph.operators}
    calls = [call for call in captured.calls if call.name in needed]
    moved = tuple(_for_host(call) for call in calls if call.name in decision.moved)
    read = set(references([(call.args, call.kwargs) for call in moved]))
    constants = {name: tensor for name, tensor in stage_of.buffers.items() if name in read}
    leaves = tuple(name for name in stage_of.leaves if name in read)
    sent = tuple(name for name in decision.sent)
    program = OperatorProgram(leaves, moved, tuple(map(Ref, sent)), constants)
    stage = DataStage(
        program,
        tuple(stage_of.leaves[name] for name in leaves),
        stage_of.num_leaves,
        stage_of.generation,
        spared_leaves(stage_of.leaves, leaves, decision.not_sent) if stage_of.spares else (),
    )
    staying = tuple(call for call in calls if call.name not in decision.moved)
    taken = {*references([(call.args, call.kwargs) for call in staying]), *references(captured.outputs)}
    given = tuple(graph_input.name for graph_input in captured.inputs if graph_input.name in taken)
    training = OperatorProgram((*given, *sent), staying, captured.outputs)
    draws = any(operator.random for operator in graph.operators if operator.name in decision.moved)
    return Split(stage, training, given, sent, numbers & set(sent), draws)


@dataclass(frozen=True)
class StageInputs:
    """What the batch stage takes.

    Attributes:
        leaves: of the graph's inputs those that are leaves of the batch, with their form.
        buffers: copies of what the forward only reads, by name.
        num_leaves: of a batch.
        generation: which cut this is.
        spares: whether leaves that nothing else reads are not sent.
    """

    leaves: Mapping[str, LeafForm]
    buffers: Mapping[str, torch.Tensor]
    num_leaves: int
    generation: int
    spares: bool = False


def spared_leaves(forms: Mapping[str, LeafForm], taken: Sequence[str], not_sent: Sequence[str]) -> tuple[int, ...]:
    """The leaves that are not sent: they are inputs of the operators, and of nothing else under another name."""
    kept = {form.number for name, form in forms.items() if name not in not_sent}
    return tuple(dict.fromkeys(forms[name].number for name in taken if forms[name].number not in kept))


def _for_host(call: Call) -> Call:
    """The same operator in host memory: data workers have no other device."""

    def on_host(value: Any) -> Any:
        return torch.device("cpu") if isinstance(value, torch.device) else value

    return replace(call, args=replace_in(call.args, on_host), kwargs=replace_in(call.kwargs, on_host))
