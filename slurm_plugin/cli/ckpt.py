"""`hetstream ckpt ACTION`: checkpoints on disk and in memory, and the writers of a job. One file for each action."""

from __future__ import annotations

import argparse

from hetstream.slurm_plugin.cli.commands import add_modules

# In the order of the help text; each is a module `ckpt_NAME` beside this one.
_ACTIONS = {
    "ls": "list checkpoints on disk, and what this host's memory holds",
    "verify": "read checkpoints and compare their checksums",
    "gc": "remove what dead jobs left in memory, and unfinished checkpoints",
    "convert": "turn checkpoints into other formats, and others into checkpoints",
    "writer": "write a job's generations from memory to disk until the job ends",
    "start": "start the checkpoint writers of this job (for batch scripts)",
}


def add_arguments(parser: argparse.ArgumentParser, only: str | None) -> None:
    """Declare the verb with its actions, of which one may be called."""
    parser.description = "Flash checkpoints: list, check, clean up, and write them to disk."
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    add_modules(actions, _ACTIONS, {action: f"ckpt_{action}" for action in _ACTIONS}, only)
