"""What is wrong with the GPUs of this host for jobs that share them: (readings) -> findings. Pure but for `read_gpus`.

A part of `hetstream doctor`, where that runs on a node with GPUs.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from hetstream.slurm_plugin.install.findings import Finding, Level

_QUERY = ["nvidia-smi", "--query-gpu=uuid,mig.mode.current,compute_mode", "--format=csv,noheader"]
_ANSWER_S = 20.0
# Where MPS has its pipes if CUDA_MPS_PIPE_DIRECTORY does not say.
_MPS_DIRECTORY = "/tmp/nvidia-mps"


@dataclass(frozen=True)
class HostGpus:
    """The GPUs of this host.

    Attributes:
        divided: by UUID, whether MIG divides it.
        modes: by UUID, its compute mode, as nvidia-smi has it: `Default`, `Exclusive_Process`, `Prohibited`.
        mps: where MPS listens; empty: nowhere.
    """

    divided: Mapping[str, bool]
    modes: Mapping[str, str]
    mps: str = ""


def read_gpus(environ: Mapping[str, str] = os.environ) -> HostGpus | None:
    """What nvidia-smi says; None where it says nothing."""
    try:
        done = subprocess.run(_QUERY, capture_output=True, text=True, timeout=_ANSWER_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    pipes = Path(environ.get("CUDA_MPS_PIPE_DIRECTORY", _MPS_DIRECTORY))
    return parse_gpus(done.stdout, str(pipes) if (pipes / "control").exists() else "")


def parse_gpus(answer: str, mps: str = "") -> HostGpus:
    """Read the lines of nvidia-smi; those of another form do not count."""
    rows = [[word.strip() for word in line.split(",")] for line in answer.splitlines()]
    rows = [row for row in rows if len(row) == len(_QUERY[1].split(","))]
    return HostGpus({name: mig == "Enabled" for name, mig, _ in rows}, {name: mode for name, _, mode in rows}, mps)


def host_gpus(gpus: HostGpus) -> Iterator[Finding]:
    """All findings."""
    exclusive = sorted(name for name, mode in gpus.modes.items() if mode != "Default")
    if exclusive:
        yield Finding(
            Level.PROBLEM, "compute mode", f"{gpus.modes[exclusive[0]]} of {', '.join(exclusive)}",
            "a second job on the GPU is refused by the driver", f"nvidia-smi -i {exclusive[0]} -c DEFAULT",
        )  # fmt: skip
    if gpus.mps:
        yield Finding(
            Level.WARNING, "MPS", gpus.mps,
            "a fault of one job ends all jobs on its GPU, a guaranteed one, too",
            "echo quit | nvidia-cuda-mps-control; jobs take turns without it",
        )  # fmt: skip
    divided = sorted(name for name, is_divided in gpus.divided.items() if is_divided)
    if divided and len(divided) < len(gpus.divided):
        yield Finding(
            Level.WARNING, "MIG", f"divides {len(divided)} of {len(gpus.divided)} GPUs",
            f"{', '.join(divided)} cannot be shared as a whole",
            "give the coordinator the instances, --gpu MIG-... of nvidia-smi -L; or nvidia-smi -i GPU -mig 0",
        )  # fmt: skip
