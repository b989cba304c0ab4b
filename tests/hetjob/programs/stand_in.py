"""Stands in for the `hetstream` command in tests of the job master: starts in milliseconds, without the data plane.

`dispatcher`, `worker`, `embedding-server` and `writer` wait for SIGTERM; `master serve` is the real one over FakeSlurm.
A file `die-VERB` in the working directory makes that verb exit with 9 at once; every start is noted in `started`.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from pathlib import Path


def value(name: str) -> str:
    words = sys.argv
    return (
        next((word.split("=", 1)[1] for word in words if word.startswith(f"{name}=")), "")
        or words[words.index(name) + 1]
    )


def until_terminated() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    signal.sigwait({signal.SIGTERM})


assert sys.argv[1] == "internal"
verb = sys.argv[2]
with open("started", "a") as started:
    started.write(f"{verb} {os.getpid()}\n")
if Path(f"die-{verb}").exists():
    print(f"{verb} dies", file=sys.stderr)
    sys.exit(9)
if verb == "dispatcher":
    if not Path(value("--work-dir")).is_symlink():
        Path(value("--work-dir")).mkdir(exist_ok=True)
    Path(value("--work-dir"), "journal").write_text("keys\n")
    Path(value("--address-file")).write_text(value("--bind"))
    until_terminated()
    Path(value("--work-dir"), "summary.json").write_text('{"loaders": [{"steps": 7}], "data_workers_seen": 2}')
elif verb == "worker":
    if not Path(value("--service").removeprefix("file:")).exists():
        sys.exit("no service")
    until_terminated()
elif verb == "embedding-server":
    place = Path(value("--service").removeprefix("file:")).parent / "embedding-servers"
    place.mkdir(exist_ok=True)
    name = value("--name")
    log = Path(value("--directory"), f"server-{name}")
    log.mkdir(mode=0o700, exist_ok=True)
    with (log / "starts").open("a") as starts:
        starts.write(f"{os.getpid()}\n")
    registration = {"name": name, "start": "", "addresses": [], "log": str(log), "limit_bytes": int(value("--memory"))}
    (place / f"{name}.json").write_text(json.dumps(registration))
    until_terminated()
elif verb == "writer":
    from hetstream.hetjob.job.job import JobEnvironment, ready_file

    ready = ready_file(JobEnvironment.read(os.environ))
    ready.touch()
    until_terminated()
    ready.unlink()
elif sys.argv[3] == "keep":
    from hetstream.hetjob.master.server import keep

    logging.basicConfig(level=logging.INFO)
    sys.exit(keep([sys.executable, os.path.abspath(__file__), "internal", "master", "serve", sys.argv[4]]))
else:
    from hetstream.hetjob.job.job import JobEnvironment
    from hetstream.hetjob.master.server import MasterConfig, serve
    from hetstream.slurm_plugin.client.fake import FakeSlurm

    logging.basicConfig(level=logging.INFO)
    config = MasterConfig.read(Path(sys.argv[4]))
    sys.exit(serve(config, FakeSlurm(Path.cwd(), dict(os.environ)), os.environ))
