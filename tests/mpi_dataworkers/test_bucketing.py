"""Plans by bucket of length: nothing lost or repeated, rounds of one bucket, the same for every rank."""

from __future__ import annotations

import pickle
import random

import numpy as np
import pytest

from hetstream.mpi_dataworkers.errors import PipelineError
from hetstream.mpi_dataworkers.order.bucketing import (
    BucketPlan,
    LengthBuckets,
    order_of,
    padding_waste,
    plan_of,
    step_spread,
)

BOUNDARIES = (10, 20, 40, 80)


def skewed(num_samples: int, seed: int = 0) -> LengthBuckets:
    return LengthBuckets(np.random.default_rng(seed).lognormal(3, 0.7, num_samples).astype(int), BOUNDARIES)


@pytest.mark.shows("each round of like length is a function of (lengths, seed, epoch, step)")
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_each_sample_once_and_every_rank_alike(world_size: int, shuffle: bool) -> None:
    draw = random.Random(world_size)
    for _ in range(60):
        num_samples = draw.randrange(world_size, 700)
        buckets = skewed(num_samples, draw.randrange(1000))
        plan = BucketPlan(buckets, draw.randrange(2, 9), world_size, False, shuffle, 3, draw.randrange(5))
        batches = [[plan.indices(step, rank) for rank in range(world_size)] for step in range(plan.num_steps)]
        assert sorted(int(i) for ranks in batches for one in ranks for i in one) == list(range(num_samples))
        assert all(1 <= len(one) <= plan.batch_size for ranks in batches for one in ranks)


@pytest.mark.shows("a step has one bucket of lengths; what fills no round is mixed at the end")
def test_a_round_is_of_one_bucket_but_for_the_remainders_at_the_end() -> None:
    buckets = skewed(1000)
    plan = BucketPlan(buckets, 4, 3, False, True, 1, 0)
    mixed = [step for step in range(plan.num_steps) if plan.bucket(step) is None]
    assert mixed == list(range(plan.num_steps - len(mixed), plan.num_steps))
    assert len(mixed) <= len(BOUNDARIES) + 1
    edges = [0, *BOUNDARIES, 1 << 60]
    for step in range(plan.num_steps - len(mixed)):
        bucket = plan.bucket(step)
        assert bucket is not None
        lengths = buckets.lengths[np.concatenate([plan.indices(step, rank) for rank in range(3)])]
        assert lengths.min() >= edges[bucket]
        assert lengths.max() < edges[bucket + 1]
    seen = {plan.bucket(step) for step in range(12)}
    assert len(seen) > 2, "buckets come in a shuffled order"


def test_with_drop_last_every_round_is_of_one_bucket() -> None:
    plan = BucketPlan(skewed(1000), 4, 3, True, True, 1, 0)
    assert all(plan.bucket(step) is not None for step in range(plan.num_steps))
    assert all(len(plan.indices(step, rank)) == 4 for step in range(plan.num_steps) for rank in range(3))
    read = [int(i) for step in range(plan.num_steps) for rank in range(3) for i in plan.indices(step, rank)]
    assert len(read) == len(set(read)) >= 1000 - 12 * (len(BOUNDARIES) + 1)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("num_samples", [500, 16 * 31 + 1, 40])
def test_the_same_global_batch_has_the_same_rounds_at_another_world_size(num_samples: int, drop_last: bool) -> None:
    buckets = skewed(num_samples)
    plans = [BucketPlan(buckets, -(-16 // world), world, drop_last, True, 2, 1, 16) for world in (1, 2, 3, 8)]
    assert len({plan.num_steps for plan in plans}) == 1
    for step in range(plans[0].num_steps):
        rounds = [np.concatenate([plan.indices(step, rank) for rank in range(plan.world_size)]) for plan in plans]
        assert all(np.array_equal(one, rounds[0]) for one in rounds)
    assert all(plan_of(order_of(plan, 0), 1, buckets) == plan for plan in plans), "as data workers hear of it"
    if not drop_last:
        read = [int(i) for step in range(plans[0].num_steps) for i in plans[0].indices(step)]
        assert sorted(read) == list(range(num_samples))


def test_epochs_and_seeds_differ() -> None:
    buckets = skewed(500)
    orders = {
        tuple(BucketPlan(buckets, 8, 1, False, True, seed, epoch).indices(step).tolist())
        for seed in (0, 1)
        for epoch in (0, 1)
        for step in (0, 1)
    }
    assert len(orders) == 8


def test_fewer_remainders_than_ranks_are_divided_with_a_full_round() -> None:
    plan = BucketPlan(LengthBuckets([5] * 17, [10]), 4, 4)
    assert [len(plan.indices(step, rank)) for step in range(plan.num_steps) for rank in range(4)] == [
        3,
        2,
        2,
        2,
        2,
        2,
        2,
        2,
    ]
    with pytest.raises(PipelineError, match="3 samples with batch_size=4 cannot give each of 4 ranks"):
        BucketPlan(LengthBuckets([5] * 3, [10]), 4, 4)


def test_padding_and_spread_are_less_than_without_buckets() -> None:
    lengths = skewed(4000).lengths
    values = []
    for boundaries in (BOUNDARIES, (1 << 30,)):
        plan = BucketPlan(LengthBuckets(lengths, boundaries), 8, 4, False, True)
        costs = [plan.cost(step) for step in range(plan.num_steps)]
        values.append((padding_waste(costs), step_spread(costs)))
    assert values[0][0] < 0.6 * values[1][0]
    assert values[0][1] < 0.6 * values[1][1]
    assert padding_waste([]) == step_spread([]) == 0.0


def test_buckets_travel() -> None:
    buckets = skewed(100)
    again = pickle.loads(pickle.dumps(buckets))
    assert np.array_equal(again.members, buckets.members)
    assert np.array_equal(again.lengths, buckets.lengths)


@pytest.mark.parametrize(
    ("lengths", "boundaries", "says"),
    [
        ([1.5], [10], "dtype float64"),
        ([-1], [10], "whole numbers >= 0"),
        ([[1]], [10], r"shape \(1, 1\)"),
        ([1], [], "bucket_boundaries=\\[\\]"),
        ([1], [10, 10], "ascending"),
        ([1.0], [20, 10], "dtype float64.*; bucket_boundaries"),
    ],
)
def test_wrong_lengths_and_boundaries_are_refused(lengths: list[int], boundaries: list[int], says: str) -> None:
    with pytest.raises(PipelineError, match=says):
        LengthBuckets(lengths, boundaries)
