"""Shell text taken to pieces: simple commands with their words, as written. Pure; nothing is expanded or run.

Called by `step_demand.py`, which looks for what a script starts. It is no shell: where a real one would do more than
split words, the words stay as they are written, and text that cannot be split is an error.
"""

from __future__ import annotations

import ast
import copy
import itertools
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

# Commands that do not run the lines that they read, and what may be one that does.
_ONLY_READS = re.compile(
    r"cat|tee|python[\d.]*|sed|awk|grep|envsubst|mail|read|done|mapfile|readarray|bc|wc|tr|cut|sort"
)
_SHELL = re.compile(r"\w*sh|eval|source|\.|.*\$.*")
_DEEPEST_DOCUMENT = 8  # in each other


class UnreadableText(ValueError):
    """Text that is no shell text, such as one with an open quote."""


@dataclass(frozen=True)
class Word:
    """One word, with its quotes, substitutions and escapes as written, and the line that it begins in."""

    text: str
    line: int


@dataclass(frozen=True)
class Command:
    """One simple command.

    Attributes:
        words: its words; targets of redirections are left out.
        in_background: it ends with `&`.
        goes_on: its output goes to a file or another command.
        is_piped: another command runs beside it, which reads what it writes.
        has_document: it reads a here-document or a here-string, whose lines are commands behind it.
        is_data: it is a line of such a text, and the command that reads it is no shell.
        is_literal: and nothing in it is substituted, because the word that ends it is quoted.
    """

    words: tuple[Word, ...]
    in_background: bool = False
    goes_on: bool = False
    is_piped: bool = False
    has_document: bool = False
    is_data: bool = False
    is_literal: bool = False


def commands(text: str, first_line: int = 1) -> list[Command]:
    """Return all simple commands of a text, also those of loops, functions, subshells and here-documents.

    Raises:
        UnreadableText: a quote or a substitution is open at the end.
    """
    return _Reader(text, first_line, 0).read()


def inner_texts(word: str) -> Iterator[str]:
    """Yield what stands in a word as text of its own: between quotes, or in a command substitution."""
    at = 0
    while at < len(word):
        if word[at] == "\\":
            at += 2
            continue
        if word[at] in "'\"`" or word.startswith(("$(", "<(", ">(", "=("), at):
            end = _end_of(word, at)
            opening = 1 if word[at] in "'\"`" else 2
            inner = word[at + opening : end - 1]
            yield re.sub(r'\\(["`\\$])', r"\1", inner) if word[at] == '"' else inner
            at = end
        else:
            at += 1


def substitutions(word: str) -> Iterator[str]:
    """Yield the commands whose output stands in a word: `$(...)` and backquotes, also in double quotes."""
    at, is_quoted = 0, False
    while at < len(word):
        if word[at] == "\\":
            at += 2
        elif word[at] == "'" and not is_quoted:
            at = _end_of(word, at)
        elif word.startswith("$((", at):
            at += 3  # arithmetic, in which others may be
        elif word[at] == "`" or word.startswith("$(", at):
            end = _end_of(word, at)
            inner = word[at + (1 if word[at] == "`" else 2) : end - 1]
            yield re.sub(r"\\([`\\$])", r"\1", inner) if word[at] == "`" else inner
            at = end
        else:
            is_quoted ^= word[at] == '"'
            at += 1


def unquoted(word: str) -> str:
    """Return a word without its quotes and escapes."""
    found: list[str] = []
    at = 0
    while at < len(word):
        if word[at] == "\\":
            found.append(word[at + 1 : at + 2])
            at += 2
        elif word[at] in "'\"":
            end = _end_of(word, at)
            inner = word[at + 1 : end - 1]
            found.append(re.sub(r'\\(["`\\$])', r"\1", inner) if word[at] == '"' else inner)
            at = end
        elif word[at] == "`" or word.startswith(("$(", "${"), at):
            end = _end_of(word, at)
            found.append(word[at:end])
            at = end
        else:
            found.append(word[at])
            at += 1
    return "".join(found).replace("\\\n", "")


def _end_of(text: str, at: int) -> int:
    """Where the quote, substitution or parenthesis that begins here ends."""
    character = text[at]
    if character == "'":
        end = text.find("'", at + 1) + 1
    elif character == "`":
        end = at + 1
        while end < len(text) and text[end] != "`":
            end += 2 if text[end] == "\\" else 1
        end = end + 1 if end < len(text) else 0
    else:
        end = _end_of_nested(text, at)
    if not end:
        raise UnreadableText(f"{text[at : at + 20]!r} is not closed")
    return end


def _end_of_nested(text: str, at: int) -> int:
    """The end of a double quote, `$(`, `${`, `<(` or `=(`, in which others may be; 0 if it is open at the end."""
    closing = [_closing(text, at)]
    at += 1 if text[at] == '"' else 2
    while closing and at < len(text):
        is_quoted = closing[-1] == '"'
        if text[at] == "\\":
            at += 2
        elif text[at] == closing[-1]:
            closing.pop()
            at += 1
        elif (
            text.startswith(("$(", "${"), at)
            or (text[at] == '"' and not is_quoted)
            or (text[at] == "(" and closing[-1] == ")")  # in `${A%%[(,]*}` it is one of many characters
        ):
            closing.append(_closing(text, at))
            at += 2 if text[at] == "$" else 1
        elif text[at] == "`" or (text[at] == "'" and not is_quoted and closing[-1] != "}"):
            at = _end_of(text, at)
        else:
            at += 1
    return at if not closing else 0


def _closing(text: str, at: int) -> str:
    return '"' if text[at] == '"' else "}" if text[at : at + 2] == "${" else ")"


class _Reader:
    def __init__(self, text: str, first_line: int, depth: int) -> None:
        self._text = text
        self._depth = depth
        self._at = 0
        self._line = first_line
        self._word = ""
        self._word_line = first_line
        self._is_target = False
        self._is_here_string = False
        self._goes_on = False
        self._words: list[Word] = []
        self._commands: list[Command] = []
        self._documents: list[tuple[str, bool]] = []  # the word that ends it as written, and whether lines are indented
        self._has_document = False
        self._marks: dict[str, int] = {}
        self._awaits_pattern = False  # of `case`: up to the next `)`

    def read(self) -> list[Command]:
        text = self._text
        while self._at < len(text):
            character = text[self._at]
            if text.startswith("\\\n", self._at):
                self._at += 2
                self._line += 1
            elif character == "\\":
                self._take(self._at + 2)
            elif character in "'\"`" or text.startswith(("$(", "${"), self._at):
                self._take(_end_of(text, self._at))
            elif character == "(" and self._word.endswith("="):
                self._at -= 1
                self._word = self._word[:-1]
                self._take(_end_of(text, self._at))  # an array
            elif character == "#" and not self._word:
                end = text.find("\n", self._at)
                self._at = end if end >= 0 else len(text)
            elif character == "\n":
                self._at += 1
                self._end_command()
                self._line += 1
                self._skip_documents()
            elif character in " \t":
                self._end_word()
                self._at += 1
            elif character in "<>":
                self._redirect()
            elif character in ";|&()":
                self._operator()
            else:
                self._take(self._at + 1)
        self._end_command()
        return self._commands

    def _take(self, end: int) -> None:
        if not self._word:
            self._word_line = self._line
        piece = self._text[self._at : end]
        self._word += piece
        self._line += piece.count("\n")
        self._at = end

    def _end_word(self) -> None:
        if self._word and not self._is_target:
            self._words.append(Word(self._word, self._word_line))
        if self._word and self._is_target and any(True for _ in substitutions(self._word)):
            self._commands.append(Command((Word(":", self._word_line), Word(self._word, self._word_line))))
        if self._word and self._is_here_string:  # text that a shell may run
            self._has_document = True
            found = _of_document(unquoted(self._word).split("\n"), self._word_line, self._depth + 1)
            self._commands += _read_by(self._words, found)
        if self._word:
            self._is_target = self._is_here_string = False
        self._word = ""

    def _end_command(self, *, in_background: bool = False, goes_on: bool = False, is_piped: bool = False) -> None:
        self._end_word()
        if self._awaits_pattern and self._words and self._words[0].text == "esac":
            self._awaits_pattern = False
        if self._awaits_pattern:
            self._words = []
        if self._words and self._words[0].text == "case":
            texts = [word.text for word in self._words]
            self._awaits_pattern = "in" in texts
            self._words = self._words[: texts.index("in")] if "in" in texts else self._words
        if self._words:
            self._commands.append(
                Command(tuple(self._words), in_background, goes_on or self._goes_on, is_piped, self._has_document)
            )
        elif self._commands and (in_background or is_piped):  # behind `)`, which has ended the command
            last = self._commands[-1]
            self._commands[-1] = replace(
                last, in_background=last.in_background or in_background, is_piped=last.is_piped or is_piped
            )
        self._words, self._goes_on, self._has_document = [], False, False

    def _operator(self) -> None:
        text, at = self._text, self._at
        if text.startswith("&>", at):
            self._at += 1
            self._redirect()
            return
        if text[at] == "(" and self._begins_with_parenthesis():
            return
        is_double = text[at : at + 2] in ("&&", "||", ";;")
        self._at += 2 if is_double else 1
        is_pipe = text[at] == "|" and not is_double
        self._end_command(in_background=text[at] == "&" and not is_double, goes_on=is_pipe, is_piped=is_pipe)
        if text[at] == ")":
            self._awaits_pattern = False
        elif text.startswith(";;", at) or text.startswith(";&", at):
            self._awaits_pattern = True

    def _begins_with_parenthesis(self) -> bool:
        """Read what a parenthesis begins other than a subshell: a function `f()`, and arithmetic `((...))`."""
        if function := re.compile(r"\(\s*\)").match(self._text, self._at):
            self._end_word()
            if len(self._words) == 1:
                self._words.insert(0, Word("function", self._words[0].line))
            self._line += function[0].count("\n")
            self._at = function.end()
            self._end_command()
            return True
        is_double = self._text.startswith("((", self._at) and not self._word
        end = self._next("))") if is_double else len(self._text)
        if end == len(self._text) or self._next("\n") < end:
            return False
        self._words.append(Word("((", self._line))
        for part in re.split(r"[;,]", self._text[self._at + 2 : end]):
            self._words.append(Word("".join(part.split()) or "0", self._line))
        self._at = end + 2
        return True

    def _next(self, mark: str) -> int:
        """Where a mark stands next; the end of the text if it stands nowhere. Looked for once up to there."""
        if self._marks.get(mark, -1) < self._at:
            found = self._text.find(mark, self._at)
            self._marks[mark] = found if found >= 0 else len(self._text)
        return self._marks[mark]

    def _redirect(self) -> None:
        if self._word.isdigit() or re.fullmatch(r"\{\w+\}", self._word):  # the descriptor, by number or in a variable
            self._word = ""
        self._end_word()
        found = re.compile(r"<<<|<<-?|[<>]\(|>>|>&|<&|>\||<>|[<>]").match(self._text, self._at)
        assert found is not None
        operator = found[0]
        self._at = found.end()
        if operator.endswith("("):
            self._end_command(goes_on=True, is_piped=True)
            self._is_target = False  # of `> >(`: what follows is a command
        elif operator in ("<<", "<<-"):
            delimiter = re.compile(r"[ \t]*([^\s;|&<>()]+)").match(self._text, self._at)
            if delimiter is None:
                raise UnreadableText(f"{operator} without a word")
            self._documents.append((delimiter[1], operator == "<<-"))
            self._has_document = True
            self._at = delimiter.end()
        else:
            self._is_target = True
            self._is_here_string = operator == "<<<"
            # Of `>& file`; `>&1` goes where another output goes.
            is_file = operator == ">&" and not re.compile(r"[ \t]*[\d-]").match(self._text, self._at)
            self._goes_on |= operator in (">", ">>", ">|") or is_file

    def _skip_documents(self) -> None:
        """Read the here-documents of the line before: their lines may be commands for somebody."""
        if not self._documents:
            return
        # From the end, where it is: a script may have thousands of documents.
        readers = (each.words for each in reversed(self._commands) if each.has_document and not each.is_data)
        reader = next(readers, ())
        for delimiter, is_indented in self._documents:
            body: list[str] = []
            begin, last = self._line, unquoted(delimiter)
            while self._at < len(self._text):
                line = self._next_line()
                if (line.lstrip("\t") if is_indented else line) == last:
                    break
                body.append(line)
            found = _of_document(body, begin, self._depth + 1)
            found = _read_by(reader, found)
            is_literal = last != delimiter
            self._commands += [replace(command, is_literal=command.is_data and is_literal) for command in found]
        self._documents = []

    def _next_line(self) -> str:
        end = self._text.find("\n", self._at)
        end = len(self._text) if end < 0 else end
        line = self._text[self._at : end]
        self._at = end + 1
        self._line += 1
        return line


def _read_by(reader: Sequence[Word], found: list[Command]) -> list[Command]:
    """Lines that a command reads, which runs them unless it is one of those that only write or compare, or Python."""
    names = [unquoted(word.text).rpartition("/")[2] for word in reader]
    is_data = any(_ONLY_READS.fullmatch(name) for name in names) and not any(_SHELL.fullmatch(name) for name in names)
    return [replace(command, is_data=True) for command in found] if is_data else found


def _of_document(body: list[str], begin: int, depth: int) -> list[Command]:
    if depth > _DEEPEST_DOCUMENT:
        raise UnreadableText(f"here-documents in each other, more than {_DEEPEST_DOCUMENT} deep")
    try:
        return _Reader("\n".join(body), begin, depth).read()
    except UnreadableText:
        # No shell text as a whole, then: line by line, and what is none is one word, which is looked at as it is.
        if len(body) == 1:
            return [Command((Word(re.sub(r"(['\"`$\\])", r"\\\1", body[0]), begin),), goes_on=True)]
        return [command for number, line in enumerate(body) for command in _of_document([line], begin + number, depth)]


# What words of a script may come to, as far as its own text says. Pure; nothing is run.
#
# Called by `step_demand.py`. A word may have several values: a variable may be assigned twice, or be a loop's.

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
        """Return those of the same script where it has these variables from outside, and perhaps lacks some of them."""
        found = copy.copy(self)
        found._given, found._may_lack, found._found = given, may_lack, {}
        return found

    def has(self, name: str) -> bool:
        """Return whether a variable is given or assigned."""
        return name in self._given or name in self._assigned

    def with_launchers(self, pieces: Sequence[Word], mention: re.Pattern[str]) -> Iterator[Word]:
        """Yield a command's words; where one is a variable with a launcher in its value, the words of that value.

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
        """Return all texts that a word may come to.

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
    """Return a number of CPUs, tasks or nodes, of a range the lower.

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
