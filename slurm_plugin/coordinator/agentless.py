"""Processes that hold memory of a GPU and have no agent for it: nobody can tell them to pause. Pure.

The agent comes to a job by its environment, which is the job's own to change, and a program without torch has none. So
the GPU is asked who holds its memory and who computes, and the kernel which job that is.

An agent comes before the first launch, and before the first tensor. What a process has before is a context: a program
that has named its GPU and then reads its data for minutes holds one, computes nothing, and is let alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hetstream.hetjob.gpu.orders import JobClass
from hetstream.slurm_plugin.coordinator.gpus import GpuReading

# A process that ends has closed its connection before the driver has freed its memory. As long as who does not keep to
# a limit has (`decide.py`).
_GRACE_NS = 10_000_000_000
# A process from before the coordinator may have an agent: that comes back at its next launch or boundary, and until
# then computes nothing.
_FROM_BEFORE_NS = 600_000_000_000
# A context and its libraries have at most so much, and of a small GPU no more than this part.
_CONTEXT_BYTES, _CONTEXT_PART = 2**30, 8


@dataclass(frozen=True)
class Holder:
    """Whose a process is.

    Attributes:
        job: that it belongs to.
        job_class: of the job.
        uid: whose the job is.
    """

    job: str
    job_class: JobClass
    uid: int


@dataclass(frozen=True)
class Agentless:
    """A process that holds memory without an agent for this GPU.

    Attributes:
        pid: its number.
        holder: whose it is; None: of no job that was given a GPU here.
        held_bytes: memory of the GPU that it holds.
        is_from_before: it was there before the coordinator.
        tensors_ns: since when it has held more than a context; None: it does not.
        launched_ns: when it was first seen to compute; None: never.
        goes_on: it was seen again long after that.
    """

    pid: int
    holder: Holder | None
    held_bytes: int
    is_from_before: bool
    tensors_ns: int | None = None
    launched_ns: int | None = None
    goes_on: bool = False

    @property
    def is_hog(self) -> bool:
        """Whether it is an opportunistic job's with more than a context. A guaranteed job's processes need no agent."""
        return self.tensors_ns is not None and self._is_opportunistic

    @property
    def _is_opportunistic(self) -> bool:
        return self.holder is not None and self.holder.job_class is JobClass.OPPORTUNISTIC

    def complaint(self, now_ns: int) -> str:
        """Why its job is to be taken away; empty: it is not."""
        if not self._is_opportunistic:
            return ""
        if self.goes_on:
            return f"process {self.pid} computes on the GPU without an agent, so that nobody can have it pause"
        patience_ns = _FROM_BEFORE_NS if self.is_from_before else _GRACE_NS
        if self.tensors_ns is not None and now_ns - self.tensors_ns > patience_ns:
            return (
                f"process {self.pid} holds {self.held_bytes:,} bytes of the GPU without an agent, so that nobody can "
                "have it pause"
            )
        return ""


def agentless(
    reading: GpuReading,
    capacity_bytes: int,
    with_agent: Mapping[int, bool],
    before: Mapping[int, Agentless] | None,
    holder_of: Callable[[int], Holder | None],
    now_ns: int,
) -> dict[int, Agentless] | None:
    """The processes on a GPU that have no agent for it, by their numbers; None where nobody counts.

    Args:
        reading: what the GPU says.
        capacity_bytes: memory of the GPU.
        with_agent: the processes that the coordinator knows; whether they keep to its orders for this GPU. One that
            keeps to those for another GPU of its job may have a context here, too, and compute a little by mistake.
        before: what the call before returned.
        holder_of: whose a process is. Asked each time: a number may be another process's by now.
        now_ns: the time.
    """
    if reading.held_bytes is None:
        return None
    context_bytes = min(_CONTEXT_BYTES, capacity_bytes // _CONTEXT_PART)
    found = {}
    for pid, num_bytes in reading.held_bytes.items():
        if not num_bytes or with_agent.get(pid, False):
            continue
        holder = holder_of(pid)
        known = before.get(pid) if before else None
        if known is None or known.holder != holder:
            known = Agentless(pid, holder, num_bytes, is_from_before=before is None)
        launched_ns, goes_on = known.launched_ns, known.goes_on
        if pid in reading.computing and pid not in with_agent:
            launched_ns = now_ns if launched_ns is None else launched_ns
            goes_on |= now_ns - launched_ns > _GRACE_NS
        tensors_ns = (known.tensors_ns or now_ns) if num_bytes > context_bytes else None
        found[pid] = Agentless(pid, holder, num_bytes, known.is_from_before, tensors_ns, launched_ns, goes_on)
    return found
