"""Write the digits that come with scikit-learn (1,797 scans of 8 x 8 pixels) to HDF5: `python prepare.py digits.h5`.

The file has groups `train` and `test`, each with `images` (uint8, N x 8 x 8), `labels` (int64, N) and `ids` (int64, N:
the position in scikit-learn's set, so that every sample can be told from every other).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import h5py
import numpy as np
from sklearn.datasets import load_digits

NUM_TEST = 360


def prepare(path: Path) -> None:
    digits = load_digits()
    # scikit-learn's pixels are 0 to 16.
    images = np.round(digits.images * (255 / 16)).astype(np.uint8)
    labels = digits.target.astype(np.int64)
    order = np.random.default_rng(0).permutation(len(labels))
    with h5py.File(path, "w") as file:
        for split, ids in (("test", np.sort(order[:NUM_TEST])), ("train", np.sort(order[NUM_TEST:]))):
            file[f"{split}/images"] = images[ids]
            file[f"{split}/labels"] = labels[ids]
            file[f"{split}/ids"] = ids


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write scikit-learn's digits to HDF5.")
    parser.add_argument("path", type=Path, nargs="?", default=Path("digits.h5"))
    prepare(parser.parse_args().path)
