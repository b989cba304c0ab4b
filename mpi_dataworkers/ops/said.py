"""What the program has set for its warnings and log lines: torch's worker processes have it from the fork.

It travels as text, which is the same in all processes of a program.
A logger's handlers travel where they are plain ones that write to standard output or standard error. Others (of files,
rich consoles, with formatters of a class of their own) stay in the program.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import re
import sys
import warnings
from typing import Any

_SCRIPTS = ("__main__", "__mp_main__")
_STREAMS = ("stdout", "stderr")
# Of a handler: the name of its stream, its level, and format, format of dates and style of its lines.
_Handler = tuple[str, int, str | None, str | None, str]
# Of a logger: its level, whether it passes lines on and is switched off, and its handlers.
_Logger = tuple[int, bool, bool, list[_Handler]]
_STYLES: dict[Any, str] = {kind: style for style, (kind, _) in logging._STYLES.items()}
_UNSET: _Logger = logging.NOTSET, True, False, []
_set_here: set[str] = set()  # names of loggers


def warning_filters() -> str:
    """The filters of warnings, the first one first. Those for a class of the script are left out."""
    found: dict[Any, None] = {}  # of equal ones the first one counts
    filters: Any = warnings.filters
    for action, message, category, module, line in filters:
        if category.__module__ not in _SCRIPTS and "<locals>" not in category.__qualname__:
            kind = category.__module__, category.__qualname__
            found[action, _pattern(message), kind, _pattern(module), line] = None
    return json.dumps(list(found))


def _pattern(pattern: Any) -> str:
    return str(pattern.pattern if isinstance(pattern, re.Pattern) else pattern or "")


def set_warning_filters(text: str) -> None:
    """Set what `warning_filters` has given; without filters for classes that are not here."""
    warnings.resetwarnings()
    for action, message, (module_name, name), module, line in reversed(json.loads(text)):
        category: Any = None
        with contextlib.suppress(ImportError, AttributeError):
            category = importlib.import_module(module_name)
            for part in name.split("."):
                category = getattr(category, part)
            warnings.filterwarnings(action, message, category, module, line)


def loggers() -> str:
    """The loggers that have something of their own, by name; the root logger's is empty."""
    named = {
        name: found for name, found in logging.root.manager.loggerDict.items() if isinstance(found, logging.Logger)
    }
    found = {name: _described(logger) for name, logger in named.items() if not _is_ours(name)}
    own = {name: logger for name, logger in found.items() if logger != _UNSET}
    return json.dumps({"": _described(logging.root)} | own, sort_keys=True)


def _is_ours(name: str) -> bool:
    return name.partition(".")[0] == "hetstream"


def _described(logger: logging.Logger) -> _Logger:
    handlers = [found for handler in logger.handlers if (found := _handler(handler)) is not None]
    return logger.level, logger.propagate, logger.disabled, handlers


def _handler(handler: logging.Handler) -> _Handler | None:
    formatter = handler.formatter
    streams = [name for name in _STREAMS if getattr(handler, "stream", None) is getattr(sys, name)]
    if type(handler) is not logging.StreamHandler or not streams or handler.filters:
        return None
    if formatter is None:
        return streams[0], handler.level, None, None, "%"
    if type(formatter) is not logging.Formatter or type(formatter._style) not in _STYLES:
        return None
    return streams[0], handler.level, formatter._fmt, formatter.datefmt, _STYLES[type(formatter._style)]


def set_loggers(text: str) -> None:
    """Set what `loggers` has given, in the place of what a module has set here when it was imported."""
    values = json.loads(text)
    _set_here.update(values)
    for name, (level, propagate, disabled, handlers) in (dict.fromkeys(_set_here, _UNSET) | values).items():
        logger = logging.getLogger(name or None)
        logger.setLevel(level)
        logger.propagate, logger.disabled = propagate, disabled
        for handler in [handler for handler in logger.handlers if _handler(handler) is not None]:
            logger.removeHandler(handler)
        for stream, least, text, dates, style in handlers:
            made: logging.Handler = logging.StreamHandler(getattr(sys, stream))
            made.setLevel(least)
            if text is not None:
                made.setFormatter(logging.Formatter(text, dates, style))
            logger.addHandler(made)
