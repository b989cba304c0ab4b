"""The cluster side of hetstream: Slurm's commands, and the command line.

This package is the only one that runs Slurm's programs. It imports `hetjob` and `mpi_dataworkers`; nothing imports it.
"""

from __future__ import annotations

if __name__ != "hetstream.slurm_plugin":
    # From the root of a checkout it would be a second copy, whose classes are not those of hetstream.
    raise ImportError(f"no module of this name is hetstream's: import hetstream.slurm_plugin instead of {__name__}")
