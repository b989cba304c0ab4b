"""One kernel for all features of a batch: in Triton's interpreter the same as the NumPy reference, whatever the graph.

No GPU is needed: the interpreter runs the kernel in this process, and compilers make it for GPUs that are not there.
"""

from __future__ import annotations

import json
import logging
import math
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from interpreted import interpreted_launch, same
from offline_compile import compile_offline
from random_features import as_input, random_chain, random_rows

from benchmarks.rap_cases import batch_of
from benchmarks.rap_plans import PLANS, make_plan
from hetstream.errors import FeatureError
from hetstream.mpi_dataworkers.features import operators as ops
from hetstream.mpi_dataworkers.features.batches import Jagged, JaggedBatch, Nullable, Reader
from hetstream.mpi_dataworkers.features.graph import FeatureGraph, dense, jagged
from hetstream.mpi_dataworkers.features.operators import FeatureType
from hetstream.mpi_dataworkers.features.transform import FeatureTransform
from hetstream.mpi_dataworkers.gpu_features.arena import Packer, program_of
from hetstream.mpi_dataworkers.gpu_features.fused import FusedTransform
from tests.mpi_dataworkers import features_reference as reference

pytestmark = pytest.mark.usefixtures("interpreted")

NAN, INF, LARGE = math.nan, math.inf, 2**63 - 1


def fused(graph: FeatureGraph, **options: Any) -> FusedTransform:
    """The kernel in the interpreter, with little tiles and several programs."""
    usual = {"device": "cpu", "num_programs": 3, "tile": 16, "launch": interpreted_launch}
    return FusedTransform(graph, **{**usual, **options})


def check_random_graph(seed: int) -> None:
    """The kernel and the reference, on a graph and a batch of this seed."""
    draw = random.Random(seed)
    num_rows = draw.choice([0, 1, 2, 7, 7, 20])
    chains = [random_chain(f"x{at}", draw) for at in range(draw.randint(1, 5))]
    rows = {chain.input.name: random_rows(chain, num_rows, draw) for chain in chains}
    graph = FeatureGraph.of({f"y{at}": chain for at, chain in enumerate(chains)})
    batch = {chain.input.name: as_input(chain, rows[chain.input.name]) for chain in chains}
    found = fused(graph)(batch)
    for at, chain in enumerate(chains):
        expected = rows[chain.input.name]
        kind = chain.input.type
        for operator in chain.operators:
            kind = operator.result(kind)
            number = np.dtype(kind.dtype).type  # what FillNull fills in is Python's
            expected = [[number(value) for value in row] for row in reference.apply(operator, expected)]
        compare(found[f"y{at}"], expected, graph.types[graph.outputs[at].of[0]], f"seed {seed}: {chain}")


def compare(found: Any, expected: list[list[Any]], kind: FeatureType, said: str) -> None:
    """Lengths and integers are the same, floating point within 1e-5."""
    values = found
    if kind.is_jagged:
        assert found.lengths.tolist() == [len(row) for row in expected], said
        values = found.values
    else:
        assert found.shape == ((len(expected),) if kind.width == 1 else (len(expected), kind.width)), said
    flat = np.array([value for row in expected for value in row], dtype=kind.dtype)
    assert values.numpy().dtype == flat.dtype, said
    if kind.is_float:
        np.testing.assert_allclose(values.numpy().reshape(-1), flat, rtol=1e-5, atol=1e-37, err_msg=said)
    else:
        assert values.reshape(-1).tolist() == flat.tolist(), said


@pytest.mark.parametrize("seed", range(20))
def test_the_kernel_does_what_the_reference_does_on_random_graphs(seed: int) -> None:
    check_random_graph(seed)


@pytest.mark.shows("one kernel computes all operators of a graph, with any number of programs")
@pytest.mark.slow
@pytest.mark.parametrize("first", range(20, 500, 60))
def test_the_kernel_does_what_the_reference_does_on_500_random_graphs(first: int) -> None:
    for seed in range(first, first + 60):
        check_random_graph(seed)


def test_random_graphs_have_all_operators() -> None:
    drawn = [random.Random(seed) for seed in range(20)]
    kinds = {type(operator) for draw in drawn for at in range(5) for operator in random_chain(f"x{at}", draw).operators}
    assert kinds == {*ops.OPERATORS}


@pytest.mark.shows("one kernel computes all operators of a graph, with any number of programs")
@pytest.mark.parametrize("number", [0, 2])
def test_the_papers_plans_in_the_layout_that_a_trainer_takes(number: int) -> None:
    """A matrix of all dense features, and all lists key by key as KeyedJaggedTensor has them."""
    graph, batch = make_plan(PLANS[number]), batch_of(PLANS[number], 5)
    found, expected = fused(graph, tile=32)(batch), FeatureTransform(graph)(batch)
    assert [*found] == [*expected] == ["dense", "sparse"]
    assert found["sparse"].keys == expected["sparse"].keys
    for name in expected:
        same(found[name], expected[name])


def test_outputs_of_every_form_from_common_inputs() -> None:
    """Dense features among lists, columns of several widths, an input as it is, a feature that is an output twice."""
    filled = dense("age", is_nullable=True) >> ops.FillNull(3.0)
    graph = FeatureGraph.of(
        {
            "mixed": [jagged("ids") >> ops.FirstX(2), (dense("page", "int64") >> ops.SigridHash(1, 50)).named("page")],
            "matrix": [filled >> ops.Onehot(0.0, 9.0, 4), filled >> ops.Logit(), filled],
            "age": filled,
            "raw": jagged("ids"),
            "hot": jagged("ids")
            >> ops.FirstX(0)
            >> ops.Onehot(0.0, 4.0, 3)
            >> ops.Onehot(0.5, 2.0, 2)
            >> ops.Clamp(0.25, 0.75),
        }
    )
    batch = {
        "age": Nullable(torch.tensor([1.0, 5.0, 8.5]), torch.tensor([True, False, True])),
        "page": torch.tensor([3, -3, LARGE]),
        "ids": Jagged(torch.tensor([1, 2, 3, 4]), torch.tensor([3, 0, 1])),
    }
    found, expected = fused(graph)(batch), FeatureTransform(graph)(batch)
    assert isinstance(found["mixed"], JaggedBatch)
    for name in expected:
        same(found[name], expected[name])
    assert fused(FeatureGraph.of({"x": dense("x")}))({"x": torch.tensor([1.0])})["x"].tolist() == [1.0]


@pytest.mark.shows("one kernel computes all operators of a graph, with any number of programs")
def test_the_number_of_programs_changes_nothing() -> None:
    graph, batch = make_plan(PLANS[0]), batch_of(PLANS[0], 9)
    alone, many = (fused(graph, num_programs=count, tile=8)(batch) for count in (1, 50))
    for name in alone:
        same(many[name], alone[name])


def test_a_batch_that_does_not_fit_is_refused_feature_by_feature() -> None:
    transform = fused(make_plan(PLANS[0]))
    batch = batch_of(PLANS[0], 4)
    wrong = {**batch, "dense3": torch.zeros(4, dtype=torch.float64), "sparse5": torch.zeros(4)}
    with pytest.raises(FeatureError, match=r"dense3 is float64.*sparse5 is float32"):
        transform(wrong)
    if not torch.cuda.is_available():
        with pytest.raises(FeatureError, match="device='cuda': there is no GPU here"):
            FusedTransform(make_plan(PLANS[0]))
    for options, message in (
        ({"num_programs": 0}, "num_programs=0"),
        ({"num_programs": 2**31}, "num_programs=2147483648: give a whole number, 1 to 2147483647"),
        ({"tile": 48}, "tile=48: a power of two, at most 512"),
        ({"device": "foo"}, "device='foo': a device of torch, such as 'cuda' or 'cuda:1': Expected one of"),
        ({"device": None}, "device=None: a device of torch"),
    ):
        with pytest.raises(FeatureError, match=message):
            fused(make_plan(PLANS[0]), **options)


@pytest.mark.shows("lists longer than the arena, and lengths that do not add up, are told")
def test_results_that_no_memory_has_room_for_are_refused_before_anything_is_made_of_them() -> None:
    """A list of a million ids, and an Ngram of half of them: a quarter of a million million values."""
    graph = FeatureGraph.of({"x": jagged("ids") >> ops.Ngram(500_000)})
    batch = {"ids": Jagged(torch.zeros(1_000_000, dtype=torch.int64), torch.tensor([1_000_000]))}
    num_rows, features = Reader(graph.inputs)(batch)
    pack = Packer(graph, program_of(graph), 256, most_bytes=1 << 37)
    with pytest.raises(torch.OutOfMemoryError, match=r"need \d+ bytes, of 137438953472"):
        pack(num_rows, features)


@pytest.mark.shows("lists longer than the arena, and lengths that do not add up, are told")
def test_lengths_that_do_not_add_up_reach_no_kernel() -> None:
    transform = fused(FeatureGraph.of({"x": jagged("ids") >> ops.SigridHash(1, 50)}))
    for lengths in ([2**62, 2**62, 3], [-1, 4, 0], [1, 1, 0]):
        with pytest.raises(FeatureError, match="ids"):
            transform({"ids": Jagged(torch.tensor([1, 2, 3]), torch.tensor(lengths))})


@pytest.mark.shows("NaN, ids beyond tables and empty batches are computed alike everywhere")
def test_numbers_that_are_none_and_ids_beyond_tables_are_what_they_are_in_host_memory() -> None:
    """NaN, infinity, the ends of int64, ids below and beyond a table: each by each operator that takes them."""
    reals = torch.tensor([NAN, INF, -INF, -0.0, 1e-45, 3.4e38, -3.4e38, 0.5])
    wholes = torch.tensor([LARGE, -LARGE - 1, -1, 0, 1, 255, 256, 2**31])
    of_reals = [
        *(ops.Logit(0.1), ops.BoxCox(0.0), ops.BoxCox(-0.5), ops.Onehot(-1.0, 1.0, 4), ops.Clamp(-1.0, 1.0)),
        *(ops.Bucketize((0.0, 0.0, 1.0)), ops.FillNull(7.0), ops.FillNull(7.0, nan=True)),
        *(ops.Cast("int32"), ops.Cast("int64"), ops.Cast("float64")),
    ]
    of_wholes = [
        *(ops.MapId((5, 6, 7)), ops.SigridHash(3, 1000), ops.Clamp(-5, 5), ops.FillNull(1)),
        *(ops.Cast("int32"), ops.Cast("float32"), ops.Onehot(0.0, 9.0, 3)),
    ]
    graph = FeatureGraph.of(
        {f"real{at}": dense("reals") >> each for at, each in enumerate(of_reals)}
        | {f"whole{at}": dense("wholes", "int64") >> each for at, each in enumerate(of_wholes)}
    )
    batch = {"reals": reals, "wholes": wholes}
    found, expected = fused(graph)(batch), FeatureTransform(graph)(batch)
    for name in expected:
        same(found[name], expected[name])


def test_without_triton_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hetstream.mpi_dataworkers.gpu_features.kernel", None)
    with pytest.raises(FeatureError, match=r"need Triton: pip install 'hetstream\[triton\]'"):
        FusedTransform(make_plan(PLANS[0]), device="cpu")


@pytest.mark.parametrize("ulps", [0, 2, -2])
def test_a_gpus_logarithms_and_powers_may_be_off_by_two_ulps(ulps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the edges. By CUDA's guide those of its library, in float64, are off by one at most (CUDA 13, 5.5)."""

    def off(function: Any) -> Any:
        def computed(values: Any) -> Any:
            exact = np.asarray(function(values))
            return np.where(np.isfinite(exact) & (exact != 0), exact + ulps * np.spacing(exact), exact)

        return lambda self, argument: self.unary_op(argument, computed)

    from triton.runtime.interpreter import InterpreterBuilder

    monkeypatch.setattr(InterpreterBuilder, "create_log", off(np.log))
    monkeypatch.setattr(InterpreterBuilder, "create_exp", off(np.exp))
    ulp = 2.0**-23
    edges = [0.0, 1e-45, 1e-38, 1e-7, 0.5 - ulp, 0.5, 0.5 + ulp, 1 - ulp, 1.0, 1 + ulp, 2.0, 1e10, 3e38, INF, NAN, -1.0]
    operators = [ops.Logit(eps) for eps in (1e-7, 1e-6, 0.499)]
    operators += [ops.BoxCox(lmbda) for lmbda in (30.0, -30.0, 2.0, 1e-7, -1e-7, 0.0)]
    chains = [dense(f"x{at}") >> operator for at, operator in enumerate(operators)]
    values = np.array(edges, np.float32)
    found = fused(FeatureGraph.of({f"y{at}": chain for at, chain in enumerate(chains)}))(
        {f"x{at}": torch.from_numpy(values) for at in range(len(chains))}
    )
    for at, operator in enumerate(operators):
        expected = [float(value) for [value] in reference.apply(operator, [[value] for value in values])]
        np.testing.assert_allclose(found[f"y{at}"].numpy(), expected, rtol=1e-5, atol=1e-37, err_msg=str(operator))


def test_nothing_of_the_kernel_is_compiled_or_loaded_anew_while_a_graph_is_captured(tmp_path: Path) -> None:
    """Triton does so for pointers that are aligned in another way, and for other numbers where these count.

    Here only pointers count: where tensors of torch's begin, which is a multiple of 512 bytes on a GPU.
    """
    program = """
import json
from hetstream.mpi_dataworkers.gpu_features.kernel import features_kernel
counts = [each.name for each in features_kernel.params if not (each.is_constexpr or each.do_not_specialize)]
print(json.dumps(counts))
"""
    assert json.loads(compile_offline(program, str(tmp_path))) == ["batch", "made", "constants"]


@pytest.mark.shows("without GPU memory, data workers compute until there is some again")
@pytest.mark.parametrize("is_too_large", [True, False])
def test_without_memory_a_batch_is_computed_in_host_memory_and_that_is_said_once(
    is_too_large: bool, caplog: pytest.LogCaptureFixture
) -> None:
    graph, batch = make_plan(PLANS[0]), batch_of(PLANS[0], 6)

    def launch(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore about it")

    transform = fused(graph, arena_bytes=1000) if is_too_large else fused(graph, launch=launch)
    with caplog.at_level(logging.WARNING):
        found = [transform(batch) for _ in range(3)]
    expected = FeatureTransform(graph)(batch)
    for name in expected:
        same(found[2][name], expected[name])
    [message] = [record.message for record in caplog.records]
    assert "computed in host memory instead of on cpu" in message
    assert ("bytes, of 1000" if is_too_large else "Tried to allocate 2 GiB.") in message
    assert "more about it" not in message


@pytest.mark.shows("one kernel computes all operators of a graph, with any number of programs")
@pytest.mark.parametrize("tiles", [(256,), pytest.param((64, 128, 512), marks=pytest.mark.slow)])
@pytest.mark.parametrize("architecture", [80, 90])
def test_the_kernel_is_compiled_for_gpus_that_are_not_here(
    architecture: int, tiles: tuple[int, ...], tmp_path: Path
) -> None:
    """For the A100 and the H200; what registers hold has room in them."""
    program = f"""
import json
from tests.mpi_dataworkers.gpu_features.offline import compile_for
print(json.dumps([vars(compile_for({architecture}, tile)) for tile in {tiles}]))
"""
    for compiled in json.loads(compile_offline(program, str(tmp_path))):
        assert compiled["architecture"] == architecture
        assert compiled["num_bytes"] > 1000
        assert compiled["spilled_bytes"] == 0


@pytest.mark.shows("a graph that does not fit its batches, or a kernel that cannot be compiled, is told")
@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Failed to find C compiler. Please specify via CC environment variable"),
        subprocess.CalledProcessError(1, ["gcc"]),
        AssertionError("libcuda.so cannot found!"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_kernel_that_cannot_be_compiled_is_told_before_the_first_step(error: Exception) -> None:
    """As Triton, and what it runs, say it; a loader then leaves the graph to data workers."""

    def launch(*_: Any) -> None:
        raise error

    with pytest.raises(FeatureError, match=r"the kernel does not run on cpu: .*Triton needs a C compiler"):
        fused(make_plan(PLANS[0]), launch=launch)
