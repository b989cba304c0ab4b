"""How the parsers of verbs and of their actions are made: each is declared by `add_VERB_arguments` in a file of this
folder."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from typing import Any, TypeAlias

# What add_subparsers returns; a text, as argparse's class has no type parameters when the program runs.
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
# Which words of these verbs are options is sbatch's rule, not argparse's: it hands all of them over.
_HANDED_OVER = ("sbatch", "convert", "filter", "migrate")
# Verbs that consist of actions. Of each action: its line in the list, and the module that declares it.
ACTIONS: dict[str, tuple[str, dict[str, tuple[str, str]]]] = {
    "ckpt": (
        "Flash checkpoints: list, check, convert, clean up, and write them to disk.",
        {
            "ls": ("list checkpoints on disk, and what this host's memory holds", "ckpt_ls"),
            "verify": ("read checkpoints and compare their checksums", "ckpt_verify"),
            "gc": ("remove what dead jobs left in memory, and unfinished checkpoints", "ckpt_gc"),
            "convert": ("turn checkpoints into other formats, and others into checkpoints", "ckpt_convert"),
            "start": ("start the checkpoint writers of this job (for batch scripts)", "ckpt_start"),
        },
    ),
    "site": (
        "What an administrator installs and runs once for the whole cluster.",
        {
            "install": ("place Lua plugins, systemd units, man pages and completion", "install"),
            "uninstall": ("take away what install placed", "uninstall"),
            "daemon": ("run the site daemon: keep history, divide data workers", "daemon"),
            "status": ("ask the running site daemon what it knows", "daemon_status"),
            "policy": ("show, explain or set how data workers are divided among jobs", "policy"),
        },
    ),
    "gpu": (
        "Several jobs on one GPU: a guaranteed one, and opportunistic ones that use what it leaves.",
        {
            "jobs": ("show opportunistic jobs, and why they wait", "gpu_jobs"),
            "top": ("show who is on this node's GPUs, and how they fare", "gpu_top"),
            "run": ("run a training program that shares its GPU", "gpu_run"),
            "pack": ("place opportunistic jobs onto GPUs in use", "gpu_pack"),
            "suspend": ("take a process off its GPU, with its memory: the last resort", "gpu_suspend"),
            "resume": ("put a process back that was taken off its GPU", "gpu_suspend"),
            "exporter": ("serve what `gpu top` shows to Prometheus", "gpu_exporter"),
        },
    ),
    "internal": (
        "What other parts of hetstream start: job scripts, systemd units, Slurm's plugins. For tests, also by hand.",
        {
            "dispatcher": ("run the dispatcher of a job", "dispatcher"),
            "worker": ("run data workers", "worker"),
            "embedding-server": ("keep rows of embedding tables for trainers", "embedding_server"),
            "master": ("run the job master (called by converted scripts)", "master"),
            "filter": ("plan the conversion of an sbatch (called by the cli_filter plugin)", "filter"),
            "writer": ("write a job's generations from memory to disk until the job ends", "ckpt_writer"),
            "coordinator": ("coordinate the jobs on this node's GPUs", "gpu_coordinator"),
            "gpu-report": ("tell the site daemon of this node's GPUs, for the packer", "gpu_report"),
            "gpu-emulate": ("make an emulated GPU, to try all this on a machine without one", "gpu_emulate"),
        },
    ),
}
# Verbs, and actions by their modules, that share a file. Others have one of their name.
_FILES = {
    module: file
    for file, modules in {
        "submit": ("sbatch", "convert"),
        "service": ("dispatcher", "worker", "embedding_server"),
        "cluster": ("frag", "jobs", "advise"),
        "report": ("serve", "exporter"),
        "ckpt": ("ckpt_ls", "ckpt_verify", "ckpt_gc", "ckpt_convert", "ckpt_start", "ckpt_writer"),
        "gpu": ("gpu_coordinator", "gpu_run", "gpu_suspend", "gpu_top", "gpu_emulate"),
        "gpu_report": ("gpu_exporter",),
        "packer": ("gpu_jobs", "gpu_pack"),
        "install": ("uninstall", "doctor"),
        "daemon": ("daemon_status", "policy"),
    }.items()
    for module in modules
}


def add_command(commands: Commands, name: str, summary: str, module: str, action: str | None = None) -> None:
    """Declare a verb, or an action of one.

    Args:
        commands: what it is added to.
        name: what the user types.
        summary: its line in the list; empty: it is not listed.
        module: the verb, or what `ACTIONS` says. Its `add_..._arguments(parser)` says what the command takes, and sets
            `run`.
        action: of a verb that consists of actions, the one that is called: it alone is imported, the others are lines
            of the list. Another word: all are.
    """
    listed: dict[str, Any] = {"help": summary} if summary else {}
    if module in _HANDED_OVER:
        parser = commands.add_parser(name, prefix_chars="\0", add_help=False, **listed)
    else:
        parser = commands.add_parser(name, **listed)
    if module in ACTIONS:
        parser.description, actions = ACTIONS[module]
        subparsers = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
        for word, (text, declared_by) in actions.items():
            if action in actions and word != action:
                subparsers.add_parser(word, help=text)
            else:
                add_command(subparsers, word, text, declared_by)
    else:
        declaration_of(module)(parser)
    parser.set_defaults(of_verb=parser)
    if parser.epilog:
        parser.formatter_class = argparse.RawDescriptionHelpFormatter


def declaration_of(module: str) -> Callable[[argparse.ArgumentParser], None]:
    """Return the `add_..._arguments` of a verb, or of an action by its module."""
    file = importlib.import_module(f"hetstream.slurm_plugin.cli.{_FILES.get(module, module)}")
    declare: Callable[[argparse.ArgumentParser], None] = getattr(file, f"add_{module}_arguments")
    return declare


def add_action(
    actions: Commands, name: str, text: str, run: Callable[[argparse.Namespace], int]
) -> argparse.ArgumentParser:
    """Declare an action that is a function of its verb's module."""
    parser = actions.add_parser(name, help=text, description=text)
    parser.set_defaults(run=run)
    return parser
