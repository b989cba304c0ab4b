"""How long a companion in a backfill hole asks for, when it leaves, and what is counted: decisions without Slurm."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetstream.base.errors import ConfigError
from hetstream.hetjob.elastic.companions import NICE, Holes, TimeRequest
from hetstream.hetjob.master.controller_state_file import CompanionTime, TimeTally
from hetstream.hetjob.master.server import hole_options
from hetstream.hetjob.ports import MarkedJob

times = st.floats(0.5, 100_000)


def test_a_companion_asks_for_little_at_the_least_and_for_an_hour_at_the_most() -> None:
    request = Holes(120).request(None)
    assert request == TimeRequest(120, 3600)
    assert request.options == ("--time=60", "--time-min=2")
    assert Holes(5400).request(None) == TimeRequest(5400, 10800)
    assert Holes(120, allowed_s=630).request(None) == TimeRequest(120, 600)
    assert Holes(120).request(601) == TimeRequest(120, 660), "no longer than the job, in whole minutes"


def test_the_minimum_is_a_guess_that_grows_with_success_and_shrinks_with_waiting() -> None:
    holes = Holes(120)
    holes.lasted(120, 120)
    assert holes.request(None) == TimeRequest(240, 3600)
    assert holes.shorter(240, 44) is None, "one look of backfill's is not over"
    assert holes.shorter(240, 45) == 120
    assert holes.shorter(120, 1000) is None
    assert holes.request(None) == TimeRequest(120, 3600)
    holes.lasted(120, 540)
    assert holes.request(None) == TimeRequest(120, 3600), "Slurm grants the whole hole: there is nothing to guess"


def test_a_hole_that_is_shorter_than_twice_its_cost_is_left_to_others() -> None:
    holes = Holes(60)
    assert holes.least_s == 60
    holes.started(35)
    holes.drained(8)  # so that companions leave 21 s before their end
    assert holes.least_s == 120
    assert holes.request(None) == TimeRequest(120, 3600)
    assert holes.request(59) is None
    assert holes.why_not(59) == (
        "a companion is worth a hole of 120 s (it takes 35 s to start and leaves 21 s before its end), and the job "
        "ends in 59 s"
    )


@given(given_s=times, left_s=st.none() | times, starts=st.lists(times), drains=st.lists(times), lasted=st.lists(times))
def test_what_is_asked_for_is_possible_and_useful(
    given_s: float, left_s: float | None, starts: list[float], drains: list[float], lasted: list[float]
) -> None:
    holes = Holes(given_s)
    for seconds in starts:
        holes.started(seconds)
    for seconds in drains:
        holes.drained(seconds)
    for seconds in lasted:
        holes.lasted(seconds, seconds)
    asked = holes.request(left_s)
    if asked is None:
        assert min(holes.longest_s, holes.longest_s if left_s is None else left_s + 60) < holes.least_s + 1
        return
    assert given_s <= asked.time_min_s <= asked.time_s <= holes.longest_s
    assert asked.time_min_s % 60 == asked.time_s % 60 == 0
    assert left_s is None or asked.time_s < left_s + 60
    useful_s = asked.time_min_s - holes.start_s - holes.lead_s()
    assert useful_s >= asked.time_min_s / 2 - 1e-6


@given(granted_s=st.floats(60, 100_000), step_s=times, drains=st.lists(times))
def test_a_companion_leaves_in_time_for_its_slowest_step_and_works_most_of_its_time(
    granted_s: float, step_s: float, drains: list[float]
) -> None:
    holes = Holes(60)
    for seconds in drains:
        holes.drained(seconds)
    assert holes.is_due(0.0, granted_s, step_s)
    assert not holes.is_due(granted_s * 0.34, granted_s, step_s)
    if 3 * (5 + 2 * step_s) < granted_s:
        assert holes.is_due(step_s, granted_s, step_s), "a step that begins now could not be finished"


@given(asked_s=st.integers(1, 60).map(lambda minutes: 60.0 * minutes), given_s=st.floats(60, 600))
def test_one_that_waits_comes_to_the_least_in_a_few_steps(asked_s: float, given_s: float) -> None:
    holes, num = Holes(given_s), 0
    while (shorter_s := holes.shorter(asked_s, 45)) is not None:
        assert holes.least_s <= shorter_s < asked_s
        asked_s, num = shorter_s, num + 1
    assert num <= 6


def running(job_id: str, elapsed_s: float, left_s: float | None) -> MarkedJob:
    return MarkedJob(job_id, "RUNNING", 2, elapsed_s, left_s)


def test_the_time_of_a_companion_in_a_hole_and_of_one_with_all_that_it_asked_for() -> None:
    time = CompanionTime(Holes(60))
    for job_id in ("1", "2", "3"):
        time.submitted(job_id, 2, TimeRequest(60, 3600), 100.0)
    time.listed([MarkedJob("1", "PENDING", 2, 0.0, 3600.0)], 105.0)
    assert time.needs_a_look(["1", "2"])
    time.working("1", 112.0)
    time.listed([running("1", 10.0, 50.0), running("2", 9.0, 3591.0)], 114.0)
    assert not time.needs_a_look(["1", "2"])
    assert time.holes is not None
    assert time.holes.start_s == 8.0, "it served before Slurm was asked"
    assert time.due(["1", "2"], {}, 153.0) == {}
    assert time.due(["1", "2"], {}, 154.0) == {"1": 10.0}
    assert time.due(["1", "2"], {"1": 6.0}, 147.0) == {"1": 17.0}
    time.leaves("1", 154.0)
    time.over("1", 156.0)
    time.over("3", 156.0)  # it never started
    assert time.summary(1104.0) == {
        "companions": 2,
        "companions_in_holes": 1,
        "companion_cpu_s": 2 * (52 + 999.0),
        "companion_cpu_s_in_holes": 2 * 52.0,
    }
    assert time.tally.asked == {}


def test_a_job_master_of_later_goes_on_counting() -> None:
    before = CompanionTime(Holes(60))
    before.submitted("1", 2, TimeRequest(60, 3600), 0.0)
    after = CompanionTime(Holes(60), TimeTally(3, 2, 9.0, 6.0, dict(before.tally.asked)))
    after.listed([running("1", 20.0, 40.0)], 30.0)
    assert after.due(["1"], {}, 60.0) == {"1": 10.0}
    after.over("1", 61.0)
    assert (after.tally.num_jobs, after.tally.num_in_holes) == (4, 3)
    assert after.tally.hole_cpu_s == 6.0 + 2 * 51


def test_without_holes_time_is_counted_and_its_end_heeded_where_it_is_known() -> None:
    time = CompanionTime(None)
    time.submitted("1", 4, None, 0.0)
    time.working("1", 5.0)
    assert not time.needs_a_look(["1"])
    assert time.due(["1"], {}, 1e9) == {}
    time.listed([running("1", 5.0, None)], 6.0)
    assert time.due(["1"], {}, 1e9) == {}, "no limit"
    time.listed([running("1", 5.0, 95.0)], 6.0)
    assert time.due(["1"], {}, 90.9) == {}
    assert time.due(["1"], {}, 91.0) == {"1": 10.0}
    assert time.impatient(["1"], 1e9) == {}
    time.over("1", 20.0)
    assert time.summary(20.0)["companion_cpu_s_in_holes"] == 0.0


def test_those_that_wait_ask_for_less_each_by_itself() -> None:
    holes = Holes(60)
    holes.lasted(120, 120)
    time = CompanionTime(holes)
    for job_id in ("1", "2"):
        asked = holes.request(None)
        assert asked == TimeRequest(240, 3600)
        time.submitted(job_id, 1, asked, 0.0)
    assert time.impatient(["1", "2"], 44.0) == {}
    shorter = TimeRequest(120, 3600)
    assert time.impatient(["1", "2"], 45.0) == {"1": shorter, "2": shorter}
    time.asks("1", shorter, 45.0)
    assert time.impatient(["1", "2"], 46.0) == {"2": shorter}
    assert time.impatient(["1"], 90.0) == {"1": TimeRequest(60, 3600)}


def test_what_a_site_says_of_holes(tmp_path: Path) -> None:
    file = tmp_path / "daemon.env"
    assert hole_options(file) == (f"--nice={NICE}",)
    for text, options in {
        "": (f"--nice={NICE}",),
        "no": None,
        '"--partition=scavenge --qos=holes"': ("--partition=scavenge", "--qos=holes"),
        "-p scavenge": ("-p", "scavenge"),
    }.items():
        file.write_text(f"HETSTREAM_DAEMON=unix:/x\nHETSTREAM_HOLES={text}\n")
        assert hole_options(file) == options


@pytest.mark.parametrize("text", ["maybe", "--time=5", "--qos=holes --wrap=x", "--qos='a b", "--qos=a script"])
def test_a_site_that_says_something_else_is_told(tmp_path: Path, text: str) -> None:
    file = tmp_path / "daemon.env"
    file.write_text(f"HETSTREAM_HOLES={text}\n")
    with pytest.raises(ConfigError, match="HETSTREAM_HOLES="):
        hole_options(file)
