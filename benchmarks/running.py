"""Run one client program (`benchmarks/clients/`) in its own process group to its end, and end what it leaves behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.processes import all_processes, is_alive, state_of

ROOT = Path(__file__).resolve().parents[1]
# A client that was told to stop gets this long to take its own children down before it counts as a leak.
TEARDOWN_GRACE_S = 5.0

Sample = Mapping[str, float]
"""What one client measured for one case in one repeat: metric name -> value."""


class ClientFailed(Exception):
    """A client program ended with an error, ran past its deadline or printed something that is no sample."""


def run_client(argv: Sequence[str], request: Mapping[str, Any], deadline_s: float) -> dict[str, Sample]:
    """Run one client program to its end and return case -> sample. Whatever it started is gone afterwards.

    Raises:
        ClientFailed: with the last line of its stderr, or the processes it left behind.
    """
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        process = subprocess.Popen(
            [*argv, json.dumps(request)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            leaked = _end_group(process)
        stdout.seek(0)
        stderr.seek(0)
        lines, complaints = stdout.read().splitlines(), stderr.read().strip().splitlines()
    last = complaints[-1] if complaints else "nothing on stderr"
    if code is None:
        raise ClientFailed(f"no end after {deadline_s:.0f} s: {last}")
    if code != 0:
        raise ClientFailed(f"exit code {code}: {last}")
    if leaked:
        raise ClientFailed("left processes running after its end")
    try:
        parsed = [json.loads(line) for line in lines if line.startswith("{")]
        return {entry.pop("case"): entry for entry in parsed}
    except (ValueError, KeyError) as error:
        raise ClientFailed(f"printed no sample: {error!r}: {lines[-1:]}") from error


@contextlib.contextmanager
def background(argv: Sequence[str], environ: Mapping[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A program that runs beside the benchmark, and is ended with it."""
    with log.open("wb") as out, subprocess.Popen(argv, env=environ, cwd=ROOT, stdout=out, stderr=out) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(30)
                except subprocess.TimeoutExpired:
                    process.kill()


def _end_group(process: subprocess.Popen[bytes]) -> bool:
    """End every process of the client's group; say whether it left any after its own end."""
    ended_itself = process.poll() is not None
    # A child of an ended client may be on its way out: it counts as left behind only if it stays.
    if not ended_itself:
        _signal_group(process.pid, signal.SIGTERM)
    leaked = not _group_gone(process.pid, TEARDOWN_GRACE_S)
    if leaked:
        _signal_group(process.pid, signal.SIGKILL)
        _group_gone(process.pid, TEARDOWN_GRACE_S)
    process.wait()
    return leaked and ended_itself


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def _group_gone(group: int, within_s: float) -> bool:
    """Wait until the process group has no member left; say whether that came true in time."""
    deadline = time.monotonic() + within_s
    while alive := _group_alive(group):
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    return not alive


def _group_alive(group: int) -> bool:
    """Say whether the process group has a member that is not a zombie (nobody may be there to reap orphans)."""
    return any(is_alive(pid) and state_of(pid)[2:3] == [str(group)] for pid in all_processes())
