"""Batches of every type, layout and container: torch and NumPy are asked which dtypes and layouts there are.

Used by `test_like_torch.py`.
"""

from __future__ import annotations

import array
import collections
import contextlib
import dataclasses
import datetime
import decimal
import enum
import fractions
import itertools
import pathlib
import pickle
import tempfile
import types
import typing
import uuid
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch

CASES: dict[str, Callable[[], Any]] = {}
_MANY = 100_000


# --- containers of a program ----------------------------------------------------------------------------------------


@dataclasses.dataclass
class Sample:
    x: Any
    y: Any = 3


@dataclasses.dataclass(slots=True)
class Slotted:
    x: Any
    y: Any = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Frozen:
    x: Any
    y: Any = "name"


class Named(typing.NamedTuple):
    x: Any
    y: Any = 5


class OwnTensor(torch.Tensor):
    """A subclass with attributes."""

    note: Any


class OwnArray(np.ndarray[Any, Any]):
    """An array that notes what it was made of."""

    def __array_finalize__(self, made_of: Any) -> None:
        self.note = getattr(made_of, "note", "none")


class OwnDict(dict[str, Any]):
    """As `transformers` has them: a dict with attributes."""


class OwnList(list[Any]):
    """A list of a program."""


class Plain:
    """An object."""

    def __init__(self, x: Any) -> None:
        self.x = x


class WithSlots:
    """An object without a `__dict__`."""

    __slots__ = ("x", "y")

    def __init__(self, x: Any) -> None:
        self.x = x


class Reduced:
    """An object that only its own `__reduce__` knows."""

    def __init__(self, x: Any) -> None:
        self.x = x

    def __reduce__(self) -> Any:
        return Reduced, (self.x,)


class Stateful:
    """An object that says what its state is."""

    def __init__(self, x: Any) -> None:
        self.hidden = [x]

    def __getstate__(self) -> Any:
        return {"kept": self.hidden[0]}

    def __setstate__(self, state: Any) -> None:
        self.hidden = [state["kept"]]


class Color(enum.Enum):
    RED = 1


def _own_tensor(tensor: torch.Tensor) -> OwnTensor:
    own = tensor.as_subclass(OwnTensor)
    own.note = {"a": 1}
    return own


def _in_dict(x: Any) -> Any:
    own = OwnDict(x=x)
    own.note = x  # type: ignore[attr-defined]
    return own


def _in_itself(x: Any) -> Any:
    ring: list[Any] = [x]
    ring.append(ring)
    return ring


def _dicts_in_themselves(x: Any) -> Any:
    above: dict[str, Any] = {"x": x}
    above["below"] = {"above": above}
    return above


CONTAINERS: dict[str, Callable[[Any], Any]] = {
    "list": lambda x: [x],
    "tuple": lambda x: (x, 1),
    "dict": lambda x: {"x": x},
    "mixed": lambda x: {"x": [x, {"y": (x, None)}], 3: "text", (1, "a"): x},
    "dataclass": lambda x: [Sample(x), Sample(x, [x])],
    "slotted": lambda x: Slotted(x),
    "frozen": lambda x: Frozen(x=x),
    "named tuple": lambda x: Named(x),
    "named tuples": lambda x: [Named(x), Named(1, x)],
    "own dict": _in_dict,
    "own list": lambda x: OwnList([x]),
    "object": lambda x: [Plain(x), Plain(Plain(x))],
    "slots": lambda x: WithSlots(x),
    "reduced": lambda x: Reduced(x),
    "stateful": lambda x: Stateful(x),
    "ordered": lambda x: collections.OrderedDict(b=1, a=x),
    "default": lambda x: collections.defaultdict(list, {"x": [x]}),
    "deque": lambda x: collections.deque([x, 1], maxlen=5),
    "namespace": lambda x: types.SimpleNamespace(x=x),
    "error": lambda x: ValueError("it", x),
    "objects": lambda x: np.array([x, None, [1]], dtype=object) if not isinstance(x, torch.Tensor) else [x],
    "one object": lambda x: (lambda some: [some, some, {"k": some}, Plain(some)])(Plain(x)),
    "one list": lambda x: (lambda some: [some, some, {"k": some}])([x]),
    "one dict": lambda x: (lambda some: [some, (some,), Sample(some)])({"x": x}),
    "in itself": _in_itself,
    "dicts in themselves": _dicts_in_themselves,
}

# --- tensors --------------------------------------------------------------------------------------------------------

DTYPES = {str(dtype): dtype for dtype in list(vars(torch).values()) if isinstance(dtype, torch.dtype)}
QUANTIZED = {name for name in DTYPES if name.startswith("torch.q")}


def _filled(dtype: torch.dtype, count: int) -> torch.Tensor:
    numbers = (torch.arange(count * dtype.itemsize) % (2 if dtype is torch.bool else 7)).to(torch.uint8)
    return numbers.view(dtype)


LAYOUTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "in order": lambda t: t.reshape(2, 3, 4),
    "0-d": lambda t: t[5],
    "one": lambda t: t[:1],
    "part": lambda t: t[5:],
    "steps": lambda t: t[::2],
    "columns": lambda t: t.reshape(4, 6)[:, 1:3],
    "a column": lambda t: t.reshape(4, 6)[:, 2],
    "turned": lambda t: t.reshape(4, 6).t(),
    "permuted": lambda t: t.reshape(2, 3, 4).permute(2, 0, 1),
    "turned columns": lambda t: t.reshape(4, 6)[:, 1:3].t(),
    "expanded": lambda t: t[:1].expand(500),
    "expanded to a matrix": lambda t: t[0].expand(30, 40),
    "expanded rows": lambda t: t[:4].reshape(4, 1).expand(4, 3),
    "expanded with gaps": lambda t: t[::3].unsqueeze(1).expand(8, 2),
    "windows": lambda t: t.unfold(0, 4, 1),
    "windows with gaps": lambda t: t.unfold(0, 4, 2)[:, ::2],
    "overlapping steps": lambda t: t.as_strided((3, 3), (2, 2)),
    "channels last": lambda t: t.as_strided((2, 3, 2, 2), (12, 1, 6, 3)),
    "channels last, one channel": lambda t: t.as_strided((2, 1, 3, 4), (12, 1, 4, 1)),
    "channels last, one pixel": lambda t: t.as_strided((2, 3, 1, 1), (3, 1, 3, 3)),
    "a stride of one": lambda t: t.as_strided((1, 5), (99, 1)),
    "empty": lambda t: t[:0],
    "empty columns": lambda t: t.reshape(2, 12)[:, :0],
    "empty turned": lambda t: t[:0].reshape(0, 3).t(),
    "empties": lambda t: (lambda none: [none, none, t[:0]])(t[:0]),
    "many": lambda t: [t[number : number + 6] for number in range(0, 12, 6)] * 5,
    "many ragged": lambda t: [t[: 2 + number].view(torch.uint8).clone().view(t.dtype) for number in range(10)],
    "twice": lambda t: (t, t, {"x": t}),
    "parts and all": lambda t: {"a": t[:12], "b": t[12:], "all": t, "rows": t.reshape(4, 6)},
    "as bytes": lambda t: [t, t.view(torch.uint8) if t.dtype is not torch.bool else t[1:]],
    "columns apart": lambda t: {"even": t.reshape(4, 6)[:, ::2], "odd": t.reshape(4, 6)[:, 1::2]},
    "two columns": lambda t: [t.reshape(4, 6)[:, 0], t.reshape(4, 6)[:, 3]],
    "steps of two and three": lambda t: [t[::2], t[::3]],
    "halves": lambda t: list(t.chunk(2)),
    "storage": lambda t: [t.untyped_storage(), t[3:]],
    "shared between objects": lambda t: [Sample(t[:9]), Slotted(t[5:]), Plain(t[7:11])],
}
LARGE_LAYOUTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "large": lambda t: t,
    "large twice": lambda t: (t, t, t[5:]),
    "large columns": lambda t: t.reshape(1000, 100)[:, ::2],
    "large turned": lambda t: t.reshape(1000, 100).t(),
    "a few of many": lambda t: t[5000:5003],
    "rows": lambda t: [Sample(row) for row in t.reshape(100, 1000)[::9]],
    "columns of many": lambda t: [Sample(column) for column in t.reshape(1000, 100).t()[::9]],
}


def _of_tensor(
    layout: Callable[[torch.Tensor], Any], dtype: torch.dtype, count: int, nested: bool
) -> Callable[[], Any]:
    def make() -> Any:
        value = layout(_filled(dtype, count))
        return {"x": (value, "text")} if nested else value

    return make


for _dtype in DTYPES.values():
    if str(_dtype) in QUANTIZED:
        continue
    for _name, _layout in LAYOUTS.items():
        CASES[f"{_dtype}, {_name}"] = _of_tensor(_layout, _dtype, 24, False)
        CASES[f"{_dtype}, {_name}, inside"] = _of_tensor(_layout, _dtype, 24, True)
    for _name, _layout in LARGE_LAYOUTS.items():
        CASES[f"{_dtype}, {_name}"] = _of_tensor(_layout, _dtype, _MANY, False)


def case(make: Callable[[], Any]) -> Callable[[], Any]:
    """Take a function's batch as a case."""
    CASES[make.__name__.strip("_").replace("_", " ")] = make
    return make


def _leaf(size: int = 3) -> torch.Tensor:
    return torch.ones(size, requires_grad=True)


TENSORS: dict[str, Callable[[], Any]] = {
    "view": lambda: torch.arange(100.0)[10:20],
    "expanded": lambda: torch.ones(1).expand(50),
    "turned": lambda: torch.arange(6.0).reshape(2, 3).t(),
    "leaf": _leaf,
    "expanded leaf": lambda: torch.ones(1).expand(50).requires_grad_(),
    "complex leaf": lambda: torch.ones(3, dtype=torch.cfloat, requires_grad=True),
    "parameter": lambda: torch.nn.Parameter(torch.arange(6.0).reshape(2, 3).t()),
    "frozen parameter": lambda: torch.nn.Parameter(torch.ones(3), requires_grad=False),
    "buffer": lambda: torch.nn.Buffer(torch.ones(3)),
    "subclass": lambda: _own_tensor(torch.arange(8.0)[2:5]),
    "subclass, turned": lambda: _own_tensor(torch.arange(6.0).reshape(2, 3).t()),
    "subclass with a gradient": lambda: _own_tensor(torch.ones(3)).requires_grad_(),
    "subclass of a leaf": lambda: _own_tensor(_leaf()),
    "conjugate": lambda: torch.tensor([1 + 2j, 3 - 1j]).conj(),
    "negative": lambda: torch.tensor([1 + 2j, 3 - 1j]).conj().imag,
    "negative 0-d": lambda: torch.tensor(1 + 2j).conj().imag,
    "inference": lambda: torch.ones(3) + 1 if torch.inference_mode().__enter__() is None else None,
    "meta": lambda: torch.empty(3, 2, device="meta").t(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
    "quantized by channel": lambda: torch.quantize_per_channel(
        torch.ones(2, 3), torch.tensor([0.1, 0.2]), torch.tensor([0, 1]), 0, torch.qint8
    ),
    "coalesced": lambda: torch.eye(3).to_sparse().coalesce(),
    "not coalesced": lambda: torch.sparse_coo_tensor([[0, 0, 1]], [1.0, 2.0, 3.0], (4,)),
    "hybrid": lambda: torch.sparse_coo_tensor([[0, 1]], torch.ones(2, 3), (4, 3)),
    "typed storage": lambda: torch.arange(4.0).storage(),
    "storage": lambda: torch.arange(4).untyped_storage(),
    "empty storage": lambda: torch.UntypedStorage(0),
    "generator": lambda: torch.Generator().manual_seed(5),
    "array": lambda: np.arange(6.0).reshape(2, 3).T,
    "array of a memory": lambda: torch.arange(3.0).numpy(),
}
del TENSORS["inference"]


def _layouts() -> Iterator[tuple[str, Callable[[], Any]]]:
    """One tensor of each layout that torch has and can make here."""
    for name, layout in list(vars(torch).items()):
        if not isinstance(layout, torch.layout):
            continue
        size = {"blocksize": (2, 2)} if name in ("sparse_bsr", "sparse_bsc") else {}
        makers: list[Callable[..., Any]] = [
            lambda layout=layout, size=size: torch.eye(4).to_sparse(layout=layout, **size),
            lambda layout=layout: torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=layout),
            lambda: torch.ones(3, 4).to_mkldnn(),
        ]
        for make in makers if name != "_mkldnn" else makers[2:]:
            try:
                made = make()
            except (RuntimeError, ValueError):
                continue
            if made.layout is layout:
                yield f"layout {name}", make
                break


with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    TENSORS |= dict(_layouts())

for (_container, _hold), (_name, _make) in itertools.product(
    [("alone", lambda x: x), *CONTAINERS.items()], TENSORS.items()
):
    CASES[f"{_name}, {_container}"] = lambda hold=_hold, make=_make: hold(make())


@case
def nothing_of_autograd() -> Any:
    return _leaf() * 2


@case
def nothing_of_autograd_inside() -> Any:
    return {"x": [Sample(_leaf() * 2)]}


@case
def leaves_and_others() -> Any:
    return {"x": _leaf(), "y": torch.ones(3), "many": [_leaf(2) for _ in range(10)]}


@case
def a_number_and_its_conjugate() -> Any:
    numbers = torch.tensor([1 + 2j, 3 - 1j])
    return [numbers, numbers.conj()]


@case
def real_and_imaginary_part() -> Any:
    numbers = torch.tensor([1 + 2j, 3 - 1j])
    return numbers.real, numbers.imag, numbers


@case
def subclasses_of_one_memory() -> Any:
    own = _own_tensor(torch.ones(30))
    return [own, own[1:], own.as_subclass(torch.Tensor), Plain(own[5:9])]


@case
def a_sparse_tensor_and_its_values() -> Any:
    sparse = torch.eye(3).to_sparse()
    return {"s": sparse, "v": sparse._values(), "l": [sparse, sparse]}


@case
def a_module() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))


@case
def packed_sequence() -> Any:
    return torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.zeros(2)], enforce_sorted=False)


@case
def words_of_torch() -> Any:
    return [torch.float32, torch.device("cpu"), torch.strided, torch.channels_last, torch.Size([1, 2])]


@case
def result_of_max() -> Any:
    return torch.tensor([[1.0, 2.0]]).max(1)


@case
def array_and_tensor_of_one_memory() -> Any:
    numbers = np.arange(5.0)
    return [numbers, torch.from_numpy(numbers), torch.from_numpy(numbers[2:])]


@case
def tensors_of_overlapping_arrays() -> Any:
    numbers = np.arange(10.0)
    return [torch.from_numpy(numbers[:6]), torch.from_numpy(numbers[4:])]


# --- arrays ---------------------------------------------------------------------------------------------------------


def _array_dtypes() -> list[np.dtype[Any]]:
    found = [np.dtype(code) for code in np.typecodes["All"] if code not in "OSUVMm"]
    found += [dtype.newbyteorder() for dtype in found]
    found += [np.dtype(code) for code in ("S3", "U4", "V5", "M8[us]", "m8[D]", "M8[ns]", "O")]
    found += [np.dtype([("a", "i4"), ("b", "f8", (2,)), ("c", "U4")])]
    found += [np.dtype({"names": ["a", "b"], "formats": ["i1", "i8"], "offsets": [0, 8], "itemsize": 24})]
    found += [np.dtype("i4", metadata={"a": 1})]
    try:
        import ml_dtypes
    except ImportError:
        return found
    types_of_numbers = [kind for kind in vars(ml_dtypes).values() if isinstance(kind, type)]
    return found + [np.dtype(kind) for kind in types_of_numbers if issubclass(kind, np.generic)]


def _array(dtype: np.dtype[Any], count: int = 24) -> np.ndarray[Any, Any]:
    if dtype.hasobject:
        return np.array([{"a": number} for number in range(count)], dtype=dtype)
    numbers = np.arange(count * dtype.itemsize) % (2 if dtype.kind == "b" else 7)
    return numbers.astype(np.uint8).view(dtype).copy()


def _readonly(numbers: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    numbers.flags.writeable = False
    return numbers


ARRAY_LAYOUTS: dict[str, Callable[[np.ndarray[Any, Any]], Any]] = {
    "in order": lambda a: a.reshape(2, 3, 4),
    "0-d": lambda a: a[5:6].reshape(()),
    "scalar": lambda a: a[5],
    "steps": lambda a: a[::2],
    "backwards": lambda a: a.reshape(4, 6)[:, ::-1],
    "turned": lambda a: a.reshape(4, 6).T,
    "permuted": lambda a: a.reshape(2, 3, 4).transpose(1, 2, 0),
    "columns": lambda a: a.reshape(4, 6)[:, 1:3],
    "repeated": lambda a: np.broadcast_to(a[:3], (4, 3)),
    "read only": _readonly,
    "empty": lambda a: [a[:0], a[:0].reshape(3, 0), a[:0].reshape(0, 2).T],
    "twice": lambda a: [a, a, Plain(a), a[1:]],
}

for _array_dtype in _array_dtypes():
    for _name, _array_layout in ARRAY_LAYOUTS.items():
        _label = f"array {_array_dtype.metadata or ''}{_array_dtype!r}, {_name}"
        CASES[_label] = lambda dtype=_array_dtype, layout=_array_layout: layout(_array(dtype))
    CASES[f"array {_array_dtype!r}, large"] = lambda dtype=_array_dtype: Sample(_array(dtype, 5000))


@case
def kinds_of_arrays() -> Any:
    table = np.rec.array([(1, 2.0)], dtype=[("a", int), ("b", float)])
    own = np.arange(12.0).reshape(3, 4).view(OwnArray)
    own.note = "mine"
    return [np.matrix([[1, 2]]), np.ma.masked_array([1, 2, 3], mask=[0, 1, 0]), table, own, own.T, own[:, 1]]


@case
def maps_of_files() -> Any:
    with tempfile.TemporaryFile() as file:
        mapped = np.memmap(file, dtype="i4", mode="w+", shape=(40, 50))
    mapped[:] = np.arange(2000).reshape(40, 50)
    return [mapped, mapped[3:5], Sample(mapped[7]), mapped.T, mapped[:, ::7], mapped[2, 3]]


@case
def texts_of_arrays() -> Any:
    kinds = (
        [np.dtypes.StringDType(), np.dtypes.StringDType(na_object=None)] if hasattr(np.dtypes, "StringDType") else []
    )
    return [np.array(["a", "bcd"], dtype=kind) for kind in [*kinds, "U8", object]]


@case
def patterns_of_nan() -> Any:
    numbers = np.array([0x7FF8000000000123, 0xFFF0000000000001], "u8").view("f8")
    return [numbers, torch.from_numpy(numbers), float("nan"), -0.0, float("inf")]


# --- Python ---------------------------------------------------------------------------------------------------------


@case
def plain_values() -> Any:
    text = "e\ud800"
    return [
        None,
        True,
        1,
        -(2**63),
        2**64,
        10**30,
        1.5,
        text,
        b"\0\xff",
        bytearray(b"ab"),
        1 + 2j,
        ...,
        range(3),
        {text: 1},
    ]


@case
def keys() -> Any:
    return {(1, "a"): torch.arange(2), 3: np.arange(3), None: 1, 2.5: 2, True: 3, b"x": 4, frozenset([1]): 5}


@case
def sets() -> Any:
    return [{1, 2}, frozenset([3]), collections.Counter("aab"), array.array("d", [1, 2]), slice(1, 2)]


@case
def values_of_libraries() -> Any:
    now = datetime.datetime(2020, 1, 1, tzinfo=datetime.timezone.utc)
    numbers = [decimal.Decimal("1.10"), fractions.Fraction(1, 3), uuid.UUID(int=5)]
    return [pathlib.PurePosixPath("/a/b"), now, datetime.timedelta(1), KeyError("k"), Color.RED, int, len, *numbers]


@case
def empty_containers() -> Any:
    return [[], (), {}, "", b"", set(), None]


@case
def deep() -> Any:
    nested: Any = torch.ones(1)
    for _ in range(200):
        nested = [nested]
    return nested


@case
def many_names() -> Any:
    return {f"k{number}": torch.tensor([number]) for number in range(300)}


# --- objects of other packages --------------------------------------------------------------------------------------


def _packages_cases() -> Iterator[tuple[str, Callable[[], Any]]]:
    """What datasets give that read images, tables and graphs; of the packages that are installed."""
    numbers = np.arange(48, dtype=np.uint8).reshape(4, 12)
    with contextlib.suppress(ImportError):
        from PIL import Image

        whole = Image.fromarray(numbers.reshape(4, 4, 3), "RGB")
        for mode in ("1", "L", "P", "RGB", "RGBA", "CMYK", "YCbCr", "HSV", "I", "F", "LA"):
            yield f"image {mode}", lambda mode=mode: [whole.convert(mode)] * 2
        yield "image with a palette and notes", lambda: _noted(whole.quantize(7))
    with contextlib.suppress(ImportError):
        import pyarrow

        table = pyarrow.table(
            {"x": [1, 2, None, 4], "text": ["a", "", None, "ü" * 300], "list": [[1], [], None, [2, 3]]}
        )
        yield "table", lambda: {"table": table, "torch": torch.ones(3)}
        yield "slice of a table", lambda: table.slice(1, 2)
        yield "column of a table", lambda: [table["text"], table["list"].chunk(0)]
        yield "rows of a table", lambda: table.to_batches()[0]
    with contextlib.suppress(ImportError):
        from scipy import sparse

        for form in ("csr", "csc", "coo", "bsr", "dia", "lil", "dok"):
            yield f"matrix {form}", lambda form=form: getattr(sparse, f"{form}_array")(numbers % 3)
    with contextlib.suppress(ImportError):
        import pandas

        frame = pandas.DataFrame({"x": [1.5, None], "text": ["a", None], "kind": pandas.Categorical(["u", "v"])})
        yield "frame", lambda: frame
        yield "column of a frame", lambda: [frame["x"], frame["kind"], frame.index]


def _noted(image: Any) -> Any:
    image.info["note"] = (1, "two")
    return image


CASES |= dict(_packages_cases())

# --- how a batch is sent --------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Refused:
    """What torch's worker process cannot send; its feeder thread would print it, and the program wait for ever."""

    kind: str
    text: str


class Batches(torch.utils.data.Dataset[Any]):
    """Each sample is a batch of `CASES`."""

    def __init__(self, names: list[str], tries: bool = False) -> None:
        self.names, self._tries = names, tries

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            batch = CASES[self.names[index]]()
            if self._tries:
                try:
                    ForkingPickler.dumps(batch)
                except (RuntimeError, TypeError, ValueError, AttributeError, pickle.PicklingError) as error:
                    return Refused(type(error).__name__, str(error))
            return batch


def as_it_is(batch: Any) -> Any:
    """The collate function."""
    return batch
