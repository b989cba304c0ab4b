"""What is cut out of an image, and what becomes of it: torchvision's two recipes, as numbers. Called by `folder.py`.

Random numbers are drawn from torch's generator in the order in which torchvision's transforms draw them, so that a seed
gives the same crops in both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from hetstream.base.errors import ConfigError

_ATTEMPTS = 10
# torchvision's factor from a byte to a number from 0 to 1.
_FACTOR = 1.0 / 255
NHWC: Literal["NHWC"] = "NHWC"
NCHW: Literal["NCHW"] = "NCHW"


def _refuse(what: str, *problems: tuple[bool, str]) -> None:
    """Name all problems that are there at once.

    Raises:
        ConfigError: there is one.
    """
    if found := "; ".join(text for is_there, text in problems if is_there):
        raise ConfigError(f"{what}: {found}")


class Window(NamedTuple):
    """A crop, what it is resized to, and which part of that is the result: `size` pixels square.

    Attributes:
        left, top, width, height: of the crop, in pixels of the file.
        made_width, made_height: what it is resized to.
        first_column, first_row: where the result begins in that.
        flip: whether the result is mirrored left to right.
    """

    left: int
    top: int
    width: int
    height: int
    made_width: int
    made_height: int
    first_column: int = 0
    first_row: int = 0
    flip: bool = False


@dataclass(frozen=True)
class TrainingRecipe:
    """Cut a random part out of an image, resize it to a square, mirror it at random.

    The same crops and pixels as `RandomResizedCrop(size, scale, ratio)` and `RandomHorizontalFlip(flip)` of
    torchvision, which draw from torch's generator, too.

    Args:
        size: Edge of the result in pixels.
        scale: Smallest and largest part of the image's area.
        ratio: Smallest and largest width to height of the part.
        flip: Probability of mirroring left to right.

    Raises:
        ConfigError: A value breaks its rule.
    """

    size: int = 224
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: float = 0.5

    def __post_init__(self) -> None:
        _refuse(
            "TrainingRecipe",
            (self.size < 1, f"size={self.size}: at least 1"),
            (not 0 < self.scale[0] <= self.scale[1], f"scale={self.scale}: 0 < smallest <= largest"),
            (not 0 < self.ratio[0] <= self.ratio[1], f"ratio={self.ratio}: 0 < smallest <= largest"),
            (not 0 <= self.flip <= 1, f"flip={self.flip}: a probability, 0 to 1"),
        )

    draws = True

    def window(self, width: int, height: int) -> Window:
        """Draw the crop of an image of so many pixels."""
        left, top, crop_width, crop_height = self._crop(width, height)
        return Window(
            left, top, crop_width, crop_height, self.size, self.size, flip=torch.rand(1).item() < self.flip
        )  # fmt: skip

    def _crop(self, width: int, height: int) -> tuple[int, int, int, int]:
        number = torch.empty(1)
        # Of float32, as torchvision has it.
        least, most = torch.log(torch.tensor(self.ratio)).tolist()
        for _ in range(_ATTEMPTS):
            area = height * width * number.uniform_(*self.scale).item()
            ratio = number.uniform_(least, most).exp_().item()
            crop_width, crop_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < crop_width <= width and 0 < crop_height <= height:
                top = int(torch.randint(0, height - crop_height + 1, size=(1,)).item())
                left = int(torch.randint(0, width - crop_width + 1, size=(1,)).item())
                return left, top, crop_width, crop_height
        # A very long or very flat image: the largest part from the middle within the ratios.
        crop_width, crop_height = width, height
        if width / height < self.ratio[0]:
            crop_height = round(width / self.ratio[0])
        elif width / height > self.ratio[1]:
            crop_width = round(height * self.ratio[1])
        return (width - crop_width) // 2, (height - crop_height) // 2, crop_width, crop_height


@dataclass(frozen=True)
class EvaluationRecipe:
    """Resize an image's shorter side and cut a square from the middle; nothing is drawn.

    The same pixels as `Resize(resize)` and `CenterCrop(size)` of torchvision.

    Args:
        size: Edge of the result in pixels.
        resize: What the shorter side becomes, at least `size`.

    Raises:
        ConfigError: A value breaks its rule.
    """

    size: int = 224
    resize: int = 256

    def __post_init__(self) -> None:
        problem = f"size={self.size}, resize={self.resize}: 1 <= size <= resize"
        _refuse("EvaluationRecipe", (not 1 <= self.size <= self.resize, problem))

    draws = False

    def window(self, width: int, height: int) -> Window:
        """The crop of an image of so many pixels."""
        made_width = int(self.resize * width / height) if width > height else self.resize
        made_height = self.resize if width > height else int(self.resize * height / width)
        column, row = round((made_width - self.size) / 2), round((made_height - self.size) / 2)
        return Window(0, 0, width, height, made_width, made_height, column, row)


@dataclass(frozen=True)
class Output:
    """In which form an image is given.

    Attributes:
        size: edge in pixels.
        dtype: torch.uint8, or torch.float32 from 0 to 1, normalised by `mean` and `std`.
        layout: NHWC or NCHW, of a batch.
        mean, std: of each channel.

    Raises:
        ConfigError: A value breaks its rule.
    """

    size: int
    dtype: torch.dtype
    layout: Literal["NHWC", "NCHW"]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        is_plain = not any(self.mean) and self.std == (1, 1, 1)
        given = f"mean={self.mean}, std={self.std}"
        _refuse(
            "ImageFolder",
            (self.dtype not in (torch.uint8, torch.float32), f"dtype={self.dtype}: torch.uint8 or torch.float32"),
            (self.layout not in (NHWC, NCHW), f"layout={self.layout!r}: {NHWC} or {NCHW}"),
            (not len(self.mean) == len(self.std) == 3 or 0 in self.std, f"{given}: three numbers each, none of std 0"),
            (self.dtype == torch.uint8 and not is_plain, "mean and std are of dtype=torch.float32"),
        )

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of an image."""
        return (3, self.size, self.size) if self.layout == NCHW else (self.size, self.size, 3)

    @property
    def steps(self) -> tuple[int, int, int]:
        """From a row, a column and a channel of an image to the next one, in elements."""
        size = self.size
        return (size, 1, size * size) if self.layout == NCHW else (size * 3, 3, 1)

    @property
    def normalise(self) -> tuple[float, ...]:
        """What float32 results are made with: the factor of a byte, then the means, then the deviations."""
        return (_FACTOR, *self.mean, *self.std)

    def of(self, pixels: torch.Tensor) -> torch.Tensor:
        """An image of bytes, (height, width, 3), in this form."""
        if self.dtype == torch.float32:
            mean, std = torch.tensor(self.mean), torch.tensor(self.std)
            pixels = pixels.to(torch.float32).mul_(_FACTOR).sub_(mean).div_(std)
        return pixels.permute(2, 0, 1) if self.layout == NCHW else pixels
