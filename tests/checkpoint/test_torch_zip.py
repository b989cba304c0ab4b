"""What the torch format writes without torch, the real `torch.load` opens; and nothing that is damaged does harm."""

from __future__ import annotations

import contextlib
import io
import math
import warnings
import zipfile
import zlib
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from msgspec.structs import replace

from hetstream.checkpoint.errors import DamagedCheckpoint
from hetstream.checkpoint.formats.plan import FilePlan, Range
from hetstream.checkpoint.formats.stored_zip import Record as ZipRecord
from hetstream.checkpoint.formats.stored_zip import plan_zip
from hetstream.checkpoint.formats.torch_zip import plan_torch, read_torch
from hetstream.checkpoint.record.layout import Entry, TensorSpec, lay_out
from hetstream.checkpoint.record.structure import Record, TensorRef
from hetstream.checkpoint.record.tree import Encoder

Point = namedtuple("Point", ["x", "y"])
WORDS = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
}


@dataclass
class Settings:
    rate: float
    name: str


class Builder:
    """A record and its payload, made by hand from torch tensors."""

    def __init__(self) -> None:
        self.specs: list[TensorSpec] = []
        self.data: list[bytes] = []
        self.refs: list[TensorRef] = []
        self.encoder = Encoder({torch.Tensor: self._tensor})

    def _tensor(self, path: str, value: torch.Tensor) -> Any:
        return self.add(value)

    def entry(self, value: torch.Tensor) -> int:
        """A tensor's whole storage is an entry."""
        flat = value.contiguous()
        self.specs.append(TensorSpec(f"t{len(self.specs)}", WORDS[value.dtype], tuple(value.shape)))
        self.data.append(flat.reshape(-1).view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
        return len(self.specs) - 1

    def add(self, value: torch.Tensor) -> Any:
        return self.ref(TensorRef(self.entry(value)))

    def ref(self, ref: TensorRef) -> Any:
        self.refs.append(ref)
        return {"$tensor": len(self.refs) - 1}

    def plan(self, tree: dict[str, Any]) -> tuple[FilePlan, memoryview]:
        nodes = {key: self.encoder.encode(key, value) for key, value in tree.items()}
        return self.plan_nodes(nodes)

    def plan_nodes(self, nodes: dict[str, Any]) -> tuple[FilePlan, memoryview]:
        layout = lay_out(self.specs)
        payload = bytearray(layout.payload_bytes)
        for entry, data in zip(layout.entries, self.data, strict=True):
            payload[entry.offset : entry.offset + entry.num_bytes] = data
        view = memoryview(payload)
        plan = plan_torch(
            layout.entries,
            Record(nodes, self.refs),
            lambda part: zlib.crc32(view[part.offset : part.offset + part.num_bytes]),
        )
        return plan, view


def written(plan: FilePlan, payload: memoryview) -> bytes:
    data = b"".join(plan.buffers(payload))
    assert len(data) == plan.num_bytes
    return data


def loaded(tree: dict[str, Any]) -> Any:
    return torch.load(io.BytesIO(written(*Builder().plan(tree))), weights_only=True)


def equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Bit for bit: NaN is equal to itself."""
    same = left.dtype == right.dtype and left.shape == right.shape
    if not same or not left.numel():
        return same
    return torch.equal(
        left.contiguous().reshape(-1).view(torch.uint8), right.contiguous().reshape(-1).view(torch.uint8)
    )


@pytest.mark.parametrize("mmap", [False, True])
def test_every_dtype_and_shape_comes_back(tmp_path: Path, mmap: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    state: dict[str, Any] = {"empty": {}, "none": torch.empty(0, 3), "scalar": torch.tensor(3.5)}
    for dtype in WORDS:
        for shape in [(7,), (16, 16), (), (0,), (3, 0, 2)]:
            data = torch.randint(0, 2, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8, generator=generator)
            state[f"{dtype}{shape}"] = data.view(dtype).reshape(shape)
    path = tmp_path / "state.pt"
    path.write_bytes(written(*Builder().plan(state)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        back = torch.load(path, weights_only=True, mmap=mmap)
    assert list(back) == list(state)
    for name, value in state.items():
        assert back[name] == value if name == "empty" else equal(back[name], value), name


def test_tied_tensors_share_a_storage_and_views_keep_their_strides() -> None:
    build = Builder()
    whole = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    entry = build.entry(whole)
    nodes = {
        "model": {
            "embedding": build.ref(TensorRef(entry)),
            "head": build.ref(TensorRef(entry)),
            "turned": build.ref(TensorRef(entry, shape=(6, 4), strides=(1, 6))),
            "column": build.ref(TensorRef(entry, shape=(4,), strides=(6,), offset_bytes=8)),
            "expanded": build.ref(TensorRef(entry, shape=(3, 6), strides=(0, 1))),
            "overlapping": build.ref(TensorRef(entry, shape=(5, 2), strides=(1, 1))),
        }
    }
    back = torch.load(io.BytesIO(written(*build.plan_nodes(nodes))), weights_only=True)["model"]
    assert {tensor.untyped_storage().data_ptr() for tensor in back.values()} == {
        back["head"].untyped_storage().data_ptr()
    }
    assert equal(back["turned"], whole.t())
    assert back["turned"].stride() == (1, 6)
    assert equal(back["column"], whole[:, 2])
    assert equal(back["expanded"], whole[:1].expand(3, 6))
    assert back["expanded"].stride() == (0, 1)
    assert equal(back["overlapping"], whole.reshape(-1).as_strided((5, 2), (1, 1)))


def test_one_storage_seen_as_two_dtypes() -> None:
    """torch.save refuses this; a state may hold it, and here it stays one storage."""
    build = Builder()
    entry = build.entry(torch.tensor([1.0, -2.0]))
    nodes = {"f": build.ref(TensorRef(entry)), "i": build.ref(TensorRef(entry, dtype="I32", shape=(2,)))}
    back = torch.load(io.BytesIO(written(*build.plan_nodes(nodes))), weights_only=True)
    assert equal(back["f"], torch.tensor([1.0, -2.0]))
    assert equal(back["i"], torch.tensor([1.0, -2.0]).view(torch.int32))
    assert back["f"].untyped_storage().data_ptr() == back["i"].untyped_storage().data_ptr()


def test_a_view_with_complex128_and_parameters() -> None:
    build = Builder()
    pairs = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64)
    nodes = {
        "c": build.ref(TensorRef(build.entry(pairs), dtype="C128", shape=(2,))),
        "p": build.ref(TensorRef(build.entry(torch.ones(2)), kind="parameter")),
        "q": build.ref(TensorRef(build.entry(torch.ones(3)), kind="frozen_parameter")),
        "g": build.ref(TensorRef(build.entry(torch.ones(4)), kind="grad")),
        "n": build.ref(TensorRef(build.entry(torch.ones(5)), kind="numpy")),
    }
    back = torch.load(io.BytesIO(written(*build.plan_nodes(nodes))), weights_only=True)
    assert equal(back["c"], torch.view_as_complex(pairs))
    assert isinstance(back["p"], torch.nn.Parameter)
    assert back["p"].requires_grad
    assert isinstance(back["q"], torch.nn.Parameter)
    assert not back["q"].requires_grad
    assert type(back["g"]) is torch.Tensor
    assert back["g"].requires_grad
    assert type(back["n"]) is torch.Tensor


def test_plain_values_come_back_as_they_are() -> None:
    state = {
        "numbers": [0, 1, -1, 255, 2**31, -(2**31) - 1, 2**63, -(2**64), 1 << 900, 0.1, -0.0, math.inf, 1e-320],
        "text": ["", "ä\U0001f600", "\udc80", "a" * 5000],
        "bytes": [b"", b"\x00\xff" * 300, bytearray(b"abc")],
        "keys": {1: "int", "1": "str", (1, "a"): "tuple", None: "none", 1.5: "float", True + 1: "two", "$tuple": 1},
        "sets": [set(), {1, 2}, {"a", (1, 2)}],
        "ordered": OrderedDict([("b", 1), ("a", OrderedDict([(3, 4)]))]),
        "counter": Counter("abca"),
        "complex": [1 + 2j, complex(math.inf, -0.0)],
        "deep": [[[[{"a": (1, (2, (3,)))}]]]],
        "constants": [None, True, False],
        "tuple": ((), (1,), (1, 2, 3, 4, 5)),
    }
    back = loaded(state)
    assert back == state
    assert [type(one) for one in back["bytes"]] == [bytes, bytes, bytearray]
    assert type(back["ordered"]) is OrderedDict
    assert type(back["ordered"]["a"]) is OrderedDict
    assert math.isnan(loaded({"nan": math.nan})["nan"])
    assert math.copysign(1, back["numbers"][10]) == -1


def test_values_without_a_plain_form_come_back_as_the_nearest() -> None:
    """The table of `torch_pickle.py`."""
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
        "words": np.array(["a", "bc"]),
        "date": np.datetime64("2020-01-02"),
        "random": ("MT19937", np.arange(624, dtype=np.uint32), 5, 0, 0.0),
    }
    back = loaded(state)
    assert back["named"] == (1, [2])
    assert type(back["named"]) is tuple
    assert back["frozen"] == (1,)
    assert back["range"] == (1, 9, 2)
    assert back["slice"] == (None, 3, None)
    assert back["data"] == {"rate": 0.1, "name": "a"}
    assert back["default"] == {1: [2]}
    assert type(back["default"]) is dict
    assert back["deque"] == [1, 2]
    assert back["scalars"] == [0.5, -7, True, 1 + 2j, 0.25]
    assert [type(one) for one in back["scalars"]] == [float, int, bool, complex, float]
    assert equal(back["array"], torch.from_numpy(state["array"]))  # type: ignore[arg-type]
    words = back["words"]
    assert np.frombuffer(words["bytes"], words["dtype"]).reshape(words["shape"]).tolist() == ["a", "bc"]
    assert np.frombuffer(back["date"]["bytes"], back["date"]["dtype"]) == np.datetime64("2020-01-02")
    name, key, *rest = back["random"]
    assert (name, rest) == ("MT19937", [5, 0, 0.0])
    assert equal(key, torch.arange(624).to(torch.uint32))


def test_dtype_device_and_size() -> None:
    nodes = {
        "dtype": {"$dtype": "bfloat16"},
        "device": {"$device": "cuda:1"},
        "size": {"$size": [2, 3]},
        "x": {"$own": [1]},
    }
    back = torch.load(io.BytesIO(written(*Builder().plan_nodes(nodes))), weights_only=True)
    assert back["dtype"] is torch.bfloat16
    assert back["device"] == torch.device("cuda:1")
    assert type(back["size"]) is torch.Size
    assert back["size"] == (2, 3)
    assert back["x"] == {"$own": [1]}


def test_any_reader_of_zip_archives_finds_its_checksums_right(tmp_path: Path) -> None:
    data = written(*Builder().plan({"a": torch.randn(300), "b": np.arange(3), "c": torch.empty(0)}))
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() is None
        assert archive.read("archive/data/0") == data[slice(*_extent(data, "archive/data/0"))]
        assert {"archive/data.pkl", "archive/version", "archive/byteorder"} <= set(archive.namelist())


def _extent(data: bytes, name: str) -> tuple[int, int]:
    from hetstream.checkpoint.formats.stored_zip import find_records

    offset, size = find_records(io.BytesIO(data), len(data))[name]
    return offset, offset + size


def test_storages_are_aligned_and_large_ones_as_in_memory() -> None:
    build = Builder()
    plan, payload = build.plan({"s": torch.ones(3), "l": torch.ones(1 << 19), "m": torch.ones((1 << 18) + 16)})
    at = 0
    for piece in plan.pieces:
        if isinstance(piece, Range) and piece.num_bytes:
            assert at % 64 == 0
            assert piece.num_bytes < 1 << 20 or (at - piece.offset) % 4096 == 0
        at += piece.num_bytes if isinstance(piece, Range) else len(piece)
    assert at == len(written(plan, payload))


def test_more_records_than_16_bits_count() -> None:
    content = Range(0, 3)
    plan = plan_zip([ZipRecord(f"a/{number}", content, zlib.crc32(b"abc")) for number in range(66_000)])
    with zipfile.ZipFile(io.BytesIO(written(plan, memoryview(b"abc")))) as archive:
        assert len(archive.namelist()) == 66_000
        assert archive.read("a/65999") == b"abc"


@pytest.mark.slow
def test_more_tensors_than_16_bits_count() -> None:
    state = {str(number): torch.tensor(number) for number in range(66_000)}
    back = loaded(state)
    assert all(int(back[name]) == int(name) for name in ("0", "1", "65535", "65999"))
    assert len(back) == 66_000


@pytest.mark.parametrize("num_before", [0, 3 << 30])
def test_a_tensor_over_4_gib_and_one_beyond_it(tmp_path: Path, num_before: int) -> None:
    """Sizes and places of more than 32 bits, in a sparse file."""
    specs = [
        TensorSpec("before", "U8", (num_before,)),
        TensorSpec("big", "F32", ((1 << 30) + 256,)),
        TensorSpec("small", "F32", (64,)),
    ]
    entries = lay_out(specs).entries
    record = Record({entry.name: {"$tensor": key} for key, entry in enumerate(entries)}, list(map(TensorRef, range(3))))
    plan = plan_torch(entries, record, lambda part: 0)
    path = tmp_path / "big.pt"
    with path.open("wb") as file:
        for piece in plan.pieces:
            if isinstance(piece, bytes):
                file.write(piece)
                continue
            if piece.num_bytes == 256:
                file.write(np.arange(64, dtype=np.float32).tobytes())
                continue
            if piece.num_bytes > 4 << 30:
                file.seek(piece.num_bytes - 4, io.SEEK_CUR)
                file.write(np.float32(7).tobytes())
            else:
                file.seek(piece.num_bytes, io.SEEK_CUR)
    back = torch.load(path, weights_only=True, mmap=True)
    assert float(back["big"][-1]) == 7
    assert back["big"].shape == ((1 << 30) + 256,)
    assert equal(back["small"], torch.arange(64, dtype=torch.float32))
    with path.open("rb") as file:
        read, _ = read_torch(file, path.stat().st_size, str(path))
        file.seek(read[2].offset)
        assert file.read(256) == np.arange(64, dtype=np.float32).tobytes()


def test_a_restore_finds_layout_and_structure_in_the_file() -> None:
    build = Builder()
    state = {"a": torch.randn(5), "b": [torch.ones(2, 2).to(torch.bfloat16), Point(1, 2)]}
    plan, payload = build.plan(state)
    data = written(plan, payload)
    entries, record = read_torch(io.BytesIO(data), len(data), "x")
    assert [(entry.name, entry.dtype, entry.shape) for entry in entries] == [
        (spec.name, spec.dtype, spec.shape) for spec in build.specs
    ]
    for entry, expected in zip(entries, build.data, strict=True):
        assert data[entry.offset : entry.offset + entry.num_bytes] == expected
    assert record.tensors == build.refs
    assert record.decode()["b"][1] == Point(1, 2)


def test_a_part_of_a_payload_is_written_from_where_it_lies() -> None:
    """Ranks other than 0 leave out what all have in common."""
    build = Builder()
    build.plan({"shared": torch.ones(100), "own": torch.arange(10)})
    layout = lay_out(build.specs)
    payload = bytearray(layout.payload_bytes)
    for entry, data in zip(layout.entries, build.data, strict=True):
        payload[entry.offset : entry.offset + entry.num_bytes] = data
    part, indices = Record({"shared": {"$tensor": 0}, "own": {"$tensor": 1}}, build.refs).only(["own"])
    plan = plan_torch([layout.entries[index] for index in indices], part, lambda part: 0)
    back = torch.load(io.BytesIO(written(plan, memoryview(payload))), weights_only=True)
    assert list(back) == ["own"]
    assert equal(back["own"], torch.arange(10))


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 2000), 1 << 2000)
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec=None))
    | st.binary(max_size=40)
    | st.complex_numbers(allow_nan=False),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=5) | st.integers() | st.tuples(st.integers(), st.text(max_size=2)), inner)
        | st.dictionaries(st.text(max_size=5), inner).map(OrderedDict)
        | st.sets(st.integers() | st.text(max_size=3), max_size=4)
    ),
    max_leaves=20,
)
shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.text(max_size=8), values, max_size=4), st.lists(st.tuples(st.sampled_from([*WORDS]), shapes)))
def test_any_tree_and_any_tensors_come_back(tree: dict[str, Any], forms: list[tuple[torch.dtype, Any]]) -> None:
    tensors = [torch.ones(math.prod(shape) * dtype.itemsize, dtype=torch.uint8) for dtype, shape in forms]
    state = {
        **tree,
        "tensors": [one.view(dtype).reshape(shape) for one, (dtype, shape) in zip(tensors, forms, strict=True)],
    }
    back = loaded(state)
    expected = state.pop("tensors")
    assert all(equal(one, other) for one, other in zip(back.pop("tensors"), expected, strict=True))
    assert back == state
    assert list(back) == list(state)


WHOLE = written(*Builder().plan({"a": torch.arange(5), "b": {"c": [1, "two"]}, "d": torch.ones(16)}))


@pytest.mark.parametrize("kept", [0, 1, 4, 100, len(WHOLE) // 2, len(WHOLE) - 22, len(WHOLE) - 1])
def test_a_truncated_file_is_refused(kept: int) -> None:
    with pytest.raises(DamagedCheckpoint, match=r"^state\.pt: "):
        read_torch(io.BytesIO(WHOLE[:kept]), kept, "state.pt")


@settings(max_examples=200, deadline=None)
@given(st.integers(0, len(WHOLE) - 1), st.binary(min_size=1, max_size=8), st.integers(0, 40))
def test_a_changed_file_is_read_or_refused_and_nothing_else(at: int, patch: bytes, cut: int) -> None:
    data = (WHOLE[:at] + patch + WHOLE[at + len(patch) :])[: len(WHOLE) - cut]
    with contextlib.suppress(DamagedCheckpoint):
        entries, _ = read_torch(io.BytesIO(data), len(data), "state.pt")
        assert all(0 <= entry.offset <= len(data) - entry.num_bytes for entry in entries)


def test_files_of_others_are_refused_with_what_to_do(tmp_path: Path) -> None:
    foreign = io.BytesIO()
    torch.save({"a": torch.ones(2)}, foreign)
    with pytest.raises(DamagedCheckpoint, match=r"not written by hetstream.*ckpt convert"):
        read_torch(foreign, len(foreign.getvalue()), "x.pt")
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/hetstream/layout.json", b"0" * (1 << 20))
    with pytest.raises(DamagedCheckpoint, match="compressed"):
        read_torch(packed, len(packed.getvalue()), "x.pt")


def test_a_number_that_no_torch_loader_takes_is_refused() -> None:
    with pytest.raises(DamagedCheckpoint, match="255"):
        loaded({"long": 1 << 4000})


def test_a_structure_that_does_not_fit_its_entries_is_refused() -> None:
    entry = Entry("a", "F32", (4,), 0, 16)
    for ref in [
        TensorRef(1),
        TensorRef(0, shape=(5,)),
        TensorRef(0, shape=(2,), strides=(4,)),
        TensorRef(0, shape=(2,), strides=(-1,)),
        TensorRef(0, shape=(2, 2), strides=(1,)),
        TensorRef(0, offset_bytes=2, shape=(1,)),
        TensorRef(0, offset_bytes=16, shape=(1,)),
        TensorRef(0, dtype="F64", shape=(3,)),
        TensorRef(0, dtype="what"),
    ]:
        with pytest.raises(DamagedCheckpoint):
            plan_torch([entry], Record({"a": {"$tensor": 0}}, [ref]), lambda part: 0)
    for node in [
        {"$tensor": 5},
        {"$tensor": "x"},
        {"$bytes": "?"},
        {"$dict": 3},
        {"$dtype": "os\nsystem"},
        {"$array": []},
    ]:
        with pytest.raises(DamagedCheckpoint):
            plan_torch([entry], Record({"a": node}, [TensorRef(0)]), lambda part: 0)
    assert plan_torch([replace(entry, shape=(0,), num_bytes=0)], Record({}, []), lambda part: 0).num_bytes
