"""Train with Lightning on data of a hetstream loader; `--die-after STEP` kills it there, after that step's save.

`--parts` adds what a checkpoint of Lightning has beside model, optimizers and loops: a GradScaler that doubles every
second step, a data module with a state, and hooks. A line PARTS says what of them is there when training begins.
"""

import argparse
import hashlib
import os
import signal
import sys

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import ModelParallelStrategy

from hetstream import DataLoader
from hetstream.base.process import told
from hetstream.checkpoint.integrations.lightning import FlashCheckpointCallback


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.full((4,), index / 40), torch.tensor(float(index % 3))


class Module(pl.LightningModule):
    def __init__(self, width):
        super().__init__()
        self.save_hyperparameters()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Dropout(0.3), torch.nn.Linear(width, 1))
        self.seen = []

    def training_step(self, batch, batch_idx):
        values, target = batch
        self.seen.append(round(float(values.sum()), 3))
        return torch.nn.functional.mse_loss(self.layers(values)[:, 0], target)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class ModuleWithHooks(Module):
    noted = None

    def on_save_checkpoint(self, checkpoint):
        checkpoint["noted"] = {"step": checkpoint["global_step"], "tensor": torch.ones(2)}

    def on_load_checkpoint(self, checkpoint):
        assert "layers.0.weight" in checkpoint["state_dict"], "all of the checkpoint is there"
        self.noted = checkpoint["noted"]["step"]

    def on_train_start(self):
        scaler = self.trainer.precision_plugin.scaler
        print("PARTS", scaler.get_scale(), self.trainer.datamodule.taken, self.noted, self.trainer.callbacks[-1].noted)


class Data(pl.LightningDataModule):
    taken = None

    def __init__(self, loader):
        super().__init__()
        self.loader = loader

    def train_dataloader(self):
        return self.loader

    def state_dict(self):
        return {"taken": self.trainer.global_step}

    def load_state_dict(self, state):
        self.taken = state["taken"]


class Hooks(pl.Callback):
    noted = None

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        checkpoint["of the callback"] = trainer.global_step

    def on_load_checkpoint(self, trainer, pl_module, checkpoint):
        self.noted = checkpoint["of the callback"]


class Die(pl.Callback):
    def __init__(self, step, number, ranks):
        self.step, self.number, self.ranks = step, number, ranks

    def on_train_batch_end(self, trainer, *_):
        planned.append(told())
        if trainer.global_step == self.step and trainer.global_rank in self.ranks:
            os.kill(os.getpid(), self.number)


parser = argparse.ArgumentParser()
parser.add_argument("directory")
parser.add_argument("--die-after", type=int, default=-1)
parser.add_argument("--number", type=int, default=signal.SIGKILL)
parser.add_argument("--die-ranks", type=int, nargs="*", default=[0, 1])
parser.add_argument("--interval", type=int, default=1)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--devices", type=int, default=1)
parser.add_argument("--plain", action="store_true", help="torch's own loader")
parser.add_argument("--width", type=int, default=8)
parser.add_argument("--parts", action="store_true")
parser.add_argument("--sharded", action="store_true", help="by the strategy")
args = parser.parse_args()
planned = []
pl.seed_everything(3)
module = ModuleWithHooks(args.width) if args.parts else Module(args.width)
loader = DataLoader(Numbers(), batch_size=4, shuffle=True, seed=1)
if args.plain:
    loader.close()
    loader = torch.utils.data.DataLoader(Numbers(), batch_size=4, shuffle=True)
plugins = [LightningEnvironment()]
if args.parts:
    plugins.append(MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)))
trainer = pl.Trainer(
    max_epochs=args.epochs,
    accumulate_grad_batches=args.accumulate,
    callbacks=[
        FlashCheckpointCallback(args.directory, interval=args.interval),
        Die(args.die_after, args.number, args.die_ranks),
        *([Hooks()] if args.parts else []),
    ],
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    logger=False,
    # Else Lightning looks for MPI by initialising it, which a killed program leaves in /dev/shm.
    plugins=plugins,
    accelerator="cpu",
    devices=args.devices,
    strategy=ModelParallelStrategy() if args.sharded else "ddp" if args.devices > 1 else "auto",
)
if args.parts:
    trainer.fit(module, datamodule=Data(loader))
else:
    trainer.fit(module, loader)
if not args.plain:
    loader.close()
weights = b"".join(one.detach().numpy().tobytes() for one in module.state_dict().values())
print("PLANNED", *(f"{one.done}/{one.total}" for one in planned), told())
print("RESULT", hashlib.sha256(weights).hexdigest(), trainer.global_step, *module.seen)
sys.stdout.flush()
