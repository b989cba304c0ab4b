"""The job's side of a shared GPU: what a training process tells the node's coordinator, and how it keeps to its orders.

A *guaranteed* job has the GPU by Slurm; an *opportunistic* one runs on it only while the other does not feel it. The
*coordinator* (`slurm_plugin/coordinator/`) decides; the *agent* in each process carries it out: memory limits at the
boundaries of mini-batches, launches only when they are due. `environment` makes an unmodified program start its agent.

Nothing here can hold up a guaranteed job: where the coordinator, a page or the agent fails, it runs as if alone, and
opportunistic jobs pause.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

STARTUP_DIRECTORY = str(Path(__file__).with_name("startup"))


def environment(settings: Mapping[str, str], environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables under which `python train.py` shares its GPU.

    Args:
        settings: the `HETSTREAM_GPU_...` variables that `config.py` reads.
        environ: the environment they are added to; its PYTHONPATH is kept behind the hook.
    """
    inherited = [entry for entry in environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    paths = [STARTUP_DIRECTORY, *(entry for entry in inherited if entry != STARTUP_DIRECTORY)]
    return {**settings, "PYTHONPATH": os.pathsep.join(paths)}
