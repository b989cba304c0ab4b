"""Which Python a program runs, and how data workers come to run the same. Imports no torch.

Data workers are started before the script activates its environment. So each process of the program that imports torch
writes down beside the address file where it runs (`announce`); data workers that follow the program
(`EnvironmentWatch`) read it, and if they run in another environment, start anew in that one (`become`). A program in a
container cannot be followed from outside of it; there, and where the user says which Python it shall be, nobody is
followed.
"""

from __future__ import annotations

import ctypes
import functools
import json
import logging
import os
import platform
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from hetstream.base.access import owners_of, strange_here
from hetstream.base.errors import ConfigError
from hetstream.base.files import Directory
from hetstream.mpi_dataworkers.process.config import (
    PATH_LISTS,
    PATHS,
    container_from_environment,
    environment_with_hash_seed,
    identity_from_environment,
    python_environment,
)
from hetstream.mpi_dataworkers.wire.address import has_ended, not_there
from hetstream.mpi_dataworkers.wire.messages import Interpreter

_log = logging.getLogger(__name__)

_FILE = "program-python.json"
_MAX_BYTES = 1 << 20
# How often it is looked for: it changes once in a job, as a rule.
LOOK_S = 1.0
# For the address file of a service that starts together with its data workers.
SERVICE_TIMEOUT_S = 30.0


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""  # built without metadata, or found by a path alone


@functools.cache
def this_interpreter() -> Interpreter:
    """Return the Python of this process."""
    return Interpreter(sys.executable, platform.python_version(), _version("torch"), _version("hetstream"))


@dataclass(frozen=True)
class PythonEnvironment:
    """Where a Python process runs.

    Attributes:
        executable: of Python, as it was called.
        prefix: of its installation or virtual environment.
        container: image of its container; "" outside of one.
        variables: of its environment, those that belong to it.
        host: where it runs.
        owners: there, of all the places that its programs and modules are found in; see `strange_here`.
    """

    executable: str
    prefix: str
    container: str
    variables: Mapping[str, str]
    host: str = field(default="", compare=False)
    owners: Mapping[str, list[int]] = field(default_factory=dict, compare=False)

    @classmethod
    def here(cls) -> PythonEnvironment:
        """That of this process."""
        found = cls(sys.executable, sys.prefix, container_from_environment(), python_environment(), platform.node())
        listed = (entry for name in PATH_LISTS for entry in found.variables.get(name, "").split(os.pathsep))
        places = (*found._of_program(), *listed, *(found.variables.get(name, "") for name in PATHS))
        return replace(found, owners={place: owners_of(place) for place in places if place})

    def _of_program(self) -> Iterator[str]:
        yield from (self.executable, os.path.dirname(self.executable), self.prefix)

    def why_strange(self) -> str:
        """Return why its Python may be a stranger's on this host; "" if it is not."""
        there = [place for place in self._of_program() if os.path.exists(place)]
        return next(filter(None, (strange_here(place, self.owners.get(place, ())) for place in there)), "")

    def without_strangers(self) -> PythonEnvironment:
        """Return the same without what may be a stranger's on this host."""
        variables = dict(self.variables)
        for name in (*PATH_LISTS, *PATHS):
            entries = [entry for entry in variables.pop(name, "").split(os.pathsep) if entry]
            if kept := [entry for entry in entries if not strange_here(entry, self.owners.get(entry, ()))]:
                variables[name] = os.pathsep.join(kept)
        return replace(self, variables=variables)

    @property
    def digest(self) -> str:
        """Names it, without its host."""
        fields = (self.prefix, self.container, sorted(self.variables.items()))
        return blake2b(json.dumps(fields).encode(), digest_size=8).hexdigest()


def take_hash_seed() -> None:
    """Have this process order sets of text as all do that make samples: starts it anew, unless it does."""
    environ = environment_with_hash_seed()
    if environ is not None and sys.executable:
        os.execve(sys.executable, sys.orig_argv, environ)


def announce(address_file: Path) -> None:
    """Write down beside a service's address file where this process runs, unless that is known.

    Of several ranks the first one does: on other hosts paths may differ in a word. Never an error: without it data
    workers stay as they are.
    """
    try:
        here = PythonEnvironment.here()
        if identity_from_environment(None).rank or announced(address_file) == here:
            return
        with Directory.open(address_file.parent) as directory:
            directory.check_own()
            directory.write_whole(_FILE, json.dumps(asdict(here)).encode())
    except (OSError, ConfigError) as error:
        _log.debug("data workers are not told where this program runs: %s", error)


def announced(address_file: Path) -> PythonEnvironment | None:
    """Return where the program runs that last announced it; None if none did, or nobody can tell."""
    try:
        with Directory.open_safe(address_file.parent, own=True) as directory:
            fields = json.loads(directory.read(_FILE, _MAX_BYTES))
        return PythonEnvironment(**{**fields, "variables": dict(fields["variables"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def remove_announcement(directory: Path) -> None:
    """Take the note away at the end of a service."""
    (directory / _FILE).unlink(missing_ok=True)


class EnvironmentWatch:
    """Tells a data worker when to start anew in the program's Python environment.

    Args:
        address_file: the dispatcher's.
        entered: digest of the environment that this process was started in for a program; "" for none. What it finds
            there may differ in a word from what was announced, and is no reason to start again.

    Attributes:
        chosen: the environment that `wants_change` found last.
    """

    def __init__(self, address_file: Path, entered: str = "") -> None:
        self._address_file = address_file
        self._here = PythonEnvironment.here()
        self._entered = entered
        self._looked_at = float("-inf")
        self._refused = ""
        self.chosen: PythonEnvironment | None = None

    def wait_for_torch(self) -> None:
        """Where this Python has no torch, wait until a program says where it runs, or the service ends.

        Raises:
            ServiceUnavailable: there is no service.
        """
        if find_spec("torch") is not None:
            return
        _log.info("%s has no torch: waiting for the program to say which Python it runs", sys.executable)
        came, deadline = False, time.monotonic() + SERVICE_TIMEOUT_S
        while self.target() is None and not (came and has_ended(self._address_file)):
            came = came or self._address_file.exists()
            if not came and time.monotonic() > deadline:
                raise not_there(self._address_file, SERVICE_TIMEOUT_S)
            time.sleep(LOOK_S)

    def wants_change(self) -> bool:
        """Return whether it is time to start anew; looks at the file about once a second."""
        now = time.monotonic()
        if now - self._looked_at < LOOK_S:
            return False
        self._looked_at = now
        self.chosen = self.target()
        return self.chosen is not None

    def target(self) -> PythonEnvironment | None:
        """Return the environment to start anew in; None to stay."""
        wanted = announced(self._address_file)
        if wanted is None or wanted.digest in (self._here.digest, self._entered, self._refused):
            return None
        reason = self._why_not(wanted)
        if reason:
            self._refused = wanted.digest
            _log.warning(
                "the program on %s runs %s, and this data worker goes on with %s: %s",
                wanted.host,
                wanted.executable,
                sys.executable,
                reason,
            )
            return None
        return wanted

    def _why_not(self, wanted: PythonEnvironment) -> str:
        if wanted.container != self._here.container:
            return (
                f"it is in the container {wanted.container or '(none)'}, into which a data worker gets only by a "
                "command: #HETSTREAM --data-worker-python='apptainer exec IMAGE python'"
            )
        if strange := wanted.why_strange():
            return f"{strange}. Put the environment on a file system that all hosts share"
        if not os.access(wanted.executable, os.X_OK):
            return (
                "there is no such program on this host. Put the environment on a file system that all hosts share, or "
                "name one that is here: #HETSTREAM --data-worker-python=PYTHON"
            )
        return ""


# Memory of a process: what its allocator keeps.
#
# `give_back_freed_memory` is called once by a process that strangers may have hold memory: the dispatcher.
# `keep_freed_memory` is called once by a process that receives or makes batches. A batch of some megabytes that is
# allocated, faulted in page by page and unmapped again costs more CPU time than its way through TCP. glibc only;
# elsewhere nothing is changed.

# From malloc.h of glibc, see mallopt(3).
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
# Blocks below this come from the heap and are used again. Above it the kernel's pages are a small part of the cost.
_HEAP_BELOW_BYTES = 256 << 20
# Free memory at the top of the heap up to here is kept: about what a loader's window holds.
_KEEP_BYTES = 512 << 20
# Below a frame of the control port, of which strangers may make the dispatcher hold a thousand. Set, it stays; else
# each larger block that is freed raises it, and what then comes from the heap is kept below whatever lives longer.
_UNMAPPED_FROM_BYTES = 32 << 10


def give_back_freed_memory() -> None:
    """Let glibc's malloc give large blocks back to the kernel as soon as they are freed (see mallopt(3))."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _UNMAPPED_FROM_BYTES)


def keep_freed_memory() -> None:
    """Let glibc's malloc hold on to freed blocks of the size of batches, in the whole process (see mallopt(3))."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _HEAP_BELOW_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEEP_BYTES)
