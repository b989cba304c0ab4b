"""A state straight to disk, without shared memory and without a checkpoint writer: for conversions, where nobody waits.

Called by `weights.py`. The file is the one that the checkpoint writer would have written.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from hetstream.checkpoint.disk.commit import write_part
from hetstream.checkpoint.disk.manifest import PartSpec
from hetstream.checkpoint.errors import NotEnoughSpace
from hetstream.checkpoint.formats.part import plan_part
from hetstream.checkpoint.formats.plan import FilePlan
from hetstream.checkpoint.record.structure import Record, written_metrics
from hetstream.checkpoint.tensors.copy_plan import make_plan
from hetstream.checkpoint.tensors.leaves import Flattener
from hetstream.checkpoint.tensors.views import bytes_as_tensor


def write_state(
    directory: Path,
    part: PartSpec,
    state: Mapping[str, Any],
    *,
    shared: Iterable[str] = (),
    keys: Iterable[str] | None = None,
    allow_pickle: bool = False,
) -> None:
    """Write one rank's part of a checkpoint; `commit.commit` makes a checkpoint of all parts.

    Args:
        directory: of checkpoints.
        part: whose, of which generation.
        state: top-level key to anything that `save` takes.
        shared: top-level keys that are equal on every rank.
        keys: those that this rank writes; None: all.
        allow_pickle: pickle what has no other form.

    Raises:
        UnsupportedState: something in the state cannot be stored.
        NotEnoughSpace: the disk is full; nothing was written.
    """
    plan, payload = plan_state(state, part, directory, shared=shared, keys=keys, allow_pickle=allow_pickle)
    write_part(directory, part, plan, payload)


def plan_state(
    state: Mapping[str, Any],
    part: PartSpec,
    scratch: Path,
    *,
    shared: Iterable[str] = (),
    keys: Iterable[str] | None = None,
    allow_pickle: bool = False,
) -> tuple[FilePlan, memoryview]:
    """A rank's file and the payload that it is made of, which lies in a nameless file of `scratch`: a state may be
    larger than memory.

    Raises:
        UnsupportedState: something in the state cannot be stored.
        NotEnoughSpace: `scratch` has no room.
    """
    leaves = Flattener(allow_pickle=allow_pickle).flatten(state)
    plan = make_plan(leaves)
    with tempfile.TemporaryFile(dir=scratch) as file:
        num_bytes = max(plan.layout.payload_bytes, mmap.PAGESIZE)
        try:
            # Not truncate: where there is no room, writing to the mapping would end the process.
            os.posix_fallocate(file.fileno(), 0, num_bytes)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            free_bytes = shutil.disk_usage(scratch).free
            raise NotEnoughSpace(
                f"{scratch} has no room for the {num_bytes} bytes of the state: {free_bytes} are free, and nothing was "
                "written; what is written next to them takes as much again"
            ) from error
        payload = memoryview(mmap.mmap(file.fileno(), 0))[: plan.layout.payload_bytes]
    with torch.no_grad():
        memory = bytes_as_tensor(payload)
        for index, tensor in enumerate(plan.tensors_to_copy(leaves.tensors)):
            plan.destination(index, memory).copy_(tensor.detach())
    metrics = written_metrics({name: float(value) for name, value in part.metrics.items()})
    record = Record(leaves.tree, plan.refs, list(shared), part.rank, part.world_size, metrics)
    return plan_part(plan.layout.entries, record, keys), payload
