"""What hetstream knows of a cluster: jobs, nodes, partitions, and what they hold. Pure; made by the parsers beside it.

The same model comes from every Slurm from 22.05 on. Times are seconds since the epoch, memory is MB as Slurm counts it
(1024 * 1024 bytes). A number that Slurm does not say, or that has no limit, is None.
"""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Protocol

# Which tasks of an array a record of squeue stands for: `4`, `3-5,9%3`, `0-9:3`. Pure.

# Ends a list of indices that Slurm's commands have cut, perhaps within a number.
CUT = "..."
_PART = re.compile(r"(\d+)(?:-(\d+)(?::(\d+))?)?")


def num_tasks(text: str) -> int:
    """Return how many tasks these are, one at least; of indices that are cut as many as are there."""
    return sum(1 if part.endswith(CUT) else _length(_numbers(part)) for part in _parts(text)) or 1


def has_task(text: str, number: int) -> bool:
    """Return whether this is one of them; of indices that are cut those are known that are there."""
    return any(number in _numbers(part) for part in _parts(text))


def _parts(text: str) -> Iterator[str]:
    return iter(text.split("%")[0].split(","))


def _numbers(part: str) -> range:
    found = _PART.fullmatch(part)
    if not found:
        return range(0)
    return range(int(found[1]), int(found[2] or found[1]) + 1, max(1, int(found[3] or 1)))


def _length(numbers: range) -> int:
    """`len` of a range that may be longer than any list."""
    return max(0, (numbers.stop - numbers.start + numbers.step - 1) // numbers.step)


# Words of a node's state beside which slurmctld starts jobs on it. Any other one keeps them away, also one of a release
# to come. The words are Slurm's (node_states and node_state_flags in src/common/slurm_protocol_defs.c, 22.05 to 26.05).
STARTS_JOBS = frozenset(
    {"IDLE", "MIXED", "ALLOCATED", "COMPLETING", "PLANNED", "RESERVED", "PERFCTRS", "EXTERNAL"}
    | {"CLOUD", "DYNAMIC_NORM", "DYNAMIC_FUTURE"}
    # One that is powered down Slurm starts for a job; one on its way down must arrive first.
    | {"POWERED_DOWN", "POWER_UP", "POWERING_UP"}
    # Until its last job has ended; with ASAP it is DRAIN, too (seen on 22.05 and 26.05).
    | {"REBOOT_REQUESTED", "REBOOT_CANCELED", "RESUME", "UNDRAIN"}
)
# States of a job that waits: PENDING, and flags that squeue shows in its place of one that is held (job_state_string in
# slurm_protocol_defs.c). One that is REVOKED another cluster of its federation has, and it never starts here.
PENDING_STATES = frozenset({"PENDING", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"})
REVOKED = "REVOKED"
# Flags of a node in a reservation with the flag MAINT.
MAINTENANCE = frozenset({"MAINTENANCE", "MAINT"})
# Ours, in the words of Slurm's reason: none of a node's partitions starts jobs.
PARTITION_DOWN = "PARTITION_DOWN"
# A flag: only jobs of a reservation can start there now.
RESERVED = "RESERVED"
# Reasons of a pending job that are about resources, or about whose turn it is; others are told as what they are.
# Before the first look of the scheduler there is none; with `defer` a submission is looked at later.
RESOURCE_REASONS = frozenset({"", "None", "Resources", "Priority", "SchedDefer"})
# slurmctld's own sentences, which it writes in the place of Resources: that nodes are out of use or others' (schedule
# in job_scheduler.c), and from 26.05 on why a topology has no room (IS_TOPO_ERROR in select_nodes, ESLURM_TOPO_* in
# slurm_errno.c).
_NO_ROOM = re.compile(
    "Nodes_required_for_job_are_DOWN|Required_nodes_(lack_available_resources|do_not_fit_topology)|"
    "(No_suitable|Insufficient_resources_in)_topology_unit|No_available_nodes_in_topology|"
    "Weight-based_selection_could_not_satisfy|Exceeded_maximum_node_limit_during_topology"
)
# The only reason that slurmctld gives when it looked for nodes and found too few: select_nodes in node_scheduler.c, and
# schedule in job_scheduler.c, with the sentences above. Whoever comes behind such a job gets Priority without a look.
_FOUND_NONE = "Resources"
# GRES that are parts of a GPU which several jobs share (gres_is_shared_name in Slurm's source).
SHARING = frozenset({"shard", "mps"})
# Words of PrivateData that hide no jobs: https://slurm.schedmd.com/slurm.conf.html#OPT_PrivateData
_OTHER_PRIVATE_DATA = frozenset(
    {"", "accounts", "cloud", "events", "nodes", "none", "partitions", "reservations", "usage", "users"}
)
# Profiles of MIG, such as `a100_1g.5gb` or `1g.10gb+me`: so many of the slices of a GPU, which has seven. Some have
# fewer, and of another size: four of 6 GB (A30) or of 24 (RTX PRO 6000), two of 16 (RTX PRO 4500). Of GPUs of
# 96 GB with seven `1g.24gb` has double memory. Source: NVIDIA MIG User Guide, Supported MIG Profiles.
_MIG = re.compile(r"(?:^|[_.-])(\d)g\.(\d+)gb")
_MIG_SLICES = 7
_FEWER_SLICES: Mapping[float, int] = {6: 4, 24: 4, 16: 2}
_DOUBLE_MEMORY = "1g.24gb"


@dataclass(frozen=True, slots=True)
class Gres:
    """Generic resources of one kind: `gpu:h200:4`, `shard:h200:3(3/4,-/4)`, `opp:p1:1(IDX:1)`.

    Attributes:
        name: `gpu`, `shard`, `opp`.
        type: `h200`; empty if the resource has no type.
        count: how many.
        indices: which devices are in use, where Slurm says so.
    """

    name: str
    type: str
    count: int
    indices: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class HetComponent:
    """Which component of which heterogeneous job: `31+1` is `HetComponent(31, 1)`."""

    het_job_id: int
    offset: int


@dataclass(frozen=True, slots=True)
class NodeShare:
    """What a running job holds on one node.

    Attributes:
        cpus: that Slurm allocated to it there.
        cpus_held: that no other job can have for it, where those are others: threads of its cores (CR_CPU).
    """

    node: str
    cpus: int
    memory_mb: int
    gres: tuple[Gres, ...]
    cpus_held: int | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """One record of squeue: a job, a component, an array task, or all the pending tasks of an array.

    Attributes:
        job_id: the record's own number, which `scancel` and `scontrol update` take for one component or array task.
        array_job_id: the array's number; None if it is no array.
        array_tasks: which tasks the record stands for: `4`, or `3-5%3` of those that are pending.
        het: which component of a heterogeneous job; None if it is none.
        partitions: where it runs, or may.
        closed_partitions: of several that a pending one names those that do not admit it, and are none of `partitions`.
        reason_is_of_closed: Slurm's reason tells of one of these, and it starts in another as soon as it can.
        reason_is_of_turn: Slurm's reason names nodes as not available on which jobs start: jobs ahead have them kept.
        state: in Slurm's spelling, such as `PENDING`.
        reason: why it is pending.
        num_nodes: nodes that it has, or the least that it asks for.
        likely_nodes: how many Slurm thinks that a pending one will get; 0 where it does not say.
        max_nodes: the most that it may get; None where nothing says so, as there may be none.
        num_cpus: on all nodes together: asked for, or allocated, as squeue and sacct say it to whoever may see the job.
        cpu_share: which share of its CPUs counts as its own, where several jobs are given the same ones
            (OverSubscribe=FORCE:N, YES:N): together they hold what their nodes say is in use. Above 1 where it keeps
            others from threads of its cores that it does not have (CR_CPU).
        min_cpus_per_node: on each node at least, such as `--mincpus`.
        layout: sockets of a node, cores of a socket and threads of a core that it asks for, each 0 if any will do. One
            thread of a core (`--hint=nomultithread`) is also the most that it uses.
        tasks_per_core, tasks_per_socket: `--ntasks-per-core` and `--ntasks-per-socket`; 0 if it says nothing.
        memory_mb: on all nodes together, as many as it has or asks for at least.
        tmp_disk_mb: `--tmp`, that each of its nodes has at all (TmpDisk), in use or not.
        memory_per_gpu_mb: `--mem-per-gpu` or its partition's DefMemPerGPU; 0 if neither is.
        own_memory: whether it asks for memory by nodes or CPUs itself (`--mem`, `--mem-per-cpu`); None where its record
            does not say.
        all_memory: it wants all memory of its nodes (`--mem=0`).
        memory_per_cpu_mb: None if it asks for memory in another way; it then asks for less with fewer CPUs.
        gres_per_node, gres_per_task, gres_per_job, gres_per_socket: what it asks for in each way.
        gpus_requested: how many GPUs Slurm says a pending one asks for, in whatever way, such as `--ntasks-per-gpu`;
            None where the cluster does not account for gres/gpu.
        gres_held: what it holds on all nodes together, which is more than it asks for with `--exclusive`; None where
            nothing says so.
        unreadable: what of its record cannot be read, and why; users have a say in what stands there.
        gres_in_doubt: that concerns what it asks for, of which it counts one then.
        untyped_gpu_share: which share of a GPU each of those without a type is: 1, or less on nodes that MIG divides.
        gpu_types_known: False where that share is an average, since nothing says which instances it holds.
        cpus_per_gpu: `--cpus-per-gpu` or its partition's DefCpuPerGPU. Of a pending job they are not in `num_cpus`.
        uid: of its user, by number; None where the source does not say. Owners are compared by it where it is known.
        nodes: where it runs.
        shares: what it holds on each node; empty unless details were asked for, or `held.spread_in_question` did.
        start_s: when it started; of a pending job, when Slurm plans to start it.
        time_limit_s: None if it has none.
        required_nodes: `--nodelist` or `--nodefile`: these and, where it wants more, others.
        excluded_nodes: `--exclude`.
        is_contiguous: `--contiguous`: nodes side by side in the order of the cluster's.
        num_switches: `--switches`, for so few of which Slurm lets it wait some time; 0 if it does not ask.
        licenses: `--licenses`. short_licenses: the names of those of which too few are left; see `read.py`.
        planned_nodes: where backfill plans to start it (22.05 says so in text alone).
        mcs_label: its label of the MCS plugin; empty where there is none.
        barred: the rules that keep a pending one from each of its partitions, of which Slurm's reason says nothing.
        begins_s: when it may begin, where that is to come and Slurm's reason says nothing of it.
        last_sched_eval_s: when a scheduler of Slurm's last looked at it; None where nothing says so.
        num_restarts: how often it was requeued.
        exclusive: what it shares its nodes with nobody for: `NODE` (`--exclusive`, or a partition of whole nodes),
            `USER`, `MCS`, `TOPO`; empty if it shares them, or where nothing says so.
    """

    job_id: int
    name: str
    user: str
    partitions: tuple[str, ...]
    state: str
    reason: str
    num_nodes: int
    num_cpus: int
    num_tasks: int
    cpus_per_task: int
    memory_mb: int
    memory_per_cpu_mb: int | None = None
    array_job_id: int | None = None
    array_tasks: str = ""
    het: HetComponent | None = None
    account: str = ""
    qos: str = ""
    gres_per_node: tuple[Gres, ...] = ()
    gres_per_task: tuple[Gres, ...] = ()
    gres_per_job: tuple[Gres, ...] = ()
    gres_held: tuple[Gres, ...] | None = None
    cpus_per_gpu: int = 0
    nodes: tuple[str, ...] = ()
    shares: tuple[NodeShare, ...] = ()
    submit_s: float | None = None
    eligible_s: float | None = None
    start_s: float | None = None
    end_s: float | None = None
    time_limit_s: float | None = None
    priority: int = 0
    dependency: str = ""
    required_nodes: tuple[str, ...] = ()
    planned_nodes: tuple[str, ...] = ()
    features: str = ""
    reservation: str = ""
    comment: str = ""
    num_restarts: int = 0
    work_dir: str = ""
    uid: int | None = None
    gres_per_socket: tuple[Gres, ...] = ()
    gpus_requested: int | None = None
    exclusive: str = ""
    untyped_gpu_share: float = 1.0
    gpu_types_known: bool = True
    unreadable: tuple[str, ...] = ()
    gres_in_doubt: bool = False
    excluded_nodes: tuple[str, ...] = ()
    is_contiguous: bool = False
    num_switches: int = 0
    licenses: str = ""
    short_licenses: tuple[str, ...] = ()
    cpu_share: float = 1.0
    likely_nodes: int = 0
    max_nodes: int | None = None
    min_cpus_per_node: int = 1
    tmp_disk_mb: int = 0
    layout: tuple[int, int, int] = (0, 0, 0)
    tasks_per_core: int = 0
    memory_per_gpu_mb: int = 0
    all_memory: bool = False
    last_sched_eval_s: float | None = None
    mcs_label: str = ""
    closed_partitions: tuple[str, ...] = ()
    reason_is_of_closed: bool = False
    tasks_per_socket: int = 0
    barred: str = ""
    reason_is_of_turn: bool = False
    begins_s: float | None = None
    own_memory: bool | None = None

    @property
    def gpus_in_doubt(self) -> bool:
        """Whether nothing says how many GPUs it has or wants: its request cannot be read, and Slurm does not count."""
        return self.gres_in_doubt and self.gres_held is None and not self.gpus_requested

    @property
    def label(self) -> str:
        """The name that Slurm's own tables give it: `29`, `31+1`, `33_4`, `33_[3-5%3]`."""
        if self.het:
            return f"{self.het.het_job_id}+{self.het.offset}"
        if self.array_job_id is not None:
            tasks = self.array_tasks
            return f"{self.array_job_id}_{tasks if tasks.isdigit() else f'[{tasks}]'}"
        return str(self.job_id)

    @property
    def reservations(self) -> tuple[str, ...]:
        """The names in `--reservation=a,b`: it may run in any of them."""
        return tuple(filter(None, self.reservation.split(",")))

    @property
    def is_pending(self) -> bool:
        return self.state in PENDING_STATES

    @property
    def is_running(self) -> bool:
        """Whether it has nodes: its processes may be there, also while it completes."""
        return self.holds_resources or self.state == "COMPLETING"

    @property
    def holds_resources(self) -> bool:
        """Whether others cannot have what it was given.

        slurmctld gives back what a job held as soon as it begins to complete, whether its nodes answer or not
        (deallocate_nodes calls select_g_job_fini; seen on 22.05, 24.11 and 26.05).
        """
        return self.state in ("RUNNING", "CONFIGURING", "STOPPED", "SUSPENDED", "RESIZING", "SIGNALING")

    @property
    def is_at_work(self) -> bool:
        """Whether it holds what it was given and is not suspended: such a job runs, in all counts of jobs."""
        return self.holds_resources and self.state != "SUSPENDED"

    @property
    def waits_for_resources(self) -> bool:
        """Whether it is pending and free resources could start it."""
        return self.is_pending and self.is_admitted and not self.short_licenses

    @property
    def is_admitted(self) -> bool:
        """Whether Slurm's reason is about resources or turns, or about partitions alone that are not all of its own."""
        if self.barred or self.begins_s is not None:
            return False
        return is_resource_reason(self.reason) or self.reason_is_of_closed or self.reason_is_of_turn

    @property
    def found_no_room(self) -> bool:
        """Whether Slurm looked for nodes for it when it last looked at it, and found too few.

        A job without a reason, or with Priority, was not looked at.
        """
        return self.is_pending and (self.reason == _FOUND_NONE or _says_no_room(self.reason))

    @property
    def trainer(self) -> str:
        """The job whose data workers it holds as a companion; empty if it is none."""
        return self._word("hets:trainer=").removeprefix("hets:trainer=")

    @property
    def mark(self) -> str:
        """The word that companions of one start of a job have in common; empty if it is none."""
        return self._word("hets:start=")

    def _word(self, begin: str) -> str:
        return next((word for word in self.comment.split() if word.startswith(begin)), "")

    @property
    def num_records(self) -> int:
        """How many jobs the record stands for: the number of pending tasks of an array, otherwise 1.

        Of indices that are cut as many as are there; see `slurm_units.py`.
        """
        if not self.array_tasks or not self.is_pending:
            return 1
        return num_tasks(self.array_tasks)

    def count(self, name: str) -> int:
        """Return how many of one GRES it holds, or asks for, on all nodes together; of GPUs in doubt 1 at least."""
        if name == "gpu" and self.gpus_requested is not None and self.gres_held is None:
            return self.gpus_requested
        return max(total(self.amounts(name), name), int(name == "gpu" and self.gpus_in_doubt))

    def cpus_on_nodes(self) -> Iterator[tuple[str, float]]:
        """Yield each of its nodes with the CPUs that it holds there; on each as many where nothing says how many.

        None while it is suspended; see `counted.held_by`.
        """
        if self.state == "SUSPENDED":
            return ((name, 0.0) for name in self.nodes)
        known: Mapping[str, float] = {
            share.node: share.cpus if share.cpus_held is None else share.cpus_held for share in self.shares
        }
        even = self.num_cpus / max(1, len(self.nodes))
        return ((name, known.get(name, even)) for name in self.nodes)

    @property
    def gpus(self) -> float:
        """GPUs that it holds, or asks for, on all nodes together, where an instance of MIG counts as its share."""
        named = [gres for gres in self.amounts("gpu") if gres.name == "gpu"]
        shares = sum(gres.count * (gpu_share(gres.type) if gres.type else self.untyped_gpu_share) for gres in named)
        num, counted = sum(gres.count for gres in named), self.count("gpu")
        return shares * counted / num if num else float(counted)

    @property
    def has_untyped_gpus(self) -> bool:
        """Whether nothing says of which type some of these are."""
        return any(gres.name == "gpu" and not gres.type and gres.count for gres in self.amounts("gpu"))

    def amounts(self, name: str) -> tuple[Gres, ...]:
        """Return what of a GRES it holds, or asks for in one of the ways, on all nodes together."""
        if self.gres_held is not None:
            return self.gres_held
        if total(self.gres_per_job, name):
            return self.gres_per_job
        if total(self.gres_per_node, name):
            return _times(self.gres_per_node, self.num_nodes)
        if total(self.gres_per_task, name):
            return _times(self.gres_per_task, self.num_tasks)
        # Of how many sockets no command says: of one on each node at least.
        return _times(self.gres_per_socket, self.num_nodes)

    def type_of(self, name: str) -> str:
        """Return the type of a GRES that it insists on; empty if any will do."""
        return next((gres.type for gres in self.gres_asked if gres.name == name and gres.type), "")

    @property
    def gres_asked(self) -> tuple[Gres, ...]:
        """What it asks for in all ways, each as it is written: of one node, task or socket, or of the job."""
        return (*self.gres_per_job, *self.gres_per_node, *self.gres_per_task, *self.gres_per_socket)


@dataclass(frozen=True, slots=True)
class ReservedPart:
    """What a reservation has of a node that is not its own as a whole.

    Attributes:
        reservation: its name.
        cpus, gpus: that other jobs cannot have. cpus_held, gpus_held: of those what its jobs hold.
    """

    reservation: str
    cpus: int
    cpus_held: int = 0
    gpus: int = 0
    gpus_held: int = 0

    @property
    def cpus_free(self) -> int:
        return self.cpus - self.cpus_held

    @property
    def gpus_free(self) -> int:
        return self.gpus - self.gpus_held


@dataclass(frozen=True, slots=True)
class Node:
    """One node.

    Attributes:
        states: base state and flags, such as `{"MIXED", "PLANNED"}`.
        cpus: CPUs for jobs, without those reserved for the system, or kept free for the jobs of a reservation.
        cpus_allocated: of those.
        memory_mb: what jobs can be given: `RealMemory` without `MemSpecLimit`.
        memory_allocated_mb: of that.
        tmp_disk_mb: `TmpDisk`, of which jobs are given none.
        gres: what it has. `gres_used`: what jobs hold of it. `gres_drained`: what is out of use.
        gpus_allocated: how many GPUs jobs hold by its AllocTRES; None where the cluster does not account for gres/gpu.
        layout: its sockets, the cores of each, and the threads of each core; zeros where nothing says so.
        cpus_per_core: 1 where Slurm counts cores as CPUs, otherwise their threads.
        gpu_cores: cores that jobs without a GPU cannot have (RestrictedCoresPerGPU, 24.05 on).
        owner: the user, by name or number, whose jobs alone may run there now, since one of them shares with no other
            user; empty if nobody's.
        mcs_label: of the jobs that alone may run there now; empty if any may.
        last_busy_s: when it became idle, if it is; None where nothing says so.
        reason: why it is out of use.
        version: of its slurmd.
        address: under which other nodes reach it.
        cpu_load: threads that want a CPU, on average over a minute or so; also what no job has started.
        reservation: that it is in now, as a whole.
        reserved_parts: what other reservations have of it; see `parse_text.py`.
        unreadable: what of its record cannot be read, and why.
    """

    name: str
    states: frozenset[str]
    partitions: tuple[str, ...]
    cpus: int
    cpus_allocated: int
    memory_mb: int
    memory_allocated_mb: int
    gres: tuple[Gres, ...] = ()
    gres_used: tuple[Gres, ...] = ()
    gres_drained: tuple[Gres, ...] = ()
    features: tuple[str, ...] = ()
    reason: str = ""
    version: str = ""
    address: str = ""
    cpu_load: float | None = None
    reservation: str = ""
    gpus_allocated: int | None = None
    unreadable: tuple[str, ...] = ()
    reserved_parts: tuple[ReservedPart, ...] = ()
    layout: tuple[int, int, int] = (0, 0, 0)
    cpus_per_core: int = 1
    last_busy_s: float | None = None
    owner: str = ""
    mcs_label: str = ""
    gpu_cores: int = 0
    tmp_disk_mb: int = 0

    @property
    def is_usable(self) -> bool:
        """Whether new jobs can start on it as soon as there is room."""
        # On a node in maintenance the jobs of that reservation start, as on others that are reserved.
        allowed = STARTS_JOBS | MAINTENANCE if self.reservation else STARTS_JOBS
        # One that is coming up does not answer yet, and 24.11 says so.
        return self.states <= (allowed | {"NOT_RESPONDING"} if "POWERING_UP" in self.states else allowed)

    @property
    def starts_jobs(self) -> bool:
        """Whether jobs of everybody can start on it as soon as there is room: it is usable, and nobody's alone."""
        return self.is_usable and not self.is_reserved

    @property
    def state(self) -> str:
        """One word for tables: what keeps it from use, otherwise its base state."""
        bad = sorted(self.states - STARTS_JOBS)
        base = [word for word in ("IDLE", "MIXED", "ALLOCATED", "COMPLETING") if word in self.states]
        kept = [RESERVED] if self.is_reserved and not bad else []
        return "+".join([*base[:1], *bad, *kept] if bad or kept else base[:1] or sorted(self.states)).lower()

    @property
    def cpus_free(self) -> int:
        return max(0, self.cpus - self.cpus_allocated)

    @property
    def memory_free_mb(self) -> int:
        return max(0, self.memory_mb - self.memory_allocated_mb)

    @property
    def is_reserved(self) -> bool:
        """Whether only jobs of a reservation can start on it now."""
        return RESERVED in self.states

    @property
    def gpus(self) -> int:
        """Whole GPUs, in use or to be had."""
        return sum(self._devices_of(kind) for kind in self.gpu_types if gpu_share(kind) == 1)

    @property
    def mig(self) -> int:
        """Parts of GPUs, by MIG."""
        return sum(self._devices_of(kind) for kind in self._mig_types())

    @property
    def gpu_types(self) -> tuple[str, ...]:
        """Each type of what Slurm counts as `gpu`; empty for those without one."""
        return tuple(dict.fromkeys(gres.type for gres in self.gres if gres.name == "gpu"))

    def devices(self, gpu_type: str = "") -> int:
        """Whole GPUs and parts of them of one type that a job may ask for; of all types if it is empty."""
        return sum(self._devices_of(kind) for kind in self._kinds(gpu_type))

    def devices_free(self, gpu_type: str = "") -> int:
        """Of these as many as a job could have now, on its own: neither held nor shared out in shards."""
        # What is held, and nothing says of which type, may be of any.
        return max(0, sum(self._free_of(kind) for kind in self._kinds(gpu_type)) - self._held_of_unknown_type())

    def gpus_free(self, gpu_type: str = "") -> int:
        """Whole GPUs that a job could have now."""
        if gpu_type or not self.mig:
            return self.devices_free(gpu_type)
        whole = sum(self._free_of(kind) for kind in self.gpu_types if gpu_share(kind) == 1)
        return max(0, whole - self._held_of_unknown_type())

    def mig_free(self) -> int:
        """Parts of GPUs that a job could have now."""
        return sum(self.devices_free(kind) for kind in self._mig_types())

    def gpus_with_mig(self) -> float:
        """GPUs, in use or to be had, where an instance of MIG counts as its share of one."""
        return sum(gpu_share(kind) * self._devices_of(kind) for kind in self.gpu_types)

    def gpus_with_mig_free(self) -> float:
        """Of these as many as jobs could have now."""
        return self.gpus_free() + sum(gpu_share(kind) * self.devices_free(kind) for kind in self._mig_types())

    def gpu_share_free(self) -> float | None:
        """Return which share of its GPUs is free, MIG instances by their slices; None without GPUs."""
        whole = self.gpus_with_mig()
        return self.gpus_with_mig_free() / whole if whole else None

    def gpus_in_use(self) -> int:
        """Whole GPUs and parts of them that jobs hold, by GresUsed."""
        return total(self.gres_used, "gpu")

    def _mig_types(self) -> list[str]:
        return [kind for kind in self.gpu_types if gpu_share(kind) < 1]

    def _kinds(self, gpu_type: str) -> tuple[str, ...]:
        return (gpu_type,) if gpu_type else self.gpu_types

    def _devices_of(self, kind: str) -> int:
        """Of exactly this type, or of those without one."""
        return max(0, _of_type(self.gres, kind) - _of_type(self.gres_drained, kind))

    def _free_of(self, kind: str) -> int:
        shared = sum(1 for shared in self._shared() if shared == kind)
        return max(0, self._devices_of(kind) - _of_type(self.gres_used, kind) - shared)

    def _held_of_unknown_type(self) -> int:
        """GPUs that jobs hold by either of Slurm's counts, and shared ones, of which nothing says the type."""
        kinds = self.gpu_types
        known = sum(_of_type(self.gres_used, kind) for kind in kinds)
        shared = sum(1 for kind in self._shared() if kind not in kinds)
        return max(self.gpus_in_use(), self.gpus_allocated or 0) - known + shared

    def _shared(self) -> list[str | None]:
        """The type of each GPU that is shared out in shards or by MPS; None where that is not known.

        Slurm gives shards the type of their GPU, if it has one (gres_c_s.c in its source).
        """
        kinds = self.gpu_types
        found: list[str | None] = []
        for gres in self.gres_used:
            if gres.name in SHARING and gres.count:
                known = gres.type if gres.type in kinds else kinds[0] if len(kinds) == 1 else None
                found += [known] * max(len(gres.indices), 1)
        return found


@dataclass(frozen=True, slots=True)
class Partition:
    """One partition.

    Attributes:
        is_up: jobs in it start.
        priority_tier: jobs of a higher tier are looked at first, and may preempt.
        max_time_s: the longest time limit; None if there is no limit.
        max_cpus_per_node: CPUs of one node that its jobs may have together; None if there is no limit.
        is_exclusive: each of its jobs takes whole nodes (OverSubscribe=EXCLUSIVE).
        qos: whose limits hold for all of its jobs; empty if it has none.
        jobs_per_cpu: how many may be given the same CPU (OverSubscribe=FORCE:N, YES:N).
        all_share: they need not ask for it (FORCE).
        max_cpus_per_socket: that one of its jobs may have; None if there is no limit (23.02 on).
        allow_accounts, deny_accounts, allow_qos, deny_qos: of the jobs that may use it, or may not; empty for no rule.
        allow_groups: whose members alone may use it; empty for no rule. members: of these those with pending jobs.
        default_cpus_per_gpu, default_mb_per_gpu, default_mb_per_cpu, default_mb_per_node: what jobs get that do not say
            it themselves (JobDefaults, DefMemPerCPU, DefMemPerNode); None where the cluster's defaults hold.
    """

    name: str
    nodes: tuple[str, ...]
    is_default: bool = False
    is_up: bool = True
    priority_tier: int = 1
    max_time_s: float | None = None
    max_cpus_per_node: int | None = None
    is_exclusive: bool = False
    qos: str = ""
    jobs_per_cpu: int = 1
    all_share: bool = False
    max_cpus_per_socket: int | None = None
    allow_accounts: tuple[str, ...] = ()
    deny_accounts: tuple[str, ...] = ()
    allow_qos: tuple[str, ...] = ()
    deny_qos: tuple[str, ...] = ()
    allow_groups: tuple[str, ...] = ()
    members: tuple[str, ...] = ()
    default_cpus_per_gpu: int | None = None
    default_mb_per_gpu: int | None = None
    default_mb_per_cpu: int | None = None
    default_mb_per_node: int | None = None


@dataclass(frozen=True, slots=True)
class Reservation:
    """Nodes, or some of their cores, that are kept for the jobs of some users for some time; others must have ended.

    Attributes:
        nodes: those that it has as a whole.
        is_active: it has begun.
        is_maintenance: its flag MAINT. Its nodes are its own, whatever other reservations have them.
        is_flexible: its flag FLEX: its jobs may use what is outside of it, too.
        is_magnetic: its flag MAGNETIC: jobs of its users need not name it.
        users, accounts: whose jobs may use it; `-NAME` are those whose may not. Of `groups` their members may, and of
            these `users` are those that have pending jobs.
        allowed_partitions, qos: of the jobs that may use it; empty for all (25.05 on).
        cpus: of the nodes of which it has some cores, how many CPUs these are.
        gpus_on_node: GPUs that it has on each of those.
    """

    name: str
    nodes: tuple[str, ...]
    start_s: float
    end_s: float
    is_active: bool = False
    is_maintenance: bool = False
    is_flexible: bool = False
    is_magnetic: bool = False
    users: tuple[str, ...] = ()
    accounts: tuple[str, ...] = ()
    cpus: tuple[tuple[str, int], ...] = ()
    gpus_on_node: int = 0
    groups: tuple[str, ...] = ()
    allowed_partitions: tuple[str, ...] = ()
    qos: tuple[str, ...] = ()

    @property
    def all_nodes(self) -> tuple[str, ...]:
        """Those of which it has some cores, too."""
        return (*self.nodes, *(name for name, _ in self.cpus))


@dataclass(frozen=True)
class Snapshot:
    """A cluster at one moment.

    Attributes:
        taken_s: when.
        version: of slurmctld, such as `22.05.8`.
        source: which backend read it, for notes and JSON.
        jobs: pending and running ones.
        config: `scontrol show config`.
        reservations: of nodes, those to come too, in the order of their beginning.
        hidden: the setting by which Slurm may have hidden a part of it from who read it, such as `PrivateData=jobs`.
            Empty where all of it is here.
        without_nodes: Slurm tells who read it of none.
    """

    taken_s: float
    version: str
    source: str
    jobs: tuple[Job, ...]
    nodes: tuple[Node, ...]
    partitions: tuple[Partition, ...]
    config: Mapping[str, str] = field(default_factory=dict)
    reservations: tuple[Reservation, ...] = ()
    hidden: str = ""
    without_nodes: bool = False

    @property
    def hides_jobs(self) -> bool:
        """Whether there may be more jobs than these."""
        return bool(set(self.hidden.partition("=")[2].lower().split(",")) - _OTHER_PRIVATE_DATA)


class Cluster(Protocol):
    """What a cluster is read from: `CommandSlurm`, the site daemon, or a fake."""

    def snapshot(self) -> Snapshot:
        """Return the cluster now, or a short time ago."""


def is_resource_reason(reason: str) -> bool:
    """Return whether a pending job with this reason waits for resources or for its turn, and for nothing else."""
    return reason in RESOURCE_REASONS or _says_no_room(reason)


def _says_no_room(reason: str) -> bool:
    return _NO_ROOM.match(reason.replace(" ", "_")) is not None


def total(gres: Iterable[Gres], name: str, gres_type: str = "") -> int:
    """Return how many of one kind, of one type or of all."""
    return sum(resource.count for resource in gres if resource.name == name and gres_type in ("", resource.type))


def _times(gres: Iterable[Gres], number: int) -> tuple[Gres, ...]:
    """What a number of nodes or tasks asks for together; anybody may ask for four thousand million tasks."""
    return tuple(Gres(resource.name, resource.type, resource.count * max(1, number)) for resource in gres)


def _of_type(gres: Iterable[Gres], kind: str) -> int:
    """How many GPUs are of exactly this type."""
    return sum(resource.count for resource in gres if resource.name == "gpu" and resource.type == kind)


@lru_cache(maxsize=1024)
def gpu_share(gpu_type: str) -> float:
    """Return which share of a GPU something of this type is: 1, or less for a profile of MIG."""
    found = _MIG.search(gpu_type)
    if not found:
        return 1.0
    num, memory_gb = int(found[1]), int(found[2])
    slice_gb = memory_gb / num if num else 0.0
    is_double = found[0].endswith(_DOUBLE_MEMORY) and "rtx" not in gpu_type.lower()
    slices = _MIG_SLICES if is_double else _FEWER_SLICES.get(slice_gb, _MIG_SLICES)
    return min(1.0, num / slices)


# Users, as Slurm names them: by name, and by number where a host knows no name. Called by all that reads jobs.


def names_of(uid: int) -> set[str]:
    """Return how Slurm may name a user. A name that is a number is left out: it would be another user's."""
    try:
        name = pwd.getpwuid(uid).pw_name
    except KeyError:
        return {str(uid)}
    return {str(uid)} if name.isdecimal() else {str(uid), name}


def is_own(job: Job) -> bool:
    """Return whether a job is this user's: by number where Slurm tells it, as each host has its own list of names."""
    return job.uid == os.geteuid() if job.uid is not None else job.user in names_of(os.geteuid())


def uid_of(name: str) -> int | None:
    """Return the user id of a name or number; None of a name that this host does not know."""
    if name.isdecimal():
        return int(name)
    try:
        return pwd.getpwnam(name).pw_uid
    except KeyError:
        return None


def with_members(reservations: Iterable[Reservation], jobs: Iterable[Job]) -> tuple[Reservation, ...]:
    """Return the reservations; of those that are of groups, with the users of pending jobs who are members on this
    host.

    Slurm names the groups alone, and slurmctld has a list of their members from its own host.
    """
    found, groups_of = tuple(reservations), dict[str, set[str]]()
    if not any(reservation.groups for reservation in found):
        return found
    for user in {job.user for job in jobs if job.is_pending}:
        groups_of[user] = _groups(user)
    return tuple(
        replace(
            reservation,
            users=tuple(user for user, names in sorted(groups_of.items()) if not names.isdisjoint(reservation.groups)),
        )
        if reservation.groups
        else reservation
        for reservation in found
    )


def with_allowed_members(partitions: Iterable[Partition], jobs: Iterable[Job]) -> tuple[Partition, ...]:
    """Return the partitions; of those that are for groups, with the users of pending jobs who are members on
    this host.
    """
    found = tuple(partitions)
    if not any(partition.allow_groups for partition in found):
        return found
    groups_of = {user: _groups(user) for user in {job.user for job in jobs if job.is_pending}}
    return tuple(
        replace(
            partition,
            members=tuple(
                user for user, names in sorted(groups_of.items()) if not names.isdisjoint(partition.allow_groups)
            ),
        )
        if partition.allow_groups
        else partition
        for partition in found
    )


def _groups(user: str) -> set[str]:
    """Names and numbers of a user's groups; none where this host does not know the user."""
    try:
        gids = os.getgrouplist(user, pwd.getpwnam(user).pw_gid)
    except KeyError:
        return set()
    found = {str(gid) for gid in gids}
    for gid in gids:
        with contextlib.suppress(KeyError):
            found.add(grp.getgrgid(gid).gr_name)
    return found
