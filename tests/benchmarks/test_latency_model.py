"""What a kernel takes, learned: of a device that is a formula, and what a model has not seen."""

from __future__ import annotations

import itertools
import math
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.latency_model import (
    CACHE_BYTES,
    CLASSES,
    OTHERS,
    KernelSize,
    LatencyModel,
    Roofline,
    beyond_caches,
)
from benchmarks.rap_kernels import Work, counts_of, samples, with_shares
from benchmarks.rap_predict import Whole, expected_s, graphs, held_out, plans
from benchmarks.rap_timing import kernel_of
from benchmarks.running import ROOT
from hetstream.errors import FeatureError
from hetstream.mpi_dataworkers.features.operators import OPERATORS, FirstX, Ngram, Operator


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
        with pytest.raises(FeatureError, match="at least 1e-12, at most 1e"):
            LatencyModel().fit(sizes, times)
    with pytest.raises(FeatureError, match="0 kernels and 0 times"):
        LatencyModel().fit([], [])


def test_what_no_cache_holds_costs_more_beyond_its_edge() -> None:
    """The caches of the device are known, and a footprint near one of them was never measured."""
    sizes = [KernelSize("Clamp", "float32", 1, rows, 1.0, 1.0, 4, 4) for rows in range(2_000, 600_000, 7_000)]
    edge = 1 << 21

    def took_s(size: KernelSize) -> float:
        missed = min(1.0, max(0.0, size.num_bytes / edge - 0.5))
        return 1e-5 + size.num_bytes * (1e-10 + 3e-10 * missed)

    known = [size for size in sizes if not 0.6 < size.num_bytes / edge < 0.9]
    unseen = [size for size in sizes if size not in known]
    found = LatencyModel((1 << 15, edge)).fit(known, [took_s(size) for size in known]).predict(unseen)
    np.testing.assert_allclose(found, [took_s(size) for size in unseen], rtol=0.05)


def test_what_others_leave_of_a_shared_cache_is_learned() -> None:
    """A host's 480 MB are the whole host's: this device has 40 MB of them, and what is larger comes from memory."""
    caches = with_shares((48 << 10, 2 << 20, 480 << 20))
    assert caches[3:] == [16 << 20, 128 << 20]
    assert with_shares((32 << 10, 1 << 20, 2 << 20)) == [32 << 10, 1 << 20, 2 << 20]
    assert with_shares((50 << 20,)) == [50 << 20], "a GPU's"

    def took_s(num_bytes: float) -> float:
        return 1e-5 + num_bytes * (1e-10 + 2e-10 * min(1.0, max(0.0, num_bytes / (40 << 20) - 0.5)))

    known = [1e5 * 1.3**at for at in range(30)]
    unseen = [each * 1.15 for each in known[:-1]]

    def worst_error(edges: Sequence[int]) -> float:
        def terms(num_bytes: float) -> dict[str, float]:
            return {"call": 1.0, "byte": num_bytes, **beyond_caches("byte", num_bytes, num_bytes, edges)}

        line = Roofline().fit([*map(terms, known)], np.array([*map(took_s, known)]))
        return float(np.abs(line.predict([*map(terms, unseen)]) / [*map(took_s, unseen)] - 1).max())

    assert worst_error(caches) < 0.15
    assert worst_error(caches[:3]) > 0.5


def test_what_loops_do_for_lists_is_counted() -> None:
    def counts(operator: Operator, *lengths: int) -> dict[str, float]:
        found = counts_of(operator, 10, float(np.mean(lengths)), np.array(lengths))
        return {name: count for name, count in found.items() if count}

    assert counts(FirstX(20), 8, 9) == {"block": 15, "guess": 5, "two blocks": 5}
    assert counts(FirstX(8), 8, 9) == {"block": 10}, "all are cut to one block"
    assert counts(Ngram(2), 1) == {"pairs": 10}, "a list of one value has no pair"
    assert counts(Ngram(2), 12) == {"pairs": 10, "pair block": 10, "pair": 30}
    assert counts(Ngram(3), 1) == {"list": 10, "window of 1": 10}
    assert counts(Ngram(3), 0, 3) == {"list": 5, "window of 3": 5, "guess": 5, "guess of size": 5}
    assert counts(Ngram(6), 40) == {"list": 10, "window of 4": 350, "guess": 10}, "too many turns to know by heart"


def test_the_benchmark_measures_all_that_plans_have_and_holds_out_whole_groups() -> None:
    works = list(samples(random.Random(1), (1, 2, 3, 4, 5, 6), 4, 6))
    assert {kind for kind, _ in (work.size.program for work in works)} == {each.__name__ for each in OPERATORS}
    assert set(CLASSES) <= {work.size.class_ for work in works}
    learned = list(graphs(random.Random(1), 4))
    both: list[Work | Whole] = [*works[::9], *learned]
    known = {name for work in both for name in work.terms(CACHE_BYTES)}
    for plan in plans()[:2]:
        assert set(plan.terms(CACHE_BYTES)) <= known
        assert plan.graph.digest not in {each.graph.digest for each in learned}
    times = [5e-6 + 1e-6 * work.size.num_features + 1e-10 * work.size.num_bytes for work in works]
    errors = np.abs(held_out(works, times, folds=3) / times - 1)
    assert (errors < 0.1).mean() > 0.9


def test_large_batches_are_measured_in_memory_that_is_kept_as_data_workers_keep_it() -> None:
    """Else the kernel gives pages anew, of 40 MiB each time, of less at first: that takes longer than to fill them.

    In a process of its own, as the benchmark: where other tests have left freed pieces, a batch finds another one.
    """
    program = (
        "import resource, torch\n"
        "from benchmarks.rap_timing import OnCpu\n"
        "OnCpu()\n"
        "for num_bytes in (40 << 20, 8 << 20):\n"
        "    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "    torch.ones(num_bytes, dtype=torch.uint8)\n"
        "    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert max(map(int, done.stdout.split())) < 100


def test_on_a_gpu_the_kernel_alone_is_timed() -> None:
    """The batch is packed and copied once, and each run is one launch of the same."""
    work = next(samples(random.Random(1), (2,), 1, 1))
    launched: list[tuple[object, ...]] = []
    run = kernel_of(work.graph, work.batch(np.random.default_rng(1)), "cpu", lambda *given: launched.append(given))
    assert not launched
    run()
    run()
    [first, second] = launched
    assert first[0] is second[0], "the same memory"


def test_whole_graphs_are_sums_of_what_was_measured() -> None:
    """On a device on which each operator takes a time for each value, and a call 10 us."""
    asked = plans()[:3]
    works, learned = list(samples(random.Random(2), (1, 2, 4), 2, 4)), list(graphs(random.Random(2), 5))
    known: list[Work | Whole] = [*works, *learned]
    costs = dict.fromkeys((name for each in [*known, *asked] for name in each.terms(())), 0.0)
    costs |= {name: 1e-9 * (1 + at % 5) for at, name in enumerate(sorted(costs)) if name.endswith("value")}
    costs |= {"call": 1e-5, "chain, list": 3e-6, "byte": 1e-11}

    def took_s(work: Work | Whole) -> float:
        return sum(costs[name] * count for name, count in work.terms(()).items())

    found = expected_s(works, learned, np.array([took_s(each) for each in known]), asked, ())
    np.testing.assert_allclose(found, [took_s(each) for each in asked], rtol=0.02)


def test_kernels_that_cannot_be_are_refused() -> None:
    size = KernelSize("Clamp", "float32", 1, 100, 1.0, 1.0, 4, 4)
    model = LatencyModel().fit([size], [1e-6])
    for name, value, rule in (
        ("num_features", 0, "at least 1"),
        ("num_rows", 0, "at least 1"),
        ("num_rows", math.inf, "finite"),
        ("num_rows", 1e300, "at most 9"),
        ("num_rows", 10**400, "at most 9"),
        ("width", 1e300, "at most 9"),
        ("read_bytes", 1e300, "at most 9"),
        ("counts", {"loop": 1e300}, "at most 9"),
        ("counts", 3, "a dict of numbers"),
        ("width", math.nan, "finite"),
        ("made_width", -1.0, "at least 0"),
        ("apart_bytes", "3", "a finite number"),
        ("held_bytes", math.nan, "finite"),
        ("counts", {"loop": math.nan}, "finite"),
        ("counts", {"launch": 3.0}, "rename it"),
    ):
        with pytest.raises(FeatureError, match=f"KernelSize Clamp: {name}.*{rule}"):
            replace(size, **{name: value})
    with pytest.raises(FeatureError, match="KernelSize: kind=3: give a name"):
        replace(size, kind=3)
    largest = replace(size, num_features=2**53, num_rows=2**53, width=2.0**53, given_bytes=2**53)
    assert np.isfinite(LatencyModel().fit([size, largest], [1e-6, 1e9]).predict([largest])).all()
    with pytest.raises(FeatureError, match=r"sizes\[0\]=3: give a KernelSize"):
        model.predict([3])  # type: ignore[list-item]
    for seconds in (math.nan, 0.0, "1", 1e-320, 1e300):
        with pytest.raises(FeatureError, match=r"seconds\[0\]=.*at least 1e-12, at most 1e\+09"):
            LatencyModel().fit([size], [seconds])  # type: ignore[list-item]
    with pytest.raises(FeatureError, match="seconds=3: give a list of seconds"):
        LatencyModel().fit([size], 3)  # type: ignore[arg-type]
    with pytest.raises(FeatureError, match=r"caches\[0\]=0"):
        LatencyModel((0,))
    with pytest.raises(FeatureError, match="caches=3: give a tuple of bytes"):
        LatencyModel(3)  # type: ignore[arg-type]
    other = replace(size, kind="Cast")
    with pytest.raises(FeatureError, match="nothing was measured of Clamp"):
        model.fit([other], [1e-6]).predict([size])
