"""Where the site daemon is, for jobs and for the daemon itself: one address in a variable or in the site's file.

unix:/run/hetstream/daemon.sock      jobs on the daemon's own host; the kernel says who asks
tcp://hetstream@controller:9420      jobs on any host; MUNGE says who asks, and only the user `hetstream` can read it
"""

from __future__ import annotations

import pwd
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hetstream.base.errors import ConfigError

ADDRESS_VARIABLE = "HETSTREAM_DAEMON"
MUNGE_VARIABLE = "HETSTREAM_MUNGE_SOCKET"
SITE_FILE = Path("/etc/hetstream/daemon.env")
# The kernel's limit for the path of a Unix socket (unix(7)), with its final zero.
_MAX_SOCKET_PATH = 107


@dataclass(frozen=True)
class UnixAddress:
    """A Unix socket on the daemon's host."""

    path: Path

    def __str__(self) -> str:
        return f"unix:{self.path}"


@dataclass(frozen=True)
class TcpAddress:
    """A TCP port.

    Attributes:
        user: whom the daemon runs as, by name or number: what jobs write can be read by this user alone.
    """

    user: str
    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{self.user}@{host}:{self.port}"

    def reader_uid(self) -> int:
        """The daemon's user id.

        Raises:
            ConfigError: this host does not know the user.
        """
        if self.user.isdigit():
            return int(self.user)
        try:
            return pwd.getpwnam(self.user).pw_uid
        except KeyError as error:
            raise ConfigError(
                f"{ADDRESS_VARIABLE}={self}: no user {self.user} on this host. Name the daemon's user, or its number"
            ) from error


Address = UnixAddress | TcpAddress


@dataclass(frozen=True)
class SiteSettings:
    """How the daemon is reached.

    Attributes:
        address: None if the site has no daemon.
        munge_socket: where munged listens; None for the usual place.
    """

    address: Address | None
    munge_socket: Path | None


def parse_address(text: str) -> Address:
    """Read an address.

    Raises:
        ConfigError: another form.
    """
    unix = re.fullmatch(r"unix:(/.+)", text)
    if unix and len(unix[1].encode()) <= _MAX_SOCKET_PATH:
        return UnixAddress(Path(unix[1]))
    tcp = re.fullmatch(r"tcp://([\w.-]+)@([\w.-]+|\[[0-9A-Fa-f:.]+\]):(\d{1,5})", text)
    if tcp and int(tcp[3]) < 65536:
        return TcpAddress(tcp[1], tcp[2].strip("[]"), int(tcp[3]))
    raise ConfigError(
        f"address of the site daemon {text!r}: must be unix:/PATH (at most {_MAX_SOCKET_PATH} bytes) or "
        "tcp://USER@HOST:PORT, where USER is whom the daemon runs as"
    )


def read_settings(environ: Mapping[str, str], site_file: Path = SITE_FILE) -> SiteSettings:
    """What the environment says and, for variables that are not set there, the site's file. Empty means none.

    Raises:
        ConfigError: an address of another form.
    """
    try:
        text = site_file.read_text(errors="replace")
    except OSError:
        text = ""
    values = {**assignments(text), **environ}
    address, socket = values.get(ADDRESS_VARIABLE, ""), values.get(MUNGE_VARIABLE, "")
    return SiteSettings(parse_address(address) if address else None, Path(socket) if socket else None)


def site_value(name: str, environ: Mapping[str, str], site_file: Path = SITE_FILE) -> str | None:
    """What the environment or the site's file says of a setting that is one word; None if neither does."""
    text = environ.get(name)
    return in_site_file(name, site_file) if text is None else text


def in_site_file(name: str, site_file: Path) -> str | None:
    """What the site's file says of a setting; None if it says nothing, or is not there."""
    try:
        return assignments(site_file.read_text(errors="replace")).get(name)
    except OSError:
        return None


def assignments(text: str) -> dict[str, str]:
    """NAME=VALUE lines of an environment file (systemd.exec(5)), as far as they are ours."""
    found = re.findall(r"^\s*(HETSTREAM_\w+)=(.*)$", text, re.MULTILINE)
    return {name: value.strip().strip("\"'") for name, value in found}
