"""Train a small network on the digits: an ordinary PyTorch program that knows nothing of hetstream.

`python train.py --data digits.h5` after `python prepare.py digits.h5`. Every sample is scaled up, turned, moved, bent
and given noise each time it is read, so that loading takes more CPU time than training, as with real images. It
measures how long the network computes: in the remaining time of its loop it waits.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import h5py
import numpy as np
import torch
from scipy import ndimage
from torch import nn
from torch.utils.data import DataLoader, Dataset

PIXELS = 80


def enlarge(image: np.ndarray) -> np.ndarray:
    """8 x 8 uint8 to 80 x 80 float32 in 0..1."""
    return np.clip(ndimage.zoom(image.astype(np.float32) / 255, PIXELS // 8, order=3), 0, 1)


def augment(image: np.ndarray) -> np.ndarray:
    """Turn, scale, move, bend elastically and add noise."""
    angle, scale = np.deg2rad(np.random.uniform(-15, 15)), np.random.uniform(0.85, 1.15)
    turn = scale * np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    middle = np.full(2, (PIXELS - 1) / 2)
    shift = np.random.uniform(-PIXELS / 12, PIXELS / 12, 2)
    grid = np.stack(np.meshgrid(np.arange(PIXELS), np.arange(PIXELS), indexing="ij")).reshape(2, -1)
    bend = [ndimage.gaussian_filter(np.random.uniform(-1, 1, (PIXELS, PIXELS)), sigma=4).ravel() for _ in range(2)]
    where = turn @ (grid - middle[:, None]) + middle[:, None] + shift[:, None] + 12 * np.stack(bend)
    bent = ndimage.map_coordinates(image, where, order=3).reshape(PIXELS, PIXELS)
    noise = np.random.normal(0, 0.05, bent.shape)
    return np.clip(bent + noise, 0, 1).astype(np.float32)


class Digits(Dataset):
    def __init__(self, path: Path, split: str, train: bool) -> None:
        self.path, self.split, self.train = path, split, train
        self.group = None
        with h5py.File(path) as file:
            self.length = len(file[split]["labels"])

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[np.ndarray, int, int]:
        if self.group is None:  # once in each worker process: an HDF5 handle does not survive a fork
            self.group = h5py.File(self.path)[self.split]
        image = enlarge(self.group["images"][index])
        if self.train:
            image = augment(image)
        return image[None], int(self.group["labels"][index]), int(self.group["ids"][index])


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 48, 5, stride=2, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(48, 96, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(96 * 10 * 10, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on the digits of prepare.py.")
    parser.add_argument("--data", type=Path, default=Path("digits.h5"))
    parser.add_argument(
        "--ledger", type=Path, help="write the sample ids of each batch to this file, a JSON line a batch"
    )
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--workers", type=int, default=1)
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.set_num_threads(1)  # the network is small: the other cores load
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # A core that loads, too, is another process's for part of the time.
    clock = time.perf_counter if device == "cuda" else time.thread_time
    model = network().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    common = {"batch_size": args.batch_size, "num_workers": args.workers, "persistent_workers": args.workers > 0}
    train_loader = DataLoader(Digits(args.data, "train", train=True), shuffle=True, **common)
    test_loader = DataLoader(Digits(args.data, "test", train=False), **common)
    ledger = open(args.ledger, "w") if args.ledger else None  # noqa: SIM115

    def record(split: str, epoch: int, ids: torch.Tensor) -> None:
        if ledger is not None:
            print(json.dumps({"split": split, "epoch": epoch, "ids": ids.tolist()}), file=ledger, flush=True)

    begin = time.perf_counter()
    for epoch in range(args.epochs):
        epoch_begin, computed_s, total_loss = time.perf_counter(), 0.0, 0.0
        model.train()
        for images, labels, ids in train_loader:
            step_begin = clock()
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            total_loss += loss.item()
            computed_s += clock() - step_begin
            record("train", epoch, ids)
        epoch_s = time.perf_counter() - epoch_begin
        model.eval()
        correct = 0
        with torch.no_grad():
            for images, labels, ids in test_loader:
                correct += (model(images.to(device)).argmax(1).cpu() == labels).sum().item()
                record("test", epoch, ids)
        accuracy, loss_mean = correct / len(test_loader.dataset), total_loss / len(train_loader)
        print(
            f"epoch {epoch + 1}/{args.epochs}: loss {loss_mean:.3f}, accuracy {accuracy:.4f}, "
            f"computed {computed_s:.1f} of {epoch_s:.1f} s",
            flush=True,
        )
    print(f"trained in {time.perf_counter() - begin:.1f} s", flush=True)
    if ledger is not None:
        ledger.close()


if __name__ == "__main__":
    main()
