"""What a job finds in its environment of the job that it was submitted from."""

from __future__ import annotations

import pytest

from hetstream.base.process import of_own_job, other_job, own_job, with_job

OF_PARENT = {
    "SLURM_HET_SIZE": "2",
    "SLURM_PACK_SIZE": "2",
    "SLURM_JOB_ID_HET_GROUP_0": "5",
    "SLURM_JOB_ID_HET_GROUP_1": "6",
    "SLURM_CPUS_PER_TASK_HET_GROUP_0": "4",
    "SLURM_JOB_ID_PACK_GROUP_0": "5",
}
SERVICE = {"HETSTREAM_SERVICE": "file:/d/job-5/address"}


@pytest.mark.parametrize(
    ("job", "own"), [("5", "5"), ("6", "5"), ("7", "7"), ("", "5")], ids=["leader", "component", "other", "no number"]
)
def test_the_leader_is_the_job_of_its_components_alone(job: str, own: str) -> None:
    environ = OF_PARENT | ({"SLURM_JOB_ID": job} if job else {})
    assert own_job(environ) == own
    assert own_job({"SLURM_JOB_ID": "8", "SLURM_HET_SIZE": "2"}) == "8"
    assert own_job({}) == ""


def test_what_a_heterogeneous_job_leaves_in_a_job_submitted_from_it_is_not_read() -> None:
    assert of_own_job(OF_PARENT | {"SLURM_JOB_ID": "7", "A": "1"}) == {"SLURM_JOB_ID": "7", "A": "1"}
    assert of_own_job(OF_PARENT | {"SLURM_JOB_ID": "6"}) == OF_PARENT | {"SLURM_JOB_ID": "6"}
    # From a job of three components into one of two: its own win, and the third says nothing.
    assert own_job(OF_PARENT | {"SLURM_JOB_ID": "5", "SLURM_JOB_ID_HET_GROUP_2": "3"}) == "5"


@pytest.mark.parametrize(
    ("made_in", "read_in", "says"),
    [
        ({"SLURM_JOB_ID": "5"}, {"SLURM_JOB_ID": "5"}, ""),
        ({"SLURM_JOB_ID": "5"}, {"SLURM_JOB_ID": "5", "SLURM_RESTART_COUNT": "1"}, ""),
        ({"SLURM_JOB_ID": "5"}, {"SLURM_JOB_ID": "7"}, "of job 5"),
        ({"SLURM_JOB_ID": "5"}, {"SLURM_JOB_ID": "7", **OF_PARENT}, "of job 5"),
        ({"SLURM_JOB_ID": "5", **OF_PARENT}, {"SLURM_JOB_ID": "6", **OF_PARENT}, ""),
        ({"SLURM_JOB_ID": "6", **OF_PARENT}, {"SLURM_JOB_ID": "5", **OF_PARENT}, ""),
        ({"SLURM_JOB_ID": "5"}, {}, ""),
        ({}, {"SLURM_JOB_ID": "7"}, "of a program outside of Slurm"),
        ({}, {}, ""),
    ],
)
def test_variables_are_for_one_job(made_in: dict[str, str], read_in: dict[str, str], says: str) -> None:
    assert other_job("HETSTREAM_SERVICE", with_job(SERVICE, made_in) | read_in) == says


def test_a_value_that_the_user_gives_is_taken_whatever_the_mark_says() -> None:
    inherited = with_job(SERVICE, {"SLURM_JOB_ID": "5"}) | {"SLURM_JOB_ID": "7"}
    assert other_job("HETSTREAM_SERVICE", inherited)
    assert not other_job("HETSTREAM_SERVICE", inherited | {"HETSTREAM_SERVICE": "file:/own/address"})
    assert not other_job("HETSTREAM_SERVICE", SERVICE | {"SLURM_JOB_ID": "7"})
    assert set(with_job({"PYTHONPATH": "/x"}, {})) == {"PYTHONPATH"}
