"""What there is on this machine for `benchmarks.gpu_session`: Python, torch, the GPU and its driver; what is missing.

Prints one JSON object. Exits with 1 where something that all stages need cannot be imported.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

# Of hetstream those that import everything else which runs beside a GPU.
_NEEDED = (
    "torch",
    "hetstream.hetjob.gpu.cuda",
    "hetstream.slurm_plugin.coordinator.server",
    "hetstream.mpi_dataworkers.loader.data_loader",
    "hetstream.mpi_dataworkers.gpu_features.corun",
    "hetstream.checkpoint.flash.checkpointer",
)
# Programs that stages start as users do.
_COMMAND = (sys.executable, "-m", "hetstream", "internal", "coordinator", "--help")
# One stage or another needs these; the others go on without.
_USEFUL = ("triton", "pynvml", "pytest", "pytest_timeout", "hypothesis", "PIL", "scipy", "torchvision")


def main() -> int:
    """Look, and print."""
    missing = {name: why for name in (*_NEEDED, *_USEFUL) if (why := _why_not(name))}
    done = subprocess.run(_COMMAND, capture_output=True, text=True, check=False)
    if done.returncode:
        missing[_NEEDED[-1]] = f"hetstream internal coordinator: {done.stderr.strip()[-300:]}"
    found = {**_machine(), **_torch()}
    summary = f"Python {found['python']}, torch {found['torch']}, triton {found['triton']}, {found['cores']} cores"
    print(json.dumps({"summary": summary, **found, "missing": missing}))
    needed = [f"{name}: {missing[name]}" for name in _NEEDED if name in missing]
    if needed:
        print("\n".join(["missing", *needed]), file=sys.stderr)
    return 1 if needed else 0


def _why_not(name: str) -> str:
    try:
        importlib.import_module(name)
    except Exception as error:  # noqa: BLE001 - whatever a module does when it is imported is why it is missing
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    return ""


def _machine() -> dict[str, Any]:
    shm = shutil.disk_usage("/dev/shm") if os.path.isdir("/dev/shm") else None
    return {
        "python": platform.python_version(),
        "kernel": platform.release(),
        "user": os.geteuid(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "shm_gib": round(shm.total / 2**30, 1) if shm else 0.0,
        "compiler": shutil.which("gcc") or shutil.which("clang") or "",
        "mps": shutil.which("nvidia-cuda-mps-control") or "",
    }


def _torch() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in ("torch", "triton"):
        module = sys.modules.get(name)
        found[name] = getattr(module, "__version__", "") if module else ""
    try:
        import torch

        found["cuda"] = torch.version.cuda or ""
        if torch.cuda.is_available():
            properties = torch.cuda.get_device_properties(0)
            found["gpu"] = properties.name
            found["gpu_memory_gib"] = round(properties.total_memory / 2**30, 1)
            found["multiprocessors"] = properties.multi_processor_count
            found["allocator"] = torch.cuda.get_allocator_backend()
    except Exception as error:  # noqa: BLE001 - what CUDA says of itself is a result
        found["cuda_says"] = f"{type(error).__name__}: {error}".partition("\n")[0]
    return found


if __name__ == "__main__":
    sys.exit(main())
