"""How the parsers of verbs and of their actions are made: each is declared by `add_VERB_arguments` in a file of this
folder."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Mapping
from typing import TypeAlias

# What add_subparsers returns; a text, as argparse's class has no type parameters when the program runs.
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
# Which words of these verbs are options is sbatch's rule, not argparse's: it hands all of them over.
_HANDED_OVER = ("sbatch", "convert", "filter", "migrate")
# Each action of these verbs has a declaration of its own.
_IN_MODULES = ("ckpt", "gpu")
# Verbs, and actions by VERB_ACTION, that share a file. Others have one of their name.
_FILES = {
    verb: file
    for file, verbs in {
        "submit": ("sbatch", "convert"),
        "job": ("top", "events", "logs", "summary", "clean"),
        "service": ("dispatcher", "worker"),
        "cluster": ("frag", "jobs", "advise"),
        "report": ("serve", "exporter"),
        "ckpt": ("ckpt_ls", "ckpt_gc", "ckpt_start", "ckpt_writer"),
        "gpu": ("gpu_coordinator", "gpu_run", "gpu_suspend", "gpu_top"),
        "gpu_report": ("gpu_exporter",),
        "packer": ("opp",),
        "install": ("uninstall", "doctor"),
    }.items()
    for verb in verbs
}


def add_command(commands: Commands, name: str, summary: str, module: str, action: str | None = None) -> None:
    """Declare a verb, or an action with a module of its own.

    Args:
        commands: what it is added to.
        name: what the user types.
        summary: its line in the list.
        module: the verb, or VERB_ACTION. Its `add_..._arguments(parser)` says what the command takes, and sets `run`.
        action: of a verb, the one that is called; see `add_modules`.
    """
    if module in _HANDED_OVER:
        parser = commands.add_parser(name, help=summary, prefix_chars="\0", add_help=False)
    else:
        parser = commands.add_parser(name, help=summary)
    declare = declaration_of(module)
    if module in _IN_MODULES:
        declare(parser, action)
    else:
        declare(parser)
    if parser.epilog:
        parser.formatter_class = argparse.RawDescriptionHelpFormatter


def declaration_of(module: str) -> Callable[..., None]:
    """The `add_..._arguments` of a verb, or of an action by VERB_ACTION."""
    file = importlib.import_module(f"hetstream.slurm_plugin.cli.{_FILES.get(module, module)}")
    declare: Callable[..., None] = getattr(file, f"add_{module}_arguments")
    return declare


def add_modules(actions: Commands, texts: Mapping[str, str], modules: Mapping[str, str], only: str | None) -> None:
    """Declare the actions of a verb that have modules of their own.

    Args:
        actions: what they are added to.
        texts: name -> its line in the list.
        modules: name -> VERB_ACTION of what declares it.
        only: the one that is called: it alone is imported, the others are lines of the list. Another word: all are.
    """
    for name, text in texts.items():
        if only in texts and name != only:
            actions.add_parser(name, help=text)
        else:
            add_command(actions, name, text, modules[name])


def add_action(
    actions: Commands, name: str, text: str, run: Callable[[argparse.Namespace], int]
) -> argparse.ArgumentParser:
    """Declare an action that is a function of its verb's module."""
    parser = actions.add_parser(name, help=text, description=text)
    parser.set_defaults(run=run)
    return parser
