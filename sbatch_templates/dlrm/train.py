"""Train a small DLRM on the rows of prepare.py. Data workers read the file and run the feature graph.

`hetstream run --data-workers 2 --embedding-servers 1 python train.py --data criteo.csv`, or without `hetstream run`:
then this process does it all, with the same batches and the same losses.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from torch import nn

from hetstream import DataLoader, EmbeddingBagCollection, EmbeddingBagConfig, RowWiseAdagrad, lookahead
from hetstream.mpi_dataworkers.features.batches import collate_rows
from hetstream.mpi_dataworkers.features.graph import FeatureGraph, dense
from hetstream.mpi_dataworkers.features.operators import BoxCox, Bucketize, Cast, Clamp, FillNull, SigridHash
from hetstream.mpi_dataworkers.features.transform import FeatureTransform
from hetstream.mpi_dataworkers.sources.tables import CsvDataset

COUNTS = [f"I{number}" for number in range(1, 14)]
CATEGORIES = [f"C{number}" for number in range(1, 27)]
BUCKETS = ["I2", "I5"]
COLUMNS = {"row": "int64", "label": "float32", **dict.fromkeys(COUNTS, "float32?"), **dict.fromkeys(CATEGORIES, "hex?")}
NUM_IDS, NUM_BUCKETS, WIDTH = 5000, 16, 16
# Less than the tables have, so that rows come and go where there is an embedding server: 4 MiB of 9.
CACHE_BYTES = 4 << 20


def features() -> FeatureGraph:
    """From raw columns to what the model takes."""
    counts = {name: dense(name, is_nullable=True) >> FillNull(0.0) for name in COUNTS}
    borders = [float(2**power) for power in range(NUM_BUCKETS - 1)]
    categories = [
        dense(name, "int64", is_nullable=True) >> FillNull(0) >> SigridHash(salt=salt, max_value=NUM_IDS)
        for salt, name in enumerate(CATEGORIES)
    ]
    return FeatureGraph.of(
        {
            "row": dense("row", "int64"),
            "label": dense("label"),
            "dense": [count >> Clamp(lower=0.0, upper=1e6) >> BoxCox(0.1) for count in counts.values()],
            "sparse": categories,
            "buckets": [counts[name] >> Bucketize(borders) >> Cast("int64") for name in BUCKETS],
        }
    )


class Dlrm(nn.Module):
    """Embeddings and a bottom network, their products in pairs, and a top network."""

    def __init__(self) -> None:
        super().__init__()
        sizes = dict.fromkeys(CATEGORIES, NUM_IDS) | dict.fromkeys(BUCKETS, NUM_BUCKETS)
        tables = [EmbeddingBagConfig(size, WIDTH, name, [name]) for name, size in sizes.items()]
        # Its rows are updated where `backward` ends; they are no parameters of the model.
        self.embeddings = EmbeddingBagCollection(tables, optimizer=RowWiseAdagrad(lr=0.03), cache_bytes=CACHE_BYTES)
        self.bottom = nn.Sequential(nn.Linear(len(COUNTS), 64), nn.ReLU(), nn.Linear(64, WIDTH), nn.ReLU())
        num_vectors = len(tables) + 1
        self.pairs = torch.triu_indices(num_vectors, num_vectors, offset=1)
        self.top = nn.Sequential(nn.Linear(WIDTH + self.pairs.shape[1], 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, dense: torch.Tensor, ids: dict[str, torch.Tensor]) -> torch.Tensor:
        bottom = self.bottom(dense)
        vectors = torch.stack([bottom, *self.embeddings(ids).values()], dim=1)
        products = vectors @ vectors.transpose(1, 2)
        return self.top(torch.cat([bottom, products[:, self.pairs[0], self.pairs[1]]], dim=1)).squeeze(1)


def ids_of(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Each feature's ids of a batch, [samples]."""
    ids = torch.cat([batch["sparse"], batch["buckets"]], dim=1)
    return dict(zip([*CATEGORIES, *BUCKETS], ids.unbind(1), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small DLRM on the rows of prepare.py.")
    parser.add_argument("--data", type=Path, default=Path("criteo.csv"))
    parser.add_argument("--ledger", type=Path, help="write the rows and the loss of each batch here, a JSON line each")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=512)
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.set_num_threads(1)  # the network is small: the other cores load
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Dlrm().to(device)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.03)
    dataset = CsvDataset(args.data, COLUMNS, group_rows=4096, cached_groups=16)
    loader = DataLoader(
        dataset,
        batch_size=args.batch_size,
        shuffle=True,
        seed=1,
        num_workers=2,
        collate_fn=collate_rows,
        batch_stage=FeatureTransform(features()),
    )
    ledger = open(args.ledger, "w") if args.ledger else None  # noqa: SIM115
    for epoch in range(args.epochs):
        began, losses = time.perf_counter(), []
        # Rows of the next 16 steps come while this one computes.
        for batch in lookahead(loader, {model.embeddings: ids_of}, steps=16):
            ids = {name: each.to(device) for name, each in ids_of(batch).items()}
            logits = model(batch["dense"].to(device), ids)
            loss = nn.functional.binary_cross_entropy_with_logits(logits, batch["label"].to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if ledger is not None:
                line = {"epoch": epoch, "rows": batch["row"].tolist(), "loss": losses[-1]}
                print(json.dumps(line), file=ledger, flush=True)
        seconds = time.perf_counter() - began
        mean = sum(losses) / len(losses)
        print(f"epoch {epoch + 1}/{args.epochs}: loss {mean:.4f}, {len(dataset) / seconds:,.0f} samples/s", flush=True)
    if ledger is not None:
        ledger.close()
    loader.close()


if __name__ == "__main__":
    main()
