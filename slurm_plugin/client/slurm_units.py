"""Slurm's ways to write a value: durations, times, memory, and its words for none. Pure, but for a line in the log.

Called by the parsers. A record of which a part cannot be read is kept: (parser, text) -> value, and what was in doubt.
Users have a say in what a job's record holds. Whoever could make it vanish would run beside every count and limit.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from datetime import MAXYEAR, datetime
from functools import lru_cache
from itertools import islice, product
from typing import TypeVar

from hetstream.hetjob.convert.sbatch_options import time_limit_s
from hetstream.slurm_plugin.client.model import CUT, Gres, Job, Node

NONE_WORDS = frozenset({"", "(null)", "N/A", "n/a", "None", "NONE", "Unknown", "UNLIMITED", "INFINITE", "NOT_SET"})
_EPOCH = re.compile(r"\d{9,10}")
# More digits are no memory, and more than a float can hold.
_MEMORY = re.compile(r"(\d{1,15}(?:\.\d+)?)([KMGTP]?)B?[nc]?")
_WHOLE = re.compile(r"(\d{1,15})([KMGT])")
_MB = {"K": 1 / 1024, "": 1, "M": 1, "G": 1024, "T": 1024**2, "P": 1024**3}


def text_or_empty(value: str) -> str:
    """Return the text itself, or nothing where Slurm writes a word for nothing."""
    return "" if value in NONE_WORDS else value


@lru_cache(maxsize=4096)
def seconds(value: str) -> float | None:
    """Return seconds of `3-02:03:04`, `02:03:04`, `5:00` (minutes and seconds) or `7` (minutes); None for no limit.

    squeue writes INVALID for a limit above 365 days (_print_secs in src/squeue/print.c), which counts as none: a job
    without a limit has those 365 days when it runs.

    Raises:
        ValueError: another form.
    """
    if value in NONE_WORDS or value in ("Partition_Limit", "INVALID"):
        return None
    found = time_limit_s(value)
    if found is None:
        raise ValueError(f"time {value!r}: must be [DAYS-]HOURS:MINUTES:SECONDS")
    return found


@lru_cache(maxsize=16384)
def moment(value: str) -> float | None:
    """Return seconds since the epoch of `1795190415` (SLURM_TIME_FORMAT=%s) or `2026-11-20T16:00:15`; None for no time.

    The second form is local time, in which an hour is there twice each autumn: its first one is meant then.

    Raises:
        ValueError: another form; SLURM_TIME_FORMAT can make Slurm write one.
    """
    return next(iter(moments(value)), None)


def moments(value: str) -> tuple[float, ...]:
    """Return the moments that a time may mean: two within the hour that a clock change repeats or leaves out, otherwise
    one.

    Raises:
        ValueError: another form.
    """
    if value in NONE_WORDS:
        return ()
    if _EPOCH.fullmatch(value):
        return (float(value),)
    local = datetime.fromisoformat(value)
    folds = (0, 1) if local.year < MAXYEAR else (0,)
    return tuple(dict.fromkeys(local.replace(fold=fold).timestamp() for fold in folds))


def local_time(moment_s: float) -> str:
    """Return a moment as Slurm's commands take it, in local time; in seconds where local time would mean two
    moments.
    """
    text = datetime.fromtimestamp(moment_s).strftime("%Y-%m-%dT%H:%M:%S")
    return text if len(moments(text)) == 1 else f"uts{moment_s:.0f}"


@lru_cache(maxsize=4096)
def megabytes(value: str) -> int:
    """MB of `100M`, `62.50G` or `4000`; 0 for none.

    Raises:
        ValueError: another form.
    """
    if value in NONE_WORDS:
        return 0
    match = _MEMORY.fullmatch(value)
    if not match:
        raise ValueError(f"memory {value!r}: must be a number with K, M, G, T or P")
    return round(float(match[1]) * _MB[match[2]])


@lru_cache(maxsize=4096)
def tres(value: str) -> dict[str, str]:
    """Return the items of `cpu=2,mem=50M,node=1,billing=2`. Callers share the dict and must not change it."""
    return {} if value in NONE_WORDS else dict(item.split("=", 1) for item in value.split(",") if "=" in item)


def whole(value: str, otherwise: int = 0) -> int:
    """Return a whole number, or `otherwise` for Slurm's words for none; squeue writes `4K` for 4096 (convert_num_unit).

    Raises:
        ValueError: it is neither.
    """
    if value in NONE_WORDS:
        return otherwise
    match = _WHOLE.fullmatch(value)
    return int(match[1]) * 1024 ** " KMGT".index(match[2]) if match and match[2] else int(value)


# Slurm's hostlists: `g[0-3,7],login` is five hosts. Pure; used by the parsers and by every table of nodes.

# A range in a hostlist that would name more hosts than any cluster has is damage, not a cluster.
MAX_HOSTS = 1_000_000
# Of a number in a name. More is damage, and a million such names would fill the memory.
_MOST_DIGITS = 64
_LAST_NUMBER = re.compile(r"(\D*)(\d+)")  # of a name backwards


@lru_cache(maxsize=4096)
def expand(hostlist: str) -> tuple[str, ...]:
    """Return the hosts of a hostlist, in its order; Slurm's words for nothing (`(null)`, `None assigned`) are no hosts.

    Raises:
        ValueError: brackets or ranges that are none.
    """
    text = hostlist.strip()
    if not text or text in ("(null)", "None", "None assigned", "n/a", "N/A"):
        return ()
    hosts = tuple(islice((host for part in _split(text) for host in _expand_part(part)), MAX_HOSTS + 1))
    if len(hosts) > MAX_HOSTS:
        raise ValueError(f"hostlist {text[:100]!r}: more than {MAX_HOSTS} hosts")
    return hosts


def compress(hosts: Iterable[str]) -> str:
    """Return the shortest hostlist of these hosts, each once, ordered by name and number."""
    plain: set[str] = set()
    numbered: dict[tuple[str, str], set[str]] = {}
    for host in hosts:
        match = _LAST_NUMBER.match(host[::-1])
        if match:
            tail, digits = match[1][::-1], match[2][::-1]
            numbered.setdefault((host[: len(host) - len(tail) - len(digits)], tail), set()).add(digits)
        else:
            plain.add(host)
    groups: dict[tuple[str, str, int], set[int]] = {}
    for (head, tail), texts in numbered.items():
        # A leading zero fixes the width for all numbers of that length; without one, g9 and g10 are one range.
        padded = {len(text) for text in texts if text.startswith("0") and len(text) > 1}
        for text in texts:
            groups.setdefault((head, tail, len(text) if len(text) in padded else 0), set()).add(int(text))
    parts = [(name, name) for name in plain]
    for (head, tail, width), numbers in groups.items():
        ranges = list(_ranges(sorted(numbers), width))
        single = len(ranges) == 1 and "-" not in ranges[0]
        inside = ranges[0] if single else f"[{','.join(ranges)}]"
        parts.append((f"{head}{ranges[0]}", f"{head}{inside}{tail}"))
    return ",".join(text for _, text in sorted(parts))


def _ranges(numbers: list[int], width: int) -> Iterator[str]:
    start = previous = numbers[0]
    for number in [*numbers[1:], None]:
        if number is not None and number == previous + 1:
            previous = number
            continue
        first, last = str(start).zfill(width), str(previous).zfill(width)
        yield first if start == previous else f"{first}-{last}"
        if number is not None:
            start = previous = number


def _split(text: str) -> Iterator[str]:
    """Split at the commas outside of brackets."""
    depth, start = 0, 0
    for place, char in enumerate(text):
        depth += (char == "[") - (char == "]")
        if depth not in (0, 1):
            raise ValueError(f"hostlist {text[:100]!r}: brackets do not match")
        if char == "," and depth == 0:
            yield text[start:place]
            start = place + 1
    if depth:
        raise ValueError(f"hostlist {text[:100]!r}: brackets do not match")
    yield text[start:]


def _expand_part(part: str) -> Iterator[str]:
    pieces = re.split(r"\[([^\[\]]*)\]", part)
    choices = [
        [piece] if place % 2 == 0 else list(islice(_numbers(piece), MAX_HOSTS + 1))
        for place, piece in enumerate(pieces)
    ]
    total = 1
    for choice in choices:
        total *= len(choice)
    if total > MAX_HOSTS:
        raise ValueError(f"hostlist {part[:100]!r}: more than {MAX_HOSTS} hosts")
    for chosen in product(*choices):
        yield "".join(chosen)


def _numbers(inside: str) -> Iterator[str]:
    for item in inside.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", item)
        if not match or len(item) > 2 * _MOST_DIGITS:
            raise ValueError(f"hostlist range {item[:100]!r}: must be N or N-M")
        first, last = match[1], match[2] or match[1]
        if int(last) - int(first) >= MAX_HOSTS:
            raise ValueError(f"hostlist range {item!r}: more than {MAX_HOSTS} hosts")
        width = len(first)
        for number in range(int(first), int(last) + 1):
            yield str(number).zfill(width)


# GRES as Slurm writes them, from 22.05 to 26.05: the one grammar, for all that reads such text. Pure.
#
#     list   items, with commas between them; a comma within parentheses belongs to its item
#     item   [gres: | gres/] NAME [:TYPE] [:no_consume] [:COUNT] [(NOTE)]      what a node has, what is in use, requests
#            gres/NAME [:TYPE] = COUNT                                         among trackable resources (TRES)
#     TYPE   a word; `(null)` is no type
#     COUNT  digits and K, M, G, T or P (of 1024); without one it is 1
#     NOTE   S:SOCKETS        the sockets near a device
#            IDX:DEVICES      which are in use: `0,2-3`; N/A or nothing for none
#            CNT:COUNT        in the place of the count
#            USED/OF,...      of the parts of each device; `-` of one that is in use as a whole
#            (null)           nothing
#
# Sources, of tags 22-05-8-1, 24-11-5-1 and 26-05-3-1: `_build_node_gres_str` and `_node_gres_used` in src/common/gres.c
# (later src/interfaces/gres.c), `gres_ctld_job_build_details` in src/slurmctld/gres_ctld.c (later
# src/stepmgr/gres_stepmgr.c), `suffix_mult` and `slurm_get_next_tres` in src/common/slurm_protocol_defs.c.

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
    """Return the GRES that a string names; other trackable resources in it (`cpu=1`) are left out.

    Raises:
        ValueError: an item that has no form listed above.
    """
    if text in _EMPTY:
        return ()
    found = (_parse_item(item.strip()) for item in _ITEMS.findall(text) if item.strip())
    return tuple(gres for gres in found if gres is not None)


@lru_cache(maxsize=8192)
def known_gres(text: str) -> tuple[tuple[Gres, ...], tuple[str, ...]]:
    """Return the same of what a user may have written: an item without a known form counts as one of its name.

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


# Which nodes `--constraint` leaves: (expression, features of a node) -> yes or no. Pure.
#
# slurmctld reads an expression strictly from left to right, what is in parentheses for itself, and takes commas for `&`
# (_feature_string2list in job_scheduler.c and valid_feature_counts in node_scheduler.c, 22.05 to 26.05; sbatch(1),
# --constraint). Of alternatives in brackets all nodes of a job must have the same one.

_TOKENS = re.compile(r"[()&|]|[^()&|]+")
_BRACKETS = re.compile(r"([^\[\]]*)\[([^\[\]]*)\]([^\[\]]*)")


@lru_cache(maxsize=4096)
def alternatives(expression: str) -> tuple[str, ...]:
    """Return the expressions of which all nodes of a job must meet the same one; none where no single node is kept out.

    Counts (`[a*2&b*4]`) say how many nodes of a job must have what, and so nothing of one node alone.
    """
    text = expression.replace(",", "&")
    if "*" in text:
        return ()
    found = _BRACKETS.fullmatch(text)
    if not found:
        return (text,) if text and not set("[]").intersection(text) else ()
    before, inside, after = found.groups()
    choices = _choices(inside)
    return tuple(f"{before}({choice}){after}" for choice in choices)


def for_one_node(expression: str) -> str:
    """Return the same for a job of one node, of which all counts are one."""
    return re.sub(r"\*\d+", "", expression)


def meets(expression: str, features: Collection[str]) -> bool:
    """Return whether a node with these features meets an expression without brackets."""
    met, operator = True, "&"
    outside: list[tuple[bool, str]] = []
    for token in _TOKENS.findall(expression):
        if token in "&|":
            operator = token
            continue
        if token == "(":
            outside.append((met, operator))
            met, operator = True, "&"
            continue
        value = token in features
        if token == ")" and outside:
            value = met
            met, operator = outside.pop()
        met = met and value if operator == "&" else met or value
    return met


def _choices(inside: str) -> list[str]:
    """The parts between the `|` that are in no parentheses."""
    parts, depth = [""], 0
    for token in _TOKENS.findall(inside):
        depth += (token == "(") - (token == ")")
        if token == "|" and depth == 0:
            parts.append("")
        else:
            parts[-1] += token
    return parts


logger = logging.getLogger(__name__)
_T = TypeVar("_T")
_MOST_NAMED = 8
_MOST_SHOWN = 300


class Reading:
    """Reads the fields of one record.

    Attributes:
        unreadable: what could not be read, and why.
        gres_in_doubt: some of it were GRES.
    """

    def __init__(self) -> None:
        self.unreadable: tuple[str, ...] = ()
        self.gres_in_doubt = False

    def __call__(self, parse: Callable[[str], _T], text: str, otherwise: _T) -> _T:
        """The value of a text, or `otherwise` if the parser raises ValueError."""
        try:
            return parse(text)
        except ValueError as exc:
            self.unreadable += (str(exc)[:_MOST_SHOWN],)
            return otherwise

    def array_tasks(self, text: str) -> str:
        """Return the indices of an array; those that are cut are said to be."""
        if CUT in text:
            cut = f"the indices {text[:_MOST_SHOWN]!r} of an array are cut: more tasks are pending than are counted"
            self.unreadable += (cut,)
        return text

    def gres(self, text: str) -> tuple[Gres, ...]:
        """Return the GRES that a text names. What cannot be read of it counts as one, and may be any number."""
        found, unreadable = known_gres(text)
        self.unreadable += tuple(reason[:_MOST_SHOWN] for reason in unreadable)
        self.gres_in_doubt |= bool(unreadable)
        return found


def note_doubts(records: Iterable[Job | Node]) -> None:
    """Say in one line which records could not be read in full."""
    found = [(_name(record), record) for record in records if record.unreadable]
    if not found:
        return
    names = ", ".join(name for name, _ in found[:_MOST_NAMED])
    others = f" and {len(found) - _MOST_NAMED:,} others" if len(found) > _MOST_NAMED else ""
    name, first = found[0]
    in_doubt = [name for name, record in found if isinstance(record, Job) and record.gpus_in_doubt]
    gpus = f" The GPUs that they ask for are in doubt: {', '.join(in_doubt[:_MOST_NAMED])}." if in_doubt else ""
    logger.warning(
        "of %s%s a part cannot be read; they count all the same.%s Of %s: %r", names, others, gpus, name,
        first.unreadable[0],
    )  # fmt: skip


def _name(record: Job | Node) -> str:
    return f"job {record.job_id}" if isinstance(record, Job) else f"node {record.name}"
