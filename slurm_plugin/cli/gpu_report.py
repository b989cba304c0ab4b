"""`hetstream gpu report`: tells the site daemon of this node's shared GPUs, for the packer."""

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
from hetstream.hetjob.gpu.config import DEFAULT_SOCKET, coordinator_uid_of
from hetstream.hetjob.site.address import SiteSettings, site_value
from hetstream.hetjob.site.client import ask
from hetstream.hetjob.site.gpus import RefuseGpus, TakeGpus
from hetstream.hetjob.site.messages import Answer
from hetstream.slurm_plugin.cli.daemon import add_address, settings_of
from hetstream.slurm_plugin.coordinator.look import look
from hetstream.slurm_plugin.coordinator.report import GpuWatch, parse_numbers

EPILOG = """\
It asks the coordinator each second, and tells the site daemon every 5 s how much of each GPU is in use, how much memory
the guaranteed job leaves, and who does not keep to his orders. Run it as the coordinator's user on each node, and name
that user in `hetstream daemon --gpu-reporters`. It changes nothing; without it nobody is placed on this node.

examples:
  hetstream gpu report
  hetstream gpu report --gpus "0=GPU-1a2b 1=GPU-3c4d" --node g3

exit codes:
  0  it was stopped; --once: told
  1  --once: the coordinator or the daemon did not answer, or the daemon refused
  2  the command line is wrong
"""
_LOOK_S = 1.0
_TELL_S = 5.0
_DRIVER = Path("/proc/driver/nvidia/gpus")
_log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the action."""
    parser.description = "Tell the site daemon how much of this node's shared GPUs is in use, until it is stopped."
    parser.epilog = EPILOG
    parser.add_argument("--socket", default=DEFAULT_SOCKET, metavar="PATH", help=f"(default {DEFAULT_SOCKET})")
    parser.add_argument("--node", metavar="NAME", help="Slurm's name of this node (default: the host's short name)")
    parser.add_argument(
        "--gpus", metavar="LIST", help="numbers and names of GPUs (default: HETSTREAM_GPUS, else the NVIDIA driver's)"
    )
    add_address(parser, None)
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
