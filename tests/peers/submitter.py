"""Run `hetstream` many times from one process, each time in a child of its own that has everything imported.

    python tests/peers/submitter.py

Each line of standard input is JSON: `argv` behind `hetstream`, `cwd`, `environ` beside the environment that there is,
and `out`: output goes to `OUT.stdout` and `OUT.stderr`. Each line of standard output is the process id of a child, and
when it has ended its exit code. Starting Python takes longer than what a submission takes.
"""

from __future__ import annotations

import json
import os
import sys

from hetstream.slurm_plugin.cli import main


def _run(argv: list[str], cwd: str, out: str, environ: dict[str, str]) -> None:
    """As the console script would, in a process group of its own; never returns."""
    os.setpgid(0, 0)
    os.chdir(cwd)
    os.environ.update(environ)
    nothing = os.open(os.devnull, os.O_RDONLY)
    files = [os.open(f"{out}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644) for name in ("stdout", "stderr")]
    for number, file in enumerate((nothing, *files)):
        os.dup2(file, number)
        os.close(file)
    sys.argv = ["hetstream", *argv]
    status = 1
    try:
        status = main()
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


for line in sys.stdin:
    request = json.loads(line)
    pid = os.fork()
    if pid == 0:
        _run(**request)
    print(pid, flush=True)
    _, status = os.waitpid(pid, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
