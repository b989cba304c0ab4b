"""Whether a Python program starts steps itself, as far as its text says. Pure.

Called by `script_launches.py`. A program that starts no processes, or only ones whose name stands in its text and is no
launcher's, is plain. Of any other nobody knows what it starts.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from hetstream.hetjob.shell_values import Unknown
from hetstream.hetjob.understood_commands import is_harmless

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
