"""pyslurm reads what Slurm's commands read, is taken where it fits, and given up where it fails."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hetstream.slurm_plugin.client import pyslurm_backend
from hetstream.slurm_plugin.client.model import Gres, HetComponent, Snapshot
from hetstream.slurm_plugin.client.read import CommandReader
from hetstream.slurm_plugin.client.slurm import CommandSlurm

# The old and the new interface of pyslurm 22.5.3, as it answered on a cluster of Slurm 22.05.8.
FAKE = """
JOB = dict(
    job_id=10, name="na|me", user_id=0, partition="cpu,gpu", job_state="RUNNING", state_reason="None", num_nodes=1,
    num_cpus=6, num_tasks=2, cpus_per_task=3, tres_alloc_str="cpu=6,mem=600M,node=1,billing=6", tres_req_str=None,
    min_memory_cpu=100, array_job_id=None, array_task_id=None, array_task_str=None, het_job_id=9, het_job_offset=1,
    account=None, qos=None, tres_per_node=None, tres_per_task=None, tres_per_job="gres:gpu:2", nodes="gpu0",
    submit_time=1795283191, eligible_time=1795283191, start_time=1795283192, end_time=1795283492, time_limit=5,
    priority=4294901758, dependency=None, req_nodes=["gpu[0", "2]"], sched_nodes=None, features=[], resv_name=None,
    comment="a|b \\x1d", work_dir="/tmp", exc_nodes=["gpu[1", "3]"], contiguous=True, req_switch=2,
)
WAITS = dict(
    JOB, job_id=6, job_state="PENDING", state_reason="ReqNodeNotAvail,_UnavailableNodes:a_b", tres_alloc_str=None,
    tres_req_str="cpu=1,mem=4000M,node=1,billing=1", time_limit="UNLIMITED", end_time=6090254027, nodes=None,
    array_job_id=6, array_task_str="1-8%2", het_job_id=None, het_job_offset=None, num_cpus=1, num_tasks=1,
)
NODE = dict(
    name="gpu0", partitions=["gpu"], alloc_cpus=6, real_memory=64000, alloc_mem=600, gres=["gpu:h200:4", "shard:8"],
    gres_used=["gpu:h200:2(IDX:0,3)", "shard:0"], gres_drain="N/A", features_active="a,b", reason="bad disk",
    version="22.05.8", node_addr="127.0.0.1", cpu_load=201,
)


class Shown:
    def __init__(self, **said):
        self.__dict__.update(said)


class Table:
    def __init__(self, rows):
        self.rows = rows

    def get(self):
        return self.rows

    def load(self):
        return self.rows


def job():
    return Table({10: JOB, 6: WAITS, 5: dict(JOB, job_id=5, job_state="COMPLETED")})


def node():
    return Table({"gpu0": NODE})


REASON = "ReqNodeNotAvail, UnavailableNodes:a_b"
Jobs = Table({10: Shown(id=10, state_reason="None"), 6: Shown(id=6, state_reason=REASON)})
Nodes = Table({"gpu0": Shown(name="gpu0", state="ALLOCATED+DRAIN", effective_cpus=14, total_cpus=16)})
"""
SCONTROL = """#!/bin/sh
[ "$2" = config ] && echo 'SLURM_VERSION = 22.05.8'
[ "$1 $4" = '--all partition' ] && echo 'PartitionName=commands Nodes=(null) State=UP'
exit 0
"""


def snapshot(reader: CommandReader) -> Snapshot:
    read = reader.snapshot()
    assert read.version == "22.05.8"
    return read


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., CommandReader]:
    """A function that installs a module `pyslurm` of some text and version, and returns a reader beside it."""

    def install(text: str = FAKE, version: str = "22.5.3") -> CommandReader:
        site, tools = tmp_path / "site", tmp_path / "tools"
        metadata = site / f"pyslurm-{version}.dist-info" / "METADATA"
        metadata.parent.mkdir(parents=True)
        metadata.write_text(f"Metadata-Version: 2.1\nName: pyslurm\nVersion: {version}\n")
        (site / "pyslurm.py").write_text(text)
        tools.mkdir()
        for name, program in (("scontrol", SCONTROL), ("squeue", "#!/bin/sh\n")):
            (tools / name).write_text(program)
            (tools / name).chmod(0o755)
        monkeypatch.syspath_prepend(site)
        return CommandReader({"PATH": f"{tools}:/usr/bin:/bin", "SLURM_CONF": "/x/slurm.conf"})

    return install


@pytest.mark.shows("pyslurm is used where it fits, and the commands everywhere else")
def test_what_it_says_is_the_model(installed: Callable[..., CommandReader]) -> None:
    read = snapshot(installed())
    assert read.source == "pyslurm"
    runs, waits = read.jobs
    assert (runs.label, runs.partitions, runs.user, runs.reason) == ("9+1", ("cpu", "gpu"), "root", "")
    assert (runs.memory_mb, runs.memory_per_cpu_mb, runs.time_limit_s, runs.end_s) == (600, 100, 300, 1795283492)
    assert (runs.count("gpu"), runs.required_nodes, runs.het) == (2, ("gpu0", "gpu2"), HetComponent(9, 1))
    assert (runs.excluded_nodes, runs.is_contiguous, runs.num_switches) == (("gpu1", "gpu3"), True, 2)
    assert (waits.label, waits.num_records, waits.end_s, waits.time_limit_s) == ("6_[1-8%2]", 8, None, None)
    assert waits.reason == "ReqNodeNotAvail, UnavailableNodes:a_b"
    (node,) = read.nodes
    assert (node.states, node.cpus, node.cpu_load) == ({"MIXED", "DRAIN"}, 14, 2.01)
    assert node.gres_used == (Gres("gpu", "h200", 2, (0, 3)),)
    assert node.features == ("a", "b")
    assert [partition.name for partition in read.partitions] == ["commands"]  # it does not say what is exclusive


@pytest.mark.shows("pyslurm is used where it fits, and the commands everywhere else")
@pytest.mark.parametrize("version", ["22.6.0", "23.2.0", "17.11.0.6", "x"])
def test_another_release_is_left_alone(installed: Callable[..., CommandReader], version: str) -> None:
    assert snapshot(installed("raise SystemExit('imported')", version)).source == "commands"


def test_without_it_commands_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [])
    assert not pyslurm_backend.matches((22, 5))


def test_a_cluster_of_another_release_is_left_alone(installed: Callable[..., CommandReader]) -> None:
    installed(version="24.11.0")
    assert not pyslurm_backend.matches((24, 11))


@pytest.mark.shows("pyslurm is used where it fits, and the commands everywhere else")
@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("import os; os._exit(1)", "exited with 1"),
        ("import os; os.abort()", "exited with -6"),
        ("import os; raise SystemExit(os.environ['SLURM_CONF'])", "/x/slurm.conf"),
        (FAKE.replace("alloc_cpus=6, ", ""), "alloc_cpus"),
        ("print('slurm says', flush=True)\n" + FAKE, "slurm says"),
    ],
    ids=["exit", "abort", "conf", "lacks", "prints"],
)
def test_a_failure_is_one_line_and_commands_read_from_then_on(
    installed: Callable[..., CommandReader], caplog: pytest.LogCaptureFixture, text: str, told: str
) -> None:
    reader = installed(text)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            read = snapshot(reader)
            assert (read.source, [partition.name for partition in read.partitions]) == ("commands", ["commands"])
    (record,) = caplog.records
    assert told in record.getMessage()
    assert "\n" not in record.getMessage()


@pytest.mark.shows("pyslurm is used where it fits, and the commands everywhere else")
@pytest.mark.slurm
def test_both_read_a_real_cluster_alike(
    devcluster: Any, wait_until: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not pyslurm_backend.matches((22, 5)):
        pytest.skip("pyslurm 22.5 is not installed: docs/admin-monitor.md says how it is built")
    slurm = CommandSlurm(devcluster.env)
    reader = CommandReader(devcluster.env)
    quiet, script = ["--output=/dev/null"], "#!/bin/sh\nsleep 300\n"
    submitted = [
        slurm.submit(script, ["-p", "cpu", "-c2", "--mem=50", "-J", "na|me", "--comment=a|b \x1d", *quiet]),
        slurm.submit(script, ["-p", "gpu", "--gpus=2", "-n2", "-c3", "--mem-per-cpu=100", "-t5", *quiet]),
        slurm.submit(script, ["-p", "gpu", "-H", "-a", "1-8%2", "--gres=gpu:1", "-w", "gpu0", *quiet]),
        slurm.submit(script, ["-p", "cpu", "--begin=now+1hour", *quiet]),
        slurm.submit("#!/bin/sh\n#SBATCH -p gpu\n#SBATCH hetjob\n#SBATCH -p cpu\nsleep 300\n", quiet),
    ]
    try:
        wait_until(lambda: sum(job.is_running for job in slurm.snapshot().jobs) == 4, 60)
        by_pyslurm = reader.snapshot()
        monkeypatch.setattr(pyslurm_backend, "RELEASES", frozenset())
        by_commands = reader.snapshot()
        assert (by_pyslurm.source, by_commands.source) == ("pyslurm", "commands")
        assert _by_id(by_pyslurm) == _by_id(by_commands)
        assert by_pyslurm.partitions == by_commands.partitions
        quiet_load = [
            [dataclasses.replace(node, cpu_load=None) for node in read.nodes] for read in (by_pyslurm, by_commands)
        ]
        assert quiet_load[0] == quiet_load[1]
        assert sum(gres.count for node in by_pyslurm.nodes for gres in node.gres_used) == 2
    finally:
        for job_id in submitted:
            slurm.cancel(job_id)
    wait_until(lambda: not slurm.snapshot().jobs, 60)


def _by_id(read: Snapshot) -> dict[int, Any]:
    return {job.job_id: job for job in read.jobs}
