"""Shared GPUs in `hetstream report`: who is on each, how they fare, whose trainer leaves its GPUs idle."""

from __future__ import annotations

import json
from dataclasses import replace

import clusters
import pytest

from hetstream.hetjob.site.messages import GpuNow, NodeGpus, SharingNow
from hetstream.slurm_plugin.cli.report import report_report
from hetstream.slurm_plugin.insight.observation import Observation, observe
from hetstream.slurm_plugin.insight.shared_gpus import SharedGpus, idle_trainers, sharing_rows
from hetstream.slurm_plugin.render.charts import MOST_LINES
from hetstream.slurm_plugin.render.page import page
from hetstream.slurm_plugin.render.tables import as_json

GIB = 1 << 30


def seen_with(shared: SharedGpus | None) -> Observation:
    return observe(clusters.snapshot(), {"2": 0.25}, shared)


@pytest.mark.shows("`opp`, `gpu top`, doctor, metrics and page show shared GPUs")
def test_each_job_stands_on_its_gpu_with_its_class_its_memory_and_its_pace() -> None:
    rows = sharing_rows(clusters.shared_gpus(), clusters.snapshot().jobs)
    shown = [(row.node, row.index, row.job, row.user, row.job_class, row.held_bytes, row.note) for row in rows]
    dark = "nobody is placed on GPUs of guaranteed jobs without an agent"
    assert shown == [
        ("gpu2", 0, "2", "alice", "guaranteed", 12 * GIB, ""),
        ("gpu2", 0, "8", "", "opportunistic", 4 * GIB, ""),
        ("gpu2", 0, "9", "", "opportunistic", None, "paused for 40 s"),
        ("gpu2", 1, "3", "alice", "guaranteed", None, ""),
        ("gpu2", 2, "", "", "guaranteed", None, dark),
        ("gpu3", 0, "", "", "", None, ""),
    ]
    assert [row.ratio and round(row.ratio, 2) for row in rows] == [1.02, 1.5, None, None, None, None]


def test_trainers_that_leave_their_gpus_idle_are_named_with_what_the_packer_would_say() -> None:
    def gpu(**more: object) -> GpuNow:
        usual = {"guaranteed": ("2",), "capacity_bytes": 80 * GIB, "idle_share": 0.7, "is_reserved": True}
        return GpuNow(0, "GPU-a", 0.3, 60 * GIB, **{**usual, **more})  # type: ignore[arg-type]

    def verdict(*gpus: GpuNow, age_s: float = 1.0) -> str:
        (row, *_) = idle_trainers(SharedGpus((NodeGpus("gpu2", age_s, gpus),)), clusters.snapshot().jobs, {"2": 0.6})
        assert (row.job, row.user, row.gpus, row.wait_share) == ("2", "alice", 2, 0.6)
        return row.verdict

    assert verdict(gpu(), gpu(closed="of guaranteed jobs that say nothing")) == "yes: 1 of 2 GPUs, up to 64.4 GB"
    assert verdict() == "not now: its nodes tell nothing of its GPUs (hetstream internal gpu-report)"
    assert verdict(gpu(), age_s=31.0) == "not now: its node told of it 31 s ago"
    crowded = gpu(sharing=(SharingNow("8"), SharingNow("9")))
    assert verdict(crowded) == "not now: 2 opportunistic jobs are there"
    full = GpuNow(0, "GPU-a", 0.3, 0, guaranteed=("2",))
    assert verdict(full) == "not now: no memory is left"
    assert "GPUs of guaranteed jobs that say nothing" in verdict(gpu(closed="of guaranteed jobs that say nothing"))
    used = GpuNow(0, "GPU-a", 0.8, 1, guaranteed=("2",))
    assert verdict(used) == "not now: in use for 80% of the time"


def test_who_keeps_his_gpus_busy_and_who_holds_none_is_not_named() -> None:
    jobs = clusters.snapshot().jobs
    assert idle_trainers(SharedGpus(), jobs, {"2": 0.1, "3": 0.19}) == []
    assert [row.job for row in idle_trainers(SharedGpus(wait_shares={"3": 0.9}), jobs, {"2": 0.3})] == ["3", "2"]
    assert idle_trainers(SharedGpus(), [clusters.job(5, 4, 0, None)], {"5": 0.9}) == []


def test_page_tables_and_json_say_the_same_and_why_nothing_is_known() -> None:
    seen = seen_with(clusters.shared_gpus())
    document = json.loads(as_json(report_report(seen, ())))
    assert [(row["node"], row["job"]) for row in document["shared_gpus"]][:3] == [
        ("gpu2", "2"), ("gpu2", "8"), ("gpu2", "9"),
    ]  # fmt: skip
    assert [row["job"] for row in document["idle_trainers"]] == ["3", "2"]
    text = page(seen, [])
    for words in ("<h2>Shared GPUs</h2>", "108.0 ms (×1.02)", "paused for 40 s", "1.1 GB", "40 %", "opportunistic"):
        assert words in text
    assert "<h2>Trainers that leave their GPUs idle</h2>" in text
    without = seen_with(None)
    assert "Shared GPUs" not in page(without, [])
    assert "shared_gpus" not in json.loads(as_json(report_report(without, ())))
    silent = seen_with(SharedGpus(missing="unix:/x does not <answer>"))
    assert "They are not known: unix:/x does not &lt;answer&gt;" in page(silent, [])
    assert report_report(silent, ()).notes == ["shared GPUs are not known: unix:/x does not <answer>"]
    assert "No node tells of shared GPUs." in page(seen_with(SharedGpus()), [])


def test_a_page_of_a_large_cluster_stays_a_page() -> None:
    (node, _) = clusters.shared_gpus().nodes
    many = SharedGpus(tuple(replace_node(node, f"g{number}") for number in range(100)))
    text = page(seen_with(many), [])
    assert "and 400 more, all of them with --json" in text
    assert text.count('data-label="Mini-batch"') == MOST_LINES


def replace_node(node: NodeGpus, name: str) -> NodeGpus:
    return NodeGpus(name, node.age_s, node.gpus)


@pytest.mark.parametrize("evil", ["<script>alert(1)</script>", "\x1b[2J"])
def test_what_nodes_tell_is_shown_as_text(evil: str) -> None:
    gpu = GpuNow(0, "GPU-a", 0.5, 1, True, ("2",), evil, (SharingNow("8", 0.0, evil),), idle_share=0.9)
    text = page(replace(seen_with(None), shared=SharedGpus((NodeGpus("gpu2", 1.0, (gpu,)),))), [])
    assert evil not in text
