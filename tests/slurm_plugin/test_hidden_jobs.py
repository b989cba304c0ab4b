"""Where Slurm hides jobs of others, nothing follows from their absence, and all commands say that there may be more."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from recorded import Recorded, job

from hetstream.slurm_plugin.cli.output import accounting_notes
from hetstream.slurm_plugin.client.accounting import Usage
from hetstream.slurm_plugin.client.model import Gres, Job, Node, Partition, Snapshot
from hetstream.slurm_plugin.client.read import hidden_from_me, in_question, with_held_gpus
from hetstream.slurm_plugin.insight.node_table import NodeTable
from hetstream.slurm_plugin.insight.observation import observe
from hetstream.slurm_plugin.insight.why import Explainer
from hetstream.slurm_plugin.render.page import page

NOW_S = 1_795_000_000.0
ALICE = 54321
FOUR, ONE = (Gres("gpu", "", 4),), (Gres("gpu", "", 1),)
BUSY = Node("n", frozenset({"MIXED"}), ("gpu",), 16, 8, 1000, 100, FOUR, FOUR)
MINE = Job(7, "j", "alice", ("gpu",), "RUNNING", "", 1, 4, 1, 4, 50, gres_per_node=ONE, nodes=("n",), uid=ALICE)
WAITS = Job(8, "j", "alice", ("gpu",), "PENDING", "Priority", 1, 4, 1, 4, 50, submit_s=NOW_S - 9, uid=ALICE, priority=9)
DBD = "accounting_storage/slurmdbd"


def snapshot(hidden: str, *jobs: Job, nodes: tuple[Node, ...] = (BUSY,)) -> Snapshot:
    return Snapshot(NOW_S, "26.05", "test", jobs, nodes, (Partition("gpu", ("n",)),), {}, hidden=hidden)


def test_a_job_that_seems_alone_has_no_gpus_of_others() -> None:
    assert with_held_gpus([MINE], [BUSY])[0].gpus == 4, "it is alone: what is in use is its own"
    (job,) = with_held_gpus([MINE], [BUSY], others_are_hidden=True)
    assert job.gpus == 1
    assert in_question([job], [BUSY], others_are_hidden=True) == {7}, "its own record says more"
    assert not in_question([replace(job, gres_held=ONE)], [BUSY], others_are_hidden=True)
    assert not in_question([job], [BUSY], others_are_hidden=False)
    assert not in_question([job], [replace(BUSY, gres=(), gres_used=())], others_are_hidden=True)


@pytest.mark.parametrize(
    ("hidden", "kind"),
    [
        ("", "scheduler"),
        ("PrivateData=jobs,usage", "hidden"),
        ("PrivateData=reservations", "hidden"),
        ("PrivateData=what_a_later_release_hides", "hidden"),
        ("MCSPlugin=mcs/user", "hidden"),
    ],
)
def test_nobody_is_said_to_be_first_in_line_where_others_are_hidden(hidden: str, kind: str) -> None:
    explainer = Explainer(snapshot(hidden, WAITS))
    (blocker,) = explainer.explain(WAITS).blockers
    assert (blocker.kind, explainer.waits_for(WAITS), explainer.causes(WAITS)) == (kind, kind, (kind,))
    assert hidden in blocker.text
    assert ("no job is ahead" in blocker.text) == (not hidden)
    ahead = replace(WAITS, job_id=6, priority=10, num_nodes=2)
    seen = Explainer(snapshot(hidden, WAITS, ahead))
    assert seen.waits_for(WAITS) == "priority", "who is seen to be ahead is"


@pytest.mark.parametrize(
    ("hidden", "are_hidden"),
    [("", False), ("PrivateData=reservations,nodes", False), ("PrivateData=Jobs", True), ("PrivateData=new", True),
     ("MCSPlugin=mcs/user", True)],
)  # fmt: skip
def test_which_settings_hide_jobs(hidden: str, are_hidden: bool) -> None:
    assert snapshot(hidden).hides_jobs is are_hidden


def test_a_node_with_cpus_in_use_may_have_jobs_of_others() -> None:
    """For --exclusive=user."""
    nodes = [BUSY, replace(BUSY, name="m", cpus_allocated=0)]
    alone = replace(WAITS, exclusive="USER")
    assert NodeTable(nodes, jobs=[MINE]).kept_from(alone).tolist() == [False, False]
    found = NodeTable(nodes, jobs=[MINE], others_are_hidden=True).kept_from(alone)
    assert np.array_equal(found, [True, False])


def slurm_that_hides(directory: Path, level: str = "None") -> Recorded:
    slurm = Recorded(directory)
    config = (directory / "config").read_text()
    slurm.write("config", config.replace("PrivateData             = none", "PrivateData             = jobs"))
    slurm.tool("sacctmgr", f"echo {level}")
    return slurm


@pytest.mark.parametrize(
    ("uid", "config", "level", "sees_all"),
    [
        (0, {}, "", True),
        (ALICE, {"SlurmUser": f"slurm({ALICE})"}, "", True),
        (ALICE, {"SlurmUser": "slurm(64030)"}, "Operator", False),  # without slurmdbd there are no operators
        (ALICE, {"AccountingStorageType": DBD}, "Operator", True),
        (ALICE, {"AccountingStorageType": DBD}, "Administrator", True),
        (ALICE, {"AccountingStorageType": DBD}, "None", False),
        (ALICE, {"AccountingStorageType": DBD}, "", False),
    ],
)
def test_root_slurm_user_and_operators_see_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uid: int, config: dict[str, str], level: str, sees_all: bool
) -> None:
    slurm_that_hides(tmp_path, level)
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    found = hidden_from_me({"PrivateData": "jobs"} | config, environ)
    assert found == ("" if sees_all else "PrivateData=jobs")
    assert hidden_from_me({"PrivateData": "none"} | config, environ) == ""


def test_who_is_an_operator_is_not_known_while_slurmdbd_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm_that_hides(tmp_path).tool("sacctmgr", "exit 1")
    monkeypatch.setattr(os, "geteuid", lambda: ALICE)
    config = {"PrivateData": "jobs", "AccountingStorageType": DBD}
    assert hidden_from_me(config, {"PATH": f"{tmp_path}:/usr/bin:/bin"}) == "PrivateData=jobs"


@pytest.mark.parametrize("verb", ["jobs", "util", "frag", "advise", "report", "why 41"])
def test_each_command_says_that_there_may_be_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    slurm = slurm_that_hides(tmp_path)
    line = "PrivateData=jobs: all figures are of what this user may see, and there may be more"
    assert line not in slurm.run(verb).stderr, "root sees all"
    monkeypatch.setattr(os, "geteuid", lambda: ALICE)
    assert line in slurm.run(verb).stderr
    told = json.loads(slurm.run(f"{verb} --json").stdout)
    assert line in told["notes"]
    assert told["meta"]["hidden"] == "PrivateData=jobs"


def test_the_page_says_so_too() -> None:
    line = "PrivateData=jobs: all figures are of what one user may see"
    assert line in page(observe(snapshot("PrivateData=jobs"), {}), [])
    assert line not in page(observe(snapshot(""), {}), [])


def test_what_sacct_hides_is_up_to_slurmdbd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: ALICE)
    monkeypatch.setenv("PATH", "/nowhere")
    seen = replace(snapshot(""), config={"AccountingStorageType": DBD})
    own = Usage("1", "j", str(ALICE), "a", "p", 4, 2, 0.0, 7200.0)
    (note,) = accounting_notes([own], seen)
    assert "sacct shows no job of another user" in note
    assert accounting_notes([own, replace(own, user="root")], seen) == []
    assert accounting_notes([own], snapshot("")) == [], "there is no sacct"
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert accounting_notes([own], seen) == []


def test_jobs_are_told_where_slurm_tells_of_no_node(tmp_path: Path) -> None:
    """What a job lacks is then said not to be known, not guessed; commands about nodes end."""
    slurm = Recorded(tmp_path)
    config = (tmp_path / "config").read_text()
    slurm.write("config", config.replace("PrivateData             = none", "PrivateData             = nodes"))
    refusal = "echo 'slurm_load_node error: Access/permission denied' >&2; exit 1"
    text = (tmp_path / "scontrol").read_text()
    slurm.tool("scontrol", f'case "$*" in *--details*) {refusal};; esac\n' + text.partition("\n")[2])
    running = job("42", "RUNNING", NodeList="g1", **{"tres-alloc": "cpu=2,mem=100M,node=1,gres/gpu=1"})
    slurm.write("queue", job("41", "PENDING", **{"tres-per-node": "gres:gpu:4"}) + running)
    rows = {row["job"]: row for row in json.loads(slurm.run("jobs --json").stdout)["jobs"]}
    assert (rows["41"]["waits_for"], rows["42"]["waits_for"]) == ("hidden", "")
    shown = slurm.run("why 41")
    assert "room now  not known\n" in shown.stdout
    assert "Slurm says Resources, and tells you nothing of nodes (PrivateData=nodes)" in shown.stdout
    (line,) = shown.stderr.splitlines()
    assert "PrivateData=nodes: Slurm tells this user of no node" in line
    assert slurm.run("doctor").returncode in (0, 3)
    assert slurm.run("frag").returncode == 1
