"""The address file of a service: where its dispatcher is and the job's keys, JSON with mode 0600.

Written by the dispatcher, read by loaders and data workers. Whoever can read the file belongs to the job. It is there
for as long as the service is: a dispatcher that ends in order takes it away, one that was killed leaves it to the next.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import stat
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from hetstream.base.errors import ConfigError
from hetstream.base.files import Directory, UntrustedFile
from hetstream.mpi_dataworkers.errors import ServiceError, ServiceUnavailable

_log = logging.getLogger(__name__)

_FORMAT = 1
# The parts of a service start together: who waits for longer than this says so.
_QUIET_WAIT_S = 3.0


@dataclass(frozen=True)
class ServiceAddress:
    """Address and keys of one service.

    Attributes:
        address: `tcp://HOST:PORT` of the dispatcher.
        server_public_key: the dispatcher's CURVE key, Z85 text; clients connect to no other.
        client_public_key, client_secret_key: the job's CURVE key; the dispatcher accepts no other.
        batch_key: 32 random bytes in hex; both ends of a batch connection prove that they hold it.
        file: the address file, on a file system that all processes of the service share.
    """

    address: str
    server_public_key: str
    client_public_key: str
    client_secret_key: str
    batch_key: str
    file: Path = field(default=Path(), compare=False)

    @property
    def pipelines_dir(self) -> Path:
        """Where trainers put what is too large for a message; of this service alone."""
        return self.file.parent / f"pipelines-{hashlib.sha256(self.server_public_key.encode()).hexdigest()[:16]}"

    def as_in_file(self) -> ServiceAddress:
        """Return the service where its address file says now that it is: a dispatcher whose port was taken has another
        one.

        Nothing but the address may have changed. A file with other keys is another service's, and one that cannot be
        read says nothing: then the address is this one.
        """
        with contextlib.suppress(OSError, ServiceError):
            found = read_address_file(self.file)
            if replace(found, address=self.address) == self:
                return found
        return self

    def __repr__(self) -> str:
        return f"ServiceAddress({self.address!r}, keys hidden)"


def write_address_file(path: Path, service: ServiceAddress) -> None:
    """Write the file in one step (temporary file, rename), readable by its owner alone."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fields = {name: value for name, value in asdict(service).items() if name != "file"}
    with Directory.open(path.parent) as directory:
        directory.write_whole(path.name, json.dumps({"format": _FORMAT, **fields}, indent=1).encode())


def remove_address_file(path: Path, service: ServiceAddress) -> None:
    """Take the file of a service away, unless it is another service's by now."""
    with contextlib.suppress(OSError, ServiceError):
        if read_address_file(path) == service:
            path.unlink()


def has_ended(path: Path) -> bool:
    """Return whether the service whose address file was here has ended; False also where nobody can tell."""
    try:
        path.stat()
    except FileNotFoundError:
        return True
    except OSError:  # a file system that is away for a moment
        return False
    return False


def parse_service(service: str) -> Path:
    """Path of a `file:PATH` service name; absolute, since programs change their working directory.

    Raises:
        ConfigError: another form.
    """
    scheme, _, path = service.partition(":")
    if scheme != "file" or not path:
        raise ConfigError(f"service {service!r}: the form is file:PATH, the address file of a dispatcher")
    return Path(path).absolute()


def read_address_file(path: Path) -> ServiceAddress:
    """Read and check an address file.

    Raises:
        FileNotFoundError: it does not exist (yet).
        ServiceError: it is a link, others may read it, it belongs to someone else, or it is no address file.
    """
    try:
        with Directory.open(path.parent) as directory:
            descriptor = directory.open_file(path.name)
    except UntrustedFile as error:
        raise ServiceError(f"address file {error}. It holds the job's keys: use the dispatcher's own file") from error
    with open(descriptor) as stream:
        facts = os.fstat(stream.fileno())
        if facts.st_uid not in (os.getuid(), 0) or stat.S_IMODE(facts.st_mode) & 0o077:
            raise ServiceError(
                f"address file {path}: owner {facts.st_uid}, mode {stat.S_IMODE(facts.st_mode):04o}; it holds the "
                f"job's keys and must be yours with mode 0600. Use the dispatcher's own file."
            )
        try:
            fields = json.load(stream)
            if (version := fields.pop("format")) != _FORMAT:
                raise ServiceError(
                    f"address file {path} has format {version!r}, this release reads format {_FORMAT}: install one "
                    "release of hetstream in all environments of a job (docs/upgrade.md)"
                )
            return ServiceAddress(**fields, file=path)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ServiceError(f"address file {path} is damaged ({error}); start the dispatcher again") from error


def not_there(path: Path, timeout_s: float) -> ServiceUnavailable:
    """Return the error of whoever has waited for an address file that did not come."""
    return ServiceUnavailable(
        f"address file {path} did not appear within {timeout_s:g} s. Is the dispatcher running, and is the "
        "directory on a file system that this host shares?"
    )


def wait_for_address_file(path: Path, timeout_s: float) -> ServiceAddress:
    """Read the address file as soon as it is there.

    Raises:
        ServiceUnavailable: it did not appear in time.
        ServiceError: it is not usable.
    """
    deadline = time.monotonic() + timeout_s
    say_at = time.monotonic() + _QUIET_WAIT_S
    while True:
        with contextlib.suppress(FileNotFoundError):
            return read_address_file(path)
        if time.monotonic() > say_at:
            _log.warning("hetstream: waiting up to %g s for the address file %s", timeout_s, path)
            say_at = deadline
        if time.monotonic() > deadline:
            raise not_there(path, timeout_s)
        time.sleep(0.05)
