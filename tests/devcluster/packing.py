"""Sharing of GPUs in a throw-away cluster, by `up --packing`: from its spec to text, paths and commands. Pure.

Called by render.py, boot.py and site_setup.py. Each GPU of a node is an emulated one, on which real programs share one
core (`hetjob/gpu/`). As on a site, each node has a coordinator; here it runs as root, like all of Slurm's
daemons. What there is, is told in docs/devcluster.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from hetstream.slurm_plugin.install.units import SCRIPTS, node_script
from hetstream.slurm_plugin.packing.quota_packer import FIRST_THAT_EXEMPTS
from tests.devcluster.spec import ClusterSpec, NodeGroup

# The partition of opportunistic jobs, and the GRES by which they stand on GPUs that others hold: type pN is GPU N.
PARTITION, GRES = "opp", "opp"
# So many opportunistic jobs at a time. Slurm of 26.05 refuses a device file that is named twice, but not a link to it.
# With constrained devices that takes the GPU from the jobs that have it: Slurm denies what is behind the other slot.
SLOTS_PER_GPU, CONSTRAINED_SLOTS_PER_GPU = 2, 1
GUARANTEED_TIER, OPPORTUNISTIC_TIER = 10, 1
# Beside root, who may place opportunistic jobs: Debian's user "daemon". Slurm lets him with accounting only.
PACKER_UID = 1
# Tests have no half minute.
UNPLACED_S = 3
GPU_MEMORY_MIB, GPU_SEGMENT_KIB, GPU_BUS_MIB_PER_S = 1024, 256, 1024


@dataclass(frozen=True)
class SharingNode:
    """Where one node has what belongs to sharing.

    Attributes:
        name: the node.
        directory: of all of it.
        gpus: how many it has.
    """

    name: str
    directory: Path
    num_gpus: int

    @property
    def grants(self) -> Path:
        return self.directory / "grants"

    @property
    def environment(self) -> Path:
        return self.directory / "environment"

    @property
    def socket(self) -> Path:
        return self.directory / "gpu.sock"

    def gpu_file(self, number: int) -> Path:
        return self.directory / f"gpu{number}"

    @property
    def coordinator(self) -> tuple[str, ...]:
        """What `hetstream` is called with to coordinate it."""
        gpus = [f"--gpu=emulation:{self.gpu_file(number)}" for number in range(self.num_gpus)]
        return ("internal", "coordinator", "--grants", str(self.grants), "--socket", str(self.socket), *gpus)


def sharing_nodes(spec: ClusterSpec) -> tuple[SharingNode, ...]:
    """The GPU nodes, where GPUs are shared."""
    if not spec.packing:
        return ()
    return tuple(
        SharingNode(node, spec.sharing_dir / node, group.gpus)
        for group in spec.groups
        if group.gpus
        for node in group.nodes
    )


def settings(spec: ClusterSpec, version: tuple[int, ...]) -> Iterator[str]:
    """Lines of slurm.conf for a Slurm of this version."""
    if spec.packing:
        yield f"Prolog={spec.state_dir / SCRIPTS['Prolog']}"
        yield f"Epilog={spec.state_dir / SCRIPTS['Epilog']}"
        yield "PrologFlags=Alloc"
        yield "PreemptType=preempt/partition_prio"
        yield "PreemptMode=REQUEUE"
        if version >= FIRST_THAT_EXEMPTS:  # slurmctld of an older one would not start
            yield "PreemptParameters=min_exempt_priority=4294967000"


def node_gres(spec: ClusterSpec, group: NodeGroup) -> str:
    """What stands behind a node's GPUs in its line."""
    count = 1 + len(links(spec, 0))
    return "".join(f",{GRES}:p{number}:{count}" for number in range(group.gpus)) if spec.packing else ""


def gres_lines(spec: ClusterSpec, group: NodeGroup, nodes: str) -> Iterator[str]:
    """Lines of gres.conf.

    Args:
        spec: the cluster.
        group: of nodes with GPUs.
        nodes: these, as Slurm writes them.
    """
    for number in range(group.gpus if spec.packing else 0):
        for path in (spec.gpu_device(number), *links(spec, number)):
            yield f"NodeName={nodes} Name={GRES} Type=p{number} File={path}"


def links(spec: ClusterSpec, number: int) -> tuple[Path, ...]:
    """Links to a GPU's device file, for all of its slots but the first."""
    device = spec.gpu_device(number)
    count = CONSTRAINED_SLOTS_PER_GPU if spec.cgroups else SLOTS_PER_GPU
    return tuple(device.with_name(f"{device.name}.slot{slot}") for slot in range(1, count))


def partitions(spec: ClusterSpec) -> Mapping[str, str]:
    """The partition of opportunistic jobs: name -> the rest of its line."""
    nodes = ",".join(node.name for node in sharing_nodes(spec))
    return {PARTITION: f"Nodes={nodes} MaxTime=INFINITE PriorityTier={OPPORTUNISTIC_TIER} State=UP"} if nodes else {}


def tier(spec: ClusterSpec, group: NodeGroup) -> str:
    """What stands in the line of a group's partition."""
    return f" PriorityTier={GUARANTEED_TIER}" if spec.packing and group.gpus else ""


def scripts(spec: ClusterSpec) -> dict[Path, str]:
    """Prolog, Epilog and TaskProlog; a directory for each node, as all share the machine's /run."""
    run_dir = f"{spec.sharing_dir}/$SLURMD_NODENAME"
    texts = {name: node_script(option, spec.packing_settings, run_dir=run_dir) for option, name in SCRIPTS.items()}
    return {spec.state_dir / name: text for name, text in texts.items()}


def environment(spec: ClusterSpec) -> str:
    """The settings of these scripts."""
    most = max(group.gpus for group in spec.groups)
    here = f"{spec.sharing_dir}/$SLURMD_NODENAME"
    gpus = " ".join(f"{number}=emulation:{here}/gpu{number}" for number in range(most))
    return (
        f'HETSTREAM_OPPORTUNISTIC_PARTITIONS="{PARTITION}"\n'
        'HETSTREAM_SHARED_PARTITIONS="gpu"\n'
        f'HETSTREAM_GPU_SOCKET="{here}/gpu.sock"\n'
        f'HETSTREAM_GPUS="{gpus}"\n'
        f"HETSTREAM_UNPLACED_S={UNPLACED_S}\n"
    )


def policy() -> str:
    """The guard's policy."""
    rule = f'opportunistic = {{ partitions = {{ "{PARTITION}" }}, hold = true, managers = {{ {PACKER_UID} }} }}'
    return f"-- Written by `devcluster up --packing`.\nreturn {{ {rule} }}\n"
