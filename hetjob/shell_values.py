"""What words of a script may come to, as far as its own text says. Pure; nothing is run.

Called by `step_demand.py`. A word may have several values: a variable may be assigned twice, or be a loop's.
"""

from __future__ import annotations

import ast
import copy
import itertools
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from hetstream.hetjob.shell_text import Command, Word, unquoted

_DECLARING = ("export", "declare", "local", "readonly", "typeset")
_READING = ("read", "mapfile", "readarray", "getopts", "select", "let", "printf")
_NAME = re.compile(r"\w+", re.ASCII)
_DEEPEST, _MOST_VALUES = 8, 64
_LARGEST = 10**9
_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a // b,
    ast.FloorDiv: lambda a, b: a // b,
    ast.Mod: lambda a, b: a % b,
}


class Unknown(ValueError):
    """What the text alone does not say."""


class Values:
    """Values of the variables of a script.

    Args:
        found: its commands, and those of scripts that it calls.
        given: variables that it has from outside.
        is_complete: nothing else can assign one; without, the default in `${N:-2}` says nothing.
    """

    def __init__(self, found: Iterable[Command], given: Mapping[str, str], *, is_complete: bool = True) -> None:
        self._given, self._is_complete = given, is_complete
        self._assigned: dict[str, list[str]] = {}
        self._changed: set[str] = set()
        self._may_lack: Collection[str] = ()
        self._found: dict[str, dict[str, None]] = {}  # of each variable what it may be assigned, in order
        for command in found:
            self._note(command)
        self._launching: dict[str, Collection[str]] | None = None

    def _note(self, command: Command) -> None:
        first = command.words[0].text
        if first in ("for", "select") and len(command.words) > 1:
            name = command.words[1].text
            behind = [word.text for word in command.words[3:]]
            self._assigned.setdefault(name, []).extend(behind)
            if first == "select" or not behind:
                self._changed.add(name)
            return
        if first in _READING:
            self._changed |= {word.text for word in command.words if _NAME.fullmatch(word.text)}
        if first == "unset":
            self._changed |= {word.text for word in command.words[1:] if _NAME.fullmatch(word.text)}
        for word in command.words:
            if found := re.match(r"(\w+)\+=(?![\"']?[\s(-])", word.text, re.ASCII):  # more of one word, or of a number
                self._changed.add(found[1])
            elif found := re.match(r"(\w+)\+?=", word.text, re.ASCII):
                self._assigned.setdefault(found[1], []).append(word.text[found.end() :])
            elif found := re.match(r"(\w+)(?:\+\+|--|[-*/%]=)|(?:\+\+|--)(\w+)$", word.text, re.ASCII):
                self._changed.add(found[1] or found[2])

    def with_given(self, given: Mapping[str, str], may_lack: Collection[str] = ()) -> Values:
        """Those of the same script where it has these variables from outside, and perhaps lacks some of them."""
        found = copy.copy(self)
        found._given, found._may_lack, found._found = given, may_lack, {}
        return found

    def has(self, name: str) -> bool:
        """Whether a variable is given or assigned."""
        return name in self._given or name in self._assigned

    def with_launchers(self, pieces: Sequence[Word], mention: re.Pattern[str]) -> Iterator[Word]:
        """A command's words; where one is a variable with a launcher in its value, the words of that value.

        Raises:
            Unknown: it has too many values.
        """
        for word in pieces:
            name = re.fullmatch(r'"?\$\{?(\w+)(?:\[[@*]\])?\}?"?', word.text)
            values = self._with_launcher(mention).get(name[1]) if name else None
            if values is None:
                yield word
                continue
            if len(values) > _MOST_VALUES:
                raise Unknown(f"{word.text[:40]!r} has too many values")
            for value in values:
                if value.lstrip('"').startswith(("$(", "`")):
                    yield Word(value, word.line)
                    continue
                text = unquoted(value[1:-1] if value.startswith("(") else value)
                yield from (Word(piece, word.line) for piece in text.split())

    def _with_launcher(self, mention: re.Pattern[str]) -> Mapping[str, Collection[str]]:
        """The values of each variable that has a launcher in one of them; looked for once, for each word may be one."""
        if self._launching is None:
            self._launching = {
                name: dict.fromkeys(values)
                for name, values in self._assigned.items()
                if any(mention.search(value) for value in values)
            }
        return self._launching

    def of(self, raw: str) -> list[str]:
        """All texts that a word may come to.

        Raises:
            Unknown: one of them depends on what is known only in the job.
        """
        return self._texts(raw, 0)

    def _texts(self, raw: str, depth: int) -> list[str]:
        if depth > _DEEPEST:
            raise Unknown(f"{raw[:40]!r} refers to itself")
        if raw.startswith("(") and raw.endswith(")"):
            raw = raw[1:-1]  # an array: its words stand side by side
        pieces: list[list[str]] = []
        text = unquoted(raw)
        at = 0
        for found in re.finditer(r"\$\(\((.*?)\)\)|\$\{([^{}]*)\}|\$(\w+)|\$(.)|`", text, re.DOTALL):
            pieces.append([text[at : found.start()]])
            at = found.end()
            if found[1] is not None:
                pieces.append([str(self._number(found[1], depth))])
            elif found[2] is not None or (found[3] is not None and not found[3][0].isdigit()):
                pieces.append(self._variable(found[3] if found[2] is None else found[2], depth))
            else:
                raise Unknown(f"{found[0]!r} in {raw[:40]!r} is known only in the job")
        pieces.append([text[at:]])
        if math.prod(len(piece) for piece in pieces) > _MOST_VALUES:
            raise Unknown(f"{raw[:40]!r} has too many values")
        return sorted({"".join(parts) for parts in itertools.product(*pieces)})

    def _variable(self, written: str, depth: int) -> list[str]:
        found = re.fullmatch(r"(\w+)(?:\[[@*]\])?(?::?-(.*))?", written, re.DOTALL)
        if not found or found[1][0].isdigit():
            raise Unknown(f"${{{written}}} is known only in the job")
        name = found[1]
        if name in self._changed:
            raise Unknown(f"${name} changes while the script runs")
        if name not in self._found:
            raws = dict.fromkeys(filter(None, (self._default_of(name, raw) for raw in self._assigned.get(name, ()))))
            self._found[name] = {text: None for raw in raws for text in self._texts(raw, depth + 1)}
        values = self._found[name]
        if len(values) > _MOST_VALUES:
            raise Unknown(f"${name} has too many values")
        if name in self._given:
            values = values | {self._given[name]: None}
            is_set = name not in self._may_lack
            return [
                *(values if found[2] is None or is_set else values | dict.fromkeys(self._texts(found[2], depth + 1)))
            ]
        if found[2] is not None and (self._is_complete or values):
            return [*(values | dict.fromkeys(self._texts(found[2], depth + 1)))]
        if not values:
            raise Unknown(f"${name} is known only in the job")
        return [*values]

    def _default_of(self, name: str, raw: str) -> str:
        """Of `N=${N:-8}` the default, which it has where it had no value; "" where it had one. Else the text itself."""
        own = re.fullmatch(rf'"?\$\{{{name}:?[-=]([^${{}}`"]*)\}}"?', raw)
        is_set = name in self._given and name not in self._may_lack
        return raw if not own else "" if is_set else own[1]

    def _number(self, expression: str, depth: int) -> int:
        def number(found: re.Match[str]) -> str:
            values = {as_number(text) for text in self._variable(found[1] or found[2], depth + 1)}
            if len(values) != 1:
                raise Unknown(f"{expression.strip()!r} has several values")
            return str(values.pop())

        text = re.sub(r"\$?\{(\w+)\}|\$?\b([A-Za-z_]\w*)", number, expression)
        try:
            return _computed(ast.parse(text.strip(), mode="eval").body)
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError) as error:
            raise Unknown(f"{expression.strip()!r} cannot be computed") from error


def as_number(text: str) -> int:
    """A number of CPUs, tasks or nodes, of a range the lower.

    Raises:
        Unknown: it is none.
    """
    found = re.fullmatch(r"\s*(\d{1,9})(?:-\d+)?\s*", text, re.ASCII)
    if not found:
        raise Unknown(f"{text[:40]!r} is no number")
    return int(found[1])


def _computed(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        found = _OPERATORS[type(node.op)](_computed(node.left), _computed(node.right))
        if abs(found) <= _LARGEST:  # a shell has 64 bits, and nobody has so many CPUs
            return found
    raise ValueError("no arithmetic of integers, or of too large ones")
