"""The picture of `make bench-elastic` is well-formed and says what happened in words."""

from __future__ import annotations

from xml.etree import ElementTree

from benchmarks.clients.elastic_picture import Sample, picture


def test_a_picture_tells_the_changes_and_has_three_charts() -> None:
    samples = [Sample(at / 2, at // 5, at // 4, 1 - at / 40, at) for at in range(40)]
    root = ElementTree.fromstring(picture("A job <grows>", samples, [(6.0, "grow 1"), (15.2, "grow 7")], 40.0))
    charts = root.findall("{http://www.w3.org/2000/svg}svg")
    assert len(charts) == 3
    text = " ".join(root.itertext())
    assert "A job <grows>" in text
    assert "Changes: grow 1 at 6 s, grow 7 at 15 s" in text
    assert "ideal" in text
    assert ElementTree.fromstring(picture("nothing yet", [], [])) is not None
