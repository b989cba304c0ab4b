"""Runs trainers in forked processes, as importing torch takes longer than what they do.

Each line of standard input is JSON: a list of jobs, each a list of arguments and a dict of environment variables; they
run side by side. The answer is a line with their exit codes. A trainer that is to be killed after a time gets
HETSTREAM_TEST_KILL_AFTER_S; one that is to start when a file is there gets HETSTREAM_TEST_AFTER.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import threading
import time
from functools import partial

import torch._dynamo  # noqa: F401, what a trainer would import at its first optimizer, half a second each

from hetstream.checkpoint import errors
from tests.checkpoint.processes import be_and_end
from tests.checkpoint.programs import flash_trainer


def run(argv: list[str], environ: dict[str, str]) -> None:
    """In the child: be the trainer."""
    os.environ.update(environ)
    errors.FAULTS.request(environ.get("HETSTREAM_CKPT_FAULT", ""))
    after_s = environ.get("HETSTREAM_TEST_KILL_AFTER_S")
    if after_s:
        threading.Timer(float(after_s), os.kill, (os.getpid(), signal.SIGKILL)).start()
    while not os.path.exists(environ.get("HETSTREAM_TEST_AFTER", "/")):
        time.sleep(0.01)
    sys.argv = ["flash_trainer", *argv]
    flash_trainer.main()


def main() -> None:
    """See the module."""
    gc.collect()
    gc.freeze()  # a child that collects garbage would have all of this as a copy of its own
    for line in sys.stdin:
        children = []
        for argv, environ in json.loads(line):
            child = os.fork()
            if child == 0:
                be_and_end(partial(run, argv, environ))
            children.append(child)
        print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]), flush=True)


if __name__ == "__main__":
    main()
