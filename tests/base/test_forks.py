"""A process knows, without asking the kernel, whether it was forked from the one that made something."""

from __future__ import annotations

import os

from hetstream.base.process import generation


def test_each_fork_begins_another_generation() -> None:
    before = generation()
    assert generation() == before, "nobody was forked"
    child = os.fork()
    if child == 0:
        grandchild = os.fork()
        if grandchild == 0:
            os._exit(generation() - before)
        _, status = os.waitpid(grandchild, 0)
        is_next = generation() == before + 1 and os.waitstatus_to_exitcode(status) == 2
        os._exit(0 if is_next else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert generation() == before, "the parent stays what it was"
