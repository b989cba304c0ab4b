"""Which remote data workers move beside their trainer, and what a job master asks before. Pure."""

from __future__ import annotations

import math
from dataclasses import replace

import msgspec
import pytest

from hetstream.hetjob.elastic.companions import RemoteWorker, moves
from hetstream.hetjob.master.companions import AGAIN_S, READ_AGAIN_S, CompanionMoves, Placed
from hetstream.hetjob.measured import Measured, RemainingWork

FAR = [RemoteWorker("7", "cpu3", 10.0, 1e6), RemoteWorker("8", "cpu4", 10.0, 9e6)]


def test_a_remote_data_worker_moves_when_that_pays_until_the_end() -> None:
    (first,) = moves(FAR, [("gpu0", 1)], 1.1, 3600, 30)
    assert (first.job, first.source, first.target) == ("8", "cpu4", "gpu0")
    assert first.gain_steps == pytest.approx(10 * 0.1 * 3570)
    assert first.cost_steps == pytest.approx(300)
    assert "3,570 steps more" in first.reason


@pytest.mark.parametrize(
    ("room", "near_speed", "remaining_s"),
    [([("gpu0", 0)], 1.1, 3600), ([("gpu0", 2)], 1.0, 3600), ([("gpu0", 2)], 1.1, 300), ([], 2, 1e9)],
)
def test_it_stays_where_there_is_no_room_no_gain_or_no_time(
    room: list[tuple[str, int]], near_speed: float, remaining_s: float
) -> None:
    assert moves(FAR, room, near_speed, remaining_s, 30) == []


NEAR, FAR_AWAY = Placed("1", 4, "gpu0", 12.0), Placed("2", 4, "cpu1", 8.0)
# 36,000 steps at 10 a second: an hour.
MEASURED = Measured(9.0, 10.0, (), 1e6, trainer_nodes=("gpu0",), remaining=RemainingWork(36_000.0, 0.0, "directive"))


def test_a_move_is_proposed_with_its_reason_where_a_near_one_is_seen_to_be_faster() -> None:
    move = CompanionMoves().move([NEAR, FAR_AWAY], ["gpu0", "cpu2"], MEASURED, 0.0)
    assert move is not None
    assert (move.job, move.source, move.target) == ("2", "cpu1", "gpu0")
    assert "8 MB/s less on the network" in move.reason


def test_hosts_may_call_themselves_by_their_full_names() -> None:
    hosts = msgspec.structs.replace(MEASURED, trainer_nodes=("gpu0.cluster.site",))
    near, far = replace(NEAR, host="gpu0.cluster.site"), replace(FAR_AWAY, host="cpu1.cluster.site")
    move = CompanionMoves().move([near, far], ["gpu0"], hosts, 0.0)
    assert move is not None
    assert (move.job, move.target) == ("2", "gpu0")
    assert CompanionMoves().move([near, far], ["node17"], hosts, 0.0) is None


@pytest.mark.parametrize(
    ("placed", "nodes", "measured"),
    [
        ([NEAR, FAR_AWAY], [], MEASURED),
        ([NEAR, FAR_AWAY], ["cpu2"], MEASURED),  # no better than where it is
        ([FAR_AWAY], ["gpu0"], MEASURED),  # nobody knows what a near one makes
        ([replace(NEAR, cpus=8), FAR_AWAY], ["gpu0"], MEASURED),  # of another size
        ([replace(NEAR, rate_per_s=8.0), FAR_AWAY], ["gpu0"], MEASURED),
        ([replace(NEAR, rate_per_s=0.0), FAR_AWAY], ["gpu0"], MEASURED),
        ([NEAR, replace(FAR_AWAY, rate_per_s=0.0)], ["gpu0"], MEASURED),
        ([replace(NEAR, rate_per_s=math.nan), FAR_AWAY], ["gpu0"], MEASURED),
        ([NEAR, FAR_AWAY], ["gpu0"], None),
        ([NEAR, NEAR], ["gpu0"], MEASURED),
    ],
)
def test_without_room_gain_or_knowledge_everything_stays(
    placed: list[Placed], nodes: list[str], measured: Measured | None
) -> None:
    assert CompanionMoves().move(placed, nodes, measured, 0.0) is None


@pytest.mark.parametrize(
    ("remaining", "moves_now"),
    [
        (RemainingWork(36_000.0, 0.0, "directive"), True),
        (RemainingWork(1_000.0, 0.0, "directive"), False),
        (RemainingWork(3_000.0, 1.4, "time_limit"), False),  # it may be over in a minute
        (None, False),
    ],
)
def test_time_that_is_left_is_taken_for_as_short_as_it_may_well_be(
    remaining: RemainingWork | None, moves_now: bool
) -> None:
    measured = msgspec.structs.replace(MEASURED, remaining=remaining)
    assert (CompanionMoves().move([NEAR, FAR_AWAY], ["gpu0"], measured, 0.0) is not None) == moves_now


def test_a_node_that_had_no_room_after_all_is_left_alone_for_a_while() -> None:
    wishes = CompanionMoves()
    wishes.not_possible("gpu0", 100.0)
    assert wishes.move([NEAR, FAR_AWAY], ["gpu0"], MEASURED, 100.0 + AGAIN_S - 1) is None
    assert wishes.move([NEAR, FAR_AWAY], ["gpu0"], MEASURED, 100.0 + AGAIN_S) is not None


def test_room_that_a_move_has_just_taken_is_not_taken_again_before_the_site_has_looked() -> None:
    wishes = CompanionMoves()
    assert wishes.move([NEAR, FAR_AWAY], ["gpu0"], MEASURED, 0.0)
    wishes.begun("gpu0", 0.0)
    assert wishes.move([NEAR, FAR_AWAY], ["gpu0"], MEASURED, READ_AGAIN_S - 1) is None
    assert wishes.move([NEAR, FAR_AWAY], ["gpu0"], MEASURED, READ_AGAIN_S)
