"""The hours in which a clock is changed: what Slurm's times mean there, and what is worked out of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hetstream.slurm_plugin.client.slurm import CommandSlurm
from hetstream.slurm_plugin.client.slurm_units import local_time, moment, moments
from hetstream.slurm_plugin.errors import SimulationInputError
from hetstream.slurm_plugin.simulate.traces import read_trace

HEAD = (
    "JobIDRaw|User|Account|State|Submit|Start|End|ElapsedRaw|NNodes|AllocCPUS|AllocTRES|TRESUsageInAve|TimelimitRaw\n"
)
AUTUMN, SPRING = "2026-10-25T", "2026-03-29T"


@pytest.fixture
def zone(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """A function that moves this process to another time zone."""

    def move(name: str) -> None:
        monkeypatch.setenv("TZ", name)
        time.tzset()
        moment.cache_clear()

    yield move
    monkeypatch.undo()
    time.tzset()
    moment.cache_clear()


def row(job: int, day: str, times: str, elapsed_s: str) -> str:
    submit, start, end = (f"{day}{word}" for word in times.split())
    return f"{job}|ann|lab|COMPLETED|{submit}|{start}|{end}|{elapsed_s}|1|4|cpu=4,gres/gpu=1||90\n"


# When a job was submitted, started and ended in Berlin, where 02:00 to 03:00 is there twice in autumn and not at all in
# spring; how long it ran, and how much later than the job of ten minutes before it starts.
JOBS = {
    "over the autumn change": (AUTUMN, "01:40:00 01:50:00 02:20:00", 5400),
    "over it, into the second hour": (AUTUMN, "01:40:00 01:50:00 03:20:00", 9000),
    "from one of the two hours into the other": (AUTUMN, "01:40:00 02:50:00 02:10:00", 1200),
    "within the first of them": (AUTUMN, "01:40:00 02:10:00 02:40:00", 1800),
    "ends when it began": (AUTUMN, "01:40:00 02:30:00 02:30:00", 3600),
    "over the spring change": (SPRING, "01:40:00 01:50:00 03:20:00", 1800),
    "on a usual day": ("2026-10-24T", "01:40:00 01:50:00 02:20:00", 1800),
}


@pytest.mark.shows("ElapsedRaw decides how long a job ran over a clock change")
@pytest.mark.parametrize("place", ["Europe/Berlin", "UTC", "America/New_York", "Asia/Kolkata"])
@pytest.mark.parametrize("name", JOBS)
def test_elapsed_raw_decides_how_long_a_job_ran(name: str, place: str, zone: Callable[[str], None]) -> None:
    """Wherever the export is read: on the site, or on a machine with another clock."""
    zone(place)
    day, times, elapsed_s = JOBS[name]
    trace = read_trace("month.txt", HEAD + row(1, day, times, str(elapsed_s)))
    recorded = trace.workload.recorded
    assert recorded is not None
    assert (recorded.end_s - recorded.start_s).tolist() == [elapsed_s]
    assert trace.workload.work_s.tolist() == [elapsed_s]
    submit, start, end = (moment(f"{day}{word}") or 0.0 for word in times.split())
    told = [note for note in trace.notes if "ElapsedRaw counts" in note]
    if place == "Europe/Berlin":
        assert told == [], "there every time has a meaning that fits"
    elif end - start != elapsed_s and place != "America/New_York":
        assert told == [
            f"1 job ran for another time than from Start to End (first line 2: {end - start:,.0f} s from Start to "
            f"End, ElapsedRaw {elapsed_s:,} s), after a clock change or because they were suspended: ElapsedRaw counts"
        ]
    assert submit <= start


def test_a_job_that_waits_within_the_doubled_hour_waits_no_hour_less(zone: Callable[[str], None]) -> None:
    """Submitted at 02:55, started at 02:05: ten minutes later. Elsewhere nobody can know that, and the line says so."""
    text = HEAD + row(1, AUTUMN, "02:55:00 02:05:00 02:30:00", "1500")
    zone("Europe/Berlin")
    recorded = read_trace("month.txt", text).workload.recorded
    assert recorded is not None
    assert (recorded.start_s.tolist(), recorded.end_s.tolist()) == ([600], [2100])
    zone("UTC")
    with pytest.raises(SimulationInputError, match="line 2: it started 3000 s before it was submitted: a clock jumped"):
        read_trace("month.txt", text)
    # Seconds since the epoch mean one thing: SLURM_TIME_FORMAT=%s.
    seconds = HEAD + "1|ann|lab|COMPLETED|1792889700|1792890300|1792891800|1500|1|4|cpu=4||90\n"
    recorded = read_trace("month.txt", seconds).workload.recorded
    assert recorded is not None
    assert (recorded.start_s.tolist(), recorded.end_s.tolist()) == ([600], [2100])


@pytest.mark.parametrize(
    "elapsed_s",
    # Two hours are no change of a clock; nor is what ends before it begins without a word of how long it ran.
    ["4800", "", "0", "17"],
)
def test_a_clock_that_jumped_is_still_a_problem(elapsed_s: str, zone: Callable[[str], None]) -> None:
    zone("UTC")
    with pytest.raises(SimulationInputError, match="it ended 2400 s before it started: a clock jumped"):
        read_trace("month.txt", HEAD + row(1, AUTUMN, "01:40:00 02:50:00 02:10:00", elapsed_s))


def test_a_time_that_is_there_twice_is_asked_for_in_seconds(zone: Callable[[str], None]) -> None:
    zone("Europe/Berlin")
    first, second = moments(f"{AUTUMN}02:30:00")
    assert second - first == 3600
    assert (local_time(first), local_time(second)) == (f"uts{first:.0f}", f"uts{second:.0f}")
    assert local_time(first - 3600) == f"{AUTUMN}01:30:00"
    assert moments(f"{first:.0f}") == (first,)
    assert moments("Unknown") == ()


@pytest.mark.shows("ElapsedRaw decides how long a job ran over a clock change")
@pytest.mark.slurm
@pytest.mark.every_release
def test_slurm_says_when_also_in_the_doubled_hour(devcluster: Any, wait_until: Callable[..., None]) -> None:
    """The clock of this zone was put back by an hour half an hour ago, and by its time it is twice what it is now."""
    now = time.gmtime()
    # BBB is UTC; AAA was an hour ahead until half an hour ago. The rules of tzset(3) are in local time.
    minutes = now.tm_hour * 60 + now.tm_min - 30 + 60
    until = f"{now.tm_yday - 1}/{minutes // 60}:{minutes % 60:02d}"
    place = f"BBB0AAA-1,{max(0, now.tm_yday - 40)}/0,{until}"
    slurm = CommandSlurm({**devcluster.env, "TZ": place})
    began_s = time.time()
    job_id = slurm.submit("#!/bin/sh\nexec sleep 600\n", ["--output=/dev/null", "--mem=1000", "--time=60"])
    try:
        wait_until(lambda: [job.state for job in slurm.snapshot().jobs] == ["RUNNING"], 60)
        (job,) = slurm.snapshot().jobs
        assert job.submit_s is not None
        assert job.start_s is not None
        assert job.end_s is not None
        assert began_s - 2 <= job.submit_s <= job.start_s <= time.time() + 2
        assert job.end_s - job.start_s == 3600
    finally:
        slurm.cancel(job_id)
    wait_until(lambda: not slurm.snapshot().jobs, 60)
