"""Lets a checkpoint writer of a test have its share of the processor, as if it had not lowered its priority.

Two test processes keep the cores busy. Beside them a writer of niceness 19 needs seconds for what takes milliseconds,
and many tests wait for it. Python runs this at its start where `conftest.py` has put this directory on its path.
"""

import os
import pathlib

_AUTOGROUP = pathlib.Path("/proc/self/autogroup")
_write_text = pathlib.Path.write_text


def _write_but_no_share(path, data, *args, **kwargs):
    return len(data) if path == _AUTOGROUP else _write_text(path, data, *args, **kwargs)


os.nice = lambda increment: increment
pathlib.Path.write_text = _write_but_no_share
