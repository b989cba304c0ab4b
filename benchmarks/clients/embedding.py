"""Trainings with embeddings on hosts of their own, and what happens to one whose embedding servers come and go.

unshare --net python -m benchmarks.clients.embedding SYSTEM REQUEST
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.clients.embedding_hosts import Hosts, Servers, found_by, hosts_of, start_ranks
from benchmarks.processes import wait
from hetstream.mpi_dataworkers.embedding.registration import read_registrations

_EVENT_S = 1.5  # of undisturbed steps before something happens
_EFFECT_S = 25.0  # in which its effect is counted


def measure(hosts: Hosts, asked: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Run the training of a case."""
    hosts.set_speed(asked["mbit"])
    if asked["holder"] == "wire":
        return hosts.wire(folder / "wire.log", asked["cores"])
    variables: dict[str, str] = {}
    if asked.get("servers"):
        servers = Servers(hosts, folder, asked["server_cores"])
        for number in range(asked["servers"]):
            servers.start(number)
        variables = servers.variables(asked["servers"])
    return found_by(start_ranks(hosts, asked, asked["cores"], folder, **variables), folder)


def events(hosts: Hosts, asked: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Let something happen to the servers of a training, and count what that costs its steps."""
    hosts.set_speed(asked["mbit"])
    servers = Servers(hosts, folder, asked["server_cores"])
    for number in range(2):
        servers.start(number)
    began, saved = folder / "began", folder / "saved.pt"
    asked = {**asked, "began": str(began)}
    if asked["event"] == "save":
        asked |= {"save": str(saved), "save_after": asked["warmup"] + asked["steps"] // 2}
    ranks = start_ranks(hosts, asked, asked["cores"], folder, **servers.variables(2))
    wait(began.exists, "the first step", every_s=0.01)
    time.sleep(_EVENT_S)
    at = time.monotonic()
    if asked["event"] == "add":
        servers.start(2)
    elif asked["event"] == "kill":
        servers.kill(1)
        at = time.monotonic()
        servers.start(1)
    found = found_by(ranks, folder)
    if asked["event"] == "add":
        found["rows_there"] = read_registrations(servers.address.parent / "embedding-servers")["2"].rows
    ends = found.pop("ends")
    steps = [(end, end - begin) for begin, end in itertools.pairwise(ends)]
    after = [step_s for end, step_s in steps if at <= end < at + _EFFECT_S]
    usual_s = statistics.median(step_s for _, step_s in steps)
    if not after:
        raise SystemExit("the training ended before anything happened")
    if asked["event"] == "save":
        return found | _restored(hosts, asked, folder, found.pop("losses"))
    lost_s = sum(max(0.0, step_s - usual_s) for step_s in after)
    waited_s = found["wait_ms"] * asked["steps"] / 1e3
    return found | {
        "pause_ms": 1e3 * max(after), "lost_s": lost_s, "waited_s": waited_s, "usual_ms": 1e3 * usual_s,
    }  # fmt: skip


def _restored(hosts: Hosts, asked: dict[str, Any], folder: Path, losses: Sequence[float]) -> dict[str, float]:
    """Go on from what was saved, with another number of servers."""
    hosts.end_programs()
    own = folder / "restored"
    own.mkdir()
    servers = Servers(hosts, own, asked["server_cores"])
    servers.folder = folder  # the logs of those before
    for number in range(3):
        servers.start(number)
    first = asked["save_after"] + 1
    again = {key: value for key, value in asked.items() if key not in ("save", "save_after", "began")}
    again |= {"load": asked["save"], "first": first, "warmup": 2, "steps": len(losses) - first - 2}
    found = found_by(start_ranks(hosts, again, asked["cores"], own, **servers.variables(3)), own)
    differ = sum(one != other for one, other in zip(found["losses"], losses[first:], strict=True))
    return {"load_ms": found["load_ms"], "steps_that_differ": differ}


def main() -> None:
    """Run what the command line asks for."""
    request = json.loads(sys.argv[2])
    names = [*(f"trainer{rank}" for rank in range(4)), *(f"server{number}" for number in range(3))]
    for case, options in request["cases"].items():
        asked = {**request, **options, **options.get(sys.argv[1], {})}
        run: Callable[..., dict[str, Any]] = events if "event" in asked else measure
        with hosts_of(names) as (hosts, folder):
            print(json.dumps({"case": case, **run(hosts, asked, folder)}), flush=True)


if __name__ == "__main__":
    main()
