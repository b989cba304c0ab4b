"""The canary: compares some steps of data workers with what torch's own worker process makes of them.

What can differ in another process is not known beforehand: a library's registry, a global switch, what `__getstate__`
leaves out, a file on another node. So it is looked for in each run. When a pass begins, one worker process is started
as torch starts them, from the program's own objects. In a loader's first pass it makes the first two steps, step
`num_workers` and two later ones, in each later pass one step at random. What it makes is compared before the program
gets the step. What a data worker raises is looked at in the same way.
"""

from __future__ import annotations

import logging
import math
import os
import random
import sys
import time
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from hetstream.mpi_dataworkers.errors import DataWorkerDied, PipelineError
from hetstream.mpi_dataworkers.loader.delivered import Delivered
from hetstream.mpi_dataworkers.loader.likeness import Difference, compare
from hetstream.mpi_dataworkers.loader.local_workers import StepRequest, one_sample_of, request_of
from hetstream.mpi_dataworkers.loader.pass_shards import PassShards
from hetstream.mpi_dataworkers.loader.user_errors import summary_of
from hetstream.mpi_dataworkers.loader.witness import LEAST_S, MOST_S, Made, NotInTime, NotMade, Witness
from hetstream.mpi_dataworkers.ops.pipeline import Pipeline, generators_kept
from hetstream.mpi_dataworkers.ops.staged import StagedBatch
from hetstream.mpi_dataworkers.wire.messages import ErrorPolicy, Failure

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

# Of a loader; until so many were compared, those of the next pass are its first ones, too.
_FIRST_STEPS = 2
# Of these one is compared, too, behind the first ones.
_SOON = 16
_NEVER = sys.maxsize
# A step that has ended data workers may end whoever makes it.
_DIED = (DataWorkerDied.__module__, DataWorkerDied.__qualname__)


class Differs(PipelineError):
    """Data workers make of a step something else than the program.

    Args:
        step: its number in the pass; it was not given to the program.
        reason: what differs, on one line.
    """

    def __init__(self, step: int, reason: str) -> None:
        super().__init__(reason)
        self.step = step


class Canary:
    """Chooses the steps of a loader that are compared, and remembers what its comparisons have found.

    Args:
        is_kept: the loader has `persistent_workers`.
        multiprocessing_context: of the loader.
        makes_steps: torch's own worker makes the steps that data workers do not deliver: the program has asked for
            worker processes, and nothing of its samples may run in the trainer.

    Attributes:
        is_kept, makes_steps: as given.
        late_since: data workers are there, and have not delivered since, on the monotonic clock, s.
        confirmed: types of exceptions of user code that torch's own worker raised where no data worker was there.
    """

    def __init__(self, is_kept: bool = False, multiprocessing_context: Any = None, makes_steps: bool = False) -> None:
        self.is_kept, self._context, self.makes_steps = is_kept, multiprocessing_context, makes_steps
        self.late_since = math.inf
        self.confirmed: set[tuple[str, str]] = set()
        self._kept: Witness | None = None
        self._witnesses: weakref.WeakSet[Witness] = weakref.WeakSet()
        self._random = random.Random()  # the program's own generators are left alone
        self._num_compared = self._most_steps = 0
        self._is_over = False
        self._varying: set[str] = set()  # with kept processes, of the first pass
        self._said: set[str] = set()

    @property
    def is_first(self) -> bool:
        """Whether the first steps of a loader are yet to be compared."""
        return self._num_compared < _FIRST_STEPS

    def steps_of_pass(self, first: int, distance: int, num_known: int) -> list[int]:
        """Steps to compare in a pass that begins with step `first`; torch's first worker makes each `distance`-th.

        Of a loader the first two of all, as what differs seldom shows in one, and the second of that worker, as what
        a program sets up at its first sample shows there; then one soon after, and one of all that are known, as what
        samples count or keep shows late, and data workers have then made other ones than the process.

        Args:
            first, distance: as above.
            num_known: steps below it are known to be there.
        """
        if self._is_over:
            return []
        if self.is_first:
            soon = first + distance + 1 + self._random.randrange(_SOON)
            late = {self._random.randrange(soon, num_known)} if soon < num_known else set()
            return sorted({first, first + 1, first + distance, soon, *late})
        return [first + self._random.randrange(self._most_steps)] if self._most_steps else []

    def witness(self, pipeline: Pipeline) -> Witness:
        """The process of a pass that begins."""
        if self._kept is not None:
            return self._kept
        made = self._new(pipeline, self.is_kept)
        self._kept = made if self.is_kept else None
        return made

    def other_witness(self, pipeline: Pipeline, witness: Witness | None, has_limit: bool = False) -> Witness:
        """A process in the place of another one, which ends: what it holds may be there for one process alone.

        Args:
            pipeline: of the program.
            witness: the other one.
            has_limit: the new one may take as much memory as is left, for steps that have ended data workers.
        """
        if witness is not None:
            self.end_witness(witness)
        return self._new(pipeline, False, has_limit) if has_limit else self.witness(pipeline)

    def _new(self, pipeline: Pipeline, is_kept: bool, has_limit: bool = False) -> Witness:
        made = Witness(pipeline, is_kept, self._context, has_limit)
        self._witnesses.add(made)
        return made

    def end_witness(self, witness: Witness) -> None:
        """End a process, also one that is kept for other passes."""
        witness.end()
        self._witnesses.discard(witness)
        if self._kept is witness:
            self._kept = None

    def give_up(self, witness: Witness) -> None:
        """End a process that makes no steps; one that was to be kept cannot be begun anew, as below."""
        self._is_over |= self.keeps(witness)
        self.end_witness(witness)

    def keeps(self, witness: Witness) -> bool:
        """Whether a process is kept for other passes."""
        return self._kept is witness

    def forget_witness(self) -> None:
        """Begin with a new process: the pipeline has other stages.

        One that was to be kept cannot be begun anew: kept workers do not see what the program has changed.
        """
        self.end_witnesses()
        self._is_over = self.is_kept

    def end_witnesses(self) -> None:
        """End all processes."""
        for witness in [*self._witnesses]:
            self.end_witness(witness)

    def difference(self, found: Made, expected: Made, once_more: Callable[[], Made]) -> str:
        """How a step of data workers differs from torch's own; empty where it does not.

        What torch's own worker makes anew at each attempt, a time or a number of the system, says nothing.

        Args:
            found: of data workers.
            expected: of torch's own worker.
            once_more: gives the same of another worker.

        Raises:
            NotMade: it cannot.
        """
        if found.failure is None and expected.failure is not None and expected.failure.is_final:
            raise NotMade(f"torch's own worker cannot send its batch: {summary_of(expected.failure)}")
        differences, varying = self._compared(found, expected), self._varying
        # A process that is started now, in a later pass, is none that was kept.
        if differences and not (self.is_kept and not self.is_first):
            # Two of now, because the program may have changed its objects since the first one was started.
            again, other = once_more(), once_more()
            made = expected, again, other
            if len({_outcome(each) for each in made}) > 1:  # it fails at times
                expected = next((each for each in made if _outcome(each) == _outcome(found)), expected)
                differences = self._compared(found, expected)
            elif varying := {each.field for each in self._compared(again, other)}:
                self._varying = self._varying | varying if self.is_kept else set()
                self.say(f"{min(varying)} is another one each time that torch's own worker makes it", "varying")
        return next((str(each) for each in differences if each.field not in varying), "")

    def _compared(self, found: Made, expected: Made) -> list[Difference]:
        outcomes = _outcome(found), _outcome(expected)
        if outcomes[0] != outcomes[1]:
            return [Difference("the step", *map(_summary, (found, expected)))]
        if found.failure is not None and expected.failure is not None:
            is_same = found.failure.text == expected.failure.text
            return [] if is_same else [Difference("its exception", *map(_summary, (found, expected)))]
        try:
            with generators_kept():
                comparison = compare(found.batch, expected.batch)
        except Exception as error:
            raise NotMade(f"{type(error).__name__}: {error}") from error
        if comparison.not_compared:
            self.say(f"no rule compares {', '.join(comparison.not_compared[:3])}", "no rule")
        return comparison.differences

    def compared(self) -> None:
        """Note that a step was compared."""
        self._num_compared += 1

    def end(self, num_steps: int) -> None:
        """End a pass of which so many steps were taken."""
        self._most_steps = max(self._most_steps, num_steps)

    def say(self, line: str, about: str = "") -> None:
        """Say what is not compared, once for each thing that it is about."""
        if about not in self._said:
            self._said.add(about)
            _log.warning("hetstream: not all of a step can be compared with the program's own: %s", line)


class ComparedPass:
    """The steps of one pass that are compared.

    Args:
        canary: of the loader.
        pipeline: of the program.
        shards: the steps.
        policy: what becomes of samples that fail.
        num_known: steps below it can be asked for.
        pinned: puts a batch into pinned memory where the loader pins.

    Attributes:
        due: a step from this one on is to be given to `difference`.
        wanted: `ask` is to be called when this step can be asked for.
    """

    def __init__(
        self,
        canary: Canary,
        pipeline: Pipeline,
        shards: PassShards,
        policy: ErrorPolicy,
        num_known: int,
        pinned: Callable[[Any], Any],
    ) -> None:
        self._canary, self._pipeline, self._policy, self._pinned = canary, pipeline, policy, pinned
        self._shards, self._first = shards, shards.position
        self._process = os.getpid()
        self._steps = canary.steps_of_pass(self._first, pipeline.num_workers, num_known)  # to compare, in order
        self._num_asked = self._num_missed = 0  # of these; of all that were made here
        self._witness: Witness | None = None
        self._began = time.monotonic()
        self._is_kept = False  # for more failures, and steps that data workers do not deliver
        self._made_instead: list[int] = []
        self._made: tuple[int, Made] | None = None  # what was compared last
        if self._steps:
            self._witness = canary.witness(pipeline)
            self._do(lambda witness: witness.begin([*self._before_all(num_known), *self._requests(num_known)]))
        self._note_next()

    def _before_all(self, num_known: int) -> list[StepRequest]:
        """What a loader's first process makes before anything that is compared: a sample of another step.

        So that samples which depend on what was made before them (on the last one, with which they are mixed) differ in
        the first step already: no data worker has made anything before that one.
        """
        shards = self._shards
        others = (step for step in range(self._first, num_known) if step not in self._steps)  # it is not made twice
        other = next(others, None) if self._canary.is_first else None
        if other is None or shards.order is None:
            return []
        sample = one_sample_of(shards.order, other, shards.seeds, self._policy, -self._pipeline.num_workers)
        return [] if sample is None else [sample]

    def _requests(self, num_known: int) -> list[StepRequest]:
        """Of the steps that can be asked for by now, and were not."""
        steps = [step for step in self._steps[self._num_asked :] if step < num_known]
        self._num_asked += len(steps)
        return [self._request(step) for step in steps]

    def _request(self, step: int) -> StepRequest:
        shards = self._shards
        request = None if shards.order is None else request_of(shards.order, step, shards.seeds, self._policy)
        assert request is not None
        return request

    def _note_next(self) -> None:
        self.due = self._steps[0] if self._steps else _NEVER
        self.wanted = self._steps[self._num_asked] if self._num_asked < len(self._steps) else _NEVER

    def _do(self, work: Callable[[Witness], _T]) -> _T | None:
        """Let the worker process do something; where it cannot, compare no more in this pass, and give None."""
        try:
            if self._witness is not None and os.getpid() == self._process:
                return work(self._witness)
        except NotMade as error:
            if isinstance(error, NotInTime) and self._canary.makes_steps:
                raise
            self._give_up(error)
            return None
        self._drop()
        return None

    def _give_up(self, error: NotMade) -> None:
        """The process is of no use any more: end it, and compare no more."""
        if self._witness is not None:
            self._canary.give_up(self._witness)
        self._canary.say(str(error))
        self._drop()

    def _drop(self) -> None:
        """Compare no more in this pass."""
        self._steps, self._num_asked = [], 0
        witness, self._witness = self._witness, None
        if witness is not None and not self._canary.keeps(witness):
            self._canary.end_witness(witness)
        self._note_next()

    def ask(self, num_known: int) -> None:
        """Ask for steps that can be asked for by now."""

        def ask_all(witness: Witness) -> None:
            for request in self._requests(num_known):
                witness.ask(request)

        self._do(ask_all)
        self._note_next()

    def difference(self, step: int, delivered: Delivered) -> str | None:
        """How a step that was delivered differs from the program's own, on one line.

        Returns:
            The line; "" where nothing differs, None where the step was not compared.
        """
        is_compared = False
        while self._steps and self._steps[0] <= step:
            is_compared = self._steps.pop(0) == step and self._num_asked > 0
            self._num_asked = max(0, self._num_asked - 1)
        found: str | None = None
        if is_compared:
            made = Made.of(delivered.num_samples, delivered.payload)
            found = self._compared(step, made)
        if found is not None and delivered.origin != "local":
            self._canary.compared()
        elif found is not None:  # made here of what data workers were sent, it says nothing of their processes
            self._num_missed += 1
            self._steps.append(max([step, *self._steps]) + (self._pipeline.num_workers << self._num_missed - 1))
        if not self._steps and not self._is_kept:
            self._drop()
        self._note_next()
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
            return self._do(lambda witness: self._difference(witness, step, found))
        except NotInTime as error:
            self._give_up(error)
            return f"step {step} cannot be compared with the program's own, which may wait for what they hold: {error}"

    def _difference(self, witness: Witness, step: int, found: Made) -> str:
        expected = self._as_pinned(witness.made(step, self._limit_s))
        self._made = step, expected
        difference = self._canary.difference(found, expected, lambda: self._once_more(self._witness or witness, step))
        return difference and f"step {step} of data workers is not the program's own: {difference}"

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
        self._is_kept = True
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
            # Another step may have ended it: begin anew with this one alone, and compare no more. Not where it hangs,
            # nor where it was kept from an earlier pass: a new one would see what the program has changed since.
            try:
                if isinstance(error, NotInTime) or self._canary.is_kept:
                    raise
                made = self._alone(step, limit_s)
            except NotMade as last:
                self._give_up(last)
                return str(last)
        return made if made.failure is None else f"torch's own worker process raises {_summary(made)}"

    def _alone(self, step: int, limit_s: float) -> Made:
        """What a fresh process makes of one step.

        Raises:
            NotMade: it cannot.
        """
        self._steps, self._num_asked, self._made_instead = [], 0, [step]
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
        has_died = failure.error_type == _DIED
        self._is_kept = True
        if self._witness is None or has_died or is_alone:
            self._process = os.getpid()
            self._witness = self._canary.other_witness(self._pipeline, self._witness, has_died)
            self._do(lambda witness: witness.begin([self._request(step)]))
        elif not self._witness.has(step):
            self._do(lambda witness: witness.ask(self._request(step)))
        found = Made(0, None, failure)
        difference = self._compared(step, found)
        if is_alone and not difference:
            self._canary.confirmed.add(failure.error_type)
        if difference is None:  # the process has ended, too, or nobody knows
            return "" if has_died else f"data workers cannot make step {step}: {summary_of(failure)}"
        return difference

    def restart(self, pipeline: Pipeline) -> None:
        """Go on with other stages, which the process does not have: compare no more in this pass but what raises."""
        self._drop()
        self._pipeline = pipeline

    def give_way(self) -> None:
        """End the process: another one makes a step, and may need what this one holds."""
        if self._witness is not None:
            self._canary.give_up(self._witness)
        self._drop()

    def close(self) -> None:
        """End the pass, which may be in its middle."""
        self._canary.end(self._shards.position - self._first)
        self._drop()


def _outcome(made: Made) -> tuple[Any, ...]:
    """What became of a step, but for the batch and the text of an exception."""
    return (made.num_samples,) if made.failure is None else made.failure.error_type


def _summary(made: Made) -> str:
    """The same on one line, and the text."""
    if made.failure is None:
        return f"{made.num_samples} samples"
    return f"{made.failure.error_type[1]}: {summary_of(made.failure)}"
