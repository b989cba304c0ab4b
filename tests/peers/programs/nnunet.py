"""nnU-Net as `nnUNetv2_train` has it, with short epochs and a small network, on balls in noise.

    python nnunet.py data CASES SIZE | train OPTIONS ...

The place of its data is in nnUNet_raw, nnUNet_preprocessed and nnUNet_results, the length of a step in STEP_S.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

_NAME, _NUMBER = "Dataset900_Balls", 900


def make_data(num_cases: int, size: int) -> None:
    import numpy as np
    import SimpleITK
    from nnunetv2.experiment_planning.plan_and_preprocess_api import (
        extract_fingerprints,
        plan_experiments,
        preprocess,
    )

    folder = Path(os.environ["nnUNet_raw"], _NAME)  # noqa: SIM112, its names
    for name in ("imagesTr", "labelsTr"):
        (folder / name).mkdir(parents=True)
    rng = np.random.default_rng(0)
    grid = np.stack(np.meshgrid(*[np.arange(size)] * 3, indexing="ij"))
    for case in range(num_cases):
        image, label = rng.normal(0, 20, (size,) * 3).astype(np.float32), np.zeros((size,) * 3, np.uint8)
        for kind in (1, 1, 2, 2):
            center, radius = rng.uniform(size * 0.2, size * 0.8, (3, 1, 1, 1)), rng.uniform(size * 0.08, size * 0.16)
            inside = ((grid - center) ** 2).sum(0) < radius**2
            image[inside] += 100 * kind
            label[inside] = kind
        for array, place in ((image, f"imagesTr/ball_{case:03}_0000"), (label, f"labelsTr/ball_{case:03}")):
            SimpleITK.WriteImage(SimpleITK.GetImageFromArray(array), str(folder / f"{place}.nii.gz"))
    described = {"channel_names": {"0": "CT"}, "labels": {"background": 0, "small": 1, "large": 2}}
    described |= {"numTraining": num_cases, "file_ending": ".nii.gz"}
    (folder / "dataset.json").write_text(json.dumps(described))
    extract_fingerprints([_NUMBER], num_processes=1)
    plan_experiments([_NUMBER])
    preprocess([_NUMBER], configurations=["3d_fullres"], num_processes=[1])
    make_small(Path(os.environ["nnUNet_preprocessed"], _NAME, "nnUNetPlans.json"))  # noqa: SIM112


def make_small(plans: Path) -> None:
    """Give the network few parameters."""
    planned = json.loads(plans.read_text())
    configuration = planned["configurations"]["3d_fullres"]
    configuration["patch_size"] = [32, 32, 32]
    configuration["architecture"]["arch_kwargs"] |= {
        "n_stages": 3,
        "features_per_stage": [4, 8, 16],
        "kernel_sizes": [[3] * 3] * 3,
        "strides": [[1] * 3, [2] * 3, [2] * 3],
        "n_conv_per_stage": [1] * 3,
        "n_conv_per_stage_decoder": [1] * 2,
    }
    plans.write_text(json.dumps(planned))


def train() -> None:
    import torch
    from nnunetv2.run.run_training import run_training_entry
    from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer

    begin, step = nnUNetTrainer.__init__, nnUNetTrainer.train_step

    def __init__(self: Any, plans: Any, configuration: Any, fold: Any, dataset_json: Any, device: Any = None) -> None:
        # Its constructor looks into its frame for what it was given, by these names.
        begin(self, plans, configuration, fold, dataset_json, device)
        self.num_epochs, self.num_iterations_per_epoch, self.num_val_iterations_per_epoch = 2, 30, 2
        self.save_every = 1

    def train_step(self: Any, batch: Any) -> Any:
        result = step(self, batch)
        print("STEP", self.current_epoch, float(result["loss"]), sorted(batch["keys"].tolist()), flush=True)
        time.sleep(float(os.environ.get("STEP_S", "0")))
        return result

    nnUNetTrainer.__init__, nnUNetTrainer.train_step = __init__, train_step
    torch.manual_seed(1)
    del sys.argv[1]
    run_training_entry()


if __name__ == "__main__":
    if sys.argv[1] == "data":
        make_data(int(sys.argv[2]), int(sys.argv[3]))
    else:
        train()
