"""The program of the table of pairs that Horovod trains: torch.distributed is not initialised in it."""

from __future__ import annotations

import horovod.torch as hvd

from tests.checkpoint.pairs.trainer import Job, Witness, layers_of, optimizer_of, run_loop


def train(job: Job) -> None:
    """Be one rank."""
    hvd.init()
    witness = Witness(job)
    model = layers_of()
    optimizer = hvd.DistributedOptimizer(optimizer_of(model), named_parameters=model.named_parameters())
    run_loop(job, witness, model, optimizer)
    hvd.shutdown()
