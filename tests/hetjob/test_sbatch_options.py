"""sbatch's option forms: every way to write one is understood, and written out again unchanged."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetstream.base.errors import UsageError
from hetstream.hetjob.convert.sbatch_options import (
    LETTERS,
    TAKES_VALUE,
    SbatchOptions,
    from_environment,
    megabytes,
    memory_words,
    parse_words,
    words_of,
)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["-c", "16"], [("cpus-per-task", "16")]),
        (["-c16"], [("cpus-per-task", "16")]),
        (["--cpus-per-task=16"], [("cpus-per-task", "16")]),
        (["--cpus-per-task", "16"], [("cpus-per-task", "16")]),
        (["--cpus-per-t", "16"], [("cpus-per-task", "16")]),
        (["--tasks-per-node=2"], [("ntasks-per-node", "2")]),
        (["-HW", "-n4"], [("hold", None), ("wait", None), ("ntasks", "4")]),
        (["-Wc", "8"], [("wait", None), ("cpus-per-task", "8")]),
        (["--exclusive", "--exclusive=user"], [("exclusive", None), ("exclusive", "user")]),
        (["--gres=gpu:2", "--mem", "64G"], [("gres", "gpu:2"), ("mem", "64G")]),
        (["-J", "-odd name"], [("job-name", "-odd name")]),
        (["--of-a-site=x", "--parsable"], [("of-a-site", "x"), ("parsable", None)]),
    ],
)
def test_every_form_of_an_option(words: list[str], expected: list[tuple[str, str | None]]) -> None:
    options, rest = parse_words(words, "command line")
    assert [(option.name, option.value) for option in options] == expected
    assert rest == []
    assert words_of(options) == words


def test_the_script_and_its_arguments_end_the_options() -> None:
    options, rest = parse_words(["-p", "gpu", "train.sbatch", "-c", "16", "--data-workers=9"], "command line")
    assert [option.name for option in options] == ["partition"]
    assert rest == ["train.sbatch", "-c", "16", "--data-workers=9"]


def test_a_missing_value_is_named() -> None:
    with pytest.raises(UsageError, match="line 3: option --mem needs a value"):
        parse_words(["--mem"], "line 3")


@given(
    st.lists(
        st.tuples(st.sampled_from(sorted(TAKES_VALUE)), st.text(st.characters(codec="ascii"), min_size=1)), max_size=6
    ),
    st.lists(st.sampled_from(["equals", "blank", "letter"]), min_size=6, max_size=6),
)
def test_options_survive_any_way_of_writing_them(options: list[tuple[str, str]], forms: list[str]) -> None:
    letters = {name: letter for letter, name in LETTERS.items()}
    words: list[str] = []
    expected: list[tuple[str, str | None]] = []
    for (name, value), form in zip(options, forms, strict=False):
        written = f"-{letters[name]}" if form == "letter" and name in letters else f"--{name}"
        if not TAKES_VALUE[name]:
            words.append(written)
        elif form == "equals":
            words.append(f"--{name}={value}")
        else:
            words += [written, value]
        expected.append(({"tasks-per-node": "ntasks-per-node", "cluster": "clusters"}.get(name, name), None))
        if TAKES_VALUE[name]:
            expected[-1] = (expected[-1][0], value)
    parsed, rest = parse_words([*words, "script"], "test")
    assert [(option.name, option.value) for option in parsed] == expected
    assert rest == ["script"]
    assert words_of(parsed) == words


@given(st.lists(st.text(), max_size=8))
def test_any_words_are_split_without_losing_one(words: list[str]) -> None:
    try:
        options, rest = parse_words(words, "test")
    except UsageError:
        return
    dashes = ["--"] if "--" in words and [*words_of(options), "--", *rest] == words else []
    assert words_of(options) + dashes + rest == words


def test_the_later_of_two_wins_and_strange_numbers_are_left_alone() -> None:
    options = SbatchOptions(tuple(parse_words(["-c16", "--cpus-per-task=8", "-n", "4x"], "test")[0]))
    assert options.number("cpus-per-task") == 8
    assert options.number("ntasks") is None
    assert options.value("ntasks") == "4x"


def test_environment_variables_become_options_of_the_trainer() -> None:
    environ = {"SBATCH_PARTITION": "gpu", "SBATCH_EXCLUSIVE": "", "SBATCH_TIMELIMIT": "carried by sbatch itself"}
    assert words_of(from_environment(environ)) == ["--exclusive", "--partition=gpu"]


@pytest.mark.parametrize(
    ("text", "size"), [("4000", 4000), ("16G", 16384), ("16GB", 16384), ("512k", 0.5), ("1t", 1048576), ("x", None)]
)
def test_memory_sizes(text: str, size: float | None) -> None:
    assert megabytes(text) == size


def test_memory_is_written_rounded_up() -> None:
    assert [memory_words(16384), memory_words(1500.2), memory_words(0.5)] == ["16G", "1501M", "1M"]
