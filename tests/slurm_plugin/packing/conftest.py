"""The Slurm in memory is beside the tests."""

from __future__ import annotations

import sys
from pathlib import Path

if (_here := str(Path(__file__).parent)) not in sys.path:
    sys.path.append(_here)
