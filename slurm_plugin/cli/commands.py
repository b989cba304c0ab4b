"""How the parsers of verbs and of their actions are made. Most have a module beside this one, with `add_arguments`."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Mapping
from typing import TypeAlias

# What add_subparsers returns; a text, as argparse's class has no type parameters when the program runs.
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
# Which words of these verbs are options is sbatch's rule, not argparse's: it hands all of them over.
_HANDED_OVER = ("sbatch", "convert", "filter", "migrate")
# Each action of these verbs has a module of its own.
_IN_MODULES = ("ckpt", "gpu")


def add_command(commands: Commands, name: str, summary: str, module: str, action: str | None = None) -> None:
    """Declare a verb, or an action with a module of its own.

    Args:
        commands: what it is added to.
        name: what the user types.
        summary: its line in the list.
        module: of this folder. Its `add_arguments(parser)` says what the command is and takes, and sets `run`.
        action: of a verb, the one that is called; see `add_modules`.
    """
    if module in _HANDED_OVER:
        parser = commands.add_parser(name, help=summary, prefix_chars="\0", add_help=False)
    else:
        parser = commands.add_parser(name, help=summary)
    declare = importlib.import_module(f"hetstream.slurm_plugin.cli.{module}").add_arguments
    if module in _IN_MODULES:
        declare(parser, action)
    else:
        declare(parser)
    if parser.epilog:
        parser.formatter_class = argparse.RawDescriptionHelpFormatter


def add_modules(actions: Commands, texts: Mapping[str, str], modules: Mapping[str, str], only: str | None) -> None:
    """Declare the actions of a verb that have modules of their own.

    Args:
        actions: what they are added to.
        texts: name -> its line in the list.
        modules: name -> its module.
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
