"""Runs the commands on checkpoint directories, each directory in a forked process: commands.py DIR...

A process of its own, as a test's may have threads that a fork does not survive. Prints for each directory a line of
JSON: exit code, seconds, bytes of memory beyond those before; what the commands said is in DIR.said.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
import traceback
from pathlib import Path

from slurm_plugin.cli import main


def run_commands(directory: Path) -> tuple[int, float, int]:
    """Exit code, seconds and bytes of memory."""
    said = directory.with_name(directory.name + ".said")
    began_s = time.monotonic()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with said.open("w") as sys.stdout:
                sys.stderr = sys.stdout
                for words in (["ls"], ["ls", "--json"], ["verify"], ["gc", "--dry-run"], ["gc"]):
                    assert main(["ckpt", *words, str(directory)]) in (0, 1)
            code = 0
        except BaseException:  # noqa: BLE001, the end of a process
            with said.open("a") as file:
                traceback.print_exc(file=file)
        finally:
            os._exit(code)
    _, status, usage = os.wait4(child, 0)
    return os.waitstatus_to_exitcode(status), time.monotonic() - began_s, (usage.ru_maxrss - before) << 10


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        print(json.dumps([argument, *run_commands(Path(argument))]), flush=True)
