"""timm's train.py, unmodified, on pictures of the test's own: the same losses under the hook.

The script is one of the collected files, the packages are those of `make test-peers`; what is missing skips the test.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from tests.peers import suite_files

SCRIPT = suite_files.FOLDER / "pytorch-image-models" / "train.py"
TORCHVISION = Path(__file__).parent / "programs" / "torchvision.py"
_CLASSES, _PICTURES, _BATCH, _EPOCHS = 2, 12, 4, 2
# The loaders of an epoch, for training and for validation, have the pictures of both classes.
_STEPS = 2 * _EPOCHS * _CLASSES * _PICTURES // _BATCH


def make_pictures(folder: Path) -> None:
    """Pictures of two classes, as train.py reads them from folders."""
    generator = torch.Generator().manual_seed(0)
    for split in ("train", "validation"):
        for label in range(_CLASSES):
            place = folder / split / str(label)
            place.mkdir(parents=True)
            for number in range(_PICTURES):
                pixels = torch.randint(0, 256, (40, 40, 3), generator=generator, dtype=torch.uint8)
                Image.fromarray(pixels.numpy()).save(place / f"{number}.png")


def losses(directory: Path, name: str, *options: str, hetstream: tuple[str, ...] = ()) -> list[list[str]]:
    """What train.py writes into its summary of each epoch."""
    program = [sys.executable, str(SCRIPT), "--data-dir", str(directory / "pictures"), "--model", "resnet10t"]
    program += ["--device", "cpu", "--num-classes", str(_CLASSES), "--img-size", "32", "-b", str(_BATCH), "--no-aug"]
    program += ["--epochs", str(_EPOCHS), "--no-prefetcher", "--workers", "2", "--output", str(directory)]
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("HETSTREAM_", "SLURM_"))}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(directory)}
    done = subprocess.run(
        [*hetstream, *program, "--experiment", name, *options],
        cwd=directory, env=environment, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    with (directory / name / "summary.csv").open() as file:
        return list(csv.reader(file))


@pytest.mark.slow
def test_timms_training_script_has_the_same_losses_under_the_hook(tmp_path: Path) -> None:
    if not SCRIPT.is_file() or not Path(sys.prefix, "torchvision").is_dir():
        pytest.skip("timm's train.py is not collected, or the packages that peers' tests need are not installed")
    make_pictures(tmp_path / "pictures")
    (tmp_path / "torchvision").mkdir()
    shutil.copyfile(TORCHVISION, tmp_path / "torchvision" / "__init__.py")
    plain = losses(tmp_path, "plain")
    assert len(plain) == 1 + _EPOCHS
    summary = tmp_path / "summary.json"
    command = (sys.executable, "-m", "hetstream.slurm_plugin.cli", "run", "--data-workers", "2", "--json", str(summary))
    assert losses(tmp_path, "hook", hetstream=(*command, "--")) == plain
    loaders = json.loads(summary.read_text())["loaders"]
    assert sum(loader["steps"] - loader["local_steps"] for loader in loaders) > _STEPS // 2
