"""Which rank of a host compares which bytes of a checkpoint with their checksums, so that each is read once. Pure.

The ranks of a host read the same files: all of them that of rank 0, with what is equal everywhere, and after a change
of the number of ranks many more. What one has read and found right lies in the page cache for all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def files_of(rank: int, num_ranks: int, num_saved: int) -> list[int]:
    """The ranks whose files a rank restores from.

    Args:
        rank: of now.
        num_ranks: how many there are now.
        num_saved: how many saved.
    """
    if num_ranks == num_saved:
        return sorted({0, rank})
    return [*range(num_saved)]  # any of them may have a piece of a sharded tensor


def files_of_host(ranks: Iterable[int], num_ranks: int, num_saved: int) -> list[int]:
    """As `files_of`, for all ranks of a host that restore from disk."""
    return sorted({file for rank in ranks for file in files_of(rank, num_ranks, num_saved)})


def share_of(counts: Sequence[tuple[int, int]], number: int, num_shares: int) -> list[tuple[int, list[int]]]:
    """One rank's share of the chunks: a run of them, as disks like it.

    Args:
        counts: file, and number of its chunks.
        number: which share.
        num_shares: how many ranks there are to share.

    Returns:
        File, and numbers of chunks of it.
    """
    total = sum(count for _, count in counts)
    begin, end = (total * share // num_shares for share in (number, number + 1))
    found = []
    at = 0
    for file, count in counts:
        mine = [*range(max(0, begin - at), min(count, end - at))]
        if mine:
            found.append((file, mine))
        at += count
    return found
