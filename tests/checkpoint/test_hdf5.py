"""Export for analysis tools: the tables are what docs/checkpoint.md says, and hold a state exactly."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import h5py
import hypothesis.strategies as st
import numpy as np
from hypothesis import HealthCheck, given, settings

from hetstream.checkpoint.formats.hdf5 import RankState, SavedState, write_hdf5
from hetstream.checkpoint.record.layout import Generation, TensorSpec
from hetstream.checkpoint.record.structure import Record, TensorRef
from hetstream.checkpoint.record.tree import Encoder

LOADER = {
    "version": 2,
    "epoch": 3,
    "turn": 0,
    "step": 117,
    "shards": "null",
    "world_size": 2,
    "is_global": True,
    "pipeline": {"dataset": "a/b.h5 of 100", "seed": "7"},
    "sampler": "",
    "drawn": "ä\0b",
    "quarantined": [4, 9],
}


def saved(step: int, attempt: int, tree: dict[str, Any], **metrics: float) -> SavedState:
    encoder = Encoder()
    record = Record({key: encoder.encode(key, value) for key, value in tree.items()}, [], ["loader"])
    table = [TensorSpec("model.weight", "F32", (3, 4)), TensorSpec("model.bias", "BF16", ())]
    return SavedState(Generation(attempt, step), 1, 1000, 12.5, metrics, [RankState(0, table, record)])


def test_the_tables_are_as_documented(tmp_path: Path) -> None:
    path = tmp_path / "out.h5"
    write_hdf5(path, "DIR", [saved(20, 2, {"loader": LOADER}, loss=0.5, acc=1), saved(10, 1, {"loader": {}}, loss=2.0)])
    with h5py.File(path) as file:
        assert dict(file.attrs) == {"format": "hetstream checkpoints", "version": 1, "source": "DIR"}
        steps = file["steps"][()]
        assert steps.dtype.names == ("name", "attempt", "step", "world_size", "num_bytes", "time_s")
        assert [tuple(row) for row in steps][1] == (b"step-0000000010.1", 1, 10, 1, 1000, 12.5)
        np.testing.assert_array_equal(file["metrics/loss"][()], [0.5, 2.0])
        np.testing.assert_array_equal(file["metrics/acc"][()], [1.0, math.nan])
        one = file["checkpoints/step-0000000020.2"]
        assert (one.attrs["step"], one["metrics/loss"][()]) == (20, 0.5)
        assert [tuple(row) for row in one["layout"][()]] == [
            (0, b"model.weight", b"F32", b"3x4", 12),
            (0, b"model.bias", b"BF16", b"", 1),
        ]
        state = one["ranks/0/state/loader"]
        assert state["epoch"][()] == 3
        assert state["is_global"].dtype == np.bool_
        assert state["pipeline/dataset"].asstr()[()] == "a/b.h5 of 100"
        np.testing.assert_array_equal(state["quarantined"][()], [4, 9])


def node_of(member: Any) -> Any:
    """A structure again, from what docs/checkpoint.md says of the attribute `kind`."""
    kind = member.attrs.get("kind")
    if isinstance(member, h5py.Group):
        assert kind in (None, "list")
        if kind == "list":
            return [node_of(item) for item in member.values()]
        return {"" if name == "%" else unquote(name): node_of(item) for name, item in member.items()}
    if kind == "none":
        return None
    if kind == "utf-8":
        return member[()].tobytes().decode()
    values = member.asstr()[()] if h5py.check_string_dtype(member.dtype) else member[()]
    return values.tolist() if isinstance(values, np.ndarray | np.generic) else values


def test_tensors_of_a_state_are_datasets(tmp_path: Path) -> None:
    specs = [TensorSpec("loader.generator", "U8", (3, 2)), TensorSpec("loader.scale", "BF16", (2,))]
    values = [bytes(range(6)), b"\0\1\2\3"]
    refs = [TensorRef(0), TensorRef(1, kind="bytes"), TensorRef(0, shape=(6,))]
    record = Record({"loader": {"a": {"$tensor": 0}, "b": [{"$tensor": 1}], "c": {"$tensor": 2}}}, refs, [])
    path = tmp_path / "out.h5"
    one = SavedState(Generation(1, 1), 1, 0, 0.0, {}, [RankState(0, specs, record, specs, values)])
    write_hdf5(path, "DIR", [one])
    with h5py.File(path) as file:
        state = file["checkpoints/step-0000000001.1/ranks/0/state/loader"]
        assert {state[name].attrs["kind"] for name in ("a", "b/0", "c")} == {"tensor"}
        np.testing.assert_array_equal(state["a/values"][()], np.arange(6, dtype=np.uint8).reshape(3, 2))
        assert state["b/0/values"][()].tobytes() == values[1]


nodes = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8")),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(st.integers(-5, 5))
        | st.lists(st.text(st.characters(codec="utf-8"), max_size=3))
        | st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=5), inner, max_size=4)
    ),
    max_leaves=15,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.sampled_from([".", "..", "", "/", "a/b", "%2F", "$tuple", "ä", "x\0y"]), nodes, max_size=4))
def test_any_structure_is_held_exactly(tmp_path: Path, tree: dict[str, Any]) -> None:
    path = tmp_path / "any.h5"
    path.unlink(missing_ok=True)
    record = Record(tree, [], [])
    one = SavedState(Generation(1, 1), 1, 0, 0.0, {}, [RankState(0, (), record)])
    write_hdf5(path, "DIR", [one])
    with h5py.File(path) as file:
        state = node_of(file["checkpoints/step-0000000001.1/ranks/0/state"])
    assert json.dumps(state) == json.dumps(tree)  # order, and 1 apart from 1.0 and True


def test_without_h5py_the_error_names_the_extra() -> None:
    code = "import sys; sys.modules['h5py'] = None; import hetstream.checkpoint.formats.hdf5"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert re.search(r"pip install '\S+\[hdf5\]'", done.stderr)
