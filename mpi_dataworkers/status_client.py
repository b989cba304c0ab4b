"""Asks a dispatcher what goes on, without registering. Called by `hetstream top` and the elastic controller."""

from __future__ import annotations

import secrets
import time
from pathlib import Path

from hetstream.mpi_dataworkers.errors import ServiceError, ServiceUnavailable
from hetstream.mpi_dataworkers.transports.base import Reconnected
from hetstream.mpi_dataworkers.transports.zmq import ZmqWorkerEndpoint
from hetstream.mpi_dataworkers.wire.address import ServiceAddress, read_address_file
from hetstream.mpi_dataworkers.wire.messages import Refused, RequestStatus, Status, SteerDataWorkers

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
        """What goes on now.

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
