"""The eleven operators: known values, and torch and native code against the NumPy reference on anything."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetstream.mpi_dataworkers.features import native
from hetstream.mpi_dataworkers.features import operators as ops
from hetstream.mpi_dataworkers.features.batches import Jagged, JaggedBatch, Nullable
from hetstream.mpi_dataworkers.features.graph import Feature, FeatureGraph, dense, jagged
from hetstream.mpi_dataworkers.features.transform import FeatureTransform
from tests.mpi_dataworkers import features_reference as reference

NAN, INF = float("nan"), float("inf")
LARGE = 2**63 - 1


def transforms(graph: FeatureGraph) -> list[FeatureTransform]:
    """Everything that can compute it quickly: torch, and native code where there is a compiler."""
    return [FeatureTransform(graph), *([FeatureTransform(graph, native=True)] if native.compiler() else [])]


def of_values(operator: ops.Operator, values: Sequence[Any], dtype: str) -> list[Any]:
    """What the reference and the kernels make of a dense feature; asserts that it is the same."""
    array = np.asarray(values, dtype=dtype)
    expected = [row[0] for row in reference.apply(operator, [[value] for value in array])]
    graph = FeatureGraph.of({"y": dense("x", dtype) >> operator})
    for transform in transforms(graph):
        found = transform({"x": array})["y"].tolist()
        assert found == pytest.approx(np.asarray(expected).tolist(), rel=1e-6, abs=0, nan_ok=True), transform
    return list(found)


def of_lists(operator: ops.Operator, rows: Sequence[Sequence[int]]) -> list[list[int]]:
    """The same for a jagged feature of int64."""
    expected = reference.apply(operator, [[*map(np.int64, row)] for row in rows])
    flat = torch.tensor([value for row in rows for value in row], dtype=torch.int64)
    graph = FeatureGraph.of({"y": jagged("x") >> operator})
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    for transform in transforms(graph):
        found = transform({"x": Jagged(flat, lengths)})["y"]
        made = [piece.tolist() for piece in found.values.split(found.lengths.tolist())]
        assert made == [[value.item() for value in row] for row in expected], transform
    return made


@pytest.mark.shows("the eleven feature operators compute what a plain reference computes, whatever the values")
@pytest.mark.shows("the feature operators compute what NumPy computes, in torch and in native code")
def test_hashes_are_torcharrow_s() -> None:
    hashes = of_values(ops.SigridHash(salt=0, max_value=100), range(17), "int64")
    assert hashes == [6, 60, 54, 54, 9, 4, 91, 11, 67, 79, 2, 25, 92, 98, 83, 66, 2]
    extremes = [-(2**63), -1, 0, 1, LARGE]
    assert of_values(ops.SigridHash(salt=-5, max_value=1), extremes, "int64") == [0] * 5
    assert all(
        0 <= value < LARGE for value in of_values(ops.SigridHash(salt=2**40, max_value=LARGE), extremes, "int64")
    )


def test_a_value_at_a_border_is_below_it_and_between_two_that_are_equal() -> None:
    values = [0.0, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, NAN, INF, -INF]
    assert of_values(ops.Bucketize((1.0, 2.0, 2.0, 3.0)), values, "float32") == [0, 0, 1, 2, 3, 3, 4, 1, 4, 0]
    assert of_values(ops.Bucketize((2.0,)), [1, 2, 3, NAN, INF, -INF], "float64") == [0, 0, 1, 0, 1, 0]
    apart = ops.Bucketize((-3e38, 3e38))
    assert of_values(apart, [-INF, INF, NAN, 0, 3.3e38, -3.3e38], "float32") == [0, 2, 1, 1, 2, 0]
    crowded = ops.Bucketize([0.0, *(1e30 + at * 1e24 for at in range(20)), 2e38])
    assert of_values(crowded, [-1.0, 0.5, 1e30 + 1.5e24, 3e38], "float64") == [0, 1, 3, 22]
    assert of_values(ops.Bucketize((-0.0, 0.0)), [-0.0, 0.0, -1e-45, 1e-45], "float32") == [1, 1, 0, 2]


@pytest.mark.shows("NaN, ids beyond tables and empty batches are computed alike everywhere")
def test_a_zero_has_one_sign_in_a_graph_as_it_has_one_digest() -> None:
    """Equal operators are computed once, and torch's own clamp takes either bound: so -0.0 would come out as 0.0."""
    assert math.copysign(1, ops.FillNull(-0.0).value) == math.copysign(1, ops.Clamp(np.float32(-0.0)).lower or 0) == 1
    values = np.array([-3.0, -0.0, 0.0, 3.0], dtype=np.float32)
    graph = FeatureGraph.of({"a": dense("x") >> ops.Clamp(-0.0, 2.0), "b": dense("x") >> ops.Clamp(0.0, 2.0)})
    for transform in transforms(graph):
        for found in transform({"x": values}).values():
            assert np.signbit(found.numpy()).tolist() == [False, True, False, False], transform


def test_what_is_outside_the_classes_has_class_0() -> None:
    operator = ops.Onehot(lower=0.0, upper=10.0, num_classes=5)
    values = np.array([0, 1.9, 2, 9.99, 10, 11, -1, -0.5, NAN, INF, -INF], dtype=np.float32)
    for transform in transforms(FeatureGraph.of({"y": dense("x") >> operator})):
        rows = transform({"x": values})["y"]
        assert rows.shape == (11, 5)
        assert rows.argmax(1).tolist() == [0, 0, 1, 4, 0, 0, 0, 0, 0, 0, 0]
        assert rows.sum(1).tolist() == [1.0] * 11
        assert rows.tolist() == np.asarray(reference.apply(operator, [[value] for value in values])).tolist()
    lists = Jagged(torch.tensor([3, 9, 7]), torch.tensor([0, 2, 0, 1]))
    for transform in transforms(FeatureGraph.of({"y": jagged("x") >> operator})):
        found = transform({"x": lists})["y"]
        assert found.argmax(1).tolist() == [0, 1, 0, 3], "a row without values has class 0"


def test_windows_and_first_values() -> None:
    rows = [[1, 2, 3], [4], [], [5, 6]]
    assert of_lists(ops.Ngram(2), rows) == [[1, 2, 2, 3], [4], [], [5, 6]]
    assert of_lists(ops.Ngram(3), rows) == [[1, 2, 3], [4], [], [5, 6]]
    assert of_lists(ops.Ngram(1), rows) == rows
    assert of_lists(ops.FirstX(2), rows) == [[1, 2], [4], [], [5, 6]]
    assert of_lists(ops.FirstX(0), rows) == [[], [], [], []]
    assert of_lists(ops.Ngram(2**62), rows) == rows
    for operator in (ops.Ngram(2), ops.FirstX(1), ops.SigridHash(0, 5)):
        assert of_lists(operator, [[], []]) == [[], []]
        assert of_lists(operator, []) == []


def test_casts_truncate_and_saturate() -> None:
    values = [1.9, -1.9, NAN, INF, -INF, 2.0**63, -(2.0**63), 3e9, -3e9, 2.0**62]
    low, high, small, large = -(2**63), LARGE, -(2**31), 2**31 - 1
    expected = [1, -1, 0, high, low, high, low, 3 * 10**9, -3 * 10**9, 2**62]
    assert (
        of_values(ops.Cast("int64"), values, "float64") == of_values(ops.Cast("int64"), values, "float32") == expected
    )
    assert of_values(ops.Cast("int32"), values, "float64") == [
        1,
        -1,
        0,
        large,
        small,
        large,
        small,
        large,
        small,
        large,
    ]
    assert of_values(ops.Cast("int32"), [low, high, 5, 2**31, large], "int64") == [small, large, 5, large, large]
    assert of_values(ops.Cast("int64"), [small, large], "int32") == [small, large]
    assert of_values(ops.Cast("float32"), [1e300, 0.1], "float64") == [INF, np.float32(0.1)]


@pytest.mark.shows("NaN, ids out of range, borders that decrease and empty features are computed or refused")
def test_values_that_are_not_numbers_stay_and_bounds_hold() -> None:
    assert of_values(ops.Clamp(-1.0, 0.1), [NAN, -5, INF, 0.05], "float32")[1:] == [
        -1.0,
        np.float32(0.1),
        np.float32(0.05),
    ]
    assert of_values(ops.Clamp(lower=LARGE), [0, LARGE], "int64") == [LARGE, LARGE]
    assert of_values(ops.Clamp(upper=-(2**63)), [0, LARGE], "int64") == [-(2**63)] * 2
    assert np.isnan(of_values(ops.Logit(), [NAN, 0.0, 1.0, 0.5, INF, -INF], "float32")[0])
    assert of_values(ops.BoxCox(0.0), [-1.0, 0.0, 1.0], "float32") == [-1, 0, 0]
    assert of_values(ops.BoxCox(2.0), [-1.0, 0.0, 3.0, INF], "float64") == [-1, 0, 4, INF]
    assert of_values(ops.MapId((7, 8, 9)), [-1, 0, 2, 3, LARGE, -(2**63)], "int64") == [0, 7, 9, 0, 0, 0]
    assert of_values(ops.FillNull(5.0), [NAN, 1], "float32")[1] == 1
    assert of_values(ops.FillNull(5.0, nan=True), [NAN, 1], "float32") == [5, 1]
    large = 10**30  # beyond int64, and a number of the feature's all the same
    assert of_values(ops.FillNull(large, nan=True), [NAN, 1], "float64") == [1e30, 1]
    assert of_values(ops.Clamp(-large, large), [INF, -INF, 1], "float64") == [1e30, -1e30, 1]


def test_missing_values_are_filled() -> None:
    graph = FeatureGraph.of({"y": dense("x", "int64", is_nullable=True) >> ops.FillNull(-1)})
    given_values, valid = torch.tensor([1, 2, 3]), torch.tensor([True, False, True])
    for transform in transforms(graph):
        assert transform({"x": Nullable(given_values, valid)})["y"].tolist() == [1, -1, 3]
        assert transform({"x": given_values})["y"].tolist() == [1, 2, 3]
    assert given_values.tolist() == [1, 2, 3], "the batch that it is given stays as it is"


def test_a_result_has_memory_of_its_own_where_no_value_has_changed() -> None:
    """A program may change it in place: the batch that it gave, and other results, stay as they are."""
    values, matrix, ids = torch.rand(4), torch.rand(2, 4).t(), Jagged(torch.arange(3), torch.tensor([1, 2, 0, 0]))
    chains = {
        "filled": dense("x") >> ops.FillNull(0.0),
        "filled again": dense("x") >> ops.FillNull(1.0),
        "cast": dense("x") >> ops.Cast("float32"),
        "matrix": dense("m", width=2) >> ops.FillNull(0.0),
        "short lists": jagged("i") >> ops.FirstX(9),
        "x": dense("x"),
    }
    for transform in transforms(FeatureGraph.of(chains)):
        batch = {"x": values.clone(), "m": matrix.clone(), "i": ids}
        found = transform(batch)
        for name in ("filled", "filled again", "cast", "matrix"):
            assert found[name].is_contiguous()
            found[name].add_(1.0)
        found["short lists"].values.add_(1)
        assert torch.equal(found["x"], values)
        assert torch.equal(found["cast"], values + 1.0)
        assert torch.equal(found["matrix"], matrix + 1.0)
        assert torch.equal(batch["m"], matrix)
        assert ids.values.tolist() == [0, 1, 2]


floats = st.floats(width=32)
numbers = st.floats(-1e6, 1e6, width=32)
int64s = st.one_of(st.integers(-(2**63), LARGE), st.integers(-3, 3), st.sampled_from([-(2**63), LARGE]))
borders = (
    st.lists(st.one_of(numbers, st.sampled_from([0.0, 1.0])), min_size=1, max_size=9)
    .map(sorted)
    .filter(lambda found: all(a != b for a, b in zip(found, found[2:], strict=False)))
)
bounds = st.tuples(numbers, numbers).map(sorted)
OF_FLOATS: dict[type[ops.Operator], st.SearchStrategy[Any]] = {
    ops.Logit: st.builds(ops.Logit, st.floats(1e-6, 0.49)),
    ops.BoxCox: st.builds(ops.BoxCox, st.one_of(st.just(0.0), st.floats(-3, 3))),
    ops.Clamp: st.builds(lambda two: ops.Clamp(*two), bounds),
    ops.Bucketize: st.builds(ops.Bucketize, borders.map(tuple)),
    ops.FillNull: st.builds(ops.FillNull, numbers, st.booleans()),
    ops.Cast: st.builds(ops.Cast, st.sampled_from(["float64", "int32", "int64"])),
    ops.Onehot: st.builds(lambda two, count: ops.Onehot(two[0], two[1] + 1.0, count), bounds, st.integers(1, 7)),
}
OF_INTS: dict[type[ops.Operator], st.SearchStrategy[Any]] = {
    ops.SigridHash: st.builds(ops.SigridHash, int64s, st.integers(1, LARGE)),
    ops.Clamp: st.builds(lambda two: ops.Clamp(*sorted(two)), st.tuples(int64s, int64s)),
    ops.MapId: st.builds(ops.MapId, st.lists(int64s, min_size=1, max_size=5).map(tuple)),
    ops.FillNull: st.builds(ops.FillNull, int64s),
    ops.Cast: st.builds(ops.Cast, st.sampled_from(["float32", "float64", "int32"])),
    ops.Onehot: st.builds(ops.Onehot, st.just(-2.0), st.just(3.0), st.integers(1, 4)),
    ops.FirstX: st.builds(ops.FirstX, st.integers(0, 4)),
    ops.Ngram: st.builds(ops.Ngram, st.integers(1, 4)),
}


def rows_of(values: Any, num_rows: int) -> list[list[Any]]:
    """Of a dense tensor, or of Jagged: the values of each row."""
    if isinstance(values, Jagged):
        return [piece.tolist() for piece in values.values.split(values.lengths.tolist())] if num_rows else []
    return [row.tolist() for row in values.reshape(num_rows, -1)] if num_rows else []


def check(chains: list[tuple[Feature, list[list[Any]]]], num_rows: int) -> None:
    """Several features in one graph, run together, against the reference of each."""
    graph = FeatureGraph.of({f"y{at}": chain for at, (chain, _) in enumerate(chains)})
    batch: dict[str, Any] = {}
    for chain, rows in chains:
        kind = np.dtype(chain.input.type.dtype)
        flat = np.asarray([value for row in rows for value in row], dtype=kind)
        lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
        shape = (num_rows,) if chain.input.type.width == 1 else (num_rows, chain.input.type.width)
        dense_form = torch.from_numpy(flat).reshape(shape) if not chain.input.type.is_jagged else None
        batch[chain.input.name] = Jagged(torch.from_numpy(flat), lengths) if dense_form is None else dense_form
    for transform in transforms(graph):
        compare(graph, transform(batch), chains, num_rows)


def compare(
    graph: FeatureGraph, found: dict[str, Any], chains: list[tuple[Feature, list[list[Any]]]], num_rows: int
) -> None:
    for at, (chain, rows) in enumerate(chains):
        kind = np.dtype(chain.input.type.dtype)
        expected: list[list[Any]] = [[*map(kind.type, row)] for row in rows]
        for operator in chain.operators:
            expected = reference.apply(operator, expected)
        is_float = graph.types[graph.outputs[at].of[0]].is_float
        for made, wanted in zip(rows_of(found[f"y{at}"], num_rows), expected, strict=True):
            if is_float:
                np.testing.assert_allclose(made, [float(one) for one in wanted], rtol=1e-6, atol=1e-38)
            else:
                assert made == [int(one) for one in wanted]


@pytest.mark.shows("the eleven feature operators compute what a plain reference computes, whatever the values")
@pytest.mark.shows("the feature operators compute what NumPy computes, in torch and in native code")
@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(0, 6))
def test_kernels_do_what_the_reference_does(data: st.DataObject, num_rows: int) -> None:
    def feature(name: str, is_float: bool) -> tuple[Feature, list[list[Any]]]:
        operator = data.draw(st.one_of(*(OF_FLOATS if is_float else OF_INTS).values()))
        values = floats if is_float else int64s
        is_jagged = not operator.takes_dense or data.draw(st.booleans())
        width = 1 if is_jagged else data.draw(st.integers(1, 3))
        size = st.integers(0, 5) if is_jagged else st.just(width)
        rows = [
            data.draw(st.lists(values, min_size=count, max_size=count))
            for count in data.draw(st.lists(size, min_size=num_rows, max_size=num_rows))
        ]
        dtype = "float32" if is_float else "int64"
        source = jagged(name, dtype) if is_jagged else dense(name, dtype, width=width)
        return source >> operator, rows

    count = data.draw(st.integers(1, 4))
    check([feature(f"x{at}", data.draw(st.booleans())) for at in range(count)], num_rows)


@pytest.mark.parametrize("rows", [[[1.0, 2.0, 3.0]], [[], [], []]], ids=["more values", "fewer values"])
def test_one_class_of_lists_is_a_value_for_each_row(rows: list[list[Any]]) -> None:
    """As wide as a list's values are counted, and of another number of them."""
    check([(jagged("x") >> ops.Cast("float32") >> ops.Onehot(0.0, 1.0, 1), rows)], len(rows))


def test_equal_borders_in_two_dtypes_are_two_tables() -> None:
    bucketize = ops.Bucketize((0.0, 1.0, 1.0))
    chain = dense("x", "float64") >> bucketize >> ops.Cast("float32") >> bucketize
    check([(chain, [[0.0], [2.0], [NAN], [-7.0], [1.0]])], 5)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_one_operator_with_other_numbers_for_each_of_many_features(data: st.DataObject) -> None:
    """Each class of operators, whose features run together in native code."""
    is_float = data.draw(st.booleans())
    same = data.draw(st.sampled_from([*(OF_FLOATS if is_float else OF_INTS).values()]))
    dtype, values = ("float32", floats) if is_float else ("int64", int64s)
    chains = [
        (jagged(f"x{at}", dtype) >> data.draw(same), [data.draw(st.lists(values, max_size=4)) for _ in range(3)])
        for at in range(data.draw(st.integers(2, 5)))
    ]
    check(chains, 3)


def test_chains_of_many_features_with_many_values() -> None:
    """More than native code takes at once, uneven, and with a result of another dtype than what comes in."""
    draw = np.random.default_rng(1)
    chains = []
    for at in range(5):
        lengths = draw.integers(0, 60, 1500)
        rows = [draw.integers(-(2**63), LARGE, int(length)).tolist() for length in lengths]
        operators = (ops.FirstX(20 + at), ops.SigridHash(at, 1000 + at), ops.Clamp(5, 900 - at))
        chain = jagged(f"x{at}")
        for operator in operators:
            chain = chain >> operator
        chains.append((chain, rows))
    check(chains, 1500)
    long = [
        (dense(f"x{at}") >> ops.FillNull(0.5, nan=True) >> ops.Logit(0.1 / (at + 1)), draw.random((70_000, 1)).tolist())
        for at in range(2)
    ]
    graph = FeatureGraph.of({"all": [chain for chain, _ in long]})
    batch = {f"x{at}": np.asarray(rows, np.float32).ravel() for at, (_, rows) in enumerate(long)}
    for transform in transforms(graph):
        found = transform(batch)["all"]
        assert found.shape == (70_000, 2)
        assert found.is_contiguous()
        for at in range(2):
            expected = torch.logit(torch.from_numpy(batch[f"x{at}"]), eps=0.1 / (at + 1))
            torch.testing.assert_close(found[:, at], expected, rtol=1e-6, atol=1e-7)


@pytest.mark.shows("jagged features come out as a KeyedJaggedTensor, which torchrec looks up")
def test_jagged_features_come_together_as_torchrec_has_them() -> None:
    chains = [jagged("a") >> ops.FirstX(2), dense("b", "int64") >> ops.Clamp(0, 5), jagged("a") >> ops.Ngram(2)]
    graph = FeatureGraph.of({"sparse": [chains[0], chains[1], chains[2].named("a2")]})
    batch = {"a": Jagged(torch.tensor([1, 2, 3, 4]), torch.tensor([3, 1])), "b": torch.tensor([9, 1])}
    found = FeatureTransform(graph)(batch)["sparse"]
    assert isinstance(found, JaggedBatch)
    assert found.keys == ("a", "b", "a2")
    assert found.values.tolist() == [1, 2, 4, 5, 1, 1, 2, 2, 3, 4]
    assert found.lengths.tolist() == [2, 1, 1, 1, 4, 1]
    assert found.of("a2").values.tolist() == [1, 2, 2, 3, 4]
    with pytest.raises(KeyError, match="none of a, b, a2"):
        found.of("c")
    torchrec = pytest.importorskip("torchrec", reason="torchrec is not installed (an optional peer)")
    keyed = FeatureTransform(graph, torchrec=True)(batch)["sparse"]
    assert isinstance(keyed, torchrec.KeyedJaggedTensor)
    assert keyed["a2"].values().tolist() == [1, 2, 2, 3, 4]


def test_without_torchrec_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torchrec.sparse.jagged_tensor", None)
    from hetstream.errors import FeatureError

    with pytest.raises(FeatureError, match="pip install torchrec"):
        JaggedBatch(("a",), torch.zeros(1), torch.ones(1, dtype=torch.int64)).to_torchrec()
