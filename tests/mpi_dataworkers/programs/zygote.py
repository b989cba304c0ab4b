"""Starts `hetstream internal worker` and others in forked processes, as importing torch takes longer than what they do.

Each line of standard input is JSON. ["start", WORDS, LOG, ENVIRONMENT, DIRECTORY] runs `hetstream WORDS` and answers
with its process id, as the user HETSTREAM_TEST_UID if the environment has that; ["reap", PID] waits for its end and
answers with its exit code.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import traceback
from types import ModuleType

import hetstream.mpi_dataworkers.dispatcher.server
import hetstream.mpi_dataworkers.embedding.server
import hetstream.mpi_dataworkers.worker.supervisor  # noqa: F401, and torch with it
from hetstream.mpi_dataworkers.process import faults
from hetstream.slurm_plugin.cli import main


def be_the_command(words: list[str], log: str, environment: dict[str, str], directory: str) -> None:
    """In the child: be `hetstream`, with nothing of this program."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for target, path, flags in ((0, os.devnull, os.O_RDONLY), (1, log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)):
        descriptor = os.open(path, flags, 0o600)
        os.dup2(descriptor, target)
        os.close(descriptor)
    os.dup2(1, 2)
    if uid := int(environment.pop("HETSTREAM_TEST_UID", "0")):
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    faults.FAULTS.request(environment.get("HETSTREAM_FAULT", ""))
    sys.argv = ["hetstream", *words]
    sys.modules["__main__"] = ModuleType("__main__")
    code = 1
    try:
        code = main(words)
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:  # noqa: BLE001, the child's end: told by its code
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def serve() -> None:
    """See the module."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the tests, and they end this
    sys.path.pop(0)  # a command does not find what lies beside this program
    gc.collect()
    gc.freeze()  # a child that collects garbage would have all of this as a copy of its own
    for line in sys.stdin:
        what, *more = json.loads(line)
        if what == "reap":
            answer = os.waitstatus_to_exitcode(os.waitpid(*more, 0)[1])
        else:
            answer = os.fork()
            if answer == 0:
                be_the_command(*more)
        print(answer, flush=True)
    os._exit(0)  # taking all these modules down takes seconds


if __name__ == "__main__":
    serve()
