"""Batches of one or many tensors: `tensors tcp|shm|torch|in-process NUMBER_OF_TENSORS`, the first two by hetstream.

`tensors least NUMBER` measures what no loader can leave out, of one tensor and of so many in turns, in one process and
by the cheapest calls that torch has: the program makes its tensors, their bytes are copied once, and tensors are made
over the copy.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import Dataset

from benchmarks.clients.prebuilt import BATCH_SIZE, LENGTH, hand_over
from benchmarks.clients.service import running, streaming
from benchmarks.clients.window import last_is, measure_cpu, read_request
from hetstream import DataLoader

COPIED_BYTES = 64 << 20
ROUNDS = 5


class Features(Dataset[Any]):
    """A map-style dataset whose `__getitems__` returns a finished dict of tensors."""

    def __init__(self, num_bytes: int, count: int) -> None:
        self.shape = (num_bytes // 4 // count,)
        self.count = count

    def __len__(self) -> int:
        return LENGTH

    def __getitems__(self, indices: list[int]) -> dict[str, torch.Tensor]:
        # New tensors over private memory each time, as a transform makes them; torch would share the old ones.
        if not hasattr(self, "made"):
            self.made = [torch.full(self.shape, float(number)).numpy() for number in range(self.count)]
        return {f"feature{number}": torch.from_numpy(array) for number, array in enumerate(self.made)}


def spent_ms(work: Callable[[], object], times: int = 100) -> float:
    """CPU-ms of some work, and of dropping what it returns."""
    began = time.thread_time()
    for _ in range(times):
        work()
    return (time.thread_time() - began) / times * 1e3


def making_ms(dataset: Features) -> float:
    """CPU-ms that the program itself spends on a batch: its objects are made and dropped; smallest of some rounds."""
    return min(spent_ms(lambda: dataset.__getitems__([0])) for _ in range(ROUNDS))


class Least:
    """The least work for a batch of so many tensors.

    Attributes:
        objects_ms: to make the program's tensors and those over the copy, round by round.
        copy_ms: to copy their bytes, round by round.
    """

    def __init__(self, num_bytes: int, count: int) -> None:
        self._dataset = Features(num_bytes, count)
        self._tensors = list(self._dataset.__getitems__([0]).values())
        length = self._tensors[0].numel()
        # As much memory as a loader's buffer in use, so that the copy meets memory as it does there.
        goals = torch.zeros(COPIED_BYTES // (4 * length * count), length * count)
        self._goals = itertools.cycle(goals.unbind())
        self._times = len(goals)
        flat, sizes = goals[0], [length] * count
        self._copies: list[Callable[[], object]] = [
            lambda: torch.cat(self._tensors, out=next(self._goals)),
            lambda: torch._foreach_copy_(list(torch.unsafe_split_with_sizes(next(self._goals), sizes)), self._tensors),
        ]
        self._views: list[Callable[[], object]] = [
            lambda: torch.unsafe_split_with_sizes(flat, sizes),
            lambda: torch.split_with_sizes(flat, sizes),
            lambda: flat.view(count, length).unbind(),
        ]
        self.objects_ms: list[float] = []
        self.copy_ms: list[float] = []

    def measure(self) -> None:
        """One round."""
        self.objects_ms.append(making_ms(self._dataset) + min(map(spent_ms, self._views)))
        self.copy_ms.append(min(spent_ms(copy, 4 * self._times) for copy in self._copies))


def measure_least(case: str, num_bytes: int, count: int) -> None:
    """Print the samples of one tensor and of many."""
    both = {f"{number} tensor{'s' * (number > 1)}": Least(num_bytes, number) for number in (1, count)}
    for _ in range(ROUNDS):
        for one in both.values():
            one.measure()
    for name, one in both.items():
        objects_ms = min(one.objects_ms)
        sample = {"cpu_ms_per_batch": objects_ms + min(one.copy_ms), "objects_cpu_ms_per_batch": objects_ms}
        print(json.dumps({"case": f"{case}|, {name}", **sample}), flush=True)


def main() -> None:
    """Measure every case of the request."""
    request = read_request()
    count = int(sys.argv[2])
    torch.set_num_threads(1)
    by = sys.argv[1]
    os.environ["HETSTREAM_TRANSPORT"] = by
    for number, (case, options) in enumerate(request.cases.items()):
        arguments: dict[str, Any] = {
            "dataset": Features(options["num_bytes"], count),
            "batch_size": BATCH_SIZE,
            "collate_fn": hand_over,
        }
        if by == "least":
            measure_least(case, options["num_bytes"], count)
            continue
        program_ms = making_ms(Features(options["num_bytes"], count))
        if by == "in-process":
            made = map(arguments["dataset"].__getitems__, itertools.repeat([0]))
            measure_cpu(case, made, last_is(count), request, program_ms)
            continue
        if by == "torch":
            os.sched_setaffinity(0, {request.producer_core})
            batches = iter(torch.utils.data.DataLoader(**arguments, num_workers=1))
            os.sched_setaffinity(0, {request.client_core})
            measure_cpu(case, batches, last_is(count), request, program_ms)
            del batches
            continue
        with running(processes=1, cores={request.producer_core}) as service:
            loader = DataLoader(**arguments, service=service, job_name=f"tensors-{number}")
            with streaming(loader, processes=1) as streamed:
                measure_cpu(case, streamed, last_is(count), request, program_ms)


if __name__ == "__main__":
    main()
