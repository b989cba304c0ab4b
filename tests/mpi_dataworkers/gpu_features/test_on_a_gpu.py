"""What a GPU alone can show of feature graphs; `pytest -m gpu` runs it, where nothing is interpreted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from interpreted import same

from benchmarks.rap_cases import batch_of
from benchmarks.rap_plans import PLANS, make_plan
from hetstream.mpi_dataworkers.features.batches import Jagged
from hetstream.mpi_dataworkers.features.transform import FeatureTransform
from hetstream.mpi_dataworkers.gpu_features.capacity import GpuProbing, capacities
from hetstream.mpi_dataworkers.gpu_features.captured import CapturedCoRun
from hetstream.mpi_dataworkers.gpu_features.corun import CoRun
from hetstream.mpi_dataworkers.gpu_features.fused import FusedTransform
from hetstream.mpi_dataworkers.gpu_features.launches import all_at_once

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.fixture(autouse=True)
def _compiled() -> None:
    triton = pytest.importorskip("triton", reason="triton is not installed: pip install 'hetstream[triton]'")
    from hetstream.mpi_dataworkers.gpu_features import kernel

    if not isinstance(kernel.features_kernel, triton.runtime.JITFunction):
        pytest.skip("other tests of this process have the kernel interpreted: pytest -m gpu")


def on_host(value: Any) -> Any:
    return (
        type(value)(*(each.cpu() if isinstance(each, torch.Tensor) else each for each in value))
        if isinstance(value, tuple)
        else value.cpu()
    )


@pytest.mark.parametrize("number", range(5))
def test_the_papers_plans_have_the_values_of_host_memory(number: int) -> None:
    graph, batch = make_plan(PLANS[number]), batch_of(PLANS[number], 4096)
    found, expected = FusedTransform(graph)(batch), FeatureTransform(graph)(batch)
    for name in expected:
        same(on_host(found[name]), expected[name])


class Model(torch.nn.Module):
    """A layer of arithmetic and one of memory traffic."""

    def __init__(self) -> None:
        super().__init__()
        self.product = torch.nn.Linear(4096, 4096)
        self.copy = torch.nn.Identity()

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        made = self.copy(self.product(values))
        for _ in range(10):
            made = made.clone()
        return made


def test_beside_training_each_batch_has_its_values() -> None:
    graph, model = make_plan(PLANS[4]), Model().cuda()
    batches = [batch_of(PLANS[4], 512, seed) for seed in range(6)]
    values = torch.ones(4096, 4096, device="cuda")
    with CoRun(graph, all_at_once(graph, "product.forward", 16), model) as beside:
        for number, features in enumerate(beside(batches)):
            model(values).sum().backward()
            expected = FeatureTransform(graph)(batches[number])
            for name in expected:
                same(on_host(features[name]), expected[name])


def test_replays_see_the_values_of_each_batch() -> None:
    graph, model = make_plan(PLANS[0]), torch.nn.Sequential(torch.nn.Linear(13, 64), torch.nn.Linear(64, 1)).cuda()
    first = batch_of(PLANS[0], 256)
    batches = [first]
    for seed in range(1, 14):  # of one size: only then a graph can be replayed
        batch = batch_of(PLANS[0], 256, seed)
        for name, value in first.items():
            if isinstance(value, Jagged):
                batch[name] = Jagged(value.values.flip(0) + seed, value.lengths.roll(seed))
        batches.append(batch)

    def step(features: dict[str, Any]) -> torch.Tensor:
        model.zero_grad(set_to_none=True)
        model(features["dense"].nan_to_num(0, 0, 0)).sum().backward()
        return features["dense"].clone()

    with CapturedCoRun(graph, all_at_once(graph, "0.forward", 8), model, step) as captured:
        for number, dense in enumerate(captured(batches)):
            same(dense.cpu(), FeatureTransform(graph)(batches[number])["dense"])
    assert captured.num_replays > 0


def test_a_product_leaves_more_memory_traffic_and_a_copy_more_arithmetic() -> None:
    model, values = Model().cuda(), torch.ones(8192, 4096, device="cuda")
    with torch.no_grad(), GpuProbing(model, lambda: model(values)) as device:
        product, copy = capacities(device)
    assert product.memory_s / product.duration_s > copy.memory_s / copy.duration_s
    assert copy.compute_s / copy.duration_s > product.compute_s / product.duration_s
