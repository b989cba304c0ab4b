"""How long a kernel takes, learned from measurements: a roofline for each operator, and what it leaves over.

The roofline says what a kernel must take: a part of each launch, each feature, each row, each value that is read or
made, and each byte that no cache holds, none of them below zero. It is fitted so that relative errors are small, and
holds for sizes that were not measured. A kernel regression then learns by which factor measurements differ, which is
small: what it cannot know beyond what was measured cannot be far off.

RAP trains one model for each of five classes of operators (its section 5.2), with XGBoost; so does this, with
scikit-learn. Trees are steps, and a width that was not measured lies on the step of its neighbour; a kernel
regression goes smoothly from one to the next. The samples are of one device: predictions are for that one alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from sklearn.kernel_ridge import KernelRidge
from sklearn.linear_model import LinearRegression
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler

from hetstream.mpi_dataworkers.errors import FeatureError
from hetstream.mpi_dataworkers.gpu_features.schedule import check_each, check_is, check_number

Numbers = npt.NDArray[np.float64]
# RAP's Table 5: these four have a model each, and all others one together.
CLASSES = ("FirstX", "Ngram", "Onehot", "Bucketize")
OTHERS = "1D Ops"
# On usual processors and on GPUs.
CACHE_BYTES = (1 << 15, 1 << 20, 1 << 25)
# What does not fit as a whole begins to miss before, and misses altogether only beyond: a cache is shared with other
# things, and does not throw away what is oldest exactly. Of each cache's size; a slope for each.
_EDGES = (0.5, 1.0, 2.0)
# Of the kernel regression, in standard deviations of what it looks at; and how much of a measurement is chance.
_REACH, _NOISE = 2.5, 0.05
# What no sum or product of these numbers makes infinite: counts and bytes, and seconds.
_MOST, _SECONDS = 2.0**53, (1e-12, 1e9)
# Of a roofline, besides counts and caches.
_PARTS = ("launch", "feature", "row", "value", "made", "byte")


@dataclass(frozen=True)
class KernelSize:
    """What a kernel works on.

    Attributes:
        kind: the operator's name.
        form: what else tells programs apart: the dtypes that it takes and gives, and whether values may be missing.
        num_features: in the kernel.
        num_rows: of each feature.
        width: values in a row of a feature, on average.
        made_width: the same of the results.
        given_bytes, made_bytes: of a value.
        counts: what else its time grows with, by name: pieces that it copies, guesses of the processor that are wrong.
        read_bytes: that it really reads; None for all values.
        held_bytes: of a cache that what it reads takes up; None for as many as it reads.
        apart_bytes: of those read, with others between them, so that no processor fetches them ahead.

    Raises:
        FeatureError: there is no feature or no row, a number is negative, NaN or larger than 2**53, or a count has the
            name of a part of the roofline.
    """

    kind: str
    form: str
    num_features: int
    num_rows: int
    width: float
    made_width: float
    given_bytes: int
    made_bytes: int
    counts: Mapping[str, float] = field(default_factory=dict)
    read_bytes: float | None = None
    held_bytes: float | None = None
    apart_bytes: float = 0.0

    def __post_init__(self) -> None:
        for name in ("kind", "form"):
            check_is(f"KernelSize: {name}", getattr(self, name), str, "a name")
        for name in ("num_features", "num_rows"):
            check_number(f"KernelSize {self.kind}: {name}", getattr(self, name), 1, _MOST)
        for name in ("width", "made_width", "given_bytes", "made_bytes", "apart_bytes"):
            check_number(f"KernelSize {self.kind}: {name}", getattr(self, name), 0, _MOST)
        for name in ("read_bytes", "held_bytes"):
            if getattr(self, name) is not None:
                check_number(f"KernelSize {self.kind}: {name}", getattr(self, name), 0, _MOST)
        check_is(f"KernelSize {self.kind}: counts", self.counts, Mapping, "a dict of numbers by name")
        for name, count in self.counts.items():
            check_is(f"KernelSize {self.kind}: counts: name", name, str, "a name")
            check_number(f"KernelSize {self.kind}: counts[{name!r}]", count, 0, _MOST)
            if name in _PARTS:
                raise FeatureError(
                    f"KernelSize {self.kind}: counts[{name!r}]: {', '.join(_PARTS)} are counted anyway; rename it"
                )

    @property
    def program(self) -> tuple[str, str]:
        """Of kernels that share it, a roofline is fitted."""
        return self.kind, self.form

    @property
    def class_(self) -> str:
        """In which class of Table 5 it is."""
        return self.kind if self.kind in CLASSES else OTHERS

    @property
    def rows(self) -> float:
        """Of all features."""
        return self.num_features * self.num_rows

    @property
    def num_bytes(self) -> float:
        """That it reads and makes."""
        read = self.rows * self.width * self.given_bytes if self.read_bytes is None else self.read_bytes
        return read + self.rows * self.made_width * self.made_bytes

    @property
    def footprint(self) -> float:
        """Bytes of a cache that all of it takes up."""
        if self.held_bytes is None:
            return self.num_bytes
        return self.held_bytes + self.rows * self.made_width * self.made_bytes

    def roofline_terms(self, caches: Sequence[int]) -> dict[str, float]:
        """What a kernel takes is a sum of these, each times something that is not negative."""
        return {
            "launch": 1.0,
            "feature": self.num_features,
            "row": self.rows,
            "value": self.rows * self.width,
            "made": self.rows * self.made_width,
            "byte": self.num_bytes,
            **self.counts,
            **beyond_caches("byte", self.num_bytes, self.footprint, caches),
            **beyond_caches("byte apart", self.apart_bytes, self.footprint, caches),
        }

    def looks(self, names: Sequence[str], programs: Sequence[tuple[str, str]]) -> list[float]:
        """What the regression looks at: sizes as powers of two, the counts of these names for a row, the program."""
        sizes = self.num_features, self.num_rows, self.width, self.made_width, self.footprint
        parts = self.apart_bytes, *(self.counts.get(name, 0.0) for name in names)
        return [
            *(math.log2(size + 1) for size in sizes),
            *(math.log2(8 * part / self.rows + 1) for part in parts),
            *(float(self.program == program) for program in programs),
        ]


def beyond_caches(name: str, num_bytes: float, footprint: float, caches: Sequence[int]) -> dict[str, float]:
    """Bytes that come from beyond each cache, if what is gone through again and again takes up so much of it."""
    return {
        f"{name} beyond {edge:g} of {cache}": num_bytes * min(1.0, max(0.0, footprint / (edge * cache) - 0.5))
        for cache in caches
        for edge in _EDGES
    }


class Roofline:
    """A time that is a sum of terms, each times something that is not negative."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._scale = np.ones(0)
        self._line = LinearRegression(positive=True, fit_intercept=False)

    def fit(self, terms: Sequence[Mapping[str, float]], times: Numbers, weights: Numbers | None = None) -> Roofline:
        """Learn what each term costs; divided by the time, all errors are relative ones.

        Args:
            terms: of each sample.
            times: that each took, in seconds.
            weights: of the samples' squared errors; None: all alike.
        """
        self._names = sorted({name for each in terms for name in each})
        found = self._matrix(terms)
        self._scale = np.maximum(found.max(0), 1e-30)
        self._line.fit(found / self._scale / times[:, None], np.ones(len(times)), sample_weight=weights)
        return self

    def predict(self, terms: Sequence[Mapping[str, float]]) -> Numbers:
        """Seconds; never zero. What was in no sample costs nothing."""
        found = self._matrix(terms) / self._scale
        seconds: Numbers = np.maximum(found @ self._line.coef_, 1e-9)
        return seconds

    def _matrix(self, terms: Sequence[Mapping[str, float]]) -> Numbers:
        return np.array([[each.get(name, 0.0) for name in self._names] for each in terms], dtype=np.float64)


class LatencyModel:
    """Predicts how long kernels take.

    Args:
        caches: bytes of the device's caches.

    Raises:
        FeatureError: a cache has no bytes.
    """

    def __init__(self, caches: Sequence[int] = CACHE_BYTES) -> None:
        check_is("caches", caches, tuple | list, "a tuple of bytes, such as (1 << 15, 1 << 20)")
        for at, cache in enumerate(caches):
            check_number(f"LatencyModel: caches[{at}]", cache, 0, _MOST, is_above=True)
        self._caches = caches
        self._rooflines: dict[tuple[str, str], Roofline] = {}
        # Of each class: names of counts, programs, and what has learned what the rooflines leave over.
        self._rest: dict[str, tuple[list[str], list[tuple[str, str]], Pipeline]] = {}

    def fit(self, sizes: Sequence[KernelSize], seconds: Sequence[float]) -> LatencyModel:
        """Learn from kernels that took so long; what was learned before is forgotten.

        Raises:
            FeatureError: there is none, or a time is shorter than a picosecond, or longer than a billion seconds.
        """
        check_each("sizes", sizes, KernelSize)
        check_is("seconds", seconds, tuple | list, "a list of seconds")
        if not sizes or len(sizes) != len(seconds):
            raise FeatureError(f"{len(sizes)} kernels and {len(seconds)} times: as many, and one at least")
        for at, each in enumerate(seconds):
            check_number(f"seconds[{at}]", each, *_SECONDS)
        self._rooflines, self._rest = {}, {}
        times = np.asarray(seconds, dtype=np.float64)
        for program in sorted({size.program for size in sizes}):
            own = [at for at, size in enumerate(sizes) if size.program == program]
            self._rooflines[program] = Roofline().fit(self._terms(sizes, own), times[own])
        factors = np.log(times / self._lines(sizes))
        for class_ in sorted({size.class_ for size in sizes}):
            own = [at for at, size in enumerate(sizes) if size.class_ == class_]
            names = sorted({name for at in own for name in sizes[at].counts})
            programs = sorted({sizes[at].program for at in own})
            regression = make_pipeline(StandardScaler(), KernelRidge(kernel="rbf", gamma=0.5 / _REACH**2, alpha=_NOISE))
            looks = np.array([sizes[at].looks(names, programs) for at in own])
            self._rest[class_] = names, programs, regression.fit(looks, factors[own])
        return self

    def predict(self, sizes: Sequence[KernelSize]) -> Numbers:
        """Seconds of each kernel.

        Raises:
            FeatureError: it has learned nothing of an operator.
        """
        check_each("sizes", sizes, KernelSize)
        unknown = sorted({size.program for size in sizes} - set(self._rooflines))
        if unknown:
            raise FeatureError(f"nothing was measured of {', '.join(map(' '.join, unknown))}")
        found = self._lines(sizes)
        for class_ in {size.class_ for size in sizes}:
            own = [at for at, size in enumerate(sizes) if size.class_ == class_]
            names, programs, regression = self._rest[class_]
            found[own] *= np.exp(regression.predict(np.array([sizes[at].looks(names, programs) for at in own])))
        return found

    def _terms(self, sizes: Sequence[KernelSize], own: Sequence[int]) -> list[dict[str, float]]:
        return [sizes[at].roofline_terms(self._caches) for at in own]

    def _lines(self, sizes: Sequence[KernelSize]) -> Numbers:
        """What the rooflines say."""
        found = np.empty(len(sizes))
        for program in {size.program for size in sizes}:
            own = [at for at, size in enumerate(sizes) if size.program == program]
            found[own] = self._rooflines[program].predict(self._terms(sizes, own))
        return found
