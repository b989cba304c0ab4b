"""Stands for a training program: tells what a rank sees of its job, and ends as it is told."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

arguments = sys.argv[1:]
# Not to the output, where the lines of ranks may be mixed.
Path(f"rank-{os.getpid()}.json").write_text(json.dumps({"arguments": arguments, "environ": dict(os.environ)}))
sys.exit(int(arguments[arguments.index("--exit") + 1]) if "--exit" in arguments else 0)
