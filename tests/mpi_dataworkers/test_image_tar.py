"""hetstream.ImageTar: the samples of tar files, and files that are damaged."""

from __future__ import annotations

import io
import pickle
import re
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import hetstream
from hetstream import EvaluationRecipe, ImageFolder, ImageTar, TrainingRecipe
from hetstream.errors import SourceError
from hetstream.mpi_dataworkers.ops import prefix_cache

RECIPE = EvaluationRecipe(16, 20)


def photograph(seed: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (30 + seed, 40, 3), np.uint8)).save(file, "JPEG")
    return file.getvalue()


def tar_of(path: Path, members: list[tuple[str, bytes]], form: int = tarfile.PAX_FORMAT) -> Path:
    with tarfile.open(path, "w", format=form) as tar:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


MEMBERS = [
    member
    for number in range(6)
    for member in ((f"{number:04}.cls", b"%d" % (number % 3)), (f"{number:04}.jpg", photograph(number)))
]


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_samples_are_those_of_the_files(tmp_path: Path, form: int) -> None:
    for number in range(6):
        path = tmp_path / "folder" / str(number % 3) / f"{number:04}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(photograph(number))
    files = tar_of(tmp_path / "a.tar", MEMBERS[:8], form), tar_of(tmp_path / "b.tar", MEMBERS[8:], form)
    found, expected = ImageTar(files, RECIPE), ImageFolder(tmp_path / "folder", RECIPE)
    assert found.samples == [(f"{number:04}", number % 3) for number in range(6)]
    assert (len(found), found.classes, found.targets) == (6, ["0", "1", "2"], [0, 1, 2, 0, 1, 2])
    by_name = {Path(path).stem: at for at, (path, _) in enumerate(expected.samples)}
    for at, (image, label) in enumerate(pickle.loads(pickle.dumps(found))[at] for at in range(6)):
        assert label == at % 3
        assert torch.equal(image, expected[by_name[f"{at:04}"]][0])


@pytest.mark.shows("WebDataset's tar files are read in any order, each sample once")
def test_a_loader_shuffles_them_and_keeps_what_is_made(tmp_path: Path) -> None:
    dataset = ImageTar([tar_of(tmp_path / "a.tar", MEMBERS)], RECIPE)
    time.sleep(2 * prefix_cache._YOUNG_S)  # a file that was written a moment ago is not yet known by its time
    loader = hetstream.DataLoader(dataset, 4, shuffle=True, seed=1, cache=f"{tmp_path}/cache:100M")
    epochs = [[tuple(image.numpy().tobytes() for image in images) for images, _ in loader] for _ in range(3)]
    images = {dataset[at][0].numpy().tobytes() for at in range(6)}
    assert len(images) == 6
    assert all({image for batch in batches for image in batch} == images for batches in epochs)
    assert loader.stats()["cache_hits"] == 12
    training = hetstream.DataLoader(ImageTar([tmp_path / "a.tar"], TrainingRecipe(16), mean=(1, 1, 1)), 6)
    assert next(iter(training))[0].dtype == torch.float32


def test_names_of_members(tmp_path: Path) -> None:
    """In folders, of other endings, not side by side, long, and as odd bytes."""
    long, odd = "x" * 150, "\udcff\n"
    members = [("d.1/", b""), (f"d.1/{long}.JPG", photograph(0)), ("b.json", b"{}"), (f"{odd}.png", photograph(1))]
    members += [("b.jpeg", photograph(2)), ("b.cls", b" 12\n"), (f"{odd}.cls", b"0"), (f"d.1/{long}.cls", b"3")]
    found = ImageTar([tar_of(tmp_path / "a.tar", members[1:], tarfile.GNU_FORMAT)], RECIPE)
    assert found.samples == [(f"d.1/{long}", 3), ("b", 12), (odd, 0)]
    assert [ImageTar([tmp_path / "a.tar"], RECIPE, label="")[at][1] for at in range(3)] == [0, 0, 0]


def cut(length: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:length]


@pytest.mark.shows("a damaged tar file is an error, not an end of the data")
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (cut(0), "cannot be read as a tar file: empty file"),
        (cut(700), "unexpected end of data"),
        (cut(1024), "damaged or cut off at byte 1,024, behind 1 members"),
        (cut(1024 + 100), "damaged or cut off at byte 1,024"),
        (lambda data: data[:1024] + b"?" * 512 + data[1536:], "damaged or cut off at byte 1,024"),
        (lambda data: data + data, "no end mark, or more behind it"),
        (lambda data: b"no tar file" * 100, "cannot be read as a tar file"),
        (lambda data: data.replace(b"0001.jpg", b"0001.txt"), "cannot be read|damaged or cut off"),
    ],
)
def test_damaged_tar_files(tmp_path: Path, change: Callable[[bytes], bytes], words: str) -> None:
    path = tar_of(tmp_path / "a\n.tar", MEMBERS)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(SourceError, match=words) as caught:
        ImageTar([path], RECIPE)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ([("a.jpg", b"")], "sample 'a' has jpg: it needs one image, and .cls"),
        ([("a.cls", b"1")], "sample 'a' has cls: it needs one image"),
        ([("a.jpg", b""), ("a.png", b""), ("a.cls", b"1")], "sample 'a' has jpg, png, cls"),
        ([("a.jpg", b""), ("a.cls", b"one")], "has the label b'one'"),
        ([("a.cls", b"1"), ("a.CLS", b"1")], "member 'a.CLS' is there twice"),
        ([], "holds no sample"),
    ],
)
def test_samples_that_are_not_whole(tmp_path: Path, members: list[tuple[str, bytes]], words: str) -> None:
    with pytest.raises(SourceError, match=re.escape(words)):
        ImageTar([tar_of(tmp_path / "a.tar", members)], RECIPE)


def test_a_photograph_that_is_damaged_is_named(tmp_path: Path) -> None:
    found: Any = ImageTar([tar_of(tmp_path / "a.tar", [("k.jpg", photograph(0)[:300]), ("k.cls", b"1")])], RECIPE)
    with pytest.raises(SourceError, match=r"a\.tar, sample 'k': .*Replace or remove"):
        found[0]
    (tmp_path / "a.tar").unlink()
    with pytest.raises(SourceError, match="sample 'k': cannot be read: No such file"):
        found[0]
    with pytest.raises(SourceError, match=r"cannot be read as a tar file: .*No such file"):
        ImageTar([tmp_path / "a.tar"], RECIPE)
