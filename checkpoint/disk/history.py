"""The link in a directory of checkpoints that names the newest one of the line, for people and other programs.

    DIR/latest -> step-0000000120.2

Nothing of ours is restored by it. Whoever commits, removes or goes back moves it, with the commit lock of
the directory held.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import stat
from pathlib import Path

import msgspec

from hetstream.base import typed_json
from hetstream.base.files import Directory, UntrustedFile
from hetstream.base.text import printable
from hetstream.checkpoint.errors import CheckpointError, DamagedLineage, DirectoryReplaced, first_line, reach
from hetstream.checkpoint.record.layout import Generation
from hetstream.checkpoint.record.lineage import Lineage

LATEST = "latest"


def point_latest_to(root: Directory, newest: Generation | None) -> None:
    """Let `latest` name a committed checkpoint, or none; where something else has this name, nothing."""
    if _problem_of(root):
        return
    try:
        old = root.read_link(LATEST)
    except FileNotFoundError:
        old = None
    if newest is None:
        root.unlink(LATEST, missing_ok=True)
    elif old != newest.directory_name:
        # Whoever renamed it may have died before it was on disk.
        root.sync()
        reach("commit.synced")
        root.link_whole(LATEST, newest.directory_name)
        reach("commit.linked")


def target_of_latest(directory: Path) -> Generation | None:
    """The checkpoint that `latest` names, whether it is there or not; None if it names none."""
    with contextlib.suppress(OSError), Directory.open(directory) as root:
        return Generation.of_directory(root.read_link(LATEST))
    return None


def problem_of_latest(directory: Path) -> str:
    """Why `latest` does not name the newest checkpoint; "" if it does, or can."""
    with Directory.open(directory) as root:
        return _problem_of(root)


def _problem_of(root: Directory) -> str:
    try:
        mode = root.status(LATEST).st_mode
    except FileNotFoundError:
        return ""
    if stat.S_ISLNK(mode):
        return ""
    what = "directory" if stat.S_ISDIR(mode) else "file"
    return (
        f"{root.path / LATEST} is a {what} of somebody else's and no link: it stays, and does not name the newest "
        "checkpoint. Checkpoints are written and restored all the same; move it away"
    )


# The file that tells a directory of checkpoints from any other, and says where its training went back.
#
#     DIR/.lineage.json    the directory's random id, its starts, and its branches, see `record/lineage.py`
#
# Memory outlives a directory that somebody deletes, and is newer than one that somebody rolls back, or puts a copy in
# the place of. A store in memory knows the directory and the start of the job that it was saved for, so what is in it
# is used for a directory with this start alone. Rank 0 writes the file, with the directory's lock held; every
# checkpoint writer looks into it before it writes a part.

_log = logging.getLogger(__name__)

_NAME = ".lineage.json"
_MAX_BYTES = 1 << 20
# Going back is what people do, by hand. More of it than this is a program's mistake, and what is older is forgotten.
_MAX_BRANCHES = 1000
_ID_BYTES = 16
_START_BYTES = 8
# Memory is of the last start on its host. Where so many have come since, it is not used any more.
_MAX_STARTS = 100


def read_lineage(root: Directory) -> Lineage:
    """The lineage of an open directory; an empty one where there is none.

    Raises:
        DamagedLineage: there is one, and it is not to be used.
    """
    try:
        return typed_json.decode(root.read(_NAME, _MAX_BYTES), Lineage)
    except FileNotFoundError:
        return Lineage()
    except (UntrustedFile, msgspec.MsgspecError, ValueError, RecursionError) as error:
        path = root.path / _NAME
        raise DamagedLineage(
            f"{path} says where this training went back, and so which checkpoints count, and cannot be used: "
            f"{first_line(error)}. Put the file back from a backup; or remove it: then all checkpoints count, the "
            "newest first, and what memory holds is given up"
        ) from error


def lineage_of(path: Path) -> Lineage:
    """The lineage of a directory; an empty one if it has none, or is not there.

    Raises:
        DamagedLineage: there is one, and it is not to be used.
        CheckpointError: it cannot be read.
    """
    try:
        with Directory.open(path) as root:
            return read_lineage(root)
    except FileNotFoundError:
        return Lineage()
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error}. It says where training went back to an earlier step, and so which "
            "checkpoints count. "
            "Each start of the training writes this file anew, for its owner alone: chmod g+r"
        ) from error


def write_lineage(root: Directory, lineage: Lineage) -> None:
    """Replace the lineage of a directory. For who has its lock."""
    branches, starts = lineage.branches[:_MAX_BRANCHES], lineage.starts[:_MAX_STARTS]
    kept = msgspec.structs.replace(lineage, branches=branches, starts=starts)
    root.write_whole(_NAME, msgspec.json.encode(kept))


def begin_start(root: Directory, *, is_new: bool) -> Lineage:
    """Write down another start of the job in a directory, which gets an id unless it has one. For who has its lock.

    Args:
        root: the directory.
        is_new: nothing of a training is in it, whatever it is called: it gets another id, and its lineage ends.
    """
    lineage = read_lineage(root)
    if is_new or not lineage.directory_id:
        lineage = Lineage(secrets.token_hex(_ID_BYTES))
    path = printable(os.path.realpath(root.path))
    if lineage.path not in ("", path):
        _log.warning(
            "%s holds the training that was last started as %s: it was renamed, moved or copied, or somebody has put "
            "it in the place of another one. This training goes on from its checkpoints, and removes old ones; if it "
            "should not, end it and give it another directory",
            path,
            printable(lineage.path),
        )
    starts = (secrets.token_hex(_START_BYTES), *lineage.starts)
    lineage = msgspec.structs.replace(lineage, starts=starts, path=path)
    write_lineage(root, lineage)
    return lineage


def check_start(root: Directory, start_id: str) -> None:
    """Refuse a directory that is not the one that a store was made for.

    Args:
        root: the directory.
        start_id: of the start of the job that made the store; "": any directory will do.

    Raises:
        DirectoryReplaced: it is another.
    """
    if start_id and not read_lineage(root).knows(start_id):
        raise DirectoryReplaced(
            f"{root.path} is not the directory that this training began in: somebody has deleted or emptied that one, "
            "or has put a copy from before in its place. Nothing is written to it. End this training; what starts "
            "there next goes on from what is there"
        )


# Steps of writing that outlive a power cut, for paths that this user has named or made.
#
# What lies in a directory that may come from elsewhere is reached through `hetstream.base.files.Directory` alone.


def write_whole(path: Path, data: bytes) -> None:
    """Write a small file of mode 0600: after a crash at any moment there is the old content or the new one."""
    with Directory.open(path.parent) as parent:
        parent.write_whole(path.name, data)
