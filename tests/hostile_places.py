"""Places that somebody else has prepared, or changes at any moment: entry points run in them as root or as a user.

A `Scenario` says what is opened by name, what it should be, what a stranger would put there, and how it is used. Each
runs in every kind of `Dirt`. Where a stranger can put one thing in the place of another, he does so once before the
entry point begins, and once at each moment at which it opens, makes, lists, renames or runs something: Python tells of
those moments (`sys.addaudithook`), so no race has to be won. The stranger is a process of another user, and does what
the kernel lets him do.
"""

from __future__ import annotations

import contextlib
import enum
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from hetstream.base.errors import HetstreamError
from tests.base.users import STRANGER, VICTIM

# A group of both of them that no account has.
TEAM = 54400
EVIL = "EVIL"
PRECIOUS = "what root has kept for years"
# Moments at which something is reached by its name: https://docs.python.org/3/library/audit_events.html
_MOMENTS = (
    "open", "os.", "shutil.", "tempfile.", "subprocess.Popen", "sqlite3.connect", "socket.connect", "socket.bind",
    "ctypes.dlopen", "glob.glob", "pathlib.Path.glob", "fcntl.flock",
)  # fmt: skip
_MOST_MOMENTS = 80
_OWN_FILES = (
    sys.prefix,
    sys.base_prefix,
    str(Path(__file__).resolve().parents[1]),
    "/proc/",
    "/usr/",
    "/dev/",
    "/etc/",
)


class Dirt(enum.Enum):
    """What is wrong with a place."""

    FOREIGN = "it is a stranger's"
    LINKED = "a stranger has put a link there"
    STICKY = "it is in a sticky directory, which is a stranger's"
    GROUP = "it is in a directory of a group, in which a stranger is"
    SWAPPED = "it is in a directory in which all can write"
    SQUATTED = "it is not there, in a directory like /tmp, where a stranger may be quicker"
    SHARED = "a group can write to it, in which a stranger is"
    OPEN = "all can write to it"


@dataclass(frozen=True)
class Scenario:
    """One entry point.

    Attributes:
        plant: as a stranger, put what harms at a path.
        act: use what is at a path; what it returns is what the user would believe. Errors of hetstream and of the
            operating system are refusals.
        prepare: make what should be at a path, as the user; None: nothing is there before.
        uid: who the user is.
        must_refuse: also where nothing of the stranger's was believed: what is made there would be in his hands.
        works: where what `prepare` has made is as it should be.
        name: of what is opened.
        dirts: the kinds of places in which it can be.
    """

    plant: Callable[[Path, Place], object]
    act: Callable[[Path], object]
    prepare: Callable[[Path], object] | None = None
    uid: int = VICTIM
    must_refuse: bool = False
    works: bool = True
    name: str = "thing"
    dirts: tuple[Dirt, ...] = tuple(Dirt)

    def tried_in(self) -> list[Dirt]:
        """The kinds of places that it is run in: where nothing is prepared, nothing can be open to others."""
        return [dirt for dirt in self.dirts if self.prepare or dirt not in (Dirt.SHARED, Dirt.OPEN)]


@dataclass(frozen=True)
class Place:
    """Where a scenario runs.

    Attributes:
        base: root's; others may look.
        name: of what is opened.
        loot: a directory of the user's, with a file that nobody may change.
        marks: where programs of the stranger's say that they ran, and as whom.
    """

    base: Path
    name: str
    parent: Path = field(init=False)
    evil: Path = field(init=False)
    loot: Path = field(init=False)
    marks: Path = field(init=False)

    def __post_init__(self) -> None:
        for part in ("parent", "evil", "loot", "marks"):
            object.__setattr__(self, part, self.base / part)

    @property
    def target(self) -> Path:
        return self.parent / self.name

    @property
    def precious(self) -> Path:
        return self.loot / "precious"

    def script(self) -> str:
        """A program of the stranger's."""
        return f"#!/bin/sh\nid -u > {self.marks}/ran-$(id -u)\necho {EVIL}\n"


def made(path: Path, content: str = "", mode: int = 0o644) -> Path:
    """A file, with the directories above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    path.chmod(mode)
    return path


@contextlib.contextmanager
def place_of(dirt: Dirt | None, scenario: Scenario) -> Iterator[Place]:
    """A place of one kind; None: one with which nothing is wrong."""
    place = Place(Path(tempfile.mkdtemp(prefix="hetstream-hostile-", dir="/tmp")), scenario.name)
    place.base.chmod(0o755)
    owner, mode, group = {
        None: (scenario.uid, 0o755, scenario.uid),
        Dirt.FOREIGN: (STRANGER, 0o755, STRANGER),
        Dirt.LINKED: (0, 0o1777, scenario.uid),
        Dirt.STICKY: (STRANGER, 0o1777, STRANGER),
        Dirt.GROUP: (scenario.uid, 0o775, TEAM),
        Dirt.SWAPPED: (scenario.uid, 0o777, scenario.uid),
        Dirt.SQUATTED: (0, 0o1777, 0),
        Dirt.SHARED: (scenario.uid, 0o755, scenario.uid),
        Dirt.OPEN: (scenario.uid, 0o755, scenario.uid),
    }[dirt]
    for directory, uid, gid, bits in (
        (place.parent, owner, group, mode), (place.evil, STRANGER, STRANGER, 0o755),
        (place.loot, scenario.uid, scenario.uid, 0o755), (place.marks, 0, 0, 0o777),
    ):  # fmt: skip
        directory.mkdir()
        os.chown(directory, uid, gid)
        directory.chmod(bits)
    place.precious.write_text(PRECIOUS)
    os.chown(place.precious, scenario.uid, scenario.uid)
    try:
        yield place
    finally:
        shutil.rmtree(place.base)


def harm_in(dirt: Dirt, scenario: Scenario, moment: int | None) -> tuple[str, bool]:
    """Let a scenario run once.

    Args:
        dirt: of the place.
        scenario: what runs.
        moment: at which the stranger acts: 0 before it begins, 1 at the first moment, and so on.

    Returns:
        What harm was done, or nothing; and whether the moment came.
    """
    with place_of(dirt, scenario) as place:
        is_there = dirt in (Dirt.FOREIGN, Dirt.LINKED)
        evil = place.target if dirt is Dirt.FOREIGN else place.evil / "thing"
        _run_as(STRANGER, lambda: scenario.plant(evil, place))
        if dirt is Dirt.LINKED:
            _run_as(STRANGER, lambda: place.target.symlink_to(evil))
        elif not is_there and dirt is not Dirt.SQUATTED:
            _prepare(scenario, place)
        if dirt in (Dirt.SHARED, Dirt.OPEN) and place.target.exists():
            os.chown(place.target, scenario.uid, TEAM)
            place.target.chmod(place.target.stat().st_mode | (0o020 if dirt is Dirt.SHARED else 0o002))
        with _Stranger(place) as stranger:
            if moment == 0 and not is_there:
                stranger.strike()
            result = _Result()
            result.run(scenario, place.target, stranger if moment and not is_there else None, moment or 0)
        return _harm(place, dirt, scenario, result), result.came


def refusal_of(scenario: Scenario) -> str:
    """Why a scenario does not work, or does harm, where everything is root's or the user's; nothing if it works."""
    with place_of(None, scenario) as place:
        _prepare(scenario, place)
        result = _Result()
        result.run(scenario, place.target, None, 0)
        return result.refused or _harm(place, None, replace(scenario, must_refuse=False), result)


def moments(dirt: Dirt) -> range:
    """At which the stranger acts, as far as they come."""
    return range(1) if dirt in (Dirt.FOREIGN, Dirt.LINKED) else range(_MOST_MOMENTS)


def _harm(place: Place, dirt: Dirt | None, scenario: Scenario, result: _Result) -> str:
    ran = [path.name for path in place.marks.iterdir() if path.name != f"ran-{STRANGER}"]
    if ran:
        return f"a program of the stranger's ran: {ran}"
    if sorted(os.listdir(place.loot)) != ["precious"] or place.precious.read_text() != PRECIOUS:
        return f"files were changed that are no business of it: {os.listdir(place.loot)}"
    if result.fault:
        return f"it ended with a fault:\n{result.fault}"
    if EVIL in result.text:
        return f"what the stranger says is believed: {result.text}"
    # Where the stranger was not quicker, it is as it should be.
    if scenario.must_refuse and dirt is not Dirt.SQUATTED and not result.refused:
        return f"it works where a stranger can have a hand in: {result.text}"
    return ""


class _Result:
    """How an entry point ended in a process of its own."""

    def __init__(self) -> None:
        self.text, self.fault, self.refused, self.came = "", "", "", False

    def run(self, scenario: Scenario, target: Path, stranger: _Stranger | None, moment: int) -> None:
        reading, writing = os.pipe()
        came_reading, came_writing = os.pipe()
        child = os.fork()
        if child == 0:
            said = b""
            try:
                os.close(reading)
                _become(scenario.uid)
                if stranger:
                    _strike_at(moment, stranger, came_writing)
                said = b"=" + str(scenario.act(target)).encode()
            except (HetstreamError, OSError) as error:
                said = b"!" + f"{type(error).__name__}: {error}".encode()
            except SystemExit as error:
                said = b"!" + str(error).encode()
            except BaseException:  # noqa: BLE001, the end of a process
                said = b"?" + traceback.format_exc().encode()
            os.write(writing, said[:60000])
            os._exit(0)
        os.close(writing)
        os.close(came_writing)
        with open(reading, "rb") as pipe:
            said = pipe.read().decode()
        with open(came_reading, "rb") as pipe:
            self.came = bool(pipe.read()) or moment == 0
        os.waitpid(child, 0)
        kind, text = said[:1], said[1:]
        self.text, self.refused, self.fault = (text if kind == mark else "" for mark in "=!?")


def _strike_at(moment: int, stranger: _Stranger, came: int) -> None:
    """Let the stranger act when this process is about to reach something by its name for so many times."""
    count = 0
    is_at_it = False

    def look(event: str, args: tuple[object, ...]) -> None:
        nonlocal count, is_at_it
        if is_at_it or not event.startswith(_MOMENTS):
            return
        if args and isinstance(args[0], str) and args[0].startswith(_OWN_FILES):
            return
        is_at_it = True
        count += 1
        if count == moment:
            os.write(came, b"!")
            stranger.strike()
        is_at_it = False

    sys.addaudithook(look)


class _Stranger:
    """A process of another user that puts his thing in the place of what is there when he is told to."""

    def __init__(self, place: Place) -> None:
        self._place = place

    def __enter__(self) -> _Stranger:
        asked, self._ask = os.pipe()
        self._told, tell = os.pipe()
        self._child = os.fork()
        if self._child == 0:
            try:
                os.close(self._ask)
                _become(STRANGER)
                while os.read(asked, 1):
                    self._swap()
                    os.write(tell, b"!")
            finally:
                os._exit(0)
        os.close(asked)
        os.close(tell)
        return self

    def _swap(self) -> None:
        """Put the evil thing in the place of the good one, or its parts in the place of parts."""
        evil, target = self._place.evil / "thing", self._place.target
        with contextlib.suppress(OSError):
            target.rename(target.with_name("aside"))
        with contextlib.suppress(OSError):
            evil.rename(target)
            return
        parts = [*evil.iterdir()] if evil.is_dir() and not evil.is_symlink() else []
        for part in parts:
            with contextlib.suppress(OSError):
                (target / part.name).rename(target / f"{part.name}.aside")
            with contextlib.suppress(OSError):
                part.rename(target / part.name)
        if evil.is_file():
            with contextlib.suppress(OSError):
                target.write_bytes(evil.read_bytes())

    def strike(self) -> None:
        os.write(self._ask, b"!")
        os.read(self._told, 1)

    def __exit__(self, *_: object) -> None:
        os.close(self._ask)
        os.close(self._told)
        os.waitpid(self._child, 0)


def _prepare(scenario: Scenario, place: Place) -> None:
    prepare = scenario.prepare
    if prepare:
        _run_as(scenario.uid, lambda: prepare(place.target))


def _become(uid: int) -> None:
    if uid:
        os.setgroups([TEAM])
        os.setgid(uid)
        os.setuid(uid)
    os.environ["HOME"] = "/nonexistent"
    os.umask(0o022)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)


def _run_as(uid: int, act: Callable[[], object]) -> None:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            _become(uid)
            act()
            code = 0
        except BaseException:  # noqa: BLE001, the end of a process
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert status == 0, f"user {uid} failed; see stderr"
