"""Where a benchmark runs, and with which versions."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.running import ROOT


def describe(**pinned: Sequence[int]) -> dict[str, Any]:
    """Describe where the run took place; `pinned` names core sets (client=[0], producer=[1])."""
    cpuinfo = Path("/proc/cpuinfo").read_text()
    model = next((line.split(":", 1)[1].strip() for line in cpuinfo.splitlines() if line.startswith("model name")), "")
    return {
        "cpu": model or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.platform(),
        "load_average_at_start": round(os.getloadavg()[0], 2),
        "pinned_cores": {name: list(cores) for name, cores in pinned.items()},
    }


def versions(*distributions: str) -> dict[str, str]:
    """Python's version, the project's commit and the named distributions of this environment."""
    found = {"python": platform.python_version()}
    for name in ("hetstream", *distributions):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    argv = ["git", "describe", "--always", "--dirty"]
    try:
        commit = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:  # a machine that is lent may have no git
        commit = ""
    found["commit"] = commit or "not a git checkout"
    return found


def caches() -> tuple[int, ...]:
    """Bytes of each cache for data that the first allowed core has; none where the system does not say."""
    found = []
    for folder in sorted(Path(f"/sys/devices/system/cpu/cpu{min(os.sched_getaffinity(0))}/cache").glob("index*")):
        text = (folder / "size").read_text().strip()
        if (folder / "type").read_text().strip() != "Instruction" and text.endswith("K"):
            found.append(int(text[:-1]) << 10)
    return tuple(found)


def two_cores() -> tuple[int, int]:
    """Pick a client and a producer core: not hardware threads of one core where that can be avoided.

    With a single allowed core both are that one; the report says so through `pinned_cores`.
    """
    allowed = sorted(os.sched_getaffinity(0))
    first = allowed[0]
    try:
        text = Path(f"/sys/devices/system/cpu/cpu{first}/topology/thread_siblings_list").read_text()
        siblings = {int(word) for part in text.split(",") for word in part.split("-")}
    except (OSError, ValueError):
        siblings = {first}
    others = [core for core in allowed if core != first]
    return first, next((core for core in others if core not in siblings), others[0] if others else first)
