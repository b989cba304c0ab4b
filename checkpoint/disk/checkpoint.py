"""One checkpoint in a directory: what is known of it, and how its files are read while it is held.

Called by `directory.py`, which finds it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hetstream.base.files import Directory
from hetstream.checkpoint.disk.rank_file import Compare, Manifest, RankFile, compare_chunks, open_file
from hetstream.checkpoint.errors import (
    DamagedCheckpoint,
    OtherRelease,
)
from hetstream.checkpoint.record.layout import Generation

# In a checkpoint whose bytes were found to be wrong: retention does not count it as good.
DAMAGED = "damaged.txt"
MAX_REASON_BYTES = 64 << 10


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint.

    Attributes:
        path: its directory.
        generation: which record it is.
        manifests: one per rank, in order; empty if `problem` says that they cannot be read.
        problem: what is wrong with it; "" if nothing is known.
        is_of_other_release: the problem is that another release of hetstream wrote it.
    """

    path: Path
    generation: Generation
    manifests: tuple[Manifest, ...]
    problem: str = ""
    is_of_other_release: bool = False

    @property
    def world_size(self) -> int:
        """Ranks that saved it."""
        return len(self.manifests)

    @property
    def num_bytes(self) -> int:
        """Size of all ranks' files."""
        return sum(manifest.num_bytes for manifest in self.manifests)

    @property
    def metrics(self) -> Mapping[str, float]:
        """What rank 0's `save` was given."""
        return self.manifests[0].metrics if self.manifests else {}

    @property
    def time_s(self) -> float:
        """When the last part was whole on disk, in seconds since 1970."""
        return max((manifest.time_s for manifest in self.manifests), default=0.0)


@dataclass(frozen=True)
class HeldCheckpoint:
    """A checkpoint that is kept from being removed.

    Attributes:
        generation: which.
        place: its open directory.
        manifests: of the ranks that are wanted.
        read_only: see `CheckpointDirectory`; then it is not kept.
    """

    generation: Generation
    place: Directory
    manifests: Mapping[int, Manifest]
    read_only: bool = False

    def read(self, rank: int, *, num_threads: int = 1, is_compared: bool = False) -> RankFile:
        """Map a rank's file.

        Args:
            rank: one that was wanted.
            num_threads: how many compare it with its checksums.
            is_compared: `compare` has done so, here or in another process of this host.

        Raises:
            DamagedCheckpoint: the file is not what was written; the checkpoint is marked, so that the next one to ask
                passes it over.
        """
        with self._marking():
            compare: Compare = "nothing" if is_compared else "all"
            return open_file(self.place, self.manifests[rank], num_threads, compare=compare, copies=self.read_only)

    def compare(self, chunks: Iterable[tuple[int, Sequence[int]]], num_threads: int) -> None:
        """Compare some chunks of files with their checksums.

        Args:
            chunks: rank, and numbers of chunks of its file.
            num_threads: how many compare.

        Raises:
            DamagedCheckpoint: as from `read`.
        """
        with self._marking():
            for rank, numbers in chunks:
                compare_chunks(self.place, self.manifests[rank], numbers, num_threads)

    @contextlib.contextmanager
    def _marking(self) -> Iterator[None]:
        try:
            yield
        except DamagedCheckpoint as error:
            if not self.read_only and not isinstance(error, OtherRelease):
                mark(self.place.path.parent, self.generation, str(error))
            raise


@dataclass(frozen=True)
class Partial:
    """A checkpoint that is not committed, or not yet.

    Attributes:
        path: its directory.
        generation: which record it is.
        ranks: whose parts are there.
        world_size: how many there will be; None while there is none.
    """

    path: Path
    generation: Generation
    ranks: tuple[int, ...]
    world_size: int | None


def mark(directory: Path, generation: Generation, problem: str) -> None:
    """Write down what is wrong with a checkpoint, or that nothing is; nothing where the directory cannot be written to,
    or is not this user's alone."""
    with contextlib.suppress(OSError), Directory.open(directory, group_reads=True) as root:
        root.check_own()
        with root.enter(generation.directory_name) as place:
            if problem:
                place.write_whole(DAMAGED, problem.encode(errors="replace")[:MAX_REASON_BYTES])
            else:
                place.unlink(DAMAGED, missing_ok=True)
