"""Make the environment of the peers that do not belong in the project's own one.

Called by the benchmarks. The environment is `.venv-peers` in the project's root (ignored by git, removed by
`make clean`). It is made on first use and again when the pins below change; nothing else ever installs into it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import ROOT, say

# Pinned: a comparison names the exact version it was made with.
PINS = ("tensorflow-cpu==2.21.0",)
FOLDER = ROOT / ".venv-peers"
# The TensorFlow wheel is 250 MB; a machine that needs longer than this is not going to get it.
INSTALL_DEADLINE_S = 900.0


@dataclass(frozen=True)
class Peers:
    """Where the peers' Python is, or why there is none, and the versions of the pinned distributions."""

    python: Path | None
    missing: str
    versions: dict[str, str]


NONE = Peers(None, "not asked for", {})


def environment(*, make: bool = True) -> Peers:
    """Return the environment of the peers, made if need be. Never raises: a missing peer is a row, not an error.

    Args:
        make: install when it is not there; without it an absent environment is reported as missing.
    """
    python, ready = FOLDER / "bin" / "python", FOLDER / ".ready"
    pins = "\n".join(PINS)
    if not (ready.exists() and ready.read_text() == pins):
        if not make:
            return Peers(None, f"no peer environment in {FOLDER.name}; run the benchmark without --quick", {})
        say(f"  making {FOLDER.name} with {', '.join(PINS)} (once, some minutes)")
        try:
            shutil.rmtree(FOLDER, ignore_errors=True)
            _call([sys.executable, "-m", "venv", str(FOLDER)])
            _call([str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", *PINS])
        except (OSError, subprocess.SubprocessError) as error:
            shutil.rmtree(FOLDER, ignore_errors=True)
            return Peers(None, f"the peer environment cannot be made: {_reason(error)}", {})
        ready.write_text(pins)
    return Peers(python, "", dict(pin.split("==") for pin in PINS))


def _call(argv: list[str]) -> None:
    subprocess.run(argv, check=True, capture_output=True, text=True, timeout=INSTALL_DEADLINE_S)


def _reason(error: Exception) -> str:
    """Prefer pip's own last error line to an exit code."""
    lines = [line for line in (getattr(error, "stderr", None) or "").splitlines() if line.startswith("ERROR")]
    return lines[-1] if lines else str(error)
