"""Other schedulers of AntMan's Figure 13, played in the simulator: preemption, and packing in the manner of Gandiva."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hetstream.slurm_plugin.packing.decide import PackedStart, PackingPlan
from hetstream.slurm_plugin.packing.decide import decide as packer_decide
from hetstream.slurm_plugin.packing.state import GpuNode, PackingRules, PackingState, Place, WaitingJob
from hetstream.slurm_plugin.simulate.sharing import GpuLoad, PackingOptions

Floats = npt.NDArray[np.float64]
# Whoever shares a GPU with another one is so much slower than by its time alone: caches, memory bandwidth, switches.
_INTERFERENCE = 1.15
_MOST_ON_A_GPU = 2
_AT_ONCE = PackingRules(settle_s=0.0, first_delay_s=0.0, longest_delay_s=0.0, most_placements=1000)


def on_free_gpus(state: PackingState, _now_s: float, _rules: PackingRules | None) -> PackingPlan:
    """Jobs of tenant B start in their order, on GPUs that nobody has; the first that finds none blocks the others."""
    return _in_order(state, most_on_a_gpu=1)


def gandiva(state: PackingState, _now_s: float, _rules: PackingRules | None) -> PackingPlan:
    """All jobs in their order, two on a GPU at most: to the GPUs with the lowest use that have the memory."""
    return _in_order(state, most_on_a_gpu=_MOST_ON_A_GPU)


def gandiva_backfilled(state: PackingState, _now_s: float, _rules: PackingRules | None) -> PackingPlan:
    """The same without order: whatever fits starts."""
    return _in_order(state, most_on_a_gpu=_MOST_ON_A_GPU, is_strict=False)


def not_isolated(load: GpuLoad, _options: PackingOptions) -> tuple[Floats, Floats]:
    """Jobs divide a GPU as they come: all are slower where together they would keep it busy for more than its time."""
    demand, num_jobs = load.demand(), load.num_jobs()
    speed = np.where(num_jobs > 1, 1.0 / (np.maximum(1.0, demand) * _INTERFERENCE), 1.0)
    return speed[load.gpu], np.ones(len(load.has_host))


def preemptive_options() -> PackingOptions:
    """Tenant A drives B's jobs from the GPUs that it needs, the newest first; they begin again."""
    return PackingOptions(
        1.0, 0.0, 0.0, 0.0, rules=_AT_ONCE, decide=on_free_gpus, keeps_progress=False, takes_over=True
    )


def gandiva_options(gpu_memory_gib: float, is_strict: bool = True) -> PackingOptions:
    """Gandiva's packing, which knows each job's use and memory."""
    decide = gandiva if is_strict else gandiva_backfilled
    return PackingOptions(
        1.0, 0.0, 0.0, 0.0, gpu_memory_gib=gpu_memory_gib, rules=_AT_ONCE, decide=decide, law=not_isolated
    )


def by_packer(gpu_memory_gib: float, guaranteed_cost: float = 0.005, overhead: float = 0.05) -> PackingOptions:
    """Ours: the packer's own decision."""
    return PackingOptions(
        guaranteed_cost=guaranteed_cost, overhead=overhead, gpu_memory_gib=gpu_memory_gib, decide=packer_decide
    )


def _in_order(state: PackingState, most_on_a_gpu: int, is_strict: bool = True) -> PackingPlan:
    """Place jobs by their submission."""
    jobs = {(node.name, gpu.index): int(gpu.has_guaranteed) for node in state.nodes for gpu in node.gpus}
    free = {
        (node.name, gpu.index): gpu.use.free_bytes if gpu.use else 0 for node in state.nodes for gpu in node.gpus
    }  # fmt: skip
    use = {(node.name, gpu.index): gpu.use.used_share if gpu.use else 1.0 for node in state.nodes for gpu in node.gpus}
    for placed in state.placed:
        for gpu in placed.place.gpus():
            jobs[gpu] += 1
            free[gpu] -= placed.gpu_bytes
    placements = []
    for job in sorted(state.waiting, key=lambda job: (job.submit_s, job.job)):
        place = _place(state.nodes, job, {gpu for gpu, count in jobs.items() if count < most_on_a_gpu}, free, jobs, use)
        if place is None:
            if is_strict:
                break
            continue
        placements.append(PackedStart(job.job, place, "in its order"))
        for gpu in place.gpus():
            jobs[gpu] += 1
            free[gpu] -= job.gpu_bytes
            use[gpu] += 1.0  # not measured yet: nobody else comes there now if there is another
    return PackingPlan(tuple(placements))


def _place(
    nodes: tuple[GpuNode, ...],
    job: WaitingJob,
    is_open: set[tuple[str, int]],
    free: dict[tuple[str, int], int],
    jobs: dict[tuple[str, int], int],
    use: dict[tuple[str, int], float],
) -> Place | None:
    """GPUs of one node for a job, those with the fewest jobs and the lowest use."""
    found = []
    for node in nodes:
        gpus = [(node.name, gpu.index) for gpu in node.gpus]
        fits = [gpu for gpu in gpus if gpu in is_open and free[gpu] >= job.gpu_bytes]
        if len(fits) >= job.gpus and node.cpus_free >= job.cpus:
            best = sorted(fits, key=lambda gpu: (jobs[gpu], use[gpu], gpu))[: job.gpus]
            rank = max((jobs[gpu], use[gpu]) for gpu in best)
            found.append((rank, node.name, tuple(sorted(index for _, index in best))))
    if not found:
        return None
    _, name, indices = min(found)
    return Place((name,), indices)
