"""An open session of a loader: one pass that it reads from data workers, or one shard of it. No I/O.

Used by `client.py`, which guards it with its lock. A session knows which steps have come and which the training loop
has taken, and from these what the dispatcher is to be told.
"""

from __future__ import annotations

import collections
import enum
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from hetstream.base.process import told
from hetstream.mpi_dataworkers.loader.process_connection import REPORT_S
from hetstream.mpi_dataworkers.ops.origins import PassSeeds
from hetstream.mpi_dataworkers.order.reorder import ReorderBuffer, Window
from hetstream.mpi_dataworkers.wire.messages import (
    BatchFailed,
    CacheReport,
    CloseSession,
    ErrorPolicy,
    ExtendSession,
    Failure,
    FeatureCut,
    LeaseRevoked,
    ListedOrder,
    LoaderStats,
    OpenSession,
    OptimizerCalls,
    PlannedOrder,
    ProvidePipeline,
    Ranges,
    ReportProgress,
    SessionSpec,
    ShardOrder,
    Sharing,
    StepList,
    StepsLost,
)

if TYPE_CHECKING:
    from hetstream.mpi_dataworkers.ops.pipeline import MadeStep

# What a loader gets for a step: a batch, a failure to make it, or word that it is to make the step itself.


class Delivered(msgspec.Struct, frozen=True):
    """One step as the training loop gets it.

    Attributes:
        payload: the batch.
        num_samples: in the batch; 0: all were skipped, and the loop gets nothing for this step.
        num_bytes: of the batch's tensors.
        origin: `local` when it was made in process; else of `wire.delivery_messages.Batch`.
        shift: in a shared stream, how far the step is from the loader's own numbering.
        num_skipped: samples that were skipped.
        left_out: how those of them failed that were tried at this step.
        snapshot: where the shard's reader is after the step; empty if it has not said so.
        held_bytes: memory of all that came for the step.
        wrote, cache: as in `wire.delivery_messages.Batch`.
    """

    payload: Any
    num_samples: int
    num_bytes: int
    origin: str = "made"
    shift: int = 0
    num_skipped: int = 0
    left_out: Sequence[Failure] = ()
    snapshot: bytes = b""
    held_bytes: int = 0
    wrote: str = ""
    cache: CacheReport | None = None

    @classmethod
    def made_here(cls, batch: Any, made: MadeStep, snapshot: bytes = b"") -> Delivered:
        """A step that was made in process.

        Args:
            batch: of the step, where the program wants it.
            made: how it was made.
            snapshot: where the shard's reader is now; empty without one.
        """
        return cls(
            batch,
            num_samples=made.num_samples,
            num_bytes=0,
            origin="local",
            num_skipped=made.num_skipped,
            left_out=made.left_out,
            snapshot=snapshot,
            cache=made.cache,
        )


class LocalFailure:
    """Instead of a batch: user code raised while the loader made the step itself."""

    def __init__(self, error: Exception) -> None:
        # As itself a StopIteration would look like the end of the data.
        self.error = RuntimeError(f"user code raised {error!r}") if isinstance(error, StopIteration) else error


class LocalFallback(msgspec.Struct, frozen=True):
    """No batch will come for this step soon: the loader is to make it in process.

    Attributes:
        step: its number.
        reason: why.
        is_late: data workers are there, and do not deliver it.
    """

    step: int
    reason: str
    is_late: bool = False


class Ended(enum.Enum):
    """Instead of a step."""

    ENDED = "the session has no more steps"
    LOST = "the session has no more steps, because a data worker was lost"


class LostStep:
    """In the place of a step that a lost data worker held, in a session that is read at most once."""


# A step that the training loop can take.
Step = Delivered | BatchFailed | LocalFailure


# Steps without a write to files after which a single step that wrote is forgotten.
_QUIET_STEPS = 256


@dataclass(frozen=True, kw_only=True)
class SessionRequest:
    """What a loader asks for when it opens a session.

    Attributes:
        pipeline: the pipeline as it is now; sent when it is not the one that the dispatcher has.
        seeds: what the random numbers of samples follow from.
        order: who knows the order.
        first_step: where to begin.
        num_steps: total, or -1 when the sampler's end is unknown.
        min_window: steps in the window even when they are larger than the buffer.
        errors: what becomes of a step that cannot be made.
        sharing: with whom to share the batches.
        shift: how far the loader is from its own numbering in the stream that it shares.
        sharers: sessions that share the buffer and the window; each is kept with one data worker if there are more.
        at_most_once: go on without the steps of a data worker that is lost.
        in_order: give the steps in order; else as they come.
        taken_out_of_order: steps beyond `first_step` that were taken before.
        snapshot: where the reader of a shard was at or before `first_step`.
        window_if_writing: steps in the window once samples were seen to write to files; 0: as without that.
    """

    pipeline: ProvidePipeline
    seeds: PassSeeds
    order: PlannedOrder | ListedOrder | ShardOrder
    first_step: int
    num_steps: int
    min_window: int
    errors: ErrorPolicy
    sharing: Sharing | None = None
    shift: int = 0
    sharers: int = 1
    at_most_once: bool = False
    in_order: bool = True
    taken_out_of_order: Ranges | None = None
    snapshot: bytes = b""
    window_if_writing: int = 0

    def spec(self, receivers: list[str]) -> SessionSpec:
        """A new session, as the dispatcher knows it; batches come to `receivers`."""
        return SessionSpec(
            secrets.token_hex(8),
            self.pipeline.pipeline_id,
            self.seeds.epoch,
            self.seeds.seed,
            self.order,
            receivers,
            self.sharing,
            kept_together=self.sharers > 1 or isinstance(self.order, ShardOrder),
            at_most_once=self.at_most_once,
            errors=self.errors,
            worker_seeds=self.seeds.workers,
        )


class Progress(NamedTuple):
    """How far a session is, as its reports say.

    Attributes:
        position: steps below it were taken.
        come: up to which step there would be batches if they had come in order.
        window: steps beyond the position that may wait or be on their way.
    """

    position: int
    come: int
    window: int


class LoaderSession:
    """One session, from its opening to its close. Made by `ServiceClient.open_session`.

    Args:
        session: as the dispatcher knows it.
        request: what was asked for.
        window: how many steps may be under way.

    Attributes:
        session_id: tells its batches from those of other sessions.
        pipeline: the pipeline, for a dispatcher that does not have it.
        num_steps: total, -1 while it is not known.
        shift: in a shared stream, how far the newest batch is from the session's own numbering.
        snapshot: where the reader of a shard was at or before the position, "" for its beginning.
        num_lost: steps that were lost and passed over.
        rest_lost: the steps after `num_steps` were lost.
        kept: what `EndOfShard` says that the next pass begins with; None before it came.
        buffer: steps that have come and were not taken.
        held_bytes: of the batches that wait in the buffer.
        known_steps: steps of a listed order that the dispatcher was told, or will be.
        suspects: steps that a data worker was at when it was lost.
    """

    def __init__(self, session: SessionSpec, request: SessionRequest, window: Window) -> None:
        first_step = request.first_step
        self.session_id = session.session_id
        self.pipeline = request.pipeline
        self.num_steps = request.num_steps
        self.shift = request.shift
        self.snapshot = request.snapshot
        self.num_lost = 0
        self.suspects: set[int] = set()
        self.rest_lost = False
        self.kept: bytes | None = None
        self.buffer = ReorderBuffer(first_step, request.in_order, request.taken_out_of_order)
        self.held_bytes = 0
        self.known_steps = request.num_steps if isinstance(session.order, PlannedOrder) else first_step
        self._session = session
        self._window = window
        self._window_if_writing = request.window_if_writing
        self._num_writing = 0  # steps that were seen to
        self._writes_until = sys.maxsize
        self._is_placed = False
        self._lists: collections.OrderedDict[int, bytes] = collections.OrderedDict()
        self._reported = Progress(first_step, first_step, 0)
        self._reported_at = 0.0

    @property
    def window(self) -> int:
        """Steps beyond the position that may wait or be on their way."""
        return self._window.steps

    # --- steps that come --------------------------------------------------------------------------------------------

    def wants(self, step: int, token: int) -> bool:
        """Whether a batch is still needed; counts it as dropped when not."""
        return self.buffer.wants(step, token)

    def revoke(self, message: LeaseRevoked) -> None:
        """Batches of a lease are no longer wanted."""
        self.buffer.revoke(message.token)
        for first, stop in message.suspects:
            self.suspects.update(range(first, stop))

    def put(self, step: int, item: Step | LostStep) -> bool:
        """Take in a step, unless it is there already; whether it was not."""
        if self.buffer.has(step):
            self.buffer.expect_no_more(step)
            return False
        self.buffer.put(step, item)
        if isinstance(item, Delivered) and item.held_bytes:
            self.held_bytes += item.held_bytes
            self._window.note(item.held_bytes, len(self.buffer), self.held_bytes)
        if isinstance(item, Delivered) and item.wrote and self._window_if_writing:
            # When it comes, not when it is taken: data workers are far ahead then.
            self._num_writing += 1
            self._window.most = self._window_if_writing
            self._writes_until = step + _QUIET_STEPS if self._num_writing == 1 else sys.maxsize
        return True

    def put_delivered(self, step: int, item: Delivered | BatchFailed | None) -> None:
        """Take in what was made of a batch that was wanted; None: it was refused, and will be made again."""
        if item is None:
            self.buffer.expect_no_more(step)
        elif self.put(step, item) and isinstance(item, Delivered):
            # Where the batch is in a shared stream; after the first one a session only moves on.
            self.shift = max(self.shift, item.shift) if self._is_placed else item.shift
            self._is_placed = True

    def end_at(self, num_steps: int) -> None:
        """Note how many steps the session turned out to have."""
        self.num_steps = min(num_steps, self.num_steps) if self.num_steps >= 0 else num_steps

    def lose(self, lost: StepsLost) -> None:
        """Go on without the steps that a lost data worker held."""
        if lost.stop_step < 0:
            self.rest_lost = self.num_steps < 0 or lost.first_step < self.num_steps
            self.end_at(lost.first_step)
            return
        for step in range(lost.first_step, lost.stop_step):
            self.put(step, LostStep())

    # --- steps that the training loop takes -------------------------------------------------------------------------

    def has_next(self) -> bool:
        """Whether a step that the training loop may take is there."""
        return self.buffer.has_next()

    def next_or_end(self) -> Step | Ended | None:
        """The next step, which stays, or how the session ended; None while neither is there. Passes over lost steps."""
        buffer = self.buffer
        item = buffer.peek()
        while isinstance(item, LostStep):
            buffer.pop()
            self.num_lost += 1
            item = buffer.peek()
        if 0 <= self.num_steps <= buffer.position:
            return Ended.LOST if self.rest_lost else Ended.ENDED
        found: Step | None = item
        return found

    def next_step(self) -> Step:
        """The next step, which is there, and stays."""
        item: Any = self.buffer.peek()
        found: Step = item
        return found

    def advance(self, step: int) -> None:
        """Move past a step that the training loop has. To do so once more, also after a part of it, changes nothing."""
        item = self.buffer.item(step)
        if isinstance(item, Delivered):
            self.snapshot = item.snapshot or self.snapshot
            self.held_bytes -= item.held_bytes
        self.buffer.advance(step)
        if step > self._writes_until:
            self._writes_until = self._window.most = sys.maxsize
        if self._lists:
            self._lists.pop(self.buffer.position - 1, None)

    # --- what the dispatcher is told --------------------------------------------------------------------------------

    def opening(self) -> OpenSession:
        """Opens the session, or continues it with a restarted dispatcher."""
        buffer = self.buffer
        return OpenSession(
            self._session,
            self.num_steps,
            buffer.position,
            buffer.received(),
            self.window,
            self._step_list(),
            self.shift,
            self.snapshot,
        )

    def _step_list(self) -> StepList | None:
        """The listed steps that the training loop has not taken."""
        if not self._lists:
            return None
        return _pack_steps(next(iter(self._lists)), list(self._lists.values()))

    def extend(self, steps: Sequence[bytes], ended: bool) -> ExtendSession:
        """Add steps of a listed order: int64 index bytes each; `ended` when the sampler has no more.

        They count as known with `was_extended`. Until then the same can be done once more.
        """
        first = self.known_steps
        for index, indices in enumerate(steps):
            self._lists[first + index] = indices
        if ended:
            self.num_steps = first + len(steps)
        return ExtendSession(self.session_id, _pack_steps(first, steps), self.num_steps)

    def was_extended(self, num_steps: int) -> None:
        """Note the steps that are on their way to the dispatcher: the next ones come behind them."""
        self.known_steps += num_steps

    def closing(self, stats: LoaderStats) -> CloseSession:
        """Closes the session, finished or not."""
        return CloseSession(self.session_id, self.buffer.position, stats)

    def progress(self) -> Progress:
        """How far the session is now."""
        position = self.buffer.position
        return Progress(position, position + self.buffer.num_come(), self.window)

    def is_report_due(self, progress: Progress, now: float) -> bool:
        """Whether the dispatcher is to be told how far the session is."""
        if progress == self._reported:
            return False
        num_unreported = self.buffer.position - self._reported.position
        is_due = now - self._reported_at >= REPORT_S or num_unreported >= self._quarter()
        return is_due or progress.window != self._reported.window

    def reaches_a_quarter(self) -> bool:
        """Whether the steps that were taken since the last report have just become another quarter of the window."""
        unreported, quarter = self.buffer.position - self._reported.position, self._quarter()
        return unreported >= quarter and unreported % quarter == 0

    def report(
        self, stats: LoaderStats, optimizer: OptimizerCalls | None = None, features: FeatureCut | None = None
    ) -> ReportProgress:
        """How far the session is, as a message."""
        at, received = self.buffer.position, self.buffer.received()
        return ReportProgress(self.session_id, at, received, self.window, stats, told(), optimizer, features)

    def has_reported(self, progress: Progress, now: float) -> None:
        """The dispatcher was told."""
        self._reported, self._reported_at = progress, now

    def _quarter(self) -> int:
        return self._window.steps // 4 or 1


def _pack_steps(first_step: int, steps: Sequence[bytes]) -> StepList:
    """Pack the int64 index bytes of consecutive steps."""
    counts = b"".join((len(indices) // 8).to_bytes(4, "little") for indices in steps)
    return StepList(first_step, counts, b"".join(steps))
