"""How a job calls this very hetstream, or that of another Python. Used by the verbs that start it again elsewhere."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from hetstream.base.installed import install_command
from hetstream.hetjob.errors import ProgramNotFound

if TYPE_CHECKING:
    from hetstream.mpi_dataworkers.process.interpreter import PythonEnvironment

# What comes before the import: else modules of the working directory would be found first.
_START = "import sys; sys.path[:1] = filter(None, sys.path[:1]); "
_START += "from hetstream.slurm_plugin.cli import main; sys.exit(main())"


def own_program() -> tuple[str, ...]:
    """Return the `hetstream` command of this Python environment, as an absolute path that symbolic links do not change.

    It is beside the interpreter, or where pip has put it: `pip install --user` and `--prefix` choose another place.

    Raises:
        ProgramNotFound: the command is at neither place.
    """
    beside = Path(sys.executable).absolute().with_name("hetstream")
    for program in (beside, *_placed_by_pip()):
        if program.exists():
            return (str(program),)
    raise ProgramNotFound(
        f"{beside} does not exist: hetstream must be installed in the environment that runs it. "
        f"Run: {install_command(python=sys.executable)}"
    )


def _placed_by_pip() -> Iterator[Path]:
    try:
        files = distribution("hetstream").files or []
    except PackageNotFoundError:
        return
    for file in files:
        if file.name == "hetstream" and file.parent.name == "bin":
            yield Path(os.path.abspath(file.locate()))


def program_of(python: Sequence[str]) -> tuple[str, ...]:
    """Return the `hetstream` command of another Python.

    Args:
        python: the command that starts it, such as `apptainer exec image.sif python`.
    """
    return (*python, "-c", _START)


def become(wanted: PythonEnvironment, arguments: Sequence[str]) -> NoReturn:
    """Go on as `hetstream WORDS` in another Python environment; the process keeps its number.

    Raises:
        OSError: it could not be started.
    """
    from hetstream.mpi_dataworkers.process.config import environment_of_python  # an sbatch needs none of it

    argv = [*program_of([wanted.executable]), *arguments]
    os.execve(wanted.executable, argv, environment_of_python(wanted.without_strangers().variables))
