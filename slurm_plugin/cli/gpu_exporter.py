"""`hetstream gpu exporter`: this node's shared GPUs for Prometheus."""

from __future__ import annotations

import argparse
import sys

from hetstream.base.signals import sleep_in_parts
from hetstream.hetjob.gpu.config import DEFAULT_SOCKET, coordinator_uid_of
from hetstream.slurm_plugin.cli.watching import add_public_argument, address_of, interval_of

EPILOG = """\
It asks the coordinator once in each interval, however often it is scraped. When that does not answer,
hetstream_gpu_up is 0. Run it as root or as the coordinator's user: others see their own processes alone.
The metrics are at /metrics. There is no password: listen at other addresses than localhost only behind a firewall. So
jobs and their processes are shown with --public alone.

examples:
  hetstream gpu exporter --public --listen 0.0.0.0:9419
  hetstream gpu exporter --print             one reading, for node_exporter's textfile collector

exit codes:
  0  done (--print)
  1  the address cannot be listened on; with --print: no coordinator answers
  2  the command line is wrong
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the action."""
    parser.description = "Serve who is on this node's shared GPUs, and how they fare, to Prometheus. Changes nothing."
    parser.epilog = EPILOG
    parser.add_argument("--socket", default=DEFAULT_SOCKET, metavar="PATH", help=f"(default {DEFAULT_SOCKET})")
    parser.add_argument("--listen", metavar="[HOST:]PORT", default="127.0.0.1:9419", help="where (default %(default)s)")
    add_public_argument(parser)
    parser.add_argument(
        "--interval", metavar="SECONDS", type=float, default=15.0, help="between readings (default %(default)g)"
    )
    parser.add_argument("--print", action="store_true", help="print the metrics of one reading and end")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal, or print once."""
    (host, port), interval_s = address_of(args), interval_of(args)
    coordinator_uid = coordinator_uid_of()
    # Only here: prometheus_client is an extra.
    from hetstream.slurm_plugin.render.gpu_metrics import GpuCollector
    from hetstream.slurm_plugin.render.metrics import MetricsServer

    collector = GpuCollector(args.socket, coordinator_uid, public=args.public or args.print)
    collector.read()
    if args.print:
        print(collector.text(), end="")
        return 0 if collector.reading.table else 1
    server = MetricsServer(host, port, collector)
    print(f"metrics at {server.url}", file=sys.stderr, flush=True)
    try:
        while True:
            sleep_in_parts(interval_s)
            collector.read()
    finally:
        server.close()
