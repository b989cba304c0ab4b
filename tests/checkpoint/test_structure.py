"""The structure of a state: every value that it takes comes back as it was, everything else is refused by name."""

from __future__ import annotations

import copy
import math
import pickle
import random
import struct
import sys
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, make_dataclass
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetstream.checkpoint.errors import DamagedCheckpoint, UnsupportedState
from hetstream.checkpoint.record.structure import Record, Shard, TensorRef
from hetstream.checkpoint.record.tree import (
    MAX_INLINE_VALUES,
    TENSOR,
    Data,
    Encoder,
    Foreign,
    Node,
    PlainObject,
    decode,
)
from hetstream.checkpoint.tensors.leaves import make_foreign

Point = namedtuple("Point", "x y")


@dataclass(frozen=True)
class Schedule:
    warmup: int
    rates: list[float]


@dataclass(frozen=True)
class Key:
    name: str


def through(value: Any) -> Any:
    """A value after it was encoded, written as JSON, read and decoded."""
    return decode(msgspec.json.decode(msgspec.json.encode(Encoder().encode("state", value))), ())


VALUES = {
    "none": None,
    "bool": True,
    "large int": 1 << 200,
    "smallest int": -(1 << 63),
    "float": 0.1,
    "integral float": 3.0,
    "large float": 1e300,
    "subnormal": 5e-324,
    "minus zero": -0.0,
    "infinity": math.inf,
    "minus infinity": -math.inf,
    "complex": complex(1.5, -math.inf),
    "text": 'a "quoted" line\n\x00 ü 🙂',
    "surrogate": "file\udcff",
    "bytes": bytes(range(256)),
    "bytearray": bytearray(b"ab"),
    "tuple": (1, (2.0, "x"), ()),
    "list": [1, [2, []]],
    "set": {1, 2, "x"},
    "frozenset": frozenset({(1, 2)}),
    "keys of all kinds": {1: "a", (1, 2): "b", None: "c", False: "d", "$tensor": 3, "e\udcff": 4, 2.5: 5, b"k": 6},
    "dict like a tag": {"$dict": []},
    "empty key": {"": 1},
    "counter": Counter({30: 1, 80: 2}),
    "defaultdict": defaultdict(list, {"a": [1]}),
    "defaultdict without factory": defaultdict(None, {"a": 1}),
    "deque": deque([1, 2], maxlen=5),
    "range": range(1, 9, 2),
    "slice": slice(1, None, 2),
}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES.keys())
def test_values_come_back_with_their_types(value: Any) -> None:
    back = through(value)
    assert back == value
    assert type(back) is type(value)
    if not isinstance(value, set | frozenset):  # their order depends on the process
        assert repr(back) == repr(value)  # also the order of keys, and the sign of zero


MANY = MAX_INLINE_VALUES + 1
LARGE: dict[str, Callable[[], Any]] = {
    "integers": lambda: (-1, *range(MANY)),
    "floats": lambda: [0.5, math.inf, -0.0] * MANY,
    "one float that JSON has not": lambda: [math.inf, *["x"] * MANY],
    "integers beyond 64 bits": lambda: [1 << 64, 1 << 200, *range(MANY)],
    "texts": lambda: deque(map(str, range(MANY)), maxlen=MANY),
    "texts and one that is none": lambda: ["file\udcff", *map(str, range(MANY))],
    "values of all plain kinds": lambda: [None, True, "x", 3, 0.1] * MANY,
    "rows, each of them small": lambda: [[number, str(number), [True]] for number in range(MANY // 4)],
    "a set": lambda: {*range(MANY)},
    "a dict": lambda: {f"sample {number}": number / 3 for number in range(MANY)},
    "a dict like a tag": lambda: {"$json": 1, **dict.fromkeys(map(str, range(MANY)))},
    "a dict with numbers as keys": lambda: {number: -number for number in range(MANY)},
    "a counter": lambda: Counter({str(number): number for number in range(MANY)}),
    "a defaultdict": lambda: defaultdict(int, {(number, 1): number for number in range(MANY // 2)}),
    "an ordered dict": lambda: OrderedDict((str(number), [number]) for number in range(MANY)),
}


@pytest.mark.parametrize("name", LARGE)
def test_what_is_too_much_for_a_header_goes_into_the_payload(name: str) -> None:
    value = LARGE[name]()
    stored: list[bytes] = []

    def store(path: str, data: Data) -> Node:
        assert path == "state.all"
        stored.append(bytes(data))
        return {TENSOR: len(stored) - 1}

    text = msgspec.json.encode(Encoder(store=store).encode("state", {"all": value, "step": 1}))
    assert len(text) < 200
    found = decode(msgspec.json.decode(text), stored, make_foreign(allow_pickle=False))
    assert found["step"] == 1
    assert type(found["all"]) is type(value)
    assert repr(found["all"]) == repr(value)
    assert getattr(found["all"], "maxlen", None) == getattr(value, "maxlen", None)


def test_a_list_that_grows_needs_no_other_place_each_time() -> None:
    sizes = set()
    for count in range(MANY, 2 * MANY, 997):
        Encoder(store=lambda _path, data: sizes.add(len(memoryview(data).cast("B")))).encode("seen", [*range(count)])
    assert len(sizes) <= 9


def test_containers_with_tensors_stay_structure() -> None:
    encoder = Encoder({np.ndarray: lambda _path, _value: {TENSOR: 0}}, store=lambda *_: {TENSOR: 1})
    large = [*range(MANY)]
    node = encoder.encode("state", {"rows": [large, np.ones(3), {"seen": large}]})
    numbers = {"$numbers": [{TENSOR: 1}, "q", MANY]}
    assert node == {"rows": [numbers, {TENSOR: 0}, {"seen": numbers}]}


DAMAGED = [
    {"$numbers": [{TENSOR: 0}, "q", 3]},
    {"$numbers": [{TENSOR: 0}, "u", 1]},
    {"$numbers": [{TENSOR: 0}, "q", -1]},
    {"$numbers": [{TENSOR: 0}, "q"]},
    {"$numbers": [[1], "q", 1]},
    {"$json": {TENSOR: 0}},
    {"$json": 3},
]


@pytest.mark.parametrize("node", DAMAGED, ids=str)
def test_damaged_values_in_the_payload_are_refused(node: Node) -> None:
    with pytest.raises(DamagedCheckpoint):
        decode(node, [b"{" * 16], make_foreign(allow_pickle=False))


def test_nan_and_its_sisters_come_back() -> None:
    assert math.isnan(through(math.nan))


def test_order_and_metadata_of_a_state_dict_come_back() -> None:
    state: Any = OrderedDict([("b", 1), ("a", 2)])
    state._metadata = OrderedDict([("", {"version": 1})])
    back = through(state)
    assert type(back) is OrderedDict
    assert list(back.items()) == [("b", 1), ("a", 2)]
    assert back._metadata == state._metadata


def test_factories_and_lengths_go_on_working() -> None:
    back = through({"d": defaultdict(int), "q": deque([1], maxlen=1)})
    back["d"]["new"] += 1
    back["q"].append(2)
    assert (back["d"]["new"], list(back["q"])) == (1, [2])


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.uint32).reshape(2, 3),
        np.array(3.5),
        np.zeros((0, 2)),
        np.array(["a", "bcd"]),
        np.array([1, 2], ">i4"),
        np.array([(1, 2.0)], [("a", "i4"), ("b", "f8")]),
        np.array(["2026-01-01"], "datetime64[D]"),
    ],
    ids=lambda array: str(array.dtype),
)
def test_arrays_come_back(array: np.ndarray[Any, Any]) -> None:
    back = through(array)
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    assert back.tobytes() == array.tobytes()
    back.setflags(write=True)


def test_numpy_scalars_stay_numpy_scalars() -> None:
    for value in (np.float32(0.1), np.int64(-5), np.bool_(True), np.float64(2.5), np.complex128(1j)):
        back = through(value)
        assert type(back) is type(value)
        assert back == value


_plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.complex_numbers(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=5) | st.integers() | st.tuples(st.integers(), st.text()), inner, max_size=4)
    ),
    max_leaves=20,
)


@settings(max_examples=150, deadline=None)
@given(_plain)
def test_any_plain_tree_comes_back(value: Any) -> None:
    assert _bits(through(value)) == _bits(value)


def _bits(value: Any) -> Any:
    """A value in a form in which NaN equals itself and -0.0 differs from 0.0."""
    if isinstance(value, float):
        return ("float", "nan" if math.isnan(value) else struct.pack("d", value))
    if isinstance(value, complex):
        return ("complex", _bits(value.real), _bits(value.imag))
    if isinstance(value, dict):
        return [(_bits(key), _bits(one)) for key, one in value.items()]
    if isinstance(value, list | tuple):
        return (type(value).__name__, [_bits(one) for one in value])
    return (type(value).__name__, value)


def test_what_cannot_be_stored_is_named_with_its_place_and_the_way_out() -> None:
    with pytest.raises(UnsupportedState, match=r"state\.a\.1 is a .*random\.Random.*allow_pickle=True"):
        through({"a": [1, random.Random()]})
    with pytest.raises(UnsupportedState, match=r"state\.f is a builtins\.function"):
        through({"f": through})
    with pytest.raises(UnsupportedState, match=r"state\.d is a defaultdict of"):
        through({"d": defaultdict(lambda: 3)})
    with pytest.raises(UnsupportedState, match=r"numpy\.ndarray"):
        through(np.array([object()]))
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(UnsupportedState, match="contains itself"):
        through(loop)


def test_objects_come_back_in_a_plain_form_whatever_class_the_program_has() -> None:
    named = through(Point(1, [2]))
    assert (type(named).__name__, named.x, named.y, named) == ("Point", 1, [2], (1, [2]))
    assert pickle.loads(pickle.dumps(copy.deepcopy(named))) == named
    data = through(Schedule(3, [0.1]))
    assert (type(data), data) == (PlainObject, Schedule(3, [0.1]))
    assert through(copy.deepcopy(data)) == data  # it can be saved again
    assert decode({"$named": ["no.such.module:Pair", {"a": 1}]}, ()).a == 1
    assert decode({"$data": ["subprocess:Popen", {"args": ["true"]}]}, ()) == PlainObject(args=["true"])
    assert decode({"$node": [f"{__name__}:Schedule", 3, [1]]}, ()).children == [1]


def test_objects_that_are_keys_are_found_by_those_of_the_program() -> None:
    back = through({Key("a"): 1, Point(1, 2): 2, "set": {Key("b")}})
    assert (back[Key("a")], back[Point(1, 2)], Key("b") in back["set"]) == (1, 2, True)
    assert Key("c") not in back


class Once:
    """A module that would load others when it is asked for what it has not."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"a file has asked for {name}")


def test_no_name_of_a_file_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "asked", Once())  # type: ignore[arg-type]
    for tag, body in (("$named", {"a": 1}), ("$data", {"a": 1})):
        decode({tag: ["asked:Lazy.Inner", body]}, ())
    decode({"$node": ["asked:Lazy.Inner", None, []]}, ())


@pytest.mark.shows("nothing that another user's checkpoint holds is called")
@pytest.mark.parametrize("name", ["__deepcopy__", "__reduce_ex__", "__reduce__", "__copy__", "__getattr__", "__x"])
def test_names_of_python_itself_are_no_fields(name: str) -> None:
    trap = make_dataclass("Trap", [name])
    with pytest.raises(UnsupportedState, match=f"state has a field '{name}'"):
        through(trap(1))
    with pytest.raises(DamagedCheckpoint, match=f"'{name}', which is Python's own"):
        decode({"$data": ["x:Trap", {name: 1}]}, ())
    with pytest.raises(DamagedCheckpoint):
        decode({"$named": ["x:Trap", {name: 1}]}, ())


@pytest.mark.parametrize(
    "node",
    [
        {"$tensor": 5},
        {"$tensor": -1},
        {"$tensor": "0"},
        {"$tensor": True},
        {"$bytes": "!"},
        {"$int": "x"},
        {"$complex": ["a", 1]},
        {"$dict": [[1]]},
        {"$default": ["system", []]},
        {"$array": ["|O", [1], "AAAAAAAAAAA="]},
        {"$array": ["<f8", [2], "AAAAAAAAAAA="]},
        {"$deque": 3},
        {"$range": ["a"]},
        {"$named": ["x:y", {"not an identifier": 1}]},
        {"$tuple": 1},
    ],
)
def test_damaged_nodes_are_refused(node: Any) -> None:
    with pytest.raises(DamagedCheckpoint):
        decode(node, ["only one"])


def test_damage_is_told_in_a_few_words() -> None:
    with pytest.raises(DamagedCheckpoint, match="more characters") as caught:
        decode({"$tensor": {"$int": "f" * 200_000}}, ["only one"])
    assert len(str(caught.value)) < 10_000


def test_unknown_tags_are_kept_for_readers_without_torch() -> None:
    assert decode({"a": {"$dtype": "float32"}}, ()) == {"a": Foreign("$dtype", "float32")}


def _record() -> Record:
    return Record(
        tree={
            "model": {"w": {"$tensor": 0}, "tied": {"$tensor": 1}},
            "loader": [{"$tensor": 2}, 7],
            "_rng": {"$tensor": 3},
        },
        tensors=[
            TensorRef(1),
            TensorRef(1),
            TensorRef(0, "grad", shard=Shard((4, 2), (2, 0), (2,), ("S(0)",))),
            TensorRef(2, "numpy", "C128", (2,), (1,), 64),
        ],
        shared=["model"],
        rank=1,
        world_size=2,
        metrics={"loss": 0.5},
    )


def test_a_record_is_read_as_it_was_written() -> None:
    assert Record.read(_record().write()) == _record()


def test_the_own_part_of_a_record_needs_only_its_own_entries() -> None:
    record = _record()
    assert record.own == ["loader", "_rng"]
    part, entries = record.only(record.own)
    assert entries == [0, 2]
    assert part.tree == {"loader": [{"$tensor": 0}, 7], "_rng": {"$tensor": 1}}
    assert [ref.entry for ref in part.tensors] == [0, 1]
    assert part.tensors[0].shard == record.tensors[2].shard
    assert (part.shared, part.rank, part.world_size, part.metrics) == ([], 1, 2, {"loss": 0.5})
    shared, entries = record.only(["model"])
    assert (entries, shared.shared) == ([1], ["model"])


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"{}",
        b"[1]",
        b'{"tree":{},"tensors":[{"entry":-1}]}',
        b'{"tree":{},"tensors":[],"version":99}',
        b'{"tree":{},"tensors":[],"rank":2}',
        b"[" * 100_000,
    ],
)
def test_damaged_records_are_refused(damage: bytes) -> None:
    with pytest.raises(DamagedCheckpoint):
        Record.read(damage)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, len(_record().write()) * 8 - 1))
def test_a_flipped_bit_never_does_more_than_to_be_refused_or_to_give_another_value(bit: int) -> None:
    data = bytearray(_record().write())
    data[bit // 8] ^= 1 << bit % 8
    try:
        record = Record.read(bytes(data))
        record.decode(lambda ref: ref)
        record.only(record.own)
    except DamagedCheckpoint:
        pass
