"""Files that a script's commands can reach by name, and what in them starts a step. Pure but for the reader given.

Called by `script_launches.py`. A program in a step has the step's CPUs; it can ask for more only by a launcher.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

from hetstream.hetjob.shell_text import Command, unquoted
from hetstream.hetjob.shell_values import Unknown, Values

_MAKEFILES = ("GNUmakefile", "makefile", "Makefile")
_IMPORT = re.compile(
    r"(?:^|;)[ \t]*(?:from[ \t]+([\w.]+)[ \t]+import[ \t(]+([\w, \t]+)|import[ \t]+([\w., \t]+))", re.MULTILINE
)
_FILE_NAME = re.compile(r"[\"']([\w./-]+\.\w+)[\"']")
_MOST_FILES = 200


def reachable(
    found: Iterable[Command], values: Values, read: Callable[[str], str | None], ignored: tuple[str, ...]
) -> Iterator[tuple[str, str]]:  # fmt: skip
    """Paths and texts of the files that commands name, and of those that these name in turn.

    Args:
        found: the commands.
        values: of their variables.
        read: a file's text by its path, None where there is none.
        ignored: commands that run nothing of what they name.

    Raises:
        Unknown: there are too many.
    """
    pending = [path for command in found for path in _named(command, values, ignored)]
    seen: set[str] = set()
    count = 0
    while pending:
        path = pending.pop()
        if path in seen:
            continue
        seen.add(path)
        text = read(path)
        if text is None:
            continue
        count += 1
        if count > _MOST_FILES:
            raise Unknown(f"it reaches more than {_MOST_FILES} files, so not all of them are read")
        yield path, text
        if path.endswith(".py"):
            pending += _of_python(path, text)


def _named(command: Command, values: Values, ignored: tuple[str, ...]) -> Iterator[str]:
    parts = [word for word in command.words if not re.match(r"\w+\+?=", word.text)]
    if not parts or parts[0].text in ignored:
        return
    plain = [unquoted(word.text) for word in parts]
    if any(name.rpartition("/")[2] in ("make", "gmake") for name in plain):
        yield from _MAKEFILES
    if plain[0] in ("import", "from"):  # Python in a here-document
        yield from _of_python("", " ".join(plain))
    for index, word in enumerate(parts):
        if index and re.fullmatch(r"-[a-zA-Z]*c", plain[index - 1]):
            yield from _of_python("", plain[index])
        try:
            texts = values.of(word.text)
        except Unknown:
            continue  # a data path, mostly; command words of this kind are refused where they stand
        for text in texts:
            if index and plain[index - 1] == "-m":
                yield from _of_module(text, "")
            yield text.rpartition("=")[2]


def _of_module(module: str, folder: str) -> Iterator[str]:
    path = folder + module.replace(".", "/")
    yield from (f"{path}.py", f"{path}/__init__.py", f"{path}/__main__.py")


def _of_python(path: str, text: str) -> Iterator[str]:
    """Local modules that a Python file imports, and files that it names."""
    folder = path[: path.rfind("/") + 1]
    for found in _IMPORT.finditer(text):
        names = [name.split()[0] for name in (found[2] or found[3] or "").split(",") if name.split()]
        for module in [found[1], *(f"{found[1]}.{name}" for name in names)] if found[1] else names:
            for place in {folder, ""}:
                yield from _of_module(module.lstrip("."), place)
    yield from (found[1] for found in _FILE_NAME.finditer(text))
