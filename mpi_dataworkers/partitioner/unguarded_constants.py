"""What torch.compile takes for constant and has no guard for, so that it is compared here in each step.

torch.compile guards the objects that a forward reads. Beside them a forward depends on the environment, on functions
that are found through a class, on methods of tensors, and on hooks of all modules. What cannot be compared is refused.
Called by `capture.py`.
"""

from __future__ import annotations

import abc
import builtins
import contextlib
import dis
import functools
import gc
import inspect
import itertools
import os
import re
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch

# Reads the bytecode of functions: what they catch, compare and ask for. Runs none of it.

# Files of torch, and of this package: what a user asks about is neither.
NOT_THE_PROGRAM = re.compile(
    r"/(site|dist)-packages/torch/|/torch/(nn|fx|_[a-z]+)/|/partitioner/|/lib/python3[.]\d+/[a-z_]+[.]py"
)
Tables = dict[str, list[dict[str, Any]]]


def catches(code: CodeType) -> str:
    """Return where a function of the program catches an exception; "" where it catches none."""
    if NOT_THE_PROGRAM.search(code.co_filename):
        return ""
    names = _opnames(code)
    catches = _catches_all(code) or not _MATCHES.isdisjoint(names)
    return f"{code.co_filename.rsplit('/', 1)[-1]}:{code.co_firstlineno}" if catches else ""


_MATCHES = frozenset(("CHECK_EXC_MATCH", "JUMP_IF_NOT_EXC_MATCH", "CHECK_EG_MATCH"))
_NO_STEP = frozenset(("CACHE", "EXTENDED_ARG", "NOP", "NOT_TAKEN"))


def _steps(code: CodeType) -> list[dis.Instruction]:
    return [each for each in dis.get_instructions(code) if each.opname not in _NO_STEP]


def _opnames(code: CodeType) -> list[str]:
    return [each.opname for each in _steps(code)]


def _catches_all(code: CodeType) -> bool:
    """Whether a function has an `except:` without a class, which drops what was raised before anything else."""
    steps = _steps(code)
    if sys.version_info >= (3, 11):
        starts = [at + 1 for at, step in enumerate(steps) if step.opname == "PUSH_EXC_INFO"]
    else:
        targets = {step.argval for step in steps if step.opname == "SETUP_FINALLY"}
        starts = [at for at, step in enumerate(steps) if step.offset in targets]
    return any(steps[start].opname == "POP_TOP" for start in starts)


def _may_catch_missing(code: CodeType, traced: Set[CodeType], tables: Tables) -> str:
    """What of a function catches, or may catch, that an attribute or a name is missing; "" where nothing does."""
    names = set(_opnames(code))
    if code.co_name == "__exit__" and _may_be_true(code):
        return "exceptions in a context manager of its own"
    if _catches_all(code):
        return "all exceptions"
    suppresses = "WITH_EXCEPT_START" in names and contextlib.suppress.__exit__.__code__ in traced
    if _MATCHES.isdisjoint(names) and not suppresses:
        return ""
    found = [kind for value in values_of(code, tables) for kind in kinds_in(value) if issubclass(kind, BaseException)]
    if not found:
        return "an exception that is found in another place"
    return next((kind.__name__ for kind in found if _is_missing(kind)), "")


def _is_missing(kind: type) -> bool:
    return any(issubclass(kind, missing) or issubclass(missing, kind) for missing in (AttributeError, NameError))


def _may_be_true(code: CodeType) -> bool:
    """Whether a function may return something else than None and False."""
    steps = _steps(code)
    for before, step in zip([None, *steps], steps, strict=False):
        given = step if step.opname == "RETURN_CONST" else before if step.opname == "RETURN_VALUE" else None
        if given is not None and not (given.opname in ("LOAD_CONST", "RETURN_CONST") and not given.argval):
            return True
    return False


def kinds_in(value: Any) -> Iterator[type]:
    """Yield a class, or those of a tuple of classes, as `isinstance` and `except` take them."""
    if isinstance(value, tuple):
        for item in value:
            yield from kinds_in(item)
    elif type.__instancecheck__(type, value):
        yield value


def values_of(code: CodeType, tables: Tables) -> Iterator[Any]:
    """Yield what the global names of a function lead to, in any module of its file, and attributes of that of these
    names.
    """
    for table in (*tables.get(code.co_filename, []), vars(builtins)):
        for name in code.co_names:
            if name in table:
                yield table[name]
                if isinstance(table[name], ModuleType):
                    yield from (vars(table[name])[each] for each in code.co_names if each in vars(table[name]))


def asks_for_kinds(code: CodeType) -> bool:
    """Return whether a function of the program asks of what kind an object is, which abstract classes answer anew."""
    if NOT_THE_PROGRAM.search(code.co_filename):
        return False
    return not {"isinstance", "issubclass"}.isdisjoint(code.co_names) or "MATCH_CLASS" in _opnames(code)


def imported(code: CodeType) -> list[str]:
    """Return the modules that a function of the program imports."""
    if NOT_THE_PROGRAM.search(code.co_filename):
        return []
    return [each.argval for each in dis.get_instructions(code) if each.opname == "IMPORT_NAME"]


def refusal(code: CodeType, traced: Set[CodeType], tables: Tables) -> str:
    """Return what a function of the program does that torch.compile answers once, and guards by nothing; "" where it
    does not.

    Args:
        code: the function's.
        traced: of all functions that were traced.
        tables: the globals of all modules.
    """
    if NOT_THE_PROGRAM.search(code.co_filename):
        return ""
    where = f"({code.co_filename.rsplit('/', 1)[-1]}:{code.co_firstlineno})"
    if code.co_name == "__getattr__":
        return f"attributes are found by __getattr__ {where}, and torch.compile guards no missing attribute"
    if name := next((name for name in code.co_names if name in _NOT_GUARDED), ""):
        return f"the forward reads {name} {where}, which torch.compile does not guard"
    if caught := _may_catch_missing(code, traced, tables):
        return f"the forward catches {caught} {where}, and torch.compile guards no missing attribute"
    if _compares_identity(code):
        return f"the forward asks whether two objects are the same {where}, which has no guard"
    return ""


# Attributes and functions whose answers torch.compile takes for constant.
_NOT_GUARDED = frozenset(("_version", "__annotations__", "dir"))


def _compares_identity(code: CodeType) -> bool:
    """Whether a function compares two objects by `is`: not one with a constant or a global, nor types of objects."""
    steps = _steps(code)
    for at, step in enumerate(steps):
        if step.opname == "IS_OP":
            right = _operand(steps, at)
            if not _is_guarded(right) and not _is_guarded(_operand(steps, at - len(right))):
                return True
    return False


def _operand(steps: Sequence[dis.Instruction], end: int) -> Sequence[dis.Instruction]:
    """The steps that give the value that is uppermost before a step; none where they are no plain expression."""
    depth = 0
    for start in range(end - 1, -1, -1):
        step = steps[start]
        if step.is_jump_target or step.opcode in dis.hasjrel or step.opcode in dis.hasjabs:
            return ()
        depth += dis.stack_effect(step.opcode, step.arg)
        if depth >= 1:
            return steps[start:end] if depth == 1 else ()
    return ()


def _is_guarded(operand: Sequence[dis.Instruction]) -> bool:
    """Whether an expression is a constant, a global, what a global has, or the type of an object."""
    if not operand:
        return False
    operand = [step for step in operand if step.opname != "PUSH_NULL"]
    names = [step.opname for step in operand]
    is_single = names[0] in _SINGLE and (len(names) == 1 or names[1:] == ["LOAD_ATTR"])
    is_call = operand[-1].opname in ("CALL", "CALL_FUNCTION") and operand[-1].arg == 1
    is_type = is_call and operand[0].argval == "type" and names[1:2] not in (["LOAD_ATTR"], ["LOAD_METHOD"])
    return is_single or is_type or operand[-1].argval == "__class__"


_SINGLE = frozenset(("LOAD_CONST", "LOAD_GLOBAL", "LOAD_NAME"))


def names_kinds(code: CodeType) -> bool:
    """Return whether global names say for which classes a function asks, in each call of `isinstance` and
    `issubclass`.
    """
    steps = _steps(code)
    for at, step in enumerate(steps):
        if step.opname not in ("CALL", "CALL_FUNCTION") or step.arg != 2:
            continue
        end = at - (steps[at - 1].opname == "PRECALL")
        kinds = _operand(steps, end)
        start = end - len(kinds) - len(_operand(steps, end - len(kinds)))
        is_question = any(each.argval in ("isinstance", "issubclass") for each in steps[max(0, start - 2) : start])
        if (is_question or start == end) and not (kinds and _OF_GLOBALS.issuperset(each.opname for each in kinds)):
            return False
    return True


_OF_GLOBALS = frozenset(("LOAD_CONST", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_ATTR", "BUILD_TUPLE"))


def namespaces() -> Iterator[dict[str, Any]]:
    """Yield the globals of all modules. Of one that is imported when an attribute of it is asked for, none is."""
    return (vars(module) for module in list(sys.modules.values()) if issubclass(type(module), ModuleType))


def tables_by_file() -> Tables:
    """Return the globals of all modules by their file."""
    found: Tables = {}
    for names in namespaces():
        file = names.get("__file__")
        found.setdefault(file if isinstance(file, str) else "", []).append(names)
    return found


_DENORMAL, _ONE = 5e-324, 1.0
_PLAIN = bool | int | float | str
_any_hook: Any = torch.nn.modules.module._has_any_global_hook
_HOOKS_OF_ALL: tuple[Any, ...] = tuple(
    getattr(torch.nn.modules.module, f"_global_{name}_hooks")
    for name in ("forward", "forward_pre", "backward", "backward_pre")
)


# Functions that keep results are refused, but for those of torch, and of einops, which compute with shapes alone.
_KEEPS_WHAT_STAYS = re.compile(rf"{NOT_THE_PROGRAM.pattern}|/einops/")


class NotCaptured(Exception):
    """There is no graph; the message is the reason, for the user. Internal to this package."""


class Unseen:
    """See the module.

    Args:
        module: the model.
        graph: that was made of its forward.
        codes: of the functions that were traced.
        given: the forward's arguments and keywords.

    Attributes:
        catches: where the forward catches exceptions; "" where it does not. Of those that a graph raises
            torch.compile's own code catches none.

    Raises:
        NotCaptured: the forward does something that torch.compile does not see.
    """

    def __init__(
        self, module: torch.nn.Module, graph: torch.fx.Graph, codes: Sequence[CodeType], given: tuple[Any, Any]
    ) -> None:
        _check_operators(graph)
        if not _keeps_denormals():
            raise NotCaptured("torch.set_flush_denormal is on, which holds for the trainer alone")
        if _has_hooks_of_all():
            raise NotCaptured("there are hooks of all modules, which torch.compile does not see")
        self.catches = next(filter(None, map(catches, codes)), "")
        traced, owners = set(codes), _classes()
        tables = tables_by_file()
        _check_functions(_functions(owners), traced)
        for code in traced:
            if reason := refusal(code, traced, tables):
                raise NotCaptured(reason)
        _check_kinds(owners, traced, tables)
        self._absent = [*_absent(traced, tables), *_own_calls(module)]
        self._model = weakref.ref(module)  # torch keeps for good what stands for a graph
        self._alike = list(_alike(module, *given))
        self._environment = dict(_environment())
        self._settings = _settings()
        self._modules = {name: sys.modules.get(name) for code in codes for name in imported(code)}
        self._registered = abc.get_cache_token() if any(map(asks_for_kinds, codes)) else None
        methods = list(_methods(owners, {type(part) for part in module.modules()}, traced))
        self._found = [
            *(place for place in methods if not isinstance(place[2], classmethod | staticmethod)),
            *_attributes_of_metaclasses(owners),
            *_methods_of_tensors(graph),
        ]
        # Those that a class gives in another form than it has them.
        self._kept = [place for place in methods if isinstance(place[2], classmethod | staticmethod)]

    def change(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        """Return what is not as it was, in a call with these arguments; "" where all is."""
        if _environment() != self._environment:
            return "a variable of the environment has changed"
        if _has_hooks_of_all():
            return "there are hooks of all modules"
        if self._registered is not None and self._registered != abc.get_cache_token():
            return "a class has been registered with an abstract one"
        model = self._model()
        scope = _scope(model, args, kwargs) if self._alike and model is not None else {}
        for text, source, found in self._alike:
            value = _value(source, scope)
            if value == found and repr(value) != repr(found):  # others are seen by torch.compile's guards
                place = re.sub(r"L\['(\w+)'\]", r"\1", text)
                return f"{place} is equal to what it was, and not the same"
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


def _alike(module: torch.nn.Module, args: Any, kwargs: Any) -> Iterator[tuple[str, Callable[..., Any], Any]]:
    """Values that torch.compile's guards take for the same if they are equal, as 0.0 and -0.0, or (1,) and (1.0,)."""
    context: Any = torch._guards.TracingContext.try_get()
    if context is None:
        return
    helpers: Any = getattr(torch._dynamo.guards, "_get_closure_vars", dict)()
    scope = _scope(module, args, kwargs)
    for guard in context.guards_context.dynamo_guards:
        text = guard.name() if callable(guard.name) else guard.name
        if guard.create_fn_name() not in _BY_EQUALITY:
            continue
        try:
            source = eval(f"lambda L, G: {text}", dict(helpers))  # torch's own text of where the value is
            value = source(scope, {})
        except _NOT_FOUND:
            continue  # neither in the model nor in the arguments
        is_zero = isinstance(value, float) and value == 0
        is_plain = guard.create_fn_name() in _OF_PLAIN and (is_zero or isinstance(value, _OF_NUMBERS))
        if is_plain or (isinstance(value, OrderedDict) and value):
            yield text, source, _value(source, scope)


_BY_EQUALITY = frozenset(("CONSTANT_MATCH", "EQUALS_MATCH", "DICT_KEYS_MATCH", "TYPE_MATCH"))
_OF_PLAIN = frozenset(("CONSTANT_MATCH", "EQUALS_MATCH"))
_NOT_FOUND = AttributeError, LookupError, NameError, SyntaxError, TypeError, ValueError
_OF_NUMBERS = (tuple, set, frozenset, complex, range, slice)


def _scope(module: torch.nn.Module, args: Any, kwargs: Any) -> dict[str, Any]:
    """What torch's texts call the model and the arguments, in `capture.py`'s calls and in the forward itself."""
    scope = {"module": module, "self": module, "args": args, "kwargs": kwargs}
    try:
        bound = inspect.signature(module.forward).bind(*args, **kwargs)
    except TypeError:
        return scope  # a hook gives the forward others
    bound.apply_defaults()
    return bound.arguments | scope


def _value(source: Callable[..., Any], scope: dict[str, Any]) -> Any:
    """A constant, whose text is another one for each type of number; of an `OrderedDict`, its keys."""
    try:
        value = source(scope, {})
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
            # Nearly all of them are functions, a quarter of a million.
            code = value.__code__ if type(value) is FunctionType else _code_of(value)
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
            for name, value in list(vars(owner).items()):
                if not name.startswith("__") and isinstance(value, _PLAIN):
                    yield owner, name, value


def _methods_of_tensors(graph: torch.fx.Graph) -> _Places:
    names = {node.target for node in graph.nodes if node.op == "call_method"}
    names |= {
        f"__{node.target.__name__}__" for node in graph.nodes if getattr(node.target, "__module__", "") == "_operator"
    }
    for name in names:
        if isinstance(name, str) and hasattr(torch.Tensor, name):
            yield torch.Tensor, name, getattr(torch.Tensor, name)


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


_FUNCTIONS = frozenset((FunctionType, functools._lru_cache_wrapper))


def _functions(owners: Sequence[Any]) -> list[Any]:
    """Functions of the process: `gc.freeze` hides objects, but not those that modules and classes have."""
    tables = (list(table.values()) for table in (*namespaces(), *map(vars, owners)))
    objects = itertools.chain(gc.get_objects(), itertools.chain.from_iterable(tables))
    return [found for found in objects if type(found) in _FUNCTIONS]


def _check_functions(objects: Iterable[Any], traced: set[CodeType]) -> None:
    """Refuse functions that keep results, and those that torch.compile compiles, which may give them other bits.

    Raises:
        NotCaptured: naming one.
    """
    for found in objects:
        if type(found) is functools._lru_cache_wrapper:
            code = _code_of(found.__wrapped__)
            if code in traced and code is not None and not _KEEPS_WHAT_STAYS.search(code.co_filename):
                raise NotCaptured(f"{found.__wrapped__.__qualname__} keeps results, which torch.compile does not see")
        # Not by `__dict__`: a function that has been asked for it has one for good.
        elif hasattr(found, "_torchdynamo_orig_callable"):
            # torch's own wrappers, as of `no_grad`, have one code for all functions.
            own = inspect.unwrap(found.__dict__["_torchdynamo_orig_callable"])
            if getattr(own, "__code__", None) in traced:
                raise NotCaptured(f"torch.compile compiles {getattr(own, '__qualname__', own)}, a part of the model")


def _check_kinds(owners: Sequence[Any], traced: set[CodeType], tables: Tables) -> None:
    """Refuse questions for classes of the program that answer themselves what is one of theirs.

    Those of installed packages are refused where a global name leads to them, and those of the program's own files also
    where no global name says for which class is asked.

    Raises:
        NotCaptured: naming one.
    """
    asking = [code for code in traced if asks_for_kinds(code)]
    named = {id(kind) for code in asking for value in values_of(code, tables) for kind in kinds_in(value)}
    are_all_named = all(map(names_kinds, asking))
    for owner in owners if asking else ():
        for name in ("__instancecheck__", "__subclasscheck__"):
            code = _code_of(_in_class(type(owner), name))
            if code is None or not _is_of_program(code):
                continue
            if id(owner) in named or not (are_all_named or _INSTALLED.search(code.co_filename)):
                raise NotCaptured(f"{owner.__name__} answers itself what is one of it, which torch.compile asks once")


_INSTALLED = re.compile(r"/(site|dist)-packages/")


def _is_of_program(code: CodeType) -> bool:
    """Not of torch or of Python, whose abstract classes are compared by their own count."""
    return not NOT_THE_PROGRAM.search(code.co_filename) and not code.co_filename.startswith("<frozen")


def _own_calls(module: torch.nn.Module) -> _Absent:
    """The classes of a model that are called as torch calls modules."""
    kinds = {kind for part in module.modules() for kind in type(part).__mro__ if kind not in torch.nn.Module.__mro__}
    return [(vars(kind), _CALLS - vars(kind).keys()) for kind in kinds]


_CALLS = frozenset(("__call__", "_call_impl"))


def _absent(codes: Iterable[CodeType], tables: Tables) -> _Absent:
    """Names that are not there, and that a function would find if they were: globals, and what globals have."""
    found: dict[int, tuple[Any, set[str]]] = {}

    def note(table: Any, names: Iterable[str]) -> None:
        found.setdefault(id(table), (table, set()))[1].update(name for name in names if name not in table)

    for code in codes:
        for table in tables.get(code.co_filename, []) if not NOT_THE_PROGRAM.search(code.co_filename) else ():
            note(table, (name for name in code.co_names if hasattr(builtins, name)))
            if not _ASK_FOR_NAMES.isdisjoint(code.co_names):
                names = {value for value in code.co_consts if isinstance(value, str) and value.isidentifier()}
                owners = [table[name] for name in code.co_names if name in table]
                for owned in (table, vars(builtins), *(vars(owner) for owner in owners if hasattr(owner, "__dict__"))):
                    note(owned, names)
    return [(table, frozenset(names)) for table, names in found.values() if names]


_ASK_FOR_NAMES = frozenset(("getattr", "hasattr", "globals", "vars", "__dict__"))


def _check_operators(graph: torch.fx.Graph) -> None:
    """Refuse Python's random numbers, which torch.compile makes tensors of, and torch.func's transforms.

    Raises:
        NotCaptured: the graph has one.
    """
    for node in graph.nodes:
        if "Random" in type(getattr(node.meta.get("grapharg"), "source", None)).__name__:
            raise NotCaptured("the forward draws Python's random numbers")
        if node.op == "call_function" and "_functorch" in (getattr(node.target, "__module__", "") or ""):
            raise NotCaptured("the forward uses torch.func")  # whose operators begin and end transforms
