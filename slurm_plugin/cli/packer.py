"""`hetstream packer`: places opportunistic GPU jobs onto GPUs in use, through Slurm."""

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
from collections.abc import Callable, Iterator
from pathlib import Path

from hetstream.base.errors import HetstreamError, UsageError
from hetstream.base.own_lock import keep_to_owner
from hetstream.slurm_plugin.cli.daemon import settings_of
from hetstream.slurm_plugin.cli.doctor import why_nobody_is_placed
from hetstream.slurm_plugin.cli.packing_arguments import (
    add_packing_arguments,
    check_partitions,
    gpu_readings,
    named_qos,
    partitions_of,
    quota_file,
    quotas_path,
)
from hetstream.slurm_plugin.client.model import Snapshot
from hetstream.slurm_plugin.client.packing_slurm import PackingSlurm
from hetstream.slurm_plugin.packing.events import PackingEvent
from hetstream.slurm_plugin.packing.packer import Packer
from hetstream.slurm_plugin.packing.quota import Quotas
from hetstream.slurm_plugin.packing.words import where

DEFAULT_LOCK = Path("/run/hetstream-packer/lock")
EPILOG = """\
Jobs of the opportunistic partitions are held by job_submit.lua when they are submitted. The packer gives each of them
GPUs of which enough is left, releases it, and looks whether Slurm did as it was told. It takes jobs away that break
their node's orders or are paused for long: they are requeued, and go on from their last checkpoint. With --quotas it
also releases guaranteed jobs within their tenant's quota, and makes opportunistic jobs that want it guaranteed where
they run. It touches no other jobs. What it remembers stands in the jobs, so it can be killed and started at any time;
run one of it, beside slurmctld. Its user is an administrator of Slurm's, and policy.lua names it as a manager:
docs/decisions/0014-the-packer-is-an-operator-and-keeps-nothing.md.

Begin with --observe, which only says what it would do.

examples:
  hetstream packer --observe
  hetstream packer --once --dry-run --json
  hetstream packer --partition opp --interval 10 --quotas /etc/hetstream/quotas.json

exit codes:
  0  it was stopped; --once: done
  1  another packer runs, Slurm could not be read, or gives nobody access to GPUs of others (see hetstream doctor)
  2  the command line is wrong
"""
_log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb."""
    parser.description = "Place opportunistic GPU jobs onto GPUs that other jobs use, again and again."
    parser.epilog = EPILOG
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
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Pack until a signal comes."""
    if not 1.0 <= args.interval <= 3600.0:
        raise UsageError(f"--interval={args.interval:g}: must be from 1 to 3600 seconds")
    acting = not (args.observe or args.dry_run)
    say, is_quiet = say_json if args.json else say_log, True

    def tell(event: PackingEvent) -> None:
        nonlocal is_quiet
        is_quiet = False
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
            if is_quiet and not args.json:
                _log.info("nothing is to be done")
        else:
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
        """Why another one acts; empty if this one does."""
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
    """Why a packer on a host does not act; empty if it does.

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
    """What tells the quotas from now on; None where the site has none.

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
