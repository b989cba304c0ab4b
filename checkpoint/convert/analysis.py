"""Checkpoints for analysis tools: data-side state and metadata to HDF5.

Called by `hetstream ckpt convert`. No torch: of the weights only names, dtypes and shapes go along.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hetstream.base.errors import OptionsError
from hetstream.base.files import Directory
from hetstream.checkpoint.convert.dcp import Source, choose
from hetstream.checkpoint.disk.checkpoint import Checkpoint
from hetstream.checkpoint.disk.directory import CheckpointDirectory
from hetstream.checkpoint.disk.history import replacing
from hetstream.checkpoint.disk.rank_file import Manifest, open_file
from hetstream.checkpoint.formats.hdf5 import RankState, SavedState, write_hdf5
from hetstream.checkpoint.record.layout import TensorSpec

# Top-level keys of a state that say where the data stands.
DATA_KEYS = ("loader",)


def saved_states(source: Source, keys: Sequence[str] | None = None, step: int | None = None) -> list[SavedState]:
    """Data-side state and metadata of checkpoints, oldest first.

    Args:
        source: a directory of checkpoints.
        keys: top-level keys whose state goes along; each is in one of the checkpoints at least. None: `DATA_KEYS`,
            where they are.
        step: checkpoints of this step alone.

    Raises:
        NoCheckpoint: there is none.
        OptionsError: no checkpoint has one of the keys.
        DamagedCheckpoint: a file is not what was written.
    """
    directory = CheckpointDirectory(source.path)
    chosen = [
        checkpoint
        for checkpoint in reversed(directory.checkpoints())
        if source.generation in (None, checkpoint.generation) and step in (None, checkpoint.generation.step)
    ]
    if not chosen:
        choose(source, step)
    there: dict[str, None] = {}
    saved = [_saved_state(directory, checkpoint, DATA_KEYS if keys is None else keys, there) for checkpoint in chosen]
    unknown = [key for key in keys or () if key not in there]
    if unknown:
        raise OptionsError(f"{source.path} has no state under {', '.join(unknown)}; it has {', '.join(there)}")
    return saved


def export_hdf5(saved: Sequence[SavedState], source: Source, target: Path) -> None:
    """Write what `saved_states` gave to a file, which must not exist; it appears whole or not at all."""
    with replacing(target) as temporary:
        write_hdf5(temporary, str(source.path), saved)


def _saved_state(
    directory: CheckpointDirectory, checkpoint: Checkpoint, keys: Sequence[str], there: dict[str, None]
) -> SavedState:
    with directory.hold(checkpoint.generation) as held:
        ranks = [_rank_state(held.place, manifest, keys, there) for manifest in held.manifests.values()]
    return SavedState(
        checkpoint.generation, checkpoint.world_size, checkpoint.num_bytes, checkpoint.time_s, checkpoint.metrics, ranks
    )


def _rank_state(place: Directory, manifest: Manifest, keys: Sequence[str], there: dict[str, None]) -> RankState:
    with open_file(place, manifest, compare="structure") as file:
        there.update(dict.fromkeys(file.record.tree))
        table = [TensorSpec(entry.name, entry.dtype, entry.shape) for entry in file.entries]
        record, indices = file.record.only([key for key in keys if key in file.record.tree])
        if indices:
            file.check()
        values = [bytes(file.bytes_of(file.entries[index])) for index in indices]
        return RankState(manifest.rank, table, record, [table[index] for index in indices], values)
