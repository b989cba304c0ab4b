"""Hugging Face Trainer: a callback that saves while it trains, and the folder from which `train` resumes.

    flash = FlashCheckpointCallback("ckpt")
    trainer = Trainer(..., callbacks=[flash])
    trainer.train(resume_from_checkpoint=flash.resume_folder())

The folder has the form of the Trainer's own checkpoints and is made from the newest generation, so that the Trainer
restores everything by its own means, its place in the data included. Data parallel training: a model that is sharded
(FSDP, DeepSpeed, tensor parallel) is refused.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hetstream.base import process
from hetstream.base.errors import OptionsError
from hetstream.base.files import temporary_place
from hetstream.checkpoint.flash.checkpointer import FlashCheckpointer

_SHARED = ("model", "optimizer", "scheduler", "trainer")
_SHARDING = (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)


class FlashCheckpointCallback(TrainerCallback):
    """Saves model, optimizer, scheduler, the Trainer's state and the generators as one record.

    Args:
        directory: of the checkpoints on disk.
        **settings: of `FlashCheckpointer`.
    """

    def __init__(self, directory: str | os.PathLike[str], **settings: Any) -> None:
        self._checkpointer = FlashCheckpointer(directory, **{"shared": _SHARED, **settings})
        self._remove_folder: Callable[[], object] = lambda: None

    def resume_folder(self) -> str | None:
        """Return a temporary folder with the newest generation that all ranks have; None if there is none.

        It goes with the first step, for which the Trainer has read all of it, or at the end of the program.
        """
        loaded = self._checkpointer.load()
        if loaded is None:
            return None
        folder = Path(tempfile.mkdtemp(prefix="hetstream-resume-", dir=temporary_place()))
        self._remove_folder = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        state = loaded.state
        (folder / "trainer_state.json").write_text(json.dumps(state["trainer"]))
        torch.save(state["model"], folder / "pytorch_model.bin")
        torch.save(state["optimizer"], folder / "optimizer.pt")
        torch.save(state["scheduler"], folder / "scheduler.pt")
        rank = int(os.environ.get("RANK", "0"))
        is_alone = os.environ.get("WORLD_SIZE", "1") == "1"
        torch.save(state["generators"], folder / ("rng_state.pth" if is_alone else f"rng_state_{rank}.pth"))
        return str(folder)

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Refuse models that are sharded, before anything is resumed.

        Raises:
            OptionsError: it will be.
        """
        self._check_replicated(args, None)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Allocate memory for saves; what was to be resumed has been read.

        Raises:
            OptionsError: the model is sharded, and the callback was added behind the Trainer's start.
        """
        self._check_replicated(args, given["model"])
        self._checkpointer.prepare(_state(state, given))
        _tell_progress(args, state)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        """Save when it is time to, after the last step, and when the job is asked to end."""
        self._remove_folder()
        _tell_progress(args, state)
        checkpointer = self._checkpointer
        is_due = checkpointer.should_save(state.global_step)
        is_stopping = checkpointer.stopping  # the same on all ranks
        if is_due or is_stopping or control.should_training_stop:
            checkpointer.save(state.global_step, _state(state, given))
        if is_stopping:
            control.should_training_stop = True

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Bring the newest generation to disk."""
        process.forget()
        self._remove_folder()
        self._checkpointer.close()

    def _check_replicated(self, args: TrainingArguments, model: torch.nn.Module | None) -> None:
        who = _sharded_by(args, model)
        if who:
            self._checkpointer.close()
            raise OptionsError(
                f"FlashCheckpointCallback keeps models that every rank has, and {who} shards them. Use data parallel "
                "training, or FlashCheckpointer in a loop of your own with FSDP2, or the Trainer's own checkpoints "
                "(save_strategy='steps')"
            )


def _tell_progress(args: TrainingArguments, state: TrainerState) -> None:
    """Say how far the training is: `TrainerState` counts updates, and each takes as many batches as are accumulated."""
    batches = args.gradient_accumulation_steps
    process.tell(state.global_step * batches, state.max_steps * batches)


def _sharded_by(args: TrainingArguments, model: torch.nn.Module | None) -> str:
    """What shards the model; "" if nothing does."""
    # Whatever asked for it: arguments, environment, a file. To make an AcceleratorState would forget FSDP (1.15).
    kind = AcceleratorState._shared_state.get("distributed_type")
    if kind in _SHARDING:
        return str(kind.value)
    if args.fsdp or args.deepspeed:
        return "FSDP" if args.fsdp else "DeepSpeed"
    is_parted = model is not None and any(hasattr(parameter, "to_local") for parameter in model.parameters())
    return "tensor parallelism" if is_parted else ""


def _state(state: TrainerState, given: dict[str, Any]) -> dict[str, Any]:
    generators: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "cpu": torch.random.get_rng_state(),
    }
    if torch.cuda.is_available():
        generators["cuda"] = torch.cuda.random.get_rng_state_all()
    return {
        "model": given["model"],
        "optimizer": given["optimizer"],
        "scheduler": given["lr_scheduler"],
        "trainer": dataclasses.asdict(state),
        "generators": generators,
    }
