"""A training that goes on until it is asked to stop: DIRECTORY LEDGER [SHARED_MEMORY]. It ends with code 75.

It runs as one process or under a launcher that sets RANK and WORLD_SIZE. Its ranks meet in every step, so one that
stopped at another step than the others would hang. LEDGER.RANK gets a line for each thing that happens: `start PID`,
`from STEP`, `saved STEP`, `stopping STEP REASON`. The first step is saved, and no other one before it is asked to stop.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from hetstream import CheckpointOptions, Every, FlashCheckpointer

LIMIT_S = 300.0
STEP_S = 0.002


def main() -> int:
    directory, ledger_path = sys.argv[1:3]
    memory = {"shared_memory": Path(sys.argv[3])} if len(sys.argv) > 3 else {}
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1:
        dist.init_process_group("gloo")
    state = {"weights": torch.zeros(1000)}
    step, end_s = 0, time.monotonic() + LIMIT_S
    with (
        open(f"{ledger_path}.{rank}", "a", buffering=1) as ledger,
        FlashCheckpointer(
            directory, shared=("weights",), interval=Every(seconds=LIMIT_S), options=CheckpointOptions(**memory)
        ) as checkpointer,
    ):
        print("start", os.getpid(), file=ledger)
        step = checkpointer.restore(state) or 0
        print("from", step, file=ledger)
        is_over = False
        while not is_over and time.monotonic() < end_s:
            gradient = torch.full((1000,), 1 / world_size)
            if world_size > 1:
                dist.all_reduce(gradient)
            state["weights"] += gradient
            step += 1
            time.sleep(STEP_S)
            is_due = checkpointer.should_save(step)
            is_over = checkpointer.stopping
            if is_due or is_over:
                assert checkpointer.save(step, state)
                print("saved", step, file=ledger)
        print("stopping", step, checkpointer.stop_reason, file=ledger)
    if world_size > 1:
        dist.destroy_process_group()
    return 75


if __name__ == "__main__":
    sys.exit(main())
