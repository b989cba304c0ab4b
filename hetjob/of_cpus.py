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
_READING = ("read", "mapfile", "readarray")
_TESTS = ("[", "[[", "]]", "test")
_ARITHMETIC = ("((", "[[", "]]", "let")


class OfCpus:
    """The words of a script that depend on its CPUs.

    Args:
        found: all its commands, and those of scripts that it calls.
    """

    def __init__(self, found: Sequence[Command]) -> None:
        self._names = {*_VARIABLES}
        self._compile()
        assigned = [pair for command in found for word in command.words for pair in _assignments(word.text)]
        data = [word.text for command in found if command.is_data for word in command.words]
        read = {
            word.text
            for command in found
            if command.has_document and command.words[0].text in _READING
            for word in command.words[1:]
            if re.fullmatch(r"\w+", word.text)
        }
        before = 0
        while before < len(self._names):
            before = len(self._names)
            self._names |= {name for name, value in assigned if name not in self._names and self.is_in(value)}
            if read and any(self.is_in(text) for text in data):
                self._names |= read
            self._compile()

    def _compile(self) -> None:
        names = "|".join(sorted(self._names))
        self._written = re.compile(
            rf"\$\{{?[#!]?({names})\b|(?<!\w)({'|'.join(_VARIABLES)})\b(?!=)|{_ASKING}", re.ASCII
        )
        self._bare = re.compile(rf"(?<!\w)({names})\b", re.ASCII)

    def is_in(self, text: str, *, is_arithmetic: bool = False) -> bool:
        """Whether a text as written depends on them.

        Args:
            text: of a word, or of several.
            is_arithmetic: names count without a `$`.
        """
        if self._written.search(text) or (is_arithmetic and self._bare.search(text)):
            return True
        return any(self._bare.search(inner) for inner in re.findall(r"\$\(\((.*?)\)\)", text, re.DOTALL))

    def first(self, parts: Iterable[Word]) -> str:
        """The first word of a command that depends on them; "" if none does.

        Whether a variable is set (`[ -z "$SLURM_CPUS_PER_TASK" ]`) depends on no number.
        """
        texts = [word.text for word in parts]
        is_arithmetic = any(text in _ARITHMETIC for text in texts)
        is_test = any(text in _TESTS for text in texts)
        for before, text in zip(["", *texts], texts, strict=False):
            is_length = is_test and before in ("-n", "-z", "-v") and "$(" not in text and "`" not in text
            if not is_length and self.is_in(text, is_arithmetic=is_arithmetic):
                return text
        return ""


def _assignments(text: str) -> Iterable[tuple[str, str]]:
    """Names that a word gives a value, with that."""
    if found := re.match(r"(\w+)(?:\[[^\]]*\])?[-+*/%]?=", text, re.ASCII):
        yield found[1], text[found.end() :]
    for name in re.findall(r"\$\{(\w+):?=", text, re.ASCII):
        yield name, text
