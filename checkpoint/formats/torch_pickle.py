"""The tree of a state as the pickle inside a `torch.save` file, without torch and without the pickle module. Pure.

Only what torch's weights_only loader takes is written: protocol 2, plain values, tensors, dtypes, devices and sizes. So
anybody can open the file without trusting it. What has no plain form comes back as its nearest one:

| in the state | from `torch.load` |
|---|---|
| named tuple, frozenset, range, slice | tuple (of a range and a slice: start, stop, step) |
| dataclass, defaultdict | dict |
| deque | list |
| NumPy scalar | Python number |
| NumPy array of numbers or bools | tensor |
| NumPy array or scalar of anything else | dict of dtype, shape and bytes |
| bytes over 4 KiB | tensor of uint8 |
| a value that only its own program can make | dict of what is known of it: `{"$pickle": ...}`, `{"$node": ...}` |
| memory format | its name |
| part of a sharded tensor | this rank's part as a plain tensor |
| channels-last and other permuted strides | same values, row-major |
"""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from hetstream.checkpoint.errors import DamagedCheckpoint
from hetstream.checkpoint.record.layout import Entry
from hetstream.checkpoint.record.structure import Record, TensorRef
from hetstream.checkpoint.record.tree import TENSOR


class _Dtype(NamedTuple):
    name: str  # in torch
    num_bytes: int  # of an element
    storage: str | None  # torch's class of typed storage, where it has one


# By the words of safetensors, which a layout uses, and those for what safetensors has no word for.
DTYPES = {
    "BOOL": _Dtype("bool", 1, "BoolStorage"),
    "U8": _Dtype("uint8", 1, "ByteStorage"),
    "I8": _Dtype("int8", 1, "CharStorage"),
    "I16": _Dtype("int16", 2, "ShortStorage"),
    "U16": _Dtype("uint16", 2, None),
    "I32": _Dtype("int32", 4, "IntStorage"),
    "U32": _Dtype("uint32", 4, None),
    "I64": _Dtype("int64", 8, "LongStorage"),
    "U64": _Dtype("uint64", 8, None),
    "F16": _Dtype("float16", 2, "HalfStorage"),
    "BF16": _Dtype("bfloat16", 2, "BFloat16Storage"),
    "F32": _Dtype("float32", 4, "FloatStorage"),
    "F64": _Dtype("float64", 8, "DoubleStorage"),
    "C32": _Dtype("complex32", 4, None),
    "C64": _Dtype("complex64", 8, "ComplexFloatStorage"),
    "C128": _Dtype("complex128", 16, "ComplexDoubleStorage"),
    "F8_E4M3": _Dtype("float8_e4m3fn", 1, None),
    "F8_E5M2": _Dtype("float8_e5m2", 1, None),
    "F8_E4M3FNUZ": _Dtype("float8_e4m3fnuz", 1, None),
    "F8_E5M2FNUZ": _Dtype("float8_e5m2fnuz", 1, None),
    "F8_E8M0": _Dtype("float8_e8m0fnu", 1, None),
    "F4_X2": _Dtype("float4_e2m1fn_x2", 1, None),
}
# NumPy's words for what torch has too.
_NUMPY = {
    "b1": "BOOL",
    "u1": "U8",
    "i1": "I8",
    "i2": "I16",
    "u2": "U16",
    "i4": "I32",
    "u4": "U32",
    "i8": "I64",
    "u8": "U64",
    "f2": "F16",
    "f4": "F32",
    "f8": "F64",
    "c8": "C64",
    "c16": "C128",
}
_STRUCT = {
    "b1": "?",
    "i1": "b",
    "u1": "B",
    "i2": "h",
    "u2": "H",
    "i4": "i",
    "u4": "I",
    "i8": "q",
    "u8": "Q",
    "f2": "e",
    "f4": "f",
    "f8": "d",
    "c8": "ff",
    "c16": "dd",
}


class Pickled(NamedTuple):
    """A pickle, and the storages that it names beside the entries.

    Attributes:
        data: bytes of `data.pkl`.
        extra: bytes of storages len(entries), len(entries) + 1, ...: small arrays that are part of the structure.
    """

    data: bytes
    extra: list[bytes]


def pickle_record(record: Record, entries: Sequence[Entry]) -> Pickled:
    """Write a state down so that `torch.load(..., weights_only=True)` gives it back.

    Args:
        record: its structure.
        entries: its tensors; entry i is storage i of the file.

    Raises:
        DamagedCheckpoint: the structure and the entries do not belong together.
    """
    try:
        writer = _Writer(entries, record.tensors)
        writer.mapping(record.tree.items())
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, OverflowError, RecursionError) as error:
        raise DamagedCheckpoint(f"the structure of the state is damaged: {type(error).__name__}: {error}") from error
    return Pickled(b"\x80\x02" + bytes(writer.out) + b".", writer.extra)


class _Writer:
    """Appends opcodes of protocol 2 (PEP 307, Lib/pickletools.py) that leave one value on the stack."""

    def __init__(self, entries: Sequence[Entry], tensors: Sequence[TensorRef]) -> None:
        self.out = bytearray()
        self.extra: list[bytes] = []
        self._entries = entries
        self._tensors = tensors
        self._memo: dict[str, int] = {}
        self._typed = _typed_storages(entries, tensors)

    # Values

    def node(self, node: Any) -> None:
        """A node of the structure."""
        if isinstance(node, dict):
            tag = next(iter(node), "")
            if tag[:1] == "$" and (len(node) == 1 or tag == "$ordered"):
                self._tagged(tag, node[tag])
            else:
                self.mapping(node.items())
        elif isinstance(node, list):
            self._sequence(b"]", b"e", node)
        else:
            self.plain(node)

    def plain(self, value: Any) -> None:
        """None, a bool, number, string, bytes or bytearray."""
        if value is None:
            self.out += b"N"
        elif value is True or value is False:
            self.out += b"\x88" if value else b"\x89"
        elif isinstance(value, int):
            self._int(value)
        elif isinstance(value, float):
            self.out += b"G" + struct.pack(">d", value)
        elif isinstance(value, str):
            data = value.encode("utf-8", "surrogatepass")
            self.out += b"X" + struct.pack("<I", len(data)) + data
        elif isinstance(value, bytearray):
            self.reduce("builtins bytearray", bytes(value))
        elif isinstance(value, bytes):
            self.reduce("_codecs encode", value.decode("latin-1"), "latin1")
        else:
            raise TypeError(f"{type(value).__name__} is no plain value")

    def _int(self, value: int) -> None:
        if -(2**31) <= value < 2**31:
            self.out += b"J" + struct.pack("<i", value)
            return
        data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        # torch's loader knows no longer form.
        if len(data) > 255:
            raise DamagedCheckpoint(f"a number of {len(data)} bytes does not fit the torch format, which takes 255")
        self.out += b"\x8a" + bytes([len(data)]) + data

    def mapping(self, pairs: Any, begin: Callable[[], None] | None = None) -> None:
        """A dict, of nodes as keys and values; `begin` makes an empty mapping of another type."""
        if begin:
            begin()
        else:
            self.out += b"}"
        self.out += b"("
        for key, value in pairs:
            self.node(key)
            self.node(value)
        self.out += b"u"

    def _sequence(self, begin: bytes, end: bytes, nodes: Any) -> None:
        self.out += begin + b"("
        for node in nodes:
            self.node(node)
        self.out += end

    def _tuple(self, nodes: Any) -> None:
        self._sequence(b"", b"t", nodes)

    def constant(self, name: str) -> None:
        """A class, function or dtype by "module name"."""
        number = self._memo.get(name)
        if number is not None:
            self.out += b"j" + struct.pack("<I", number)
            return
        self._memo[name] = len(self._memo)
        module, attribute = name.split(" ")
        self.out += f"c{module}\n{attribute}\n".encode() + b"r" + struct.pack("<I", self._memo[name])

    def reduce(self, name: str, *values: Any) -> None:
        """The result of a call with plain values."""
        self.constant(name)
        self.out += b"("
        for value in values:
            self.plain(value)
        self.out += b"tR"

    # Tags of `tree.py` and, at the end, of the flash side

    def _tagged(self, tag: str, body: Any) -> None:
        if tag == TENSOR:
            self._tensor(self._tensors[body])
        elif tag in _TAGS:
            _TAGS[tag](self, body)
        else:
            # A value that only its own program can make: what was written down of it.
            self.out += b"}"
            self.plain(tag)
            self.node(body)
            self.out += b"s"

    def _called(self, name: str, nodes: Any) -> None:
        """The result of a call with one list of nodes."""
        self.constant(name)
        self.node(nodes)
        self.out += b"\x85R"

    def array(self, dtype: Any, shape: Sequence[int], data: bytes) -> None:
        """A NumPy array: a tensor if torch has its dtype."""
        word = _NUMPY.get(dtype[1:]) if isinstance(dtype, str) and dtype[:1] in "<|=" else None
        if word is None:
            self.node({"dtype": dtype, "shape": list(shape), "bytes": {"$bytes": base64.b64encode(data).decode()}})
            return
        self.extra.append(data)
        form = DTYPES[word]
        key = len(self._entries) + len(self.extra) - 1
        self._rebuild(key, len(data), form if form.storage else None, form, 0, shape, _row_major(shape))

    def scalar(self, dtype: Any, data: bytes) -> None:
        """A NumPy scalar: a Python number if it is one."""
        code = _STRUCT.get(dtype[1:]) if isinstance(dtype, str) and dtype[:1] in "<|=" else None
        if code is None:
            self.array(dtype, (), data)
            return
        parts = struct.unpack("<" + code, data)
        if len(parts) == 2:
            self.reduce("builtins complex", *parts)
        else:
            self.plain(parts[0])

    # Tensors

    def sparse(self, parts: Sequence[Any], shape: Sequence[int], is_coalesced: bool) -> None:
        """A sparse tensor of indices and values."""
        self.constant("torch._utils _rebuild_sparse_tensor")
        self.out += b"("
        self.reduce("torch.serialization _get_layout", "torch.sparse_coo")
        self.out += b"("
        self.node(parts[0])
        self.node(parts[1])
        self._called("torch Size", {"$tuple": list(shape)})
        self.plain(is_coalesced)
        self.out += b"ttR"

    def _tensor(self, ref: TensorRef) -> None:
        entry = self._entries[ref.entry]
        form = DTYPES[ref.dtype or entry.dtype]
        shape = tuple(entry.shape) if ref.shape is None else ref.shape
        strides = _row_major(shape) if ref.strides is None or ref.is_permuted else ref.strides
        begin, rest = divmod(ref.offset_bytes, form.num_bytes)
        last = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        if (
            rest
            or min(strides, default=0) < 0
            or (0 not in shape and (begin + last) * form.num_bytes > entry.num_bytes)
        ):
            raise DamagedCheckpoint(f"a tensor is no view of its entry {entry.name!r}: {ref}")
        if ref.kind == "parameter" or ref.kind == "frozen_parameter":
            self.constant("torch._utils _rebuild_parameter")
            self.out += b"("
        typed = self._typed.get(ref.entry)
        self._rebuild(ref.entry, entry.num_bytes, typed, form, begin, shape, strides, requires_grad=ref.kind == "grad")
        if ref.kind == "parameter" or ref.kind == "frozen_parameter":
            self.plain(ref.kind == "parameter")
            self._hooks()
            self.out += b"tR"

    def _rebuild(
        self,
        key: int,
        num_bytes: int,
        typed: _Dtype | None,
        form: _Dtype,
        begin: int,
        shape: Sequence[int],
        strides: Sequence[int],
        requires_grad: bool = False,
    ) -> None:
        """A view of storage `key`: of a typed one, as every torch and other readers know it, where that is possible."""
        self.constant(f"torch._utils _rebuild_tensor_v{2 if typed else 3}")
        self.out += b"(("
        self.plain("storage")
        self.constant(f"torch {typed.storage}" if typed else "torch.storage UntypedStorage")
        self.plain(str(key))
        self.plain("cpu")
        self.plain(num_bytes // (typed.num_bytes if typed else 1))
        self.out += b"tQ"
        self.plain(begin)
        self._tuple(shape)
        self._tuple(strides)
        self.plain(requires_grad)
        self._hooks()
        if not typed:
            self.constant(f"torch {form.name}")
        self.out += b"tR"

    def _hooks(self) -> None:
        self.constant("collections OrderedDict")
        self.out += b")R"


def _typed_storages(entries: Sequence[Entry], tensors: Sequence[TensorRef]) -> dict[int, _Dtype]:
    """Entries whose views are all of one dtype that torch has a typed storage for."""
    words: dict[int, set[str]] = {}
    for ref in tensors:
        words.setdefault(ref.entry, set()).add(ref.dtype or entries[ref.entry].dtype)
    forms = {
        index: DTYPES[next(iter(seen))] for index, seen in words.items() if len(seen) == 1 and seen <= DTYPES.keys()
    }
    return {
        index: form
        for index, form in forms.items()
        if form.storage is not None and entries[index].num_bytes % form.num_bytes == 0
    }


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(max(size, 1) for size in shape[place + 1 :]) for place in range(len(shape)))


def _data(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _word(text: str) -> str:
    if not text.isidentifier():
        raise ValueError(f"{text!r} is no name in torch")
    return text


def _ordered(writer: _Writer, body: Any) -> None:
    pairs = body["$dict"] if len(body) == 1 and "$dict" in body else body.items()
    writer.mapping(pairs, writer._hooks)


_TAGS: Mapping[str, Callable[[_Writer, Any], None]] = {
    "$tuple": lambda writer, body: writer._tuple(body),
    "$set": lambda writer, body: writer._called("builtins set", body),
    "$frozenset": lambda writer, body: writer._tuple(body),
    "$dict": lambda writer, body: writer.mapping(body),
    "$ordered": _ordered,
    "$counter": lambda writer, body: writer._called("collections Counter", {"$dict": body}),
    "$default": lambda writer, body: writer.mapping(body[1]),
    "$deque": lambda writer, body: writer.node(body[1]),
    "$range": lambda writer, body: writer._tuple(body),
    "$slice": lambda writer, body: writer._tuple(body),
    "$int": lambda writer, body: writer.plain(int(body, 16)),
    "$float": lambda writer, body: writer.plain(float(body)),
    "$str": lambda writer, body: writer.plain(_data(body).decode("utf-8", "surrogatepass")),
    "$complex": lambda writer, body: writer.reduce("builtins complex", *(_float(part) for part in body)),
    "$bytes": lambda writer, body: writer.plain(_data(body)),
    "$bytearray": lambda writer, body: writer.plain(bytearray(_data(body))),
    "$named": lambda writer, body: writer._tuple(body[1].values()),
    "$data": lambda writer, body: writer.mapping(body[1].items()),
    "$array": lambda writer, body: writer.array(body[0], body[1], _data(body[2])),
    "$scalar": lambda writer, body: writer.scalar(body[0], _data(body[1])),
    "$dtype": lambda writer, body: writer.constant(f"torch {_word(body)}"),
    "$layout": lambda writer, body: writer.reduce("torch.serialization _get_layout", f"torch.{_word(body)}"),
    "$memory_format": lambda writer, body: writer.plain(_word(body)),
    "$device": lambda writer, body: writer.reduce("torch device", body),
    "$size": lambda writer, body: writer._called("torch Size", {"$tuple": body}),
    "$sparse_coo": lambda writer, body: writer.sparse(*body),
}


def _float(part: Any) -> float:
    return float(part["$float"]) if isinstance(part, dict) else float(part)
