"""The job masters of many jobs in one process, as far as site daemon and slurmctld can tell.

Each job reports to the daemon by the `SiteLink` of a real job master. Those whose companions wait in the queue ask
Slurm about them when a job master would, by its own rule (`Looks`) and its own command. Prints how often, at the end.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import threading
import time

from hetjob.master.looks import Looks
from hetjob.site.address import read_settings
from hetjob.site.link import SiteLink
from slurm_plugin.client.slurm import CommandSlurm

# Companions have waited for this long when the measurement begins.
WAITED_S = (60, 3600)


def looks_after(waited_s: int, now: float) -> Looks:
    """What a job master remembers that has waited for its companions for so long, looking once a second."""
    looks = Looks()
    for second in range(waited_s):
        looks.is_due("pending", False, now - waited_s + second)
    return looks


def main() -> int:
    """Run until SIGTERM."""
    request = json.loads(sys.argv[1])
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    settings, client, draw = read_settings(os.environ), CommandSlurm(), random.Random(1)
    now = time.monotonic()
    waiting = {job: looks_after(draw.randint(*WAITED_S), now) for job in request["waiting"]}
    num_looks, asked_s = 0, 0.0
    with contextlib.ExitStack() as links:
        for job in request["jobs"]:
            link = links.enter_context(SiteLink(settings, job))
            link.report(0, 0, 4, 2, 0.5)
        print(json.dumps({"case": "started"}), flush=True)
        while not stopped.wait(1.0):
            for job, looks in waiting.items():
                if looks.is_due("pending", False, time.monotonic()):
                    began = time.monotonic()
                    client.marked_jobs(f"hets:start={job}.0")
                    num_looks += 1
                    asked_s += time.monotonic() - began
        print(json.dumps({"case": "ended", "looks": num_looks, "look_s": asked_s / max(1, num_looks)}), flush=True)
        os._exit(0)  # a thousand links would be ended one after the other


if __name__ == "__main__":
    sys.exit(main())
