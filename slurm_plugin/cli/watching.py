"""Options of the commands that read the cluster again and again, and serve what they saw: `exporter` and `serve`."""

from __future__ import annotations

import argparse

from hetstream.base.errors import ConfigError, UsageError
from hetstream.mpi_dataworkers.config import metrics_address
from hetstream.slurm_plugin.cli.output import add_history_argument
from hetstream.slurm_plugin.insight.monitor import MIN_INTERVAL_S


def add_watch_arguments(parser: argparse.ArgumentParser, listen: str) -> None:
    """Declare `--listen`, `--interval` and `--history`."""
    parser.add_argument("--listen", metavar="[HOST:]PORT", default=listen, help="where (default %(default)s)")
    parser.add_argument(
        "--interval", metavar="SECONDS", type=float, default=60.0, help="between readings (default %(default)g)"
    )
    add_history_argument(parser)


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
    """Seconds of `--interval`.

    Raises:
        UsageError: shorter than slurmctld should be asked.
    """
    interval_s: float = args.interval
    if not interval_s >= MIN_INTERVAL_S:
        raise UsageError(f"--interval={interval_s:g}: must be at least {MIN_INTERVAL_S:g} seconds")
    return interval_s
