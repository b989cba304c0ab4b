"""What a batch stage must be, and what tells two of them apart. Used by `options.py` and `loader_connection.py`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hetstream.mpi_dataworkers.handlers import others
from hetstream.mpi_dataworkers.ops.pickled_pipeline import find_unpicklable
from hetstream.mpi_dataworkers.ops.pickling import digest_of, pickle_apart
from hetstream.mpi_dataworkers.ops.pipeline import Stages
from hetstream.mpi_dataworkers.ops.reachable import device_of
from hetstream.mpi_dataworkers.wire.messages import Program


def picklable_stage(name: str, value: Any) -> Iterator[str]:
    """A function of a batch that data workers can have, or None."""
    if value is None:
        return
    if not callable(value):
        yield f"{name}={value!r}: must be a function of a batch or None"
        return
    if device := device_of(value):
        yield (
            f"{name}: it holds a tensor on {device}, a device that data workers do not have. Move it with .cpu(), or "
            "keep this part in the training loop"
        )
        return
    try:
        pickle_apart(value)
    except others() as error:  # pickling runs user code: any exception may come
        yield (
            f"{name}: {find_unpicklable(value)} cannot be pickled ({error}), and data workers get the stage pickled. "
            "Make it a function or a class of a module, open files and connections when it is first called, or leave "
            "them out in __getstate__"
        )


def digest_of_stages(stages: Stages) -> str:
    """What tells stages from other ones under the same `pipeline_name`; "" without a stage."""
    if stages == (None, None):
        return ""
    pickled = pickle_apart(stages)
    return " stages " + digest_of(pickled.blob, pickled.buffers, Program("", []), b"")
