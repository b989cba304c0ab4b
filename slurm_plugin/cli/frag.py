"""`hetstream frag`: which CPUs and GPUs are free and of no use, node by node."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from hetstream.slurm_plugin.cli.output import (
    EXIT_CODES,
    add_node_arguments,
    add_output_arguments,
    chosen_nodes,
    chosen_partitions,
    emit,
    meta_of,
)
from hetstream.slurm_plugin.cli.reading import add_fresh_argument, read_cluster
from hetstream.slurm_plugin.client.hostlist import compress
from hetstream.slurm_plugin.client.model import Node, Snapshot
from hetstream.slurm_plugin.insight.fragmentation import Fragmentation, NodeFragmentation, measure
from hetstream.slurm_plugin.insight.shapes import Shape, gres_words
from hetstream.slurm_plugin.render.report import Column, Report, Row, Section, gib, partition_words, percent, signed
from hetstream.slurm_plugin.render.table import RED, YELLOW

EPILOG = f"""\
FRAG is the free share of a node's CPUs less the free share of its GPUs (GoldMiner's indicator). Below zero the CPUs are
gone before the GPUs; above zero the GPUs are gone first. MEM is the same with memory in place of CPUs. STRANDED is what
is free although jobs wait: no pending job fits there, and LACKS says more of what would let one start. Of a pending job
that wants several nodes, the share of one node is looked at. Nodes with equal figures share a line; JSON and CSV have a
line each.

examples:
  hetstream frag
  hetstream frag -p gpu --csv > frag.csv
  hetstream frag --json | jq .summary

{EXIT_CODES}"""
# The most frequent; a busy site has thousands.
MOST_SHAPES = 20
_BAD, _WORSE = 0.25, 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb."""
    parser.description = "Show which CPUs, GPUs and memory are free, and how much of it no pending job can use."
    parser.epilog = EPILOG
    add_node_arguments(parser)
    add_fresh_argument(parser)
    add_output_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Read the cluster once and print."""
    snapshot = read_cluster(args)
    partitions, names = chosen_partitions(args, snapshot), chosen_nodes(args, snapshot)
    nodes = [
        node
        for node in snapshot.nodes
        if (partitions is None or set(partitions) & set(node.partitions)) and (names is None or node.name in names)
    ]
    hides = snapshot.hides_jobs
    found = measure(nodes, snapshot.jobs, snapshot.partitions, config=snapshot.config, others_are_hidden=hides)
    emit(args, report_of(found, snapshot))
    return 0


def report_of(found: Fragmentation, snapshot: Snapshot) -> Report:
    """Put a measurement into words and tables."""
    summary: dict[str, Any] = {
        name: found.total(name)
        for name in (
            "cpus", "cpus_free", "gpus", "gpus_free", "memory_mb", "memory_free_mb", "stranded_gpus", "stranded_cpus",
            "mig", "mig_free",
        )
    }  # fmt: skip
    summary |= {
        "num_nodes": len(found.nodes),
        "num_gpu_nodes": len(found.gpu_nodes),
        "mean_abs_indicator": _rounded(found.mean_abs_indicator),
        "mean_indicator": _rounded(found.mean_indicator),
        "share_all_cpus_taken_gpus_free": _rounded(found.share_without_cpus),
        "share_all_gpus_taken_cpus_free": _rounded(found.share_without_gpus),
        "num_left_out": len(found.left_out),
    }
    nodes = Section("nodes", _NODE_COLUMNS, [_node_row(node) for node in found.nodes], hosts="node",
                    empty="no node can run jobs. Check: sinfo -R")  # fmt: skip
    shapes = Section(
        "shapes",
        _SHAPE_COLUMNS,
        [_shape_row(shape) for shape in found.shapes],
        title="What pending jobs ask of a node",
        empty="no job waits for resources",
        most_lines=MOST_SHAPES,
    )
    # One type alone, of whole GPUs, is what the nodes' lines say already.
    kinds = found.gpu_types if len(found.gpu_types) > 1 or any(kind.is_mig for kind in found.gpu_types) else ()
    title = "GPUs by type" if kinds else ""
    types = Section("gpu_types", _TYPE_COLUMNS, [asdict(kind) for kind in kinds], title=title)
    elsewhere = Section(
        "elsewhere",
        _ELSEWHERE_COLUMNS,
        [{"node": row.node, "cpus": row.cpus, "gpus": row.gpus, "memory_mb": row.memory_mb} for row in found.elsewhere],
        title="Held there all the same, and counted" if found.elsewhere else "",
        hosts="node",
    )
    left_out = Section(
        "left_out",
        _LEFT_OUT_COLUMNS,
        [{"node": node.name, "state": node.state, "reason": node.reason} for node in found.left_out],
        title="Left out: no job can start there" if found.left_out else "",
        hosts="node",
    )
    sections = (nodes, shapes, types, left_out, elsewhere)
    return Report(meta_of("frag", snapshot), summary, _lines(found), sections, _notes(found, snapshot.nodes))


def _lines(found: Fragmentation) -> list[str]:
    total = found.total
    lines = [
        f"free: {total('cpus_free'):,} of {total('cpus'):,} CPUs, {total('gpus_free'):,} of {total('gpus'):,} GPUs, "
        f"{gib(total('memory_free_mb'))} of {gib(total('memory_mb'))} GiB on {len(found.nodes):,} node(s)"
    ]
    if found.elsewhere:
        cpus, gpus = (sum(getattr(row, what) for row in found.elsewhere) for what in ("cpus", "gpus"))
        where = f"{len(found.elsewhere):,} node(s) on which no other job can start"
        lines.append(f"of these {cpus:,} CPUs and {gpus:,} GPUs are held on {where}")
    if not found.gpu_nodes:
        if any(node.gpus for node in found.left_out):
            return [*lines, "no node in use has GPUs: there is no indicator. Check: sinfo -R"]
        return [*lines, "no node has GPUs: there is no indicator. Check: scontrol show node | grep Gres"]
    mean_abs, mean = found.mean_abs_indicator or 0.0, found.mean_indicator or 0.0
    return [
        *lines,
        f"stranded: {total('stranded_gpus'):,} GPUs, {total('stranded_cpus'):,} CPUs that no pending job can use",
        f"indicator: {mean_abs:.2f} on average without its sign, {signed(mean)} with it, "
        f"over {len(found.gpu_nodes):,} node(s) with GPUs",
        f"all CPUs taken, more than 25 % of the GPUs free: {percent(found.share_without_cpus or 0)} of them; "
        f"all GPUs taken, more than 25 % of the CPUs free: {percent(found.share_without_gpus or 0)}",
    ]


def _notes(found: Fragmentation, nodes: Sequence[Node]) -> list[str]:
    names = {row.node for row in found.nodes}
    kept = [node for node in nodes if node.name in names and any(part.cpus_free for part in node.reserved_parts)]
    notes = []
    if kept:
        cpus = sum(part.cpus_free for node in kept for part in node.reserved_parts)
        where = compress(node.name for node in kept)
        notes.append(f"{cpus:,} CPUs of {where} are kept by reservations and do not count")
    owned = [node for node in nodes if node.name in names and (node.owner or node.mcs_label)]
    if any(node.cpus_free or node.gpus_free() for node in owned):
        cpus, gpus = sum(node.cpus_free for node in owned), sum(node.gpus_free() for node in owned)
        where = compress(node.name for node in owned)
        notes.append(
            f"{gpus:,} free GPUs and {cpus:,} free CPUs of {where} are for jobs of one user or MCS label alone"
        )
    completing = [node for node in nodes if node.name in names and "COMPLETING" in node.states]
    if any(node.cpus_free or node.gpus_free() for node in completing):
        cpus, gpus = sum(node.cpus_free for node in completing), sum(node.gpus_free() for node in completing)
        where = compress(node.name for node in completing)
        notes.append(
            f"{gpus:,} free GPUs and {cpus:,} free CPUs of {where} can be had when jobs that have ended are gone there"
        )
    if not found.assumed or not any(node.gpus_free for node in found.nodes):
        return notes
    return [
        *notes,
        f"no pending job with GPUs could run on {compress(found.assumed)}: "
        "there a job of 1 GPU and 1 CPU is assumed for stranded GPUs",
    ]


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _node_row(node: NodeFragmentation) -> Row:
    row = asdict(node) | {"partitions": list(node.partitions)}
    return row | {name: _rounded(row[name]) for name in ("indicator", "memory_indicator", "gpu_share_free")}


def _shape_row(shape: Shape) -> Row:
    row = asdict(shape) | {"gres": [*map(gres_words, shape.gres)]}
    del row["whose"]  # these are of all users together
    return row


def _bad(row: Row) -> str:
    value = abs(row["indicator"] or 0.0)
    return RED if value >= _WORSE else YELLOW if value >= _BAD else ""


def _stranded(row: Row) -> str:
    return RED if row["stranded_gpus"] else ""


_NODE_COLUMNS = (
    Column("node", "NODES", left=True),
    Column("partitions", "PARTITIONS", partition_words, left=True),
    Column("cpus_free", "FREE CPUS"),
    Column("cpus", "OF"),
    Column("gpus_free", "FREE GPUS"),
    Column("gpus", "OF"),
    Column("memory_free_mb", "FREE GIB", gib),
    Column("memory_mb", "OF", gib),
    Column("indicator", "FRAG", signed, mark=_bad),
    Column("memory_indicator", "MEM", signed),
    Column("stranded_gpus", "STRANDED GPUS", mark=_stranded),
    Column("stranded_cpus", "STRANDED CPUS"),
    Column("lacking", "LACKS", left=True),
)
_SHAPE_COLUMNS = (
    Column("num_jobs", "JOBS"),
    Column("gpus", "GPUS"),
    Column("gpu_type", "TYPE", left=True),
    Column("gres", "GRES", lambda gres: ",".join(gres) or "-", left=True),
    Column("cpus", "CPUS"),
    Column("memory_mb", "GIB", gib),
    Column("partitions", "PARTITIONS", partition_words, left=True),
)
_TYPE_COLUMNS = (
    Column("type", "TYPE", left=True),
    Column("is_mig", "PART OF A GPU", lambda is_mig: "MIG" if is_mig else "-", left=True),
    Column("num_free", "FREE"),
    Column("num", "OF"),
)
_LEFT_OUT_COLUMNS = (
    Column("node", "NODES", left=True),
    Column("state", "STATE", left=True),
    Column("reason", "REASON", left=True),
)
_ELSEWHERE_COLUMNS = (
    Column("node", "NODES", left=True),
    Column("cpus", "CPUS"),
    Column("gpus", "GPUS"),
    Column("memory_mb", "GIB", gib),
)
