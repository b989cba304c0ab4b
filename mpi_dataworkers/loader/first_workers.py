"""torch's own worker processes for the first steps of a loader; see `canary`.

Each makes its steps and no others, in their order, as where there are no data workers: what samples keep, count or
leave in a library is then what it would be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from hetstream.mpi_dataworkers.loader.local_workers import StepRequest
from hetstream.mpi_dataworkers.loader.witness import MOST_S, Made, Witness


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
