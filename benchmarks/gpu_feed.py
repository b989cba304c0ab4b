"""`make bench-gpu_feed`: a ResNet-50 in bf16 on one GPU, fed with photographs by a DataLoader and by data workers.

How near does each come to a loop on batches that lie on the GPU, and for which part of the time is the GPU idle? The
photographs are made on the spot. Without a GPU the whole course runs once with small images on the CPU: nothing of that
is a figure.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.utils.data

from benchmarks import harness, machine
from benchmarks.clients.gpu_models import resnet50
from benchmarks.clients.images import Photographs
from benchmarks.harness import Row, System, row_of, say
from benchmarks.overhead import write_synthetic
from benchmarks.rap_cases import NO_GPU
from hetstream import DataLoader
from hetstream.mpi_dataworkers.gpu_features.capacity import Clock, CudaClock, HostClock

SECONDS = 75.0
# Of the time for all, what is left beside making the photographs, and beside processes that end.
_FED_PART = 0.8
# Of a system's time, what its processes need to start and to fill what they make ahead.
_WARM_PART = 0.4
_LEAST_STEPS = 3
_IN_FLIGHT = 3
_IDEAL, _OWN = "batches on the GPU", "data workers"


@dataclass(frozen=True)
class Size:
    """What is trained.

    Attributes:
        photographs: files, which are read again and again.
        side: of an image, in pixels.
        batch: images of a step.
        model: makes the network.
    """

    photographs: int
    side: int
    batch: int
    model: Callable[[], torch.nn.Module]


ON_GPU = Size(256, 224, 256, resnet50)
DRY = Size(
    4, 8, 2, lambda: torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(4 * 6 * 6, 8))
)


@dataclass(frozen=True)
class Fed:
    """What a system came to.

    Attributes:
        images_per_s: that were trained on.
        idle_share: of the time, in which nothing of a step was on the GPU.
    """

    images_per_s: float
    idle_share: float


class Trainer:
    """Trains the network, and takes the times of its steps on the device."""

    def __init__(self, size: Size, device: torch.device) -> None:
        torch.manual_seed(0)
        self.size, self.device = size, device
        layout: Any = torch.channels_last
        self._model = size.model().to(device, memory_format=layout)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.1, momentum=0.9)
        self._clock: Clock = CudaClock() if device.type == "cuda" else HostClock()

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> tuple[Any, Any]:
        """Train on a batch of (N, height, width, 3) bytes. Marks of its beginning and its end on the device."""
        images = images.to(self.device, non_blocking=True)
        labels = labels.to(self.device, non_blocking=True)
        began = self._clock.mark()
        pixels = images.permute(0, 3, 1, 2).float().div_(255)
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(self._model(pixels), labels)
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self._optimizer.step()
        return began, self._clock.mark()

    def fed(self, batches: Iterable[Any], seconds: float) -> Fed:
        """Train for so long; the last part of it counts."""
        began_s, marks = time.monotonic(), list[tuple[Any, Any]]()
        warm = 0
        for images, labels in batches:
            marks.append(self.step(images, labels))
            if len(marks) > _IN_FLIGHT:
                self._clock.seconds(marks[-1 - _IN_FLIGHT][0], marks[-1 - _IN_FLIGHT][1])  # waits for that one
            elapsed_s = time.monotonic() - began_s
            if elapsed_s < _WARM_PART * seconds or not warm:
                warm = len(marks)
            elif elapsed_s > seconds and len(marks) >= warm + _LEAST_STEPS:
                break
        counted = marks[warm:]
        whole_s = self._clock.seconds(counted[0][0], counted[-1][1])
        busy_s = sum(self._clock.seconds(began, ended) for began, ended in counted)
        return Fed(len(counted) * self.size.batch / whole_s, max(0.0, 1 - busy_s / whole_s))


def _on_device(folder: Path, trainer: Trainer) -> Iterator[Any]:
    """The same batch again and again, which lies on the device."""
    plain = torch.utils.data.DataLoader(_photographs(folder, trainer), trainer.size.batch, drop_last=True)
    yield itertools.repeat([part.to(trainer.device) for part in next(iter(plain))])


def _torch_loader(num_workers: int) -> Callable[[Path, Trainer], Iterator[Any]]:
    def made(folder: Path, trainer: Trainer) -> Iterator[Any]:
        loader = torch.utils.data.DataLoader(
            _photographs(folder, trainer),
            trainer.size.batch,
            shuffle=True,
            drop_last=True,
            num_workers=num_workers,
            pin_memory=trainer.device.type == "cuda",
        )
        batches = iter(loader)
        try:
            yield batches
        finally:
            del batches  # ends its processes

    return made


def _data_workers(folder: Path, trainer: Trainer) -> Iterator[Any]:
    num_workers = max(1, len(os.sched_getaffinity(0)) - 1)
    with DataLoader(
        _photographs(folder, trainer),
        trainer.size.batch,
        shuffle=True,
        drop_last=True,
        num_workers=num_workers,
        device=str(trainer.device),
    ) as loader:
        yield iter(loader)


class _Photographs(torch.utils.data.Dataset[Any]):
    """A few files as a long data set: a pass over them would be over before the processes have started."""

    def __init__(self, folder: Path, side: int, passes: int) -> None:
        self._folder = Photographs(folder, side)
        self._passes = passes

    def __len__(self) -> int:
        return len(self._folder) * self._passes

    def __getitem__(self, at: int) -> Any:
        return self._folder[at % len(self._folder)]


def _photographs(folder: Path, trainer: Trainer) -> _Photographs:
    return _Photographs(folder, trainer.size.side, 2000)


SYSTEMS: Mapping[str, Callable[[Path, Trainer], Iterator[Any]]] = {
    _IDEAL: _on_device,
    _OWN: _data_workers,
    "DataLoader, 8 processes": _torch_loader(8),
    "DataLoader, 1 process": _torch_loader(1),
}


def main() -> int:
    """Run the benchmark."""
    own = harness.parser("A GPU fed with photographs.", repeats=1)
    own.add_argument("--seconds", type=float, default=SECONDS, help="for all systems (default: %(default)s)")
    args = own.parse_args()
    names = [system.name for system in harness.chosen([System(name) for name in SYSTEMS], args.systems)]
    is_real = torch.cuda.is_available()
    size, device = (ON_GPU, torch.device("cuda")) if is_real else (DRY, torch.device("cpu"))
    context: dict[str, Any] = {"machine": machine.describe(), "versions": machine.versions("torch"), "notes": []}
    found, failures = measured(size, device, names, _FED_PART * args.seconds / len(names) if is_real else 0.0)
    if is_real:
        context["gpu"] = torch.cuda.get_device_name()
        context["notes"] = [
            f"Batches of {size.batch} synthetic JPEG files of 500 x 375, cut to {size.side} x {size.side}"
        ]
        return harness.finish("gpu_feed", args.out, report(found), failures, context)
    context |= {"notes": [NO_GPU], "dry_run": [*found]}
    rows = [Row("photographs", name, None, "images/s", note=NO_GPU) for name in names]
    return harness.finish("gpu_feed", args.out, rows, failures, context)


def measured(
    size: Size, device: torch.device, names: list[str], seconds: float
) -> tuple[dict[str, Fed], dict[str, str]]:
    """Feed the network by each system for so long. What they came to, and why others failed."""
    found, failures = dict[str, Fed](), dict[str, str]()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_synthetic(folder, size.photographs)
        trainer = Trainer(size, device)
        for name in names:
            try:
                with contextlib.contextmanager(SYSTEMS[name])(folder, trainer) as batches:
                    found[name] = trainer.fed(batches, seconds)
            except Exception as error:  # noqa: BLE001 - of one system: the others go on, and it is told at the end
                failures[name] = f"{type(error).__name__}: {str(error).strip()}".partition("\n")[0]
                continue
            say(f"  {name}: {found[name].images_per_s:,.0f} images/s, GPU idle {found[name].idle_share:.0%}")
    return found, failures


def report(found: Mapping[str, Fed]) -> list[Row]:
    """The rows."""
    rows = [row_of("photographs", name, [fed.images_per_s], "images/s") for name, fed in found.items()]
    rows += [row_of("GPU idle", name, [100 * fed.idle_share], "%") for name, fed in found.items()]
    ideal_per_s = found[_IDEAL].images_per_s if _IDEAL in found else math.nan
    for name, fed in found.items():
        if _IDEAL in found and name != _IDEAL:
            rows.append(row_of("photographs", f"{name} / {_IDEAL}", [fed.images_per_s / ideal_per_s], "x"))
        if _OWN in found and name not in (_IDEAL, _OWN):
            rows.append(row_of("photographs", f"{_OWN} / {name}", [found[_OWN].images_per_s / fed.images_per_s], "x"))
    return rows


if __name__ == "__main__":
    sys.exit(main())
