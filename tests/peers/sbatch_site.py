"""A throw-away cluster on which as many scripts as possible are accepted: it has what they name.

Its queue is for held jobs. Beside one real node for data workers it has nodes of a cloud, which nobody starts:
slurmctld checks a job against them as against any other. What scripts name is looked for roughly, by regular
expressions and not by hetstream's parser, since sbatch says what is accepted: a name that is missed costs a comparison
and no more.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from hetstream.slurm_plugin.client.slurm_units import expand
from tests.devcluster.spec import ClusterShape

# The partition of the data workers, with the one node that is real.
DATA_WORKER_PARTITION = "cpu"
SHAPE = ClusterShape(0, 1, 1)
_DEFAULT_PARTITION = "everything"
# More than the largest job of the scripts asks for; each is a row of each partition in what sinfo prints.
_NODES = 72
_NODE = (
    "NodeAddr=127.0.0.1 Port=1 Sockets=8 CoresPerSocket=64 ThreadsPerCore=2 RealMemory=16000000 TmpDisk=16000000 "
    "State=CLOUD"
)
_GPUS = 64
_NAME = re.compile(r"[A-Za-z][\w.-]*", re.ASCII)
_OPTIONS = {
    "partitions": r"(?:\s-p\s*|\s--partition[= ]\s*)[\"']?([^\s\"'#]+)",
    "features": r"(?:\s-C\s*|\s--(?:constraint|prefer)[= ]\s*)[\"']?([^\s\"'#]+)",
    "licenses": r"(?:\s-L\s*|\s--licenses[= ]\s*)[\"']?([^\s\"'#]+)",
    "reservations": r"\s--reservation[= ]\s*[\"']?([^\s\"'#]+)",
    "nodes": r"(?:\s-[wx]\s*|\s--nodelist[= ]\s*|\s--exclude[= ]\s*)[\"']?([^\s\"'#]+)",
    "gres": r"\s--gres[= ]\s*[\"']?([^\s\"'#]+)",
    "gpus": r"(?:\s-G\s*|\s--gpus(?:-per-\w+)?[= ]\s*)[\"']?([A-Za-z][\w.-]*)",
}


@dataclass
class Named:
    """What scripts name, each once, in their order."""

    partitions: dict[str, None] = field(default_factory=dict)
    features: dict[str, None] = field(default_factory=dict)
    licenses: dict[str, None] = field(default_factory=dict)
    reservations: dict[str, None] = field(default_factory=dict)
    nodes: dict[str, None] = field(default_factory=dict)
    gres: dict[str, None] = field(default_factory=lambda: {"gpu": None})
    gpu_types: dict[str, None] = field(default_factory=dict)


def named_in(scripts: Iterable[str]) -> Named:
    """Look through the `#SBATCH` lines of scripts."""
    named = Named()
    lines = [f" {line[7:]}" for script in scripts for line in script.splitlines() if line.startswith("#SBATCH")]
    for line in lines:
        found = {what: re.findall(pattern, line) for what, pattern in _OPTIONS.items()}
        named.partitions |= _names(found["partitions"], ",")
        named.features |= _names(found["features"], r"[&|,\[\]()*]")
        named.licenses |= {name.partition(":")[0]: None for name in _names(found["licenses"], ",|;")}
        named.reservations |= _names(found["reservations"], ",")
        named.nodes |= dict.fromkeys(text for text in found["nodes"] if re.fullmatch(r"[A-Za-z][\w.,\[\]-]*", text))
        for resource in (part for text in found["gres"] for part in text.split(",")):
            kind, *more = resource.removeprefix("gres:").removeprefix("gres/").split(":")
            if _NAME.fullmatch(kind):
                named.gres[kind] = None
            if kind == "gpu" and more and _NAME.fullmatch(more[0]):
                named.gpu_types[more[0]] = None
        named.gpu_types |= _names(found["gpus"], ",")
    return named


def _names(texts: Iterable[str], separators: str) -> dict[str, None]:
    parts = (part.strip() for text in texts for part in re.split(separators, text))
    return dict.fromkeys(part for part in parts if _NAME.match(part) and re.fullmatch(r"[\w.:-]+", part, re.ASCII))


def settings_of(named: Named) -> Iterator[str]:
    """Lines of slurm.conf with which a cluster has all of it."""
    types = [f"gpu:{name}:{_GPUS}" for name in named.gpu_types] or [f"gpu:{_GPUS}"]
    others = [f"{name}:1000000" for name in named.gres if name != "gpu"]
    own = _hosts(named.nodes)
    # Numbers that are in no name of a script: a job's own are taken out of its paths.
    yield "FirstJobId=4000001"
    yield f"GresTypes={','.join(named.gres)}"
    if named.licenses:
        yield f"Licenses={','.join(f'{name}:1000000' for name in named.licenses)}"
    features = f" Feature={','.join(named.features)}" if named.features else ""
    for names in (f"big[0001-{_NODES:04}]", *own):
        yield f"NodeName={names} {_NODE} Gres={','.join([*types, *others])}{features}"
    nodes = ",".join([f"big[0001-{_NODES:04}]", *own])
    yield f"PartitionName={_DEFAULT_PARTITION} Nodes={nodes} Default=YES MaxTime=UNLIMITED State=UP"
    for name in named.partitions:
        if name.upper() not in ("DEFAULT", DATA_WORKER_PARTITION.upper(), _DEFAULT_PARTITION.upper()):
            yield f"PartitionName={name} Nodes={nodes} MaxTime=UNLIMITED State=UP"


def _hosts(nodes: Iterable[str]) -> list[str]:
    """The hosts of host lists that are ones; sbatch judges the others."""
    names: dict[str, None] = {}
    for text in nodes:
        with suppress(ValueError):
            names |= dict.fromkeys(name for name in expand(text) if _NAME.fullmatch(name))
    return list(names)


def commands_after_boot(named: Named) -> Iterator[list[str]]:
    """What is not part of slurm.conf: it would name the data workers' partition twice there."""
    yield ["scontrol", "update", f"PartitionName={DATA_WORKER_PARTITION}", "Nodes=ALL"]
    # From here on slurmctld writes down what it is asked for, also what `scontrol show job` does not have.
    yield ["scontrol", "setdebug", "debug3"]
    for name in named.reservations:
        words = [f"ReservationName={name}", "Users=root", "Nodes=ALL", "StartTime=now", "Duration=7-0"]
        yield ["scontrol", "create", "reservation", *words, "Flags=IGNORE_JOBS,OVERLAP"]
