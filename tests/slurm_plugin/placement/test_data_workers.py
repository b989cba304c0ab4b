"""Where data workers go, what their traffic may be, and when one moves."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hetstream.slurm_plugin.placement import Network, room_of, spread

GBIT = 1e9 / 8


def network(
    num: int, used: list[float] | None = None, remote: list[int] | None = None, link: float = 20 * GBIT
) -> Network:
    return Network(np.full(num, link), np.array(used or [0.0] * num), np.array(remote or [0] * num))


@pytest.mark.shows("data workers go to the trainer's node first, then where least other traffic is")
@pytest.mark.shows("whole jobs are placed by FGD, best fit, dot product and chance, within budgets")
def test_the_trainers_own_node_comes_first_then_those_with_least_other_traffic() -> None:
    found = spread(np.array([3, 9, 4, 4]), [0], 8, 1e6, network(4, remote=[0, 5, 2, 0]))
    assert found.places == ((0, 3), (3, 4), (2, 1))
    assert found.num_left == 0
    assert found.reason == "3 of 8 beside the trainer, 5 where least other traffic is"


def test_of_equally_many_remote_ones_the_node_with_less_traffic_comes_first() -> None:
    found = spread(np.array([0, 4, 4]), [0], 4, 1e6, network(3, used=[0.0, 5e8, 1e8], remote=[0, 1, 1]))
    assert found.places == ((2, 4),)


@pytest.mark.shows("data workers go to the trainer's node first, then where least other traffic is")
def test_a_job_that_is_heavy_on_the_network_stays_near_and_gets_no_more_than_the_budget() -> None:
    """12 Gb/s of batches, 20 Gb/s links of which half may be used."""
    heavy = 12 * GBIT / 8
    found = spread(np.array([4, 100, 100]), [0], 12, heavy, network(3))
    assert dict(found.places) == {0: 4, 1: 6}
    assert found.num_left == 2
    assert found.reason.endswith("2 have no place: the network budget of the trainer's node is used up")
    local = spread(np.array([12, 100]), [0], 12, heavy, network(2))
    assert local.places == ((0, 12),)
    assert not local.traffic_bytes_per_s.any()


def test_what_others_send_counts() -> None:
    full = network(2, used=[10 * GBIT, 0.0])
    assert spread(np.array([0, 9]), [0], 3, 1e6, full).num_left == 3
    assert spread(np.array([0, 9]), [0], 3, 0.0, full).num_left == 0


def test_no_room_is_said_to_be_none() -> None:
    assert spread(np.array([0, 1]), [0], 3, 1e6, network(2)).reason.endswith("2 have no place: no room")


@pytest.mark.shows("whole jobs are placed by FGD, best fit, dot product and chance, within budgets")
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.tuples(st.integers(0, 9), st.floats(0, 3e9), st.integers(0, 4)), min_size=2, max_size=8),
    st.integers(0, 30),
    st.floats(0, 1e9),
    st.integers(1, 2),
)
def test_no_link_carries_more_than_its_budget_and_no_node_more_than_it_holds(
    nodes: list[tuple[int, float, int]], num: int, bytes_per_s: float, num_trainers: int
) -> None:
    room = np.array([one for one, _, _ in nodes])
    net = network(len(nodes), [one for _, one, _ in nodes], [one for _, _, one in nodes])
    found = spread(room, list(range(num_trainers)), num, bytes_per_s, net)
    assert sum(count for _, count in found.places) + found.num_left == num
    assert len({node for node, _ in found.places}) == len(found.places)
    assert all(0 < count <= room[node] for node, count in found.places)
    assert (found.traffic_bytes_per_s <= net.left_bytes_per_s * (1 + 1e-9) + 1e-6).all()
    # The first node of the trainers is filled before any other gets one, unless its batches may not leave it.
    if num_trainers == 1 and any(node for node, _ in found.places):
        assert dict(found.places).get(0, 0) == min(num, room[0])


def test_room_leaves_cpus_for_trainers() -> None:
    free, memory = np.array([10, 3, 8]), np.array([64, 64, 8])
    assert room_of(free, memory, 4).tolist() == [2, 0, 2]
    assert room_of(free, memory, 4, memory_mb=8, reserved_cpus=np.array([4, 0, 0])).tolist() == [1, 0, 1]
    with pytest.raises(ValueError, match="at least one CPU"):
        room_of(free, memory, 0)
