"""Python's collector of cycles, held off while a state is taken apart or put together.

That makes many objects at once, and no cycles. The collector would look at each object of the program several times
meanwhile, torch's too, which takes longer than all else for a state of many small tensors.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def held_off() -> Iterator[None]:
    """Collect nothing in the block. It is for the program's own thread: two at a time would not know of each other."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
