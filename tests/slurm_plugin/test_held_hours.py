"""What a job holds while it runs, is suspended, and after its size was changed: one rule for `util` and its sources."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetstream.slurm_plugin.client.accounting import SACCT_FIELDS, Times, Usage, from_queue, usages_of
from hetstream.slurm_plugin.client.model import Gres, Job
from hetstream.slurm_plugin.insight.utilisation import Utilisation, Window, together
from hetstream.slurm_plugin.simulate.traces import read_trace

HOUR_S = 3600.0


def hours(usage: Usage, start_s: float, end_s: float) -> Utilisation:
    return together([usage], Window(start_s, end_s))


def line(**more: str) -> dict[str, str]:
    """A line of sacct, of a job with 4 CPUs and 2 GPUs; times are hours after an epoch."""
    times = {name: str(1_795_000_000 + int(float(more.pop(name)) * HOUR_S)) for name in ("Submit", "Start", "End")
             if more.get(name, "Unknown") != "Unknown"}  # fmt: skip
    return dict.fromkeys(SACCT_FIELDS, "") | {
        "JobIDRaw": "7", "State": "COMPLETED", "AllocCPUS": "4", "AllocTRES": "cpu=4,gres/gpu=2",
        "Suspended": "00:00:00",
    } | more | times  # fmt: skip


def test_a_job_that_was_suspended_held_its_gpus_and_not_its_cpus() -> None:
    """Two hours, for one of which it was suspended; its CPUs were used for half of the time that it ran."""
    one = Usage("1", "j", "u", "a", "p", 4, 2, 0.0, 7200.0, cpu_used_s=4 * 1800.0, elapsed_s=3600.0, suspended_s=3600.0)
    whole, half = hours(one, 0.0, 7200.0), hours(one, 0.0, 3600.0)
    assert (whole.gpu_hours, whole.cpu_hours) == (4.0, 4.0)
    assert (half.gpu_hours, half.cpu_hours) == (2.0, 2.0), "its time is taken to be alike"
    assert whole.cpu_hours_used / whole.cpu_hours_measured == 0.5
    never = hours(replace(one, elapsed_s=7200.0, suspended_s=0.0), 0.0, 7200.0)
    assert (never.gpu_hours, never.cpu_hours) == (4.0, 8.0)


def test_a_job_that_is_suspended_holds_no_cpus_since_then() -> None:
    """It ran for two hours, and is suspended for the third."""
    (one,) = usages_of([line(Start="0", End="Unknown", ElapsedRaw="7200", Suspended="01:00:00", State="SUSPENDED")])
    begin_s = one.start_s
    last, middle, whole = (hours(one, begin_s + first * HOUR_S, begin_s + 3 * HOUR_S) for first in (2, 1, 0))
    assert [(part.gpu_hours, part.cpu_hours) for part in (last, middle, whole)] == [(2, 0), (4, 4), (6, 8)]


def test_a_running_job_that_was_suspended_counts_as_one_that_has_ended() -> None:
    (one,) = usages_of([line(Start="0", End="Unknown", ElapsedRaw="3600", Suspended="01:00:00", State="RUNNING")])
    found = hours(one, one.start_s, one.start_s + 2 * HOUR_S)
    assert (found.gpu_hours, found.cpu_hours) == (4.0, 4.0)


def test_gpus_are_idle_while_their_job_is_suspended() -> None:
    """Busy all the time that it ran, which is half of the time that it held them."""
    job = line(Start="0", End="2", ElapsedRaw="3600", Suspended="01:00:00")
    step = line(JobIDRaw="7.0", Start="0", End="2", ElapsedRaw="3600", TRESUsageInAve="gres/gpuutil=200")
    (one,) = usages_of([job, step])
    assert one.gpu_share == 0.5


@pytest.mark.parametrize("second_start", ["0", "1"], ids=["22.05", "24.11"])
def test_a_job_of_another_size_has_a_run_of_each_size(second_start: str) -> None:
    """4 CPUs and 2 GPUs for an hour, then half of that for two; 22.05 has the first start in both lines."""
    elapsed = str(int((3 - float(second_start)) * HOUR_S))
    half = {"AllocCPUS": "2", "AllocTRES": "cpu=2,gres/gpu=1", "DBIndex": "8"}
    first = line(Submit="0", Start="0", End="1", ElapsedRaw="3600", State="RESIZING", DBIndex="7")
    second = line(Submit="1", Start=second_start, End="3", ElapsedRaw=elapsed, **half)
    runs = usages_of([first, second])
    begin_s = runs[0].start_s
    assert [(run.start_s - begin_s, run.cpus, run.gpus, run.ran_s) for run in runs] == [
        (0.0, 4, 2, 3600.0), (3600.0, 2, 1, 7200.0),
    ]  # fmt: skip
    found = together(runs, Window(begin_s, begin_s + 3 * HOUR_S))
    assert (found.gpu_hours, found.cpu_hours) == (2 + 2, 4 + 4)


def test_without_slurmdbd_squeue_says_how_long_jobs_ran() -> None:
    """Each began three hours ago; the one that ended did an hour ago."""
    job = Job(1, "j", "u", ("gpu",), "RUNNING", "", 1, 4, 1, 4, 0, gres_per_node=(Gres("gpu", "", 2),), start_s=0.0)
    jobs = [job, replace(job, job_id=2, state="SUSPENDED"), replace(job, job_id=3, state="COMPLETED", end_s=2 * HOUR_S)]
    times = {1: Times(HOUR_S), 2: Times(2 * HOUR_S, is_resized=True), 3: Times(HOUR_S)}
    found = [hours(usage, 0.0, 3 * HOUR_S) for usage in from_queue(jobs, times=times, now_s=3 * HOUR_S)]
    assert [(one.gpu_hours, one.cpu_hours, one.num_resized) for one in found] == [(6, 4, 0), (6, 8, 1), (4, 4, 0)]
    assert hours(from_queue([job], now_s=3 * HOUR_S)[0], 0.0, 3 * HOUR_S).cpu_hours == 12


def export(*lines: str) -> str:
    head = "JobIDRaw|JobID|State|Submit|Start|End|ElapsedRaw|NNodes|AllocCPUS|AllocTRES\n"
    return head + "".join(f"{line}\n" for line in lines)


def sizes(*lines: str) -> tuple[list[tuple[float, float, float, float]], tuple[str, ...]]:
    """Of each simulated job when it was submitted, began and ended, and its GPUs; and the notes."""
    trace = read_trace("month.txt", export(*lines))
    load, recorded = trace.workload, trace.workload.recorded
    assert recorded is not None
    rows = zip(load.submit_s, recorded.start_s, recorded.end_s, load.num_gpus, strict=True)
    return [(float(a), float(b), float(c), float(d)) for a, b, c, d in rows], trace.notes


@pytest.mark.parametrize(("start", "elapsed"), [("1795000010", 7210), ("1795003610", 3610)], ids=["22.05", "24.11"])
def test_a_simulation_knows_each_size_of_a_job(start: str, elapsed: int) -> None:
    """As slurmdbd has it: 2 GPUs for an hour, then 1 for one more."""
    first = "7|7|RESIZING|1795000000|1795000010|1795003610|3600|1|4|cpu=4,gres/gpu=2"
    second = f"7|7|COMPLETED|1795003610|{start}|1795007220|{elapsed}|1|2|cpu=2,gres/gpu=1"
    found, notes = sizes(first, second)
    assert found == [(0, 10, 3610, 2), (3610, 3610, 7220, 1)]
    assert "resized: 1 job; each of their sizes counts as a job, submitted when it began" in notes
    assert not [note for note in notes if "ElapsedRaw" in note]


def test_a_simulation_says_which_starts_of_requeued_jobs_it_leaves_out() -> None:
    """The size that the job had before it was requeued goes with that start."""
    before = "7|7|RESIZING|1795000000|1795000010|1795000110|100|1|4|cpu=4,gres/gpu=2"
    requeued = "7|7|REQUEUED|1795000110|1795000110|1795000210|100|1|2|cpu=2,gres/gpu=1"
    last = "7|7|COMPLETED|1795000210|1795000300|1795000400|100|1|2|cpu=2,gres/gpu=1"
    found, notes = sizes(before, requeued, last)
    assert found == [(0, 90, 190, 1)]
    assert "left out: 2 earlier runs of requeued jobs; each job counts with its last start" in notes
