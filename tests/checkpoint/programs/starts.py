"""Starts a program again and again in forked processes, as importing its framework takes longer than what it does.

    python starts.py PROGRAM.py MODULE

Each line of standard input is JSON: the program's arguments, a file for what it says, and variables of its environment.
The answer is its exit code.
"""

import gc
import importlib
import json
import os
import runpy
import sys
import tempfile
import traceback


def start(program: str, argv: list[str], said: str, variables: dict[str, str]) -> None:
    """In the child: be the program."""
    descriptor = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.argv = [program, *argv]
    os.environ.update(variables)
    tempfile.tempdir = None  # TMPDIR may be another one
    code = 1
    try:
        runpy.run_path(program, run_name="__main__")
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:  # noqa: BLE001, the child's end: told by its code
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


program, module = sys.argv[1:]
importlib.import_module(module)
gc.collect()
gc.freeze()  # a child that collects garbage would have all of this as a copy of its own
for line in sys.stdin:
    argv, said, variables = json.loads(line)
    child = os.fork()
    if child == 0:
        start(program, argv, said, variables)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
# Taking all these modules down takes seconds.
os._exit(0)
