"""The threads of a data worker process that make the samples of one batch together, for its life.

Used by `worker.DataWorker`. The thread that asks takes part, so T threads are it and T - 1 more.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

# So many places are in `watch.WorkPage`.
MAX_THREADS = 128


class ThreadTeam:
    """Threads that divide work among them.

    Args:
        num_threads: how many, with the one that asks; 2 to `MAX_THREADS`.
        on_start: called in each new thread.
    """

    def __init__(self, num_threads: int, on_start: Callable[[], None]) -> None:
        self._others = range(1, num_threads)
        self._pool = ThreadPoolExecutor(num_threads - 1, "hetstream-sample", on_start)

    def map(self, make: Callable[[int, int], Any], count: int, idle: Callable[[int], None]) -> list[Any]:
        """Call `make(place, thread)` for each place below `count`, in ascending order, each by the thread that is free.

        Args:
            make: what to call.
            count: how many places.
            rest: called by each thread (0 is the one that asks) when there is nothing more for it.

        Returns:
            The results by place.

        Raises:
            BaseException: what the lowest place raised. Those above it that had begun are finished first.
        """
        results: list[Any] = [None] * count
        errors: dict[int, BaseException] = {}
        places = itertools.count()  # whose `next` is one operation for other threads

        def work(thread: int) -> None:
            try:
                while not errors and (place := next(places)) < count:
                    try:
                        results[place] = make(place, thread)
                    except BaseException as error:  # noqa: BLE001, a thread's boundary: the one that asks raises it
                        errors[place] = error
            finally:
                idle(thread)

        others = [self._pool.submit(work, thread) for thread in self._others[: count - 1]]
        work(0)
        for other in others:
            other.result()
        if errors:
            raise errors[min(errors)]
        return results

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()
