"""Hugging Face Trainer: a callback that saves while it trains, and the folder from which `train` resumes.

    flash = FlashCheckpointCallback("ckpt")
    trainer = Trainer(..., callbacks=[flash])
    trainer.train(resume_from_checkpoint=flash.resume_folder())

The folder has the form of the Trainer's own checkpoints and is made from the newest generation, so that the Trainer
restores everything by its own means, its place in the data included. Data parallel training; for a model that is
sharded use `FlashCheckpointer` in a loop of your own.
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
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from checkpoint.flash.checkpointer import FlashCheckpointer

_SHARED = ("model", "optimizer", "scheduler", "trainer")


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
        """A temporary folder with the newest generation that all ranks have; None if there is none.

        It goes with the first step, for which the Trainer has read all of it, or at the end of the program.
        """
        loaded = self._checkpointer.load()
        if loaded is None:
            return None
        folder = Path(tempfile.mkdtemp(prefix="hetstream-resume-"))
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

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Allocate memory for saves; what was to be resumed has been read."""
        self._checkpointer.prepare(_state(state, given))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        """Save when it is time to, after the last step, and when the job is asked to end."""
        self._remove_folder()
        checkpointer = self._checkpointer
        is_due = checkpointer.should_save(state.global_step)
        is_stopping = checkpointer.stopping  # the same on all ranks
        if is_due or is_stopping or control.should_training_stop:
            checkpointer.save(state.global_step, _state(state, given))
        if is_stopping:
            control.should_training_stop = True

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Bring the newest generation to disk."""
        self._remove_folder()
        self._checkpointer.close()


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
