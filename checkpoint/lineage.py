"""The file that tells a directory of checkpoints from any other, and says where its training went back.

    DIR/.lineage.json    the directory's random id, and its branches, see `policy/lineage.py`

Memory outlives a directory that somebody deletes, and is newer than one that somebody rolls back. A store in memory
knows the id of the directory that it was saved for, so what is in it is used for that one alone. Rank 0 writes the
file, with the directory's lock held; every saver compares the id before it writes a part.
"""

from __future__ import annotations

import contextlib
import secrets

import msgspec

from checkpoint import typed_json
from checkpoint.errors import DirectoryReplaced
from checkpoint.policy.lineage import Lineage
from hetstream.base.files import Directory, UntrustedFile

_NAME = ".lineage.json"
_MAX_BYTES = 1 << 20
# Going back is what people do, by hand. More of it than this is a program's mistake, and what is older is forgotten.
_MAX_BRANCHES = 1000
_ID_BYTES = 16


def read_lineage(root: Directory) -> Lineage:
    """The lineage of an open directory; an empty one where there is none to be read."""
    with contextlib.suppress(FileNotFoundError, UntrustedFile, msgspec.MsgspecError, ValueError, RecursionError):
        return typed_json.decode(root.read(_NAME, _MAX_BYTES), Lineage)
    return Lineage()


def write_lineage(root: Directory, lineage: Lineage) -> None:
    """Replace the lineage of a directory. For who has its lock."""
    kept = msgspec.structs.replace(lineage, branches=lineage.branches[:_MAX_BRANCHES])
    root.write_whole(_NAME, msgspec.json.encode(kept))


def name_directory(root: Directory, *, is_new: bool) -> Lineage:
    """Give a directory its id, unless it has one. For who has its lock.

    Args:
        root: the directory.
        is_new: nothing of a training is in it, whatever it is called: it gets another id, and its lineage ends.
    """
    lineage = read_lineage(root)
    if is_new or not lineage.directory_id:
        lineage = Lineage(secrets.token_hex(_ID_BYTES))
        write_lineage(root, lineage)
    return lineage


def check_id(root: Directory, directory_id: str) -> None:
    """Refuse a directory that is not the one that a store was made for.

    Args:
        root: the directory.
        directory_id: of that one; "": any will do.

    Raises:
        DirectoryReplaced: it is another.
    """
    if directory_id and read_lineage(root).directory_id != directory_id:
        raise DirectoryReplaced(
            f"{root.path} is not the directory that this training began in: somebody has deleted or emptied that one. "
            "Nothing is written to it. End this training; what starts there next begins anew"
        )
