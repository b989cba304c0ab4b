"""Every reason of Slurm's table for a pending job: what is about resources, and what else is told as what it is."""

from __future__ import annotations

from typing import Any

import pytest

from hetstream.slurm_plugin.client.model import Gres, Job, Node, Partition, Snapshot, is_resource_reason
from hetstream.slurm_plugin.insight.advise import advise
from hetstream.slurm_plugin.insight.fragmentation import measure
from hetstream.slurm_plugin.insight.observation import observe
from hetstream.slurm_plugin.insight.reasons import told_by_slurm
from hetstream.slurm_plugin.insight.why import Explainer

NOW_S = 1_000_000.0
# The names of job_state_reason.c of 22.05 to 26.05, and the texts that slurmctld writes in their place, by what they
# are about. `limit` of what others hold, of what one job may ask for, and of time that is used up have other advice.
RESOURCES = (
    "None|Resources|Priority|SchedDefer|"
    "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions|"
    "Nodes_required_for_job_are_DOWN,_DRAINED_or_reserved_for_jobs_in_higher_priority_partitions"
)
OTHERS = {
    "held": "JobHeldUser|JobHeldAdmin|JobHoldMaxRequeue|launch failed requeued held|job_requeued_in_held_state|"
    "JobLaunchFailure",
    "dependency": "Dependency|DependencyNeverSatisfied",
    "time": "BeginTime|DeadLine",
    "time limit": "PartitionTimeLimit|QOSTimeLimit|QOSMaxWallDurationPerJobLimit|AssociationTimeLimit|"
    "AssocMaxWallDurationPerJobLimit",
    "partition": "PartitionDown|PartitionInactive",
    "nodes": "ReqNodeNotAvail, UnavailableNodes:g3|ReqNodeNotAvail,_Reserved_for_maintenance|NodeDown|FrontEndDown",
    "reservation": "Reservation|ReservationDeleted|ReservationInvalid",
    "licenses": "Licenses",
    "not allowed": "InvalidQOS|QOSNotAllowed|InvalidAccount|AccountNotAllowed",
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
