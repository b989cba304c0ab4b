"""Files that somebody else has prepared: links, devices, strangers' files, and names that lead elsewhere."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from hetstream.base.files import Directory, UntrustedFile, is_temporary, temporary_name
from tests.base.users import STRANGER, VICTIM, needs_root, run_as


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A directory with a file that no test may touch."""
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "profile").write_text("mine")
    return folder


@pytest.fixture
def inside(tmp_path: Path) -> Path:
    """The directory that is opened."""
    folder = tmp_path / "inside"
    folder.mkdir()
    return folder


def test_a_file_is_written_whole_and_read_back(inside: Path) -> None:
    with Directory.open(inside) as directory:
        directory.write_whole("one", b"first")
        directory.write_whole("one", b"second")
        assert directory.read("one", 10) == b"second"
        assert directory.names() == ["one"]
        assert directory.status("one").st_mode & 0o777 == 0o600


def test_a_write_that_fails_leaves_what_was_there(inside: Path) -> None:
    with Directory.open(inside) as directory:
        directory.write_whole("one", b"first")

        def write_half() -> None:
            with directory.replacing("one") as descriptor:
                os.write(descriptor, b"half")
                raise OSError(errno.ENOSPC, "full")

        with pytest.raises(OSError, match="full"):
            write_half()
        assert directory.read("one", 10) == b"first"
        assert directory.names() == ["one"]


def test_no_link_is_followed_by_reading_writing_and_entering(inside: Path, outside: Path) -> None:
    (inside / "file").symlink_to(outside / "profile")
    (inside / "folder").symlink_to(outside)
    with Directory.open(inside) as directory:
        for act in (
            lambda: directory.read("file", 100),
            lambda: directory.open_file("file", os.O_RDWR),
            lambda: directory.open_file("file", os.O_RDWR | os.O_CREAT),
            lambda: directory.enter("folder"),
            lambda: directory.make("folder"),
            lambda: directory.remove_directory("folder"),
        ):
            with pytest.raises(UntrustedFile, match="link"):
                act()
        assert not directory.has_directory("folder")
        directory.write_whole("file", b"replaced")
    assert (outside / "profile").read_text() == "mine"
    assert not (inside / "file").is_symlink()


def test_a_planted_temporary_file_is_not_written_through(inside: Path, outside: Path) -> None:
    (inside / temporary_name("one")).symlink_to(outside / "profile")
    with Directory.open(inside) as directory:
        directory.write_whole("one", b"content")
        (inside / temporary_name("link")).symlink_to(outside / "profile")
        directory.link_whole("link", "one")
        assert directory.read_link("link") == "one"
    assert (outside / "profile").read_text() == "mine"
    assert is_temporary(temporary_name("one"), "one")
    assert not is_temporary("one")


def test_a_file_with_a_second_name_elsewhere_is_not_changed(inside: Path, outside: Path) -> None:
    os.link(outside / "profile", inside / "history")
    with Directory.open(inside) as directory:
        with pytest.raises(UntrustedFile, match="2 names"):
            directory.open_file("history", os.O_RDWR | os.O_APPEND)
        assert directory.read("history", 100) == b"mine"


def test_pipes_sockets_and_devices_are_refused_at_once(inside: Path) -> None:
    os.mkfifo(inside / "pipe")
    (inside / "folder").mkdir()
    with Directory.open(inside) as directory:
        for name, flags in (("pipe", os.O_RDONLY), ("pipe", os.O_WRONLY), ("folder", os.O_RDONLY)):
            with pytest.raises(UntrustedFile, match="no regular file"):
                directory.open_file(name, flags)
        with pytest.raises(UntrustedFile, match="no directory"):
            directory.enter("pipe")


def test_more_than_was_asked_for_is_not_read(inside: Path) -> None:
    with open(inside / "large", "wb") as file:
        file.truncate(1 << 40)
    with Directory.open(inside) as directory, pytest.raises(UntrustedFile, match="more than 4096 bytes"):
        directory.read("large", 4096)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/etc/passwd", "a\0b"])
def test_a_name_that_leads_elsewhere_is_refused(inside: Path, name: str) -> None:
    with Directory.open(inside) as directory, pytest.raises(ValueError, match="no name"):
        directory.read(name, 10)


def test_a_directory_is_removed_with_its_links_and_not_what_they_point_to(inside: Path, outside: Path) -> None:
    (inside / "old").mkdir()
    (inside / "old" / "file").write_text("gone")
    (inside / "old" / "link").symlink_to(outside / "profile")
    with Directory.open(inside) as directory:
        directory.remove_directory("old")
        directory.remove_directory("old")
        (inside / "deep" / "deeper").mkdir(parents=True)
        (inside / "deep" / "file").write_text("stays")
        with pytest.raises(UntrustedFile, match=r"nothing of .* is removed"):
            directory.remove_directory("deep")
    assert (outside / "profile").read_text() == "mine"
    assert [one.name for one in inside.iterdir()] == ["deep"]
    assert (inside / "deep" / "file").exists()


def test_a_directory_that_is_replaced_is_still_the_one_that_was_opened(inside: Path, outside: Path) -> None:
    with Directory.open(inside) as directory:
        inside.rename(inside.with_name("moved"))
        inside.symlink_to(outside)
        directory.write_whole("profile", b"not yours")
    assert (outside / "profile").read_text() == "mine"


def test_what_everybody_can_write_to_is_not_used(inside: Path) -> None:
    (inside / "file").write_text("anybody's")
    (inside / "file").chmod(0o666)
    (inside / "folder").mkdir()
    (inside / "folder").chmod(0o777)
    inside.chmod(0o777)
    with Directory.open(inside) as directory:
        for act in (lambda: directory.read("file", 100), lambda: directory.enter("folder"), directory.check_own):
            with pytest.raises(UntrustedFile, match="chmod go-w"):
                act()


@needs_root
def test_a_strangers_files_are_not_used(common_place: Path) -> None:
    mine = common_place / "mine"
    mine.mkdir()
    mine.chmod(0o777)

    def plant() -> None:
        (mine / "file").write_text("the stranger's")
        (mine / "folder").mkdir()

    run_as(STRANGER, plant)

    def look() -> None:
        with Directory.open(mine) as directory:
            for act in (lambda: directory.read("file", 100), lambda: directory.enter("folder")):
                with pytest.raises(UntrustedFile, match=f"belongs to user {STRANGER}"):
                    act()
            with pytest.raises(UntrustedFile, match="belongs to user 0"):
                directory.check_own()

    run_as(VICTIM, look)


@needs_root
def test_a_group_of_ones_own_may_write_and_a_common_one_may_not(inside: Path) -> None:
    (inside / "file").write_text("content")
    (inside / "file").chmod(0o664)  # root's group is root's alone
    with Directory.open(inside) as directory:
        assert directory.read("file", 10) == b"content"
        os.chown(inside / "file", 0, STRANGER)
        (inside / "file").chmod(0o664)
        with pytest.raises(UntrustedFile, match="others can write"):
            directory.read("file", 10)


@needs_root
@pytest.mark.parametrize(
    ("mode", "group", "expected"),
    [
        pytest.param(0o750, VICTIM, (0o640, 0o750), id="the group of who writes"),
        pytest.param(0o750, STRANGER, (0o600, 0o700), id="a group that he is not of"),
        pytest.param(0o740, VICTIM, (0o600, 0o700), id="a group that cannot enter"),
        pytest.param(0o700, VICTIM, (0o600, 0o700), id="nobody else's"),
    ],
)
def test_what_is_made_can_be_read_by_the_group_that_the_directory_lets_in(
    common_place: Path, mode: int, group: int, expected: tuple[int, int]
) -> None:
    place = common_place / "place"
    place.mkdir()
    os.chown(place, VICTIM, group)
    place.chmod(mode)

    def write() -> None:
        for shared in (False, True):
            with Directory.open(place, group_reads=shared) as directory, directory.make(f"made-{shared}") as inner:
                inner.write_whole("file", b"x")

    run_as(VICTIM, write)
    for shared, modes in ((False, (0o600, 0o700)), (True, expected)):
        made = [(place / f"made-{shared}" / "file").stat(), (place / f"made-{shared}").stat()]
        assert tuple(stat.S_IMODE(one.st_mode) for one in made) == modes
        assert all(one.st_gid == VICTIM for one in made)


def test_an_error_of_the_system_names_the_whole_path(inside: Path) -> None:
    with Directory.open(inside) as directory:
        for act in (
            lambda: directory.status("none"),
            lambda: directory.read_link("none"),
            lambda: directory.enter("none"),
            lambda: directory.open_file("none"),
            lambda: directory.rename("none", "other"),
            lambda: directory.unlink("none"),
        ):
            with pytest.raises(FileNotFoundError) as caught:
                act()
            assert caught.value.filename == str(inside / "none")
