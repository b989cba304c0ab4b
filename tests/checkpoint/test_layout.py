"""Layouts: every tensor has its own aligned bytes, whatever comes in; and JSON from elsewhere is not believed."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetstream.checkpoint.errors import DamagedLayout
from hetstream.checkpoint.record.layout import (
    ALIGN_BYTES,
    ITEM_BYTES,
    MAX_PAYLOAD_BYTES,
    TensorSpec,
    from_json,
    lay_out,
)

shapes = st.lists(st.integers(0, 70), max_size=4).map(tuple)
specs = st.lists(
    st.builds(TensorSpec, st.text(st.characters(codec="utf-8"), min_size=1), st.sampled_from(list(ITEM_BYTES)), shapes),
    max_size=30,
    unique_by=lambda spec: spec.name,
).filter(lambda made: all(spec.name != "__metadata__" for spec in made))


@pytest.mark.shows("every tensor lies at a multiple of 64 bytes, and none overlaps; a foreign layout is refused")
@given(specs)
def test_tensors_are_aligned_inside_and_do_not_overlap(made: list[TensorSpec]) -> None:
    layout = lay_out(made)
    assert [(entry.name, entry.dtype, entry.shape) for entry in layout.entries] == [
        (spec.name, spec.dtype, spec.shape) for spec in made
    ]
    end = 0
    for entry in sorted(layout.entries, key=lambda entry: (entry.offset, entry.num_bytes)):
        assert entry.num_bytes == math.prod(entry.shape) * ITEM_BYTES[entry.dtype]
        assert entry.offset % ALIGN_BYTES == 0
        assert entry.offset >= end
        end = entry.offset + entry.num_bytes
    assert end <= layout.payload_bytes < end + ALIGN_BYTES


@pytest.mark.shows("every tensor lies at a multiple of 64 bytes, and none overlaps; a foreign layout is refused")
@given(specs)
def test_region_a_has_no_holes_and_region_b_packs_onto_item_boundaries(made: list[TensorSpec]) -> None:
    layout = lay_out(made)
    end = 0
    ordered = sorted(layout.entries, key=lambda entry: (entry.offset, entry.num_bytes))
    region_a = [entry for entry in ordered if entry.num_bytes % ALIGN_BYTES == 0]
    region_b = [entry for entry in ordered if entry.num_bytes % ALIGN_BYTES]
    for entry in region_a:
        assert entry.offset == end
        end += entry.num_bytes
    packed = end
    for entry in region_b:
        assert entry.offset >= end
        assert packed % ITEM_BYTES[entry.dtype] == 0
        packed += entry.num_bytes
    assert packed == sum(entry.num_bytes for entry in layout.entries)


@given(specs)
def test_json_gives_the_same_layout(made: list[TensorSpec]) -> None:
    layout = lay_out(made)
    assert from_json(layout.to_json()) == layout


def test_the_digest_tells_names_dtypes_shapes_and_order_apart() -> None:
    first, second = TensorSpec("a", "F32", (2, 3)), TensorSpec("b", "F32", (2, 3))
    layouts = [
        lay_out(made)
        for made in (
            [first, second],
            [second, first],
            [first],
            [TensorSpec("a", "I32", (2, 3)), second],
            [TensorSpec("a", "F32", (3, 2)), second],
        )
    ]
    assert len({layout.digest for layout in layouts}) == len(layouts)
    assert lay_out([first, second]).digest == layouts[0].digest


@pytest.mark.parametrize(
    ("made", "words"),
    [
        ([TensorSpec("a", "F32", (1,)), TensorSpec("a", "F32", (1,))], "'a'"),
        ([TensorSpec("a", "C128", (1,))], "C128"),
        ([TensorSpec("a", "F32", (-1,))], "-1"),
        ([TensorSpec("a", "F32", (1,) * 65)], "64"),
        ([TensorSpec("a", "F32", (1 << 30, 1 << 30))], str(MAX_PAYLOAD_BYTES)),
        ([TensorSpec("a", "U8", (1 << 64, 0))], "sizes"),
        ([TensorSpec("", "F32", (1,))], "called"),
        ([TensorSpec("__metadata__", "F32", (1,))], "__metadata__"),
        ([TensorSpec("\ud800", "F32", (1,))], "not text"),
    ],
)
def test_what_breaks_a_rule_is_refused(made: list[TensorSpec], words: str) -> None:
    with pytest.raises(DamagedLayout, match=words):
        lay_out(made)


@pytest.mark.shows("every tensor lies at a multiple of 64 bytes, and none overlaps; a foreign layout is refused")
@given(
    st.binary(max_size=200)
    | st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters(codec="utf-8")),
        lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["version", "tensors", "x"]), inner),
    ).map(msgspec.json.encode)
    | st.lists(
        st.tuples(st.sampled_from(["a", "b", ""]), st.sampled_from([*ITEM_BYTES, "F4"]), st.lists(st.integers())),
        max_size=3,
    ).map(lambda tensors: msgspec.json.encode({"version": 1, "tensors": tensors}))
)
def test_foreign_json_is_refused_or_a_right_layout(data: bytes) -> None:
    try:
        layout = from_json(data)
    except DamagedLayout:
        return
    assert lay_out([TensorSpec(entry.name, entry.dtype, entry.shape) for entry in layout.entries]) == layout


def test_another_version_is_named() -> None:
    with pytest.raises(DamagedLayout, match="version 2"):
        from_json(b'{"version":2,"tensors":[]}')


def test_deep_json_is_refused() -> None:
    with pytest.raises(DamagedLayout):
        from_json(b'{"version":1,"tensors":' + b"[" * 100_000)
