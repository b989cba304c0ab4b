"""What a cluster is and its configuration files, as text."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from hetstream.base.errors import ConfigError
from tests.devcluster import packing
from tests.devcluster.render import (
    cgroup_conf,
    gres_conf,
    hostlist,
    slurm_conf,
    task_prolog,
    version_tuple,
)
from tests.devcluster.roots import mirror_from
from tests.devcluster.spec import ClusterShape, ClusterSpec, RootPaths

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "devcluster"
HERE = Path("/var/lib/hetstream/devcluster/default")


def spec_of(shape: ClusterShape | None = None, **fields: object) -> ClusterSpec:
    defaults = {"name": "default", "cluster_name": "default-0123abcd", "state_dir": HERE, "base_port": 21000}
    return ClusterSpec(shape=shape or ClusterShape(), **{**defaults, **fields})


def test_default_cluster() -> None:
    spec = spec_of()
    assert slurm_conf(spec) == (GOLDEN / "default.slurm.conf").read_text()
    assert gres_conf(spec) == (GOLDEN / "default.gres.conf").read_text()


def test_one_node_of_each_kind_from_a_root_with_slurms_own_scheduler() -> None:
    spec = spec_of(
        ClusterShape(1, 1, 1, 3), tuned_scheduler=False, root=RootPaths(Path("/cache/plugins"), Path("/cache/commands"))
    )
    assert slurm_conf(spec) == (GOLDEN / "small.slurm.conf").read_text()
    assert gres_conf(spec) == f"NodeName=gpu0 Name=gpu File={HERE}/dev/gpu0\n"


def test_cluster_without_gpus_has_one_partition_and_no_gres() -> None:
    spec = spec_of(ClusterShape(gpu_nodes=0, cpu_nodes=2))
    text = slurm_conf(spec)
    assert "Gres" not in text
    assert text.count("PartitionName=") == 1
    assert "PartitionName=cpu Nodes=cpu[0-1] Default=YES" in text
    assert gres_conf(spec) == ""


@pytest.mark.shows("a GPU may have two slots, by a link to the device file")
def test_gpus_that_are_shared_have_slots_a_partition_below_and_scripts() -> None:
    spec = spec_of(ClusterShape(1, 2, 1), packing=True, lua_plugins=True)
    assert slurm_conf(spec, "23.02.7") == (GOLDEN / "packing.slurm.conf").read_text()
    assert "PreemptParameters" not in slurm_conf(spec, "22.05.8"), "its slurmctld would not start"
    assert gres_conf(spec) == (GOLDEN / "packing.gres.conf").read_text()
    constrained = spec_of(ClusterShape(1, 2, 1), packing=True, cgroups=True)
    assert "Gres=gpu:2,opp:p0:1,opp:p1:1" in slurm_conf(constrained)
    assert gres_conf(constrained).count("\n") == 3
    (node,) = packing.sharing_nodes(spec)
    here = f"{HERE}/sharing/gpu0"
    assert node.coordinator[2:6] == ("--grants", f"{here}/grants", "--socket", f"{here}/gpu.sock")
    assert node.coordinator[6:] == (f"--gpu=emulation:{here}/gpu0", f"--gpu=emulation:{here}/gpu1")


def test_no_gpus_can_be_shared_where_there_are_none() -> None:
    with pytest.raises(ConfigError, match="--packing with --gpu-nodes=0"):
        spec_of(ClusterShape(0, 1, 1), packing=True)


def test_nodes_with_cores_of_their_own_have_no_more_cpus() -> None:
    spec = spec_of(ClusterShape(1, 2, 2), cores=(0, 1, 2, 4, 5, 7))
    assert spec.cores_of == {"gpu0": (0,), "cpu0": (1, 2), "cpu1": (4, 5)}
    text = slurm_conf(spec)
    assert "NodeName=gpu0 NodeAddr=127.0.0.1 NodeHostname=localhost Port=21001 CPUs=1 " in text
    assert "NodeName=cpu[0-1] NodeAddr=127.0.0.1 NodeHostname=localhost Port=[21002-21003] CPUs=2 " in text
    assert spec_of(ClusterShape(1, 1, 1), cores=(0, 1)).cores_of == {"gpu0": (0,), "cpu0": (1,)}
    assert spec_of().cores_of == {}
    with pytest.raises(ConfigError, match=r"--own-cores: 1 core for 2 nodes: each needs one"):
        spec_of(ClusterShape(1, 1, 1), cores=(0,))


def test_more_settings_come_last() -> None:
    more = ("PreemptType=preempt/partition_prio", "PartitionName=workers Nodes=cpu[0-1] State=UP")
    assert slurm_conf(spec_of(settings=more)) == slurm_conf(spec_of()) + "".join(line + "\n" for line in more)


def test_every_node_has_a_port_of_its_own() -> None:
    groups = spec_of(ClusterShape(gpu_nodes=3, cpu_nodes=5)).groups
    ports = [group.first_port + number for group in groups for number in range(group.count)]
    assert ports == list(range(21001, 21009))


def test_control_groups_are_for_processes_devices_and_memory() -> None:
    lines = slurm_conf(spec_of(cgroups=True)).splitlines()
    assert {"ProctrackType=proctrack/cgroup", "TaskPlugin=task/cgroup"} <= {*lines}
    memory = "CgroupPlugin=cgroup/v1\nConstrainRAMSpace=yes\n"
    assert cgroup_conf("22.05.8", cgroups=True) == f"{memory}ConstrainDevices=yes\n"
    assert cgroup_conf("22.05.8", cgroups=True, has_gpus=False) == memory


@pytest.mark.parametrize(
    ("version", "text"),
    [
        ("22.05.8", None),
        ("23.11.4", None),
        ("24.11.5", "CgroupPlugin=disabled\n"),
        ("26.05.5", "CgroupPlugin=disabled\n"),
    ],
)
def test_cgroup_conf_is_only_for_slurm_that_demands_one(version: str, text: str | None) -> None:
    assert cgroup_conf(version) == text


def test_version_tuple_drops_what_is_no_number() -> None:
    assert version_tuple("24.11.5") == (24, 11, 5)
    assert version_tuple("24.11.5-4") == (24, 11, 5)
    assert version_tuple("26.05.0rc1") == (26, 5, 0)
    assert version_tuple("25.pre") == (25,)


@pytest.mark.parametrize(
    ("prefix", "count", "first", "text"),
    [("gpu", 4, 0, "gpu[0-3]"), ("gpu", 1, 0, "gpu0"), ("", 2, 21001, "[21001-21002]"), ("", 1, 21001, "21001")],
)
def test_hostlist(prefix: str, count: int, first: int, text: str) -> None:
    assert hostlist(prefix, count, first) == text


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"gpu_nodes": -1}, "--gpu-nodes=-1"),
        ({"gpus_per_node": 0}, "--gpus-per-node=0"),
        ({"cpu_nodes": 65}, "--cpu-nodes=65"),
        ({"cpus_per_node": 0}, "--cpus-per-node=0"),
        ({"gpu_nodes": 0, "cpu_nodes": 0}, "is 0"),
        ({"gpu_nodes": 40, "cpu_nodes": 40}, "is 80"),
    ],
)
def test_shape_refuses(fields: dict[str, int], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ClusterShape(**fields)


def test_shape_reports_all_problems_at_once() -> None:
    with pytest.raises(ConfigError, match=r"--gpu-nodes=99.*--gpus-per-node=17.*--cpus-per-node=0"):
        ClusterShape(gpu_nodes=99, gpus_per_node=17, cpus_per_node=0)


@pytest.mark.parametrize("path", ["relative/path", "/tmp/a b", "/tmp/a#b", "/tmp/a,b", "/tmp/ä", "/tmp/" + "x" * 60])
def test_state_dir_must_fit_into_slurm_conf_and_a_socket_path(path: str) -> None:
    with pytest.raises(ConfigError, match="--state-dir="):
        spec_of(state_dir=Path(path))


@pytest.mark.parametrize("name", ["", "Upper", "a_b", "-x", "x" * 33, "a/b", ".."])
def test_name_must_fit_into_slurm_and_a_path(name: str) -> None:
    with pytest.raises(ConfigError, match="--name="):
        spec_of(name=name)


@pytest.mark.parametrize(
    ("targets", "mirror"),
    [
        (
            "Debian|http://mirror.example/debian/|bookworm|main\n"
            "Debian|http://mirror.example/security/|bookworm-security|main\n",
            "http://mirror.example/debian",
        ),
        (
            "Debian|http://s.example/|trixie-updates|main\nDebian|http://m.example/d|trixie|contrib\n",
            "http://deb.debian.org/debian",
        ),
        ("Ubuntu|http://archive.ubuntu.com/ubuntu/|noble|main\n", "http://deb.debian.org/debian"),
        ("", "http://deb.debian.org/debian"),
    ],
)
def test_mirror_is_the_hosts_own_if_that_is_debian(targets: str, mirror: str) -> None:
    assert mirror_from(targets) == mirror


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({}, "export PATH=/cache/w:/usr/local/bin:/usr/bin:/bin\n"),
        ({"PATH": "/home/x/bin:/bin"}, "export PATH=/cache/w:/home/x/bin:/bin\n"),
        ({"PATH": "/venv/bin:/cache/w:/bin"}, ""),
    ],
)
def test_task_prolog_puts_the_roots_commands_first_unless_they_are_there(
    tmp_path: Path, environment: dict[str, str], said: str
) -> None:
    script = tmp_path / "task_prolog.sh"
    script.write_text(task_prolog(Path("/cache/w")))
    script.chmod(0o755)
    # dash gives itself a PATH when it has none, without exporting it: Slurm's tasks have one either way.
    done = subprocess.run([script], env={"PATH": "", **environment}, capture_output=True, text=True, check=True)
    assert done.stdout == said
