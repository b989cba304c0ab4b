"""Options of the commands that read the cluster again and again, and serve what they saw: `exporter` and `serve`."""

from __future__ import annotations

import argparse

from hetstream.base.errors import ConfigError, UsageError
from hetstream.mpi_dataworkers.process.config import metrics_address
from hetstream.slurm_plugin.cli.cluster_source import add_fresh_argument, cluster_of
from hetstream.slurm_plugin.cli.output import add_history_argument
from hetstream.slurm_plugin.client.model import Cluster, Snapshot
from hetstream.slurm_plugin.client.read import hidden_by
from hetstream.slurm_plugin.errors import ServeError
from hetstream.slurm_plugin.insight.observation import MIN_INTERVAL_S


def add_watch_arguments(parser: argparse.ArgumentParser, listen: str) -> None:
    """Declare `--listen`, `--public`, `--interval`, `--fresh` and `--history`."""
    parser.add_argument("--listen", metavar="[HOST:]PORT", default=listen, help="where (default %(default)s)")
    add_public_argument(parser)
    parser.add_argument(
        "--interval", metavar="SECONDS", type=float, default=60.0, help="between readings (default %(default)g)"
    )
    add_fresh_argument(parser)
    add_history_argument(parser)


def add_public_argument(parser: argparse.ArgumentParser) -> None:
    """Declare `--public`."""
    parser.add_argument(
        "--public", action="store_true", help="show all that this user sees to everybody who reaches the address"
    )


def refuse_hidden(args: argparse.Namespace, snapshot: Snapshot) -> None:
    """End before anything of a cluster is served, without a password, that Slurm hides from some of its users.

    Raises:
        ServeError: Slurm does, and `--public` is not given.
    """
    hidden = hidden_by(snapshot.config)
    if hidden and not args.public:
        raise ServeError(
            f"{hidden} hides a part of the cluster from some users, and whoever reaches the address would see it: it "
            "is not served. With --public it is"
        )


def address_of(args: argparse.Namespace) -> tuple[str, int]:
    """Host and port of `--listen`; localhost where no host is given.

    Raises:
        UsageError: another form.
    """
    try:
        return metrics_address(args.listen, "--listen")
    except ConfigError as exc:
        raise UsageError(str(exc)) from exc


def interval_of(args: argparse.Namespace) -> float:
    """Return seconds of `--interval`.

    Raises:
        UsageError: shorter than slurmctld should be asked.
    """
    interval_s: float = args.interval
    if not interval_s >= MIN_INTERVAL_S:
        raise UsageError(f"--interval={interval_s:g}: must be at least {MIN_INTERVAL_S:g} seconds")
    return interval_s


def watched_cluster(args: argparse.Namespace) -> Cluster:
    """Return what to read in each interval. A reading of the site daemon counts if it was made within the last two."""
    return cluster_of(args, max_age_s=2 * interval_of(args))
