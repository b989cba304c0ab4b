"""`hetstream completion`, and man pages: shtab and argparse-manpage read the parsers.

A wheel brings both (a hook of the build makes them); `hetstream site install` places them.

Verbs that hand their words on (`sbatch`, `convert`, `migrate`) have no options in argparse's eyes: here they get those
that they take, beside sbatch's own.
"""

from __future__ import annotations

import argparse
import contextlib
import io
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import hetstream
from hetstream.hetjob.convert.directives import OPTIONS, WITH_VALUE
from hetstream.slurm_plugin.cli.commands import declaration_of

# Of each shell: where its completions lie below /usr or another prefix.
SHELLS = {
    "bash": "share/bash-completion/completions/hetstream",
    "zsh": "share/zsh/site-functions/_hetstream",
    "fish": "share/fish/vendor_completions.d/hetstream.fish",
}
# Options of these verbs that are not a job's: name, and what stands for its value.
HANDED_ON: dict[str, dict[str, str]] = {
    "sbatch": {"dry-run": ""},
    "convert": {"json": "", "auto": ""},
    "migrate": {"dry-run": "", "json": "", "no-wait": "", "timeout": "S"},
}
EPILOG = """\
examples:
  eval "$(hetstream completion bash)"                              in ~/.bashrc
  hetstream completion zsh > ~/.zfunc/_hetstream                   with fpath+=~/.zfunc before compinit in ~/.zshrc
  hetstream completion fish > ~/.config/fish/completions/hetstream.fish
"""


def add_completion_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb."""
    parser.description = "Print the completion of hetstream's verbs and options for a shell."
    parser.epilog = EPILOG
    parser.add_argument("shell", choices=SHELLS, help="which one")
    parser.set_defaults(run=run_completion)


def run_completion(args: argparse.Namespace) -> int:
    """Print it."""
    print(completion(args.shell))
    return 0


def completion(shell: str) -> str:
    """Return what a shell loads."""
    import shtab

    parser = documented_parser()
    for sub in _parsers(parser):
        for action in sub._actions:
            is_path = action.type is Path or action.nargs == argparse.REMAINDER
            if is_path and action.choices is None:
                place = shtab.DIRECTORY if action.metavar == "DIR" else shtab.FILE
                action.complete = place  # type: ignore[attr-defined]
    return str(shtab.complete(parser, shell))


def installed_man_pages() -> dict[str, str]:
    """Return those that the wheel has brought: roff text by file name. None in an editable install."""
    files = metadata.files("hetstream") or ()
    return {file.name: Path(file.locate()).read_text() for file in files if file.parent.name == "man1"}


def man_pages(version: str = hetstream.__version__) -> dict[str, str]:
    """Return the manual of the command and of each of its verbs, in section 1: roff text by file name.

    Raises:
        ModuleNotFoundError: argparse-manpage is not installed.
    """
    from argparse_manpage.manpage import Manpage

    from hetstream.slurm_plugin.cli import VERBS, build_parser

    verbs = _subparsers(documented_parser()).choices
    pages = {}
    for verb in ("", *VERBS):
        # The command's own page names its verbs, and leaves their options to their pages.
        page = Manpage(verbs[verb] if verb else build_parser(""))
        page.prog = f"hetstream-{verb}" if verb else "hetstream"
        page.date, page.source, page.manual = "", f"hetstream {version}", "User Commands"
        page.description = VERBS[verb] if verb else "CPU data workers for GPU jobs on Slurm"
        # Ragged right: between options as long as these there is nothing to stretch.
        pages[f"{page.prog}.1"] = str(page).replace("\n.SH NAME", "\n.ad l\n.SH NAME", 1)
    return pages


def documented_parser() -> argparse.ArgumentParser:
    """Return the parser of the command, with all options of all verbs."""
    from hetstream.slurm_plugin.cli import VERBS, build_parser

    parser = build_parser()
    for verb, own in HANDED_ON.items():
        sub = argparse.ArgumentParser(
            prog=f"hetstream {verb}",
            description=VERBS[verb],
            epilog=_own_help(verb),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        for name, option in OPTIONS.items():
            _add(sub, name, option.metavar if name in WITH_VALUE else "", option.meaning)
        for name, metavar in own.items():
            _add(sub, name, metavar, "see below")
        sub.add_argument("words", nargs=argparse.REMAINDER, metavar="JOBID" if verb == "migrate" else "SCRIPT")
        _subparsers(parser).choices[verb] = sub
    return parser


def _add(parser: argparse.ArgumentParser, name: str, metavar: str, meaning: str) -> None:
    text = meaning.replace("%", "%%")
    if metavar:
        parser.add_argument(f"--{name}", metavar=metavar, help=text)
    else:
        parser.add_argument(f"--{name}", action="store_true", help=text)


def _own_help(verb: str) -> str:
    """What a verb that reads its own words says to --help."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        parser = argparse.ArgumentParser()
        declaration_of(verb)(parser)
        parser.get_default("run")(argparse.Namespace(words=["--help"]))
    return out.getvalue()


def _subparsers(parser: argparse.ArgumentParser) -> argparse._SubParsersAction[argparse.ArgumentParser]:
    return next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))


def _parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """A parser, and those of its verbs and their actions."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for sub in action.choices.values():
                yield from _parsers(sub)
