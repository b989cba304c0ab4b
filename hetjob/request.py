"""What the options of a script ask for, in numbers: GPUs and tasks. Pure; called by the conversion."""

from __future__ import annotations

import math
import re
from fractions import Fraction

from hetstream.hetjob.sbatch_options import SbatchOptions


def gpus_per_task(options: SbatchOptions) -> Fraction:
    """GPUs of one trainer task, from whatever form the script uses; 0 when it asks for none."""
    per_task = count(options.value("gpus-per-task")) or _gres_gpus(options.value("tres-per-task"))
    if per_task:
        return Fraction(per_task)
    nodes = _first_number(options.value("nodes")) or 1
    per_node = count(options.value("gpus-per-node")) or _gres_gpus(options.value("gres"))
    per_socket = count(options.value("gpus-per-socket")) or 0
    per_node = per_node or per_socket * (options.number("sockets-per-node") or 1)
    total = count(options.value("gpus")) or per_node * nodes
    per_gpu = options.number("ntasks-per-gpu")
    if per_gpu and total:
        return Fraction(1, per_gpu)
    tasks = options.number("ntasks") or nodes * (options.number("ntasks-per-node") or 1)
    return Fraction(total, tasks)


def asks_for_gpus(options: SbatchOptions) -> bool:
    """Whether a script asks for GPUs, or for shares of some, in any form."""
    if options.has("gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket"):
        return True
    resources = f"{options.value('gres') or ''},{options.value('tres-per-task') or ''}".split(",")
    kinds = (re.split(r"[:=]", re.sub(r"^gres[/:]", "", resource.strip()))[0] for resource in resources)
    return any(kind in ("gpu", "shard", "mps") for kind in kinds)


def tasks_per_node(options: SbatchOptions) -> int:
    """Trainer tasks on the fullest node, from whatever form the script uses; at least 1."""
    if options.number("ntasks-per-node"):
        return options.number("ntasks-per-node") or 1
    nodes = _first_number(options.value("nodes")) or 1
    tasks = options.number("ntasks")
    per_gpu = options.number("ntasks-per-gpu")
    if tasks is None and per_gpu:
        per_node = count(options.value("gpus-per-node")) or _gres_gpus(options.value("gres"))
        total = count(options.value("gpus")) or per_node * nodes
        tasks = max(1, total * per_gpu)
    return math.ceil((tasks or 1) / nodes) if tasks else 1


def tasks_and_nodes(options: SbatchOptions) -> tuple[int, int | None]:
    """Trainer tasks in all, and nodes; None where the request leaves their number open."""
    given = options.number("nodes")
    nodes = given or _first_number(options.value("nodes")) or 1
    tasks = options.number("ntasks") or nodes * tasks_per_node(options)
    if given is None and (options.has("nodes") or tasks > 1):
        return tasks, None
    return tasks, nodes


def count(text: str | None) -> int | None:
    """The number in `2`, `h200:2` or `2(S:0)`; `h200` alone is one. None for other forms."""
    if not text:
        return None
    last = (text.partition("(")[0] if text.endswith(")") else text).split(":")[-1]
    return int(last) if last.isascii() and last.isdigit() else (1 if re.fullmatch(r"[A-Za-z][\w.-]*", last) else None)


def _gres_gpus(text: str | None) -> int:
    """GPUs per node in a --gres list (`gpu:2`, `gres/gpu:h200:4,shard:1`, since 23.02 also `gpu=2`)."""
    total = 0
    for part in (text or "").split(","):
        resource = part.strip().removeprefix("gres/").removeprefix("gres:").replace("=", ":")
        if resource == "gpu" or resource.startswith("gpu:"):
            total += (count(resource.removeprefix("gpu").removeprefix(":")) or 1) if resource != "gpu" else 1
    return total


def _first_number(text: str | None) -> int | None:
    """The minimum in sbatch's node counts: `2`, `2-4`."""
    match = re.match(r"\d+", text or "", re.ASCII)
    return int(match[0]) if match and int(match[0]) > 0 else None
