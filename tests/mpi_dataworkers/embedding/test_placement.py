"""Parts of ranks among servers."""

from __future__ import annotations

from collections import Counter

import pytest

from hetstream.mpi_dataworkers.embedding.placement import place


@pytest.mark.parametrize("num_ranks", [1, 3, 64, 100, 256])
@pytest.mark.parametrize("num_servers", [1, 2, 3, 7])
def test_servers_have_as_many_parts_of_all_ranks_together(num_ranks: int, num_servers: int) -> None:
    servers = [f"s{number}" for number in range(num_servers)]
    counts: Counter[str] = Counter()
    for rank in range(num_ranks):
        parts = range(rank, 256, num_ranks)
        placed = place(parts, {}, servers)
        assert sorted(placed) == list(parts)
        of_rank = [list(placed.values()).count(server) for server in servers]
        assert max(of_rank) - min(of_rank) <= 1
        assert place(list(parts)[::-1], dict(placed), servers[::-1]) == placed, "nothing moves"
        counts.update(placed.values())
    assert max(counts.values()) <= 1.15 * 256 / num_servers + 1


def test_as_few_parts_move_as_possible() -> None:
    parts = range(1, 256, 3)
    placed = place(parts, {}, ["a", "b"])
    joined = place(parts, placed, ["a", "b", "c"])
    moved = [part for part in parts if joined[part] != placed[part]]
    assert {joined[part] for part in moved} == {"c"}
    assert len(moved) == len(parts) // 3
    left = place(parts, joined, ["b", "c"])
    assert all(left[part] == joined[part] for part in parts if joined[part] != "a")
