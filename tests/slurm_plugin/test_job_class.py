"""A job's class from where sbatch is called to where tools show it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hetstream.base.errors import UsageError
from hetstream.hetjob.convert.directives import OPTIONS, from_command_line
from hetstream.hetjob.convert.sbatch_options import parse_words
from hetstream.slurm_plugin.cli.cluster import class_of, jobs_report
from hetstream.slurm_plugin.client.fake import FakeSlurm
from hetstream.slurm_plugin.client.model import Gres, Job, Snapshot
from hetstream.slurm_plugin.submit.conversion import convert_script

OPP = {"HETSTREAM_OPPORTUNISTIC_PARTITIONS": "opp late"}
JOB = Job(7, "run", "ann", ("gpu",), "RUNNING", "", 1, 2, 1, 2, 100, start_s=0.0, nodes=("g0",))


def comment_of(script: str, environ: dict[str, str], *words: str) -> str:
    """What the converted job's Comment is; empty if nothing is converted."""
    options, _ = parse_words(words, "command line", extra=OPTIONS)
    found = convert_script(
        f"#!/bin/bash\n{script}\npython t.py\n".encode(), "t", options, environ, FakeSlurm(Path("/"), {}), ("/h",)
    )
    lines = [line for line in found.script.decode().split("\n") if "hetstream:class=" in line]
    return lines[0] if lines else ""


@pytest.mark.shows("a job's class comes from option, partition or environment")
def test_the_command_line_wins_over_the_script_and_the_script_over_the_environment() -> None:
    environ = {**OPP, "HETSTREAM_JOB_CLASS": "opportunistic"}
    assert "class=opportunistic" in comment_of("true", environ)
    assert "--partition=opp" in comment_of("true", environ)
    assert "class=guaranteed" in comment_of("#HETSTREAM --job-class=guaranteed", environ)
    assert "class=opportunistic" in comment_of("#HETSTREAM --job-class=guaranteed", OPP, "--job-class=opportunistic")
    assert from_command_line(parse_words(["--job-class=guaranteed"], "x", extra=OPTIONS)[0])


@pytest.mark.shows("a job's class comes from option, partition or environment")
def test_without_a_word_the_partition_says_it_and_nothing_is_converted() -> None:
    assert comment_of("#SBATCH -p opp", OPP) == ""


def test_within_a_job_the_variable_is_not_handed_on() -> None:
    assert comment_of("true", {**OPP, "HETSTREAM_JOB_CLASS": "opportunistic", "SLURM_JOB_ID": "7"}) == ""


@pytest.mark.shows("a job's class comes from option, partition or environment")
@pytest.mark.shows("unknown classes, and quotas that the cluster cannot keep, are refused")
def test_an_unknown_class_of_the_environment_is_one_line() -> None:
    with pytest.raises(UsageError, match="environment variable HETSTREAM_JOB_CLASS: --job-class=fast: guaranteed or"):
        comment_of("true", {"HETSTREAM_JOB_CLASS": "fast"})


@pytest.mark.parametrize(
    ("job", "shown"),
    [
        (JOB, ""),
        (replace(JOB, comment="hetstream:class=guaranteed mine"), "guaranteed"),
        (replace(JOB, comment="hetstream:gpu=0 hetstream:class=opportunistic"), "opportunistic"),
        (replace(JOB, comment="hetstream:class=\x1b[31mroot"), ""),
        # What Slurm says counts before what its owner says.
        (replace(JOB, partitions=("late",), comment="hetstream:class=guaranteed"), "opportunistic"),
        (replace(JOB, gres_per_node=(Gres("opp", "p1", 1),), comment="hetstream:class=guaranteed"), "opportunistic"),
        (replace(JOB, gres_held=(Gres("gpu", "", 1),), comment="hetstream:class=opportunistic"), "opportunistic"),
    ],
)
def test_tools_show_the_class(job: Job, shown: str) -> None:
    assert class_of(job, ("opp", "late")) == shown


def test_the_table_of_jobs_has_a_column_only_where_there_are_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETSTREAM_OPPORTUNISTIC_PARTITIONS", "opp")

    def table(*jobs: Job) -> list[str]:
        report = jobs_report(list(jobs), Snapshot(0.0, "24.11", "test", jobs, (), ()), details=False)
        return [column.title for column in report.sections[0].columns]

    assert "CLASS" not in table(JOB)
    assert "CLASS" in table(JOB, replace(JOB, job_id=8, partitions=("opp",)))
