"""The order of samples: a bijection, the same for any reader, every rank the same number of steps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetstream.mpi_dataworkers.errors import PipelineError
from hetstream.mpi_dataworkers.order.sharding import EpochPlan, SampleSeeds, derive_seed, permute


@given(n=st.integers(1, 3000), seed=st.integers(0, 2**63), epoch=st.integers(0, 1000))
def test_permute_is_a_bijection(n: int, seed: int, epoch: int) -> None:
    order = permute(np.arange(n), n, seed, epoch)
    assert sorted(order.tolist()) == list(range(n))


@pytest.mark.shows("each iteration is the next epoch, with an order of its own, unless `set_epoch` chooses one")
def test_permute_differs_by_seed_and_epoch_and_is_seekable() -> None:
    n = 10_000_000
    tail = permute(np.arange(n - 5, n), n, 7, 3)
    assert tail.tolist() == permute(np.arange(n - 5, n), n, 7, 3).tolist()
    assert tail.tolist() != permute(np.arange(n - 5, n), n, 7, 4).tolist()
    assert tail.tolist() != permute(np.arange(n - 5, n), n, 8, 3).tolist()


def test_permute_spreads_evenly() -> None:
    # Where sample 0 lands over many epochs: chi-square with 15 degrees of freedom, 99.9 % quantile 37.7.
    n, epochs = 16, 8000
    where = [int(np.flatnonzero(permute(np.arange(n), n, 1, epoch) == 0)[0]) for epoch in range(epochs)]
    counts = np.bincount(where, minlength=n)
    assert ((counts - epochs / n) ** 2 / (epochs / n)).sum() < 37.7


@pytest.mark.shows("the last, partial batch comes, or `drop_last` leaves it out")
@settings(deadline=None)
@given(
    n=st.integers(0, 400),
    batch_size=st.integers(1, 9),
    world_size=st.integers(1, 6),
    drop_last=st.booleans(),
    shuffle=st.booleans(),
)
def test_every_sample_once_and_every_rank_the_same_number_of_steps(
    n: int, batch_size: int, world_size: int, drop_last: bool, shuffle: bool
) -> None:
    try:
        plan = EpochPlan(n, batch_size, world_size, drop_last, shuffle, seed=3, epoch=1)
    except PipelineError:
        assert 0 < n % (batch_size * world_size) < world_size
        return
    batches = [[plan.indices(step, rank) for rank in range(world_size)] for step in range(plan.num_steps)]
    assert all(1 <= len(batch) <= batch_size for ranks in batches for batch in ranks)
    seen = [int(i) for ranks in batches for batch in ranks for i in batch]
    assert len(set(seen)) == len(seen)
    assert len(seen) == (n - n % (batch_size * world_size) if drop_last else n)


def test_one_rank_without_shuffle_is_torchs_sequential_order() -> None:
    plan = EpochPlan(7, 3)
    assert [plan.indices(k).tolist() for k in range(plan.num_steps)] == [[0, 1, 2], [3, 4, 5], [6]]


def test_global_order_does_not_depend_on_the_world_size() -> None:
    one = EpochPlan(96, 8, 1, shuffle=True, seed=5)
    four = EpochPlan(96, 2, 4, shuffle=True, seed=5)
    for step in range(one.num_steps):
        split = np.concatenate([four.indices(step, rank) for rank in range(4)])
        assert split.tolist() == one.indices(step).tolist()


@pytest.mark.shows("the place in the data is right after a resize within an epoch")
@settings(deadline=None)
@given(
    n=st.integers(0, 300),
    global_batch_size=st.integers(1, 24),
    world_sizes=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    drop_last=st.booleans(),
    shuffle=st.booleans(),
)
def test_with_a_global_batch_size_every_world_size_has_the_same_global_steps(
    n: int, global_batch_size: int, world_sizes: tuple[int, int], drop_last: bool, shuffle: bool
) -> None:
    steps = []
    for world_size in world_sizes:
        try:
            plan = EpochPlan(n, 1, world_size, drop_last, shuffle, 3, 1, global_batch_size=global_batch_size)
        except PipelineError:
            # At most half a global batch of ranks always works, but for a dataset that is smaller than that.
            assert world_size > min(global_batch_size // 2, n)
            return
        shares = [[plan.indices(step, rank).tolist() for rank in range(world_size)] for step in range(plan.num_steps)]
        for ranks in shares:
            sizes = [len(share) for share in ranks]
            assert min(sizes) >= 1
            assert max(sizes) - min(sizes) <= 1
        steps.append([[index for share in ranks for index in share] for ranks in shares])
    assert steps[0] == steps[1]
    seen = [index for step in steps[0] for index in step]
    assert len(set(seen)) == len(seen) == (n - n % global_batch_size if drop_last else n)


def test_a_short_last_global_batch_is_divided_with_the_one_before() -> None:
    sizes = [[len(EpochPlan(n, 1, 1, global_batch_size=8).indices(k)) for k in range(3)] for n in (19, 20, 24)]
    assert sizes == [[8, 6, 5], [8, 8, 4], [8, 8, 8]]


def test_outside_the_plan_is_an_error() -> None:
    with pytest.raises(IndexError, match="step 3"):
        EpochPlan(7, 3).indices(3)


def test_derived_seeds_differ() -> None:
    seeds = {derive_seed(0, epoch, index) for epoch in range(20) for index in range(500)}
    assert len(seeds) == 20 * 500


@given(
    indices=st.lists(st.integers(0, 2**62), min_size=0, max_size=40),
    seed=st.integers(0, 2**63 - 1),
    epoch=st.integers(0, 1000),
    step=st.none() | st.integers(0, 10**9),
)
def test_seeds_are_the_same_one_by_one_and_all_at_once(
    indices: list[int], seed: int, epoch: int, step: int | None
) -> None:
    seeds = SampleSeeds(np.array(indices, dtype=np.int64), seed, epoch, step)
    made = list(seeds)
    assert made == [seeds[place] for place in range(len(indices))]
    if step is None:
        assert made == [derive_seed(seed, epoch, index) for index in indices]
    assert {type(value) for value in made} <= {int}
