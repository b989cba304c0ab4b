"""Which words of a script depend on how many CPUs its job has. Pure; called by `step_demand.py`.

Conversion changes that number. An option of `srun` that says how many CPUs a step has may follow it, and so may what a
Python program is given; a number of tasks, a loop or a test may not, or the script would do something else. So commands
are listed here that may have such a word, and in any other it is `Unknown`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from hetstream.hetjob.shell_text import Command, Word

# Slurm's variables of a batch script, and of its memory where that goes by CPUs.
_VARIABLES = (
    *("SLURM_CPUS_PER_TASK", "SLURM_CPUS_ON_NODE", "SLURM_JOB_CPUS_PER_NODE", "SLURM_CPUS_PER_GPU"),
    *("SLURM_TRES_PER_TASK", "SLURM_MEM_PER_CPU", "SLURM_CPU_BIND_LIST", "SRUN_CPUS_PER_TASK"),
)
# What asks the system or Slurm for it. `nproc --all` and `lscpu` tell what the host has.
_ASKING = (
    r"(?:^|\$\(|`|[|;&])\s*nproc(?![\w-])(?!\s+--all)|sched_getaffinity|process_cpu_count|joblib\S*cpu_count"
    r"|Cpus_allowed|NumCPUs|AllocCPUS|AllocTRES|%\d*C\b"
)
# A variable, and a command whose output is a word or part of one.
_REFERENCE = re.compile(r"\$\{?[#!]?(\w+)|(?:\$\(|`|[|;&])\s*([\w./-]+)", re.ASCII)
_ARITHMETIC = re.compile(r"\$\(\((.*?)\)\)|\$\[(.*?)\]", re.DOTALL)
_READING = ("read", "mapfile", "readarray")
_TESTS = ("[", "[[", "]]", "test")
_COMPUTING = ("((", "[[", "]]", "let", "-i")


class OfCpus:
    """The words of a script that depend on its CPUs.

    Args:
        found: all its commands, and those of scripts that it calls.
        callable_names: functions and scripts among these; what they print may depend on it where anything does.
        more_variables: Slurm's variables that depend on CPUs in this job, beside those that do in each.
    """

    def __init__(
        self, found: Sequence[Command], callable_names: Iterable[str] = (), more_variables: Sequence[str] = ()
    ) -> None:
        variables = "|".join((*_VARIABLES, *more_variables))
        self._direct = re.compile(rf"(?<!\w)(?:{variables})\b(?!=)|{_ASKING}", re.ASCII)
        self._names: set[str] = set()
        used: dict[str, set[str]] = {}  # what each name is part of
        pending: list[str] = []
        is_anywhere = False
        for command in found:
            is_arithmetic = _is_arithmetic(command.words)
            for word in command.words:
                is_direct = bool(self._direct.search(word.text))
                is_anywhere |= is_direct
                for name, value in _assignments(word.text):
                    pending += [name] if self._direct.search(value) else []
                    for reference in _references(value, is_arithmetic=is_arithmetic):
                        used.setdefault(reference, set()).add(name)
        if is_anywhere:
            pending += [f"{name.removeprefix('./')}()" for name in callable_names]
            pending += _read_from_documents(found)
        while pending:
            name = pending.pop()
            if name not in self._names:
                self._names.add(name)
                pending += used.get(name, ())

    def is_in(self, text: str, *, is_arithmetic: bool = False) -> bool:
        """Whether a text as written depends on them.

        Args:
            text: of a word, or of several.
            is_arithmetic: names count without a `$`.
        """
        references = _references(text, is_arithmetic=is_arithmetic)
        return bool(self._direct.search(text)) or not self._names.isdisjoint(references)

    def first(self, parts: Sequence[Word]) -> str:
        """The first word of a command that depends on them; "" if none does.

        Whether a variable is set (`[ -z "$SLURM_CPUS_PER_TASK" ]`) depends on no number.
        """
        texts = [word.text for word in parts]
        is_arithmetic, is_test = _is_arithmetic(parts), any(text in _TESTS for text in texts)
        for before, text in zip(["", *texts], texts, strict=False):
            is_length = is_test and before in ("-n", "-z", "-v") and "$(" not in text and "`" not in text
            if not is_length and self.is_in(text, is_arithmetic=is_arithmetic):
                return text
        return ""


def _is_arithmetic(parts: Sequence[Word]) -> bool:
    return any(word.text in _COMPUTING for word in parts)


def _references(text: str, *, is_arithmetic: bool) -> set[str]:
    """Names of variables in a text, and of commands in its substitutions, with `()` behind them."""
    found = {name or f"{command.removeprefix('./')}()" for name, command in _REFERENCE.findall(text)}
    inner = [text] if is_arithmetic else ["".join(pair) for pair in _ARITHMETIC.findall(text)]
    return found.union(*(re.findall(r"[A-Za-z_]\w*", computed, re.ASCII) for computed in inner))


def _assignments(text: str) -> Iterable[tuple[str, str]]:
    """Names that a word gives a value, with that."""
    if found := re.match(r"(\w+)(?:\[[^\]]*\])?[-+*/%]?=", text, re.ASCII):
        yield found[1], text[found.end() :]
    for name in re.findall(r"\$\{(\w+):?=", text, re.ASCII):
        yield name, text
    if found := re.match(r"--(?:export|env)=", text):
        yield from re.findall(r"(\w+)=([^,]*)", text[found.end() :], re.ASCII)


def _read_from_documents(found: Sequence[Command]) -> list[str]:
    """Names that commands read from a here-document or a here-string."""
    return [
        word.text
        for command in found
        if command.has_document and command.words[0].text in _READING
        for word in command.words[1:]
        if re.fullmatch(r"\w+", word.text)
    ]
