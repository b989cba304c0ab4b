"""The systemd units of all services with the environment files of exporter and site daemon, as text. Pure.

Called by `hetstream install`. The settings of what shares GPUs are in `node_scripts.py`.
"""

from __future__ import annotations

from pathlib import Path

from hetstream.slurm_plugin.install.node_scripts import RUN_DIR

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

# Options of: hetstream daemon
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

# Number of the user that "hetstream gpu coordinator" runs as. Without it jobs trust one of root's, or their own user's.
#HETSTREAM_GPU_COORDINATOR_UID=990

{_COMMANDS}"""


def exporter_unit(program: str, environment: Path) -> str:
    """A unit that reads the cluster as nobody in particular and may write only to /var/lib/hetstream.

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
    """A unit of the site daemon: as the user `hetstream`, made for it where the site has none, with no rights."""
    return _unit(
        "hetstream's site daemon: the Slurm cluster's history, data workers among jobs",
        "hetstream-daemon",
        environment,
        f'ExecStart="{_escaped(program)}" daemon $HETSTREAM_DAEMON_OPTIONS',
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
            f"{start} gpu coordinator --grants {RUN_DIR}/grants $HETSTREAM_COORDINATOR_OPTIONS",
            [user, *run_dir],
        ),
        "hetstream-gpu-report": _unit(
            "hetstream's site daemon is told of this node's shared GPUs",
            "hetstream-gpu",
            environment,
            f"{start} gpu report $HETSTREAM_GPU_REPORT_OPTIONS",
            [user],
        ),
        "hetstream-packer": _unit(
            "hetstream's packer: places opportunistic jobs on GPUs in use",
            "hetstream-packer",
            environment,
            f"{start} packer $HETSTREAM_PACKER_OPTIONS",
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
# Placed by `hetstream install`; `hetstream uninstall` takes it away. Changes belong into: systemctl edit
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
