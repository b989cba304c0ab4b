"""A Slurm in memory, as far as the packer sees it: held jobs are updated, released, started, preempted and requeued.

It has 22.05's ways that hurt: a GRES is added to the one that a job asks for already, and an update that was accepted
may have no effect.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from hetstream.hetjob.errors import SlurmCommandError
from hetstream.hetjob.site.messages import GpuNow, NodeGpus, SharingNow, ShowGpus
from hetstream.slurm_plugin.client.model import Gres, Job, Node, Partition, Snapshot
from hetstream.slurm_plugin.client.packing_slurm import JobNotes
from hetstream.slurm_plugin.client.slurm_units import expand, parse_gres

GIB = 1 << 30
NOW_S = 1_795_000_000.0


def number_of(job_id: str) -> int:
    """Of a job; of an array's task, of which these have one, the array's; of a component its own."""
    number, _, offset = job_id.partition("_")[0].partition("+")
    return int(number) + int(offset or 0)


@dataclass
class PackedSlurm:
    """One partition `opp` over nodes g1 to gN with some GPUs each.

    Attributes:
        num_nodes, num_gpus: of them.
        now_s: its clock, and the packer's.
        jobs: by number.
        admin_comments: of these.
        given: what running jobs were given.
        no_requeue: numbers of jobs that cannot be requeued.
        excluded: nodes that jobs exclude, by number.
        calls: commands that change something.
        refuse: a command that fails -> what it says.
        lie: what a job is given in the place of what was asked for.
        guaranteed: GPUs that jobs of their own have.
        used_share: of each GPU, if it is not 0.3.
        age_s: of the nodes' readings.
        sharing: what nodes say of the opportunistic jobs on a GPU.
        gpu_types: of the GPUs.
        granted_s: how long a job may run before the planned start of another one; None: no start is planned.
        least_s: what is enough for a job, where it says so (TimeMin).
        dies_before: the command before which slurmctld is killed, once: it forgets what came after `write_down`, and
            hears the command when it is back.
        dies_after: the command after which it is killed, once; `lingers`: jobs that were to be ended have not yet;
            `unanswered`: it was killed before it could answer.
        ended: numbers of jobs that have ended by themselves; `ends_as`: how one does that is to be requeued.
    """

    num_nodes: int = 1
    num_gpus: int = 2
    now_s: float = NOW_S
    jobs: dict[int, Job] = field(default_factory=dict)
    admin_comments: dict[int, str] = field(default_factory=dict)
    given: dict[int, tuple[Gres, ...]] = field(default_factory=dict)
    no_requeue: set[int] = field(default_factory=set)
    excluded: dict[int, tuple[str, ...]] = field(default_factory=dict)
    calls: list[tuple[str, ...]] = field(default_factory=list)
    refuse: dict[str, str] = field(default_factory=dict)
    lie: str = ""
    guaranteed: set[tuple[str, int]] = field(default_factory=set)
    used_share: dict[tuple[str, int], float] = field(default_factory=dict)
    age_s: float = 2.0
    sharing: dict[tuple[str, int], tuple[SharingNow, ...]] = field(default_factory=dict)
    gpu_types: tuple[str, ...] = ("h200",)
    granted_s: float | None = None
    least_s: dict[int, float] = field(default_factory=dict)
    dies_before: str = ""
    dies_after: str = ""
    lingers: bool = False
    unanswered: bool = False
    ended: set[int] = field(default_factory=set)
    ends_as: str = "FAILED"
    written: tuple[dict[int, Job], dict[int, str]] = field(default_factory=lambda: ({}, {}))

    def clock(self) -> float:
        return self.now_s

    @property
    def names(self) -> list[str]:
        return [f"g{number + 1}" for number in range(self.num_nodes)]

    def submit(self, number: int, comment: str = "", **more: object) -> None:
        """A job, held by the guard."""
        job = Job(
            number, "train", "alice", ("opp",), "PENDING", "JobHeldUser", 1, 4, 1, 4, 8000, comment=comment,
            submit_s=NOW_S - 1000 + number, time_limit_s=300.0,
        )  # fmt: skip
        self.jobs[number] = replace(job, **more)  # type: ignore[arg-type]
        self.admin_comments[number] = "hetstream:guarded"

    def write_down(self) -> None:
        """As slurmctld does every few seconds."""
        self.written = dict(self.jobs), dict(self.admin_comments)

    def _forget(self) -> None:
        self.jobs, self.admin_comments = dict(self.written[0]), dict(self.written[1])

    def start(self) -> None:
        """What is released starts where it was told to."""
        for number, job in self.jobs.items():
            limit_s = job.time_limit_s
            if self.granted_s is not None and (limit_s is None or limit_s > self.granted_s):
                if self.least_s.get(number, self.granted_s + 1) > self.granted_s:
                    continue
                limit_s = self.granted_s
            if job.is_pending and job.priority:
                self.given[number] = parse_gres(self.lie) if self.lie else job.gres_per_node * job.num_nodes
                self.jobs[number] = replace(
                    job, state="RUNNING", reason="None", nodes=job.required_nodes, time_limit_s=limit_s
                )

    def end(self, number: int, state: str = "FAILED") -> None:
        """A job ends."""
        self.given.pop(number, None)
        self.jobs[number] = replace(self.jobs[number], state=state, nodes=())
        self.ended.add(number)

    def preempt(self, number: int) -> None:
        """Slurm requeues a job, and would start it again by itself."""
        job = self.jobs[number]
        self.given.pop(number, None)
        self.jobs[number] = replace(
            job, state="PENDING", reason="BeginTime", nodes=(), num_restarts=job.num_restarts + 1,
            eligible_s=self.now_s + 120,
        )  # fmt: skip

    # What the packer calls.

    def snapshot(self) -> Snapshot:
        return Snapshot(
            self.now_s, "22.05.8", "test", self._queue(), tuple(self._node(name) for name in self.names),
            (Partition("opp", tuple(self.names)),),
        )  # fmt: skip

    def _queue(self) -> tuple[Job, ...]:
        return tuple(
            replace(job, excluded_nodes=self.excluded.get(number, ()))
            for number, job in self.jobs.items()
            if number not in self.ended
        )

    def _node(self, name: str) -> Node:
        used = [
            gres for number, job in self.jobs.items() if name in job.nodes for gres in set(self.given.get(number, ()))
        ]
        indices = tuple(sorted(index for node, index in self.guaranteed if node == name))
        held = (Gres("gpu", "h200", len(indices), indices),) if indices else ()
        running = [job for job in self.jobs.values() if name in job.nodes]
        gpus = [Gres("gpu", kind, self.num_gpus) for kind in self.gpu_types]
        return Node(
            name, frozenset({"MIXED"}), ("gpu", "opp"), 16,
            sum(job.num_cpus // job.num_nodes for job in running), 64000,
            sum(job.memory_mb // job.num_nodes for job in running),
            (*gpus, *(Gres("opp", f"p{index}", 1) for index in range(self.num_gpus))),
            (*held, *used),
        )  # fmt: skip

    def notes(self, partitions: Collection[str]) -> dict[int, JobNotes]:
        return {
            number: JobNotes(
                self.admin_comments[number], number not in self.no_requeue, number in self.ended
            )
            for number, job in self.jobs.items()
            if not set(job.partitions).isdisjoint(partitions)
        }  # fmt: skip

    def switches(self) -> dict[str, tuple[str, ...]]:
        return {}

    def got(self, job_id: str) -> tuple[Gres, ...] | None:
        counts: Counter[tuple[str, str]] = Counter({("opp", "p9"): 0})  # as 22.05 lists those of the start before
        for gres in self.given.get(number_of(job_id), ()):
            counts[gres.name, gres.type] += gres.count
        return tuple(Gres(name, kind, count) for (name, kind), count in counts.items())

    def update(self, job_id: str, fields: Mapping[str, str]) -> None:
        self._called("update", job_id, *(f"{name}={value}" for name, value in fields.items()))
        number = number_of(job_id)
        if number in self.ended:
            raise SlurmCommandError(["scontrol", "update", job_id], 1, "", "Job has already finished")
        job = self.jobs[number]
        if "TresPerNode" in fields:
            job = replace(job, gres_per_node=parse_gres(fields["TresPerNode"]))
        if "Gres" in fields:
            job = replace(job, gres_per_node=(*job.gres_per_node, *parse_gres(fields["Gres"])))
        if "ReqNodeList" in fields:
            job = replace(job, required_nodes=expand(fields["ReqNodeList"]))
        if "Comment" in fields:
            job = replace(job, comment=fields["Comment"])
        if fields.get("Requeue") == "1":
            self.no_requeue.discard(number)
        if "TimeMin" in fields:
            self.least_s[number] = float(fields["TimeMin"]) * 60
        if "TimeLimit" in fields:
            limit = fields["TimeLimit"]
            job = replace(job, time_limit_s=None if limit == "UNLIMITED" else float(limit) * 60)
        self.admin_comments[number] = fields.get("AdminComment", self.admin_comments[number])
        self.jobs[number] = job

    def _components(self, job_id: str) -> list[int]:
        """The numbers of a job: of a heterogeneous one those of all of its components."""
        found = [number for number, job in self.jobs.items() if job.het and str(job.het.het_job_id) == job_id]
        return found or [number_of(job_id)]

    def hold(self, job_id: str) -> None:
        self._called("hold", job_id)
        for number in self._components(job_id):
            self.jobs[number] = replace(self.jobs[number], priority=0, reason="JobHeldUser")

    def release(self, job_id: str) -> None:
        self._called("release", job_id)
        number = number_of(job_id)
        self.jobs[number] = replace(self.jobs[number], priority=100, reason="Priority")

    def requeue_held(self, job_id: str) -> None:
        self._called("requeuehold", job_id)
        for number in self._components(job_id):
            self.ended.discard(number)
            self.preempt(number)
            self.jobs[number] = replace(
                self.jobs[number], priority=0, reason="job requeued in held state", eligible_s=None
            )  # fmt: skip
        if self.dies_after == "requeuehold":
            self.dies_after = ""
            self._forget()
            if not self.lingers:
                self.end(number, self.ends_as)
            if self.unanswered:
                raise SlurmCommandError(["scontrol", *self.calls[-1]], 1, "", "Zero Bytes were transmitted or received")

    def _called(self, *call: str) -> None:
        if call[0] == self.dies_before:
            self.dies_before = ""
            self._forget()
        self.calls.append(call)
        if call[0] in self.refuse:
            raise SlurmCommandError(["scontrol", *call], 1, "", self.refuse[call[0]])

    def submit_own(self, script: str, options: Sequence[str]) -> str:
        raise AssertionError(f"nobody upgrades here: {script} {options}")

    def gpu_spots(self, job_id: str) -> tuple[tuple[str, int], ...]:
        raise AssertionError(f"nobody upgrades here: {job_id}")

    def cancel(self, job_id: str) -> None:
        self._called("cancel", job_id)
        del self.jobs[int(job_id)]

    # What nodes tell.

    def readings(self) -> ShowGpus:
        return ShowGpus(
            tuple(
                NodeGpus(name, self.age_s, tuple(self._gpu(name, index) for index in range(self.num_gpus)))
                for name in self.names
            ),
            {},
        )

    def _gpu(self, name: str, index: int) -> GpuNow:
        spot = name, index
        has = spot in self.guaranteed
        return GpuNow(
            index, f"GPU-{index}", self.used_share.get(spot, 0.3), 40 * GIB, has, ("1",) if has else (),
            sharing=self.sharing.get(spot, ()),
        )  # fmt: skip
