"""Lines with options are read as sbatch reads them: against an independent port of sbatch's function, on any text."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetstream.base.errors import UsageError
from hetstream.hetjob.convert.convert import AlreadyHeterogeneous, script_options
from hetstream.hetjob.convert.directives import foreign_line, option_lines, read_directives, split_line
from hetstream.hetjob.convert.spec import read_spec
from hetstream.hetjob.errors import DirectiveError


def get_argument(line: bytes, at: int, blank_can_be_escaped: bool) -> tuple[bytes | None, int]:
    """`get_argument` of src/sbatch/opt.c, statement by statement: an argument (NULL is None) and where it ends."""
    text = bytearray(line + b"\0")
    blanks = b" \t\n\v\f\r"
    ptr = at
    while text[ptr] in blanks and text[ptr]:
        ptr += 1
    for mark in (b"packjob", b"hetjob"):
        end = ptr + len(mark)
        if text[ptr:end].lower() == mark and (not text[end] or text[end] in blanks):
            text[ptr:end] = b" " * len(mark)
            break
    if text[ptr] == ord(":"):
        raise ValueError("Unexpected `:`")
    argument: bytes | None = None
    quoted, escape_flag, q_char = False, False, 0
    while (quoted or text[ptr] not in blanks) and text[ptr] not in b"\n\0":
        if escape_flag:
            escape_flag = False
        elif text[ptr] == ord("\\"):
            ptr += 1
            if blank_can_be_escaped and text[ptr] == ord(" "):
                argument = (argument or b"") + b" "
                ptr += 1
                escape_flag = False
            else:
                escape_flag = True
            continue
        elif quoted:
            if text[ptr] == q_char:
                quoted = False
                ptr += 1
                continue
        elif text[ptr] in b"\"'":
            quoted, q_char = True, text[ptr]
            ptr += 1
            continue
        elif text[ptr] == ord("#"):
            break
        argument = (argument or b"") + bytes([text[ptr]])
        ptr += 1
    if quoted:
        raise ValueError("Unmatched quote")
    return argument, ptr


def all_arguments(line: bytes, blank_can_be_escaped: bool) -> list[bytes] | None:
    """The words of a line; None where sbatch ends with an error."""
    found, at = [], 0
    try:
        while True:
            argument, at = get_argument(line, at, blank_can_be_escaped)
            if argument is None:
                return found
            found.append(argument)
    except ValueError:
        return None


@pytest.mark.shows("a trailing backslash, vertical tabs and empty words are read as sbatch reads them")
@given(
    st.lists(
        st.sampled_from([*"ab-=:#'\"\\ \t\v\f\r", "hetjob", "PACKJOB ", "--gres=gpu:1", " -c 8", "ü", "\u00a0"]),
        max_size=25,
    ),
    st.booleans(),
)
def test_words_are_those_of_sbatch(pieces: list[str], blank_can_be_escaped: bool) -> None:
    line = "".join(pieces)
    expected = all_arguments(line.encode(), blank_can_be_escaped)
    try:
        found = split_line(line, blank_can_be_escaped=blank_can_be_escaped)
    except ValueError:
        assert expected is None
    else:
        assert [word.encode() for word in found] == expected


def options_of(script: str) -> list[tuple[str, str | None, str]]:
    return [(item.name, item.value, item.origin) for item in script_options(f"#!/bin/bash\n{script}\nhostname\n", "x")]


@pytest.mark.shows("a trailing backslash, vertical tabs and empty words are read as sbatch reads them")
@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("#SBATCH --gres=gpu:1 \\\n#SBATCH -c 8", [("gres", "gpu:1", "line 2"), ("cpus-per-task", "8", "line 3")]),
        ("#SBATCH --gres=gpu:1 \\   \n#SBATCH -c 8", [("gres", "gpu:1", "line 2"), ("cpus-per-task", "8", "line 3")]),
        ("#SBATCH -n4\v-c\f8\r", [("ntasks", "4", "line 2"), ("cpus-per-task", "8", "line 2")]),
        ("#SBATCH -c\n# a comment\n\n#SBATCH 8", [("cpus-per-task", "8", "line 2")]),
        ('#SBATCH --comment "" -c 8\n#SBATCH word', [("comment", "word", "line 2")]),
        ("#SBATCH -J a\\ b", [("job-name", "a b", "line 2")]),
        ("#SLURM -c 8\n#SBATCH--mem=1G", [("cpus-per-task", "8", "line 2"), ("mem", "1G", "line 3")]),
        ("#SBATCH -J x hetjob -c 8", [("job-name", "x", "line 2")]),
        ("#SBATCH --of-a-site\\#1 value -c 8", [("of-a-site#1", "value", "line 2"), ("cpus-per-task", "8", "line 2")]),
        ("#SBATCH --of-a-site -c 8", [("of-a-site", None, "line 2"), ("cpus-per-task", "8", "line 2")]),
        ("\u00a0\n#SBATCH -c 8", []),  # no blank for sbatch, so a command
    ],
)
def test_what_sbatch_accepts_is_accepted(script: str, expected: list[tuple[str, str | None, str]]) -> None:
    assert options_of(script) == expected


@pytest.mark.parametrize("line", ["#SBATCH :", "#SBATCH -J 'a", "#SBATCH word", "#SBATCH -c 8 -- word", "#SBATCH -c"])
def test_what_sbatch_refuses_is_refused_with_its_line(line: str) -> None:
    with pytest.raises(UsageError, match="line 2"):
        options_of(line)


def test_a_component_is_found_in_every_spelling() -> None:
    for line in ("#SBATCH hetjob", "#SBATCH\tPackJob -c 8", "#SLURM  HETJOB", "#SBATCHhetjob"):
        with pytest.raises(AlreadyHeterogeneous, match="line 2"):
            options_of(line)


def test_a_directive_is_read_alike_and_nothing_of_it_is_passed_over() -> None:
    spec = read_spec(read_directives("#HETSTREAM --data-workers=2 \\\n#HETSTREAM\v--trainer-cpus\f4 # why\n", "x"), "x")
    assert spec is not None
    assert (spec.data_workers_max, spec.trainer_cpus) == (2, 4)
    with pytest.raises(DirectiveError, match=r"line 1: an empty word: .* --trainer-cpus=4"):
        read_directives('#HETSTREAM --data-workers=2 "" --trainer-cpus=4\n', "x")


def test_lines_of_another_batch_system_are_found_where_sbatch_finds_them() -> None:
    commands = "true\n" * 100
    assert foreign_line(f"#!/bin/sh\n#SBATCH -c 8\n{commands}#PBS -l nodes=1:ppn=8\n") == 103
    assert foreign_line(f"#!/bin/sh\n{commands}true\n#PBS -l nodes=1:ppn=8\n") is None
    assert foreign_line("#!/bin/sh\n#BSUB -n 4\n") == 2
    assert foreign_line("#!/bin/sh\n # PBS -l nodes=1\n #PBS -l nodes=1\n") is None


@given(st.text(st.sampled_from("#SBATCHLURM \t\v\n\r\u00a0x\\'\"-c")))
def test_any_script_has_lines_or_a_named_error(script: str) -> None:
    for line in option_lines(script):
        assert script.split("\n")[line.number - 1] == line.line
    with contextlib.suppress(UsageError):
        script_options(script, "x")
