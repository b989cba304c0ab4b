"""The forward of a partitioned model: what data workers have not done, or the program's own forward.

It stands in the module's `forward` attribute. Each call proves that it may take the short way: that the arguments are
the loader's leaves, that data workers have computed the cut for them, and that the model is as it was captured.
"""

from __future__ import annotations

import contextlib
import logging
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils.checkpoint
from torch.utils import _pytree as pytree

from hetstream.mpi_dataworkers.partitioner.copied_buffer import CopiedBuffer, same_bytes
from hetstream.mpi_dataworkers.partitioner.first_graph import DoesNotFit, RanAsWritten
from hetstream.mpi_dataworkers.partitioner.graph import Kind
from hetstream.mpi_dataworkers.partitioner.guards import Guards
from hetstream.mpi_dataworkers.partitioner.leaves import flatten_call
from hetstream.mpi_dataworkers.partitioner.own_call import OwnCall
from hetstream.mpi_dataworkers.partitioner.provenance import Delivery, origin, plain, whole
from hetstream.mpi_dataworkers.partitioner.split import Split

_log = logging.getLogger(__name__)
_pytree: Any = pytree
_StopsRecomputation: type[Exception] = torch.utils.checkpoint._StopRecomputationError
# So many calls in a row, in training, that data workers have worked for in vain: they work for it no more.
_MOST_MISSES = 50
_OTHER_FORM = "its arguments have another type or size"
_DRAWS_ANEW = "it is called once more with a batch, for other random numbers than those that data workers have drawn"
# Buffers in host memory are compared in each step if they are no larger together: it takes some microseconds.
_MOST_BYTES_TO_COMPARE = 1 << 20
# How near outputs must be where the trainer has an accelerator: (relative, absolute), by the size of a number.
_TOLERANCE = {2: (1e-2, 1e-3), 4: (1e-4, 1e-5), 8: (1e-7, 1e-7)}


@dataclass
class Counts:
    """How the calls of a forward went.

    Attributes:
        partitioned, original: calls that took the short way, and the program's own.
        checked: calls that took both, and gave the same.
        remade: leaves that had not been sent and were made once more, because something read them.
        reasons: why calls took the program's own, with their number.
    """

    partitioned: int = 0
    original: int = 0
    checked: int = 0
    remade: int = 0
    reasons: dict[str, int] = field(default_factory=dict)


class PartitionedForward:
    """Stands in a module's `forward`.

    Args:
        module: the module; its `forward` is replaced by `install`.
        guards: what must be as it was captured.
        num_checked: calls that run both ways and compare.
        withdraw: called with a reason when data workers work in vain.

    Attributes:
        counts: how the calls went.
        withdraw: as given.
        split: the cut now; None: the program's own forward runs.
        is_paused: batches come as if there were no cut, for a comparison, so the module gets its own forward back.
    """

    def __init__(
        self, module: torch.nn.Module, guards: Guards, num_checked: int, withdraw: Callable[[str], None]
    ) -> None:
        self.counts = Counts()
        self.split: Split | None = None
        self.is_paused = False
        self._before: Split | None = None  # of the batches that were on their way when the cut changed
        self._module = module
        self._own = vars(module).get("forward")
        self._guards = guards
        self._to_check = self._num_checked = num_checked
        self.withdraw = withdraw
        self._misses = 0
        self._inputs = {graph_input.name: graph_input for graph_input in guards.captured.inputs}
        self._copied_buffers: list[CopiedBuffer] = []

    @property
    def _original(self) -> Any:
        """The program's own forward, as its class has it now."""
        return self._own or types.MethodType(type(self._module).forward, self._module)

    def install(self) -> bool:
        """Stand in; whether that may be: not where the program has set another forward since."""
        if vars(self._module).get("forward") not in (self, self._own):
            return False
        vars(self._module)["forward"] = self
        return True

    def uninstall(self) -> None:
        """Give the module its own forward back."""
        if vars(self._module).get("forward") is self:
            if self._own is not None:
                vars(self._module)["forward"] = self._own
            else:
                del vars(self._module)["forward"]

    @property
    def is_checked(self) -> bool:
        """Whether the cut has been checked."""
        return self._to_check == 0

    def use(self, split: Split | None, is_checked: bool = False) -> None:
        """Use another cut, whose first calls are checked.

        Args:
            split: the cut, or None for the program's own forward.
            is_checked: its operators are those of the cut before.
        """
        self._before, self.split = self.split, split
        self._to_check, self._misses = 0 if is_checked else self._num_checked, 0
        self._copied_buffers = self._watched_buffers()

    def _watched_buffers(self) -> list[CopiedBuffer]:
        cuts = [cut for cut in (self.split, self._before) if self.split and cut]
        copies = [copied for cut in cuts for copied in cut.stage.program.constants.items()]
        found = [(self._inputs[name].target, copy) for name, copy in copies if name in self._inputs]
        places = [(*self._guards.tables[target], copy) for target, copy in found if target in self._guards.tables]
        in_host = [copy for table, name, copy in places if not table[name].is_cuda]
        is_quick = sum(copy.nbytes for copy in in_host) <= _MOST_BYTES_TO_COMPARE
        return [
            CopiedBuffer(table, name, copy, is_small=is_quick and not table[name].is_cuda)
            for table, name, copy in places
        ]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the module's own forward would return."""
        if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
            return self._original(*args, **kwargs)
        flat, spec = flatten_call(args, kwargs)
        origins = {place: found for place, value in enumerate(flat) if (found := origin(value)) is not None}
        values = [plain(value) if isinstance(value, torch.Tensor) else value for value in flat]

        def original() -> Any:
            own = _pytree.tree_unflatten([whole(value) for value in values], spec)
            return OwnCall(self._original, (args, kwargs), own)()

        if self.split is None or not self._module.training:
            return original()
        if self.is_paused and not origins:  # nor will those of later batches be
            self.uninstall()
            return original()
        proved, reason = self._proved(values, spec, origins)
        if proved is None:
            self._missed(reason)
            return original()
        delivery, split = proved
        if split.draws and not _recomputes():
            if delivery.was_used:
                self.withdraw(_DRAWS_ANEW)
                return original()
            delivery.was_used = True
        if self._to_check > 0 or delivery.was_checked:
            return self._checked(proved, values, spec, original)
        try:
            result = self._run(split, delivery, values, spec, (args, kwargs))
        except _StopsRecomputation:
            raise  # activation checkpointing has what it wants
        except RanAsWritten as ran:
            self._missed(str(ran))
            return ran.result
        except DoesNotFit as reason:
            self._missed(str(reason))
            return original()
        except Exception as error:  # noqa: BLE001, the program's own forward raises it again, with its own lines
            result = original()
            self.withdraw(f"the training side raised {error!r}, and the program's own forward did not")
            return result
        self.counts.partitioned += 1
        self._misses = 0
        return result

    def _missed(self, reason: str) -> None:
        counts = self.counts
        counts.original += 1
        if reason not in counts.reasons:
            _log.warning("hetstream: the forward of %s runs as it is: %s", type(self._module).__name__, reason)
        counts.reasons[reason] = counts.reasons.get(reason, 0) + 1
        self._misses += 1
        if self._misses >= _MOST_MISSES:
            self.withdraw(f"{self._misses} steps in a row could not use it: {reason}")

    def _proved(
        self, values: list[Any], spec: Any, origins: dict[int, tuple[Delivery, int]]
    ) -> tuple[tuple[Delivery, Split] | None, str]:
        """The batch whose leaves the arguments are, and its cut, if all is as it was captured; else why not."""
        guards = self._guards
        if spec != guards.in_spec:
            return None, "it was called with arguments of another structure"
        if any(place not in origins or origins[place][1] != leaf for place, leaf in guards.leaves.items()):
            return None, "its arguments are not, or no longer, the loader's own tensors"
        delivery = origins[next(iter(guards.leaves))][0]
        if any(origins[place][0] is not delivery for place in guards.leaves):
            return None, "its arguments are of more than one batch"
        cuts = (self.split, self._before)
        split = next((cut for cut in cuts if cut is not None and cut.stage.generation == delivery.generation), None)
        if delivery.cut is None or split is None:
            return None, "data workers have not computed the cut for this batch"
        if delivery.has_changed_cut():
            return None, "the program has changed an output that data workers had computed in place"
        is_other = any(values[place] != value for place, value in guards.plain_arguments.items())
        if is_other or any(type(values[place]) is not kind for place, kind in guards.unread.items()):
            return None, "an argument that is no tensor has another value"
        if guards.first is None and not guards.forms.fit(values):
            return None, _OTHER_FORM
        if change := guards.state.change():
            return None, change
        if change := next(filter(None, (buffer.change() for buffer in self._copied_buffers)), ""):
            return None, change
        return (delivery, split), ""

    def _run(self, split: Split, delivery: Delivery, values: list[Any], spec: Any, theirs: Any = None) -> Any:
        """The forward's result with the cut; for the exceptions see `FirstGraph.run`.

        Args:
            split, delivery: the cut, and the batch with its values.
            values, spec: the flattened arguments.
            theirs: the program's own, in which it finds what the forward changes; None: it does not.
        """
        guards = self._guards
        if guards.first is None:
            return self._rest(split, delivery, values)

        def instead(inputs: Sequence[Any]) -> Any:
            if not guards.forms.fit(inputs):
                raise DoesNotFit(_OTHER_FORM)
            return self._rest(split, delivery, inputs)

        own = _pytree.tree_unflatten(values, spec)
        return guards.first.run(OwnCall(self._original, theirs or own, own), values, instead)

    def _rest(self, split: Split, delivery: Delivery, inputs: Sequence[Any]) -> Any:
        """The graph's outputs, of its inputs and of what data workers have computed."""
        arguments: list[Any] = []
        for name in split.given:
            graph_input = self._inputs[name]
            if graph_input.kind in (Kind.LEAF, Kind.PLAIN):
                arguments.append(inputs[graph_input.argument])
            else:
                arguments.append(self._guards.tensor_of(graph_input.target))
        leaf = next(graph_input for graph_input in self._inputs.values() if graph_input.kind is Kind.LEAF)
        device = inputs[leaf.argument].device
        assert delivery.cut is not None
        for name, value in zip(split.sent, delivery.cut, strict=True):
            arguments.append(value.item() if name in split.numbers else value.to(device, non_blocking=True))
        return _pytree.tree_unflatten(split.training(*arguments), self._guards.captured.out_spec)

    def _checked(
        self, proved: tuple[Delivery, Split], values: list[Any], spec: Any, run_original: Callable[[], Any]
    ) -> Any:
        """Both ways, from the same arguments, buffers and random numbers; the program gets its own outputs."""
        problem = missed = ""
        delivery, split = proved
        delivery.was_checked = True
        with restored(self._module, values) as after, saving_nothing():
            try:
                # Copied, because the forward may change them in place.
                result = self._run(split, delivery, [*map(_copied, values)], spec)
                partitioned = after(result)
            except (RanAsWritten, DoesNotFit) as reason:
                missed = str(reason)
            except Exception as error:  # noqa: BLE001, whatever it is, the program runs as before
                problem = f"the training side raised {error!r}"
        original = run_original()
        if missed:
            self._missed(missed)
            return original
        if not problem:
            problem = difference(partitioned, snapshot(self._module, original))
        if problem:
            self.withdraw(f"the check of a batch failed: {problem}")
            return original
        self._to_check = max(0, self._to_check - 1)
        self.counts.checked += 1
        self._misses = 0
        return original

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of the model has its own forward."""
        copied = memo.get(id(self._module))
        return types.MethodType(type(copied).forward, copied) if copied is not None else self._original

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._module, "forward")  # of an object that has no attributes yet: its class's


def _recomputes() -> bool:
    """Whether a backward pass is under way, which wants what the forward had."""
    return bool(torch._C._current_graph_task_id() != -1)


def _copied(value: Any) -> Any:
    """A tensor in memory of its own, unless a copy would lie otherwise there."""
    if not isinstance(value, torch.Tensor):
        return value
    copy = value.clone()
    return copy if copy.stride() == value.stride() else value


def snapshot(module: torch.nn.Module, outputs: Any) -> list[Any]:
    """Outputs and buffers, copied."""
    leaves = _pytree.tree_leaves(outputs)
    values = [*leaves, *module.buffers()]
    return [value.detach().clone() if isinstance(value, torch.Tensor) else value for value in values]


def saving_nothing() -> contextlib.AbstractContextManager[object]:
    """For what has no backward pass: activation checkpointing counts what a call saves for one."""
    return torch.autograd.graph.saved_tensors_hooks(lambda _: None, lambda _: torch.empty(0))


@contextlib.contextmanager
def restored(module: torch.nn.Module, values: list[Any]) -> Iterator[Callable[[Any], list[Any]]]:
    """Give buffers and random numbers their state back at the end."""
    devices = {value.device.index for value in values if isinstance(value, torch.Tensor) and value.is_cuda}
    before = [buffer.detach().clone() for buffer in module.buffers()]
    with torch.random.fork_rng(devices=sorted(devices)):
        try:
            yield lambda outputs: snapshot(module, outputs)
        finally:
            for buffer, value in zip(module.buffers(), before, strict=True):
                buffer.data.copy_(value)  # uncounted: an earlier call's graph may hold the buffer as it is


def difference(found: list[Any], expected: list[Any]) -> str:
    """How values differ from those of the program's own forward; "" when they do not.

    In host memory each byte must be the same; on an accelerator, numbers must be as near as `_TOLERANCE` says.
    """
    if len(found) != len(expected):
        return f"there are {len(found)} values instead of {len(expected)}"
    for index, (actual, other) in enumerate(zip(found, expected, strict=True)):
        if not isinstance(other, torch.Tensor):
            if actual != other:
                return f"value {index} is {actual!r} instead of {other!r}"
            continue
        if not isinstance(actual, torch.Tensor) or actual.dtype != other.dtype or actual.shape != other.shape:
            return f"value {index} has another type or size"
        if not _alike(actual, other):
            return f"value {index} differs"
    return ""


def _alike(actual: torch.Tensor, other: torch.Tensor) -> bool:
    if actual.is_cuda and actual.dtype.is_floating_point:
        relative, absolute = _TOLERANCE[actual.element_size()]
        return torch.allclose(actual, other, relative, absolute, equal_nan=True)
    return same_bytes(actual, other)
