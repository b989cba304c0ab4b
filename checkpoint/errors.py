"""Every error that checkpoints raise on purpose, beside `hetstream.base.errors.OptionsError`. All are HetstreamErrors.

CheckpointError
├── UnsupportedState         a value of the state cannot be saved
├── StateMismatch            what was saved does not fit what it is to be restored into
├── NoCheckpoint             there is none where one is needed
├── MissingRanks             a checkpoint without the files of some ranks
├── Damaged                  bytes that are not what was written
│   ├── DamagedLayout        a layout that breaks its rules
│   ├── DamagedSegment       a slot file that is torn, short, foreign or of another version
│   ├── DamagedCheckpoint    a file of a checkpoint on disk
│   │   └── OtherRelease     of another version: nothing is wrong with it, this release cannot read it
│   └── DamagedLineage       the file that says which checkpoints of a directory count
├── DirectoryInUse           another job writes to this checkpoint directory
├── DirectoryNotWritable     its file system says no
├── DirectoryReplaced        another directory has its name: somebody has deleted or replaced it
├── NotEnoughSpace           the disk is too full for a checkpoint
├── NotOnDisk                the program ends, and its newest checkpoint could not be written
├── SharedMemoryFull         no room in memory for a generation
├── StoreInUse               a living process has this rank's store, or this store's checkpoint writer
├── ForeignOwner             another user's files under our name
├── ReplicaError             a generation did not get to another host's memory, or back
└── WriterError              the checkpoint writer cannot be started, or has died
"""

from __future__ import annotations

from hetstream.base.errors import HetstreamError
from hetstream.base.text import shortened

__all__ = [
    "CheckpointError",
    "Damaged",
    "DamagedCheckpoint",
    "DamagedLayout",
    "DamagedLineage",
    "DamagedSegment",
    "DirectoryInUse",
    "DirectoryNotWritable",
    "DirectoryReplaced",
    "ForeignOwner",
    "MissingRanks",
    "NoCheckpoint",
    "NotEnoughSpace",
    "NotOnDisk",
    "OtherRelease",
    "ReplicaError",
    "SharedMemoryFull",
    "StateMismatch",
    "StoreInUse",
    "UnsupportedState",
    "WriterError",
]

_MAX_WORDS = 500
# Characters of an error that quotes what somebody wrote: names of files have their place in it, and no more than that.
MAX_DAMAGE = 8000


class CheckpointError(HetstreamError):
    """Base of all: the message says what failed, the value seen, the rule and the next step."""


class UnsupportedState(CheckpointError):
    """A value of the state cannot be saved; the message names its place, its type and the way out."""


class StateMismatch(CheckpointError):
    """What was saved does not fit what it is to be restored into."""


class NoCheckpoint(CheckpointError):
    """There is no checkpoint where one is needed."""


class MissingRanks(CheckpointError):
    """A checkpoint lacks the files of some ranks."""


class Damaged(CheckpointError):
    """Bytes that are not what was written. Messages quote them, and are cut: whoever wrote them may not have ended."""

    def __init__(self, text: str) -> None:
        super().__init__(shortened(text, MAX_DAMAGE))


class DamagedLayout(Damaged):
    """A layout that breaks its rules."""


class DamagedSegment(Damaged):
    """A slot file that is torn, short, another user's, of another version, or no slot file at all."""


class DamagedCheckpoint(Damaged):
    """A file of a checkpoint on disk that is not what was committed."""


class OtherRelease(DamagedCheckpoint):
    """A checkpoint that another release of hetstream wrote, and this one does not read.

    For whoever looks for one that can be used it is like a damaged one; but it is never marked as such or removed, and
    no training goes on from an older one in its place.
    """

    @staticmethod
    def of(what: str, version: object, own: int) -> OtherRelease:
        """The error: which thing, of which version, and which version this release reads."""
        return OtherRelease(
            f"{what} has version {version}, this release reads version {own}: go on with the release of hetstream that "
            "wrote it, or begin in another directory (docs/upgrade.md)"
        )


class DamagedLineage(Damaged):
    """The file that says where a directory's training went back is not what was written."""


class DirectoryInUse(CheckpointError):
    """Another job writes to this checkpoint directory."""


class DirectoryNotWritable(CheckpointError):
    """The file system refuses to write to the checkpoint directory."""


class DirectoryReplaced(CheckpointError):
    """A checkpoint directory is not the one that a training began in."""


class NotOnDisk(CheckpointError):
    """The program ends, and its newest checkpoint could not be written; it is left in memory."""


class NotEnoughSpace(CheckpointError):
    """The disk has no room for a checkpoint."""


class SharedMemoryFull(CheckpointError):
    """There is no room in memory for a generation. Nothing was written."""


class StoreInUse(CheckpointError):
    """A living process has this rank's store, or is the checkpoint writer of this store."""


class ForeignOwner(CheckpointError):
    """Files of another user, or open to other users, where ours should be."""


class ReplicaError(CheckpointError):
    """A generation did not get to another host's memory, or back from there."""


class WriterError(CheckpointError):
    """The checkpoint writer cannot be started, or has died."""


def first_line(error: BaseException) -> str:
    """An error of a library in a line: some tell all that they know."""
    lines = str(error).strip().splitlines() or [""]
    text = f"{type(error).__name__}: {lines[0]}".removesuffix(": ")
    return text if len(text) <= _MAX_WORDS else f"{text[:_MAX_WORDS]} ..."
