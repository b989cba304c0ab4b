"""How a job calls this very hetstream. Used by the verbs that start it again elsewhere."""

from __future__ import annotations

import sys
from pathlib import Path

from hetjob.errors import ProgramNotFound


def own_program() -> tuple[str, ...]:
    """The `hetstream` command of this Python environment, as an absolute path that symbolic links do not change.

    Raises:
        ProgramNotFound: the command is not beside the interpreter.
    """
    program = Path(sys.executable).absolute().with_name("hetstream")
    if not program.exists():
        raise ProgramNotFound(
            f"{program} does not exist: hetstream must be installed in the environment that runs it. "
            f"Run: {sys.executable} -m pip install hetstream"
        )
    return (str(program),)
