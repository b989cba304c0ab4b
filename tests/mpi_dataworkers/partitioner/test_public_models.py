"""Models of public packages behind preprocessing in a forward: what can move does, and the losses are the same.

Each is skipped where its package is not installed; `make test-peers` installs three of them. For facebookresearch/dlrm
`HETSTREAM_DLRM` names a clone, and `pip install --no-deps deepctr-torch` has DeepFM and Wide&Deep.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, default_collate

from hetstream.mpi_dataworkers.partitioner.partition import partition

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),  # of the packages
]
LOADER_OPTIONS: dict[str, Any] = {}
STEPS, BATCH = 24, 4
IDS, NUMBERS = 5, 4
# Imports torchvision from where `make test-peers` has it, apart from other packages.
TORCHVISION = Path(__file__).parents[2] / "peers" / "programs" / "torchvision.py"


class Made(Dataset[tuple[torch.Tensor, ...]]):
    """Samples that are made from their number."""

    def __init__(self, make: Callable[[torch.Generator, int], tuple[torch.Tensor, ...]]) -> None:
        self._make = make

    def __len__(self) -> int:
        return STEPS * BATCH

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        return self._make(torch.Generator().manual_seed(index), index)


def _text(draws: torch.Generator, index: int) -> tuple[torch.Tensor, ...]:
    return torch.randint(0, 256, (24,), dtype=torch.uint8, generator=draws), torch.tensor(index % 2)


def _image(draws: torch.Generator, index: int) -> tuple[torch.Tensor, ...]:
    return torch.randint(0, 256, (3, 40, 44), dtype=torch.uint8, generator=draws), torch.tensor(index % 3)


def _edges(draws: torch.Generator, index: int) -> tuple[torch.Tensor, ...]:
    return (
        torch.randn(10, 6, generator=draws),
        torch.randint(0, 10, (2, 30), generator=draws),
        torch.tensor(float(index % 2)),
    )


def _clicks(draws: torch.Generator, index: int) -> tuple[torch.Tensor, ...]:
    numbers = torch.randn(NUMBERS, generator=draws) * 50
    if index % 3 == 0:
        numbers[index % NUMBERS] = float("nan")
    ids = torch.randint(-(10**12), 10**12, (IDS,), generator=draws)
    return ids, numbers, torch.tensor(float(index % 2))


class Bert(nn.Module):
    """Makes tokens and a mask of bytes, sorted, in front of transformers' BERT."""

    def __init__(self) -> None:
        super().__init__()
        bert = pytest.importorskip("transformers")
        settings = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
        self.net = bert.BertForSequenceClassification(bert.BertConfig(**settings, vocab_size=300))

    def forward(self, raw: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        ids = raw.long() + 10
        ids = torch.where(ids > 260, 0, ids)
        mask = (ids != 0).long()
        ids, order = ids.sort(dim=1, stable=True)
        loss: torch.Tensor = self.net(input_ids=ids, attention_mask=mask.gather(1, order), labels=labels).loss
        return loss


class Vision(nn.Module):
    """torchvision's v2 transforms in front of one of its models."""

    def __init__(self) -> None:
        super().__init__()
        if "torchvision" not in sys.modules:
            try:
                runpy.run_path(str(TORCHVISION))
            except ModuleNotFoundError:
                pytest.skip("torchvision is not there")
        torchvision = sys.modules["torchvision"]
        v2 = pytest.importorskip("torchvision.transforms.v2")
        self.transform = v2.Compose(
            [
                v2.Resize(36, antialias=True),
                v2.CenterCrop(32),
                v2.ToDtype(torch.float32, scale=True),
                v2.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
            ]
        )
        self.net = torchvision.models.mobilenet_v3_small(num_classes=3)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(self.transform(images)), labels)


class Graphs(nn.Module):
    """Joins graphs into one, without double edges, in front of PyG's convolutions."""

    def __init__(self) -> None:
        super().__init__()
        pyg = pytest.importorskip("torch_geometric.nn")
        self.first, self.second, self.pool = pyg.GCNConv(6, 8), pyg.GCNConv(8, 8), pyg.global_mean_pool
        self.head = nn.Linear(8, 1)

    def forward(self, nodes: torch.Tensor, edges: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        number, size = nodes.shape[:2]
        edges = (edges + torch.arange(number)[:, None, None] * size).transpose(0, 1).reshape(2, -1)
        edges = torch.unique(edges, dim=1)
        values = torch.nan_to_num(nodes.reshape(number * size, -1)).clamp(-2, 2)
        values = self.second(self.first(values, edges).relu(), edges).relu()
        pooled = self.pool(values, torch.arange(number).repeat_interleave(size))
        return nn.functional.mse_loss(self.head(pooled).squeeze(1), labels)


class Clicks(nn.Module):
    """Hashes ids and cleans numbers in front of a recommender."""

    def hashed(self, ids: torch.Tensor) -> torch.Tensor:
        return (ids * 2654435761) % 50

    def cleaned(self, numbers: torch.Tensor) -> torch.Tensor:
        return torch.nan_to_num(numbers).clamp(min=0).log1p()


class DeepCtr(Clicks):
    def __init__(self, name: str) -> None:
        super().__init__()
        inputs = pytest.importorskip("deepctr_torch.inputs")
        columns = [inputs.SparseFeat(f"C{number}", 50, embedding_dim=4) for number in range(IDS)]
        columns += [inputs.DenseFeat(f"I{number}", 1) for number in range(NUMBERS)]
        self.net = getattr(pytest.importorskip("deepctr_torch.models"), name)(columns, columns, device="cpu")

    def forward(self, ids: torch.Tensor, numbers: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        outputs = self.net(torch.cat([self.hashed(ids).float(), self.cleaned(numbers)], 1)).squeeze(1)
        return nn.functional.binary_cross_entropy(outputs, labels)


class Dlrm(Clicks):
    """facebookresearch/dlrm, as its script makes it."""

    def __init__(self) -> None:
        super().__init__()
        script = pytest.importorskip("dlrm_s_pytorch", reason="HETSTREAM_DLRM names no clone", exc_type=ImportError)
        tops = np.array([8 + (IDS + 1) * IDS // 2, 16, 1])
        tables, bottom = np.array([50] * IDS), np.array([NUMBERS, 16, 8])
        self.net = script.DLRM_Net(8, tables, bottom, tops, arch_interaction_op="dot", sigmoid_top=1)

    def forward(self, ids: torch.Tensor, numbers: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        offsets = torch.arange(ids.shape[0]).repeat(IDS, 1)
        outputs = self.net(self.cleaned(numbers), offsets, self.hashed(ids).t().contiguous()).squeeze(1)
        return nn.functional.binary_cross_entropy(outputs, labels)


MODELS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "bert": (Bert, _text),
    "torchvision": (Vision, _image),
    "torch_geometric": (Graphs, _edges),
    "dlrm": (Dlrm, _clicks),
    "deepfm": (lambda: DeepCtr("DeepFM"), _clicks),
    "wdl": (lambda: DeepCtr("WDL"), _clicks),
}


@pytest.fixture(autouse=True)
def _paths(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Where a clone of dlrm is, and what stands in for packages that its script imports."""
    for name in ("mlperf_logger", "sklearn", "sklearn.metrics", "torch.utils.tensorboard"):
        stands_in = MagicMock(__spec__=ModuleSpec(name, None))  # imported there, and not used here
        monkeypatch.setitem(sys.modules, name, stands_in)
    monkeypatch.syspath_prepend(os.environ.get("HETSTREAM_DLRM", "/nowhere"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    np.random.seed(0)  # of which dlrm makes its weights
    return make()


@pytest.mark.parametrize("name", MODELS)
def test_what_can_move_does_and_the_losses_stay(name: str, loaders: Callable[..., Any], three: Any) -> None:
    make, sample = MODELS[name]
    dataset = Made(sample)

    def losses(loader: Any, model: nn.Module) -> list[str]:
        torch.manual_seed(1)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        found = []
        for batch in loader:
            loss = model(*batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(float(loss.detach()).hex())
        return found

    made = seeded(make)
    expected = losses(loaders(dataset, batch_size=BATCH), made)
    model, loader = seeded(make), loaders(dataset, batch_size=BATCH, service=three.name)
    example = default_collate([dataset[number] for number in range(BATCH)])
    done = partition(model, example, loader=loader, offload="all")
    assert losses(loader, model) == expected
    assert done.decision is not None, done.reason
    assert done.counts.partitioned >= STEPS // 2, (done.reason, done.counts)
    print(name, len(done.decision.moved), done.reason)
