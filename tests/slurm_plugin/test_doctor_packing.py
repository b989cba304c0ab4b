"""What `hetstream doctor` says of a cluster whose GPUs are shared: each finding by itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetstream.slurm_plugin.cli.install import _programs
from hetstream.slurm_plugin.client.model import Gres, Node, Snapshot
from hetstream.slurm_plugin.install.doctor import Facts, Finding, Level, packing, why_no_packing
from hetstream.slurm_plugin.install.units import SCRIPTS, SCRIPTS_VERSION, node_script

GOOD = {
    "GresTypes": "gpu,opp", "JobSubmitPlugins": "lua",
    "PreemptType": "preempt/partition_prio", "PreemptMode": "REQUEUE",
    "PreemptParameters": "min_exempt_priority=4294967000",
}  # fmt: skip
OURS = {option: {f"/p/{name}": node_script(option, Path("/e"))} for option, name in SCRIPTS.items()}
CONSTRAINED = "CgroupPlugin=autodetect\nConstrainDevices=yes\n"


def gpu_node(*types: str) -> Node:
    gres = (Gres("gpu", "", 2), *(Gres("opp", name, 1) for name in types))
    return Node("g0", frozenset({"IDLE"}), ("gpu",), 16, 0, 64000, 0, gres)


def found(
    config: Mapping[str, str] = {}, *, version: str = "26.05.5", types: str = "p0 p1", **more: Any
) -> list[Finding]:
    snapshot = Snapshot(0.0, version, "test", (), (gpu_node(*types.split()),), (), {**GOOD, **config})
    return list(packing(replace(Facts(snapshot, version, "", CONSTRAINED, node_scripts=OURS), **more)))


def only(*args: Any, **more: Any) -> Finding:
    (finding,) = found(*args, **more)
    return finding


def test_a_good_cluster_has_no_findings_and_one_that_shares_no_gpus_none_either() -> None:
    assert found() == []
    assert found({"GresTypes": "gpu", "JobSubmitPlugins": "(null)"}, node_scripts={}) == []


@pytest.mark.shows("Slurm 22.05 with ConstrainDevices: `doctor` says what packing needs, and the packer does not begin")
@pytest.mark.parametrize(
    ("version", "cgroup_conf", "has_plugin", "closed"),
    [
        ("22.05.8", CONSTRAINED, False, True),
        ("22.05.8", CONSTRAINED, None, True),
        ("22.05.8", CONSTRAINED, True, False),
        ("22.05.8", "ConstrainDevices=no\n", False, False),
        ("22.05.8", None, False, False),
        ("23.02.0", CONSTRAINED, False, False),
    ],
)
def test_22_05_with_constrained_devices_needs_a_plugin(
    version: str, cgroup_conf: str | None, has_plugin: bool | None, closed: bool
) -> None:
    config = {"PreemptType": "preempt/qos"}
    findings = found(config, version=version, cgroup_conf=cgroup_conf, has_gres_opp_plugin=has_plugin)
    reason = why_no_packing(version, GOOD, cgroup_conf, has_gres_opp_plugin=has_plugin)
    assert ("gres_opp.so" in reason) == closed
    assert [(finding.level, finding.check, finding.text) for finding in findings] == (
        [(Level.PROBLEM, "packing", reason)] if closed else []
    )


def test_without_the_gres_nobody_is_placed() -> None:
    assert "GresTypes in slurm.conf has no opp" in why_no_packing(
        "26.05.5", {"GresTypes": "gpu"}, None, has_gres_opp_plugin=None
    )


@pytest.mark.parametrize("types", ["p0", "p0 p2", "p1 p2", "a b"])
def test_each_gpu_has_one_slot_of_its_number(types: str) -> None:
    assert (only(types=types).level, only(types=types).seen) == (Level.PROBLEM, "g0")


@pytest.mark.shows("jobs that share a GPU see the same one, and can open no other")
def test_a_second_slot_and_constrained_devices_do_not_go_together() -> None:
    node = replace(gpu_node(), gres=(Gres("gpu", "", 1), Gres("opp", "p0", 2)))
    snapshot = Snapshot(0.0, "26.05.5", "test", (), (node,), (), GOOD)
    facts = Facts(snapshot, "26.05.5", "", CONSTRAINED, node_scripts=OURS)
    (finding,) = packing(facts)
    assert (finding.level, finding.seen, finding.fix) == (Level.PROBLEM, "g0", "one slot for each GPU: opp:p0:1")
    assert list(packing(replace(facts, cgroup_conf="ConstrainDevices=no\n"))) == []


def test_rules_of_slurm_conf() -> None:
    assert only({"JobSubmitPlugins": "(null)"}).check == "JobSubmitPlugins"
    assert only({"PreemptMode": "CANCEL"}).check == "PreemptMode"
    assert only({"PreemptParameters": "(null)"}).fix == "PreemptParameters=min_exempt_priority=4294967000"
    assert only(version="22.05.8", has_gres_opp_plugin=True).fix.startswith("Slurm 23.02, and ")
    assert found({"PreemptType": "preempt/qos", "PreemptParameters": "(null)"}) == []


@pytest.mark.parametrize("option", list(SCRIPTS))
def test_scripts_of_nodes(option: str) -> None:
    def with_script(*texts: str | None) -> Finding:
        programs = {f"/p/{number}": text for number, text in enumerate(texts)}
        return only(node_scripts={**OURS, option: programs})

    ours = node_script(option, Path("/e"))
    assert (with_script().level, with_script().check) == (Level.PROBLEM, option)
    assert with_script(None).level is Level.WARNING
    assert with_script("#!/bin/sh\nexit 0\n").level is Level.NOTE
    newer = ours.replace(f"hetstream_scripts={SCRIPTS_VERSION}", f"hetstream_scripts={SCRIPTS_VERSION + 1}")
    assert f"of version {SCRIPTS_VERSION + 1}" in with_script(newer).text
    assert found(node_scripts={**OURS, option: {"/p/site": "#!/bin/sh\n", "/p/ours": ours}}) == []


def test_where_a_job_that_drops_its_agent_is_not_found_that_is_said() -> None:
    uncounted = only(is_gpu_node=True, coordinator_socket=("/run/s", 0), uncounted_gpus=("GPU-1a2b", "MIG-5e6f"))
    assert (uncounted.level, uncounted.seen) == (Level.WARNING, "GPU-1a2b, MIG-5e6f")
    assert "only jobs that keep theirs are held back" in uncounted.text
    assert only({"ProctrackType": "proctrack/linuxproc"}).fix == "ProctrackType=proctrack/cgroup"
    assert found({"ProctrackType": "proctrack/cgroup"}) == []


def test_what_slurm_runs_is_found_by_each_of_its_spellings(tmp_path: Path) -> None:
    for name in ("a.sh", "b.sh"):
        (tmp_path / name).write_text(name)
    both = {str(tmp_path / name): name for name in ("a.sh", "b.sh")}
    assert _programs({"Prolog": f"{tmp_path}/*.sh", "PrologFlags": "Alloc"}, "Prolog") == both
    assert _programs({"Prolog[0]": f"{tmp_path}/a.sh", "Prolog[1]": f"{tmp_path}/b.sh"}, "Prolog") == both
    assert _programs({"Prolog": "(null)"}, "Prolog") == {}
    assert _programs({"Prolog": f"{tmp_path}/none.sh"}, "Prolog") == {f"{tmp_path}/none.sh": None}


@pytest.mark.parametrize(
    ("owner", "trusted", "said"), [(None, None, "no socket"), (990, None, "do not trust"), (990, 7, "do not trust")]
)
def test_the_coordinator_of_a_gpu_node(owner: int | None, trusted: int | None, said: str) -> None:
    here = {"is_gpu_node": True, "coordinator_socket": ("/run/s", owner), "coordinator_uid": trusted}
    assert said in only(**here).text
    assert found(**{**here, "is_gpu_node": False}) == []
    assert found(**{**here, "coordinator_socket": ("/run/s", trusted or 0)}) == []


def test_a_node_that_the_prolog_has_closed() -> None:
    here = {"is_gpu_node": True, "coordinator_socket": ("/run/s", 0), "is_sharing_closed": True}
    assert only(**here).check == "grants"
