"""What a kernel takes, learned: of a device that is a formula, and what a model has not seen."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from benchmarks.rap_predict import held_out, kernels_of, samples
from hetstream import FeatureError
from hetstream.mpi_dataworkers.features.operators import OPERATORS
from hetstream.mpi_dataworkers.gpu_features.plans import PLANS
from hetstream.mpi_dataworkers.gpu_features.predictor import CLASSES, OTHERS, KernelSize, LatencyModel


def sizes_of(kind: str) -> list[KernelSize]:
    """Kernels of many sizes."""
    return [
        KernelSize(kind, "float32 to float32", count, rows, width, width, 4, 4)
        for count, rows, width in itertools.product((1, 3, 10, 30), (100, 1000, 5000), (1.0, 2.0, 5.0, 20.0))
    ]


def device_s(size: KernelSize) -> float:
    """A device on which a launch takes 5 us, a feature 0.1 us, and memory has two speeds."""
    slow = max(0.0, size.num_bytes - (1 << 20))
    return 5e-6 + 1e-7 * size.num_features + size.num_bytes * 1e-11 + slow * 4e-11


def test_sizes_that_were_not_measured_are_predicted() -> None:
    """Two widths are held out, one of which is beyond all others."""
    sizes = sizes_of("Clamp") + sizes_of("Ngram")
    known = [size for size in sizes if size.width not in (2.0, 20.0)]
    unseen = [size for size in sizes if size.width in (2.0, 20.0)]
    model = LatencyModel().fit(known, [device_s(size) for size in known])
    found = model.predict(unseen)
    np.testing.assert_allclose(found, [device_s(size) for size in unseen], rtol=0.1)
    assert {size.class_ for size in sizes} == {OTHERS, "Ngram"}


def test_a_model_says_what_it_has_not_seen() -> None:
    sizes = sizes_of("Clamp")
    model = LatencyModel().fit(sizes, [device_s(size) for size in sizes])
    with pytest.raises(FeatureError, match="nothing was measured of FirstX float32 to float32"):
        model.predict(sizes_of("FirstX"))
    for times in ([0.0] * len(sizes), [float("nan")] * len(sizes)):
        with pytest.raises(FeatureError, match="above 0"):
            LatencyModel().fit(sizes, times)
    with pytest.raises(FeatureError, match="0 kernels and 0 times"):
        LatencyModel().fit([], [])


def test_the_benchmark_measures_all_that_plans_have_and_holds_out_whole_groups() -> None:
    works = list(samples(random.Random(1), (1, 2, 4, 8), 3))
    programs = {work.size.program for work in works}
    assert {kind for kind, _ in programs} == {operator.__name__ for operator in OPERATORS}
    for plan in (PLANS[0], PLANS[2]):
        assert {work.size.program for work in kernels_of(plan)} <= programs
        assert sum(len(work.operators) for work in kernels_of(plan)) == plan.num_operators
    predicted = held_out(works, [device_s(work.size) for work in works], folds=3)
    errors = np.abs(predicted / [device_s(work.size) for work in works] - 1)
    assert (errors < 0.1).mean() > 0.9
    assert set(CLASSES) <= {work.size.class_ for work in works}
