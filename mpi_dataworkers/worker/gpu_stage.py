"""The stage before: a data worker with a GPU is itself a loader, of the batches that data workers without one make.

For each lease that it holds it opens a session for exactly those steps, at the dispatcher that gave the lease. So the
steps of the earlier stage come as those of any loader come: exactly once, fenced, through the death of who makes them.
A data worker that loses its lease, or ends, takes its sessions with it.
"""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import numpy as np

from hetstream.base.errors import HetstreamError
from hetstream.mpi_dataworkers.loader.batches import TorchBatches
from hetstream.mpi_dataworkers.loader.client import ClientOptions, LoaderName, ServiceClient
from hetstream.mpi_dataworkers.loader.session import (
    Delivered,
    Ended,
    LoaderSession,
    LocalFailure,
    LocalFallback,
    SessionRequest,
    Step,
)
from hetstream.mpi_dataworkers.loader.statistics import LoaderStatistics
from hetstream.mpi_dataworkers.ops.origins import PassSeeds
from hetstream.mpi_dataworkers.ops.pipeline import MadeStep
from hetstream.mpi_dataworkers.process.config import (
    TrainerIdentity,
    buffer_bytes_from_environment,
    compression_from_environment,
    transports_from_environment,
)
from hetstream.mpi_dataworkers.wire.messages import BatchFailed, GrantLease, ListedOrder, ProvidePipeline
from hetstream.mpi_dataworkers.wire.pipeline_transfer import HandoverFailed
from hetstream.mpi_dataworkers.worker.leases import LeaseGone
from hetstream.mpi_dataworkers.worker.pipelines import StepFailed
from hetstream.mpi_dataworkers.worker.process import FetchProvided, StageLeases

# Who waits for a batch looks this often whether it is still to have it.
_LOOK_AGAIN_S = 0.2


class LoaderOfEarlierStage:
    """A data worker's loader; an `EarlierStage`.

    Args:
        address_file: of the service.
        worker_id: of the data worker.
        leases: its leases.
        fetch: has the dispatcher send a pipeline.
    """

    def __init__(self, address_file: Path, worker_id: str, leases: StageLeases, fetch: FetchProvided) -> None:
        self._address_file, self._worker_id = address_file, worker_id
        self._leases, self._fetch = leases, fetch
        self._statistics = LoaderStatistics()
        self._client: ServiceClient | None = None
        self._pipelines: dict[str, ProvidePipeline] = {}
        self._sessions: dict[int, LoaderSession] = {}  # by the token of the lease

    def take(self, lease: GrantLease, step: int) -> MadeStep | None:
        """Wait for the batch of a leased step; see `EarlierStage`."""
        began = time.monotonic()
        while self._leases.holds(lease.token):
            # Again each time: more leases have come, and their batches are to be made meanwhile.
            client = self._open(lease, step)
            session = self._sessions[lease.token]
            found = self._wait(client, session, began)
            if found is None:
                continue
            if isinstance(found, LocalFallback):
                client.say_local(found.reason)
                # What has come meanwhile wins.
                found = client.put_local(session, Delivered(None, num_samples=0, num_bytes=0, origin="local"))
            else:
                client.say_streaming()
            if not isinstance(found, Ended):
                client.advance(session, session.buffer.position)
            if isinstance(found, BatchFailed):
                raise StepFailed(found.failure)
            if isinstance(found, Ended | LocalFailure) or found.origin == "local":
                return None
            self._statistics.count({"steps": 1, "samples": found.num_samples, "bytes": found.num_bytes}, 0)
            return MadeStep(found.payload, found.num_samples, found.num_skipped, list(found.left_out))
        raise LeaseGone

    def _wait(self, client: ServiceClient, session: LoaderSession, since: float) -> Step | LocalFallback | Ended | None:
        """Wait a moment for the next step; None if it has not come. The wait counts while it goes on."""
        began = time.monotonic()
        try:
            return client.take([session], began + _LOOK_AGAIN_S, since)[1]
        except TimeoutError:
            return None
        except HetstreamError as error:
            self.close()
            raise HandoverFailed(f"the stage before cannot be reached: {error}") from error
        finally:
            self._statistics.count({"wait_s": time.monotonic() - began}, 0)

    def missed(self, made_here_s: float) -> None:
        """Count it as a wait; see `EarlierStage`."""
        self._statistics.count({"local_steps": 1, "wait_s": made_here_s}, 0)

    def _open(self, lease: GrantLease, step: int) -> ServiceClient:
        """Open sessions for this lease, and for those that come after it: their batches are made meanwhile."""
        held = {ahead.token: ahead for ahead in self._leases.held()}
        pipeline_id = lease.session.pipeline_id
        if pipeline_id not in self._pipelines:
            self._pipelines = {pipeline_id: self._fetch(pipeline_id, lambda: self._leases.holds(lease.token))}
        client = self._client
        if client is None:
            client = self._client = self._join(self._pipelines[pipeline_id])
        for token in self._sessions.keys() - held.keys():
            client.close_session(self._sessions.pop(token))
        mine = self._sessions.get(lease.token)
        if mine is not None and mine.buffer.position != step:  # it was told to begin anew
            client.close_session(self._sessions.pop(lease.token))
        for ahead in (lease, *held.values()):
            if ahead.token not in self._sessions and ahead.session.pipeline_id == pipeline_id:
                first_step = step if ahead is lease else ahead.first_step
                self._sessions[ahead.token] = self._open_session(client, ahead, first_step)
        return client

    def _join(self, pipeline: ProvidePipeline) -> ServiceClient:
        options = ClientOptions(
            self._address_file,
            TrainerIdentity(0, 1, f"stage.{self._worker_id}", is_named=True),
            LoaderName(0, 0, "", "", divides=False),
            {},
            TorchBatches(pin=False),
            self._statistics,
            buffer_bytes_from_environment(),
            transports_from_environment(),
            compression_from_environment(),
            feeds=self._worker_id,
        )
        return ServiceClient(options, pipeline)

    def _open_session(self, client: ServiceClient, lease: GrantLease, first_step: int) -> LoaderSession:
        spec, stop_step = lease.session, lease.stop_step
        # What failed in a step as a whole may have been any of its samples; of those that are known it is made without.
        lacking = {failure.sample_index for failures in lease.left_out.values() for failure in failures} - {-1}
        errors = msgspec.structs.replace(spec.errors, quarantined=sorted({*spec.errors.quarantined, *lacking}))
        is_listed = isinstance(spec.order, ListedOrder)
        request = SessionRequest(
            pipeline=self._pipelines[spec.pipeline_id],
            seeds=PassSeeds(spec.seed, spec.epoch, spec.worker_seeds),
            order=spec.order,
            first_step=first_step,
            num_steps=-1 if is_listed else stop_step,
            min_window=stop_step - first_step,
            errors=errors,
        )
        session = client.open_session(request)
        if is_listed:
            client.extend(session, _listed(lease, first_step), ended=True)
        return session

    def close(self) -> None:
        """Leave the service as a loader, until the next lease."""
        client, self._client = self._client, None
        self._sessions.clear()
        if client is not None:
            client.close()


def _listed(lease: GrantLease, first_step: int) -> list[bytes]:
    """The indices of a lease's steps, as they came with it."""
    assert lease.steps is not None
    counts = np.frombuffer(lease.steps.counts, dtype="<i4")
    ends = 8 * np.cumsum(counts, dtype=np.int64)
    begins = ends - 8 * counts
    first = first_step - lease.steps.first_step
    number = lease.stop_step - first_step
    return [lease.steps.indices[begin:end] for begin, end in zip(begins, ends, strict=True)][first : first + number]
