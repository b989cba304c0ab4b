"""Slurm's hostlists: `g[0-3,7],login` is five hosts. Pure; used by the parsers and by every table of nodes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import islice, product

# A range in a hostlist that would name more hosts than any cluster has is damage, not a cluster.
MAX_HOSTS = 1_000_000
# Of a number in a name. More is damage, and a million such names would fill the memory.
_MOST_DIGITS = 64
_LAST_NUMBER = re.compile(r"(\D*)(\d+)")  # of a name backwards


@lru_cache(maxsize=4096)
def expand(hostlist: str) -> tuple[str, ...]:
    """The hosts of a hostlist, in its order; Slurm's words for nothing (`(null)`, `None assigned`) are no hosts.

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
    """The shortest hostlist of these hosts, each once, ordered by name and number."""
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
