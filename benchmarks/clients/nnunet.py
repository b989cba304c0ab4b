"""A training whose batches an augmenter of batchgenerators makes, as nnU-Net's does; the accelerator is a sleep.

    python -m benchmarks.clients.nnunet SYSTEM REQUEST

runs itself as the program of each case, alone or with `hetstream run`, and prints what that measured. Transforms are
nnU-Net's own on one core each, or emulated: a sleep of the time that a sample takes, so that a machine of two cores
can have the CPUs of many.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from benchmarks.clients.service import run_program

BATCH_SIZE = 2  # as nnU-Net plans it for 3d_fullres
_PATIENCE_STEPS = 1500  # of a run in which data workers never take over
# A training does something else from time to time, and data workers, which began later, come to where it is.
_VALIDATION_S = 4.0


class Patches:
    """An endless loader in the manner of nnU-Net's: two patches with one channel, and their labels.

    Args:
        edge: of a patch, in voxels.
    """

    def __init__(self, edge: int) -> None:
        self.edge = edge
        self.thread_id = 0
        self.base: Any = None

    def set_thread_id(self, thread_id: int) -> None:
        """As batchgenerators tells each process who it is."""
        self.thread_id = thread_id

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> dict[str, Any]:
        shape = (BATCH_SIZE, 1, self.edge, self.edge, self.edge)
        place = np.random.random(3)  # as its loader draws places, with NumPy's generator
        grid = np.arange(self.edge, dtype=np.float32)
        image = np.broadcast_to(np.sin(grid * place[0] + 1), shape) + grid[:, None, None] * place[1]
        return {"data": image.astype(np.float32), "target": (image > place[2]).astype(np.int16)}


class Sleep:
    """Stands for transforms: what a sample takes is slept.

    Args:
        sample_s: for each sample.
        scales: of the labels for deep supervision.
    """

    def __init__(self, sample_s: float, scales: int = 4) -> None:
        self.sample_s, self.scales = sample_s, scales

    def __call__(self, data: Any, target: Any) -> dict[str, Any]:
        """Make tensors of both."""
        begun = time.monotonic()
        label = torch.from_numpy(target)
        labels = [label[:, :, :: 2**scale, :: 2**scale, :: 2**scale].contiguous() for scale in range(self.scales)]
        time.sleep(max(0.0, self.sample_s * BATCH_SIZE - (time.monotonic() - begun)))
        return {"data": torch.from_numpy(data), "target": labels}


class Transforms:
    """nnU-Net's own transforms of training, sample by sample.

    Args:
        edge: of a patch, in voxels.
    """

    def __init__(self, edge: int) -> None:
        from batchgeneratorsv2.helpers.scalar_type import RandomScalar  # noqa: F401, says early that it is missing
        from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer

        angles = (-np.pi / 6, np.pi / 6)
        self._transform = nnUNetTrainer.get_training_transforms(
            (edge,) * 3, angles, [[1.0] * 3, [0.5] * 3, [0.25] * 3], (0, 1, 2), False, use_mask_for_norm=[False]
        )

    def __call__(self, data: Any, target: Any) -> dict[str, Any]:
        """Make tensors of both."""
        made = [
            self._transform(image=torch.from_numpy(image), segmentation=torch.from_numpy(label))
            for image, label in zip(data, target, strict=True)
        ]
        labels = [torch.stack(scale) for scale in zip(*(each["segmentation"] for each in made), strict=True)]
        return {"data": torch.stack([each["image"] for each in made]), "target": labels}


def train(asked: dict[str, Any]) -> None:
    """Draw batches and sleep; print the time of the last steps, those whose batches data workers made."""
    from batchgenerators.dataloading.nondet_multi_threaded_augmenter import NonDetMultiThreadedAugmenter

    torch.set_num_threads(1)
    loader = Patches(asked["edge"])
    transform = Sleep(asked["sample_s"]) if asked["sample_s"] else Transforms(asked["edge"])
    processes = asked["processes"]
    if not processes:  # what a batch costs
        seconds = []
        for _ in range(asked["steps"]):
            begun = time.process_time()
            transform(**next(loader))
            seconds.append(time.process_time() - begun)
        print(json.dumps({"batch_cpu_ms": 1e3 * sum(seconds) / len(seconds)}), flush=True)
        return
    cached = max(6, processes // 2)  # as nnU-Net asks
    augmenter = NonDetMultiThreadedAugmenter(loader, transform, processes, num_cached=cached)
    begun, waits, ended = time.monotonic(), [], [0.0]
    warmup: int | None = None if asked["data_workers"] else 2 * processes + cached
    while warmup is None or len(waits) < warmup + asked["steps"]:
        asked_at = time.monotonic()
        next(augmenter)
        waits.append(time.monotonic() - asked_at)
        time.sleep(asked["step_s"])
        ended.append(time.monotonic() - begun)
        # Data workers' batches are known to be the same: the processes that made them here are gone, and as many wait.
        if warmup is None and len(multiprocessing.active_children()) <= processes:
            warmup = len(waits) + 3 * processes
        elif warmup is None and len(waits) % (2 * processes) == 0:
            time.sleep(_VALIDATION_S)
        if warmup is None and len(waits) > _PATIENCE_STEPS:
            raise SystemExit("data workers never took over")
    taken = len(waits) - asked["steps"]
    mean_s = (ended[-1] - ended[taken]) / asked["steps"]
    measured = {
        "step_ms": 1e3 * mean_s,
        "wait_ms": 1e3 * sum(waits[taken:]) / asked["steps"],
        "steps_per_min": 60 / mean_s,
        "steps_before": taken,
    }
    print(json.dumps(measured), flush=True)
    augmenter._finish()


def run(asked: dict[str, Any]) -> dict[str, Any]:
    """Run the program of a case on its cores, and its data workers on theirs."""
    program = [sys.executable, "-m", "benchmarks.clients.nnunet", "program", json.dumps(asked)]
    count = asked["data_workers"]
    # nnU-Net's networks ask for torchvision; it lies apart in the environment of peers' tests.
    path = os.pathsep.join([f"{sys.prefix}/torchvision", os.environ.get("PYTHONPATH", "")])
    variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    cores = asked["worker_cores"] if count else ()
    found, loaders = run_program(program, asked["cores"], ("--data-workers", str(count)), cores, **variables)
    if count and sum(each["steps"] - each["local_steps"] for each in loaders) < asked["steps"]:
        raise SystemExit("data workers made fewer batches than were measured")
    return found


def main() -> None:
    """Run what the command line asks for."""
    if sys.argv[1] == "program":
        train(json.loads(sys.argv[2]))
        return
    request = json.loads(sys.argv[2])
    for case, options in request["cases"].items():
        asked = {**request, **options, **options.get(sys.argv[1], {})}
        print(json.dumps({"case": case, **run(asked)}), flush=True)


if __name__ == "__main__":
    main()
