"""A job's class: what it changes in the request, and what it contradicts."""

from __future__ import annotations

import pytest

from hetstream.hetjob.convert.convert import convert
from hetstream.hetjob.convert.directives import WITH_VALUE, read_directives
from hetstream.hetjob.convert.plan import ClassNotPossible, HetPlan
from hetstream.hetjob.convert.render import render
from hetstream.hetjob.convert.sbatch_options import parse_words
from hetstream.hetjob.convert.spec import GUARANTEED, OPPORTUNISTIC, read_spec
from hetstream.hetjob.errors import DirectiveError
from hetstream.hetjob.gpu.orders import JobClass
from hetstream.hetjob.ports import ClusterLimits


def plan_of(directive: str, *lines: str, words: tuple[str, ...] = (), known: tuple[str, ...] = ("opp",)) -> HetPlan:
    text = "\n".join(
        ["#!/bin/bash", f"#HETSTREAM {directive}", *(f"#SBATCH {line}" for line in lines), "python train.py"]
    )
    spec = read_spec(read_directives(text, "train.sbatch"), "train.sbatch")
    assert spec is not None
    outside, _ = parse_words(words, "command line", extra=WITH_VALUE)
    cluster = ClusterLimits(frozenset(), "gpu", "sched/backfill", opportunistic=known)
    plan = convert(spec, text, "train.sbatch", command_line=outside, cluster=cluster)
    assert "train.py" in render(text, plan, ("/bin/hetstream",))
    return plan


def test_the_classes_are_those_of_the_coordinator() -> None:
    assert [kind.value for kind in JobClass] == [GUARANTEED, OPPORTUNISTIC]


def test_an_opportunistic_job_goes_to_the_sites_partition_and_says_so() -> None:
    plan = plan_of("--job-class=opportunistic", "--comment='my run'", known=("opp", "late"))
    assert plan.components[0].options == ("--partition=opp", "--comment=hetstream:class=opportunistic my run")
    assert plan.master_options is None
    assert len(plan.components) == 1


def test_a_partition_that_agrees_is_kept() -> None:
    assert plan_of("--job-class=opportunistic", "-p late", known=("opp", "late")).components[0].options == (
        "--comment=hetstream:class=opportunistic",
    )
    # A site that names none is believed: its guard says which it is.
    assert "--partition" not in str(plan_of("--job-class=opportunistic", "-p late", known=()).components)


def test_a_guaranteed_job_may_say_how_long_it_waits_for_quota() -> None:
    plan = plan_of("--opportunistic-after=30:00", "--gpus=2 -p gpu")
    assert plan.components[0].options == ("--comment=hetstream:class=guaranteed hetstream:opportunistic-after=1800",)
    both = plan_of("--job-class=guaranteed --opportunistic-after=1:00:00")
    assert "hetstream:opportunistic-after=3600" in both.components[0].options[0]


def test_what_stands_on_the_command_line_stays_there() -> None:
    plan = plan_of("--job-class=opportunistic", words=("--comment=fast", "--time=5"))
    assert "--comment=hetstream:class=opportunistic fast" in plan.components[0].options
    assert plan.sbatch_options == ("--time=5",)


def test_with_data_workers_and_checkpoints_the_class_is_one_more_change() -> None:
    plan = plan_of(
        "--job-class=opportunistic --data-workers=0-2 --data-worker-partition=cpu --checkpoint=/c --checkpoint-size=1G"
    )
    assert "--partition=opp" in plan.components[0].options
    assert plan.master_options is not None
    assert plan.writer_options is not None


@pytest.mark.parametrize(
    ("directive", "line", "known", "text"),
    [
        ("--job-class=opportunistic", "--gpus=1", ("opp",), "Remove --gpus and --gres=gpu"),
        ("--job-class=opportunistic", "--gres=gpu:2", ("opp",), "the site chooses the one that it shares"),
        ("--job-class=opportunistic", "-p gpu", ("opp",), "gpu is not for opportunistic jobs: write --partition=opp"),
        ("--job-class=opportunistic", "-p opp,gpu", ("opp",), "partition gpu is not for opportunistic jobs"),
        ("--job-class=opportunistic", "--time=5", (), "HETSTREAM_OPPORTUNISTIC_PARTITIONS"),
        ("--job-class=guaranteed", "-p opp", ("opp",), "partition opp is for opportunistic jobs"),
        ("--opportunistic-after=5:00", "-p opp", ("opp",), "partition opp is for opportunistic jobs"),
    ],
)  # fmt: skip
def test_a_contradiction_is_one_clear_line(directive: str, line: str, known: tuple[str, ...], text: str) -> None:
    with pytest.raises(ClassNotPossible, match=text) as caught:
        plan_of(directive, line, known=known)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("directive", "text"),
    [
        ("--job-class=best-effort", "line 2: --job-class=best-effort: guaranteed or opportunistic"),
        ("--job-class=Opportunistic", "guaranteed or opportunistic"),
        ("--job-class", "--job-class needs a value"),
        ("--opportunistic-after=soon", "a time above 0"),
        ("--opportunistic-after=0", "a time above 0"),
        ("--job-class=opportunistic --opportunistic-after=5:00", "only for a guaranteed job"),
        ("--job-class=opportunistic --data-workers=2", "use --data-workers=0-2"),
    ],
)
def test_what_is_no_class_is_refused(directive: str, text: str) -> None:
    with pytest.raises(DirectiveError, match=text):
        plan_of(directive)


def test_a_class_alone_needs_no_data_workers_and_others_still_do() -> None:
    assert "--companions=16" in (plan_of("--job-class=guaranteed --trainer-cpus=2").master_options or ())
