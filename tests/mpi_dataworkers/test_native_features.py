"""Feature graphs in native code: the same as with torch, whatever the batch; what happens where it cannot be made."""

from __future__ import annotations

import gc
import os
import pickle
import random
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from random_features import as_bytes, random_batch, random_graph

from hetstream import DataLoader
from hetstream.errors import FeatureError
from hetstream.mpi_dataworkers.features import native
from hetstream.mpi_dataworkers.features import operators as ops
from hetstream.mpi_dataworkers.features import transform as transform_module
from hetstream.mpi_dataworkers.features.batches import Jagged, JaggedBatch, Nullable
from hetstream.mpi_dataworkers.features.graph import FeatureGraph, dense, groups_of, jagged
from hetstream.mpi_dataworkers.features.transform import FeatureTransform
from tests.programs import needs

needs_compiler = needs("g++")
LOADER_OPTIONS: dict[str, Any] = {"batch_size": 8, "seed": 5, "shuffle": True}
LENGTHS = (0, 1, 2, 3, 9, 17)
TABLE = tuple(range(100, 1100))


def graph_of_everything() -> FeatureGraph:
    """Chains of all kinds: operators by value, of lists and of rows in one chain, several dtypes, several users."""
    outputs: dict[str, Any] = {}
    for at in range(3):
        filled = dense(f"f{at}", width=at + 1, is_nullable=True) >> ops.FillNull(0.5, nan=True)
        clamped = filled >> ops.Clamp(0.0 if at else None, 1.0 + at)
        outputs |= {
            f"logit{at}": clamped >> ops.Logit(0.01),
            f"boxcox{at}": filled >> ops.BoxCox(0.3 * at - 0.3) >> ops.Cast("float64"),
            f"hot{at}": clamped >> ops.Onehot(0.0, 1.5, 5 + at) >> ops.Clamp(0.1, 0.9),
            f"bucket{at}": dense(f"d{at}", "float64") >> ops.Bucketize((-1.0, 0.0, 0.0, 0.5, 2.0)) >> ops.Cast("int64"),
            f"class{at}": dense(f"d{at}", "float64") >> ops.Cast("int32") >> ops.MapId(TABLE) >> ops.SigridHash(at, 50),
            f"whole{at}": dense(f"d{at}", "float64") >> ops.Cast("int64") >> ops.Cast("float32"),
            f"pairs{at}": jagged(f"i{at}")
            >> ops.Clamp(-5, 2000)
            >> ops.FirstX(7 + at)
            >> ops.Ngram(2)
            >> ops.MapId(TABLE),
            f"hashed{at}": jagged(f"i{at}")
            >> ops.SigridHash(-at, 2**62 + at if at == 2 else 10 ** (at + 1))
            >> ops.FirstX(3),
            f"words{at}": jagged(f"w{at}", "int32") >> ops.Ngram(at + 1) >> ops.Cast("int64") >> ops.FirstX(10),
            f"first{at}": jagged(f"w{at}", "int32") >> ops.FirstX(2) >> ops.Onehot(0.0, 5.0, 3),
            f"reals{at}": jagged(f"r{at}", "float32") >> ops.FirstX(9 + at) >> ops.Logit(),
        }
    sparse = [(jagged(f"i{at}") >> ops.Ngram(3)).named(f"i{at}") for at in range(3)]
    return FeatureGraph.of(
        {**outputs, "sparse": [*sparse, dense("n", "int64") >> ops.SigridHash(3, 10)], "n": dense("n", "int64")}
    )


def batch_of(rows: int, seed: int = 1) -> dict[str, Any]:
    """What that graph takes: NaN, infinity, all of int64, empty lists; not all of it lies one behind the other."""
    draw = np.random.default_rng(seed)

    def lists(values: Callable[[int], Any]) -> Jagged:
        lengths = draw.choice(LENGTHS, rows)
        return Jagged(torch.from_numpy(values(int(lengths.sum()))), torch.from_numpy(lengths))

    batch: dict[str, Any] = {"n": torch.arange(2 * rows)[::2]}
    for at in range(3):
        reals = draw.normal(0, 2, (rows, at + 1) if at else rows).astype(np.float32)
        reals.reshape(-1)[::5], reals.reshape(-1)[1::7], reals.reshape(-1)[2::11] = np.nan, np.inf, -np.inf
        batch[f"f{at}"] = Nullable(torch.from_numpy(reals), torch.from_numpy(draw.random(reals.shape) < 0.8))
        batch[f"d{at}"] = torch.from_numpy(draw.normal(0, 10.0 ** (at * 8), 2 * rows))[::2]
        batch[f"i{at}"] = lists(lambda count: draw.integers(-(2**63), 2**63 - 1, count) >> draw.integers(0, 63, count))
        batch[f"w{at}"] = lists(lambda count: draw.integers(-9, 9, count, dtype=np.int32))
        batch[f"r{at}"] = lists(lambda count: draw.random(count, dtype=np.float32))
    return batch


def leaves(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, JaggedBatch):
        yield from (value.values, value.lengths)
    else:
        for part in value:
            yield from leaves(part)


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        for made, wanted in zip(leaves(found[name]), leaves(value), strict=True):
            assert (made.dtype, made.shape) == (wanted.dtype, wanted.shape), name
            if "logit" in name or "boxcox" in name or "reals" in name:
                torch.testing.assert_close(made, wanted, rtol=1e-6, atol=1e-7, equal_nan=True)
            else:
                assert torch.equal(made, wanted), name


@needs_compiler
def test_it_is_made_and_leaves_no_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    native.library.cache_clear()
    assert native.library() is not None
    assert not list(tmp_path.iterdir())


@pytest.mark.shows("the eleven feature operators compute what a plain reference computes, whatever the values")
@pytest.mark.shows("the feature operators compute what NumPy computes, in torch and in native code")
@needs_compiler
@pytest.mark.parametrize("rows", [0, 1, 2, 127, 129, 5000])
def test_native_code_does_what_torch_does(rows: int) -> None:
    graph, batch = graph_of_everything(), batch_of(rows)
    before = pickle.dumps(batch)
    transform = FeatureTransform(graph, native=True)
    assert_same(transform(batch), FeatureTransform(graph)(batch))
    assert_same(transform(batch), transform(batch))
    assert pickle.dumps(batch) == before, "the batch that it is given stays as it is"


def check_random_graphs(first: int, count: int) -> None:
    """Byte for byte, so without the two operators that native code computes with functions of its own."""
    draw = random.Random(first)
    while count:
        graph, chains = random_graph(draw)
        if any(isinstance(each, (ops.Logit, ops.BoxCox)) for chain in chains.values() for each in chain.operators):
            continue
        for rows in (0, draw.randint(1, 300)):
            batch = random_batch(chains, rows, draw)
            assert as_bytes(FeatureTransform(graph, native=True)(batch)) == as_bytes(FeatureTransform(graph)(batch))
        count -= 1


@pytest.mark.shows("moved operators are fused for CPUs: native code")
@needs_compiler
def test_native_code_does_what_torch_does_on_random_graphs() -> None:
    check_random_graphs(0, 100)


@pytest.mark.shows("the feature operators compute what NumPy computes, in torch and in native code")
@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("first", range(1, 11))
def test_native_code_does_what_torch_does_on_a_thousand_random_graphs(first: int) -> None:
    check_random_graphs(first, 100)


@needs_compiler
def test_results_of_many_sizes_lie_in_several_pieces_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces so small that most features have one of their own, and some are larger."""
    monkeypatch.setattr(native, "_SLAB_VALUES", 300)
    for rows in (1, 100, 400):
        batch = batch_of(rows)
        assert_same(
            FeatureTransform(graph_of_everything(), native=True)(batch), FeatureTransform(graph_of_everything())(batch)
        )


@needs_compiler
def test_several_threads_may_call_one() -> None:
    graph = graph_of_everything()
    transform, plain = FeatureTransform(graph, native=True), FeatureTransform(graph)
    batches = [batch_of(300 + 10 * seed, seed) for seed in range(8)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(transform, batches))
    for made, batch in zip(found, batches, strict=True):
        assert_same(made, plain(batch))


@needs_compiler
def test_data_workers_and_the_program_itself_make_the_same_bytes(
    three: Any, loaders: Callable[..., DataLoader]
) -> None:
    graph = FeatureGraph.of(
        {"x": dense("x") >> ops.Clamp(0.01, 0.9) >> ops.Logit(1e-3), "box": dense("x") >> ops.BoxCox(0.25)}
    )
    samples = [{"x": np.float32(value)} for value in np.random.default_rng(1).random(200)]
    made = []
    places: tuple[dict[str, Any], ...] = ({}, {"service": three.name})
    for options in places:
        stage = FeatureTransform(graph, native=True)
        loader = loaders(samples, batch_stage=stage, **options)
        made.append([[part.numpy().tobytes() for part in batch.values()] for batch in loader])
    assert made[0] == made[1]
    assert len(made[0]) == 25


@pytest.mark.parametrize("is_native", [False, True])
def test_lengths_that_are_more_than_int64_together_are_refused(is_native: bool) -> None:
    transform = FeatureTransform(FeatureGraph.of({"y": jagged("x") >> ops.FirstX(1)}), native=is_native)
    lengths = torch.tensor([2**62] * 4)
    assert int(lengths.sum()) == 0
    with pytest.raises(FeatureError, match="x has a list that is longer than all of its values"):
        transform({"x": Jagged(torch.empty(0, dtype=torch.int64), lengths)})


@needs_compiler
def test_lists_that_do_not_fit_are_refused_in_the_same_words() -> None:
    graph = FeatureGraph.of({name: jagged(name) >> ops.FirstX(1) for name in ("x", "y")})
    own, plain = FeatureTransform(graph, native=True), FeatureTransform(graph)
    right = Jagged(torch.arange(6)[::2], torch.tensor([1, 9, 0, 9, 2, 9])[::2])  # not one behind the other
    assert [part.tolist() for part in own({"x": right, "y": right})["y"]] == [[0, 2], [1, 0, 1]]
    for lengths in (
        [1, 1, 2],
        [1, 0, 1],
        [4, -2, 1],
        [3, 1, -1],
        [2**63 - 1, 4, -(2**63)],
        [2**62] * 2 + [-(2**63) + 3],
    ):
        batch = {"x": right, "y": Jagged(torch.arange(3), torch.tensor(lengths))}
        said = []
        for transform in (own, plain):
            with pytest.raises(FeatureError) as caught:
                transform(batch)
            said.append((str(caught.value), caught.value.row))
        assert said[0] == said[1]


@pytest.mark.shows("a graph that does not fit its batches, or a kernel that cannot be compiled, is told")
@pytest.mark.parametrize(
    ("compiler", "folder", "words"),
    [
        (None, ".", "no C++ compiler"),
        ("#!/bin/sh\necho too old >&2\nexit 1\n", ".", "too old"),
        ("#!/bin/sh\nexit 0\n", "no such folder", "No such file"),
    ],
)
def test_where_it_cannot_be_made_torch_does_the_work(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    compiler: str | None,
    folder: str,
    words: str,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / folder))
    if compiler:
        (tmp_path / "g++").write_text(compiler)
        (tmp_path / "g++").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    native.library.cache_clear()
    try:
        transform = FeatureTransform(FeatureGraph.of({"y": dense("x", "int64") >> ops.Clamp(0, 5)}), native=True)
        assert transform({"x": torch.tensor([9])})["y"].tolist() == [5]
        assert transform({"x": torch.tensor([-9])})["y"].tolist() == [0]
    finally:
        native.library.cache_clear()
    assert caplog.text.count("the graph runs with torch") == 1
    assert words in caplog.text


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("bounds", [(0.0, None), (None, 0.0), (-0.0, None), (None, -0.0), (0.0, 0.0), (-1.0, 0.0)])
def test_the_sign_of_zero_is_the_same_wherever_a_graph_runs(dtype: str, bounds: tuple[Any, Any]) -> None:
    # Bounds that differ between features: torch takes them as tensors.
    lower, upper = bounds
    others = ops.Clamp(None if lower is None else -5.0, None if upper is None else 5.0)
    chains = {"a": dense("a", dtype) >> ops.Clamp(lower, upper), "b": dense("b", dtype) >> others}
    values = torch.tensor([-0.0, 0.0, 1.0, -1.0, np.nan] * 7, dtype=getattr(torch, dtype))
    batch = {"a": values, "b": values}
    with_torch, natively = (FeatureTransform(FeatureGraph.of(chains), native=some)(batch) for some in (False, True))
    for name in chains:
        assert torch.signbit(with_torch[name]).tolist() == torch.signbit(natively[name]).tolist()
        assert torch.signbit(with_torch[name])[:2].tolist() == [True, False], "0 and -0 are within the bounds"


@pytest.mark.shows("NaN, ids out of range, borders that decrease and empty features are computed or refused")
@pytest.mark.parametrize("is_native", [False, True])
def test_ids_without_a_place_are_counted_where_it_is_asked_for(is_native: bool) -> None:
    chain = jagged("x") >> ops.FirstX(3) >> ops.MapId((7, 8))
    graph = FeatureGraph.of({"y": chain, "z": dense("n", "int32") >> ops.MapId((1, 2, 3)) >> ops.Cast("float32")})
    transform = FeatureTransform(graph, native=is_native, outside="outside")
    transform = pickle.loads(pickle.dumps(transform))
    batch = {
        "x": Jagged(torch.tensor([0, -1, 2, -5, 1, 9, -(2**63)]), torch.tensor([4, 0, 3])),
        "n": torch.tensor([0, 3, 2], dtype=torch.int32),
    }
    found = transform(batch)
    assert found["y"].values.tolist() == [7, 0, 0, 8, 0, 0]
    assert found["z"].tolist() == [1.0, 0.0, 3.0]
    counted = {name: value.tolist() for name, value in found["outside"].items()}
    assert counted == {"x.FirstX.MapId": [2, 2], "n.MapId": [0, 1]}, "negative ones, and those beyond the table"
    assert transform.fingerprint != FeatureTransform(graph).fingerprint
    with pytest.raises(FeatureError, match="is the name of an output"):
        FeatureTransform(graph, outside="y")


def resident_bytes() -> int:
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.shows("thousands of feature batches take no more memory than hundreds")
@pytest.mark.parametrize("steps", [300, pytest.param(2000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("is_native", [False, True])
def test_memory_does_not_grow_with_the_steps(steps: int, is_native: bool) -> None:
    transform = FeatureTransform(graph_of_everything(), native=is_native)
    batches = [batch_of(rows, rows) for rows in (64, 300, 500)]

    def run(count: int) -> None:
        for step in range(count):
            transform(batches[step % len(batches)])

    run(steps // 3)
    gc.collect()
    before = resident_bytes()
    run(steps)
    gc.collect()
    # One result of these batches that is kept is 0.7 MB.
    assert resident_bytes() - before < 8 << 20


def test_until_it_is_time_to_decide_no_batch_pays_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chains of many features take longer to find than a small batch to compute."""
    found: list[int] = []
    monkeypatch.setattr(transform_module, "groups_of", lambda *given: found.append(1) or groups_of(*given))
    computed = FeatureTransform(FeatureGraph.of({"x": dense("x") >> ops.Clamp(0.0, 1.0)}), native="exact")
    for _ in range(20):
        computed({"x": torch.ones(3)})
    assert len(found) == 1
