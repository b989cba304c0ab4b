"""One client for the cache benchmark: the CPU time of an epoch over photographs, with or without a cache."""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import hetstream

_MEAN, _STD = (torch.tensor(values).view(3, 1, 1) for values in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
_JOBS = 8


@hetstream.deterministic
def decoded(path: str) -> np.ndarray[Any, Any]:
    """A photograph whose shorter edge has 256 pixels."""
    image = Image.open(path).convert("RGB")
    scale = 256 / min(image.size)
    size = [max(256, round(edge * scale)) for edge in image.size]
    return np.array(image.resize((size[0], size[1]), Image.Resampling.BILINEAR))


class Crops(torch.utils.data.Dataset[Any]):
    """Random crops, and mirror images of half of them."""

    def __init__(self, root: str, edge: int, as_float: bool, held: bool) -> None:
        self.paths = sorted(str(path) for path in Path(root).iterdir())
        self.edge, self.as_float = edge, as_float
        self.held = {path: decoded(path) for path in self.paths} if held else {}

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> torch.Tensor:
        path = self.paths[index]
        image = self.held[path] if self.held else decoded(path)
        top, left = (random.randint(0, size - self.edge) for size in image.shape[:2])
        crop = torch.from_numpy(image)[top : top + self.edge, left : left + self.edge]
        if random.random() < 0.5:
            crop = crop.flip(1)
        if not self.as_float:
            return crop
        return (crop.permute(2, 0, 1).float() / 255 - _MEAN) / _STD


def dataset(case: str, root: str, edge: int, held: bool = False) -> Any:
    """What a case reads; `held`: what a cache would keep is in the program's memory."""
    if case != "ImageFolder":
        return Crops(root, edge, case == "float crops", held)
    from torchvision import datasets, transforms

    steps = [
        transforms.Resize(256),
        transforms.RandomCrop(edge),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
        transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
    ]
    made = datasets.ImageFolder(Path(root).parent, transforms.Compose(steps))  # whose one class is the folder
    if held:
        images = {path: steps[0](made.loader(path)) for path, _ in made.samples}
        made.loader = images.__getitem__
    return made


def epoch_s(loader: Any) -> float:
    """The CPU time of one epoch."""
    began = time.process_time()
    for _ in loader:
        pass
    return time.process_time() - began


def job_s(case: str, root: str, place: str, number: int, seed: int = 0, epochs: int = 1) -> float:
    """The CPU time of the last epoch of a job of one process; without a cache `place` is torch, off or held."""
    data = dataset(case, root, 224 - 8 * number, place == "held")
    if place == "torch":
        loader: Any = torch.utils.data.DataLoader(data, 32, shuffle=True)
    else:
        loader = hetstream.DataLoader(data, 32, shuffle=True, seed=seed, cache="off" if place == "held" else place)
    times = [epoch_s(loader) for _ in range(epochs)]
    return times[-1]


def jobs_s(case: str, root: str, place: str, seeds: Sequence[int]) -> float:
    """The CPU time of one epoch of several jobs at once, each a program of its own with this seed."""
    command = [sys.executable, "-m", "benchmarks.clients.cache", "job"]
    jobs = [
        subprocess.Popen([*command, json.dumps([case, root, place, number, seed])], stdout=subprocess.PIPE)
        for number, seed in enumerate(seeds)
    ]
    return sum(float(job.communicate()[0]) for job in jobs)


def measured_s(stage: str, case: str, root: str, place: str) -> float:
    """The CPU time of what a system is measured for, with an empty directory for its cache."""
    if stage in ("torch", "off"):
        return job_s(case, root, stage, 0, epochs=2)
    if stage == "second":
        return job_s(case, root, place, 0, epochs=2)
    if stage == "bound":
        return job_s(case, root, "off", 0, epochs=2) + (_JOBS - 1) * job_s(case, root, "held", 0, epochs=2)
    if stage == "apart":
        return jobs_s(case, root, "off", range(_JOBS))
    if stage == "restart":
        jobs_s(case, root, place, [0])
    return jobs_s(case, root, place, {"jobs": range(_JOBS), "ordered": [0] * _JOBS}.get(stage, [0]))


def main() -> None:
    """Measure every case of the request with the system that comes first."""
    torch.set_num_threads(1)
    if sys.argv[1] == "job":
        print(job_s(*json.loads(sys.argv[-1])))
        return
    request = json.loads(sys.argv[-1])
    # Nothing is removed in between: ext4 looks at each file that was removed just now before it makes one.
    directory = Path(tempfile.mkdtemp(dir=request["folder"]))
    root = directory / "folder" / "photographs"
    root.mkdir(parents=True)
    photographs = itertools.cycle(sorted(Path(request["root"]).iterdir()))
    for number, photograph in zip(range(request["files"]), photographs, strict=False):
        (root / f"{number:04}{photograph.suffix}").symlink_to(photograph)
        photograph.read_bytes()  # it is in memory then
    for case, options in request["cases"].items():
        os.sched_setaffinity(0, options["cores"])
        cpu_s = measured_s(sys.argv[1], case, str(root), tempfile.mkdtemp(dir=directory))
        print(json.dumps({"case": case, "cpu_ms_per_image": 1000 * cpu_s / request["files"]}), flush=True)


if __name__ == "__main__":
    main()
