"""NVIDIA's MPS, and preprocessing in a process of its own beside training under it: a system of `rap.py`.

The trainer and the preprocessing are two processes that begin when MPS does. As in RAP's program, a batch is begun by
a message and its results stay where they are: handing them over is left out, in favour of this system.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from benchmarks.running import ROOT

if TYPE_CHECKING:
    from benchmarks.rap_systems import Bench

MPS = "MPS"
_CONTROL = "nvidia-cuda-mps-control"
_LIMIT_S = 240


def mps_missing() -> str:
    """Why MPS cannot be used here; "" if it can."""
    if shutil.which(_CONTROL) is None:
        return f"{_CONTROL} is not installed"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        return _start(_environment(folder)) or _stop(_environment(folder))


def mps_step_s(bench: Bench, limit_s: float = _LIMIT_S) -> float:
    """Seconds of a training step with the next batch computed by another process.

    Raises:
        RuntimeError: MPS cannot be started, or the trainer failed.
        TimeoutExpired: the trainer has not ended; where MPS starts but serves nobody, it may wait for ever.
    """
    tf32 = bool(torch.backends.cuda.matmul.allow_tf32)
    request = {"plan": bench.size.name, "rows": bench.rows, "steps": bench.num_steps, "tf32": tf32}
    with mps_service() as environment:
        argv = [sys.executable, str(ROOT / "benchmarks/clients/rap_mps.py"), json.dumps(request)]
        environ = {**os.environ, **environment}
        done = subprocess.run(
            argv, env=environ, capture_output=True, text=True, timeout=min(limit_s, _LIMIT_S), check=False
        )
    if done.returncode:
        raise RuntimeError(f"MPS: the trainer ended with {done.returncode}: {done.stderr[-2000:]}")
    return float(json.loads(done.stdout.splitlines()[-1])["step_s"])


@contextlib.contextmanager
def mps_service() -> Iterator[dict[str, str]]:
    """A service of our own, as long as the context, which no other program meets. Variables of whoever is to use it.

    Raises:
        RuntimeError: MPS cannot be started.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        environment = _environment(folder)
        if why := _start(environment):
            raise RuntimeError(f"MPS: {why}")
        try:
            yield environment
        finally:
            _stop(environment)


def _environment(folder: str) -> dict[str, str]:
    places = {"CUDA_MPS_PIPE_DIRECTORY": "pipe", "CUDA_MPS_LOG_DIRECTORY": "log"}
    for name in places.values():
        Path(folder, name).mkdir(exist_ok=True)
    return {variable: str(Path(folder, name)) for variable, name in places.items()}


def _start(environment: dict[str, str]) -> str:
    return _answer([_CONTROL, "-d"], environment)


def _stop(environment: dict[str, str]) -> str:
    return _answer([_CONTROL], environment, "quit\n")


def _answer(argv: list[str], environment: dict[str, str], text: str = "") -> str:
    """What a command says if it fails; "" if it does not."""
    # A file: a daemon that the command leaves behind may hold it open, and nobody waits for its end.
    with tempfile.TemporaryFile("w+") as said:
        try:
            done = subprocess.run(
                argv,
                env={**os.environ, **environment},
                input=text,
                stdout=said,
                stderr=said,
                text=True,
                timeout=30,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
        if not done.returncode:
            return ""
        said.seek(0)
        return said.read().strip() or f"{argv[0]} ended with {done.returncode}"
