"""Make the environments of the peers that do not belong in the project's own one.

Called by the benchmarks. The environments are `.venv-peers*` in the project's root (ignored by git, removed by
`make clean`). Each is made on first use and again when its pins below change; nothing else ever installs into it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import say
from benchmarks.running import ROOT


@dataclass(frozen=True)
class PeerSet:
    """Distributions that live in one environment.

    Attributes:
        folder: name of the environment in the project's root.
        pins: exact versions: a comparison names the version it was made with.
    """

    folder: str
    pins: tuple[str, ...]


TENSORFLOW = PeerSet(".venv-peers", ("tensorflow-cpu==2.21.0",))
# torch as the project's own tests have it: an open range pulls gigabytes of CUDA packages.
TORCH_PEERS = PeerSet(
    ".venv-peers-torch",
    (
        "torch==2.13.0",
        "torchdata==0.11.0",
        "ray[data]==2.60.0",
        "grain==0.2.18",
        "mosaicml-streaming==0.13.0",
        "rpcdataloader==0.2.1",
    ),
)
# The TensorFlow wheel is 250 MB; a machine that needs longer than this is not going to get it.
INSTALL_DEADLINE_S = 900.0


@dataclass(frozen=True)
class Peers:
    """Where the peers' Python is, or why there is none, and the versions of the pinned distributions."""

    python: Path | None
    missing: str
    versions: dict[str, str]


NONE = Peers(None, "not asked for", {})


def environment(which: PeerSet = TENSORFLOW, *, make: bool = True) -> Peers:
    """Return an environment of peers, made if need be. Never raises: a missing peer is a row, not an error.

    Args:
        which: the environment.
        make: install when it is not there; without it an absent environment is reported as missing.
    """
    folder = ROOT / which.folder
    python, ready = folder / "bin" / "python", folder / ".ready"
    pins = "\n".join(which.pins)
    if not (ready.exists() and ready.read_text() == pins):
        if not make:
            return Peers(None, f"no peer environment in {which.folder}; run the benchmark without --quick", {})
        say(f"  making {which.folder} with {', '.join(which.pins)} (once, some minutes)")
        try:
            shutil.rmtree(folder, ignore_errors=True)
            _call([sys.executable, "-m", "venv", str(folder)])
            _call([str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", *which.pins])
        except (OSError, subprocess.SubprocessError) as error:
            shutil.rmtree(folder, ignore_errors=True)
            return Peers(None, f"the peer environment cannot be made: {_reason(error)}", {})
        ready.write_text(pins)
    return Peers(python, "", dict(pin.split("==") for pin in which.pins))


def _call(argv: list[str]) -> None:
    subprocess.run(argv, check=True, capture_output=True, text=True, timeout=INSTALL_DEADLINE_S)


def _reason(error: Exception) -> str:
    """Prefer pip's own last error line to an exit code."""
    lines = [line for line in (getattr(error, "stderr", None) or "").splitlines() if line.startswith("ERROR")]
    return lines[-1] if lines else str(error)
