"""Restores: bring a generation that all ranks have into the program's state; later saves follow that generation.

Called by the checkpointer of every rank. `restore/` finds the generation and copies it into the state.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import MutableMapping
from typing import Any

from hetstream.checkpoint.errors import UnsupportedState
from hetstream.checkpoint.flash import collector
from hetstream.checkpoint.flash.distributed import Communicator, gather
from hetstream.checkpoint.flash.restore.destinations import LoadedCheckpoint, RestoreRequest, load_values, restore_state
from hetstream.checkpoint.flash.save.saving import Saving
from hetstream.checkpoint.flash.storage import CheckpointStorage
from hetstream.checkpoint.flash.timing import Timing
from hetstream.checkpoint.record.generation import Generation

_log = logging.getLogger(__name__)


class Restoring:
    """The restores of one rank.

    Args:
        ranks: that have to agree.
        storage: what they restore from.
        saving: goes on behind what was restored.
        timing: counts from there.
        allow_pickle: unpickle what was pickled.
    """

    def __init__(
        self, ranks: Communicator, storage: CheckpointStorage, saving: Saving, timing: Timing, *, allow_pickle: bool
    ) -> None:
        self._ranks = ranks
        self._storage = storage
        self._saving = saving
        self._timing = timing
        self._allow_pickle = allow_pickle

    def restore(self, state: MutableMapping[str, Any], step: int | None, *, strict: bool) -> int | None:
        """Bring a generation into a state, in place; see `FlashCheckpointer.restore`."""
        leaves = self._saving.announce(state)  # says what is wrong with it before anything happens
        self._storage.become_owner()
        candidates = self._storage.candidates()
        with collector.held_off():
            whole = functools.partial(self._saving.flatten, state) if leaves.unasked else lambda: leaves
            restored = restore_state(candidates, state, whole, RestoreRequest(step, strict, self._allow_pickle))
        if restored.generation and (step is not None or self._is_behind(restored.generation)):
            self._go_back(restored.generation)
        self._timing.begin(restored.step or 0)
        self._storage.succession.note_restored(restored.step or 0)
        try:
            # Last, as it goes on in a thread, and each look at a file would wait for that.
            is_known = restored.keeps_leaves and not (leaves.unasked and restored.generation)
            self._saving.prepare(state, leaves if is_known else None)
        except UnsupportedState as error:  # the restore is done, here and on the other ranks; a save raises it
            _log.warning("what was restored cannot be saved: %s", error)
        return restored.step

    def load(self, step: int | None) -> LoadedCheckpoint | None:
        """A generation as plain values; see `FlashCheckpointer.load`."""
        self._storage.become_owner()
        loaded = load_values(self._storage.candidates(), RestoreRequest(step, allow_pickle=self._allow_pickle))
        self._storage.succession.note_restored(loaded.step if loaded else 0)
        return loaded

    def all_steps(self) -> list[int]:
        """The steps that can be restored; see `FlashCheckpointer.all_steps`."""
        storage = self._storage
        candidates = storage.candidates() if storage.attempt else storage.candidates_on_disk()
        return candidates.all_steps()[0]

    def _is_behind(self, generation: Generation) -> bool:
        """Whether any rank has saved a newer one in this attempt: not all have it, and its steps are made again."""
        newest = self._saving.newest
        return any(gather(self._ranks, newest is not None and generation < newest))

    def _go_back(self, start: Generation) -> None:
        """Have later saves follow a generation; all that is newer is left behind."""
        self._saving.background.wait()
        has_saved = any(gather(self._ranks, self._saving.newest is not None))
        self._storage.go_back(start, has_saved=has_saved)
        self._saving.begin_anew()
