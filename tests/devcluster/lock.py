"""One `up` or `down` at a time where two could collide. Called by boot.py, teardown.py and roots.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from hetstream.base.locks import own_lock
from tests.devcluster.errors import DevclusterError

# Root alone can make files there.
MACHINE = Path("/run")
_NAME = "hetstream-devcluster.lock"


@contextmanager
def locked(directory: Path, timeout_s: float, purpose: str) -> Iterator[None]:
    """Hold the lock of `directory`; it goes with the process that holds it.

    Args:
        directory: in which it is; it must exist, and be this user's or root's.
        timeout_s: how long to wait for another holder.
        purpose: for the message.

    Raises:
        DevclusterError: another process held it all the time.
    """
    with ExitStack() as held:
        try:
            held.enter_context(own_lock(directory / _NAME, timeout_s))
        except TimeoutError as error:
            raise DevclusterError(f"{error} ({purpose})") from None
        yield
