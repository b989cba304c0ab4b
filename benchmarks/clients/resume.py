"""A trainer that is restarted at 90 % of an epoch: hetstream, or torchdata's StatefulDataLoader.

Called with `hetstream`, `in-process` or, in the peers' environment, `torchdata`. Every loader gives its states itself:
what is before the 90 % is read, once, by hetstream loaded from an earlier state and by its peer as it has to.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Dataset

DONE = 0.9


class Numbers(Dataset[Any]):
    """Samples that cost nothing."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> int:
        return index

    def __getitems__(self, indices: list[int]) -> list[int]:
        return indices


@contextlib.contextmanager
def loaders(system: str, request: dict[str, Any], shuffle: bool) -> Iterator[tuple[Any, Any]]:
    """Yield a loader and its state at 90 % of the epoch."""
    data, size = Numbers(request["samples"]), request["batch_size"]
    step = int(DONE * request["samples"]) // size
    if system == "torchdata":
        from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-not-found,unused-ignore]

        # The state is written at every thousandth batch only: it costs more than the batches.
        options: dict[str, Any] = {"batch_size": size, "shuffle": shuffle, "collate_fn": torch.tensor}
        options |= {"num_workers": 1, "snapshot_every_n_steps": 1000}
        first = StatefulDataLoader(data, **options)
        passing = iter(first)
        for _ in range(step):
            next(passing)
        yield StatefulDataLoader(data, **options), first.state_dict()
        return
    from benchmarks.clients.service import running, wait_for_data_workers
    from hetstream import DataLoader

    def trainer(service: str | None) -> Any:
        return DataLoader(data, size, shuffle=shuffle, collate_fn=torch.tensor, service=service)

    if system == "in-process":
        first = trainer(None)
        first.load_state_dict(first.state_dict() | {"step": step - 1})
        next(iter(first))
        yield trainer(None), first.state_dict()
        return
    with contextlib.ExitStack() as stack:
        state: Any = None
        for processes in (1, 2):
            service = stack.enter_context(running(processes, os.sched_getaffinity(0)))
            loader = stack.enter_context(trainer(service))
            wait_for_data_workers(loader, processes)
            if state is None:
                loader.load_state_dict(loader.state_dict() | {"step": step - 1})
                next(iter(loader))
                state = loader.state_dict()
        yield loader, state


def size_of(state: Any) -> int:
    """Bytes of a state as it would be saved."""
    try:
        return len(json.dumps(state))
    except TypeError:
        return len(pickle.dumps(state))


def main() -> None:
    """Measure every case of the request."""
    system, request = sys.argv[1], json.loads(sys.argv[-1])
    torch.set_num_threads(1)
    for case, options in request["cases"].items():
        with loaders(system, request, options["shuffle"]) as (loader, state):
            started = time.perf_counter()
            loader.load_state_dict(state)
            loaded = time.perf_counter()
            passing = iter(loader)
            batch = next(passing)
            seconds = time.perf_counter() - started
            if len(batch) != request["batch_size"]:
                raise RuntimeError(f"a batch of {len(batch)} samples")
            sample = {
                "case": case,
                "load_ms": (loaded - started) * 1e3,
                "first_batch_ms": seconds * 1e3,
                "state_bytes": float(size_of(state)),
            }
            print(json.dumps(sample), flush=True)
            del passing


if __name__ == "__main__":
    main()
