"""The canary: compares some steps of data workers with what torch's own worker process makes of them.

What can differ in another process is not known beforehand: a library's registry, a global switch, what `__getstate__`
leaves out, what samples that the same process made before have left. So it is looked for in each run, with worker
processes that are started as torch starts them, from the program's own objects. What they make is compared before the
program gets the step:

* all steps from the first one on, until 64 were equal, by as many processes as the program asks for, each of which
  makes the steps that it would make without data workers (`first_workers`). A pass with another dataset is looked at
  anew.
* behind them, of each stretch twice as long as the one before, one step; in each later pass the first one, as what the
  program changes between passes shows there, and one at random. One process makes these; for hetstream's own loader
  also the first two of its first pass and step `num_workers`.

What a data worker raises is looked at in the same way.

A sample that is made twice must leave the program's objects as they were, or the loader stays local from its first
step; see `ops.changes`. The rest of it is in `compared_pass`.
"""

from __future__ import annotations

import logging
import math
import random
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from hetstream.mpi_dataworkers.errors import PipelineError
from hetstream.mpi_dataworkers.loader.local_workers import StepRequest, one_sample_of
from hetstream.mpi_dataworkers.loader.shards import PassShards
from hetstream.mpi_dataworkers.loader.user_errors import summary_of
from hetstream.mpi_dataworkers.loader.witness import MOST_S, Made, NotMade, Witness
from hetstream.mpi_dataworkers.ops.batch_comparison import Difference, compare
from hetstream.mpi_dataworkers.ops.pipeline import Pipeline, generators_kept
from hetstream.mpi_dataworkers.process.handlers import others
from hetstream.mpi_dataworkers.wire.messages import ErrorPolicy

_log = logging.getLogger(__name__)

# First steps of a loader that are compared; if a pass ends before, the next one goes on with them.
_FIRST_STEPS = 2
# Equal steps, made beside as without data workers, before the others are believed; after a change of the dataset half
# as many, but two of each process.
_PROVING_STEPS = 64
# Behind the first ones, one step of this many is compared, then one of twice as many, and so on.
_SOON = 16
_MOST_STRETCHES = 40  # no pass has more
# By the digest of what data workers were sent, as programs make a new loader for each epoch.
_num_proved: dict[str, int] = {}
_said_to_write: set[str | None] = set()


class NotSent(NotMade):
    """torch's own worker has made a batch that it cannot send; torch's own loader would wait for it without end."""


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
        self._num_passes = 0  # that have ended
        self._num_kinds = 0  # datasets for which steps were to be proved
        self._kind: str | None = None
        self._varying: set[str] = set()  # of this pass; with kept processes, of the first one
        self._said: set[str] = set()
        self._writing: set[tuple[int, int]] = set()  # steps whose samples write, each with the number of its pass

    @property
    def is_first(self) -> bool:
        """Whether the first steps of a loader are yet to be compared."""
        return self._num_compared < _FIRST_STEPS

    @property
    def has_passes(self) -> bool:
        """Whether a pass of the loader has ended."""
        return self._num_passes > 0

    def steps_of_pass(self, first: int, distance: int) -> list[int]:
        """Steps to compare in a pass that begins with step `first`; torch's first worker makes each `distance`-th.

        Of a loader the first two of all, as what differs seldom shows in one, and the second of that worker, as what
        a program sets up at its first sample shows there. Then one soon after, and one of each stretch that is twice as
        long as the one before: what samples count or keep shows late, and may be followed by as many steps as it took.
        Of a later pass the first one, before the program has it: what has changed since the pass before shows there.
        """
        if self._is_over:
            return []
        if self.is_first:
            begin = first + distance + 1
            stretches = [_SOON << number for number in range(_MOST_STRETCHES)]
            later = [begin + length - _SOON + self._random.randrange(length) for length in stretches]
            return sorted({first, first + 1, first + distance, *later})
        return sorted({first, first + self._random.randrange(self._most_steps)}) if self._most_steps else []

    def num_to_prove(self, digest: str, num_workers: int) -> int:
        """How many steps of a pass that begins are to be equal to those of torch's own workers, from its first one on.

        Args:
            digest: of what data workers were sent.
            num_workers: that the program asks for.
        """
        if not self.makes_steps or (self.is_kept and self._num_passes):
            return 0
        if digest != self._kind:
            self._kind = digest
            self._num_kinds += 1
        wanted = max(2 * num_workers, _PROVING_STEPS >> min(self._num_kinds - 1, _MOST_STRETCHES))
        return max(0, wanted - _num_proved.get(digest, 0))

    def proved(self) -> None:
        """Note that a step was equal to that of torch's own workers."""
        assert self._kind is not None
        _num_proved[self._kind] = _num_proved.get(self._kind, 0) + 1

    def new_witness(self, pipeline: Pipeline) -> Witness:
        """A process for the first steps."""
        return self._new(pipeline, False)

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
            NotSent: torch's own worker cannot send the batch.
        """
        if found.failure is None and expected.failure is not None and expected.failure.is_final:
            raise NotSent(f"torch's own worker cannot send its batch: {summary_of(expected.failure)}")
        differences, varying = self.differences(found, expected), self._varying
        # A process that is started now, in a later pass, is none that was kept.
        if differences and not (self.is_kept and self._num_passes):
            # Two of now, because the program may have changed its objects since the first one was started.
            again, other = once_more(), once_more()
            made = expected, again, other
            if len({each.outcome for each in made}) > 1:  # it fails at times
                expected = next((each for each in made if each.outcome == found.outcome), expected)
                differences = self.differences(found, expected)
            elif varying := {each.field for each in self.differences(again, other)}:
                self._varying |= varying
                self.say(f"{min(varying)} is another one each time that torch's own worker makes it", "varying")
        return next((str(each) for each in differences if each.field not in varying), "")

    def differences(self, found: Made, expected: Made) -> list[Difference]:
        """All differences of two makings of a step.

        Raises:
            NotMade: user code raised when they were looked at.
        """
        outcomes = found.outcome, expected.outcome
        if outcomes[0] != outcomes[1]:
            return [Difference("the step", found.summary, expected.summary)]
        if found.failure is not None and expected.failure is not None:
            is_same = found.failure.text == expected.failure.text
            return [] if is_same else [Difference("its exception", found.summary, expected.summary)]
        try:
            with generators_kept():
                comparison = compare(found.batch, expected.batch)
        except others() as error:
            raise NotMade(f"{type(error).__name__}: {error}") from error
        if comparison.not_compared:
            self.say(f"no rule compares {', '.join(comparison.not_compared[:3])}", "no rule")
        return comparison.differences

    def compared(self) -> None:
        """Note that a step was compared."""
        self._num_compared += 1

    def end(self, num_steps: int) -> None:
        """End a pass, of which a number of steps was taken."""
        self._most_steps = max(self._most_steps, num_steps)
        self._num_passes += 1
        if not self.is_kept:
            self._varying = set()

    @property
    def samples_write(self) -> bool:
        """Whether samples were seen to write to files in more than one step."""
        return len(self._writing) > 1 or self._kind in _said_to_write

    def writes(self, step: int, what: str) -> None:
        """Note that the samples of a step write to files. What one alone writes (a module that is compiled when it is
        imported, say) is not told."""
        if not self.samples_write:
            self._writing.add((self._num_passes, step))
        if len(self._writing) > 1 and self._kind not in _said_to_write:
            _said_to_write.add(self._kind)
            _log.warning(
                "hetstream: samples of a DataLoader write to files (step %d: %s). So do data workers, and what "
                "compares steps: what is appended may be there more than once, and what goes through the program's own "
                "logging handlers is in the data workers' logs.%s",
                step,
                what,
                " Data workers make its steps no further ahead than torch's own would" if self.makes_steps else "",
            )

    def say(self, line: str, about: str = "") -> None:
        """Say what is not compared, once for each thing that it is about."""
        if about not in self._said:
            self._said.add(about)
            _log.warning("hetstream: not all of a step can be compared with the program's own: %s", line)


# A sample that a loader's first process makes twice, before anything that is compared; see `canary`.


class MadeTwice:
    """A sample of another step than those that are compared.

    So that samples which depend on what was made before them (on the last one, with which they are mixed) differ in
    the first step already: no data worker has made anything before that one. And it shows what samples change.

    Args:
        canary: of the loader.
        pipeline: of the program.

    Attributes:
        number: of the sample, which is asked for as a step; None where nothing is to be learnt of it (any more).
    """

    def __init__(self, canary: Canary, pipeline: Pipeline) -> None:
        self._canary, self._pipeline = canary, pipeline
        self.number: int | None = None

    def requests(self, shards: PassShards, policy: ErrorPolicy, steps: list[int], num_known: int) -> list[StepRequest]:
        """What its process is to make before it makes `steps`; nothing but in a loader's first pass."""
        first = shards.position
        if shards.order is None or not self._canary.is_first or num_known <= first:
            return []
        number = -self._pipeline.num_workers
        other = next((step for step in range(first, num_known) if step not in steps), first)
        sample = one_sample_of(shards.order, other, shards.seeds, policy, number)
        self.number = None if sample is None else number
        return [] if sample is None else [sample]

    def changes(self, witness: Witness, limit_s: float) -> str:
        """What the sample changes, on one line; asked for once.

        Raises:
            NotMade: the process gives no answer.
        """
        if self.number is None or not witness.has(self.number):
            return ""
        made, request = witness.made(self.number, limit_s), witness.requests.asked[0]
        if not made.repeated:
            self.number = None
            return made.changes
        # Another process tells what is another one each time: a time, a number of the system.
        other = self._canary.new_witness(self._pipeline)
        try:
            other.begin([request])
            again = other.made(request[1], limit_s)
            varying = {each.field for each in self._canary.differences(again, made)}
        finally:
            self._canary.end_witness(other)
        found = next((how for field, how in made.repeated.items() if field not in varying), "")
        self.number = None
        said = "a sample is another one when its process makes it a second time, so samples may depend on one another"
        return f"{said}: {found}" if found else ""


# torch's own worker processes for the first steps of a loader; see `canary`.
#
# Each makes its steps and no others, in their order, as where there are no data workers: what samples keep, count or
# leave in a library is then what it would be.


class FirstWorkers:
    """As many processes as the program asks for.

    Args:
        make: gives a process that is yet to begin.
        end: ends one.
        num_workers: how many.
        first: number of the first step.

    Attributes:
        next_step: the first one that was not asked for.
    """

    def __init__(
        self, make: Callable[[], Witness], end: Callable[[Witness], None], num_workers: int, first: int
    ) -> None:
        self._make, self._end, self._num_workers = make, end, num_workers
        self._workers: dict[int, Witness] = {}
        self.next_step = first

    def ask(self, requests: Iterable[StepRequest]) -> None:
        """Have the next steps made, each by the process whose turn it is.

        Raises:
            NotMade: as `Witness.begin`.
        """
        asked: dict[int, list[StepRequest]] = {}
        for request in requests:
            asked.setdefault(request[1] % self._num_workers, []).append(request)
        for number, each in asked.items():
            worker = self._workers.get(number)
            if worker is None:
                self._begin(number, each)
                continue
            for request in each:
                if not worker.has(request[1]):  # else a handler of a signal has interrupted this, and it is done again
                    worker.ask(request)
        self.next_step = max([self.next_step, *(each[-1][1] + 1 for each in asked.values())])

    def _begin(self, number: int, requests: list[StepRequest]) -> Witness:
        worker = self._make()
        worker.begin(requests)
        self._workers[number] = worker
        return worker

    def has(self, step: int) -> bool:
        """Whether a step was asked for, and its batch is wanted."""
        worker = self._workers.get(step % self._num_workers)
        return worker is not None and worker.has(step)

    def made(self, step: int, limit_s: float = MOST_S) -> Made:
        """Wait for a step that was asked for.

        Raises:
            NotMade: as `Witness.made`.
        """
        return self._workers[step % self._num_workers].made(step, limit_s)

    def made_anew(self, step: int, limit_s: float) -> Made:
        """What another process makes of a step, after all that the one before has made; it takes its place.

        Raises:
            NotMade: as `Witness.made`.
        """
        number = step % self._num_workers
        before = self._workers[number]
        requests = before.requests.all()
        self._end(before)
        self._begin(number, requests).drop_before(step)
        return self.made(step, limit_s)

    def begin_anew(self, step: int) -> None:
        """End all processes, and have others make all that these were asked for; batches from a step on are wanted.

        Raises:
            NotMade: as `Witness.begin`.
        """
        requests = {number: worker.requests.all() for number, worker in self._workers.items()}
        self.end()
        for number, asked in requests.items():
            self._begin(number, asked).drop_before(step)

    def drop(self, step: int) -> None:
        """Free the batch of a step, which the program has by now."""
        self._workers[step % self._num_workers].drop_before(step + 1)

    def end(self) -> None:
        """End the processes."""
        while self._workers:
            self._end(self._workers.popitem()[1])
