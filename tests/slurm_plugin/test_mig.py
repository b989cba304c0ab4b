"""Instances of MIG are parts of GPUs wherever GPUs are counted, also where Slurm names no type of what jobs hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetstream.slurm_plugin.cli.cluster import frag_report as frag_report
from hetstream.slurm_plugin.cli.cluster import jobs_report as jobs_report
from hetstream.slurm_plugin.cli.util import report_of as util_report
from hetstream.slurm_plugin.client.accounting import SACCT_FIELDS, Usage, from_queue, sacct_rows, usages_of, with_mig
from hetstream.slurm_plugin.client.counted import counted
from hetstream.slurm_plugin.client.model import Gres, Job, Node, NodeShare, Partition, Snapshot, gpu_share
from hetstream.slurm_plugin.client.read import with_gpu_shares
from hetstream.slurm_plugin.client.slurm_units import parse_gres
from hetstream.slurm_plugin.daemon.nodes import pool_partitions
from hetstream.slurm_plugin.insight.fragmentation import measure
from hetstream.slurm_plugin.insight.utilisation import Window
from hetstream.slurm_plugin.insight.why import Explainer

NOW_S = 1e9
LARGE, SMALL = "nvidia_h100_80gb_hbm3_3g.40gb", "nvidia_h100_80gb_hbm3_1g.10gb"
NO_TYPE = "AccountingStorageTRES=gres/gpu,gres/gpu:TYPE"


@pytest.mark.parametrize(
    ("gpu_type", "share"),
    [
        ("", 1), ("h200", 1), ("a100_1g.5gb", 1 / 7), ("1g.10gb+me", 1 / 7), ("nvidia_a100_80gb_pcie_7g.80gb", 1),
        ("h100-3g.40gb", 3 / 7), ("nvidia_h200_2g.35gb", 2 / 7), ("gh200_1g.24gb", 1 / 7), ("1g.12gb", 1 / 7),
        ("nvidia_a30_1g.6gb", 1 / 4), ("a30_2g.12gb+me", 2 / 4), ("4g.24gb", 1), ("a100_4g.20gb", 4 / 7),
        ("nvidia_rtx_pro_6000_blackwell_server_edition_1g.24gb", 1 / 4), ("2g.48gb", 2 / 4), ("4g.96gb", 1),
        ("rtx_pro_4500_1g.16gb", 1 / 2), ("0g.5gb", 0),
    ],
)  # fmt: skip
def test_the_share_of_each_profile(gpu_type: str, share: float) -> None:
    assert gpu_share(gpu_type) == pytest.approx(share)


def node(name: str, gres: str, used: str = "", *states: str) -> Node:
    return Node(
        name, frozenset(states or {"MIXED"}), ("gpu",), 16, 0, 64000, 0, parse_gres(gres), parse_gres(used),
        gpus_allocated=sum(found.count for found in parse_gres(used)),
    )  # fmt: skip


def job(job_id: int, nodes: tuple[str, ...], held: str, asked: str = "") -> Job:
    return Job(
        job_id, "j", "u", ("gpu",), "RUNNING", "", len(nodes), 1, 1, 1, 0, nodes=nodes, start_s=NOW_S - 3600,
        gres_per_job=parse_gres(asked or held), gres_held=parse_gres(held),
    )  # fmt: skip


def mixed_site(*more: Job) -> Snapshot:
    """Five nodes of 4 GPUs, one of 6 instances (2 GPUs), and one of 4 GPUs that is drained and in use."""
    nodes = [node(f"g{number}", "gpu:4") for number in (1, 3, 4, 6, 7)]
    nodes.append(node("g2", f"gpu:{LARGE}:4,gpu:{SMALL}:2", f"gpu:{LARGE}:4,gpu:{SMALL}:2"))
    nodes.append(node("g5", "gpu:4", "gpu:4", "MIXED", "DRAIN"))
    jobs = (job(1, ("g2",), "gres/gpu=6"), job(2, ("g5",), "gres/gpu=4"), *more)
    return Snapshot(NOW_S, "24.11", "test", with_gpu_shares(jobs, nodes), tuple(nodes), ())


def test_instances_count_as_parts_in_what_is_held_and_in_what_there_is() -> None:
    """6 instances are 2 GPUs, and 4 are on the drained node: 6 of 20 + 2 + 4."""
    seen = mixed_site()
    jobs = jobs_report(list(seen.jobs), seen, False)
    assert jobs.summary["gpus_held"] == 6
    assert jobs.lines[0].startswith("2 running with 2 CPUs and 6 GPUs")
    assert [row["gpus"] for row in jobs.sections[0].rows] == [2, 4]
    util = util_report(list(from_queue(seen.jobs)), Window(NOW_S - 60, NOW_S), "partition", seen, None)
    assert util.summary["gpu_allocated_share"] == pytest.approx(6 / 26, abs=1e-4)
    assert "allocated: 23 % of the GPUs" in util.lines[1]
    assert not any(NO_TYPE in note for note in (*util.notes, *jobs.notes))


def test_what_nobody_knows_is_an_average_and_said_to_be() -> None:
    seen = replace(
        mixed_site(),
        nodes=(node("g2", f"gpu:{LARGE}:2,gpu:{SMALL}:2", f"gpu:{LARGE}:1,gpu:{SMALL}:1"),),
        jobs=(job(1, ("g2",), "gres/gpu=1"), job(2, ("g2",), "gres/gpu=1")),
    )
    seen = replace(seen, jobs=with_gpu_shares(seen.jobs, seen.nodes))
    jobs = jobs_report(list(seen.jobs), seen, False)
    assert jobs.summary["gpus_held"] == pytest.approx(4 / 7, abs=1e-4)
    assert [row["gpus"] for row in jobs.sections[0].rows] == [0.2857, 0.2857]
    assert sum(NO_TYPE in note and note.startswith("of 2 jobs") for note in jobs.notes) == 1
    util = util_report(list(from_queue(seen.jobs)), Window(NOW_S - 60, NOW_S), "partition", seen, None)
    assert sum(NO_TYPE in note for note in util.notes) == 1
    assert util.summary["gpu_allocated_share"] == pytest.approx((4 / 7) / (8 / 7), abs=1e-4)


@pytest.mark.parametrize(
    ("held", "asked", "gpus"),
    [
        ("gres/gpu=2", f"gres/gpu:{LARGE}:2", 6 / 7),  # what it asked for
        (f"gres/gpu=2,gres/gpu:{SMALL}=2", "gres/gpu:2", 2 / 7),
        ("gres/gpu=2", "gres/gpu:2", 2 / 7),  # the small ones alone are left
    ],
)
def test_what_can_be_known_is_used(held: str, asked: str, gpus: float) -> None:
    from hetstream.slurm_plugin.client.parse_text import allocated_gres

    kept = allocated_gres("RUNNING", held)
    first = replace(job(1, ("g2",), "", asked), gres_held=kept)
    other = job(2, ("g2",), "gres/gpu=2", f"gres/gpu:{LARGE}:2")
    large = 4 if LARGE in asked else 2
    nodes = [node("g2", f"gpu:{LARGE}:4,gpu:{SMALL}:2", f"gpu:{LARGE}:{large},gpu:{SMALL}:{0 if large == 4 else 2}")]
    found, _ = with_gpu_shares((first, other), nodes)
    assert (found.gpus, found.gpu_types_known) == (pytest.approx(gpus), True)


def test_what_a_job_has_on_each_node_says_its_types() -> None:
    share = NodeShare("g2", 1, 0, parse_gres(f"gpu:{LARGE}:1(IDX:0),gpu:{SMALL}:1(IDX:4)"))
    nodes = [node("g2", f"gpu:{LARGE}:4,gpu:{SMALL}:2", f"gpu:{LARGE}:2,gpu:{SMALL}:1")]
    found, other = with_gpu_shares(
        (replace(job(1, ("g2",), "gres/gpu=2"), shares=(share,)), job(2, ("g2",), "gres/gpu=1")), nodes
    )
    assert (found.gpus, other.gpus) == (pytest.approx(4 / 7), pytest.approx(3 / 7))


def sacct_line(job_id: int, tres: str, node_name: str, end: str = "2026-11-20T18:00:00") -> str:
    row = dict.fromkeys(SACCT_FIELDS, "") | {
        "JobIDRaw": str(job_id), "User": "alice", "Partition": "gpu", "State": "COMPLETED", "End": end,
        "Start": "2026-11-20T16:00:00", "ElapsedRaw": "7200", "AllocCPUS": "4", "AllocTRES": tres, "TotalCPU": "",
        "NodeList": node_name, "JobName": "train",
    }  # fmt: skip
    return "\x1f".join(row[name] for name in SACCT_FIELDS) + "\n"


def of_accounting(*lines: str, told: Mapping[int, str] = {}) -> tuple[list[tuple[str, float, bool]], int]:
    """Jobs, their GPUs and whether these are known; and how often slurmctld was asked."""
    asked = []

    def ask() -> dict[int, tuple[Gres, ...] | None]:
        asked.append(1)
        return {number: parse_gres(text) for number, text in told.items()}

    seen = mixed_site()
    usages: tuple[Usage, ...] = with_mig(usages_of(sacct_rows("".join(lines))), seen, ask)
    return [(usage.job, round(usage.gpus, 4), usage.gpu_types_known) for usage in usages], len(asked)


def test_jobs_of_accounting_without_types() -> None:
    found, num_asked = of_accounting(
        sacct_line(1, "cpu=1,gres/gpu=6", "g2", "Unknown"),  # it runs: all that is in use there
        sacct_line(5, "cpu=1,gres/gpu=2", "g2"),  # slurmctld remembers it
        sacct_line(6, "cpu=1,gres/gpu=3", "g2"),  # nobody does: 3 of 6 that are 2
        sacct_line(7, f"cpu=1,gres/gpu=2,gres/gpu:{LARGE}=2", "g2"),
        sacct_line(8, "cpu=1,gres/gpu=4", "g4"),
        told={5: f"gpu:{SMALL}:2", 6: "gpu:3"},
    )
    assert found == [("1", 2.0, True), ("5", 0.2857, True), ("6", 1.0, False), ("7", 0.8571, True), ("8", 4.0, True)]
    assert num_asked == 1


def test_slurmctld_is_not_asked_where_there_is_no_doubt() -> None:
    found, num_asked = of_accounting(sacct_line(8, "cpu=1,gres/gpu=4", "g[3-4]"), sacct_line(9, "cpu=1", "g2"))
    assert (found, num_asked) == ([("8", 4.0, True), ("9", 0.0, True)], 0)


def test_a_site_with_instances_alone_has_gpus() -> None:
    """A table shows them, and CPUs beside them are beside GPUs."""
    nodes = (
        replace(node("g1", f"gpu:{LARGE}:2", f"gpu:{LARGE}:1"), cpus_allocated=12),
        replace(node("g2", f"gpu:{LARGE}:2", f"gpu:{LARGE}:2"), cpus=64),
        replace(node("c1", ""), partitions=("cpu",)),
    )
    seen = Snapshot(NOW_S, "24.11", "test", (), nodes, (Partition("gpu", ("g1", "g2")), Partition("cpu", ("c1",))))
    assert pool_partitions(seen, None) == ("cpu",)
    found = measure(nodes, ())
    assert (found.share_without_cpus, found.share_without_gpus) == (0.0, 0.5)  # g2 has none left, g1 one of two
    (types,) = (part for part in frag_report(found, seen).sections if part.name == "gpu_types")
    assert [(row["type"], row["num_free"], row["num"]) for row in types.rows] == [(LARGE, 1, 4)]
    waiting = replace(
        job(7, (), "", f"gres/gpu:{LARGE}:1"), state="PENDING", reason="Resources", num_nodes=1, num_cpus=8,
        cpus_per_task=8, gres_held=None,
    )  # fmt: skip
    verdict = Explainer(replace(seen, jobs=(waiting,))).explain(waiting).conversion
    assert "--data-worker-partition=cpu" in verdict.directive


@given(st.data())
def test_jobs_hold_together_what_is_in_use(data: st.DataObject) -> None:
    """Whatever jobs asked for, and though the TRES of none has a type."""
    counts = {kind: data.draw(st.integers(0, 4)) for kind in (LARGE, SMALL, "h100")}
    left = Counter(counts)
    jobs: list[Job] = []
    for number in range(data.draw(st.integers(0, 4))):
        takes = Counter({kind: data.draw(st.integers(0, num)) for kind, num in left.items()})
        left -= takes
        num = sum(takes.values())
        kinds = [kind for kind, count in takes.items() if count]
        typed = len(kinds) == 1 and data.draw(st.booleans())
        if num:
            jobs.append(job(number, ("g",), f"gres/gpu={num}", f"gres/gpu:{kinds[0]}:{num}" if typed else ""))
    used = Counter(counts)
    used.subtract(left)

    def words(of: Mapping[str, int]) -> str:
        return ",".join(f"gpu:{kind}:{num}" for kind, num in of.items() if num)

    nodes = [node("g", words(counts), words(used))]
    there = counted(nodes)
    held = sum(found.gpus for found in with_gpu_shares(jobs, nodes))
    assert held == pytest.approx(there.gpus_with_mig_held)
    assert there.gpus_with_mig == pytest.approx(counts["h100"] + counts[LARGE] * 3 / 7 + counts[SMALL] / 7)
