"""Completion for bash, zsh and fish: what real shells offer, beside the options that the parsers take."""

from __future__ import annotations

import argparse
import io
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from hetstream.checkpoint.convert import dcp
from hetstream.hetjob.convert.directives import OPTIONS
from hetstream.slurm_plugin.cli import VERBS, build_parser, ckpt, main
from hetstream.slurm_plugin.cli.completion import HANDED_ON, SHELLS, completion
from hetstream.slurm_plugin.cli.migrate import _OWN as OF_MIGRATE
from tests.programs import needs

Complete = Callable[..., set[str]]
# What readline does: the function that is registered, with the words so far.
BASH = """\
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
eval "$(complete -p hetstream | sed 's/.* -F \\([^ ]*\\) .*/function=\\1/')"
$function hetstream "${COMP_WORDS[$COMP_CWORD]}" "${COMP_WORDS[$((COMP_CWORD - 1))]}"
echo "${COMPREPLY[@]}"
"""
# A terminal, a shell in it that loads completions from a folder, and the tab key twice.
ZSH = """\
zmodload zsh/zpty
zpty shell zsh -f -i
zpty -w shell "PS1=; fpath=($1 \\$fpath); autoload -Uz compinit; compinit -u -D; print -r -- RE''ADY"
zpty -r -m shell before '*READY*'
zpty -w -n shell "$2"$'\\t\\t'
zpty -r -m shell out "*$3*" && print -r -- $out
"""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the script of each shell, named as its own folders have it."""
    folder = tmp_path_factory.mktemp("completion")
    for shell, path in SHELLS.items():
        with redirect_stdout(io.StringIO()) as out:
            assert main(["completion", shell]) == 0
        (folder / Path(path).name).write_text(out.getvalue())
    return folder


@pytest.fixture(scope="module")
def complete(scripts: Path) -> Complete:
    def run(*words: str) -> set[str]:
        argv = ["bash", "-c", BASH, "bash", str(scripts / "hetstream"), "hetstream", *words]
        return set(subprocess.run(argv, capture_output=True, text=True, check=True, timeout=30).stdout.split())

    return run


def commands(
    parser: argparse.ArgumentParser, words: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], set[str]]]:
    """Each listed verb and action, with the long options that it takes."""
    nested = next((action for action in parser._actions if isinstance(action, argparse._SubParsersAction)), None)
    if nested is None:
        options = {
            option for action in parser._actions if action.help != argparse.SUPPRESS for option in action.option_strings
        }
        yield words, {option for option in options if option.startswith("--")}
    else:
        for listed in nested._choices_actions:
            yield from commands(nested.choices[listed.dest], (*words, listed.dest))


@needs("bash")
def test_every_command_is_offered_the_options_that_it_takes_and_no_other(complete: Complete) -> None:
    walked = dict(commands(build_parser()))
    assert {words[0] for words in walked} == set(VERBS)
    for words, options in walked.items():
        verb = words[0]
        if verb in HANDED_ON:
            # Their words are read by sbatch's rules: its parser takes nothing.
            options = {f"--{name}" for name in (*OPTIONS, *HANDED_ON[verb], "help")}
        assert complete(*words, "--") == options, words


def test_what_verbs_take_beside_a_job_s_options_is_what_they_read() -> None:
    assert {*HANDED_ON["migrate"], "help"} == set(OF_MIGRATE)


def test_without_torch_there_is_the_same_completion() -> None:
    code = "import sys; sys.modules['torch'] = None; from hetstream.slurm_plugin.cli import main; main(sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, "-c", code, "completion", "bash"], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == completion("bash") + "\n"
    assert ckpt.KINDS == dcp.KINDS


@needs("bash")
def test_verbs_and_actions_are_completed_and_internal_ones_are_not(complete: Complete) -> None:
    assert complete("con") == {"convert"}
    assert complete("sbatch", "--data-worker-pa") == {"--data-worker-partition"}
    assert {"jobs", "run", "suspend"} <= complete("gpu", "")
    assert complete("int") == complete("compl") == set()


@needs("zsh")
def test_zsh_finds_it_by_its_name_and_shows_what_options_mean(scripts: Path) -> None:
    argv = ["zsh", "-f", "-c", ZSH, "zsh", str(scripts), "hetstream why --", "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert re.search(r"--fresh +-- ask slurmctld", done.stdout), done.stdout + done.stderr


@pytest.mark.slow
@needs("fish")
def test_fish_completes_the_same(scripts: Path) -> None:
    script = f"source {scripts / 'hetstream.fish'}; complete -C 'hetstream why --'; complete -C 'hetstream gpu '"
    done = subprocess.run(["fish", "--no-config", "-c", script], capture_output=True, text=True, timeout=60, check=True)
    offered = {line.split("\t")[0] for line in done.stdout.splitlines()}
    assert {"--help", "--fresh", "--json", "--csv", "jobs", "suspend"} <= offered
    assert "--exclusive" not in offered
