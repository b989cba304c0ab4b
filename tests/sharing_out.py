"""Which of several test processes gets which file: the files that boot Slurm mostly wait, the others mostly compute."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from xdist.scheduler import LoadFileScheduling


@functools.cache
def needs_slurm(file: Path) -> bool:
    """Whether a file of tests boots Slurm."""
    return "pytest.mark.slurm" in file.read_text()


def next_file(root: Path, waiting: Mapping[str, Collection[str]], takes_slurm: bool) -> str:
    """Of the files of a process's own kind, or, where there is none left, of all, the one with the fewest tests.

    A test that is alone in its file is the whole life of a job, and takes a minute; of hundreds each takes a moment. So
    at the end no process waits long for another.
    """
    files = sorted(waiting, key=lambda file: len(waiting[file]))
    return next((file for file in files if needs_slurm(root / file) == takes_slurm), files[0])


class SlurmInOneProcess(LoadFileScheduling):
    """The first process begins with the files that boot Slurm, and waits while the others compute.

    So one cluster runs at a time as long as there are other files, and the longest tests do not come last.
    """

    def _assign_work_unit(self, node: Any) -> None:
        chosen = next_file(self.config.rootpath, self.workqueue, takes_slurm=node is self.nodes[0])
        self.workqueue.move_to_end(chosen, last=False)
        super()._assign_work_unit(node)
