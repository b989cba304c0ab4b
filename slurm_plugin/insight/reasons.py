"""Slurm's reasons for which a job is pending, in words, with the next step. Pure; called by `why.py`.

The names are those of Slurm's table of reasons (`job_state_reason.c`), from 22.05 to 26.05, and the texts that
slurmctld writes in their place. `RESOURCE_REASONS` in `client/model.py` are those about resources; of every other one
more free CPUs or GPUs are no help, and one that is not known here is told in Slurm's own words.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

from hetstream.slurm_plugin.client.model import Job, is_resource_reason

# Reason, as a pattern of its beginning -> kind, in words, the next step. {id}, {array}, {dependency}, {reason}, {user},
# {account}, {qos}, {partition}, {reservation} and {begin} are filled in.
_SHOW_JOB, _LIMIT = "scontrol show job {id}", "scontrol update JobId={id} TimeLimit=T"
_SHOW_QOS, _SHOW_ASSOC = "sacctmgr show qos {qos}", "sacctmgr show assoc user={user} account={account}"
_OF_QOS, _OF_ASSOC = "of its QOS ({reason})", "of its account or user ({reason})"
_PATTERNS = (
    (r"JobHeldUser|job_requeued_in_held_state", "held", "its owner holds it", "scontrol release {id}"),
    (r"JobHeldAdmin", "held", "an operator holds it", "ask an operator for: scontrol release {id}"),
    (r"JobHoldMaxRequeue", "held", "it was requeued too often", "look at its output, then: scontrol release {id}"),
    (r"launch_failed_requeued_held|JobLaunchFailure", "held", "its launch failed",
     "look at slurmd's log, then: scontrol release {id}"),
    (r"DependencyNeverSatisfied", "dependency", "it waits for {dependency}, which cannot come true", "scancel {id}"),
    (r"Dependency", "dependency", "it waits for {dependency}", "hetstream jobs"),
    (r"BeginTime", "time",
     "it may not begin yet: {begin}",
     "scontrol update JobId={id} StartTime=now"),
    (r"DeadLine", "time", "it cannot end before its --deadline", "scontrol update JobId={id} Deadline=TIME"),
    (r"JobArrayTaskLimit", "limit", "as many tasks of its array run as its limit allows",
     "scontrol update JobId={array} ArrayTaskThrottle=N"),
    (r"PartitionTimeLimit", "time limit", "its time limit is above the partition's", _LIMIT),
    (r"PartitionNodeLimit", "limit", "it asks for more or fewer nodes than the partition allows", "sinfo -o '%P %s'"),
    (r"PartitionConfig", "limit", "what it asks for is not allowed in its partition",
     "scontrol show partition {partition}"),
    (r"MaxMemPerLimit", "limit", "it asks for more memory than MaxMemPerNode or MaxMemPerCPU allows",
     "scontrol show config | grep MaxMem; scontrol show partition {partition}"),
    (r"Partition", "partition", "its partition is not up", "scontrol show partition {partition}"),
    (r"ReqNodeNotAvail|NodeDown|FrontEndDown", "nodes", "a node that it needs is not available ({reason})",
     "sinfo -R; scontrol show reservation"),
    (r"Reservation(Deleted|Invalid)", "reservation", "its reservation is gone",
     "scontrol update JobId={id} ReservationName="),
    (r"Reservation", "reservation", "its reservation has not begun or is full",
     "{reservation}"),
    (r"Licenses", "licenses", "its licenses are taken", "scontrol show license"),
    (r"InvalidQOS|QOSNotAllowed", "not allowed", "it may not use QOS {qos} here ({reason})",
     _SHOW_ASSOC + "; scontrol update JobId={id} QOS=NAME"),
    (r"InvalidAccount|AccountNotAllowed", "not allowed", "it may not use account {account} here ({reason})",
     _SHOW_ASSOC + "; scontrol update JobId={id} Account=NAME"),
    (r"QOS(MaxWall|TimeLimit)", "time limit", "its time limit is above that " + _OF_QOS, _LIMIT),
    (r"Assoc(MaxWall|iationTimeLimit)", "time limit", "its time limit is above that " + _OF_ASSOC, _LIMIT),
    (r"(QOS|Assoc)Grp\w*Minutes|(QOS|Assoc)GrpWall|QOSUsageThreshold", "limit",
     "the CPU, GPU or wall time granted to its QOS, account or user is used up ({reason})",
     _SHOW_QOS + "; " + _SHOW_ASSOC),
    (r"QOSMax\w*(PerJob|PerNode)|QOSMin", "limit", "one job may not ask for so much or so little under the limits "
     + _OF_QOS, "ask for what they allow: " + _SHOW_QOS),
    (r"AssocMax\w*(PerJob|PerNode)", "limit", "one job may not ask for so much under the limits " + _OF_ASSOC,
     "ask for what they allow: " + _SHOW_ASSOC),
    (r"QOSMax\w*PerUser", "limit", "other jobs of {user} hold all that one user may have under the limits " + _OF_QOS,
     "it starts when they end: squeue -u {user}; " + _SHOW_QOS),
    (r"Max\w*PerAccount", "limit", "jobs of account {account} hold all that it may have under the limits " + _OF_QOS,
     "it starts when they end: squeue -A {account}; " + _SHOW_QOS),
    (r"QOS", "limit", "jobs of its QOS hold all that they may have together ({reason})",
     "it starts when they end: " + _SHOW_QOS),
    (r"Assoc", "limit", "jobs of its account or user hold all that they may have together ({reason})",
     "it starts when they end: " + _SHOW_ASSOC),
    (r"AccountingPolicy", "limit", "a limit of its account or QOS is reached", _SHOW_ASSOC),
    (r"BadConstraints|Constraints", "constraints", "no node can meet what it asks for", _SHOW_JOB),
    (r"BurstBuffer", "burst buffer", "its burst buffer is not ready ({reason})", "scontrol show burst"),
    (r"Power", "power", "the cluster's power limit is reached ({reason})", "scontrol show powercap"),
    (r"Cleaning", "requeue", "its last start is still being cleaned up", _SHOW_JOB),
)  # fmt: skip
_REASONS = tuple((re.compile(pattern), kind, text, step) for pattern, kind, text, step in _PATTERNS)


@dataclass(frozen=True)
class Told:
    """What a reason says.

    Attributes:
        kind: `held`, `dependency`, `limit`, `time limit`, `licenses`, ...; `slurm` if only Slurm knows it.
        text: in words.
        next_step: what to do or look at.
    """

    kind: str
    text: str
    next_step: str


def told_by_slurm(job: Job) -> Told | None:
    """What a pending job waits for that is no resource, in words; None if it waits for resources or its turn."""
    if is_resource_reason(job.reason):
        if job.short_licenses:  # Slurm has not looked so far, or says it at its next look
            text = f"its licenses are taken: {', '.join(job.short_licenses)}"
            return Told("licenses", text, "scontrol show license")
        return None
    sentences = {
        "id": job.job_id, "array": job.array_job_id or job.job_id, "dependency": job.dependency or "another job",
        "reason": job.reason, "user": job.user, "account": job.account, "qos": job.qos,
        "partition": job.partitions[0], "reservation": job.reservation,
        "begin": f"it was requeued (start {job.num_restarts + 1}), and Slurm waits two minutes then"
        if job.num_restarts else "its --begin time has not come",
    }  # fmt: skip
    # The next step is a line for a shell: whoever named the account must not have written a part of it.
    quoted = {name: shlex.quote(str(word)) if word else "" for name, word in sentences.items()}
    shown = [f"scontrol show reservation {shlex.quote(name)}" for name in job.reservations]  # it takes one name
    quoted["reservation"] = "; ".join(shown) or "scontrol show reservation"
    begin = job.reason.replace(" ", "_")
    for pattern, kind, text, step in _REASONS:
        if pattern.match(begin):
            return Told(kind, text.format(**sentences), step.format(**quoted))
    return Told("slurm", f"Slurm says {job.reason}", _SHOW_JOB.format(**quoted))
