"""GRES strings of every kind: requests, what a node has, what is in use. Pure; called by the parsers.

Seen forms: `gpu:h200:4`, `gres:gpu:4` (22.05), `gres/gpu:4` (24.11, 26.05), `gpu:a100:4(S:0-1)`, `gpu:h200:2(IDX:0-1)`,
`gpu:4(IDX:0,2-3)`, `opx:x1(CNT:1)`, `shard:h200:1(IDX:0)`, `shard:h200:3(3/4,-/4)`, `gpu`, `cpu=1,gres/gpu=2`.
"""

from __future__ import annotations

import re
from functools import lru_cache

from hetstream.slurm_plugin.client.model import Gres

_EMPTY = frozenset({"", "(null)", "N/A", "none"})
_ITEM = re.compile(r"((?:[^,(]|\([^)]*\))+)")
# More digits are no count, and more than a float can hold.
_COUNT = re.compile(r"(\d{1,15})([kKmMgG]?)")
_FACTOR = {"": 1, "k": 1024, "m": 1024**2, "g": 1024**3}


@lru_cache(maxsize=8192)
def parse_gres(text: str) -> tuple[Gres, ...]:
    """The GRES that a string names; other trackable resources in it (`cpu=1`) are left out.

    Raises:
        ValueError: an item that has no form listed above.
    """
    if text in _EMPTY:
        return ()
    found = (_parse_item(item.strip()) for item in _ITEM.findall(text))
    return tuple(gres for gres in found if gres is not None)


def _parse_item(item: str) -> Gres | None:
    body, _, behind = item.partition("(")
    resource = re.sub(r"^gres[:/]", "", body)
    if "=" in resource:
        name, _, number = resource.partition("=")
        if name == body.partition("=")[0]:
            return None  # cpu=1, mem=50M, billing=2: no GRES
        name, _, gres_type = name.partition(":")
        return Gres(name, gres_type, _number(number, item))
    parts = resource.split(":")
    if len(parts) > 3 or not parts[0]:
        raise ValueError(f"GRES {item!r}: must be NAME[:TYPE][:COUNT]")
    counted = re.fullmatch(r"CNT:(\d+)\)", behind)
    if counted:
        return Gres(parts[0], parts[1] if len(parts) > 1 else "", int(counted[1]))
    if len(parts) == 3:
        return Gres(parts[0], parts[1], _number(parts[2], item), _indices(behind))
    if len(parts) == 2 and not _COUNT.fullmatch(parts[1]):
        return Gres(parts[0], parts[1], 1, _indices(behind))
    return Gres(parts[0], "", _number(parts[1], item) if len(parts) == 2 else 1, _indices(behind))


def _number(text: str, item: str) -> int:
    match = _COUNT.fullmatch(text)
    if not match:
        raise ValueError(f"GRES {item!r}: {text!r} is no count")
    return int(match[1]) * _FACTOR[match[2].lower()]


def _indices(behind: str) -> tuple[int, ...]:
    """Devices in use, from `IDX:0,2-3)` or the shards of each device, `3/4,0/4,-/4)`; `-` is a GPU taken whole."""
    inside = behind.rstrip(")")
    if inside.startswith("IDX:") and inside != "IDX:N/A":
        found: list[int] = []
        for part in inside[4:].split(","):
            first, _, last = part.partition("-")
            if first.isdigit():
                found += range(int(first), int(last or first) + 1)
        return tuple(found)
    if "/" in inside:
        used = (share.partition("/")[0] for share in inside.split(","))
        return tuple(place for place, count in enumerate(used) if count.isdigit() and int(count) > 0)
    return ()
