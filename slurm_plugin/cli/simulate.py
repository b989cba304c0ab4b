"""`hetstream simulate`: what a policy would have done to a cluster and its jobs."""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace

import numpy as np

from hetstream.base.errors import UsageError
from hetstream.base.text import count_words, percent, printable
from hetstream.slurm_plugin.cli.cluster_source import add_prices_argument, prices_of, read_text
from hetstream.slurm_plugin.cli.output import add_output_arguments, emit
from hetstream.slurm_plugin.client.slurm import CommandSlurm
from hetstream.slurm_plugin.daemon.settings import PolicySettings, decode_settings
from hetstream.slurm_plugin.errors import PolicyError
from hetstream.slurm_plugin.placement import CHOICES
from hetstream.slurm_plugin.policy.policies import EVERYBODY, POLICIES, Rules
from hetstream.slurm_plugin.render.tables import Column, Report, Row, Section
from hetstream.slurm_plugin.simulate.metrics import BASELINES, PACKED, RULES, Compared, as_plain, compare
from hetstream.slurm_plugin.simulate.scenario import (
    CapOptions,
    Discipline,
    FailureOptions,
    QueueOptions,
    Request,
    Scenario,
    WorkerOptions,
)
from hetstream.slurm_plugin.simulate.sharing import PackingOptions
from hetstream.slurm_plugin.simulate.traces import (
    EXPORT,
    Assumptions,
    ReadOptions,
    ReplayError,
    Trace,
    read_trace,
    replay,
)
from hetstream.slurm_plugin.simulate.workload import MOST, Cluster, Workload, of_nodes, parse

EPILOG = f"""\
A site's own month, on its own nodes, under each policy; what really happened is replayed first, and the error of that
is told:
  {EXPORT} > month.txt
  hetstream simulate month.txt --from-slurm

other examples:
  hetstream simulate jobs.csv --cluster '8*gpus=8,cpus=64,memory_gib=256'
  hetstream simulate jobs.csv --cluster cluster.json --policies fair,srtf --disciplines easy --json
  hetstream simulate philly_jobs.csv --cluster '312*gpus=8,cpus=96' --seeds 5 --window 8.33
  hetstream simulate jobs.csv --cluster '8*gpus=8,cpus=64' --policies tuned,srtf --packing

exit codes:
  0  done
  1  FILE, the cluster or another file cannot be read, or something in it is wrong; Slurm could not be asked; or the
     simulator found an error of its own
  2  the command line is wrong
"""
_HOUR_S = 3600.0
# Nodes that fail more often are taken out of any cluster, and make more events than a simulation comes to an end with.
_LEAST_NODE_MTBF_HOURS = 1.0
_MOST_SEEDS = 10_000
_MOST_OF_TRACE, _MOST_OF_CLUSTER, _MOST_OF_SETTINGS = 512 << 20, 64 << 20, 1 << 20  # characters
_ELASTIC = ("fair", "maxtp", "srtf", "stretch", "stretch+rules")
# Options that take any number from 0 on, and the most that each may be.
_AMOUNTS = {
    "bf_interval": MOST,
    "checkpoint": MOST / _HOUR_S,
}
# How many times the fragmentation of nodes is looked at between the first submission and the last.
_SAMPLES = 200
# Parts of a run for which the table tells it.
_SPANS = 8


def add_simulate_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb."""
    parser.description = "Replay jobs on a cluster under each policy and each discipline of the queue, and compare."
    parser.epilog = EPILOG
    parser.add_argument("trace", metavar="FILE", help="jobs: a trace, a table, or an export of sacct -P")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--cluster", metavar="FILE|TEXT", help="JSON, or '8*gpus=8,cpus=64'")
    where.add_argument("--from-slurm", action="store_true", help="the usable nodes of this site")
    named = ", ".join((*BASELINES, *POLICIES))
    parser.add_argument(
        "--policies",
        metavar="A,B",
        help=f"of {named}; the last ones also with {RULES}, as the site daemon runs them (default: the baselines and "
        f"{', '.join(_ELASTIC)})",
    )
    parser.add_argument(
        "--disciplines",
        metavar="A,B",
        default=",".join(discipline.value for discipline in Discipline),
        help="of the queue: fifo, easy, greedy (default: all three)",
    )
    parser.add_argument(
        "--policy-settings",
        metavar="FILE",
        help=f"what holds for policies with {RULES}: floor and caps, as hetstream site policy --json prints them in "
        "summary.settings",
    )
    choices = "; ".join(f"{name}: {choice.meaning}" for name, choice in CHOICES.items())
    parser.add_argument(
        "--placement",
        choices=list(CHOICES),
        help=f"of whole jobs ({choices}); data workers then have nodes, too: their trainer's first, then those with "
        "least other traffic, within the node's link (default: jobs go where least is left, and of data workers only "
        "CPUs are counted)",
    )
    parser.add_argument(
        "--packing",
        action="store_true",
        help="each run also with opportunistic jobs (column job_class) on GPUs that others have; else they are jobs as "
        "all others",
    )
    parser.add_argument(
        "--gpu-memory",
        type=float,
        default=math.inf,
        metavar="GIB",
        help="of each GPU, for --packing (default: no limit)",
    )
    parser.add_argument_group("queue").add_argument(
        "--bf-interval", type=float, default=QueueOptions().interval_s, metavar="S", help="bf_interval (%(default)g s)"
    )
    parser.add_argument_group("data workers").add_argument(
        "--data-worker-cpus", type=int, default=WorkerOptions().cpus, metavar="N", help="of one (%(default)d)"
    )
    _add_rest(parser.add_argument_group("runs"))
    add_output_arguments(parser, csv=True)
    parser.set_defaults(run=run)


def _add_rest(group: argparse._ArgumentGroup) -> None:
    usual, assumed = FailureOptions(), Assumptions()
    group.add_argument("--seeds", type=int, default=1, metavar="N", help="so many runs, with intervals (1)")
    group.add_argument("--seed", type=int, default=0, help="of the first run (0)")
    group.add_argument(
        "--window", type=float, metavar="HOURS", help="for shares of GPUs and CPUs (default: to the last end)"
    )
    group.add_argument(
        "--node-mtbf", type=float, metavar="HOURS", help="mean time between failures of a node (no failures)"
    )
    group.add_argument(
        "--checkpoint",
        type=float,
        default=usual.checkpoint_s / _HOUR_S,
        metavar="HOURS",
        help="between two (%(default)g)",
    )
    add_prices_argument(group)
    group.add_argument(
        "--gpu-busy",
        type=float,
        default=assumed.gpu_share,
        metavar="SHARE",
        help="of jobs that nobody measured (%(default)g)",
    )
    group.add_argument("--skip-bad", action="store_true", help="leave out lines that are wrong, and say how many")


def run(args: argparse.Namespace) -> int:
    """Read, simulate, and write."""
    _check_options(args)
    prices = prices_of(args)
    traces = _traces(args)
    cluster = _cluster(args)
    disciplines = _disciplines(args.disciplines)
    recorded = traces[0].workload.recorded is not None
    usual = ("recorded", *_ELASTIC) if recorded else ("tuned", "hardware", "fixed", *_ELASTIC)
    settings = _settings(args.policy_settings)
    if settings is not None and settings.policy + RULES not in usual:
        usual = (*usual, settings.policy + RULES)
    policies = [name for name in args.policies.split(",") if name] if args.policies else list(usual)
    if not policies:
        raise UsageError(f"--policies={args.policies}: names none")
    if "recorded" in policies and not recorded:
        raise UsageError("--policies: recorded is for an export of sacct, which says what jobs really had")
    is_packed = args.packing or any(name.endswith(PACKED) for name in policies)
    if is_packed:
        _check_packing(traces)
    if args.packing:
        plain = dict.fromkeys(name.removesuffix(PACKED) for name in policies)
        policies = [name + suffix for name in plain for suffix in ("", PACKED)]
    base = _base(args, traces)
    if settings is not None:
        rules = Rules(settings.floor, cpus_per_gpu=settings.cpus_per_gpu)
        base = replace(base, rules=rules, caps=CapOptions(settings.user_caps, settings.tenant_caps))
    bar = _Bar(sys.stderr if sys.stderr.isatty() else None)
    each = f"{base.workers.cpus} CPU{'s' if base.workers.cpus > 1 else ''} each"
    lines = [f"{len(traces[0].workload):,} jobs on {cluster.describe()}; data workers have {each}"]
    lines += [f"costs: {prices}"] if prices else []
    error: ReplayError | None = None
    if recorded:
        _, error = replay(traces[0].workload, cluster, base.queue, lambda done, whole: bar.show("replay", done, whole))
        lines += _error_lines(error)
    workloads = [trace.workload for trace in traces]
    window_s = args.window * _HOUR_S if args.window else None
    compared = compare(workloads, cluster, policies, disciplines, base, window_s, prices, bar.show)
    bar.clear()
    notes = [*traces[0].notes, *cluster.notes, *_unknown_groups(base.caps, traces[0].workload), *_odd_jobs(compared)]
    meta = {"verb": "simulate", "source": args.trace, "form": traces[0].form, "seeds": args.seeds, "seed": args.seed}
    error_row = None if error is None else {name: round(float(value), 6) for name, value in asdict(error).items()}
    summary = {
        "num_jobs": len(workloads[0]), "num_nodes": cluster.num_nodes, "gpus": cluster.num_gpus,
        "cpus": cluster.num_cpus, "prices": as_plain(prices), "replay": error_row,
        "placement": base.placement,
    }  # fmt: skip
    sections = [
        Section(
            "runs",
            [column for column in _COLUMNS if is_packed or column.key != "gpu_effective_shared"],
            [comparison.row() for comparison in compared],
        ),
        Section("fragmentation", _OVER_TIME, _over_time(compared), title="nodes over time, first seed"),
    ]
    rows = sections[0].rows
    summary["conclusion"] = conclusion = _conclusion(rows, "recorded" if recorded else policies[0])
    emit(args, Report(meta, summary, lines, sections, notes, [conclusion] if conclusion else ()))
    return 0


def _conclusion(rows: Sequence[Row], usual: str) -> str:
    """Which policy is best, and what it would gain; empty where there is nothing to compare.

    Args:
        rows: of all runs.
        usual: the policy that the others are compared with.
    """
    known = [row for row in rows if row["mean_jct_s"]]
    before = min((row for row in known if row["policy"] == usual), key=lambda row: row["mean_jct_s"], default=None)
    if before is None or len(known) < 2:
        return ""
    best = min(known, key=lambda row: row["mean_jct_s"])
    gain = 1 - best["mean_jct_s"] / before["mean_jct_s"]
    name, time = f"{best['policy']} with {best['discipline']}", _hours(best["mean_jct_s"])
    if best["policy"] == usual or gain < _LEAST_GAIN:
        return f"conclusion: nothing to gain by another policy; {usual} with {before['discipline']} is as good as any"
    return (
        f"conclusion: {name} is best, jobs complete in {time} on average, {percent(gain)} sooner than {usual} with "
        f"{before['discipline']} ({_hours(before['mean_jct_s'])})"
    )


# A smaller share of the completion time is within what a replay is wrong by.
_LEAST_GAIN = 0.01


def _check_options(args: argparse.Namespace) -> None:
    """Refuse what means nothing, by the names of the options."""
    if not 1 <= args.seeds <= _MOST_SEEDS:
        raise UsageError(f"--seeds={args.seeds}: must be at least 1, and at most {_MOST_SEEDS:,}")
    if args.seed < 0:
        raise UsageError(f"--seed={args.seed}: must be 0 or more")
    for name in ("window", "node_mtbf"):
        value = getattr(args, name)
        if value is not None and not 0 < value < math.inf:
            raise UsageError(f"--{name.replace('_', '-')}={value:g}: must be a finite number of hours above 0")
        if value is not None and value > MOST / _HOUR_S:
            raise UsageError(f"--{name.replace('_', '-')}={value:g}: must be at most {MOST / _HOUR_S:,.0f} hours")
    for name, most in _AMOUNTS.items():
        if not 0 <= (value := getattr(args, name)) <= most:
            raise UsageError(f"--{name.replace('_', '-')}={value:g}: must be from 0 to {most:g}")
    if not 1 <= args.data_worker_cpus <= MOST:
        raise UsageError(f"--data-worker-cpus={args.data_worker_cpus}: must be at least 1, and at most {MOST:g}")
    if not args.checkpoint:
        raise UsageError("--checkpoint=0: must be above 0")
    if args.node_mtbf is not None and args.node_mtbf < _LEAST_NODE_MTBF_HOURS:
        raise UsageError(f"--node-mtbf={args.node_mtbf:g}: must be at least {_LEAST_NODE_MTBF_HOURS:g} hour")


def _traces(args: argparse.Namespace) -> list[Trace]:
    text = read_text(args.trace, "list of jobs", _MOST_OF_TRACE)
    options = ReadOptions(args.seed, args.skip_bad, Assumptions(gpu_share=args.gpu_busy))
    if not 0 < args.gpu_busy <= 1:
        raise UsageError(f"--gpu-busy={args.gpu_busy}: must be above 0 and at most 1")
    first = read_trace(args.trace, text, options=options)
    if args.seeds > 1 and first.form == "philly":
        steps = [replace(options, seed=args.seed + place) for place in range(1, args.seeds)]
        return [first, *(read_trace(args.trace, text, options=step) for step in steps)]
    return [first] * args.seeds


def _settings(path: str | None) -> PolicySettings | None:
    if path is None:
        return None
    try:
        return decode_settings(read_text(path, "settings of a policy", _MOST_OF_SETTINGS))
    except PolicyError as error:
        raise UsageError(f"--policy-settings={printable(path)}: {error}") from error


def _unknown_groups(caps: CapOptions, workload: Workload) -> list[str]:
    """Caps of whoever has no job: a slip, as likely as not."""
    named = (("user", caps.user, workload.user_names), ("tenant", caps.tenant, workload.tenant_names))
    return [
        f"{what} {printable(name)} has a cap, and no job"
        for what, limits, names in named
        for name in limits
        if name not in (EVERYBODY, *names)
    ]


def _cluster(args: argparse.Namespace) -> Cluster:
    if args.from_slurm:
        return of_nodes(CommandSlurm().snapshot().nodes)
    if not args.cluster.strip():
        raise UsageError("--cluster is empty: must be a file, or text such as 8*gpus=8,cpus=64")
    # A text of many groups is longer than the name of a file may be, and os.path says then that there is none.
    is_text = args.cluster.lstrip().startswith("{") or ("=" in args.cluster and not os.path.exists(args.cluster))
    text = args.cluster if is_text else read_text(args.cluster, "list of nodes", _MOST_OF_CLUSTER)
    return parse(text)


def _disciplines(text: str) -> list[Discipline]:
    known = {discipline.value: discipline for discipline in Discipline}
    names = [name for name in text.split(",") if name]
    wrong = [name for name in names if name not in known]
    if wrong or not names:
        raise UsageError(f"--disciplines={text}: must be one or more of {', '.join(known)}")
    return [known[name] for name in names]


def _base(args: argparse.Namespace, traces: Sequence[Trace]) -> Scenario:
    mtbf_s = math.inf if args.node_mtbf is None else args.node_mtbf * _HOUR_S
    last_s = float(traces[0].workload.submit_s[-1])
    return Scenario(
        name="",
        request=Request.TUNED,
        discipline=Discipline.FIFO,
        queue=QueueOptions(interval_s=args.bf_interval),
        workers=WorkerOptions(args.data_worker_cpus),
        failures=FailureOptions(mtbf_s, checkpoint_s=args.checkpoint * _HOUR_S),
        seed=args.seed,
        sample_s=max(60.0, last_s / _SAMPLES),
        placement=args.placement,
        packing=PackingOptions(gpu_memory_gib=args.gpu_memory),
    )  # fmt: skip


def _check_packing(traces: Sequence[Trace]) -> None:
    """Refuse packing where it would change nothing."""
    sharing = traces[0].workload.sharing
    if sharing is None or not sharing.is_opportunistic.any():
        raise UsageError(
            f"--packing: no job of {traces[0].form} is opportunistic. In a table of your own a column job_class says so"
        )


def _error_lines(error: ReplayError) -> list[str]:
    return [
        f"what really happened, replayed ({error.num_jobs:,} jobs, EASY): mean completion time {error.mean_jct:+.1%}, "
        f"makespan {error.makespan:+.1%}, starts in the right order {error.order:.1%} of pairs",
        f"mean waiting {_hours(error.mean_wait_s)}, really {_hours(error.real_mean_wait_s)}; half of the starts are "
        f"within {_hours(error.median_start_s)}. What follows is no surer than this",
    ]


def _odd_jobs(compared: Sequence[Compared]) -> list[str]:
    """Jobs that some run could not run."""
    notes = []
    if not compared[0].first.workload.demand.any():
        notes.append("no job gains by data workers, so the policies that divide them are all alike")
    for outcome in compared:
        rejected = outcome.first.rejected
        if rejected:
            name = printable(outcome.first.workload.names[next(iter(rejected))])
            why = next(iter(rejected.values()))
            notes.append(
                f"{outcome.policy}, {outcome.discipline}: {count_words(len(rejected), 'job')} left out; {name} is {why}"
            )
        if outcome.first.num_unfinished:
            notes.append(
                f"{outcome.policy}, {outcome.discipline}: without an end: "
                f"{count_words(outcome.first.num_unfinished, 'job')}; no CPU is left for data workers"
            )
    return notes


def _over_time(compared: Sequence[Compared]) -> list[dict[str, object]]:
    """A row for each run: what its nodes were like at equal spans, from the first submission on."""
    rows = []
    for outcome in compared:
        seen = outcome.first.fragmentation
        if seen is None or not len(seen.at_s):
            continue
        span_s = float(seen.at_s[-1]) / _SPANS
        last = np.searchsorted(seen.at_s, span_s * np.arange(_SPANS), side="right") - 1
        found = {
            name: np.round(getattr(seen, name)[np.maximum(last, 0)], 4).tolist()
            for name in ("indicator", "unusable_gpus", "cpus_gone", "gpus_gone")
        }
        rows.append({"policy": outcome.policy, "discipline": outcome.discipline, "span_s": round(span_s, 3), **found})
    return rows


class _Bar:
    """A progress bar on a terminal; nothing elsewhere."""

    WIDTH, EVERY_S = 30, 0.2

    def __init__(self, stream: object) -> None:
        self._stream, self._shown_s = stream, 0.0

    def show(self, name: str, done: int, whole: int) -> None:
        """Draw it, a few times a second at most."""
        now_s = time.monotonic()
        if self._stream is None or now_s - self._shown_s < self.EVERY_S:
            return
        self._shown_s = now_s
        full = self.WIDTH * done // max(1, whole)
        bar = "#" * full + "." * (self.WIDTH - full)
        print(f"\r\x1b[K[{bar}] {done:,} of {whole:,} jobs: {name}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Take it away."""
        if self._stream is not None:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _hours(seconds: float) -> str:
    """`3.4 h`."""
    return f"{seconds / 3600:,.1f} h" if seconds >= 3600 else f"{seconds / 60:.1f} min"


def _percentages(shares: Sequence[float]) -> str:
    """` 3 31`: short, as two columns of eight fit a terminal of 80."""
    return " ".join(f"{100 * share:2.0f}" for share in shares)


_COLUMNS = (
    Column("policy", "POLICY", left=True),
    Column("discipline", "QUEUE", left=True),
    Column("mean_jct_s", "COMPLETION", _hours),
    Column("mean_wait_s", "WAITING", _hours),
    Column("p95_wait_s", "P95", _hours, priority=3),
    Column("max_slowdown", "WORST SLOWDOWN", lambda value: f"{value:.1f}", priority=4),
    Column("gpu_allocated", "GPUS", percent),
    Column("gpu_effective", "EFFECTIVE", percent),
    Column("gpu_effective_shared", "OF IT SHARED", percent, priority=6),
    Column("cpu_allocated", "CPUS", percent, priority=5),
    Column("cpu_productive", "PRODUCTIVE", percent, priority=7),
    Column("fragmentation", "FRAGMENTED", lambda value: f"{value:.2f}", priority=8),
    Column("unusable_gpus", "UNUSABLE", percent, priority=2),
    Column("cost", "COST", lambda value: f"{value:,.0f}"),
)
_OVER_TIME = (
    Column("policy", "POLICY", left=True),
    Column("discipline", "QUEUE", left=True),
    Column("span_s", "EVERY", _hours),
    Column("indicator", "FRAGMENTED, %", _percentages, wraps=True),
    Column("unusable_gpus", "UNUSABLE GPUS, %", _percentages, wraps=True),
)
