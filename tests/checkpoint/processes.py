"""Processes that a test begins and ends: fake trainers and checkpoint writers."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[2]
# Where programs of tests import from: first what leaves checkpoint writers the priority of the tests.
PYTHON_PATH = os.pathsep.join([str(Path(__file__).parent / "equal_priority"), str(ROOT)])


@dataclass
class FakeTrainer:
    """A process of `fake_trainer.py`, and its store."""

    process: subprocess.Popen[str]
    store: Path

    def say(self, line: str) -> None:
        """Have it do something, and wait until it has."""
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline().strip() == line

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        """Have it close its store, and end."""
        self.say("close")
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()


def begin_trainer(undo: contextlib.ExitStack, *words: object) -> FakeTrainer:
    """Begin a fake trainer; `fake_trainer.py` says what its words mean."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.checkpoint.fake_trainer", *map(str, words)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    undo.callback(end_process, process)
    assert process.stdout
    return FakeTrainer(process, Path(process.stdout.readline().strip()))


def begin_writer(
    undo: contextlib.ExitStack, store: Path, directory: Path, log: Path, fault: str = "", linger_s: float = 0.3
) -> subprocess.Popen[bytes]:
    """Begin the checkpoint writer of a store.

    Args:
        undo: ends it.
        store: its store.
        directory: of the checkpoints.
        log: its stderr is added there.
        fault: `faults.py` says how; "" for none.
        linger_s: see `writer.Options`.
    """
    request = {"HETSTREAM_CKPT_FAULT": fault} if fault else {}
    words = [f"--store={store}", f"--directory={directory}", f"--linger={linger_s}"]
    argv = [sys.executable, "-m", "hetstream.checkpoint.persist.writer", *words]
    with open(log, "ab") as stderr:
        process = subprocess.Popen(argv, stderr=stderr, env={**os.environ, **request}, cwd=ROOT)
    undo.callback(end_process, process)
    return process


def end_process(process: subprocess.Popen[Any]) -> None:
    """End a process, and close its pipes."""
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream:
            with contextlib.suppress(BrokenPipeError):
                stream.close()


def be_and_end(be: Callable[[], object]) -> NoReturn:
    """In a forked child: be something, and end with 0, or with 1 after an exception; nothing of the parent runs."""
    code = 1
    try:
        be()
        code = 0
    except BaseException:  # noqa: BLE001, the end of a process: told by its code
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)
