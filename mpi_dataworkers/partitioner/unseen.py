"""What torch.compile takes for constant and has no guard for, so that it is compared here in each step.

torch.compile guards the objects that a forward reads. Beside them a forward depends on the environment, on functions
that are found through a class, on methods of tensors, and on hooks of all modules. What cannot be compared is refused.
Called by `capture.py`.
"""

from __future__ import annotations

import abc
import builtins
import dis
import functools
import gc
import inspect
import os
import re
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import CodeType, FunctionType
from typing import Any

import torch

# Files of torch, and of this package: what a user asks about is neither.
NOT_THE_PROGRAM = re.compile(
    r"/(site|dist)-packages/torch/|/torch/(nn|fx|_[a-z]+)/|/partitioner/|/lib/python3[.]\d+/[a-z_]+[.]py"
)
_DENORMAL, _ONE = 5e-324, 1.0
_PLAIN = bool | int | float | str
_any_hook: Any = torch.nn.modules.module._has_any_global_hook
_HOOKS_OF_ALL: tuple[Any, ...] = tuple(
    getattr(torch.nn.modules.module, f"_global_{name}_hooks")
    for name in ("forward", "forward_pre", "backward", "backward_pre")
)


class NotCaptured(Exception):
    """There is no graph; the message is the reason, for the user. Internal to this package."""


class Unseen:
    """See the module.

    Args:
        module: the model.
        graph: that was made of its forward.
        codes: of the functions that were traced.

    Attributes:
        catches: where the forward catches exceptions; "" where it does not. Of those that a graph raises
            torch.compile's own code catches none.

    Raises:
        NotCaptured: the forward does something that torch.compile does not see.
    """

    def __init__(self, module: torch.nn.Module, graph: torch.fx.Graph, codes: Sequence[CodeType]) -> None:
        _check_random(graph)
        _check_transforms(graph)
        if not _keeps_denormals():
            raise NotCaptured("torch.set_flush_denormal is on, which holds for the trainer alone")
        if _has_hooks_of_all():
            raise NotCaptured("there are hooks of all modules, which torch.compile does not see")
        self.catches = next(filter(None, map(_catches, codes)), "")
        traced, owners = set(codes), _classes()
        _check_functions(_functions(owners), traced)
        for code in traced:
            _check_code(code)
        _check_kinds(owners, traced)
        self._absent = [*_absent(traced), *_own_calls(module)]
        self._alike = list(_alike(module))
        self._environment = dict(_environment())
        self._settings = _settings()
        self._modules = {name: sys.modules.get(name) for code in codes for name in _imported(code)}
        self._registered = abc.get_cache_token() if any(map(_asks_for_kinds, codes)) else None
        methods = list(_methods(owners, {type(part) for part in module.modules()}, traced))
        self._found = [
            *(place for place in methods if not isinstance(place[2], classmethod | staticmethod)),
            *_attributes_of_metaclasses(owners),
            *_methods_of_tensors(graph),
        ]
        # Those that a class gives in another form than it has them.
        self._kept = [place for place in methods if isinstance(place[2], classmethod | staticmethod)]

    def change(self) -> str:
        """What is not as it was; "" where all is."""
        if _environment() != self._environment:
            return "a variable of the environment has changed"
        if _has_hooks_of_all():
            return "there are hooks of all modules"
        if self._registered is not None and self._registered != abc.get_cache_token():
            return "a class has been registered with an abstract one"
        for text, find, found in self._alike:
            value = _value(find)
            if value == found and repr(value) != repr(found):  # others are seen by torch.compile's guards
                return f"{text} is equal to what it was, and not the same"
        for table, names in self._absent:
            if not table.keys().isdisjoint(names):
                return f"there is a {next(iter(table.keys() & names))}, which there was not"
        for owner, name, value in self._found:
            if getattr(owner, name, None) is not value:
                return f"{owner.__name__}.{name} has been replaced"
        for owner, name, value in self._kept:
            if _in_class(owner, name) is not value:
                return f"{owner.__name__}.{name} has been replaced"
        for name, module in self._modules.items():
            if sys.modules.get(name) is not module:
                return f"the module {name} has been replaced"
        return "" if _settings() == self._settings else "a setting of torch or of Python has changed"


_Places = Iterator[tuple[Any, str, Any]]
_Absent = list[tuple[Mapping[str, Any], frozenset[str]]]  # tables, and names that are not in them


def _alike(module: torch.nn.Module) -> Iterator[tuple[str, Callable[[], Any], Any]]:
    """Values that torch.compile's guards take for the same if they are equal, as 0.0 and -0.0, or (1,) and (1.0,)."""
    context: Any = torch._guards.TracingContext.try_get()
    if context is None:
        return
    helpers: Any = getattr(torch._dynamo.guards, "_get_closure_vars", dict)()
    model = weakref.ref(module)  # torch keeps for good what stands for a graph
    for guard in context.guards_context.dynamo_guards:
        text = guard.name() if callable(guard.name) else guard.name
        if guard.create_fn_name() not in _BY_EQUALITY or "L['args']" in text or "L['kwargs']" in text:
            continue
        try:
            source = eval(f"lambda L, G: {text}", dict(helpers))  # torch's own text of where the value is
            find = functools.partial(_in_model, model, source)
            value = find()
        except _NOT_FOUND:
            continue  # not in the model
        is_zero = isinstance(value, float) and value == 0
        is_plain = guard.create_fn_name() in _OF_PLAIN and (is_zero or isinstance(value, _OF_NUMBERS))
        if is_plain or (isinstance(value, OrderedDict) and value):
            yield text, find, _value(find)


_BY_EQUALITY = frozenset(("CONSTANT_MATCH", "EQUALS_MATCH", "DICT_KEYS_MATCH", "TYPE_MATCH"))
_OF_PLAIN = frozenset(("CONSTANT_MATCH", "EQUALS_MATCH"))
_NOT_FOUND = AttributeError, LookupError, NameError, SyntaxError, TypeError, ValueError
_OF_NUMBERS = (tuple, set, frozenset)


def _in_model(model: Any, source: Callable[..., Any]) -> Any:
    """What torch finds at a place of its own."""
    module = model()
    return source({"module": module, "self": module}, {})


def _value(find: Callable[[], Any]) -> Any:
    """A constant, whose text is another one for each type of number; of an `OrderedDict`, its keys."""
    try:
        value = find()
    except _NOT_FOUND:
        return None
    return dict.fromkeys(value) if isinstance(value, OrderedDict) else value


def _settings() -> tuple[Any, ...]:
    """What torch.compile asks functions for, once."""
    return (
        sys.getrecursionlimit(),
        sys.get_int_max_str_digits() if hasattr(sys, "get_int_max_str_digits") else 0,
        torch.get_default_dtype(),
        _keeps_denormals(),
        torch.get_autocast_dtype("cpu"),
        torch.get_autocast_dtype("cuda"),
        torch.is_autocast_cache_enabled(),
        torch._C._get_cublas_allow_tf32(),
        torch.distributed.is_available() and torch.distributed.is_initialized(),
    )


def _keeps_denormals() -> bool:
    """Whether numbers below 1e-38 are kept, which `torch.set_flush_denormal` changes for this thread."""
    return _DENORMAL * _ONE != 0.0


def _has_hooks_of_all() -> bool:
    """Whether the program has some: hetstream's own, which time lookups of embeddings, change nothing."""
    if not _any_hook():
        return False
    hooks = [hook for table in _HOOKS_OF_ALL for hook in table.values()]
    return any(not str(getattr(hook, "__module__", "")).startswith("hetstream.") for hook in hooks)


def _environment() -> Any:
    return getattr(os.environ, "_data", os.environ)


def _code_of(value: Any) -> CodeType | None:
    if isinstance(value, classmethod | staticmethod):
        value = value.__func__
    function = value.fget if isinstance(value, property) else value
    return function.__code__ if isinstance(function, FunctionType) else None


def _methods(owners: Sequence[Any], kinds: set[type], traced: set[CodeType]) -> _Places:
    """The functions of classes that were traced, each with the classes through which it was, or may have been, found.

    Those of torch have thousands below them, of which the model's own count.
    """
    for owner in owners:
        for name, value in list(vars(owner).items()):
            code = _code_of(value)
            if code in traced and code is not None:
                below = kinds if NOT_THE_PROGRAM.search(code.co_filename) else _classes(owner)
                found = {owner, *(kind for kind in below if issubclass(kind, owner))}
                yield from ((kind, name, value) for kind in found if _in_class(kind, name) is value)


def _in_class(owner: Any, name: str) -> Any:
    """What a class has under a name, itself or from those above it, as it has it."""
    return next((vars(kind)[name] for kind in owner.__mro__ if name in vars(kind)), None)


def _attributes_of_metaclasses(owners: Sequence[Any]) -> _Places:
    for owner in owners:
        if issubclass(owner, type) and owner is not type:
            values = list(vars(owner).items())
            yield from ((owner, name, value) for name, value in values if _is_setting(name, value))


def _is_setting(name: str, value: Any) -> bool:
    return not name.startswith("__") and isinstance(value, _PLAIN)


def _methods_of_tensors(graph: torch.fx.Graph) -> _Places:
    names = {node.target for node in graph.nodes if node.op == "call_method"}
    names |= {
        f"__{node.target.__name__}__" for node in graph.nodes if getattr(node.target, "__module__", "") == "_operator"
    }
    for name in names:
        if isinstance(name, str) and hasattr(torch.Tensor, name):
            yield torch.Tensor, name, getattr(torch.Tensor, name)


def _catches(code: CodeType) -> str:
    """Where a function of the program catches an exception; "" where it catches none."""
    if NOT_THE_PROGRAM.search(code.co_filename):
        return ""
    names = [instruction.opname for instruction in dis.get_instructions(code)]
    catches = any(name in ("CHECK_EXC_MATCH", "JUMP_IF_NOT_EXC_MATCH") for name in names)
    return f"{code.co_filename.rsplit('/', 1)[-1]}:{code.co_firstlineno}" if catches else ""


def _asks_for_kinds(code: CodeType) -> bool:
    """Whether a function of the program asks of what kind an object is, which abstract classes answer anew."""
    return not NOT_THE_PROGRAM.search(code.co_filename) and not {"isinstance", "issubclass"}.isdisjoint(code.co_names)


def _imported(code: CodeType) -> list[str]:
    """The modules that a function of the program imports."""
    if NOT_THE_PROGRAM.search(code.co_filename):
        return []
    return [each.argval for each in dis.get_instructions(code) if each.opname == "IMPORT_NAME"]


def _classes(above: type = object) -> list[Any]:
    """All classes below one, and that one."""
    found: dict[Any, None] = {}
    waiting: list[Any] = [above]
    while waiting:
        owner = waiting.pop()
        if owner not in found:
            found[owner] = None
            waiting += type.__subclasses__(owner)
    return list(found)


def _functions(owners: Sequence[Any]) -> Iterator[Any]:
    """Functions of the process: `gc.freeze` hides objects, but not those that modules and classes have."""
    yield from gc.get_objects()
    for table in (
        *(vars(module) for module in list(sys.modules.values()) if hasattr(module, "__dict__")),
        *map(vars, owners),
    ):
        yield from list(table.values())


def _check_functions(objects: Iterable[Any], traced: set[CodeType]) -> None:
    """Refuse functions that keep results, and those that torch.compile compiles, which may give them other bits.

    Raises:
        NotCaptured: naming one.
    """
    for found in objects:
        if type(found) is functools._lru_cache_wrapper:
            code = _code_of(found.__wrapped__)
            if code in traced and code is not None and not NOT_THE_PROGRAM.search(code.co_filename):
                raise NotCaptured(f"{found.__wrapped__.__qualname__} keeps results, which torch.compile does not see")
        elif type(found) is FunctionType and "_torchdynamo_orig_callable" in found.__dict__:
            # torch's own wrappers, as of `no_grad`, have one code for all functions.
            own = inspect.unwrap(found.__dict__["_torchdynamo_orig_callable"])
            if getattr(own, "__code__", None) in traced:
                raise NotCaptured(f"torch.compile compiles {getattr(own, '__qualname__', own)}, a part of the model")


def _check_code(code: CodeType) -> None:
    """Refuse what a function of the program does that torch.compile answers once, and guards by nothing.

    Raises:
        NotCaptured: naming it.
    """
    if NOT_THE_PROGRAM.search(code.co_filename):
        return
    where = f"({code.co_filename.rsplit('/', 1)[-1]}:{code.co_firstlineno})"
    if code.co_name == "__getattr__":
        raise NotCaptured(f"attributes are found by __getattr__ {where}, and torch.compile guards no missing attribute")
    if name := next((name for name in code.co_names if name in _NOT_GUARDED), ""):
        raise NotCaptured(f"the forward reads {name} {where}, which torch.compile does not guard")
    catches = _catches(code) or "suppress" in code.co_names
    if catches and (name := next((name for name in code.co_names if name in _OF_MISSING), "")):
        raise NotCaptured(f"the forward catches {name} {where}, and torch.compile guards no missing attribute")
    if _compares_identity(code):
        raise NotCaptured(f"the forward asks whether two objects are the same {where}, which has no guard")


# Attributes and functions whose answers torch.compile takes for constant.
_NOT_GUARDED = frozenset(("_version", "__annotations__", "dir"))
# What an attribute or a name raises that is not there.
_OF_MISSING = frozenset(("AttributeError", "NameError", "Exception", "BaseException"))


def _compares_identity(code: CodeType) -> bool:
    """Whether a function compares two objects by `is`, and not one with a constant, a global, or what that has."""
    before: list[str] = ["", ""]
    for instruction in dis.get_instructions(code):
        name = instruction.opname
        is_single = before[-1] in _SINGLE or (before[-1] == "LOAD_ATTR" and before[-2] in _SINGLE)
        if name == "IS_OP" and not is_single:
            return True
        if name not in ("CACHE", "EXTENDED_ARG", "NOP", "PUSH_NULL", "PRECALL"):
            before = [before[-1], name]
    return False


_SINGLE = frozenset(("LOAD_CONST", "LOAD_GLOBAL", "LOAD_NAME"))


def _check_kinds(owners: Sequence[Any], traced: set[CodeType]) -> None:
    """Refuse questions for classes of the program that answer themselves what is one of theirs.

    Raises:
        NotCaptured: naming one.
    """
    names = {name for code in traced if _asks_for_kinds(code) for name in (*code.co_names, *code.co_freevars)}
    for owner in owners if names else ():
        for name in ("__instancecheck__", "__subclasscheck__"):
            code = _code_of(_in_class(type(owner), name))
            if owner.__name__ in names and code is not None and _is_of_program(code):
                raise NotCaptured(f"{owner.__name__} answers itself what is one of it, which torch.compile asks once")


def _is_of_program(code: CodeType) -> bool:
    """Not of torch or of Python, whose abstract classes are compared by their own count."""
    return not NOT_THE_PROGRAM.search(code.co_filename) and not code.co_filename.startswith("<frozen")


def _own_calls(module: torch.nn.Module) -> _Absent:
    """The classes of a model that are called as torch calls modules."""
    kinds = {kind for part in module.modules() for kind in type(part).__mro__ if kind not in torch.nn.Module.__mro__}
    return [(vars(kind), _CALLS - vars(kind).keys()) for kind in kinds]


_CALLS = frozenset(("__call__", "_call_impl"))


def _absent(codes: Iterable[CodeType]) -> _Absent:
    """Names that are not there, and that a function would find if they were: globals, and what globals have."""
    found: dict[int, tuple[Any, set[str]]] = {}

    def note(table: Any, names: Iterable[str]) -> None:
        found.setdefault(id(table), (table, set()))[1].update(name for name in names if name not in table)

    modules: dict[str, list[dict[str, Any]]] = {}
    for module in list(sys.modules.values()):
        modules.setdefault(getattr(module, "__file__", None) or "", []).append(getattr(module, "__dict__", {}))
    for code in codes:
        for table in modules.get(code.co_filename, []) if not NOT_THE_PROGRAM.search(code.co_filename) else ():
            note(table, (name for name in code.co_names if hasattr(builtins, name)))
            if not _ASK_FOR_NAMES.isdisjoint(code.co_names):
                names = {value for value in code.co_consts if isinstance(value, str) and value.isidentifier()}
                owners = [table[name] for name in code.co_names if name in table]
                for owned in (table, vars(builtins), *(vars(owner) for owner in owners if hasattr(owner, "__dict__"))):
                    note(owned, names)
    return [(table, frozenset(names)) for table, names in found.values() if names]


_ASK_FOR_NAMES = frozenset(("getattr", "hasattr", "globals", "vars", "__dict__"))


def _check_random(graph: torch.fx.Graph) -> None:
    """Refuse Python's random numbers, which torch.compile makes tensors of.

    Raises:
        NotCaptured: the graph takes one.
    """
    for node in graph.nodes:
        source = getattr(node.meta.get("grapharg"), "source", None)
        if "Random" in type(source).__name__:
            raise NotCaptured("the forward draws Python's random numbers")


def _check_transforms(graph: torch.fx.Graph) -> None:
    """Refuse torch.func's transforms, whose operators begin and end them.

    Raises:
        NotCaptured: there is one.
    """
    for node in graph.nodes:
        if node.op == "call_function" and "_functorch" in (getattr(node.target, "__module__", "") or ""):
            raise NotCaptured("the forward uses torch.func")
