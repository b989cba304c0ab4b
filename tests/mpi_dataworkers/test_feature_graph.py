"""Feature graphs: what is refused when one is made, JSON, digests; batches that do not fit; a stage of a loader."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from hetstream.errors import FeatureError
from hetstream.mpi_dataworkers.features import operators as ops
from hetstream.mpi_dataworkers.features.batches import Jagged, Nullable
from hetstream.mpi_dataworkers.features.cut import CutGraph, DataWorkersPart, TrainersPart
from hetstream.mpi_dataworkers.features.graph import (
    Feature,
    FeatureGraph,
    Input,
    Output,
    Step,
    dense,
    from_json,
    groups_of,
    jagged,
    to_json,
)
from hetstream.mpi_dataworkers.features.operators import FeatureType
from hetstream.mpi_dataworkers.features.transform import FeatureTransform

NAN = float("nan")
EVERY = FeatureGraph.of(
    {
        "dense": [
            dense("a", is_nullable=True) >> ops.FillNull(0.0) >> ops.Clamp(0.1, 0.9) >> ops.Logit(1e-3),
            dense("b") >> ops.FillNull(0.5, nan=True) >> ops.BoxCox(0.25),
        ],
        "sparse": [
            jagged("c") >> ops.FirstX(2) >> ops.SigridHash(1, 100),
            (jagged("c") >> ops.FirstX(2) >> ops.Ngram(2) >> ops.MapId((3, 4))).named("c2"),
        ],
        "bucket": dense("b") >> ops.Bucketize((0.0, 1.0)) >> ops.Cast("int64"),
        "hot": dense("b") >> ops.Onehot(0.0, 1.0, 4),
        "label": dense("label", "int64"),
    }
)


def problems_of(*steps: Step, inputs: tuple[Input, ...] = (), outputs: tuple[Output, ...] | None = None) -> str:
    given = inputs or (Input("x", FeatureType("float32")), Input("j", FeatureType("int64", is_jagged=True)))
    with pytest.raises(FeatureError) as caught:
        FeatureGraph(given, steps, (Output("y", ("x",)),) if outputs is None else outputs)
    return str(caught.value)


@pytest.mark.shows("operators on wrong types and a graph with a cycle are refused with all problems at once")
@pytest.mark.parametrize(
    ("operator", "of", "words"),
    [
        (ops.Logit(0.6), "x", "eps=0.6: between 0 and 0.5"),
        (ops.Logit(1e-9), "x", "1 - eps below 1"),
        (ops.Logit(), "j", 'Logit of j (jagged int64): it takes float32 or float64: put Cast("float32") before it'),
        (ops.BoxCox(NAN), "x", "lmbda=nan: a finite number"),
        (ops.Onehot(1.0, 1.0, 3), "x", "lower < upper"),
        (ops.Onehot(0.0, 1.0, 0), "x", "num_classes=0: at least 1"),
        (ops.Onehot(0.0, 1.0, 10**12), "x", "num_classes=1000000000000: at least 1 and at most 2**24"),
        (ops.SigridHash(0, -5), "j", "max_value=-5: 1 to 2**63 - 1"),
        (ops.SigridHash(0, 5), "x", "it takes int64"),
        (ops.FirstX(-1), "j", "n=-1: at least 0"),
        (ops.FirstX(1), "x", "jagged features only"),
        (ops.Ngram(0), "j", "n=0: at least 1"),
        (ops.Clamp(2.0, 1.0), "x", "lower <= upper"),
        (ops.Clamp(NAN, 1.0), "x", "finite, or None"),
        (ops.Clamp(), "x", "neither lower nor upper"),
        (ops.Clamp(0.5, 1.5), "j", "bound 0.5 is no int64"),
        (ops.Bucketize((1.0, 3.0, 2.0)), "x", "borders[2]=2.0 is below borders[1]=3.0: they may not decrease"),
        (ops.Bucketize((0.0, NAN)), "x", "borders[1]=nan: a finite number"),
        (ops.Bucketize((1.0, 1.0, 1.0)), "x", "stands there three times in float32"),
        (ops.Bucketize((1.0, 1.0 + 1e-12, 1.0 + 2e-12)), "x", "three times in float32"),
        (ops.Bucketize(()), "x", "borders is empty"),
        (ops.MapId(()), "j", "table is empty"),
        (ops.MapId((2**63,)), "j", "a value is no int64"),
        (ops.FillNull(1.5), "j", "value 1.5 is no int64"),
        (ops.FillNull(0, nan=True), "j", "no int64 is NaN"),
        (ops.Cast("float16"), "x", "dtype='float16': one of float32"),
        (ops.SigridHash(0, "many"), "j", "Expected `int`, got `str`"),  # type: ignore[arg-type]
        ("Clamp", "x", "'Clamp' is no operator"),
    ],
)
def test_what_an_operator_refuses(operator: Any, of: str, words: str) -> None:
    assert words in problems_of(Step("s", of, operator))


@pytest.mark.shows("a feature graph that cannot work is refused with all of its problems")
@pytest.mark.shows("operators on wrong types and a graph with a cycle are refused with all problems at once")
def test_every_problem_is_told_at_once() -> None:
    said = problems_of(
        Step("a", "nowhere", ops.Logit()),
        Step("b", "c", ops.FirstX(1)),
        Step("c", "b", ops.FirstX(1)),
        Step("d", "j", ops.FirstX(-1)),
        Step("d", "j", ops.FirstX(1)),
        inputs=(Input("x", FeatureType("float16")), Input("j", FeatureType("int64", True, 2))),
        outputs=(Output("y", ("z",)), Output("y", ())),
    )
    for words in (
        "there is no feature 'nowhere'",
        "b <- c <- b: each needs the next one, in a circle",
        "n=-1",
        "feature 'd' stands there 2 times",
        "output 'y' stands there 2 times",
        "dtype 'float16' is none of",
        "width 2",
        "output y: there is no feature 'z'",
        "one feature, or a list of features",
    ):
        assert words in said


@pytest.mark.parametrize(
    ("chain", "words"),
    [
        (lambda: dense("a", is_nullable=True) >> ops.FillNull(10**400), "a finite number"),
        (lambda: dense("a") >> ops.Clamp(-(10**400)), "finite, or None"),
        (lambda: dense("a") >> ops.Bucketize((10**400,)), "Bucketize"),
        (lambda: dense("a") >> ops.Bucketize(("x",)), "got `str`"),  # type: ignore[arg-type]
        (lambda: dense("a", "int64") >> ops.MapId((NAN,)), "got `float`"),  # type: ignore[arg-type]
        (lambda: dense("a", "int64") >> ops.MapId((1.7,)), "got `float`"),  # type: ignore[arg-type]
        (lambda: dense("a", width=1.5), "width=1.5"),  # type: ignore[arg-type]
        (lambda: dense("a\ud800"), "a name is a text"),
        (lambda: dense(3), "a name is a text"),  # type: ignore[arg-type]
        (lambda: dense("a") >> ops.FillNull, "it is no operator"),  # type: ignore[operator]
        (lambda: dense("a") >> 3, "it is no operator"),
        # A dict would be taken for its keys, and a set has no order.
        (lambda: dense("a", "int64") >> ops.MapId({7: 1}), "or tuples of these"),  # type: ignore[arg-type]
        (lambda: dense("a", "int64") >> ops.MapId({7, 8}), "or tuples of these"),  # type: ignore[arg-type]
        (lambda: dense("a", "int64") >> ops.MapId(frozenset({7})), "in this order"),  # type: ignore[arg-type]
        (lambda: dense("a") >> ops.Bucketize(frozenset({7.0})), "in their order"),  # type: ignore[arg-type]
        (lambda: dense("a") >> ops.Bucketize(1.0), "got `float`"),  # type: ignore[arg-type]
        (lambda: dense("a") >> ops.Cast([1]), "or tuples of these"),  # type: ignore[arg-type]
        (lambda: dense("a", []), "or tuples of these"),  # type: ignore[arg-type]
        (lambda: 5, "output y: 5 is no chain"),
        (lambda: "price", "output y: 'price' is no chain"),
        (lambda: [[dense("a")]], "is no chain"),
    ],
)
def test_numbers_that_are_none_are_problems_of_the_graph(chain: Callable[[], Feature], words: str) -> None:
    with pytest.raises(FeatureError, match=words):
        FeatureGraph.of({"y": chain()})


def test_a_message_has_no_table_of_a_million_places() -> None:
    with pytest.raises(FeatureError, match="got `float`") as caught:
        FeatureGraph.of({"y": dense("a", "int64") >> ops.MapId((*range(100_000), 1.5))})  # type: ignore[arg-type]
    assert len(str(caught.value)) < 500
    with pytest.raises(FeatureError, match="it is a list; give a dict of chains"):
        FeatureGraph.of([dense("a")])  # type: ignore[arg-type]
    with pytest.raises(FeatureError, match="graph is a CutGraph; give a FeatureGraph"):
        FeatureTransform(CutGraph(EVERY))  # type: ignore[arg-type]


def test_outputs_have_features_that_go_together() -> None:
    assert "it has no output" in problems_of(outputs=())
    for chains, words in (
        ([dense("a"), dense("b", "int64")], "float32 and int64; put Cast"),
        ([jagged("a"), jagged("a")], "key 'a' stands there twice: give one .named"),
        ([dense("a", is_nullable=True)], "values of a may be missing: put FillNull"),
    ):
        with pytest.raises(FeatureError, match=words):
            FeatureGraph.of({"y": chains})
    with pytest.raises(FeatureError, match="put FillNull before it"):
        FeatureGraph.of({"y": dense("a", is_nullable=True) >> ops.Logit()})
    with pytest.raises(FeatureError, match="feature 'a' stands there 2 times"):
        FeatureGraph.of({"y": dense("a"), "z": jagged("a")})


@pytest.mark.shows("a feature graph that cannot work is refused with all of its problems")
def test_a_graph_is_the_same_out_of_json_and_pickle_and_on_every_machine() -> None:
    again = from_json(to_json(EVERY))
    assert again == EVERY == pickle.loads(pickle.dumps(EVERY))
    before = pickle.dumps(again)
    assert again.digest == EVERY.digest != FeatureGraph.of({"y": dense("a")}).digest
    assert {type(step.operator) for step in EVERY.steps} == set(ops.OPERATORS)
    assert pickle.dumps(again) == before, "what was asked of it does not travel"
    program = "import sys; from hetstream.mpi_dataworkers.features.graph import from_json\n"
    program += "print(from_json(sys.stdin.read()).digest); assert 'torch' not in sys.modules"
    done = subprocess.run(
        [sys.executable, "-c", program], input=to_json(EVERY), capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == EVERY.digest
    numpy_s = FeatureGraph.of({"y": dense("a", "int64") >> ops.SigridHash(np.int64(1), np.int64(5))})  # type: ignore[arg-type]
    assert numpy_s.digest == FeatureGraph.of({"y": dense("a", "int64") >> ops.SigridHash(1, 5)}).digest
    assert from_json(to_json(numpy_s)) == numpy_s
    whole = FeatureGraph.of({"y": dense("a") >> ops.BoxCox(1) >> ops.Clamp(0, 1) >> ops.Bucketize((1, 2))})
    point = FeatureGraph.of({"y": dense("a") >> ops.BoxCox(1.0) >> ops.Clamp(0.0, 1.0) >> ops.Bucketize((1.0, 2.0))})
    assert whole == point == from_json(to_json(whole))
    assert whole.digest == point.digest == from_json(to_json(whole)).digest


def test_json_that_is_no_graph() -> None:
    form = json.loads(to_json(EVERY))
    for change, words in (
        ({"version": 2}, "version 2"),
        ({"more": 1}, "unknown field `more`"),
        ({"inputs": 5}, "Expected `array`"),
        ({"steps": [{"name": "s", "of": "a", "operator": "Log"}]}, "there is no operator 'Log'; there are BoxCox"),
        ({"steps": [{"name": "s", "of": "a", "operator": "FirstX", "parameters": {"m": 1}}]}, "no parameter m"),
        ({"steps": [{"name": "s", "of": "a", "operator": "FirstX", "parameters": {"n": "1"}}]}, "got `str`"),
        ({"steps": []}, "there is no feature 'a.FillNull"),
    ):
        with pytest.raises(FeatureError, match=words):
            from_json(json.dumps({**form, **change}))
    deep = '{"version": 1, "inputs": [], "outputs": [], "steps": [{"parameters": {"n": ' + "[" * 10_000
    for text in (to_json(EVERY)[:-5], "\ud800", deep, None, 5):
        with pytest.raises(FeatureError, match="no feature graph in JSON"):
            from_json(text)  # type: ignore[arg-type]
    with pytest.raises(FeatureError, match="graph is a int; give a FeatureGraph"):
        to_json(5)  # type: ignore[arg-type]


def test_a_flat_form_of_other_things_is_refused_in_words() -> None:
    node, of = Input("x", FeatureType("float32")), Output("y", ("x",))
    with pytest.raises(FeatureError, match=r"inputs is a int; give a tuple of Input.*steps is a int.*outputs is a int"):
        FeatureGraph(1, 2, 3)  # type: ignore[arg-type]
    for parts, words in (
        (((5,), (), (of,)), r"inputs\[0\] is 5, and no Input"),
        (((Input("x", "float32"),), (), (of,)), r"inputs\[0\]: type is 'float32', and no FeatureType"),
        (((node,), (node,), (of,)), r"steps\[0\] is Input.*, and no Step"),
        (((node,), (Step([], "x", ops.Cast()),), (of,)), r"steps\[0\]: .*: names are texts"),
        (((node,), (Step("s", {}, ops.Cast()),), (of,)), r"steps\[0\]: .*: names are texts"),
        (((node,), (), (Output("y", "x"),)), r"outputs\[0\]: of='x', keys=\(\): tuples of names"),
        (((node,), (), (Output("y", ([],)),)), r"outputs\[0\]: .*: names are texts"),
    ):
        with pytest.raises(FeatureError, match=f"this is no feature graph: {words}"):
            FeatureGraph(*parts)  # type: ignore[arg-type]


@pytest.mark.shows("moved operators are fused for CPUs: native code")
def test_chains_that_begin_alike_are_computed_once_and_like_chains_together() -> None:
    assert sum(step.operator == ops.FirstX(2) for step in EVERY.steps) == 1
    many = FeatureGraph.of({"y": [dense(f"a{at}") >> ops.Clamp(0.0, at + 1.0) >> ops.Logit() for at in range(20)]})
    [group] = groups_of(many)
    assert len(group) == 20
    kinds = FeatureGraph.of({"x": dense("a") >> ops.Cast("int32"), "y": dense("b") >> ops.Cast("int64")})
    assert len(groups_of(kinds)) == 2


def a_batch(rows: int = 3) -> dict[str, Any]:
    return {
        "a": Nullable(torch.rand(rows), torch.arange(rows) % 2 == 0),
        "b": torch.full((rows,), 0.3),
        "c": Jagged(torch.arange(2 * rows), torch.full((rows,), 2)),
        "label": torch.ones(rows, dtype=torch.int64),
    }


@pytest.mark.shows("NaN, ids out of range, borders that decrease and empty features are computed or refused")
def test_an_empty_batch_has_empty_features() -> None:
    found = FeatureTransform(EVERY)(a_batch(0))
    assert found["dense"].shape == (0, 2)
    assert (found["hot"].shape, found["bucket"].dtype) == ((0, 4), torch.int64)
    assert (len(found["sparse"].values), len(found["sparse"].lengths)) == (0, 0)


def test_an_empty_batch_has_the_columns_of_others() -> None:
    wide = FeatureGraph.of(
        {"y": [dense("x", width=8) >> ops.Clamp(0.0, 1.0), dense("b") >> ops.Onehot(0.0, 1.0, 5), dense("b")]}
    )
    for rows in (0, 3):
        batch = {"x": torch.rand(rows, 8), "b": torch.rand(rows)}
        assert FeatureTransform(wide)(batch)["y"].shape == (rows, 14)


def test_what_a_program_has_set_as_default_changes_nothing() -> None:
    batch = a_batch()
    want = FeatureTransform(EVERY)(batch)
    none = {**batch, "c": Jagged(torch.empty(0, dtype=torch.int64), torch.zeros(3, dtype=torch.int64))}
    hot = FeatureGraph.of({"y": jagged("c") >> ops.Onehot(0.0, 1.0, 3)})
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    try:
        found = FeatureTransform(EVERY)(batch)
        of_none = FeatureTransform(hot)(none)["y"]
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    for name in ("dense", "hot", "bucket"):
        assert found[name].dtype == want[name].dtype
        assert torch.equal(found[name], want[name])
    assert torch.equal(found["sparse"].values, want["sparse"].values)
    assert (of_none.dtype, of_none.tolist()) == (torch.float32, [[1.0, 0.0, 0.0]] * 3)


@pytest.mark.shows("operators on wrong types and a graph with a cycle are refused with all problems at once")
def test_numpy_arrays_of_every_kind_are_taken_or_refused_in_words() -> None:
    graph = FeatureGraph.of({"y": dense("x") >> ops.Clamp(1.0, 2.0)})
    transform, native = FeatureTransform(graph), FeatureTransform(graph, native=True)
    read_only = np.arange(4, dtype=np.float32)
    read_only.setflags(write=False)
    for array in (read_only, read_only[::-1], read_only[::2], read_only.astype(">f4")):
        assert transform({"x": array})["y"].tolist() == np.clip(array, 1, 2).tolist()
    assert read_only.tolist() == [0, 1, 2, 3]
    for array, words in (
        (np.array([None, 1.0]), "x is a ndarray of object"),
        (np.array(["a"]), "x is a ndarray of <U1"),
        (
            np.zeros(3, dtype=np.longdouble),
            "x is a ndarray of float.*it must be .* a NumPy array of numbers of 8 bytes",
        ),
        (np.ma.masked_array(read_only, [0, 1, 0, 0]), r"x is a masked array; give Nullable\(x.data, ~np.ma.getmask"),
        (torch.eye(3)[0].to_sparse(), "x is sparse_coo"),
        (torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged), "x is nested"),
        (_Elsewhere(torch.ones(2)), "x is a _Elsewhere; it must be a tensor in host memory"),
    ):
        for each in (transform, native):
            with pytest.raises(FeatureError, match=words):
                each({"x": array})
    for each in (transform, native):
        found = each({"x": torch.ones(2).as_subclass(_Named)})["y"]
        assert (type(found), found.tolist()) == (torch.Tensor, [1.0, 1.0])


class _Named(torch.Tensor):
    """A tensor with a name of its own, and nothing else."""


class _Elsewhere(torch.Tensor):
    """A tensor whose values are another one's, as those of torch.masked and DTensor: it has no memory."""

    @staticmethod
    def __new__(cls: type[_Elsewhere], of: torch.Tensor) -> _Elsewhere:
        return torch.Tensor._make_wrapper_subclass(cls, of.shape, dtype=of.dtype)  # type: ignore[no-any-return,attr-defined]

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{function} was called")


def test_arrays_of_one_row_that_run_backwards_are_taken() -> None:
    transform = FeatureTransform(FeatureGraph.of({"y": dense("x"), "z": jagged("l"), "w": dense("w", width=2)}))
    for rows in (0, 1, 2):
        numbers = np.arange(rows)
        floats = numbers.astype(np.float32)
        wide = np.arange(2 * rows, dtype=np.float32).reshape(rows, 2)
        batch = {"x": floats[::-1], "l": (numbers[::-1], np.ones(rows, dtype=np.int64)[::-1]), "w": wide[::-1, ::-1]}
        found = transform(batch)
        assert found["y"].tolist() == floats[::-1].tolist()
        assert found["z"].values.tolist() == numbers[::-1].tolist()
        assert found["w"].tolist() == wide[::-1, ::-1].tolist()


def test_batches_that_do_not_fit_are_told_feature_by_feature() -> None:
    transform = FeatureTransform(EVERY)
    whole = a_batch()
    wrong = {
        "b": torch.zeros(3, dtype=torch.float64),
        "c": Jagged(torch.arange(5), torch.tensor([2, 2, 2])),
        "label": torch.ones(3, 1, dtype=torch.int64),
    }
    with pytest.raises(FeatureError) as caught:
        transform({**whole, **wrong})
    for words in ("b is float64 on cpu, and float32 in the graph", "label has the shape (3, 1), and (rows,)"):
        assert words in str(caught.value)
    for change, words in (
        ({"c": wrong["c"]}, "c has 5 values, and its lengths are 6 together"),
        (
            {"c": Jagged(torch.arange(3), torch.tensor([4, -2, 1]))},
            "c has a negative length: row 1 has -2, so its borders fall from 4 to 2",
        ),
        (
            {"c": Jagged(torch.arange(0), torch.tensor([2**63 - 1, 2**63 - 1, 2]))},
            "c has a list that is longer than all of its values: row 0 has 9223372036854775807",
        ),
        ({"c": torch.arange(3)}, "a jagged feature is Jagged"),
        ({"b": Nullable(torch.zeros(3), torch.ones(3, dtype=torch.bool))}, "b has missing values"),
        ({"b": torch.zeros(4)}, "one number of rows, 3 here: b has 4"),
        ({"b": [1.0, 2.0, 3.0]}, "b is a list; it must be a tensor"),
    ):
        with pytest.raises(FeatureError, match=words):
            transform({**whole, **change})
    del whole["b"]
    with pytest.raises(FeatureError, match="it has no 'b'; it has a, c, label"):
        transform(whole)
    del whole["c"]
    with pytest.raises(FeatureError, match="it has no 'b', 'c'; it has a, label"):
        transform(whole)
    with pytest.raises(FeatureError, match="must be a dict of features"):
        transform([1])  # type: ignore[arg-type]


def test_it_leaves_the_batch_as_it_is_and_can_be_pickled() -> None:
    batch = a_batch()
    before = pickle.dumps(batch)
    transform = FeatureTransform(EVERY)
    found = transform(batch)
    assert pickle.dumps(batch) == before
    again = pickle.loads(pickle.dumps(transform))
    assert again.fingerprint == transform.fingerprint
    for name, value in again(batch).items():
        assert all(map(torch.equal, _tensors(value), _tensors(found[name]))), name


def _tensors(value: Any) -> list[torch.Tensor]:
    return [value] if isinstance(value, torch.Tensor) else [part for part in value if isinstance(part, torch.Tensor)]


@pytest.mark.shows("a row at fault is told with sample, file and line")
def test_a_step_that_cannot_work_is_named_with_its_line() -> None:
    line = test_a_step_that_cannot_work_is_named_with_its_line.__code__.co_firstlineno + 3  # behind the mark
    chain = dense("price") >> ops.Bucketize((3.0, 1.0))
    with pytest.raises(FeatureError, match=rf"step price.Bucketize \(test_feature_graph.py:{line}\): .* not decrease"):
        FeatureGraph.of({"bucket": chain})
    bare = FeatureGraph.of({"price": replace(chain, operators=())})
    assert not bare.steps, "a chain may be made anew with other operators"


def test_lines_are_no_part_of_a_graph() -> None:
    one = FeatureGraph.of({"price": dense("price") >> ops.Clamp(0.0, 1.0)})
    other = FeatureGraph.of({"price": dense("price") >> ops.Clamp(0.0, 1.0)})
    assert one.steps[0].line != other.steps[0].line
    assert (one, one.digest, pickle.dumps(one)) == (other, other.digest, pickle.dumps(other))


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("width", [1, 2])
def test_what_a_program_does_to_one_feature_in_place_happens_to_no_other(native: bool, width: int) -> None:
    chains = [jagged(name) >> ops.SigridHash(1, 100) for name in "jk"]
    outputs = {name: dense(name, width=width) >> ops.Clamp(0.0, 1.0) for name in "abc"}
    graph = FeatureGraph.of(
        {**outputs, "all": list(outputs.values()), "one": [outputs["a"]], "j": chains[0], "jk": chains}
    )
    given: dict[str, Any] = {name: torch.rand(6, width).squeeze(1) for name in "abc"}
    lists = Jagged(torch.arange(6), torch.ones(6, dtype=torch.int64))
    made = FeatureTransform(graph, native=native)({**given, "j": lists, "k": lists})
    before = {name: made[name].clone() for name in ("a", "b", "all", "one")}
    ids = made["jk"].values.clone()
    weight = torch.ones_like(made["a"], requires_grad=True)
    loss = (weight * made["a"]).sum()  # its backward needs a
    made["b"].mul_(2.0)
    made["c"].mul_(weight)
    made["j"].values.add_(1)
    loss.backward()  # type: ignore[no-untyped-call]
    assert torch.equal(weight.grad, before["a"]), "autograd takes each for a tensor of its own"
    made["a"].add_(1.0)
    assert all(torch.equal(made[name], before[name]) for name in ("all", "one"))
    assert torch.equal(made["jk"].values, ids)


LISTS = jagged("x")
OUTPUTS_THAT_SHARE = {
    "an input": {"a": dense("d"), "b": dense("d"), "c": LISTS, "d": LISTS, "e": [dense("d"), dense("e")], "f": [LISTS]},
    "a chain": {
        "a": dense("d") >> ops.Clamp(0.0),
        "b": dense("d") >> ops.Clamp(0.0),
        "c": [dense("d") >> ops.Clamp(0.0)],
    },
    "lengths": {"a": LISTS >> ops.Clamp(0, 9), "b": LISTS >> ops.SigridHash(0, 10), "c": LISTS >> ops.MapId((1, 2))},
    "lengths of short lists": {"a": LISTS >> ops.FirstX(9), "b": LISTS >> ops.FirstX(9) >> ops.Clamp(0, 3), "c": LISTS},
    "lengths in a matrix": {
        "a": [LISTS >> ops.Clamp(0, 9), (jagged("y") >> ops.Clamp(0, 9)).named("y")],
        "b": [(jagged("y") >> ops.SigridHash(0, 9)).named("z")],
        "c": jagged("y") >> ops.FirstX(1) >> ops.Clamp(0, 2),
    },
}


@pytest.mark.parametrize("native", [False, True, "exact"])
@pytest.mark.parametrize("outputs", OUTPUTS_THAT_SHARE.values(), ids=OUTPUTS_THAT_SHARE)
def test_outputs_of_one_feature_or_of_lists_of_one_length_share_no_memory(native: Any, outputs: dict[str, Any]) -> None:
    lengths = torch.tensor([2, 0, 3, 1, 1, 1, 0, 4])
    batch = {
        "x": Jagged(torch.arange(6), lengths[:4]),  # of a transport, all columns may lie in one piece of memory
        "y": Jagged(torch.arange(6), lengths[4:]),
        "d": torch.tensor([0.5, -2, 3, 4]),
        "e": torch.ones(4),
    }

    def tensors(found: Any) -> list[torch.Tensor]:
        if isinstance(found, torch.Tensor):
            return [found]
        return [each for part in found if not isinstance(part[0], str) for each in tensors(part)]

    graph = FeatureGraph.of(outputs)
    made = [FeatureTransform(graph, native=native)(batch)]
    for step in graph.steps:
        cut = CutGraph(graph, (step.name,))
        made.append(TrainersPart(cut)(DataWorkersPart(cut)(batch)))
    for found in made:
        each = [tensor for output in found.values() for tensor in tensors(output)]
        for at, tensor in enumerate(each):
            before = [other.clone() for other in each]
            tensor.fill_(77)
            same = [torch.equal(*pair) for pair in zip(before, each, strict=True)]
            assert all(same[:at] + same[at + 1 :]), "another output has changed with it"
        lengths.copy_(torch.tensor([2, 0, 3, 1, 1, 1, 0, 4]))
