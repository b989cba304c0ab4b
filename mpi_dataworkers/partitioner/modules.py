"""Which modules can be partitioned. Called by `partition.py` and `unmodified.py`."""

from __future__ import annotations

import torch

from hetstream.mpi_dataworkers.partitioner.forward import PartitionedForward
from hetstream.mpi_dataworkers.partitioner.unseen import NotCaptured


def release(module: torch.nn.Module) -> None:
    """Give a model that is partitioned its own forward back: the loader that feeds it last has it."""
    if isinstance(module._compiled_call_impl, PartitionedForward):
        module._compiled_call_impl.withdraw("another loader feeds this model now")


def check_module(module: torch.nn.Module) -> None:
    """Refuse modules whose forward is not one to be captured.

    Raises:
        NotCaptured: with the reason.
    """
    for part in module.modules():
        call = part._compiled_call_impl
        if hasattr(part, "_orig_mod") or (call is not None and not isinstance(call, PartitionedForward)):
            raise NotCaptured("torch.compile compiles the model, or a part of it, which may give it other bits")
        if isinstance(part, torch.jit.ScriptModule):
            raise NotCaptured("the model, or a part of it, is a TorchScript module, whose forward is no Python")
    if isinstance(module, torch.nn.DataParallel):
        raise NotCaptured("the model is a DataParallel, which cuts each batch; use DistributedDataParallel")
    if any(type(parameter.data) is not torch.Tensor for parameter in module.parameters()):
        raise NotCaptured("the model's parameters are no plain tensors, as with FSDP")
    if not module.training:
        raise NotCaptured("the model is in eval mode; only its training is partitioned")
