"""Replicas in the store of the rank whose checkpoint writer keeps them: two slot files for each rank that it keeps them
of.

    STORE/replica-1-0, STORE/replica-1-1    generations of rank 1, as `segment.py` describes them

A new one overwrites the older, so a transfer that breaks off costs nothing that was whole. They go with the store.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator

from hetstream.checkpoint.errors import CheckpointError, DamagedSegment, ReplicaError
from hetstream.checkpoint.faults import reach
from hetstream.checkpoint.memory.segment import Segment, check_memory, check_room, file_bytes, split_metadata
from hetstream.checkpoint.memory.store_files import SlotContent, StoreFiles
from hetstream.checkpoint.record.agreement import Replica
from hetstream.checkpoint.record.layout import from_json
from hetstream.checkpoint.record.structure import Origin, Record, read_origin

NUM_SLOTS = 2


def make_slot(files: StoreFiles, rank: int, payload_bytes: int, metadata_bytes: int) -> Segment:
    """Where the next generation of a rank is to be written; the newest one stays.

    Raises:
        SharedMemoryFull: there is no room.
        OSError: the store is gone.
    """
    whole = files.replicas_of(rank)
    kept = whole[0].path if whole else None
    path = next(
        candidate for candidate in (files.replica(rank, number) for number in range(NUM_SLOTS)) if candidate != kept
    )
    try:
        segment = Segment.open(path, writable=True)
        header = segment.header
        if header.payload_capacity_bytes >= payload_bytes and header.metadata_capacity_bytes >= metadata_bytes:
            return segment
        segment.close()
    except DamagedSegment:
        pass  # there is none, or it is torn: a new one takes its place
    reach("replica.allocating")
    path.unlink(missing_ok=True)
    num_bytes = file_bytes(payload_bytes, metadata_bytes)
    check_room(files.path, num_bytes)
    check_memory(files.path, num_bytes, files.promised_bytes() + files.outstanding_bytes())
    made = files.path / f"new-{path.name}"
    made.unlink(missing_ok=True)
    segment = Segment.create(made, payload_bytes, metadata_bytes)
    made.rename(path)
    segment.path = path
    return segment


def forget_others(files: StoreFiles, ranks: Collection[int]) -> None:
    """Free the replicas of all ranks but some: their peer is another now."""
    for path in files.replicas():
        if files.rank_of_replica(path) not in ranks:
            path.unlink(missing_ok=True)


def check_record(metadata: bytes, rank: int, layout_digest: str, payload_bytes: int) -> None:
    """Refuse what is not a rank's record.

    Raises:
        CheckpointError: it is not.
    """
    layout_json, structure = split_metadata(metadata)
    layout, record = from_json(layout_json), Record.read(structure)
    if layout.digest != layout_digest or layout.payload_bytes > payload_bytes or record.rank != rank:
        raise ReplicaError(f"what came is not the record of rank {rank} that was announced, but of rank {record.rank}")


def on_this_host(files: StoreFiles, rank: int) -> list[SlotContent]:
    """All that this host's memory has of a rank, in any store of the same job and directory; newest first."""
    found: list[SlotContent] = []
    for store in files.siblings():
        found += store.replicas_of(rank)
        found += store.complete() if store.holder().rank == rank else []
    return sorted(found, key=lambda content: content.age, reverse=True)


def for_others(files: StoreFiles) -> Iterator[Replica]:
    """What this host could give to other ranks.

    The replicas in this store; and all that is in stores of dead trainers, whose ranks may run elsewhere now.
    """
    for store in files.siblings():
        is_own = store.path == files.path
        if not is_own and store.is_trainer_alive():
            continue  # it speaks for itself
        held = [(store.rank_of_replica(path), SlotContent.of(path)) for path in store.replicas()]
        if not is_own:
            held += [(store.holder().rank, content) for content in store.complete()]
        for rank, content in held:
            # What is damaged, or overwritten just now, is nothing to give.
            with contextlib.suppress(CheckpointError):
                if content:
                    origin = _origin(content, rank)
                    yield Replica(rank, content.header.generation, origin.world_size, origin.shared_elsewhere)


def _origin(content: SlotContent, rank: int) -> Origin:
    with Segment.open(content.path) as segment:
        origin = read_origin(split_metadata(segment.metadata)[1])
    if origin.rank != rank:
        raise ReplicaError(f"{content.path} holds a record of rank {origin.rank}, not {rank}")
    return origin
