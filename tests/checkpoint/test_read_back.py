"""What `save` accepts comes back as it was: it is read back from memory the first time that its layout is seen."""

from __future__ import annotations

import collections
import dataclasses
import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hetstream import CheckpointReader, FlashCheckpointer
from hetstream.checkpoint.flash import saving
from hetstream.checkpoint.record import tree
from hetstream.errors import OptionsError, UnsupportedState
from hetstream.slurm_plugin.cli import main

Make = Callable[..., FlashCheckpointer]


@dataclasses.dataclass
class Stats(dict[str, int]):
    n: int = 0


@dataclasses.dataclass
class History(list[int]):
    n: int = 0


@dataclasses.dataclass(frozen=True)
class Place:
    x: float
    y: float = math.nan


@dataclasses.dataclass
class Registered:
    value: torch.Tensor
    count: int


torch.utils._pytree.register_dataclass(Registered)
Point = collections.namedtuple("Point", "x y")
RECORD = np.dtype([("pos", [("x", "f4"), ("y", "f4")]), ("id", "i8")])

COME_BACK: dict[str, Any] = {
    "nested record": np.zeros(2, RECORD),
    "scalar of a record": np.ones(2, RECORD)[0],
    "aligned record": np.zeros(2, np.dtype([("a", "i1"), ("b", "f8")], align=True)),
    "record with a title": np.zeros(2, np.dtype([(("title", "a"), "i4")])),
    "record out of order": np.zeros(2, np.dtype({"names": ["a", "b"], "formats": ["i4", "i4"], "offsets": [8, 0]})),
    "record of arrays": np.zeros(2, np.dtype([("a", "f4", (2, 3)), ("b", [("c", "i2")], (2,))])),
    "time": np.timedelta64(3, "h"),
    "days": np.array(["2020", "NaT"], "M8[D]"),
    "25 seconds": np.array([1], "M8[25s]"),
    "void": np.void(b"abc"),
    "bytes with a zero": np.bytes_(b"a\0"),
    "long double": np.longdouble("0.1"),
    "big endian": np.arange(5, dtype=">f8"),
    "no column": np.zeros((0, 3)),
    "texts": np.array(["", "bc"]),
    "NaN as a key": {math.nan: 1, (1, None): 2},
    "minus zero": -0.0,
    "not finite": [math.nan, -math.inf, complex(math.nan, -0.0)],
    "many not finite": [math.nan] * 70_000,
    "inf - inf": [math.inf - math.inf, complex(-math.nan, math.nan), {"loss": -math.nan}],
    "texts with zeros at their end": [np.str_("a\0"), np.str_("\0")],
    "surrogate": "\udc80",
    "names with a dollar": {"$tensor": 1, "$x": {"$tuple": [1]}},
    "large integers": {2**80: -(2**63)},
    "named tuple": Point(1, [torch.ones(2)]),
    "dataclass": {"a": Place(1.0)},
    "order": collections.OrderedDict(b=1, a=2),
    "counts": collections.Counter(a=-1),
    "default": collections.defaultdict(None, a=1),
    "last ones": collections.deque([1, 2], 7),
    "set": {1.5, True, "a", None, (1, 2)},
    "file": io.BytesIO(b"abc" * 2000),
    "two doubles": torch.tensor([complex(math.nan, -0.0)], dtype=torch.complex128),
    "conjugate": torch.tensor([1 + 2j]).conj(),
    "expanded": torch.ones(1).expand(9),
    "every other": torch.arange(10.0)[::2],
    "no number": torch.zeros(0, 3),
    "wants a gradient": torch.ones(2, requires_grad=True),
    "dtype": [torch.float8_e5m2, torch.channels_last, torch.Size([1, 2]), torch.device("cpu")],
}

REFUSED: dict[str, Any] = {
    "dict with fields": Stats(3),
    "list with fields": History(3),
    "array of another library's numbers": lambda: np.ones(3, pytest.importorskip("ml_dtypes").bfloat16),
}


def described(value: Any) -> Any:
    """Type and content in words, by nothing of hetstream's: bytes of numbers, items in their order."""
    if isinstance(value, torch.Tensor):
        plain = value.detach().resolve_conj().contiguous()
        return value.dtype, tuple(value.shape), value.requires_grad, plain.numpy().tobytes()
    if isinstance(value, np.ndarray | np.generic) and value.dtype.names:  # what is between the fields is nobody's
        fields: Any = [described(value[name]) for name in value.dtype.names]
        return type(value).__name__, value.dtype, value.dtype.isalignedstruct, fields
    if isinstance(value, np.ndarray | np.generic):
        return type(value).__name__, value.dtype, value.dtype.isalignedstruct, value.shape, value.tobytes()
    if isinstance(value, io.BytesIO):
        return value.getvalue(), value.tell()
    name = "" if hasattr(value, "__dict__") else type(value).__name__
    if isinstance(value, dict):
        return name, [(described(key), described(item)) for key, item in value.items()]
    if isinstance(value, set | frozenset):
        return name, sorted(map(repr, value))
    if isinstance(value, list | tuple | collections.deque):
        return name, getattr(value, "maxlen", None), [described(item) for item in value]
    if isinstance(value, Place) or type(value).__name__ == "PlainObject":
        return described(vars(value))
    if isinstance(value, complex):
        return "complex", described(value.real), described(value.imag)
    if isinstance(value, float):
        return type(value).__name__, repr(value), math.copysign(1, value)
    return type(value).__name__, repr(value), len(value) if isinstance(value, str) else 0


@pytest.mark.parametrize("name", COME_BACK)
def test_what_is_saved_comes_back_as_it_was(name: str, make: Make, tmp_path: Path) -> None:
    value = COME_BACK[name]
    with make() as checkpointer:
        assert checkpointer.save(1, {"w": torch.ones(2), "value": value})
    loaded = CheckpointReader(tmp_path / "ckpt").load().state["value"]
    assert described(loaded) == described(value)
    assert main(["ckpt", "verify", str(tmp_path / "ckpt")]) == 0


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("method", ["save", "save_async"])
def test_what_would_come_back_as_something_else_is_refused_with_its_place(name: str, method: str, make: Make) -> None:
    value = REFUSED[name]
    value = value() if callable(value) else value
    with make() as checkpointer:
        assert checkpointer.save(1, {"w": torch.ones(2)})
        with pytest.raises(UnsupportedState, match=r"extra\.0 is .*nothing was saved"):
            getattr(checkpointer, method)(2, {"w": torch.ones(2), "extra": [value]})
        assert checkpointer.save(3, {"w": torch.ones(2)})
        assert checkpointer.all_steps() == [1, 3]


class Thing:
    """Of the program's own; it equals nothing but itself."""


class Bag(dict[str, Any]):
    """A dict of the program's own, with attributes."""


PICKLED: dict[str, Callable[[], Any]] = {
    "array of objects": lambda: np.array([1.5, "x", None], object),
    "array of another library's numbers": lambda: np.ones(3, pytest.importorskip("ml_dtypes").bfloat16),
    "its scalar": lambda: pytest.importorskip("ml_dtypes").bfloat16(1.5),
    "dataclass within a dict of the program's own": lambda: Bag(place=Place(1.0), more=[Point(1, 2)]),
    "set of objects": lambda: {Thing(), Thing()},
    "objects as keys": lambda: {Thing(): 1},
    "record array": lambda: np.rec.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f4")]),
    "masked array": lambda: np.ma.array([1, 2], mask=[False, True]),
    "paths": lambda: [Path("/a"), {Path("b")}],
}


@pytest.mark.parametrize("name", PICKLED)
def test_what_was_pickled_is_known_by_its_type(name: str, make: Make) -> None:
    value = PICKLED[name]()
    state: dict[str, Any] = {"w": torch.zeros(2), "value": None}
    with make(allow_pickle=True) as checkpointer:
        assert checkpointer.save(1, {"w": torch.ones(2), "value": value})
        assert checkpointer.restore(state) == 1
    assert type(state["value"]) is type(value)
    assert str(state["value"]) == str(value) or name in ("set of objects", "objects as keys")


def test_places_of_one_name_are_not_taken_for_each_other(make: Make) -> None:
    """Keys with dots in them, and keys that are called alike."""
    layer, other = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    with make() as checkpointer:
        assert checkpointer.save(1, {"a": {"b": layer}, "a.b": [1], "c": {0: layer, "0": other}})


def test_types_of_torchs_pytree_come_back_whatever_else_they_are(make: Make) -> None:
    output = pytest.importorskip("transformers.modeling_outputs").BaseModelOutput
    saved = {"one": Registered(torch.ones(2), 3), "output": output(torch.ones(1)), "top": torch.ones(2, 2).max(0)}
    state = {"one": Registered(torch.zeros(2), 0), "output": output(torch.zeros(1)), "top": torch.zeros(2, 2).max(0)}
    with make() as checkpointer:
        assert checkpointer.save(1, saved)
        assert checkpointer.restore(state) == 1
    assert repr(state) == repr(saved)


def test_a_tensor_that_other_processes_write_to_is_saved(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = torch.zeros(3).share_memory_()  # type: ignore[no-untyped-call]
    whole = saving.Saving._copy

    def copy(self: Any, taken: Any, entries: Any) -> None:
        whole(self, taken, entries)
        shared.add_(1)

    monkeypatch.setattr(saving.Saving, "_copy", copy)
    with make() as checkpointer:
        assert checkpointer.save(1, {"w": shared})


def test_a_key_that_nobody_would_find_again_is_refused(make: Make) -> None:
    weight = torch.ones(1)
    with make() as checkpointer:
        for keys in ({weight: 1}, {(1, weight): 1}):
            with pytest.raises(UnsupportedState, match="it has a tensor as a key"):
                checkpointer.save(1, {"it": keys})
        with pytest.raises(UnsupportedState, match=r"it is a parameter of layout torch\.sparse_coo"):
            checkpointer.save(1, {"it": torch.nn.Parameter(torch.eye(2).to_sparse())})


@pytest.mark.parametrize("metric", [math.nan, math.inf, -math.inf])
def test_a_metric_that_is_no_number_is_kept_and_never_the_best(metric: float, make: Make, tmp_path: Path) -> None:
    from hetstream.checkpoint import Best, Retention

    keep = Retention(keep_last=1, keep_best=Best("loss"))
    state = {"w": torch.zeros(1)}
    with make(keep=keep) as checkpointer:
        for step, loss in enumerate([0.5, 0.3, metric, 0.4, 0.6, metric], start=1):
            state["w"] += 1
            assert checkpointer.save(step, state, metrics={"loss": loss})
            assert checkpointer.wait(30)
    reader = CheckpointReader(tmp_path / "ckpt")
    assert reader.all_steps() == [2, 6]
    assert reader.best_step("loss") == 2
    assert reader.metrics() == {}
    assert reader.load(step=6).state["w"] == 6


def test_a_metric_that_is_no_number_is_read_from_memory_after_a_crash(make: Make) -> None:
    with make() as checkpointer:
        checkpointer.save(1, {"w": torch.ones(1)}, metrics={"loss": math.nan})
        checkpointer.close(keep_memory=True)
    with make() as checkpointer:
        state = {"w": torch.zeros(1)}
        assert checkpointer.restore(state) == 1
    assert state["w"] == 1
    with make() as checkpointer:
        checkpointer.restore(state)
        with pytest.raises(OptionsError, match="no text"):
            checkpointer.save(2, state, metrics={"\udc80": 1.0})


def test_a_fault_of_the_decoder_is_found_by_the_first_save(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    with make() as checkpointer:
        assert checkpointer.save(1, {"w": torch.ones(2)})
        makers = {**tree._MAKERS, "$complex": lambda _decoder, body: body[0]}
        monkeypatch.setattr(tree, "_MAKERS", makers)
        with pytest.raises(UnsupportedState, match=r"gain is complex \(1\+2j\), and would come back as float 1.0"):
            checkpointer.save(2, {"w": torch.ones(2), "gain": 1 + 2j})


def test_a_fault_of_the_copy_is_found_by_the_first_save(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = saving.Saving._copy
    monkeypatch.setattr(saving.Saving, "_copy", lambda self, taken, entries: whole(self, taken, [*entries][:-1]))
    state = {"a": torch.ones(2), "b": torch.ones(2, 3)}
    with make() as checkpointer, pytest.raises(UnsupportedState, match="with other values"):
        checkpointer.save(1, state)


def test_a_layout_is_read_back_once_and_a_new_kind_of_value_again(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(saving, "read_back", lambda state, *_, **__: seen.append(sorted(state)))
    state: dict[str, Any] = {"w": torch.ones(2), "log": []}
    with make() as checkpointer:
        for step in range(1, 4):
            state["log"].append(step)
            checkpointer.save(step, state)
        assert len(seen) == 1
        state["log"].append(1 + 2j)
        checkpointer.save(4, state)
        checkpointer.save(5, state)
        assert len(seen) == 2
        checkpointer.save(6, {**state, "more": torch.ones(3)})
        assert len(seen) == 3


def test_verify_decodes_what_a_restore_decodes(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "read_back", lambda *_, **__: None)
    monkeypatch.setattr(tree, "_dtype_of", lambda _dtype: "no dtype")
    with make() as checkpointer:
        checkpointer.save(1, {"w": torch.ones(2), "place": np.zeros(3)})
    monkeypatch.undo()
    assert main(["ckpt", "verify", str(tmp_path / "ckpt")]) == 1
