"""Rows and pictures of the benchmarks that simulate: means over job lists, ratios of means, charts as files."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np

from benchmarks.harness import Row
from hetstream.slurm_plugin.render.charts import STYLE, patterns
from hetstream.slurm_plugin.simulate.metrics import Compared, interval

_MINUTE_S = 60.0


def figure(case: str, name: str, one: Compared, metric: str, unit: str, per: float, note: str = "") -> Row:
    """The mean of a figure over the lists."""
    values = tuple(float(getattr(run, metric)) / per for run in one.runs)
    mean = sum(values) / len(values)
    return Row(case, name, mean, unit, interval(values), note=note, samples=values)


def ratio(case: str, name: str, upper: Sequence[float], lower: Sequence[float], goal: float | None, most: bool) -> Row:
    """The ratio of two means over the same lists, with its interval; `most`: the goal is an upper limit."""
    value = sum(upper) / sum(lower)
    pairs = list(zip(upper, lower, strict=True))
    spread = _ratio_interval(pairs)
    if goal is None:
        return Row(case, name, value, "x", spread)
    met = value <= goal if most else value >= goal
    lost = "" if met else f"by {abs(value / goal - 1):.1%}"
    return Row(case, name, value, "x", spread, f"{'<=' if most else '>='} {goal:g}", met, lost)


def _ratio_interval(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    sample = np.array(pairs)
    draw = np.random.default_rng([0, len(pairs)])
    drawn = sample[draw.integers(0, len(pairs), (2000, len(pairs)))].sum(axis=1)
    low, high = np.percentile(drawn[:, 0] / drawn[:, 1], [2.5, 97.5])
    return float(low), float(high)


def jct_minutes(one: Compared) -> list[float]:
    """The mean completion time of each list."""
    return [run.mean_jct_s / _MINUTE_S for run in one.runs]


def standalone_svg(svg: str, title: str, parts: Sequence[str] = ()) -> str:
    """A chart of a page as a file of its own: with its title above and, for bars, what their parts are below."""
    defined = patterns()
    pattern = defined[defined.index("<defs>") : defined.index("</defs>") + len("</defs>")]
    head, body = svg.removesuffix("</svg>").split(">", 1)
    head = head.replace('viewBox="0 0 640 260"', f'viewBox="0 -30 640 {290 + (28 if parts else 0)}"')
    legend = "".join(
        f'<g transform="translate({36 + 100 * place} 268)"><rect class="f{place}" width="14" height="12"/>'
        f'<rect fill="url(#p{place})" width="14" height="12"/>'
        f'<text x="18" y="10" style="font-size:10px">{escape(name)}</text></g>'
        for place, name in enumerate(parts)
    )
    return (
        f'{head} xmlns="http://www.w3.org/2000/svg"><style>{STYLE}</style>{pattern}'
        f'<text x="10" y="-12" style="font-weight:bold">{escape(title)}</text>{body}{legend}</svg>\n'
    )
