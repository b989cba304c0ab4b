"""`hetstream report`: the cluster as one HTML page, with its history."""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import platform
import secrets
import shlex
import stat
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from http import HTTPStatus
from pathlib import Path
from tempfile import NamedTemporaryFile

from hetstream.base.errors import UsageError
from hetstream.base.text import duration
from hetstream.base.web import PRIVATE, Document
from hetstream.slurm_plugin.cli.cluster_source import (
    add_fresh_argument,
    add_prices_argument,
    prices_of,
    read_cluster,
    shared_gpus,
)
from hetstream.slurm_plugin.cli.output import EXIT_CODES, add_history_argument, add_output_arguments, emit, meta_of
from hetstream.slurm_plugin.cli.util import parse_time
from hetstream.slurm_plugin.cli.watching import (
    add_watch_arguments,
    address_of,
    interval_of,
    refuse_hidden,
    watched_cluster,
)
from hetstream.slurm_plugin.client.read import hidden_by
from hetstream.slurm_plugin.insight.advise import would_start
from hetstream.slurm_plugin.insight.observation import KEEP_S, History, Monitor, Observation, Reading, Sample, observe
from hetstream.slurm_plugin.insight.prices import Prices, hourly, spent
from hetstream.slurm_plugin.insight.utilisation import SharesAside, wait_shares
from hetstream.slurm_plugin.render.charts import shared_gpu_sections
from hetstream.slurm_plugin.render.page import in_one_sentence, page, serve_documents, unavailable
from hetstream.slurm_plugin.render.tables import Column, Report, Section, as_json

REPORT_EPILOG = f"""\
The page is one file: it has no script and loads nothing from elsewhere. It names users and jobs, so mind whom you send
it to; where Slurm hides something from some users (PrivateData, MCSPlugin), its mode is 0600. With --history the
reading is added to a SQLite file, and the page draws the curves of all readings in it. The file keeps 92 days.
hetstream exporter and hetstream serve may add to the same file.

examples:
  hetstream report --html cluster.html
  hetstream report --history ~/cluster.sqlite --start now-7days --html cluster.html
  hetstream report --history ~/cluster.sqlite --json | jq '.history[-1]'

{EXIT_CODES}"""
DEFAULT_START = "now-7days"


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb."""
    parser.description = "Show fragmentation, queueing delay by cause and utilisation, now and over time."
    parser.epilog = REPORT_EPILOG
    parser.add_argument("--html", metavar="FILE", help="write the page there")
    add_history_argument(parser)
    parser.add_argument(
        "-S", "--start", metavar="TIME", default=DEFAULT_START, help="begin of the history (default %(default)s)"
    )
    add_prices_argument(parser)
    add_fresh_argument(parser)
    add_output_arguments(parser)
    parser.set_defaults(run=run_report)


def run_report(args: argparse.Namespace) -> int:
    """Read the cluster once, and write."""
    check_page(args.html)
    prices = prices_of(args)
    with ExitStack() as undo:
        history = undo.enter_context(History(Path(args.history))) if args.history else None
        snapshot = read_cluster(args)
        start_s = parse_time("--start", args.start, snapshot.taken_s)
        seen = observe(snapshot, wait_shares(snapshot.jobs), shared_gpus())
        samples = [seen.sample]
        if history:
            history.append(seen.sample)
            samples = history.since(start_s) or samples
    report = report_report(seen, samples if args.json else (), prices)
    if args.html:
        hidden = hidden_by(snapshot.config)
        write_whole(Path(args.html), page(seen, samples, prices), 0o600 if hidden else 0o666)
        if hidden:
            note = f"{hidden} hides a part of the cluster from some users: nobody else can read {args.html}"
            report = replace(report, notes=(*report.notes, note))
        if (path := Path(args.html).resolve()).is_file():
            where = shlex.quote(f"{platform.node()}:{path}")
            note = f"the page is in {args.html}: open it in a browser, from another machine after scp {where} ."
            report = replace(report, notes=(*report.notes, note))
    emit(args, report)
    return 0


def report_report(seen: Observation, samples: Sequence[Sample], prices: Prices | None = None) -> Report:
    """Return the same figures as tables and JSON.

    Args:
        seen: the cluster now.
        samples: the history, which is for programs alone.
        prices: None if there are none.
    """
    now = seen.sample
    summary = {name: value for name, value in asdict(now).items() if name not in ("taken_s", "waiting")}
    helped = [advice.job for advice in would_start(seen.snapshot)] if now.stranded_gpus else []
    lines = [
        in_one_sentence(seen, helped),
        f"{now.num_running:,} running, {sum(group.num_jobs for group in now.waiting.values()):,} pending",
    ]
    summary["cost"] = None
    if prices:
        now_cost = hourly(now, prices)
        summary["cost"] = {
            "prices": asdict(prices), "an_hour_now": asdict(now_cost), "history": asdict(spent(samples, prices)),
        }  # fmt: skip
        lines.append(
            f"an hour costs {prices.shown(now_cost.held)} for what jobs hold, of that {prices.shown(now_cost.waited)} "
            f"for GPUs whose trainers wait for data, and {prices.shown(now_cost.free)} for what is free"
        )
    waiting = [
        {
            "cause": cause,
            "num_jobs": group.num_jobs,
            "cpus": group.cpus,
            "gpus": group.gpus,
            "mean_s": round(group.mean_s, 1),
            "longest_s": round(group.longest_s, 1),
        }
        for cause, group in sorted(now.waiting.items(), key=lambda item: -item[1].num_jobs)
    ]
    sections = [Section("waiting", _COLUMNS, waiting, title="What jobs wait for", empty="no job waits")]
    shared_sections, notes = shared_gpu_sections(seen)
    sections += shared_sections
    if samples:
        sections.append(Section("history", (), [asdict(sample) for sample in samples]))
    return Report(meta_of("report", seen.snapshot), summary, lines, sections, notes)


def check_page(text: str | None) -> None:
    """Refuse a page that could not be written, before anything is read or computed for it.

    Raises:
        UsageError: it cannot be written there.
    """
    if not text:
        return
    path = Path(text)
    if not path.parent.is_dir():
        raise UsageError(f"--html={text}: there is no directory {path.parent}")
    if path.is_dir():
        raise UsageError(f"--html={text}: is a directory. Name a file, such as {path / 'cluster.html'}")


def write_whole(path: Path, text: str, mode: int = 0o666) -> None:
    """Write a file so that readers see the old text or the new one; of the mode, the umask takes away.

    A link stays, and what it leads to is written. What is no regular file, such as /dev/stdout or a pipe, is written
    to: it must not become a file, and root could make it one. Both belong to root or to this user: a link of somebody
    else's would lead this user's rights to what he has chosen, and a pipe of his brings him the page.

    Raises:
        OSError: it cannot be written, or leads to where somebody else wants it.
    """
    named, there = path, None
    with contextlib.suppress(FileNotFoundError):
        there = path.lstat()
        if not stat.S_ISREG(there.st_mode) and there.st_uid not in (0, os.geteuid()):
            problem = f"it is there, is no regular file, and belongs to user {there.st_uid}: name another file"
            raise PermissionError(errno.EPERM, problem, str(path))
        if stat.S_ISLNK(there.st_mode):
            there, path = None, path.resolve()
            there = path.stat()
    if there and not stat.S_ISREG(there.st_mode):
        path.write_text(text, encoding="utf-8")
        return
    umask = os.umask(0)
    os.umask(umask)
    try:
        with NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", delete=False, encoding="utf-8") as file:
            try:
                file.write(text)
                os.fchmod(file.fileno(), mode & ~umask)
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(named)) from error  # not the temporary name


_COLUMNS = (
    Column("cause", "CAUSE", left=True),
    Column("num_jobs", "JOBS"),
    Column("cpus", "CPUS"),
    Column("gpus", "GPUS"),
    Column("mean_s", "MEAN WAIT", duration),
    Column("longest_s", "LONGEST", duration),
)


# `hetstream serve`: the page of `hetstream report`, live.

SERVE_EPILOG = """\
The page is at /, the figures of now are at /data.json. It reads the cluster once in each interval, however many look,
and changes nothing. It names users and jobs, so it is shown to those who have the token in the address that is printed,
a new one at each start; a browser keeps it as a cookie. From another machine use ssh -L 8418:localhost:8418 HOST. A
socket (unix:PATH) is for this user and root alone, and asks for no token: use ssh -L 8418:PATH HOST, or a proxy that
knows who may look. With --public nobody is asked for one. Without --history it shows what it has seen since its start.

examples:
  hetstream serve
  hetstream serve --listen 8500 --history ~/cluster.sqlite --start now-1day
  hetstream serve --listen unix:$HOME/hetstream.sock

exit codes:
  1  the address cannot be listened on, or the history cannot be used
  2  the command line is wrong
"""

# Before the first reading.
REFRESH_EARLY_S = 2


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb."""
    parser.description = "Serve the page of hetstream report, made anew at each --interval."
    parser.epilog = SERVE_EPILOG
    add_watch_arguments(parser, "127.0.0.1:8418")
    parser.add_argument(
        "-S", "--start", metavar="TIME", default=DEFAULT_START, help="begin of the history (default %(default)s)"
    )
    add_prices_argument(parser)
    parser.set_defaults(run=run_serve)


def run_serve(args: argparse.Namespace) -> int:
    """Serve until a signal."""
    is_private = args.listen.startswith(PRIVATE)
    (host, port), interval_s = (args.listen, 0) if is_private else address_of(args), interval_of(args)
    token = "" if is_private or args.public else secrets.token_urlsafe()
    start_s = parse_time("--start", args.start, time.time())
    prices = prices_of(args)
    with ExitStack() as undo:
        history = undo.enter_context(History(Path(args.history))) if args.history else None
        samples: deque[Sample] = deque(history.since(start_s) if history else ())
        shown: Mapping[str, Document] = documents(Reading(error="It has not been asked yet."), [], REFRESH_EARLY_S)
        server = serve_documents(host, port, lambda: shown, token)
        undo.callback(server.close)
        print(f"the cluster at {server.url}", file=sys.stderr, flush=True)
        monitor = Monitor(watched_cluster(args), SharesAside(), history, shared_gpus)
        for reading in monitor.readings(interval_s):
            if reading.observation:
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
    """Return what is served after a reading."""
    seen = reading.observation
    if seen is None:
        error = Document(
            "text/html; charset=utf-8", unavailable(reading.error, refresh_s), HTTPStatus.SERVICE_UNAVAILABLE
        )
        return {"/": error, "/data.json": Document("text/plain", f"{reading.error}\n", HTTPStatus.SERVICE_UNAVAILABLE)}
    return {
        "/": Document("text/html; charset=utf-8", page(seen, samples, prices, refresh_s)),
        "/data.json": Document("application/json", as_json(report_report(seen, (), prices))),
    }


# `hetstream exporter`: the cluster's figures for Prometheus.

EXPORTER_EPILOG = """\
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
  hetstream exporter --alerts > hetstream.rules.yml    for rule_files: of prometheus.yml

exit codes:
  0  done (--print, --dashboard, --alerts)
  1  the address cannot be listened on, the history cannot be used, or Slurm hides what would be served; with --print:
     Slurm could not be asked
  2  the command line is wrong
"""
DASHBOARD, ALERTS = (Path(__file__).parents[1] / name for name in ("dashboard.json", "alerts.yml"))


def add_exporter_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb."""
    parser.description = (
        "Serve the cluster's allocation, fragmentation and pending causes to Prometheus. Changes nothing."
    )
    parser.epilog = EXPORTER_EPILOG
    add_watch_arguments(parser, "127.0.0.1:9418")
    once = parser.add_mutually_exclusive_group()
    once.add_argument("--print", action="store_true", help="print the metrics of one reading and end")
    once.add_argument("--dashboard", action="store_true", help="print a Grafana dashboard of these metrics and end")
    once.add_argument("--alerts", action="store_true", help="print alert rules on these metrics and end")
    parser.set_defaults(run=run_exporter)


def run_exporter(args: argparse.Namespace) -> int:
    """Serve until a signal, or print once."""
    if args.dashboard or args.alerts:
        print((DASHBOARD if args.dashboard else ALERTS).read_text(), end="")
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
