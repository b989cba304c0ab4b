"""Which nodes `--constraint` leaves: (expression, features of a node) -> yes or no. Pure.

slurmctld reads an expression strictly from left to right, what is in parentheses for itself, and takes commas for `&`
(_feature_string2list in job_scheduler.c and valid_feature_counts in node_scheduler.c, 22.05 to 26.05; sbatch(1),
--constraint). Of alternatives in brackets all nodes of a job must have the same one.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import lru_cache

_TOKENS = re.compile(r"[()&|]|[^()&|]+")
_BRACKETS = re.compile(r"([^\[\]]*)\[([^\[\]]*)\]([^\[\]]*)")


@lru_cache(maxsize=4096)
def alternatives(expression: str) -> tuple[str, ...]:
    """The expressions of which all nodes of a job must meet the same one; none where no single node is kept out.

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
    """The same for a job of one node, of which all counts are one."""
    return re.sub(r"\*\d+", "", expression)


def meets(expression: str, features: Collection[str]) -> bool:
    """Whether a node with these features meets an expression without brackets."""
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
