"""Messages about what goes on in a service, and the elastic controller's. Holds no logic."""

from __future__ import annotations

from typing import Literal

import msgspec

from hetstream.base.training_progress import TrainingProgress
from hetstream.mpi_dataworkers.wire.work import Device, FeatureCut, LoaderStats, Message, OptimizerCalls


class RequestStatus(Message, frozen=True):
    """Tell what goes on; asked without registering, changes nothing."""


class SteerDataWorkers(Message, frozen=True):
    """The job's elastic controller tells what it does; asked without registering, answered with `Status`.

    Attributes:
        elastic: what it says of itself, on one line.
        action: grow, drain or cancel; "" for nothing new.
        count: data workers that the action is about.
        reason: of the action.
        drain: Slurm jobs whose data workers are to leave after the step that they are at.
        device: of the data workers of the stage that it is the controller of.
    """

    elastic: str
    action: str
    count: int
    reason: str
    drain: list[str]
    device: Device = "cpu"


DataWorkerState = Literal["working", "idle", "draining", "unreachable", "silent"]


class DataWorkerStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One data worker process.

    Attributes:
        state: `unreachable`: it could not deliver to some loader, and is not used for that one for a while.
        leases: that it holds now.
        steps, leases_revoked: since it registered; steps count when their lease is finished.
        steps_per_s, busy_share, wait_share: over the last seconds. Busy is the time in which it made steps,
            `wait_share` that in which it waited for the stage before, or did its work because nobody else did.
        up_s: since it registered.
        silent_s: since its last message.
        slurm_job: as in `RegisterWorker`.
        resident_bytes: of its memory, without files' pages, and its part of what it shares; 0 while that is not known.
        device: what it makes steps with.
    """

    number: int
    host: str
    pid: int
    state: DataWorkerState
    leases: int
    steps: int
    steps_per_s: float
    busy_share: float
    leases_revoked: int
    up_s: float
    silent_s: float
    slurm_job: str = ""
    resident_bytes: int = 0
    device: Device = "cpu"
    wait_share: float = 0.0


class LoaderStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One loader of one rank.

    Attributes:
        ordinal: number of the loader in its program.
        epoch: -1 between sessions.
        step, num_steps: taken by the training loop, of how many in this epoch; -1 while that is not known.
        buffered, window: steps that wait in its buffer, and how many may wait or be on their way.
        num_data_workers: that reach it.
        steps_per_s, bytes_per_s, wait_share: over the last seconds; a wait counts when it ends.
        totals: since the loader was made.
        step_s: time of the training loop for a step without its waits for data, over the last seconds; 0 without steps.
        step_time_spread: of `step_s` over the ranks of this loader that took steps: (largest - smallest) / mean.
        title: what a person knows it by, such as `ImageFolder train.py:38`.
        training: how far the training loop of its process is; None where no framework told it.
        device: what data workers make its batches with.
        optimizer: what its process has counted of optimizers' steps; None while none has stepped.
        features: where its feature graph is cut; None without one.
    """

    job: str
    ordinal: int
    rank: int
    world_size: int
    host: str
    pid: int
    epoch: int
    step: int
    num_steps: int
    buffered: int
    window: int
    num_data_workers: int
    steps_per_s: float
    bytes_per_s: float
    wait_share: float
    totals: LoaderStats
    step_s: float = 0.0
    step_time_spread: float = 0.0
    title: str = ""
    training: TrainingProgress | None = None
    device: Device = "cpu"
    optimizer: OptimizerCalls | None = None
    features: FeatureCut | None = None


class PastDecision(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A change of the number of data workers of a stage, `ago_s` seconds ago."""

    ago_s: float
    action: str
    count: int
    reason: str
    device: Device = "cpu"


class Status(Message, frozen=True):
    """Answer to `RequestStatus`.

    Attributes:
        incarnation: number of this start of the dispatcher, from 1.
        uptime_s: since this start.
        data_workers, loaders: those that are there.
        data_workers_seen, data_workers_lost, leases_granted, leases_revoked: since this start; a data worker that left
            in an orderly way was not lost.
        leases_per_s: granted over the last seconds.
        elastic: what the elastic controller says of itself; "" without one.
        decisions: the last ones of both controllers, oldest first.
        elastic_gpu: what the controller of the stage on GPUs says of itself; "" without one.
    """

    incarnation: int
    uptime_s: float
    data_workers: list[DataWorkerStatus]
    loaders: list[LoaderStatus]
    data_workers_seen: int
    data_workers_lost: int
    leases_granted: int
    leases_revoked: int
    leases_per_s: float
    elastic: str = ""
    decisions: list[PastDecision] = []
    elastic_gpu: str = ""
