"""Horovod's rank and world size for the loader: the one place that knows Horovod.

Called when a loader is made, after torch.distributed was asked. It never imports Horovod, which costs seconds: a
program that uses it has imported it already.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from hetstream.base.errors import ConfigError

# World size as horovodrun, Open MPI's mpirun and MPICH's mpiexec tell it to each rank.
_SIZE_VARIABLES = ("HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


def horovod_identity(environ: Mapping[str, str] = os.environ) -> tuple[int, int] | None:
    """Rank and world size, or None in a program that does not use Horovod.

    Raises:
        ConfigError: The program imported Horovod, runs as one of several ranks, and has not called `hvd.init()`: every
            rank would take itself for the only one and read all the data.
    """
    hvd = sys.modules.get("horovod.torch")
    if hvd is None:
        return None
    if hvd.is_initialized():
        return int(hvd.rank()), int(hvd.size())
    for name in _SIZE_VARIABLES:
        if environ.get(name, "1") != "1":
            raise ConfigError(
                f"a DataLoader is made before Horovod knows its rank ({name}={environ[name]}): call hvd.init() first"
            )
    return None
