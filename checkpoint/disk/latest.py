"""The link in a directory of checkpoints that names the newest one of the line, for people and other programs.

    DIR/latest -> step-0000000120.2

Nothing of ours is restored by it. Whoever commits, removes or goes back moves it, with the commit lock of
the directory held.
"""

from __future__ import annotations

import contextlib
import stat
from pathlib import Path

from hetstream.base.files import Directory
from hetstream.checkpoint.faults import reach
from hetstream.checkpoint.record.generation import Generation

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
