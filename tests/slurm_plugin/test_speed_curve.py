"""A curve from what jobs have measured: concave, bounded, and no right by wanting much. Pure."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetstream.hetjob.ports import Measured, SpeedPoint
from hetstream.slurm_plugin.daemon.registry import MAX_CPUS_PER_GPU, POINTS, assumed_curve, curve_of
from hetstream.slurm_plugin.policy.table import check_table, job_table


def measured(*points: tuple[int, int, float], ideal: float = 10.0) -> Measured:
    return Measured(1.0, ideal, tuple(SpeedPoint(*point) for point in points))


def bends(curve: tuple[tuple[float, ...], tuple[float, ...]]) -> list[tuple[float, float]]:
    return list(dict.fromkeys(zip(*curve, strict=True)))


def test_known_curves() -> None:
    # Half the speed with 8 CPUs: it goes on so up to all of it.
    assert bends(curve_of(measured((4, 2, 5.0)), 1.0)) == [(0.0, 0.0), (16.0, 1.0)]
    # The job's own loading, then a knee, then flat.
    assert bends(curve_of(measured((1, 0, 2.0), (4, 1, 6.0), (4, 2, 10.0), (4, 4, 10.0)), 1.0)) == [
        (0.0, 0.2), (8.0, 1.0),
    ]  # fmt: skip
    # Noise below a line between two measurements is no knee.
    assert bends(curve_of(measured((1, 4, 4.0), (1, 6, 4.1), (1, 8, 8.0)), 1.0)) == [(0.0, 0.0), (10.0, 1.0)]
    assert bends(curve_of(measured((1, 0, 10.0), (1, 4, 10.0)), 1.0)) == [(0.0, 1.0)]
    # A data worker takes the place of the job's own loading: two are twice as fast as one, not a little faster.
    assert bends(curve_of(measured((1, 0, 2.0), (1, 1, 2.5)), 1.0)) == [(0.0, 0.2), (4.0, 1.0)]
    # The job's own loading beats two data workers, and five beat it.
    assert bends(curve_of(measured((1, 0, 5.0), (1, 2, 4.0)), 1.0)) == [(0.0, 0.5), (5.0, 1.0)]


def test_a_job_that_says_too_much_is_cut() -> None:
    curve = curve_of(measured((100_000, 100, 9.0), (1, 1, 0.001)), 2.0)
    assert max(curve[0]) <= 2 * MAX_CPUS_PER_GPU


def test_without_a_measurement_to_want_more_gives_no_more_at_the_same_cpus() -> None:
    small, large = assumed_curve(64.0, 2.0, 8.0), assumed_curve(6400.0, 2.0, 8.0)
    for cpus in (4.0, 16.0):
        assert np.interp(cpus, *large) <= np.interp(cpus, *small)
    assert bends(assumed_curve(8.0, 2.0, 8.0)) == [(0.0, 0.0), (8.0, 1.0)]
    assert bends(assumed_curve(0.0, 2.0, 8.0)) == [(0.0, 0.0)]


POINT = st.builds(SpeedPoint, st.integers(1, 64), st.integers(0, 64), st.floats(0, 1e6))
ANY = st.builds(
    Measured, st.floats(0, 1e6), st.floats(1e-3, 1e6), st.lists(POINT, max_size=16).map(tuple)
)  # fmt: skip


@settings(deadline=None)
@given(ANY, st.floats(0, 64), st.integers(0, 10_000))
def test_every_curve_is_one_that_policies_are_written_for(said: Measured, gpus: float, wanted: int) -> None:
    for curve in (curve_of(said, gpus), assumed_curve(float(wanted), gpus, 8.0)):
        assert (len(curve[0]), len(curve[1])) == (POINTS, POINTS)
        check_table(job_table([1], [wanted], curve_cpus=[curve[0]], curve_speed=[curve[1]]))


def test_points_without_a_data_worker_make_no_curve_alone() -> None:
    assert bends(curve_of(measured((1, 0, 3.0)), 1.0)) == [(0.0, pytest.approx(0.3))]


def test_a_speed_near_nothing_is_nothing() -> None:
    said = Measured(1.0, 1.0, points=(SpeedPoint(4, 1, 5e-324), SpeedPoint(4, 2, 1.0)))
    assert curve_of(said, 1.0) == curve_of(Measured(1.0, 1.0, points=(SpeedPoint(4, 2, 1.0),)), 1.0)


def test_a_job_that_reports_again_and_again_has_one_curve_in_memory() -> None:
    points = (SpeedPoint(4, 1, 0.5), SpeedPoint(4, 2, 1.0))
    first, later = (Measured(now, 1.25, points, step_bytes=now) for now in (0.5, 0.75))
    assert curve_of(first, 3.0) is curve_of(later, 3.0)
