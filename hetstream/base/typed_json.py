"""JSON into values of a type, in any thread: what everything calls that reads JSON of a known form.

msgspec looks at a type when it first meets it, and ends the process with SIGSEGV where two threads do that at once
(seen with msgspec 0.22 when a trainer read its memory in a thread while it looked at its directory). So each
type is looked at once, by one thread; a process that is forked meanwhile finds that done.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from hetstream.base.posix import register_at_fork

T = TypeVar("T")

_lock = threading.Lock()
_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}
register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


def decode(data: bytes | bytearray | memoryview | str, kind: type[T]) -> T:
    """Read a value.

    Args:
        data: JSON.
        kind: of the value: a Struct, a dataclass, a type of the standard library. Paths are texts.

    Raises:
        msgspec.MsgspecError: it is no JSON, or no such value.
    """
    decoder = _decoders.get(kind)
    if decoder is None:
        with _lock:
            decoder = _decoders.setdefault(kind, msgspec.json.Decoder(kind, dec_hook=_read_path))
    try:
        value: T = decoder.decode(data)
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError(f"it is no text: {error}") from error
    except RecursionError as error:  # whoever sends a kilobyte of brackets must not end the process that reads it
        raise msgspec.DecodeError("it is nested too deeply") from error
    return value


def encode(value: Any) -> bytes:
    """JSON of a value that `decode` reads; also of one that has paths."""
    return msgspec.json.encode(value, enc_hook=_write_path)


def _read_path(kind: type[Any], value: Any) -> Any:
    if issubclass(kind, Path):
        return kind(value)  # a TypeError becomes msgspec's error
    raise NotImplementedError


def _write_path(value: Any) -> str:
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError
