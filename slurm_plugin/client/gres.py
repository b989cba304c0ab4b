"""GRES as Slurm writes them, from 22.05 to 26.05: the one grammar, for all that reads such text. Pure.

    list   items, with commas between them; a comma within parentheses belongs to its item
    item   [gres: | gres/] NAME [:TYPE] [:no_consume] [:COUNT] [(NOTE)]      what a node has, what is in use, requests
           gres/NAME [:TYPE] = COUNT                                         among trackable resources (TRES)
    TYPE   a word; `(null)` is no type
    COUNT  digits and K, M, G, T or P (of 1024); without one it is 1
    NOTE   S:SOCKETS        the sockets near a device
           IDX:DEVICES      which are in use: `0,2-3`; N/A or nothing for none
           CNT:COUNT        in the place of the count
           USED/OF,...      of the parts of each device; `-` of one that is in use as a whole
           (null)           nothing

Sources, of tags 22-05-8-1, 24-11-5-1 and 26-05-3-1: `_build_node_gres_str` and `_node_gres_used` in src/common/gres.c
(later src/interfaces/gres.c), `gres_ctld_job_build_details` in src/slurmctld/gres_ctld.c (later
src/stepmgr/gres_stepmgr.c), `suffix_mult` and `slurm_get_next_tres` in src/common/slurm_protocol_defs.c.
"""

from __future__ import annotations

import re
from functools import lru_cache

from hetstream.slurm_plugin.client.model import Gres

_EMPTY = frozenset({"", "(null)", "N/A", "none"})
# One item of a list; what is within parentheses is passed over once, however long it is.
_ITEMS = re.compile(r"(?:[^,(]+|\([^)]*\)?)+")
_ITEM = re.compile(
    r"(?P<kind>gres[:/])?(?P<name>[^\s,:=()/]+)(?P<named>(?::(?:\(null\)|[^\s,:=()/]+))*)"
    r"(?:=(?P<equals>[^\s,:=()]*))?(?:\((?P<note>\(null\)|[^()]*)\))?"
)
# `cpu=4`, `mem=50M`, `license/fluent:2`, `cpu:8` of --tres-per-task: what Slurm counts and is no GRES (tres_types_t).
_OTHER_TRES = re.compile(
    r"(?!gres[:/]|gpu=)(?:[\w.-]+/.*|[^(=]*=.*|(?:cpu|mem|node|billing|energy|pages|vmem)(?::\w+)?)"
)
_NAME = re.compile(r"(?:gres[:/])?([\w.-]+)\s*[:=]")
# More digits are no count, and more than a float can hold.
_COUNT = re.compile(r"(\d{1,15})(?:([kmgtp])(b|ib)?)?", re.IGNORECASE)
# Slurm's buffers for the list of devices have 64 bytes for a node and 128 for a job, and the text is cut to that.
_CUT_AT = (63, 127)
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")
_PART = re.compile(r"(\d+|-)/\d+")
_NOT_COUNTED = "no_consume"
# Devices that Slurm counts on a node (MAX_GRES_BITMAP in gres.c); a job's list is that of one node, too.
_MOST_DEVICES = 1024


@lru_cache(maxsize=8192)
def parse_gres(text: str) -> tuple[Gres, ...]:
    """The GRES that a string names; other trackable resources in it (`cpu=1`) are left out.

    Raises:
        ValueError: an item that has no form listed above.
    """
    if text in _EMPTY:
        return ()
    found = (_parse_item(item.strip()) for item in _ITEMS.findall(text) if item.strip())
    return tuple(gres for gres in found if gres is not None)


@lru_cache(maxsize=8192)
def known_gres(text: str) -> tuple[tuple[Gres, ...], tuple[str, ...]]:
    """The same of what a user may have written: an item without a known form counts as one of its name.

    slurmctld takes more forms than it prints, such as `gpu: 1` and `gpu:x/y:0`. Whose name cannot be read is a GPU.

    Returns:
        The GRES, and why items could not be read.
    """
    found, unreadable = list[Gres](), list[str]()
    for item in _ITEMS.findall("" if text in _EMPTY else text):
        try:
            found += parse_gres(item.strip())
        except ValueError as exc:
            unreadable.append(str(exc))
            name = _NAME.match(item.strip())
            found.append(Gres(name[1] if name else "gpu", "", 1))
    return tuple(found), tuple(unreadable)


def _parse_item(item: str) -> Gres | None:
    if _OTHER_TRES.fullmatch(item):
        return None
    match = _ITEM.fullmatch(item)
    if not match:
        raise ValueError(f"GRES {item!r}: must be NAME[:TYPE][:COUNT], as in scontrol show node")
    named = [word for word in match["named"].split(":")[1:] if word != _NOT_COUNTED]
    note = match["note"] or ""
    if match["equals"] is not None:
        count = _number(match["equals"], item)
    elif note.startswith("CNT:"):
        count = _number(note.removeprefix("CNT:"), item)
    elif named and (len(named) > 1 or _COUNT.fullmatch(named[-1])):
        count = _number(named.pop(), item)
    else:
        count = 1
    if len(named) > 1:
        raise ValueError(f"GRES {item!r}: must be NAME[:TYPE][:COUNT], and has {len(named)} types")
    gres_type = "" if named in ([], ["(null)"]) else named[0]
    return Gres(match["name"], gres_type, count, _devices(note, count, item))


def _number(text: str, item: str) -> int:
    match = _COUNT.fullmatch(text)
    if not match:
        raise ValueError(f"GRES {item!r}: {text!r} is no count")
    unit = (match[2] or "").lower()
    base = 1000 if (match[3] or "").lower() == "b" else 1024
    return int(match[1]) * (base ** (1 + "kmgtp".index(unit)) if unit else 1)


def _devices(note: str, count: int, item: str) -> tuple[int, ...]:
    """The devices in use, as far as a note says which."""
    kind, _, listed = note.partition(":")
    if kind in ("S", "CNT") or note in ("", "(null)", "IDX:", "IDX:N/A"):
        return ()
    if kind == "IDX":
        found = [_RANGE.fullmatch(part) for part in listed.split(",")]
        if len(listed) in _CUT_AT and (not all(found) or _length(found) != count):
            return ()  # where it is cut, the last number may be another one
        if all(found):
            if _length(found) > _MOST_DEVICES:
                raise ValueError(f"GRES {item[:100]!r}: more than {_MOST_DEVICES} devices, which no node has")
            return tuple(
                number for part in found if part for number in range(int(part[1]), int(part[2] or part[1]) + 1)
            )
    parts = [_PART.fullmatch(part) for part in note.split(",")]
    if not all(parts):
        raise ValueError(f"GRES {item!r}: ({note}) is neither S:, IDX:, CNT: nor USED/OF of each device")
    return tuple(place for place, part in enumerate(parts) if part and part[1].isdigit() and int(part[1]) > 0)


def _length(ranges: list[re.Match[str] | None]) -> int:
    return sum(max(0, int(part[2] or part[1]) - int(part[1]) + 1) for part in ranges if part)
