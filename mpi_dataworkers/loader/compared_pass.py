"""The steps of one pass that are compared with what torch's own worker process makes of them; see `canary`."""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from hetstream.mpi_dataworkers.errors import DataWorkerDied
from hetstream.mpi_dataworkers.loader.canary import Canary, FirstWorkers, MadeTwice, NotSent
from hetstream.mpi_dataworkers.loader.local_workers import StepRequest, request_of
from hetstream.mpi_dataworkers.loader.session import Delivered
from hetstream.mpi_dataworkers.loader.shards import PassShards
from hetstream.mpi_dataworkers.loader.user_errors import summary_of
from hetstream.mpi_dataworkers.loader.witness import LEAST_S, MOST_S, HasEnded, Made, NotInTime, NotMade, Witness
from hetstream.mpi_dataworkers.ops.pipeline import Pipeline, StagedBatch
from hetstream.mpi_dataworkers.wire.messages import ErrorPolicy, Failure

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

_NEVER = sys.maxsize
# Time from data workers' first step in which slow torch workers may still prove steps.
_PROVING_S = 30.0
# A step that has ended data workers may end whoever makes it.
_DIED = (DataWorkerDied.__module__, DataWorkerDied.__qualname__)


class ComparedPass:
    """The steps of one pass that are compared.

    Args:
        canary: of the loader.
        pipeline: of the program.
        shards: the steps.
        policy: what becomes of samples that fail.
        num_known: steps below it can be asked for.
        pinned: puts a batch into pinned memory where the loader pins.
        digest: of what data workers were sent.
        ahead: steps that torch's workers have in work: what they read while the program goes on, a file that it
            replaces, say, they read as late as without data workers.

    Attributes:
        due: a step from this one on is to be given to `difference`.
        has_ended: `instead` gave no step because that step alone has ended its process.
        was_late: `instead` gave no step because it was not made in time.
    """

    def __init__(
        self,
        canary: Canary,
        pipeline: Pipeline,
        shards: PassShards,
        policy: ErrorPolicy,
        num_known: int,
        pinned: Callable[[Any], Any],
        digest: str,
        ahead: int,
    ) -> None:
        self._ahead = max(1, ahead)
        self._canary, self._pipeline, self._policy, self._pinned = canary, pipeline, policy, pinned
        self._shards, self._first = shards, shards.position
        self._process = os.getpid()
        self._num_to_prove = canary.num_to_prove(digest, pipeline.num_workers)
        self._is_unknown = self._num_to_prove > 0
        self._proved_since = math.inf  # on the monotonic clock, s
        steps = canary.steps_of_pass(self._first, pipeline.num_workers)
        # To compare one by one, in order.
        self._steps = [step for step in steps if step >= self._first + self._num_to_prove or not self._num_to_prove]
        # To compare with what a process of their own makes, as one that makes several has ended; and why it has.
        self._one_by_one: list[int] = []
        self._ended_by = ""
        self._workers: FirstWorkers | None = None
        self._asked: set[int] = set()  # of these
        self._num_missed = 0  # that were made here
        self._last_same = -1
        self._twice = MadeTwice(canary, pipeline)
        self._witness: Witness | None = None
        self._began = time.monotonic()
        self.has_ended = self.was_late = False
        self._is_kept = False  # for more failures, and steps that data workers do not deliver
        self._made_instead: list[int] = []
        self._made: tuple[int, Made] | None = None  # what was compared last
        self._looked_at: tuple[int, str | None] | None = None  # a step, and how it differs
        self._doubted = -1  # a step that differs, and was being made once more
        self._death: RuntimeError | None = None  # of the process that has ended last, as torch tells it
        self._died: tuple[int, RuntimeError] | None = None  # a step that ends each process
        num_known = self._askable(num_known)
        if self._steps:
            self._witness = canary.witness(pipeline)
            requests = self._requests(num_known)
            self._asked.update(request[1] for request in requests)
            before = self._twice.requests(shards, policy, self._steps, num_known)
            self._do(lambda witness: witness.begin([*before, *requests]))
        if self._num_to_prove:
            self._workers = FirstWorkers(
                lambda: canary.new_witness(pipeline), canary.end_witness, pipeline.num_workers, self._first
            )
            self._ask_workers(num_known)
        self._note_next()

    @property
    def as_torch(self) -> bool:
        """Whether data workers are to be no further ahead than torch's own would be.

        As long as nobody knows what samples do outside, and where they write: what fills a directory must not fill more
        of it before the program leaves the loop.
        """
        return self._is_unknown or (self._canary.makes_steps and self._canary.samples_write)

    def _requests(self, num_known: int) -> list[StepRequest]:
        """Of the steps that can be asked for by now, and were not."""
        return [self._request(step) for step in self._steps if step < num_known and step not in self._asked]

    def _request(self, step: int) -> StepRequest:
        shards = self._shards
        request = None if shards.order is None else request_of(shards.order, step, shards.seeds, self._policy)
        assert request is not None
        return request

    def _note_next(self) -> None:
        self.due = self._steps[0] if self._steps else _NEVER
        self._wanted = next((step for step in self._steps if step not in self._asked), _NEVER)
        if self._workers is not None:
            self.due, self._wanted = self._first, min(self._wanted, self._workers.next_step)
        if self._one_by_one:
            self.due = min(self.due, self._one_by_one[0])

    def _askable(self, num_known: int) -> int:
        """Steps below it can be asked for."""
        return min(num_known, self._shards.position + self._ahead)

    def _do(self, work: Callable[[Witness], _T]) -> _T | None:
        """Let the worker process do something; where it cannot, compare no more in this pass, and give None."""
        try:
            if self._witness is not None and os.getpid() == self._process:
                return work(self._witness)
        except NotMade as error:
            if isinstance(error, NotInTime) and self._canary.makes_steps:
                raise
            if isinstance(error, HasEnded):
                self._death = error.as_torch
            self._give_up(error)
            return None
        self._drop()
        return None

    def _ask_workers(self, num_known: int) -> None:
        """Have torch's own workers make the steps that can be asked for by now."""
        workers = self._own_workers()
        if workers is None:
            return
        try:
            workers.ask(self._request(step) for step in range(workers.next_step, num_known))
        except NotMade as error:
            self._give_up(error)

    def _own_workers(self) -> FirstWorkers | None:
        """Those of the first steps; none in a process that was forked since."""
        if os.getpid() != self._process:
            self._workers = None
        return self._workers

    def _begin_anew(self, workers: FirstWorkers, step: int) -> None:
        """Begin anew with the workers, and with no other process, which may have what they need."""
        self._steps.clear()
        witness, self._witness = self._witness, None
        if witness is not None:
            self._canary.give_up(witness)
        try:
            workers.begin_anew(step)
        except NotMade as error:
            self._give_up(error)

    def _end_workers(self) -> None:
        workers, self._workers = self._workers, None
        if workers is not None:
            workers.end()

    def _give_up(self, error: NotMade) -> None:
        """The process is of no use any more: end it. Compare no more; under the hook each step that is left, alone."""
        if self._witness is not None:
            self._canary.give_up(self._witness)
        if self._canary.makes_steps and not isinstance(error, NotSent):
            to_prove = self._num_to_prove if self._workers is not None else 0
            position = self._shards.position
            self._one_by_one = sorted({*self._one_by_one, *self._steps, *range(position, position + to_prove)})
            self._ended_by = str(error)
        else:
            self._canary.say(str(error))
        self._drop()

    def _drop(self) -> None:
        """Compare no more in this pass."""
        self._steps.clear()
        self._end_workers()
        witness, self._witness = self._witness, None
        if witness is not None and not self._canary.keeps(witness):
            self._canary.end_witness(witness)
        self._note_next()

    def ask(self, num_known: int) -> None:
        """Ask for steps that can be asked for by now.

        Args:
            num_known: steps below it are known.
        """
        num_known = self._askable(num_known)
        if self._wanted >= num_known:
            return

        def ask_all(witness: Witness) -> None:
            for request in self._requests(num_known):
                if not witness.has(request[1]):
                    witness.ask(request)
                self._asked.add(request[1])

        if self._steps:
            self._do(ask_all)
        self._ask_workers(num_known)
        self._note_next()

    def difference(self, step: int, delivered: Delivered) -> str | None:
        """How a step that was delivered differs from the program's own, on one line.

        Returns:
            The line; "" where nothing differs, None where the step was not compared.
        """
        if self._looked_at is not None and self._looked_at[0] == step and step not in self._one_by_one:
            return self._looked_at[1]  # a handler of a signal has interrupted what followed
        found: str | None = None
        if (workers := self._own_workers()) is not None:
            found = self._proved(workers, step, delivered)
            if found is not None or step not in self._one_by_one:
                self._note_next()
                return found
        elif step in self._steps and step in self._asked:
            found = self._compared(step, Made.of(delivered.num_samples, delivered.payload))
        if found is None and step in self._one_by_one:
            found = self._compared_alone(step, delivered)
        self._looked_at = step, found
        self._one_by_one = [later for later in self._one_by_one if later > step]
        self._steps = [later for later in self._steps if later > step]
        if found is not None and delivered.origin != "local":
            self._canary.compared()
        elif found is not None:  # made here of what data workers were sent, it says nothing of their processes
            self._num_missed += 1
            self._steps = sorted({*self._steps, step + (self._pipeline.num_workers << self._num_missed - 1)})
        if not self._steps and not self._is_kept:
            self._drop()
        self._note_next()
        return found

    def _proved(self, workers: FirstWorkers, step: int, delivered: Delivered) -> str | None:
        """How a step differs from that of the worker process which would make it without data workers."""
        found: str | None = None
        if delivered.origin != "local":
            self._proved_since = min(self._proved_since, time.monotonic())
            self._looked_at = step, self._compared(step, Made.of(delivered.num_samples, delivered.payload))
            found = self._looked_at[1]
            if found == "":
                self._canary.compared()
                self._canary.proved()
                self._num_to_prove -= 1
        if self._workers is not workers:
            return found
        workers.drop(step)
        if self._is_proved_by(step):
            self._end_workers()
            self._steps = [later for later in self._steps if later > step]
            if not self._steps and not self._is_kept:
                self._drop()
        return found

    def _is_proved_by(self, step: int) -> bool:
        """Whether enough steps were equal with this one, or as many as there was time for."""
        has_second = step >= self._first + 2 * self._pipeline.num_workers - 1
        if self._num_to_prove <= 0 or (has_second and time.monotonic() - self._proved_since > _PROVING_S):
            self._is_unknown = False
        return not self._is_unknown

    def _compared_alone(self, step: int, delivered: Delivered) -> str | None:
        """How a step differs from what a process makes of it that makes nothing else.

        A process that has ended may have ended of a step that it made ahead, which data workers treat by their rules.
        What was kept from an earlier pass, or was to show what samples change, no other process can do.
        """
        if delivered.origin == "local" or os.getpid() != self._process:
            return None
        if self._canary.is_kept or self._twice.number is not None:
            return f"step {step} cannot be compared with the program's own: {self._ended_by}"
        try:
            self._witness = witness = self._canary.other_witness(self._pipeline, self._witness)
            witness.begin([self._request(step)])
            found = self._difference(witness, step, Made.of(delivered.num_samples, delivered.payload))
        except NotSent as error:
            self._canary.say(str(error))
            return None
        except NotMade as error:
            return f"step {step} cannot be compared with the program's own: {error}"
        if self._num_to_prove and not found:
            self._canary.proved()
            self._num_to_prove -= 1
            if self._is_proved_by(step) and self._num_to_prove:  # it takes too long
                self._one_by_one.clear()
        return found

    def untouched(self, step: int, payload: Any) -> Any:
        """The batch of a step that was compared, for the program: torch's own worker's, if to compare is to change."""
        made = self._made
        if made is None or made[0] != step or made[1].untouched is None:
            return payload
        batch = self._pinned(Made.of(0, made[1].untouched[0]).batch)
        return StagedBatch(batch, payload.extra) if type(payload) is StagedBatch else batch

    def _compared(self, step: int, found: Made) -> str | None:
        """How what became of a step differs from the program's own; None where there is nothing to compare with."""
        try:
            if (workers := self._own_workers()) is not None and workers.has(step):
                difference = self._difference_of_workers(workers, step, found)
            else:
                difference = self._do(lambda witness: self._difference(witness, step, found))
            if difference is None and step == self._doubted:
                return f"step {step} of data workers is not the program's own, and a signal interrupted a look"
            return difference
        except NotInTime as error:
            self._give_up(error)
            return f"step {step} cannot be compared with the program's own, which may wait for what they hold: {error}"

    def _difference_of_workers(self, workers: FirstWorkers, step: int, found: Made) -> str | None:
        changes = (
            self._do(lambda witness: self._twice.changes(witness, self._limit_s)) if self._witness is not None else ""
        )
        if changes or self._workers is not workers:  # which end with the process that makes a sample twice
            return changes
        try:
            expected = workers.made(step, self._limit_s)
            return self._difference_from(
                step, found, expected, lambda: self._as_pinned(workers.made_anew(step, self._limit_s))
            )
        except NotMade as error:
            if isinstance(error, NotInTime):
                raise
            self._give_up(error)
            return None

    def _difference(self, witness: Witness, step: int, found: Made) -> str:
        if changes := self._twice.changes(witness, self._limit_s):
            return changes
        expected = witness.made(step, self._limit_s)
        return self._difference_from(step, found, expected, lambda: self._once_more(self._witness or witness, step))

    def _difference_from(self, step: int, found: Made, expected: Made, once_more: Callable[[], Made]) -> str:
        if expected.changes:
            return expected.changes
        if expected.wrote:
            self._canary.writes(step, expected.wrote)
        expected = self._as_pinned(expected)
        self._made = step, expected

        def once_more_doubted() -> Made:
            self._doubted = step
            made = once_more()
            if found.failure is not None and made.outcome == found.outcome:
                self._made = step, made  # it may be raised at times alone
            return made

        try:
            difference = self._canary.difference(found, expected, once_more_doubted)
        except NotMade:
            self._doubted = -1
            raise
        self._doubted = -1
        if not difference:
            self._last_same = step
            return ""
        difference = f"step {step} of data workers is not the program's own: {difference}"
        first = max(self._first, self._last_same + 1)
        given = [f"those from step {first} on"] if first < step else []
        if self._canary.has_passes:
            given.append("those of earlier passes")
        if not given:
            return difference
        return f"{difference}. T{' and '.join(given)[1:]} may have been others, too"

    @property
    def _limit_s(self) -> float:
        """How long to wait for a step that data workers have made by now."""
        return min(MOST_S, max(LEAST_S, 4 * (time.monotonic() - self._began)))

    def _once_more(self, witness: Witness, step: int) -> Made:
        """What another process makes of a step after all that the first one made before it; it takes its place."""
        requests = witness.requests.all()
        self._witness = other = self._canary.other_witness(self._pipeline, witness)
        other.begin(requests)
        return self._as_pinned(other.made(step, self._limit_s))

    def instead(self, step: int, num_known: int, limit_s: float) -> Made | str:
        """Have the process make a step that data workers do not deliver.

        Args:
            step: which.
            num_known: steps below it may be asked for ahead.
            limit_s: how long to wait.

        Returns:
            The step; or why it cannot make it, on one line.
        """
        self._is_kept, self.was_late = True, False
        if (workers := self._own_workers()) is not None and workers.has(step):
            try:
                made = self._as_pinned(workers.made(step, limit_s))
                return made.no_batch or made
            except NotInTime as error:  # nor is it where there are no data workers
                self.was_late = True
                self._give_up(error)
                return str(error)
            except NotMade:
                self._end_workers()  # a process of its own says what that step does
        try:
            if self._witness is None or os.getpid() != self._process:
                self._process = os.getpid()
                self._witness = self._canary.witness(self._pipeline)
                self._witness.begin([])
            witness = self._witness
            while self._made_instead and self._made_instead[0] < step:
                witness.forget(self._made_instead.pop(0))
            for number in range(step, min(step + 2, num_known)):  # it makes one while the program is at the other
                if not witness.has(number):
                    witness.ask(self._request(number))
                    self._made_instead.append(number)
            made = self._as_pinned(witness.made(step, limit_s))
        except NotMade as error:
            # Another step may have ended it: begin anew with this one alone, and so with those to compare. Not where it
            # hangs, nor where it was kept from an earlier pass: a new one would see what the program has changed since.
            try:
                if isinstance(error, NotInTime) or self._canary.is_kept:
                    raise
                made = self._alone(step, limit_s)
            except NotMade as last:
                self.has_ended = isinstance(last, HasEnded) and not self._canary.is_kept
                self.was_late = isinstance(last, NotInTime)
                self._give_up(last)
                return str(last)
        return made.no_batch or made

    def _alone(self, step: int, limit_s: float) -> Made:
        """What a fresh process makes of one step.

        Raises:
            NotMade: it cannot.
        """
        if self._canary.makes_steps:
            self._one_by_one = sorted({*self._one_by_one, *self._steps})
        self._steps, self._made_instead = [], [step]
        self._note_next()
        self._witness = witness = self._canary.other_witness(self._pipeline, self._witness)
        witness.begin([self._request(step)])
        return self._as_pinned(witness.made(step, limit_s))

    def _as_pinned(self, made: Made) -> Made:
        return made if made.batch is None else msgspec.structs.replace(made, batch=self._pinned(made.batch))

    def is_confirmed(self, failure: Failure) -> bool:
        """Whether such an exception is known to be raised, too, where no data worker holds anything."""
        return not self._canary.makes_steps or failure.error_type in self._canary.confirmed

    def failed(self, step: int, failure: Failure, is_alone: bool = False) -> str:
        """Look at what a data worker raised.

        Args:
            step: its step.
            failure: what it raised.
            is_alone: no data worker holds anything now: begin with another process.

        Returns:
            Why it may not be raised, on one line; "" where the program would raise the same.
        """
        if is_alone and self._canary.is_kept and self._canary.has_passes:
            # One that is begun now would have what the program has changed since the first pass.
            return (
                f"data workers and torch's own worker process raise at step {step}: {failure.error_type[1]}: "
                f"{summary_of(failure)}. With persistent_workers the program's own workers alone show whether it is "
                "raised where there are no data workers"
            )
        has_died = failure.error_type == _DIED
        self._is_kept, self._death = True, None
        if (workers := self._own_workers()) is not None and workers.has(step) and not has_died:
            if is_alone:
                self._begin_anew(workers, step)
        elif self._witness is None or has_died or is_alone:
            self._process = os.getpid()
            self._witness = self._canary.other_witness(self._pipeline, self._witness, has_died)
            self._do(lambda witness: witness.begin([self._request(step)]))
        elif not self._witness.has(step):
            self._do(lambda witness: witness.ask(self._request(step)))
        found = Made(0, None, failure)
        difference = self._compared(step, found)
        # A process whose memory has a limit may raise in place of it.
        has_raised = self._made is not None and self._made[0] == step
        self._died = (step, self._death) if has_died and self._death is not None and not has_raised else None
        if self._died is not None and (is_alone or self.is_confirmed(failure)):
            _log.warning("hetstream: %s", failure.text)  # torch names no sample
        if is_alone and not difference:
            self._canary.confirmed.add(failure.error_type)
        if difference is None:  # the process has ended, too, or nobody knows
            return "" if has_died else f"data workers cannot make step {step}: {summary_of(failure)}"
        return difference

    def raised(self, step: int) -> Exception | None:
        """What the program gets for a step that has `failed` as its own would; None where torch hands over nothing."""
        if self._died is not None and self._died[0] == step:
            # Not that one: once raised, it would hold this object in its frames.
            raised = RuntimeError(*self._died[1].args)
            raised.__cause__ = self._died[1].__cause__
            return raised
        return self._made[1].raised if self._made is not None and self._made[0] == step else None

    def restart(self, pipeline: Pipeline) -> None:
        """Go on with other stages, which the process does not have: compare no more in this pass but what raises."""
        self._drop()
        self._pipeline, self._looked_at, self._one_by_one = pipeline, None, []

    def give_way(self) -> None:
        """End the process: another one makes a step, and may need what this one holds."""
        if self._witness is not None:
            self._canary.give_up(self._witness)
        self._drop()

    def close(self) -> None:
        """End the pass, which may be in its middle."""
        self._canary.end(self._shards.position - self._first)
        self._drop()
