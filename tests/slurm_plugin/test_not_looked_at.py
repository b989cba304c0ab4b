"""Slurm finds no room where all that hetstream looks at has some: its own verdict is told, whatever led to it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hetstream.slurm_plugin.cli.why import report_of
from hetstream.slurm_plugin.client.model import HetComponent, Job, Node, Partition, Snapshot
from hetstream.slurm_plugin.client.parse_text import FIELD_END, JOB_FIELDS, RECORD_END, parse_jobs
from hetstream.slurm_plugin.insight.blockers import Blocker
from hetstream.slurm_plugin.insight.observation import observe
from hetstream.slurm_plugin.insight.why import Explainer

NOW_S = 1_795_000_000.0
LOOKED_S = NOW_S - 20


def node(name: str, *partitions: str, cpus: int = 16, **more: Any) -> Node:
    return Node(name, frozenset({"MIXED"}), partitions or ("p",), 16, 16 - cpus, 1000, 0, **more)


def pending(reason: str = "Resources", **more: Any) -> Job:
    job = Job(7, "j", "u", ("p",), "PENDING", reason, 1, 4, 1, 4, 100, priority=100, last_sched_eval_s=LOOKED_S)
    return replace(job, **more)


def snapshot(job: Job, *others: Job, nodes: tuple[Node, ...] = (node("a"), node("b"))) -> Snapshot:
    names = {name for each in nodes for name in each.partitions}
    return Snapshot(NOW_S, "22.05.8", "test", (job, *others), nodes, tuple(Partition(name, ()) for name in names))


def blocker(job: Job, *others: Job, **how: Any) -> Blocker:
    """What it waits for; `why`, `jobs` and what is counted name the same."""
    seen = snapshot(job, *others, **how)
    explainer = Explainer(seen)
    (found,) = explainer.explain(job).blockers
    assert explainer.waits_for(job) == found.kind
    assert explainer.causes(job) == (found.kind,)
    assert {row.job.job_id: row.cause for row in observe(seen, {}).waiting}[job.job_id] == found.kind
    return found


@pytest.mark.parametrize(
    "reason", ["Resources", "Nodes required for job are DOWN, DRAINED or reserved for jobs in hig"]
)
def test_who_slurm_has_looked_at_waits_for_what_is_not_looked_at(reason: str) -> None:
    job = pending(reason)
    found = blocker(job)
    said = "" if reason == "Resources" else f" (Slurm says: {reason})"
    assert found == Blocker(
        "not looked at",
        "no job is ahead, and all that is looked at here has room, but Slurm found none when it last looked, 00:00:20 "
        f"ago: for something that is not looked at here{said}, unless it was freed since",
        "scontrol show job 7; scontrol show node",
    )
    lines = report_of("7", [job], snapshot(job)).lines
    assert "room now  a,b (Slurm finds none)" in lines
    bad = pending("BadConstraints")
    assert "room now  a,b (Slurm finds none)" in report_of("7", [bad], snapshot(bad)).lines
    unknown = replace(job, last_sched_eval_s=None, gres_per_node=())
    assert "found none: for something that is not looked at here" in blocker(unknown).text
    assert Explainer(snapshot(job)).conversion(job).text == "it asks for no GPU"


@pytest.mark.parametrize("reason", ["", "None", "Priority", "SchedDefer"])
def test_who_slurm_has_not_looked_at_is_next(reason: str) -> None:
    """It was just submitted, or the first look ended before it: by depth, time or a limit of jobs."""
    found = blocker(pending(reason))
    assert found.kind == "scheduler"
    assert found.text == "there is room now, and no job is ahead: the next scheduling cycle starts it"


def test_a_job_that_only_backfill_looks_at_has_a_plan_in_the_place_of_a_reason() -> None:
    found = blocker(pending("None", start_s=NOW_S + 3600))
    assert found.kind == "not looked at"
    assert ", and plans its start in 01:00:00: for something" in found.text
    # Behind others it is planned behind them, and they may have gone since.
    assert blocker(pending("Priority", start_s=NOW_S + 3600)).kind == "scheduler"
    assert blocker(pending("None", start_s=NOW_S - 3600)).kind == "scheduler"


def test_what_was_freed_since_slurm_looked_is_room() -> None:
    idle = tuple(node(name, last_busy_s=LOOKED_S + 5) for name in "ab")
    found = blocker(pending(), nodes=idle)
    assert found.kind == "scheduler"
    assert "which was freed since Slurm last looked for it, 00:00:20 ago" in found.text
    ended = pending(job_id=3, state="COMPLETING", nodes=("a", "b"), end_s=LOOKED_S)
    assert blocker(pending(), ended).kind == "scheduler"
    # Of these two nodes one has had room since before.
    assert blocker(pending(), nodes=(idle[0], node("b", last_busy_s=LOOKED_S - 5))).kind == "not looked at"
    assert blocker(pending(num_nodes=2), nodes=(idle[0], node("b"))).kind == "scheduler"
    assert blocker(pending(), replace(ended, end_s=LOOKED_S - 1)).kind == "not looked at"
    assert blocker(pending(), replace(ended, nodes=("a",))).kind == "not looked at"


def test_a_component_is_judged_by_what_backfill_plans() -> None:
    """Backfill says Resources of it before it looks, and the main scheduler notes a look that it does not take."""
    part = pending(het=HetComponent(7, 0))
    assert blocker(part).text.endswith("backfill starts it in its next cycle, if it finds room for all components")
    found = blocker(replace(part, start_s=NOW_S + 3600))
    assert found.kind == "not looked at"
    assert "Slurm's backfill scheduler found none, and plans its start in 01:00:00: for something" in found.text
    assert found.text.endswith("unless it was freed since backfill last looked")


def test_of_equal_priorities_the_smaller_number_goes_first() -> None:
    assert blocker(pending(), pending(job_id=6)).kind == "priority"
    assert blocker(pending(), pending(job_id=8)).kind == "not looked at"
    parts = [pending("None", job_id=70 + offset, het=HetComponent(70, offset)) for offset in (0, 1)]
    assert blocker(parts[1], parts[0]).kind == "scheduler"


def test_jobs_of_another_partition_with_the_same_nodes_are_ahead() -> None:
    """The main scheduler starts nothing behind them on any node of their partition."""
    shared, other = node("a", "p", "q"), node("c", "r")
    rival = pending(job_id=3, partitions=("q",), priority=200, num_cpus=64, num_nodes=4)
    assert blocker(pending(), rival, nodes=(shared, other)).kind == "priority"
    assert blocker(pending(), replace(rival, priority=50), nodes=(shared, other)).kind == "not looked at"
    assert blocker(pending(), replace(rival, partitions=("r",)), nodes=(shared, other)).kind == "not looked at"
    planned = replace(rival, start_s=NOW_S + 60)
    assert blocker(pending(), planned, nodes=(shared, other)).kind == "backfill"


def test_the_look_is_read_from_squeue() -> None:
    values = dict.fromkeys(JOB_FIELDS, "") | {
        "JobID": "5", "UserName": "a", "Partition": "p", "State": "PENDING", "Reason": "Resources", "NumNodes": "1",
        "NumCPUs": "1", "LastSchedEval": "1795000000",
    }  # fmt: skip
    (job,) = parse_jobs(FIELD_END.join(values[name] for name in JOB_FIELDS) + RECORD_END)
    assert job.last_sched_eval_s == NOW_S
