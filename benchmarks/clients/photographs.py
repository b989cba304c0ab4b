"""One client for the images benchmark: photographs from files to batches of a recipe, by one of the systems.

The trainer does no training: it reads a byte of each page of a batch and asks for the next. All of a system runs on the
cores of the request. Runs in the peers' environment, which has torchvision, SPDL, DALI, LitData and TensorSocket.
"""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision.datasets import ImageFolder as TorchImageFolder
from torchvision.io import ImageReadMode, decode_jpeg, read_file
from torchvision.transforms import v2

import hetstream
from benchmarks.clients.service import running, streaming
from benchmarks.clients.window import Meter, descendants, touch

BATCH_SIZE, SIZE, RESIZE = 64, 224, 256
SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# The first batches, which are compared with Pillow's pixels.
COMPARED = 4


@dataclass(frozen=True)
class Case:
    """What is made of the photographs below `root`, by `workers` processes or threads on `cores`."""

    root: str
    training: bool
    floats: bool
    workers: int
    cores: list[int]

    @property
    def files(self) -> list[str]:
        """In the order of every system in evaluation."""
        return [path for path, _ in TorchImageFolder(self.root).samples]

    def batch(self, images: torch.Tensor) -> torch.Tensor:
        """A batch of bytes, NHWC, in the form that is asked for."""
        if not self.floats:
            return images
        scaled = images.permute(0, 3, 1, 2).to(torch.float32, memory_format=torch.contiguous_format)
        mean, std = (torch.tensor(numbers).view(3, 1, 1) for numbers in (MEAN, STD))
        return scaled.mul_(1 / 255).sub_(mean).div_(std)


Batches = Iterator[Any]
"""Of (images, ...) or of images; what `images_of` understands."""


def images_of(batch: Any) -> torch.Tensor:
    return batch[0] if isinstance(batch, tuple | list) else batch


def recipe(case: Case, first: Callable[..., Any] | None = None) -> v2.Compose:
    """torchvision's transforms."""
    steps: list[Any] = [] if first is None else [first]
    if case.training:
        steps += [v2.RandomResizedCrop(SIZE, SCALE, RATIO), v2.RandomHorizontalFlip()]
    else:
        steps += [v2.Resize(RESIZE), v2.CenterCrop(SIZE)]
    steps.append(v2.ToImage())
    steps += [v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)] if case.floats else [to_nhwc]
    return v2.Compose(steps)


def to_nhwc(image: torch.Tensor) -> torch.Tensor:
    return image.permute(1, 2, 0).contiguous()


def read_and_decode(path: str) -> torch.Tensor:
    return decode_jpeg(read_file(path), mode=ImageReadMode.RGB)


def torchvision_dataset(case: Case, loader: Callable[[str], Any] | None = None) -> Dataset[Any]:
    given = {} if loader is None else {"loader": loader}
    return TorchImageFolder(case.root, recipe(case), **given)


def image_folder(case: Case, exact: bool) -> hetstream.ImageFolder:
    made = hetstream.TrainingRecipe(SIZE, SCALE, RATIO) if case.training else hetstream.EvaluationRecipe(SIZE, RESIZE)
    given: dict[str, Any] = {"mean": MEAN, "std": STD} if case.floats else {}
    return hetstream.ImageFolder(case.root, made, exact=exact, **given)


def recoded(case: Case) -> Case:
    """The photographs as FFCV stores them: JPEG files of quality 90, which are smaller."""
    root = f"{case.root}-quality-90"
    for path in case.files:
        place = Path(root) / Path(path).relative_to(case.root)
        if not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            Image.open(path).convert("RGB").save(place, quality=90)
    return replace(case, root=root)


@contextlib.contextmanager
def by_torch(case: Case, dataset: Dataset[Any]) -> Iterator[Batches]:
    yield iter(DataLoader(dataset, BATCH_SIZE, shuffle=case.training, num_workers=case.workers))


@contextlib.contextmanager
def by_hetstream(case: Case, dataset: Dataset[Any]) -> Iterator[Batches]:
    with contextlib.ExitStack() as stack:
        service = stack.enter_context(running(processes=case.workers, cores=set(case.cores)))
        loader = hetstream.DataLoader(
            dataset, BATCH_SIZE, shuffle=case.training, seed=0, service=service, job_name="photographs"
        )
        batches = stack.enter_context(streaming(loader, case.workers))
        stack.callback(setattr, by_hetstream, "waiting", None)
        by_hetstream.waiting = lambda: int(loader.stats()["batches_waiting"])  # type: ignore[attr-defined]
        yield batches


@contextlib.contextmanager
def by_spdl(case: Case) -> Iterator[Batches]:
    import spdl.io
    from spdl.pipeline import PipelineBuilder

    crop = v2.RandomResizedCrop(SIZE, SCALE, RATIO)

    def decode(path: str) -> Any:
        packets = spdl.io.demux_image(path)
        if case.training:
            # A tensor that has no memory of its own: what is asked of it is its shape.
            cut = crop.make_params([torch.empty(1, 1, 1).expand(3, packets.height, packets.width)])
            steps = f"crop={cut['width']}:{cut['height']}:{cut['left']}:{cut['top']}:exact=1,"
            steps += f"scale={SIZE}:{SIZE}:flags=bilinear" + (",hflip" if torch.rand(1) < 0.5 else "")
        else:
            width, height = packets.width, packets.height
            short = min(width, height)
            steps = f"scale={int(RESIZE * width / short)}:{int(RESIZE * height / short)}:flags=bilinear,"
            steps += f"crop={SIZE}:{SIZE}:exact=1"
        return spdl.io.decode_packets(packets, filter_desc=f"{steps},format=pix_fmts=rgb24")

    def batch(frames: Sequence[Any]) -> torch.Tensor:
        return case.batch(spdl.io.to_torch(spdl.io.convert_frames([*frames])))

    files = case.files
    if case.training:
        files = [files[index] for index in torch.randperm(len(files)).tolist()]
    pipeline = (
        PipelineBuilder()
        .add_source(files)
        .pipe(decode, concurrency=case.workers, output_order="input")
        .aggregate(BATCH_SIZE)
        .pipe(batch)
        .add_sink(2)
        .build(num_threads=case.workers)
    )
    with pipeline.auto_stop():
        yield iter(pipeline.get_iterator(timeout=60))


@contextlib.contextmanager
def by_dali(case: Case) -> Iterator[Batches]:
    from nvidia.dali import fn, pipeline_def, types

    @pipeline_def(batch_size=BATCH_SIZE, num_threads=case.workers, device_id=None)
    def graph() -> Any:
        files, labels = fn.readers.file(file_root=case.root, random_shuffle=case.training)
        if case.training:
            images = fn.decoders.image_random_crop(files, random_area=SCALE, random_aspect_ratio=RATIO)
            images = fn.resize(images, size=[SIZE, SIZE], interp_type=types.INTERP_LINEAR, antialias=True)
            mirror = fn.random.coin_flip(probability=0.5)
        else:
            images = fn.decoders.image(files)
            images = fn.resize(images, resize_shorter=RESIZE, interp_type=types.INTERP_LINEAR, antialias=True)
            mirror = 0
        scale = 255.0 if case.floats else 1.0
        images = fn.crop_mirror_normalize(
            images,
            crop=(SIZE, SIZE),
            mirror=mirror,
            mean=[number * scale for number in MEAN] if case.floats else [0.0],
            std=[number * scale for number in STD] if case.floats else [1.0],
            dtype=types.FLOAT if case.floats else types.UINT8,
            output_layout="CHW" if case.floats else "HWC",
        )
        return images, labels

    pipeline = graph()
    pipeline.build()

    def batches() -> Batches:
        while True:
            # Valid until the next call, as of DALI's own iterators for torch, which copy it.
            yield torch.from_dlpack(pipeline.run()[0].as_tensor()).clone()

    yield batches()


def as_stored(path: str) -> dict[str, Any]:
    return {"image": Image.open(path), "label": 0}


def changed(change: Callable[[Any], Any], sample: Any) -> Any:
    return change(sample["image"].expand(3, -1, -1))  # some are grey


@contextlib.contextmanager
def by_litdata(case: Case) -> Iterator[Batches]:
    import litdata

    folder = f"{case.root}-litdata"
    if not Path(folder).is_dir():
        litdata.optimize(as_stored, case.files, folder, chunk_bytes="64MB", num_workers=1)

    dataset = litdata.StreamingDataset(folder, shuffle=case.training, transform=partial(changed, recipe(case)))
    yield iter(litdata.StreamingDataLoader(dataset, batch_size=BATCH_SIZE, num_workers=case.workers))


class _Passes:
    """One pass over the photographs after the other, for a producer that asks for an iterator and a length."""

    def __init__(self, case: Case) -> None:
        self._case = case

    def __len__(self) -> int:
        return len(self._case.files) // BATCH_SIZE

    def __iter__(self) -> Batches:
        with by_torch(self._case, torchvision_dataset(self._case)) as batches:
            yield from batches


def _produce(case: Case, ports: tuple[int, ...]) -> None:
    import tensorsocket

    # Without a GPU it sends the bytes of as many batches with each of them; 2 are the fewest with which it goes on.
    producer = tensorsocket.TensorProducer(_Passes(case), *ports[:2], ports[2:], producer_batch_size=2)
    while True:
        for _ in producer:
            pass


def _consume(job: int, ports: tuple[int, ...], results: Any) -> None:
    import tensorsocket

    receiver = vars(tensorsocket)["TensorConsumer"](*ports[:2], ports[2:], batch_size=BATCH_SIZE)
    while True:
        for batch in receiver:
            touch(images_of(batch).numpy())
            results.put(job)


@contextlib.contextmanager
def by_tensorsocket(case: Case, jobs: int) -> Iterator[Batches]:
    """Batches as the jobs get them, all together, from when each has its first."""
    import socket

    with contextlib.ExitStack() as stack:
        free = [stack.enter_context(socket.socket()) for _ in range(4)]
        for each in free:
            each.bind(("127.0.0.1", 0))
        ports = tuple(each.getsockname()[1] for each in free)
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    processes = [context.Process(target=_consume, args=(job, ports, results)) for job in range(jobs)]
    processes.append(context.Process(target=_produce, args=(case, ports)))
    for process in processes:
        process.start()
    shape = (BATCH_SIZE, 3, SIZE, SIZE) if case.floats else (BATCH_SIZE, SIZE, SIZE, 3)
    counted = torch.empty(shape, dtype=torch.float32 if case.floats else torch.uint8)

    def batches() -> Batches:
        waiting = set(range(jobs))
        while waiting:
            waiting.discard(results.get())
        while True:
            results.get()
            yield counted

    try:
        yield batches()
    finally:
        for number in descendants():  # torch's worker processes, too
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        for process in processes:
            process.join()


@contextlib.contextmanager
def by_ffcv(case: Case) -> Iterator[Batches]:
    from ffcv.fields import IntField, RGBImageField
    from ffcv.fields.rgb_image import CenterCropRGBImageDecoder, RandomResizedCropRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.writer import DatasetWriter

    path = f"{case.root}.beton"
    if not Path(path).exists():
        fields = {"image": RGBImageField(write_mode="jpg"), "label": IntField()}
        DatasetWriter(path, fields, num_workers=2).from_indexed_dataset(TorchImageFolder(case.root))
    size = (SIZE, SIZE)
    decoder: Any = RandomResizedCropRGBImageDecoder(size, SCALE, RATIO)
    if not case.training:
        decoder = CenterCropRGBImageDecoder(size, SIZE / RESIZE)
    pipelines = {"image": [decoder], "label": None}
    if case.training:
        from ffcv.transforms import RandomHorizontalFlip

        pipelines["image"] = [decoder, RandomHorizontalFlip()]
    order = OrderOption.RANDOM if case.training else OrderOption.SEQUENTIAL
    loader = Loader(path, batch_size=BATCH_SIZE, num_workers=case.workers, order=order, pipelines=pipelines)
    yield (case.batch(torch.as_tensor(batch[0])) for batch in loader)


# Limits: in this process, on one core.


@contextlib.contextmanager
def decoded(case: Case, scaled: bool) -> Iterator[Batches]:
    """Decoded by libjpeg-turbo into memory that is there; with the DCT scale that the crop allows, or whole."""
    import simplejpeg

    data = [Path(path).read_bytes() for path in case.files[:: max(1, len(case.files) // 1000)]]
    room, counted = bytearray(3 * 10_000_000), torch.empty(BATCH_SIZE, 1, dtype=torch.uint8)
    crop = v2.RandomResizedCrop(SIZE, SCALE, RATIO)

    def least(width: int, height: int) -> dict[str, int]:
        if not case.training:
            short = min(width, height)
            return {"min_width": math.ceil(width * RESIZE / short), "min_height": math.ceil(height * RESIZE / short)}
        cut = crop.make_params([torch.empty(1, 1, 1).expand(3, height, width)])
        return {
            "min_width": math.ceil(SIZE * width / cut["width"]),
            "min_height": math.ceil(SIZE * height / cut["height"]),
        }

    def batches() -> Batches:
        while True:
            for first in range(0, len(data) - BATCH_SIZE, BATCH_SIZE):
                for each in data[first : first + BATCH_SIZE]:
                    height, width, *_ = simplejpeg.decode_jpeg_header(each)
                    given = least(width, height) if scaled else {}
                    simplejpeg.decode_jpeg(each, "RGB", min_factor=2, buffer=room, strict=False, **given)
                yield counted

    yield batches()


@contextlib.contextmanager
def copied(case: Case) -> Iterator[Batches]:
    """A batch, copied."""
    batch = case.batch(torch.zeros(BATCH_SIZE, SIZE, SIZE, 3, dtype=torch.uint8))
    made = torch.empty_like(batch)

    def batches() -> Batches:
        while True:
            yield made.copy_(batch)

    yield batches()


System = Callable[[Case], contextlib.AbstractContextManager[Batches]]
SYSTEMS: dict[str, System] = {
    "torch-pillow": lambda case: by_torch(case, torchvision_dataset(case)),
    "torch-decode": lambda case: by_torch(case, torchvision_dataset(case, read_and_decode)),
    "spdl": by_spdl,
    "dali": by_dali,
    "litdata": by_litdata,
    "ffcv": by_ffcv,
    "tensorsocket-2": partial(by_tensorsocket, jobs=2),
    "tensorsocket-4": partial(by_tensorsocket, jobs=4),
    "hetstream-user": lambda case: by_hetstream(case, torchvision_dataset(case)),
    "hetstream": lambda case: by_hetstream(case, image_folder(case, exact=True)),
    "hetstream-inexact": lambda case: by_hetstream(case, image_folder(case, exact=False)),
    "hetstream-recoded": lambda case: by_hetstream(case, image_folder(recoded(case), exact=True)),
    "torch-image-folder": lambda case: by_torch(case, image_folder(case, exact=True)),
    "limit-decode": partial(decoded, scaled=False),
    "limit-scaled": partial(decoded, scaled=True),
    "limit-memcpy": copied,
}
LIMITS = [name for name in SYSTEMS if name.startswith("limit-")]


def differences(case: Case, batches: Batches) -> dict[str, float]:
    """How far the first images of evaluation are from Pillow's, of 255: the largest and the mean."""
    reference = TorchImageFolder(case.root, recipe(case))
    largest, total, count = 0, 0, 0
    for number in range(COMPARED):
        for row, image in enumerate(images_of(next(batches))):
            apart = np.abs(image.numpy().astype(np.int16) - reference[number * BATCH_SIZE + row][0].numpy())
            largest, total, count = max(largest, int(apart.max())), total + int(apart.sum()), count + apart.size
    return {"largest_difference": largest, "mean_difference": total / count}


def measured(system: str, case: Case, batches: int, warmup: int) -> dict[str, float]:
    """Images a CPU second and a second in a window that begins and ends with the arrival of a batch."""
    found = {}
    if (
        not case.training
        and not case.floats
        and system not in (*LIMITS, "litdata", "hetstream-recoded")
        and "tensorsocket" not in system
    ):
        with SYSTEMS[system](case) as made:
            found = differences(case, made)
    with SYSTEMS[system](case) as made:
        for _ in range(warmup):
            touch(images_of(next(made)).numpy())
        waiting: Callable[[], int] = getattr(by_hetstream, "waiting", None) or (lambda: 0)
        meter, before = Meter(set(case.cores)), waiting()
        for _ in range(batches):
            touch(images_of(next(made)).numpy())
        spent = meter.read()
        count = (batches + waiting() - before) * BATCH_SIZE
    cpu_s = spent.own_cpu_s + spent.children_cpu_s
    found |= {"images_per_cpu_s": count / cpu_s, "other_load": spent.other_load}
    return found if system in LIMITS else found | {"images_per_s": count / spent.seconds}


def main() -> None:
    """Measure every case of the request with the system of the first argument."""
    system, request = sys.argv[1], json.loads(sys.argv[-1])
    torch.set_num_threads(1)
    for name, given in request["cases"].items():
        case = Case(root=request["root"], **given)
        os.sched_setaffinity(0, case.cores[:1] if system in LIMITS else case.cores)
        sample = measured(system, case, request["batches"], request["warmup"])
        print(json.dumps({"case": name, **sample}), flush=True)
        time.sleep(0.1)  # what a system leaves behind comes to its end
    os._exit(0) if "tensorsocket" in system else None


if __name__ == "__main__":
    main()
