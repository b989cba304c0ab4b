"""`CheckpointReader`: what an evaluation, or any program that does not train, reads checkpoints with.

It takes no lock, writes nothing, has no memory of its own and no checkpoint writer, so it can run beside the training
whose checkpoints it reads, as another user, on any number of ranks, and where the directory cannot be written to.
Nothing that it reads is kept from retention: a checkpoint that is removed meanwhile is not used, not even a part of it.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from operator import attrgetter
from typing import Any, Literal

from hetstream.checkpoint.disk.directory import Checkpoint, CheckpointDirectory
from hetstream.checkpoint.disk.rank_file import open_file
from hetstream.checkpoint.errors import NoCheckpoint
from hetstream.checkpoint.flash.candidates import RestoreCandidates, Sources
from hetstream.checkpoint.flash.destinations import LoadedCheckpoint, RestoreRequest, load_values, restore_state
from hetstream.checkpoint.flash.options import CheckpointOptions, requested_step
from hetstream.checkpoint.flash.ranks import Communicator, communicator, from_rank_0
from hetstream.checkpoint.flash.saving import Capture, cycles_held_off
from hetstream.checkpoint.policy import Best
from hetstream.checkpoint.record.lineage import Lineage
from hetstream.checkpoint.record.structure import RNG
from hetstream.checkpoint.record.tree import numbers_in
from hetstream.checkpoint.tensors.leaves import make_foreign


class CheckpointReader:
    """Reads the checkpoints of a directory; every rank makes one, and every rank calls each of its methods.

    Args:
        directory: of the checkpoints, as `FlashCheckpointer` was given it.
        ranks: how ranks talk; None: torch.distributed or Horovod, where it is initialised.
        allow_pickle: unpickle what was saved with allow_pickle=True. It may run anything: only what you trust.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        ranks: Communicator | None = None,
        allow_pickle: bool = False,
    ) -> None:
        self._directory = CheckpointDirectory(directory, read_only=True)
        self._ranks = ranks or communicator()
        self._allow_pickle = allow_pickle

    def all_steps(self) -> list[int]:
        """Return the steps on disk that `restore` and `load` can give, ascending, without those that were left
        behind.
        """
        return self._candidates().all_steps()[0]

    def latest_step(self) -> int | None:
        """Return the step that `restore` and `load` would give; None: there is none yet."""
        choice = self._candidates().newest()
        return choice.generation.step if choice.generation else None

    def metrics(self, *, step: int | None = None) -> dict[str, float]:
        """Return what `save` was given as metrics, without loading anything; those that are not finite are left out.

        Args:
            step: as for `restore`.

        Raises:
            NoCheckpoint: there is none, or none of this step.
        """
        return from_rank_0(self._ranks, lambda: dict(self._checkpoint(step).metrics), dict[str, float])

    def best_step(self, metric: str, mode: Literal["min", "max"] = "min") -> int | None:
        """Return the step whose metric is the smallest or the greatest, of equals the first; None: no checkpoint has
        it.

        Raises:
            OptionsError: the mode is another one.
        """
        Best(metric, mode)  # checks them

        def best() -> int | None:
            found = {step: self._checkpoint(step).metrics for step in self._on_disk()}
            values = {step: metrics[metric] for step, metrics in found.items() if metric in metrics}
            return (min if mode == "min" else max)(values, key=values.__getitem__, default=None)

        return from_rank_0(self._ranks, best, int | None)  # type: ignore[arg-type]

    def metadata(self, *, step: int | None = None) -> dict[str, Any]:
        """Return what was saved under the top-level keys that hold no tensor, such as the program's settings, without
        reading the tensors. With several ranks it is what rank 0 saved. Every rank reads for itself.

        Args:
            step: as for `restore`.

        Raises:
            NoCheckpoint: there is none, or none of this step.
            DamagedCheckpoint: it cannot be read.
        """
        generation = self._checkpoint(step).generation
        with (
            self._directory.hold(generation, [0]) as held,
            open_file(held.place, held.manifests[0], compare="structure", copies=True) as file,
        ):
            record = file.record
            with_tensors = [key for key, node in record.tree.items() if any(True for _ in numbers_in(node))]
            make = make_foreign(allow_pickle=self._allow_pickle)
            return record.decode(None, make, [*with_tensors, RNG])

    def _on_disk(self) -> dict[int, Checkpoint]:
        """Those that can be used, by step, in order; of several attempts at a step the newest."""
        lineage = self._directory.lineage()
        scanned = self._directory.scan()
        found = [each for each in scanned if not each.problem and lineage.holds(each.generation)]
        return {each.generation.step: each for each in sorted(found, key=attrgetter("generation"))}

    def _checkpoint(self, step: int | None) -> Checkpoint:
        wanted, found = requested_step(step), self._on_disk()
        if not found:
            raise self._nothing()
        if wanted is None:
            wanted = max(found)
        if wanted not in found:
            steps = ", ".join(map(str, found))
            raise NoCheckpoint(f"{self._directory.path} has no checkpoint of step {wanted} that can be used: {steps}")
        return found[wanted]

    def restore(self, state: MutableMapping[str, Any], *, step: int | None = None, strict: bool = True) -> int:
        """Bring a checkpoint into a state, in place. Random number generators stay as they are.

        Args:
            state: some or all of the top-level keys that were saved, such as `{"model": model}`; the others are not
                read.
            step: which; None: the newest, and if that is removed meanwhile, the one that is the newest then.
            strict: every key and tensor below these top-level keys must be on both sides; else what fits is restored,
                and the log says what not.

        Returns:
            The step.

        Raises:
            NoCheckpoint: there is none that can be used, or none of this step.
            StateMismatch: the layout of the state is another; every difference is named. Nothing is restored.
        """
        request = RestoreRequest(requested_step(step), strict, self._allow_pickle, only_given=True)
        with cycles_held_off():
            capture = Capture(
                (), self._ranks.rank, self._ranks.world_size, CheckpointOptions(allow_pickle=self._allow_pickle)
            )
            leaves = capture.flatten(state)
            restored = restore_state(self._candidates(), state, lambda: leaves, request)
        if restored.generation is None:
            raise self._nothing()
        return restored.generation.step

    def load(self, *, step: int | None = None) -> LoadedCheckpoint:
        """Return a checkpoint as plain values on the CPU.

        Args:
            step: as for `restore`.

        Raises:
            NoCheckpoint: there is none that can be used, or none of this step.
        """
        request = RestoreRequest(requested_step(step), allow_pickle=self._allow_pickle)
        loaded = load_values(self._candidates(), request)
        if loaded is None:
            raise self._nothing()
        return loaded

    def _candidates(self) -> RestoreCandidates:
        lineage = from_rank_0(self._ranks, self._directory.lineage, Lineage)
        return RestoreCandidates(self._ranks, Sources(self._directory), lineage)

    def _nothing(self) -> NoCheckpoint:
        path = self._directory.path
        return NoCheckpoint(f"{path} has no checkpoint. Name the directory that FlashCheckpointer was given: ls {path}")
