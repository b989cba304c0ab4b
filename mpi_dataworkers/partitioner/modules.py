"""Which modules can be partitioned, and how to run a module's forward without the program's noticing."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from hetstream.mpi_dataworkers.ops.pipeline import generators_kept
from hetstream.mpi_dataworkers.partitioner.capture import NotCaptured
from hetstream.mpi_dataworkers.partitioner.forward import PartitionedForward, restored, saving_nothing
from hetstream.mpi_dataworkers.partitioner.leaves import leaves_of, unread
from hetstream.mpi_dataworkers.partitioner.own_call import OwnCall
from hetstream.mpi_dataworkers.partitioner.provenance import plain
from hetstream.mpi_dataworkers.partitioner.side_effects import Effects, ModelState, watch

_pytree: Any = pytree
CHANGES_ITS_ARGUMENTS = "the forward changes a list or dictionary that it is given, which no graph does"


def inner_module(model: torch.nn.Module) -> torch.nn.Module:
    """The module whose forward the program has written."""
    inner = getattr(model, "module", None)
    wraps = isinstance(model, torch.nn.parallel.DistributedDataParallel) and isinstance(inner, torch.nn.Module)
    return inner if wraps and inner is not None else model


def release(module: torch.nn.Module) -> None:
    """Give a model that is partitioned its own forward back: the loader that feeds it last has it."""
    forward = vars(module).get("forward")
    if isinstance(forward, PartitionedForward):
        forward.withdraw("another loader feeds this model now")


def check_hooks(state: ModelState) -> None:
    """Refuse a model in which modules have hooks.

    Raises:
        NotCaptured: naming the first.
    """
    if hooked := state.hooked():
        raise NotCaptured(f"the module {hooked}, which a graph does not call")


def check_module(module: torch.nn.Module) -> None:
    """Refuse modules whose forward is not one to be captured.

    Raises:
        NotCaptured: with the reason.
    """
    if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
        raise NotCaptured("the model is compiled by torch.compile as a whole: give its inner part to torch.compile")
    if isinstance(module, torch.jit.ScriptModule):
        raise NotCaptured("the model is a TorchScript module, whose forward is no Python")
    if isinstance(module, torch.nn.DataParallel):
        raise NotCaptured("the model is a DataParallel, which cuts each batch; use DistributedDataParallel")
    if not module.training:
        raise NotCaptured("the model is in eval mode; only its training is partitioned")


def watched(module: torch.nn.Module, args: tuple[Any, ...]) -> tuple[float, Effects]:
    """Run the forward twice, once to see what it does and once for its time; the program notices nothing of it.

    Returns:
        Its time, and what was seen.

    Raises:
        NotCaptured: it cannot be run apart from the program.
    """
    twin = _twin(module)
    state = ModelState(twin, [])
    check_hooks(state)
    changes: list[bool] = []

    def call() -> Any:
        ours, own = (
            _pytree.tree_map(lambda value: plain(value).clone() if isinstance(value, torch.Tensor) else value, args)
            for _ in range(2)
        )
        own_call = OwnCall(twin.forward, (ours, {}), (own, {}))
        result = own_call()
        changes.append(own_call.has_changed)
        return result

    with restored(module, leaves_of(args)), generators_kept():
        if any(hasattr(part, "_orig_mod") for part in twin.modules()):
            call()  # so that the compiler, which reads files and the time, is not taken for the forward
        _, effects = watch(call)
        if change := state.change():
            raise NotCaptured(f"the forward changes the model beside its tensors: {change}")
        if any(changes):
            raise NotCaptured(CHANGES_ITS_ARGUMENTS)
        started = time.perf_counter()
        call()
        seconds = time.perf_counter() - started
    return seconds, effects


def unread_values(
    module: torch.nn.Module, values: Sequence[Any], spec: Any, candidates: Sequence[int]
) -> frozenset[int]:
    """Which arguments of a forward it does not look at; runs it, and the program notices nothing of it.

    Args:
        module: whose forward changes nothing of it but buffers.
        values, spec: the flattened arguments.
        candidates: numbers of those in question.
    """

    def call(leaves: list[Any]) -> None:
        # Of the leaves some notice each look at them.
        tensors = [value.clone() if isinstance(value, torch.Tensor) else None for value in values]
        copied = [leaf if tensor is None else tensor for leaf, tensor in zip(leaves, tensors, strict=True)]
        args, kwargs = _pytree.tree_unflatten(copied, spec)
        with restored(module, [*values]), generators_kept(), saving_nothing():
            module.forward(*args, **kwargs)

    return unread(values, candidates, call)


def _twin(module: torch.nn.Module) -> torch.nn.Module:
    """A copy of a model with the very same parameters and buffers: what its forward does to attributes stays there."""
    tensors = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    try:
        return copy.deepcopy(module, dict(tensors))
    except Exception as error:
        raise NotCaptured(f"the model cannot be copied: {error!r}") from error
