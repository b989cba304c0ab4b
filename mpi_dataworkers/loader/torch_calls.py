"""torch's own loader where this one stands in for it: its keywords, and calls of its functions as it makes them."""

from __future__ import annotations

import dis
import inspect
import types
from typing import Any

import torch


def torch_options(loader: Any) -> dict[str, Any]:
    """Keywords of the local torch loader that runs the pipeline in process."""
    options: dict[str, Any] = {
        "num_workers": loader.num_workers,
        "pin_memory": loader.pin_memory and torch.cuda.is_available(),
        "worker_init_fn": loader.worker_init_fn,
        "timeout": loader.timeout,
    }
    if loader.num_workers > 0:
        options |= {
            "prefetch_factor": loader.prefetch_factor,
            "multiprocessing_context": loader.multiprocessing_context,
            "persistent_workers": loader.persistent_workers,
        }
    return options


# Calls of torch's functions from where torch calls them.
#
# torch gives a warning the place of the caller (`stacklevel=2`), and programs filter by it. A frame of ours would be
# that place.


def call_as_in(caller: Any, name: str, function: Any, *arguments: Any) -> None:
    """Call a function as if another one did, on the line on which that one calls something of this name.

    Args:
        caller: a function of torch, also one that others have wrapped.
        name: of an attribute.
        function: what to call.
        arguments: of the call.
    """
    caller = inspect.unwrap(caller)
    if (line := _line_of(caller, name)) is None:
        function(*arguments)
        return
    code = _call.__code__.replace(
        co_filename=caller.__code__.co_filename, co_name=caller.__code__.co_name, co_firstlineno=line - 1
    )
    types.FunctionType(code, caller.__globals__)(function, arguments)


def _line_of(caller: Any, name: str) -> int | None:
    """The line; None where there is no such call, or nobody sees it."""
    code = getattr(caller, "__code__", None)
    if code is None:
        return None
    begins = next((each.offset for each in dis.get_instructions(code) if each.argval == name), -1)
    return next((line for first, stop, line in code.co_lines() if first <= begins < stop), None)


def _call(function: Any, arguments: Any) -> None:
    function(*arguments)  # on the first line: `call_as_in` counts on it
