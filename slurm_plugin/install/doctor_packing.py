"""What is wrong with a cluster's configuration for opportunistic jobs on GPUs in use: (facts) -> findings. Pure.

A part of `hetstream doctor`. `why_no_packing` is also asked by `hetstream packer` before it places anything.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from hetstream.slurm_plugin.client.hostlist import compress
from hetstream.slurm_plugin.client.model import Snapshot
from hetstream.slurm_plugin.client.read import release_of
from hetstream.slurm_plugin.install.findings import Facts, Finding, Level
from hetstream.slurm_plugin.install.node_scripts import RUN_DIR, SCRIPTS, SCRIPTS_VERSION, script_version
from hetstream.slurm_plugin.packing.upgrade import FIRST_THAT_EXEMPTS, exempt_priority

GRES = "opp"
# Since then Slurm gives a job the device files of any GRES; before, of those alone that have a plugin of their own.
_FIRST_WITH_DEVICES = (23, 2)
_MEANS = {
    "Prolog": "nobody writes down who was given which GPU, so that coordinators let no job on",
    "Epilog": "what a job was given is not taken back, and a later process could call itself one of it",
    "TaskProlog": "opportunistic jobs do not hear which GPU they share, and programs start no agent",
}
_GONE = {
    "Prolog": "A node without it is drained by its next job",
    "Epilog": "A node without it is drained by its next job",
    "TaskProlog": "On a node without it no task starts",
}


def constrains_devices(cgroup_conf: str) -> bool:
    """Whether jobs can open only the devices that they were given."""
    return bool(re.search(r"^\s*ConstrainDevices\s*=\s*yes", cgroup_conf, re.MULTILINE | re.IGNORECASE))


def why_no_packing(
    version: str, config: Mapping[str, str], cgroup_conf: str | None, *, has_gres_opp_plugin: bool | None
) -> str:
    """Why opportunistic jobs cannot be placed in this cluster; empty if they can.

    Args:
        version: Slurm's.
        config: `scontrol show config`.
        cgroup_conf: that file; None if it cannot be read here.
        has_gres_opp_plugin: whether gres_opp.so is in PluginDir; None if that cannot be read here.
    """
    if GRES not in config.get("GresTypes", "").split(","):
        return f"GresTypes in slurm.conf has no {GRES}, by which opportunistic jobs stand on GPUs of others"
    constrained = cgroup_conf is not None and constrains_devices(cgroup_conf)
    if release_of(version) < _FIRST_WITH_DEVICES and constrained and not has_gres_opp_plugin:
        return (
            f"with ConstrainDevices, Slurm {version} gives jobs with GRES {GRES} no access to the GPU: that needs "
            "gres_opp.so, a copy of gres_nic.so, in PluginDir, or Slurm 23.02"
        )
    return ""


def packing(facts: Facts) -> Iterator[Finding]:
    """All findings; none where no GPUs are shared."""
    config = facts.snapshot.config
    if GRES not in config.get("GresTypes", "").split(","):
        return
    reason = why_no_packing(
        facts.snapshot.version, config, facts.cgroup_conf, has_gres_opp_plugin=facts.has_gres_opp_plugin
    )
    if reason:
        yield Finding(
            Level.PROBLEM, "packing", facts.snapshot.version, reason,
            "cp PLUGINDIR/gres_nic.so PLUGINDIR/gres_opp.so on all hosts, or Slurm 23.02; until then nobody is placed",
        )  # fmt: skip
    yield from _slots(facts)
    yield from _rules(config)
    yield from _upgraded(facts.snapshot)
    for option in SCRIPTS:
        yield from _script(option, facts.node_scripts.get(option, {}))
    if facts.is_gpu_node:
        yield from _node(facts)


def _slots(facts: Facts) -> Iterator[Finding]:
    """Type pN is GPU N, and the packer takes the GPU from that name."""
    wrong, doubled = [], []
    for node in facts.snapshot.nodes:
        types = {gres.type for gres in node.gres if gres.name == GRES}
        num_gpus = sum(gres.count for gres in node.gres if gres.name == "gpu")
        if types and types != {f"p{number}" for number in range(num_gpus)}:
            wrong.append(node.name)
        if any(gres.name == GRES and gres.count > 1 for gres in node.gres):
            doubled.append(node.name)
    if wrong:
        yield Finding(
            Level.PROBLEM, f"Gres={GRES}", compress(wrong), f"not {GRES} of types p0, p1, ..., one for each GPU",
            f"Gres=gpu:2,{GRES}:p0:1,{GRES}:p1:1 on NodeName, and lines Name={GRES} Type=p0 File=... in gres.conf",
        )  # fmt: skip

    if doubled and facts.cgroup_conf is not None and constrains_devices(facts.cgroup_conf):
        yield Finding(
            Level.PROBLEM, f"Gres={GRES}", compress(doubled),
            "with ConstrainDevices, a second slot keeps jobs from the GPU that they have: Slurm denies its file",
            f"one slot for each GPU: {GRES}:p0:1",
        )  # fmt: skip


def _rules(config: Mapping[str, str]) -> Iterator[Finding]:
    if not re.search(r"\blua\b", config.get("JobSubmitPlugins", "")):
        yield Finding(
            Level.PROBLEM, "JobSubmitPlugins", config.get("JobSubmitPlugins", "") or "none",
            "nobody holds opportunistic jobs, and keeps their owners from starting them",
            "JobSubmitPlugins=lua, and `opportunistic` in policy.lua",
        )  # fmt: skip
    tracks = config.get("ProctrackType", "")
    if tracks and tracks != "proctrack/cgroup":
        yield Finding(
            Level.WARNING, "ProctrackType", tracks,
            "whose a process on a GPU is, it says itself: an opportunistic one without an agent may hide that",
            "ProctrackType=proctrack/cgroup",
        )  # fmt: skip
    kind, mode = config.get("PreemptType", ""), config.get("PreemptMode", "")
    if kind not in ("preempt/none", "(null)", "") and "REQUEUE" not in mode.upper():
        yield Finding(
            Level.WARNING, "PreemptMode", mode or "none", "opportunistic jobs that give way do not come back",
            "PreemptMode=REQUEUE",
        )  # fmt: skip


def _upgraded(snapshot: Snapshot) -> Iterator[Finding]:
    """An upgraded job stays in its partition, whose jobs give way."""
    said, works = snapshot.config.get("PreemptParameters", ""), exempt_priority(snapshot) is not None
    if snapshot.config.get("PreemptType", "") == "preempt/partition_prio" and not works:
        newer = release_of(snapshot.version) < FIRST_THAT_EXEMPTS
        yield Finding(
            Level.NOTE, "PreemptParameters", said or "none",
            "a job that was upgraded is still requeued if a guaranteed one needs its CPUs",
            f"{'Slurm 23.02, and ' if newer else ''}PreemptParameters=min_exempt_priority=4294967000",
        )  # fmt: skip


def _script(option: str, found: Mapping[str, str | None]) -> Iterator[Finding]:
    place = (
        f"{option}=/usr/local/share/hetstream/prolog/{SCRIPTS[option]} (hetstream install), or a script that runs it"
    )
    if not found:
        yield Finding(Level.PROBLEM, option, "none", _MEANS[option], place)
        return
    programs = ", ".join(found)
    missing = [path for path, text in found.items() if text is None]
    versions = [version for text in found.values() if (version := script_version(text or "")) is not None]
    if missing:
        yield Finding(
            Level.WARNING, option, ", ".join(missing), f"cannot be read here. {_GONE[option]}",
            f"look on each GPU node: ls -l {missing[0]}",
        )  # fmt: skip
    elif not versions:
        yield Finding(Level.NOTE, option, programs, "not hetstream's own: it must run that, too", place)
    elif versions != [SCRIPTS_VERSION]:
        yield Finding(
            Level.PROBLEM, option, programs, f"of version {versions[0]}, and this hetstream has {SCRIPTS_VERSION}",
            "hetstream install on each GPU node",
        )  # fmt: skip


def _node(facts: Facts) -> Iterator[Finding]:
    path, uid = facts.coordinator_socket
    if uid is None:
        yield Finding(
            Level.WARNING, "coordinator", path, "no socket: opportunistic jobs on this node pause",
            "hetstream gpu coordinator",
        )  # fmt: skip
    elif uid not in (0, facts.coordinator_uid):
        yield Finding(
            Level.WARNING, "coordinator", f"{path} of user {uid}", "jobs do not trust this user, and do not ask him",
            f"HETSTREAM_GPU_COORDINATOR_UID={uid} in /etc/hetstream/daemon.env on GPU nodes, if he is the right one",
        )  # fmt: skip
    if facts.uncounted_gpus:
        yield Finding(
            Level.WARNING, "coordinator", ", ".join(facts.uncounted_gpus),
            "nobody counts which process holds memory of it: who drops its agent is not found, so only jobs that keep "
            "theirs are held back",
            "share it by its UUID (nvidia-smi -L), with hetstream[nvml]; of an instance (MIG) whose driver does not "
            "tell that, the whole GPU",
        )  # fmt: skip
    if facts.is_sharing_closed:
        closed = f"{RUN_DIR}/grants-incomplete"
        yield Finding(
            Level.WARNING, "grants", closed, "a guaranteed job could not be written down: nobody shares a GPU here",
            f"journalctl -t hetstream-prolog; when no job runs here: rm -r {closed}",
        )  # fmt: skip
