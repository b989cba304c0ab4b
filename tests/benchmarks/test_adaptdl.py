"""The baseline after Pollux: its model of a step, and what it may give out."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("scipy")

from benchmarks import adaptdl, schedulers
from benchmarks.resource_model.fit import Observations


def test_the_model_of_a_step_is_found_again() -> None:
    truth = np.array([0.5, 0.2, 0.03, 2.0])
    workers = np.array([1.0, 2.0, 4.0, 8.0, 16.0, 32.0])
    found = adaptdl.fitted(workers, adaptdl.step_s(truth, workers))
    assert adaptdl.step_s(found, workers) == pytest.approx(adaptdl.step_s(truth, workers), rel=0.02)
    # By hand: (0.5^2 + (0.2 + 2 x 0.03)^2)^(1/2).
    assert adaptdl.step_s(truth, np.array([4.0]))[0] == pytest.approx(0.31759**0.5, rel=1e-4)
    alone = adaptdl.fitted(np.array([4.0, 4.0]), np.array([0.6, 0.6]))
    assert adaptdl.step_s(alone, np.array([64.0]))[0] == pytest.approx(0.6), "synchronisation is free until it is seen"


def test_it_gives_at_most_twice_what_a_job_ever_had_and_never_more_than_there_is() -> None:
    act = adaptdl.goodput_scheduler(30.0)
    jobs = [schedulers.Job(schedulers.true_model(name, np.random.default_rng(0))) for name in schedulers.MODELS]
    for _ in range(8):
        for job in jobs:
            new = Observations(job.have, job.have.trainers / job.steps_per_s)
            job.seen = new if job.seen is None else job.seen.joined(new)
        given = act(jobs)
        for job, have in zip(jobs, given, strict=True):
            assert job.seen is not None
            assert have.trainers[0] <= 2 * job.seen.configurations.trainers.max()
            job.have = have
        assert sum(schedulers.cores_of(job.have) for job in jobs) <= schedulers.CORES
    assert max(job.have.trainers[0] for job in jobs) > schedulers.START.trainers[0]
