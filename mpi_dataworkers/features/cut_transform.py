"""Run the two parts of a cut feature graph: one is a batch stage in data workers, the other finishes in the trainer."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any, NamedTuple

from hetstream.mpi_dataworkers.errors import FeatureError
from hetstream.mpi_dataworkers.features.cut_graph import CutGraph
from hetstream.mpi_dataworkers.features.reading import Reader, forms_of
from hetstream.mpi_dataworkers.features.transform import FeatureTransform, in_host_memory

Compute = Callable[[Mapping[str, Any]], dict[str, Any]]


class HandedOver(NamedTuple):
    """What data workers hand over of a batch.

    Attributes:
        fingerprint: of the cut by which it was made.
        features: by key, as `CutGraph` says.
        seconds: that the data workers' part took.
        num_rows: of the batch.
        list_length: values in a list of a jagged input, on average.
        columns: what the batch had, what `forms_of` says, as JSON.
        code: what ran the data workers' part, as `FeatureTransform.code`; "" where that is nothing.
    """

    fingerprint: str
    features: dict[str, Any]
    seconds: float = 0.0
    num_rows: int = 0
    list_length: float = 0.0
    columns: str = ""
    code: str = ""


class DataWorkersPart:
    """The data workers' part of a cut graph, as a function of batches. It can be pickled.

    The whole graph's inputs are checked here, so that a batch which does not fit fails alike wherever it is cut.

    Args:
        cut: the graph and where it is cut.

    Raises:
        FeatureError: when it is called: the batch does not fit the graph, and the message names each feature.
    """

    def __init__(self, cut: CutGraph) -> None:
        _check_cut("DataWorkersPart", cut)
        self.cut = cut
        self._check = Reader(cut.graph.inputs)
        self._transform = None if cut.data_workers is None else FeatureTransform(cut.data_workers, native="exact")
        self._copied = _in_both(cut)
        self._columns: tuple[dict[str, Any], str] = {}, ""  # of the batch before: what it had, also as JSON

    def __reduce__(self) -> tuple[object, ...]:
        return DataWorkersPart, (self.cut,)

    def __repr__(self) -> str:
        return f"DataWorkersPart({self.cut})"

    def __call__(self, batch: Mapping[str, Any]) -> HandedOver:
        began = time.perf_counter()
        with in_host_memory():
            num_rows, features = self._check(batch)
        lists = [features.values[name].numel() for name in features.lengths]
        list_length = sum(lists) / (len(lists) * num_rows) if lists and num_rows else 0.0
        made = {} if self._transform is None else self._transform.of_columns(num_rows, features)
        passed = ((key, batch[name], name in self._copied) for name, key in self.cut.passed)
        handed = made | {key: deepcopy(found) if is_shared else found for key, found, is_shared in passed}
        if (forms := forms_of(batch)) != self._columns[0]:
            self._columns = forms, json.dumps(forms)
        columns = self._columns[1]
        code = "" if self._transform is None else self._transform.code
        seconds = time.perf_counter() - began
        return HandedOver(self.cut.fingerprint, handed, seconds, num_rows, list_length, columns, code)


class TrainersPart:
    """The trainer's part of a cut graph: makes the whole graph's outputs of what data workers hand over.

    Args:
        cut: the graph and where it is cut.
        compute: what computes `cut.trainer`, such as a `FusedTransform`; default: torch, in host memory.

    Raises:
        FeatureError: when it is called: this was handed over for another cut.
    """

    def __init__(self, cut: CutGraph, compute: Compute | None = None) -> None:
        _check_cut("TrainersPart", cut)
        self.cut = cut
        if cut.trainer is not None and compute is None:
            compute = FeatureTransform(cut.trainer, native="exact")
        self._compute = compute if cut.trainer is not None else None

    def __call__(self, handed: HandedOver) -> dict[str, Any]:
        if handed.fingerprint != self.cut.fingerprint:
            raise FeatureError(f"these features were handed over for another cut than {self.cut}")
        made = handed.features if self._compute is None else handed.features | self._compute(handed.features)
        return {output.name: made[output.name] for output in self.cut.graph.outputs}


def _check_cut(who: str, cut: object) -> None:
    if not isinstance(cut, CutGraph):
        raise FeatureError(f"{who}: cut is a {type(cut).__name__}; give a CutGraph")


def _in_both(cut: CutGraph) -> frozenset[str]:
    """Inputs that are passed on, and whose memory outputs of the data workers' part may have: their own or the lengths.

    The trainer's part may make other outputs over that memory, and a program may change one of them in place.
    """
    if cut.data_workers is None:
        return frozenset()
    outputs = {name for output in cut.data_workers.outputs for name in output.of}
    shared = {node.name for node in cut.data_workers.inputs if node.type.is_jagged or node.name in outputs}
    return frozenset(name for name, _ in cut.passed if name in shared)
