"""What is wrong with a cluster's configuration for hetstream, and the fix: (facts) -> findings. Pure.

Called by `hetstream doctor`, which gathers the facts. It changes nothing and repairs nothing.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator

from hetstream.slurm_plugin.client.hidden import hides_nodes
from hetstream.slurm_plugin.client.hostlist import compress, expand
from hetstream.slurm_plugin.client.read import release_of
from hetstream.slurm_plugin.install.doctor_gpus import HostGpus, host_gpus
from hetstream.slurm_plugin.install.doctor_packing import constrains_devices, packing
from hetstream.slurm_plugin.install.findings import Facts, Finding, Level
from hetstream.slurm_plugin.install.lua_settings import OPTIONS, WITHOUT

DEFAULT_BF_INTERVAL_S = 30
GOOD_BF_INTERVAL_S = 5
# What the modules in slurm_plugin/lua are written for, and tested with.
LUA_VERSIONS = ("5.1", "5.2", "5.3", "5.4")
# So many nodes of one kind of trouble are named.
_MOST_NODES = 8
LUA_PLUGINS = {"job_submit": "JobSubmitPlugins", "cli_filter": "CliFilterPlugins"}


def examine(facts: Facts, gpus: HostGpus | None = None) -> tuple[Finding, ...]:
    """All findings, the worst first.

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
        others = f"; so do {len(differ) - 1} other node(s)" if len(differ) > 1 else ""
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
        for node in _expanded(row.get("nodename", "")) or ("",):
            for file in _expanded(row.get("file", "")):
                seen[node, row.get("name", ""), file] += 1
    doubled = sorted({(name, file) for (_, name, file), count in seen.items() if count > 1})
    if doubled:
        shown = ", ".join(f"{name} {file}" for name, file in doubled[:3])
        yield Finding(
            Level.WARNING, "gres.conf", shown, "the same file twice for one GRES: slurmd of 26.05 refuses to start",
            "a symbolic link for the second slot",
        )  # fmt: skip


def _expanded(text: str) -> tuple[str, ...]:
    try:
        return expand(text)
    except ValueError:
        return ()


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
    """The versions of Lua that a plugin of Slurm names: of the library that it is linked to or opens.

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
                "Slurm built with one of these, or hetstream uninstall",
            )  # fmt: skip


def _lua_files(facts: Facts) -> Iterator[Finding]:
    """A hook that is asked for and gone stops all submissions; one whose modules are gone does nothing."""
    for name, paths in facts.lua_missing.items():
        yield Finding(
            Level.PROBLEM, name, f"{', '.join(paths)} not found here", f"{OPTIONS[name]}=lua: {WITHOUT[name]}",
            f"take lua out of {OPTIONS[name]} in slurm.conf and run scontrol reconfigure, or put the file back: "
            "hetstream install",
        )  # fmt: skip
    for name, paths in facts.lua_idle.items():
        yield Finding(
            Level.WARNING, name, f"{', '.join(paths)} not found here", "hetstream's hook does nothing on this host",
            "hetstream install --prefix DIR, on this host too",
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
