"""A rank of the table of pairs that a launcher has started: it says which one in the environment.

torchrun --nproc-per-node=2 launched.py JOB
"""

import json
import os
import signal
import sys
from pathlib import Path

from tests.checkpoint.pairs.programs import train
from tests.checkpoint.pairs.trainer import Job

if __name__ == "__main__":
    # A rank that is forked has its launcher's handlers, which one that is started anew has not.
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    given = json.loads(sys.argv[1])
    for name in ("directory", "memory", "out", "meeting"):
        given[name] = Path(given[name])
    # A launcher of one process may say nothing: then it is rank 0.
    rank = os.environ.get("RANK") or os.environ.get("HOROVOD_RANK") or "0"
    train(Job(**given | {"rank": int(rank)}))
