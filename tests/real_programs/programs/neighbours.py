"""Batches of sampled neighbourhoods, as torch_geometric's NodeLoader makes them.

The dataset is only the numbers of the seed nodes; the loader's own collate function samples their neighbours, and its
`_get_iterator` joins them with their features in the training process, unless the user wants that in the workers.
"""

from dataclasses import dataclass

import ledger
import torch
from torch.utils.data import DataLoader

NUM_NODES = 240
NUM_NEIGHBOURS = 3


class Graph:
    """Every node has as many edges to later nodes, on a ring."""

    def __init__(self):
        self.targets = (torch.arange(NUM_NODES)[:, None] * 7 + torch.arange(1, 12)) % NUM_NODES
        self.features = torch.arange(NUM_NODES * 4, dtype=torch.float32).reshape(NUM_NODES, 4)


@dataclass
class Sampled:
    """What sampling gives: numbers of nodes, nothing of their features."""

    seeds: torch.Tensor
    nodes: torch.Tensor


@dataclass
class Subgraph:
    """What the training loop wants."""

    seeds: torch.Tensor
    nodes: torch.Tensor
    features: torch.Tensor


class JoiningIterator:
    """Joins what another iterator gives, in the process that asks."""

    def __init__(self, iterator, join):
        self.iterator, self.join = iterator, join

    def __iter__(self):
        return self

    def _reset(self, loader, first_iter=False):
        self.iterator._reset(loader, first_iter)

    def __len__(self):
        return len(self.iterator)

    def __next__(self):
        return self.join(next(self.iterator))


class NeighbourLoader(DataLoader):
    def __init__(self, graph, join_in_worker, **options):
        self.graph, self.join_in_worker = graph, join_in_worker
        super().__init__(range(NUM_NODES), collate_fn=self.collate_fn, **options)

    def collate_fn(self, seeds):
        seeds = torch.tensor(seeds)
        edges = torch.randint(self.graph.targets.shape[1], (len(seeds), NUM_NEIGHBOURS))
        nodes = torch.cat([seeds, self.graph.targets[seeds].gather(1, edges).flatten()]).unique()
        sampled = Sampled(seeds, nodes)
        return self.join(sampled) if self.join_in_worker else sampled

    def join(self, sampled):
        return Subgraph(sampled.seeds, sampled.nodes, self.graph.features[sampled.nodes])

    def _get_iterator(self):
        iterator = super()._get_iterator()
        return iterator if self.join_in_worker else JoiningIterator(iterator, self.join)


def main():
    ledger.seed(1)
    graph = Graph()
    options = {"batch_size": 16, "shuffle": True, "num_workers": 2}
    loaders = {
        "joined in the trainer": NeighbourLoader(graph, False, **options),
        "joined in the worker": NeighbourLoader(graph, True, **options),
        "kept workers": NeighbourLoader(graph, False, persistent_workers=True, **options),
    }
    for phase, loader in loaders.items():
        for _ in range(2):
            iterator = iter(loader)
            ledger.fact("length", len(iterator))
            for batch in iterator:
                ledger.step(phase, batch.seeds, batch)
    ledger.end()


if __name__ == "__main__":
    main()
