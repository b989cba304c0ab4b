"""Map-style dataset over JPEG and PNG files, a class per subfolder or a label from the file's name.

Called by the user's program; iterated by a loader or a data worker. It lists once, when it is made, and decodes with
Pillow at each read; it keeps no file open and never imports torch.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import numpy.typing as npt

from hetstream.base.errors import ConfigError
from hetstream.base.installed import install_command
from hetstream.mpi_dataworkers.errors import SourceError
from hetstream.mpi_dataworkers.generators import makes_sample, sample_generator

SUFFIXES = (".jpg", ".jpeg", ".png")
# Modes whose pixels do not fit 8 bits: Pillow would clip them to white without a word.
_DEEP_MODES = ("I", "F")


class ImageFolder:
    """Samples `(image, label)` from a folder of image files; the order is that of the sorted paths, on every machine.

    Args:
        root: The folder. Without `label_of` each subfolder is a class and is searched to any depth; with it, all files
            below `root` are taken. Files with other suffixes than .jpg, .jpeg and .png (in any case) are passed over.
        label_of: Gives the class of a file from its name without folders, as in `lambda name: name.split("_")[0]`.
        transform: Called with each image. It may draw from `random`, `numpy.random` or torch: the loader seeds them for
            each sample. One that has `thread_safe = True` may be called by several threads at once and draws from
            `hetstream.sample_generator()`.

    A sample's image is uint8 of shape (height, width, 3), RGB, owned and writable, or what `transform` made of it; its
    label is an `int`, the position of its class in `classes`.

    Attributes:
        classes: Class names in sorted order.

    Raises:
        ImportError: Pillow is not installed.
        SourceError: The folder is missing, holds no image, mixes subfolders with loose images, or has an empty class.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        label_of: Callable[[str], str] | None = None,
        transform: Callable[[npt.NDArray[np.uint8]], Any] | None = None,
    ) -> None:
        pillow_image()
        # Absolute, because a data worker may run in another directory.
        self.root = Path(root).absolute()
        self.transform = transform
        if not self.root.is_dir():
            raise SourceError.of(self.root, "no such folder; data workers need the same path as the trainer")
        self._files = tuple(sorted(_images(self.root)))
        if not self._files:
            raise SourceError.of(self.root, f"no image below it; suffixes read: {', '.join(SUFFIXES)}")
        if label_of is None:
            names = [self._class_folder(file) for file in self._files]
            self._refuse_empty_classes(set(names))
        else:
            names = [label_of(file.rpartition("/")[2]) for file in self._files]
        self.classes: tuple[str, ...] = tuple(sorted(set(names)))
        numbers = {name: index for index, name in enumerate(self.classes)}
        self._labels = tuple(numbers[name] for name in names)

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        """Decode image `index`.

        Raises:
            IndexError: The index is outside `-len(self) .. len(self) - 1`.
            SourceError: The file cannot be read or decoded; the message names it.
        """
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} is outside 0..{len(self) - 1}: {self.root} holds {len(self)} images")
        image: Any = decode(self.path(index))
        return (image if self.transform is None else self.transform(image)), self._labels[index]

    @property
    def thread_safe(self) -> bool:
        """Whether several threads may read samples: if the transform, should there be one, says so."""
        return self.transform is None or getattr(self.transform, "thread_safe", False) is True

    def path(self, index: int) -> Path:
        """File of image `index`, to look at a sample that stands out."""
        return self.root / self._files[index]

    def __repr__(self) -> str:
        return f"ImageFolder({str(self.root)!r}, classes={len(self.classes)}, length={len(self)})"

    def _class_folder(self, file: str) -> str:
        folder, slash, _ = file.partition("/")
        if not slash:
            raise SourceError.of(
                self.root / file,
                "image outside any class folder. Move it into one, or give label_of= to take "
                "the class from the file name",
            )
        return folder

    def _refuse_empty_classes(self, found: set[str]) -> None:
        folders = {entry.name for entry in self.root.iterdir() if entry.is_dir() and not entry.name.startswith(".")}
        empty = sorted(folders - found)
        if empty:
            raise SourceError.of(self.root, f"class folder without an image: {', '.join(empty)}. Remove it or fill it")


def pillow_image() -> Any:
    """Pillow's `Image`, from where images are decoded: loaders and data workers of all other data do without it.

    Raises:
        ImportError: it is not installed; how to is said.
    """
    try:
        from PIL import Image
    except ImportError as exc:
        raise ImportError(f"images need Pillow, which is not installed: {install_command('images')}") from exc
    return Image


def decode(path: Path) -> npt.NDArray[np.uint8]:
    """Decode a JPEG or PNG file to uint8 (height, width, 3), RGB.

    Raises:
        SourceError: The file is missing, truncated, no image, or has more than 8 bits a channel.
    """
    pillow = pillow_image()
    try:
        with pillow.open(path) as image:
            if image.mode.startswith(_DEEP_MODES):
                raise SourceError.of(
                    path, f"mode {image.mode} has more than 8 bits a channel; convert the file to 8 bits"
                )
            # A copy: the array that Pillow shares is read-only, and torch warns about those.
            return np.array(image.convert("RGB"))
    except (OSError, SyntaxError, ValueError, EOFError, pillow.DecompressionBombError) as exc:
        raise SourceError.of(path, f"cannot be decoded: {exc}. Replace or remove the file") from exc


def _images(root: Path) -> Iterator[str]:
    """Paths of the images below `root`, relative, with `/`. Hidden folders and files are passed over."""
    for folder, subfolders, files in os.walk(root, followlinks=True):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        prefix = Path(folder).relative_to(root).as_posix()
        for name in files:
            if name.lower().endswith(SUFFIXES) and not name.startswith("."):
                yield name if prefix == "." else f"{prefix}/{name}"


# Image augmentation on uint8 arrays, with Pillow's resampling and the sample's generator.
#
# Given as `transform=` to a source. The loader seeds `sample_generator()` for each sample from (seed, epoch, index), so
# a sample is cut the same way whoever makes it. For what is not here any function on arrays will do.

_ATTEMPTS = 10


@dataclass(frozen=True)
class RandomResizedCrop:
    """Cut a random part out of an image, scale it to a square, mirror it at random: the usual ImageNet recipe.

    Takes and returns uint8 (height, width, 3); the result is `size` x `size` pixels. The trainer turns a batch into
    (N, 3, height, width) with `batch.permute(0, 3, 1, 2)`, which moves no byte. Thread-safe. Where no
    loader of hetstream calls it, the part follows the global generator of `random`.

    Args:
        size: Edge of the result in pixels.
        scale: Smallest and largest part of the image's area.
        ratio: Smallest and largest width to height of the part.
        flip: Probability of mirroring left to right.

    Raises:
        ConfigError: A value breaks its rule.
    """

    thread_safe: ClassVar[bool] = True

    size: int
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: float = 0.5

    def __post_init__(self) -> None:
        problems = []
        if self.size < 1:
            problems.append(f"size={self.size}: at least 1")
        if not 0 < self.scale[0] <= self.scale[1] <= 1:
            problems.append(f"scale={self.scale}: 0 < smallest <= largest <= 1")
        if not 0 < self.ratio[0] <= self.ratio[1]:
            problems.append(f"ratio={self.ratio}: 0 < smallest <= largest")
        if not 0 <= self.flip <= 1:
            problems.append(f"flip={self.flip}: a probability, 0 to 1")
        if problems:
            raise ConfigError("RandomResizedCrop: " + "; ".join(problems))

    def __call__(self, image: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        height, width = image.shape[:2]
        draw = sample_generator() if makes_sample() else random.Random(random.getrandbits(64))
        left, top, part_width, part_height = self._part(width, height, draw)
        pillow = pillow_image()
        part = pillow.fromarray(np.ascontiguousarray(image[top : top + part_height, left : left + part_width]))
        scaled = np.array(part.resize((self.size, self.size), pillow.Resampling.BILINEAR))
        return np.ascontiguousarray(scaled[:, ::-1]) if draw.random() < self.flip else scaled

    def _part(self, width: int, height: int, draw: random.Random) -> tuple[int, int, int, int]:
        """Left, top, width and height of the part in pixels."""
        for _ in range(_ATTEMPTS):
            area = width * height * draw.uniform(*self.scale)
            # Even in the logarithm: twice as wide is as likely as twice as high.
            ratio = math.exp(draw.uniform(math.log(self.ratio[0]), math.log(self.ratio[1])))
            part_width, part_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < part_width <= width and 0 < part_height <= height:
                left, top = draw.randint(0, width - part_width), draw.randint(0, height - part_height)
                return left, top, part_width, part_height
        # A very long or very flat image: the largest part from the middle within the ratios.
        part_width = min(width, max(1, round(height * self.ratio[1])))
        part_height = min(height, max(1, round(width / self.ratio[0])))
        return (width - part_width) // 2, (height - part_height) // 2, part_width, part_height


# Marks datasets that read the samples of a batch at once and transform them one by one, each with its own seed.

_MARK = "_hetstream_reads_apart"
_Method = TypeVar("_Method", bound=Callable[..., Any])


def transforms_what_it_reads(getitems: _Method) -> _Method:
    """Say of a `__getitems__` that it is `self.transform` over `self.read_samples(indices)`, and nothing else."""
    setattr(getitems, _MARK, True)
    return getitems


def reads_apart(dataset: object) -> bool:
    """Whether a loader may call `read_samples` and `transform` in the place of `__getitems__`.

    A subclass with a `__getitems__` of its own, and a program's class that has a method called `read_samples`, are
    asked as torch asks them.
    """
    return hasattr(getattr(type(dataset), "__getitems__", None), _MARK)
