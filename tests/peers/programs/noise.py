"""Programs of other projects' users whose samples draw random numbers: noise.py NAME FILE.

Each writes runs to FILE, two lists of numbers of which a reader asks whether they are equal, or with two ranks one.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

RANK = int(os.environ.get("RANK", "0"))


class Samples(Dataset[Any]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        return torch.rand(3) + 0.5 * np.random.rand()


class Labelled(Samples):
    def __getitem__(self, index: int) -> Any:
        return {"x": super().__getitem__(index), "labels": torch.tensor(1.0)}


class Model(torch.nn.Module):
    """Notes what it gets."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(3, 1)
        self.seen: list[Any] = []

    def forward(self, x: Any, labels: Any = None, **_: Any) -> Any:
        self.seen.append(x.tolist())
        return {"loss": ((self.linear(x).squeeze(-1) - labels) ** 2).mean()}


def _trainer(directory: str, **options: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    quiet: dict[str, Any] = {"report_to": [], "disable_tqdm": True, "logging_strategy": "no", "use_cpu": True}
    loading = {"dataloader_num_workers": 2, "per_device_train_batch_size": 4, "remove_unused_columns": False}
    return Trainer(Model(), TrainingArguments(directory, **quiet | loading | options), train_dataset=Labelled())


def transformers_ranks() -> list[Any]:
    with tempfile.TemporaryDirectory() as directory:
        trainer = _trainer(directory, max_steps=2, save_strategy="no", ddp_backend="gloo")
        trainer.train()
        return [trainer.model.seen]


def transformers_resume() -> list[Any]:
    with tempfile.TemporaryDirectory() as directory:
        whole, resumed = (_trainer(directory, num_train_epochs=3, save_strategy="epoch") for _ in range(2))
        whole.train()
        resumed.train(resume_from_checkpoint=f"{directory}/checkpoint-4")
        weights = [trainer.model.linear.weight.tolist() for trainer in (whole, resumed)]
        return [[whole.model.seen[4:], weights[0]], [resumed.model.seen, weights[1]]]


def lightning_ranks() -> list[Any]:
    from functools import partial

    from lightning.fabric.utilities.seed import pl_worker_init_function

    torch.manual_seed(0)
    init = partial(pl_worker_init_function, rank=RANK)
    return [[batch.tolist() for batch in DataLoader(Samples(), 4, num_workers=2, worker_init_fn=init)]]


def timm_ranks() -> list[Any]:
    """timm's function, from its file: the package needs torchvision, which has no build for every torch."""
    places = importlib.util.find_spec("timm")
    assert places is not None
    assert places.submodule_search_locations is not None
    tree = ast.parse((Path(places.submodule_search_locations[0]) / "data" / "loader.py").read_text())
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "_worker_init"]
    import random
    from collections.abc import Callable

    names = {"torch": torch, "np": np, "random": random, "Callable": Callable}
    exec(compile(ast.Module(found, []), "timm/data/loader.py", "exec"), names)
    torch.manual_seed(42 + RANK)  # timm.utils.random_seed(seed, rank)
    loader = DataLoader(Samples(), 4, num_workers=2, worker_init_fn=names["_worker_init"], persistent_workers=True)
    return [[batch.tolist() for _ in range(2) for batch in loader]]


def ignite_resume() -> list[Any]:
    from ignite.engine import Events
    from ignite.engine.deterministic import DeterministicEngine

    def run(max_epochs: int, state: Any = None) -> tuple[list[Any], Any]:
        seen: list[Any] = []
        engine = DeterministicEngine(lambda engine, batch: seen.append([engine.state.epoch, batch.tolist()]))
        if state is not None:
            engine.load_state_dict(state)
        torch.manual_seed(7)  # from which the engine draws the seed that it keeps
        states: list[Any] = []
        engine.add_event_handler(Events.EPOCH_COMPLETED, lambda: states.append(dict(engine.state_dict())))
        loader = DataLoader(Samples(), 4, shuffle=True, num_workers=2)
        engine.run(loader, max_epochs=max_epochs)
        return seen, states[0]

    whole, state = run(3)
    resumed, _ = run(3, state)
    return [[step for step in whole if step[0] > 1], resumed]


def monai_random_state() -> list[Any]:
    from monai.data import ArrayDataset
    from monai.transforms import Compose, RandGaussianNoise

    images = [np.zeros((1, 4, 4), dtype=np.float32) for _ in range(6)]
    dataset = ArrayDataset(images, Compose([RandGaussianNoise(prob=1.0, std=1.0)]))
    loader = DataLoader(dataset, 2, num_workers=2)
    runs = []
    for _ in range(2):
        dataset.set_random_state(seed=1234)
        runs.append([torch.as_tensor(batch).tolist() for batch in loader])
    return runs


def monai_inverse() -> list[Any]:
    from monai.data import DataLoader as MonaiLoader
    from monai.data import Dataset as MonaiDataset
    from monai.data import decollate_batch
    from monai.transforms import Compose, EnsureChannelFirstd, Invertd, RandFlipd, SpatialPadd

    images = [{"image": np.arange(12, dtype=np.float32).reshape(3, 4) + number} for number in range(4)]
    there = Compose(
        [
            EnsureChannelFirstd("image", channel_dim="no_channel"),
            RandFlipd("image", prob=0.5, spatial_axis=0),
            SpatialPadd("image", (6, 6)),
        ]
    )
    back = Invertd(keys="pred", transform=there, orig_keys="image", nearest_interp=False, to_tensor=True)
    found = []
    for batch in MonaiLoader(MonaiDataset(images, there), batch_size=2, num_workers=2):
        batch["pred"] = batch["image"] * 1.0
        found += [back(sample)["pred"][0].tolist() for sample in decollate_batch(batch)]
    return [found, [image["image"].tolist() for image in images]]


def monai_other_seeds() -> list[Any]:
    from monai.data import DataLoader as MonaiLoader
    from monai.data import Dataset as MonaiDataset
    from monai.transforms import Compose, RandGaussianNoise
    from monai.utils import set_determinism

    images = [np.zeros((1, 4, 4), dtype=np.float32) for _ in range(6)]
    runs = []
    for seed in (1, 1 + RANK):
        set_determinism(seed=seed)
        dataset = MonaiDataset(images, Compose([RandGaussianNoise(prob=1.0, std=1.0)]))
        runs.append([torch.as_tensor(batch).tolist() for batch in MonaiLoader(dataset, batch_size=2, num_workers=2)])
    return runs[1:] if "WORLD_SIZE" in os.environ else runs


if __name__ == "__main__":
    Path(f"{sys.argv[2]}.{RANK}").write_text(json.dumps(globals()[sys.argv[1]]()))
