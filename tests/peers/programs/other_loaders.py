"""Programs whose libraries put something of their own around torch's DataLoader, unmodified; prints what they gave.

python other_loaders.py torchio | monai_threads | megatron FOLDER
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch


def digest(number: int, batch: Any) -> None:
    found = hashlib.blake2b(digest_size=8)
    for tensor in batch if isinstance(batch, list | tuple) else [batch]:
        found.update(np.ascontiguousarray(tensor))
    print("batch", number, found.hexdigest(), flush=True)


def torchio(folder: Path) -> None:
    """A queue of patches, which a loader of whole volumes fills."""
    import nibabel
    import torchio as tio

    rng = np.random.default_rng(0)
    for case in range(12):
        if not (folder / f"{case}.nii").exists():
            volume = nibabel.Nifti1Image(rng.normal(size=(24, 24, 24)).astype(np.float32), np.eye(4))
            nibabel.save(volume, folder / f"{case}.nii")
    subjects = [tio.Subject(image=tio.ScalarImage(folder / f"{case}.nii"), case=case) for case in range(12)]
    transform = tio.Compose([tio.ZNormalization(), tio.RandomNoise(), tio.RandomFlip(axes=(0, 1))])
    dataset = tio.SubjectsDataset(subjects, transform=transform)
    torch.manual_seed(3)
    queue = tio.Queue(dataset, 40, 8, tio.data.UniformSampler(12), num_workers=2)
    for epoch in range(3):
        for number, batch in enumerate(tio.SubjectsLoader(queue, batch_size=4, num_workers=0)):
            digest(1000 * epoch + number, [batch["image"][tio.DATA], batch["case"]])


def monai_threads(folder: Path) -> None:
    """A thread that is a few batches ahead of a loader, as MONAI's tutorials have it."""
    from monai.data import CacheDataset, DataLoader, ThreadBuffer
    from monai.transforms import Compose, EnsureTyped, RandFlipd, RandGaussianNoised
    from monai.utils import set_determinism

    set_determinism(3)
    items = [{"image": np.full((1, 8, 8), case, np.float32), "case": case} for case in range(64)]
    noisy = [RandFlipd(["image"], prob=0.5), RandGaussianNoised(["image"], prob=0.5), EnsureTyped(["image"])]
    dataset = CacheDataset(items, Compose(noisy), progress=False)
    loader = DataLoader(dataset, batch_size=4, shuffle=True, num_workers=2)
    for epoch in range(3):
        for number, batch in enumerate(ThreadBuffer(loader, buffer_size=3)):
            digest(1000 * epoch + number, [batch["image"], batch["case"]])


class PretrainingSampler:
    """Indices of batches in order from where a run was, as Megatron's samplers give them."""

    def __init__(self, total: int, consumed: int, batch_size: int) -> None:
        self.total, self.consumed, self.batch_size = total, consumed, batch_size

    def __len__(self) -> int:
        return self.total

    def __iter__(self) -> Iterator[list[int]]:
        for start in range(self.consumed, self.total - self.batch_size + 1, self.batch_size):
            yield [*range(start, start + self.batch_size)]


def megatron(folder: Path) -> None:
    """Two corpora on memory maps, blended, read from the middle."""
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    rng = np.random.default_rng(0)
    for name in ("first", "second"):
        if not (folder / f"{name}.idx").exists():
            builder = IndexedDatasetBuilder(str(folder / f"{name}.bin"), dtype=np.int32)
            for _ in range(300):
                words = torch.from_numpy(rng.integers(1, 500, rng.integers(20, 90)))
                builder.add_document(words, [len(words)])
            builder.finalize(str(folder / f"{name}.idx"))

    config = GPTDatasetConfig(
        random_seed=5,
        sequence_length=64,
        blend=([str(folder / "first"), str(folder / "second")], [0.3, 0.7]),
        split="90,10,0",
        path_to_cache=str(folder / "cache"),
        tokenizer=Tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )
    train, _, _ = BlendedMegatronDatasetBuilder(GPTDataset, [480, 40, 0], lambda: True, config).build()
    sampler: Any = PretrainingSampler(len(train), 48, 4)
    loader = torch.utils.data.DataLoader(train, batch_sampler=sampler, num_workers=2, persistent_workers=True)
    for number, batch in enumerate(loader):
        digest(number, [batch["tokens"], batch["labels"], batch["loss_mask"]])


class Tokenizer:
    """What Megatron's datasets ask of one."""

    eod, pad, bos, eos = 0, 0, 1, 2
    unique_identifiers: ClassVar = {"kind": "numbers"}
    vocab_size = 512


if __name__ == "__main__":
    torch.set_num_threads(1)
    globals()[sys.argv[1]](Path(sys.argv[2]))
