"""Where a record is restored from: a slot in memory, or the files of a checkpoint, as the same `StoredPart`s.

Called by the checkpointer. What it gives may lie in shared memory or in a file, and only until it is closed.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hetstream.base.errors import HetstreamError
from hetstream.checkpoint.disk.directory import CheckpointDirectory, files_of_host, share_of
from hetstream.checkpoint.disk.rank_file import RankFile
from hetstream.checkpoint.errors import Damaged, DamagedSegment, NoCheckpoint
from hetstream.checkpoint.flash.host import Host
from hetstream.checkpoint.flash.sources import Payload, StoredPart, TensorStore, owned
from hetstream.checkpoint.memory.segment import Header, Segment, split_metadata
from hetstream.checkpoint.memory.store import Store
from hetstream.checkpoint.memory.store_files import StoreFiles
from hetstream.checkpoint.record.agreement import OfferedRecord
from hetstream.checkpoint.record.layout import Generation, Layout, from_json
from hetstream.checkpoint.record.structure import Record, TensorRef, read_origin
from hetstream.checkpoint.record.tree import Foreign, Node
from hetstream.checkpoint.tensors.leaves import make_foreign
from hetstream.checkpoint.tensors.shards import Whole, names_of, open_parts

# One waits for the disk while another compares; many ranks of a host read at the same time.
_MAX_READERS = 8


class MemorySource:
    """The generations in a rank's own memory.

    Args:
        store: of the rank.
        host: whose other ranks may have what is equal on all.

    Attributes:
        host: see above; another one when a store of it has been made anew.
    """

    def __init__(self, store: Store, host: Host) -> None:
        self._store = store
        self.host = host
        self._read: tuple[Header, Layout, Record] | None = None

    def offered(self) -> tuple[list[OfferedRecord], list[str]]:
        """What this rank can restore from its memory, and what is there and cannot be used, in words."""
        found, problems = [], []
        for content in self._store.held():
            try:
                with self._store.read(content) as segment:
                    origin = read_origin(split_metadata(segment.metadata)[1])
            except Damaged as error:
                problems.append(str(error))
            else:
                if origin.rank == self._store.identity.rank:
                    found.append(OfferedRecord(content.header.generation, origin.world_size, origin.shared_elsewhere))
        return found, problems

    def read_ahead(self) -> None:
        """Read what the newest generation says of itself, for a thread that runs while the program builds its model."""
        content = next(iter(self._store.held()), None)
        if content:
            with contextlib.suppress(Damaged, OSError), self._store.read(content) as segment:
                self._read = segment.header, *_described(segment)

    @contextlib.contextmanager
    def open(self, generation: Generation, sharer: int | None = None) -> Iterator[list[StoredPart]]:
        """A generation; it is not overwritten meanwhile.

        Args:
            generation: which.
            sharer: the rank of this host that has the shared keys for this one.

        Raises:
            NoCheckpoint: it is not there.
            Damaged: it is not what was published.
        """
        content = next((found for found in self._store.held() if found.header.generation == generation), None)
        if content is None:
            raise NoCheckpoint(f"{self._store.path} has no {generation} any more")
        with contextlib.ExitStack() as held:
            segment = held.enter_context(self._store.read(content))
            # Equal headers have equal checksums of what was read, and `Store.read` has just compared them.
            ahead, self._read = self._read, None
            layout, record = ahead[1:] if ahead and ahead[0] == segment.header else _described(segment)
            parts = [StoredPart(record, TensorStore(Payload(layout.entries, segment.payload)))]
            if sharer is not None:
                parts.append(held.enter_context(_open_shared(StoreFiles(self.host.stores[sharer]), generation)))
            yield parts


@contextlib.contextmanager
def _open_shared(files: StoreFiles, generation: Generation) -> Iterator[StoredPart]:
    """The shared keys in the store of another rank, which may run or not."""
    try:
        files.check_owner()
    except HetstreamError as error:
        raise NoCheckpoint(f"{generation}: what is equal on all ranks is out of reach: {error}") from error
    content = next((found for found in files.complete() if found.header.generation == generation), None)
    if content is None:
        raise NoCheckpoint(f"{files.path} has no {generation} any more, which holds what is equal on all ranks")
    with content.open() as segment:
        layout, record = _described(segment)
        shared, indices = record.only(record.shared)
        yield StoredPart(shared, TensorStore(Payload([layout.entries[index] for index in indices], segment.payload)))


def _described(segment: Segment) -> tuple[Layout, Record]:
    layout_json, structure = split_metadata(segment.metadata)
    layout = from_json(layout_json)
    payload_bytes = segment.header.payload_bytes
    if layout.digest != segment.header.layout_digest or layout.payload_bytes > payload_bytes:
        raise DamagedSegment(f"{segment.path}: its layout is not that of the {payload_bytes} bytes of its payload")
    return layout, Record.read(structure)


class DiskSource:
    """The files of a checkpoint that one rank restores from. All ranks of a host compare them with their checksums
    together: `compare` on each of them, then `open`. The checkpoint is not removed meanwhile.

    Where the directory is read-only, nothing keeps the checkpoint, and each rank compares what it needs by itself.

    Args:
        directory: of checkpoints.
        generation: which.
        rank: of now. Where fewer ranks saved, it takes the part of one of those.
        num_ranks: how many there are now.
        num_saved: how many saved.
        readers: the ranks of this host that restore from disk, ascending.
        held: lets the checkpoint and its files go.
    """

    def __init__(
        self,
        directory: CheckpointDirectory,
        generation: Generation,
        rank: int,
        num_ranks: int,
        num_saved: int,
        readers: Sequence[int],
        held: contextlib.ExitStack,
    ) -> None:
        self._directory = directory
        self._generation = generation
        self._rank = rank
        self._own = rank % num_saved
        self._readers = readers
        self._held = held
        # What may be removed meanwhile has to be compared while it is copied, by each rank for itself.
        self._has_all = num_ranks != num_saved and not directory.read_only
        self._is_alone = directory.read_only or (len(readers) == 1 and num_ranks == num_saved)
        self._files = sorted({0, self._own}) if self._is_alone else files_of_host(readers, num_ranks, num_saved)
        self._checkpoint = held.enter_context(directory.hold(generation, self._files))

    def compare(self) -> None:
        """Compare this rank's share.

        Raises:
            Damaged: it is not what was written.
        """
        if not self._is_alone:
            counts = [(file, len(self._checkpoint.manifests[file].checksums)) for file in self._files]
            share = share_of(counts, self._readers.index(self._rank), len(self._readers))
            self._checkpoint.compare(share, _num_threads())

    def open(self) -> list[StoredPart]:
        """What this rank needs, when all have compared theirs.

        Raises:
            Damaged: it is not what was written.
        """
        own = self._open(self._own)
        whole_of = _wholes(self._directory, self._generation, own.record, self._held, is_compared=self._has_all)
        parts = [_part(own, own.record, whole_of=whole_of)]
        if self._own != 0:
            first = self._open(0)
            shared, indices = first.record.only(first.record.shared)
            parts.append(_part(first, shared, indices))
        return parts

    def _open(self, rank: int) -> RankFile:
        file = self._checkpoint.read(rank, num_threads=_num_threads(), is_compared=not self._is_alone)
        return self._held.enter_context(file)


def _num_threads() -> int:
    return min(_MAX_READERS, max(2, len(os.sched_getaffinity(0))))


WholeOf = Callable[[TensorRef], Whole | None]


def _wholes(
    directory: CheckpointDirectory,
    generation: Generation,
    record: Record,
    held: contextlib.ExitStack,
    *,
    is_compared: bool,
) -> WholeOf:
    """What all ranks saved of the sharded tensors of one; their files are opened when the first is asked for."""

    @functools.cache
    def found() -> dict[TensorRef, Whole]:
        path = directory.path / generation.directory_name
        parts = open_parts(path, read_only=directory.read_only, is_compared=is_compared)
        wholes = held.enter_context(parts).wholes
        names = names_of(record)
        return {
            ref: wholes[names[index]]
            for index, ref in enumerate(record.tensors)
            if ref.shard and names[index] in wholes
        }

    return lambda ref: found().get(ref)


def _part(
    file: RankFile, record: Record, indices: list[int] | None = None, whole_of: WholeOf = lambda _ref: None
) -> StoredPart:
    entries = file.entries if indices is None else [file.entries[index] for index in indices]
    return StoredPart(record, TensorStore(Payload(entries, file.data), whole_of=whole_of))


# Whether a rank's file can be restored: it is decoded as a restore decodes it. Called by `hetstream ckpt verify`.


def check_readable(file: RankFile) -> None:
    """Decode all that a restore decodes; its bytes are those that were written, and may say nothing sensible. What was
    pickled is not unpickled: that runs what it says.

    Raises:
        DamagedCheckpoint: it breaks its form.
    """
    make = make_foreign(allow_pickle=False)

    def foreign(tag: str, body: Node, again: Callable[[Node], Any]) -> Any:
        return Foreign(tag, body) if tag == "$pickle" else make(tag, body, lambda node: owned(again(node)))

    file.record.decode(TensorStore(Payload(file.entries, file.data)).stored, foreign)
