"""Every reason of Slurm's table for a pending job: what is about resources, and what else is told as what it is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hetstream.slurm_plugin.client.model import Gres, Job, Node, Partition, Snapshot, is_resource_reason
from hetstream.slurm_plugin.insight.advise import advise
from hetstream.slurm_plugin.insight.blockers import told_by_slurm
from hetstream.slurm_plugin.insight.fragmentation import measure
from hetstream.slurm_plugin.insight.observation import observe
from hetstream.slurm_plugin.insight.why import Explainer

NOW_S = 1_000_000.0
# The names of job_state_reason.c of 22.05 to 26.05, and the texts that slurmctld writes in their place, by what they
# are about. `limit` of what others hold, of what one job may ask for, and of time that is used up have other advice.
RESOURCES = (
    "None|Resources|Priority|SchedDefer|"
    "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions|"
    "Nodes_required_for_job_are_DOWN,_DRAINED_or_reserved_for_jobs_in_higher_priority_partitions|"
    "Nodes required for job are DOWN, DRAINED, REBOOTING or reserved for jobs in higher priority partitions|"
    # With topology plugins, from 26.05 on (ESLURM_TOPO_* in slurm_errno.c).
    "Required nodes lack available resources|Required nodes do not fit topology|No suitable topology unit found|"
    "No suitable topology unit found for segment|Insufficient resources in topology unit|"
    "Insufficient_resources_in_topology_unit|No available nodes in topology|"
    "Weight-based selection could not satisfy request within topology unit|"
    "Exceeded maximum node limit during topology allocation"
)
OTHERS = {
    "held": "JobHeldUser|JobHeldAdmin|JobHoldMaxRequeue|launch failed requeued held|job_requeued_in_held_state|"
    "JobLaunchFailure|job requeued in special exit state|launch failure limit exceeded requeued held|"
    "user env retrieval failed requeued held",
    "dependency": "Dependency|DependencyNeverSatisfied",
    "time": "BeginTime|DeadLine",
    "time limit": "PartitionTimeLimit|QOSTimeLimit|QOSMaxWallDurationPerJobLimit|AssociationTimeLimit|"
    "AssocMaxWallDurationPerJobLimit",
    "partition": "PartitionDown|PartitionInactive",
    "nodes": "ReqNodeNotAvail, UnavailableNodes:g3|ReqNodeNotAvail|NodeDown|FrontEndDown",
    "reservation": "Reservation|ReservationDeleted|ReservationInvalid|Reservation soon was deleted|"
    "Reservation soon is invalid|Reservation soon, which this job was running under, has ended|"
    "ReqNodeNotAvail,_Reserved_for_maintenance|ReqNodeNotAvail, May be reserved for other job",
    "licenses": "Licenses|License request 'sim:9' is no longer valid, holding job",
    "not allowed": "InvalidQOS|QOSNotAllowed|InvalidAccount|AccountNotAllowed|"
    "Job's account not permitted to use this partition (gpu allows lab2 not lab)|"
    "Job's account not permitted to use this partition (gpu denies lab including lab)|"
    "Job's account not known, so it can't use this partition (gpu allows topology)|"
    "Job's_QOS_not_permitted_to_use_this_partition_(gpu_allows_low_not_high)|"
    "Job's QOS not permitted to use this partition (gpu denies high including high)|"
    "Job's QOS not known, so it can't use this partition (gpu allows Insufficient resources in topology unit)|"
    "uid 1000 not in group permitted to use this partition (gpu). groups allowed: staff",
    "constraints": "BadConstraints|Constraints",
    "burst buffer": "BurstBufferResources|BurstBufferStageIn|BurstBufferOperation",
    "power": "PowerNotAvail|PowerReserved",
    "requeue": "Cleaning",
    "slurm": "Prolog|SystemFailure|NonZeroExitCode|RaisedSignal|TimeLimit|InactiveLimit|FedJobLock|OutOfMemory|"
    "NvidiaImexChannels|A_reason_of_next_year",
}
LIMITS = {
    "AccountingPolicy": "sacctmgr show assoc",
    "JobArrayTaskLimit": "ArrayTaskThrottle",
    "PartitionNodeLimit|PartitionConfig": "",
    "MaxMemPerLimit": "MaxMem",
    "QOSGrpCpuLimit|QOSGrpJobsLimit|QOSGrpMemLimit|QOSGrpNodeLimit|QOSGrpSubmitJobsLimit|QOSJobLimit|QOSResourceLimit|"
    "QOSGrpUnknown|QOSGrpEnergy|QOSGrpGRES|QOSGrpLicense|QOSGrpBB|QOSGrpBilling": "when they end: sacctmgr show qos",
    "AssocGrpCpuLimit|AssocGrpJobsLimit|AssocGrpMemLimit|AssocGrpNodeLimit|AssocGrpSubmitJobsLimit|AssocMaxJobsLimit|"
    "AssocMaxSubmitJobLimit|AssociationJobLimit|AssociationResourceLimit|AssocGrpUnknown|AssocGrpEnergy|AssocGrpGRES|"
    "AssocGrpLicense|AssocGrpBB|AssocGrpBilling": "when they end: sacctmgr show assoc",
    "QOSMaxCpuPerUserLimit|QOSMaxJobsPerUserLimit|QOSMaxNodePerUserLimit|QOSMaxSubmitJobPerUserLimit|"
    "QOSMaxUnknownPerUser|QOSMaxMemoryPerUser|QOSMaxEnergyPerUser|QOSMaxGRESPerUser|QOSMaxLicensePerUser|"
    "QOSMaxBBPerUser|QOSMaxBillingPerUser": "squeue -u alice",
    "MaxBBPerAccount|MaxCpuPerAccount|MaxEnergyPerAccount|MaxGRESPerAccount|MaxNodePerAccount|MaxLicensePerAccount|"
    "MaxMemoryPerAccount|MaxUnknownPerAccount|MaxJobsPerAccount|MaxSubmitJobsPerAccount|MaxBillingPerAccount":
        "squeue -A lab",
    "QOSMaxCpuPerJobLimit|QOSMaxCpuMinutesPerJobLimit|QOSMaxNodePerJobLimit|QOSMinCpuNotSatisfied|"
    "QOSMaxUnknownPerJob|QOSMaxUnknownPerNode|QOSMaxUnknownMinutesPerJob|QOSMinUnknown|QOSMaxCpuPerNode|"
    "QOSMaxMemoryPerJob|QOSMaxMemoryPerNode|QOSMaxMemoryMinutesPerJob|QOSMinMemory|QOSMaxNodeMinutesPerJob|QOSMinNode|"
    "QOSMaxEnergyPerJob|QOSMaxEnergyPerNode|QOSMaxEnergyMinutesPerJob|QOSMinEnergy|QOSMaxGRESPerJob|QOSMaxGRESPerNode|"
    "QOSMaxGRESMinutesPerJob|QOSMinGRES|QOSMaxLicensePerJob|QOSMaxLicenseMinutesPerJob|QOSMinLicense|QOSMaxBBPerJob|"
    "QOSMaxBBPerNode|QOSMinBB|QOSMaxBillingPerJob|QOSMaxBillingPerNode|QOSMaxBillingMinutesPerJob|QOSMinBilling":
        "allow: sacctmgr show qos",
    "AssocMaxCpuPerJobLimit|AssocMaxCpuMinutesPerJobLimit|AssocMaxNodePerJobLimit|AssocMaxUnknownPerJob|"
    "AssocMaxUnknownPerNode|AssocMaxUnknownMinutesPerJob|AssocMaxCpuPerNode|AssocMaxMemPerJob|AssocMaxMemPerNode|"
    "AssocMaxMemMinutesPerJob|AssocMaxNodeMinutesPerJob|AssocMaxEnergyPerJob|AssocMaxEnergyPerNode|"
    "AssocMaxEnergyMinutesPerJob|AssocMaxGRESPerJob|AssocMaxGRESPerNode|AssocMaxGRESMinutesPerJob|"
    "AssocMaxLicensePerJob|AssocMaxLicenseMinutesPerJob|AssocMaxBBPerJob|AssocMaxBBPerNode|AssocMaxBBMinutesPerJob|"
    "AssocMaxBillingPerJob|AssocMaxBillingPerNode|AssocMaxBillingMinutesPerJob": "allow: sacctmgr show assoc",
    "Job is at or exceeds QOS high's group wall limit of 3 with 4|"
    "Job is at or exceeds association (acc=lab/user=alice/part=) group max TRES(cpu) minutes of 3 with 4|"
    "QOSUsageThreshold|QOSGrpCPUMinutesLimit|QOSGrpCPURunMinutesLimit|QOSGrpWallLimit|AssocGrpCPUMinutesLimit|"
    "AssocGrpCPURunMinutesLimit|AssocGrpWallLimit|AssocGrpUnknownMinutes|AssocGrpUnknownRunMinutes|AssocGrpMemMinutes|"
    "AssocGrpMemRunMinutes|AssocGrpNodeMinutes|AssocGrpNodeRunMinutes|AssocGrpEnergyMinutes|AssocGrpEnergyRunMinutes|"
    "AssocGrpGRESMinutes|AssocGrpGRESRunMinutes|AssocGrpLicenseMinutes|AssocGrpLicenseRunMinutes|AssocGrpBBMinutes|"
    "AssocGrpBBRunMinutes|AssocGrpBillingMinutes|AssocGrpBillingRunMinutes|QOSGrpUnknownMinutes|"
    "QOSGrpUnknownRunMinutes|QOSGrpMemoryMinutes|QOSGrpMemoryRunMinutes|QOSGrpNodeMinutes|QOSGrpNodeRunMinutes|"
    "QOSGrpEnergyMinutes|QOSGrpEnergyRunMinutes|QOSGrpGRESMinutes|QOSGrpGRESRunMinutes|QOSGrpLicenseMinutes|"
    "QOSGrpLicenseRunMinutes|QOSGrpBBMinutes|QOSGrpBBRunMinutes|QOSGrpBillingMinutes|QOSGrpBillingRunMinutes":
        "sacctmgr show qos high; sacctmgr show assoc",
}  # fmt: skip


def pending(reason: str, **more: Any) -> Job:
    """A job of 1 GPU and 14 CPUs."""
    return Job(
        7, "train", "alice", ("gpu",), "PENDING", reason, 1, 14, 1, 14, 100, account="lab", qos="high",
        gres_per_node=(Gres("gpu", "", 1),), submit_s=NOW_S - 60, **more,
    )  # fmt: skip


def cluster(*jobs: Job) -> Snapshot:
    """A node with 3 GPUs and 4 CPUs free, of 4 and 16; and CPUs for data workers."""
    nodes = (
        Node("g0", frozenset({"MIXED"}), ("gpu",), 16, 12, 1000, 100, (Gres("gpu", "", 4),), (Gres("gpu", "", 1),)),
        Node("c0", frozenset({"IDLE"}), ("cpu",), 16, 0, 1000, 0),
    )
    return Snapshot(NOW_S, "22.05.8", "test", jobs, nodes, (Partition("gpu", ()), Partition("cpu", ())))


def test_what_is_about_resources() -> None:
    for reason in ("", *RESOURCES.split("|")):
        job = pending(reason)
        assert (job.waits_for_resources, told_by_slurm(job)) == (True, None), reason
        assert Explainer(cluster(job)).causes(job) == ("CPUs",), reason


@pytest.mark.parametrize(("kind", "reasons"), [*OTHERS.items(), *(("limit", names) for names in LIMITS)])
def test_what_is_not(kind: str, reasons: str) -> None:
    for reason in reasons.split("|"):
        job = pending(reason)
        told = told_by_slurm(job)
        assert told is not None
        assert told.kind == kind, reason
        assert not is_resource_reason(reason)
        assert "{" not in told.text + told.next_step, reason
        found = Explainer(cluster(job)).explain(job)
        assert found.blockers[0].kind == kind
        assert not found.conversion.helps
        assert "no resource" in found.conversion.text
    for reason in [one for one in reasons.split("|") if kind == "limit"]:
        told = told_by_slurm(pending(reason))
        assert told is not None
        assert LIMITS[reasons] in told.next_step, reason


def test_sentences_of_a_topology_that_found_no_room_are_its_verdict() -> None:
    """As with Resources: where nothing is lacking that is looked at here, Slurm's own words are told."""
    sentence = "Insufficient resources in topology unit"
    job = replace(pending(sentence), num_cpus=2, cpus_per_task=2)
    assert job.found_no_room
    (blocker,) = Explainer(cluster(job)).explain(job).blockers
    assert blocker.kind == "not looked at"
    assert f"(Slurm says: {sentence})" in blocker.text
    (blocker,) = Explainer(cluster(replace(job, reason="Resources"))).explain(replace(job, reason="Resources")).blockers
    assert "Slurm says" not in blocker.text


def test_what_a_reservation_keeps_is_told_before_what_is_out_of_use() -> None:
    for reason in ("ReqNodeNotAvail, May be reserved for other job", "ReqNodeNotAvail, Reserved for maintenance"):
        told = told_by_slurm(pending(reason))
        assert told is not None
        assert told.next_step.startswith("scontrol show reservation")


def test_a_limit_that_a_job_alone_exceeds() -> None:
    """Who runs nothing that counts there never starts; whoever hides jobs, or runs one, may."""
    cases = {
        "QOSMaxGRESPerUser": {"user": "alice", "account": "other"},
        "MaxCpuPerAccount": {"user": "bob", "account": "lab"},
        "AssocGrpCpuLimit": {"user": "bob", "account": "child"},
        "QOSGrpNodeLimit": {"user": "bob", "account": "other"},
        "QOSMaxCpuPerUserLimit": {"user": "alice", "account": "other"},
        "AssocGrpMemLimit": {"user": "alice", "account": "lab"},
    }
    for reason, whose in cases.items():
        job = pending(reason)
        first = Explainer(cluster(job)).explain(job).blockers[0]
        assert "more than the limit by itself" in first.text, reason
        assert "when they end" not in first.next_step
        assert first.next_step.startswith("ask for less, unless one has just ended: sacctmgr show"), reason
        running = replace(pending(""), job_id=8, state="RUNNING", nodes=("g0",), **whose)
        first = Explainer(cluster(job, running)).explain(job).blockers[0]
        assert "or it asks for more than the limit by itself" in first.text, reason
        assert "when they end" in first.next_step
        other = replace(running, user="carol", account="else", qos="low")
        first = Explainer(cluster(job, other)).explain(job).blockers[0]
        alone = not reason.startswith("Assoc")  # of an account's parents nothing is known
        assert ("when they end" not in first.next_step) == alone, reason
        hiding = replace(cluster(job), hidden="PrivateData=jobs")
        assert "when they end" in Explainer(hiding).explain(job).blockers[0].next_step
    of_partition = replace(pending("QOSGrpCpuLimit"), qos="normal")
    neighbour = replace(pending(""), job_id=8, state="RUNNING", nodes=("g0",), qos="low")
    both = cluster(of_partition, neighbour)
    limited = replace(both, partitions=(Partition("gpu", (), qos="part"), Partition("cpu", ())))
    assert "when they end" in Explainer(limited).explain(of_partition).blockers[0].next_step


def test_jobs_and_why_name_the_same_cause() -> None:
    job = replace(pending("PartitionConfig"), num_cpus=64, cpus_per_task=64)
    explainer = Explainer(cluster(job))
    assert explainer.explain(job).blockers[0].kind == explainer.waits_for(job) == "size"
    assert explainer.causes(job) == ("size",)


@pytest.mark.parametrize("reason", ["QOSGrpGRES", "AssocGrpCpuLimit", "Licenses", "PartitionTimeLimit", "Reservation"])
def test_nobody_takes_it_for_a_want_of_resources(reason: str) -> None:
    """The job asks for 14 CPUs beside a GPU, of which 4 are free: with Resources it strands GPUs and gets advice."""
    waiting = pending("Resources")
    assert [one.basis for one in advise(cluster(waiting), {})] == ["free now"]
    assert measure(cluster().nodes, [waiting]).total("stranded_gpus") == 3
    assert set(observe(cluster(waiting), {}).sample.waiting) == {"CPUs"}

    limited = pending(reason)
    told = told_by_slurm(limited)
    assert told is not None
    assert advise(cluster(limited), {}) == ()
    found = measure(cluster().nodes, [limited])
    assert (found.shapes, found.total("stranded_gpus")) == ((), 0)
    assert set(observe(cluster(limited), {}).sample.waiting) == {told.kind}
