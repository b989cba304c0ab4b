"""`hetstream exporter`: the cluster's figures for Prometheus."""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from pathlib import Path

from hetstream.slurm_plugin.cli.watching import (
    add_watch_arguments,
    address_of,
    interval_of,
    refuse_hidden,
    watched_cluster,
)
from hetstream.slurm_plugin.insight.history import History
from hetstream.slurm_plugin.insight.monitor import Monitor
from hetstream.slurm_plugin.insight.wait_shares import SharesAside

EPILOG = """\
It reads the cluster once in each interval, however often it is scraped. Where the site has a daemon, it takes the last
reading of that, unless --fresh is given. When slurmctld does not answer, hetstream_up is 0, hetstream_read_errors_total
counts it by its kind, the reason is in the log, and the next interval tries again.
The metrics are at /metrics, in Prometheus's format or OpenMetrics's. There is no password: listen at other addresses
than localhost only behind a firewall. Where Slurm hides jobs, nodes, partitions or reservations from some users
(PrivateData, MCSPlugin) it ends, unless --public is given.

examples:
  hetstream exporter
  hetstream exporter --listen 0.0.0.0:9418 --history /var/lib/hetstream/history.sqlite
  hetstream exporter --print             one reading, for node_exporter's textfile collector
  hetstream exporter --dashboard         a dashboard to import into Grafana

exit codes:
  0  done (--print, --dashboard)
  1  the address cannot be listened on, the history cannot be used, or Slurm hides what would be served; with --print:
     Slurm could not be asked
  2  the command line is wrong
"""
DASHBOARD = Path(__file__).parents[1] / "dashboard.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb."""
    parser.description = (
        "Serve the cluster's allocation, fragmentation and pending causes to Prometheus. Changes nothing."
    )
    parser.epilog = EPILOG
    add_watch_arguments(parser, "127.0.0.1:9418")
    once = parser.add_mutually_exclusive_group()
    once.add_argument("--print", action="store_true", help="print the metrics of one reading and end")
    once.add_argument("--dashboard", action="store_true", help="print a Grafana dashboard of these metrics and end")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal, or print once."""
    if args.dashboard:
        print(DASHBOARD.read_text(), end="")
        return 0
    (host, port), interval_s = address_of(args), interval_of(args)
    # Only here: prometheus_client is an extra.
    from hetstream.slurm_plugin.render.metrics import ClusterCollector, MetricsServer

    with ExitStack() as undo:
        history = undo.enter_context(History(Path(args.history))) if args.history else None
        monitor = Monitor(watched_cluster(args), SharesAside(), history)
        collector = ClusterCollector()
        if args.print:
            collector.reading = monitor.read()
            print(collector.text(), end="")
            return 0 if collector.reading.observation else 1
        server = MetricsServer(host, port, collector)
        undo.callback(server.close)
        print(f"metrics at {server.url}", file=sys.stderr, flush=True)
        for reading in monitor.readings(interval_s):
            if reading.observation:
                refuse_hidden(args, reading.observation.snapshot)
            collector.reading = reading
    return 0
