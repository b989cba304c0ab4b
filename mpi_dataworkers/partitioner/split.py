"""The two sides of a forward that was cut: a stage for data workers, and what is left for the trainer.

Called by `partition.py`. Both are `OperatorProgram`s, which need no module of the user's program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from hetstream.mpi_dataworkers.ops.pipeline import StagedBatch
from hetstream.mpi_dataworkers.partitioner.capture import CapturedForward, on_both_sides
from hetstream.mpi_dataworkers.partitioner.cut import CutDecision
from hetstream.mpi_dataworkers.partitioner.leaves import leaves_of
from hetstream.mpi_dataworkers.partitioner.program import (
    Call,
    ForwardGraph,
    OperatorProgram,
    Ref,
    references,
    replace_in,
)

# What an operator raises for data that it cannot work with. The trainer then runs the forward itself, and raises it.
_OPERATOR_ERRORS = (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError)


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
        """Return whether it is."""
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
    """

    program: OperatorProgram
    forms: tuple[LeafForm, ...]
    num_leaves: int
    generation: int

    def __call__(self, batch: Any) -> Any:
        """Run for one batch."""
        leaves = leaves_of(batch)
        if len(leaves) != self.num_leaves or not all(form.fits(leaves[form.number]) for form in self.forms):
            return StagedBatch(batch, ())
        try:
            values = self.program(*(leaves[form.number] for form in self.forms))
        except _OPERATOR_ERRORS:
            return StagedBatch(batch, ())
        return StagedBatch(batch, pack(values, self.generation))


def pack(values: Sequence[Any], generation: int) -> list[torch.Tensor]:
    """Return values of one step as tensors, with a header: the generation of the cut, and how each lay in memory."""
    header = [generation]
    packed: list[torch.Tensor] = []
    for value in values:
        tensor = value if isinstance(value, torch.Tensor) else torch.tensor(value)
        order = sorted(range(tensor.dim()), key=lambda place, of=tensor: (-of.stride(place), place))  # type: ignore[misc]
        if not tensor.permute(order).is_contiguous():
            order = list(range(tensor.dim()))
        header += [len(order), *order]
        packed.append(tensor.permute(order).contiguous())
    return [torch.tensor(header), *packed]


def unpack(tensors: Sequence[torch.Tensor]) -> tuple[int, list[torch.Tensor]]:
    """Return the generation and the values that `pack` was given, each value laid out in memory as it was."""
    header = tensors[0].tolist()
    place = 1
    values: list[torch.Tensor] = []
    for tensor in tensors[1:]:
        order = header[place + 1 : place + 1 + header[place]]
        place += 1 + len(order)
        inverse = [order.index(place) for place in range(len(order))]
        values.append(tensor if order == sorted(order) else tensor.permute(inverse))
    return header[0], values


@dataclass(frozen=True)
class Split:
    """A forward that was cut.

    Attributes:
        stage: for the data workers.
        here: what the stage computes, as the trainer computes it.
        training: what is left: its inputs are `given`, then the sent values.
        taken: of the leaves that the stage takes, in the order of the program's inputs, the number among the graph's.
        copied: what else the stage has copies of: the number of the graph's input, and the copy.
        given: numbers of the graph's inputs that the training side takes.
        numbers: places of the sent values that are no tensors.
        devices: where each sent value is in the program's own forward.
        draws: data workers draw random numbers for it.
    """

    stage: DataStage
    here: OperatorProgram
    training: OperatorProgram
    taken: tuple[int, ...]
    copied: tuple[tuple[int, torch.Tensor], ...]
    given: tuple[int, ...]
    numbers: frozenset[int]
    devices: tuple[torch.device | None, ...]
    draws: bool


@dataclass(frozen=True)
class StageInputs:
    """What a cut is made with.

    Attributes:
        leaves: of the graph's inputs those that are leaves of the batch, with their form.
        tensors: what the forward only reads, by the name of the input: of constants and of buffers.
        num_leaves: of a batch.
        generation: which cut this is.
        numbers: names of the values that are no tensors.
        devices: where values are, by name.
        bounded: names of the values that depend on the number of threads from some size on.
    """

    leaves: Mapping[str, LeafForm]
    tensors: Mapping[str, torch.Tensor]
    num_leaves: int
    generation: int
    numbers: frozenset[str]
    devices: Mapping[str, torch.device | None]
    bounded: frozenset[str]


def split(captured: CapturedForward, graph: ForwardGraph, decision: CutDecision, made_with: StageInputs) -> Split:
    """Make the two sides.

    Args:
        captured: the forward.
        graph: its operators; what is not among them is not needed.
        decision: which of them move.
        made_with: see there.
    """
    operators = graph.by_name()
    calls = [call for call in captured.calls if call.name in operators]
    moved = tuple(call for call in calls if call.name in decision.moved)
    twice = on_both_sides(captured) & decision.moved
    sent = tuple(name for name in decision.sent if name not in twice)
    read = {*references([(call.args, call.kwargs) for call in moved])}
    by_name = {each.name: each for each in captured.inputs}
    leaves = tuple(name for name in made_with.leaves if name in read)
    buffers = {name: tensor for name, tensor in made_with.tensors.items() if name in read}
    copies = {name: tensor.detach().cpu().clone() for name, tensor in buffers.items()}
    outputs = tuple(map(Ref, sent))
    bounded = made_with.bounded & decision.moved
    stage = DataStage(
        OperatorProgram(leaves, tuple(map(_for_host, moved)), outputs, copies, bounded),
        tuple(made_with.leaves[name] for name in leaves),
        made_with.num_leaves,
        made_with.generation,
    )
    staying = tuple(call for call in calls if call.name not in decision.moved or call.name in twice)
    taken = {*references([(call.args, call.kwargs) for call in staying]), *references(captured.outputs)}
    given = tuple(each for each in captured.inputs if each.name in taken and each.argument >= 0)
    constants = {
        each.name: made_with.tensors[each.name]
        for each in captured.inputs
        if each.name in taken and each.argument < 0 and each.name in made_with.tensors
    }
    training = OperatorProgram((*(each.name for each in given), *sent), staying, captured.outputs, constants)
    own = [by_name[name] for name in copies if by_name[name].argument >= 0]
    return Split(
        stage,
        OperatorProgram(leaves, moved, outputs, buffers),
        training,
        tuple(by_name[name].argument for name in leaves),
        tuple((each.argument, buffers[each.name].detach().clone()) for each in own),
        tuple(each.argument for each in given),
        frozenset(place for place, name in enumerate(sent) if name in made_with.numbers),
        tuple(made_with.devices.get(name) for name in sent),
        any(operators[call.name].random for call in moved),
    )


def _for_host(call: Call) -> Call:
    """The same operator in host memory: data workers have no other device."""

    def on_host(value: Any) -> Any:
        is_device = isinstance(value, torch.device) or (isinstance(value, str) and value.startswith("cuda"))
        return torch.device("cpu") if is_device else value

    return replace(call, args=replace_in(call.args, on_host), kwargs=replace_in(call.kwargs, on_host))
