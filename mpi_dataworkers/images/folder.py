"""`hetstream.ImageFolder` and `ImageTar`: map-style datasets of photographs, made into tensors in one pass.

Called by the user's program; iterated by a loader, a data worker or torch's DataLoader. It lists the files when it is
made, and keeps none open. The samples of a step are made in the memory of their batch, so that collating moves
nothing.
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator, Sequence
from io import FileIO
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
        self._set_rules(recipe, mean, std, dtype, layout, exact, max_pixels)
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

    def _set_rules(
        self,
        recipe: TrainingRecipe | EvaluationRecipe,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        dtype: torch.dtype | None = None,
        layout: Literal["NHWC", "NCHW"] | None = None,
        exact: bool = True,
        max_pixels: int = MAX_PIXELS,
    ) -> None:
        pillow_image()
        native()  # before worker processes are forked, which then need not compile it
        is_normalised = mean is not None or std is not None
        dtype = dtype or (torch.float32 if is_normalised else torch.uint8)
        layout = layout or (NHWC if dtype == torch.uint8 else NCHW)
        output = Output(recipe.size, dtype, layout, tuple(mean or (0.0,) * 3), tuple(std or (1.0,) * 3))
        self.recipe = recipe
        self._rules = Rules(output, exact, max_pixels)
        self._front = recipe, self._rules  # by which a cache keeps what is made without random numbers

    def _images(self, name: str) -> Iterator[str]:
        """The images of a class, relative to `root`."""
        begin = len(str(self.root / "_")) - 1
        for folder, _, files in sorted(os.walk(self.root / name, followlinks=True)):
            for file in sorted(files):
                if file.lower().endswith(SUFFIXES):
                    yield f"{folder[begin:]}/{file}"

    def __len__(self) -> int:
        return len(self.targets)

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
                raise IndexError(f"index {index} is outside 0..{len(self) - 1}: {self!r}")
        batch = self._memory(len(indices)), torch.tensor([self.targets[index] for index in indices])
        return [_Place(*batch, row, index) for row, index in enumerate(indices)]

    def transform(self, place: Any) -> tuple[torch.Tensor, int]:
        """Read and make one sample; a loader seeds the generators before each."""
        where, image = self._place(place.number), place.images[place.row]
        cache = None if self.recipe.draws else current_cache()
        if cache is None:
            self._make(*where, image)
        else:
            image.copy_(cache.value(self._front, "ImageFolder", self._made, (*where, tuple(image.shape)), {}))
        sample = Sample((image, self.targets[place.number]))
        sample.place = place
        return sample

    @property
    def why_no_front(self) -> str | None:
        """Why a cache keeps nothing of the samples; None where it keeps them."""
        if not self.recipe.draws:
            return None
        return f"a {type(self.recipe).__name__} cuts out, and decodes, another part of a photograph in each epoch"

    def _place(self, index: int) -> tuple[str, int, int, str]:
        """Where a sample is: its file, where in it, how many bytes (-1: to the end), and its name for errors."""
        path = f"{self.root}/{self._files[index]}"
        return path, 0, -1, path

    def _made(self, path: str, offset: int, size: int, name: str, shape: Sequence[int]) -> torch.Tensor:
        """An image in memory of its own."""
        image = torch.empty(shape, dtype=self._rules.output.dtype)
        self._make(path, offset, size, name, image)
        return image

    def _make(self, path: str, offset: int, size: int, name: str, image: torch.Tensor) -> None:
        try:
            with open(path, "rb", buffering=0) as file:
                if offset:
                    file.seek(offset)
                data = file.read(size)
        except OSError as error:
            text = f"cannot be read: {error.strerror}. Replace it, or make the dataset anew without it"
            raise SourceError.of(name, text) from error
        make_image(name, data, self.recipe.window, self._rules, image)

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


class ImageTar(ImageFolder):
    """Samples `(image, label)` of tar files as WebDataset's writer makes them; otherwise as `ImageFolder`.

    The members of a sample have one name up to the first dot, its key: `shard/000123.jpg` and `shard/000123.cls`. The
    files are gone through once, when the dataset is made; a sample is then read where it lies. They are not compressed.

    Args:
        files: The tar files. Samples are in their order, and in each in the order of the members.
        recipe: What is made of an image.
        label: Suffix of the members with labels, whole numbers as text; "" if there are none, and each label is 0.
        **options: `mean`, `std`, `dtype`, `layout`, `exact` and `max_pixels` of `ImageFolder`.

    Attributes:
        keys: The key of each sample.
        targets: The label of each sample.

    Raises:
        ImportError: Pillow is not installed.
        ConfigError: An argument breaks its rule.
        SourceError: A file is damaged, cut off, compressed or empty, or a sample lacks a member or has one twice.
    """

    def __init__(
        self,
        files: Sequence[str | os.PathLike[str]],
        recipe: TrainingRecipe | EvaluationRecipe,
        *,
        label: str = "cls",
        **options: Any,
    ) -> None:
        self._set_rules(recipe, **options)
        self._tars = [str(Path(file).absolute()) for file in files]
        self.keys: list[str] = []
        self.targets = []
        places = list[tuple[int, int, int]]()
        for number, path in enumerate(self._tars):
            samples = _samples_of(path)
            with open(path, "rb", buffering=0) as file:
                for key, members in samples.items():
                    images = [suffix for suffix in members if f".{suffix}" in SUFFIXES]
                    if len(images) != 1 or (label and label not in members):
                        text = (
                            f"sample {key!r} has {', '.join(members)}: it needs one image, and .{label} for its label"
                        )
                        raise SourceError.of(path, text)
                    self.targets.append(_label_of(file, key, members[label]) if label else 0)
                    self.keys.append(key)
                    places.append((number, members[images[0]].offset_data, members[images[0]].size))
        if not places:
            raise SourceError.of(self._tars[0] if files else "no file", "holds no sample. Give tar files with images")
        self._places = np.array(places)
        self.classes = [str(number) for number in sorted(set(self.targets))]

    def _place(self, index: int) -> tuple[str, int, int, str]:
        number, offset, size = self._places[index].tolist()
        return self._tars[number], offset, size, f"{self._tars[number]}, sample {self.keys[index]!r}"

    @property
    def samples(self) -> list[tuple[str, int]]:
        """Key and label of each sample."""
        return [*zip(self.keys, self.targets, strict=True)]

    def __repr__(self) -> str:
        return f"ImageTar({len(self._tars)} files, {self.recipe}, length={len(self)})"


def _samples_of(path: str) -> dict[str, dict[str, tarfile.TarInfo]]:
    """The members of each sample of a tar file, by key and suffix.

    Raises:
        SourceError: it cannot be read to its end, or has a member twice.
    """
    found = dict[str, dict[str, tarfile.TarInfo]]()
    try:
        with tarfile.open(path, "r:") as tar, open(path, "rb") as file:
            for member in tar:
                folder, slash, name = member.name.rpartition("/")
                name, _, suffix = name.partition(".")
                if member.isdir():
                    continue
                members = found.setdefault(f"{folder}{slash}{name}", {})
                if suffix.lower() in members or member.issparse() or not member.isreg():
                    text = f"member {member.name!r} is there twice, or a link or sparse. Write the file anew"
                    raise SourceError.of(path, text)
                members[suffix.lower()] = member
            # tarfile stops without a word at what is no header.
            file.seek(tar.offset)
            end = file.read(1 << 20)
            if len(end) < tarfile.BLOCKSIZE or any(end):
                text = f"damaged or cut off at byte {tar.offset:,}, behind {len(tar.getmembers()):,} members"
                raise SourceError.of(path, f"{text}: no end mark, or more behind it. Copy or write the file anew")
    except (OSError, tarfile.TarError) as error:
        text = f"cannot be read as a tar file: {error}. It must be whole and not compressed"
        raise SourceError.of(path, text) from error
    return found


def _label_of(file: FileIO, key: str, member: tarfile.TarInfo) -> int:
    file.seek(member.offset_data)
    text = file.read(min(member.size, 100))
    try:
        return int(text)
    except ValueError as error:
        raise SourceError.of(file.name, f"sample {key!r} has the label {text!r}: a whole number as text") from error
