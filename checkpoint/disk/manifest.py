"""What is said about one rank's file of a checkpoint, beside it as JSON: it exists only once the file is whole on disk.

Pure: bytes to `Manifest` and back, every field checked. A manifest carries a checksum of itself, so a torn or flipped
one is refused like a damaged file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

import msgspec

from hetstream.base import typed_json
from hetstream.checkpoint.errors import DamagedCheckpoint, OtherRelease
from hetstream.checkpoint.formats.part import SUFFIX
from hetstream.checkpoint.record.checksum import checksum
from hetstream.checkpoint.record.generation import Generation

VERSION = 1
# One checksum for each so many bytes, so that damage has a place.
CHUNK_BYTES = 64 << 20
# More ranks than any machine has; a file that says so takes no more memory than one that is right.
MAX_RANKS = 1_000_000
_NAME = re.compile(r"rank-(\d{5,7})-of-(\d{5,7})\.json")

_Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Positive = Annotated[int, msgspec.Meta(ge=1, le=(1 << 63) - 1)]
_Ranks = Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)]
_Digest = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{16}$")]


@dataclass(frozen=True)
class PartSpec:
    """Whose part of which record; what is known before a byte of it is written.

    Attributes:
        generation: the record.
        rank: whose part.
        world_size: how many parts there are.
        layout_digest: digest of the record's layout in memory.
        metrics: what `save` was given.
    """

    generation: Generation
    rank: int
    world_size: int
    layout_digest: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def file_name(self) -> str:
        """Name of the file that holds it."""
        return f"rank-{self.rank:05}-of-{self.world_size:05}{SUFFIX}"

    @property
    def manifest_name(self) -> str:
        """Name of the file that describes that file."""
        return f"rank-{self.rank:05}-of-{self.world_size:05}.json"

    def manifest(self, num_bytes: int, checksums: tuple[str, ...], time_s: float) -> Manifest:
        """What is to be said about the file, once it is on disk."""
        return Manifest(
            attempt=self.generation.attempt,
            step=self.generation.step,
            rank=self.rank,
            world_size=self.world_size,
            num_bytes=num_bytes,
            checksums=checksums,
            layout_digest=self.layout_digest,
            # They choose the best checkpoint, which one that is not finite never is. The record has all of them.
            metrics={name: float(value) for name, value in self.metrics.items() if math.isfinite(value)},
            time_s=time_s,
            repeat=self.generation.repeat or msgspec.UNSET,
        )


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rank's part of a checkpoint.

    Attributes:
        attempt: number of the start of the job that saved it.
        step: of training.
        rank: whose part this is.
        world_size: how many parts there are.
        num_bytes: size of the file.
        checksums: XXH3 of every `chunk_bytes` of the file, the last one of the rest.
        layout_digest: digest of the record's layout in memory.
        metrics: what `save` was given; rank 0's count.
        time_s: when the file was whole on disk, in seconds since 1970. Told to people, never compared.
        chunk_bytes: how many bytes one checksum covers.
        format: of the file.
        version: of this form.
        repeat: see `Generation`; not written where it is 0, so that the checksums of manifests from before it was there
            fit.
        itself: checksum of all of the above; "" in one that is not written yet.
    """

    attempt: _Positive
    step: _Count
    rank: _Count
    world_size: _Ranks
    num_bytes: _Positive
    checksums: tuple[_Digest, ...]
    layout_digest: str
    metrics: dict[str, float]
    time_s: float
    chunk_bytes: _Positive = CHUNK_BYTES
    format: Literal["safetensors"] = "safetensors"
    version: int = VERSION
    repeat: _Positive | msgspec.UnsetType = msgspec.UNSET
    itself: str = ""

    @property
    def part(self) -> PartSpec:
        """Whose part of which record this is."""
        generation = Generation(self.attempt, self.step, self.repeat or 0)
        return PartSpec(generation, self.rank, self.world_size, self.layout_digest, self.metrics)

    def to_json(self) -> bytes:
        """What `read_manifest` reads."""
        return msgspec.json.format(msgspec.json.encode(msgspec.structs.replace(self, itself=self._checksum()))) + b"\n"

    def problems(self) -> Iterator[str]:
        """What contradicts itself in it."""
        if self.itself != self._checksum():
            yield "its own checksum does not fit"
        if self.rank >= self.world_size:
            yield f"rank={self.rank} of world_size={self.world_size}"
        if len(self.checksums) != -(-self.num_bytes // self.chunk_bytes):
            yield f"{len(self.checksums)} checksums for {self.num_bytes} bytes"

    def _checksum(self) -> str:
        return f"{checksum(msgspec.json.encode(msgspec.structs.replace(self, itself=''))):016x}"


class _Versioned(msgspec.Struct, frozen=True):
    version: int = VERSION


def read_manifest(data: bytes, name: str) -> Manifest:
    """Read what `to_json` gave.

    Args:
        data: the file's content.
        name: its path, for messages.

    Raises:
        DamagedCheckpoint: it is torn or changed.
        OtherRelease: it is of another version.
    """
    try:
        # Only then the rest: it may have another form.
        version = typed_json.decode(data, _Versioned).version
        if version != VERSION:
            raise OtherRelease.of(name, version, VERSION)
        manifest = typed_json.decode(data, Manifest)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise DamagedCheckpoint(f"{name}: {len(data)} bytes that are no manifest: {error}") from error
    problems = list(manifest.problems())
    if problems:
        raise DamagedCheckpoint(f"{name} is damaged: {'; '.join(problems)}")
    return manifest


def is_manifest_name(name: str) -> bool:
    """Whether a file of this name is a manifest."""
    return ranks_of_name(name) is not None


def ranks_of_name(name: str) -> tuple[int, int] | None:
    """The rank and the number of ranks in a manifest's name; None if it is no such name."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    rank, world_size = int(match[1]), int(match[2])
    return (rank, world_size) if rank < world_size <= MAX_RANKS else None
