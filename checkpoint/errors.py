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
from hetstream.base.faults import InjectionPoints
from hetstream.base.text import shortened
from hetstream.checkpoint.config import faults_from_environment

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
        """Return the error: which thing, of which version, and which version this release reads."""
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
    """Return an error of a library in a line: some tell all that they know."""
    lines = str(error).strip().splitlines() or [""]
    text = f"{type(error).__name__}: {lines[0]}".removesuffix(": ")
    return text if len(text) <= _MAX_WORDS else f"{text[:_MAX_WORDS]} ..."


# Where tests make processes of checkpoints die or stop, by HETSTREAM_CKPT_FAULT; see `hetstream.base.faults`.

POINTS = {
    "store.created": "the trainer's store has its directory and no slots",
    "store.adopted": "a dead trainer's store has a new owner",
    "store.copied": "somebody has deleted the store, and its newest generation is copied into the new one, incomplete",
    "store.renewed": "a store that somebody has deleted is made anew, and no checkpoint writer knows it",
    "slot.allocated": "a slot file is made and has not got its name",
    "slot.placed": "a slot file has its name and holds nothing",
    "slot.begun": "a slot is marked as being written, and not a byte of it is",
    "save.copied": "the tensors of a state are copied, nothing is said about them",
    "slot.described": "payload and metadata are written, the header is not",
    "slot.before_complete": "all but the word that makes a generation complete is written",
    "slot.complete": "a generation is complete, its lock is held and the checkpoint writer knows nothing",
    "slot.published": "the checkpoint writer has been woken",
    "store.closing": "the trainer is about to mark its store as closed",
    "store.closed": "the store is marked as closed",
    "store.removing": "a store's first file is deleted",
    "writer.ready": "the checkpoint writer serves its stores and has not looked at them",
    "writer.chosen": "it is decided what to write, nothing is written",
    "writer.written": "a rank's part is whole on disk and nothing is committed",
    "writer.committed": "the checkpoint is committed and nobody has been told",
    "ending.looked": "a checkpoint writer has looked for the last time, and its store is still its own",
    "persist.announced": "the directory of an uncommitted checkpoint is there",
    "persist.writing": "some MiB of a rank's file are written; passed again and again",
    "persist.unsynced": "a rank's file is written, not synced",
    "persist.synced": "a rank's file is on disk under its temporary name",
    "persist.named": "a rank's file has its name and no manifest",
    "persist.described": "a rank's manifest is there",
    "commit.locked": "the set is complete and nothing is renamed",
    "commit.renamed": "the directory has its final name, which is not yet synced",
    "commit.synced": "the checkpoint is committed, `latest` still names an older one",
    "commit.linked": "`latest` names the checkpoint",
    "remove.renamed": "a checkpoint has lost its name and none of its files",
    "remove.unlinked": "one of the files of a removed checkpoint is gone; passed for each of them",
    "replica.listed": "a checkpoint writer listens for replicas and is listed",
    "replica.offered": "the sender has said what it will send",
    "replica.sending": "a MiB of a replica is sent; passed again and again",
    "replica.sent": "a replica is sent and not confirmed",
    "replica.allocating": "the receiver is about to make a slot for a replica",
    "replica.receiving": "a MiB of a replica has come; passed again and again",
    "replica.received": "a replica is whole at the receiver and not complete",
    "replica.kept": "a replica is complete and the sender does not know",
    "owner.numbered": "an attempt has its number, which is not yet written",
    "owner.written": "the attempt's number is on disk, the history does not know it",
    "lineage.written": "it is on disk that training went back, and what is in memory and newer is still there",
    "handover.claimed": "a job has locked its request for the directory of another, which is not written",
    "handover.asked": "a job has asked for the directory of another",
    "handover.heard": "the owner knows that it is to stop, and nothing is saved",
    "handover.saved": "the owner's last generation is committed, the directory is still its own",
    "handover.released": "the directory is free and its next owner has not got it",
}
FAULTS = InjectionPoints("HETSTREAM_CKPT_FAULT", POINTS, faults_from_environment())
reach = FAULTS.reach
