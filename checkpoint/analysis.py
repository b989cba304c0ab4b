"""Checkpoints for analysis tools: data-side state and metadata to HDF5, and back to a state to start a loader from.

Called by `hetstream ckpt convert`. No torch: of the weights only names, dtypes and shapes go along.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from pathlib import Path

import msgspec

from checkpoint.commit import commit, write_part
from checkpoint.conversion import Source, attempt_on, choose
from checkpoint.directory import Checkpoint, CheckpointDirectory
from checkpoint.errors import NoCheckpoint
from checkpoint.files import replacing
from checkpoint.formats.hdf5 import RankState, SavedState, read_hdf5, write_hdf5
from checkpoint.formats.part import Format, plan_part
from checkpoint.generation import Generation
from checkpoint.layout import TensorSpec, lay_out
from checkpoint.manifest import Manifest, Part
from checkpoint.rank_file import open_file

# Top-level keys of a state that say where the data stands.
DATA_KEYS = ("loader",)


def export_hdf5(source: Source, target: Path, keys: Sequence[str] = DATA_KEYS, step: int | None = None) -> list[str]:
    """Write data-side state and metadata of checkpoints to an HDF5 file.

    Args:
        source: a directory of checkpoints.
        target: the file; must not exist.
        keys: top-level keys whose state goes along; those that a checkpoint lacks are left out.
        step: checkpoints of this step alone.

    Returns:
        Names of the checkpoints, oldest first.

    Raises:
        NoCheckpoint: there is none.
        DamagedCheckpoint: a file is not what was written.
    """
    directory = CheckpointDirectory(source.path)
    chosen = [
        one
        for one in reversed(directory.checkpoints())
        if source.generation in (None, one.generation) and step in (None, one.generation.step)
    ]
    if not chosen:
        choose(source, step)
    saved = [_saved_state(directory, one, keys) for one in chosen]
    with replacing(target) as temporary:
        write_hdf5(temporary, str(source.path), saved)
    return [one.path.name for one in chosen]


def _saved_state(directory: CheckpointDirectory, one: Checkpoint, keys: Sequence[str]) -> SavedState:
    with directory.hold(one.generation):
        ranks = [_rank_state(one.path, manifest, keys) for manifest in one.manifests]
    return SavedState(one.generation, one.world_size, one.num_bytes, one.time_s, one.metrics, ranks)


def _rank_state(path: Path, manifest: Manifest, keys: Sequence[str]) -> RankState:
    with open_file(path / manifest.part.file_name, manifest, tensors=False) as file:
        table = [TensorSpec(entry.name, entry.dtype, entry.shape) for entry in file.entries]
        record, indices = file.record.only([key for key in keys if key in file.record.tree])
        if indices:
            file.check()
        values = [bytes(file.bytes_of(file.entries[index])) for index in indices]
        return RankState(manifest.rank, table, record, [table[index] for index in indices], values)


def import_hdf5(
    source: Source, target: Path, form: Format = "safetensors", step: int | None = None, identity: str = "local"
) -> Path:
    """Make a checkpoint of what `export_hdf5` wrote: its data-side keys, for as many ranks as saved them.

    Args:
        source: the file.
        target: directory of checkpoints; made if it is missing.
        form: of the ranks' files.
        step: which; None: the newest.
        identity: job id, for the directory's history.

    Returns:
        The checkpoint's directory.

    Raises:
        NoCheckpoint: the file holds none of this step.
        DirectoryInUse: a running job has the directory.
    """
    found = sorted(read_hdf5(source.path), key=lambda one: one.generation, reverse=True)
    one = next((one for one in found if step in (None, one.generation.step)), None)
    if one is None:
        steps = ", ".join(str(one.generation.step) for one in found) or "none"
        raise NoCheckpoint(f"{source.path} holds no checkpoint" + (f" of step {step}; it has {steps}" if found else ""))
    with attempt_on(target, identity) as attempt:
        generation = Generation(attempt, one.generation.step)
        for rank in one.ranks:
            layout = lay_out(rank.specs)
            payload = memoryview(mmap.mmap(-1, max(layout.payload_bytes, 1)))
            record = msgspec.structs.replace(rank.record, rank=rank.rank, world_size=len(one.ranks), format=form)
            for entry, data in zip(layout.entries, rank.values, strict=True):
                payload[entry.offset : entry.offset + entry.num_bytes] = data
            part = Part(generation, rank.rank, len(one.ranks), layout.digest, one.metrics, form)
            write_part(target, part, plan_part(form, layout.entries, record, payload), payload)
        commit(target, generation, len(one.ranks))
    return target / generation.directory_name
