"""What pictures of simulations show: completion times in parts, and effective GPUs over time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hetstream.slurm_plugin.render.charts import WIDE, Axis, count_axis, stacked_bars
from hetstream.slurm_plugin.simulate.metrics import Compared
from hetstream.slurm_plugin.simulate.usage_log import Outcome

PARTS = ("running", "waits for GPUs", "for CPUs", "for memory", "behind others", "for backfill")
_POINTS = 120


def completion_bars(own: Sequence[Compared], width: int, height: int, title: str) -> str:
    """Mean completion time in hours, in parts: running, and what jobs wait for."""
    bars = []
    for place, comparison in enumerate(own):
        waited = comparison.waiting_s()
        backfill = waited["reservation"] + waited["cycle"]
        parts = [waited["gpus"], waited["cpus"], waited["memory"], waited["queue"], backfill]
        running = max(0.0, (comparison.mean("mean_jct_s") or 0.0) - sum(parts))
        bars.append((float(place), [part / 3600 for part in (running, *parts)]))
    high = max(sum(sizes) for _, sizes in bars)
    names = [(float(place), comparison.policy) for place, comparison in enumerate(own)]
    step = max(1, len(names) * 70 // width + (1 if width < WIDE else 0))
    shown = [name if at % step == 0 else (name[0], "") for at, name in enumerate(names)]
    # Names stand in the middle below their bars; the first and the last text of an axis do not.
    x = Axis(-0.6, len(own) - 0.4, [(-0.6, ""), *shown, (len(own) - 0.4, "")])
    return stacked_bars(bars, x, count_axis(high), width, height, title)


def effective_points(outcome: Outcome) -> list[tuple[float, float | None]]:
    """Effective GPUs over time, as means over equal spans."""
    use, end_s = outcome.use, float(outcome.use.at_s[-1]) if len(outcome.use.at_s) else 0.0
    if end_s <= 0 or not outcome.cluster.num_gpus:
        return []
    bounds = np.linspace(0.0, end_s, _POINTS + 1)
    integral = np.concatenate([[0.0], np.cumsum(use.effective_gpus[:-1] * np.diff(use.at_s))])
    means = np.diff(np.interp(bounds, use.at_s, integral)) / np.diff(bounds) / outcome.cluster.num_gpus
    return list(zip(bounds[:-1].tolist(), means.tolist(), strict=True))
