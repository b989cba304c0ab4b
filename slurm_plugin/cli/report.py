"""`hetstream report`: the cluster as one HTML page, with its history."""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import stat
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import NamedTemporaryFile

from hetstream.base.errors import UsageError
from hetstream.slurm_plugin.cli.output import EXIT_CODES, add_history_argument, add_output_arguments, emit, meta_of
from hetstream.slurm_plugin.cli.pricing import add_prices_argument, prices_of
from hetstream.slurm_plugin.cli.reading import add_fresh_argument, read_cluster, shared_gpus
from hetstream.slurm_plugin.cli.util import parse_time
from hetstream.slurm_plugin.client.hidden import hidden_by
from hetstream.slurm_plugin.insight.history import History
from hetstream.slurm_plugin.insight.observation import Observation, Sample, observe
from hetstream.slurm_plugin.insight.spending import hourly, spent
from hetstream.slurm_plugin.insight.wait_shares import wait_shares
from hetstream.slurm_plugin.prices import Prices
from hetstream.slurm_plugin.render.page import page
from hetstream.slurm_plugin.render.report import Column, Report, Section, duration
from hetstream.slurm_plugin.render.shared_gpus import shared_gpu_sections

EPILOG = f"""\
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb."""
    parser.description = "Show fragmentation, queueing delay by cause and utilisation, now and over time."
    parser.epilog = EPILOG
    parser.add_argument("--html", metavar="FILE", help="write the page there")
    add_history_argument(parser)
    parser.add_argument(
        "-S", "--start", metavar="TIME", default=DEFAULT_START, help="begin of the history (default %(default)s)"
    )
    add_prices_argument(parser)
    add_fresh_argument(parser)
    add_output_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Read the cluster once, and write."""
    check_page(args.html, ())
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
    report = report_of(seen, samples if args.json else (), prices)
    if args.html:
        hidden = hidden_by(snapshot.config)
        write_whole(Path(args.html), page(seen, samples, prices), 0o600 if hidden else 0o666)
        if hidden:
            note = f"{hidden} hides a part of the cluster from some users: nobody else can read {args.html}"
            report = replace(report, notes=(*report.notes, note))
    emit(args, report)
    return 0


def report_of(seen: Observation, samples: Sequence[Sample], prices: Prices | None = None) -> Report:
    """The same figures as tables and JSON.

    Args:
        seen: the cluster now.
        samples: the history, which is for programs alone.
        prices: None if there are none.
    """
    now = seen.sample
    summary = {name: value for name, value in asdict(now).items() if name not in ("taken_s", "waiting")}
    lines = [
        f"{now.gpus - now.gpus_allocated:,} of {now.gpus:,} GPUs and {now.cpus - now.cpus_allocated:,} of {now.cpus:,} "
        f"CPUs are free; {now.stranded_gpus:,} GPUs are of no use to any pending job",
        f"{now.num_running:,} job(s) run, {sum(group.num_jobs for group in now.waiting.values()):,} wait",
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


def check_page(text: str | None, inputs: Collection[str]) -> None:
    """Refuse a page that could not be written, before anything is read or computed for it.

    Args:
        text: of `--html`.
        inputs: paths that the command reads, which the page must not take the place of.

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
    if path.is_file() and any(Path(other).exists() and path.samefile(other) for other in inputs):
        raise UsageError(f"--html={text}: the command reads this file. Name another one for the page")


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
