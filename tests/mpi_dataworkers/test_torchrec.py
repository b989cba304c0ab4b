"""torchrec's own KeyedJaggedTensor out of a feature graph: its content, from data workers, and into its embeddings.

torchrec is an optional peer: `make test-peers` installs it and runs these tests.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import hetstream
from hetstream.errors import ConfigError, EmbeddingError
from hetstream.mpi_dataworkers.features import operators as ops
from hetstream.mpi_dataworkers.features.batches import Jagged, JaggedBatch
from hetstream.mpi_dataworkers.features.graph import FeatureGraph, dense, jagged
from hetstream.mpi_dataworkers.features.transform import FeatureTransform

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torchrec and what it imports warn of their own deprecated uses
    torchrec = pytest.importorskip("torchrec", reason="torchrec is not installed (make test-peers has it)")

ROWS, BATCH_SIZE, NUM_IDS = 40, 8, 50
LOADER_OPTIONS: dict[str, Any] = {"batch_size": BATCH_SIZE, "shuffle": True, "seed": 5}
GRAPH = FeatureGraph.of(
    {
        "sparse": [
            jagged("clicked") >> ops.FirstX(3) >> ops.SigridHash(1, NUM_IDS),
            (jagged("clicked") >> ops.Ngram(2) >> ops.SigridHash(2, NUM_IDS)).named("pairs"),
            dense("page", "int64") >> ops.SigridHash(3, NUM_IDS),
        ],
        "row": dense("row", "int64"),
    }
)


def collate(rows: list[int]) -> dict[str, Any]:
    """Lists of 0 to 4 ids, some batches begin with empty ones."""
    return {
        "row": torch.tensor(rows),
        "page": torch.tensor([row * 7919 for row in rows]),
        "clicked": Jagged(
            torch.cat([torch.arange(row % 5) * 31 + row for row in rows]), torch.tensor([row % 5 for row in rows])
        ),
    }


def assert_same(keyed: Any, batch: JaggedBatch) -> None:
    assert isinstance(keyed, torchrec.KeyedJaggedTensor)
    assert tuple(keyed.keys()) == batch.keys
    assert torch.equal(keyed.values(), batch.values)
    assert torch.equal(keyed.lengths(), batch.lengths)
    for key in batch.keys:
        own = batch.of(key)
        assert torch.equal(keyed[key].values(), own.values)
        assert torch.equal(keyed[key].lengths(), own.lengths)


@pytest.mark.parametrize("options", [{}, {"native": True}], ids=["torch", "native"])
def test_it_has_the_values_and_the_lengths_of_each_feature(options: dict[str, bool]) -> None:
    for rows in (range(BATCH_SIZE), [0, 5, 10], [7]):
        batch = collate(list(rows))
        keyed = FeatureTransform(GRAPH, torchrec=True, **options)(batch)["sparse"]
        assert_same(keyed, FeatureTransform(GRAPH, **options)(batch)["sparse"])
        assert keyed.stride() == len(rows)


def test_data_workers_send_it(three: Any, loaders: Any) -> None:
    def batches(transform: FeatureTransform, **options: Any) -> list[dict[str, Any]]:
        return list(loaders([*range(ROWS)], batch_stage=transform, collate_fn=collate, **options))

    plain = batches(FeatureTransform(GRAPH))
    made = batches(FeatureTransform(GRAPH, torchrec=True), service=three.name)
    assert len(made) == ROWS // BATCH_SIZE
    for batch, expected in zip(made, plain, strict=True):
        assert torch.equal(batch["row"], expected["row"])
        assert_same(batch["sparse"], expected["sparse"])


@pytest.mark.shows("jagged features come out as a KeyedJaggedTensor, which torchrec looks up")
def test_torchrec_looks_its_ids_up() -> None:
    """Sums of the rows of embedding tables, as one computes them by hand."""
    torch.manual_seed(0)
    keys = ("clicked", "pairs", "page")
    tables = [
        torchrec.EmbeddingBagConfig(name=key, feature_names=[key], num_embeddings=NUM_IDS, embedding_dim=4)
        for key in keys
    ]
    model = torchrec.EmbeddingBagCollection(tables=tables, device=torch.device("cpu"))
    batch = collate(list(range(BATCH_SIZE)))
    found = model(FeatureTransform(GRAPH, torchrec=True)(batch)["sparse"])
    own = FeatureTransform(GRAPH)(batch)["sparse"]
    for key in keys:
        values, lengths = own.of(key)
        ends = lengths.cumsum(0)
        rows = model.embedding_bags[key].weight[values]
        sums = [rows[end - length : end].sum(0) for end, length in zip(ends, lengths, strict=True)]
        torch.testing.assert_close(found[key], torch.stack(sums))


def test_features_of_their_own_numbers_of_samples_and_other_dtypes_are_refused() -> None:
    """Four bags of two features, which could be taken for two samples."""
    configs = [
        torchrec.EmbeddingBagConfig(num_embeddings=20, embedding_dim=8, name="users", feature_names=["user"]),
        torchrec.EmbeddingBagConfig(num_embeddings=30, embedding_dim=8, name="things", feature_names=["item"]),
    ]
    ours = hetstream.EmbeddingBagCollection(configs, optimizer=hetstream.RowSGD(0.1))
    features = torchrec.KeyedJaggedTensor(
        keys=["user", "item"],
        values=torch.tensor([1, 2, 3, 4]),
        lengths=torch.tensor([1, 1, 1, 1]),
        stride_per_key_per_rank=[[1], [3]],
    )
    with pytest.raises(EmbeddingError, match=r"features of different numbers of samples: \{'user': 1, 'item': 3\}"):
        ours(features)
    configs[0].data_type = torchrec.types.DataType.FP16
    with pytest.raises(ConfigError, match="tables of data_type FP16, FP32"):
        hetstream.EmbeddingBagCollection(configs, optimizer=hetstream.RowSGD(0.1))


def test_a_collection_takes_torchrecs_configs_states_and_features() -> None:
    """And returns and updates what torchrec's own collection does."""
    configs = [
        torchrec.EmbeddingBagConfig(num_embeddings=20, embedding_dim=8, name="users", feature_names=["user"]),
        torchrec.EmbeddingBagConfig(num_embeddings=30, embedding_dim=8, name="things", feature_names=["item", "seen"]),
    ]
    theirs = torchrec.EmbeddingBagCollection(tables=configs)
    ours = hetstream.EmbeddingBagCollection(configs, optimizer=hetstream.RowSGD(0.1))
    ours.load_state_dict(theirs.state_dict())
    features = torchrec.KeyedJaggedTensor(
        keys=["seen", "user", "item"],
        values=torch.tensor([1, 2, 29, 19, 0, 3, 3, 3]),
        lengths=torch.tensor([2, 0, 1, 1, 1, 1, 0, 1, 1]),
    )
    expected, got = theirs(features), ours(features)
    assert got.keys() == expected.keys()
    assert torch.equal(got.values(), expected.values())
    for pooled in (expected, got):
        pooled.values().pow(2).sum().backward()
    with torch.no_grad():
        for weight in theirs.parameters():
            weight -= 0.1 * weight.grad
    for name, weight in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], weight)
