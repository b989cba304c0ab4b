"""Image augmentation on uint8 arrays, with Pillow's resampling and the sample's generator.

Given as `transform=` to a source. The loader seeds `sample_generator()` for each sample from (seed, epoch, index), so a
sample is cut the same way whoever makes it. For what is not here any function on arrays will do.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from hetstream.base.errors import ConfigError
from hetstream.base.installed import install_command
from hetstream.mpi_dataworkers.generators import makes_sample, sample_generator

try:
    from PIL import Image
except ImportError as exc:
    raise ImportError(
        f"hetstream.mpi_dataworkers.sources.transforms needs Pillow: {install_command('images')}"
    ) from exc

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
        part = Image.fromarray(np.ascontiguousarray(image[top : top + part_height, left : left + part_width]))
        scaled = np.array(part.resize((self.size, self.size), Image.Resampling.BILINEAR))
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
