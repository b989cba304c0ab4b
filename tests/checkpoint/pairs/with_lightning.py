"""The program of the table of pairs that Lightning trains, each rank started by somebody else."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.utilities.exceptions import SIGTERMException

from hetstream.checkpoint.integrations.lightning import FlashCheckpointCallback
from tests.checkpoint.pairs.trainer import (
    Job,
    Witness,
    batches,
    digest,
    environment_of,
    layers_of,
    meet_at,
    optimizer_of,
)


class _Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = layers_of()

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        return (self.layers(batch) - batch.sum(1, keepdim=True)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer_of(self)


class _Seen(Exception):
    """What was restored has been looked at."""


class _Look(pl.Callback):
    """Notes what is there when training begins."""

    def __init__(self, job: Job, witness: Witness) -> None:
        self._job, self._witness = job, witness

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        def bits() -> str:
            return digest([pl_module.state_dict(), trainer.optimizers[0].state_dict()])

        self._witness.note_restored(trainer.global_step, bits())
        if not self._job.event:
            raise _Seen
        self._witness.watch(bits)


def train(job: Job) -> None:
    """Be one rank."""
    witness = Witness(job)
    os.environ |= environment_of(job)
    if job.size > 1:
        meet_at(job)
    settings: dict[str, Any] = {"strategy": "ddp" if job.size > 1 else "auto", "devices": job.size}
    trainer = pl.Trainer(
        max_epochs=1,
        callbacks=[FlashCheckpointCallback(job.directory, **job.options()), _Look(job, witness)],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        logger=False,
        plugins=[TorchElasticEnvironment()],
        accelerator="cpu",
        **settings,
    )
    # Lightning ends the program at Ctrl-C by itself, and at SIGTERM by this exception.
    with contextlib.suppress(_Seen, SIGTERMException, *([SystemExit] if "exception" in job.event else [])):
        trainer.fit(_Module(), torch.utils.data.DataLoader(batches(), batch_size=None))  # type: ignore[arg-type]
    witness.say(ends=trainer.global_step)
    if dist.is_initialized():
        dist.destroy_process_group()
