"""What a conversion starts from and where it goes, found out without torch.

Called by `hetstream ckpt convert`. The conversions are in `analysis.py` and, with weights, in `weights.py`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from hetstream.base.errors import OptionsError
from hetstream.checkpoint.disk.checkpoint import Checkpoint
from hetstream.checkpoint.disk.directory import CheckpointDirectory
from hetstream.checkpoint.disk.ownership import JobIdentity
from hetstream.checkpoint.errors import NoCheckpoint
from hetstream.checkpoint.record.generation import Generation

Kind = Literal["flash", "dcp", "torch", "safetensors"]
KINDS: tuple[Kind, ...] = get_args(Kind)
_ZIP = b"PK\x03\x04"


@dataclass(frozen=True)
class Source:
    """What is converted.

    Attributes:
        path: a file, a directory of torch.distributed.checkpoint, or a directory of checkpoints.
        kind: which of these.
        generation: of a directory of checkpoints, the one that was meant; None: none in particular.
    """

    path: Path
    kind: Kind
    generation: Generation | None = None


def detect(path: Path) -> Source:
    """Find out what a path holds by what is in it.

    Raises:
        FileNotFoundError: nothing.
        NoCheckpoint: something else.
    """
    if path.is_dir():
        place = path.resolve()
        generation = Generation.of_directory(place.name)
        if generation:
            return Source(place.parent, "flash", generation)
        if os.path.lexists(path / ".metadata"):
            return Source(path, "dcp")
        if any(Generation.of_directory(name) for name in os.listdir(path)):
            return Source(path, "flash")
        raise NoCheckpoint(
            f"{path} is no checkpoint: neither a directory of hetstream's (with step-0000000120.2 or the like in it) "
            "nor one of torch.distributed.checkpoint (with .metadata)"
        )
    # Without waiting for the other end of a pipe, and without reading a device.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise NoCheckpoint(f"{path} is neither a directory nor a regular file")
        begin = file.read(9)
    if begin.startswith(_ZIP):
        return Source(path, "torch")
    # Eight bytes of length, then JSON.
    if len(begin) == 9 and begin[8:] == b"{":
        return Source(path, "safetensors")
    raise NoCheckpoint(f"{path} begins with {begin!r}: neither of torch.save nor safetensors")


def choose(source: Source, step: int | None) -> Checkpoint:
    """The checkpoint of a directory that is meant: that of a step, or the newest good one of the line.

    Raises:
        NoCheckpoint: there is none.
    """
    directory = CheckpointDirectory(source.path)
    lineage = directory.lineage()
    # Of several of one step that of the line.
    for checkpoint in sorted(directory.checkpoints(), key=lambda checkpoint: not lineage.holds(checkpoint.generation)):
        is_named = source.generation == checkpoint.generation or step == checkpoint.generation.step
        if (
            source.generation in (None, checkpoint.generation)
            and step in (None, checkpoint.generation.step)
            and (is_named or lineage.holds(checkpoint.generation))
        ):
            return checkpoint
    meant = source.generation or ("good checkpoint" if step is None else f"good checkpoint of step {step}")
    raise NoCheckpoint(f"{source.path} has no {meant}. See: hetstream ckpt ls {source.path}")


def check_target(path: Path, kind: str) -> None:
    """Refuse to write over something.

    Raises:
        OptionsError: the target exists, and is not a directory of checkpoints that one more goes into.
    """
    if path.exists() and not (kind == "flash" and path.is_dir() and not (path / ".metadata").exists()):
        raise OptionsError(f"{path} exists: a conversion overwrites nothing. Name another target, or remove it")
    if not path.absolute().parent.is_dir():
        raise OptionsError(f"{path.absolute().parent} is no directory: make it, or name another target")


@contextlib.contextmanager
def attempt_on(path: Path, job: str) -> Iterator[int]:
    """An attempt of its own on a directory of checkpoints, so that what is written is newer than all that is there.

    Raises:
        DirectoryInUse: a running job has it.

    After an error in the block a directory that this made is gone again.
    """
    is_new = not os.path.lexists(path)
    directory = CheckpointDirectory(path)
    try:
        yield directory.acquire(JobIdentity.of_this_process(job))
    except BaseException:
        directory.release()
        if is_new:
            shutil.rmtree(path, ignore_errors=True)
        raise
    finally:
        directory.release()
