"""Where a record is restored from: a slot in memory, or the files of a checkpoint, as the same `Part`s.

Called by the checkpointer. What it gives may lie in shared memory or in a file, and only until it is closed.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator

from checkpoint.agreement import Held
from checkpoint.directory import CheckpointDirectory
from checkpoint.errors import Damaged, DamagedSegment, NoCheckpoint
from checkpoint.flash.payload import Payload
from checkpoint.flash.restore import Part, Stock
from checkpoint.flash.shards import Whole, names_of, open_parts
from checkpoint.generation import Generation
from checkpoint.layout import Layout, from_json
from checkpoint.rank_file import RankFile
from checkpoint.segment import Header, Segment, split_metadata
from checkpoint.store import Store
from checkpoint.structure import Record, TensorRef, read_origin

# One waits for the disk while another compares; many ranks of a host read at the same time.
_MAX_READERS = 8


class Memory:
    """The generations in a rank's own memory.

    Args:
        store: of the rank.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._read: tuple[Header, Layout, Record] | None = None

    def offered(self) -> tuple[list[Held], list[str]]:
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
                    found.append(Held(content.header.generation, origin.world_size))
        return found, problems

    def read_ahead(self) -> None:
        """Read what the newest generation says of itself, for a thread that runs while the program builds its model."""
        content = next(iter(self._store.held()), None)
        if content:
            with contextlib.suppress(Damaged, OSError), self._store.read(content) as segment:
                self._read = segment.header, *_described(segment)

    @contextlib.contextmanager
    def open(self, generation: Generation) -> Iterator[list[Part]]:
        """A generation; it is not overwritten meanwhile.

        Raises:
            NoCheckpoint: it is not there.
            Damaged: it is not what was published.
        """
        content = next((one for one in self._store.held() if one.header.generation == generation), None)
        if content is None:
            raise NoCheckpoint(f"{self._store.path} has no {generation} any more")
        with self._store.read(content) as segment:
            # Equal headers have equal checksums of what was read, and `Store.read` has just compared them.
            ahead, self._read = self._read, None
            layout, record = ahead[1:] if ahead and ahead[0] == segment.header else _described(segment)
            yield [Part(record, Stock(Payload(layout.entries, segment.payload)))]


def _described(segment: Segment) -> tuple[Layout, Record]:
    layout_json, structure = split_metadata(segment.metadata)
    layout = from_json(layout_json)
    payload_bytes = segment.header.payload_bytes
    if layout.digest != segment.header.layout_digest or layout.payload_bytes > payload_bytes:
        raise DamagedSegment(f"{segment.path}: its layout is not that of the {payload_bytes} bytes of its payload")
    return layout, Record.read(structure)


@contextlib.contextmanager
def open_disk(directory: CheckpointDirectory, generation: Generation, rank: int) -> Iterator[list[Part]]:
    """What one rank needs of a checkpoint, all of it compared with its checksums; it is not removed meanwhile.

    Args:
        rank: of now. Where fewer ranks saved, it takes the part of one of those.

    Raises:
        NoCheckpoint: it is not there.
        Damaged: it is not what was written.
    """
    with contextlib.ExitStack() as held:
        world_size = held.enter_context(directory.hold(generation)).checkpoint.world_size
        owner = rank % world_size
        num_threads = min(_MAX_READERS, max(2, len(os.sched_getaffinity(0))))
        own = held.enter_context(directory.read(generation, owner, num_threads=num_threads))
        whole_of = _wholes(directory, generation, own.record, held)
        parts = [_part(own, own.record, whole_of=whole_of)]
        if owner != 0:
            first = held.enter_context(directory.read(generation, 0, num_threads=num_threads))
            shared, indices = first.record.only(first.record.shared)
            parts.append(_part(first, shared, indices))
        yield parts


WholeOf = Callable[[TensorRef], Whole | None]


def _wholes(
    directory: CheckpointDirectory, generation: Generation, record: Record, held: contextlib.ExitStack
) -> WholeOf:
    """What all ranks saved of the sharded tensors of one; their files are opened when the first is asked for."""

    @functools.cache
    def found() -> dict[TensorRef, Whole]:
        path = directory.path / generation.directory_name
        wholes = held.enter_context(open_parts(path, read_only=directory.read_only)).wholes
        names = names_of(record)
        return {
            ref: wholes[names[number]]
            for number, ref in enumerate(record.tensors)
            if ref.shard and names[number] in wholes
        }

    return lambda ref: found().get(ref)


def _part(
    file: RankFile, record: Record, indices: list[int] | None = None, whole_of: WholeOf = lambda _ref: None
) -> Part:
    entries = file.entries if indices is None else [file.entries[index] for index in indices]
    return Part(record, Stock(Payload(entries, file.data), whole_of=whole_of))
