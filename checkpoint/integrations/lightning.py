"""PyTorch Lightning: a callback that restores at the start of `fit`, saves during it and ends it when asked to stop.

    Trainer(callbacks=[FlashCheckpointCallback("ckpt")], enable_checkpointing=False).fit(module)

Starting the program again goes on at the newest step. A loader with a `state_dict` (such as hetstream's) continues
where it was; others begin the epoch anew, and a warning says so: Lightning skips no batches.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils import _pytree

from checkpoint.flash.checkpointer import FlashCheckpointer

_log = logging.getLogger(__name__)

_SHARED = ("model", "optimizers", "schedulers")


class FlashCheckpointCallback(Callback):
    """Saves model, optimizers, schedulers, the loop's progress, loaders and other callbacks as one record.

    Args:
        directory: of the checkpoints on disk.
        sharded: the strategy shards the model, as FSDP does: each rank keeps its part.
        **settings: of `FlashCheckpointer`.
    """

    def __init__(self, directory: str | os.PathLike[str], *, sharded: bool = False, **settings: Any) -> None:
        self._directory = directory
        self._settings = {"shared": () if sharded else _SHARED, **settings}
        self._checkpointer: FlashCheckpointer | None = None
        self._saved_step = -1

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the newest generation, if there is one: Lightning has made the optimizers, and no loader yet."""
        self._checkpointer = FlashCheckpointer(self._directory, **self._settings)
        step = self._checkpointer.restore(self._state(trainer, pl_module), strict=False)
        self._saved_step = -1 if step is None else step

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say where the place in the data is not part of what is saved."""
        loaders = _pytree.tree_leaves(trainer.train_dataloader)
        if not all(hasattr(one, "state_dict") and hasattr(one, "load_state_dict") for one in loaders):
            _log.warning(
                "the loader of the training data has no state_dict: a start within an epoch takes its first batches "
                "again, and not its last ones. mpi_dataworkers.DataLoader and torchdata's StatefulDataLoader have one"
            )

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Save when it is time to, and once more when the job is asked to end."""
        checkpointer = self._checkpointer
        assert checkpointer is not None
        step = trainer.global_step
        if step == self._saved_step:
            return  # gradients are accumulated: no step was made
        is_due = checkpointer.should_save(step)
        is_stopping = checkpointer.stopping  # the same on all ranks
        if is_due or is_stopping:
            checkpointer.save(step, self._state(trainer, pl_module))
            self._saved_step = step
        if is_stopping:
            trainer.should_stop = True

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the last step, whatever the interval: `fit` of a finished training has nothing more to do."""
        if self._checkpointer and trainer.global_step != self._saved_step:
            self._checkpointer.save(trainer.global_step, self._state(trainer, pl_module))

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Keep the generations in memory for the next start."""
        self._close(keep_memory=isinstance(exception, Exception))

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Bring the newest generation to disk."""
        self._close(keep_memory=False)

    def _close(self, *, keep_memory: bool) -> None:
        if self._checkpointer:
            self._checkpointer.close(keep_memory=keep_memory)
            self._checkpointer = None

    def _state(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        others = [one for one in trainer.callbacks if one is not self]  # type: ignore[attr-defined]
        return {
            "model": pl_module,
            "optimizers": dict(enumerate(trainer.optimizers)),
            "schedulers": {number: one.scheduler for number, one in enumerate(trainer.lr_scheduler_configs)},
            "fit_loop": trainer.fit_loop,
            "callbacks": {one.state_key: one for one in others if one.state_dict()},
        }
