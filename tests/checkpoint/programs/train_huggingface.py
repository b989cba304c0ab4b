"""Train with the Hugging Face Trainer; `--die-after STEP` kills itself there, after that step's save."""

import argparse
import hashlib
import os
import signal
import sys

import torch
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_module
from transformers import Trainer, TrainerCallback, TrainingArguments

from hetstream.base.process import told
from hetstream.checkpoint.integrations.huggingface import FlashCheckpointCallback


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return {"values": torch.full((4,), index / 40), "labels": torch.tensor(float(index % 3))}


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
        self.seen = []

    def forward(self, values, labels):
        self.seen.append(round(float(values.sum()), 3))
        return {"loss": torch.nn.functional.mse_loss(self.layers(values)[:, 0], labels)}


class Die(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        planned.append(told())
        if state.global_step == die_after and int(os.environ.get("RANK", "0")) in given.die_ranks:
            os.kill(os.getpid(), number)


parser = argparse.ArgumentParser()
parser.add_argument("directory")
parser.add_argument("--die-after", type=int, default=-1)
parser.add_argument("--number", type=int, default=signal.SIGKILL)
parser.add_argument("--die-ranks", type=int, nargs="*", default=[0, 1])
parser.add_argument("--interval", type=int, default=1)
parser.add_argument("--sharded", choices=["FSDP", "DEEPSPEED", "tensor parallelism"], default="")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--accumulate", type=int, default=1)
given = parser.parse_args()
planned = []
die_after, number = given.die_after, given.number
if given.sharded == "FSDP":  # the Trainer wants several ranks for it, or a launcher
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
torch.manual_seed(3)
model = Model()
# First of all: of several ranks it makes them known to each other.
arguments = TrainingArguments(
    output_dir=given.directory + ".out",
    per_device_train_batch_size=4,
    num_train_epochs=given.epochs,
    gradient_accumulation_steps=given.accumulate,
    learning_rate=0.01,
    save_strategy="no",
    report_to="none",
    disable_tqdm=True,
    use_cpu=True,
    ddp_backend="gloo" if "RANK" in os.environ else None,
    logging_steps=1000,
    fsdp=True if given.sharded == "FSDP" else None,
)
flash = FlashCheckpointCallback(given.directory, interval=given.interval)
trainer = Trainer(model=model, args=arguments, train_dataset=Numbers(), callbacks=[flash, Die()])
if given.sharded == "DEEPSPEED":
    # DeepSpeed itself is not installed: what the Trainer's accelerator would say at the end of its start.
    AcceleratorState._shared_state["distributed_type"] = DistributedType.DEEPSPEED
    trainer.callback_handler.on_init_end(arguments, trainer.state, trainer.control)
if given.sharded == "tensor parallelism":
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    distribute_module(model, init_device_mesh("cpu", (1,)))
trainer.train(resume_from_checkpoint=flash.resume_folder())
weights = b"".join(one.detach().numpy().tobytes() for one in model.state_dict().values())
print("PLANNED", *(f"{one.done}/{one.total}" for one in planned), told())
print("RESULT", hashlib.sha256(weights).hexdigest(), trainer.state.global_step, *model.seen)
sys.stdout.flush()
