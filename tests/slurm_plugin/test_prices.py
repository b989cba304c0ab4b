"""Cost beside time: lists of prices, and what `util`, `report` and the page make of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import clusters
import pytest
from recorded import Recorded

from hetstream.base.errors import OptionsError
from hetstream.slurm_plugin.insight.prices import Prices, Spending, hourly, parse_prices, spent
from hetstream.slurm_plugin.render.page import page

PRICES = Prices(2.0, 0.1, "EUR")


@pytest.mark.parametrize(
    "text",
    [
        "gpu_hour=2,cpu_hour=0.1,currency=EUR",
        "# of one\ngpu_hour = 2.0  # A100\n\ncpu_hour=1e-1\ncurrency=EUR\n",
    ],
)
def test_a_list_of_prices(text: str) -> None:
    assert parse_prices(text) == PRICES
    assert PRICES.shown(PRICES.of(600.0, 345.0)) == "1,234.50 EUR"
    assert parse_prices("cpu_hour=1") == Prices(0.0, 1.0)


def test_all_that_is_wrong_with_a_list_comes_at_once() -> None:
    with pytest.raises(OptionsError) as raised:
        parse_prices("gpu_hour=-1, cpu_hour=nan, cpu_hour=2\nnode=3\ncheap\ncurrency=\x1b[31m Taler")
    for said in ("gpu_hour is '-1'", "cpu_hour is 'nan'", "cpu_hour stands there twice", "'node=3': must be one of",
                 "'cheap'", "currency is '\\\\x1b[31m Taler'"):  # fmt: skip
        assert said in str(raised.value)
    with pytest.raises(OptionsError, match="neither gpu_hour nor cpu_hour"):
        parse_prices("currency=EUR")


def test_a_history_costs_what_was_held_and_free_and_gaps_cost_nothing() -> None:
    now = clusters.observation(4).sample
    sample = replace(now, gpus=8, gpus_allocated=6, cpus=100, cpus_allocated=40, gpus_starved=1.5)
    assert hourly(sample, PRICES) == Spending(1.0, 16.0, 3.0, 10.0)
    at_s = sample.taken_s
    history = [sample, replace(sample, taken_s=at_s + 1800), replace(sample, taken_s=at_s + 1800 + 86400)]
    assert spent(history, PRICES) == Spending(1.5, 24.0, 4.5, 15.0), "nobody looked for a day but for its first hour"
    assert spent([sample], PRICES) == Spending()


@pytest.mark.shows("prices stand beside time in `util`, `report`, `simulate` and `bench-cost`")
def test_the_page_has_costs_where_there_are_prices() -> None:
    seen = clusters.observation(4)
    assert "Cost" not in page(seen, clusters.history(seen.sample))
    priced = page(seen, clusters.history(seen.sample), PRICES)
    assert PRICES.shown(hourly(seen.sample, PRICES).held) in priced
    assert "EUR" in page(seen, [], PRICES)


@pytest.mark.shows("prices stand beside time in `util`, `report`, `simulate` and `bench-cost`")
def test_util_and_report_show_cost_in_every_form(tmp_path: Path) -> None:
    own = tmp_path / "prices"
    own.write_text("gpu_hour=2\ncpu_hour=0.1\ncurrency=EUR\n")
    cluster = Recorded(tmp_path)
    plain = json.loads(cluster.run("util --json").stdout)
    assert plain["summary"]["cost"] is None
    found = json.loads(cluster.run(f"util --json --prices {own}").stdout)
    summary = found["summary"]
    assert summary["cost"] == pytest.approx(PRICES.of(summary["gpu_hours"], summary["cpu_hours"]), abs=0.01)
    assert summary["prices"] == {"gpu_hour": 2.0, "cpu_hour": 0.1, "currency": "EUR"}
    assert sum(row["cost"] for row in found["groups"]) == pytest.approx(summary["cost"], abs=0.01)
    told = cluster.run("util", HETSTREAM_PRICES=str(own)).stdout
    assert f"cost:      {PRICES.shown(summary['cost'])} for what jobs held" in told
    assert "COST" in told
    assert "COST" not in cluster.run("util").stdout
    html = tmp_path / "page.html"
    report = cluster.run(f"report --html {html} --prices gpu_hour=2,cpu_hour=0.1,currency=EUR --json")
    cost = json.loads(report.stdout)["summary"]["cost"]
    assert PRICES.shown(cost["an_hour_now"]["held"]) in html.read_text()
    assert json.loads(cluster.run("report --json").stdout)["summary"]["cost"] is None
    for wrong in ("gpu_hour=x", "/nowhere"):
        done = cluster.run(f"report --prices {wrong}")
        assert done.returncode == (2 if "=" in wrong else 1)
        assert wrong in done.stderr
