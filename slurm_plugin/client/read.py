"""Read a cluster with Slurm's commands: one snapshot of jobs, nodes, partitions and configuration.

Called by `CommandSlurm`. Five commands whatever the size of the cluster, none of which changes anything; a sixth while
jobs wait, before 24.05 for the nodes that they exclude, and with 26.05 for which of them want whole nodes; one more
while jobs with licenses wait, one where what jobs hold on each of their nodes decides a figure, and one where nothing
else tells a job with `--mem=0` from one that gets DefMemPerGPU. Jobs come from `squeue -O`: 0.5 kB each, against 4 kB
(22.05) and 13 kB (24.11 on) in JSON, which only says more about running jobs: what they hold on each node. Nodes come
as JSON where `scontrol` has it, from 23.02 on. Where pyslurm is installed and of slurmctld's release, it reads jobs and
nodes instead; see `pyslurm_backend.py`.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hetstream.base.errors import HetstreamError
from hetstream.base.text import count_words
from hetstream.hetjob.convert.sbatch_options import time_limit_s
from hetstream.hetjob.errors import SlurmCommandError
from hetstream.hetjob.ports import MarkedJob
from hetstream.slurm_plugin.client import parse_json, parse_text
from hetstream.slurm_plugin.client.counted import held_by
from hetstream.slurm_plugin.client.gpu_defaults import GpuDefaults
from hetstream.slurm_plugin.client.model import (
    PARTITION_DOWN,
    Gres,
    Job,
    Node,
    NodeShare,
    Partition,
    Reservation,
    Snapshot,
    gpu_share,
    names_of,
    num_tasks,
    total,
    with_allowed_members,
    with_members,
)
from hetstream.slurm_plugin.client.parse_text import (
    JOB_FIELDS,
    exclusive_of,
    parse_exclusive,
    parse_reservations,
    records_of_jobs,
    said_of_jobs,
    with_open_partitions,
    with_reservations,
)
from hetstream.slurm_plugin.client.run import is_denied, run_slurm
from hetstream.slurm_plugin.client.slurm_units import NONE_WORDS, expand, moment, parse_gres, whole
from hetstream.slurm_plugin.errors import NodesHidden, UnsupportedSlurm

if TYPE_CHECKING:
    from hetstream.slurm_plugin.client import pyslurm_backend

# Which GPUs running jobs hold, where their own records do not say: (jobs, nodes) -> jobs. Pure.
#
# A job with `--exclusive`, or in a partition with OverSubscribe=EXCLUSIVE, holds all GPUs of its nodes, whatever it
# asked for (seen on 22.05, 24.11 and 26.05). Its allocated TRES say so where the site accounts for gres/gpu; elsewhere
# its nodes do: all that is in use on a node with one job is that job's. Where jobs of others are hidden from who asks,
# nothing says that a job is alone, and its own record is asked for.

# What a job holds on nodes of which it has as much of each (slurm_sprint_job_info).
_GROUP = re.compile(r"(?<!\S)Nodes=(\S+) CPU_IDs=([-,\d]+) Mem=(\d+) GRES=(\S*)")
# From so many characters on 22.05 has cut them (tmp1 in slurm_sprint_job_info).
_CUT_IDS = 127


def with_held_gpus(
    jobs: Sequence[Job],
    nodes: Sequence[Node],
    partitions: Iterable[Partition] = (),
    *,
    others_are_hidden: bool = False,
) -> tuple[Job, ...]:
    """Return the jobs; those that are alone on all of their nodes hold what is in use there.

    Args:
        jobs: running ones, and also ended ones and those that complete, of which the nodes say nothing any more.
        nodes: all nodes.
        partitions: where jobs get whole nodes, those that have ended had all GPUs of theirs.
        others_are_hidden: there may be more jobs than these: none is known to be alone on its nodes.
    """
    num_jobs = Counter(name for job in jobs if job.holds_resources for name in job.nodes)
    used = {node.name: node.gres_used for node in nodes}
    whole = {partition.name for partition in partitions if partition.is_exclusive}
    had = {node.name: node.gres for node in nodes} if whole else {}
    found = []
    for job in jobs:
        if job.gres_held is None and job.nodes and all(name in used for name in job.nodes):
            if job.holds_resources and not others_are_hidden and all(num_jobs[name] == 1 for name in job.nodes):
                job = _with(job, [gres for name in job.nodes for gres in used[name]])
            elif not job.holds_resources and not whole.isdisjoint(job.partitions):
                job = _with(job, [gres for name in job.nodes for gres in had[name]])
        found.append(job)
    return tuple(found)


def in_question(jobs: Iterable[Job], nodes: Iterable[Node] | None, *, others_are_hidden: bool) -> frozenset[int]:
    """Return numbers of the running jobs of which only their own records say what GPUs they hold; see `with_held_gpus`.

    Args:
        jobs: all that are seen.
        nodes: all; None where nothing is known of them.
        others_are_hidden: there may be more jobs than these.
    """
    with_gpus = {node.name for node in nodes or () if node.gpu_types} if others_are_hidden else set()
    return frozenset(
        job.job_id
        for job in jobs
        if job.holds_resources
        and (job.gpus_in_doubt or (job.gres_held is None and (nodes is None or not with_gpus.isdisjoint(job.nodes))))
    )


def _with(job: Job, used: Iterable[Gres]) -> Job:
    held = Counter[tuple[str, str]]()
    for gres in used:
        held[gres.name, gres.type] += gres.count
    gpus = tuple(Gres(name, kind, count) for (name, kind), count in held.items())
    asked = job.count("gpu")
    is_more = sum(gres.count for gres in gpus if gres.name == "gpu") > asked
    return replace(job, gres_held=gpus) if is_more or job.gpus_in_doubt else job


def with_shared_cpus(jobs: Sequence[Job], nodes: Sequence[Node], partitions: Iterable[Partition]) -> tuple[Job, ...]:
    """Return the jobs, with which share of their CPUs counts as their own where a partition gives CPUs to several jobs.

    A node of such a partition says how many CPUs are in use, each once: where several jobs are, they have them in
    proportion to what each was given there.

    Args:
        jobs: with `shares` where `spread_in_question` asks for them.
        nodes: all nodes.
        partitions: all partitions.
    """
    sharing = {partition.name for partition in partitions if partition.jobs_per_cpu > 1}
    if not sharing:
        return tuple(jobs)
    given, num_jobs = dict.fromkeys((node.name for node in nodes), 0.0), Counter[str]()
    for job in jobs:
        if held_by(job).cpus:
            num_jobs.update(job.nodes)
            for name, cpus in job.cpus_on_nodes():
                given[name] = given.get(name, 0.0) + cpus
    shares = {
        node.name: node.cpus_allocated / given[node.name]
        for node in nodes
        if num_jobs[node.name] > 1
        and 0 < node.cpus_allocated < given[node.name]
        and not sharing.isdisjoint(node.partitions)
    }
    return tuple(
        replace(job, cpu_share=sum(cpus * shares.get(name, 1.0) for name, cpus in job.cpus_on_nodes()) / job.num_cpus)
        if job.holds_resources and not shares.keys().isdisjoint(job.nodes)
        else job
        for job in jobs
    )


def spread_in_question(
    jobs: Iterable[Job], nodes: Iterable[Node], partitions: Iterable[Partition], reservations: Iterable[Reservation]
) -> frozenset[int]:
    """Return numbers of the running jobs of which a figure needs to know how many CPUs they have on each of their
    nodes.

    squeue says how many on all together. It matters where several jobs are given the same CPUs, where a partition gives
    so many of a node and no more, and to a reservation of some cores.
    """
    sharing = {partition.name for partition in partitions if partition.jobs_per_cpu > 1}
    limited = {partition.name for partition in partitions if partition.max_cpus_per_node is not None}
    reserved = {reservation.name for reservation in reservations if reservation.is_active and reservation.cpus}
    shared = {node.name for node in nodes if not sharing.isdisjoint(node.partitions)}
    return frozenset(
        job.job_id
        for job in jobs
        if job.holds_resources and not job.shares and 1 < len(job.nodes) < job.num_cpus
        and not (shared.isdisjoint(job.nodes) and limited.isdisjoint(job.partitions)
                 and reserved.isdisjoint(job.reservations))
    )  # fmt: skip


def parts_of_cores_in_question(jobs: Iterable[Job], nodes: Iterable[Node], config: Mapping[str, str]) -> frozenset[int]:
    """Return numbers of the running jobs that may hold more CPUs than they have.

    With CR_CPU a job has as many as it asked for, and no other job is given what is left of its cores: the node counts
    all threads of those as in use (seen on 22.05, 24.11 and 26.05). With CR_Core the job itself has them.
    """
    if "CR_CPU" not in config.get("SelectTypeParameters", "").upper():
        return frozenset()
    threaded = {node.name for node in nodes if node.cpus_per_core > 1}
    return frozenset(job.job_id for job in jobs if job.holds_resources and not threaded.isdisjoint(job.nodes))


def knows_held_cpus(snapshot: Snapshot) -> bool:
    """Return whether who read it is told how many CPUs jobs keep others from, where those are not what Slurm
    allocated.
    """
    shares = any(partition.jobs_per_cpu > 1 for partition in snapshot.partitions)
    has_parts = "CR_CPU" in snapshot.config.get("SelectTypeParameters", "").upper()
    return not (snapshot.without_nodes and (has_parts or shares)) and not (snapshot.hides_jobs and shares)


def with_shares(
    jobs: Iterable[Job], asked: Collection[int], text: str, parts_of_cores: Collection[int] = ()
) -> tuple[Job, ...]:
    """Return the jobs, those that were asked about with what they hold on each node, where nothing leaves that in
    doubt.

    Args:
        jobs: all.
        asked: numbers of those in question.
        text: the records of `scontrol --details --oneliner show job`.
        parts_of_cores: see `parts_of_cores_in_question`: of those that are asked about, too.
    """
    records = records_of_jobs(text) if asked else {}
    found = []
    for job in jobs:
        if job.job_id in asked:
            is_whole = job.job_id in parts_of_cores
            shares = _shares(job, records.get(job.job_id, []), is_whole)
            if shares and is_whole:
                held = sum(share.cpus_held or 0 for share in shares)
                job = replace(job, cpu_share=held / job.num_cpus)
            job = replace(job, shares=shares or job.shares)
        found.append(job)
    return tuple(found)


def _shares(job: Job, records: Sequence[str], is_whole: bool) -> tuple[NodeShare, ...]:
    groups = _GROUP.findall(records[0]) if len(records) == 1 else []
    shown: list[tuple[str, int, int, str]] = []
    for names, ids, memory_mb, gres in groups:
        if len(ids) >= _CUT_IDS:
            return ()
        shown += [(name, num_tasks(ids), int(memory_mb), gres) for name in expanded(names)]
    # A user may have written a group into the job's name: it has a node twice, or one that is not the job's.
    if sorted(name for name, *_ in shown) != sorted(job.nodes):
        return ()
    # All threads of a core are shown, whether they are CPUs or not.
    threads = sum(num for _, num, *_ in shown) / job.num_cpus
    try:
        return tuple(
            NodeShare(name, round(num / threads), memory_mb, parse_gres(gres), num if is_whole else None)
            for name, num, memory_mb, gres in shown
        )
    except ValueError:
        return ()


def expanded(names: str) -> tuple[str, ...]:
    """Return the names that a list of Slurm stands for; none where it is no list."""
    try:
        return expand(names)
    except ValueError:
        return ()


def with_closed_partitions(nodes: Iterable[Node], partitions: Iterable[Partition]) -> tuple[Node, ...]:
    """Return the nodes; those of which no partition starts jobs have a word of ours among their states, which keeps
    jobs away.

    A partition that is not shown may start some.
    """
    closed = {partition.name for partition in partitions if not partition.is_up}
    return tuple(
        replace(node, states=node.states | {PARTITION_DOWN})
        if node.partitions and closed.issuperset(node.partitions)
        else node
        for node in nodes
    )


def with_gpu_shares(jobs: Sequence[Job], nodes: Sequence[Node]) -> tuple[Job, ...]:
    """Return the jobs, with what each GPU without a type is on nodes that MIG divides.

    Slurm accounts for gres/gpu without types unless the site names each (AccountingStorageTRES). What is in use on the
    node, less what jobs hold that asked for a type, are the instances of the others; of an ended job it is all that the
    node has. Instances of one size leave no doubt; of several sizes each counts as their average, so that together they
    are what is in use.
    """
    divided = {node.name: node for node in nodes if node.mig}
    if not divided:
        return tuple(jobs)
    jobs = [_with_asked_types(job) if not divided.keys().isdisjoint(job.nodes) else job for job in jobs]
    left = {node.name: gpus_by_type(node.gres_used) for node in nodes}
    for job in jobs:
        if job.holds_resources and len(job.nodes) == 1 and job.nodes[0] in divided:
            left[job.nodes[0]] -= Counter({kind: num for kind, num in gpus_by_type(job.amounts("gpu")).items() if kind})
    everything = {node.name: gpus_by_type(node.gres) for node in nodes}
    found = []
    for job in jobs:
        if not divided.keys().isdisjoint(job.nodes) and job.gpus and job.has_untyped_gpus:
            counts = [left if job.holds_resources else everything, everything]
            share, is_known = untyped_share(counts, job.nodes, job.count("gpu"))
            job = replace(job, untyped_gpu_share=share, gpu_types_known=is_known)
        found.append(job)
    return tuple(found)


def untyped_share(
    counts: Iterable[Mapping[str, Counter[str]]], nodes: Collection[str], num_gpus: float
) -> tuple[float, bool]:
    """Return the share of a whole GPU that a GPU without a type is on average; and whether it is exactly that.

    It is where all have the same share, or the job has all of them.

    Args:
        counts: of each node GPUs by type; the first that have any count.
        nodes: of which.
        num_gpus: that the job has.
    """
    for of_nodes in counts:
        sums = sum((of_nodes.get(name, Counter[str]()) for name in nodes), Counter[str]())
        shares = {kind: gpu_share(kind) for kind, num in sums.items() if num > 0}
        if shares:
            num = sum(sums[kind] for kind in shares)
            weighed = sum(share * sums[kind] for kind, share in shares.items())
            return weighed / num, len(set(shares.values())) == 1 or num == num_gpus
    return 1.0, True


def without_types(num_jobs: int) -> list[str]:
    """Return the line about jobs whose GPUs count as an average; none where there are no such jobs."""
    if not num_jobs:
        return []
    return [
        f"of {count_words(num_jobs, 'job')} on nodes with MIG instances of several sizes Slurm does not say which "
        "were held: each counts as the average there. It says so with AccountingStorageTRES=gres/gpu,gres/gpu:TYPE for "
        "each type"
    ]


def _with_asked_types(job: Job) -> Job:
    """The job; if no GPU that it holds has a type, and it has or asked for as many of some types, with these."""
    held = gpus_by_type(job.gres_held or ())
    has = gpus_by_type(gres for share in job.shares for gres in share.gres)
    asked = gpus_by_type(replace(job, gres_held=None).amounts("gpu"))
    others = tuple(gres for gres in job.gres_held or () if gres.name != "gpu")
    for typed in (has, asked):
        if set(held) == {""} and "" not in typed and sum(typed.values()) == held[""]:
            return replace(job, gres_held=(*others, *(Gres("gpu", kind, num) for kind, num in typed.items())))
    return job


def gpus_by_type(gres: Iterable[Gres]) -> Counter[str]:
    """Return how many GPUs of each type; of none under the empty name."""
    found = Counter[str]()
    for resource in gres:
        if resource.name == "gpu":
            found[resource.type] += resource.count
    return found


def ended_on_whole_nodes(jobs: Iterable[Job], nodes: Iterable[Node]) -> frozenset[int]:
    """Return numbers of the ended jobs that had all CPUs of nodes with GPUs: with `--exclusive` they had all
    GPUs, too.
    """
    cpus = {node.name: node.cpus for node in nodes}
    gpus = {node.name for node in nodes if node.gpus or node.mig}
    return frozenset(
        job.job_id
        for job in jobs
        if job.gres_held is None and not job.is_pending and not job.holds_resources and not gpus.isdisjoint(job.nodes)
        and job.num_cpus >= sum(cpus.get(name, 0) for name in job.nodes)
    )  # fmt: skip


def parse_held(text: str) -> dict[int, tuple[Gres, ...] | None]:
    """Return what jobs held by their records of `scontrol --details --oneliner show job`; None where that is in
    doubt.
    """
    found: dict[int, tuple[Gres, ...] | None] = {}
    for job_id, gres in said_of_jobs(text, "JOB_GRES").items():
        try:
            found[job_id] = None if gres is None else parse_gres(gres)
        except ValueError:
            found[job_id] = None
    return found


def held_in_shares(jobs: Iterable[Job]) -> dict[int, tuple[Gres, ...] | None]:
    """Return what running jobs hold by their shares; None where they have none."""
    found: dict[int, tuple[Gres, ...] | None] = {}
    for job in jobs:
        held = Counter((gres.name, gres.type) for share in job.shares for gres in share.gres for _ in range(gres.count))
        found[job.job_id] = tuple(Gres(*kind, num) for kind, num in held.items()) if job.shares else None
    return found


def with_told_gpus(
    jobs: Sequence[Job],
    asked: Collection[int],
    held: Mapping[int, tuple[Gres, ...] | None],
    nodes: Iterable[Node] | None,
) -> tuple[tuple[Job, ...], frozenset[int]]:
    """Return the jobs, with what their records say of those that were asked about, and the numbers of which that is
    unknown.

    Args:
        jobs: all.
        asked: numbers of those in question.
        held: see `parse_held`. More than the job's nodes have is not believed.
        nodes: all nodes; None where nothing is known of them.
    """
    most = None if nodes is None else {node.name: total(node.gres, "gpu") for node in nodes}
    found, unknown = [], set[int]()
    for job in jobs:
        if job.job_id in asked:
            gpus = held.get(job.job_id)
            if gpus is None or (most is not None and total(gpus, "gpu") > sum(most.get(name, 0) for name in job.nodes)):
                unknown.add(job.job_id)
            else:
                job = replace(job, gres_held=gpus)
        found.append(job)
    return tuple(found), frozenset(unknown)


# Which pending jobs are short of licenses: (jobs, `scontrol show licenses`) -> jobs. Pure.
#
# slurmctld says Priority of a job behind others, also where no license is left for it. It starts one if what it asks
# for, what is used and what reservations of others keep is no more than there is (license_job_test in licenses.c).

_RECORD = re.compile(r"LicenseName=(\S+) Total=(\d+) Used=(\d+) Free=(\d+) Reserved=(\d+)")
# Names of licenses and how many, all of them or, with `|`, any (sbatch(1), --licenses).
_ASKED = re.compile(r"([^,;|:=()\s]+)(?:[:=](\d+))?")


@dataclass(frozen=True, slots=True)
class Licenses:
    """Licenses of one name: how many are free, and how many of these reservations keep."""

    free: int
    reserved: int


def parse_licenses(text: str) -> dict[str, Licenses]:
    """Return the licenses of `scontrol --oneliner show licenses`, by their names."""
    return {name: Licenses(int(free), int(reserved)) for name, _, _, free, reserved in _RECORD.findall(text)}


def with_short_licenses(jobs: Iterable[Job], licenses: Mapping[str, Licenses]) -> tuple[Job, ...]:
    """Return the jobs, with the names of the licenses of which too few are left."""
    return tuple(
        replace(job, short_licenses=short)
        if job.licenses and job.waits_for_resources and (short := _short(job, licenses))
        else job
        for job in jobs
    )


def _short(job: Job, licenses: Mapping[str, Licenses]) -> tuple[str, ...]:
    asked = [(name, int(number or 1)) for name, number in _ASKED.findall(job.licenses)]
    short = tuple(
        name
        for name, number in asked
        if (known := licenses.get(name)) and number > known.free - (0 if job.reservation else known.reserved)
    )
    return () if "|" in job.licenses and len(short) < len(asked) else short


# What Slurm hides from users: (configuration, who asks) -> the setting by which it does. Asks Slurm in one place only.
#
# Where a part of the cluster is hidden, nothing follows from what is not there: not that a job is alone on its nodes,
# and not that none is ahead of it.

# Words of PrivateData about what slurmdbd and the event log say, and `cloud`, which shows more instead of less:
# https://slurm.schedmd.com/slurm.conf.html#OPT_PrivateData
_HIDES_NOTHING_HERE = frozenset({"", "none", "accounts", "cloud", "events", "usage", "users"})
_NO_PLUGIN = frozenset({"", "(null)", "none", "mcs/none"})
# AdminLevel of users who see everything (validate_operator in src/slurmctld/proc_req.c).
_SEE_ALL = frozenset({"operator", "administrator"})
_ASKING_S = 10.0


def hidden_by(config: Mapping[str, str]) -> str:
    """Return the setting by which Slurm hides jobs, nodes, partitions or reservations from some users; empty if none
    does.
    """
    private = config.get("PrivateData", "none")
    if set(private.lower().split(",")) - _HIDES_NOTHING_HERE:
        return f"PrivateData={private}"
    labels = config.get("MCSPlugin", "")
    return "" if labels.lower() in _NO_PLUGIN else f"MCSPlugin={labels}"


def hides_nodes(config: Mapping[str, str]) -> bool:
    """Return whether Slurm refuses plain users all that it knows of nodes, their own job's too
    (slurm_rpc_dump_nodes).
    """
    return "nodes" in config.get("PrivateData", "none").lower().split(",")


def hidden_from_me(config: Mapping[str, str], environ: Mapping[str, str]) -> str:
    """Return the setting by which Slurm may hide a part of the cluster from this user; empty where this user sees all
    of it.

    root, SlurmUser and operators do. Who is an operator slurmdbd says; where it does not say, this user counts as none.
    """
    hidden = hidden_by(config)
    return "" if not hidden or sees_everything(config, environ) else hidden


def sees_everything(config: Mapping[str, str], environ: Mapping[str, str]) -> bool:
    """Return whether this user is root, SlurmUser or an operator."""
    uid = os.geteuid()
    number = re.search(r"\((\d+)\)", config.get("SlurmUser", ""))
    if uid == 0 or (number is not None and int(number[1]) == uid):
        return True
    if not config.get("AccountingStorageType", "").endswith("slurmdbd"):
        return False
    users = ",".join(sorted(names_of(uid)))
    argv = ["sacctmgr", "--noheader", "--parsable2", "show", "user", users, "format=AdminLevel"]
    try:
        said = run_slurm(argv, env=environ, timeout_s=_ASKING_S).stdout
    except SlurmCommandError:
        return False
    return any(line.strip().lower() in _SEE_ALL for line in said.splitlines())


OLDEST = (22, 5)
SUBMISSION_FIELDS = ("JobID", "ArrayJobID", "ArrayTaskID", "HetJobID", "UserID", "Comment")
_JSON_IN_SCONTROL = (23, 2)
# squeue then says NO of all jobs that do not oversubscribe, and scontrol alone says Exclusive=NODE.
_OWN_FIELD_FOR_EXCLUSIVE = (26, 5)
# `squeue -O` knows no field for --exclude before, and `-o` does.
_FIELD_FOR_EXCLUDED = (24, 5)
# What slurmctld says of nodes that a job needs, here or in the place of blanks with underscores.
_UNAVAILABLE = re.compile(r"ReqNodeNotAvail,[ _](?:UnavailableNodes:(\S+)$|May[ _]be[ _]reserved)")
logger = logging.getLogger(__name__)


class CommandReader:
    """Reads with squeue and scontrol.

    Args:
        environ: the environment to run them in.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = plain_environ(environ)
        self._pyslurm_failed = False

    def snapshot(self, *, details: bool = False, without_nodes: bool = False) -> Snapshot:
        """Return the cluster now.

        Args:
            details: also what each running job holds on each of its nodes, which costs JSON of all jobs.
            without_nodes: ask for none, as Slurm keeps them from this user.

        Raises:
            SlurmCommandError: a command failed.
            NodesHidden: Slurm keeps them from this user.
            UnsupportedSlurm: slurmctld is older than 22.05.
            UnreadableAnswer: a command printed what no known version prints.
        """
        config = parse_text.parse_config(self._run("scontrol", "show", "config"))
        version = config.get("SLURM_VERSION", "")
        release = release_of(version)
        if release < OLDEST:
            raise UnsupportedSlurm(
                f"slurmctld is Slurm {version or 'of an unknown version'}: hetstream reads 22.05 and newer. "
                "Check: scontrol show config | grep SLURM_VERSION"
            )
        answer = None if details or without_nodes else self._by_pyslurm(release)
        if answer:
            source, jobs, nodes = "pyslurm", answer.jobs, answer.nodes
        else:
            source, nodes = "commands", () if without_nodes else self._nodes(release)
            jobs = self._with_sharing(release, self._with_excluded(release, self.jobs(details=details), details))
        partitions = parse_text.parse_partitions(self._run("scontrol", "--all", "--oneliner", "show", "partition"))
        partitions = with_allowed_members(partitions, jobs)
        jobs = with_times_to_come(with_open_partitions(jobs, partitions), time.time())
        jobs = self._with_gpu_defaults(jobs, GpuDefaults(partitions, nodes, config, release))
        hidden = hidden_by(config) if without_nodes else hidden_from_me(config, self._environ)
        jobs = self._with_licenses(jobs)
        seen = Snapshot(time.time(), version, source, jobs, nodes, (), config, (), hidden, without_nodes)
        records = functools.cache(self._records)
        jobs = self._with_told_gpus(seen, records)
        reservations = parse_reservations(self._run("scontrol", "--oneliner", "show", "reservation"))
        reservations = with_members(reservations, jobs)
        # It decides figures of nodes, and of their records scontrol then shows none.
        asked = frozenset() if without_nodes else spread_in_question(jobs, nodes, partitions, reservations)
        jobs = self._with_shares(jobs, asked, parts_of_cores_in_question(jobs, nodes, config), records)
        jobs = with_labels(with_shared_cpus(jobs, nodes, partitions), config)
        nodes = with_closed_partitions(nodes, partitions)
        jobs = with_gpu_shares(jobs, nodes)
        nodes = with_reservations(nodes, reservations, jobs)
        return Snapshot(
            taken_s=time.time(),
            version=version,
            source=source,
            jobs=with_turns(jobs, nodes, reservations, hidden),
            nodes=nodes,
            partitions=partitions,
            config=config,
            reservations=reservations,
            hidden=hidden,
            without_nodes=without_nodes,
        )

    def jobs(self, *, details: bool = False, ended: bool = False) -> tuple[Job, ...]:
        """Pending and running jobs of all partitions, hidden ones too; with `ended` also those still remembered."""
        if details:
            found = parse_json.parse_jobs(self._run("squeue", "--all", "--json"))
            # JSON has jobs that have ended, too, and what 22.05 shows of a state does not always say which.
            listed = set(self._run("squeue", "--all", "--noheader", "--format=%A").split())
            return tuple(job for job in found if str(job.job_id) in listed)
        states = ["--states=all"] if ended else []
        ends = parse_text.new_separators()
        said = self._run("squeue", "--all", *states, "--noheader", "-O", parse_text.job_format(JOB_FIELDS, *ends))
        return parse_text.parse_jobs(said, JOB_FIELDS, *ends)

    def _with_excluded(self, release: tuple[int, int], jobs: tuple[Job, ...], details: bool) -> tuple[Job, ...]:
        """The jobs, with the nodes that pending ones exclude."""
        if details or release >= _FIELD_FOR_EXCLUDED or not any(job.is_pending for job in jobs):
            return jobs
        said = self._run("squeue", "--all", "--noheader", "--states=PENDING", "--format=%A %x")
        excluded = parse_text.parse_excluded(said)
        return tuple(replace(job, excluded_nodes=excluded.get(job.job_id, ())) for job in jobs)

    def _with_sharing(self, release: tuple[int, int], jobs: tuple[Job, ...]) -> tuple[Job, ...]:
        """Pending and running jobs, with which of the pending ones want whole nodes."""
        if release < _OWN_FIELD_FOR_EXCLUSIVE:
            return tuple(replace(job, exclusive=exclusive_of(job.exclusive)) for job in jobs)
        said: dict[int, str] = {}
        if any(job.waits_for_resources for job in jobs):
            try:
                said = parse_exclusive(self._run("scontrol", "--all", "--oneliner", "show", "job"))
            except SlurmCommandError as exc:  # all other figures are known
                logger.warning("which pending jobs want whole nodes (--exclusive) is not known: %s", exc)
        return tuple(replace(job, exclusive=said.get(job.job_id, "")) for job in jobs)

    def _with_gpu_defaults(self, jobs: tuple[Job, ...], defaults: GpuDefaults) -> tuple[Job, ...]:
        """The jobs, pending ones with what their partitions give for each GPU."""
        asks_itself: dict[int, bool | None] = {}
        if defaults.in_doubt(jobs):
            try:
                asks_itself = {job.job_id: job.own_memory for job in self.jobs(details=True)}
            except SlurmCommandError as exc:  # they count as jobs that ask for no memory
                logger.warning("which pending jobs want all memory (--mem=0) is not known: %s", exc)
        return defaults.with_defaults(jobs, asks_itself)

    def _with_licenses(self, jobs: tuple[Job, ...]) -> tuple[Job, ...]:
        """The jobs, with which licenses are too few for those that wait for resources or their turn."""
        if not any(job.waits_for_resources and job.licenses for job in jobs):
            return jobs
        return with_short_licenses(jobs, parse_licenses(self._run("scontrol", "--oneliner", "show", "licenses")))

    def _with_shares(
        self, jobs: tuple[Job, ...], asked: frozenset[int], parts_of_cores: frozenset[int], records: Callable[[], str]
    ) -> tuple[Job, ...]:
        """The jobs, those that were asked about with what they hold on each node."""
        asked |= parts_of_cores
        try:
            return with_shares(jobs, asked, records() if asked else "", parts_of_cores)
        except SlurmCommandError as exc:  # they count as if they were spread evenly
            logger.warning("what %s hold on each of their nodes is not known: %s", count_words(len(asked), "job"), exc)
            return jobs

    def _with_told_gpus(self, seen: Snapshot, records: Callable[[], str]) -> tuple[Job, ...]:
        """The jobs, with what Slurm gave to running ones where neither their requests nor their nodes say it."""
        jobs = with_held_gpus(seen.jobs, seen.nodes, others_are_hidden=seen.hides_jobs)
        nodes = None if seen.without_nodes else seen.nodes
        asked = in_question(jobs, nodes, others_are_hidden=seen.hides_jobs)
        if not asked:
            return jobs
        try:
            if nodes is None:  # scontrol --details then fails (24.11, 26.05) or crashes (22.05)
                return with_told_gpus(jobs, asked, held_in_shares(self.jobs(details=True)), nodes)[0]
            return with_told_gpus(jobs, asked, parse_held(records()), nodes)[0]
        except SlurmCommandError as exc:  # they count as in doubt, and all other figures are known
            logger.warning(
                "what %s hold is not known, and they count as they asked: %s", count_words(len(asked), "job"), exc
            )
            return jobs

    def held_gpus(self) -> dict[int, tuple[Gres, ...] | None]:
        """Return what jobs hold and held that slurmctld remembers, by their numbers; None where that is in doubt."""
        return parse_held(self._records())

    def _records(self) -> str:
        return self._run("scontrol", "--all", "--details", "--oneliner", "show", "job")

    def living_jobs(self, uid: int) -> dict[str, str]:
        """Return jobs of a user that are not over: id of each (of array tasks and components, their own) and state."""
        return {row["JobID"]: row["State"] for row in self._rows(uid, "JobID", "State")}

    def marked_jobs(self, mark: str, uid: int) -> list[MarkedJob]:
        """Return jobs of a user that are not over and have this word in their comment, whatever else stands there."""
        rows = self._rows(uid, "JobID", "State", "NumCPUs", "TimeUsed", "TimeLeft", "Comment")
        return [
            MarkedJob(
                row["JobID"],
                row["State"],
                whole(row["NumCPUs"].split("-")[0]),
                time_limit_s(row["TimeUsed"]) or 0.0,
                time_limit_s(
                    row["TimeLeft"]
                ),  # None of UNLIMITED; and of INVALID: a limit that is over, or above a year
            )
            for row in rows
            if mark in row["Comment"].split()
        ]

    def job_with(self, token: str, uid: int) -> str | None:
        """Return the id, of an array or heterogeneous job as a whole, of this user's living job with a word in its
        comment.
        """
        for row in self._rows(uid, *SUBMISSION_FIELDS):
            if row["UserID"] == str(uid) and token in row["Comment"].split():
                if whole(row["HetJobID"]):
                    return row["HetJobID"]
                return row["JobID"] if row["ArrayTaskID"] in NONE_WORDS else row["ArrayJobID"]
        return None

    def _rows(self, uid: int, *fields: str) -> Iterator[dict[str, str]]:
        ends = parse_text.new_separators()
        asked = "-O", parse_text.job_format(fields, *ends)
        said = self._run("squeue", "--all", "--noheader", f"--user={uid}", *asked)
        return parse_text.parse_rows(said, fields, *ends)

    def end_s(self, job_id: str) -> float | None:
        """Return when a running job's time limit ends it, in seconds since 1970; None if Slurm does not say."""
        said = self._run("squeue", "--all", "--noheader", f"--jobs={job_id}", "--format=%e").split()
        return moment(said[0]) if said else None

    def _by_pyslurm(self, release: tuple[int, int]) -> pyslurm_backend.Answer | None:
        """What pyslurm reads; None if it is not there, of another release, or has failed this reader before."""
        # Only here: to ask which packages are installed takes longer than to read a small cluster.
        from hetstream.slurm_plugin.client import pyslurm_backend

        if self._pyslurm_failed or not pyslurm_backend.matches(release):
            return None
        try:
            return pyslurm_backend.read(self._environ)
        except HetstreamError as exc:
            self._pyslurm_failed = True
            logger.warning("pyslurm did not read the cluster, Slurm's commands do from now on: %s", exc)
            return None

    def _nodes(self, release: tuple[int, int]) -> tuple[Node, ...]:
        argv = ["scontrol", "--all", "--details", "show", "node"]
        try:
            if release >= _JSON_IN_SCONTROL:
                return parse_json.parse_nodes(self._run(*argv, "--json"))
            return parse_text.parse_nodes(self._run(*argv, "--oneliner"))
        except SlurmCommandError as exc:
            if not is_denied(exc):
                raise
            raise NodesHidden(
                "Slurm tells this user nothing of nodes (PrivateData=nodes), and without them no figure is right. Run "
                "it as an operator or SlurmUser; what is known of jobs: hetstream jobs, hetstream why JOBID"
            ) from exc

    def _run(self, *argv: str) -> str:
        # SLURM_CLUSTERS may name several clusters, of which scontrol reads none.
        named = [f"{name}={value}" for name in ("SLURM_CONF", "SLURM_CLUSTERS") if (value := self._environ.get(name))]
        hint = ", and ".join(["Check: scontrol ping", *named])
        return run_slurm(argv, env=self._environ, hint=hint).stdout


def with_turns(
    jobs: Iterable[Job], nodes: Iterable[Node], reservations: Iterable[Reservation] = (), hidden: str = ""
) -> tuple[Job, ...]:
    """Return the jobs, with which of them Slurm says that nodes are not available which it keeps for jobs ahead.

    Behind a job that finds no room slurmctld takes all nodes of its partition for unavailable, and says of those that a
    job asks for by name that they are, or that they may be reserved for another job (schedule in job_scheduler.c,
    select_nodes in node_scheduler.c; seen on 22.05, 24.11 and 26.05).

    Args:
        jobs: any.
        nodes: all that are shown, as jobs without a reservation see them.
        reservations: all that are shown.
        hidden: a setting by which there may be others.
    """
    start_jobs = {node.name for node in nodes if node.starts_jobs}
    of_nobody = start_jobs.difference(*(reservation.all_nodes for reservation in reservations))

    def is_of_turn(job: Job) -> bool:
        found = _UNAVAILABLE.match(job.reason) if job.is_pending else None
        if found is None:
            return False
        if found[1] is None:
            return not hidden and bool(job.required_nodes) and of_nobody.issuperset(job.required_nodes)
        try:
            return start_jobs.issuperset(expand(found[1]))
        except ValueError:
            return False

    return tuple(replace(job, reason_is_of_turn=True) if is_of_turn(job) else job for job in jobs)


def with_times_to_come(jobs: Iterable[Job], now_s: float) -> tuple[Job, ...]:
    """Return the jobs, with when pending ones may begin for which Slurm still names resources or turns.

    A time that is set later (`scontrol update StartTime`) becomes a reason when slurmctld next builds its queue.
    """
    return tuple(
        replace(job, begins_s=job.eligible_s)
        if job.is_pending and job.is_admitted and job.eligible_s is not None and job.eligible_s > now_s
        else job
        for job in jobs
    )


def with_labels(jobs: tuple[Job, ...], config: Mapping[str, str]) -> tuple[Job, ...]:
    """Return the jobs, with which of them share nodes with those of their MCS label alone, by the site's MCSParameters.

    With `select` all do, with `noselect` none, otherwise those that say so (slurm_mcs_get_select in
    src/common/slurm_mcs.c).
    """
    said = config.get("MCSParameters", "").lower().partition(":")[0]
    if "noselect" in said:
        return tuple(replace(job, exclusive="") if job.exclusive == "MCS" else job for job in jobs)
    if "select" not in said.replace("ondemandselect", ""):
        return jobs
    return tuple(replace(job, exclusive="MCS") if job.mcs_label and not job.exclusive else job for job in jobs)


def plain_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without a user's own defaults, which would change what is printed: SQUEUE_FORMAT,
    SINFO_SORT.

    Times are asked for in seconds since the epoch: local time has an hour twice each autumn.
    """
    own = ("SQUEUE_", "SINFO_", "SCONTROL_", "SACCT_")
    # Of a federation they show all clusters' jobs and nodes where the site says so (FederationParameters=fed_display);
    # sacct is told the cluster.
    local = {f"{name}LOCAL": "1" for name in own if name != "SACCT_"}
    return (
        {name: value for name, value in environ.items() if not name.startswith(own)}
        | local
        | {
            "SLURM_TIME_FORMAT": "%s",
            "SLURM_BITSTR_LEN": "0",  # all indices of an array: squeue ends them with "..." after 64 characters
        }
    )


def release_of(version: str) -> tuple[int, int]:
    """(22, 5) of `22.05.8` or `slurm-wlm 22.05.8`; (0, 0) if there is no version in it."""
    match = re.search(r"(?<!\d)(\d{1,9})\.(\d{1,9})", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)
