"""The systemd units of all services with the environment files of exporter and site daemon, as text. Pure.

Called by `hetstream site install`.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from hetstream.hetjob import gpu
from hetstream.slurm_plugin.packing.notes import COMMENT_MARK, HOLDS_MARK, UPGRADE_MARK

# Slurm's Prolog, Epilog and TaskProlog of nodes whose GPUs are shared, and the file of their settings, as text. Pure.
#
# Called by `hetstream site install` and the devcluster. What the scripts do is in `slurm_plugin/prolog/`; here are
# the paths that stand before it.

# Where root writes for each job what it was given. Not in the coordinator's own /run/hetstream: its user owns that.
RUN_DIR = "/run/hetstream-jobs"
DRIVER_DIR = "/proc/driver/nvidia/gpus"
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

# hetstream-gpu.service, on each GPU node. Options of: hetstream internal coordinator
#HETSTREAM_COORDINATOR_OPTIONS="--gpu GPU-1a2b --gpu GPU-3c4d"

# hetstream-gpu-report.service, on each GPU node. Options of: hetstream internal gpu-report
#HETSTREAM_GPU_REPORT_OPTIONS="--address tcp://hetstream@controller:9420"

# hetstream-packer.service, beside slurmctld. Options of: hetstream gpu pack
#HETSTREAM_PACKER_OPTIONS="--observe"
"""


def node_script(option: str, settings: Path, *, run_dir: str = RUN_DIR, startup: str = gpu.STARTUP_DIRECTORY) -> str:
    """Return a script that Slurm runs on nodes.

    Args:
        option: of slurm.conf: `Prolog`, `Epilog` or `TaskProlog`.
        settings: the file of `PACKING_ENVIRONMENT`.
        run_dir: where the Prolog writes. It stands between double quotes: `$SLURMD_NODENAME` is the node.
        startup: directory that makes programs start their agent, on nodes.
    """
    return (
        "#!/bin/sh\n"
        f"# {option} of hetstream, placed by `hetstream site install`; `hetstream site uninstall` takes it away.\n"
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
    """Return the version that a script of ours carries; None: it is not one of ours."""
    found = _VERSION_LINE.search(text)
    return int(found[1]) if found else None


_COMMANDS = """\
# Where Slurm's commands and its configuration are, if that is not the usual place.
#PATH=/opt/slurm/bin:/usr/bin:/bin
#SLURM_CONF=/etc/slurm/slurm.conf
"""
EXPORTER_ENVIRONMENT = f"""\
# What hetstream-exporter.service runs with. Take the "#" away from what shall hold, then restart it.

# Options of: hetstream exporter. It ends where Slurm hides something from some users (PrivateData), without --public.
#HETSTREAM_EXPORTER_OPTIONS="--listen 127.0.0.1:9418 --interval 60 --history /var/lib/hetstream/history.sqlite"

{_COMMANDS}"""
DAEMON_ENVIRONMENT = f"""\
# What hetstreamd.service runs with, and where jobs find it. Take the "#" away from what shall hold, then restart it.
# Jobs read the lines on the address and on directories from /etc/hetstream/daemon.env of their own node.

# Options of: hetstream site daemon
#HETSTREAM_DAEMON_OPTIONS="--allocate --pool cpu"

# Where it is: USER is whom it runs as, by name or number, and must be known on the nodes. Without this line it listens
# at unix:/run/hetstream/daemon.sock, and jobs look for no daemon.
#HETSTREAM_DAEMON=tcp://hetstream@controller:9420

# Where munged listens, if that is not the usual place.
#HETSTREAM_MUNGE_SOCKET=/run/munge/munge.socket.2

# Where jobs have their directories (%u is the user), and dispatchers their journals, if users do not say; the same on
# login and compute nodes. Without these lines both are in .hetstream where a job was submitted.
#HETSTREAM_JOBS_DIR=/scratch/%u/hetstream
#HETSTREAM_JOURNAL_DIR=/tmp

# Number of the user that "hetstream internal coordinator" runs as. Without it jobs trust root's, or their own user's.
#HETSTREAM_GPU_COORDINATOR_UID=990

{_COMMANDS}"""


def exporter_unit(program: str, environment: Path) -> str:
    """Return a unit that reads the cluster as nobody in particular and may write only to /var/lib/hetstream.

    Args:
        program: the `hetstream` command, absolute.
        environment: the environment file; the unit starts without it, too.
    """
    return _unit(
        "hetstream's metrics of the Slurm cluster for Prometheus",
        "hetstream-exporter",
        environment,
        f'ExecStart="{_escaped(program)}" exporter $HETSTREAM_EXPORTER_OPTIONS',
        ["StateDirectory=hetstream"],
    )


def daemon_unit(program: str, environment: Path) -> str:
    """Return a unit of the site daemon: as the user `hetstream`, made for it where the site has none, with no
    rights.
    """
    return _unit(
        "hetstream's site daemon: the Slurm cluster's history, data workers among jobs",
        "hetstream-site",
        environment,
        f'ExecStart="{_escaped(program)}" site daemon $HETSTREAM_DAEMON_OPTIONS',
        ["User=hetstream", "StateDirectory=hetstreamd", "StateDirectoryMode=0700", "RuntimeDirectory=hetstream"],
    )


def sharing_units(program: str, environment: Path) -> dict[str, str]:
    """Units by name: of GPU nodes the coordinator and what tells the site daemon; and the packer's.

    Jobs trust a coordinator by its user, and Slurm and the guard a packer. The packer has a user of its own, an
    administrator of Slurm's: what jobs and users speak with must not be one.

    Args:
        program: the `hetstream` command, absolute.
        environment: the environment file; the packer's unit starts without it, too.
    """
    start, user = f'ExecStart="{_escaped(program)}"', "User=hetstream"
    run_dir = ["RuntimeDirectory=hetstream", "RuntimeDirectoryPreserve=restart"]
    units = {
        "hetstream-gpu": _unit(
            "hetstream's coordinator of jobs that share GPUs of this node",
            "hetstream-gpu",
            environment,
            f"{start} internal coordinator --grants {RUN_DIR}/grants $HETSTREAM_COORDINATOR_OPTIONS",
            [user, *run_dir],
        ),
        "hetstream-gpu-report": _unit(
            "hetstream's site daemon is told of this node's shared GPUs",
            "hetstream-gpu",
            environment,
            f"{start} internal gpu-report $HETSTREAM_GPU_REPORT_OPTIONS",
            [user],
        ),
        "hetstream-packer": _unit(
            "hetstream's packer: places opportunistic jobs on GPUs in use",
            "hetstream-gpu",
            environment,
            f"{start} gpu pack $HETSTREAM_PACKER_OPTIONS",
            ["User=hetstream-packer", "RuntimeDirectory=hetstream-packer", "RuntimeDirectoryMode=0700"],
        ),
    }
    # It asks NVIDIA's driver, and the kernel in whose control group a process of another user is.
    for kept in ("PrivateDevices=yes\n", "ProtectProc=invisible\n"):
        units["hetstream-gpu"] = units["hetstream-gpu"].replace(kept, "")
    return units


def _unit(description: str, page: str, environment: Path, start: str, more: list[str]) -> str:
    extra = "\n".join(more)
    return f"""\
# Placed by `hetstream site install`; `hetstream site uninstall` takes it away. Changes belong into: systemctl edit
[Unit]
Description={description}
Documentation=man:{page}(1)
After=network-online.target munge.service
Wants=network-online.target

[Service]
EnvironmentFile=-{_escaped(str(environment))}
{start}
Restart=on-failure
RestartSec=10
DynamicUser=yes
{extra}
UMask=0077
NoNewPrivileges=yes
CapabilityBoundingSet=
ProtectSystem=strict
ProtectHome=read-only
PrivateTmp=yes
PrivateDevices=yes
ProtectClock=yes
ProtectHostname=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
ProtectControlGroups=yes
ProtectProc=invisible
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
RemoveIPC=yes
LockPersonality=yes
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallFilter=~@privileged @resources
SystemCallErrorNumber=EPERM

[Install]
WantedBy=multi-user.target
"""


def _escaped(path: str) -> str:
    return path.replace("%", "%%")
