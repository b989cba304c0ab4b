"""Slurm's Prolog, Epilog and TaskProlog of nodes whose GPUs are shared, and the file of their settings, as text. Pure.

Called by `hetstream install` and the devcluster; the units are in `unit.py`. What the scripts do is in
`slurm_plugin/prolog/`; here are the paths that stand before it.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from hetstream.hetjob import gpu

# Where root writes for each job what it was given. Not in the coordinator's own /run/hetstream: its user owns that.
RUN_DIR = "/run/hetstream-jobs"
DRIVER_DIR = "/proc/driver/nvidia/gpus"
# A Comment that begins so was written by the packer (the guard refuses it to others): GPU numbers with commas follow.
COMMENT_MARK = "hetstream:gpu="
# Likewise: it keeps a GPU for another job, or makes another job guaranteed (`packing/upgrade.py`).
HOLDS_MARK, UPGRADE_MARK = "hetstream:holds=", "hetstream:upgrade="
SCRIPTS = {"Prolog": "prolog.sh", "Epilog": "epilog.sh", "TaskProlog": "task_prolog.sh"}
# Grows with what the scripts, the coordinator and the agents must agree on; `hetstream doctor` compares it.
SCRIPTS_VERSION = 4

_BODIES = Path(__file__).parents[1] / "prolog"
_VERSION_LINE = re.compile(r"^hetstream_scripts=(\d+)$", re.M)

PACKING_ENVIRONMENT = """\
# Which jobs share GPUs. Read by hetstream's Prolog (as root) and TaskProlog on each node, and by the units of systemd
# that are named below. Take the "#" away from what shall hold. The next job on the node sees it; restart the units.

# Partitions whose jobs are opportunistic, as in policy.lua. Their jobs see no GPU but those that the packer has chosen.
#HETSTREAM_OPPORTUNISTIC_PARTITIONS="opp"

# QOS whose jobs are opportunistic, as in policy.lua. The packer holds who came past the guard into one.
#HETSTREAM_OPPORTUNISTIC_QOS="scavenge"

# So many seconds a batch script of these partitions waits before it starts without a GPU: within them the packer takes
# back a job that it did not place. It looks every 10 s.
#HETSTREAM_UNPLACED_S=30

# Partitions whose jobs share their GPU with opportunistic ones. Where these jobs train, an agent tells the coordinator
# when they need the GPU. Jobs of other partitions are left as they are, and nobody launches on their GPUs.
#HETSTREAM_SHARED_PARTITIONS="gpu"

# The number of the packer's user. Its jobs can make opportunistic jobs of this node guaranteed ones (quotas).
#HETSTREAM_PACKER_UID=999

# The site's quotas, on the host of the packer and wherever users ask why their jobs wait.
#HETSTREAM_QUOTAS=/etc/hetstream/quotas.json

# The coordinator's socket, if it is not /run/hetstream/gpu.sock.
#HETSTREAM_GPU_SOCKET=/run/hetstream/gpu.sock

# The coordinator's names of GPUs by their numbers, if NVIDIA's driver does not tell (/proc/driver/nvidia/gpus).
#HETSTREAM_GPUS="0=GPU-1a2b 1=GPU-3c4d"

# hetstream-gpu.service, on each GPU node. Options of: hetstream gpu coordinator
#HETSTREAM_COORDINATOR_OPTIONS="--gpu GPU-1a2b --gpu GPU-3c4d"

# hetstream-gpu-report.service, on each GPU node. Options of: hetstream gpu report
#HETSTREAM_GPU_REPORT_OPTIONS="--address tcp://hetstream@controller:9420"

# hetstream-packer.service, beside slurmctld. Options of: hetstream packer
#HETSTREAM_PACKER_OPTIONS="--observe"
"""


def node_script(option: str, settings: Path, *, run_dir: str = RUN_DIR, startup: str = gpu.STARTUP_DIRECTORY) -> str:
    """A script that Slurm runs on nodes.

    Args:
        option: of slurm.conf: `Prolog`, `Epilog` or `TaskProlog`.
        settings: the file of `PACKING_ENVIRONMENT`.
        run_dir: where the Prolog writes. It stands between double quotes: `$SLURMD_NODENAME` is the node.
        startup: directory that makes programs start their agent, on nodes.
    """
    return (
        "#!/bin/sh\n"
        f"# {option} of hetstream, placed by `hetstream install`; `hetstream uninstall` takes it away.\n"
        f"hetstream_scripts={SCRIPTS_VERSION}\n"
        f'run="{run_dir}"\n'
        f"settings={shlex.quote(str(settings))}\n"
        f"driver={DRIVER_DIR}\n"
        f"mark={COMMENT_MARK}\n"
        f"holds={HOLDS_MARK}\n"
        f"upgrades={UPGRADE_MARK}\n"
        f"startup={shlex.quote(startup)}\n"
        + "".join("\n" + (_BODIES / name).read_text() for name in ("own.sh", SCRIPTS[option]))
    )


def script_version(text: str) -> int | None:
    """The version that a script of ours carries; None: it is not one of ours."""
    found = _VERSION_LINE.search(text)
    return int(found[1]) if found else None
