from __future__ import annotations

import pickle
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from hetstream.base.errors import ConfigError
from hetstream.mpi_dataworkers.errors import SourceError
from hetstream.mpi_dataworkers.sources.images import ImageFolder, RandomResizedCrop

JPEGS = Path(__file__).resolve().parents[3] / "shared" / "data" / "jpeg"


def prefix(name: str) -> str:
    return name.split("_")[0]


def write(
    path: Path, colour: tuple[int, int, int] = (200, 30, 40), size: tuple[int, int] = (12, 8), mode: str = "RGB"
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).convert(mode).save(path)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("dogs/b.JPG", "dogs/deep/a.png", "cats/z.jpeg", "cats/y.png"):
        write(tmp_path / name)
    (tmp_path / "cats" / "notes.txt").write_text("passed over")
    write(tmp_path / ".hidden" / "a.png")
    return tmp_path


def test_subfolders_are_classes_and_the_order_is_sorted(root: Path) -> None:
    dataset = ImageFolder(root)
    assert dataset.classes == ("cats", "dogs")
    assert [dataset.path(index).relative_to(root).as_posix() for index in range(len(dataset))] == [
        "cats/y.png",
        "cats/z.jpeg",
        "dogs/b.JPG",
        "dogs/deep/a.png",
    ]
    assert [label for _, label in dataset] == [0, 0, 1, 1]


def test_images_are_rgb_arrays_of_their_own(root: Path) -> None:
    image, label = ImageFolder(root)[0]
    assert (image.shape, image.dtype, type(label)) == ((8, 12, 3), np.uint8, int)
    assert image[0, 0].tolist() == [200, 30, 40]
    assert image.flags.writeable
    assert image.flags.owndata


def test_labels_come_from_file_names(tmp_path: Path) -> None:
    for name in ("n2_b.png", "n1_a.png", "more/n2_c.png"):
        write(tmp_path / name)
    dataset = ImageFolder(tmp_path, label_of=lambda name: name.split("_")[0])
    assert dataset.classes == ("n1", "n2")
    assert [label for _, label in dataset] == [1, 0, 1]
    assert len(pickle.loads(pickle.dumps(dataset))) == 3


@pytest.mark.parametrize("mode", ["L", "P", "1", "RGBA", "LA"])
def test_every_mode_of_8_bits_becomes_rgb(tmp_path: Path, mode: str) -> None:
    write(tmp_path / "a" / "x.png", mode=mode)
    assert ImageFolder(tmp_path)[0][0].shape == (8, 12, 3)


def test_torch_loads_and_the_transform_is_called(root: Path) -> None:
    dataset = ImageFolder(root, transform=RandomResizedCrop(6))
    images, labels = next(iter(torch.utils.data.DataLoader(dataset, batch_size=4, num_workers=1)))
    assert (tuple(images.shape), images.dtype) == ((4, 6, 6, 3), torch.uint8)
    assert labels.tolist() == [0, 0, 1, 1]


def test_a_truncated_file_is_named(root: Path) -> None:
    path = root / "cats" / "z.jpeg"
    Image.effect_noise((64, 64), 50).convert("RGB").save(path)
    path.write_bytes(path.read_bytes()[:-300])
    with pytest.raises(SourceError, match=r"z\.jpeg: cannot be decoded: .*truncated"):
        ImageFolder(root)[1]


@pytest.mark.parametrize("content", [b"", b"no image", b"\x89PNG\r\n\x1a\n" + bytes(40)])
def test_a_file_that_is_no_image_is_named(root: Path, content: bytes) -> None:
    (root / "cats" / "y.png").write_bytes(content)
    with pytest.raises(SourceError, match=r"y\.png: cannot be decoded"):
        ImageFolder(root)[0]


def test_deep_pixels_are_refused_not_clipped(root: Path) -> None:
    Image.fromarray(np.full((4, 4), 40000, dtype=np.uint16)).save(root / "cats" / "y.png")
    with pytest.raises(SourceError, match="more than 8 bits a channel"):
        ImageFolder(root)[0]


def test_folders_that_cannot_be_listed_say_why(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no such folder"):
        ImageFolder(tmp_path / "none")
    with pytest.raises(SourceError, match=re.escape("no image below it; suffixes read: .jpg, .jpeg, .png")):
        ImageFolder(tmp_path)
    write(tmp_path / "a" / "x.png")
    (tmp_path / "b").mkdir()
    with pytest.raises(SourceError, match="class folder without an image: b"):
        ImageFolder(tmp_path)
    write(tmp_path / "loose.png")
    with pytest.raises(SourceError, match=r"loose\.png: image outside any class folder.*label_of="):
        ImageFolder(tmp_path)


def test_an_index_outside_is_an_index_error(root: Path) -> None:
    with pytest.raises(IndexError, match=r"index 4 is outside 0\.\.3"):
        ImageFolder(root)[4]


@pytest.mark.parametrize("size", [(40, 30), (1, 500), (500, 1), (1, 1)])
def test_a_crop_has_its_size_and_follows_the_seed(size: tuple[int, int]) -> None:
    image = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    crop = RandomResizedCrop(16)
    random.seed(1)
    first = crop(image)
    random.seed(1)
    assert np.array_equal(first, crop(image))
    assert (first.shape, first.dtype, first.flags.c_contiguous) == ((16, 16, 3), np.uint8, True)


def test_a_crop_of_everything_is_the_image_and_flip_mirrors_it() -> None:
    image = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    whole = RandomResizedCrop(16, scale=(1, 1), ratio=(1, 1), flip=0)
    assert np.array_equal(whole(image), image)
    assert np.array_equal(RandomResizedCrop(16, scale=(1, 1), ratio=(1, 1), flip=1)(image), image[:, ::-1])


def test_wrong_crop_options_are_all_named() -> None:
    with pytest.raises(ConfigError, match=r"size=0: .*scale=\(0, 1\): .*ratio=\(2, 1\): .*flip=2: "):
        RandomResizedCrop(0, scale=(0, 1), ratio=(2, 1), flip=2)


@pytest.mark.skipif(not JPEGS.is_dir(), reason="the sample photographs (../shared/data/jpeg) are not here")
def test_photographs_load() -> None:
    dataset = ImageFolder(JPEGS, label_of=prefix, transform=RandomResizedCrop(32))
    assert len(dataset) == len(dataset.classes) == 250
    assert all(dataset[index][0].shape == (32, 32, 3) for index in range(0, 250, 25))
