"""What the coordinator and the agents of a GPU's jobs tell each other while the jobs run. Pure.

Both are flat records of whole numbers, because they lie in pages of shared memory (`Page`). Times are nanoseconds
of CLOCK_MONOTONIC, which all processes of a host share.
"""

from __future__ import annotations

import contextlib
import enum
import fcntl
import mmap
import os
import re
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Generic, TypeVar

from hetstream.hetjob.errors import GpuJobRefused

FULL_SHARE = 1000
NO_LIMIT = 2**62


class JobClass(enum.Enum):
    """What a job may expect of its GPU."""

    GUARANTEED = "guaranteed"
    OPPORTUNISTIC = "opportunistic"


class GpuUse(enum.IntEnum):
    """Whether a job may use the GPU now."""

    PAUSE = 0  # no launch, wherever the job is
    FINISH = 1  # go on to the next boundary, or to `meet_at`, and pause there: memory is given back at boundaries
    RUN = 2


@dataclass(frozen=True)
class Order:
    """What one job is to do; the coordinator writes it, the job can only read it.

    Attributes:
        valid_until_ns: when it lapses. An opportunistic job pauses then, a guaranteed one is bound by nothing.
        verdict: of `GpuUse`.
        limit_bytes: most memory of the GPU that the job may hold; `NO_LIMIT`: all that there is.
        share: of the time in which it may launch while the GPU is in use by others, in thousandths.
        open_until_ns: others leave the GPU idle, which may be used without regard to the share until then.
        idle_since_ns: since when they leave it idle; what the guaranteed job has begun since then closes it.
        meet_at: number of the boundary at which all processes of the job wait for each other: none begins another
            mini-batch there, and who has ended fewer goes on. 0: there is none.
    """

    valid_until_ns: int = 0
    verdict: int = GpuUse.PAUSE
    limit_bytes: int = NO_LIMIT
    share: int = 0
    open_until_ns: int = 0
    idle_since_ns: int = 0
    meet_at: int = 0


@dataclass(frozen=True)
class Work:
    """That the guaranteed job has work for the GPU; its agent writes it, and the agents of the others read it.

    The coordinator says the same, a moment later: it has to wake up for it. What stands here can only end what an order
    allows, so whoever writes nonsense keeps others from a GPU that is his own. When it is his no more, nobody reads his
    page any longer.

    Attributes:
        since_ns: when it launched first after its last boundary.
    """

    since_ns: int = 0


@dataclass(frozen=True)
class Statistics:
    """What one job says of itself; its agent writes it.

    Attributes:
        updated_ns: when.
        boundaries: mini-batches that have ended.
        boundary_ns: when the last of them ended; 0: none has.
        mini_batch_ns: how long the last one took, from boundary to boundary.
        gap_ns: how long the GPU was idle after the boundary before it, until the first launch.
        is_idle: 1 from a boundary to the first launch after it.
        held_bytes: memory of the GPU that the process holds, cached or in use.
        peak_bytes: most that was in use in the last mini-batch, on the GPU and on the host together.
        host_bytes: most that the last mini-batch had on the host for want of memory of the GPU.
        host_capacity_bytes: memory of the host that may stand in; 0: none, so too low a limit would end the job.
        limit_bytes: the limit that the process keeps to.
        paused_ns: how long it was held up in all.
    """

    updated_ns: int = 0
    boundaries: int = 0
    boundary_ns: int = 0
    mini_batch_ns: int = 0
    gap_ns: int = 0
    is_idle: int = 0
    held_bytes: int = 0
    peak_bytes: int = 0
    host_bytes: int = 0
    host_capacity_bytes: int = 0
    limit_bytes: int = NO_LIMIT
    paused_ns: int = 0


# Records in shared memory that one process writes and another reads, at any time, without a lock.
#
# A page has two places. The writer fills them in turn, so a writer that dies in the middle leaves the record before. A
# record has its number and a checksum: the reader takes the newest whole one, and what is torn, or was overwritten by
# somebody else, counts as nothing. Pages are memory files without a name (memfd_create(2)), passed as descriptors.

T = TypeVar("T", Order, Statistics, Work)

# Grows with each change of a record's fields, or of the introduction's; a job and a coordinator of two versions refuse
# each other.
VERSION = 6
SIZE_BYTES = 4096
_PLACE_BYTES = SIZE_BYTES // 2
_HEAD = struct.Struct("<4sIQ")  # magic, version, number of the record
_CHECKSUM = struct.Struct("<I")
_MAGIC = {Order: b"HGOR", Statistics: b"HGST", Work: b"HGWK"}
# linux/fcntl.h, since 5.1; Python has no name for it before 3.13.
_F_SEAL_FUTURE_WRITE = 0x0010
_FIXED_SIZE = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class Page(Generic[T]):
    """A mapped page of one kind of record.

    Args:
        descriptor: of the memory file; it is not needed afterwards.
        kind: of the record.
        writable: whether this process writes it.
    """

    def __init__(self, descriptor: int, kind: type[T], *, writable: bool) -> None:
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self._memory = mmap.mmap(descriptor, SIZE_BYTES, mmap.MAP_SHARED, protection)
        self._kind: type[T] = kind
        self._names = [field.name for field in fields(kind)]
        self._body = struct.Struct(f"<{len(self._names)}q")
        self._length = _HEAD.size + self._body.size + _CHECKSUM.size
        self._number = 0
        self._seen: tuple[bytes, bytes] | None = None
        self._newest: T | None = None

    def write(self, record: T) -> None:
        """Make this the newest record."""
        self._number += 1
        content = _HEAD.pack(_MAGIC[self._kind], VERSION, self._number) + self._body.pack(
            *[getattr(record, name) for name in self._names]
        )
        content += _CHECKSUM.pack(zlib.crc32(content))
        start = self._number % 2 * _PLACE_BYTES
        self._memory[start : start + len(content)] = content

    def read(self) -> T | None:
        """Return the newest whole record; None if there is none. What was read before is not checked again."""
        seen = self._memory[: self._length], self._memory[_PLACE_BYTES : _PLACE_BYTES + self._length]
        if seen != self._seen:
            found = [place for place in map(self._record_of, seen) if place is not None]
            self._newest = max(found, key=lambda place: place[0])[1] if found else None
            self._seen = seen
        return self._newest

    def close(self) -> None:
        """Unmap it."""
        self._memory.close()

    def _record_of(self, content: bytes) -> tuple[int, T] | None:
        checked = content[: -_CHECKSUM.size]
        if _CHECKSUM.unpack_from(content, len(checked))[0] != zlib.crc32(checked):
            return None
        magic, version, number = _HEAD.unpack_from(content)
        if magic != _MAGIC[self._kind] or version != VERSION:
            return None
        return number, self._kind(*self._body.unpack_from(content, _HEAD.size))


def make_orders() -> tuple[Page[Order], int]:
    """Return a page that this process writes, and a descriptor for the job, which can only read it.

    The mapping is made first. Then the file is sealed against any further writing, where the kernel can do that, and
    the descriptor is opened anew for reading only: that alone keeps out jobs of other users.
    """
    descriptor = os.memfd_create("hetstream-gpu-orders", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, SIZE_BYTES)
        page = Page(descriptor, Order, writable=True)
        os.fchmod(descriptor, 0o400)
        with contextlib.suppress(OSError):  # Linux before 5.1
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _FIXED_SIZE | fcntl.F_SEAL_SEAL)
        return page, os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(descriptor)


def make_statistics() -> tuple[Page[Statistics], int]:
    """Return a page that this process reads, and a descriptor for the job, which writes it. Nobody can change
    its size.
    """
    descriptor = _written_by_jobs("hetstream-gpu-statistics")
    try:
        return Page(descriptor, Statistics, writable=False), descriptor
    except OSError:
        os.close(descriptor)
        raise


def make_work() -> tuple[int, int]:
    """Return two descriptors of a page: one for the guaranteed job, which writes it, and one for the others, which read
    it.

    Whoever has the first can keep it for ever, so each guaranteed job has a page of its own.
    """
    descriptor = _written_by_jobs("hetstream-gpu-work")
    try:
        os.fchmod(descriptor, 0o400)
        return descriptor, os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        os.close(descriptor)
        raise


def _written_by_jobs(name: str) -> int:
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, SIZE_BYTES)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _FIXED_SIZE | fcntl.F_SEAL_SEAL)
        return descriptor
    except OSError:
        os.close(descriptor)
        raise


# Which of a job's GPUs one of its processes uses, and which rank of the job it is: by its environment. Pure.
#
# Slurm's prolog names all GPUs that a job has on the node; a launcher says which of its processes this is. On a real
# GPU the driver knows better which one a process uses (`gpu/cuda.py`); what stands here counts where it does not
# say.

# Who numbers the processes of a node; the innermost launcher comes first: torchrun may run within srun.
_NUMBERED_BY = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")
_COUNTED_BY = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")
# Together these variables tell the launches apart that a job runs at the same time.
_LAUNCHES = ("SLURM_STEP_ID", "HETSTREAM_GPU_JOB", "TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")
# What Slurm says of a step's tasks: "2(x3),1" are 2 on each of three nodes, and 1 on another one.
_TASKS = re.compile(r"(\d{1,6})(?:\(x(\d{1,6})\))?", re.ASCII)
_MOST_LAUNCH_CHARACTERS = 200


@dataclass(frozen=True)
class LocalRank:
    """One process among those of its launch on this node.

    Attributes:
        number: from 0; without a launcher 0, as PyTorch takes the first GPU.
        count: how many there are; 0: nobody says.
        launch: another text for each launch of the job.
        said_by: the variable that has the number; empty: none.
    """

    number: int = 0
    count: int = 0
    launch: str = ""
    said_by: str = ""


def local_rank(environ: Mapping[str, str]) -> LocalRank:
    """Return what the launcher says of this process."""
    said_by = next((name for name in _NUMBERED_BY if _number(environ.get(name)) is not None), "")
    counts = [count for name in _COUNTED_BY if (count := _number(environ.get(name)))]
    if said_by == "SLURM_LOCALID" and not counts:
        counts = [_tasks_here(environ)]
    launch = "/".join(environ.get(name, "") for name in _LAUNCHES)
    return LocalRank(
        _number(environ.get(said_by)) or 0, counts[0] if counts else 0, launch[:_MOST_LAUNCH_CHARACTERS], said_by
    )


def gpu_of(gpus: Sequence[str], numbers: Sequence[str], rank: LocalRank, visible: str | None) -> str:
    """Return the GPU of one process.

    Args:
        gpus: that the job has on this node, as the coordinator calls them.
        numbers: of these GPUs, in the same order; empty: not known.
        rank: of the process.
        visible: its CUDA_VISIBLE_DEVICES; None: not set.

    Returns:
        Its GPU; empty if the process lets itself see none.

    Raises:
        GpuJobRefused: it names a GPU that the job has not, or there are more processes than GPUs.
    """
    if len(gpus) == 1:
        return gpus[0]
    seen = list(gpus) if visible is None else _visible(visible, gpus, numbers)
    if len(seen) == 1:  # the others are hidden from it, whatever its rank is
        return seen[0]
    if not seen:
        return ""
    if rank.number >= len(seen):
        raise GpuJobRefused(
            f"{rank.said_by}={rank.number}, and the job has {len(seen)} GPUs on this node, with numbers from 0. Start "
            f"{len(seen)} processes on it (torchrun --nproc-per-node={len(seen)}, srun --ntasks-per-node={len(seen)}), "
            "or set CUDA_VISIBLE_DEVICES to one GPU in each process, where several share one"
        )
    return seen[rank.number]


def _visible(text: str, gpus: Sequence[str], numbers: Sequence[str]) -> list[str]:
    """The GPUs behind CUDA_VISIBLE_DEVICES, in its order; as CUDA does it, those before a -1."""
    entries = [entry.strip() for entry in text.split(",") if entry.strip()]
    entries = entries[: entries.index("-1")] if "-1" in entries else entries
    by_number = dict(zip(numbers, gpus, strict=False))
    if not {*entries} <= by_number.keys():  # where Slurm constrains devices, it counts those of the job from 0
        by_number = {str(place): gpu for place, gpu in enumerate(gpus)}
    found = []
    for entry in entries:
        named = [gpu for gpu in gpus if gpu.startswith(entry) and not entry.isdecimal()]
        if len(named) != 1 and entry not in by_number:
            raise GpuJobRefused(
                f"CUDA_VISIBLE_DEVICES={text[:100]}: {entry[:50]} is none of the {len(gpus)} GPUs that the job has on "
                f"this node ({', '.join(numbers or gpus)}). Leave the variable as the job has it, or name some of these"
            )
        found.append(named[0] if len(named) == 1 else by_number[entry])
    return list(dict.fromkeys(found))


def _tasks_here(environ: Mapping[str, str]) -> int:
    """Tasks of this step on this node; 0: not known."""
    before = _number(environ.get("SLURM_NODEID")) or 0  # so many nodes come first
    for part in environ.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        found = _TASKS.fullmatch(part)
        if found is None:
            return 0
        if before < int(found[2] or 1):
            return int(found[1])
        before -= int(found[2] or 1)
    return 0


def _number(text: str | None) -> int | None:
    return int(text) if text and re.fullmatch(r"[0-9]{1,6}", text) else None
