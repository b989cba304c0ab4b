"""Which policies and promises go together, and what is said when they do not."""

from __future__ import annotations

from typing import Any

import pytest

from hetstream.base.errors import ConfigError
from hetstream.mpi_dataworkers.order.visitation import Cut, ShardingPolicy, Traits, decide

INDEXED = Traits("Table")
STREAM = Traits("Log", iterable=True)
FILES = Traits("Folder", iterable=True, num_files=20)


@pytest.mark.shows("names of tf.data service are there: `ShardingPolicy`, `Visitation`, `job_name`")
@pytest.mark.parametrize(
    ("sharding", "traits", "cut", "num_shards", "visitation"),
    [
        (None, INDEXED, Cut.STEPS, 1, "exactly_once"),
        ("off", INDEXED, Cut.COPIES, 0, "zero_once_or_more"),
        ("data", INDEXED, Cut.INDICES, 8, "exactly_once"),
        ("file_or_data", INDEXED, Cut.INDICES, 8, "exactly_once"),
        (None, STREAM, Cut.WHOLE, 1, "exactly_once"),
        (None, Traits("Log", iterable=True, num_workers=3), Cut.ITSELF, 3, "exactly_once"),
        (ShardingPolicy.OFF, STREAM, Cut.COPIES, 0, "zero_once_or_more"),
        (ShardingPolicy.FILE_OR_DATA, STREAM, Cut.ELEMENTS, 8, "exactly_once"),
        (ShardingPolicy.FILE_OR_DATA, FILES, Cut.FILES, 8, "exactly_once"),
        (ShardingPolicy.DYNAMIC, FILES, Cut.EACH_FILE, 20, "exactly_once"),
        (None, Traits("Log", iterable=True, world_size=3), Cut.ITSELF_FOR_RANKS, 3, "exactly_once"),
        (
            None,
            Traits("Log", iterable=True, world_size=3, num_workers=2),
            Cut.ITSELF_FOR_RANKS,
            6,
            "exactly_once",
        ),
        ("data", Traits("Log", iterable=True, world_size=3, num_workers=2), Cut.ELEMENTS, 9, "exactly_once"),
    ],
)
def test_defaults(sharding: Any, traits: Traits, cut: Cut, num_shards: int, visitation: str) -> None:
    decided = decide(sharding, None, None, traits)
    assert (decided.cut, decided.num_shards, decided.visitation) == (cut, num_shards, visitation)


@pytest.mark.shows("every setting is checked at construction, all problems at once")
@pytest.mark.parametrize(
    ("keywords", "traits", "texts"),
    [
        (("never", "twice", 0), INDEXED, ["sharding='never'", "visitation='twice'", "num_shards=0"]),
        (("DYNAMIC", None, None), INDEXED, ["sharding='DYNAMIC': must be one of off, dynamic, "]),
        (("off", "exactly_once", None), INDEXED, ["OFF gives zero_once_or_more"]),
        (("data", "zero_once_or_more", None), INDEXED, ["OFF gives zero_once_or_more"]),
        (("hint", None, None), INDEXED, ["Table is read by index"]),
        (("file", None, None), STREAM, ["Log has no attribute `files`"]),
        (("dynamic", None, None), STREAM, ["Log has no attribute `files`"]),
        ((None, None, 2), Traits("Log", iterable=True, world_size=3), ["3 ranks need at least one shard each"]),
        (("off", None, 4), STREAM, ["has no fixed number of shards"]),
        (("data", None, None), Traits("Table", listed=True), ["their order is one stream"]),
        ((None, None, None), Traits("Log", iterable=True, shuffle=True), ["has no indices to shuffle"]),
        ((None, "at_most_once", None), Traits("Table", in_order=False), ["in_order=False"]),
    ],
)
def test_what_cannot_be_is_told_all_at_once(keywords: Any, traits: Traits, texts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        decide(*keywords, traits)
    for text in texts:
        assert text in str(caught.value)
