"""Runs what reads checkpoint directories on each of some, in a forked process for each: commands.py HOME DIR...

A process of its own, as a test's may have threads that a fork does not survive. What it all said is in DIR.said; what
was converted lies below DIR.out. Prints for each directory a line of JSON, see `Result`.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import resource
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

import hetstream.checkpoint.convert.weights  # noqa: F401, once for all: each command's process would import it anew
from hetstream.checkpoint.config import JOB_WRITER
from hetstream.checkpoint.convert.dcp import KINDS
from hetstream.checkpoint.errors import CheckpointError
from hetstream.checkpoint.flash.checkpointer import FlashCheckpointer
from hetstream.checkpoint.flash.options import CheckpointOptions
from hetstream.slurm_plugin.cli import main
from tests.checkpoint.hostile import state_of
from tests.checkpoint.processes import be_and_end

MAX_ACT_S = 100


class Result(NamedTuple):
    """What became of one directory.

    Attributes:
        directory: its path.
        exit_code: of the process; 0: every act ended as it may.
        num_bytes: memory beyond that before, of the process or of one that it started.
        acts: of each act its name, what it came to, seconds, and where what it said begins and ends in DIR.said.
        touched: what is not as it was, outside.
    """

    directory: str
    exit_code: int
    num_bytes: int
    acts: list[tuple[str, int | str, float, int, int]]
    touched: list[str]


def look(home: Path) -> dict[str, tuple[object, ...]]:
    """What can be seen of a tree that nobody may touch."""
    found: dict[str, tuple[object, ...]] = {}
    for path in (home, *home.rglob("*")):
        status = path.lstat()
        content = path.read_bytes() if path.is_file() else b""
        found[str(path)] = (status.st_mode, status.st_uid, status.st_size, status.st_mtime_ns, content)
    return found


def restore(directory: Path) -> str:
    """What a trainer does; the name of the error, if it is one of ours."""
    state = state_of(1)
    mine = state["model"]["weight"]
    before = mine.clone()
    memory = directory.with_name(directory.name + ".memory")
    memory.mkdir(mode=0o700)
    try:
        with FlashCheckpointer(directory, options=CheckpointOptions(shared_memory=memory)) as checkpointer:
            step = checkpointer.restore(state)
        return f"step {step}"
    except CheckpointError as error:
        assert torch.equal(mine, before), "a restore that failed has changed the state"
        print(f"{type(error).__name__}: {error}")
        return type(error).__name__


def acts_on(directory: Path, kinds: Sequence[str]) -> dict[str, Callable[[], int | str]]:
    """By name, in their order."""
    out = directory.with_name(directory.name + ".out")
    out.mkdir()
    acts: dict[str, Callable[[], int | str]] = {}

    def command(name: str, *words: str) -> None:
        acts[name] = lambda: main(["ckpt", *words])

    command("ls", "ls", str(directory))
    command("ls --json", "ls", "--json", str(directory))
    for kind in kinds:
        command(f"to {kind}", "convert", str(directory), str(out / kind), "--to", kind)
    acts["restore"] = lambda: restore(directory)
    command("verify", "verify", str(directory))
    command("gc --dry-run", "gc", "--dry-run", str(directory))
    command("gc", "gc", str(directory))
    return acts


def conversions_of(source: Path) -> dict[str, Callable[[], int | str]]:
    """Of what is no directory of ours."""
    out = source.with_name(source.name + ".out")
    out.mkdir()
    options = {"flash": ["--as-step", "1"], "torch": []}
    return {
        f"to {kind}": lambda kind=kind: main(  # type: ignore[misc]
            ["ckpt", "convert", str(source), str(out / kind), "--to", kind, *options[kind]]
        )
        for kind in options
    }


def run(home: Path, directory: Path, kinds: Sequence[str], before: dict[str, tuple[object, ...]]) -> Result:
    """Act on one directory in a forked process."""
    said = directory.with_name(directory.name + ".said")
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    receiver, sender = os.pipe()
    child = os.fork()
    if child == 0:

        def act_on() -> None:
            os.close(receiver)
            descriptor = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            for number in (1, 2):
                os.dup2(descriptor, number)
            sys.stdout = sys.stderr = open(1, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
            logging.basicConfig(stream=sys.stderr, level=logging.INFO)
            told = []
            is_source = directory.name.startswith("source-")
            acts = conversions_of(directory) if is_source else acts_on(directory, kinds)
            for name, act in acts.items():
                began_s, begin = time.monotonic(), os.fstat(1).st_size
                faulthandler.dump_traceback_later(MAX_ACT_S, exit=True)
                came_to = act()
                faulthandler.cancel_dump_traceback_later()
                sys.stdout.flush()
                told.append((name, came_to, time.monotonic() - began_s, begin, os.fstat(1).st_size))
            os.write(sender, json.dumps(told).encode())

        be_and_end(act_on)
    os.close(sender)
    with open(receiver) as pipe:
        text = pipe.read()
    _, status, usage = os.wait4(child, 0)
    after = look(home)
    touched = sorted(path for path in {*before, *after} if before.get(path) != after.get(path))
    more_bytes = (usage.ru_maxrss - size) << 10
    return Result(str(directory), os.waitstatus_to_exitcode(status), more_bytes, json.loads(text or "[]"), touched)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    os.environ[JOB_WRITER] = "1"  # a restore needs no checkpoint writer of its own
    torch.set_num_threads(1)
    the_home, *directories = map(Path, sys.argv[1:])
    seen = look(the_home)
    for number, one in enumerate(directories):
        # One conversion each: so many processes take their time.
        print(json.dumps(run(the_home, one, [KINDS[number % len(KINDS)]], seen)), flush=True)
