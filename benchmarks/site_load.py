"""`make bench-site_load`: what a thousand elastic jobs cost slurmctld and the site daemon, on a throw-away cluster.

A thousand jobs run `sleep` on four nodes of 512 CPUs. Their job masters are stubs in one process, which report to a
real daemon over TCP with MUNGE as job masters do; a tenth of the jobs have companions that wait in the queue, about
which they ask Slurm. A minute without all that comes first, then a minute with it; `sdiag` counts the requests of each.
Then `hetstream why` is asked about waiting jobs. docs/benchmarks-cluster.md explains the rows.
"""

from __future__ import annotations

import json
import os
import re
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks import harness, machine
from benchmarks.cluster import throw_away_cluster, why_no_cluster
from benchmarks.harness import Row
from benchmarks.processes import state_of, wait
from benchmarks.running import ROOT, background
from hetstream.hetjob.errors import SiteError
from hetstream.hetjob.site.client import SiteSettings, TcpAddress, ask
from hetstream.hetjob.site.messages import AskStatus, ShowStatus
from hetstream.slurm_plugin.client.run import run_slurm
from tests.devcluster.spec import ClusterShape

NUM_JOBS, NUM_WAITING, MINUTE_S, NUM_QUESTIONS = 1000, 100, 60.0, 30
QUICK = (20, 4, 5.0, 3)
LARGE = ClusterShape(gpu_nodes=1, cpu_nodes=4, cpus_per_node=512)
MOST_REQUESTS_PER_S = 5.0
HETSTREAM = str(Path(sys.executable).with_name("hetstream"))
_DEADLINE_S = 900.0
_COUNT = re.compile(r"^\s+([A-Z_]+)\s+\(\s*\d+\) count:(\d+)", re.MULTILINE)


def main() -> int:
    """Run the benchmark."""
    args = harness.parser("Load slurmctld and the site daemon with a thousand jobs.", repeats=1).parse_args()
    if reason := why_no_cluster():
        harness.say(reason)
        return 2
    num_jobs, num_waiting, minute_s, num_questions = (
        QUICK if args.quick else (NUM_JOBS, NUM_WAITING, MINUTE_S, NUM_QUESTIONS)
    )
    with throw_away_cluster(LARGE) as (directory, environ):
        jobs = _submit(environ, ["--partition=cpu", "--wrap=exec sleep 7200"], num_jobs)
        wait(lambda: len(_squeue(environ, "RUNNING")) >= num_jobs, f"the start of {num_jobs} jobs", _DEADLINE_S, 0.5)
        waiting = jobs[:: max(1, num_jobs // num_waiting)][:num_waiting]
        for job in waiting:
            comment = f"--comment=hets:trainer={job} hets:start={job}.0"
            _submit(environ, ["--partition=cpu", "--hold", comment, "--wrap=exec sleep 1"], 1)
        harness.say(f"{len(_squeue(environ, 'RUNNING'))} jobs run")
        rows = _measure(directory, environ, jobs, waiting, minute_s)
        rows += _why(environ, _squeue(environ, "PENDING")[:num_questions])
    context = {
        "machine": machine.describe(),
        "versions": machine.versions("torch"),
        "notes": [
            f"{num_jobs} jobs with a slurmstepd and a sleep each; their job masters are stubs in one process: the link "
            "to the daemon and the rule when to ask Slurm are the real ones.",
            f"{len(waiting)} of them have companions that have waited for a minute to an hour.",
            "The cluster, the stubs and the daemon share the cores of one machine.",
        ],
    }
    return harness.finish("site_load", args.out, rows, {}, context)


def _measure(
    directory: Path, environ: dict[str, str], jobs: Sequence[int], waiting: Sequence[int], minute_s: float
) -> list[Row]:
    case = f"{len(jobs):,} jobs"
    alone = _requests(environ, minute_s)
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = TcpAddress("root", "127.0.0.1", free.getsockname()[1])
    environ = environ | {"HETSTREAM_DAEMON": str(address), "PYTHONPATH": str(ROOT)}
    settings = SiteSettings(address, Path(environ["HETSTREAM_MUNGE_SOCKET"]))
    argv = [HETSTREAM, "site", "daemon", "--allocate", "--pool", "cpu", "--state-dir", str(directory / "state")]
    with background(argv, environ, directory / "daemon.log") as daemon:
        wait(lambda: (directory / "daemon.log").read_text().count("listen"), "the daemon", _DEADLINE_S)
        request = json.dumps({"jobs": list(jobs), "waiting": list(waiting)})
        stub = [sys.executable, "-m", "benchmarks.clients.site_jobs", request]
        with background(stub, environ, directory / "jobs.log") as masters:
            wait(lambda: "started" in (directory / "jobs.log").read_text(), "the job masters", _DEADLINE_S)
            began = time.monotonic()
            wait(lambda: len(_status(settings).jobs) == len(jobs), "all reports", _DEADLINE_S, 0.5)
            all_known_s = time.monotonic() - began
            before_s = _cpu_s(daemon.pid)
            together = _requests(environ, minute_s)
            cpu_s = _cpu_s(daemon.pid) - before_s
            known = _status(settings)
            masters.terminate()
            masters.wait(60)
    told = json.loads((directory / "jobs.log").read_text().splitlines()[-1])
    ages_s = [job.age_s for job in known.jobs]
    told_limit = sum(job.limit is not None for job in known.jobs)
    rate = sum(together.values()) / minute_s
    asked = ", ".join(f"{name} {count}" for name, count in sorted(together.items(), key=lambda one: -one[1])[:5])
    return [
        Row(case, "requests to slurmctld, alone", sum(alone.values()) / minute_s, "1/s"),
        Row(
            case, "requests to slurmctld, with hetstream", rate, "1/s",
            target=f"<= {MOST_REQUESTS_PER_S:g}", met=rate <= MOST_REQUESTS_PER_S, note=asked,
        ),
        Row(case, "looks at companions that were due, in all", told["due"], "looks"),
        Row(case, "of them by squeue, in all", told["looks"], "looks", note=f"{told['look_s']:.2f} s each"),
        Row(case, "jobs with a limit from the daemon", told_limit, "jobs",
            target=f">= {len(jobs)}", met=told_limit >= len(jobs)),
        Row(case, "all known to a daemon that has just started", all_known_s, "s"),
        Row(case, "age of a report, oldest", max(ages_s, default=0.0), "s"),
        Row(case, "CPU of the daemon", 100 * cpu_s / minute_s, "% of a core", note=f"{cpu_s:.1f} s"),
    ]  # fmt: skip


def _why(environ: dict[str, str], jobs: Sequence[int]) -> list[Row]:
    taken_s = []
    for job in jobs:
        began = time.monotonic()
        subprocess.run([HETSTREAM, "why", str(job)], env=environ, stdout=subprocess.DEVNULL, check=True, timeout=120)
        taken_s.append(time.monotonic() - began)
    slow_s = statistics.quantiles(taken_s, n=20)[-1] if len(taken_s) > 1 else taken_s[0]
    case = "hetstream why"
    return [
        Row(case, "median", statistics.median(taken_s), "s", samples=tuple(taken_s)),
        Row(case, "95th percentile", slow_s, "s", note=f"of {len(taken_s)} waiting jobs"),
    ]


def _requests(environ: dict[str, str], seconds: float) -> dict[str, int]:
    """Requests that slurmctld takes, by message type, without those of sdiag."""
    run_slurm(["sdiag", "--reset"], env=environ)
    time.sleep(seconds)
    text = run_slurm(["sdiag"], env=environ).stdout.partition("statistics by message type")[2]
    counts = {name: int(count) for name, count in _COUNT.findall(text.partition("statistics by user")[0])}
    return {name: count for name, count in counts.items() if name != "REQUEST_STATS_INFO"}


def _status(settings: SiteSettings) -> ShowStatus:
    """What the daemon knows. Where all jobs come at once it may close a connection, and is asked again."""
    deadline = time.monotonic() + _DEADLINE_S
    while True:
        try:
            status = ask(settings, AskStatus(), 30.0)
            assert isinstance(status, ShowStatus)
            return status
        except SiteError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def _submit(environ: dict[str, str], words: Sequence[str], count: int) -> list[int]:
    argv = ["sbatch", "--parsable", "--ntasks=1", "--output=/dev/null", "--chdir=/tmp", *words]

    def one(_: int) -> int:
        return int(run_slurm(argv, env=environ, timeout_s=120).stdout)

    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(one, range(count)))


def _squeue(environ: dict[str, str], state: str) -> list[int]:
    done = run_slurm(["squeue", "--noheader", f"--states={state}", "--format=%A"], env=environ, timeout_s=120)
    return [int(word) for word in done.stdout.split()]


def _cpu_s(pid: int) -> float:
    """Of a process and its children that have ended."""
    return sum(map(int, state_of(pid)[11:15])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    sys.exit(main())
