"""What a script runs, as two short digests by which jobs are compared: (script) -> `WhatRuns`. Pure.

Called when a job ends, with the script that Slurm has of it, and before a submission, with the user's. Two scripts run
the same if their commands are equal but for numbers that stand alone: a sweep changes `--lr 0.1`, and a directory's
copy nothing. A script that was edited still names the same files (`train.py`, `vit.yaml`), unless it runs something
else. Digests, because commands may hold what their user keeps to himself.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from hetstream.hetjob.render import without_block

_NUMBER = re.compile(r"""(?<![^\s=,:;"'(\[])[-+]?\d+(?:\.\d*)?(?:[eE][-+]?\d+)?(?![^\s,:;"')\]])""")
_FILE_NAME = re.compile(r"""[^\s"'=,;()|&<>/]+\.[A-Za-z]\w*""")
_DIGITS = 16


@dataclass(frozen=True, slots=True)
class WhatRuns:
    """Of one script.

    Attributes:
        commands: of all its commands without their numbers; "" for a script without a command.
        files: of the names of files and modules in them, in whatever folder; "" where they name none.
    """

    commands: str = ""
    files: str = ""


def what_runs(script: str) -> WhatRuns:
    """The digests of a script, converted or not.

    Args:
        script: its text; bytes that are no UTF-8 may come as surrogates.
    """
    lines = (line.strip() for line in re.sub(r"\\\r?\n", " ", without_block(script)).split("\n"))
    text = "\n".join(
        " ".join(_NUMBER.sub("0", line).split()) for line in lines if line and not line.startswith("#")
    )  # fmt: skip
    return WhatRuns(_digest(text), _digest("\n".join(sorted(set(_FILE_NAME.findall(text))))))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:_DIGITS] if text else ""
