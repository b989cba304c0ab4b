"""What a program changes between two passes of a loader and pickling does not show: `__getstate__` leaves it out, say.

Each of torch's worker processes begins with it. Of what is pickled alike the objects are looked at each time. Loaders
come and go, so what was seen is remembered for the whole program.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from hetstream.mpi_dataworkers.handlers import others
from hetstream.mpi_dataworkers.ops.changes import State, change_between, objects_at, state_of
from hetstream.mpi_dataworkers.ops.pickling import pickle_apart

# Paths in all that is remembered: about 200 bytes each.
_MOST_PATHS = 400_000

_seen: OrderedDict[str, State] = OrderedDict()


def unseen_change(pipeline_id: str, objects: Mapping[str, Any]) -> str:
    """What has changed since the same was sent before, on one line; "" for nothing.

    Args:
        pipeline_id: of what data workers are sent.
        objects: that it was made of.
    """
    now = state_of(objects, with_generators=False)
    before = _seen.setdefault(pipeline_id, now)
    _seen.move_to_end(pipeline_id)
    while len(_seen) > 1 and sum(map(len, _seen.values())) > _MOST_PATHS:
        _seen.popitem(last=False)
    # What is opened late, and cannot be pickled, is no change: a file, a connection.
    new = objects_at(objects, [path for path in now if before.get(path, now) is None and now[path] is not None])
    opened = [path for path, value in new.items() if not _can_be_pickled(value)]
    for path in opened:
        below = tuple(f"{path}{mark}" for mark in (".", "[", " "))
        before, now = (
            {each: state[each] for each in state if each != path and not each.startswith(below)}
            for state in (before, now)
        )
    return change_between(before, now)


def _can_be_pickled(value: Any) -> bool:
    try:
        pickle_apart(value)
    except others():  # pickling runs user code; the question is only whether it raises
        return False
    return True
