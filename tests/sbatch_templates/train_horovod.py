"""A Horovod program, as docs/horovod.md shows it: `train_horovod.py LOSSES BATCH_SIZE`; %r stands for the rank."""

import json
import sys
from pathlib import Path

import horovod.torch as hvd
import torch

from hetstream import DataLoader


class Points(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 320

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        value = torch.tensor([index / 320.0])
        return value, value.sin()


def main() -> None:
    hvd.init()
    torch.manual_seed(hvd.rank())
    model = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    losses = []
    with DataLoader(Points(), batch_size=int(sys.argv[2]) // hvd.size(), shuffle=True, seed=3) as loader:
        for _ in range(2):
            for values, sines in loader:
                optimizer.zero_grad()
                loss = torch.nn.functional.mse_loss(model(values), sines)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        stats = loader.stats()
    report = {"losses": losses, "size": hvd.size(), "local_steps": stats["local_steps"]}
    Path(sys.argv[1].replace("%r", str(hvd.rank()))).write_text(json.dumps(report))


if __name__ == "__main__":
    main()
