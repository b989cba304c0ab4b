"""What a site gives for each GPU to jobs that do not say it: DefCpuPerGPU, DefMemPerGPU. Pure; used by `read.py`.

slurmctld puts these into a job's record when it first tries the job, and until then nothing of it shows them. Nor does
the record say whether a job's memory is what it asked for itself, beside which DefMemPerGPU is given to nobody.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from hetstream.slurm_plugin.client.model import Job, Node, Partition
from hetstream.slurm_plugin.client.parse_text import job_default
from hetstream.slurm_plugin.client.slurm_units import whole

# The cluster's DefMemPerGPU then gives way to a partition's own DefMemPerCPU or DefMemPerNode, and counts in what a job
# asks for from the beginning (_set_gpu_defaults in select/cons_tres, job_get_tres_mem in src/slurmctld/job_mgr.c).
_COUNTED_AT_ONCE = (25, 5)


class GpuDefaults:
    """The defaults of a cluster's partitions.

    Args:
        partitions: all of them.
        nodes: those that are shown.
        config: `scontrol show config`.
        release: of slurmctld.
    """

    def __init__(
        self,
        partitions: Iterable[Partition],
        nodes: Iterable[Node],
        config: Mapping[str, str],
        release: tuple[int, int],
    ) -> None:
        self._partitions = {partition.name: partition for partition in partitions}
        self._config, self._release = config, release
        self._memory_mb = {node.name: node.memory_mb for node in nodes}

    def in_doubt(self, jobs: Iterable[Job]) -> frozenset[int]:
        """Return the jobs of which nothing in their records says whether they ask for memory, such as all of a node."""
        return frozenset(job.job_id for job in jobs if self._mb_per_gpu(job) and self._asks_itself(job) is None)

    def with_defaults(self, jobs: Iterable[Job], asks_itself: Mapping[int, bool | None]) -> tuple[Job, ...]:
        """Return the jobs, pending ones with what they get for each of their GPUs.

        Args:
            jobs: any.
            asks_itself: which of those in doubt ask for memory themselves; one of which nothing is known does not.
        """
        return tuple(self._with_defaults(job, asks_itself) if job.is_pending else job for job in jobs)

    def _with_defaults(self, job: Job, asks_itself: Mapping[int, bool | None]) -> Job:
        if not _wants_gpus(job):
            return job
        if mb_per_gpu := self._mb_per_gpu(job):
            own = self._asks_itself(job)
            own = bool(asks_itself.get(job.job_id)) if own is None else own
            tried = job.memory_per_gpu_mb > 0
            job = replace(job, memory_per_gpu_mb=mb_per_gpu, own_memory=own)
            if own:  # --mem=0, of which later releases show DefMemPerGPU once the job was tried
                job = replace(job, all_memory=job.all_memory or (tried and job.memory_mb == self._all_mb(job)))
            else:
                job = replace(job, all_memory=False, memory_per_cpu_mb=None)
        else:
            tried = False
        # With --cpus-per-task it gets none; nobody can tell of 1 whether it was said, until the job was tried.
        says_cpus = job.cpus_per_gpu or job.cpus_per_task > 1 or job.num_cpus > max(job.num_tasks, job.num_nodes)
        if not (says_cpus or tried or job.found_no_room):
            job = replace(job, cpus_per_gpu=self._cpus_per_gpu(job))
        return self._with_memory_of_cpus(job)

    def _with_memory_of_cpus(self, job: Job) -> Job:
        """The job, with its DefMemPerCPU where its CPUs come with its GPUs: its record shows one CPU a node."""
        if not job.cpus_per_gpu or job.memory_per_gpu_mb or job.all_memory or job.memory_per_cpu_mb:
            return job
        mb_per_cpu = self._by_cpus_or_nodes(job)[0]
        is_default = mb_per_cpu is not None and job.memory_mb == mb_per_cpu * job.num_cpus
        return replace(job, memory_per_cpu_mb=mb_per_cpu) if is_default else job

    def _asks_itself(self, job: Job) -> bool | None:
        """Whether a job asks for memory by nodes or CPUs; None if what Slurm counts as asked for does not say."""
        if job.own_memory is not None:
            return job.own_memory
        per_cpu, per_node = self._by_cpus_or_nodes(job)
        by_gpus = self._mb_per_gpu(job) * job.count("gpu")
        if job.memory_mb in (by_gpus, (per_cpu or 0) * job.num_cpus, (per_node or 0) * job.num_nodes):
            return False
        # Without any default it would be counted with all memory of a node.
        if per_cpu or per_node or self._release >= _COUNTED_AT_ONCE:
            return True
        return None if job.memory_mb == self._all_mb(job) else True

    def _all_mb(self, job: Job) -> int | None:
        """What Slurm counts for all memory of a job's nodes: of each that of the partition's first (job_mgr.c)."""
        places = (self._partitions[name].nodes for name in job.partitions if name in self._partitions)
        first_mb = next((self._memory_mb.get(nodes[0]) for nodes in places if nodes), None)
        return None if first_mb is None else first_mb * max(1, job.num_nodes)

    def _mb_per_gpu(self, job: Job) -> int:
        """DefMemPerGPU; 0 where there is none, or the job has said another amount for each GPU."""
        if not job.is_pending or not _wants_gpus(job) or (job.memory_per_gpu_mb and job.own_memory is False):
            return 0
        return min((self._mb_per_gpu_in(partition) for partition in self._of(job)), default=0)

    def _mb_per_gpu_in(self, partition: Partition) -> int:
        if partition.default_mb_per_gpu is not None:
            return partition.default_mb_per_gpu
        has_own = partition.default_mb_per_cpu or partition.default_mb_per_node
        if has_own and self._release >= _COUNTED_AT_ONCE:
            return 0
        return job_default("DefMemPerGPU", self._config.get("JobDefaults", "")) or 0

    def _cpus_per_gpu(self, job: Job) -> int:
        everywhere = job_default("DefCpuPerGPU", self._config.get("JobDefaults", "")) or 0
        found = (partition.default_cpus_per_gpu for partition in self._of(job))
        return min((everywhere if number is None else number for number in found), default=0)

    def _by_cpus_or_nodes(self, job: Job) -> tuple[int | None, int | None]:
        """DefMemPerCPU and DefMemPerNode of a job's partition, of which there is one at the most."""
        for partition in self._of(job)[:1]:
            if partition.default_mb_per_cpu or partition.default_mb_per_node:
                return partition.default_mb_per_cpu, partition.default_mb_per_node
        per_cpu, per_node = (whole(self._config.get(name, "")) or None for name in ("DefMemPerCPU", "DefMemPerNode"))
        return per_cpu, per_node

    def _of(self, job: Job) -> Sequence[Partition]:
        return [self._partitions[name] for name in job.partitions if name in self._partitions]


def _wants_gpus(job: Job) -> bool:
    return any(gres.name == "gpu" for gres in job.gres_asked)
