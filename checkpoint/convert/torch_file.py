"""Files of torch.save: read with torch's weights_only loader, and written so that anybody can read them with it.

Called by `weights.py`. The loader knows fewer types than a state may have; the table in docs/checkpoint-formats.md says
what becomes of the others.
"""

from __future__ import annotations

import codecs
import contextlib
import dataclasses
import io
import os
import pickle
from collections import Counter, OrderedDict, deque
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from hetstream.checkpoint.errors import DamagedCheckpoint, UnsupportedState, first_line
from hetstream.checkpoint.record.tree import MAX_INLINE_BYTES

# NumPy's words for the numbers that torch has too.
_NUMPY_CHARS = "?bBhHiIqQlLefdFD"
# NumPy's arrays of numbers are rebuilt by these; elements of other kinds go through the same loader.
_ARRAY_GLOBALS = [
    np.zeros(1).__reduce__()[0],
    np.float64(0).__reduce__()[0],
    np.ndarray,
    np.dtype,
    *{type(np.dtype(word)) for word in _NUMPY_CHARS},
]
# The loader takes no longer integers.
_MAX_INTEGER_BYTES = 255
_LOADABLE = (
    *(type(None), bool, int, float, complex, str, bytearray),
    *(torch.dtype, torch.layout, torch.device, torch.Size),
)


def load_torch(path: Path) -> Any:
    """Read a file of torch.save with the weights_only loader; its tensors are mapped.

    Raises:
        UnsupportedState: it holds objects that only code of its own could make. None of it was run.
        DamagedCheckpoint: it is damaged.
    """
    return load_weights_only(path, str(path), mmap=True)


def load_weights_only(file: Any, name: str, **options: Any) -> Any:
    """Read what torch.save wrote.

    Args:
        file: a path, or an open file.
        name: of it, for messages.
        options: of torch.load.

    Raises:
        UnsupportedState: it holds objects that only code of its own could make. None of it was run.
        DamagedCheckpoint: it is damaged.
    """
    try:
        with torch.serialization.safe_globals(_ARRAY_GLOBALS):
            return torch.load(file, map_location="cpu", weights_only=True, **options)
    except pickle.UnpicklingError as error:
        lines = str(error).splitlines() or ["unknown"]
        reason = next((line.strip() for line in lines if "GLOBAL" in line), lines[0])
        raise UnsupportedState(
            f"{name} holds what torch's weights_only loader does not take, and nothing of it was run: {reason}"
        ) from error
    except FileNotFoundError:
        raise
    # The loader raises whatever a damaged file leads it to.
    except Exception as error:
        raise DamagedCheckpoint(f"{name} cannot be read by torch.load: {first_line(error)}") from error


def save_torch(state: Mapping[str, Any], descriptor: int) -> None:
    """Write a state with torch.save, and bring it to disk.

    Args:
        state: top-level key to tree.
        descriptor: of a new file.

    Raises:
        UnsupportedState: it holds a value that the weights_only loader does not take.
        OSError: as from write(2); what was written so far stays.
    """
    with open(descriptor, "wb", closefd=False) as file:
        try:
            torch.save(_Loadable().tree(state), file)
        except RuntimeError as error:
            # torch closes its archive when a write has failed, and raises what that runs into.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from error
            raise
    os.fsync(descriptor)


def plain(value: Any) -> Any:
    """A tree of the types that any program has: what is of a program's own classes becomes dict, list or tuple."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | deque):
        return [plain(item) for item in value]
    if isinstance(value, tuple) and not isinstance(value, torch.Size):
        return tuple(plain(item) for item in value)
    if isinstance(value, SimpleNamespace):
        return plain(vars(value))
    if isinstance(value, range):
        # torch would write it down number by number.
        return (value.start, value.stop, value.step)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return value


class _Loadable:
    """Makes a tree of what the weights_only loader takes."""

    def __init__(self) -> None:
        self._dtypes: dict[int, torch.dtype] = {}

    def tree(self, value: Any) -> Any:
        """A value, and all that is in it, as its nearest type that the loader knows."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, np.ndarray | np.generic):
            return _of_numpy(value)
        if isinstance(value, bytes | io.BytesIO):
            return _of_bytes(value if isinstance(value, bytes) else value.getvalue())
        if isinstance(value, Mapping):
            return self._mapping(value)
        if isinstance(value, list | deque):
            return [self.tree(item) for item in value]
        if isinstance(value, set):
            return {self.tree(item) for item in value}
        if isinstance(value, tuple | frozenset) and not isinstance(value, torch.Size):
            return tuple(self.tree(item) for item in value)
        if isinstance(value, slice):
            return (value.start, value.stop, value.step)
        if isinstance(value, torch.memory_format):
            return str(value).removeprefix("torch.")
        if isinstance(value, int) and value.bit_length() // 8 >= _MAX_INTEGER_BYTES:
            raise UnsupportedState(
                f"the state holds an integer of {value.bit_length()} bits, and torch's weights_only loader takes at "
                f"most {_MAX_INTEGER_BYTES} bytes: convert it to safetensors or flash"
            )
        if isinstance(value, _LOADABLE):
            return value
        simpler = plain(value)
        if simpler is value:
            raise UnsupportedState(f"the state holds a {type(value)}, which torch's weights_only loader does not take")
        return self.tree(simpler)

    def _mapping(self, value: Mapping[Any, Any]) -> dict[Any, Any]:
        kind = type(value) if isinstance(value, OrderedDict | Counter) else dict
        made = kind({self.tree(key): self.tree(item) for key, item in value.items()})
        if isinstance(value, OrderedDict):  # of a module, with versions of its parts
            vars(made).update(self.tree(vars(value)))
        return made

    def _tensor(self, value: torch.Tensor) -> torch.Tensor:
        """A copy where one storage is seen as two dtypes, which torch.save refuses."""
        if value.layout is not torch.strided or not value.numel():
            return value
        known = self._dtypes.setdefault(value.untyped_storage().data_ptr(), value.dtype)
        return value if known is value.dtype else value.clone()


class _NoBytes:
    """Becomes b"" when it is loaded: pickle writes that down as a call of `bytes`, which the loader does not make."""

    def __reduce__(self) -> tuple[Any, tuple[str, str]]:
        return codecs.encode, ("", "latin1")


def _of_bytes(value: bytes) -> Any:
    """Many as a tensor: pickle's protocol 2 writes them as text."""
    if len(value) > MAX_INLINE_BYTES:
        return torch.frombuffer(bytearray(value), dtype=torch.uint8)
    return value or _NoBytes()


def _of_numpy(value: Any) -> Any:
    """An array as a tensor, a scalar as a number of Python; what torch does not have as its bytes."""
    if value.dtype.char not in _NUMPY_CHARS:
        return {"dtype": _dtype(value.dtype), "shape": list(value.shape), "bytes": value.tobytes()}
    if isinstance(value, np.generic):
        return value.item()
    return torch.from_numpy(np.array(value, value.dtype.newbyteorder("=")))


def _dtype(dtype: Any) -> Any:
    """What `numpy.dtype` makes it of again: a name, or of records a list of fields.

    NumPy has no such list where fields overlap or are out of order, and one with more fields where there are gaps
    between them. There it is a dict, which has their offsets.
    """
    if dtype.subdtype:
        base, shape = dtype.subdtype
        return (_dtype(base), shape)
    if not dtype.names:
        return dtype.str
    with contextlib.suppress(ValueError):
        if np.dtype(dtype.descr) == dtype:
            return dtype.descr
    fields = [dtype.fields[name] for name in dtype.names]
    formats, offsets = [_dtype(field[0]) for field in fields], [field[1] for field in fields]
    return {"names": list(dtype.names), "formats": formats, "offsets": offsets, "itemsize": dtype.itemsize}
