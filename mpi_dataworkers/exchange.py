"""One copy of a large dataset for all processes of a data worker: loaded by the supervisor, which forks them anew.

A child that meets a pipeline of which the pickled form is large puts that form here and leaves with
`LOAD_IN_SUPERVISOR`; the supervisor loads it and renews its children, which have it then and share its memory with each
other for as long as nobody writes to it. Only one child of a data worker fetches at a time; the others see that a large
one came and wait to be renewed. Small ones are loaded by each child itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator

import msgspec

from mpi_dataworkers.ops.pipeline import Definition, Pipeline

LARGE_BYTES = 1 << 20
# Exit code of a child that left a definition for its supervisor.
LOAD_IN_SUPERVISOR = 3
# A supervisor that has not renewed a child by then does not: it loads the dataset itself.
RENEWED_WITHIN_S = 60.0
_ID_BYTES = 64
_LOOK_AGAIN_S = 0.02


class Renew(Exception):
    """A large definition is left for the supervisor: this process is to end, and be forked anew."""


class Exchange:
    """Shared by a supervisor and its children; made before the fork.

    Attributes:
        pipelines: what the supervisor has loaded, by definition id.
        in_place: definitions that it could not load; its children find out why.
    """

    def __init__(self) -> None:
        self.pipelines: dict[str, Pipeline] = {}
        self.in_place: set[str] = set()
        self._file = os.memfd_create("hetstream-definition")

    @contextlib.contextmanager
    def alone(self, definition_id: str, should_stop: Callable[[], bool]) -> Iterator[bool]:
        """Wait until no other child fetches a definition.

        Gives:
            Whether to fetch this one; else to stop, because the supervisor loads it or the service ends.
        """
        deadline = time.monotonic() + RENEWED_WITHIN_S
        # A lock of this open file, not of the inherited one, which all children have in common.
        own = os.open(f"/proc/self/fd/{self._file}", os.O_RDWR)
        try:
            while not should_stop():
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(own, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if self._left() != definition_id or time.monotonic() > deadline or definition_id in self.in_place:
                        yield True
                        return
                    fcntl.flock(own, fcntl.LOCK_UN)
                time.sleep(_LOOK_AGAIN_S)
            yield False
        finally:
            os.close(own)

    def leave(self, definition: Definition) -> None:
        """Leave a large definition for the supervisor, if this is one that it may load.

        Raises:
            Renew: it is left.
        """
        if len(definition.blob) < LARGE_BYTES or definition.definition_id in self.in_place:
            return
        os.ftruncate(self._file, 0)
        with open(os.dup(self._file), "wb") as stream:
            stream.seek(_ID_BYTES)
            fields = definition.definition_id, definition.sys_path, definition.working_dir
            head = msgspec.msgpack.encode(fields)
            stream.write(len(head).to_bytes(8, "little") + head)
            stream.write(definition.blob)
            stream.flush()
        os.pwrite(self._file, definition.definition_id.encode().ljust(_ID_BYTES, b"\0"), 0)
        raise Renew

    def take(self) -> Definition | None:
        """The definition that a child left, for the supervisor; None when there is none that it does not have."""
        definition_id = self._left()
        is_there = os.fstat(self._file).st_size > _ID_BYTES
        if not is_there or definition_id in self.pipelines or definition_id in self.in_place:
            return None
        with open(os.dup(self._file), "rb") as stream:
            stream.seek(_ID_BYTES)
            head = stream.read(int.from_bytes(stream.read(8), "little"))
            _, sys_path, working_dir = msgspec.msgpack.decode(head, type=tuple[str, list[str], str])
            blob = stream.read()
        return Definition(definition_id, sys_path, working_dir, blob)

    def empty(self) -> None:
        """Give the memory of the pickled form back; its id stays, for children that are not renewed yet."""
        os.ftruncate(self._file, _ID_BYTES)

    def _left(self) -> str:
        return os.pread(self._file, _ID_BYTES, 0).rstrip(b"\0").decode()

    def close(self) -> None:
        """Give it all back."""
        os.close(self._file)
