"""Train a network of torchvision on ImageNet, or on any folder with `train` and `val`: with DDP where there are ranks.

`python train.py --data imagenet`, `hetstream run python train.py --data imagenet`, or on Slurm by `imagenet.sbatch`.
Data workers send bytes, a quarter of what floats would be; the GPU makes normalised floats of them.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torchvision
from torch import distributed, nn

from hetstream import DataLoader, EvaluationRecipe, ImageFolder, TrainingRecipe

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Normalised(nn.Module):
    """A network for batches as they come: uint8, NHWC."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("mean", 255 * torch.tensor(MEAN).view(3, 1, 1))
        self.register_buffer("deviation", 255 * torch.tensor(STD).view(3, 1, 1))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        # A view: NHWC in memory is what torch calls channels_last.
        return self.network((images.permute(0, 3, 1, 2) - self.mean) / self.deviation)


def accuracy(model: nn.Module, loader: DataLoader, device: torch.device) -> float:
    """Of all ranks; each has its part of the images."""
    model.eval()
    counts = torch.zeros(2, device=device)
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16):
        for images, labels in loader:
            found = model(images.to(device)).argmax(1)
            counts += torch.stack([(found == labels.to(device)).sum(), torch.tensor(len(labels), device=device)])
    if distributed.is_initialized():
        distributed.all_reduce(counts)
    return float(counts[0] / counts[1])


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a network of torchvision on a folder of photographs.")
    parser.add_argument("--data", type=Path, default=Path("imagenet"), help="a folder with `train` and `val`")
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--epochs", type=int, default=90)
    parser.add_argument("--batch-size", type=int, default=256, help="of a rank")
    parser.add_argument("--size", type=int, default=224, help="edge of an image in pixels")
    args = parser.parse_args()

    places = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0}
    rank, ranks, local = (int(os.environ.get(name, alone)) for name, alone in places.items())
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if ranks > 1:
        distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")

    train = ImageFolder(args.data / "train", TrainingRecipe(args.size))
    val = ImageFolder(args.data / "val", EvaluationRecipe(args.size, args.size * 8 // 7))
    network = torchvision.models.get_model(args.model, num_classes=len(train.classes))
    model: nn.Module = Normalised(network).to(device, memory_format=torch.channels_last)
    if ranks > 1:
        model = nn.parallel.DistributedDataParallel(model)
    learning_rate = 0.1 * args.batch_size * ranks / 256
    optimizer = torch.optim.SGD(model.parameters(), learning_rate, momentum=0.9, weight_decay=5e-5, nesterov=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    given = {"batch_size": args.batch_size, "seed": 1, "num_workers": 2, "pin_memory": device.type == "cuda"}
    with DataLoader(train, shuffle=True, drop_last=True, **given) as batches, DataLoader(val, **given) as evaluated:
        for epoch in range(args.epochs):
            batches.set_epoch(epoch)
            model.train()
            loss = torch.zeros(())
            for images, labels in batches:
                with torch.autocast(device.type, torch.bfloat16):
                    found = model(images.to(device, non_blocking=True))
                    loss = nn.functional.cross_entropy(found, labels.to(device), label_smoothing=0.1)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            schedule.step()
            right = accuracy(model, evaluated, device)
            if rank == 0:
                print(f"epoch {epoch + 1}/{args.epochs}: loss {loss.item():.3f}, right {right:.1%}", flush=True)
    if ranks > 1:
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
