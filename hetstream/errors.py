"""Every error that hetstream raises, by its name: `from hetstream.errors import NoCheckpoint`."""

# ruff: noqa: F403 (each is listed in the module of its package alone, whose docstring draws them as a tree)

from hetstream.base.errors import *
from hetstream.checkpoint.errors import *
from hetstream.hetjob.errors import *
from hetstream.mpi_dataworkers.errors import *
from hetstream.slurm_plugin.errors import *
