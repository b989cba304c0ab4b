"""Packages that hetstream needs and a machine with a GPU may lack: fetched here, used there without being installed.

`make gpu-wheels` fetches the wheels into `build/gpu-wheels`, which is ignored by git and goes along with the tree.
`gpu_session.py` unpacks those that are missing beside its results. Only Python's own library is used.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build/gpu-wheels"
MOST_BYTES = 3_000_000
# What GPU machines run. pip matches a platform to the letter, so those of all wheels of today are named.
_PYTHON = "3.12"
_PLATFORMS = ("manylinux2014", "manylinux_2_17", "manylinux_2_26", "manylinux_2_27", "manylinux_2_28")
# Whoever has torch has NumPy, which alone is larger than all the others. rich draws tables for a terminal, shtab
# writes its completion.
_LEFT_OUT = ("numpy", "rich", "shtab")


def requirements() -> list[str]:
    """What `pyproject.toml` says that hetstream needs, with what reads the driver's counts."""
    text = (ROOT / "pyproject.toml").read_text()
    needed = re.search(r"^dependencies = \[(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    nvml = re.search(r"^nvml = \[(.*?)\]", text, re.MULTILINE)
    assert needed
    assert nvml
    found = re.findall(r'"([^"]+)"', needed[1] + nvml[1])
    return [each for each in found if re.split(r"[<>=~!]", each)[0] not in _LEFT_OUT]


def fetch() -> int:
    """Fetch the wheels anew. The number of their bytes.

    Raises:
        SystemExit: pip does not get them, or they are too large to go along.
    """
    FOLDER.mkdir(parents=True, exist_ok=True)
    for old in FOLDER.glob("*.whl"):
        old.unlink()
    argv = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
    argv += ["--only-binary=:all:", "--implementation", "cp", "--python-version", _PYTHON]
    argv += [word for name in _PLATFORMS for word in ("--platform", f"{name}_x86_64")]
    done = subprocess.run([*argv, "-d", str(FOLDER), *requirements()], check=False)
    if done.returncode:
        raise SystemExit(f"pip did not get {', '.join(requirements())} for Python {_PYTHON}")
    num_bytes = sum(path.stat().st_size for path in FOLDER.glob("*.whl"))
    if num_bytes > MOST_BYTES:
        raise SystemExit(f"the wheels in {FOLDER} have {num_bytes:,} bytes, and may have {MOST_BYTES:,}")
    return num_bytes


def unpacked(into: Path, folder: Path = FOLDER) -> tuple[str, list[str]]:
    """Unpack what this Python does not have.

    Args:
        into: directory for the packages.
        folder: of the wheels.

    Returns:
        The directory for PYTHONPATH, or "" if nothing is missing, and the names of what was unpacked.
    """
    missing = [wheel for wheel in sorted(folder.glob("*.whl")) if not _is_here(wheel)]
    for wheel in missing:
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(into)
    return (str(into) if missing else ""), [wheel.name.split("-")[0] for wheel in missing]


def _is_here(wheel: Path) -> bool:
    return any(importlib.util.find_spec(name) is not None for name in _packages(wheel))


def _packages(wheel: Path) -> Sequence[str]:
    """What can be imported of a wheel: its directories and modules at the top."""
    with zipfile.ZipFile(wheel) as packed:
        tops = {name.split("/")[0] for name in packed.namelist()}
    return sorted({top.removesuffix(".py") for top in tops if re.fullmatch(r"[a-z]\w*(\.py)?", top)})


if __name__ == "__main__":
    print(f"{fetch():,} bytes in {FOLDER.relative_to(ROOT)}: {', '.join(requirements())}")
