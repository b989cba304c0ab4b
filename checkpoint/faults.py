"""Where tests make processes of checkpoints die or stop, by HETSTREAM_CKPT_FAULT; see `hetstream.base.faults`."""

from __future__ import annotations

from hetstream.base.faults import InjectionPoints
from hetstream.checkpoint.config import faults_from_environment

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
