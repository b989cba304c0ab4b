"""Embedding servers of a job: how they are started, and what is left of those that were killed.

Called by the job master and the local backend, which keep them alive.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hetstream.base.files import Directory, make_private
from hetstream.hetjob.job.job import JobEnvironment
from hetstream.hetjob.job.processes import remove_tree
from hetstream.mpi_dataworkers.embedding.registration import REGISTRY

# Where their logs are, unless a user names another place: checkpoints name what is in it.
EMBEDDING_DIR = "hetstream-embedding"
# Time in which a companion that leaves gives its parts away: 64 GB over a slow network.
_DRAIN_S = 600.0


@dataclass(frozen=True)
class EmbeddingServers:
    """The embedding servers of one job.

    Attributes:
        count: from the start, for which trainers wait.
        memory_bytes: that the rows of each may take.
        directory: of this start of the job; each server keeps its log in a folder of it.
        cpus: of each, on Slurm.
        most: with companions.
        companion_options: sbatch options of those.
    """

    count: int
    memory_bytes: int
    directory: Path
    cpus: int = 1
    most: int = 0
    companion_options: tuple[str, ...] = ()

    def words(self, program: Sequence[str], address_file: Path, name: str) -> list[str]:
        """Return the command of one: of the same name with the same log, however often it is started.

        Args:
            program: how hetstream is called.
            address_file: of the service.
            name: of the server; "" for a companion, whose name stands behind the command.
        """
        arguments = ["internal", "embedding-server", "--service", f"file:{address_file}"]
        arguments += ["--directory", str(self.directory), "--memory", str(self.memory_bytes)]
        # Those from the start are ended with the service, or to be started again at once: nobody takes their parts.
        last = ["--name", name, "--drain-s", "0"] if name else ["--drain-s", f"{_DRAIN_S:g}"]
        return [*program, *arguments, *last]

    def of_start(self, job: JobEnvironment) -> EmbeddingServers:
        """The same with the folder of this start of a Slurm job, which is made.

        Raises:
            OSError: it cannot be made, or somebody else could put another one in its place.
        """
        directory = job.submit_dir / self.directory / job.directory.name
        make_private(directory)
        return replace(self, directory=directory)


def remove_registrations(folder: Path) -> None:
    """Remove what servers have left that were killed."""
    with contextlib.suppress(FileNotFoundError), Directory.open(folder) as outer:
        remove_tree(outer, REGISTRY)
