"""The page: its charts by hand, what is in it, and how a real browser shows it."""

from __future__ import annotations

import http.client
import json
import re
import struct
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path

import clusters
import pytest
from browser import Browser

from hetstream.base.web import Document, WebServer
from hetstream.slurm_plugin.cli.report import documents
from hetstream.slurm_plugin.client.model import Partition
from hetstream.slurm_plugin.errors import ServeError
from hetstream.slurm_plugin.insight.observation import Reading, Sample, class_of, observe
from hetstream.slurm_plugin.render.charts import (
    Axis,
    Series,
    cell,
    count_axis,
    line_chart,
    share_axis,
    stacked_areas,
    stacked_bars,
    time_axis,
    with_gaps,
)
from hetstream.slurm_plugin.render.page import MAX_LARGE_CELLS, NUM_WORST, binned, page, serve_documents

DESKTOP, PHONE = 1280, 390
# Added by the test alone: the page itself has no script. A window is 500 wide at least, so the page is put in a frame.
MEASURE = (
    "<script>onload = () => parent.postMessage(`width ${document.documentElement.scrollWidth} of ${innerWidth} `"
    " + `shown ${seen('.chart')} nodes ${seen('.cell')}`, '*');"
    "seen = kind => [...document.querySelectorAll(kind)].filter(at => at.getBoundingClientRect().width).length</script>"
)
FRAME = (
    "<title>none</title><script>onmessage = said => {{ document.title = said.data }}</script>"
    '<iframe src="measured.html{view}" style="width:{width}px;height:900px;border:0"></iframe>'
)


def elements(svg: str, name: str, kind: str = "") -> list[ET.Element]:
    """Elements of a picture, which has to be XML."""
    return [one for one in ET.fromstring(svg).iter(name) if kind in one.get("class", "").split() or not kind]


def test_a_line_goes_where_its_numbers_say() -> None:
    lines = [Series("GPUs", 0, [(0, 0.0), (5, None), (10, 1.0)]), Series("<CPUs>", 1, [(0, 1.0), (10, 1.0)])]
    svg = line_chart(lines, Axis(0, 10, [(0, "a"), (10, "b")]), share_axis(), 400, 200, "two & more")
    first, second = elements(svg, "path", "line")
    right = 400 - (12 + 7.4 * 8)
    assert first.get("d") == f"M42.0 172.0M{right:.1f} 12.0"
    assert second.get("d") == f"M42.0 12.0L{right:.1f} 12.0"
    assert first.get("stroke-dasharray") != second.get("stroke-dasharray")
    names = {one.text: float(one.get("y", "0")) for one in elements(svg, "text")}
    assert abs(names["GPUs"] - names["<CPUs>"]) >= 14, "names at the same height are moved apart"


def test_a_step_holds_until_the_next_point() -> None:
    one = Series("x", 2, [(0, 2.0), (10, 0.0)], steps=True)
    svg = line_chart([one], Axis(0, 10, []), Axis(0, 2, []), 100, 140, "")
    assert re.fullmatch(r"M42\.0 12\.0L([\d.]+) 12\.0L\1 112\.0", elements(svg, "path", "line")[0].get("d", ""))


def test_bars_are_stacked_in_proportion() -> None:
    svg = stacked_bars([(0, [1, 0, 3]), (1, [2, 2, 0])], Axis(0, 1, []), Axis(0, 4, []), 200, 140, "")
    found = [(one.get("class"), float(one.get("height", "0"))) for one in elements(svg, "rect") if one.get("class")]
    assert found == [("f0", 25.0), ("f2", 75.0), ("f0", 50.0), ("f1", 50.0)]
    assert len([one for one in elements(svg, "rect") if one.get("fill") == "url(#p2)"]) == 1


def test_areas_lie_on_each_other_and_end_where_nobody_looked() -> None:
    lower = Series("a", 0, [(0, 1.0), (1, 1.0), (2, None), (3, 2.0)])
    upper = Series("b", 2, [(0, 1.0), (1, 3.0), (2, None), (3, 0.0)])
    svg = stacked_areas([lower, upper], Axis(0, 3, []), Axis(0, 4, []), 200, 140, "", hints=[(0, "<zero>"), (3, "x")])
    found = [(one.get("class"), one.get("d")) for one in elements(svg, "path") if one.get("class")]
    assert found == [
        ("f0", "M42.0 87.0L42.0 87.0L92.0 87.0L92.0 87.0L92.0 112.0L92.0 112.0L42.0 112.0L42.0 112.0z"),
        ("f2", "M42.0 62.0L42.0 62.0L92.0 12.0L92.0 12.0L92.0 87.0L92.0 87.0L42.0 87.0L42.0 87.0z"),
        ("f0", "M191.0 62.0L192.0 62.0L193.0 62.0L193.0 112.0L192.0 112.0L191.0 112.0z"),
    ]
    assert len([one for one in elements(svg, "path") if one.get("fill") == "url(#p2)"]) == 1
    bands = elements(svg, "rect", "band")
    assert [(one.get("x"), one.get("width"), one[0].text) for one in bands] == [
        ("42.0", "75.0", "<zero>"), ("117.0", "75.0", "x"),
    ]  # fmt: skip


@pytest.mark.parametrize("span_s", [3, 60, 3600, 86399, 86400, 3 * 86400, 7 * 86400, 92 * 86400, 500 * 86400])
@pytest.mark.parametrize("most", [2, 5])
def test_moments_have_round_labels_all_different(span_s: int, most: int) -> None:
    ticks = time_axis(clusters.NOW_S + 17.5, clusters.NOW_S + 17.5 + span_s, most).ticks
    labels = [text for _, text in ticks]
    assert len(set(labels)) == len(labels)
    assert 1 <= len(labels) <= most + 1
    assert all(text.endswith(":00") for text in labels if ":" in text and span_s >= 86400)


def test_axes_have_round_ticks() -> None:
    assert [text for _, text in count_axis(0).ticks] == ["0", "1"]
    assert [text for _, text in count_axis(7).ticks] == ["0", "2", "4", "6", "8"]
    assert [text for _, text in count_axis(4100).ticks] == ["0", "2,000", "4,000", "6,000"]


def test_nobody_looked_in_between() -> None:
    assert with_gaps([(0, 1), (1, 1), (2, 1), (9, 1)]) == [(0, 1), (1, 1), (2, 1), (5.5, None), (9, 1)]
    assert with_gaps([(0, 1), (9, 1)]) == [(0, 1), (9, 1)]


@pytest.mark.shows("`report --html` is one self-contained page, and nothing is told by colour alone")
def test_a_cell_says_its_value_in_three_ways() -> None:
    svg = cell("gpu<1>", "−0.75", 0, "hint & more", large=True)
    assert [one.text for one in elements(svg, "text")] == ["gpu<1>", "−0.75"]
    assert 'class="f0"' in svg
    assert "url(#p0)" in svg
    small = cell("gpu1", "−0.75", 4, "hint", large=False)
    assert elements(small, "text") == []
    assert elements(small, "title")[0].text == "hint"


@pytest.mark.parametrize(
    ("indicator", "kind"),
    [(-1, 0), (-0.5, 0), (-0.49, 1), (-0.25, 1), (-0.2, 2), (0, 2), (0.2, 2), (0.25, 3), (0.5, 4), (1, 4)],
)
def test_classes_of_the_indicator(indicator: float, kind: int) -> None:
    assert class_of(indicator) == kind


@pytest.mark.shows("`report --html` is one self-contained page, and nothing is told by colour alone")
def test_what_jobs_wait_for_is_counted_by_cause() -> None:
    sample = clusters.observation().sample
    counts = {cause: one.num_jobs for cause, one in sample.waiting.items()}
    assert counts == {
        "GPUs": 5, "GPUs or CPUs": 9, "memory": 3, "scheduler": 1, "priority": 3, "size": 1, "dependency": 1,
    }  # fmt: skip
    either = sample.waiting["GPUs or CPUs"]
    assert (either.gpus, either.cpus, either.longest_s, either.mean_s) == (18, 108, 4800.0, 2400.0)
    assert (sample.gpus, sum(sample.classes), sample.gpus_measured, sample.gpus_starved) == (88 + 7, 22, 2, 0.5)


@pytest.mark.shows("`report --html` is one self-contained page, and nothing is told by colour alone")
def test_the_page_asks_nobody_for_anything_and_escapes_what_users_wrote() -> None:
    evil = "</td><script>alert(1)</script><img src=x>"
    seen = clusters.observation(names=evil)
    text = page(seen, clusters.history(seen.sample))
    assert "<script" not in text
    assert "<img" not in text
    assert "&lt;script&gt;" in text
    assert re.findall(r"(?:https?:)?//[\w.]|@import|url\((?!#[pq]\d\))", text) == []
    for title in ("Nodes now", "Fragmentation over time", "Utilisation over time", "Jobs that wait, by cause",
                  "How long they have waited", "Worst nodes", "Jobs that wait longest"):  # fmt: skip
        assert f"<h2>{title}</h2>" in text
    for svg in re.findall(r"<svg.*?</svg>", text):
        ET.fromstring(svg)
    assert len(text) < 200_000


@pytest.mark.shows("a CPU load above 100 % is drawn as high as it is")
def test_a_cpu_load_above_all_cpus_is_drawn_as_high_as_it_is() -> None:
    """191 %: the axis goes to 200 %, and the curve almost to its top; below 100 % the axis ends there."""
    seen = clusters.observation()
    usual, busy = clusters.history(seen.sample), []
    for sample in usual:
        busy.append(replace(sample, cpu_load=1.91 * sample.cpus))
    assert "200 %" not in page(seen, usual)
    text = page(seen, busy)
    assert "200 %" in text
    axis = share_axis(1.91)
    assert axis.place(1.91) == pytest.approx(0.955)
    assert [label for _, label in axis.ticks] == ["0 %", "50 %", "100 %", "150 %", "200 %"]
    assert [label for _, label in share_axis(0.4).ticks] == ["0 %", "25 %", "50 %", "75 %", "100 %"]


@pytest.mark.shows("the page begins with one sentence, and shows a value where one points")
def test_the_page_begins_with_what_matters_and_has_values_to_point_at() -> None:
    seen = clusters.observation()
    text = page(seen, clusters.history(seen.sample))
    stranded = seen.sample.stranded_gpus
    assert re.search(rf"<h1>{stranded} of \d+ free GPUs are stranded: ", text)
    assert re.search(r"<title>1\d Nov \d\d:\d\d\nGPUs held: \d+ %\nCPUs held: \d+ %\nCPU load: \d+ %\nstranded: ", text)
    assert re.search(r"<title>1\d Nov \d\d:\d\d\nGPUs: \d+\nCPUs: \d+\n", text) is None, "that nobody waits for CPUs"
    assert "<title>cpu2: 16 of 32 CPUs free</title>" in text
    assert "<h3>h200 <span>24 nodes" in text
    assert re.search(r'data-label="Since"><span>18 Nov 0\d:\d\d<', text)
    full = replace(seen.snapshot, nodes=tuple(replace(node, gres_used=node.gres) for node in seen.snapshot.nodes))
    assert "<h1>0 of 96 GPUs and" in page(observe(full, {}), [])


def test_each_partition_has_its_own_worst_and_longest() -> None:
    """More than ten nodes are worse than those of a partition, which are in its view, and not in that of all."""
    seen = clusters.observation(40)
    names = {f"gpu{number}" for number in (8, 28)}
    nodes = tuple(
        replace(node, partitions=("gpu", "a<b")) if node.name in names else node for node in seen.snapshot.nodes
    )
    partitions = (*seen.snapshot.partitions, Partition("a<b", ()))
    text = page(observe(replace(seen.snapshot, nodes=nodes, partitions=partitions), {}), [])
    worst = text.split("<h2>Worst nodes</h2>")[1].split("</table>")[0]
    rows = re.findall(r'<tr data-in="([\d ]+)"><td data-label="Node"><span>(\w+)', worst)
    assert len([views for views, _ in rows if "0" in views.split()]) == NUM_WORST
    assert {name for views, name in rows if "3" in views.split()} == names
    assert '<a class="in" id="in3" href="#in3">a&lt;b</a>' in text
    assert '<p data-in="3">2 of 8 GPUs are free' in text
    alone = replace(seen.snapshot, partitions=seen.snapshot.partitions[:1])
    assert "data-in" not in page(observe(alone, {}), []).split("</style>")[1]


@pytest.mark.shows("`report --html` is one self-contained page, and nothing is told by colour alone")
def test_clusters_with_little_to_show() -> None:
    seen = clusters.observation(gpus=False)
    text = page(seen, [seen.sample])
    assert "No node has GPUs." in text
    assert "1 reading so far: a history needs two" in text
    empty = observe(replace(seen.snapshot, jobs=(), nodes=(), partitions=(), config={}), {})
    text = page(empty, [empty.sample, replace(empty.sample, taken_s=clusters.NOW_S + 60)])
    assert text.count("No job waits for resources.") == 2


def test_jobs_that_are_held_do_not_stretch_the_delays() -> None:
    seen = clusters.observation()
    held = clusters.job(900, 1, 1, 30 * 86400.0, reason="JobHeldUser", name="held-for-a-month")
    text = page(observe(replace(seen.snapshot, jobs=(*seen.snapshot.jobs, held)), {}), [])
    assert "held-for-a-month" not in text
    assert "1 h to 6 h: GPUs: 2, GPUs or CPUs: 3" in text
    assert "7 d to longer: none" in text


def test_many_nodes_are_small_cells() -> None:
    """With those without GPUs."""
    text = page(clusters.observation(MAX_LARGE_CELLS + 8), [])
    assert text.count('class="cell" width="20"') == MAX_LARGE_CELLS + 8 + 4
    assert 'class="cell" width="82"' not in text


def test_samples_are_drawn_in_bins() -> None:
    def at(moment_s: float) -> Sample:
        return replace(clusters.observation(2).sample, taken_s=moment_s)

    samples = [at(moment_s) for moment_s in (0, 1, 2, 50, 51, 100)]
    assert [[one.taken_s for one in some] for some in binned(samples, 4)] == [[0, 1, 2], [50, 51], [100]]
    assert binned(samples, 6) == [[one] for one in samples]


@pytest.mark.shows("`report --html` is one self-contained page, and nothing is told by colour alone")
def test_a_real_browser_shows_it_on_desktops_and_phones(tmp_path: Path, wait_until: Callable[..., None]) -> None:
    browser = Browser(tmp_path)
    seen = clusters.observation(names="a-job-name-of-a-user-who-likes-long-ones" * 3)
    path = tmp_path / "page.html"
    path.write_text(page(seen, clusters.history(seen.sample)))
    (tmp_path / "measured.html").write_text(path.read_text().replace("</body>", f"{MEASURE}</body>"))
    for width, view, num_nodes in ((DESKTOP, "", 28), (PHONE, "#in2", 4), (DESKTOP, "#in0", 28)):
        frame = tmp_path / f"frame-{width}.html"
        frame.write_text(FRAME.format(width=width, view=view))
        document, console = browser.dump(frame.as_uri(), DESKTOP)
        assert console == []
        # Six pictures: of each chart, the one for this width.
        assert f"<title>width {width} of {width} shown 4 nodes {num_nodes}</title>" in document
    for width, height in ((DESKTOP, 1900), (PHONE, 1900)):
        picture = browser.picture(path.as_uri(), width, height)
        assert picture[:8] == b"\x89PNG\r\n\x1a\n"
        assert struct.unpack(">II", picture[16:24]) == (width, height)
        assert len(picture) > 50_000, "it is not blank"

    served = documents(Reading(seen), [seen.sample], 60)
    server = serve_documents("127.0.0.1", 0, lambda: served)
    try:
        document, console = browser.dump(server.url, PHONE)
    finally:
        server.close()
    assert console == [], "the page may not be hindered by its own security policy"
    assert "<p>testbed · " in document


def ask(server: WebServer, path: str, method: str = "GET", host: str | None = None) -> tuple[int, dict[str, str], str]:
    address = server.url.removeprefix("http://").rstrip("/")
    connection = http.client.HTTPConnection(address, timeout=30)
    try:
        connection.request(method, path, headers={"Host": host or address})
        answer = connection.getresponse()
        return answer.status, dict(answer.headers), answer.read().decode()
    finally:
        connection.close()


@pytest.mark.shows("`serve` shows the page live, read only, on localhost")
def test_the_server_shows_two_documents_and_takes_nothing() -> None:
    seen = clusters.observation()
    shown = documents(Reading(seen), [seen.sample], 60)
    server = serve_documents("127.0.0.1", 0, lambda: shown)
    try:
        status, headers, text = ask(server, "/?x=1")
        assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
        assert headers["Content-Security-Policy"].startswith("default-src 'none'")
        assert 'http-equiv="refresh" content="60"' in text
        figures = json.loads(ask(server, "/data.json", host="localhost:80")[2])
        assert (figures["summary"]["gpus"], len(figures["waiting"])) == (88 + 7, 7)
        assert ask(server, "/", "HEAD")[2] == ""
        assert ask(server, "/../etc/passwd")[0] == HTTPStatus.NOT_FOUND
        assert ask(server, "/", "POST")[0] == HTTPStatus.NOT_IMPLEMENTED
        assert ask(server, "/", host="evil.example:80")[0] == HTTPStatus.FORBIDDEN
        shown = documents(Reading(error="Unable to contact <slurm> controller"), [], 60)
        status, _, text = ask(server, "/")
        assert status == HTTPStatus.SERVICE_UNAVAILABLE
        assert "Unable to contact &lt;slurm&gt; controller" in text
        with pytest.raises(ServeError, match="cannot be listened on: Address already in use"):
            serve_documents("127.0.0.1", int(server.url.split(":")[2].rstrip("/")), lambda: {"/": Document("", "")})
    finally:
        server.close()
