"""Errors of the job side; their base classes are in `hetstream.base.errors`.

HetstreamError
├── UsageError
│   ├── DirectiveError       a `#HETSTREAM` line is wrong (with its line number)
│   │   └── DataWorkersMissing   nothing is wrong but that none says how many data workers
│   └── ConversionError      Slurm cannot do this with a heterogeneous job, one subclass per limit in convert.py
├── MasterError              the job master did not start
├── WritersNotStarted        the checkpoint writers of a job did not start
├── GpuCoordinatorError      nobody coordinates the GPUs of this node, or what answers is something else
├── GpuJobRefused            the coordinator does not let a process share a GPU
│   └── GpuTaken             another guaranteed job has the GPU
├── ServiceNotFound          no service of the job that was named
├── SiteError                the site daemon does not answer, or says what cannot be trusted
│   └── SiteClosed           it closed the connection without an answer
├── ProgramNotFound          the user's program, or hetstream's own command, is not there
└── SlurmCommandError        a Slurm command failed: argv, exit code, stdout, stderr
"""

from __future__ import annotations

from collections.abc import Sequence

from hetstream.base.errors import HetstreamError, UsageError
from hetstream.base.text import shortened

# Characters of what a command was told, and of what it said, in a message; both may hold what users wrote.
_MOST_SHOWN = 2000

__all__ = [
    "ConversionError",
    "DataWorkersMissing",
    "DirectiveError",
    "GpuCoordinatorError",
    "GpuJobRefused",
    "GpuTaken",
    "MasterError",
    "ProgramNotFound",
    "ServiceNotFound",
    "SiteClosed",
    "SiteError",
    "SlurmCommandError",
    "WritersNotStarted",
]


class DirectiveError(UsageError):
    """A `#HETSTREAM` directive or its command-line form is wrong."""


class DataWorkersMissing(DirectiveError):
    """All that is wrong with directives: they are about data workers, and none says how many."""


class ConversionError(UsageError):
    """The script asks for something that a heterogeneous job cannot do."""


class MasterError(HetstreamError):
    """The job master, or the dispatcher that it starts, did not come up."""


class WritersNotStarted(HetstreamError):
    """The job's checkpoint writers did not come up."""


class GpuCoordinatorError(HetstreamError):
    """Nobody coordinates the GPUs of this node, or what answers is something else."""


class GpuJobRefused(HetstreamError):
    """The coordinator does not let a process share a GPU: another version, a GPU that it was not given."""


class GpuTaken(GpuJobRefused):
    """Another guaranteed job has the GPU, so a process that has not begun ends, also a guaranteed one."""


class ServiceNotFound(HetstreamError):
    """The job that was named has no service that this user can see, or Slurm could not say where it would be."""


class SiteError(HetstreamError):
    """The site daemon does not answer, or what it or a stranger says cannot be trusted."""


class SiteClosed(SiteError):
    """The site daemon closed the connection without an answer: it is older, it seems, or trusts nothing of this."""


class ProgramNotFound(UsageError):
    """A program that should be started does not exist or cannot be run."""


class SlurmCommandError(HetstreamError):
    """A Slurm command failed.

    Args:
        argv: the command as it was run.
        returncode: its exit code.
        stdout: what it printed.
        stderr: what it said went wrong.
        hint: the next command to run.

    Attributes:
        reason: the first line of what it said.
    """

    def __init__(self, argv: Sequence[str], returncode: int, stdout: str, stderr: str, hint: str = "") -> None:
        self.argv = list(argv)
        self.returncode = returncode
        self.stdout = stdout
        self.stderr = stderr
        said = stderr.strip() or stdout.strip() or "nothing"
        self.reason = said.partition("\n")[0]
        text = f"{self.argv[0]} exited with {returncode}: {shortened(repr(said), _MOST_SHOWN)}."
        text += f" argv={shortened(str(self.argv), _MOST_SHOWN)}."
        super().__init__(f"{text} {hint}".rstrip())
