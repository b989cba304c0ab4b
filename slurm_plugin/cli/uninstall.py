"""`hetstream uninstall`: take away what `hetstream install` placed, and put back what it moved."""

from __future__ import annotations

import argparse

from hetstream.slurm_plugin.cli.install import add_place_arguments, report
from hetstream.slurm_plugin.install.installation import uninstall


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb."""
    parser.description = (
        "Take away what hetstream install placed. A site's own Lua files are byte for byte what they were; "
        "files that were changed since they were placed stay. Refused as long as slurm.conf asks for a hook that would "
        "be gone: without it every sbatch and srun would fail."
    )
    add_place_arguments(parser)
    parser.add_argument("--force", action="store_true", help="remove also hooks that slurm.conf still asks for")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Remove and restore."""
    prefix = args.prefix.absolute()
    actions = uninstall(prefix, dry_run=args.dry_run, force=args.force)
    report("uninstall", actions, [] if actions else [f"nothing is installed below {prefix}"], args)
    return 0
