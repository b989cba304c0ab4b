"""The examples of docs/gpu-features.md run as they are printed; where a GPU would be, something stands in for it."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from interpreted import interpreted_launch, same

from hetstream import DataLoader
from hetstream.mpi_dataworkers.features.batches import collate_rows
from hetstream.mpi_dataworkers.features.cut import CutGraph
from hetstream.mpi_dataworkers.features.graph import FeatureGraph, dense
from hetstream.mpi_dataworkers.features.operators import BoxCox, Clamp, FillNull, SigridHash
from hetstream.mpi_dataworkers.features.transform import FeatureTransform
from hetstream.mpi_dataworkers.gpu_features import capacity, captured, corun, fused
from hetstream.mpi_dataworkers.gpu_features.capacity import GpuProbing, LayerHooks
from hetstream.mpi_dataworkers.sources.tables import CsvDataset
from tests.mpi_dataworkers.gpu_features.fake_gpu import FakeGpu, FakeLayer
from tests.mpi_dataworkers.gpu_features.fake_streams import FakeStreams

GUIDE = Path(__file__).parents[3] / "docs" / "gpu-features.md"
ROWS = 24
GRAPH = FeatureGraph.of(
    {
        "label": dense("label"),
        "dense": [
            dense("age", is_nullable=True) >> FillNull(30.0) >> Clamp(0.0, 120.0),
            dense("price") >> BoxCox(0.5),
        ],
        "page": dense("page", "int64", is_nullable=True) >> FillNull(0) >> SigridHash(max_value=1000),
    }
)


class Model(torch.nn.Module):
    """A reader's model."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = torch.nn.Linear(2, 4)
        self.embedding = torch.nn.Embedding(1000, 4)

    def forward(self, features: dict[str, Any]) -> torch.Tensor:
        made: torch.Tensor = self.mlp(features["dense"]) + self.embedding(features["page"])
        return made.sum()


class ProbingOfALaw(FakeGpu):
    """In the place of `GpuProbing`: the model's own layers, which take what a law says."""

    def __init__(self, *given: Any, **options: Any) -> None:
        asked = inspect.signature(GpuProbing).bind(*given, **options).arguments
        asked["train_step"]()
        hooks = LayerHooks(asked["model"], lambda _: None, optimizer=asked["optimizer"])
        hooks.close()
        super().__init__([FakeLayer(name, 1e-3, 0.2, 0.3) for name in hooks.names])

    def __enter__(self) -> ProbingOfALaw:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a reader has: data, a graph, a model. Interpreted kernels, and streams that find what is read too early."""
    pytest.importorskip("triton", reason="triton is not installed: pip install 'hetstream[triton]'")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    on_cpu = {"device": "cpu", "launch": interpreted_launch, "tile": 16}
    monkeypatch.setattr(fused, "FusedTransform", functools.partial(fused.FusedTransform, **on_cpu))
    for module, name in ((corun, "CoRun"), (captured, "CapturedCoRun")):
        beside = {"streams": FakeStreams(), "kernel": (16, interpreted_launch)}
        monkeypatch.setattr(module, name, functools.partial(getattr(module, name), **beside))
    monkeypatch.setattr(capacity, "GpuProbing", ProbingOfALaw)
    rows = "".join(f"{row % 2},{'' if row % 3 else row},{row},{row:08x}\n" for row in range(ROWS))
    (tmp_path / "clicks.csv").write_text("label,age,price,page\n" + rows)
    kinds = {"label": "float32", "age": "float32?", "price": "float32", "page": "hex?"}
    dataset = CsvDataset(str(tmp_path / "clicks.csv"), kinds)
    loader = DataLoader(dataset, batch_size=8, shuffle=False, collate_fn=collate_rows)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = FeatureTransform(GRAPH)(next(iter(loader)))

    def step(features: dict[str, Any]) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(features)
        loss.backward()
        optimizer.step()
        return loss.detach()

    losses: list[torch.Tensor] = []

    def criterion(made: torch.Tensor, *_: object) -> torch.Tensor:
        losses.append(made)
        return made

    return {
        "graph": GRAPH, "dataset": dataset, "loader": loader, "model": model, "optimizer": optimizer, "step": step,
        "train_step": lambda: step(batch), "criterion": criterion, "losses": losses,
    }  # fmt: skip


@pytest.mark.shows("the examples of the GPU feature guide run as they are printed")
def test_the_examples_of_the_gpu_guide_run_as_they_are_printed(
    reader: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Each block has what those before it have made; its results are those of the graph in host memory."""
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    checks: dict[str, Callable[[], object]] = {
        "FusedTransform(": lambda: same(reader["features"], expected(reader["batch"])),
        "search(problem": lambda: reader["found"].kernels or pytest.fail("no kernel"),
        "GpuProbing(": lambda: [layer.memory_s > 0 for layer in reader["layers"]].index(True),
        "corun(loader)": lambda: len(reader["losses"]) == ROWS // 8 or pytest.fail("a batch is missing"),
        "CapturedCoRun(": lambda: reader["training"].corun.fallback.missing and pytest.fail("nothing was captured"),
        "decide(": lambda: isinstance(reader["decision"].cut, CutGraph) or pytest.fail("no cut"),
        "HybridFeatures(": lambda: same(next(iter(reader["loader"])), expected(collate_rows([*reader["dataset"]]))),
    }
    assert len(blocks) == len(checks)
    for (words, check), block in zip(checks.items(), blocks, strict=True):
        assert words in block, "an example has come or gone"
        exec(compile(block, str(GUIDE), "exec"), reader)
        check()
    reader["loader"].close()
    assert re.search(r"\d+ kernels, the step is \d+ us longer", capsys.readouterr().out)
    CutGraph(GRAPH, first=("age.FillNull.Clamp",))  # which the text names


def expected(batch: dict[str, Any]) -> dict[str, Any]:
    return dict(FeatureTransform(GRAPH)(batch))
