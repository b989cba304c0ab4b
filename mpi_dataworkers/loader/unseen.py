"""What a program has in its objects and pickling does not show: `__getstate__` leaves it out, say.

Each of torch's worker processes begins with it. Before the first pass what `__getstate__` and `__reduce__` of the
program's classes write is compared with what the objects hold. Of what is pickled alike the objects are looked at each
time. Loaders come and go, so what was seen is remembered for the whole program.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from hetstream.mpi_dataworkers.handlers import others
from hetstream.mpi_dataworkers.ops.changes import (
    State,
    change_between,
    is_alike,
    look_at,
    objects_at,
    state_of,
    writes_itself,
)
from hetstream.mpi_dataworkers.ops.pickled_pipeline import PickledPipeline, copy_of
from hetstream.mpi_dataworkers.ops.pickling import RunsUserCode, pickle_apart
from hetstream.mpi_dataworkers.ops.pipeline import generators_kept

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


def left_out(pickled: PickledPipeline, objects: Mapping[str, Any]) -> str:
    """What `__getstate__` or `__reduce__` of the program's own classes leaves out or changes, by its path; "" for
    nothing. What cannot be pickled is left out with a reason: an open file, a connection.

    Args:
        pickled: what data workers are sent.
        objects: that it was made of, as `unseen_change`.
    """
    if pickled.pipeline_id in _seen:
        return ""
    now, held = look_at(objects)
    writers = tuple(path for path, value in held.items() if writes_itself(type(value)))
    if not writers:
        return ""
    with generators_kept():
        copied = copy_of(pickled.in_private())[0]
    then, _ = look_at({**copied.user_objects, "worker_init_fn": copied.worker_init_fn})
    passed: tuple[str, ...] = ()
    for path, value in now.items():
        is_written = any(path.startswith(f"{writer}.") or path.startswith(f"{writer}[") for writer in writers)
        if not is_written or path.startswith(passed) or value is None or is_alike(then.get(path), value):
            continue
        if path not in held or _can_be_pickled(held[path]):
            return path
        passed += tuple(f"{path}{mark}" for mark in (".", "[", " "))
    return ""


def _can_be_pickled(value: Any) -> bool:
    """As far as can be said without calling user code."""
    try:
        pickle_apart(value, runs_user_code=False)
    except RunsUserCode:
        return True
    except others():  # the question is only whether it raises
        return False
    return True
