"""`hetstream gpu pack`: places opportunistic GPU jobs onto GPUs in use, through Slurm."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from hetstream.base.errors import HetstreamError, UsageError
from hetstream.base.locks import keep_to_owner
from hetstream.base.text import count_words, percent, printable
from hetstream.slurm_plugin.cli.daemon import settings_of
from hetstream.slurm_plugin.cli.install import why_nobody_is_placed
from hetstream.slurm_plugin.cli.output import EXIT_CODES, add_output_arguments, emit, meta_of
from hetstream.slurm_plugin.cli.packing_arguments import (
    add_packing_arguments,
    check_partitions,
    gpu_readings,
    named_qos,
    partitions_of,
    quota_file,
    quotas_path,
    reasons,
    seen_by,
    upgrade_in_words,
)
from hetstream.slurm_plugin.client.model import Snapshot
from hetstream.slurm_plugin.client.packing_slurm import PackingSlurm
from hetstream.slurm_plugin.errors import UnknownJob
from hetstream.slurm_plugin.packing.decide import PackingPlan, verdicts
from hetstream.slurm_plugin.packing.jobs import OpportunisticJob
from hetstream.slurm_plugin.packing.notes import where
from hetstream.slurm_plugin.packing.observe import PackingView
from hetstream.slurm_plugin.packing.packer import Packer
from hetstream.slurm_plugin.packing.quota import Quotas
from hetstream.slurm_plugin.packing.quota_file import is_upgraded
from hetstream.slurm_plugin.packing.state import PackingEvent, PackingState
from hetstream.slurm_plugin.render.tables import Column, Report, Row, Section

DEFAULT_LOCK = Path("/run/hetstream-packer/lock")
PACKER_EPILOG = """\
Jobs of the opportunistic partitions are held by job_submit.lua when they are submitted. The packer gives each of them
GPUs of which enough is left, releases it, and looks whether Slurm did as it was told. It takes jobs away that break
their node's orders or are paused for long: they are requeued, and go on from their last checkpoint. With --quotas it
also releases guaranteed jobs within their tenant's quota, and makes opportunistic jobs that want it guaranteed where
they run. It touches no other jobs. What it remembers stands in the jobs, so it can be killed and started at any time;
run one of it, beside slurmctld. Its user is an administrator of Slurm's, and policy.lua names it as a manager:
docs/decisions.md.

Begin with --observe, which only says what it would do.

examples:
  hetstream gpu pack --observe
  hetstream gpu pack --dry-run --json
  hetstream gpu pack --partition opp --interval 10 --quotas /etc/hetstream/quotas.json

exit codes:
  0  it was stopped; --once: done
  1  another packer runs, Slurm could not be read, or gives nobody access to GPUs of others (see hetstream doctor);
     --once: Slurm refused a placement
  2  the command line is wrong
"""
_log = logging.getLogger(__name__)


def add_gpu_pack_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb."""
    parser.description = "Place opportunistic GPU jobs onto GPUs that other jobs use, again and again."
    parser.epilog = PACKER_EPILOG
    add_packing_arguments(parser)
    parser.add_argument("--observe", action="store_true", help="say what it would do, and change nothing")
    parser.add_argument("-n", "--dry-run", action="store_true", help="the same, once: --observe --once")
    parser.add_argument("--once", action="store_true", help="look, decide and act once, and end")
    parser.add_argument(
        "--interval", metavar="SECONDS", type=float, default=10.0, help="between two looks (default %(default)g)"
    )
    parser.add_argument(
        "--lock",
        metavar="FILE",
        type=Path,
        default=DEFAULT_LOCK,
        help="held by the one that acts (default %(default)s)",
    )
    parser.add_argument(
        "--shared-lock",
        metavar="FILE",
        type=Path,
        help="on a file system of all hosts: packers on any of them wait for it, and slurmctld may be elsewhere",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object for each event, on stdout")
    parser.set_defaults(run=run_pack)


def run_pack(args: argparse.Namespace) -> int:
    """Pack until a signal comes."""
    if not 1.0 <= args.interval <= 3600.0:
        raise UsageError(f"--interval={args.interval:g}: must be from 1 to 3600 seconds")
    acting = not (args.observe or args.dry_run)
    say, kinds = say_json if args.json else say_log, set[str]()

    def tell(event: PackingEvent) -> None:
        kinds.add(event.event)
        say(event)

    slurm = PackingSlurm()
    snapshot = slurm.snapshot()
    check_partitions(partitions_of(args), snapshot)
    problem = why_nobody_is_placed(snapshot) if acting else ""
    if problem:
        raise HetstreamError(f"nobody can be placed: {problem}. Check: hetstream doctor")
    packer = Packer(
        slurm, gpu_readings(settings_of(args)), partitions_of(args), tell, acting=acting,
        quotas=checked_quotas(args, slurm, snapshot), qos=named_qos(),
    )  # fmt: skip
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda *_: packer.stopping.set())
    with contextlib.ExitStack() as held:
        actor = SoleActor(slurm, args.shared_lock, held)
        if acting:
            held.enter_context(alone(args.lock))
        if args.once or args.dry_run:
            if acting and (reason := actor.why_wait()):
                raise HetstreamError(reason)
            packer.step()
            if not kinds and not args.json:
                _log.info("nothing is to be done")
            return 1 if "refused" in kinds else 0
        _log.info("mode=%s partitions=%s", "act" if acting else "observe", ",".join(sorted(partitions_of(args))))
        packer.run(args.interval, actor.why_wait if acting else str)
    return 0


class SoleActor:
    """Whether this packer is the one that acts, of those on several hosts.

    Args:
        slurm: the cluster.
        shared_lock: of a file that all hosts see; None: the one beside slurmctld acts, of which there is one.
        held: has the lock, as soon as it is got, until the end.
    """

    def __init__(self, slurm: PackingSlurm, shared_lock: Path | None, held: contextlib.ExitStack) -> None:
        self._slurm, self._lock, self._held = slurm, shared_lock, held
        self._has_lock = False

    def why_wait(self) -> str:
        """Return why another one acts; empty if this one does."""
        if self._lock is None:
            return why_elsewhere(self._slurm.controller(), socket.gethostname())
        if not self._has_lock:
            try:
                self._held.enter_context(alone(self._lock))
            except HetstreamError as error:
                return str(error)
            self._has_lock = True
        return ""


def why_elsewhere(controller: str, host: str) -> str:
    """Return why a packer on a host does not act; empty if it does.

    Args:
        controller: the host whose slurmctld answers, by Slurm's name.
        host: this one.
    """
    if controller and controller.partition(".")[0].lower() == host.partition(".")[0].lower():
        return ""
    where_it_is = f"slurmctld runs on {controller}" if controller else "no slurmctld answers"
    return (
        f"{where_it_is}, and the packer beside it acts; this one on {host} waits. To run it elsewhere: "
        "--shared-lock=FILE, on a file system of all its hosts"
    )


def checked_quotas(
    args: argparse.Namespace, slurm: PackingSlurm, snapshot: Snapshot
) -> Callable[[Snapshot], Quotas] | None:
    """Return what tells the quotas from now on; None where the site has none.

    Raises:
        QuotaError: they cannot be read, or cannot be kept in this cluster.
    """
    path = quotas_path(args)
    if path is None:
        return None
    quotas = quota_file(path, slurm, partitions_of(args))
    quotas.first(snapshot)
    return quotas.now


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """Be the only packer of this host; the lock goes with the process.

    Args:
        path: of a file that only the packer's user can write to.

    Raises:
        HetstreamError: another one holds it.
    """
    path.parent.mkdir(mode=0o700, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        keep_to_owner(descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise HetstreamError(
                f"another packer holds {path}. Stop that one first: systemctl stop hetstream-packer"
            ) from None
        yield
    finally:
        os.close(descriptor)


def say_json(event: PackingEvent) -> None:
    """An event as a line of JSON."""
    nodes, gpus = (event.place.nodes, event.place.indices) if event.place else ((), ())
    line = {
        "time_s": round(time.time(), 3), "event": event.event, "job": event.job, "nodes": list(nodes),
        "gpus": list(gpus), "reason": event.reason,
    }  # fmt: skip
    print(json.dumps(line), flush=True)


def say_log(event: PackingEvent) -> None:
    """An event as a line of the log."""
    place = f" on {where(event.place)}" if event.place else ""
    _log.info("job=%s %s%s: %s", event.job, event.event, place, event.reason)


# `hetstream gpu jobs`: the opportunistic jobs, where they are or why they wait.

JOBS_EPILOG = f"""\
It needs no rights: it works out what the packer decides from what everybody may see. Of one job it shows what each GPU
says to it.

examples:
  hetstream gpu jobs
  hetstream gpu jobs 8123

{EXIT_CODES}"""
_GIB = 1 << 30


def add_gpu_jobs_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the action."""
    parser.description = "Show opportunistic GPU jobs: where they are, or why they wait."
    parser.epilog = JOBS_EPILOG
    parser.add_argument("job", nargs="?", metavar="JOBID", help="only this one, GPU by GPU: N, or N_TASK of an array")
    add_packing_arguments(parser)
    add_output_arguments(parser)
    parser.set_defaults(run=run_jobs)


def run_jobs(args: argparse.Namespace) -> int:
    """Print all of them, or what each GPU says to one."""
    snapshot, seen, plan, missing = _see(args)
    waits = reasons(seen, plan, missing)
    job = next((job for name, job in seen.jobs.items() if args.job in (name, str(job.job.job_id))), None)
    if args.job is None:
        report = jobs_report(snapshot, seen, waits, missing)
    elif job is not None:
        report = job_report(snapshot, seen, job, waits, missing)
    elif args.job in seen.quota.guaranteed:
        report = quota_report(snapshot, seen, args.job, waits, missing)
    else:
        names = ", ".join(sorted(partitions_of(args)))
        raise UnknownJob(f"no job {args.job} is pending or running in {names}. Check: hetstream gpu jobs")
    emit(args, report)
    return 0


def _see(args: argparse.Namespace) -> tuple[Snapshot, PackingView, PackingPlan, str]:
    slurm = PackingSlurm()
    snapshot = slurm.snapshot()
    if args.partition is not None:
        check_partitions(partitions_of(args), snapshot)
    return snapshot, *seen_by(snapshot, slurm, settings_of(args), partitions_of(args), quotas_path(args))


def jobs_report(snapshot: Snapshot, seen: PackingView, waits: dict[str, str], missing: str) -> Report:
    """Return all jobs as a table."""
    rows = [_row(job, waits.get(name, "")) for name, job in seen.jobs.items()]
    num_waiting = sum(bool(row["reason"]) for row in rows)
    lines = [f"{count_words(len(rows), 'opportunistic job')}, {num_waiting} waiting; {_gpus_in_words(seen.state)}"]
    columns = (
        Column("job", "JOB", left=True), Column("user", "USER", left=True), Column("state", "STATE", left=True),
        Column("gpus", "GPUS"), Column("gpu_memory_gib", "GIB EACH", show=lambda value: f"{value:.1f}", priority=1),
        Column("place", "WHERE", left=True), Column("class", "CLASS", left=True, priority=2),
        Column("num_evictions", "EVICTED", priority=3),
        Column("reason", "WAITS BECAUSE", left=True, below=True),
        Column("not_upgraded", "NOT UPGRADED BECAUSE", left=True, below=True),
    )  # fmt: skip
    section = Section("jobs", columns, rows, empty="no opportunistic job is pending or running")
    notes = [missing] if missing else []
    facts = {"num_jobs": len(rows), "num_waiting": num_waiting}
    return Report(meta_of("gpu jobs", snapshot), facts, lines, (section, *_line(seen, waits)), notes)


def _line(seen: PackingView, waits: Mapping[str, str]) -> tuple[Section, ...]:
    """The jobs that have or want quota, where there are quotas."""
    if not seen.quota.quotas.partitions:
        return ()
    rows = [
        {
            "job": decision.job.name, "tenant": printable(decision.job.tenant), "gpus": decision.job.gpus,
            "class": decision.job.runs_as.value if decision.job.runs_as else "", "verdict": decision.verdict.value,
            "reason": waits.get(decision.job.name, decision.reason),
        }
        for decision in seen.quota.decisions
    ]  # fmt: skip
    columns = (
        Column("job", "JOB", left=True), Column("tenant", "TENANT", left=True), Column("gpus", "GPUS"),
        Column("class", "RUNS AS", left=True), Column("verdict", "VERDICT", left=True, wraps=True),
        Column("reason", "BECAUSE", left=True, wraps=True),
    )  # fmt: skip
    return (Section("line", columns, rows, empty="no job has or wants quota"),)


def quota_report(snapshot: Snapshot, seen: PackingView, name: str, waits: Mapping[str, str], missing: str) -> Report:
    """Return a guaranteed job, and why it waits for quota."""
    decision = next((found for found in seen.quota.decisions if found.job.name == name), None)
    job = seen.quota.guaranteed[name]
    reason = waits.get(name, decision.reason if decision else "")
    row: Row = {
        "job": name, "user": job.user, "state": job.state, "gpus": job.count("gpu"), "tenant": job.account,
        "verdict": decision.verdict.value if decision else "", "reason": reason,
    }  # fmt: skip
    lines = [
        f"job {name} of {job.user}: {job.state}, {count_words(job.count('gpu'), 'GPU')}, account "
        f"{printable(job.account)}"
    ]
    lines += [f"waits     {reason}"] if job.is_pending and reason else []
    return Report(meta_of("gpu jobs", snapshot), row, lines, (), [missing] if missing else [])


def job_report(
    snapshot: Snapshot, seen: PackingView, job: OpportunisticJob, waits: dict[str, str], missing: str
) -> Report:
    """Return one job, and what each GPU says to it."""
    row = _row(job, waits.get(job.name, ""))
    asked = next((waiting for waiting in seen.state.waiting if waiting.job == job.name), None)
    found = verdicts(seen.state, asked, time.time()) if asked else []
    rows = [
        {
            "node": node, "gpu": gpu.index, "used_share": gpu.use and gpu.use.used_share,
            "free_gib": gpu.use and gpu.use.free_bytes / _GIB, "wait_share": gpu.use and gpu.use.wait_share,
            "verdict": why_not or "takes it",
        }
        for node, gpu, why_not in found
    ]  # fmt: skip
    columns = (
        Column("node", "NODE", left=True), Column("gpu", "GPU"), Column("used_share", "USED", show=percent),
        Column("free_gib", "GIB FREE", show=lambda value: f"{value:.1f}"),
        Column("wait_share", "TRAINER WAITS", show=percent), Column("verdict", "VERDICT", left=True, wraps=True),
    )  # fmt: skip
    place = f" on {row['place']}" if row["place"] else ""
    asks = f"{count_words(job.wish.gpus, 'GPU')} with {job.wish.gpu_bytes / _GIB:.1f} GiB"
    asks += f" on each of {job.job.num_nodes} nodes" if job.job.num_nodes > 1 else ""
    lines = [f"job {job.name} of {job.job.user}: {row['state']}{place}", f"asks for  {asks}"]
    lines += [f"waits     {row['reason']}"] if row["reason"] else []
    lines += [f"upgrade   {row['not_upgraded']}"] if row["not_upgraded"] else []
    section = Section("gpus", columns, rows)
    return Report(meta_of("gpu jobs", snapshot), row, lines, (section,), [missing] if missing else [])


def _row(job: OpportunisticJob, reason: str) -> Row:
    placed = None if job.is_held else job.record.placed
    return {
        "job": job.name, "user": job.job.user, "state": job.job.state,
        "gpus": job.wish.gpus * max(1, job.job.num_nodes), "gpu_memory_gib": job.wish.gpu_bytes / _GIB,
        "place": where(placed.place) if placed else "", "class": "guaranteed" if is_upgraded(job) else "opportunistic",
        "num_evictions": job.record.evicted.count if job.record.evicted else 0, "reason": reason,
        "not_upgraded": upgrade_in_words(job),
    }  # fmt: skip


def _gpus_in_words(state: PackingState) -> str:
    gpus = [gpu for node in state.nodes for gpu in node.gpus]
    known = sum(gpu.use is not None for gpu in gpus)
    return f"{known} of {len(gpus)} GPUs for them are known"
