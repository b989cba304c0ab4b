"""Every launcher in a script and in what it calls, and what else counts for the CPUs of its steps. Pure but for `read`.

Called by `step_demand.py`. Launchers are found in commands, variables, quotes, functions, here-documents, scripts that
the script calls and files that it names; where one is named in a way that cannot be followed, that is `Unknown`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from hetstream.hetjob.convert.launch_options import OF_MPI
from hetstream.hetjob.convert.shell import (
    Command,
    Unknown,
    UnreadableText,
    Values,
    Word,
    commands,
    inner_texts,
    unquoted,
)
from hetstream.hetjob.convert.understood_commands import LAUNCHERS, SHELLS, Placed, is_harmless

# Files that a script's commands can reach by name, and what in them starts a step. Pure but for the reader given.
#
# A program in a step has the step's CPUs; it can ask for more only by a launcher.

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


# Whether a Python program starts steps itself, as far as its text says. Pure.
#
# A program that starts no processes, or only ones whose name stands in its text and is
# no launcher's, is plain. Of any other nobody knows what it starts.

# The functions of Python's library that start a program, by their modules.
_STARTING = {
    "os": re.compile(r"system|popen|startfile|(exec|spawn)[lv]p?e?|posix_spawnp?"),
    "posix": re.compile(r"system|exec\w*|posix_spawnp?"),
    "subprocess": re.compile(r"run|call|check_call|check_output|Popen|getoutput|getstatusoutput"),
    "pty": re.compile(r"spawn"),
    "asyncio": re.compile(r"create_subprocess_\w+"),
    "asyncio.subprocess": re.compile(r"create_subprocess_\w+"),
}


def check_python(text: str, path: str, mention: re.Pattern[str]) -> None:
    """Look at a program.

    Args:
        text: of the program.
        path: its file's, for messages.
        mention: finds the name of a launcher.

    Raises:
        Unknown: it may start a step.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        if mention.search(text):
            raise Unknown(f"{path} has a launcher in it") from None
        return
    said = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings say, and do nothing
    calls = [*_starting_calls(tree)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in said:
            found = mention.search(node.value)
            # Words about a launcher, as in the help of an option, start nothing.
            if found and (calls or not node.value.strip().count(" ") or node.value.lstrip().startswith(found[0])):
                raise Unknown(f"{path} line {node.lineno} has {found[1]}")
    for call in calls:
        if not is_harmless(_first_word(call)):
            raise Unknown(f"{path} line {call.lineno} starts a program, and nobody knows here which")


def _starting_calls(tree: ast.AST) -> Iterator[ast.Call]:
    modules = {name: name for name in _STARTING}  # under another name, too
    functions: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {name.asname: name.name for name in node.names if name.asname and name.name in _STARTING}
        elif isinstance(node, ast.ImportFrom) and node.module in _STARTING:
            functions |= {name.asname or name.name: node.module for name in node.names}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        function = node.func
        if isinstance(function, ast.Attribute):
            module = modules.get(ast.unparse(function.value), "")
            if module and _STARTING[module].fullmatch(function.attr):
                yield node
        elif isinstance(function, ast.Name) and function.id in functions:
            yield node


def _first_word(call: ast.Call) -> str:
    """The program that a call names in its text; "" if it does not."""
    given = [*call.args, *(keyword.value for keyword in call.keywords if keyword.arg in ("args", "cmd", "program"))]
    if isinstance(call.func, ast.Attribute) and call.func.attr.startswith("spawn") and len(given) > 1:
        given = given[1:]  # the first is a mode
    first = given[0] if given else None
    if isinstance(first, ast.List | ast.Tuple) and first.elts:
        first = first.elts[0]
        if ast.unparse(first) == "sys.executable":
            return "python"
    elif isinstance(first, ast.Constant) and isinstance(first.value, str):
        # Text for a shell: one command.
        return "" if re.search(r"[;&|`$\n(<>]", first.value) else next(iter(first.value.split()), "")
    return first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else ""


_NAMES = "|".join(re.escape(name) for name in LAUNCHERS)
_MENTION = re.compile(rf"(?<![\w./-])(?:[\w./-]*/)?({_NAMES})(?![\w./-])")
# Variables of srun that ask for CPUs or say where they are.
_OF_SRUN = re.compile(
    r"S(?:RUN|LURM)_\w*(?:CPU|TASK|PROC|CORE|THREAD|EXACT|EXCLUSIVE|HINT|BIND|TRES|OVERLAP|MEM_PER_|JOB_NUM_NODES)\w*"
)
# Slurm gives them to each job anew.
_OF_JOB = re.compile(
    r"SLURM_(JOB_NUM_NODES|JOB_CPUS_PER_NODE|CPUS_ON_NODE|TASKS_PER_NODE|PROCID|TASK_PID|PRIO_PROCESS|STEP_\w+|\w+_(HET|PACK)_GROUP_\d+)"
)
_HANDLED = ("SRUN_CPUS_PER_TASK", "SLURM_CPUS_PER_TASK", "SLURM_NTASKS", "SLURM_NPROCS")
# Files that set up an environment and start no steps; they are found by paths of the site that nobody else knows.
_SETTING_UP = re.compile(
    r"(^|/)(activate|conda\.sh|mamba\.sh|setup-env\.sh|\.?\w*profile(\.d/.*)?|\.?bashrc|\w*modules?\.sh)$|/init/"
)
_PROCESSES = re.compile(r"--(?:nproc[-_]per[-_]node|num[-_]processes)(?:=(.*))?$", re.DOTALL)
_NO_CALLS = (
    *("echo", "printf", "rm", "chmod", "cp", "mv", "ln", "mkdir", "cat", "ls"),
    *("test", "[", "[[", "cd", "module", "ml"),
)
_DEEPEST, _MOST_STEPS = 4, 200


@dataclass(frozen=True)
class Launch:
    """A launcher's words behind its name, and where it stands."""

    launcher: str
    words: tuple[Word, ...]
    where: str


@dataclass
class ScriptText:
    """What was found in a script and in what it calls.

    Attributes:
        launches: every launcher.
        commands: all commands, and assignments of files that set up an environment.
        placed: the commands again, with the file that they stand in.
        was_read: paths of the scripts among them.
        has_background: steps may run side by side.
        is_complete: every file that is read into the script could be read here.
    """

    launches: list[Launch] = field(default_factory=list)
    commands: list[Command] = field(default_factory=list)
    placed: list[Placed] = field(default_factory=list)
    was_read: set[str] = field(default_factory=set)
    has_background: bool = False
    is_complete: bool = True

    def processes_per_node(self) -> list[Word]:
        """Return what `--nproc-per-node` of a launcher says, and of `accelerate`, which says it of all nodes:
        no fewer.
        """
        found = []
        for command in self.commands:
            for word, following in zip(command.words, (*command.words[1:], None), strict=True):
                option = _PROCESSES.match(unquoted(word.text))
                number = "" if not option else option[1] or (unquoted(following.text) if following else "")
                if number not in ("", "gpu", "auto", "cpu"):
                    found.append(Word(number, word.line))
        return found


def launches_of(script: str, read: Callable[[str], str | None]) -> ScriptText:
    """Return all that a script starts, and what it calls.

    Raises:
        Unknown: something of it cannot be read.
    """
    found = ScriptText()
    pending, seen = [(script, "", 0)], set[str]()
    while pending:
        text, place, depth = pending.pop()
        try:
            parsed = commands(text)
        except UnreadableText as error:
            raise Unknown(f"{place or 'the script '}cannot be split into commands ({error})") from error
        found.commands += parsed
        values = Values(found.commands, {})
        is_beside = False
        for command in parsed:
            before = len(found.launches)
            _look_at(command, values, found, place)
            is_launch = len(found.launches) > before
            found.has_background |= is_beside and (is_launch or command.words[0].text == "while")
            is_beside = command.is_piped and (is_launch or is_beside or len(command.words) == 1)
            found.placed.append(Placed(command, place))
            for path, is_needed in _called(command, values, place):
                called = read(path)
                if called is not None:
                    found.was_read.add(path)
                if called is None:
                    if is_needed:
                        raise Unknown(f"{_at(place, command.words[0])} runs {path}, which cannot be read here")
                elif path.endswith(".py"):
                    continue  # read below
                elif depth >= _DEEPEST:
                    raise Unknown(f"{_at(place, command.words[0])} runs scripts that run scripts ({path})")
                elif is_needed or re.match(r"#!.*sh\b", called) or re.search(r"\.(sh|bash|ksh|zsh)$", path):
                    pending.append((called, f"{path} ", depth + 1))
                    seen.add(path)
    found.is_complete = all(read(path) is not None for command in found.commands for path in _sourced(command))
    for path, text in reachable(tuple(found.commands), Values(found.commands, {}), read, _NO_CALLS):
        if path.endswith(".py"):
            check_program(text, path)
        elif _SETTING_UP.search(path):
            for assigned in re.finditer(r"^[ \t]*(?:export[ \t]+)?(\w+=[^\s;]*)", text, re.MULTILINE):
                word = Word(assigned[1], text.count("\n", 0, assigned.start()) + 1)
                _check_variable(word, f"{path} ")
                found.commands.append(Command((word,)))
        elif path not in seen and (mention := _MENTION.search(text)):
            line = text.count("\n", 0, mention.start()) + 1
            raise Unknown(f"{path} line {line} has {mention[1]}, and nothing says what runs it")
    return found


def _at(place: str, word: Word) -> str:
    return f"{place}line {word.line}"


def _look_at(command: Command, values: Values, found: ScriptText, place: str, depth: int = 0) -> None:
    """Note the steps that a command starts, and those in texts in it."""
    found.has_background |= command.in_background
    arguments = list(values.with_launchers(command.words, _MENTION))
    first = unquoted(arguments[0].text) if arguments else ""
    if first == "alias" and any(_MENTION.search(word.text) for word in arguments):
        raise Unknown(f"{_at(place, arguments[0])} has a launcher in an alias")
    if first in ("parallel", "xargs", "coproc", "make"):
        found.has_background = True
    if (
        first in ("echo", "printf", "logger")
        and not command.goes_on
        and not any("$(" in word.text for word in arguments)
    ):
        return  # it only says so
    for index, word in enumerate(arguments):
        _check_variable(word, place)
        if not _MENTION.search(word.text) and not _MENTION.search(unquoted(word.text)):
            continue
        found_by = re.fullmatch(r'"?\$\((?:which|command -v|type -p)\s+([\w.]+)\s*\)"?', word.text)
        plain = found_by[1] if found_by else unquoted(word.text)
        name = plain.rpartition("/")[2]
        if name in LAUNCHERS and re.fullmatch(r"[\w./-]+", plain):
            found.launches.append(Launch(name, tuple(arguments[index + 1 :]), _at(place, word)))
            if len(found.launches) > _MOST_STEPS:
                raise Unknown(f"the script starts more than {_MOST_STEPS} steps")
        else:
            _look_inside(word, values, found, place, depth)


def _look_inside(word: Word, values: Values, found: ScriptText, place: str, depth: int) -> None:
    """The same for a word that has a launcher somewhere in it: as a text of its own, or nobody knows."""
    name, equals, value = word.text.partition("=")
    texts = list(inner_texts(word.text))
    if equals and re.fullmatch(r"\w+\+?", name):
        texts = list(inner_texts(word.text[len(name) :])) or [value]
    outside = _MENTION.search(re.sub(r"\s+", " ", _without(word.text, texts)))
    if outside and not (equals and re.fullmatch(r"\w+\+?", name)):
        raise Unknown(f"{_at(place, word)} has {outside[1]} in {unquoted(word.text)[:40]!r}")
    for text in texts:
        if not _MENTION.search(text):
            continue
        if not equals and _MENTION.fullmatch(text.strip()):
            raise Unknown(f"{_at(place, word)} has {text.strip()} in {unquoted(word.text)[:40]!r}")
        if depth >= _DEEPEST:
            raise Unknown(f"{_at(place, word)} has {_MENTION.findall(text)[0]} in texts of texts")
        try:
            inner = commands(text, word.line)
        except UnreadableText as error:
            raise Unknown(f"{_at(place, word)} has text that is no command ({error})") from error
        for command in inner:
            first = unquoted(command.words[0].text)
            is_made = word.text.lstrip('"').startswith(("$(", "`")) and first in ("echo", "printf", "cat")
            if is_made or not re.search(r"[\w$]", first):
                raise Unknown(f"{_at(place, word)} has a launcher in {text[:40]!r}")
            _look_at(Command(command.words, command.in_background, goes_on=True), values, found, place, depth + 1)


def _without(text: str, parts: Sequence[str]) -> str:
    for part in parts:
        text = text.replace(part, "", 1)
    return text


def _check_variable(word: Word, place: str) -> None:
    """Refuse assignments to srun's own variables whose meaning is not followed."""
    name = re.match(r"(\w+)\+?=", word.text)
    if name and _OF_SRUN.fullmatch(name[1]) and name[1] not in _HANDLED:
        raise Unknown(f"{_at(place, word)} sets {name[1]}")


def _called(command: Command, values: Values, place: str) -> Iterator[tuple[str, bool]]:
    """Paths of what a command may run, and whether it certainly does, as a shell script."""
    arguments = [word for word in command.words if not re.match(r"\w+=", word.text)]
    if not arguments or arguments[0].text in _NO_CALLS:
        return
    shell = ""
    for index, word in enumerate(arguments):
        plain = unquoted(word.text)
        if plain.startswith("-"):
            shell = "" if re.match(r"-\w*[cs]$", plain) else shell  # text, or standard input
            continue
        is_needed = bool(shell) or (index == 0 and plain.endswith(".sh"))
        shell = plain.rpartition("/")[2] if plain.rpartition("/")[2] in (*SHELLS, "source", ".") else ""
        if (
            _SETTING_UP.search(plain)
            or re.match(r"[<>(]|/dev/", plain)
            or not (is_needed or re.search(r"/|\.py$", plain))
        ):
            continue
        try:
            for path in values.of(word.text):
                yield path, is_needed
        except Unknown:
            if is_needed:
                raise Unknown(f"{_at(place, word)} runs {plain}, which is known only in the job") from None


def _sourced(command: Command) -> Iterator[str]:
    """Files that a command reads into this shell."""
    before = ("if", "then", "else", "do", "!", "{", "command", "builtin")
    parts = [unquoted(word.text) for word in command.words if word.text not in before]
    if len(parts) > 1 and parts[0] in ("source", "."):
        yield parts[1]


def is_of_srun(name: str) -> bool:
    """Return whether a variable from outside asks srun for CPUs in a way that is not followed here."""
    return bool(_OF_SRUN.fullmatch(name)) and not _OF_JOB.fullmatch(name) and name not in _HANDLED


def check_variables(environ: Mapping[str, str], text: ScriptText) -> None:
    """Refuse variables from outside, or of the script, that say how launchers choose CPUs."""
    for name in environ:
        if is_of_srun(name):
            raise Unknown(f"the environment of the submission has {name}")
    if any(launch.launcher != "srun" for launch in text.launches):
        assigned = (re.match(r"(\w+)\+?=", word.text) for command in text.commands for word in command.words)
        for name in [*environ, *(found[1] for found in assigned if found)]:
            if OF_MPI.fullmatch(name):
                raise Unknown(f"{name} says how MPI chooses CPUs")


def check_program(text: str, where: str) -> None:
    """Look at a Python program.

    Args:
        text: of it.
        where: it stands, for messages.

    Raises:
        Unknown: it may start a step.
    """
    check_python(text, where, _MENTION)
