"""Keywords as fields of a dataclass: a field declares a keyword and its check, and a constructor takes them all.

Used by `options.py` and `data_loader.py`.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from dataclasses import fields
from threading import TIMEOUT_MAX
from typing import Any, Concatenate, ParamSpec, TypeVar

from hetstream.base.errors import HetstreamError

# Gives the problems of a keyword's value.
Check = Callable[[str, Any], Iterator[str]]
_Options = TypeVar("_Options")
_Keywords = ParamSpec("_Keywords")


def must_be(check: Check) -> dict[str, Any]:
    """Metadata of a field of a dataclass: what its value must be."""
    return {"check": check}


def problems_of(options: Any) -> Iterator[str]:
    """What is wrong with the value of each keyword by itself."""
    for declared in fields(options):
        if (check := declared.metadata.get("check")) is not None:
            yield from check(declared.name, getattr(options, declared.name))


def help_of(declaration: object) -> str:
    """The docstring of what takes the keywords of a declaration, from the declaration's own."""
    return inspect.cleandoc(declaration.__doc__ or "").replace("Attributes:\n", "Args:\n", 1)


def takes(
    declaration: Callable[_Keywords, _Options],
) -> Callable[[Callable[[Any, _Options], None]], Callable[Concatenate[Any, _Keywords], None]]:
    """Decorate a constructor: callers give the keywords, and the constructor gets one value that has them all.

    Editors, type checkers, `help` and `inspect.signature` show the keywords.

    Args:
        declaration: the dataclass whose fields are the keywords.
    """

    def decorate(construct: Callable[[Any, _Options], None]) -> Callable[Concatenate[Any, _Keywords], None]:
        signature = inspect.signature(declaration)
        itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)

        def __init__(self: Any, /, *args: _Keywords.args, **keywords: _Keywords.kwargs) -> None:
            try:
                signature.bind(*args, **keywords)  # else its error would name the declaration, and not the class
            except TypeError as error:
                raise TypeError(f"{type(self).__name__}: {error}") from None
            construct(self, declaration(*args, **keywords))

        __init__.__module__, __init__.__qualname__ = construct.__module__, construct.__qualname__
        __init__.__doc__ = help_of(declaration)
        parameters = [itself, *signature.parameters.values()]
        __init__.__signature__ = inspect.Signature(parameters, return_annotation=None)  # type: ignore[attr-defined]
        return __init__

    return decorate


# --- checks ---------------------------------------------------------------------------------------------------------


def whole(least: int, most: int | None = None, or_none: bool = False) -> Check:
    """A whole number within limits."""
    limits = f"of at least {least}" if most is None else f"from {least} to {most}"

    def check(name: str, value: Any) -> Iterator[str]:
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        fits = is_whole and value >= least and (most is None or value <= most)
        if not fits and not (value is None and or_none):
            yield f"{name}={value!r}: must be a whole number {limits}{' or None' if or_none else ''}"

    return check


def among(*allowed: Any) -> Check:
    """One of these values."""
    *most, last = map(repr, allowed)

    def check(name: str, value: Any) -> Iterator[str]:
        if not any(value is choice or (isinstance(choice, str) and value == choice) for choice in allowed):
            yield f"{name}={value!r}: must be {', '.join(most)} or {last}"

    return check


def waiting_seconds(name: str, value: Any) -> Iterator[str]:
    """Seconds to wait, 0 for ever."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= TIMEOUT_MAX:
        yield f"{name}={value!r}: must be a number of seconds of at least 0; 0 waits for ever"


def seconds_limit(name: str, value: Any) -> Iterator[str]:
    """Seconds that something may take."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.1 <= value < float("inf"):
        yield f"{name}={value!r}: must be a number of seconds of at least 0.1"


def printable(name: str, value: Any) -> Iterator[str]:
    """Text that can be shown, or None."""
    if value is not None and not (isinstance(value, str) and value and value.isprintable()):
        yield f"{name}={value!r}: must be non-empty printable text or None"


def function(name: str, value: Any) -> Iterator[str]:
    """A function or None."""
    if value is not None and not callable(value):
        yield f"{name}={value!r}: must be a function or None"


def iterated(name: str, value: Any) -> Iterator[str]:
    """Something to iterate, or None."""
    if value is not None and not hasattr(value, "__iter__") and not hasattr(value, "__getitem__"):
        yield f"{name}={value!r}: must be something to iterate, or None"


def folder(name: str, value: Any) -> Iterator[str]:
    """The path of a folder, or None."""
    if value is not None and (not isinstance(value, str | os.PathLike) or not os.fspath(value)):
        yield f"{name}={value!r}: must be the path of a folder, or None"


def problem_of(function: Callable[..., Any], *arguments: Any) -> Iterator[str]:
    """What a function refuses, in its own words."""
    try:
        function(*arguments)
    except HetstreamError as error:
        yield str(error)
