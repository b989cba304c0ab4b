"""Which rank compares which bytes: together all of them, and none twice."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hetstream.checkpoint.disk.directory import files_of_host, share_of


@given(st.lists(st.integers(0, 9), max_size=9), st.integers(1, 9))
def test_each_chunk_is_one_ranks(counts: list[int], num_shares: int) -> None:
    files = [(7 * file, count) for file, count in enumerate(counts)]
    shares = [share_of(files, number, num_shares) for number in range(num_shares)]
    compared = [(file, chunk) for share in shares for file, chunks in share for chunk in chunks]
    assert compared == [(file, chunk) for file, count in files for chunk in range(count)]
    sizes = [sum(len(chunks) for _, chunks in share) for share in shares]
    assert max(sizes) - min(sizes) <= 1


def test_a_host_needs_its_own_files_and_that_of_rank_0() -> None:
    assert files_of_host([4, 5], 8, 8) == [0, 4, 5]
    assert files_of_host([0], 1, 1) == [0]


def test_after_a_change_of_the_number_of_ranks_it_may_need_any() -> None:
    assert files_of_host([1], 2, 3) == [0, 1, 2]
