"""A Slurm that is a few recorded texts, for tests that need its commands and no daemons."""

from __future__ import annotations

import io
import subprocess
from contextlib import redirect_stderr, redirect_stdout
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from hetstream.slurm_plugin.cli import main
from hetstream.slurm_plugin.client.parse_text import FIELD_END, JOB_FIELDS, RECORD_END

# A filter for texts with the default separators: puts in those that `squeue -O` is asked to use.
AS_ASKED = (
    """sed "$(printf '%s' "$*" | sed -n 's/.*JobID:\\x1f\\([0-9a-f]*\\)\\x1f.*/"""
    """s,\\x1f,\\x1f\\1\\x1f,g;s,\\x1e,\\x1e\\1\\x1e,g/p')\""""
)
FIXTURES = Path(__file__).parents[1] / "fixtures"


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Recorded:
    """Programs that answer as Slurm of one version did when it was recorded."""

    def __init__(self, directory: Path, version: str = "22.05") -> None:
        self.directory = directory
        source = FIXTURES / version
        partitions = (source / "scontrol_show_partition.txt").read_text().replace("\n   ", " ")
        config = (source / "scontrol_show_config.txt").read_text()
        self.write("config", config.replace("gpu,shard,opp", "gpu,shard,opp,opx"))  # nodes are of another moment
        self.write("partition", partitions)
        self.write("node", (source / "scontrol_show_node_oneliner.txt").read_text())
        if version != "22.05":
            self.write("node.json", (source / "scontrol_show_node.json").read_text())
        self.write("reservation", "No reservations in the system\n")
        # One job waits that data workers would let start, and one runs.
        waiting = job("41", "PENDING", **{"tres-per-node": "gres:gpu:4", "NumCPUs": "16"})
        running = job("42", "RUNNING", NodeList="g1", StartTime=hours_ago(3), **{"tres-per-node": "gres:gpu:1"})
        self.write("queue", waiting + running)
        self.write("job", "")
        self.write("version", f"slurm-wlm {version}.5\n")
        self.tool(
            "scontrol",
            'for word in "$@"; do case $word in config|partition|reservation|job) what=$word;; '
            "node) what=${what:-node};; "
            f"--json) what=node.json;; --version) what=version;; esac; done; cat {directory}/$what",
        )
        # How long its jobs have run was not recorded.
        self.tool("squeue", f'case "$*" in *TimeUsed*) exit 0;; esac; cat {directory}/queue | {AS_ASKED}')

    def write(self, name: str, text: str) -> None:
        (self.directory / name).write_text(text)

    def tool(self, name: str, text: str) -> None:
        path = self.directory / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)

    def run(self, line: str, **environ: str) -> subprocess.CompletedProcess[str]:
        """The command in this process: it takes a tenth of the time of a new one. With COLUMNS, on such a terminal."""
        out, err = _Terminal() if "COLUMNS" in environ else io.StringIO(), io.StringIO()
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
            for name, value in ({"PATH": f"{self.directory}:/usr/bin:/bin"} | environ).items():
                patch.setenv(name, value)
            patch.delenv("SLURM_CONF", raising=False)
            patch.setattr("logging.basicConfig", lambda **options: None)
            code = main(line.split())
        return subprocess.CompletedProcess(line.split(), code, out.getvalue(), err.getvalue())


def hours_ago(number: int) -> str:
    """A time as Slurm writes it."""
    return (datetime.now() - timedelta(hours=number)).strftime("%Y-%m-%dT%H:00:00")


def job(job_id: str, state: str, **more: str) -> str:
    """A record of `squeue -O`."""
    values = {
        "JobID": job_id, "ArrayJobID": job_id, "UserName": "alice", "Partition": "gpu", "State": state,
        "Reason": "Resources", "NumCPUs": "2", "tres-alloc": "cpu=2,mem=100M,node=1,billing=2", "TimeLimit": "30:00",
        "PriorityLong": "100", "SubmitTime": "2026-11-20T16:00:14", "Name": "train", "NodeList": "",
    } | more  # fmt: skip
    return FIELD_END.join(values.get(name, "N/A") for name in JOB_FIELDS) + RECORD_END + "\n"
