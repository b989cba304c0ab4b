"""The job masters of many jobs in one process, as far as site daemon and slurmctld can tell.

Each job reports to the daemon by the `SiteLink` of a real job master. Those whose companions wait in the queue ask
Slurm about them when a job master would, by its own rules (`PollBackoff`, and what the daemon has read) and its own
command. Prints how often, at the end.
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

from hetstream.hetjob.master.elastic import READ_WITHIN_S, PollBackoff
from hetstream.hetjob.ports import JobDemand
from hetstream.hetjob.site.client import SiteLink, read_settings
from hetstream.slurm_plugin.client.slurm import CommandSlurm

# Companions have waited for this long when the measurement begins.
WAITED_S = (60, 3600)


def looks_after(waited_s: int, now: float) -> PollBackoff:
    """What a job master remembers that has waited for its companions for so long, looking once a second."""
    looks = PollBackoff()
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
    num_due, num_looks, asked_s = 0, 0, 0.0
    linked: dict[int, SiteLink] = {}
    with contextlib.ExitStack() as links:
        for job in request["jobs"]:
            link = links.enter_context(SiteLink(settings, job))
            link.report(JobDemand(minimum=0, current=0, wanted=4, cpus=2, wait_share=0.5))
            linked[job] = link
        print(json.dumps({"case": "started"}), flush=True)
        while not stopped.wait(1.0):
            for job, looks in waiting.items():
                began, mark = time.monotonic(), f"hets:start={job}.0"
                if looks.is_due("pending", False, began):
                    num_due += 1
                    reading = linked[job].marked(mark)
                    if reading is not None and began - reading.taken_s <= READ_WITHIN_S:
                        continue
                    client.marked_jobs(mark)
                    num_looks += 1
                    asked_s += time.monotonic() - began
        told = {"case": "ended", "due": num_due, "looks": num_looks, "look_s": asked_s / max(1, num_looks)}
        print(json.dumps(told), flush=True)
        os._exit(0)  # a thousand links would be ended one after the other


if __name__ == "__main__":
    sys.exit(main())
