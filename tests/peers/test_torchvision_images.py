"""hetstream.ImageFolder against torchvision v2 on Pillow: the same classes, crops and pixels of a seed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from hetstream import EvaluationRecipe, ImageFolder, TrainingRecipe

JPEGS = Path(__file__).resolve().parents[3] / "shared" / "data" / "jpeg"
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@pytest.fixture(scope="module")
def torchvision() -> Any:
    before = sys.modules.get("torchvision")
    spec = importlib.util.spec_from_file_location("torchvision", Path(__file__).parent / "programs" / "torchvision.py")
    assert spec is not None
    assert spec.loader is not None
    try:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    except ModuleNotFoundError:
        pytest.skip("the packages that peers' tests need are not installed")
    import torchvision
    import torchvision.datasets
    import torchvision.transforms.v2

    yield torchvision
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        del sys.modules[name]
    if before is not None:
        sys.modules["torchvision"] = before


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    photographs = sorted(JPEGS.glob("*.JPEG"))
    for number, path in enumerate(photographs):
        (folder / f"class {number % 7}").mkdir(exist_ok=True)
        (folder / f"class {number % 7}" / path.name).symlink_to(path)
    draw = np.random.default_rng(0)
    for number in range(40):
        place = folder / "made" / str(number % 3)
        place.mkdir(parents=True, exist_ok=True)
        width, height = draw.integers(1, 700, 2).tolist()
        coarse = Image.fromarray(draw.integers(0, 256, (height // 8 + 2, width // 8 + 2, 3), np.uint8))
        options = {"subsampling": number % 3, "progressive": number % 5 == 0}
        coarse.resize((width, height)).save(place / f"{number}.jpg", **options)
    return folder


@pytest.mark.shows("ImageFolder gives torchvision's samples")
@pytest.mark.parametrize("is_float", [False, True])
@pytest.mark.parametrize("is_training", [False, True])
def test_a_seed_gives_torchvisions_samples(torchvision: Any, root: Path, is_float: bool, is_training: bool) -> None:
    v2 = torchvision.transforms.v2
    if is_training:
        recipe: Any = TrainingRecipe(224)
        steps = [v2.RandomResizedCrop(224), v2.RandomHorizontalFlip()]
    else:
        recipe = EvaluationRecipe(224, 256)
        steps = [v2.Resize(256), v2.CenterCrop(224)]
    steps.append(v2.ToImage())
    options: dict[str, Any] = {"layout": "NCHW"}
    if is_float:
        steps += [v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
        options = {"mean": MEAN, "std": STD}
    theirs = torchvision.datasets.ImageFolder(root, v2.Compose(steps))
    ours = ImageFolder(root, recipe, **options)
    assert (ours.classes, ours.class_to_idx, ours.targets) == (theirs.classes, theirs.class_to_idx, theirs.targets)
    assert ours.samples == theirs.samples
    torch.manual_seed(11)
    expected = [theirs[index] for index in range(len(theirs))]
    torch.manual_seed(11)
    for index, (image, label) in enumerate(ours.__getitems__(range(len(ours)))):
        assert torch.equal(image, expected[index][0]), ours.samples[index]
        assert label == expected[index][1]
