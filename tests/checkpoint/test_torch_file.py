"""`hetstream ckpt convert --to torch`: anybody opens the file with `torch.load(..., weights_only=True)`."""

from __future__ import annotations

import errno
import math
import os
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hetstream.checkpoint.convert.weights import save_torch
from hetstream.checkpoint.errors import UnsupportedState
from hetstream.checkpoint.tensors.leaves import DTYPES
from tests.checkpoint.mounted import mounted_memory

Point = namedtuple("Point", ["x", "y"])


@dataclass
class Settings:
    rate: float
    name: str


def saved(state: dict[str, Any], path: Path) -> Path:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        save_torch(state, descriptor)
    finally:
        os.close(descriptor)
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state.pt"


@pytest.mark.shows("`ckpt convert --to torch` opens with `torch.load(weights_only=True)`, mapped too")
@pytest.mark.parametrize("mmap", [False, True])
def test_every_dtype_and_shape_comes_back(path: Path, mmap: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    state = {}
    for dtype in {*DTYPES.values()} - {torch.complex32}:  # torch warns of its own support for it
        for shape in [(7,), (16, 16), (), (0,), (3, 0, 2)]:
            data = torch.randint(0, 2, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8, generator=generator)
            state[f"{dtype}{shape}"] = data.view(dtype).reshape(shape)
    back = torch.load(saved(state, path), weights_only=True, mmap=mmap)
    assert list(back) == list(state)
    for name, value in state.items():
        assert (back[name].dtype, back[name].shape) == (value.dtype, value.shape)
        if value.numel():
            assert torch.equal(back[name].reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8)), name


@pytest.mark.shows("`ckpt convert --to torch` opens with `torch.load(weights_only=True)`, mapped too")
def test_tied_tensors_share_a_storage_and_views_keep_their_strides(path: Path) -> None:
    whole = torch.arange(24.0).reshape(4, 6)
    state = {"a": whole, "b": whole, "turned": whole.t(), "column": whole[:, 2], "expanded": whole[:1].expand(3, 6)}
    back = torch.load(saved(state, path), weights_only=True)
    assert len({tensor.untyped_storage().data_ptr() for tensor in back.values()}) == 1
    for name, value in state.items():
        assert torch.equal(back[name], value)
        assert back[name].stride() == value.stride()


def test_one_storage_seen_as_two_dtypes_is_written_twice(path: Path) -> None:
    """torch.save refuses it."""
    numbers = torch.tensor([1.0, -2.0])
    back = torch.load(saved({"f": numbers, "i": numbers.view(torch.int32)}, path), weights_only=True)
    assert torch.equal(back["f"], numbers)
    assert torch.equal(back["i"], numbers.view(torch.int32))


def test_parameters_stay_parameters(path: Path) -> None:
    state = {
        "trained": torch.nn.Parameter(torch.ones(2)),
        "frozen": torch.nn.Parameter(torch.ones(3), requires_grad=False),
        "grad": torch.ones(4, requires_grad=True),
        "sparse": torch.eye(3).to_sparse(),
        "module": torch.nn.BatchNorm1d(3).state_dict(),
    }
    back = torch.load(saved(state, path), weights_only=True)
    assert [type(back[name]) for name in ("trained", "frozen")] == [torch.nn.Parameter] * 2
    assert [back[name].requires_grad for name in ("trained", "frozen", "grad")] == [True, False, True]
    assert torch.equal(back["sparse"].to_dense(), torch.eye(3))
    assert back["module"]._metadata == state["module"]._metadata  # type: ignore[attr-defined]


@pytest.mark.shows("`ckpt convert --to torch` opens with `torch.load(weights_only=True)`, mapped too")
def test_plain_values_come_back_as_they_are(path: Path) -> None:
    state = {
        "numbers": [0, 1, -1, 255, 2**31, 2**63, -(2**64), 1 << 900, -(1 << 2038), 0.1, -0.0, math.inf, 1e-320],
        "text": ["", "ä\U0001f600", "\udc80", "a" * 5000],
        "bytes": [b"", b"\x00\xff" * 2000, bytearray(b"abc")],
        "keys": {1: "int", "1": "str", (1, "a"): "tuple", None: "none", 1.5: "float", "$tuple": 1},
        "sets": [set(), {1, 2}, {"a", (1, 2)}],
        "ordered": OrderedDict([("b", 1), ("a", OrderedDict([(3, 4)]))]),
        "counter": Counter("abca"),
        "complex": [1 + 2j, complex(math.inf, -0.0)],
        "deep": [[[[{"a": (1, (2, (3,)))}]]]],
        "constants": [None, True, False],
        "of torch": [torch.bfloat16, torch.device("cuda:1"), torch.Size([2, 3]), torch.strided],
    }
    back = torch.load(saved(state, path), weights_only=True)
    assert back == state
    assert type(back["ordered"]["a"]) is OrderedDict
    assert type(back["of torch"][2]) is torch.Size


@pytest.mark.shows("what has no plain form comes back from `torch.load` as its nearest, as documented")
def test_values_without_a_plain_form_come_back_as_the_nearest(path: Path) -> None:
    """The table in docs/checkpoint-formats.md."""
    state = {
        "named": Point(1, [2]),
        "frozen": frozenset({1}),
        "range": range(1, 9, 2),
        "slice": slice(None, 3),
        "data": Settings(0.1, "a"),
        "default": defaultdict(list, {1: [2]}),
        "deque": deque([1, 2], maxlen=3),
        "scalars": [np.float32(0.5), np.int64(-7), np.bool_(True), np.complex64(1 + 2j), np.float16(0.25)],
        "array": np.arange(6, dtype=np.uint32).reshape(2, 3),
        "bytes": b"\x00\xff" * 3000,
        "turned": np.arange(6, dtype=">f4")[::-1],
        "words": np.array(["a", "bc"]),
        "date": np.datetime64("2020-01-02"),
        "form": torch.channels_last,
    }
    back = torch.load(saved(state, path), weights_only=True)
    assert (back["named"], type(back["named"])) == ((1, [2]), tuple)
    assert (back["frozen"], back["range"], back["slice"]) == ((1,), (1, 9, 2), (None, 3, None))
    assert back["data"] == {"rate": 0.1, "name": "a"}
    assert (back["default"], type(back["default"])) == ({1: [2]}, dict)
    assert back["deque"] == [1, 2]
    assert [(value, type(value)) for value in back["scalars"]] == [
        (0.5, float), (-7, int), (True, bool), (1 + 2j, complex), (0.25, float)
    ]  # fmt: skip
    assert back["array"].dtype is torch.uint32
    assert back["array"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert bytes(back["bytes"].tolist()) == state["bytes"]
    assert back["turned"].tolist() == [5, 4, 3, 2, 1, 0]
    words = back["words"]
    assert np.frombuffer(words["bytes"], words["dtype"]).reshape(words["shape"]).tolist() == ["a", "bc"]
    assert np.frombuffer(back["date"]["bytes"], back["date"]["dtype"]) == np.datetime64("2020-01-02")
    assert back["form"] == "channels_last"


@pytest.mark.parametrize(
    "dtype",
    [
        {"names": ["late", "early"], "formats": ["<i4", "<f8"], "offsets": [8, 0]},
        {"names": ["all", "half"], "formats": ["<i4", "<i2"], "offsets": [0, 0], "itemsize": 8},
        [("inner", {"names": ["b", "a"], "formats": ["<i2", "<i2"], "offsets": [2, 0]}, (2, 2)), ("outer", "<i4")],
        {"names": ["byte", "number"], "formats": ["i1", "<f8"], "offsets": [0, 8], "itemsize": 24},
        [("plain", "<i2"), ("many", "<f4", (3,))],
    ],
    ids=["out of order", "overlapping", "within another", "with gaps", "in order"],
)
def test_records_come_back_wherever_their_fields_lie(path: Path, dtype: Any) -> None:
    array = np.frombuffer(np.arange(2 * np.dtype(dtype).itemsize, dtype=np.uint8).tobytes(), dtype)
    back = torch.load(saved({"array": array, "scalar": array[1]}, path), weights_only=True)
    for name, wanted in (("array", array), ("scalar", array[1])):
        found = np.frombuffer(back[name]["bytes"], np.dtype(back[name]["dtype"])).reshape(back[name]["shape"])
        assert found.dtype == array.dtype
        assert found.tobytes() == wanted.tobytes()


@pytest.mark.parametrize(
    ("value", "message"),
    [(1 << 4000, "an integer of 4001 bits"), (pytest, "a <class 'module'>, which torch's weights_only loader")],
)
def test_what_the_loader_does_not_take_is_refused(path: Path, value: Any, message: str) -> None:
    with pytest.raises(UnsupportedState, match=message):
        saved({"a": [value]}, path)


def test_a_full_disk_is_the_systems_own_error(tmp_path: Path) -> None:
    with mounted_memory(tmp_path / "disk", "1m") as disk, pytest.raises(OSError, match="No space left") as raised:
        saved({"a": torch.ones(1 << 20)}, disk / "state.pt")
    assert raised.value.errno == errno.ENOSPC
