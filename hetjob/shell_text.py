"""Shell text taken to pieces: simple commands with their words, as written. Pure; nothing is expanded or run.

Called by `step_demand.py`, which looks for what a script starts. It is no shell: where a real one would do more than
split words, the words stay as they are written, and text that cannot be split is an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
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
    """All simple commands of a text, also those of loops, functions, subshells and here-documents.

    Raises:
        UnreadableText: a quote or a substitution is open at the end.
    """
    return _Reader(text, first_line, 0).read()


def inner_texts(word: str) -> Iterator[str]:
    """What stands in a word as text of its own: between quotes, or in a command substitution."""
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
    """The commands whose output stands in a word: `$(...)` and backquotes, also in double quotes."""
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
    """A word without its quotes and escapes."""
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
