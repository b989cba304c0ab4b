"""Slurm's reasons for which a job is pending, in words, with the next step. Pure; called by `why.py`.

The names are those of Slurm's table of reasons (`job_state_reason.c`), from 22.05 to 26.05, and the texts that
slurmctld writes in their place. `is_admitted` in `client/model.py` knows those about resources; of every other
one more free CPUs or GPUs are no help, and one that is not known here is told in Slurm's own words.
"""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass

from hetstream.slurm_plugin.client.model import Job, Snapshot

# Reason, as a pattern of its beginning -> kind, in words, the next step. {id}, {array}, {dependency}, {reason}, {user},
# {account}, {qos}, {partition}, {reservation} and {begin} are filled in.
_SHOW_JOB, _LIMIT = "scontrol show job {id}", "scontrol update JobId={id} TimeLimit=T"
_SHOW_QOS, _SHOW_ASSOC = "sacctmgr show qos {qos}", "sacctmgr show assoc user={user} account={account}"
_OF_QOS, _OF_ASSOC = "of its QOS ({reason})", "of its account or user ({reason})"
# Limits of several jobs together. Slurm's reason is the same where one job alone asks for more.
_USER, _ACCOUNT, _QOS, _ASSOC = r"QOSMax\w*PerUser", r"Max\w*PerAccount", "QOS", "Assoc"
_OR_ALONE, _ENDS = ", or it asks for more than the limit by itself", "it starts when they end: "
_ALONE = "no job runs that counts with it ({reason}): it asks for more than the limit by itself"
_PATTERNS = (
    # An operator holds it so with `scontrol uhold`, and slurmctld itself where it cannot launch it.
    (r"JobHeldUser", "held", "it is held, by its owner or so that its owner can release it", "scontrol release {id}"),
    (r"job_requeued_in_held_state", "held",
     "it was requeued to be held (scontrol requeuehold, or RequeueExitHold of its exit code)",
     "look at its output, then: scontrol release {id}"),
    (r"job_requeued_in_special_exit_state", "held",
     "it was requeued to be held in SPECIAL_EXIT (scontrol requeuehold State=SpecialExit, or RequeueExitHold)",
     "look at its output, then: scontrol release {id}"),
    # slurmctld itself gives this reason too, such as to a job with which its scheduler makes no progress.
    (r"JobHeldAdmin", "held", "an operator holds it, or slurmctld itself, whose log then says so",
     "ask an operator for: scontrol release {id}"),
    # Its owner cannot release it: update_job in job_mgr.c.
    (r"JobHoldMaxRequeue|launch_failure_limit_exceeded", "held",
     "slurmctld holds it: its launch failed, and it was requeued, as often as Slurm allows (max_batch_requeue)",
     "look at its output and slurmd's log, then ask an operator for: scontrol release {id}"),
    (r"(launch|user_env_retrieval)_failed_requeued_held|JobLaunchFailure", "held", "its launch failed",
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
    (r"ReqNodeNotAvail,_(May_be_r|R)eserved", "reservation",
     "nodes that it needs may be kept by a reservation ({reason})", "scontrol show reservation; sinfo -R"),
    (r"ReqNodeNotAvail|NodeDown|FrontEndDown", "nodes", "a node that it needs is not available ({reason})",
     "sinfo -R; scontrol show reservation"),
    (r"Reservation(Deleted|Invalid)|Reservation_.*(was_deleted|is_invalid|has_ended)", "reservation",
     "its reservation is gone", "scontrol update JobId={id} ReservationName="),
    (r"Reservation", "reservation", "its reservation has not begun or is full",
     "{reservation}"),
    (r"License_request", "licenses", "its licenses are none of the cluster's any more ({reason})",
     "ask for others: scontrol show license"),
    (r"Licenses", "licenses", "its licenses are taken", "scontrol show license"),
    (r"InvalidQOS|QOSNotAllowed|Job's_QOS_not", "not allowed", "it may not use QOS {qos} here ({reason})",
     _SHOW_ASSOC + "; scontrol update JobId={id} QOS=NAME"),
    (r"uid_\d+_not_in_group", "not allowed", "{user} may not use its partition ({reason})",
     "scontrol show partition {partition}; scontrol update JobId={id} Partition=NAME"),
    (r"InvalidAccount|AccountNotAllowed|Job's_account_not", "not allowed",
     "it may not use account {account} here ({reason})", _SHOW_ASSOC + "; scontrol update JobId={id} Account=NAME"),
    (r"QOS(MaxWall|TimeLimit)", "time limit", "its time limit is above that " + _OF_QOS, _LIMIT),
    (r"Assoc(MaxWall|iationTimeLimit)", "time limit", "its time limit is above that " + _OF_ASSOC, _LIMIT),
    (r"(QOS|Assoc)Grp\w*Minutes|(QOS|Assoc)GrpWall|QOSUsageThreshold|Job_is_at_or_exceeds", "limit",
     "the CPU, GPU or wall time granted to its QOS, account or user is used up ({reason})",
     _SHOW_QOS + "; " + _SHOW_ASSOC),
    (r"QOSMax\w*(PerJob|PerNode)|QOSMin", "limit", "one job may not ask for so much or so little under the limits "
     + _OF_QOS, "ask for what they allow: " + _SHOW_QOS),
    (r"AssocMax\w*(PerJob|PerNode)", "limit", "one job may not ask for so much under the limits " + _OF_ASSOC,
     "ask for what they allow: " + _SHOW_ASSOC),
    (_USER, "limit", "other jobs of {user} hold all that one user may have under the limits " + _OF_QOS + _OR_ALONE,
     _ENDS + "squeue -u {user}; " + _SHOW_QOS),
    (_ACCOUNT, "limit", "jobs of account {account} hold all that it may have under the limits " + _OF_QOS + _OR_ALONE,
     _ENDS + "squeue -A {account}; " + _SHOW_QOS),
    (_QOS, "limit", "jobs of its QOS hold all that they may have together ({reason})" + _OR_ALONE, _ENDS + _SHOW_QOS),
    (_ASSOC, "limit", "jobs of its account or user hold all that they may have together ({reason})" + _OR_ALONE,
     _ENDS + _SHOW_ASSOC),
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


@dataclass(frozen=True)
class Running:
    """Whose jobs run, and so may count against the limit of another one.

    Attributes:
        users, accounts: of these jobs.
        qos: theirs, and those of the partitions that they are in.
        qos_of: of each partition the QOS, if it has one.
    """

    users: frozenset[str]
    accounts: frozenset[str]
    qos: frozenset[str]
    qos_of: Mapping[str, str]

    def may_count_with(self, job: Job, limit: str) -> bool:
        """Whether any may count with a job against a limit, by the pattern of its reason."""
        if limit == _USER:
            return job.user in self.users
        if limit == _ACCOUNT:
            return job.account in self.accounts
        if limit == _QOS:
            return not self.qos.isdisjoint([job.qos, *(self.qos_of.get(name, "") for name in job.partitions)])
        return bool(self.users)  # of the parents of an account nothing is known here


def running_in(snapshot: Snapshot) -> Running | None:
    """Whose jobs run; None where some may be hidden."""
    if snapshot.hides_jobs:
        return None
    jobs = [job for job in snapshot.jobs if job.is_running]
    qos_of = {partition.name: partition.qos for partition in snapshot.partitions if partition.qos}
    qos = {job.qos for job in jobs} | {qos_of.get(name, "") for job in jobs for name in job.partitions}
    return Running(
        frozenset(job.user for job in jobs), frozenset(job.account for job in jobs), frozenset(qos - {""}), qos_of
    )


def told_by_slurm(job: Job, running: Running | None = None) -> Told | None:
    """What a pending job waits for that is no resource, in words; None if it waits for resources or its turn.

    Args:
        job: a pending one.
        running: see `running_in`.
    """
    if job.is_admitted:
        if job.short_licenses:  # Slurm has not looked so far, or says it at its next look
            text = f"its licenses are taken: {', '.join(job.short_licenses)}"
            return Told("licenses", text, "scontrol show license")
        return None
    quoted_partition = shlex.quote(job.partitions[0])
    if job.barred:
        text = f"none of its partitions admits it, and Slurm has not looked so far: {job.barred}"
        return Told("not allowed", text, f"scontrol show partition {quoted_partition}")
    if job.begins_s is not None:
        begin = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(job.begins_s))
        step = f"scontrol update JobId={job.job_id} StartTime=now"
        return Told("time", f"it may not begin before {begin}", step)
    sentences = {
        "id": job.job_id, "array": job.array_job_id or job.job_id, "dependency": job.dependency or "another job",
        "reason": job.reason, "user": job.user, "account": job.account, "qos": job.qos,
        "partition": job.partitions[0], "reservation": job.reservation,
        "begin": f"it was requeued (start {job.num_restarts + 1}), and Slurm waits two minutes then"
        if job.num_restarts else "its --begin time has not come",
    }  # fmt: skip
    # The next step is a line for a shell: whoever named the account must not have written a part of it.
    quoted = {name: shlex.quote(str(word)) if word else "" for name, word in sentences.items()}
    reservations = [f"scontrol show reservation {shlex.quote(name)}" for name in job.reservations]  # it takes one name
    quoted["reservation"] = "; ".join(reservations) or "scontrol show reservation"
    begin = job.reason.replace(" ", "_")
    for pattern, kind, text, step in _REASONS:
        if pattern.match(begin):
            if running and step.startswith(_ENDS) and not running.may_count_with(job, pattern.pattern):
                shown = "; ".join(part for part in step.removeprefix(_ENDS).split("; ") if part.startswith("sacctmgr"))
                text, step = _ALONE, f"ask for less, unless one has just ended: {shown}"
            return Told(kind, text.format(**sentences), step.format(**quoted))
    return Told("slurm", f"Slurm says {job.reason}", _SHOW_JOB.format(**quoted))
