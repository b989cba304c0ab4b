"""hetstream.ImageFolder against Pillow: which pixels, which crops, which errors."""

from __future__ import annotations

import contextlib
import io
import logging
import math
import os
import pickle
import random
import re
import warnings
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

import hetstream
from hetstream import EvaluationRecipe, ImageFolder, TrainingRecipe
from hetstream.errors import ConfigError, SourceError
from hetstream.mpi_dataworkers.images import decoder
from hetstream.mpi_dataworkers.images.recipes import NHWC, Output, Window
from tests.programs import needs

JPEGS = Path(__file__).resolve().parents[3] / "shared" / "data" / "jpeg"
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
needs_compiler = needs("g++")


def photograph(width: int, height: int, seed: int = 0) -> Image.Image:
    """Coarse and fine noise, so that wrong colours and wrong edges show."""
    draw = np.random.default_rng(seed)
    coarse = Image.fromarray(draw.integers(0, 256, (height // 9 + 2, width // 9 + 2, 3), np.uint8))
    pixels = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), np.int16)
    return Image.fromarray((pixels + draw.integers(-20, 21, pixels.shape)).clip(0, 255).astype(np.uint8))


def encoded(image: Image.Image, form: str = "JPEG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def by_pillow(data: bytes, window: Window, size: int) -> np.ndarray:
    """What torchvision has Pillow do."""
    image = Image.open(io.BytesIO(data)).convert("RGB")
    crop = image.crop((window.left, window.top, window.left + window.width, window.top + window.height))
    made = np.asarray(crop.resize((window.made_width, window.made_height), Image.Resampling.BILINEAR))
    made = made[window.first_row : window.first_row + size, window.first_column : window.first_column + size]
    return made[:, ::-1] if window.flip else made


def made(data: bytes, window: Window, size: int, *, exact: bool = True) -> np.ndarray:
    rules = decoder.Rules(Output(size, torch.uint8, NHWC, (0, 0, 0), (1, 1, 1)), exact, 10**9)
    # One image more on either side: nothing else is written.
    target = torch.full((3, size, size, 3), 99, dtype=torch.uint8)
    decoder.make_image("the file", data, lambda width, height: window, rules, target[1])
    assert (target[0] == 99).all()
    assert (target[2] == 99).all()
    return target[1].numpy()


def windows(width: int, height: int, size: int, number: int) -> Iterator[Window]:
    draw = random.Random(f"{width} {height} {size}")
    yield EvaluationRecipe(size, size + size // 7).window(width, height)
    yield Window(0, 0, width, height, size, size)
    for _ in range(number):
        crop_width, crop_height = draw.randint(1, width), draw.randint(1, height)
        left, top = draw.randint(0, width - crop_width), draw.randint(0, height - crop_height)
        yield Window(left, top, crop_width, crop_height, size, size, flip=draw.random() < 0.5)


FORMS = {
    "4:4:4": {"subsampling": 0},
    "4:2:2": {"subsampling": 1},
    "4:2:0": {"subsampling": 2},
    "progressive": {"subsampling": 2, "progressive": True},
    "restart markers": {"subsampling": 2, "restart_marker_rows": 1},
    "low quality": {"subsampling": 2, "quality": 20},
}


@pytest.fixture
def natively(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each image was made by native code."""
    decoder.native()  # which tries it out
    found: list[bool] = []
    make = decoder.Native.make
    monkeypatch.setattr(decoder.Native, "make", lambda *given: found.append(make(*given)) or found[-1])
    return found


@needs_compiler
@pytest.mark.shows("ImageFolder gives Pillow's pixels, bit for bit")
@pytest.mark.parametrize("form", [*FORMS, "grey"])
def test_native_code_gives_pillows_pixels(form: str, natively: list[bool]) -> None:
    number = 0
    for width, height in [(1, 1), (7, 5), (64, 48), (65, 131), (333, 500), (500, 333), (40, 700), (901, 17)]:
        image = photograph(width, height)
        data = encoded(image.convert("L")) if form == "grey" else encoded(image, **FORMS[form])
        for size in (5, 48, 224):
            for window in windows(width, height, size, 6):
                expected = by_pillow(data, window, size)
                assert np.array_equal(made(data, window, size), expected), (width, height, window)
                number += 1
    assert natively == [True] * number


@needs_compiler
@pytest.mark.shows("ImageFolder gives Pillow's pixels, bit for bit")
def test_photographs_have_pillows_pixels(natively: list[bool]) -> None:
    files = sorted(JPEGS.glob("*.JPEG"))
    if not files:
        pytest.skip(f"no photographs in {JPEGS}")
    torch.manual_seed(3)
    for path in files:
        data = path.read_bytes()
        with Image.open(path) as image:
            size = image.size
        for window in (TrainingRecipe().window(*size), EvaluationRecipe().window(*size)):
            assert np.array_equal(made(data, window, 224), by_pillow(data, window, 224)), (path, window)
    assert sum(natively) == len(natively) == 2 * len(files)


@needs_compiler
def test_inexact_pixels_are_close(natively: list[bool]) -> None:
    data = encoded(photograph(1200, 900), subsampling=2, quality=92)
    for window in windows(1200, 900, 64, 20):
        apart = np.abs(made(data, window, 64, exact=False).astype(int) - by_pillow(data, window, 64))
        assert apart.mean() < 6  # of 255, in noise
        if window.width * 4 < 64 * 8 or window.height * 4 < 64 * 8:
            assert not apart.any()  # not scaled
    assert all(natively)


def folder_of(place: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        path = place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return place


@pytest.fixture
def root(tmp_path: Path) -> Path:
    names = [f"{label}/{number}.jpg" for label in ("cats", "dogs") for number in range(5)]
    return folder_of(
        tmp_path / "images",
        {name: encoded(photograph(90 + 7 * at, 120 - 9 * at, at)) for at, name in enumerate(names)},
    )


def as_torchvision(path: Path, size: int) -> torch.Tensor:
    """RandomResizedCrop and RandomHorizontalFlip of torchvision on Pillow's image, drawn from torch's generator."""
    image = Image.open(path).convert("RGB")
    width, height = image.size
    least, most = torch.log(torch.tensor((3 / 4, 4 / 3)))
    for _ in range(10):
        area = width * height * torch.empty(1).uniform_(0.08, 1.0).item()
        ratio = torch.exp(torch.empty(1).uniform_(least, most)).item()
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            top = torch.randint(0, height - h + 1, size=(1,)).item()
            left = torch.randint(0, width - w + 1, size=(1,)).item()
            break
    else:
        raise AssertionError("not for the images of these tests")
    image = image.crop((left, top, left + w, top + h)).resize((size, size), Image.Resampling.BILINEAR)
    if torch.rand(1) < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return torch.from_numpy(np.array(image))


@pytest.mark.shows("a seed gives the crops of torchvision's transforms")
def test_a_seed_gives_the_crops_of_torchvision(root: Path) -> None:
    dataset = ImageFolder(root, TrainingRecipe(32))
    torch.manual_seed(7)
    batch = next(iter(DataLoader(dataset, 10, generator=torch.Generator())))
    torch.manual_seed(7)
    expected = [as_torchvision(Path(path), 32) for path, _ in dataset.samples]
    assert torch.equal(batch[0], torch.stack(expected))
    assert batch[1].tolist() == [0] * 5 + [1] * 5


def test_images_beyond_the_ratios_are_cut_from_the_middle() -> None:
    recipe = TrainingRecipe(16, scale=(1, 1))
    assert recipe.window(1000, 10)[:4] == (493, 0, 13, 10)
    assert recipe.window(10, 1000)[:4] == (0, 493, 10, 13)


def test_classes_and_files_are_torchvisions(tmp_path: Path) -> None:
    data = encoded(photograph(9, 9))
    hostile = "a\nb\x1b[31m.jpg"
    folder_of(
        tmp_path,
        dict.fromkeys(("b/z.JPG", "b/deep/a.jpeg", "b/a.png", ".c/x.webp", f"a b/{hostile}", "loose.jpg"), data),
    )
    (tmp_path / "b" / "notes.txt").write_text("passed over")
    (tmp_path / "a b" / "link").symlink_to(tmp_path / "b" / "deep")
    dataset = ImageFolder(tmp_path, EvaluationRecipe(8, 8))
    assert dataset.classes == [".c", "a b", "b"]
    assert dataset.class_to_idx == {".c": 0, "a b": 1, "b": 2}
    names = [(Path(path).relative_to(tmp_path).as_posix(), label) for path, label in dataset.samples]
    assert names == [
        (".c/x.webp", 0), (f"a b/{hostile}", 1), ("a b/link/a.jpeg", 1), ("b/a.png", 2), ("b/z.JPG", 2),
        ("b/deep/a.jpeg", 2),
    ]  # fmt: skip
    assert dataset.targets == [label for _, label in names]
    assert len({dataset[at][0].numpy().tobytes() for at in range(-len(names), len(names))}) == 1


@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
@pytest.mark.parametrize("native_code", [True, False])
@pytest.mark.parametrize("size", [20, 64])
def test_forms_of_the_result(
    root: Path, layout: str, native_code: bool, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not native_code:
        monkeypatch.setattr(decoder, "native", lambda: None)
    recipe = EvaluationRecipe(size, 70)
    given: dict[str, Any] = {"layout": layout}
    plain = torch.stack([ImageFolder(root, recipe)[at][0] for at in range(10)])
    as_bytes = next(iter(DataLoader(ImageFolder(root, recipe, **given), 10)))[0]
    as_float = next(iter(DataLoader(ImageFolder(root, recipe, dtype=torch.float32, **given), 10)))[0]
    normalised = next(iter(DataLoader(ImageFolder(root, recipe, mean=MEAN, std=STD, **given), 10)))[0]
    assert as_bytes.is_contiguous()
    assert normalised.dtype == as_float.dtype == torch.float32
    # torchvision's operations, on NCHW
    pixels = plain.permute(0, 3, 1, 2)
    scaled = pixels.to(torch.float32).mul_(1.0 / 255)
    expected = scaled.sub(torch.tensor(MEAN).view(3, 1, 1)).div_(torch.tensor(STD).view(3, 1, 1))
    for result, wanted in ((as_bytes, pixels), (as_float, scaled), (normalised, expected)):
        assert torch.equal(result, wanted if layout == "NCHW" else wanted.permute(0, 2, 3, 1))


@pytest.mark.shows("collating a batch of ImageFolder copies nothing")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_batch_is_made_where_it_stays(root: Path, num_workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = ImageFolder(root, EvaluationRecipe(16, 20))
    monkeypatch.setattr(torch, "stack", lambda *_, **__: pytest.fail("images are copied"))
    loader = DataLoader(dataset, 4, num_workers=num_workers, shuffle=True)
    batches = [*loader]
    assert [len(labels) for _, labels in batches] == [4, 4, 2]
    assert sorted(torch.cat([labels for _, labels in batches]).tolist()) == dataset.targets
    assert all(images.is_shared() == (num_workers > 0) for images, _ in batches)


def test_another_collate_function_gets_samples(root: Path) -> None:
    dataset = ImageFolder(root, EvaluationRecipe(16, 20))
    batches = [*DataLoader(dataset, 5, collate_fn=list)]
    assert all(type(label) is int and image.shape == (16, 16, 3) for batch in batches for image, label in batch)
    # In another order, or of two batches, they are no batch that is there.
    mixed = [*batches[1][::-1], *batches[0]]
    images, labels = torch.utils.data.default_collate(mixed)
    assert torch.equal(images, torch.stack([image for image, _ in mixed]))
    assert labels.tolist() == [1] * 5 + [0] * 5
    alone = pickle.loads(pickle.dumps(batches[0][1]))
    assert type(alone) is tuple
    assert torch.equal(alone[0], dataset[1][0])


def test_hetstreams_loader_seeds_each_sample(root: Path) -> None:
    """Whatever batch a sample is in, and whoever makes it."""
    dataset = ImageFolder(root, TrainingRecipe(16))
    again = pickle.loads(pickle.dumps(dataset))
    large = torch.cat([images for images, _ in hetstream.DataLoader(dataset, 10, seed=5)])
    small = torch.cat([images for images, _ in hetstream.DataLoader(again, 3, seed=5)])
    assert torch.equal(large, small)
    other = torch.cat([images for images, _ in hetstream.DataLoader(dataset, 10, seed=6)])
    assert not torch.equal(large, other)


def test_a_cache_that_keeps_nothing_of_a_training_recipe_says_why(
    root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = torch.utils.data.Subset(ImageFolder(root, TrainingRecipe(16)), range(2))
    with hetstream.DataLoader(dataset, batch_size=2, cache=str(tmp_path)) as loader:
        list(loader)
    (line,) = [line for line in caplog.messages if "has no effect" in line]
    assert "a TrainingRecipe cuts out, and decodes, another part of a photograph in each epoch" in line
    assert "deterministic" not in line


def test_threads_are_for_what_draws_nothing(root: Path) -> None:
    assert ImageFolder(root, EvaluationRecipe()).thread_safe
    assert not ImageFolder(root, TrainingRecipe()).thread_safe


# Files that are not plain JPEG, or no images.


def turned(image: Image.Image) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return encoded(image, exif=exif)


PICTURE = photograph(120, 90)
PLAIN = encoded(PICTURE, quality=95)
OTHERS = {
    "CMYK": encoded(PICTURE.convert("CMYK")),
    "EXIF-turned": turned(PICTURE),
    "palette": encoded(PICTURE.convert("P"), "PNG"),
    "transparent": encoded(PICTURE.convert("RGBA"), "PNG"),
    "black and white": encoded(PICTURE.convert("1"), "PNG"),
    "WebP": encoded(PICTURE, "WEBP"),
    "two frames": encoded(PICTURE, "TIFF", save_all=True, append_images=[photograph(30, 30)]),
    "bytes behind the end": PLAIN + b"more than a photograph" * 9,
    "another image behind the end": PLAIN + encoded(photograph(30, 30)),
    "damaged but whole": PLAIN[:2000] + b"\x55" * 40 + PLAIN[2040:],
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_files_have_pillows_pixels(kind: str) -> None:
    for window in windows(120, 90, 32, 5):
        assert np.array_equal(made(OTHERS[kind], window, 32), by_pillow(OTHERS[kind], window, 32))


def png_16(width: int, height: int) -> bytes:
    return encoded(Image.fromarray(np.arange(width * height, dtype=np.uint16).reshape(height, width)), "PNG")


@pytest.mark.shows("a damaged photograph is an error with its path and the next step")
@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "no image that Pillow knows (0 bytes). Replace or remove"),
        (b"<html>not found</html>", "no image that Pillow knows (22 bytes)"),
        (PLAIN[: len(PLAIN) // 2], "image file is truncated"),
        (PLAIN[:-2], "image file is truncated"),
        (PLAIN[:300], "Replace or remove the file"),
        (b"\xff\xd8", "Replace or remove the file"),
        (png_16(20, 20), "more than 8 bits a channel; convert the file to 8 bits"),
        (encoded(PICTURE, "PNG")[:900], "Replace or remove the file"),
    ],
)
def test_damaged_files(tmp_path: Path, data: bytes, words: str) -> None:
    folder_of(tmp_path, {"a/good.jpg": PLAIN, "a/wrong\n.jpg": data})
    # Also of a crop that lies before the damage.
    dataset = ImageFolder(tmp_path, TrainingRecipe(8, scale=(1e-3, 1e-3)))
    with pytest.raises(SourceError, match=re.escape(words)) as caught:
        dataset.__getitems__([0, 1])
    assert f"{tmp_path}/a/wrong" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_change(root: Path) -> None:
    dataset = ImageFolder(root, EvaluationRecipe(16, 20))
    first, path = dataset[0][0].clone(), Path(dataset.samples[0][0])
    path.write_bytes(PLAIN)
    assert not torch.equal(dataset[0][0], first)
    path.unlink()
    with pytest.raises(SourceError, match=r"0\.jpg: cannot be read: No such file"):
        dataset[0]
    path.symlink_to(root)
    with pytest.raises(SourceError, match="cannot be read: Is a directory"):
        dataset[0]


def test_large_files_are_refused_unless_they_may_be_large(tmp_path: Path) -> None:
    large = encoded(Image.new("L", (15_000, 13_000), 7))
    folder_of(tmp_path, {"a/large.jpg": large, "a/long.png": encoded(Image.new("L", (300_000, 1)), "PNG")})
    dataset = ImageFolder(tmp_path, EvaluationRecipe(16, 40_000 // 16))
    with pytest.raises(
        SourceError, match=r"15,000 x 13,000 pixels are more than max_pixels=178,956,970\. Give ImageFolder"
    ):
        dataset[0]
    with pytest.raises(SourceError, match="300,000 x 1, resized to 750,000,000 x 2,500 pixels are more"):
        dataset[1]
    if decoder.native() is not None:
        allowed = ImageFolder(tmp_path, EvaluationRecipe(16, 16), max_pixels=200_000_000, exact=False)
        assert (allowed[0][0] == 7).all()


@pytest.mark.shows("without a C++ compiler ImageFolder has Pillow's pixels by Pillow, and says so once")
@pytest.mark.parametrize("lacks", ["compiler", "function", "pixels"])
def test_without_native_code_pillow_makes_the_same(
    root: Path, lacks: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if lacks != "compiler" and decoder.compiler() is None:
        pytest.skip("g++ is not here: apt-get install g++")
    expected = [ImageFolder(root, EvaluationRecipe(16, 20))[at][0] for at in range(10)]
    if lacks == "compiler":
        monkeypatch.setattr(decoder, "compiler", lambda: None)
    elif lacks == "function":
        monkeypatch.setattr(decoder, "_FUNCTIONS", ("jpeg_no_such_function",))
    else:
        monkeypatch.setattr(decoder, "_INTERFACES", ((62, 640), (90, 632)))
    decoder.native.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            dataset = ImageFolder(root, EvaluationRecipe(16, 20))
            assert all(torch.equal(dataset[at][0], expected[at]) for at in range(10))
            with pytest.raises(SourceError):
                made(b"\xff\xd8nothing", Window(0, 0, 1, 1, 4, 4), 4)
        assert caplog.text.count("decoded by Pillow, pixel for pixel the same but slower") == 1
    finally:
        decoder.native.cache_clear()


def test_what_is_asked_for_is_checked(root: Path) -> None:
    folder = partial(ImageFolder, root, EvaluationRecipe())
    for make, words in (
        (partial(TrainingRecipe, 0, scale=(0, 1), ratio=(2, 1), flip=2), "size=0.*scale=.*ratio=.*flip=2"),
        (partial(EvaluationRecipe, 224, 200), "1 <= size <= resize"),
        (partial(folder, dtype=torch.float64, layout="HWC"), "dtype=torch.float64.*layout='HWC'"),
        (partial(folder, mean=MEAN, dtype=torch.uint8), "mean and std are of dtype=torch.float32"),
        (partial(folder, std=(0, 1, 1)), "none of std 0"),
    ):
        with pytest.raises(ConfigError, match=words):
            make()
    with pytest.raises(IndexError, match=r"outside 0\.\.9"):
        folder()[10]


def test_folders_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="No such file"):
        ImageFolder(tmp_path / "none", EvaluationRecipe())
    with pytest.raises(SourceError, match="no subfolder"):
        ImageFolder(tmp_path, EvaluationRecipe())
    os.mkdir(tmp_path / "empty")
    with pytest.raises(SourceError, match="subfolder without an image: empty"):
        ImageFolder(tmp_path, EvaluationRecipe())


# Files that nobody would save: the same pixels as Pillow's, or both refuse.


def segment(marker: int, data: bytes) -> bytes:
    return bytes((0xFF, marker)) + (len(data) + 2).to_bytes(2, "big") + data


class Bits:
    """Bits of a JPEG scan."""

    def __init__(self) -> None:
        self.bytes, self._value, self._count = bytearray(), 0, 0

    def put(self, value: int, count: int) -> None:
        self._value, self._count = self._value << count | value, self._count + count
        while self._count >= 8:
            self._count -= 8
            byte = self._value >> self._count & 255
            self.bytes += b"\xff\0" if byte == 255 else bytes((byte,))

    def end(self) -> None:
        self.put((1 << -self._count % 8) - 1, -self._count % 8)


def of_sampling(sampling: list[tuple[int, int]], width: int, height: int, restart: int, draw: random.Random) -> bytes:
    """A baseline file of random coefficients, whose components are sampled as no encoder does it."""
    across, down = max(wide for wide, _ in sampling), max(high for _, high in sampling)
    if len(sampling) == 1:
        across = down = 1
    num_units = math.ceil(width / 8 / across) * math.ceil(height / 8 / down)
    bits = Bits()
    for unit in range(num_units):
        if restart and unit and unit % restart == 0:
            bits.end()
            bits.bytes += bytes((0xFF, 0xD0 + (unit // restart - 1) % 8))
        for wide, high in sampling if len(sampling) > 1 else [(1, 1)]:
            for _ in range(wide * high):
                category = draw.randrange(7)
                bits.put(category, 4)
                bits.put(draw.getrandbits(category) if category else 0, category)
                for _ in range(draw.randrange(6)):
                    size = draw.randint(1, 3)
                    bits.put(size, 3)
                    bits.put(draw.getrandbits(size), size)
                bits.put(0, 3)
    bits.end()
    frame = b"".join(bytes((at + 1, wide << 4 | high, 0)) for at, (wide, high) in enumerate(sampling))
    tables = bytes((0, 0, 0, 0, 12, *[0] * 12, *range(12))), bytes((0x10, 0, 0, 4, *[0] * 13, *range(4)))
    return b"".join((
        b"\xff\xd8", segment(0xDB, bytes((0, *[9] * 64))), *(segment(0xC4, table) for table in tables),
        segment(0xDD, restart.to_bytes(2, "big")),
        segment(0xC0, bytes((8, *height.to_bytes(2, "big"), *width.to_bytes(2, "big"), len(sampling))) + frame),
        segment(0xDA, bytes((len(sampling), *sum(((at + 1, 0) for at in range(len(sampling))), ()), 0, 63, 0))),
        bytes(bits.bytes), b"\xff\xd9",
    ))  # fmt: skip


SAMPLINGS = {
    "4:1:1": [(4, 1), (1, 1), (1, 1)],
    "4:4:0": [(1, 2), (1, 1), (1, 1)],
    "4:1:0": [(4, 2), (1, 1), (1, 1)],
    "3:1:1": [(3, 1), (1, 1), (1, 1)],
    "colours larger": [(1, 1), (2, 2), (1, 1)],
    "colours differ": [(2, 2), (1, 2), (2, 1)],
    "grey of four": [(2, 2)],
    "none known": [(2, 1), (1, 2), (1, 1)],
}


@needs_compiler
@pytest.mark.shows("ImageFolder gives Pillow's pixels, bit for bit")
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_each_sampling_of_colours(sampling: str, natively: list[bool]) -> None:
    draw = random.Random(sampling)
    for width, height, restart in ((97, 71, 0), (40, 130, 3), (31, 8, 1)):
        data = of_sampling(SAMPLINGS[sampling], width, height, restart, draw)
        for window in windows(width, height, 24, 12):
            assert np.array_equal(made(data, window, 24), by_pillow(data, window, 24)), (width, height, window)
    assert all(natively)


@pytest.mark.parametrize("subsampling", [0, 2])
def test_progressive_files_that_lack_scans(subsampling: int) -> None:
    """libjpeg smooths their blocks, by the neighbours that it decodes."""
    data = encoded(photograph(200, 150), subsampling=subsampling, progressive=True)
    scans = [at for at in range(len(data)) if data[at : at + 2] == b"\xff\xda"]
    for scan in scans[1:]:
        less = data[: data.rindex(b"\xff\xc4", 0, scan)] + b"\xff\xd9"
        for window in windows(200, 150, 24, 5):
            assert np.array_equal(made(less, window, 24), by_pillow(less, window, 24)), (len(scans), scan, window)


EXIF = Image.Exif()
EXIF[0x0112] = 8
BASES = [
    *(encoded(photograph(83, 61), **options) for options in FORMS.values()),
    encoded(photograph(64, 48).convert("L")),
    encoded(photograph(40, 90).convert("CMYK")),
    encoded(photograph(40, 90), exif=EXIF, icc_profile=b"none" * 40, comment="of nothing", dpi=(1, 1)),
    encoded(photograph(70, 50), "MPO", save_all=True, append_images=[photograph(70, 50, 1)]),
    *(of_sampling(sampling, 60, 50, at % 3, random.Random(at)) for at, sampling in enumerate(SAMPLINGS.values())),
]  # fmt: skip
SEGMENTS = [
    segment(0xE0, b"JFIF\0"), segment(0xEE, b"Adobe\0"), segment(0xEE, b"Adobe\0d\0\0\0\0\0"),
    segment(0xEE, b"Adobe\0d\0\0\0\0\2"),
    segment(0xE2, b"ICC_PROFILE\0"), segment(0xE2, b"ICC_PROFILE\0\1\2more"), segment(0xE2, b"MPF\0MM\0*"),
    segment(0xED, b"Photoshop 3.0\x008BIM\3\xed\0\0\0\0\0\4four"), segment(0xED, b"Photoshop 3.0\x008BIM\3\xed"),
    segment(0xED, b"Photoshop 3.0\x008BIM\3\xed\0\0\0\0\0\7"), segment(0xE1, b"Exif\0\0MM\0*\0\0\0\x08\0\1\1\x1a"),
    segment(0xE1, b"Exif\0\0"), segment(0xFE, b""), segment(0xDC, b"\0\x09"), segment(0xDD, b"\0\2"),
    segment(0xDB, b"\0"),
    b"\xff\x01", b"\xff\xff\xff", b"\xff\xd0", b"\xff\x30\0\4ab", b"\0\0", b"\xff\xf5", b"\xff\xf0\0\4ab", b"\xff\xd8",
]  # fmt: skip


def damaged(draw: random.Random) -> bytes:
    """A JPEG file with one to three things wrong with it."""
    data = bytearray(draw.choice(BASES))
    for _ in range(draw.randint(1, 3)):
        scan = max(data.find(b"\xff\xda"), 3)
        place = draw.randrange(2, draw.choice((scan, len(data))))
        starts = [at for at in range(2, scan) if data[at] == 0xFF] or [2]
        length = draw.choice((1, 2, 20, 200))
        match draw.randrange(9):
            case 0:
                data[place] ^= 1 << draw.randrange(8)
            case 1:
                data[place] = draw.choice((0, 1, 2, 0x11, 0x22, 0x41, 0xC4, 0xD8, 0xD9, 0xFF, draw.randrange(256)))
            case 2:
                data[place:place] = bytes(
                    (0xFF, draw.choice((0, 0x01, 0xC0, 0xC4, 0xD0, 0xD3, 0xD8, 0xD9, 0xDA, 0xDC, 0xE0)))
                )
            case 3:
                del data[place : place + length]
            case 4:
                data[place:place] = data[place : place + length]
            case 5:
                del data[place:]
                data += draw.choice((b"", b"\xff", b"\xff\xd9", b"\xff\xda", bytes(9) + b"\xff\xd9"))
            case 6:
                at = draw.choice(starts)
                data[at:at] = draw.choice(SEGMENTS)
            case 7:
                data += draw.choice((bytes(9), b"\xff\xd9", draw.choice(BASES)))
            case 8:
                data[place : place + length] = draw.randbytes(length)
        if len(data) < 4:
            break
    return bytes(data)


def compared_with_pillow(data: bytes, draw: random.Random) -> str:
    """What a file came to: "pixels", "refused" or, where it would take long, "large"."""
    size = draw.choice((8, 24))
    parts, flip = [draw.random() for _ in range(4)], draw.random() < 0.5

    def window_of(width: int, height: int) -> Window:
        wide, high = 1 + int(parts[0] * (width - 1)), 1 + int(parts[1] * (height - 1))
        return Window(
            int(parts[2] * (width - wide)), int(parts[3] * (height - high)), wide, high, size, size, flip=flip
        )

    expected: Any = None
    with warnings.catch_warnings(), contextlib.suppress(Exception):
        warnings.simplefilter("ignore")
        with Image.open(io.BytesIO(data)) as image:
            if image.width * image.height > 1_000_000:
                return "large"
            window = window_of(*image.size)
        expected = by_pillow(data, window, size)
    rules = decoder.Rules(Output(size, torch.uint8, NHWC, (0, 0, 0), (1, 1, 1)), True, 1_000_000)
    target = torch.empty(size, size, 3, dtype=torch.uint8)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            decoder.make_image("the file", data, window_of, rules, target)
    except SourceError as caught:
        if expected is not None:
            raise AssertionError("Pillow has pixels") from caught
        return "refused"
    assert expected is not None, "Pillow refuses it"
    assert np.array_equal(target.numpy(), expected)
    return "pixels"


@needs_compiler
@pytest.mark.shows("of a damaged photograph ImageFolder has Pillow's pixels, or both refuse it")
def test_damaged_files_are_as_for_pillow() -> None:
    found = Counter[str]()
    for seed in range(1500):
        draw = random.Random(seed)
        try:
            found[compared_with_pillow(damaged(draw), draw)] += 1
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error
    assert min(found["pixels"], found["refused"]) > 200, found
