"""`hetstream serve`: the page of `hetstream report`, live."""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack
from http import HTTPStatus
from pathlib import Path

from hetstream.base.web import Document
from hetstream.slurm_plugin.cli.pricing import add_prices_argument, prices_of
from hetstream.slurm_plugin.cli.reading import shared_gpus
from hetstream.slurm_plugin.cli.report import DEFAULT_START, report_of
from hetstream.slurm_plugin.cli.util import parse_time
from hetstream.slurm_plugin.cli.watching import (
    add_watch_arguments,
    address_of,
    interval_of,
    refuse_hidden,
    watched_cluster,
)
from hetstream.slurm_plugin.insight.history import KEEP_S, History
from hetstream.slurm_plugin.insight.monitor import Monitor, Reading
from hetstream.slurm_plugin.insight.observation import Sample
from hetstream.slurm_plugin.insight.shared_gpus import for_everybody
from hetstream.slurm_plugin.insight.wait_shares import SharesAside
from hetstream.slurm_plugin.prices import Prices
from hetstream.slurm_plugin.render.page import page, unavailable
from hetstream.slurm_plugin.render.report import as_json
from hetstream.slurm_plugin.render.web import serve_documents

EPILOG = """\
The page is at /, the figures of now are at /data.json. It reads the cluster once in each interval, however many look,
and changes nothing. It names users and jobs, and has no password: from another machine use
ssh -L 8418:localhost:8418 HOST. So it ends where Slurm hides jobs, nodes, partitions or reservations from some users
(PrivateData, MCSPlugin), and leaves out how jobs fare on shared GPUs, unless --public is given. Without --history it
shows what it has seen since its start.

examples:
  hetstream serve
  hetstream serve --listen 8500 --history ~/cluster.sqlite --start now-1day

exit codes:
  1  the address cannot be listened on, the history cannot be used, or Slurm hides what would be served
  2  the command line is wrong
"""

# Before the first reading.
REFRESH_EARLY_S = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb."""
    parser.description = "Serve the page of hetstream report, made anew at each --interval."
    parser.epilog = EPILOG
    add_watch_arguments(parser, "127.0.0.1:8418")
    parser.add_argument(
        "-S", "--start", metavar="TIME", default=DEFAULT_START, help="begin of the history (default %(default)s)"
    )
    add_prices_argument(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal."""
    (host, port), interval_s = address_of(args), interval_of(args)
    start_s = parse_time("--start", args.start, time.time())
    prices = prices_of(args)
    with ExitStack() as undo:
        history = undo.enter_context(History(Path(args.history))) if args.history else None
        samples: deque[Sample] = deque(history.since(start_s) if history else ())
        shown: Mapping[str, Document] = documents(Reading(error="It has not been asked yet."), [], REFRESH_EARLY_S)
        server = serve_documents(host, port, lambda: shown)
        undo.callback(server.close)
        print(f"the cluster at {server.url}", file=sys.stderr, flush=True)
        shared = shared_gpus if args.public else lambda: for_everybody(shared_gpus())
        monitor = Monitor(watched_cluster(args), SharesAside(), history, shared)
        for reading in monitor.readings(interval_s):
            if reading.observation:
                refuse_hidden(args, reading.observation.snapshot)
                if samples and samples[-1].taken_s == reading.observation.sample.taken_s:
                    samples.pop()  # the site daemon has not read the cluster anew since
                samples.append(reading.observation.sample)
                now_s = samples[-1].taken_s
                start_s = max(now_s - KEEP_S, parse_time("--start", args.start, now_s))
                while samples[0].taken_s < start_s and len(samples) > 1:
                    samples.popleft()
            shown = documents(reading, list(samples), round(interval_s), prices)
    return 0


def documents(
    reading: Reading, samples: list[Sample], refresh_s: int, prices: Prices | None = None
) -> Mapping[str, Document]:
    """What is served after a reading."""
    seen = reading.observation
    if seen is None:
        error = Document(
            "text/html; charset=utf-8", unavailable(reading.error, refresh_s), HTTPStatus.SERVICE_UNAVAILABLE
        )
        return {"/": error, "/data.json": Document("text/plain", f"{reading.error}\n", HTTPStatus.SERVICE_UNAVAILABLE)}
    return {
        "/": Document("text/html; charset=utf-8", page(seen, samples, prices, refresh_s)),
        "/data.json": Document("application/json", as_json(report_of(seen, (), prices))),
    }
