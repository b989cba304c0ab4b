"""Train with Lightning on data of a hetstream loader; `--die-after STEP` kills it there, after that step's save."""

import argparse
import hashlib
import os
import signal
import sys

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment

from checkpoint.integrations.lightning import FlashCheckpointCallback
from mpi_dataworkers import DataLoader


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.full((4,), index / 40), torch.tensor(float(index % 3))


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
        self.seen = []

    def training_step(self, batch, batch_idx):
        values, target = batch
        self.seen.append(round(float(values.sum()), 3))
        return torch.nn.functional.mse_loss(self.layers(values)[:, 0], target)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Die(pl.Callback):
    def __init__(self, step, number, ranks):
        self.step, self.number, self.ranks = step, number, ranks

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == self.step and trainer.global_rank in self.ranks:
            os.kill(os.getpid(), self.number)


parser = argparse.ArgumentParser()
parser.add_argument("directory")
parser.add_argument("--die-after", type=int, default=-1)
parser.add_argument("--number", type=int, default=signal.SIGKILL)
parser.add_argument("--die-ranks", type=int, nargs="*", default=[0, 1])
parser.add_argument("--interval", type=int, default=1)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--devices", type=int, default=1)
parser.add_argument("--plain", action="store_true", help="torch's own loader")
args = parser.parse_args()
pl.seed_everything(3)
module = Module()
loader = DataLoader(Numbers(), batch_size=4, shuffle=True, seed=1)
if args.plain:
    loader.close()
    loader = torch.utils.data.DataLoader(Numbers(), batch_size=4, shuffle=True)
trainer = pl.Trainer(
    max_epochs=args.epochs,
    callbacks=[
        FlashCheckpointCallback(args.directory, interval=args.interval),
        Die(args.die_after, args.number, args.die_ranks),
    ],
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    logger=False,
    # Else Lightning looks for MPI by initialising it, which a killed program leaves in /dev/shm.
    plugins=[LightningEnvironment()],
    accelerator="cpu",
    devices=args.devices,
    strategy="ddp" if args.devices > 1 else "auto",
)
trainer.fit(module, loader)
if not args.plain:
    loader.close()
weights = b"".join(one.detach().numpy().tobytes() for one in module.state_dict().values())
print("RESULT", hashlib.sha256(weights).hexdigest(), trainer.global_step, *module.seen)
sys.stdout.flush()
