"""Every setting that checkpoints read from the environment, in one place. No other module reads `os.environ`.

HETSTREAM_CKPT_FAULT     for tests: where a process is to die, see `faults.py`
"""

from __future__ import annotations

import os
from collections.abc import Mapping


def faults_from_environment(environ: Mapping[str, str] = os.environ) -> str:
    """Requests of a test to hurt this process, as `faults.py` reads them; empty without."""
    return environ.get("HETSTREAM_CKPT_FAULT", "")
