"""`hetstream.ImageFolder`: map-style dataset of photographs, a class per subfolder, made into tensors in one pass.

Called by the user's program; iterated by a loader, a data worker or torch's DataLoader. It lists the files when it is
made, and keeps none open. The samples of a step are made in the memory of their batch, so that collating moves
nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch.utils.data import get_worker_info
from torch.utils.data._utils.collate import collate_tensor_fn, default_collate_fn_map

from hetstream.mpi_dataworkers.errors import SourceError
from hetstream.mpi_dataworkers.generators import current_cache, makes_sample
from hetstream.mpi_dataworkers.images.decoder import Rules, make_image, native, pillow_image
from hetstream.mpi_dataworkers.images.recipes import NCHW, NHWC, EvaluationRecipe, Output, TrainingRecipe
from hetstream.mpi_dataworkers.sources import transforms_what_it_reads

# torchvision's.
SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
# Above this Pillow, too, takes a file for an attack: twice its MAX_IMAGE_PIXELS.
MAX_PIXELS = 2 * (1024 * 1024 * 1024 // 4 // 3)


class _Place(NamedTuple):
    """Where a sample is to be made, in the memory of its batch, and which one."""

    images: torch.Tensor
    labels: torch.Tensor
    row: int
    number: int


class Sample(tuple[torch.Tensor, int]):
    """An image and its label, which knows of which batch it is a row."""

    place: _Place

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (tuple(self),)  # alone, without the batch


def _collate(samples: Sequence[Sample], *, collate_fn_map: Any = None) -> list[torch.Tensor]:
    """What torch's `default_collate` makes of such samples; where they are a batch's, in its order, that batch."""
    batch, labels, *_ = samples[0].place
    if [sample.place.row for sample in samples] == [*range(len(labels))] and all(
        sample.place.images is batch for sample in samples
    ):
        return [batch, labels]
    images = [sample[0] for sample in samples]
    return [collate_tensor_fn(images, collate_fn_map=collate_fn_map), torch.tensor([sample[1] for sample in samples])]


# As torch's documentation of `default_collate` says for types of one's own.
default_collate_fn_map[Sample] = _collate


class ImageFolder:
    """Samples `(image, label)` of the image files below a folder, a class for each of its subfolders.

    Classes, files and their order are those of torchvision's `ImageFolder`, and so are the pixels: reading, decoding,
    cropping, resizing, mirroring and normalising are one pass in native code, which is compiled when the dataset is
    made. Where there is no C++ compiler Pillow does it, which a line in the log says. An image's EXIF orientation is
    not applied, as torchvision does not.

    Args:
        root: The folder. Each subfolder is a class and is searched to any depth.
        recipe: What is made of an image: a `hetstream.TrainingRecipe` or `hetstream.EvaluationRecipe`.
        mean, std: Of each channel, from 0 to 1: images become `(image - mean) / std`.
        dtype: `torch.uint8`, or `torch.float32` from 0 to 1; without it float32 if `mean` or `std` is given.
        layout: Of a batch, "NHWC" or "NCHW"; without it NHWC for uint8, NCHW for float32.
        exact: Whether the pixels are Pillow's, bit for bit. With False a crop that is at least twice as large as the
            result is decoded at a half, a quarter or an eighth of its size, which is faster for large photographs.
        max_pixels: Files with more pixels are refused.

    Attributes:
        root: The folder, absolute.
        classes: Class names in sorted order.
        class_to_idx: The label of each.
        targets: The label of each sample.

    Raises:
        ImportError: Pillow is not installed.
        ConfigError: An argument breaks its rule.
        SourceError: The folder is missing, has no subfolder, or one without an image.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        recipe: TrainingRecipe | EvaluationRecipe,
        *,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        dtype: torch.dtype | None = None,
        layout: Literal["NHWC", "NCHW"] | None = None,
        exact: bool = True,
        max_pixels: int = MAX_PIXELS,
    ) -> None:
        pillow_image()
        is_normalised = mean is not None or std is not None
        dtype = dtype or (torch.float32 if is_normalised else torch.uint8)
        layout = layout or (NHWC if dtype == torch.uint8 else NCHW)
        output = Output(recipe.size, dtype, layout, tuple(mean or (0.0,) * 3), tuple(std or (1.0,) * 3))
        self.recipe = recipe
        self._rules = Rules(output, exact, max_pixels)
        self._front = recipe, self._rules  # by which a cache keeps what is made without random numbers
        # Absolute, because a data worker may run in another directory.
        self.root = Path(root).absolute()
        try:
            with os.scandir(self.root) as entries:
                self.classes = sorted(entry.name for entry in entries if entry.is_dir())
        except OSError as error:
            text = f"cannot be listed: {error.strerror}; data workers need the same path as the trainer"
            raise SourceError.of(self.root, text) from error
        if not self.classes:
            raise SourceError.of(self.root, "no subfolder. Move the images of each class into one of its own")
        self.class_to_idx = {name: label for label, name in enumerate(self.classes)}
        of_class = [[*self._images(name)] for name in self.classes]
        if empty := [name for name, found in zip(self.classes, of_class, strict=True) if not found]:
            text = f"subfolder without an image: {', '.join(empty)}. Remove it or fill it; read: {', '.join(SUFFIXES)}"
            raise SourceError.of(self.root, text)
        self._files = tuple(file for found in of_class for file in found)
        self.targets = [label for label, found in enumerate(of_class) for _ in found]
        native()  # before worker processes are forked, which then need not compile it

    def _images(self, name: str) -> Iterator[str]:
        """The images of a class, relative to `root`."""
        begin = len(str(self.root / "_")) - 1
        for folder, _, files in sorted(os.walk(self.root / name, followlinks=True)):
            for file in sorted(files):
                if file.lower().endswith(SUFFIXES):
                    yield f"{folder[begin:]}/{file}"

    def __len__(self) -> int:
        return len(self._files)

    @property
    def samples(self) -> list[tuple[str, int]]:
        """Path and label of each sample, as torchvision has them."""
        return [(f"{self.root}/{file}", label) for file, label in zip(self._files, self.targets, strict=True)]

    @property
    def thread_safe(self) -> bool:
        """Whether several threads may make samples: where the recipe draws nothing from torch's generator."""
        return not self.recipe.draws

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        """Make sample `index`.

        Raises:
            IndexError: The index is outside `-len(self) .. len(self) - 1`.
            SourceError: The file cannot be read or decoded; the message names it.
        """
        return self.transform(self.read_samples([index])[0])

    @transforms_what_it_reads
    def __getitems__(self, indices: Sequence[int]) -> list[tuple[torch.Tensor, int]]:
        """Make the samples of a batch, in its memory: torch's `default_collate` then copies nothing.

        Raises:
            IndexError, SourceError: As `__getitem__`.
        """
        return [self.transform(place) for place in self.read_samples(indices)]

    def read_samples(self, indices: Sequence[int]) -> list[Any]:
        """Say for each sample of a batch where `transform` is to make it."""
        for index in indices:
            if not -len(self) <= index < len(self):
                raise IndexError(f"index {index} is outside 0..{len(self) - 1}: {self.root} holds {len(self)} images")
        batch = self._memory(len(indices)), torch.tensor([self.targets[index] for index in indices])
        return [_Place(*batch, row, index) for row, index in enumerate(indices)]

    def transform(self, place: Any) -> tuple[torch.Tensor, int]:
        """Read and make one sample; a loader seeds the generators before each."""
        path = f"{self.root}/{self._files[place.number]}"
        image = place.images[place.row]
        cache = None if self.recipe.draws else current_cache()
        if cache is None:
            self._make(path, image)
        else:
            image.copy_(cache.value(self._front, "ImageFolder", self._made, (path, tuple(image.shape)), {}))
        sample = Sample((image, self.targets[place.number]))
        sample.place = place
        return sample

    def _made(self, path: str, shape: Sequence[int]) -> torch.Tensor:
        """An image in memory of its own."""
        image = torch.empty(shape, dtype=self._rules.output.dtype)
        self._make(path, image)
        return image

    def _make(self, path: str, image: torch.Tensor) -> None:
        try:
            with open(path, "rb", buffering=0) as file:
                data = file.read()
        except OSError as error:
            text = f"cannot be read: {error.strerror}. Replace it, or make the dataset anew without it"
            raise SourceError.of(path, text) from error
        make_image(path, data, self.recipe.window, self._rules, image)

    def _memory(self, count: int) -> torch.Tensor:
        """Memory for a batch: in torch's worker process shared, where torch would put it for its way to the trainer."""
        output = self._rules.output
        shape = (count, *output.shape)
        if get_worker_info() is None or makes_sample():
            # NumPy asks the kernel for large pages: with torch's memory a batch of floats costs three times as much.
            return torch.from_numpy(np.empty(shape, np.uint8 if output.dtype == torch.uint8 else np.float32))
        storage: Any = torch.UntypedStorage
        size = torch.Size(shape).numel() * output.dtype.itemsize
        return torch.empty(0, dtype=output.dtype).set_(storage._new_shared(size)).view(shape)

    def __repr__(self) -> str:
        return f"ImageFolder({str(self.root)!r}, {self.recipe}, classes={len(self.classes)}, length={len(self)})"
