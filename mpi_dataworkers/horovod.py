"""Horovod's rank and world size for the loader: the one place that knows Horovod.

Called when a loader is made, after torch.distributed was asked. It never imports Horovod, which costs seconds: a
program that uses it has imported it already.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from hetstream.base.errors import ConfigError
from hetstream.base.process import OF_ANY_PROGRAM, OF_ONE_TRAINING, lone_horovod, one_of_several


def horovod_identity(environ: Mapping[str, str] = os.environ) -> tuple[int, int] | None:
    """Rank and world size, or None in a program that does not use Horovod.

    Raises:
        ConfigError: The program imported Horovod, runs as one of several ranks, and has not called `hvd.init()`, or its
            Horovod does not know the others: every rank would take itself for the only one and read all the data.
    """
    hvd = sys.modules.get("horovod.torch")
    if hvd is None:
        return None
    if hvd.is_initialized():
        if wrong := lone_horovod(int(hvd.size()), environ):
            raise ConfigError(f"{wrong}. If each trains for itself, give the DataLoader rank=0 and world_size=1")
        return int(hvd.rank()), int(hvd.size())
    if others := one_of_several((*OF_ONE_TRAINING, *OF_ANY_PROGRAM), environ):
        raise ConfigError(f"a DataLoader is made before Horovod knows its rank ({others}): call hvd.init() first")
    return None
