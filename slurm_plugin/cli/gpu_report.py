"""`hetstream internal gpu-report` tells the site daemon of this node's shared GPUs, `gpu exporter` Prometheus."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import sys
import threading
from pathlib import Path

from hetstream.base.errors import HetstreamError, UsageError
from hetstream.base.process import sleep_in_parts
from hetstream.hetjob.gpu.config import DEFAULT_SOCKET, coordinator_uid_of
from hetstream.hetjob.site.client import SiteSettings, ask
from hetstream.hetjob.site.messages import Answer, RefuseGpus, TakeGpus
from hetstream.hetjob.site.site_file import site_value
from hetstream.slurm_plugin.cli.daemon import add_address, settings_of
from hetstream.slurm_plugin.cli.watching import add_public_argument, address_of, interval_of
from hetstream.slurm_plugin.coordinator.table import GpuWatch, look, parse_numbers

EPILOG = """\
It asks the coordinator each second, and tells the site daemon every 5 s how much of each GPU is in use, how much memory
the guaranteed job leaves, and who does not keep to his orders. Run it as the coordinator's user on each node, and name
that user in `hetstream site daemon --gpu-reporters`. It changes nothing; without it nobody is placed on this node.

examples:
  hetstream internal gpu-report
  hetstream internal gpu-report --gpus "0=GPU-1a2b 1=GPU-3c4d" --node g3

exit codes:
  0  it was stopped; --once: told
  1  --once: the coordinator or the daemon did not answer, or the daemon refused
  2  the command line is wrong
"""
_LOOK_S = 1.0
_TELL_S = 5.0
_DRIVER = Path("/proc/driver/nvidia/gpus")
_log = logging.getLogger(__name__)


def add_gpu_report_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the action."""
    parser.description = "Tell the site daemon how much of this node's shared GPUs is in use, until it is stopped."
    parser.epilog = EPILOG
    parser.add_argument("--socket", default=DEFAULT_SOCKET, metavar="PATH", help=f"(default {DEFAULT_SOCKET})")
    parser.add_argument("--node", metavar="NAME", help="Slurm's name of this node (default: the host's short name)")
    parser.add_argument(
        "--gpus", metavar="LIST", help="numbers and names of GPUs (default: HETSTREAM_GPUS, else the NVIDIA driver's)"
    )
    add_address(parser)
    parser.add_argument("--once", action="store_true", help="tell once, and end")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Tell until a signal comes."""
    settings, numbers = settings_of(args), _numbers(args.gpus)
    if not numbers:
        raise UsageError('no number of any GPU is known: write --gpus "0=NAME 1=NAME", as the coordinator calls them')
    watch = GpuWatch(args.node or socket.gethostname().split(".")[0], numbers)
    coordinator_uid = coordinator_uid_of()
    if args.once:
        _tell(watch, args.socket, coordinator_uid, settings)
        return 0
    stopped = threading.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda *_: stopped.set())
    print(f"telling {settings.address} of {', '.join(numbers)}", file=sys.stderr, flush=True)
    said = ""
    looks = 0
    while not stopped.is_set():
        try:
            if looks % int(_TELL_S / _LOOK_S) == 0:
                _tell(watch, args.socket, coordinator_uid, settings)
            else:
                watch.see(look(args.socket, coordinator_uid))
            problem = ""
        except HetstreamError as error:
            problem = str(error)
        if problem != said:
            said = problem
            _log.warning("nobody is told: %s", problem) if problem else _log.info("told again")
        looks += 1
        stopped.wait(_LOOK_S)
    return 0


def _tell(watch: GpuWatch, path: str, coordinator_uid: int | None, settings: SiteSettings) -> None:
    table = look(path, coordinator_uid)
    watch.see(table)
    answer: Answer = ask(settings, watch.report(table))
    if isinstance(answer, RefuseGpus):
        raise HetstreamError(f"the daemon at {settings.address} refuses: {answer.reason}")
    if not isinstance(answer, TakeGpus):
        raise HetstreamError(f"the daemon at {settings.address} answers {answer!r} to a report of GPUs")


def _numbers(text: str | None) -> dict[str, int]:
    """The GPUs' numbers, as the Prolog finds them."""
    listed = text or site_value("HETSTREAM_GPUS", os.environ) or ""
    if listed:
        return parse_numbers(listed)
    found = {}
    for path in sorted(_DRIVER.glob("*/information")):
        try:
            text = path.read_text()
        except OSError as error:  # the GPU has vanished meanwhile
            _log.warning("a GPU is left out: %s", error)
            continue
        lines = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
        number, name = lines.get("Device Minor", "").strip(), lines.get("GPU UUID", "").strip()
        if number.isdecimal() and name:
            found[name] = int(number)
    return found


GPU_EXPORTER_EPILOG = """\
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


def add_gpu_exporter_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the action."""
    parser.description = "Serve who is on this node's shared GPUs, and how they fare, to Prometheus. Changes nothing."
    parser.epilog = GPU_EXPORTER_EPILOG
    parser.add_argument("--socket", default=DEFAULT_SOCKET, metavar="PATH", help=f"(default {DEFAULT_SOCKET})")
    parser.add_argument("--listen", metavar="[HOST:]PORT", default="127.0.0.1:9419", help="where (default %(default)s)")
    add_public_argument(parser)
    parser.add_argument(
        "--interval", metavar="SECONDS", type=float, default=15.0, help="between readings (default %(default)g)"
    )
    parser.add_argument("--print", action="store_true", help="print the metrics of one reading and end")
    parser.set_defaults(run=run_gpu_exporter)


def run_gpu_exporter(args: argparse.Namespace) -> int:
    """Serve until a signal, or print once."""
    (host, port), interval_s = address_of(args), interval_of(args)
    coordinator_uid = coordinator_uid_of()
    # Only here: prometheus_client is an extra.
    from hetstream.slurm_plugin.render.metrics import GpuCollector, MetricsServer

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
