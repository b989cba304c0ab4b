"""What is wrong with a cluster's configuration for hetstream, and the fix: (facts) -> findings. Pure.

Called by `hetstream doctor`, which gathers the facts. It changes nothing and repairs nothing.
"""

from __future__ import annotations

import enum
import os
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hetstream.base.text import count_words
from hetstream.slurm_plugin.client.model import Snapshot
from hetstream.slurm_plugin.client.read import expanded, hides_nodes, release_of
from hetstream.slurm_plugin.client.slurm_units import compress
from hetstream.slurm_plugin.install.units import RUN_DIR, SCRIPTS, SCRIPTS_VERSION, script_version
from hetstream.slurm_plugin.packing.quota_packer import FIRST_THAT_EXEMPTS, exempt_priority

# What `hetstream doctor` looks at, and what it finds. Pure data.


class Level(enum.Enum):
    """How bad a finding is."""

    PROBLEM = "problem"  # something of hetstream does not work
    WARNING = "warning"  # it works badly, or could surprise
    NOTE = "note"  # a feature is off


@dataclass(frozen=True)
class Facts:
    """What is examined.

    Attributes:
        snapshot: the cluster.
        client_version: of Slurm's commands here.
        gres_conf, cgroup_conf: those files; None if they cannot be read here.
        unresolved: host names that have no address here.
        lua_needed: of each Lua file that the configuration asks for, itself and what it loads.
        lua_missing: of the same, which files that it needs are not here.
        lua_idle: of the same, which of hetstream's modules are not here.
        node_scripts: of each of Slurm's `Prolog`, `Epilog` and `TaskProlog` that is set, the text of the program, by
            its path; None for one that is not here or cannot be read.
        has_gres_opp_plugin: whether gres_opp.so is in PluginDir; None if that cannot be read here.
        is_gpu_node: whether this host is a node with shared GPUs.
        coordinator_socket: where a coordinator listens on such a node, and the user who does; None: nobody.
        coordinator_uid: the user that jobs here trust as a coordinator, beside root.
        uncounted_gpus: shared here, of which nobody counts which process holds how much memory.
        is_sharing_closed: whether the Prolog has closed this node for sharing.
        lua: of each of Slurm's Lua plugins that is here, the versions of Lua that it names; None if PluginDir cannot be
            read here.
        pyslurm: its version in this Python; None: it is not installed.
    """

    snapshot: Snapshot
    client_version: str
    gres_conf: str | None
    cgroup_conf: str | None
    unresolved: tuple[str, ...] = ()
    lua: Mapping[str, tuple[str, ...]] | None = None
    lua_needed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    lua_missing: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    lua_idle: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    node_scripts: Mapping[str, Mapping[str, str | None]] = field(default_factory=dict)
    has_gres_opp_plugin: bool | None = None
    is_gpu_node: bool = False
    coordinator_socket: tuple[str, int | None] = ("", None)
    coordinator_uid: int | None = None
    uncounted_gpus: tuple[str, ...] = ()
    is_sharing_closed: bool = False
    pyslurm: str | None = None


@dataclass(frozen=True)
class Finding:
    """One thing that was found.

    Attributes:
        check: its name, stable.
        seen: the value seen.
        text: what it means.
        fix: what to change or run.
    """

    level: Level
    check: str
    seen: str
    text: str
    fix: str


# What is wrong with the GPUs of this host for jobs that share them: (readings) -> findings. Pure but for `read_gpus`.
#
# A part of `hetstream doctor`, where that runs on a node with GPUs.

_QUERY = ["nvidia-smi", "--query-gpu=uuid,mig.mode.current,compute_mode", "--format=csv,noheader"]
_ANSWER_S = 20.0
# Where MPS has its pipes if CUDA_MPS_PIPE_DIRECTORY does not say.
_MPS_DIRECTORY = "/tmp/nvidia-mps"


@dataclass(frozen=True)
class HostGpus:
    """The GPUs of this host.

    Attributes:
        divided: by UUID, whether MIG divides it.
        modes: by UUID, its compute mode, as nvidia-smi has it: `Default`, `Exclusive_Process`, `Prohibited`.
        mps: where MPS listens; empty: nowhere.
    """

    divided: Mapping[str, bool]
    modes: Mapping[str, str]
    mps: str = ""


def read_gpus(environ: Mapping[str, str] = os.environ) -> HostGpus | None:
    """Return what nvidia-smi says; None where it says nothing."""
    try:
        done = subprocess.run(_QUERY, capture_output=True, text=True, timeout=_ANSWER_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    pipes = Path(environ.get("CUDA_MPS_PIPE_DIRECTORY", _MPS_DIRECTORY))
    return parse_gpus(done.stdout, str(pipes) if (pipes / "control").exists() else "")


def parse_gpus(answer: str, mps: str = "") -> HostGpus:
    """Read the lines of nvidia-smi; those of another form do not count."""
    rows = [[word.strip() for word in line.split(",")] for line in answer.splitlines()]
    rows = [row for row in rows if len(row) == len(_QUERY[1].split(","))]
    return HostGpus({name: mig == "Enabled" for name, mig, _ in rows}, {name: mode for name, _, mode in rows}, mps)


def host_gpus(gpus: HostGpus) -> Iterator[Finding]:
    """Yield all findings."""
    exclusive = sorted(name for name, mode in gpus.modes.items() if mode != "Default")
    if exclusive:
        yield Finding(
            Level.PROBLEM, "compute mode", f"{gpus.modes[exclusive[0]]} of {', '.join(exclusive)}",
            "a second job on the GPU is refused by the driver", f"nvidia-smi -i {exclusive[0]} -c DEFAULT",
        )  # fmt: skip
    if gpus.mps:
        yield Finding(
            Level.WARNING, "MPS", gpus.mps,
            "a fault of one job ends all jobs on its GPU, a guaranteed one, too",
            "echo quit | nvidia-cuda-mps-control; jobs take turns without it",
        )  # fmt: skip
    divided = sorted(name for name, is_divided in gpus.divided.items() if is_divided)
    if divided and len(divided) < len(gpus.divided):
        yield Finding(
            Level.WARNING, "MIG", f"divides {len(divided)} of {len(gpus.divided)} GPUs",
            f"{', '.join(divided)} cannot be shared as a whole",
            "give the coordinator the instances, --gpu MIG-... of nvidia-smi -L; or nvidia-smi -i GPU -mig 0",
        )  # fmt: skip


# What is wrong with a cluster's configuration for opportunistic jobs on GPUs in use: (facts) -> findings. Pure.
#
# A part of `hetstream doctor`. `why_no_packing` is also asked by `hetstream gpu pack` before it places anything.

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
    """Return whether jobs can open only the devices that they were given."""
    return bool(re.search(r"^\s*ConstrainDevices\s*=\s*yes", cgroup_conf, re.MULTILINE | re.IGNORECASE))


def why_no_packing(
    version: str, config: Mapping[str, str], cgroup_conf: str | None, *, has_gres_opp_plugin: bool | None
) -> str:
    """Return why opportunistic jobs cannot be placed in this cluster; empty if they can.

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
    """Yield all findings; none where no GPUs are shared."""
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
    script = f"/usr/local/share/hetstream/prolog/{SCRIPTS[option]}"
    place = f"{option}={script} (hetstream site install), or a script that runs it"
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
            "hetstream site install on each GPU node",
        )  # fmt: skip


def _node(facts: Facts) -> Iterator[Finding]:
    path, uid = facts.coordinator_socket
    if uid is None:
        yield Finding(
            Level.WARNING, "coordinator", path, "no socket: opportunistic jobs on this node pause",
            "hetstream internal coordinator",
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


# Which files of ours slurm.conf asks for, and what becomes of jobs when one is not there. Reads files.
#
# Called by `hetstream site uninstall` and `hetstream doctor`. With `CliFilterPlugins=lua` and no cli_filter.lua beside
# slurm.conf every sbatch, salloc and srun of that host fails; with `JobSubmitPlugins=lua` and no job_submit.lua
# slurmctld does not start. A node whose Prolog or Epilog is not there is drained by its next job.

# Slurm's file -> the option of slurm.conf that asks for it.
OPTIONS = {"cli_filter.lua": "CliFilterPlugins", "job_submit.lua": "JobSubmitPlugins"}
WITHOUT = {
    "cli_filter.lua": "every sbatch, salloc and srun on this host fails",
    "job_submit.lua": "slurmctld does not start",
}
_MOST_INCLUDED = 100


def asks_for_lua(text: str, option: str) -> bool:
    """Return whether lines of slurm.conf, or of `scontrol show config`, name Lua plugins of a kind; the last one
    counts.
    """
    found = re.findall(rf"^[ \t]*{option}[ \t]*=[ \t]*([^#\s]*)", text, re.MULTILINE | re.IGNORECASE)
    return bool(found) and bool(re.search(r"(?:^|[,/])lua(?:,|$)", found[-1]))


def asked_for(directory: Path) -> frozenset[str]:
    """Return the Lua files that slurm.conf of this directory asks for, with the files that it includes."""
    text = "\n".join(_texts(directory))
    return frozenset(name for name, option in OPTIONS.items() if asks_for_lua(text, option))


def programs_asked_for(directory: Path) -> dict[str, str]:
    """Return the programs that slurm.conf of this directory has nodes run for each job: option by path."""
    text = "\n".join(_texts(directory))
    found = re.findall(r"^[ \t]*(Prolog|Epilog|TaskProlog)[ \t]*=[ \t]*([^#\s]+)", text, re.MULTILINE | re.IGNORECASE)
    return {path: option for option, path in found}


def missing_files(hook: Path) -> list[str]:
    """Return what a hook loads without which it fails: itself, and the site's own file that it names.

    Raises:
        OSError: the directory, or the hook, cannot be read here.
    """
    try:
        text = hook.read_text(errors="replace")
    except FileNotFoundError:
        hook.parent.stat()
        return [str(hook)]
    loaded = re.findall(r'^dofile\("([^"]+)"\)', text, re.MULTILINE)
    return [path for path in loaded if not Path(path).exists()]


def modules_of(hook: Path) -> list[str]:
    """hetstream's files that a hook loads; without them it does nothing."""
    try:
        text = hook.read_text(errors="replace")
    except OSError:
        return []
    return re.findall(r'pcall\(dofile, "([^"]+)"\)', text)


def missing_modules(hook: Path) -> list[str]:
    """Return those of them that are not there."""
    return [path for path in modules_of(hook) if not Path(path).exists()]


def _texts(directory: Path) -> Iterator[str]:
    waiting, seen = [directory / "slurm.conf"], set[Path]()
    while waiting and len(seen) < _MOST_INCLUDED:
        path = waiting.pop(0)
        if path in seen:
            continue
        seen.add(path)
        try:
            text = path.read_text(errors="replace")
        except OSError:
            continue
        yield text
        included = re.findall(r"^[ \t]*include[ \t]+(\S+)", text, re.MULTILINE | re.IGNORECASE)
        waiting += [directory / name for name in included]


DEFAULT_BF_INTERVAL_S = 30
GOOD_BF_INTERVAL_S = 5
# What the modules in slurm_plugin/lua are written for, and tested with.
LUA_VERSIONS = ("5.1", "5.2", "5.3", "5.4")
# So many nodes of one kind of trouble are named.
_MOST_NODES = 8
LUA_PLUGINS = {"job_submit": "JobSubmitPlugins", "cli_filter": "CliFilterPlugins"}


def examine(facts: Facts, gpus: HostGpus | None = None) -> tuple[Finding, ...]:
    """Return all findings, the worst first.

    Args:
        facts: on the cluster.
        gpus: of this host; None: it has none.
    """
    checks = [check for check in _CHECKS if check not in _OF_NODES] if facts.snapshot.without_nodes else _CHECKS
    found = [finding for check in checks for finding in check(facts)]
    found += host_gpus(gpus) if gpus else ()
    levels = list(Level)
    return tuple(sorted(found, key=lambda finding: levels.index(finding.level)))


def _scheduler(facts: Facts) -> Iterator[Finding]:
    kind = facts.snapshot.config.get("SchedulerType", "")
    if kind != "sched/backfill":
        yield Finding(
            Level.PROBLEM, "SchedulerType", kind, "heterogeneous jobs start only through the backfill scheduler",
            "SchedulerType=sched/backfill",
        )  # fmt: skip
        return
    match = re.search(r"\bbf_interval=(\d+)", facts.snapshot.config.get("SchedulerParameters", ""))
    interval_s = int(match[1]) if match else DEFAULT_BF_INTERVAL_S
    if interval_s > GOOD_BF_INTERVAL_S:
        yield Finding(
            Level.WARNING, "bf_interval", f"{interval_s} s",
            f"a heterogeneous job waits up to {interval_s} s although there is room",
            f"SchedulerParameters=...,bf_interval={GOOD_BF_INTERVAL_S} or less, as far as a cycle takes less (sdiag)",
        )  # fmt: skip


def _select(facts: Facts) -> Iterator[Finding]:
    config = facts.snapshot.config
    kind = config.get("SelectType", "")
    if kind != "select/cons_tres":
        yield Finding(
            Level.PROBLEM, "SelectType", kind, "jobs cannot share nodes by CPU and GPU", "SelectType=select/cons_tres"
        )
    parameters = config.get("SelectTypeParameters", "")
    if "MEMORY" not in parameters.upper():
        yield Finding(
            Level.WARNING, "SelectTypeParameters", parameters,
            "memory is not allocated: data workers can exhaust the memory of other jobs",
            "SelectTypeParameters=CR_Core_Memory",
        )  # fmt: skip


def _gres(facts: Facts) -> Iterator[Finding]:
    known = set(facts.snapshot.config.get("GresTypes", "").split(","))
    on_nodes = {gres.name for node in facts.snapshot.nodes for gres in node.gres}
    missing = sorted(on_nodes - known)
    if missing:
        yield Finding(
            Level.PROBLEM, "GresTypes", ",".join(sorted(known)), f"nodes have {', '.join(missing)}, which is not in it",
            f"GresTypes=...,{','.join(missing)}",
        )  # fmt: skip
    if "gpu" not in on_nodes:
        yield Finding(
            Level.NOTE, "Gres", "no gpu", "no node has GPUs: there is nothing to stream to", "Gres=gpu:N on NodeName"
        )


def _gpus_in_use(facts: Facts) -> Iterator[Finding]:
    """Slurm counts the GPUs in use twice, and of two numbers one is wrong."""
    differ = [
        (node, node.gpus_in_use(), node.gpus_allocated)
        for node in facts.snapshot.nodes
        if node.gpus_allocated is not None and node.gpus_allocated != node.gpus_in_use()
    ]
    for node, used, allocated in differ[:_MOST_NODES]:
        others = f"; so do {count_words(len(differ) - 1, 'other node')}" if len(differ) > 1 else ""
        yield Finding(
            Level.WARNING, "GPUs in use", f"{node.name}: {used} by GresUsed, {allocated} by AllocTRES",
            f"Slurm's two counts of one node differ{others}. hetstream takes the larger one, so that no GPU is shown "
            "as free that a job holds",
            f"scontrol -d show node {node.name}; squeue -w {node.name}. If no job explains it, restart slurmctld",
        )  # fmt: skip


def _gres_conf(facts: Facts) -> Iterator[Finding]:
    if facts.gres_conf is None:
        yield Finding(
            Level.NOTE, "gres.conf", "not found here", "duplicates in it were not looked for", "run it on a node"
        )
        return
    seen: Counter[tuple[str, str, str]] = Counter()
    for line in facts.gres_conf.splitlines():
        fields = dict(re.findall(r"(\w+)=(\S+)", line.split("#")[0]))
        row = {key.lower(): value for key, value in fields.items()}
        for node in expanded(row.get("nodename", "")) or ("",):
            for file in expanded(row.get("file", "")):
                seen[node, row.get("name", ""), file] += 1
    doubled = sorted({(name, file) for (_, name, file), count in seen.items() if count > 1})
    if doubled:
        shown = ", ".join(f"{name} {file}" for name, file in doubled[:3])
        yield Finding(
            Level.WARNING, "gres.conf", shown, "the same file twice for one GRES: slurmd of 26.05 refuses to start",
            "a symbolic link for the second slot",
        )  # fmt: skip


def _devices(facts: Facts) -> Iterator[Finding]:
    if facts.cgroup_conf is None:
        yield Finding(
            Level.NOTE, "cgroup.conf", "not found here", "whether devices are constrained is not known",
            "run it on a node",
        )  # fmt: skip
        return
    if not constrains_devices(facts.cgroup_conf):
        yield Finding(
            Level.WARNING, "ConstrainDevices", "no", "jobs can use GPUs that others hold", "ConstrainDevices=yes"
        )


def _preemption(facts: Facts) -> Iterator[Finding]:
    kind = facts.snapshot.config.get("PreemptType", "")
    if kind in ("preempt/none", "(null)", ""):
        yield Finding(
            Level.NOTE, "PreemptType", kind or "none", "opportunistic jobs could not give way to others",
            "PreemptType=preempt/partition_prio, PreemptMode=REQUEUE",
        )  # fmt: skip


def _prolog(facts: Facts) -> Iterator[Finding]:
    flags = facts.snapshot.config.get("PrologFlags", "")
    if "alloc" not in flags.lower():
        yield Finding(
            Level.NOTE, "PrologFlags", flags or "none",
            "Prolog runs with a node's first step, after the batch script has asked for its GPU", "PrologFlags=Alloc",
        )  # fmt: skip


def _privacy(facts: Facts) -> Iterator[Finding]:
    private = facts.snapshot.config.get("PrivateData", "none")
    hidden = sorted(set(private.split(",")) - {"", "cloud", "none"})
    not_looked_at = ", and from who runs this: no node was looked at" if facts.snapshot.without_nodes else ""
    looked_up = "; a job looks up its node's address by name, as Slurm tells it none: all nodes must resolve NodeName"
    if hidden:
        yield Finding(
            Level.WARNING, "PrivateData", private,
            f"{', '.join(hidden)} of others are hidden from ordinary users{not_looked_at}"
            f"{looked_up if hides_nodes(facts.snapshot.config) else ''}",
            "run the commands for admins as operator or SlurmUser",
        )  # fmt: skip


def _pyslurm(facts: Facts) -> Iterator[Finding]:
    if facts.pyslurm is not None and facts.snapshot.source != "pyslurm":
        yield Finding(
            Level.NOTE, "pyslurm", facts.pyslurm,
            f"it is not used with Slurm {facts.snapshot.version}: pyslurm 22.5 is, where slurmctld is 22.05. Slurm's "
            "commands read the same", "nothing, or pip uninstall pyslurm",
        )  # fmt: skip


def _accounting(facts: Facts) -> Iterator[Finding]:
    config = facts.snapshot.config
    kind = config.get("AccountingStorageType", "")
    if not kind.endswith("slurmdbd"):
        yield Finding(
            Level.NOTE, "AccountingStorageType", kind or "none",
            f"hetstream util and advise know running jobs and the last {config.get('MinJobAge', '300 sec')} only",
            "slurmdbd",
        )  # fmt: skip
    gather = config.get("JobAcctGatherType", "")
    if gather in ("jobacct_gather/none", "(null)", ""):
        yield Finding(
            Level.NOTE, "JobAcctGatherType", gather or "none", "how much CPU time jobs use is not known",
            "JobAcctGatherType=jobacct_gather/cgroup",
        )  # fmt: skip


def lua_versions(plugin: bytes) -> tuple[str, ...]:
    """Return the versions of Lua that a plugin of Slurm names: of the library that it is linked to or opens.

    Args:
        plugin: the bytes of `job_submit_lua.so` or `cli_filter_lua.so`.
    """
    found = re.findall(rb"\bliblua(?:-|\.so\.)?(5\.?\d)\b", plugin)
    return tuple(sorted({(text if b"." in text else text[:1] + b"." + text[1:]).decode() for text in found}))


def _lua(facts: Facts) -> Iterator[Finding]:
    config = facts.snapshot.config
    used = [name for name, option in LUA_PLUGINS.items() if re.search(r"\blua\b", config.get(option, ""))]
    if not used:
        return
    if facts.lua is None:
        yield Finding(
            Level.NOTE, "Lua", "PluginDir cannot be read here", "which Lua Slurm's plugins use is not known",
            "run it on slurmctld's host",
        )  # fmt: skip
        return
    for name in used:
        if name not in facts.lua:
            yield Finding(
                Level.WARNING, "Lua", f"{name}_lua.so is not in PluginDir here",
                f"{LUA_PLUGINS[name]}=lua cannot be loaded on this host", "Slurm's packages with Lua",
            )  # fmt: skip
            continue
        unknown = [version for version in facts.lua[name] if version not in LUA_VERSIONS]
        if unknown and not set(facts.lua[name]) & set(LUA_VERSIONS):
            yield Finding(
                Level.PROBLEM, "Lua", f"{name}_lua.so uses Lua {', '.join(unknown)}",
                f"hetstream's modules are for Lua {LUA_VERSIONS[0]} to {LUA_VERSIONS[-1]}",
                "Slurm built with one of these, or hetstream site uninstall",
            )  # fmt: skip


def _lua_files(facts: Facts) -> Iterator[Finding]:
    """A hook that is asked for and gone stops all submissions; one whose modules are gone does nothing."""
    for name, paths in facts.lua_missing.items():
        yield Finding(
            Level.PROBLEM, name, f"{', '.join(paths)} not found here", f"{OPTIONS[name]}=lua: {WITHOUT[name]}",
            f"take lua out of {OPTIONS[name]} in slurm.conf and run scontrol reconfigure, or put the file back: "
            "hetstream site install",
        )  # fmt: skip
    for name, paths in facts.lua_idle.items():
        yield Finding(
            Level.WARNING, name, f"{', '.join(paths)} not found here", "hetstream's hook does nothing on this host",
            "hetstream site install --prefix DIR, on this host too",
        )  # fmt: skip


def _lua_hosts(facts: Facts) -> Iterator[Finding]:
    """One host was looked at. Slurm's clients run on others, too, and nobody tells of a file that is missing there."""
    paths = facts.lua_needed.get("cli_filter.lua", ())
    if not paths:
        return
    nodes = compress(node.name for node in facts.snapshot.nodes)
    yield Finding(
        Level.NOTE, "cli_filter.lua", f"login hosts, and {nodes}",
        f"each host on which users run sbatch, salloc or srun, also inside jobs, needs {paths[0]}, or they fail "
        "there. Where the other files are missing, jobs are submitted as they are. Only this host was looked at",
        f"on each of them: ls -l {' '.join(paths)}",
    )  # fmt: skip


def _hosts(facts: Facts) -> Iterator[Finding]:
    if facts.unresolved:
        yield Finding(
            Level.WARNING, "host names", compress(facts.unresolved),
            "no address here: trainers and data workers would not find each other, and slurmctld of 26.05 blocks for "
            "seconds when a step of such a host is cancelled", "/etc/hosts or DNS",
        )  # fmt: skip


def _nodes(facts: Facts) -> Iterator[Finding]:
    out = [node for node in facts.snapshot.nodes if not node.is_usable]
    if out:
        reasons = sorted({node.reason for node in out if node.reason})
        yield Finding(
            Level.WARNING, "nodes", compress(node.name for node in out),
            f"out of use{': ' + '; '.join(reasons[:3]) if reasons else ''}", "sinfo -R",
        )  # fmt: skip
    unset = [node.name for node in facts.snapshot.nodes if node.memory_mb <= 1]
    if unset:
        yield Finding(
            Level.PROBLEM, "RealMemory", compress(unset), "jobs that ask for memory cannot start there",
            "RealMemory=MB on NodeName; slurmd -C shows it",
        )  # fmt: skip


def _versions(facts: Facts) -> Iterator[Finding]:
    server = facts.snapshot.version
    if release_of(facts.client_version) > release_of(server):
        yield Finding(
            Level.PROBLEM, "version", f"commands {facts.client_version}, slurmctld {server}",
            "commands may be older than slurmctld, never newer", "use the cluster's own commands",
        )  # fmt: skip
    other = [node.name for node in facts.snapshot.nodes if node.version and node.version != server]
    if other:
        yield Finding(Level.NOTE, "slurmd versions", compress(other), f"not slurmctld's {server}", "finish the upgrade")


def _partitions(facts: Facts) -> Iterator[Finding]:
    down = [partition.name for partition in facts.snapshot.partitions if not partition.is_up]
    if down:
        yield Finding(
            Level.WARNING, "partitions", ",".join(down), "not up: no job starts there",
            f"scontrol update PartitionName={down[0]} State=UP",
        )  # fmt: skip
    if facts.snapshot.partitions and not any(partition.is_default for partition in facts.snapshot.partitions):
        yield Finding(
            Level.NOTE, "partitions", "no default", "scripts must name the data workers' partition", "Default=YES"
        )


_CHECKS: tuple[Callable[[Facts], Iterator[Finding]], ...] = (
    _versions, _scheduler, _select, _gres, _gpus_in_use, _gres_conf, _devices, _preemption, _prolog, _privacy,
    _pyslurm, _accounting, _lua, _lua_files, _lua_hosts, _hosts, _nodes, _partitions, packing,
)  # fmt: skip
# Without nodes there is nothing to look at.
_OF_NODES = (_gres, _gpus_in_use, _lua_hosts, _nodes)
NUM_CHECKS = len(_CHECKS) + 1  # the host's GPUs
