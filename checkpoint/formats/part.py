"""A rank's part of a checkpoint on disk: a safetensors file, whose metadata hold the structure of the state. Pure.

Called by the checkpoint writer and readers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from hetstream.checkpoint.errors import DamagedCheckpoint, OtherRelease
from hetstream.checkpoint.formats import safetensors
from hetstream.checkpoint.formats.plan import FilePlan
from hetstream.checkpoint.record.layout import Entry, Layout
from hetstream.checkpoint.record.structure import Record

SUFFIX = ".safetensors"
# Where the file carries the structure.
STRUCTURE = "hetstream.structure"


def plan_part(entries: Sequence[Entry], record: Record, keys: Iterable[str] | None = None) -> FilePlan:
    """Lay a rank's file out.

    Args:
        entries: of the layout in memory.
        record: the structure in memory.
        keys: the top-level keys that this rank writes; None: all.

    Raises:
        DamagedCheckpoint: layout and structure do not belong together.
    """
    if keys is not None:
        record, indices = record.only(keys)
        entries = [entries[index] for index in indices]
    return safetensors.plan_file(entries, {"format": "pt", STRUCTURE: record.write().decode()})


def check_structure(layout: Layout, structure: bytes) -> None:
    """Refuse a state whose file nobody could read, before it is saved.

    Args:
        layout: in memory.
        structure: `Record.write` of the record in memory.

    Raises:
        UnsupportedState: it has too many tensors and values.
    """
    # JSON in JSON is at most three times as long, and a tensor is a line beside its name and shape.
    most_bytes = 3 * (len(structure) + len(layout.encoded)) + 128 * len(layout.entries)
    if most_bytes > safetensors.MAX_HEADER_BYTES:
        safetensors.plan_file(layout.entries, {"format": "pt", STRUCTURE: structure.decode()})


def structure_in(metadata: Mapping[str, str], name: str) -> Record:
    """The structure that a file carries along.

    Raises:
        DamagedCheckpoint: there is none, or it is damaged.
    """
    text = metadata.get(STRUCTURE)
    if text is None:
        raise DamagedCheckpoint(
            f"{name} holds no structure of a state: it was not written by hetstream. `hetstream ckpt convert` takes it"
        )
    try:
        return Record.read(text.encode())
    except OtherRelease as error:
        raise OtherRelease(f"{name}: {error}") from error
    except (DamagedCheckpoint, UnicodeEncodeError) as error:
        raise DamagedCheckpoint(f"{name}: {error}") from error
