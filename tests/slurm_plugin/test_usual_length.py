"""How long similar jobs ran. Pure."""

from __future__ import annotations

import pytest

from hetstream.hetjob.elastic.step_terms import UsualLength
from hetstream.slurm_plugin.past_jobs import Features, PastJob, past_job_of, usual_length


def past(name: str, share: float | None, job: str = "1") -> PastJob:
    return PastJob(job, float(job), Features(name, user="u"), 2, 4, None, 10.0, 0.0, limit_share=share)


def test_the_most_similar_jobs_say_how_much_of_the_limit_is_used() -> None:
    new = Features("train", user="u")
    one = usual_length(new, [past("train", 0.25), past("other", 0.9)])
    assert one == UsualLength(0.25, 0.7, 1)
    three = usual_length(new, [past("train", 0.25, "1"), past("train", 0.25, "2"), past("train", 0.25, "3")])
    assert three == UsualLength(0.25, 0.3, 3), "jobs that agree are not exact"
    wild = usual_length(new, [past("train", 0.001, "1"), past("train", 1.0, "2")])
    assert wild is not None
    assert (wild.sigma, wild.num_jobs) == (1.4, 2)
    assert usual_length(new, [past("train", None), past("other", 0.9), past("train", 1e-9)]) is None
    assert usual_length(new, []) is None


@pytest.mark.parametrize("wrong", [0.0002, 1.0])
@pytest.mark.parametrize("place", range(4))
def test_what_one_job_says_does_not_decide_how_long_the_next_runs(wrong: float, place: int) -> None:
    jobs = [past("train", wrong if number == place else 0.25, str(number)) for number in range(4)]
    found = usual_length(Features("train", user="u"), jobs)
    assert found is not None
    assert found.limit_share == pytest.approx(0.25)
    assert found.sigma > 0.3, "that they disagree is said"


@pytest.mark.parametrize(
    ("elapsed_s", "limit_s", "share"),
    [(900.0, 3600.0, 0.25), (3630.0, 3600.0, 1.0), (None, 3600.0, None), (900.0, None, None), (-5.0, 3600.0, None)],
)
def test_a_record_tells_how_long_its_job_ran(elapsed_s: object, limit_s: object, share: float | None) -> None:
    record = {
        "job_name": "train",
        "elapsed_s": elapsed_s,
        "time_limit_s": limit_s,
        "loaders": [{"rank": 0, "steps": 100, "samples": 400}],
        "elastic": {"data_workers": 2, "data_worker_cpus": 4},
    }
    found = past_job_of(record, "7", "u", 1.0)
    assert found is not None
    assert found.limit_share == share
    for broken in ("x", 0, float("nan"), [1]):
        found = past_job_of({**record, "elapsed_s": 1.0, "time_limit_s": broken}, "7", "u", 1.0)
        assert found is None or found.limit_share is None
