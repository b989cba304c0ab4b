"""Export for analysis tools: the tables are what docs/checkpoint.md says, and a state comes back exactly."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from hetstream.checkpoint.errors import DamagedCheckpoint
from hetstream.checkpoint.formats.hdf5 import RankState, SavedState, read_hdf5, write_hdf5
from hetstream.checkpoint.record.generation import Generation
from hetstream.checkpoint.record.layout import TensorSpec
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


def test_a_loaders_state_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "out.h5"
    before = [saved(20, 2, {"loader": LOADER}, **{"loss/train": 0.5})]
    write_hdf5(path, "DIR", before)
    (after,) = read_hdf5(path)
    assert (after.generation, after.world_size, after.time_s) == (Generation(2, 20), 1, 12.5)
    assert after.metrics == {"loss/train": 0.5}
    assert after.ranks[0].record == before[0].ranks[0].record
    assert after.ranks[0].record.decode()["loader"] == LOADER


def test_tensors_of_a_state_come_back_and_tied_ones_stay_tied(tmp_path: Path) -> None:
    specs = [TensorSpec("loader.generator", "U8", (3, 2)), TensorSpec("loader.scale", "BF16", (2,))]
    values = [bytes(range(6)), b"\0\1\2\3"]
    refs = [TensorRef(0), TensorRef(1, kind="bytes"), TensorRef(0, shape=(6,))]
    record = Record({"loader": {"a": {"$tensor": 0}, "b": [{"$tensor": 1}], "c": {"$tensor": 2}}}, refs, [])
    path = tmp_path / "out.h5"
    one = SavedState(Generation(1, 1), 1, 0, 0.0, {}, [RankState(0, specs, record, specs, values)])
    write_hdf5(path, "DIR", [one])
    back = read_hdf5(path)[0].ranks[0]
    assert back.record == record
    assert [*back.specs] == specs
    assert [*back.values] == values
    with h5py.File(path) as file:
        group = file["checkpoints/step-0000000001.1/ranks/0/state/loader/a/values"]
        np.testing.assert_array_equal(group[()], np.arange(6, dtype=np.uint8).reshape(3, 2))


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
def test_any_structure_comes_back(tmp_path: Path, tree: dict[str, Any]) -> None:
    path = tmp_path / "any.h5"
    path.unlink(missing_ok=True)
    record = Record(tree, [], [])
    one = SavedState(Generation(1, 1), 1, 0, 0.0, {}, [RankState(0, (), record)])
    write_hdf5(path, "DIR", [one])
    back = read_hdf5(path)[0].ranks[0].record
    assert back.write() == record.write()  # order, and 1 apart from 1.0 and True


def test_other_and_damaged_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.h5"
    path.write_bytes(b"no hdf5 at all")
    with pytest.raises(DamagedCheckpoint, match="cannot be read as HDF5"):
        read_hdf5(path)
    path.unlink()
    with h5py.File(path, "w") as file:
        file["images"] = [1, 2]
    with pytest.raises(DamagedCheckpoint, match="no export of hetstream"):
        read_hdf5(path)
    path.unlink()
    write_hdf5(path, "DIR", [saved(1, 1, {"loader": LOADER})])
    whole = path.read_bytes()
    for size in (100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(DamagedCheckpoint):
            read_hdf5(path)


LOADER_AT = "checkpoints/step-0000000001.1/ranks/0/state/loader"


@pytest.mark.parametrize(
    "spoil",
    [
        lambda file: file.__setitem__(f"{LOADER_AT}/out", h5py.ExternalLink("/etc/passwd", "/")),
        lambda file: file.__setitem__(f"{LOADER_AT}/out", h5py.SoftLink("/")),
        lambda file: file.__setitem__(f"{LOADER_AT}/ring", file[LOADER_AT]),
        lambda file: file.create_dataset(f"{LOADER_AT}/huge", (1 << 50,), "u1", chunks=(1 << 10,)),
        lambda file: file.create_dataset(f"{LOADER_AT}/many", (1 << 24,), h5py.string_dtype(), chunks=(1 << 10,)),
        lambda file: file["checkpoints/step-0000000001.1"].attrs.__setitem__("step", 2),
        lambda file: file["checkpoints/step-0000000001.1"].attrs.__delitem__("step"),
        lambda file: file.__delitem__("checkpoints/step-0000000001.1/ranks/0/shared"),
        lambda file: file.move("checkpoints/step-0000000001.1/ranks/0", "checkpoints/step-0000000001.1/ranks/x"),
        lambda file: file[f"{LOADER_AT}/pipeline"].attrs.__setitem__("kind", "tensor"),
    ],
)
def test_a_hostile_file_is_refused(tmp_path: Path, spoil: Any) -> None:
    path = tmp_path / "x.h5"
    write_hdf5(path, "DIR", [saved(1, 1, {"loader": LOADER})])
    with h5py.File(path, "r+") as file:
        spoil(file)
    with pytest.raises(DamagedCheckpoint):
        read_hdf5(path)


def test_without_h5py_the_error_names_the_extra() -> None:
    code = "import sys; sys.modules['h5py'] = None; import hetstream.checkpoint.formats.hdf5"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert re.search(r"pip install '\S+\[hdf5\]'", done.stderr)
