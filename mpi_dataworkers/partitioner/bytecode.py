"""Reads the bytecode of functions: what they catch, compare and ask for. Called by `unseen.py`. Runs none of it."""

from __future__ import annotations

import builtins
import contextlib
import dis
import re
import sys
from collections.abc import Iterator, Sequence, Set
from types import CodeType, ModuleType
from typing import Any

# Files of torch, and of this package: what a user asks about is neither.
NOT_THE_PROGRAM = re.compile(
    r"/(site|dist)-packages/torch/|/torch/(nn|fx|_[a-z]+)/|/partitioner/|/lib/python3[.]\d+/[a-z_]+[.]py"
)
Tables = dict[str, list[dict[str, Any]]]


def catches(code: CodeType) -> str:
    """Where a function of the program catches an exception; "" where it catches none."""
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
    """A class, or those of a tuple of classes, as `isinstance` and `except` take them."""
    if isinstance(value, tuple):
        for item in value:
            yield from kinds_in(item)
    elif type.__instancecheck__(type, value):
        yield value


def values_of(code: CodeType, tables: Tables) -> Iterator[Any]:
    """What the global names of a function lead to, in any module of its file, and attributes of that of these names."""
    for table in (*tables.get(code.co_filename, []), vars(builtins)):
        for name in code.co_names:
            if name in table:
                yield table[name]
                if isinstance(table[name], ModuleType):
                    yield from (vars(table[name])[each] for each in code.co_names if each in vars(table[name]))


def asks_for_kinds(code: CodeType) -> bool:
    """Whether a function of the program asks of what kind an object is, which abstract classes answer anew."""
    if NOT_THE_PROGRAM.search(code.co_filename):
        return False
    return not {"isinstance", "issubclass"}.isdisjoint(code.co_names) or "MATCH_CLASS" in _opnames(code)


def imported(code: CodeType) -> list[str]:
    """The modules that a function of the program imports."""
    if NOT_THE_PROGRAM.search(code.co_filename):
        return []
    return [each.argval for each in dis.get_instructions(code) if each.opname == "IMPORT_NAME"]


def refusal(code: CodeType, traced: Set[CodeType], tables: Tables) -> str:
    """What a function of the program does that torch.compile answers once, and guards by nothing; "" where it does not.

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
    """Whether global names say for which classes a function asks, in each call of `isinstance` and `issubclass`."""
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
    """The globals of all modules. Of one that is imported when an attribute of it is asked for, none is."""
    return (vars(module) for module in list(sys.modules.values()) if issubclass(type(module), ModuleType))


def tables_by_file() -> Tables:
    """The globals of all modules by their file."""
    found: Tables = {}
    for names in namespaces():
        file = names.get("__file__")
        found.setdefault(file if isinstance(file, str) else "", []).append(names)
    return found
