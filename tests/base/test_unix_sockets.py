"""Who may listen at a name that all users know, and who is believed there."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hetstream.base.files import UntrustedFile
from hetstream.base.unix_sockets import listen_at, peer_of, stranger_at
from tests.base.users import STRANGER, VICTIM, needs_root, run_as

pytestmark = needs_root
SERVICE = 54323


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that is root's, below others that are."""
    path = Path(tempfile.mkdtemp(prefix="hetstream-socket-", dir="/run"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def listening(directory: Path, uid: int, mode: int = 0o755) -> socket.socket:
    """A user's socket in a directory that is his."""
    directory.mkdir()
    listener = socket.socket(socket.AF_UNIX)
    directory.chmod(0o777)
    os.seteuid(uid)  # the kernel notes the user at listen()
    try:
        listener.bind(str(directory / "socket"))
        listener.listen(16)
    finally:
        os.seteuid(0)
    (directory / "socket").chmod(0o666)
    os.chown(directory, uid, uid)
    directory.chmod(mode)
    return listener


def believed_by(uid: int, path: Path, listener: socket.socket) -> bool:
    """Whether a user believes who listens."""

    def look(expected: int | None) -> Callable[[], None]:
        def act() -> None:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(str(path))
                assert stranger_at(path, connection) == expected

        return act

    try:
        run_as(uid, look(None))
    except AssertionError:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(path))
            run_as(uid, look(peer_of(connection)[1]))
        return False
    return True


@pytest.mark.parametrize(
    ("owner", "asker", "believed"),
    [(0, VICTIM, True), (SERVICE, VICTIM, True), (SERVICE, 0, True), (VICTIM, VICTIM, True)],
)
def test_a_service_is_known_by_the_directory_that_root_gave_it(
    place: Path, owner: int, asker: int, believed: bool
) -> None:
    with listening(place / "service", owner) as listener:
        assert believed_by(asker, place / "service/socket", listener) is believed


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o775])
def test_nobody_is_believed_where_others_can_listen(place: Path, mode: int) -> None:
    with listening(place / "service", STRANGER, mode) as listener:
        assert not believed_by(VICTIM, place / "service/socket", listener)


@pytest.mark.shows("who asks a service learns from the kernel who listens")
def test_a_directory_that_a_stranger_made_makes_him_no_service(place: Path) -> None:
    place.chmod(0o1777)
    with listening(place / "service", STRANGER) as listener:
        assert not believed_by(VICTIM, place / "service/socket", listener)


@pytest.mark.shows("who asks a service learns from the kernel who listens")
def test_a_strangers_link_to_what_root_gave_him_makes_him_no_service(place: Path) -> None:
    (place / "scratch").mkdir()
    (place / "scratch").chmod(0o1777)
    with listening(place / "home", STRANGER) as listener:
        run_as(STRANGER, lambda: (place / "scratch/service").symlink_to(place / "home"))
        assert not believed_by(VICTIM, place / "scratch/service/socket", listener)


def test_what_is_no_socket_is_not_replaced_and_a_dead_one_is(place: Path) -> None:
    path = place / "socket"
    path.write_text("results of a year")
    with pytest.raises(FileExistsError):
        listen_at(path, socket.SOCK_STREAM, 0o666, 1)
    path.unlink()
    listen_at(path, socket.SOCK_STREAM, 0o666, 1).close()
    with (
        listen_at(path, socket.SOCK_STREAM, 0o666, 1),
        pytest.raises(OSError, match="Address already in use"),
    ):
        listen_at(path, socket.SOCK_STREAM, 0o666, 1)
    place.chmod(0o777)
    with pytest.raises(UntrustedFile, match="anybody could put another directory"):
        listen_at(path, socket.SOCK_STREAM, 0o666, 1)
