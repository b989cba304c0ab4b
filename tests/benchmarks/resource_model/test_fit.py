"""The step-time model: what is recovered, how sure it is, what cannot be told apart, what to try next."""

from __future__ import annotations

import builtins
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy import stats

from benchmarks.resource_model.fit import Observations, fit
from benchmarks.resource_model.identify import propose_probes
from benchmarks.resource_model.plan import grid
from benchmarks.resource_model.step_time import Side, StepTimeModel
from benchmarks.resource_model.terms import (
    FED_PARAMETER_SERVERS,
    GPU_TRAINERS,
    PARAMETER_SERVERS,
    Array,
    Configurations,
    Family,
    ModelError,
    Term,
    Workload,
)

WORKLOAD = Workload(batch=512, model_bytes=50e6, embedding_dim=16, bytes_per_s=1.25e9)
REFERENCE = Configurations.of(
    trainers=8, servers=4, trainer_cpus=8, server_cpus=8, data_workers=8, data_worker_cpus=4
)  # fmt: skip
FED = grid(data_workers=range(1, 17), data_worker_cpus=[1, 2, 4, 8], trainers=[1, 2, 4])
SERVED = grid(trainers=range(1, 17), servers=range(1, 9), trainer_cpus=[1, 4, 16], server_cpus=[1, 4, 16])


def known(family: Family, compute: list[float], loading: list[float] | None = None) -> StepTimeModel:
    """A model whose terms take these seconds in the reference configuration."""

    def side(terms: tuple[Term, ...], seconds: list[float]) -> Side:
        columns = np.maximum(family.columns(terms, REFERENCE, WORKLOAD)[0], 1e-12)
        num = len(terms)
        return Side(terms, np.array(seconds) / columns, np.zeros((num, num)), 0.0, 1, 1.0)

    return StepTimeModel(
        family, WORKLOAD, side(family.compute, compute), side(family.loading, loading) if loading else None
    )


def observed(model: StepTimeModel, num: int, noise: float, seed: int, candidates: Configurations) -> Observations:
    rng = np.random.default_rng(seed)
    chosen = candidates[rng.choice(len(candidates), num, replace=False)]
    return Observations(chosen, model.step_s(chosen) * np.exp(rng.normal(0, noise, num)))


def median_error(model: StepTimeModel, truth: StepTimeModel, candidates: Configurations) -> float:
    return float(np.median(np.abs(model.step_s(candidates) / truth.step_s(candidates) - 1)))


@pytest.mark.parametrize(
    ("family", "compute", "loading", "candidates"),
    [
        (PARAMETER_SERVERS, [0.035, 0.024, 0.007, 0.025, 0.025], None, SERVED),
        (GPU_TRAINERS, [0.01, 0.05], [0.08, 0.005], FED),
        (FED_PARAMETER_SERVERS, [0.035, 0.024, 0.007, 0.025, 0.025], [0.15, 0.005],
         grid(trainers=[2, 4, 8], servers=[1, 2, 4], trainer_cpus=[2, 8], server_cpus=[2, 8], data_workers=[1, 4, 16])),
    ],
    ids=["parameter servers", "GPU trainers", "fed parameter servers"],
)  # fmt: skip
def test_twenty_noisy_observations_are_enough(
    family: Family, compute: list[float], loading: list[float] | None, candidates: Configurations
) -> None:
    truth = known(family, compute, loading)
    errors = [
        median_error(fit(family, WORKLOAD, observed(truth, 20, 0.05, seed, candidates)), truth, candidates)
        for seed in range(20)
    ]
    assert np.median(errors) <= 0.03


def test_without_noise_the_slopes_come_back() -> None:
    truth = known(PARAMETER_SERVERS, [0.035, 0.024, 0.007, 0.025, 0.025])
    found = fit(PARAMETER_SERVERS, WORKLOAD, observed(truth, 20, 0.0, 1, SERVED))
    assert found.compute.slopes == pytest.approx(truth.compute.slopes, rel=1e-6)
    assert found.compute.is_known


def test_measured_waits_say_which_side_was_slower() -> None:
    truth = known(GPU_TRAINERS, [0.01, 0.05], [0.08, 0.005])
    chosen = grid(data_workers=[1, 2, 4, 8, 16], data_worker_cpus=[1, 2, 4], trainers=[1, 4])
    compute, _ = truth.sides(chosen)
    step = truth.step_s(chosen)
    found = fit(GPU_TRAINERS, WORKLOAD, Observations(chosen, step, 1 - compute / step))
    assert found.loading is not None
    assert found.loading.slopes == pytest.approx(truth.loading.slopes if truth.loading else None, rel=1e-6)
    assert found.compute.slopes == pytest.approx(truth.compute.slopes, rel=1e-6)


@pytest.mark.parametrize("waits", [np.zeros(3), None])
def test_a_job_that_never_waits_gains_by_no_data_worker_and_is_not_trusted_with_fewer(waits: Array | None) -> None:
    chosen = grid(data_workers=[4, 8, 16])
    found = fit(GPU_TRAINERS, WORKLOAD, Observations(chosen, np.full(3, 0.05), waits))
    assert found.loading is not None
    assert not found.loading.is_known
    assert found.step_s(grid(data_workers=[4, 64])) == pytest.approx([0.05, 0.05])
    assert found.step_s(grid(data_workers=[2]))[0] == pytest.approx(0.1)
    assert found.interval_s(grid(data_workers=[2]))[1][0] == np.inf


def test_intervals_hold_what_is_measured() -> None:
    truth = known(PARAMETER_SERVERS, [0.035, 0.024, 0.007, 0.025, 0.025])
    inside = []
    for seed in range(30):
        found = fit(PARAMETER_SERVERS, WORKLOAD, observed(truth, 40, 0.05, seed, SERVED))
        new = observed(truth, 40, 0.05, seed + 1000, SERVED)
        low, high = found.interval_s(new.configurations)
        inside.append(np.mean((low <= new.step_s) & (new.step_s <= high)))
    assert 0.90 <= np.mean(inside) <= 0.99


@pytest.mark.parametrize("num", [8, 10, 15, 20])
@pytest.mark.parametrize("seconds", [[0.035, 0.024, 0.007, 0.025, 0.025], [0.035, 0.0, 0.007, 0.0005, 0.025]])
def test_few_observations_have_wider_intervals_that_hold_as_much(num: int, seconds: list[float]) -> None:
    truth = known(PARAMETER_SERVERS, seconds)
    inside = []
    for seed in range(60):
        found = fit(PARAMETER_SERVERS, WORKLOAD, observed(truth, num, 0.05, seed, SERVED))
        new = observed(truth, 30, 0.05, seed + 1000, SERVED)
        low, high = found.interval_s(new.configurations)
        assert np.all(np.isfinite(high))
        inside.append(np.mean((low <= new.step_s) & (new.step_s <= high)))
    assert 0.93 <= np.mean(inside) <= 0.995, "also where slopes are at their bound of 0"


def test_an_interval_is_that_of_least_squares_where_nothing_is_at_its_bound() -> None:
    truth = known(PARAMETER_SERVERS, [0.035, 0.024, 0.007, 0.025, 0.025])
    seen = observed(truth, 12, 0.01, 3, SERVED)
    found = fit(PARAMETER_SERVERS, WORKLOAD, seen)
    assert np.all(found.compute.slopes > 0)
    # The textbook's prediction interval, on errors relative to the measured time.
    columns = found.family.columns(found.compute.terms, seen.configurations, WORKLOAD)
    rows = columns / seen.step_s[:, None]
    free = len(rows) - rows.shape[1]
    noise = float(np.sqrt((((rows @ found.compute.slopes) - 1) ** 2).sum() / free))
    new = found.family.columns(found.compute.terms, SERVED, WORKLOAD)
    errors = noise * np.sqrt(np.einsum("ni,ij,nj->n", new, np.linalg.inv(rows.T @ rows), new)
                             + (new @ found.compute.slopes) ** 2)  # fmt: skip
    width = found.interval_s(SERVED)[1] - found.step_s(SERVED)
    # Huber's weights make little of a few observations, so the slopes are known a little less.
    assert width == pytest.approx(stats.t.ppf(0.975, free) * errors, rel=0.15)


def test_off_the_line_that_was_measured_there_is_no_interval() -> None:
    truth = known(PARAMETER_SERVERS, [0.035, 0.024, 0.007, 0.025, 0.025])
    line = grid(trainers=range(1, 17), servers=[2], trainer_cpus=[4], server_cpus=[4])
    elsewhere = grid(trainers=[4, 8], servers=[1, 4, 8], trainer_cpus=[1, 4, 16], server_cpus=[2, 4, 8])
    for seed in range(20):
        noise = np.exp(np.random.default_rng(seed).normal(0, 0.05, len(line)))
        found = fit(PARAMETER_SERVERS, WORKLOAD, Observations(line, truth.step_s(line) * noise))
        assert np.all(np.isinf(found.interval_s(elsewhere)[1])), "it is off by a third there"
        low, high = found.interval_s(line)
        assert np.all(np.isfinite(high))
        assert np.mean((low <= truth.step_s(line)) & (truth.step_s(line) <= high)) > 0.9


def test_too_few_observations_have_no_interval() -> None:
    seen = Observations(grid(data_workers=[4]), np.array([0.1]), np.array([0.5]))
    low, high = fit(GPU_TRAINERS, WORKLOAD, seen).interval_s(grid(data_workers=[8]))
    assert (low[0], high[0]) == (0.0, np.inf)


def test_terms_that_did_not_vary_are_named() -> None:
    truth = known(PARAMETER_SERVERS, [0.035, 0.024, 0.007, 0.025, 0.025])
    only_trainers = grid(trainers=range(1, 17), servers=[2], trainer_cpus=[4], server_cpus=[4])
    found = fit(PARAMETER_SERVERS, WORKLOAD, Observations(only_trainers, truth.step_s(only_trainers)))
    assert not found.compute.is_known
    assert found.compute.confused == (("gradient", "update", "synchronisation", "embedding", "constant"),)
    assert median_error(found, truth, only_trainers) < 1e-6  # where it was seen it is right


def test_a_probe_tells_the_confused_terms_apart() -> None:
    truth = known(PARAMETER_SERVERS, [0.035, 0.024, 0.007, 0.025, 0.025])
    seen = grid(trainers=range(1, 9), servers=[2], trainer_cpus=[4], server_cpus=[4])
    for _ in range(3):
        found = fit(PARAMETER_SERVERS, WORKLOAD, Observations(seen, truth.step_s(seen)))
        (probe,) = propose_probes(found, seen, SERVED)
        assert probe.reason.endswith("cannot be told apart yet")
        seen = seen.joined(SERVED[probe.index])
    found = fit(PARAMETER_SERVERS, WORKLOAD, Observations(seen, truth.step_s(seen)))
    assert found.compute.is_known
    assert median_error(found, truth, SERVED) < 1e-6


def test_probes_beat_chance() -> None:
    truth = known(PARAMETER_SERVERS, [0.035, 0.024, 0.007, 0.025, 0.025])
    rng = np.random.default_rng(0)
    probed, by_chance = [], []
    for seed in range(10):
        first = observed(truth, 4, 0.05, seed, SERVED)
        chosen = first.configurations
        for _ in range(4):
            now = fit(PARAMETER_SERVERS, WORKLOAD, Observations(chosen, truth.step_s(chosen)))
            chosen = chosen.joined(SERVED[propose_probes(now, chosen, SERVED)[0].index])
        others = first.configurations.joined(SERVED[rng.choice(len(SERVED), 4, replace=False)])
        for kept, configurations in ((probed, chosen), (by_chance, others)):
            times = truth.step_s(configurations) * np.exp(rng.normal(0, 0.05, len(configurations)))
            model = fit(PARAMETER_SERVERS, WORKLOAD, Observations(configurations, times))
            kept.append(float(np.mean(np.abs(model.step_s(SERVED) / truth.step_s(SERVED) - 1))))
    assert np.median(probed) < np.median(by_chance)


def test_a_step_that_was_held_up_bends_no_fit() -> None:
    truth = known(PARAMETER_SERVERS, [0.035, 0.024, 0.007, 0.025, 0.025])
    seen = observed(truth, 20, 0.0, 1, SERVED)
    held_up = np.ones(20)
    held_up[[3, 11]] = 3.0
    found = fit(PARAMETER_SERVERS, WORKLOAD, Observations(seen.configurations, seen.step_s * held_up))
    assert median_error(found, truth, SERVED) < 0.01
    errors = []
    for seed in range(20):
        noisy = observed(truth, 20, 0.05, seed, SERVED)
        late = np.where(np.random.default_rng(seed).random(20) < 0.05, 3.0, 1.0)
        errors.append(
            median_error(
                fit(PARAMETER_SERVERS, WORKLOAD, Observations(noisy.configurations, noisy.step_s * late)), truth, SERVED
            )
        )
    assert np.median(errors) < 0.025


def test_a_job_without_embeddings_has_no_term_for_them() -> None:
    without = Workload(batch=512, model_bytes=50e6, embedding_dim=0, bytes_per_s=1.25e9)
    truth = known(PARAMETER_SERVERS, [0.035, 0.024, 0.007, 0.0, 0.025])
    found = fit(PARAMETER_SERVERS, without, observed(truth, 40, 0.05, 1, SERVED))
    assert [term.name for term in found.compute.terms] == ["gradient", "update", "synchronisation", "constant"]
    assert found.compute.is_known
    with_them = fit(PARAMETER_SERVERS, WORKLOAD, observed(truth, 40, 0.05, 1, SERVED))
    assert len(with_them.compute.slopes) == 5
    assert median_error(found, truth, SERVED) < 0.03


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.floats(1e-3, 1e3), min_size=5, max_size=5), st.integers(1, 12), st.integers(0, 1 << 20))
def test_any_observations_give_a_model_that_is_never_negative_and_loads_faster_with_more(
    seconds: list[float], num: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    chosen = FED[rng.choice(len(FED), num, replace=False)]
    times: Array = rng.choice(np.array(seconds), num)
    found = fit(GPU_TRAINERS, WORKLOAD, Observations(chosen, times))
    compute, loading = found.sides(FED)
    assert (compute >= 0).all()
    assert (loading >= 0).all()
    _, more = found.sides(grid(data_workers=range(1, 65)))
    assert (np.diff(more) <= 1e-12).all()


def test_what_is_no_observation_is_refused() -> None:
    with pytest.raises(ModelError, match="nothing to fit"):
        fit(GPU_TRAINERS, WORKLOAD, Observations(FED[[]], np.zeros(0)))
    with pytest.raises(ValueError, match="must be positive"):
        Observations(FED[[0]], np.zeros(1))
    with pytest.raises(ValueError, match="data_workers must be positive"):
        Configurations.of(data_workers=0)
    with pytest.raises(ValueError, match="no amounts: workers"):
        Configurations.of(workers=1)


def test_without_scipy_one_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("scipy"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ModelError, match=r"needs scipy.*pip install scipy"):
        fit(GPU_TRAINERS, WORKLOAD, Observations(FED[[0]], np.ones(1)))
