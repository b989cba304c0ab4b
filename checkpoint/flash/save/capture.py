"""A state taken apart for a save: which tensors are copied where, and the metadata that tells what they are.

Called by the checkpointer. The plan of one save serves the next as long as the layout of the state is the same.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Any

import torch

from hetstream.base.errors import OptionsError
from hetstream.base.text import is_unicode
from hetstream.checkpoint.errors import UnsupportedState
from hetstream.checkpoint.flash import rng
from hetstream.checkpoint.flash.options import CheckpointOptions
from hetstream.checkpoint.flash.save.read_back import read_back
from hetstream.checkpoint.formats.part import check_structure
from hetstream.checkpoint.memory.segment import join_metadata
from hetstream.checkpoint.record.structure import RNG, Record, written_metrics
from hetstream.checkpoint.tensors.copy_plan import Plan, make_plan
from hetstream.checkpoint.tensors.leaves import Flattener, Leaves, Signature

# Rare dtypes and formats aside: JSON of a state's structure, before there is one.
_METADATA_BYTES_EACH = 256
# How many tensors of its parameter's size an optimizer keeps, once it has made a step.
_NUM_MOMENTS = {"Adam": 2, "AdamW": 2, "NAdam": 2, "RAdam": 2, "Adamax": 2, "RMSprop": 1, "Adadelta": 2}


@dataclass(frozen=True)
class Captured:
    """A state that is about to be copied.

    Attributes:
        plan: where its tensors go.
        metadata: of the generation.
        leaves: the tensors as they were found.
        addresses: of the tensors.
        read_back: where nothing like it was read back yet: does so, from the payload that it was copied to. With its
            values, unless the program may have changed some.
    """

    plan: Plan
    metadata: bytes
    leaves: Leaves
    addresses: list[int]
    read_back: Callable[[memoryview, bool], None] | None


class Capture:
    """Takes states apart.

    Args:
        shared: top-level keys that are equal on every rank, but for the parts that a rank has of sharded tensors.
        rank: of this process.
        world_size: number of ranks.
        options: of the checkpointer.
        holds_shared: this rank has the shared keys in memory; else another rank of the host has them for it.
    """

    def __init__(
        self,
        shared: tuple[str, ...],
        rank: int,
        world_size: int,
        options: CheckpointOptions,
        *,
        holds_shared: bool = True,
    ) -> None:
        self._shared = shared
        self._holds_shared = holds_shared
        self._rank = rank
        self._world_size = world_size
        self._options = options
        self._flattener = Flattener(allow_pickle=options.allow_pickle)
        self._generators = rng.Generators()
        self._signature: Signature | None = None
        self._plan: Plan | None = None
        self._planned: threading.Event | None = None
        # What was read back: the plan, and the kinds of values.
        self._known: tuple[Plan | None, Set[object]] = None, frozenset()

    def take(self, state: Mapping[str, Any], metrics: Mapping[str, float], *, finds_stepped: bool = False) -> Captured:
        """Take a state apart; the generators' states are added.

        Args:
            state: top-level key to objects and trees.
            metrics: for `Retention.keep_best`.
            finds_stepped: find out which tensors an optimizer changes.

        Raises:
            UnsupportedState: something in the state cannot be stored.
            OptionsError: it is no state.
        """
        leaves = self.flatten(state, finds_stepped=finds_stepped)
        if leaves.shapeless:
            raise UnsupportedState(
                f"{leaves.shapeless[0]} has no shape yet, so there is nothing to save: lazy modules get shapes in "
                "their first forward pass, or when they are restored"
            )
        self._await_plan()
        own = self._own(leaves)
        plan = self._plan_of(own)
        metadata = self._metadata(own, plan, metrics)
        read_back = self._reader(state, own, plan, metadata)
        return Captured(plan, metadata, own, own.signature.addresses, read_back)

    def _reader(
        self, state: Mapping[str, Any], own: Leaves, plan: Plan, metadata: bytes
    ) -> Callable[[memoryview, bool], None] | None:
        """`Captured.read_back`. Where the plan and the kinds of values are known, only bytes have changed."""
        forms = self._flattener.forms
        if self._known[0] is plan and forms <= self._known[1]:
            return None
        seen = plan, frozenset(forms)

        def reader(payload: memoryview, with_values: bool) -> None:
            read_back(
                state,
                own.states,
                own.generators,
                metadata,
                payload,
                allow_pickle=self._options.allow_pickle,
                with_values=with_values,
            )
            self._known = seen

        return reader

    def prepare(self, state: Mapping[str, Any], leaves: Leaves) -> Callable[[], tuple[int, int]]:
        """Plan saves of a state, beside the program.

        Args:
            state: top-level key to objects and trees.
            leaves: the same, as `flatten` takes it apart.

        Returns:
            To be called in a thread: `take` waits for it. It gives the bytes of payload and metadata that saves will
            need, also once optimizers have made a step.
        """
        self._await_plan()
        own = self._own(leaves)
        _ = own.signature  # the program may change its tensors from now on
        bytes_to_come = self._bytes_to_come(state, own)
        planned = self._planned = threading.Event()

        def plan_saves() -> tuple[int, int]:
            try:
                plan = self._plan_of(own)
                metadata_bytes = len(self._metadata(own, plan, {})) + _METADATA_BYTES_EACH * len(own.tensors)
                return plan.layout.payload_bytes + bytes_to_come, metadata_bytes
            finally:
                planned.set()

        return plan_saves

    def expected_bytes(self, state: Mapping[str, Any], leaves: Leaves) -> tuple[int, int]:
        """About what the plan of `prepare` will give, at once and before there is one; 0 for lazy modules."""
        if leaves.shapeless:
            return 0, 0
        own = self._own(leaves)
        num_bytes = sum(tensor.nbytes for tensor in own.tensors) + self._bytes_to_come(state, own)
        return num_bytes, _METADATA_BYTES_EACH * len(own.tensors)

    @staticmethod
    def _bytes_to_come(state: Mapping[str, Any], own: Leaves) -> int:
        """What optimizers will take beyond what they take now."""
        return sum(_bytes_to_come(value) for key, value in state.items() if key in own.tree or _is_sharded(value))

    def _await_plan(self) -> None:
        if self._planned:
            self._planned.wait()  # after an error the plan is made anew, and it comes again
            self._planned = None

    def flatten(self, state: Mapping[str, Any], *, finds_stepped: bool = False, asks_all: bool = True) -> Leaves:
        """The tensors of a state, and the tree without them; see `take` and `Flattener.flatten`."""
        if not isinstance(state, Mapping) or not all(isinstance(key, str) and key for key in state):
            raise OptionsError(f"a state is a dict with names as keys, such as {{'model': model}}, not {_short(state)}")
        if RNG in state:
            raise OptionsError(f"the key {RNG!r} of the state is taken: the generators' states are saved under it")
        unknown = [key for key in self._shared if key not in state]
        if unknown:
            raise OptionsError(f"shared={self._shared}: the state has no {', '.join(unknown)}, only {', '.join(state)}")
        generators = self._generators.capture()
        leaves = self._flattener.flatten({**state, RNG: generators}, finds_stepped=finds_stepped, asks_all=asks_all)
        leaves.generators = generators
        return leaves

    def _own(self, leaves: Leaves) -> Leaves:
        """What this rank has in memory of a state."""
        return leaves if self._holds_shared else leaves.without(leaves.equal_keys(self._shared))

    def _plan_of(self, leaves: Leaves) -> Plan:
        signature, former = leaves.signature, self._signature
        if self._plan is None or former is None or signature != former:
            self._plan = make_plan(leaves, self._shared_in(leaves))
        elif signature.addresses != former.addresses and not self._plan.fits(signature.addresses):
            plan = make_plan(leaves, self._shared_in(leaves))
            # An equal plan is the same one, so that the slots' views stay.
            self._plan = self._plan if plan.is_like(self._plan) else plan
        self._signature = signature
        return self._plan

    def _shared_in(self, leaves: Leaves) -> tuple[str, ...]:
        return tuple(key for key in self._shared if key in leaves.tree)

    def _metadata(self, leaves: Leaves, plan: Plan, metrics: Mapping[str, float]) -> bytes:
        try:
            numbers = {str(name): float(value) for name, value in metrics.items()}
            if not all(map(is_unicode, numbers)):
                raise ValueError("a name is no text")
        except (AttributeError, TypeError, ValueError, RuntimeError) as error:
            raise OptionsError(f"metrics={_short(metrics)}: a dict of names and numbers: {error}") from error
        structure = Record.write_with(
            plan.encoded_refs,
            tree=leaves.tree,
            shared=plan.shared,
            rank=self._rank,
            world_size=self._world_size,
            metrics=written_metrics(numbers),
            shared_elsewhere=len(self._shared_in(leaves)) < len(self._shared),
        )
        check_structure(plan.layout, structure)
        return join_metadata(plan.layout.to_json(), structure)


def _is_sharded(value: Any) -> bool:
    """Whether an optimizer will have sharded tensors, once it has made a step."""
    return isinstance(value, torch.optim.Optimizer) and any(
        hasattr(parameter, "to_local") for group in value.param_groups for parameter in group["params"]
    )


def _bytes_to_come(value: Any) -> int:
    """What the state of an optimizer will take beyond what it takes now."""
    # Around another one, an optimizer may have no state of its own.
    if not isinstance(value, torch.optim.Optimizer) or getattr(value, "state", True):
        return 0
    num_moments = next(
        (_NUM_MOMENTS[kind.__name__] for kind in type(value).__mro__ if kind.__name__ in _NUM_MOMENTS), 0
    )
    num_bytes = 0
    for group in value.param_groups:
        here = num_moments + bool(group.get("amsgrad")) + bool(group.get("momentum")) + bool(group.get("centered"))
        for parameter in group["params"]:
            # Each with its count of steps; all at multiples of 64 bytes.
            num_bytes += here * (parameter.numel() * parameter.element_size() + 64) + 64
    return num_bytes


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
