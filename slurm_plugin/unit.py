"""The systemd unit of the exporter and its environment file, as text. Pure; called by `hetstream install`."""

from __future__ import annotations

from pathlib import Path

ENVIRONMENT = """\
# What hetstream-exporter.service runs with. Take the "#" away from what shall hold, then restart it.

# Options of: hetstream exporter
#HETSTREAM_EXPORTER_OPTIONS="--listen 127.0.0.1:9418 --interval 60 --history /var/lib/hetstream/history.sqlite"

# Where Slurm's commands and its configuration are, if that is not the usual place.
#PATH=/opt/slurm/bin:/usr/bin:/bin
#SLURM_CONF=/etc/slurm/slurm.conf
"""


def unit_text(program: str, environment: Path) -> str:
    """A unit that reads the cluster as nobody in particular and may write only to /var/lib/hetstream.

    Args:
        program: the `hetstream` command, absolute.
        environment: the environment file; the unit starts without it, too.
    """
    return f"""\
# Placed by `hetstream install`; `hetstream uninstall` takes it away. Changes belong into: systemctl edit
[Unit]
Description=hetstream's metrics of the Slurm cluster for Prometheus
Documentation=man:hetstream-exporter(1)
After=network-online.target munge.service
Wants=network-online.target

[Service]
EnvironmentFile=-{_escaped(str(environment))}
ExecStart="{_escaped(program)}" exporter $HETSTREAM_EXPORTER_OPTIONS
Restart=on-failure
RestartSec=10
DynamicUser=yes
StateDirectory=hetstream
NoNewPrivileges=yes
ProtectSystem=strict
ProtectHome=read-only
PrivateDevices=yes
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6

[Install]
WantedBy=multi-user.target
"""


def _escaped(path: str) -> str:
    return path.replace("%", "%%")
