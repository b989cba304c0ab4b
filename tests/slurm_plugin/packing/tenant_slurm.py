"""A Slurm in memory with tenants: guaranteed jobs that the guard holds, GPUs that Slurm chooses, and nodes' Prologs."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from packed_slurm import GIB, NOW_S, PackedSlurm, number_of

from hetstream.hetjob.site.messages import GpuNow, SharingNow
from hetstream.slurm_plugin.client.model import Gres, Job, Node, Partition, Snapshot
from hetstream.slurm_plugin.client.slurm_units import expand
from hetstream.slurm_plugin.packing.notes import held_for, upgrades

GPU = (Gres("gpu", "", 1),)


@dataclass
class TenantSlurm(PackedSlurm):
    """Partitions `gpu` and `opp` over the same nodes.

    Attributes:
        gpus_of: node and number of the GPUs of each guaranteed job that runs.
        upgraded: numbers of jobs that their nodes call guaranteed.
        deaf: nodes whose Prolog upgrades nobody.
        drained: nodes that take no more jobs.
        silent: nodes of which nothing was read lately.
        version: of Slurm.
        config: of Slurm.
        partition_qos: of partition `gpu`.
    """

    gpus_of: dict[int, tuple[tuple[str, int], ...]] = field(default_factory=dict)
    upgraded: set[int] = field(default_factory=set)
    deaf: set[str] = field(default_factory=set)
    drained: set[str] = field(default_factory=set)
    silent: bool = False
    version: str = "24.11.5"
    config: dict[str, str] = field(default_factory=dict)
    partition_qos: str = ""

    def ask(self, number: int, account: str = "a", comment: str = "", **more: object) -> None:
        """A guaranteed job with a GPU, held by the guard."""
        wanted = {"partitions": ("gpu",), "account": account, "gres_per_node": GPU, "uid": 1000, **more}
        self.submit(number, comment, **wanted)

    def start_all(self) -> None:
        """What is released starts, on the GPUs with the lowest numbers."""
        self.start_guaranteed()
        held = {number: job for number, job in self.jobs.items() if "gpu" in job.partitions}
        for number in held:
            del self.jobs[number]
        self.start()
        self.jobs |= held

    def start_guaranteed(self) -> None:
        for number, job in sorted(self.jobs.items()):
            if not (job.is_pending and job.priority and "gpu" in job.partitions):
                continue
            if not self.drained.isdisjoint(job.required_nodes):
                continue
            spots: list[tuple[str, int]] = []
            for name in job.required_nodes or self.names:
                free = [index for index in range(self.num_gpus) if (name, index) not in self.taken]
                spots += [(name, index) for index in free[: job.count("gpu") - len(spots)]]
            if len(spots) == job.count("gpu"):
                self.gpus_of[number] = tuple(spots)
                nodes = job.required_nodes or tuple(dict.fromkeys(name for name, _ in spots))
                self.jobs[number] = replace(job, state="RUNNING", reason="None", nodes=nodes)

    @property
    def taken(self) -> set[tuple[str, int]]:
        return {spot for spots in self.gpus_of.values() for spot in spots}

    def end(self, number: int) -> None:
        """A job ends."""
        self.jobs.pop(number)
        self.gpus_of.pop(number, None)
        self.given.pop(number, None)
        self.upgraded.discard(number)

    def preempt(self, number: int) -> None:
        super().preempt(number)
        self.upgraded.discard(number)

    def run_prologs(self) -> None:
        """Those of the packer's jobs that upgrade, which then end."""
        for number, job in list(self.jobs.items()):
            upgraded = upgrades(job.comment)
            if upgraded is not None and job.state == "RUNNING" and job.uid == os.geteuid():
                if not self.deaf:
                    self.upgraded.add(upgraded)
                self.end(number)

    def holders(self, of: int) -> list[tuple[str, int]]:
        """GPUs that placeholders keep for a job."""
        return [
            spot
            for number, job in self.jobs.items()
            if (held_for(job.comment) or (0,))[0] == of
            for spot in self.gpus_of.get(number, ())
        ]

    # What the packer calls.

    def submit_own(self, script: str, options: Sequence[str]) -> str:
        number = max(self.jobs) + 1000
        given = dict(option.removeprefix("--").partition("=")[::2] for option in options)
        nodes = expand(given["nodelist"])
        self._called("submit", given["comment"], given["nodelist"])
        self.jobs[number] = Job(
            number, given["job-name"], "hetstream", (given["partition"],), "PENDING", "None", len(nodes), len(nodes), 1,
            1, int(given["mem"]), account=given.get("account", ""), comment=given["comment"], required_nodes=nodes,
            uid=os.geteuid(), gres_per_node=GPU if "gres" in given else (), priority=1, submit_s=self.now_s,
        )  # fmt: skip
        self.admin_comments[number] = ""
        return str(number)

    def gpu_spots(self, job_id: str) -> tuple[tuple[str, int], ...]:
        return self.gpus_of.get(int(job_id), ())

    def got(self, job_id: str) -> tuple[Gres, ...] | None:
        number = number_of(job_id)
        spots = () if number in self.given else self.gpus_of.get(number, ())
        return (Gres("gpu", "", len(spots)),) if spots else super().got(job_id)

    def cancel(self, job_id: str) -> None:
        self._called("cancel", job_id)
        self.end(int(job_id))

    def update(self, job_id: str, fields: dict[str, str]) -> None:  # type: ignore[override]
        super().update(job_id, fields)
        job = self.jobs[number_of(job_id)]
        if "Partition" in fields:
            self.jobs[number_of(job_id)] = replace(job, partitions=(fields["Partition"],))
        if "Priority" in fields:
            self.jobs[number_of(job_id)] = replace(job, priority=int(fields["Priority"]))

    def snapshot(self) -> Snapshot:
        partitions = [
            Partition("gpu", tuple(self.names), priority_tier=10, qos=self.partition_qos),
            Partition("opp", tuple(self.names)),
        ]
        return Snapshot(
            self.now_s, self.version, "test", tuple(self.jobs.values()), tuple(self._node(name) for name in self.names),
            tuple(partitions), self.config,
        )  # fmt: skip

    def _node(self, name: str) -> Node:
        self.guaranteed = self.taken
        node = super()._node(name)
        return replace(node, states=node.states | {"DRAIN"}) if name in self.drained else node

    def _gpu(self, name: str, index: int) -> GpuNow:
        spot = name, index
        on_it = [
            number for number, gres in self.given.items() if Gres("opp", f"p{index}", 1) in gres
            and name in self.jobs[number].nodes
        ]  # fmt: skip
        jobs = [str(number) for number in on_it if number in self.upgraded]
        jobs += [
            str(number) for number, spots in self.gpus_of.items()
            if spot in spots and held_for(self.jobs[number].comment) is None
        ]  # fmt: skip
        sharing = tuple(SharingNow(str(number)) for number in on_it if number not in self.upgraded)
        return GpuNow(index, f"GPU-{index}", 0.3, 40 * GIB, bool(jobs), tuple(jobs), sharing=sharing)


def names(spots: Collection[tuple[str, int]]) -> list[str]:
    """GPUs, to be compared."""
    return sorted(f"{node}:{index}" for node, index in spots)


__all__ = ["NOW_S", "TenantSlurm", "names"]
