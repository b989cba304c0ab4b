"""Where Triton keeps what it compiles, and loads again as a program of whoever runs it.

It asks nobody whose the files are that it finds there. So before hetstream has it compile, the place is looked at: one
that the user has set is used as it is, or not at all; else it is Triton's own, in the home directory, or where others
can change that, a directory with mode 0700 that is his.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import shutil
import stat
import tempfile
from pathlib import Path

from hetstream.base.access import unsafe_below
from hetstream.base.files import Directory, temporary_place

_TRITON, _TRITON_HOME = "TRITON_CACHE_DIR", "TRITON_HOME"


def prepare_triton() -> str:
    """Have Triton keep what it makes where nobody else has a hand in it. Any thread, any number of times.

    Returns:
        Why nothing may be compiled; "" if all is well.
    """
    if why := _why_not_temporary():
        return why
    chosen, home = os.environ.get(_TRITON), os.environ.get(_TRITON_HOME)
    if chosen:
        return _why_not(Path(chosen), _TRITON)
    if home:
        return _why_not(Path(home) / ".triton" / "cache", _TRITON_HOME)
    own = Path(os.path.expanduser("~/.triton/cache"))  # stays as it is for a user without a home directory
    if not own.is_absolute() or _why_not(own, "HOME"):
        os.environ[_TRITON] = str(_private())
    return ""


def _why_not_temporary() -> str:
    """Why somebody else could change the files by which compilers work together; "" if nobody could."""
    place = Path(tempfile.gettempdir())
    why = unsafe_below(place)
    return f"compilers make their files in {place}: {why}. Set TMPDIR to another place" if why else ""


def _why_not(place: Path, variable: str) -> str:
    try:
        with Directory.open_safe(place, make=True) as directory:
            why = directory.strangers()
    except OSError as error:
        why = error.strerror or str(error)
    return f"{variable} leads to {place}, and what is compiled is loaded from there: {why}" if why else ""


def _private() -> Path:
    """A directory that nobody else can enter: of all processes of this user, or of this one if the name is taken."""
    path = temporary_place() / f"hetstream-triton-{os.geteuid()}"
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    status = path.lstat()
    if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077:
        return path
    return _of_this_process()


@functools.cache
def _of_this_process() -> Path:
    made = Path(tempfile.mkdtemp(prefix="hetstream-triton-", dir=temporary_place()))
    atexit.register(_remove, made, os.getpid())
    return made


def _remove(path: Path, pid: int) -> None:
    if os.getpid() == pid:  # a forked process goes on with the directory of its parent
        shutil.rmtree(path, ignore_errors=True)
