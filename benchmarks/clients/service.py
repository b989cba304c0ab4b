"""Start and stop hetstream's own commands for a client: one dispatcher, one data worker with N processes."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

# Generous: on a loaded machine importing torch in the worker alone takes seconds. Nothing measured depends on it.
START_DEADLINE_S = 60.0
STOP_DEADLINE_S = 20.0
PROGRAM_DEADLINE_S = 280.0


@contextlib.contextmanager
def running(processes: int, cores: set[int], threads: int = 1) -> Iterator[str]:
    """Yield the `service=` value of a running service whose processes are all pinned to `cores`.

    Raises:
        RuntimeError: the dispatcher ended or wrote no address file in time.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hetstream-bench-")))
        address = folder / "address"
        own = os.sched_getaffinity(0)
        os.sched_setaffinity(0, cores)  # inherited by what is started here
        try:
            dispatcher = stack.enter_context(
                _command(
                    "internal",
                    "dispatcher",
                    "--bind",
                    "tcp://127.0.0.1:0",
                    "--work-dir",
                    folder,
                    "--address-file",
                    address,
                )
            )
            deadline = time.monotonic() + START_DEADLINE_S
            while not address.exists():
                if dispatcher.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(
                        f"hetstream internal dispatcher wrote no {address.name}: exit code {dispatcher.poll()}"
                    )
                time.sleep(0.02)
            if processes:
                counts = ("--processes", processes, *(("--threads", threads) if threads > 1 else ()))
                stack.enter_context(_command("internal", "worker", "--service", f"file:{address}", *counts))
        finally:
            os.sched_setaffinity(0, own)
        yield f"file:{address}"


@contextlib.contextmanager
def streaming(loader: Any, processes: int) -> Iterator[Any]:
    """Yield an iterator of the loader that `processes` data workers feed, and close the loader at the end.

    A loader without data workers makes its own batches, at the speed of a function call. Nothing of that kind may be
    measured, so all data workers are waited for, and one step made in process is an error.

    Raises:
        RuntimeError: the data workers did not come in time, or the loader helped itself.
    """
    with loader:
        batches = iter(loader)
        wait_for_data_workers(loader, processes)
        yield batches
        if loader.stats()["local_steps"]:
            raise RuntimeError(f"the loader made batches in process: {loader.stats()}")


def wait_for_data_workers(loader: Any, processes: int) -> None:
    """Wait until so many data worker processes can reach the loader.

    Raises:
        RuntimeError: they did not come in time.
    """
    deadline = time.monotonic() + START_DEADLINE_S
    while loader.stats()["num_data_workers"] < processes:
        if time.monotonic() > deadline:
            raise RuntimeError(f"no {processes} data workers within {START_DEADLINE_S:g} s: {loader.stats()}")
        time.sleep(0.02)


def run_program(
    program: Sequence[str], cores: Sequence[int], hetstream: Sequence[str] = (), worker_cores: Sequence[int] = (),
    **variables: str,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:  # fmt: skip
    """Run a program that prints one JSON object, alone or under `hetstream run`, each on cores of its own.

    Args:
        program: its command line.
        cores: of the program and its own worker processes.
        hetstream: options of `hetstream run`.
        worker_cores: of data workers; without any the program runs alone.
        variables: more of its environment.

    Returns:
        What it printed, and the loaders of the summary of `hetstream run`.

    Raises:
        SystemExit: it failed, with its last line.
    """
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HETSTREAM_")} | variables
    argv = ["taskset", "-c", ",".join(map(str, cores)), *program]
    with tempfile.NamedTemporaryFile(suffix=".json") as summary:
        if worker_cores:
            run = [sys.executable, "-m", "hetstream.slurm_plugin.cli", "run", "--json", summary.name, *hetstream, "--"]
            argv = ["taskset", "-c", ",".join(map(str, worker_cores)), *run, *argv]
        done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=PROGRAM_DEADLINE_S)
        if done.returncode:
            raise SystemExit((done.stderr or done.stdout).strip().splitlines()[-1])
        found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
        return found, json.loads(Path(summary.name).read_text())["loaders"] if worker_cores else []


@contextlib.contextmanager
def _command(verb: str, *arguments: object) -> Iterator[subprocess.Popen[bytes]]:
    """Run one hetstream verb until the block ends."""
    argv: Sequence[str] = [str(Path(sys.executable).with_name("hetstream")), verb, *map(str, arguments)]
    process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
