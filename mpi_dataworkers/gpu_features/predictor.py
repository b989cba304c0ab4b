"""How long a kernel takes, learned from measurements: a roofline for each operator, and trees for what it leaves over.

The roofline says what a kernel must take: a part of each launch, each feature, each row, and each value that is read or
made, none of them below zero. It is fitted so that relative errors are small, and holds for sizes that were not
measured. Gradient-boosted trees then learn by which factor measurements differ, which is small: what they cannot know
beyond what was measured cannot be far off.

RAP trains one model for each of five classes of operators (its section 5.2), with XGBoost; so does this, with
scikit-learn. The samples are of one device: predictions are for that one alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.linear_model import LinearRegression

from hetstream.mpi_dataworkers.errors import FeatureError

Numbers = npt.NDArray[np.float64]
# RAP's Table 5: these four have a model each, and all others one together.
CLASSES = ("FirstX", "Ngram", "Onehot", "Bucketize")
OTHERS = "1D Ops"


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
        parameter: what else matters for the operator: borders of Bucketize, n of FirstX and Ngram, classes of Onehot.
        pieces: that are copied one by one: blocks of FirstX, windows of Ngram, lines of memory that Onehot touches.
        quick_pieces, quick_values: those of them for which the program has a quicker way, such as windows of two, and
            their values.
        uneven_rows: of all features, those whose list is not as long as the one before: processors guess wrong there.
        read_bytes: that it really reads; None for all.
    """

    kind: str
    form: str
    num_features: int
    num_rows: int
    width: float
    made_width: float
    given_bytes: int
    made_bytes: int
    parameter: float = 0.0
    pieces: float = 0.0
    quick_pieces: float = 0.0
    quick_values: float = 0.0
    uneven_rows: float = 0.0
    read_bytes: float | None = None

    @property
    def program(self) -> tuple[str, str]:
        """Of kernels that share it, a roofline is fitted."""
        return self.kind, self.form

    @property
    def class_(self) -> str:
        """In which class of Table 5 it is."""
        return self.kind if self.kind in CLASSES else OTHERS

    @property
    def values(self) -> float:
        """That it reads."""
        return self.num_features * self.num_rows * self.width

    @property
    def made_values(self) -> float:
        """That it makes."""
        return self.num_features * self.num_rows * self.made_width

    @property
    def num_bytes(self) -> float:
        """That it reads and makes."""
        read = self.values * self.given_bytes if self.read_bytes is None else self.read_bytes
        return read + self.made_values * self.made_bytes

    def roofline_terms(self) -> list[float]:
        """What a kernel takes is a sum of these, each times something that is not negative."""
        depth = math.log2(self.parameter + 2) * self.made_values
        rows = self.num_features * self.num_rows
        cached = [max(0.0, self.num_bytes - edge) for edge in _CACHE_BYTES]
        pieces = self.pieces, self.quick_pieces, self.quick_values, self.uneven_rows
        return [1.0, self.num_features, rows, *pieces, self.values, self.made_values, depth, *cached]

    def features(self) -> list[float]:
        """What the trees look at."""
        sizes = self.num_rows, self.width, self.made_width, self.values, self.made_values, self.num_bytes, self.pieces
        quick = self.quick_values / self.made_values if self.made_values else 0.0
        return [float(self.num_features), *(math.log2(size + 1) for size in sizes), self.parameter, quick]


# Where another cache begins, on usual processors and on GPUs: a roofline has a slope for each.
_CACHE_BYTES = (1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 25)
_TREES: dict[str, Any] = {"max_iter": 120, "learning_rate": 0.06, "max_leaf_nodes": 12, "min_samples_leaf": 8}


class LatencyModel:
    """Predicts how long kernels take.

    Args:
        seed: of the trees.
    """

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        self._rooflines: dict[tuple[str, str], LinearRegression] = {}
        self._trees: dict[str, HistGradientBoostingRegressor] = {}

    def fit(self, sizes: Sequence[KernelSize], seconds: Sequence[float]) -> LatencyModel:
        """Learn from kernels that took so long.

        Raises:
            FeatureError: there is none, or a time is not above zero.
        """
        if not sizes or len(sizes) != len(seconds):
            raise FeatureError(f"{len(sizes)} kernels and {len(seconds)} times: as many, and one at least")
        if not all(math.isfinite(each) and each > 0 for each in seconds):
            raise FeatureError("a kernel's time must be a finite number above 0")
        times = np.asarray(seconds, dtype=np.float64)
        programs = [size.program for size in sizes]
        for program in sorted(set(programs)):
            own = [at for at, each in enumerate(programs) if each == program]
            terms = np.array([sizes[at].roofline_terms() for at in own])
            # Divided by the time, all errors are relative ones.
            line = LinearRegression(positive=True, fit_intercept=False)
            self._rooflines[program] = line.fit(terms / times[own, None], np.ones(len(own)))
        classes = [size.class_ for size in sizes]
        factors = np.log(times / self._lines(sizes))
        for name in sorted(set(classes)):
            own = [at for at, each in enumerate(classes) if each == name]
            trees = HistGradientBoostingRegressor(random_state=self._seed, **_TREES)
            self._trees[name] = trees.fit(self._looks([sizes[at] for at in own]), factors[own])
        return self

    def predict(self, sizes: Sequence[KernelSize]) -> Numbers:
        """Seconds of each kernel.

        Raises:
            FeatureError: it has learned nothing of an operator.
        """
        unknown = sorted({size.program for size in sizes} - set(self._rooflines))
        if unknown:
            raise FeatureError(f"nothing was measured of {', '.join(map(' '.join, unknown))}")
        found = self._lines(sizes)
        for name in {size.class_ for size in sizes}:
            own = [at for at, size in enumerate(sizes) if size.class_ == name]
            found[own] *= np.exp(self._trees[name].predict(self._looks([sizes[at] for at in own])))
        return found

    def _lines(self, sizes: Sequence[KernelSize]) -> Numbers:
        """What the rooflines say; never zero."""
        found = np.empty(len(sizes))
        for at, size in enumerate(sizes):
            found[at] = float(np.dot(size.roofline_terms(), self._rooflines[size.program].coef_))
        return np.maximum(found, 1e-9)

    def _looks(self, sizes: Sequence[KernelSize]) -> Numbers:
        programs = {program: float(at) for at, program in enumerate(sorted(self._rooflines))}
        return np.array([[*size.features(), programs[size.program]] for size in sizes])
