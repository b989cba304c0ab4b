"""Asks a dispatcher what goes on, without registering. Called by `hetstream job` and the elastic controller."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from hetstream.mpi_dataworkers.errors import ServiceError, ServiceUnavailable
from hetstream.mpi_dataworkers.transports.base import Reconnected
from hetstream.mpi_dataworkers.transports.zmq import ZmqWorkerEndpoint
from hetstream.mpi_dataworkers.wire.address import ServiceAddress, read_address_file
from hetstream.mpi_dataworkers.wire.messages import (
    DataWorkerStatus,
    Device,
    LoaderStatus,
    Refused,
    RequestStatus,
    Status,
    SteerDataWorkers,
)

_CONNECT_TIMEOUT_S = 5.0
_ANSWER_TIMEOUT_S = 5.0


def running_service(path: Path) -> ServiceAddress:
    """Read the address file of a service that should be running.

    Raises:
        ServiceUnavailable: there is no such file.
        ServiceError: it is not usable.
    """
    try:
        return read_address_file(path)
    except FileNotFoundError as error:
        raise ServiceUnavailable(
            f"there is no address file {path}: the job has ended, has not started, or its directory is not visible "
            "from this host"
        ) from error
    except OSError as error:
        raise ServiceError(
            f"the address file {path} cannot be read: {error.strerror}. It holds the job's keys: only the job's "
            "user and root may look at the job"
        ) from error


class StatusClient:
    """A connection to a dispatcher that only asks.

    Args:
        service: address and keys.

    Raises:
        ServiceUnavailable, AuthenticationError: as they say.
    """

    def __init__(self, service: ServiceAddress) -> None:
        self._address = service.address
        self._endpoint = ZmqWorkerEndpoint(service, secrets.token_hex(16), _CONNECT_TIMEOUT_S)

    def fetch(self) -> Status:
        """Return what goes on now.

        Raises:
            ServiceUnavailable: the dispatcher did not answer in time.
            ServiceError: it refused.
        """
        return self._ask(RequestStatus())

    def steer(self, order: SteerDataWorkers) -> Status:
        """Tell what the elastic controller does, and hear what goes on.

        Raises:
            ServiceUnavailable: the dispatcher did not answer in time; it may have heard all the same.
            ServiceError: it refused.
        """
        return self._ask(order)

    def _ask(self, question: RequestStatus | SteerDataWorkers) -> Status:
        self._endpoint.send(question)
        deadline = time.monotonic() + _ANSWER_TIMEOUT_S
        while (left_s := deadline - time.monotonic()) > 0:
            for message in self._endpoint.poll(left_s):
                if isinstance(message, Status):
                    return message
                if isinstance(message, Reconnected):
                    self._endpoint.send(question)  # the question died with the dispatcher of before
                if isinstance(message, Refused):
                    raise ServiceError(f"the dispatcher at {self._address} gave no status: {message.text}")
        raise ServiceUnavailable(f"the dispatcher at {self._address} did not answer within {_ANSWER_TIMEOUT_S:g} s")

    def close(self) -> None:
        """Close the connection."""
        self._endpoint.close()

    def __enter__(self) -> StatusClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# What goes on at each stage of a service: (Status) -> StageLoad. Pure.
#
# Read by the elastic controller of each stage, by `hetstream job` and the metrics. A stage is large enough if those
# that take its batches do not wait: the training loops, or for the stage before the last one the data workers with a
# GPU.


@dataclass(frozen=True, slots=True)
class StageLoad:
    """One stage over the last seconds.

    Attributes:
        device: of its data workers.
        workers: its data worker processes.
        trainers: the loaders in training programs that take its batches.
        reading: somebody takes batches of it.
        steps_per_s: taken of it.
        wait_share: in which those that take its batches waited for it, and the training loop for them; and in which
            training loops computed features that more data workers could compute.
        earlier_wait_share: in which its own data workers waited for the stage before.
        features_share: of the trainer that computes most features itself, the part of `wait_share` that this takes.
    """

    device: Device
    workers: tuple[DataWorkerStatus, ...]
    trainers: tuple[LoaderStatus, ...]
    reading: bool
    steps_per_s: float
    wait_share: float
    earlier_wait_share: float = 0.0
    features_share: float = 0.0

    @property
    def features_on_trainer(self) -> int:
        """Operators that the trainers compute of their feature graphs."""
        return sum(row.features.on_trainer for row in self.trainers if row.features is not None)

    @property
    def busy_share(self) -> float:
        """Of its data workers, on average, in which they made steps."""
        return fmean(worker.busy_share for worker in self.workers) if self.workers else 0.0


def load_of(device: Device, status: Status) -> StageLoad:
    """Return the stage whose data workers have this device.

    A data worker with a GPU also waits while the training loop does not: with a full buffer there is one lease at a
    time, and nothing of it was made ahead. So the stage before is missed no more than the last one is.
    """
    # Between two passes a loader is in none for a moment.
    reading = [row for row in status.loaders if row.epoch >= 0 or row.steps_per_s > 0]
    trainers = tuple(row for row in reading if row.device == device)
    workers = tuple(row for row in status.data_workers if row.device == device)
    steps_per_s = sum(row.steps_per_s for row in trainers)
    wait_share = max(map(_wait_share, trainers), default=0.0)
    features_share = max(map(_features_share, trainers), default=0.0)
    if device == "gpu":
        waiting = max((row.wait_share for row in workers), default=0.0)
        return StageLoad(device, workers, trainers, bool(trainers), steps_per_s, wait_share, waiting)
    last = load_of("gpu", status)
    if not (last.reading and last.workers):
        is_read = bool(trainers)
        return StageLoad(device, workers, trainers, is_read, steps_per_s, wait_share, features_share=features_share)
    steps_per_s += sum(row.steps_per_s for row in last.workers)
    wait_share = max(wait_share, min(last.wait_share, last.earlier_wait_share))
    return StageLoad(device, workers, trainers, True, steps_per_s, wait_share, features_share=features_share)


def has_gpu_stage(status: Status) -> bool:
    """Return whether anything goes on at a stage on GPUs."""
    devices = {row.device for row in status.data_workers} | {row.device for row in status.loaders}
    return "gpu" in devices


def _wait_share(row: LoaderStatus) -> float:
    """A wait counts when it ends: a loop that has taken no step and has none to take has waited all the time."""
    if row.steps_per_s <= 0 and row.buffered == 0 and row.epoch >= 0:
        return 1.0
    return min(1.0, row.wait_share + _features_share(row))


def _features_share(row: LoaderStatus) -> float:
    """A share that a loader has told; what is none counts as nothing."""
    return row.features.share if row.features is not None and 0 <= row.features.share <= 1 else 0.0
