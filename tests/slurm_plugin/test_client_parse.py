"""The three recorded versions of Slurm, in text and JSON, are one model."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetstream.hetjob.errors import SlurmCommandError
from hetstream.slurm_plugin.client import parse_json, parse_text
from hetstream.slurm_plugin.client.model import Gres, HetComponent, Job, Node, NodeShare, Snapshot, total
from hetstream.slurm_plugin.client.read import CommandReader, release_of
from hetstream.slurm_plugin.client.slurm import CommandSlurm
from hetstream.slurm_plugin.client.slurm_units import compress, expand, megabytes, moment, parse_gres, seconds, whole
from hetstream.slurm_plugin.errors import UnreadableAnswer, UnsupportedSlurm
from hetstream.slurm_plugin.packing.quota_file import takes_gpus

FIXTURES = Path(__file__).with_name("fixtures")
VERSIONS = ("22.05", "24.11", "26.05")
# What the recorded `squeue -O` was asked for.
RECORDED = (
    "JobID", "ArrayOrHet", "UserName", "Partition", "State", "Reason", "NumCPUs", "MinMemory", "tres-alloc",
    "tres-per-node", "tres-per-job", "TimeLimit", "StartTime", "PriorityLong", "NodeList",
)  # fmt: skip


def recorded(version: str, name: str) -> str:
    return (FIXTURES / version / name).read_text()


def like(job: Job, first: int) -> dict[str, Any]:
    """A job without what differs between two runs of the same workload."""
    row = dataclasses.asdict(job)
    times = ("submit_s", "eligible_s", "start_s", "end_s", "last_sched_eval_s")
    for name in (*times, "priority", "nodes", "required_nodes", "planned_nodes", "shares", "work_dir"):
        del row[name]
    row["job_id"] -= first
    if row["array_job_id"] is not None:
        row["array_job_id"] -= first
    if row["het"]:
        row["het"]["het_job_id"] -= first
    # 22.05 says nothing about CPUs of a task; 24.11 puts them into tres-per-task.
    row["cpus_per_task"] = None
    return row


@pytest.mark.shows("the recorded outputs of Slurm 22.05, 24.11 and 26.05 are one model")
@pytest.mark.parametrize("version", VERSIONS)
def test_squeue_in_text(version: str) -> None:
    jobs = parse_text.parse_jobs(recorded(version, "squeue_O_pipe.txt"), RECORDED, "|", "\n")
    by_kind = {(job.partitions[0], job.state, str(job.gres_per_node)): job for job in jobs}
    assert len(jobs) == 11
    pending_gpu = by_kind["gpu", "PENDING", str((Gres("gpu", "", 4),))]
    assert (pending_gpu.num_cpus, pending_gpu.memory_mb, pending_gpu.count("gpu")) == (2, 100, 4)
    assert pending_gpu.waits_for_resources
    assert pending_gpu.start_s is not None
    typed = by_kind["gpu", "RUNNING", str((Gres("gpu", "h200", 1),))]
    assert (typed.nodes, typed.type_of("gpu"), typed.time_limit_s) == (("g3",), "h200", 1800)
    assert by_kind["opp", "RUNNING", str((Gres("opp", "p1", 1),))].nodes == ("g0",)
    assert by_kind["gpu", "RUNNING", str((Gres("shard", "", 3),))].count("gpu") == 0
    waiting = next(job for job in jobs if job.reason == "JobArrayTaskLimit")
    assert not waiting.waits_for_resources
    first, other = jobs[0].job_id, parse_text.parse_jobs(recorded("22.05", "squeue_O_pipe.txt"), RECORDED, "|", "\n")
    offset = first - other[0].job_id
    assert [like(job, offset) | {"reason": ""} for job in jobs] == [like(job, 0) | {"reason": ""} for job in other]


@pytest.mark.shows("the recorded outputs of Slurm 22.05, 24.11 and 26.05 are one model")
@pytest.mark.parametrize(("version", "first"), [("22.05", 101), ("24.11", 1), ("26.05", 96)])
def test_squeue_in_json(version: str, first: int) -> None:
    jobs = [job for job in parse_json.parse_jobs(recorded(version, "squeue.json")) if job.job_id >= first]
    base = [job for job in parse_json.parse_jobs(recorded("22.05", "squeue.json")) if job.job_id >= 101]
    assert [like(job, first) for job in jobs] == [like(job, 101) for job in base]
    one, two, leader, component, array = jobs
    assert one.shares == (NodeShare("g1", 2, 50, (Gres("gpu", "h200", 1, (0,)),)),)
    assert two.shares[0].gres == (Gres("gpu", "h200", 1, (1,)),)
    assert (one.time_limit_s, leader.time_limit_s) == (None, 300)
    assert (one.state, one.end_s, leader.state) == ("RUNNING", None, "RUNNING")
    assert leader.end_s is not None
    assert (leader.label, component.label) == (f"{first + 2}+0", f"{first + 2}+1")
    assert component.het == HetComponent(first + 2, 1)
    assert (array.label, array.num_records, array.reason) == (f"{first + 4}_[1-3]", 3, "JobHeldUser")
    assert (array.count("gpu"), array.waits_for_resources, array.start_s) == (1, False, None)


def _nodes(version: str) -> tuple[Node, ...]:
    return parse_json.parse_nodes(recorded(version, "sinfo.json" if version == "22.05" else "scontrol_show_node.json"))


@pytest.mark.shows("the recorded outputs of Slurm 22.05, 24.11 and 26.05 are one model")
@pytest.mark.parametrize("version", VERSIONS)
def test_nodes_in_json(version: str) -> None:
    nodes = {node.name: node for node in _nodes(version)}
    assert list(nodes) == ["c0", "c1", "c2", "c3", "g0", "g1", "g2", "g3"]
    c0, g1 = nodes["c0"], nodes["g1"]
    assert (c0.cpus, c0.cpus_free, c0.memory_mb, c0.memory_free_mb) == (32, 30, 64000, 63990)
    assert (c0.gpus, c0.gres_used, c0.features, c0.states) == (0, (), ("dw",), {"MIXED"})
    assert (g1.gpus, g1.gpus_free(), g1.gpus_free("h200"), g1.gpus_free("a100")) == (4, 2, 2, 0)
    assert Gres("gpu", "h200", 2, (0, 1)) in g1.gres_used
    assert (g1.cpus_free, total(g1.gres, "shard")) == (g1.cpus - 4, 16)
    assert all(node.is_usable and node.version.startswith(version) for node in nodes.values())


@pytest.mark.shows("the recorded outputs of Slurm 22.05, 24.11 and 26.05 are one model")
@pytest.mark.parametrize("version", VERSIONS)
def test_nodes_in_text(version: str) -> None:
    nodes = {node.name: node for node in parse_text.parse_nodes(recorded(version, "scontrol_show_node_oneliner.txt"))}
    assert len(nodes) == 8
    c3, g0 = nodes["c3"], nodes["g0"]
    assert (c3.is_usable, c3.state, c3.reason) == (False, "idle+drain", "maintenance window")
    assert (g0.cpus, g0.cpus_allocated, g0.memory_allocated_mb, g0.gpus) == (16, 3, 200, 4)
    assert (g0.partitions, g0.state, g0.is_usable) == (("gpu", "opp"), "mixed", True)
    base = parse_text.parse_nodes(recorded("22.05", "scontrol_show_node_oneliner.txt"))
    same = [(node.name, node.partitions, node.cpus, node.memory_mb, node.gres, node.features) for node in base]
    assert same == [
        (node.name, node.partitions, node.cpus, node.memory_mb, node.gres, node.features) for node in nodes.values()
    ]


@pytest.mark.parametrize(
    ("written", "reason"),
    # Recorded on 22.05, but for the last.
    [("Reason=bad GPU=1 State=x [a] Comment=y [root@1795283191]          z=1 Comment=hi Reason=no Extra=Reason=w",
      "bad GPU=1 State=x [a] Comment=y\nz=1"),
     ("Reason=Not responding [slurm@2026-11-27T04:20:18]", "Not responding"),
     ("Comment=hi Reason=no GresDrain=gpu:4", ""), ("Extra=Reason=x State=DOWN Comment=Reason=z", ""),
     ("Reason=no time CPUAlloc=9 Extra=Reason=w", "no time CPUAlloc=9"), ("", "")],
)  # fmt: skip
def test_what_people_write_into_a_node_is_told_whole_and_is_no_field(written: str, reason: str) -> None:
    (first, *_) = recorded("22.05", "scontrol_show_node_oneliner.txt").splitlines()
    (plain,) = parse_text.parse_nodes(f"{first}\n")
    (node,) = parse_text.parse_nodes(f"{first} {written}\n")
    assert dataclasses.replace(node, reason="") == plain
    assert node.reason == reason


@pytest.mark.slurm
@pytest.mark.every_release
def test_a_reason_is_told_as_sinfo_has_it_on_slurm(devcluster: Any) -> None:
    reason = "bad GPU=1 State=x [a] Comment=y"
    update = ("scontrol", "update", "NodeName=cpu3")
    devcluster.run(*update, "State=DRAIN", f"Reason={reason}")
    devcluster.run(*update, "Comment=hi Reason=no Extra=3 MemSpecLimit=9", "Extra=CPUAlloc=7 Reason=w")
    try:
        (node,) = [node for node in CommandSlurm(devcluster.env).snapshot().nodes if node.name == "cpu3"]
        assert (node.reason, node.states, node.memory_mb) == (reason, {"IDLE", "DRAIN"}, 64000)
        assert devcluster.run("sinfo", "--noheader", "--nodes=cpu3", "--format=%E") == reason
    finally:
        devcluster.run(*update, "State=RESUME", "Comment=", "Extra=")


def test_a_drained_partition_starts_the_jobs_that_wait_in_it() -> None:
    text = recorded("24.11", "scontrol_show_partition.txt").replace("\n   ", " ")
    assert "State=UP" in text
    for state, starts in (("UP", True), ("DRAIN", True), ("DOWN", False), ("INACTIVE", False)):
        partitions = parse_text.parse_partitions(text.replace("State=UP", f"State={state}"))
        assert {partition.is_up for partition in partitions} == {starts}, state


@pytest.mark.shows("the recorded outputs of Slurm 22.05, 24.11 and 26.05 are one model")
@pytest.mark.parametrize("version", VERSIONS)
def test_partitions_and_configuration(version: str) -> None:
    text = recorded(version, "scontrol_show_partition.txt").replace("\n   ", " ")
    partitions = {partition.name: partition for partition in parse_text.parse_partitions(text)}
    assert set(partitions) == {"gpu", "opp", "cpu"}
    gpu = partitions["gpu"]
    assert (gpu.nodes, gpu.is_default, gpu.is_up) == (("g0", "g1", "g2", "g3"), True, True)
    assert (gpu.priority_tier, partitions["opp"].priority_tier) == (10, 1)
    assert (gpu.max_time_s, gpu.max_cpus_per_node) == (None, None)
    config = parse_text.parse_config(recorded(version, "scontrol_show_config.txt"))
    assert config["SLURM_VERSION"].startswith(version)
    assert config["PreemptType"] == "preempt/partition_prio"


@pytest.mark.shows("all ways to ask for GPUs are understood alike")
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gres:gpu:4", [Gres("gpu", "", 4)]),
        ("gres/gpu:h200:4", [Gres("gpu", "h200", 4)]),
        ("gpu", [Gres("gpu", "", 1)]),
        ("gpu:tesla", [Gres("gpu", "tesla", 1)]),
        ("gpu:a100:4(S:0-1)", [Gres("gpu", "a100", 4)]),
        ("gpu:a100_1g.5gb:7", [Gres("gpu", "a100_1g.5gb", 7)]),
        ("gpu:4(IDX:0,2-4),shard:h200:0(IDX:N/A)", [Gres("gpu", "", 4, (0, 2, 3, 4)), Gres("shard", "h200", 0)]),
        ("shard:h200:3(3/4,-/4,0/4)", [Gres("shard", "h200", 3, (0,))]),
        ("opx:x1(CNT:1)", [Gres("opx", "x1", 1)]),
        ("craynetwork:2K", [Gres("craynetwork", "", 2048)]),
        ("cpu=2,mem=50M,gres/gpu=2,gres/gpu:h200=2", [Gres("gpu", "", 2), Gres("gpu", "h200", 2)]),
        ("cpu=1", []),
        ("(null)", []),
        ("N/A", []),
        ("", []),
    ],
)
def test_gres_strings(text: str, expected: list[Gres]) -> None:
    assert list(parse_gres(text)) == expected


@pytest.mark.parametrize("text", ["gpu:a:b:1", "gres/gpu:h200:x1", ":2"])
def test_what_is_no_gres_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="GRES"):
        parse_gres(text)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("g[0-2,7],login", ["g0", "g1", "g2", "g7", "login"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("r[1-2]n[1-2]-ib", ["r1n1-ib", "r1n2-ib", "r2n1-ib", "r2n2-ib"]),
        ("(null)", []),
    ],
)
def test_hostlists_expand(text: str, hosts: list[str]) -> None:
    assert list(expand(text)) == hosts


@pytest.mark.parametrize("text", ["g[0-2", "g]0[", "g[a-b]", "g[0-9999999]", "g[0-999][0-9999]"])
def test_what_is_no_hostlist_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="hostlist"):
        expand(text)


@pytest.mark.parametrize("text", ["a[1-999999]," * 90 + "b", f"a[{','.join(['1-999999'] * 90)}]", "a[0-9][1-999999]"])
def test_a_hostlist_of_more_hosts_than_any_cluster_has_is_not_written_out(text: str) -> None:
    with pytest.raises(ValueError, match="more than 1000000 hosts"):
        expand(text)


@pytest.mark.shows("JSON, table and CSV are made from the same rows; hostlist compression round-trips")
@given(st.sets(st.from_regex(r"[a-z]{1,3}[0-9]{0,3}(-ib)?", fullmatch=True), max_size=40))
def test_hostlists_round_trip(hosts: set[str]) -> None:
    text = compress(hosts)
    assert sorted(expand(text)) == sorted(hosts)
    assert compress(expand(text)) == text


def test_hostlists_are_short() -> None:
    assert compress([f"node{number:03}" for number in range(2000)]) == "node[000-999],node[1000-1999]"
    assert compress(["g10", "g9", "g3", "login"]) == "g[3,9-10],login"
    assert compress(["n1"]) == "n1"


def test_values() -> None:
    assert [seconds(text) for text in ("3-02:03:04", "02:03:04", "5:00", "7", "1-12", "UNLIMITED", "INVALID")] == [
        266584, 7384, 300, 420, 129600, None, None,
    ]  # fmt: skip
    assert [megabytes(text) for text in ("100M", "62.50G", "4000", "512K", "N/A")] == [100, 64000, 4000, 0, 0]
    assert moment("2026-11-20T16:00:15") is not None
    for parse, text in ((seconds, "soon"), (megabytes, "much"), (moment, "yesterday")):
        with pytest.raises(ValueError, match=text):
            parse(text)


# Whatever sbatch and scontrol take: control characters and Slurm's own words and marks among it.
user_text = st.one_of(
    st.text(),
    st.lists(
        st.sampled_from(
            ["gpu", ": 0:0", "gres", "/", ":", ",", "(", ")", "[", "]", "-", "=", "0", "4", "K", "\n", "\x1f"]
        )
    ).map("".join),
)
BY_USERS = (
    "Name", "WorkDir", "Comment", "Feature", "Reservation", "Dependency", "Account", "QOS", "Partition", "Reason",
    "tres-per-node", "tres-per-task", "tres-per-job", "tres-per-socket", "cpus-per-tres", "ReqNodes", "SchedNodes",
    "NumCPUs", "NumNodes", "NumTasks", "TimeLimit", "MinMemory", "ArrayTaskID", "StartTime", "ExcNodes", "ReqSwitch",
)  # fmt: skip
IN_JSON = (
    "name", "comment", "features", "resv_name", "dependency", "account", "partition", "current_working_directory",
    "tres_per_node", "tres_per_task", "tres_per_job", "tres_per_socket", "cpus_per_tres", "required_nodes",
    "scheduled_nodes", "array_task_string", "tres_req_str", "excluded_nodes",
)  # fmt: skip


@given(st.lists(st.dictionaries(st.sampled_from(BY_USERS), user_text), min_size=1, max_size=4))
def test_no_text_of_a_user_makes_a_job_vanish(given_texts: list[dict[str, str]]) -> None:
    ends = parse_text.new_separators()
    rows = [
        dict.fromkeys(parse_text.JOB_FIELDS, "") | {"JobID": str(number), "State": "PENDING", "NumCPUs": "1"} | texts
        for number, texts in enumerate(given_texts, 1)
    ]
    said = "".join(ends[0].join(row[name] for name in parse_text.JOB_FIELDS) + ends[1] + "\n" for row in rows)
    jobs = parse_text.parse_jobs(said, parse_text.JOB_FIELDS, *ends)
    assert [job.job_id for job in jobs] == [*range(1, len(rows) + 1)]
    assert all(job.num_records >= 1 and job.gpus >= 0 and job.label for job in jobs)


@given(st.lists(st.dictionaries(st.sampled_from(IN_JSON), user_text), min_size=1, max_size=4))
def test_no_text_of_a_user_makes_a_job_vanish_from_json(given_texts: list[dict[str, str]]) -> None:
    rows = [{"job_id": number, "job_state": "PENDING"} | texts for number, texts in enumerate(given_texts, 1)]
    jobs = parse_json.parse_jobs(json.dumps({"jobs": rows}).encode(errors="replace"))
    assert [job.job_id for job in jobs] == [*range(1, len(rows) + 1)]


ODD_GRES = (
    "gpu: 0:0",
    "gpu: 1",
    "gpu:x/y:0",
    "gres:gpu:a:b:1",
    "gpu:4,gpu: 0:0",
    "gres/gpu: 2",
    "gpu :1",
    "g pu",
)


@pytest.mark.parametrize("text", ODD_GRES)
@pytest.mark.parametrize("field", ["tres-per-node", "tres-per-task", "tres-per-job", "tres-per-socket"])
def test_a_job_whose_gres_cannot_be_read_has_gpus_in_doubt(
    text: str, field: str, caplog: pytest.LogCaptureFixture
) -> None:
    ends = parse_text.new_separators()
    row = dict.fromkeys(parse_text.JOB_FIELDS, "") | {"JobID": "41", "State": "PENDING", field: text}
    if field != "tres-per-job":
        row["tres-per-job"] = "gres/gpu:0"
    said = ends[0].join(row[name] for name in parse_text.JOB_FIELDS) + ends[1]
    (job,) = parse_text.parse_jobs(said, parse_text.JOB_FIELDS, *ends)
    assert job.gpus_in_doubt
    assert takes_gpus(job), "the packer holds it where GPUs have quotas"
    assert job.count("gpu") >= 1
    assert job.gpus >= 1
    assert "of job 41 a part cannot be read" in caplog.text


def test_what_slurm_counts_leaves_no_doubt_about_a_job() -> None:
    row = {"job_id": 41, "tres_per_node": "gres/gpu: 0:0,gres/gpu:4"}
    pending = row | {"job_state": "PENDING", "tres_req_str": "cpu=1,gres/gpu=4"}
    runs = row | {"job_state": "RUNNING", "tres_alloc_str": "cpu=1,gres/gpu=4"}
    for job in parse_json.parse_jobs(json.dumps({"jobs": [pending, runs]})):
        assert (job.count("gpu"), job.gpus_in_doubt, len(job.unreadable)) == (4, False, 1)


def test_a_node_with_an_odd_gres_stays(caplog: pytest.LogCaptureFixture) -> None:
    line = "NodeName=gpu0 State=IDLE CPUTot=4 CPUAlloc=0 RealMemory=10 AllocMem=0 Gres=gpu:4,x:y:z:w GresUsed=gpu:1 \n"
    (node,) = parse_text.parse_nodes(line)
    assert (node.gpus, node.gpus_in_use(), len(node.unreadable)) == (4, 1, 1)
    row = {"name": "gpu0", "state": "IDLE", "cpus": 4, "alloc_cpus": 0, "real_memory": 10, "alloc_memory": 0}
    (node,) = parse_json.parse_nodes(json.dumps({"nodes": [row | {"gres": "gpu:4,x:y:z:w", "gres_used": "gpu:1"}]}))
    assert (node.gpus, node.gpus_in_use(), len(node.unreadable)) == (4, 1, 1)
    assert "of node gpu0 a part cannot be read" in caplog.text


def test_what_slurm_gave_is_asked_where_a_running_jobs_request_cannot_be_read(tmp_path: Path) -> None:
    """On a cluster that does not account for gres/gpu, where two jobs are on a node."""
    tool = tmp_path / "scontrol"
    tool.write_text(
        "#!/bin/sh\necho 'JobId=41 JobName=a JOB_GRES=gpu:3 '\necho 'JobId=42 JobName=b JOB_GRES=(null) '\n"
        "echo 'JobId=43 JobName=c JOB_GRES=gpu: '\n"
    )
    tool.chmod(0o755)
    rows = [
        {"job_id": number, "job_state": "RUNNING", "nodes": "gpu0", "tres_per_node": "gres/gpu: 0:0"}
        for number in (41, 42, 43)
    ]
    jobs = parse_json.parse_jobs(json.dumps({"jobs": rows}))
    node = Node("gpu0", frozenset({"MIXED"}), (), 4, 0, 10, 0, gres=(Gres("gpu", "", 4),))
    reader = CommandReader({"PATH": str(tmp_path)})
    found = reader._with_told_gpus(Snapshot(0.0, "22.05", "commands", jobs, (node,), ()), reader._records)
    assert [(job.count("gpu"), job.gpus_in_doubt) for job in found] == [(3, False), (0, False), (1, True)]


def test_excluded_nodes_that_cannot_be_read_are_of_that_job_alone() -> None:
    assert parse_text.parse_excluded("8 g[1-\n9 g[1-2]\n\u00b2 g1\n10 (null)\n") == {9: ("g1", "g2")}


def test_squeue_writes_round_numbers_with_a_unit() -> None:
    assert [whole(text) for text in ("4K", "1M", "4095", "N/A")] == [4096, 1 << 20, 4095, 0]


def test_answers_of_another_form_are_errors() -> None:
    with pytest.raises(UnreadableAnswer, match="2 fields"):
        parse_text.parse_jobs("1\x1f2\x1e")
    with pytest.raises(UnreadableAnswer, match="State"):
        parse_text.parse_nodes("NodeName=x CPUTot=4\n")
    with pytest.raises(UnreadableAnswer, match="job_id"):
        parse_json.parse_jobs('{"jobs": [{"job_state": "RUNNING"}]}')
    with pytest.raises(UnreadableAnswer):
        parse_json.parse_nodes("squeue: error")


def test_an_old_slurm_is_one_line(tmp_path: Path) -> None:
    tool = tmp_path / "scontrol"
    tool.write_text("#!/bin/sh\necho 'SLURM_VERSION = 21.08.8'\n")
    tool.chmod(0o755)
    with pytest.raises(UnsupportedSlurm, match=r"21\.08\.8: hetstream reads 22\.05 and newer"):
        CommandReader({"PATH": str(tmp_path)}).snapshot()


@pytest.mark.shows("all ways to ask for GPUs are understood alike")
@pytest.mark.shows("pyslurm is used where it fits, and the commands everywhere else")
@pytest.mark.shows("the recorded outputs of Slurm 22.05, 24.11 and 26.05 are one model")
@pytest.mark.slurm
@pytest.mark.every_release
def test_text_and_json_of_a_real_cluster_agree(devcluster: Any, wait_until: Callable[..., None]) -> None:
    """What users can write is read alike in text and JSON, while jobs run and wait."""
    slurm = CommandSlurm({**devcluster.env, "SQUEUE_FORMAT": "%i", "SLURM_TIME_FORMAT": "relative"})
    quiet = ["--output=/dev/null"]
    script = "#!/bin/sh\nsleep 300\n"
    submitted = [
        slurm.submit(script, ["-p", "cpu", "-c2", "--mem=50", "-J", "na|me", "--comment=a|b \x1d", *quiet], key="k1"),
        slurm.submit(script, ["-p", "gpu", "--gpus=2", "-n2", "-c3", "--mem-per-cpu=100", "-t5", *quiet]),
        slurm.submit(script, ["-p", "gpu", "--gpus-per-task=1", "-n2", "--mem=10", *quiet]),
        slurm.submit(script, ["-p", "gpu", "-H", "-a", "1-8%2", "--gres=gpu:1", "-w", "gpu0", *quiet]),
        slurm.submit(script, ["-p", "cpu", "--begin=now+1hour", *quiet]),
    ]
    try:
        wait_until(
            lambda: sum(job.is_running for job in slurm.snapshot().jobs if str(job.job_id) in submitted) == 3, 60
        )
        in_text = {job.job_id: job for job in slurm.snapshot().jobs}
        in_json = {job.job_id: job for job in slurm.snapshot(details=True).jobs}
        for job_id in map(int, submitted):
            said = in_json[job_id]
            # JSON alone says which memory a job has asked for itself.
            plain = dataclasses.replace(said, shares=(), cpus_per_task=0, own_memory=None)
            assert dataclasses.replace(in_text[job_id], cpus_per_task=0, own_memory=None) == plain
        first, gpus, per_task, array, _ = (in_text[int(job_id)] for job_id in submitted)
        assert (first.name, first.comment) == ("na|me", "a|b \x1d hetstream:key=k1")
        assert [job.count("gpu") for job in (first, gpus, per_task, array)] == [0, 2, 2, 1]
        assert (gpus.memory_mb, gpus.memory_per_cpu_mb, gpus.num_cpus, gpus.time_limit_s) == (600, 100, 6, 300)
        assert (array.num_records, array.required_nodes) == (8, ("gpu0",))
        assert sum(total(share.gres, "gpu") for share in in_json[gpus.job_id].shares) == 2
        assert slurm.find("k1") == submitted[0]
        assert slurm.find("k2") is None
        slurm.update(submitted[3], {"TimeLimit": "20", "Comment": "moved"})
        slurm.release(submitted[3])
        wait_until(lambda: _by_id(slurm, submitted[3]).priority > 0, 30)
        assert (_by_id(slurm, submitted[3]).time_limit_s, _by_id(slurm, submitted[3]).comment) == (1200, "moved")
        slurm.hold(submitted[4])
        assert _by_id(slurm, submitted[4]).priority == 0
        with pytest.raises(SlurmCommandError, match="Check: squeue --jobs=999999"):
            slurm.hold("999999")
    finally:
        for job_id in submitted:
            slurm.cancel(job_id)
    wait_until(lambda: not slurm.snapshot().jobs, 60)


def _by_id(slurm: CommandSlurm, job_id: str) -> Job:
    return next(job for job in slurm.snapshot().jobs if job_id in (str(job.job_id), str(job.array_job_id)))


def test_lines_of_any_length_are_read_in_time() -> None:
    """Whoever may write a field of a record would hold up all that reads the cluster."""
    began_s = time.process_time()
    many = 100_000
    assert parse_text.record(" " * many + "!") == {}
    assert parse_text.record("NodeName=a" + "\t" * many + "Reason=b" + " " * many)["NodeName"] == "a"
    with pytest.raises(ValueError, match="must be NAME"):
        parse_gres("=" * many + "\n!")
    assert compress(["1" * many + "a1", "a7", "a8", "a09"]) == f"{'1' * many}a1,a09,a[7-8]"
    with pytest.raises(ValueError, match="hostlist"):
        expand("[" * many)
    with pytest.raises(ValueError, match="must be N or N-M"):
        expand(f"n[{'0' * 4000}1-1000000]")
    assert release_of("1" * many + " 22.05.8") == (22, 5)
    assert time.process_time() - began_s < 20
