"""Slurm's ways to write a value: durations, times, memory, and its words for none. Pure; called by the parsers."""

from __future__ import annotations

import re
from datetime import MAXYEAR, datetime
from functools import lru_cache

from hetstream.hetjob.sbatch_options import time_limit_s

NONE_WORDS = frozenset({"", "(null)", "N/A", "n/a", "None", "NONE", "Unknown", "UNLIMITED", "INFINITE", "NOT_SET"})
_EPOCH = re.compile(r"\d{9,10}")
# More digits are no memory, and more than a float can hold.
_MEMORY = re.compile(r"(\d{1,15}(?:\.\d+)?)([KMGTP]?)B?[nc]?")
_WHOLE = re.compile(r"(\d{1,15})([KMGT])")
_MB = {"K": 1 / 1024, "": 1, "M": 1, "G": 1024, "T": 1024**2, "P": 1024**3}


def text_or_empty(value: str) -> str:
    """The text itself, or nothing where Slurm writes a word for nothing."""
    return "" if value in NONE_WORDS else value


@lru_cache(maxsize=4096)
def seconds(value: str) -> float | None:
    """Seconds of `3-02:03:04`, `02:03:04`, `5:00` (minutes and seconds) or `7` (minutes); None for no limit.

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
    """Seconds since the epoch of `1795190415` (SLURM_TIME_FORMAT=%s) or `2026-11-20T16:00:15`; None for no time.

    The second form is local time, in which an hour is there twice each autumn: its first one is meant then.

    Raises:
        ValueError: another form; SLURM_TIME_FORMAT can make Slurm write one.
    """
    return next(iter(moments(value)), None)


def moments(value: str) -> tuple[float, ...]:
    """The moments that a time may mean: two within the hour that a clock change repeats or leaves out, otherwise one.

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
    """A moment as Slurm's commands take it, in local time; in seconds where local time would mean two moments."""
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
    """The items of `cpu=2,mem=50M,node=1,billing=2`. Callers share the dict and must not change it."""
    return {} if value in NONE_WORDS else dict(item.split("=", 1) for item in value.split(",") if "=" in item)


def whole(value: str, otherwise: int = 0) -> int:
    """A whole number, or `otherwise` for Slurm's words for none; squeue writes `4K` for 4096 (convert_num_unit).

    Raises:
        ValueError: it is neither.
    """
    if value in NONE_WORDS:
        return otherwise
    match = _WHOLE.fullmatch(value)
    return int(match[1]) * 1024 ** " KMGT".index(match[2]) if match and match[2] else int(value)
