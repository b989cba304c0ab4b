"""Made-up clusters for the tests of what draws and exports them."""

from __future__ import annotations

from dataclasses import replace

from hetstream.hetjob.site.messages import GpuNow, NodeGpus, SharingJobNow, SharingNow
from hetstream.slurm_plugin.client.model import Gres, Job, Node, Partition, Snapshot
from hetstream.slurm_plugin.insight.observation import Observation, Sample, observe
from hetstream.slurm_plugin.insight.shared_gpus import SharedGpus

NOW_S = 1_795_000_000.0
HOUR_S = 3600.0
GIB = 1 << 30


def gpu_node(number: int, cpus_allocated: int, gpus_allocated: int, drained: bool = False) -> Node:
    """One of 16 CPUs and 4 GPUs."""
    return Node(
        f"gpu{number}", frozenset({"IDLE", "DRAIN"} if drained else {"MIXED"}), ("gpu",), 16, cpus_allocated,
        64000, 4000 * cpus_allocated, (Gres("gpu", "h200", 4),), (Gres("gpu", "h200", gpus_allocated),),
        reason="broken fan" if drained else "", cpu_load=0.6 * cpus_allocated,
    )  # fmt: skip


def job(job_id: int, cpus: int, gpus: int, waited_s: float | None, **more: object) -> Job:
    """A pending job; a running one if it has not waited."""
    made = Job(
        job_id, "train", "alice", ("gpu",), "RUNNING" if waited_s is None else "PENDING", "Resources", 1, cpus, 1, cpus,
        4000, gres_per_node=(Gres("gpu", "", gpus),) if gpus else (), priority=100 + job_id,
        submit_s=NOW_S - (waited_s or 0.0), start_s=NOW_S - 900 if waited_s is None else None,
    )  # fmt: skip
    return replace(made, **more)  # type: ignore[arg-type]


def snapshot(num_nodes: int = 24, *, gpus: bool = True, names: str = "train") -> Snapshot:
    """Nodes in every class of the indicator, and jobs that wait for each cause."""
    layout = [(16, 0), (16, 1), (12, 1), (8, 2), (14, 3), (16, 4), (4, 4), (8, 4), (6, 3), (15, 2)]
    nodes = [gpu_node(number, *layout[number % len(layout)], drained=number % 11 == 7) for number in range(num_nodes)]
    cpu_nodes = [
        Node(f"cpu{number}", frozenset({"MIXED"}), ("cpu",), 32, 8 * number, 128000, 1000, cpu_load=8.0 * number)
        for number in range(4)
    ]
    jobs = [job(number, 8, 2, None, nodes=(f"gpu{number}",)) for number in (2, 3)]
    jobs += [job(100 + number, 12, 2, 600.0 * number, num_nodes=1, name=names) for number in range(9)]  # lack CPUs
    jobs += [job(200 + number, 2, 4, 1500.0 * number, user="bob", required_nodes=("gpu5",)) for number in range(5)]
    jobs += [job(250 + number, 2, 1, 700.0 * number, user="carol", memory_mb=50000) for number in range(3)]
    jobs += [job(300, 4, 8, 7200.0), job(301, 2, 1, 100.0, reason="Dependency", dependency="afterok:1")]
    there_is_room = range(4)
    jobs += [job(400 + number, 1, 1, 60.0 * number, user="dan", reason="Priority") for number in there_is_room]
    partitions = (Partition("gpu", (), is_default=True), Partition("cpu", ()))
    chosen = nodes if gpus else []
    return Snapshot(
        NOW_S, "22.05.8", "test", tuple(jobs), (*chosen, *cpu_nodes), partitions, {"ClusterName": "testbed"}
    )


def observation(num_nodes: int = 24, **more: object) -> Observation:
    """The snapshot looked at; the trainer of job 2 waits for data for a quarter of its time."""
    return observe(snapshot(num_nodes, **more), {"2": 0.25}, shared_gpus())  # type: ignore[arg-type]


def shared_gpus() -> SharedGpus:
    """What two nodes told: a job that waits, with a guest; one whose GPU is busy; a GPU without anybody."""
    fares = (
        SharingJobNow("2", 1000, True, 12 * GIB, 0, 0.110, 0.108),
        SharingJobNow("8", 1001, False, 4 * GIB, GIB, 0.075, 0.050),
    )
    starved = GpuNow(
        0, "GPU-1a2b", 0.6, 60 * GIB, True, ("2",), sharing=(SharingNow("8", 0.0), SharingNow("9", 40.0)),
        capacity_bytes=80 * GIB, idle_share=0.4, jobs=fares,
    )  # fmt: skip
    busy = GpuNow(1, "GPU-3c4d", 0.98, 10 * GIB, True, ("3",), capacity_bytes=80 * GIB, idle_share=0.02)
    dark = GpuNow(
        2, "GPU-5e6f", 0.0, 0, True, closed="of guaranteed jobs without an agent", capacity_bytes=80 * GIB
    )  # fmt: skip
    empty = GpuNow(0, "GPU-7a8b", 0.0, 80 * GIB, capacity_bytes=80 * GIB)
    return SharedGpus((NodeGpus("gpu2", 3.0, (starved, busy, dark)), NodeGpus("gpu3", 1.0, (empty,))), {"3": 0.5})


def history(last: Sample, num_samples: int = 200) -> list[Sample]:
    """Samples of the two days before, with a gap, made by shifting the last."""
    found = []
    for number in range(num_samples):
        wave = (number * 37 % 40) / 40
        if not 0.4 < number / num_samples < 0.5:
            found.append(
                replace(
                    last,
                    taken_s=last.taken_s - (num_samples - number) * 48 * HOUR_S / num_samples,
                    gpus_allocated=round(last.gpus * (0.45 + 0.4 * wave)),
                    cpus_allocated=round(last.cpus * (0.85 - 0.2 * wave)),
                    cpu_load=last.cpus * (0.5 + 0.1 * wave),
                    stranded_gpus=round(last.gpus * 0.3 * (1 - wave)),
                    classes=(2 + number % 5, 4, 8 - number % 5, 4, 3),
                    waiting={
                        cause: replace(one, num_jobs=max(0, round(one.num_jobs * 2 * wave)))
                        for cause, one in last.waiting.items()
                    },
                )
            )
    return [*found, last]
