"""Lightning with two ranks that seeds its workers, saves a checkpoint after an epoch and goes on from it.

`seed_everything(workers=True)` has each worker derive its seeds from torch's and from its rank.
"""

import sys
import warnings
from pathlib import Path

import ledger
import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch.utils.data import DataLoader, Dataset


class Samples(Dataset):
    def __init__(self, first, num_samples):
        self.first, self.num_samples = first, num_samples

    def __len__(self):
        return self.num_samples

    def __getitem__(self, index):
        return torch.full((8,), index / self.num_samples) + 0.01 * torch.randn(8), self.first + index


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Dropout(0.1), torch.nn.Linear(4, 1))

    def training_step(self, batch, batch_idx):
        ledger.step(f"training, epoch {self.current_epoch}", batch[1], batch)
        return self.layers(batch[0]).square().mean()

    def validation_step(self, batch, batch_idx):
        ledger.step(f"validation, epoch {self.current_epoch}", batch[1], batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


def make_trainer(max_epochs):
    return pl.Trainer(
        max_epochs=max_epochs,
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        plugins=[LightningEnvironment()],
        val_check_interval=4,
        num_sanity_val_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def main(directory):
    warnings.simplefilter("ignore")
    pl.seed_everything(3, workers=True)
    training = DataLoader(Samples(0, 64), batch_size=4, shuffle=True, num_workers=2, persistent_workers=True)
    validation = DataLoader(Samples(1000, 16), batch_size=4, num_workers=2)
    trainer, path = make_trainer(1), directory / "after-an-epoch.ckpt"
    trainer.fit(Model(), training, validation)
    trainer.save_checkpoint(path)
    make_trainer(3).fit(Model(), training, validation, ckpt_path=path)
    ledger.end()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
