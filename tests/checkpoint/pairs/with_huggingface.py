"""The program of the table of pairs that the Hugging Face Trainer trains, each rank started by somebody else."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import torch
import torch.distributed as dist
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hetstream.checkpoint.flash.destinations import LoadedCheckpoint
from hetstream.checkpoint.integrations.huggingface import FlashCheckpointCallback
from tests.checkpoint.pairs.trainer import Job, Witness, batches, digest, environment_of, layers_of, meet_at


class _Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = layers_of()

    def forward(self, values: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.layers(values) - values.sum(1, keepdim=True)).square().mean()}


class _Numbers(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __init__(self) -> None:
        self._values = torch.cat(batches())

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"values": self._values[index]}


class _Seen(Exception):
    """What was restored has been looked at."""


class _Look(TrainerCallback):
    """Notes what is there when training begins."""

    def __init__(self, job: Job, witness: Witness, model: torch.nn.Module) -> None:
        self._job, self._witness, self._model = job, witness, model

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        def bits() -> str:
            return digest([self._model.state_dict(), given["optimizer"].state_dict()])

        self._witness.note_restored(state.global_step, bits())
        if not self._job.event:
            raise _Seen
        self._witness.watch(bits)


def train(job: Job) -> None:
    """Be one rank."""
    witness = Witness(job)
    os.environ |= environment_of(job) if job.size > 1 else {}
    if job.size > 1:
        meet_at(job)
    torch.manual_seed(3)
    model = _Model()
    arguments = TrainingArguments(
        output_dir=str(job.directory.parent / "out"),
        per_device_train_batch_size=6,
        num_train_epochs=1,
        learning_rate=0.01,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        ddp_backend="gloo" if job.size > 1 else None,
        logging_steps=100_000,
    )
    flash = FlashCheckpointCallback(job.directory, **job.options())
    look = _Look(job, witness, model)
    load = flash._checkpointer.load

    def noted() -> LoadedCheckpoint | None:
        loaded = load()
        witness.source = ", ".join(sorted({*loaded.sources})) if loaded else ""
        return loaded

    flash._checkpointer.load = noted  # type: ignore[method-assign]
    trainer = Trainer(model=model, args=arguments, train_dataset=_Numbers(), callbacks=[flash, look])
    # Nothing stands in the way of Ctrl-C here.
    with contextlib.suppress(_Seen, *([KeyboardInterrupt] if "exception" in job.event else [])):
        trainer.train(resume_from_checkpoint=flash.resume_folder())
    flash._checkpointer.close()
    witness.say(ends=trainer.state.global_step)
    if dist.is_initialized():
        dist.destroy_process_group()
