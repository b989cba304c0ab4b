"""The pipelines of a data worker process: loaded at their first lease, kept while loaders use them."""

from __future__ import annotations

import functools
import logging
import math
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hetstream.mpi_dataworkers.ops.origins import PassSeeds
from hetstream.mpi_dataworkers.ops.pickled_pipeline import PickledPipeline
from hetstream.mpi_dataworkers.ops.pipeline import Pipeline, describe_failure
from hetstream.mpi_dataworkers.ops.process_memory import Looking, WriteWatch
from hetstream.mpi_dataworkers.ops.worker_context import EnteredPipeline
from hetstream.mpi_dataworkers.wire.messages import (
    Device,
    Failure,
    FetchPipeline,
    GrantLease,
    ProvidePipeline,
    SessionSpec,
    ShardOrder,
)
from hetstream.mpi_dataworkers.wire.pipeline_transfer import HandoverFailed
from hetstream.mpi_dataworkers.worker.fork_server import (
    FORK_FROM_BYTES,
    Exchange,
    LoadedProgram,
    OtherProgram,
    ask_to_be_forked,
    objects_bytes,
    wish,
)
from hetstream.mpi_dataworkers.worker.leases import DispatcherConnection, HeldLeases, LeaseGone
from hetstream.mpi_dataworkers.worker.process import LoadAnswer, WorkPage

# Where a data worker process finds a pickled pipeline: on this host, or at the dispatcher.

_log = logging.getLogger(__name__)

# Who waits for a pickled pipeline looks this often whether it is still to have it.
_LOOK_AGAIN_S = 0.5


class PickledPipelines:
    """Pickled pipelines for one process. The main thread finds them; those that it asks for come to the control thread.

    Args:
        exchange: pickled pipelines that this host has; None for a process that shares them with no other.
        directory: where large pickled pipelines lie, the service's `pipelines_dir`.
        dispatcher: has those that this host lacks.
    """

    def __init__(self, exchange: Exchange | None, directory: Path, dispatcher: DispatcherConnection) -> None:
        self._is_shared = exchange is not None
        self._exchange = exchange or Exchange(num_slots=0)
        self._directory, self._dispatcher = directory, dispatcher
        # Its lock guards all that follows.
        self._came = threading.Condition()
        self._messages: dict[str, ProvidePipeline] = {}
        self._asked_for: set[str] = set()  # on their way
        self._dropped: set[str] = set()  # used by no loader

    def close(self) -> None:
        """Give back what belongs to this process alone."""
        if not self._is_shared:
            self._exchange.close()

    # --- of the main thread -----------------------------------------------------------------------------------------

    def find(self, pipeline_id: str, is_wanted: Callable[[], bool]) -> PickledPipeline:
        """Return a pickled pipeline, from bytes that this host has or that come from the dispatcher.

        Raises:
            LeaseGone: it is wanted no more.
            HandoverFailed: its bytes cannot be had.
        """
        found = self._exchange.find(pipeline_id)
        if found is None:
            with self._exchange.alone(lambda: not is_wanted()) as is_its_turn:
                if not is_wanted():
                    raise LeaseGone
                found = self._exchange.find(pipeline_id)
                if found is None:
                    came = self.fetch(pipeline_id, is_wanted)
                    found = self._exchange.keep(came, self._directory, shared=is_its_turn)
                    num_bytes = len(came.blob) + sum(came.contents.sizes)
                    _log.info("pipeline=%s fetched for this host: %d bytes", pipeline_id[:8], num_bytes)
        return found

    def fetch(self, pipeline_id: str, is_wanted: Callable[[], bool]) -> ProvidePipeline:
        """Ask the dispatcher for a pickled pipeline, once for each connection, and wait for it.

        Raises:
            LeaseGone: it is wanted no more.
        """
        with self._came:
            if pipeline_id not in self._asked_for and pipeline_id not in self._messages:
                self._asked_for.add(pipeline_id)
                self._dispatcher.tell(FetchPipeline(pipeline_id))
            while pipeline_id not in self._messages:
                self._came.wait(_LOOK_AGAIN_S)
                if not is_wanted():
                    raise LeaseGone
            return self._messages.pop(pipeline_id)

    @property
    def has_dropped(self) -> bool:
        """Whether `take_dropped` has something; asked without the lock, at each step: the next one comes soon."""
        return bool(self._dropped)

    def take_dropped(self) -> set[str]:
        """Pickled pipelines that no loader uses any more, since this was asked last."""
        with self._came:
            dropped, self._dropped = self._dropped, set()
        return dropped

    # --- of the control thread --------------------------------------------------------------------------------------

    def take(self, message: ProvidePipeline) -> None:
        """Give a pickled pipeline that came to the main thread."""
        with self._came:
            self._asked_for.discard(message.pipeline_id)
            self._messages[message.pipeline_id] = message
            self._came.notify_all()

    def drop(self, pipeline_id: str) -> None:
        """No loader uses a pickled pipeline any more."""
        with self._came:
            self._messages.pop(pipeline_id, None)
            self._dropped.add(pipeline_id)

    def ask_again(self) -> None:
        """Ask another incarnation of the dispatcher for what the last one was asked for."""
        with self._came:
            for pipeline_id in sorted(self._asked_for):
                self._dispatcher.tell(FetchPipeline(pipeline_id))


# What `multiprocessing` says of a data worker process: it is a worker process of torch, or no child of a program.
#
# `multiprocessing` keeps this in its own variables, and hetstream, which forks by itself, asks for none of it.

_process: Any = multiprocessing.process
_own = _process._current_process, _process._parent_process


def act(as_worker: bool, number: int) -> None:
    """Be a worker process of torch for `multiprocessing`, or what this process is.

    Such a worker is daemonic, so that a sample which starts a `multiprocessing.Process` gets the error that torch's
    worker gives it: where a loader has no worker processes it may start them.

    Args:
        as_worker: be one.
        number: of the data worker, which its name has.
    """
    if not as_worker:
        _process._current_process, _process._parent_process = _own
        return
    acted: Any = multiprocessing.Process(daemon=True)
    acted.name = f"Process-{number + 1}"
    acted._parent_pid = parent = os.getppid()
    acted._popen = None
    _process._current_process = acted
    # Readable at the end of that process, as the pipe is that multiprocessing has for it.
    _process._parent_process = _process._ParentProcess("MainProcess", parent, os.pidfd_open(parent))


# A pipeline that could not be loaded is loaded anew after this: what was missing may be there now.
_LOAD_AGAIN_S = 5.0
# A program may change its dataset for each epoch; the oldest forms are forgotten, and fetched again if need be.
_MAX_PIPELINES = 8

# At shared memory, after each step; what takes longer is looked at less often.
_SHORT_LOOK_S = 0.005


class StepFailed(Exception):
    """User code raised for a step."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.text)
        self.failure = failure


class ForkedAnew(Exception):
    """This process is to leave: one in its place shares the memory of the lease's pipeline with others."""


class Pipelines:
    """The pipelines of one process, by id. Of its main thread.

    Args:
        pickled_pipelines: where they are found.
        loaded: the program of this process.
        leases: loading ends when the lease that it is for is gone.
        page: where the process says what it is doing.
        forks_anew: its supervisor has a large pipeline loaded once for its processes.
        is_supervised: where it leaves for it, a fresh process takes its place.
        device: what it makes steps with: without a GPU, all but the last stage of a pipeline that needs one.
        worker_number: what the dispatcher calls this data worker now.
    """

    def __init__(
        self,
        pickled_pipelines: PickledPipelines,
        loaded: LoadedProgram,
        leases: HeldLeases,
        page: WorkPage,
        forks_anew: bool,
        is_supervised: bool,
        device: Device,
        worker_number: Callable[[], int],
    ) -> None:
        self._pickled_pipelines, self._loaded, self._leases, self._page = pickled_pipelines, loaded, leases, page
        self._forks_anew, self._is_supervised = forks_anew, is_supervised
        self._device, self._worker_number = device, worker_number
        # Sessions of a program that only knows torch for which user code has run here, and pipelines whose worker
        # processes torch keeps from pass to pass.
        self._passes: set[str] = set()
        self._lasting: set[str] = set()
        self._streams: set[str] = set()  # of these sessions, those whose steps follow from those before
        # The small pipeline that its supervisor was asked to load for later processes. It is kept when no loader uses
        # it any more: it costs nothing, and its fork server has the program's modules.
        self._prepared = ""
        self._pipelines: dict[str, EnteredPipeline | Exception] = {}
        self._entered: EnteredPipeline | None = None  # the last one
        self._acts = False  # as one of torch's worker processes
        self._user_code_begins = functools.partial(page.at_sample, -1)
        self._seeds: tuple[SessionSpec | None, PassSeeds] = None, PassSeeds(0, 0)  # of the session that was asked last
        self._write_watches: dict[str, WriteWatch] = {}  # of those that hold shared memory
        self._failed_at: dict[str, float] = {}  # when those that are exceptions could not be loaded
        self._in_use: dict[str, PickledPipeline] = {}  # siblings find them while they are held
        # That a pipeline must exceed for which this process is forked anew: so never in turn for two of one size.
        self._asked_bytes = loaded.kept_bytes

    def seeds_of(self, session: SessionSpec) -> PassSeeds:
        """Return what the random numbers of a session follow from."""
        if self._seeds[0] is not session:
            self._seeds = session, PassSeeds(session.seed, session.epoch, session.worker_seeds)
        return self._seeds[1]

    def enter(self, lease: GrantLease, step: int) -> Pipeline:
        """Let user code see its part for a step of a lease.

        Returns:
            The pipeline to run now.

        Raises:
            StepFailed: user code failed.
            LeaseGone: the lease was revoked while it waited.
            ForkedAnew, OtherProgram: this process is to leave.
            HandoverFailed: the pickled pipeline's bytes cannot be had.
        """
        pipeline_id = lease.session.pipeline_id
        if self._pickled_pipelines.has_dropped or self._failed_at:
            self._forget_old(pipeline_id)
        begins = lease.session.worker_seeds is not None and lease.session.session_id not in self._passes
        if begins:
            self._begin_pass(lease)
        if self._entered is not None and self._pipelines.get(pipeline_id) is not self._entered:
            self._entered.rest()  # the next one begins with the program's globals
            self._entered = None
        if pipeline_id not in self._pipelines:
            try:
                self._pipelines[pipeline_id] = EnteredPipeline(self._load(pipeline_id, lease), self._worker_number())
            except (LeaseGone, ForkedAnew, OtherProgram, HandoverFailed):
                raise
            except Exception as error:  # noqa: BLE001, user code; every step of this pipeline fails alike
                self._pipelines[pipeline_id] = error
                self._failed_at[pipeline_id] = time.monotonic()
            while len(self._pipelines) > _MAX_PIPELINES:
                self._forget(next(iter(self._pipelines)))
        entered = self._pipelines[pipeline_id]
        if isinstance(entered, EnteredPipeline):
            try:
                if begins:
                    self._user_code_begins()
                    self._prepare_fork(lease)
                self._loaded.enter(self._in_use[pipeline_id])
                self._entered = entered
                if entered.has_workers is not self._acts:
                    self._acts = entered.has_workers
                    act(self._acts, self._worker_number())
                return entered.enter(self.seeds_of(lease.session), step, self._user_code_begins)
            except Exception as error:  # noqa: BLE001, worker_init_fn may raise anything; as above
                entered = self._pipelines[pipeline_id] = error
                self._failed_at[pipeline_id] = time.monotonic()
        raise StepFailed(describe_failure(entered, is_final=True))

    def check_writes(self, pipeline_id: str) -> None:
        """See that user code has not written to the memory that it shares.

        Raises:
            PipelineError: it has.
        """
        if pipeline_id in self._write_watches:
            self._write_watches[pipeline_id].check()

    def _begin_pass(self, lease: GrantLease) -> None:
        """Come to a pass of a program that only knows torch, as a worker process of torch does: with nothing in memory
        that samples of an earlier pass have left there.

        Of what user code may have changed (its dataset, module globals, what libraries keep) no list is complete, so
        this process leaves for one that has made no sample. One that cannot leave unpickles the pipeline anew: of the
        state that samples leave, that of modules then stays. Passes that are open at the same time share a process.

        Raises:
            ForkedAnew: this process has made samples of a pass that is over.
            LeaseGone: the lease was revoked while it waited.
        """
        going_on = self._leases.sessions.keys()
        if self._passes - going_on:
            # Who takes over a stream reads all of it again, so this process stays with one.
            has_stream = bool(self._streams & going_on)
            if self._is_supervised and not self._lasting and not has_stream:
                self._wait_for_fork(self._page.shares or self._page.wished[0] or lease.session.pipeline_id, lease)
                raise ForkedAnew
            for name in self._pipelines.keys() - self._lasting:
                self._forget(name)
            self._passes.clear()
        self._passes.add(lease.session.session_id)
        if isinstance(lease.session.order, ShardOrder):
            self._streams = {lease.session.session_id, *(self._streams & going_on)}
        seeds = lease.session.worker_seeds
        if seeds is not None and seeds.are_kept:
            self._lasting.add(lease.session.pipeline_id)

    def _load(self, pipeline_id: str, lease: GrantLease) -> Pipeline:
        """Have a pipeline: as it was when this process was forked, or unpickled."""
        taken = self._loaded.take(pipeline_id)
        if taken is not None:
            found, pipeline = taken
        else:
            self._page.rest()  # no user code runs while it waits
            found = self._pickled_pipelines.find(pipeline_id, lambda: self._leases.holds(lease.token))
            if self._forks_anew and objects_bytes(found) > max(FORK_FROM_BYTES, self._asked_bytes):
                if self._wait_for_fork(pipeline_id, lease):
                    raise ForkedAnew
                self._asked_bytes = objects_bytes(found)
            self._page.at_sample(-1)
            pipeline = self._loaded.load(found)
        self._in_use[pipeline_id] = found
        if found.shared:
            self._write_watches[pipeline_id] = WriteWatch(found.look_at_shared(), looking=Looking(each_s=_SHORT_LOOK_S))
        return pipeline if self._device == "gpu" else pipeline.before_gpu

    def _wait_for_fork(self, pipeline_id: str, lease: GrantLease) -> bool:
        """Wait until a fork server has loaded a pipeline; whether this process is to leave for one that it forks."""
        limit_s = lease.session.errors.sample_timeout_s
        self._page.rest()  # no user code runs while it waits
        if ask_to_be_forked(self._page, pipeline_id, limit_s, lambda: self._leases.holds(lease.token)):
            return True
        if not self._leases.holds(lease.token):
            raise LeaseGone
        return False

    def _prepare_fork(self, lease: GrantLease) -> None:
        """Have the program loaded for the process that takes this one's place after the pass, while the pass goes on.

        One fork server does for all small pipelines of a program: what takes long are the imports.
        """
        if self._is_supervised and not self._page.wished[0]:
            pipeline_id, num_bytes = self._page.shares, self._loaded.kept_bytes
            if not pipeline_id:
                pipeline_id = lease.session.pipeline_id
                num_bytes = objects_bytes(self._in_use[pipeline_id])
            wish(self._page, pipeline_id, lease.session.errors.sample_timeout_s)
            if num_bytes <= FORK_FROM_BYTES:
                self._prepared = pipeline_id

    def is_spent(self) -> bool:
        """Return whether this process is to leave once no session goes on; asked by the control thread."""
        return (
            bool(self._passes)
            and self._is_supervised
            and not self._lasting
            and self._page.answer is not LoadAnswer.WAIT
        )

    def _forget_old(self, pipeline_id: str) -> None:
        """Forget what no loader uses, and this pipeline if it could not be loaded some time ago."""
        dropped = self._pickled_pipelines.take_dropped()
        if time.monotonic() - self._failed_at.get(pipeline_id, math.inf) > _LOAD_AGAIN_S:
            dropped.add(pipeline_id)
        for name in dropped:
            self._forget(name)
            if self._page.shares == name != self._prepared:
                self._page.shares = ""
                if not self._pipelines:  # to leave costs what other pipelines have in this process, a cache, say
                    self._asked_bytes = 0

    def _forget(self, pipeline_id: str) -> None:
        self._loaded.forget(pipeline_id)
        if self._page.wished[0] == pipeline_id != self._prepared:
            self._page.wish("")
        self._lasting.discard(pipeline_id)
        self._pipelines.pop(pipeline_id, None)
        self._write_watches.pop(pipeline_id, None)
        self._failed_at.pop(pipeline_id, None)
        self._in_use.pop(pipeline_id, None)
