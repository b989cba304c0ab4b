"""`make bench-slurm_parse`: how much CPU does it take to read a large cluster?

5,000 jobs and 2,000 nodes, made from the recorded outputs of three Slurm versions by giving the recorded jobs and nodes
new numbers, are parsed by the code that reads a real cluster. Beside it, the limit that the form sets: `json.loads` for
JSON, splitting at the separators for text. Only parsing is measured, in CPU seconds of this process; what squeue and
slurmctld need to produce the answer comes on top. One row is the whole look of the page, the exporter and the daemon,
at 5,000 nodes that are all different and 50,000 pending jobs with 5,000 shapes.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from hetstream.slurm_plugin.client import parse_json, parse_text, slurm_units
from hetstream.slurm_plugin.client.model import Job, Node, Partition, Snapshot
from hetstream.slurm_plugin.insight.advise import advise
from hetstream.slurm_plugin.insight.fragmentation import measure
from hetstream.slurm_plugin.insight.observation import observe
from hetstream.slurm_plugin.insight.why import Explainer

FIXTURES = Path(__file__).resolve().parents[1] / "tests/slurm_plugin/fixtures"
VERSIONS = ("22.05", "24.11", "26.05")
NUM_JOBS, NUM_NODES = 5000, 2000
TARGET_S = 1.0
OBSERVED = (5000, 50_000, 5000)  # nodes, pending jobs, shapes


def jobs_in_json(version: str, count: int) -> bytes:
    """The answer of `squeue --json` with so many pending and running jobs."""
    answer = json.loads((FIXTURES / version / "squeue.json").read_text())
    live = [job for job in answer["jobs"] if "RUNNING" in job["job_state"] or "PENDING" in job["job_state"]]
    jobs = []
    for number in range(count):
        job = copy.deepcopy(live[number % len(live)])
        job["job_id"] = number + 1
        job["name"] = f"job-{number}"
        jobs.append(job)
    return json.dumps({**answer, "jobs": jobs}).encode()


def jobs_in_text(count: int) -> str:
    """The answer of `squeue -O` with so many jobs: each with times, node and comment of its own."""
    rows = []
    for number in range(count):
        running = number % 2 == 0
        minute, second = number // 60 % 60, number % 60
        row = {
            "JobID": str(number + 1), "ArrayJobID": str(number + 1), "ArrayTaskID": "N/A", "HetJobID": "N/A",
            "HetJobOffset": "N/A", "UserName": f"user{number % 97}", "UserID": str(1000 + number % 97),
            "Account": f"group{number % 13}", "QOS": "normal",
            "Partition": "gpu", "State": "RUNNING" if running else "PENDING",
            "Reason": "None" if running else "Priority",
            "NumNodes": "1", "NumCPUs": str(number % 64 + 1), "NumTasks": "1", "cpus-per-task": str(number % 64 + 1),
            "MinMemory": f"{number % 500 + 1}G",
            "tres-alloc": f"cpu={number % 64 + 1},mem={number % 500 + 1}G,node=1,billing=2",
            "tres-per-node": f"gres:gpu:h200:{number % 8 + 1}", "tres-per-task": "N/A", "tres-per-job": "N/A",
            "tres-per-socket": "N/A", "cpus-per-tres": "N/A",
            "NodeList": f"node{number % NUM_NODES:04}" if running else "",
            "SubmitTime": f"2026-11-20T10:{minute:02}:{second:02}",
            "EligibleTime": f"2026-11-20T11:{minute:02}:{second:02}", "EndTime": "N/A", "TimeLimit": "1-00:00:00",
            "StartTime": f"2026-11-20T12:{minute:02}:{second:02}" if running else "N/A", "PriorityLong": str(number),
            "Dependency": "(null)", "ReqNodes": "", "SchedNodes": "(null)", "Feature": "(null)",
            "Reservation": "(null)", "Name": f"job-{number}", "WorkDir": f"/home/user{number % 97}",
            "Comment": "(null)", "RestartCnt": "0", "OverSubscribe": "OK", "ExcNodes": "", "Contiguous": "0",
            "ReqSwitch": "0", "Licenses": "(null)", "MaxNodes": "0", "MinCPUs": "1", "MinTmpDisk": "0", "SCT": "*:*:*",
            "NTPerCore": "-2", "NTPerSocket": "-2",
            "mem-per-tres": "N/A", "LastSchedEval": "2026-11-20T12:00:00", "MCSLabel": "N/A",
        }  # fmt: skip
        rows.append(parse_text.FIELD_END.join(row[name] for name in parse_text.JOB_FIELDS) + parse_text.RECORD_END)
    return "\n".join(rows)


def nodes_in_json(version: str, count: int) -> bytes:
    """The answer of `scontrol show node --json` (22.05: `sinfo --json`) with so many nodes."""
    name = "sinfo.json" if version == "22.05" else "scontrol_show_node.json"
    answer = json.loads((FIXTURES / version / name).read_text())
    nodes = [{**answer["nodes"][number % len(answer["nodes"])], "name": f"node{number:04}"} for number in range(count)]
    return json.dumps({**answer, "nodes": nodes}).encode()


def nodes_in_text(version: str, count: int) -> str:
    """The answer of `scontrol --oneliner show node` with so many nodes."""
    lines = (FIXTURES / version / "scontrol_show_node_oneliner.txt").read_text().splitlines()
    behind = [line.split(" ", 1)[1] for line in lines if line]
    return "\n".join(f"NodeName=node{number:04} {behind[number % len(behind)]}" for number in range(count))


def answers(num_jobs: int, num_nodes: int) -> dict[str, Callable[[], object]]:
    """The thinking of commands for admins over such a cluster, in which each pending job has a shape of its own."""
    jobs = parse_text.parse_jobs(jobs_in_text(num_jobs))
    found = parse_text.parse_nodes(nodes_in_text("26.05", num_nodes))
    nodes = tuple(replace(node, partitions=("gpu",)) for node in found)
    snapshot = Snapshot(time.time(), "26.05.5", "benchmark", jobs, nodes, (Partition("gpu", ()),))
    return {
        "hetstream frag": lambda: measure(nodes, jobs),
        "hetstream jobs": lambda: [explain.waits_for(job) for explain in (Explainer(snapshot),) for job in jobs],
        "hetstream advise": lambda: advise(snapshot, {}),
    }


def large_queue(num_nodes: int, num_jobs: int, num_shapes: int) -> Snapshot:
    """Nodes unlike each other, and pending jobs of so many shapes."""
    draw = random.Random(1)
    nodes = tuple(
        Node(
            f"node{number}", frozenset({"MIXED"}), ("gpu",) if number % 2 else ("cpu",), 128, draw.randrange(129),
            1_000_000, draw.randrange(1_000_000), slurm_units.parse_gres("gpu:h100:8" if number % 2 else ""),
            slurm_units.parse_gres(f"gpu:h100:{draw.randrange(1, 9)}" if number % 2 else ""), cpu_load=3.0,
        )
        for number in range(num_nodes)
    )  # fmt: skip
    shapes = [
        (draw.choice((1, 2, 4, 8, 16, 24, 32, 48, 64)), draw.choice((0, 1, 2, 4, 8)), draw.randrange(1000, 200_000))
        for _ in range(num_shapes)
    ]
    jobs = []
    for number in range(num_jobs):
        cpus, gpus, memory_mb = shapes[number % num_shapes]
        jobs.append(
            Job(
                number + 1, "train", f"user{number % 300}", ("gpu",) if gpus else ("cpu",), "PENDING", "Priority",
                1, cpus, 1, cpus, memory_mb, gres_per_node=slurm_units.parse_gres(f"gpu:{gpus}" if gpus else ""),
                submit_s=draw.random() * 1e5, priority=draw.randrange(1_000_000),
            )
        )  # fmt: skip
    partitions = (Partition("gpu", ()), Partition("cpu", ()))
    return Snapshot(2e5, "26.05.5", "benchmark", tuple(jobs), nodes, partitions)


def cpu_s(act: Callable[[], object], repeats: int) -> float:
    """The least CPU time of several runs, each without what the run before has remembered."""
    found = []
    for _ in range(repeats):
        for cached in (
            slurm_units.parse_gres,
            slurm_units.expand,
            slurm_units.seconds,
            slurm_units.moment,
            slurm_units.megabytes,
            slurm_units.tres,
        ):
            cached.cache_clear()
        before = time.process_time()
        act()
        found.append(time.process_time() - before)
    return min(found)


def main() -> int:
    """Print the table; 1 if the way that hetstream reads any version takes longer than the target."""
    parser = argparse.ArgumentParser(description="CPU time of reading a large cluster.")
    parser.add_argument("--quick", action="store_true", help="a tenth of the size, once")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    args = parser.parse_args()
    num_jobs, num_nodes = (NUM_JOBS // 10, NUM_NODES // 10) if args.quick else (NUM_JOBS, NUM_NODES)
    repeats = 1 if args.quick else 3
    rows = []
    text = jobs_in_text(num_jobs)
    split = cpu_s(lambda: [line.split(parse_text.FIELD_END) for line in text.split(parse_text.RECORD_END)], repeats)
    text_s = cpu_s(lambda: parse_text.parse_jobs(text), repeats)
    rows.append({"what": "jobs, squeue -O", "bytes": len(text), "cpu_s": text_s, "limit_cpu_s": split})
    for version in VERSIONS:
        jobs, nodes = jobs_in_json(version, num_jobs), nodes_in_json(version, num_nodes)
        node_text = nodes_in_text(version, num_nodes)
        for what, data, parse in (
            (f"{version} jobs, JSON", jobs, parse_json.parse_jobs),
            (f"{version} nodes, JSON", nodes, parse_json.parse_nodes),
        ):
            limit = cpu_s(lambda data=data: json.loads(data), repeats)  # type: ignore[misc]
            took = cpu_s(lambda parse=parse, data=data: parse(data), repeats)  # type: ignore[misc]
            rows.append({"what": what, "bytes": len(data), "cpu_s": took, "limit_cpu_s": limit})
        took = cpu_s(lambda text=node_text: parse_text.parse_nodes(text), repeats)  # type: ignore[misc]
        rows.append({"what": f"{version} nodes, text", "bytes": len(node_text), "cpu_s": took, "limit_cpu_s": None})
    by_name = {str(row["what"]): float(row["cpu_s"] or 0) for row in rows}
    thinking = {name: cpu_s(act, 1) for name, act in answers(num_jobs, num_nodes).items()}
    sizes = [size // 10 for size in OBSERVED] if args.quick else list(OBSERVED)
    queue = large_queue(*sizes)
    observed = cpu_s(lambda: observe(queue, {}), repeats)
    form = {"22.05": "text", "24.11": "JSON", "26.05": "JSON"}
    used = {version: text_s + by_name[f"{version} nodes, {form[version]}"] for version in VERSIONS}
    if args.json:
        print(
            json.dumps(
                {
                    "num_jobs": num_jobs,
                    "num_nodes": num_nodes,
                    "rows": rows,
                    "as_used_cpu_s": used,
                    "answers_cpu_s": thinking,
                    "observe_cpu_s": observed,
                },
                indent=1,
            )
        )
    else:
        print(f"{num_jobs:,} jobs, {num_nodes:,} nodes; CPU seconds, least of {repeats}")
        for row in rows:
            limit = f"{row['limit_cpu_s']:8.3f}" if row["limit_cpu_s"] is not None else "       -"
            size = f"{int(row['bytes'] or 0) / 1e6:8.1f} MB"
            print(f"{row['what']:<22}{size}{row['cpu_s']:8.3f} s   json.loads/split{limit} s")
        for name, took in thinking.items():
            print(f"{name:<22}{took:19.3f} s   after parsing")
        looked = "{:,} nodes, {:,} pending jobs, {:,} shapes".format(*sizes)
        print(f"observe(), {looked}: {observed:.3f} s (target: less than {TARGET_S:g} s)")
        for version, took in used.items():
            print(f"{version} as `CommandReader.snapshot` reads it: {took:.3f} s (target: less than {TARGET_S:g} s)")
    return int(max(observed, *used.values()) >= TARGET_S)


if __name__ == "__main__":
    sys.exit(main())
