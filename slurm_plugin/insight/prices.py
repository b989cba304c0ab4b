"""What an hour of a GPU and of a CPU costs, text -> prices; and what a cluster costs, (samples, prices) -> cost of what
jobs hold, of what is free, of trainers that wait. Pure.

For whatever shows cost beside time. Prices are pairs, one on a line or several with commas between them, `#` begins a
comment:

    gpu_hour=2.50, cpu_hour=0.04   # of one GPU, of one CPU
    currency=EUR

Nodes that are out of use cost nothing here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from hetstream.base.errors import OptionsError
from hetstream.base.text import printable

if TYPE_CHECKING:
    from hetstream.slurm_plugin.insight.observation import Sample

# Beyond it a slip, and sums of it would be no numbers any more.
_MOST = 1e9
_LONGEST_CURRENCY = 8
_KEYS = ("gpu_hour", "cpu_hour", "currency")


@dataclass(frozen=True)
class Prices:
    """What an hour costs.

    Attributes:
        gpu_hour, cpu_hour: of one GPU, and of one CPU.
        currency: for what is shown; may be empty.
    """

    gpu_hour: float
    cpu_hour: float
    currency: str = ""

    def of(self, gpu_hours: float, cpu_hours: float) -> float:
        """Return the cost of a number of hours."""
        return gpu_hours * self.gpu_hour + cpu_hours * self.cpu_hour

    def shown(self, cost: float) -> str:
        """`1,234.50 EUR`."""
        return f"{cost:,.2f} {self.currency}".rstrip()

    def __str__(self) -> str:
        money = f" {self.currency}" if self.currency else ""
        return f"{self.gpu_hour:g}{money} for an hour of a GPU, {self.cpu_hour:g}{money} for one of a CPU"


def parse_prices(text: str) -> Prices:
    """Read prices; one that is not named is 0.

    Raises:
        OptionsError: with all that is wrong.
    """
    found: dict[str, str] = {}
    problems = []
    lines = (line.split("#", 1)[0] for line in text.splitlines())
    for pair in (part.strip() for line in lines for part in line.split(",")):
        name, is_pair, value = (word.strip() for word in pair.partition("="))
        if not pair:
            continue
        if not is_pair or name not in _KEYS:
            problems.append(f"{printable(pair)!r}: must be one of {', '.join(f'{key}=...' for key in _KEYS)}")
        elif name in found:
            problems.append(f"{name} stands there twice")
        else:
            found[name] = value
    hours = {name: _price(name, found[name], problems) for name in ("gpu_hour", "cpu_hour") if name in found}
    if not hours and not problems:
        problems.append("there is neither gpu_hour nor cpu_hour")
    currency = found.get("currency", "")
    if not currency.isprintable() or len(currency) > _LONGEST_CURRENCY:
        problems.append(f"currency is {printable(currency)!r}: must have at most {_LONGEST_CURRENCY} characters")
    if problems:
        raise OptionsError("; ".join(problems))
    return Prices(hours.get("gpu_hour", 0.0), hours.get("cpu_hour", 0.0), currency)


def _price(name: str, text: str, problems: list[str]) -> float:
    try:
        price = float(text)
    except ValueError:
        price = math.nan
    if not 0 <= price <= _MOST:
        problems.append(f"{name} is {printable(text)!r}: must be a number from 0 to {_MOST:g}")
    return price


# A sample says how things were until the next one; not for longer, since nobody looked.
_LONGEST_GAP_S = 3600.0
_HOUR_S = 3600.0


@dataclass(frozen=True)
class Spending:
    """Cost of an hour, or of several.

    Attributes:
        hours: that were looked at.
        held: cost of the GPUs and CPUs that jobs held.
        waited: of that, GPUs whose trainers waited for data, as far as that is known.
        free: of those that no job held.
    """

    hours: float = 0.0
    held: float = 0.0
    waited: float = 0.0
    free: float = 0.0


def hourly(sample: Sample, prices: Prices) -> Spending:
    """Return what an hour costs as things are."""
    return Spending(
        1.0,
        prices.of(sample.gpus_allocated, sample.cpus_allocated),
        prices.of(sample.gpus_starved, 0.0),
        prices.of(sample.gpus - sample.gpus_allocated, sample.cpus - sample.cpus_allocated),
    )


def spent(samples: Sequence[Sample], prices: Prices) -> Spending:
    """Return what the history of a cluster has cost.

    Args:
        samples: the oldest first.
        prices: the same for all of it.
    """
    total = Spending()
    for sample, following in pairwise(samples):
        hours = min(following.taken_s - sample.taken_s, _LONGEST_GAP_S) / _HOUR_S
        rate = hourly(sample, prices)
        total = Spending(
            total.hours + hours,
            total.held + rate.held * hours,
            total.waited + rate.waited * hours,
            total.free + rate.free * hours,
        )
    return total
