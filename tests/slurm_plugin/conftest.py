"""What several tests of the cluster side share is in `programs/`."""

from __future__ import annotations

import sys
from pathlib import Path

PROGRAMS = Path(__file__).with_name("programs")
if str(PROGRAMS) not in sys.path:
    sys.path.append(str(PROGRAMS))

from running_daemon import local, slurm  # noqa: E402

__all__ = ["local", "slurm"]
