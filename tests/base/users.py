"""Code run as another user, for tests of what one user can do to another. They need root."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable

import pytest

# Numbers that no account has.
VICTIM, STRANGER = 54321, 54322
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")


def run_as(uid: int, act: Callable[[], object]) -> None:
    """Run something in a forked child that is another user; an error there is an error here."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            act()
            code = 0
        except BaseException:  # noqa: BLE001, the end of a process
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0, f"user {uid} failed; see stderr"
