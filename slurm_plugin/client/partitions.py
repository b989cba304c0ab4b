"""What one job can get on the nodes of each partition, from sinfo's and scontrol's text. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from hetstream.hetjob.ports import NodeSize, PartitionLimits
from hetstream.slurm_plugin.client.values import seconds

# Of sinfo, one line for each kind of node of a partition: name (the default one with `*`), CPUs, MB, nodes, GRES.
SINFO_FORMAT = "--format=%P|%c|%m|%D|%G"


def parse_limits(sinfo: Iterable[str], partitions: str, config: str) -> dict[str, PartitionLimits]:
    """The limits of each partition that sinfo shows with its nodes.

    Args:
        sinfo: its lines, in `SINFO_FORMAT`. Where nodes of several sizes share a line, `+` follows the smallest: the
            partition is then left out, as nobody knows the largest.
        partitions: `scontrol --oneliner show partition`.
        config: `scontrol show config`.
    """
    nodes: dict[str, list[NodeSize]] = {}
    unknown: set[str] = set()
    for line in sinfo:
        name, *rest = line.strip().split("|")
        name = name.rstrip("*")
        if len(rest) == 4 and all(one.isdigit() for one in rest[:3]):
            has_gpus = re.search(r"(^|,)gpu(:|$)", rest[3]) is not None
            nodes.setdefault(name, []).append(NodeSize(int(rest[0]), int(rest[1]), has_gpus, int(rest[2])))
        else:
            unknown.add(name)
    everywhere = _number("MaxMemPerCPU", config)
    found = {}
    for name, kinds in nodes.items():
        if name in unknown:
            continue
        line = next(
            (one for one in partitions.splitlines() if re.match(rf"PartitionName={re.escape(name)}\s", one)), ""
        )
        most = _number("MaxCPUsPerNode", line)
        sizes = tuple(replace(one, cpus=min(one.cpus, most)) if most else one for one in kinds)
        longest = re.search(r"\sMaxTime=(\S+)", line)
        max_time_s = seconds(longest[1]) if longest else None
        found[name] = PartitionLimits(sizes, _number("MaxMemPerCPU", line) or everywhere, max_time_s)
    return found


def _number(key: str, text: str) -> int | None:
    match = re.search(rf"(?:^|\s){key}\s*=\s*(\d+)", text, re.MULTILINE)
    return int(match[1]) if match and int(match[1]) > 0 else None
