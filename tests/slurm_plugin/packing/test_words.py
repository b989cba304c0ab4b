"""What the packer reads of owners' words, and its own notes in Slurm's records."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetstream import slurm_plugin
from hetstream.slurm_plugin.install import units
from hetstream.slurm_plugin.packing.notes import (
    COMMENT_MARK,
    DEFAULT_GPU_BYTES,
    HOLD_WORD,
    EvictedRecord,
    PackingRecord,
    PlacedRecord,
    comment_with,
    gres_of,
    read_record,
    says_place,
    wish_of,
    with_record,
)
from hetstream.slurm_plugin.packing.state import Place

PLACE = Place(("g1", "g2"), (0, 3))


@pytest.mark.parametrize(
    ("comment", "gpus", "gpu_bytes"),
    [
        ("", 1, DEFAULT_GPU_BYTES),
        ("hetstream:gpus=2 hetstream:gpu-memory=16G", 2, 16 << 30),
        ("x hetstream:gpu-memory=512 y", 1, 512 << 20),
        ("hetstream:gpu-memory=2GiB", 1, 2 << 30),
        ("hetstream:gpu=0,1 hetstream:gpus=2", 2, DEFAULT_GPU_BYTES),
    ],
)
def test_wishes(comment: str, gpus: int, gpu_bytes: int) -> None:
    wish = wish_of(comment)
    assert (wish.gpus, wish.gpu_bytes, wish.problem) == (gpus, gpu_bytes, "")


@pytest.mark.parametrize("word", ["gpus=0", "gpus=65", "gpus=-1", "gpus=²", "gpus=99999999999", "gpu-memory=1e9"])
def test_wishes_that_are_none_are_told(word: str) -> None:
    assert word[:20] in wish_of(f"hetstream:{word}").problem


@pytest.mark.parametrize("word", ["gpus=0001" + "0" * 5000, "gpus=\u0663", "gpu-memory=16\u212a", "gpu-memory=\u0661G"])
def test_words_that_python_takes_for_numbers_are_told_too(word: str) -> None:
    """The packer looks at the jobs of all: nobody's Comment may end it."""
    assert "its comment says hetstream:" in wish_of(f"hetstream:{word}").problem


def test_a_long_comment_keeps_whole_words_alone() -> None:
    """Slurm takes no more than 1,024 bytes, and a Comment of an owner may have as many already."""
    long = "\u00fc" * 499 + " hetstream:gpu-memory=16G"
    assert len(long.encode()) == 1023
    assert comment_with(long, PLACE) == "hetstream:gpu=0,3 hetstream:gpu-memory=16G"
    many = comment_with(" ".join(["w\u00f6rd"] * 180 + ["hetstream:gpu-memory=16G"]), PLACE)
    assert set(many.split()) == {"hetstream:gpu=0,3", "w\u00f6rd", "hetstream:gpu-memory=16G"}
    assert 1000 < len(many.encode()) <= 1024


def test_guard_prolog_and_packer_know_places_by_the_same_mark() -> None:
    assert units.COMMENT_MARK == COMMENT_MARK
    guard = Path(slurm_plugin.__file__).parent / "lua" / "job_submit.lua"
    assert re.findall(r'^local MARK = "(.*?)"', guard.read_text(), re.M) == [COMMENT_MARK]
    assert re.findall(r'^local HOLD = "(.*?)"', guard.read_text(), re.M) == [HOLD_WORD]


def test_the_place_comes_first_and_the_owners_words_stay() -> None:
    comment = comment_with("mine hetstream:gpu=7 \x1b[31m hetstream:gpus=2", PLACE)
    assert comment == "hetstream:gpu=0,3 mine hetstream:gpus=2"
    assert says_place(comment, PLACE)
    assert not says_place(f"mine {comment}", PLACE)
    assert comment_with(comment, None) == "mine hetstream:gpus=2"
    assert gres_of(PLACE) == "opp:p0:1,opp:p3:1"


@pytest.mark.shows("a submission's key is a word in Comment; words of others in AdminComment stay")
def test_a_record_comes_back_and_others_words_stay() -> None:
    record = PackingRecord(
        PlacedRecord(PLACE, 1795000000.0, 2), EvictedRecord(3, 1794990000.0, PLACE), ("g1", "g7"), limit="480"
    )
    text = with_record("ticket=5 hetstream:placed=old", record)
    assert text == (
        "ticket=5 hetstream:placed=g[1-2]:0,3@1795000000@2 hetstream:evicted=3@1794990000@g[1-2]:0,3 "
        "hetstream:limit=480 hetstream:nodelist=g[1,7]"
    )
    assert read_record(text) == record
    assert with_record(text, PackingRecord()) == "ticket=5"
    own = PackingRecord(evicted=EvictedRecord(1, 1794990000.0, None))
    assert with_record("", own) == "hetstream:evicted=1@1794990000"
    assert read_record(with_record("", own)) == own


@given(st.text(max_size=60).map("hetstream:placed={} hetstream:evicted=1@2@g[".format))
def test_notes_of_another_form_count_as_not_there(text: str) -> None:
    assert read_record(text).evicted is None
