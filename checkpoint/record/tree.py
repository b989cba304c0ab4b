"""A tree of values without its tensors, as compact JSON and back.

The flash side encodes a tree when it saves and decodes it when it loads; others count and renumber the tensors in it.
Pure: no torch, no files, and nothing is imported, called or unpickled because a file says so. What is decoded is data:
no class is looked up by a name of the file, and no value is callable, so there are no methods of a stranger's choice.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import functools
import math
import sys
from array import array
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec

from hetstream.base.text import is_unicode
from hetstream.checkpoint.errors import DamagedCheckpoint, UnsupportedState, first_line

# Larger arrays and byte strings are payload, not structure.
MAX_INLINE_BYTES = 4096
# Containers with more values are payload: a file's header, which holds the structure, is limited.
MAX_INLINE_VALUES = 1 << 16
# Deeper trees are refused on both sides: JSON readers recurse.
MAX_DEPTH = 200

Node = Any  # what JSON can hold
Data = bytearray | array  # type: ignore[type-arg]
TENSOR = "$tensor"


class Foreign(msgspec.Struct, frozen=True):
    """A value that needs torch (or pickle) to be made again, for readers without: its tag and its JSON."""

    tag: str
    body: Node


class PlainObject(SimpleNamespace):
    """What was saved of an object, as data: a dataclass's fields, or `type`, `context` and `children` of a type that is
    registered with torch's pytree.

    It equals a dataclass with the same fields and hashes as that does, so that it can be the key that it was.
    """

    def __eq__(self, other: object) -> bool:
        if dataclasses.is_dataclass(other) and not isinstance(other, type):
            return vars(self) == attributes_of(other)
        return super().__eq__(other)

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(vars(self).values()))


def attributes_of(value: Any) -> dict[str, Any]:
    """Return what a dataclass's object holds: its fields, and what else the program has set, but for cached
    properties.
    """
    names = (field.name for field in dataclasses.fields(value))
    fields = {name: getattr(value, name) for name in names if hasattr(value, name)}
    kind = type(value)
    for name, attribute in getattr(value, "__dict__", {}).items():
        if name not in fields and not isinstance(getattr(kind, name, None), functools.cached_property):
            fields[name] = attribute
    return fields


MakeForeign = Callable[[str, Node, Callable[[Node], Any]], Any]


def numbers_in(node: Node) -> Iterable[int]:
    """Return the numbers of the tensors below a node, in its order."""
    stack = [node]
    while stack:
        here = stack.pop()
        if isinstance(here, dict):
            number = here.get(TENSOR)
            if number is not None and len(here) == 1:
                yield _checked_number(number)
            else:
                stack.extend(reversed(here.values()))
        elif isinstance(here, list):
            stack.extend(reversed(here))


def renumbered(node: Node, places: Mapping[int, int]) -> Node:
    """Return a node whose tensors have other numbers."""
    if isinstance(node, dict):
        if TENSOR in node:
            return {TENSOR: places[node[TENSOR]]}
        return {key: renumbered(item, places) for key, item in node.items()}
    if isinstance(node, list):
        return [renumbered(item, places) for item in node]
    return node


def _checked_number(number: Any) -> int:
    if not isinstance(number, int) or isinstance(number, bool):
        raise DamagedCheckpoint(f"the structure names a tensor by {number!r}, not by a number")
    return number


# Encoding


class Encoder:
    """Turns values into nodes. Made once and used for every save.

    Args:
        handlers: exact type to a function (path, value) -> node, for the types of torch.
        foreign: called with (path, value) for a value whose exact type is unknown; gives a node or NotImplemented.
        store: called with (path, data) for what is too much for the structure; puts it into the payload and gives the
            node of a tensor that `loaded_numbers` or `loaded_json` gets as bytes. None: all of it is structure.

    Attributes:
        forms: type, tag and NumPy's or torch's dtype of every value met so far that is not JSON as it is.
    """

    def __init__(
        self,
        handlers: Mapping[type, Callable[[str, Any], Node]] | None = None,
        foreign: Callable[[str, Any], Node] = lambda _path, _value: NotImplemented,
        store: Callable[[str, Data], Node] | None = None,
    ) -> None:
        self._foreign = foreign
        self._store = store
        self._num_inline = 0
        self.forms: set[tuple[type, str, Any]] = set()
        self._handlers: dict[type, Callable[[str, Any], Node]] = {
            type(None): _itself,
            bool: _itself,
            int: _int,
            float: _float,
            str: _str,
            complex: _complex,
            bytes: inline_bytes,
            bytearray: _bytearray,
            range: lambda _path, value: {"$range": [value.start, value.stop, value.step]},
            slice: lambda path, value: {"$slice": self.items(path, (value.start, value.stop, value.step))},
            list: self.items,
            tuple: lambda path, value: {"$tuple": self.items(path, value)},
            set: lambda path, value: {"$set": self.items(path, _in_order(value))},
            frozenset: lambda path, value: {"$frozenset": self.items(path, _in_order(value))},
            dict: self.mapping,
            OrderedDict: self._ordered,
            Counter: self._counter,
            defaultdict: self._defaultdict,
            deque: lambda path, value: {"$deque": [value.maxlen, self.items(path, value)]},
            **(handlers or {}),
        }

    def encode(self, path: str, value: Any) -> Node:
        """Return a value as JSON.

        Args:
            path: where it is in the state, for names and errors.

        Raises:
            UnsupportedState: something in it cannot be stored; the message names where and what to do.
        """
        self._num_inline = 0
        try:
            return self.item(path, value)
        except RecursionError as error:
            raise UnsupportedState(
                f"{path} is nested too deeply or contains itself: a state is a tree of at most {MAX_DEPTH} levels"
            ) from error

    def item(self, path: str, value: Any) -> Node:
        """As `encode`, for use inside handlers."""
        handler = self._handlers.get(type(value))
        node = self._foreign(path, value) if handler is None else handler(path, value)
        if node is NotImplemented:
            node = self.unusual(path, value)
        if type(node) is dict:
            tag = next(iter(node), "")
            if tag[:1] == "$" and tag != TENSOR:
                self.forms.add((type(value), tag, getattr(value, "dtype", None)))
        return node

    def items(self, path: str, values: Collection[Any]) -> Node:
        """Return values in order, as a list."""
        if self._store and len(values) > MAX_INLINE_VALUES:
            kinds = {*map(type, values)}
            if kinds in ({int}, {float}):
                with contextlib.suppress(OverflowError):  # beyond 64 bits
                    return self._stored_numbers(path, array("q" if kinds == {int} else "d", values))
            if _is_json(kinds, values):
                with contextlib.suppress(UnicodeEncodeError, OverflowError):
                    return self._stored_json(path, [*values])
        item, before = self.item, self._num_inline
        node = [item(f"{path}.{index}", value) for index, value in enumerate(values)]
        return self._inline(path, node, before)

    def mapping(self, path: str, value: Mapping[Any, Any]) -> Node:
        """Return a dict of any keys."""
        item, before = self.item, self._num_inline
        for key in value:
            if type(key) is not str or key[:1] == "$" or not is_unicode(key):
                return self._inline(path, {"$dict": self._pairs(path, value)}, before)
        if self._store and len(value) > MAX_INLINE_VALUES and _is_json({*map(type, value.values())}, value.values()):
            with contextlib.suppress(UnicodeEncodeError, OverflowError):
                return self._stored_json(path, {**value})
        return self._inline(path, {key: item(f"{path}.{key}", entry) for key, entry in value.items()}, before)

    def _inline(self, path: str, node: Node, before: int) -> Node:
        """A container of the structure; one that holds too many values and no tensor becomes payload.

        Args:
            before: how many values there were in the structure before those of this container.
        """
        self._num_inline += len(node)
        if not self._store or self._num_inline - before <= MAX_INLINE_VALUES or any(True for _ in numbers_in(node)):
            return node
        self._num_inline = before
        return self._stored_json(path, node)

    def _stored_numbers(self, path: str, numbers: array[Any]) -> Node:
        assert self._store is not None
        count = len(numbers)
        numbers.frombytes(bytes(_room(count * numbers.itemsize, numbers.itemsize)))
        return {"$numbers": [self._store(path, numbers), numbers.typecode, count]}

    def _stored_json(self, path: str, node: Node) -> Node:
        assert self._store is not None
        text = bytearray(msgspec.json.encode(node))
        text += b" " * _room(len(text), 1)
        return {"$json": self._store(path, text)}

    def _pairs(self, path: str, value: Mapping[Any, Any]) -> list[Node]:
        item = self.item
        self._num_inline += 2 * len(value)
        return [[item(f"{path}[key]", key), item(f"{path}.{key}", entry)] for key, entry in value.items()]

    def _counter(self, path: str, value: Counter[Any]) -> Node:
        before = self._num_inline
        return self._inline(path, {"$counter": self._pairs(path, value)}, before)

    def _ordered(self, path: str, value: OrderedDict[Any, Any]) -> Node:
        node = {"$ordered": self.mapping(path, value)}
        # torch keeps the versions of modules as an attribute of their state_dict.
        metadata = getattr(value, "_metadata", None)
        if metadata is not None:
            node["metadata"] = self.item(f"{path}._metadata", metadata)
        return node

    def _defaultdict(self, path: str, value: defaultdict[Any, Any]) -> Node:
        factory, before = value.default_factory, self._num_inline
        if factory is not None and _FACTORIES.get(factory.__name__) is not factory:
            raise UnsupportedState(
                f"{path} is a defaultdict of {factory!r}: only those of {', '.join(_FACTORIES)} can be stored; "
                "turn it into a dict"
            )
        node = {"$default": [factory.__name__ if factory else None, self._pairs(path, value)]}
        return self._inline(path, node, before)

    def unusual(self, path: str, value: Any) -> Node:
        """Return values known by what they are like, not by their type."""
        kind = type(value)
        if isinstance(value, tuple) and hasattr(kind, "_fields"):
            fields = {name: self.item(f"{path}.{name}", entry) for name, entry in zip(kind._fields, value, strict=True)}
            return {"$named": [name_of(kind), fields]}
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return self._data(path, kind, attributes_of(value))
        if kind is PlainObject:
            return self._data(path, SimpleNamespace, vars(value))
        numpy = sys.modules.get("numpy")
        if (
            numpy is not None
            and isinstance(value, numpy.ndarray)
            and kind is numpy.ndarray
            and not value.dtype.hasobject
        ):
            return {"$array": [_dtype_of(value.dtype), list(value.shape), _text(value.tobytes())]}
        if numpy is not None and isinstance(value, numpy.generic) and not value.dtype.hasobject:
            return {"$scalar": [_dtype_of(value.dtype), _text(value.tobytes())]}
        state = next((name for name in ("get_state", "getstate", "bit_generator") if hasattr(value, name)), "")
        if state:  # a generator of random numbers
            call = "bit_generator.state" if state == "bit_generator" else f"{state}()"
            advice = f"Store what its {call} gives, and set it after the restore"
        else:
            advice = "Give the object state_dict() and load_state_dict(), store plain values instead"
        raise UnsupportedState(
            f"{path} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot hold. {advice}, or allow "
            "pickle with allow_pickle=True (both to save and to load)"
        )

    def _data(self, path: str, kind: type, fields: Mapping[str, Any]) -> Node:
        for name in filter(_is_pythons, fields):
            raise UnsupportedState(
                f"{path} has a field {name!r}: what begins with two underscores is Python's own, and a "
                "checkpoint holds none. Give the field another name"
            )
        return {"$data": [name_of(kind), {name: self.item(f"{path}.{name}", entry) for name, entry in fields.items()}]}


def _is_json(kinds: set[type], values: Iterable[Any]) -> bool:
    """Whether values of these types are JSON as they are, but for strings that are no text and integers of more than
    64 bits."""
    return kinds <= {bool, type(None), str, int, float} and (
        float not in kinds or all(math.isfinite(value) for value in values if type(value) is float)
    )


def _room(num_bytes: int, item_bytes: int) -> int:
    """Bytes to leave free behind so many, at most an eighth: what grows from save to save shall not need another slot
    for each."""
    grain = max(item_bytes, 1 << max(0, num_bytes.bit_length() - 4))
    return -num_bytes % grain


def loaded_numbers(data: bytes, typecode: str, count: int) -> list[Any]:
    """Return the list of `{"$numbers": [tensor, typecode, count]}`, from the bytes of its tensor."""
    numbers = array(typecode)
    if typecode not in ("q", "d") or not 0 <= count * numbers.itemsize <= len(data):
        raise DamagedCheckpoint(f"the structure takes {len(data)} bytes for {count} numbers of type {typecode!r}")
    numbers.frombytes(data[: count * numbers.itemsize])
    return numbers.tolist()


def loaded_json(data: bytes) -> Node:
    """Return the node of `{"$json": tensor}`, from the bytes of its tensor."""
    try:
        return msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DamagedCheckpoint(f"a part of the structure in the payload cannot be read: {error}") from error


def _itself(_path: str, value: Any) -> Node:
    return value


def _int(_path: str, value: int) -> Node:
    return value if -(2**63) <= value < 2**63 else {"$int": hex(value)}


def _float(_path: str, value: float) -> Node:
    if math.isfinite(value):
        return value
    # What is no number has a sign, too: inf - inf is a negative one, and Python does not write it.
    sign = "-" if math.isnan(value) and math.copysign(1, value) < 0 else ""
    return {"$float": sign + repr(value)}


def _str(_path: str, value: str) -> Node:
    return value if is_unicode(value) else {"$str": _text(value.encode("utf-8", "surrogatepass"))}


def _complex(path: str, value: complex) -> Node:
    return {"$complex": [_float(path, value.real), _float(path, value.imag)]}


def inline_bytes(_path: str, value: bytes) -> Node:
    """Return a short byte string."""
    return {"$bytes": _text(value)}


def _bytearray(_path: str, value: bytearray) -> Node:
    return {"$bytearray": _text(value)}


def _text(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode("ascii")


def _in_order(values: Iterable[Any]) -> list[Any]:
    """A set in an order that does not depend on the process, so that equal sets are stored equally."""
    return sorted(values, key=lambda value: (type(value).__name__, repr(value)))


def name_of(kind: type) -> str:
    """Return what a class is called in a structure."""
    return f"{kind.__module__}:{kind.__qualname__}"


def _dtype_of(dtype: Any) -> Node:
    """A NumPy dtype: what `numpy.dtype` makes it of again; fields may be records and arrays themselves."""
    if dtype.subdtype:
        base, shape = dtype.subdtype
        return {"base": _dtype_of(base), "shape": list(shape)}
    if not dtype.names:
        return dtype.str
    fields = [dtype.fields[name] for name in dtype.names]
    return {
        "names": list(dtype.names),
        "formats": [_dtype_of(field[0]) for field in fields],
        "offsets": [field[1] for field in fields],
        "titles": [field[2] if len(field) > 2 else None for field in fields],
        "itemsize": dtype.itemsize,
        "aligned": dtype.isalignedstruct,
    }


def _dtype_from(node: Node) -> Any:
    import numpy

    if not isinstance(node, dict):
        return numpy.dtype([tuple(field) for field in node] if isinstance(node, list) else node)
    if "base" in node:
        return numpy.dtype((_dtype_from(node["base"]), tuple(node["shape"])))
    given: Any = {name: node[name] for name in ("names", "offsets", "titles", "itemsize")}
    given["formats"] = [_dtype_from(form) for form in node["formats"]]
    if not any(given["titles"]):
        del given["titles"]
    return numpy.dtype(given, align=node["aligned"])


# Decoding

_FACTORIES: dict[str, Callable[[], Any]] = {
    kind.__name__: kind for kind in (int, float, bool, str, list, dict, set, tuple, bytes)
}


def decode(
    node: Node,
    tensors: Sequence[Any],
    foreign: MakeForeign = lambda tag, body, _again: Foreign(tag, body),
) -> Any:
    """Return a node as a Python value.

    Args:
        tensors: what to put where the tree names tensor 0, 1, ...
        foreign: makes a value of a tag that is not known here, from its body; its third argument decodes nodes.

    Raises:
        DamagedCheckpoint: the node breaks the form.
    """
    try:
        return _Decoder(tensors, foreign).value(node)
    # RuntimeError is torch's for arguments that do not fit.
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, OverflowError, RuntimeError) as error:
        raise DamagedCheckpoint(f"the structure of the state is damaged: {first_line(error)}") from error


class _Decoder:
    def __init__(self, tensors: Sequence[Any], foreign: MakeForeign) -> None:
        self._tensors = tensors
        self._foreign = foreign

    def value(self, node: Node) -> Any:
        if type(node) is dict:
            if len(node) == 1 or "$ordered" in node:
                number = node.get(TENSOR)
                if type(number) is int and number >= 0:  # nearly all of a large state
                    return self._tensors[number]
                tag = next(iter(node))
                if tag[:1] == "$":
                    return self._tagged(tag, node)
            return {key: self.value(entry) for key, entry in node.items()}
        if type(node) is list:
            return [self.value(entry) for entry in node]
        return node

    def _tagged(self, tag: str, node: dict[str, Node]) -> Any:
        body = node[tag]
        if tag == TENSOR:
            if _checked_number(body) < 0:
                raise DamagedCheckpoint(f"the structure refers to tensor {body}")
            return self._tensors[body]
        if tag == "$ordered":
            ordered = OrderedDict(self.value(body))
            if "metadata" in node:
                ordered._metadata = self.value(node["metadata"])  # type: ignore[attr-defined]
            return ordered
        maker = _MAKERS.get(tag)
        return maker(self, body) if maker else self._foreign(tag, body, self.value)

    def pairs(self, body: Node) -> list[tuple[Any, Any]]:
        return [(self.value(key), self.value(entry)) for key, entry in body]

    def fields(self, body: Node) -> tuple[str, dict[str, Any]]:
        name, fields = body
        return str(name), {str(key): self.value(field) for key, field in fields.items()}


_MAKERS: dict[str, Callable[[_Decoder, Node], Any]] = {
    "$tuple": lambda decoder, body: tuple(decoder.value(body)),
    "$set": lambda decoder, body: set(decoder.value(body)),
    "$frozenset": lambda decoder, body: frozenset(decoder.value(body)),
    "$dict": lambda decoder, body: dict(decoder.pairs(body)),
    "$counter": lambda decoder, body: Counter(dict(decoder.pairs(body))),
    "$default": lambda decoder, body: defaultdict(_FACTORIES[body[0]] if body[0] else None, decoder.pairs(body[1])),
    "$deque": lambda decoder, body: deque(decoder.value(body[1]), maxlen=body[0]),
    "$range": lambda _decoder, body: range(*body),
    "$slice": lambda decoder, body: slice(*decoder.value(body)),
    "$int": lambda _decoder, body: int(body, 16),
    "$float": lambda _decoder, body: float(body),
    "$str": lambda _decoder, body: _data(body).decode("utf-8", "surrogatepass"),
    "$complex": lambda decoder, body: complex(*decoder.value(body)),
    "$bytes": lambda _decoder, body: _data(body),
    "$bytearray": lambda _decoder, body: bytearray(_data(body)),
    "$named": lambda decoder, body: _named(*decoder.fields(body)),
    "$data": lambda decoder, body: _plain_object(decoder.fields(body)[1]),
    "$node": lambda decoder, body: PlainObject(
        type=str(body[0]), context=decoder.value(body[1]), children=decoder.value(body[2])
    ),
    "$array": lambda _decoder, body: _array(*body),
    "$scalar": lambda _decoder, body: _scalar(*body),
}


def _data(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _named(name: str, fields: dict[str, Any]) -> Any:
    """A named tuple like the one that was saved, of a class of its own."""
    return _named_kind(name.rpartition(":")[2].rpartition(".")[2], tuple(fields))(**fields)


@functools.lru_cache(maxsize=256)
def _named_kind(name: str, fields: tuple[str, ...]) -> Any:
    make: Any = namedtuple
    kind = make(name, fields)
    kind.__reduce__ = lambda self: (_named, (name, self._asdict()))  # no module has the class
    return kind


def _plain_object(fields: dict[str, Any]) -> PlainObject:
    for name in filter(_is_pythons, fields):
        raise DamagedCheckpoint(f"the structure gives an object {name!r}, which is Python's own")
    return PlainObject(**fields)


def _is_pythons(name: str) -> bool:
    """Whether Python itself may look for an attribute of this name, and call what it finds."""
    return name.startswith("__")


def _array(dtype: Node, shape: list[int], text: str) -> Any:
    import numpy

    form = _dtype_from(dtype)
    if form.hasobject:
        raise DamagedCheckpoint(f"the structure holds an array of objects, dtype {dtype!r}")
    return numpy.frombuffer(_data(text), form).reshape(shape).copy()


def _scalar(dtype: Node, text: str) -> Any:
    array = _array(dtype, [1], text)
    # NumPy takes zeros at the end of a text for padding.
    if array.dtype.kind == "S":
        return type(array[0])(_data(text))
    if array.dtype.kind == "U":
        return type(array[0])(_data(text).decode("utf-32-" + ("be" if array.dtype.byteorder == ">" else "le")))
    return array[0]
