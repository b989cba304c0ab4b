"""How the commands for admins print: `--json`, `--csv`, colours where they are wanted, notes on stderr."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from hetstream.base.errors import UsageError
from hetstream.base.text import printable
from hetstream.slurm_plugin.cli.screen import say, wants_color, width_of_output
from hetstream.slurm_plugin.client.accounting import Usage, has_accounting
from hetstream.slurm_plugin.client.model import Snapshot, names_of
from hetstream.slurm_plugin.client.read import sees_everything
from hetstream.slurm_plugin.client.slurm_units import expand
from hetstream.slurm_plugin.insight.last_reading import SOURCE
from hetstream.slurm_plugin.render.tables import Report, as_csv, as_json, as_table

EXIT_CODES = """\
exit codes:
  0  done
  1  Slurm could not be asked, or did not know the job
  2  the command line is wrong
"""


def add_output_arguments(parser: argparse.ArgumentParser, csv: bool = False) -> None:
    """Declare `--json`, and of a verb whose first table somebody may want in a spreadsheet `--csv`."""
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--json", action="store_true", help="print one JSON document; meta.version says which keys to expect"
    )
    if csv:
        form.add_argument("--csv", action="store_true", help="print the first table as comma-separated values")
    else:
        parser.set_defaults(csv=False)


def add_node_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options that choose nodes."""
    parser.add_argument("-p", "--partition", metavar="NAMES", help="only these partitions, with commas between them")
    parser.add_argument("-w", "--nodelist", metavar="HOSTLIST", help="only these nodes, such as gpu[0-7]")


def add_history_argument(parser: argparse.ArgumentParser) -> None:
    """Declare `--history`."""
    parser.add_argument(
        "--history", metavar="FILE", help="SQLite file to which each reading is added; made where it does not exist"
    )


def emit(args: argparse.Namespace, report: Report) -> None:
    """Print a report the way the arguments ask for; where Slurm hides something from this user, it says so."""
    hidden, without_nodes = str(report.meta.get("hidden", "")), bool(report.meta.get("without_nodes"))
    report = replace(report, notes=(*hidden_notes(hidden, without_nodes), *report.notes))
    if args.json:
        print(as_json(report))
        return
    if args.csv:
        print(as_csv(report), end="")
    else:
        print("\n".join(as_table(report, wants_color(), width_of_output())))
    sys.stdout.flush()
    for note in [*_source_notes(report.meta), *report.notes]:
        say(printable(note))


def hidden_notes(hidden: str, without_nodes: bool = False) -> list[str]:
    """Return the line that figures are not of all; none where they are.

    Args:
        hidden, without_nodes: see `Snapshot`.
    """
    if without_nodes:
        return [f"{hidden}: Slurm tells this user of no node: where there is room, and what a job lacks, is not known"]
    return [f"{hidden}: all figures are of what this user may see, and there may be more"] if hidden else []


def accounting_notes(usages: Iterable[Usage], snapshot: Snapshot) -> list[str]:
    """Return the line that sacct may not have shown all jobs; none where it did.

    What it hides is up to slurmdbd.conf, which has a PrivateData of its own that users of some releases are not told.
    """
    own = names_of(os.geteuid())
    if not has_accounting(snapshot) or any(usage.user not in own for usage in usages):
        return []
    if sees_everything(snapshot.config, os.environ):
        return []
    return ["sacct shows no job of another user: there was none, or slurmdbd.conf hides them (PrivateData=jobs)"]


def _source_notes(meta: Mapping[str, object]) -> list[str]:
    """How old the reading is, where it is not of this moment."""
    taken_s = meta.get("taken_s")
    if meta.get("source") != SOURCE or not isinstance(taken_s, float):
        return []
    age_s = max(0.0, time.time() - taken_s)
    return [f"this is what the site daemon read {age_s:.0f} s ago; --fresh asks slurmctld now"]


def meta_of(verb: str, snapshot: Snapshot) -> dict[str, object]:
    """Return where a report comes from."""
    return {
        "verb": verb,
        "slurm": snapshot.version,
        "cluster": snapshot.config.get("ClusterName", ""),
        "source": snapshot.source,
        "taken_s": round(snapshot.taken_s, 3),
        "hidden": snapshot.hidden,
        "without_nodes": snapshot.without_nodes,
    }


def chosen_partitions(args: argparse.Namespace, snapshot: Snapshot) -> Collection[str] | None:
    """Return the partitions that `-p` names; None for all.

    Raises:
        UsageError: one does not exist.
    """
    if args.partition is None:
        return None
    names = set(args.partition.split(","))
    known = {partition.name for partition in snapshot.partitions}
    if names - known:
        raise UsageError(
            f"--partition={args.partition}: no partition {', '.join(sorted(names - known))}. "
            f"There are: {', '.join(sorted(known))}"
        )
    return names


def chosen_nodes(args: argparse.Namespace, snapshot: Snapshot) -> Collection[str] | None:
    """Return the nodes that `-w` names; None for all.

    Raises:
        UsageError: it is no hostlist, or names a node that does not exist.
    """
    if args.nodelist is None:
        return None
    try:
        names = set(expand(args.nodelist))
    except ValueError as exc:
        raise UsageError(f"--nodelist: {exc}") from exc
    unknown = names - {node.name for node in snapshot.nodes}
    if unknown:
        raise UsageError(f"--nodelist={args.nodelist}: no node {', '.join(sorted(unknown))}. Check: sinfo -N")
    return names
