"""How the parsers of verbs and of their actions are made. Most have a module beside this one, with `add_arguments`."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from typing import TypeAlias

# What add_subparsers returns; a text, as argparse's class has no type parameters when the program runs.
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
# Which words of these verbs are options is sbatch's rule, not argparse's: it hands all of them over.
_HANDED_OVER = ("sbatch", "convert", "filter", "migrate")


def add_command(commands: Commands, name: str, summary: str, module: str) -> None:
    """Declare a verb, or an action with a module of its own.

    Args:
        commands: what it is added to.
        name: what the user types.
        summary: its line in the list.
        module: of this folder. Its `add_arguments(parser)` says what the command is and takes, and sets `run`.
    """
    if module in _HANDED_OVER:
        parser = commands.add_parser(name, help=summary, prefix_chars="\0", add_help=False)
    else:
        parser = commands.add_parser(name, help=summary)
    importlib.import_module(f"hetstream.slurm_plugin.cli.{module}").add_arguments(parser)
    if parser.epilog:
        parser.formatter_class = argparse.RawDescriptionHelpFormatter


def add_action(
    actions: Commands, name: str, text: str, run: Callable[[argparse.Namespace], int]
) -> argparse.ArgumentParser:
    """Declare an action that is a function of its verb's module."""
    parser = actions.add_parser(name, help=text, description=text)
    parser.set_defaults(run=run)
    return parser
