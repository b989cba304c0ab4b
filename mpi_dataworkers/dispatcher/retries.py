"""Steps that failed: what becomes of them, who tries them again, and what that says of who failed them. Pure.

`failures.py` has the verdict on one step, `standing.py` what is known of a data worker with one pipeline.
"""

from __future__ import annotations

from collections.abc import Sequence

from hetstream.mpi_dataworkers.dispatcher import events
from hetstream.mpi_dataworkers.dispatcher.instructions import Instruction, Send
from hetstream.mpi_dataworkers.dispatcher.lifecycle import LeaseLifecycle
from hetstream.mpi_dataworkers.dispatcher.placement import Placement
from hetstream.mpi_dataworkers.dispatcher.records import Session, UnexplainedLoss
from hetstream.mpi_dataworkers.dispatcher.tables import Tables
from hetstream.mpi_dataworkers.failures import StepFailures, Verdict
from hetstream.mpi_dataworkers.wire.messages import BatchFailed, Failure, ShardOrder

# A step that was lost so often with its data worker is tried while no other one of that kind is: the next loss is its.
_ALONE_FROM = 2
# A supervisor that is there has another process in the place of one that has died by then.
_EXPLAINED_S = 2.0


class Retries:
    """Takes note of failures, and leases failed steps again.

    Attributes:
        _tables: what is known.
        _placement: who can make what.
        _lifecycle: makes and revokes leases.
    """

    def __init__(self, tables: Tables, placement: Placement, lifecycle: LeaseLifecycle) -> None:
        self._tables = tables
        self._placement = placement
        self._lifecycle = lifecycle

    def grant(self, now: float) -> list[Instruction]:
        """Lease steps that failed, each alone, to data workers that have not failed them where there are such."""
        out: list[Instruction] = []
        for session in self._tables.sessions.values():
            for step in sorted(session.retries) if session.retries else ():
                if step in session.unexplained:
                    out += self._note_unexplained(session, step, now)
                    continue
                if session.times_lost(step) >= _ALONE_FROM and self._tries_alone(session):
                    continue
                peer = self._who_tries_again(session, session.failures[step], now)
                if peer is not None:
                    session.retries.discard(step)
                    self._lifecycle.keep_together(session, peer)
                    out.append(self._lifecycle.grant(peer, session, range(step, step + 1), now))
        return out

    def _tries_alone(self, session: Session) -> bool:
        """Whether a step that is to be tried by itself is being tried."""
        leases = (self._tables.leases[token] for token in session.tokens)
        return any(session.times_lost(lease.first) >= _ALONE_FROM for lease in leases)

    def note_lost(
        self, session: Session, suspects: Sequence[int], token: int, peer: str, failure: Failure, now: float
    ) -> None:
        """A data worker was lost, and nobody has said at which of the steps that it held, if at any.

        A step that was lost twice is leased by itself, while no other one like it is. When it is lost again, and no
        supervisor says why, that is a failure of the step.
        """
        spec = session.spec
        if isinstance(spec.order, ShardOrder) or spec.sharing is not None or spec.at_most_once:
            return
        for step in set(suspects).intersection(session.requeued):
            was_alone = session.times_lost(step) >= _ALONE_FROM
            session.losses.setdefault(step, []).append(peer)
            if session.times_lost(step) >= _ALONE_FROM:
                session.requeued.remove(step)
                session.retries.add(step)
                session.failures.setdefault(step, StepFailures()).hosts.add(failure.host)
            if was_alone:
                session.unexplained[step] = UnexplainedLoss(now + _EXPLAINED_S, token, peer, failure)

    def explain(self, peer: str) -> None:
        """The supervisor of a data worker that was lost has said how it ended, and at which step."""
        for session in self._tables.sessions.values():
            for step, peers in session.losses.items():
                if peer in peers:
                    peers.remove(peer)
                    session.unexplained.pop(step, None)

    def _note_unexplained(self, session: Session, step: int, now: float) -> list[Instruction]:
        loss = session.unexplained[step]
        if now < loss.until:
            return []
        del session.unexplained[step]
        session.retries.discard(step)
        return self.note_failure(session, step, loss.token, loss.peer, loss.failure, now)

    def _who_tries_again(self, session: Session, failures: StepFailures, now: float) -> str | None:
        """A data worker with a free place: best on a host where the step has not failed, and that makes other steps."""
        tables = self._tables
        able = self._placement.able(session, now)
        elsewhere = [peer for peer in able if able[peer] not in failures.hosts]
        fit = [peer for peer in elsewhere if self._placement.is_fit(peer, session, now)]
        others = fit or elsewhere or [peer for peer in able if peer not in failures.workers] or able
        free = [peer for peers in tables.free for peer in peers if peer in others]
        pipeline_id = session.spec.pipeline_id
        return min(free, key=lambda peer: not tables.workers[peer].is_sound(pipeline_id), default=None)

    def note_made(self, peer: str, session: Session, steps: range, now: float) -> list[Instruction]:
        """A data worker made these steps; who failed them before did so by its own fault."""
        pipeline_id, workers = session.spec.pipeline_id, self._tables.workers
        workers[peer].standing(pipeline_id).made_step()
        out: list[Instruction] = []
        for step in session.failures.keys() & steps if session.failures else ():
            failures = session.failures[step]
            for other in failures.workers & workers.keys() - {peer}:
                pause_s = workers[other].standing(pipeline_id).made_by_another(now)
                out += self._tell_pause(other, pipeline_id, pause_s, "others make the steps that it fails")
            failures.settle()
        return out

    def note_failure(
        self, session: Session, step: int, token: int, peer: str, failure: Failure, now: float
    ) -> list[Instruction]:
        """Count a failure of a step that the loader may still need, and act on the verdict."""
        if session.has(step):
            return []
        spec = session.spec
        failures = session.failures.setdefault(step, StepFailures())
        is_late = token <= failures.last_token  # of a lease from before something was left out
        verdict, out = (Verdict.TRY_AGAIN, []) if is_late else self._judge(peer, session, step, failure, now)
        out += self._tables.tell(
            events.StepFailed(
                session=spec.session_id,
                step=step,
                sample=failure.sample_index,
                host=failure.host,
                pid=failure.pid,
                verdict=verdict.value,
                traceback=failure.remote_traceback,
                cause=f"{failure.error_type[1]}: {_first_line(failure.text)}",
            )
        )
        leases = [self._tables.leases[held] for held in session.tokens]
        elsewhere = [lease for lease in leases if lease.first <= step < lease.stop]
        if verdict is not Verdict.TRY_AGAIN:
            # A process that dies is heard of late: its step may be with another one already.
            failures.last_token = self._tables.token_base + self._tables.leases_granted
            for lease in elsewhere:
                out += self._lifecycle.revoke(lease, f"its step {step} is {verdict.value}")
        elif elsewhere:
            return out
        session.requeued = [requeued for requeued in session.requeued if requeued != step]
        if verdict is not Verdict.RAISE:
            session.retries.add(step)
            return out
        session.lost.add(step)
        return [*out, Send(session.loader, BatchFailed(spec.session_id, step, failure))]

    def _judge(
        self, peer: str, session: Session, step: int, failure: Failure, now: float
    ) -> tuple[Verdict, list[Instruction]]:
        """Count a failure of a step, and decide what becomes of the step and of who failed it."""
        pipeline_id, worker = session.spec.pipeline_id, self._tables.workers.get(peer)
        failures = session.failures[step]
        if worker is None:  # it was lost with all that it said
            able = self._placement.able(session, now)
            return failures.note(peer, failure, session.spec.errors, failure.host, True, able), []
        standing = worker.standing(pipeline_id)
        was_sound = standing.is_sound
        pause_s = standing.failed_step(failure.is_final, now)
        cause = f"it cannot use the pipeline: {_first_line(failure.text)}"
        out = self._tell_pause(peer, pipeline_id, pause_s, cause)
        able = self._placement.able(session, now)
        if failure.is_final:
            able = self._placement.not_known_to_fail(able, pipeline_id)
        return failures.note(peer, failure, session.spec.errors, worker.host, was_sound, able), out

    def _tell_pause(self, peer: str, pipeline_id: str, pause_s: float, cause: str) -> list[Instruction]:
        if pause_s <= 0:
            return []
        number, host = self._tables.workers[peer].number, self._tables.workers[peer].host
        return self._tables.tell(
            events.DataWorkerPaused(data_worker=number, host=host, pipeline_id=pipeline_id, for_s=pause_s, cause=cause)
        )


def _first_line(text: str) -> str:
    """The beginning of a text that may be long, for a log."""
    return text.partition("\n")[0][:200]
