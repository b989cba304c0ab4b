"""`hetstream doctor`: each finding by itself, then a real cluster."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetstream.slurm_plugin.cli.install import _lua, _lua_files
from hetstream.slurm_plugin.client import parse_text
from hetstream.slurm_plugin.client.model import Node, Partition, Snapshot
from hetstream.slurm_plugin.client.slurm_units import compress
from hetstream.slurm_plugin.install.doctor import (
    LUA_PLUGINS,
    LUA_VERSIONS,
    Facts,
    Finding,
    Level,
    examine,
    lua_versions,
)
from hetstream.slurm_plugin.install.installation import LUA_DIR

FIXTURES = Path(__file__).with_name("fixtures")
GOOD = {
    "SchedulerType": "sched/backfill", "SchedulerParameters": "bf_interval=1", "SelectType": "select/cons_tres",
    "SelectTypeParameters": "CR_Core_Memory", "GresTypes": "gpu,shard", "PreemptType": "preempt/partition_prio",
    "PrologFlags": "Alloc", "PrivateData": "none", "AccountingStorageType": "accounting_storage/slurmdbd",
    "JobAcctGatherType": "jobacct_gather/cgroup",
}  # fmt: skip


def recorded_nodes() -> tuple[Node, ...]:
    """Nodes of a cluster, without the GRES of shared GPUs."""
    nodes = parse_text.parse_nodes((FIXTURES / "26.05" / "scontrol_show_node_oneliner.txt").read_text())
    return tuple(replace(node, gres=tuple(gres for gres in node.gres if gres.name != "opp")) for node in nodes)


def facts(config: Mapping[str, str] = {}, **more: Any) -> Facts:
    """A good cluster, with these differences; no GPUs are shared, for which `test_doctor_packing.py` is there."""
    usable = tuple(node for node in recorded_nodes() if node.is_usable)
    version = more.pop("version", "26.05.5")
    snapshot = Snapshot(
        0.0, version, "test", (), tuple(replace(node, version=version) for node in usable),
        more.pop("partitions", (Partition("gpu", (), is_default=True),)), {**GOOD, **config},
    )  # fmt: skip
    if "nodes" in more:
        snapshot = replace(snapshot, nodes=more.pop("nodes"))
    return replace(Facts(snapshot, version, "Name=gpu File=/dev/gpu[0-3]", "ConstrainDevices=yes"), **more)


def only(given: Facts) -> Finding:
    found = examine(given)
    assert len(found) == 1, found
    return found[0]


@pytest.mark.shows("`doctor` checks Slurm's configuration, and the Lua that its plugins name")
def test_a_good_cluster_has_no_findings() -> None:
    assert examine(facts()) == ()


@pytest.mark.shows("a pyslurm that is not used is one line of `doctor`")
def test_a_pyslurm_that_is_not_used_is_one_line() -> None:
    """As 25.11.2, which PyPI has: also beside a slurmctld of 25.11."""
    finding = only(facts(pyslurm="25.11.2", version="25.11.1"))
    assert (finding.level, finding.check, finding.seen) == (Level.NOTE, "pyslurm", "25.11.2")
    assert "not used with Slurm 25.11.1: pyslurm 22.5 is, where slurmctld is 22.05" in finding.text
    used = facts(pyslurm="22.5.3")
    assert examine(replace(used, snapshot=replace(used.snapshot, source="pyslurm"))) == ()


@pytest.mark.shows("GPUs in use are counted by GresUsed and AllocTRES, and `doctor` says where they differ")
def test_two_counts_of_gpus_that_differ_are_named_with_their_node() -> None:
    nodes = tuple(replace(node, gpus_allocated=node.gpus_in_use()) for node in facts().snapshot.nodes)
    assert examine(facts(nodes=nodes)) == ()
    (place,) = (place for place, node in enumerate(nodes) if node.name == "g1")
    used = nodes[place].gpus_in_use()
    wrong = replace(nodes[place], gpus_allocated=used + 1)
    found = only(facts(nodes=(*nodes[:place], wrong, *nodes[place + 1 :])))
    assert (found.level, found.check) == (Level.WARNING, "GPUs in use")
    assert found.seen == f"g1: {used} by GresUsed, {used + 1} by AllocTRES"
    assert "scontrol -d show node g1" in found.fix
    many = tuple(replace(node, gpus_allocated=node.gpus_in_use() + 1) for node in nodes if node.gpus)
    assert all(f"so do {len(many) - 1} other" in finding.text for finding in examine(facts(nodes=many)))


def test_lua_files_that_are_asked_for_and_not_there(tmp_path: Path) -> None:
    conf, hook = tmp_path / "slurm.conf", tmp_path / "cli_filter.lua"
    conf.write_text("CliFilterPlugins=lua\n")

    def found() -> list[tuple[str, str]]:
        known = facts(**_lua_files(tmp_path, {"JobSubmitPlugins": "(null)"}))
        return [(finding.level.value, finding.seen) for finding in examine(known) if finding.level is not Level.NOTE]

    (missing, where) = examine(facts(**_lua_files(tmp_path, {})))
    nodes = compress(node.name for node in facts().snapshot.nodes)
    assert (where.level, where.seen) == (Level.NOTE, f"login hosts, and {nodes}")
    assert where.fix == f"on each of them: ls -l {hook}"
    assert (missing.level, missing.check) == (Level.PROBLEM, "cli_filter.lua")
    assert "every sbatch, salloc and srun on this host fails" in missing.text
    assert "scontrol reconfigure" in missing.fix
    module, site = tmp_path / "module.lua", tmp_path / "cli_filter.site.lua"
    hook.write_text(f'dofile("{site}")\nlocal ok, hetstream = pcall(dofile, "{module}")\n')
    assert found() == [("problem", f"{site} not found here")]
    site.touch()
    assert found() == [("warning", f"{module} not found here")]
    module.touch()
    assert found() == []
    (where,) = examine(facts(**_lua_files(tmp_path, {})))
    assert where.fix == f"on each of them: ls -l {hook} {module}"
    # What slurmctld runs with counts too, whatever the file says by now.
    conf.write_text("")
    hook.unlink()
    assert [finding.check for finding in examine(facts(**_lua_files(tmp_path, {"JobSubmitPlugins": "lua"})))] == [
        "job_submit.lua"
    ]
    assert found() == []


@pytest.mark.shows("`doctor` checks Slurm's configuration, and the Lua that its plugins name")
@pytest.mark.parametrize(
    ("config", "level", "check"),
    [
        ({"SchedulerType": "sched/builtin"}, Level.PROBLEM, "SchedulerType"),
        ({"SchedulerParameters": "(null)"}, Level.WARNING, "bf_interval"),
        ({"SchedulerParameters": "sched_min_interval=0,bf_interval=60"}, Level.WARNING, "bf_interval"),
        ({"SelectType": "select/linear"}, Level.PROBLEM, "SelectType"),
        ({"SelectTypeParameters": "CR_Core"}, Level.WARNING, "SelectTypeParameters"),
        ({"GresTypes": "gpu"}, Level.PROBLEM, "GresTypes"),
        ({"PreemptType": "preempt/none"}, Level.NOTE, "PreemptType"),
        ({"PrologFlags": "(null)"}, Level.NOTE, "PrologFlags"),
        ({"PrivateData": "jobs,usage"}, Level.WARNING, "PrivateData"),
        ({"PrivateData": "nodes"}, Level.WARNING, "PrivateData"),
        ({"AccountingStorageType": "(null)"}, Level.NOTE, "AccountingStorageType"),
        ({"JobAcctGatherType": "jobacct_gather/none"}, Level.NOTE, "JobAcctGatherType"),
    ],
)
def test_settings(config: dict[str, str], level: Level, check: str) -> None:
    found = only(facts(config))
    assert (found.level, found.check) == (level, check)
    assert found.fix


def test_how_jobs_find_their_address_is_said_where_slurm_tells_none() -> None:
    assert "resolve NodeName" in only(facts({"PrivateData": "jobs,nodes"})).text


@pytest.mark.shows("`doctor` checks Slurm's configuration, and the Lua that its plugins name")
def test_files_beside_slurm_conf() -> None:
    doubled = "NodeName=g[0-3] Name=opp Type=p0 File=/dev/gpu0\nNodeName=g1 Name=opp Type=p1 File=/dev/gpu0 # again\n"
    assert only(facts(gres_conf=doubled)).seen == "opp /dev/gpu0"
    assert examine(facts(gres_conf="NodeName=g0 Name=gpu File=/dev/gpu0\nNodeName=g1 Name=gpu File=/dev/gpu0\n")) == ()
    assert only(facts(gres_conf=None)).check == "gres.conf"
    assert only(facts(cgroup_conf=None)).check == "cgroup.conf"
    assert only(facts(cgroup_conf="#ConstrainDevices=yes\n")).text == "jobs can use GPUs that others hold"


@pytest.mark.shows("`doctor` checks Slurm's configuration, and the Lua that its plugins name")
def test_nodes_hosts_versions_partitions() -> None:
    nodes = recorded_nodes()
    found = only(facts(nodes=nodes))
    assert (found.check, found.seen, found.text) == ("nodes", "c3", "out of use: maintenance window")
    bare = tuple(replace(node, memory_mb=1) for node in nodes[:1])
    assert [finding.check for finding in examine(facts(nodes=bare))] == ["RealMemory", "Gres"]
    assert only(facts(unresolved=("gpu0", "gpu1"))).seen == "gpu[0-1]"
    assert only(facts(client_version="slurm 26.11.1")).level is Level.PROBLEM
    assert only(facts(partitions=(Partition("gpu", (), is_default=True), Partition("x", (), is_up=False)))).seen == "x"
    assert only(facts(partitions=(Partition("gpu", ()),))).seen == "no default"


@pytest.mark.shows("`doctor` checks Slurm's configuration, and the Lua that its plugins name")
def test_the_lua_of_slurms_plugins() -> None:
    both = {"JobSubmitPlugins": "all_partitions,lua", "CliFilterPlugins": "lua"}
    assert examine(facts(both, lua={"job_submit": ("5.1",), "cli_filter": ("5.4",)})) == ()
    assert examine(facts(both, lua={"job_submit": (), "cli_filter": ("5.3", "5.5")})) == ()
    assert examine(facts({"JobSubmitPlugins": "all_partitions"}, lua={"job_submit": ("5.5",)})) == ()
    found = only(facts(both, lua={"job_submit": ("5.5",), "cli_filter": ("5.4",)}))
    assert (found.level, found.check, found.seen) == (Level.PROBLEM, "Lua", "job_submit_lua.so uses Lua 5.5")
    assert found.text == "hetstream's modules are for Lua 5.1 to 5.4"
    assert only(facts(both, lua={"job_submit": ("5.1",)})).seen == "cli_filter_lua.so is not in PluginDir here"
    assert only(facts(both, lua=None)).level is Level.NOTE


@pytest.mark.shows("`doctor` checks Slurm's configuration, and the Lua that its plugins name")
@pytest.mark.parametrize(
    ("plugin", "versions"),
    [
        (b"\0liblua5.1.so.0\0liblua.so\0liblua-5.1.so\0liblua.so.5.1\0", ("5.1",)),  # Debian's, 22.05 to 26.05
        (b"\0liblua-5.4.so\0", ("5.4",)),
        (b"\0liblua54.so.5.4\0liblua5.5.so\0", ("5.4", "5.5")),
        (b"\0liblua.so\0", ()),
    ],
)
def test_versions_of_lua_in_a_plugin(plugin: bytes, versions: tuple[str, ...]) -> None:
    assert lua_versions(plugin) == versions


def test_the_modules_say_the_versions_that_the_doctor_knows() -> None:
    for name in LUA_PLUGINS:
        text = (LUA_DIR / f"{name}.lua").read_text()
        assert f"Lua {LUA_VERSIONS[0]} to {LUA_VERSIONS[-1]}" in text


def test_the_worst_comes_first() -> None:
    found = examine(facts({"PreemptType": "preempt/none", "SchedulerType": "sched/builtin", "PrivateData": "jobs"}))
    assert [finding.level for finding in found] == [Level.PROBLEM, Level.WARNING, Level.NOTE]


@pytest.mark.shows("`doctor` checks Slurm's configuration, and the Lua that its plugins name")
@pytest.mark.slurm
@pytest.mark.every_release
def test_a_real_cluster_has_no_problem_that_is_none(devcluster: Any) -> None:
    command = [sys.executable, "-m", "hetstream.slurm_plugin.cli", "doctor", "--json"]
    env = {**os.environ, **devcluster.env}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    document = json.loads(done.stdout)
    assert (done.returncode, document["summary"]["problem"]) == (0, 0), done.stdout
    # The cluster does not load Lua, but Debian's plugins are there.
    config = parse_text.parse_config(devcluster.run("scontrol", "show", "config"))
    assert _lua(config["PluginDir"]) == {"job_submit": ("5.1",), "cli_filter": ("5.1",)}
    assert {"AccountingStorageType", "PreemptType"} <= {finding["check"] for finding in document["findings"]}
