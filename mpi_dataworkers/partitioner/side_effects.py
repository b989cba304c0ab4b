"""What a forward does beside its tensors: reads files, time and globals, draws random numbers, changes attributes.

A graph holds none of that: it would keep the file, the time and the number of the one run that was captured. So one
call of the forward is watched, and afterwards, before each step, the plain values that it read must be what they were.
"""

from __future__ import annotations

import dis
import gc
import operator
import os
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

_HERE = os.path.dirname(__file__) + os.sep
_OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_WITHOUT_STATE = frozenset(
    [
        *("math", "typing", "functools", "itertools", "operator", "collections", "contextlib", "warnings", "copy"),
        *(
            "dataclasses",
            "enum",
            "numbers",
            "abc",
            "types",
            "string",
            "re",
            "inspect",
            "__future__",
            "typing_extensions",
        ),
    ]
)
_WITH_STATE = frozenset(["numpy", "pandas", "PIL", "cv2", "scipy", "h5py", "pyarrow", "requests"])
_EFFECTS_OF_BUILTINS = frozenset(["print", "open", "input", "exec", "eval", "compile", "__import__", "breakpoint"])
_MODULES_WITH_EFFECTS = frozenset(
    ["time", "posix", "_io", "io", "_random", "random", "_socket", "socket", "select", "_datetime", "datetime", "os"]
)


class Effects:
    """What was seen of a forward.

    Attributes:
        reasons: why it has no graph, with file and line; empty when it may have one.
        read_globals: the plain values that it read: the table, the name, the value then.
        asks_for_types: it asks for types or identities of objects.
    """

    def __init__(self) -> None:
        self.reasons: list[str] = []
        self.asks_for_types = False
        self.read_globals: list[tuple[dict[str, Any], str, Any]] = []

    def note(self, code: types.CodeType, line: int, what: str) -> None:
        """Add a reason."""
        reason = f"{what} ({code.co_filename.rsplit('/', 1)[-1]}:{line}, in {code.co_name})"
        if reason not in self.reasons:
            self.reasons.append(reason)


def watch(call: Callable[[], Any]) -> tuple[Any, Effects]:
    """Call it, and see what it does beside its tensors.

    Returns:
        What the call returned, and what was seen.
    """
    effects = Effects()
    seen: dict[types.CodeType, bool] = {}

    def event(frame: types.FrameType, kind: str, what: Any) -> None:
        code = frame.f_code
        if code not in seen:
            seen[code] = _is_of_the_program(code)
            if seen[code]:
                _read_code(frame, effects)
        if kind == "c_call" and seen[code] and (name := _effect_of(what)):
            effects.note(code, frame.f_lineno, f"the forward calls {name}")

    before, collects = sys.getprofile(), gc.isenabled()
    gc.disable()  # what a collection calls, as `gc.callbacks`, is none of the forward's
    sys.setprofile(event)
    try:
        result = call()
    finally:
        sys.setprofile(before)
        if collects:
            gc.enable()
    return result, effects


def _is_of_the_program(code: types.CodeType) -> bool:
    file = code.co_filename
    # Ours, too, may run in a forward: what times the lookups of embeddings.
    return not file.startswith(("<", _OURS)) and "/torch/" not in file


def _effect_of(called: Any) -> str:
    """The name of a C function that does something beside its result; "" for others."""
    owner = getattr(called, "__self__", None)
    name = getattr(called, "__name__", "")
    module = getattr(called, "__module__", None) or ""
    if isinstance(owner, types.ModuleType):
        module = owner.__name__
    elif owner is not None:
        module = type(owner).__module__
    if module == "builtins":
        return name if name in _EFFECTS_OF_BUILTINS else ""
    return f"{module}.{name}" if module.split(".")[0] in _MODULES_WITH_EFFECTS else ""


def _read_code(frame: types.FrameType, effects: Effects) -> None:
    """Note the globals that a function reads and writes, from its instructions."""
    code, table = frame.f_code, frame.f_globals
    line = code.co_firstlineno
    instructions = [
        instruction for instruction in dis.get_instructions(code) if instruction.opname not in ("PUSH_NULL", "CACHE")
    ]
    for place, instruction in enumerate(instructions):
        if instruction.starts_line is not None:
            line = _line_of(instruction, line)
        name = instruction.argval
        if instruction.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            effects.note(code, line, f"the forward writes the global {name}")
        elif instruction.opname == "IS_OP":
            effects.asks_for_types |= instructions[place - 1].argval is not None
        elif instruction.opname == "LOAD_GLOBAL" and name in ("type", "id") and name not in table:
            effects.asks_for_types = True
        elif instruction.opname == "LOAD_GLOBAL" and name in table:
            following = instructions[place + 1] if place + 1 < len(instructions) else None
            attribute = following.argval if following is not None and "ATTR" in following.opname else None
            if following is not None and following.opname == "LOAD_METHOD":
                attribute = following.argval
            _note_global(table, name, attribute, effects, (code, line))
        elif instruction.opname in ("LOAD_DEREF", "STORE_DEREF") and _is_from_outside(frame, name):
            effects.note(code, line, f"the forward uses the variable {name} of a function around it, which may change")


def _is_from_outside(frame: types.FrameType, name: str) -> bool:
    """Whether a variable of a closure is none of a function that the forward itself has called."""
    if name not in frame.f_code.co_freevars or name == "__class__":
        return False
    caller = frame.f_back
    while caller is not None and not caller.f_code.co_filename.startswith(_HERE):
        if name in caller.f_code.co_cellvars:
            return False
        caller = caller.f_back
    value = frame.f_locals.get(name)
    return not (isinstance(value, type | types.FunctionType | types.BuiltinFunctionType))


def _line_of(instruction: dis.Instruction, before: int) -> int:
    line = getattr(instruction, "line_number", None) or instruction.starts_line
    return line if isinstance(line, int) and not isinstance(line, bool) else before


def _note_global(
    table: dict[str, Any], name: str, attribute: Any, effects: Effects, place: tuple[types.CodeType, int]
) -> None:
    value = table[name]
    if isinstance(value, types.ModuleType):
        root = value.__name__.split(".")[0]
        if root in _WITH_STATE or (root in sys.stdlib_module_names and root not in _WITHOUT_STATE):
            effects.note(*place, f"the forward uses the module {value.__name__}, whose results no graph can hold")
        elif isinstance(attribute, str) and is_plain(found := vars(value).get(attribute, len)):
            effects.read_globals.append((vars(value), attribute, copy_of(found)))
    elif is_plain(value) or isinstance(value, types.FunctionType | type):
        effects.read_globals.append((table, name, copy_of(value)))
    elif callable(value):
        effects.read_globals.append((table, name, value))
        inside = getattr(value, "__dict__", {})
        found_inside = ((key, found) for key, found in inside.items() if is_plain(found))
        effects.read_globals.extend((inside, key, copy_of(found)) for key, found in found_inside)
    else:
        effects.note(*place, f"the forward reads the global {name}, a {type(value).__name__}, which may change")


def is_plain(value: Any) -> bool:
    """Whether a value is made of numbers and text alone, so that it can be compared."""
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(is_plain, value))
    if isinstance(value, dict):
        return all(map(is_plain, value)) and all(map(is_plain, value.values()))
    return isinstance(value, _PLAIN)


def copy_of(value: Any) -> Any:
    """A plain value, as it is now."""
    if isinstance(value, list):
        return [copy_of(item) for item in value]
    if isinstance(value, dict):
        return {key: copy_of(item) for key, item in value.items()}
    return set(value) if isinstance(value, set) else value


class _Table:
    """Entries of dictionaries, and what they were."""

    def __init__(self) -> None:
        self.tables: list[Mapping[str, Any]] = []
        self.names: list[str] = []
        self.values: list[Any] = []
        self.where: list[str] = []

    def add(self, table: Mapping[str, Any], name: str, value: Any, where: str) -> None:
        """Add an entry."""
        self.tables.append(table)
        self.names.append(name)
        self.values.append(value)
        self.where.append(where)

    def now(self) -> list[Any]:
        """What the entries are now; a KeyError where one is gone."""
        return list(map(operator.getitem, self.tables, self.names))


# What torch itself keeps in each module.
_OF_TORCH = frozenset(vars(torch.nn.Module())) - {"training"}
_OF_ALL_MODULES = [
    getattr(torch.nn.modules.module, f"_global_{name}")
    for name in ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")
]
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class ModelState:
    """A model's structure and plain attributes, as they were; whether they still are costs microseconds to say.

    Args:
        module: the outermost module.
        read_globals: values that must stay, too.
    """

    def __init__(self, module: torch.nn.Module, read_globals: list[tuple[dict[str, Any], str, Any]]) -> None:
        self._parts, self._plain_values = _Table(), _Table()
        self._sizes: list[tuple[dict[str, Any], int]] = []
        self._hooks: list[tuple[str, Any]] = []
        self._attributes: list[tuple[str, dict[str, Any], int, bool]] = []
        self._classes: set[type] = set()
        self._default_type = torch.get_default_dtype()
        for name, part in module.named_modules():
            self._add_module(name or type(module).__name__, part, is_outermost=part is module)
        for table, name, value in read_globals:
            self._plain_values.add(table, name, value, f"the global {name}")

    def _add_module(self, name: str, module: torch.nn.Module, is_outermost: bool) -> None:
        own = vars(module)
        for key, value in own.items():
            if key in ("_parameters", "_modules"):
                for child, found in value.items():
                    self._parts.add(value, child, found, f"{name}.{child}")
                self._sizes.append((value, len(value)))
            elif key in _HOOKS and not is_outermost:
                self._hooks.append((name, value))
            elif key not in _OF_TORCH and not (is_outermost and key == "forward"):
                self._add_attribute(own, key, value, f"{name}.{key}")
        self._attributes.append((name, own, self._num_attributes(own, is_outermost), is_outermost))
        for kind in type(module).__mro__[: type(module).__mro__.index(torch.nn.Module)]:
            if kind not in self._classes:
                self._classes.add(kind)
                self._add_class(kind)

    def _add_class(self, kind: type) -> None:
        for key, value in vars(kind).items():
            if isinstance(value, types.FunctionType):
                self._parts.add(vars(kind), key, value, f"{kind.__name__}.{key}")
            elif is_plain(value) and not key.startswith("__"):
                self._plain_values.add(vars(kind), key, copy_of(value), f"{kind.__name__}.{key}")

    def _add_attribute(self, own: dict[str, Any], key: str, value: Any, where: str) -> None:
        # torch.export puts copies in place of containers, and what tensors are is compared elsewhere.
        if not is_plain(value) and not isinstance(value, torch.Tensor | list | tuple | dict | set):
            self._parts.add(own, key, value, where)
        for table, inner, plain_value in _plain_parts(own, key, value):
            self._plain_values.add(table, inner, plain_value, where)

    @staticmethod
    def _num_attributes(own: dict[str, Any], is_outermost: bool) -> int:
        return len(own) - (is_outermost and "forward" in own)  # where a partition stands

    def hooked(self) -> str:
        """The module inside that has a hook, with the hook's file and line; "" without."""
        of_all = (("torch.nn.Module", hooks) for hooks in _OF_ALL_MODULES)
        for name, hooks in (*self._hooks, *of_all):
            for hook in hooks.values():
                code = getattr(hook, "__code__", None)
                if code is None or not code.co_filename.startswith(_OURS):
                    where = f" ({os.path.basename(code.co_filename)}:{code.co_firstlineno})" if code is not None else ""
                    return f"{name} has a hook{where}"
        return ""

    def change(self) -> str:
        """What is not as it was; "" when nothing is."""
        try:
            parts, plain_values = self._parts.now(), self._plain_values.now()
        except KeyError as error:
            return f"{error.args[0]} is gone"
        if not all(map(operator.is_, parts, self._parts.values)):
            place = next(place for place, part in enumerate(parts) if part is not self._parts.values[place])
            return f"{self._parts.where[place]} is another object than it was"
        if plain_values != self._plain_values.values:
            before = self._plain_values.values
            place = next(place for place, value in enumerate(plain_values) if value != before[place])
            return f"{self._plain_values.where[place]} was {before[place]!r} and is {plain_values[place]!r}"
        if torch.get_default_dtype() is not self._default_type:
            return f"torch's default type was {self._default_type} and is {torch.get_default_dtype()}"
        if any(len(table) != size for table, size in self._sizes):
            return "the model has other parts than it had"
        for name, own, number, is_outermost in self._attributes:
            if self._num_attributes(own, is_outermost) != number:
                return f"{name} has other attributes than it had, now {[*own][-1]} too"
        return self.hooked() if any(_OF_ALL_MODULES) or any(hooks for _, hooks in self._hooks) else ""


def _plain_parts(table: dict[str, Any], key: str, value: Any) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """The plain values of an attribute: itself, or the attributes of an object of settings."""
    if is_plain(value):
        yield table, key, copy_of(value)
    elif hasattr(value, "__dict__") and not isinstance(value, torch.nn.Module | torch.Tensor | type | types.ModuleType):
        inside = vars(value)
        for name, found in inside.items():
            if isinstance(name, str) and is_plain(found):
                yield inside, name, copy_of(found)
