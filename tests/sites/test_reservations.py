"""Reservations: gpu1 is kept for jobs of `course` from now on, cpu3 for those of `maintenance` in an hour."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.devcluster.sites import RESERVATIONS

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.every_release]
KINDS = (RESERVATIONS,)
SMALL = ("--mem=1000", "--time=60")


def test_reserved_nodes_are_room_for_their_own_jobs_alone(site: Any) -> None:
    """By hand: of gpu1 what jobs hold counts, 14 CPUs and 3 GPUs, beside 80 CPUs and 4 GPUs of which 4 and 3 are held.

    The job outside needs 2 GPUs: 1 is free, and is stranded with the 12 CPUs beside it. Of the job inside, which needs
    4 CPUs where 2 of gpu1 are free, 2 CPUs would move, to one data worker outside.
    """
    outside = site.submit("--gpus=3", "-c4", *SMALL)
    site.settle(**{outside: "RUNNING"})
    second = site.submit("--gpus=2", "-c4", *SMALL)
    inside = ("--reservation=course", *SMALL)
    first_inside = site.submit("--gpus=3", "-c14", *inside)
    site.settle(**{first_inside: "RUNNING"})
    second_inside = site.submit("--gpus=1", "-c4", *inside)
    early = site.submit("--reservation=maintenance", "-pcpu", "-c2", *SMALL)
    site.settle(**{second: "PENDING Resources", second_inside: "PENDING Resources", early: "PENDING Reservation"})

    frag = site.told("frag")
    summary = frag["summary"]
    assert [summary[name] for name in ("cpus", "cpus_free", "gpus", "gpus_free")] == [80 + 14, 76, 4 + 3, 1]
    assert (summary["stranded_gpus"], summary["stranded_cpus"]) == (1, 12)
    assert [(one["node"], one["state"]) for one in frag["left_out"]] == [("gpu1", "mixed+reserved")]
    assert [(one["gpus"], one["cpus"]) for one in frag["shapes"]] == [(2, 4)]
    assert site.blockers(second) == [
        ("GPUs", "it needs 2 GPUs on a node; of 1 node with enough CPUs and memory the most free is 1 (gpu0)")
    ]
    assert site.blockers(second_inside) == [
        ("CPUs", "it needs 4 CPUs on a node; of 1 node with enough GPUs and memory the most free is 2 (gpu1)")
    ]
    directive = "#HETSTREAM --data-workers=1 --data-worker-partition=cpu --data-worker-reservation=none"
    assert site.facts(second_inside)["directive"] == directive
    # Its reservation has not begun, and gpu1, which is reserved too, is not its own.
    assert (site.blockers(early)[0][0], site.facts(early)["fits_on"]) == ("reservation", [])
    (advice,) = site.told("advise")["advice"]
    assert (advice["job"], advice["cpus_freed"], advice["gpus_unlocked"]) == (second_inside, 2, 1)


def test_nodes_reserved_for_later_are_room_for_who_ends_before(site: Any) -> None:
    """The CPU nodes but cpu3 are full. Who has three hours would run into the maintenance, who has half an hour not."""
    full = [site.submit("-pcpu", f"-wcpu{number}", "-c16", *SMALL) for number in range(3)]
    site.settle(**dict.fromkeys(full, "RUNNING"))
    long = site.submit("-pcpu", "-c16", "--mem=1000", "--time=180")
    named = site.submit("-pcpu", "-wcpu3", "-c2", "--mem=1000", "--time=180")
    site.settle(**{long: "PENDING Resources", named: "PENDING ReqNodeNotAvail"})
    ((kind, text),) = site.blockers(long)
    assert kind == "reservation"
    kept = r"cpu3 has room, but is reserved in 00:5\d:\d\d \(maintenance\), before its time limit would end it"
    assert re.fullmatch(kept, text)
    assert site.facts(long)["fits_on"] == []
    assert [one[0] for one in site.blockers(named)] == ["reservation", "reservation"]
    # What the answer advises is what starts it.
    site.run("scontrol", "update", f"JobId={long}", "TimeLimit=30")
    site.settle(**{long: "RUNNING"})


def test_a_converted_job_in_a_reservation_starts(site: Any, tmp_path: Path) -> None:
    """The directive of `why` puts its data worker outside: the reservation has no node for it."""
    script = tmp_path / "train.sbatch"
    script.write_text(
        "#!/bin/bash\n#SBATCH --reservation=course --gpus=1 --cpus-per-task=4 --time=10\n"
        "#HETSTREAM --data-workers=1 --data-worker-partition=cpu --data-worker-reservation=none\nsleep 600\n"
    )
    converted = site.told("convert", str(script))
    assert [part["role"] for part in converted["components"]] == ["trainer", "data_workers"]
    (tmp_path / "converted.sbatch").write_text(converted["script"])
    job = site.run("sbatch", "--parsable", f"--chdir={tmp_path}", str(tmp_path / "converted.sbatch"))
    site.settle(**{f"{job}+0": "RUNNING", f"{job}+1": "RUNNING"})
    assert site.run("squeue", "--noheader", f"--jobs={job}+1", "--format=%P %v %N").split()[:2] == ["cpu", "(null)"]


def test_jobs_in_an_active_maintenance_and_in_one_of_several_reservations(site: Any) -> None:
    """The maintenance of cpu3 begins now: its own jobs have room there, others not, and of two names either will do."""
    site.run("scontrol", "update", "ReservationName=maintenance", "StartTime=now", "Duration=02:00:00")
    try:
        site.wait_until(lambda: "MAINT" in site.run("scontrol", "show", "node", "cpu3"), 60, "cpu3 in maintenance")
        inside = ("-pcpu", "--reservation=maintenance", "--mem=1000", "--time=30")
        first = site.submit(*inside, "-c10")
        site.settle(**{first: "RUNNING"})
        second = site.submit(*inside, "-c10")
        outside = site.submit("-pcpu", "-wcpu3", "-c1", *SMALL)
        either = site.submit("--reservation=course,maintenance", "-pgpu", "-c2", *SMALL)
        site.settle(**{second: "PENDING Resources", either: "RUNNING"})
        assert site.blockers(second) == [
            ("CPUs", "it needs 10 CPUs on a node; of 1 node with enough memory the most free is 6 (cpu3)")
        ]
        assert site.facts(outside)["fits_on"] == []
        left_out = {one["node"]: one["state"] for one in site.told("frag")["left_out"]}
        assert left_out == {"cpu3": "mixed+maintenance", "gpu1": left_out["gpu1"]}
        assert site.run("squeue", "--noheader", f"--jobs={either}", "--format=%N") == "gpu1"
    finally:
        site.run("scancel", "--user=root", "--quiet")
        site.wait_until(lambda: not site.run("squeue", "--all", "--noheader"), 60, "an empty queue")
        site.run("scontrol", "delete", "ReservationName=maintenance")
        site.run("scontrol", "create", "reservation", "ReservationName=maintenance", "StartTime=now+1hour",
                 "Duration=02:00:00", "Users=root", "Flags=MAINT", "Nodes=cpu3")  # fmt: skip
