"""A program that changes its dataset between epochs: the transform, the resolution, labels that it teaches itself."""

import ledger
import torch
from torch.utils.data import DataLoader, Dataset


class Scenes(Dataset):
    def __init__(self):
        self.size = 4
        self.transform = torch.negative
        self.labels = torch.zeros(48)

    def __len__(self):
        return 48

    def __getitem__(self, index):
        return self.transform(torch.full((self.size,), float(index))), self.labels[index], index


class Blur:
    def __init__(self, strength):
        self.strength = strength

    def __call__(self, scene):
        return scene + self.strength * torch.randn(len(scene))


def main():
    ledger.seed(8)
    scenes = Scenes()
    loader = DataLoader(scenes, batch_size=4, shuffle=True, num_workers=2)
    for epoch in range(4):
        if epoch == 1:
            scenes.transform = Blur(0.5)
        if epoch == 2:
            scenes.size = 6
            scenes.transform.strength = 0.0
        if epoch == 3:
            scenes.labels[:24] = 1.0  # pseudo-labels, written into the same tensor
        for batch in loader:
            ledger.step(f"epoch {epoch}", batch[2], batch)
            ledger.fact("size and labels", [batch[0].shape[1], batch[1].tolist()])
    ledger.end()


if __name__ == "__main__":
    main()
