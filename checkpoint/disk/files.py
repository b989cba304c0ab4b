"""Steps of writing that outlive a power cut, for paths that this user has named or made.

What lies in a directory that may come from elsewhere is reached through `hetstream.base.files.Directory` alone.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from hetstream.base.files import Directory, temporary_name


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a path where nothing is; what the block makes there takes the place of `path` at its end.

    If the block fails, what it made is removed, if it is a file, and `path` is as it was.
    """
    temporary = path.with_name(temporary_name(path.name))
    temporary.unlink(missing_ok=True)
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    with Directory.open(path.absolute().parent) as parent:
        parent.sync()


def write_whole(path: Path, data: bytes) -> None:
    """Write a small file of mode 0600: after a crash at any moment there is the old content or the new one."""
    with Directory.open(path.parent) as parent:
        parent.write_whole(path.name, data)
