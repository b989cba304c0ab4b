"""Who else could put something in the place of a path. As root: the others are processes of other users."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from hetstream.base.access import UntrustedFile, members_by_first_group, others_can_write, unsafe_above, unsafe_below
from hetstream.base.files import Directory, own_directory
from tests.base.users import STRANGER, VICTIM, needs_root, run_as

GROUP = 54399  # that no account is in


def give(path: Path, uid: int, mode: int, gid: int | None = None) -> Path:
    """Make a directory of a user."""
    path.mkdir()
    os.chown(path, uid, uid if gid is None else gid)
    path.chmod(mode)
    return path


def allow(path: Path, *entries: tuple[int, int, int]) -> None:
    """Give a directory an ACL, of (tag, permissions, number); the mask is all."""
    nobody = 0xFFFFFFFF
    whole = sorted([(0x01, 7, nobody), (0x04, 5, nobody), (0x10, 7, nobody), (0x20, 5, nobody), *entries])
    acl = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in whole)
    try:
        os.setxattr(path, "system.posix_acl_access", acl)
    except OSError as error:
        if error.errno != errno.ENOTSUP:
            raise
        pytest.skip("this file system has no ACLs")


def said_by_victim(path: Path, *, of_colleagues: bool = False) -> str:
    """What another user is told of a path."""
    reading, writing = os.pipe()
    run_as(VICTIM, lambda: os.write(writing, unsafe_above(path, of_colleagues=of_colleagues).encode()) and None)
    os.close(writing)
    with open(reading) as stream:
        return stream.read()


# What is on the way, and what is said of it; "" where it is safe.
Prepare = Callable[[Path], Path]
WAYS: dict[str, tuple[Prepare, str]] = {
    "one's own": (lambda top: give(top / "a", VICTIM, 0o755) / "x", ""),
    "root's": (lambda top: give(top / "a", 0, 0o755) / "x", ""),
    "root's, sticky": (lambda top: give(top / "a", 0, 0o1777) / "x", ""),
    "one's own, sticky": (lambda top: give(top / "a", VICTIM, 0o1777) / "x", ""),
    "a group's, sticky": (lambda top: give(top / "a", 0, 0o3775, GROUP) / "x", ""),
    "a stranger's, sticky": (lambda top: give(top / "a", STRANGER, 0o1777) / "x", "does not bind the owner"),
    "a stranger's, closed": (lambda top: give(top / "a", STRANGER, 0o755) / "x", "another user's"),
    "a stranger's, higher up": (
        lambda top: give(give(top / "a", STRANGER, 0o755) / "b", VICTIM, 0o700) / "x",
        "a (own",
    ),
    "everybody's": (lambda top: give(top / "a", 0, 0o777) / "x", "which has no sticky bit"),
    "one's own, everybody's": (lambda top: give(top / "a", VICTIM, 0o777) / "x", "which has no sticky bit"),
    "a group's": (lambda top: give(top / "a", 0, 0o2775, GROUP) / "x", f"group {GROUP}"),
    "one's own, a group's": (lambda top: give(top / "a", VICTIM, 0o2775, GROUP) / "x", f"group {GROUP}"),
    "not there": (lambda top: top / "a" / "b" / "c", ""),
    "not there, at a stranger's": (lambda top: give(top / "a", STRANGER, 0o1777) / "b" / "c", "another user's"),
    "its last part is not looked at": (lambda top: give(top / "a", STRANGER, 0o1777), ""),
}


@needs_root
@pytest.mark.parametrize("name", WAYS)
def test_each_directory_on_the_way_is_looked_at(common_place: Path, name: str) -> None:
    prepare, expected = WAYS[name]
    said = said_by_victim(prepare(common_place))
    assert expected in said if expected else said == "", said


def link(top: Path, target: Path, owner: int = VICTIM) -> Path:
    """A link of a user in the common place."""
    path = top / "link"
    path.symlink_to(target)
    os.chown(path, owner, owner, follow_symlinks=False)
    return path


LINKS: dict[str, tuple[Prepare, str]] = {
    "one's own link to one's own": (lambda top: link(top, give(top / "a", VICTIM, 0o700)) / "x", ""),
    "one's own link to a stranger's": (
        lambda top: link(top, give(top / "a", STRANGER, 0o1777)) / "x",
        "another user's",
    ),
    "a stranger's link to one's own": (
        lambda top: link(top, give(top / "a", VICTIM, 0o700), STRANGER) / "x",
        f"a link of user {STRANGER}",
    ),
    "a link as the last part": (lambda top: link(top, give(top / "a", STRANGER, 0o1777) / "x"), "another user's"),
    "a link that a stranger's directory holds": (
        lambda top: link(give(top / "b", STRANGER, 0o1777), give(top / "a", VICTIM, 0o700)) / "x",
        "another user's",
    ),
    "up again behind a link": (
        lambda top: link(top, give(give(top / "a", STRANGER, 0o777) / "b", VICTIM, 0o700)) / ".." / "x",
        "another user's",
    ),
    "through a stranger's directory and back": (
        lambda top: give(top / "a", STRANGER, 0o755) / ".." / give(top / "b", VICTIM, 0o700).name / "x",
        "another user's",
    ),
}


@needs_root
@pytest.mark.parametrize("name", LINKS)
def test_so_is_each_that_holds_a_link_and_where_that_leads(common_place: Path, name: str) -> None:
    prepare, expected = LINKS[name]
    said = said_by_victim(prepare(common_place))
    assert expected in said if expected else said == "", said


def test_links_without_end_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(OSError, match="Too many levels"):
        unsafe_above(tmp_path / "a" / "x")


@needs_root
@pytest.mark.parametrize(
    ("tag", "permissions", "is_safe"),
    [
        pytest.param(0x02, 7, False, id="a named user writes"),
        pytest.param(0x02, 5, True, id="a named user reads"),
        pytest.param(0x08, 6, False, id="a named group writes"),
        pytest.param(0x08, 5, True, id="a named group reads"),
    ],
)
def test_an_acl_is_read(common_place: Path, tag: int, permissions: int, is_safe: bool) -> None:
    place = give(common_place / "a", VICTIM, 0o755)
    allow(place, (tag, permissions, STRANGER))
    assert (said_by_victim(place / "x") == "") == is_safe
    assert others_can_write(place.stat(), place) != is_safe
    # The mask, which the group's bits of the mode are then, takes it away again.
    place.chmod(0o755)
    assert said_by_victim(place / "x") == ""
    assert not others_can_write(place.stat(), place)


@needs_root
def test_a_private_group_with_an_acl_beside_it_is_not_private(common_place: Path) -> None:
    place = give(common_place / "a", 0, 0o775)  # root's group is root's alone
    assert unsafe_above(place / "x") == ""
    allow(place, (0x02, 7, STRANGER))
    assert stat.S_IMODE(place.stat().st_mode) == 0o775
    assert "an ACL names" in unsafe_above(place / "x")
    with Directory.open(place) as directory, pytest.raises(UntrustedFile, match="others can write to"):
        directory.check_own()


@needs_root
def test_what_is_said_names_the_directory_its_owner_its_mode_the_rule_and_what_to_do(common_place: Path) -> None:
    place = give(common_place / "a", STRANGER, 0o1777)
    said = said_by_victim(place / "x")
    for part in (str(place), f"owner {STRANGER}", "mode 1777", f"root's or user {VICTIM}'s", "Use another place"):
        assert part in said


@needs_root
def test_data_that_is_looked_at_itself_may_be_among_colleagues(common_place: Path) -> None:
    lab = give(common_place / "lab", STRANGER, 0o2775, GROUP)
    assert said_by_victim(lab / "x", of_colleagues=True) == ""
    lab.chmod(0o1777)
    assert "does not bind the owner" in said_by_victim(lab / "x", of_colleagues=True)


@needs_root
def test_a_directory_is_opened_only_where_it_is_safe_and_made_only_there(common_place: Path) -> None:
    def open_it() -> None:
        for place in (common_place / "theirs" / "a", common_place / "theirs"):
            for act in (lambda: Directory.open_safe(place, make=True), lambda: own_directory(place / "work")):  # noqa: B023
                with pytest.raises(UntrustedFile, match="another user's"):
                    act()
        with Directory.open_safe(common_place / "mine" / "deep", make=True) as directory:
            directory.check_own()
        with pytest.raises(FileNotFoundError):
            Directory.open_safe(common_place / "mine" / "missing")
        (common_place / "mine" / "file").touch()
        with pytest.raises(NotADirectoryError):
            Directory.open_safe(common_place / "mine" / "file" / "x")

    give(common_place / "theirs", STRANGER, 0o1777)
    run_as(VICTIM, open_it)
    assert list((common_place / "theirs").iterdir()) == []
    assert (common_place / "mine" / "deep").stat().st_uid == VICTIM


def test_who_has_a_group_as_his_first_one_is_a_member() -> None:
    passwd = "root:x:0:0:root:/root:/bin/bash\nann:x:7:7::/:/bin/sh\nbob:x:8:7::/:/bin/sh\n# no user\n+::::::\n\n"
    assert members_by_first_group(passwd, 7) == {7, 8}
    assert members_by_first_group(passwd, 0) == {0}
    assert members_by_first_group(passwd, 9) == set()


def enter_container() -> None:
    """Be in a user namespace in which nobody has a number but this process's user."""
    libc, uid = ctypes.CDLL(None, use_errno=True), os.geteuid()
    set_dumpable, new_user_namespace = 4, 0x10000000
    libc.prctl(set_dumpable, 1, 0, 0, 0)  # else /proc/self is root's after a change of user
    assert libc.unshare(new_user_namespace) == 0, os.strerror(ctypes.get_errno())
    Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")


@needs_root
@pytest.mark.skipif(
    Path("/proc/sys/user/max_user_namespaces").read_text().strip() == "0", reason="this kernel has no user namespaces"
)
def test_in_a_container_without_roots_number_only_the_top_counts_as_roots(common_place: Path) -> None:
    mine, theirs = give(common_place / "mine", VICTIM, 0o755), give(common_place / "theirs", STRANGER, 0o1777)

    def look() -> None:
        enter_container()
        assert Path("/tmp").stat().st_uid == theirs.stat().st_uid != os.geteuid()
        assert unsafe_above("/tmp/x") == ""
        for place in (theirs / "x", mine / "x"):
            assert f"{common_place} (owner" in unsafe_above(place), "root's, or anybody's: nobody can tell"

    run_as(VICTIM, look)


def test_a_directory_that_cannot_be_entered_is_no_safe_one_and_no_error(tmp_path: Path) -> None:
    assert unsafe_below(tmp_path / "missing") == ""
    assert unsafe_below(tmp_path / ("x" * 300)).endswith("File name too long")
