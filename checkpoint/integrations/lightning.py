"""PyTorch Lightning: a callback that restores at the start of `fit`, saves during it and ends it when asked to stop.

    Trainer(callbacks=[FlashCheckpointCallback("ckpt")], enable_checkpointing=False).fit(module)

Starting the program again goes on at the newest step. What is saved is Lightning's own checkpoint, with all that its
hooks, plugins and data module add to it, and Lightning restores it. A loader with a `state_dict` (such as hetstream's)
continues where it was; others begin the epoch anew, and a warning says so: Lightning skips no batches.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils import _pytree

from hetstream.base import process
from hetstream.base.errors import OptionsError
from hetstream.checkpoint.flash.checkpointer import FlashCheckpointer

_log = logging.getLogger(__name__)

# Names of ours, for what Lightning calls so. The first three are equal on all ranks, the fourth is a rank's own.
_PARTS = {"model": "state_dict", "optimizers": "optimizer_states", "schedulers": "lr_schedulers"}
_REST = "trainer"


class FlashCheckpointCallback(Callback):
    """Saves Lightning's checkpoint: model, optimizers, schedulers, loops, loaders, callbacks, plugins, hooks.

    Once the program is asked to end, it saves and raises `SIGTERMException`, as Lightning does at SIGTERM: `fit` does
    not return, and the program ends with code 0 if nobody catches it.

    Attributes:
        stop_reason: why it was asked to end; "" if it was not.

    Args:
        directory: of the checkpoints on disk.
        **settings: of `FlashCheckpointer`.
    """

    def __init__(self, directory: str | os.PathLike[str], **settings: Any) -> None:
        self._directory = directory
        self._settings = {"shared": (*_PARTS,), **settings}
        self._checkpointer: FlashCheckpointer | None = None
        self._handlers: dict[int, Any] = {}
        self._saved_step = -1
        self.stop_reason = ""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse strategies that shard the model.

        Raises:
            OptionsError: it is one.
        """
        strategy = trainer.strategy
        if stage == "fit" and strategy.restore_checkpoint_after_setup:  # what those have in common
            raise OptionsError(
                f"FlashCheckpointCallback keeps models that every rank has, and {type(strategy).__name__} shards them. "
                "Use DDP, or FlashCheckpointer in a loop of your own with FSDP2, or Lightning's ModelCheckpoint"
            )

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the newest generation, if there is one: Lightning has made the optimizers, and no loader yet."""
        before = {number: signal.getsignal(number) for number in signal.valid_signals()}
        checkpointer = self._checkpointer = FlashCheckpointer(self._directory, **self._settings)
        after = {number: signal.getsignal(number) for number in before}
        self._handlers = {number: ours for number, ours in after.items() if ours != before[number]}
        state: dict[str, Any] = dict.fromkeys((*_PARTS, _REST))
        step = checkpointer.restore(state)
        self._saved_step = -1 if step is None else step
        if step is None:
            checkpointer.prepare({**state, "model": pl_module, "optimizers": [*trainer.optimizers]})
        else:
            _hand_over(trainer, state)

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Listen to signals."""
        self._listen()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Listen to signals, and say where the place in the data is not part of what is saved."""
        self._listen()
        _tell_progress(trainer)
        loaders = _pytree.tree_leaves(trainer.train_dataloader)
        if not all(hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict") for loader in loaders):
            _log.warning(
                "the loader of the training data has no state_dict: a run that is resumed within an epoch "
                "gets its first batches again, and misses its last ones. hetstream's DataLoader and torchdata's "
                "StatefulDataLoader have one"
            )

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Save when it is time to; once more when the program is asked to end, which it then does.

        Raises:
            SIGTERMException: it is asked to end; on all ranks after the same step.
        """
        checkpointer = self._checkpointer
        assert checkpointer is not None
        step = trainer.global_step
        if step == self._saved_step:
            return  # gradients are accumulated: no step was made
        _tell_progress(trainer)
        is_due = checkpointer.should_save(step)
        is_stopping = checkpointer.stopping  # the same on all ranks
        if is_due or is_stopping:
            self._save(trainer, step)
        if is_stopping:
            self.stop_reason = checkpointer.stop_reason
            _log.warning("training ends after step %d, which is saved: %s", step, self.stop_reason)
            raise SIGTERMException

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the last step, whatever the interval: `fit` of a finished training has nothing more to do."""
        if self._checkpointer and trainer.global_step != self._saved_step:
            self._save(trainer, trainer.global_step)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Keep the generations in memory for the next start."""
        self._close(keep_memory=isinstance(exception, Exception))

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Bring the newest generation to disk."""
        self._close(keep_memory=False)

    def _listen(self) -> None:
        """Have signals for the checkpointer alone; the program's own handlers, from before `fit`, still run.

        Lightning's handler meets the other ranks at once, wherever each of them is: they would wait for ever.
        """
        if threading.current_thread() is threading.main_thread():
            for number, ours in self._handlers.items():
                signal.signal(number, ours)

    def _save(self, trainer: Trainer, step: int) -> None:
        assert self._checkpointer is not None
        self._checkpointer.save(step, _taken(trainer))
        self._saved_step = step

    def _close(self, *, keep_memory: bool) -> None:
        process.forget()
        if self._checkpointer:
            self._checkpointer.close(keep_memory=keep_memory)
            self._checkpointer = None


def _tell_progress(trainer: Trainer) -> None:
    """Say how far the training is: Lightning counts steps of the optimizer, each of as many batches as it accumulates.

    Where neither `max_steps` nor `max_epochs` bounds the training, or an epoch's length is not known, the total is
    infinite or -1: then nobody knows.
    """
    batches = trainer.accumulate_grad_batches
    process.tell(trainer.global_step * batches, trainer.estimated_stepping_batches * batches)


def _taken(trainer: Trainer) -> dict[str, Any]:
    """Lightning's checkpoint, in our parts."""
    checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    for owner in (trainer.lightning_module, getattr(trainer, "datamodule", None)):
        # Arguments of the program, which gives them anew; Lightning does not restore them.
        for name in ("KEY", "NAME", "TYPE"):
            checkpoint.pop(getattr(owner, f"CHECKPOINT_HYPER_PARAMS_{name}", ""), None)
    parts = {ours: checkpoint.pop(theirs) for ours, theirs in _PARTS.items()}
    return {**parts, _REST: checkpoint}


def _hand_over(trainer: Trainer, state: dict[str, Any]) -> None:
    """Let Lightning restore what `_taken` gave: this at once; optimizers, loops and plugins when it gets there."""
    connector = trainer._checkpoint_connector
    connector._loaded_checkpoint = {**state[_REST], **{theirs: state[ours] for ours, theirs in _PARTS.items()}}
    # In this order, as Lightning does before the strategy is set up, which is over by now.
    connector.restore_model()
    connector.restore_datamodule()
    connector.restore_callbacks()
