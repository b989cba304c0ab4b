"""`hetstream gpu ACTION`: several jobs on one GPU. One file for each action."""

from __future__ import annotations

import argparse

from hetstream.slurm_plugin.cli.commands import add_modules

# In the order of the help text; each is a module `gpu_NAME` beside this one, but `resume` is one with `suspend`.
_ACTIONS = {
    "coordinator": "coordinate the jobs on this node's GPUs",
    "run": "run a training program that shares its GPU",
    "top": "who is on this node's GPUs, and how they fare",
    "exporter": "the same for Prometheus",
    "report": "tell the site daemon of this node's GPUs, for the packer",
    "suspend": "take a process off its GPU, with its memory: the last resort",
    "resume": "put a process back that was taken off its GPU",
    "emulate": "make an emulated GPU, to try all this on a machine without one",
}


def add_arguments(parser: argparse.ArgumentParser, only: str | None) -> None:
    """Declare the verb with its actions, of which one may be called."""
    parser.description = "Several jobs on one GPU: a guaranteed one, and opportunistic ones that use what it leaves."
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    modules = {action: f"gpu_{action}" for action in _ACTIONS} | {"resume": "gpu_suspend"}
    add_modules(actions, _ACTIONS, modules, only)
