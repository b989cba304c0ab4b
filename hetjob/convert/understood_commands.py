"""Whether each command of a script is one that is known to start no step but those that are counted. Pure.

Called by `step_demand.py`. It is a grammar of what is understood, and no list of what is dangerous: a command that is
not in it is `Unknown`, and the trainer keeps its CPUs. Understood are keywords and commands of the shell, the ordinary
commands that work on files, text and environments, Python programs (their files are read by `launches.py`), what
runs another command (`env`, `timeout 60`, `apptainer exec IMAGE`, a shell with `-c`), the launchers whose options
`step_demand.py` reads, functions of the script, and scripts whose text was read.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from hetstream.hetjob.convert.launch_options import program_of_mpi, programs_of
from hetstream.hetjob.convert.shell import (
    Command,
    Unknown,
    UnreadableText,
    Values,
    Word,
    commands,
    substitutions,
    unquoted,
)

# Which words of a script depend on how many CPUs its job has. Pure; called by `step_demand.py`.
#
# Conversion changes that number. An option of `srun` that says how many CPUs a step has may follow it, and so may what
# a Python program is given; a number of tasks, a loop or a test may not, or the script would do something else. So
# commands are listed here that may have such a word, and in any other it is `Unknown`.

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
        """Return whether a text as written depends on them.

        Args:
            text: of a word, or of several.
            is_arithmetic: names count without a `$`.
        """
        references = _references(text, is_arithmetic=is_arithmetic)
        return bool(self._direct.search(text)) or not self._names.isdisjoint(references)

    def first(self, parts: Sequence[Word]) -> str:
        """Return the first word of a command that depends on them; "" if none does.

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


SHELLS = ("sh", "bash", "dash", "ksh", "zsh")
MPI_LAUNCHERS = ("mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prterun", "ibrun")
LAUNCHERS = ("srun", *MPI_LAUNCHERS)
_LAUNCHER = re.compile(rf"(?<![\w./-])(?:[\w./-]*/)?({'|'.join(map(re.escape, LAUNCHERS))})(?![\w./-])")
_KEYWORDS = ("do", "then", "else", "if", "elif", "while", "until", "!", "{", "time")
# Commands that run nothing which their words name.
_OF_THE_SHELL = """
    : . [ [[ (( break cd continue declare dirs disown done echo esac exit export false fi getopts hash help history
    jobs let local mapfile popd printf pushd pwd read readarray readonly return set setopt shift shopt source suspend
    test times true type typeset ulimit umask unalias unset wait } for select case function bg fg kill logout
"""
_OF_FILES_AND_TEXT = """
    awk base64 basename bc bzip2 cat chgrp chmod chown cksum cmp column comm cp curl cut date dd df diff dirname
    dos2unix du egrep envsubst expand expr fgrep file find fmt fold free gawk getconf getent git gpg grep groups gunzip
    gzip head hexdump hostname id ip ifconfig join jq link ln locale logger logname ls lscpu lsof lspci md5sum
    mkdir mkfifo mktemp mv netstat nl nproc numfmt nvidia-smi od paste pathchk pigz ping pgrep pkill pr printenv ps
    pwdx quota readlink realpath rename rm rmdir rocm-smi rsync scp sed seq sha1sum sha256sum shuf sleep sort ss
    stat stty sum sync tac tail tar tee top touch tput tr tree truncate tsort tty uname unexpand uniq unlink unxz
    unzip uptime users vmstat wc wget whereis which who whoami xz yq zcat zgrep zip zstd
"""
_OF_ENVIRONMENTS = """
    module ml conda mamba micromamba spack pip pip3 virtualenv pyvenv deactivate hetstream
    add_package use setpkgs nvidia-cuda-mps-control dcgmi
"""
_OF_SLURM = "squeue scontrol sinfo sacct sacctmgr sstat scancel sbatch sbcast sprio sreport sshare sattach seff"
_HARMLESS = frozenset(" ".join((_OF_THE_SHELL, _OF_FILES_AND_TEXT, _OF_ENVIRONMENTS, _OF_SLURM)).split())
_PYTHON = re.compile(r"(?:python|ipython|pypy)[\d.]*|torchrun|deepspeed|accelerate|lightning|fabric")
# What runs the command behind its options, and those of these whose value is the next word. The word itself may be part
# of the name: `uv run`, `apptainer exec IMAGE`.
_BEFORE_A_COMMAND: dict[str, tuple[str, int]] = {
    "env": ("-u --unset -C --chdir", 0),
    "nohup": ("", 0),
    "time": ("-o -f", 0),
    "timeout": ("-k --kill-after -s --signal", 1),
    "nice": ("-n --adjustment", 0),
    "ionice": ("-c -n", 0),
    "stdbuf": ("-i -o -e", 0),
    "setsid": ("", 0),
    "exec": ("-a", 0),
    "command": ("", 0),
    "builtin": ("", 0),
    "xargs": ("-I -P -n -L -d -s -a -E --max-procs --max-args --delimiter --arg-file", 0),
    "conda run": ("-n --name -p --prefix --cwd", 0),
    "mamba run": ("-n --name -p --prefix --cwd", 0),
    "micromamba run": ("-n --name -p --prefix --cwd", 0),
    "uv run": ("--with --python -p --extra --group --project --directory --env-file --package", 0),
    "poetry run": ("", 0),
    "pipenv run": ("", 0),
    "shifter": ("-V --volume -i --image -m --module -e --env -w --workdir", 0),
    "hetstream run": ("--data-workers --worker-threads --offload --cache", 0),
    **dict.fromkeys(
        ("apptainer exec", "singularity exec", "apptainer run", "singularity run"),
        (
            "-B --bind --pwd -H --home --env --env-file -W --workdir -o --overlay -S --scratch --network --app --mount",
            1,
        ),
    ),
}
# What makes some of these start another program.
_STARTING = {
    **dict.fromkeys(("awk", "gawk"), re.compile(r"\bsystem\s*\(|\||^-f|^--file|@load|@include")),
    "sed": re.compile(r"(?:^|[;{}])[\s\d,$]*e(?:\s|$)|/[gpiImM\d]*e[gpiImM\d]*(?:[;}]|$)|^-f|^--file|^-\w*f$"),
    "tar": re.compile(r"^-I|^--(?:to-c|use-c|checkpoint-a|rmt|rsh|info-s|new-v)|^-?\w*F"),
    "rsync": re.compile(r"^-\w*e|^--(?:rsh|rsync-path)"),
    "sort": re.compile(r"^--comp"),
    "wget": re.compile(r"^--use-askpass|^-e|^--execute"),
    "git": re.compile(
        r"^(?:-c|bisect|rebase|submodule|filter-branch|difftool|mergetool|--config.*)$|^--(?:exec|upload)"
    ),
    "hetstream": re.compile(r"^gpu$"),
    "find": re.compile(r"^-(?:exec|ok)"),
    "env": re.compile(r"^-\w*S|^--s"),
}
# What may have words that depend on how many CPUs there are: programs, and what shows or assigns them.
_SHOWING = ("echo", "printf", "logger", "nproc")
_ASSIGNING = (":", "export", "declare", "typeset", "local", "readonly", "unset")
_INTERPRETER = re.compile(r"(?:python|ipython|pypy)[\d.]*")
_NO_PYTHON = re.compile(r"^--(?:no[-_]python|launcher$|launcher=)")
_HARMLESS_PAIRS = ("ray start", "ray stop", "ray status", "apptainer pull", "singularity pull")
_OF_HERE = re.compile(r"$|\.|\w|\$\{?PWD|\$\(pwd|`pwd|\$\{?SLURM_SUBMIT_DIR")
# Of Python that a script reads from its own text, or writes into a file.
_PYTHON_STARTS = re.compile(r"\bos\.(?:system|popen|exec|spawn|posix_spawn)|\bsubprocess\b|\bcreate_subprocess|\bpty\b")
_ALL_ARGUMENTS = re.compile(r'"\$@"|\$@|\$\*|\$\{@\}')
# They print text for `eval` that sets up an environment.
_SETTING_UP = re.compile(r"(conda|mamba|micromamba|hetstream|pyenv|direnv|lmod|modulecmd|spack|ssh-agent|dircolors)")
# Where those are; a name alone is looked for in PATH, and "/" stands for a path that a variable holds.
_PLACES = ("", "/", "/bin/", "/usr/bin/", "/usr/local/bin/", "/sbin/", "/usr/sbin/")
_DEEPEST = 8


@dataclass(frozen=True)
class Placed:
    """A command, and the file that it stands in.

    Attributes:
        command: the command.
        place: what stands before its line in a message; "" in the script itself.
    """

    command: Command
    place: str


class UnderstoodCommands:
    """The commands that are understood in a script.

    Args:
        values: of its variables.
        functions: that it defines.
        was_read: paths of the scripts whose commands are looked at, too.
        check_python: looks at the text of a Python program, with where it stands.
        of_cpus: which of its words depend on how many CPUs there are.
        has_mpi: it starts programs by MPI, which may read files that it writes.
    """

    def __init__(
        self,
        values: Values,
        functions: Collection[str],
        was_read: Collection[str],
        check_python: Callable[[str, str], None],
        of_cpus: OfCpus,
        *,
        has_mpi: bool,
    ) -> None:
        self._check_python = check_python
        self._of_cpus, self._has_mpi = of_cpus, has_mpi
        self._is_read = False  # by another command, what the one that is looked at writes
        self._is_output = False  # it is part of a word, which is looked at itself
        self._values, self._functions = values, functions
        self._has_document = False  # of the command that is looked at
        self._was_read = {path.removeprefix("./") for path in was_read}

    def check_all(self, placed: Iterable[Placed]) -> None:
        """Look at all commands.

        Raises:
            Unknown: one is not understood; it is named, with its line.
        """
        is_in_test = False
        for item in placed:
            texts = [word.text for word in item.command.words]
            is_part = is_in_test
            begins_test = next((text for text in texts if text not in _KEYWORDS), "") == "[["
            is_in_test = (begins_test or is_in_test) and "]]" not in texts
            self._has_document = item.command.has_document
            where = f"{item.place}line {item.command.words[0].line}"
            self._note_output(item.command)
            if is_part or (item.command.is_data and self._has_mpi):
                self._refuse_of_cpus("[[" if is_part else "a file", item.command.words, where)
            if not is_part and not item.command.is_data:
                self._check(item.command.words, where, 0)
            if item.command.is_data and any(_PYTHON_STARTS.search(text) for text in texts):
                raise Unknown(f"{where} has a line of Python that may start a program")
            if not item.command.is_literal:
                self._check_inner(item.command.words, where, 0)

    def _note_output(self, command: Command) -> None:
        self._is_read = command.is_piped or (command.goes_on and self._has_mpi)

    def _refuse_of_cpus(self, name: str, parts: Sequence[Word], where: str) -> None:
        if text := self._of_cpus.first(parts):
            raise Unknown(f"{where} has {text[:40]!r} in {name}, which would be another number with fewer CPUs")

    def _check_numbers(self, path: str, parts: Sequence[Word], where: str) -> None:
        """Refuse words of a command that would be others with fewer CPUs, but where that is what they are for.

        Options of launchers are compared by `step_demand.py`, and inner commands are looked at by themselves.
        """
        name = path.rpartition("/")[2]
        behind = [*parts[1:]]
        second = f"{name} {unquoted(behind[0].text)}" if behind else ""
        is_written = name in _SHOWING and not self._is_read and not any(word.text == "-v" for word in behind[:1])
        is_program = _INTERPRETER.fullmatch(name) or path.endswith(".py") or second in _HARMLESS_PAIRS
        is_looked_at = self._is_output or name in (*LAUNCHERS, *_ASSIGNING, "eval", "trap", "alias")
        if is_looked_at or is_written or is_program:
            return
        pair = second if second in _BEFORE_A_COMMAND else name
        if pair in _BEFORE_A_COMMAND:
            behind = behind[1:] if pair == second else behind
            program = _behind_options(behind, *_BEFORE_A_COMMAND[pair])
            options = behind[: len(behind) - len(program)]
            behind = [word for word in options if not re.match(r"\w+=|--env=", word.text)]
        elif _PYTHON.fullmatch(name):
            texts = [unquoted(word.text) for word in behind]
            end = next((at for at, text in enumerate(texts) if text.endswith(".py") or text == "-m"), len(texts))
            behind = [
                word
                for word, text, before in zip(behind[:end], texts, ["", *texts], strict=False)
                if "thread" not in f"{text} {before}"  # of each process
            ]
        elif name in SHELLS:  # the text behind -c is looked at by itself
            texts = [unquoted(word.text) for word in behind]
            behind = [
                word for word, before in zip(behind, ["", *texts], strict=False) if not re.match(r"-\w*c$", before)
            ]
        self._refuse_of_cpus(name, [*parts[:1], *behind], where)

    def _check_inner(self, parts: Iterable[Word], where: str, depth: int) -> None:
        """Look at the command substitutions in words."""
        before = self._is_output
        for word in parts:
            for text in substitutions(word.text):
                self._is_output = not _LAUNCHER.search(text)
                self._check_text(text, word.line, where, depth)
        self._is_output = before

    def _check_text(self, text: str, line: int, where: str, depth: int) -> None:
        if depth > _DEEPEST:
            raise Unknown(f"{where} has texts in texts")
        try:
            found = commands(text, line)
        except UnreadableText as error:
            raise Unknown(f"{where} has text that is no command ({error})") from error
        for command in found:
            self._note_output(command)
            self._check(command.words, where, depth + 1)
            self._check_inner(command.words, where, depth + 1)

    def _check(self, command: Sequence[Word], where: str, depth: int, before: int = 0) -> None:
        """Look at one command, by its name and, where it runs another one, by that one's."""
        parts = [*command]
        while parts and (parts[0].text in (*_KEYWORDS, "function") or re.match(r"\w+(\[[^\]]*\])?\+?=", parts[0].text)):
            self._check_assignment(parts[0], where)
            # Behind a function's name stands its first command.
            parts = parts[2:] if parts[0].text == "function" else parts[1:]
        if not parts:
            return
        if depth > _DEEPEST or before > _DEEPEST:  # texts in texts, or commands that run commands
            raise Unknown(f"{where} has commands in commands")
        is_hidden = "$" in parts[0].text and (
            depth > 0 or not re.fullmatch(r'"?\$(\{?\w+(\[[@*]\])?\}?|\(.*\))"?', parts[0].text)
        )
        for pieces in self._readings(parts[0], where):
            if is_hidden and unquoted(pieces[0].text).rpartition("/")[2] in LAUNCHERS:
                raise Unknown(f"{where} has a launcher in {unquoted(parts[0].text)[:40]!r}")
            self._check_named([*pieces, *parts[1:]], where, depth, before + 1)

    def _check_assignment(self, word: Word, where: str) -> None:
        """Refuse what changes which program a name stands for, or what shells do first."""
        name, _, value = word.text.partition("=")
        if name.rstrip("+") in ("BASH_ENV", "ENV", "PROMPT_COMMAND"):
            raise Unknown(f"{where} sets {name}, by which shells run something first")
        if name == "PATH" and any(_OF_HERE.match(entry) for entry in unquoted(value).split(":")):
            raise Unknown(f"{where} looks for commands in the working directory")

    def _readings(self, word: Word, where: str) -> list[list[Word]]:
        """What the first word of a command comes to."""
        name = unquoted(word.text)
        last = name.rpartition("/")[2]
        if "$" not in name and "`" not in name:
            return [[word]]
        if "/" in name and re.fullmatch(r"[\w.+-]+", last):
            return [[Word(f"/{last}", word.line)]]  # of a path its last part says which program that is
        if found := re.fullmatch(r"\$\((?:which|command -v|type -p)\s+([\w.]+)\s*\)", name):
            return [[Word(found[1], word.line)]]
        if (expanded := [*self._values.with_launchers([word], _LAUNCHER)]) != [word]:
            return [expanded]
        try:
            texts = self._values.of(word.text)
        except Unknown as error:
            raise Unknown(f"{where} runs what a variable says: {error}") from error
        return [[Word(piece, word.line) for piece in text.split()] for text in texts if text.split()]

    def _check_named(self, parts: Sequence[Word], where: str, depth: int, before: int) -> None:
        path = unquoted(parts[0].text)
        name = path.rpartition("/")[2]
        behind = parts[1:]
        second = f"{name} {unquoted(behind[0].text)}" if behind else ""
        self._check_numbers(path, parts, where)
        if name == "srun":
            for program in programs_of(behind, self._values):
                self._check(program, where, depth, before)
        elif name in MPI_LAUNCHERS:
            self._check(program_of_mpi(behind, self._values), where, depth, before)
        elif name in ("command", "builtin") and behind and re.match(r"-[vV]", behind[0].text):
            return
        elif second in _BEFORE_A_COMMAND:
            program = _behind_options(behind[1:], *_BEFORE_A_COMMAND[second])
            if not program:
                raise Unknown(f"{where} runs {second}, of which nobody knows here what it starts")
            self._check(program, where, depth, before)
        elif name in _BEFORE_A_COMMAND:
            self._check_options(name, behind, where)
            self._check(_behind_options(behind, *_BEFORE_A_COMMAND[name]), where, depth, before)
        elif name in SHELLS:
            self._check_shell(behind, where, depth)
        elif name in ("eval", "trap", "alias"):
            self._check_texts_of(name, behind, where, depth)
        elif name in ("export", "declare", "typeset", "local", "readonly"):
            for word in behind:
                self._check_assignment(word, where)
        elif name in ("source", ".") and (not behind or unquoted(behind[0].text).startswith("/dev/")):
            raise Unknown(f"{where} reads commands from another one's output")
        elif is_harmless(path) or second in _HARMLESS_PAIRS:
            self._check_options(name, behind, where)
        elif not (
            path in self._functions or path.removeprefix("./") in self._was_read or re.fullmatch(r"[\w./-]*\.py", path)
        ):
            raise Unknown(f"{where} runs {path[:40]}, of which nobody knows here what it starts")

    def _check_options(self, name: str, behind: Sequence[Word], where: str) -> None:
        """Refuse options by which a command that is known starts another one."""
        plain = [unquoted(word.text) for word in behind]
        starting = _NO_PYTHON if _PYTHON.fullmatch(name) else _STARTING.get(name)
        if starting and any(starting.search(text) for text in plain):
            raise Unknown(f"{where} runs {name}, which may start another program")
        if _PYTHON.fullmatch(name):
            for text, following in itertools.pairwise(plain):
                if text.endswith(".py") or text == "-m":
                    break
                if re.fullmatch(r"-[a-zA-Z]*c", text):
                    self._check_python(following, where)

    def _check_shell(self, behind: Sequence[Word], where: str, depth: int) -> None:
        for index, word in enumerate(behind):
            plain = unquoted(word.text)
            if re.match(r"-\w*c$", plain):
                if index + 1 < len(behind):
                    text, arguments = behind[index + 1], behind[index + 3 :]
                    if "$" in text.text and arguments:  # behind a name they are the text's `"$@"`
                        self._check(arguments, where, depth + 1)
                        text = Word(_ALL_ARGUMENTS.sub(":", text.text), text.line)
                    self._check_command_text(text, where, depth)
                return
            if not plain.startswith("-"):
                return  # a script, which is read by whoever calls this
        if not self._has_document:  # which has been looked at
            raise Unknown(f"{where} runs a shell, of whose standard input nobody knows here what it says")

    def _check_texts_of(self, name: str, behind: Sequence[Word], where: str, depth: int) -> None:
        if name == "trap":
            behind = [word for word in behind[:1] if word.text not in ("-", "-l", "-p", "--", "''", '""')]
            if behind:
                self._check_command_text(behind[0], where, depth)
        elif name == "alias":
            for word in behind:
                if "=" in word.text:
                    self._check_command_text(Word(word.text.partition("=")[2], word.line), where, depth)
        elif len(behind) == 1 and _is_made_to_set_up(behind[0]):
            return
        else:
            self._check_command_text(Word(" ".join(unquoted(word.text) for word in behind), 0), where, depth)

    def _check_command_text(self, word: Word, where: str, depth: int) -> None:
        text = unquoted(word.text)
        if re.fullmatch(r"\$\{?\w+(\[[@*]\])?\}?", text.strip()):
            try:
                texts = self._values.of(word.text)
            except Unknown as error:
                raise Unknown(f"{where} runs what a variable says: {error}") from error
            for found in texts:
                self._check_text(found, word.line, where, depth + 1)
        else:
            self._check_text(text, word.line, where, depth + 1)


def _is_made_to_set_up(word: Word) -> bool:
    """Whether a word is what one command prints that sets up an environment: `"$(conda shell.bash hook)"`."""
    texts = [*substitutions(word.text)]
    if len(texts) != 1 or unquoted(word.text).strip() not in (f"$({texts[0]})", f"`{texts[0]}`"):
        return False
    found = commands(texts[0])
    return len(found) == 1 and bool(_SETTING_UP.fullmatch(unquoted(found[0].words[0].text).rpartition("/")[2]))


def _behind_options(parts: Sequence[Word], with_value: str, skipped: int) -> list[Word]:
    """The command behind options, assignments and a number of words."""
    taking = with_value.split()
    left = [*parts]
    while left:
        text = unquoted(left[0].text)
        if text.startswith("-") and text != "-":
            left.pop(0)
            if text in taking and left:
                left.pop(0)
        elif re.match(r"\w+=", text):
            left.pop(0)
        else:
            break
    return left[skipped:]


def is_harmless(name: str) -> bool:
    """Return whether a program, by its name or path, is one that starts no steps, or Python."""
    last = name.rpartition("/")[2]
    return bool(_PYTHON.fullmatch(last)) or (last in _HARMLESS and name[: -len(last)] in _PLACES)


def functions_of(found: Iterable[Command]) -> set[str]:
    """Return names of the functions that commands define."""
    return {
        unquoted(word.text)
        for command in found
        for before, word in zip(command.words, command.words[1:], strict=False)
        if before.text == "function"
    }
