"""A feature graph in two parts: what data workers compute, and what is left for the trainer. Pure, without torch.

`gpu_features/hybrid.py` decides where to cut.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Set
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from hetstream.mpi_dataworkers.errors import FeatureError
from hetstream.mpi_dataworkers.features.batches import Reader, forms_of
from hetstream.mpi_dataworkers.features.graph import FeatureGraph, Input, Output, Step
from hetstream.mpi_dataworkers.features.transform import FeatureTransform, in_host_memory


@dataclass(frozen=True)
class CutGraph:
    """A feature graph that is cut at some of its operators; both parts together make the same of a batch.

    What data workers hand over is a dict: the outputs that they finish, under their names, and each feature that the
    trainer's part takes, under its name or, where that is taken, a longer one.

    Attributes:
        graph: the whole graph.
        first: names of the steps with which the trainer's part begins: it has these and all that need them.
        data_workers: what data workers compute; None if it is nothing.
        passed: inputs of the graph that the trainer's part takes as they are, and under which key.
        trainer: what the trainer computes of that; None if it is nothing.

    Raises:
        FeatureError: The graph has no such step; the message has every problem.
    """

    graph: FeatureGraph
    first: tuple[str, ...] = ()
    data_workers: FeatureGraph | None = field(init=False, repr=False, compare=False)
    passed: tuple[tuple[str, str], ...] = field(init=False, repr=False, compare=False)
    trainer: FeatureGraph | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        problems = list(_problems(self.graph, self.first))
        if problems:
            raise FeatureError("this feature graph cannot be cut: " + "; ".join(problems))
        object.__setattr__(self, "first", tuple(sorted(set(self.first))))
        parts = _Parts(self.graph, behind(self.graph, self.first))
        object.__setattr__(self, "data_workers", parts.data_workers())
        object.__setattr__(self, "trainer", parts.trainer())
        object.__setattr__(self, "passed", parts.passed)

    def __reduce__(self) -> tuple[object, ...]:
        # As FeatureGraph: the same cut is the same bytes.
        return CutGraph, (self.graph, self.first)

    @cached_property
    def fingerprint(self) -> str:
        """64 hexadecimal digits that two cuts share if what data workers hand over is the same."""
        # It travels with each batch, and of a graph with 2,000 features all may be named.
        return hashlib.blake2b(f"{self.graph.digest} {self.first!r}".encode(), digest_size=32).hexdigest()

    def __str__(self) -> str:
        own = len(self.trainer.steps) if self.trainer is not None else 0
        return f"CutGraph({own} of {len(self.graph.steps)} operators on the trainer)"


def behind(graph: FeatureGraph, first: Collection[str]) -> frozenset[str]:
    """Some steps, and all that need them."""
    found = set(first)
    for step in graph.order:
        if step.of in found:
            found.add(step.name)
    return frozenset(found)


def _problems(graph: object, first: object) -> Iterator[str]:
    if not isinstance(graph, FeatureGraph):
        yield f"it is a {type(graph).__name__}; give a FeatureGraph"
        return
    if isinstance(first, str) or not isinstance(first, Collection):
        yield f"first={first!r}: names of steps, such as {[step.name for step in graph.steps[:2]]}"
        return
    steps = {step.name for step in graph.steps}
    for name in first:
        if not isinstance(name, str) or name not in steps:
            some = ", ".join(map(repr, sorted(steps)[:5])) or "none"
            yield f"there is no step {name!r}; its steps are {some}{', ...' if len(steps) > 5 else ''}"


class _Parts:
    """The two parts while they are made."""

    def __init__(self, graph: FeatureGraph, on_trainer: Set[str]) -> None:
        self._graph = graph
        self._inputs = {node.name for node in graph.inputs}
        self._finished = [output for output in graph.outputs if on_trainer.isdisjoint(output.of)]
        self._outputs = [output for output in graph.outputs if not on_trainer.isdisjoint(output.of)]
        results = _features_of(self._outputs)
        self._own = _needed([step for step in graph.order if step.name in on_trainer], results)
        self._others = [step for step in graph.order if step.name not in on_trainer]
        taken = {output.name for output in self._finished} | {step.name for step in self._own}
        # Under which key each feature is handed over, in the order in which they are needed.
        self._keys: dict[str, str] = {}
        for name in (*(step.of for step in self._own), *results):
            if name not in on_trainer and name not in self._keys:
                self._keys[name] = key = _free(name, taken)
                taken.add(key)
        self.passed = tuple((name, key) for name, key in self._keys.items() if name in self._inputs)

    def data_workers(self) -> FeatureGraph | None:
        handed = [Output(key, (name,)) for name, key in self._keys.items() if name not in self._inputs]
        outputs = (*self._finished, *handed)
        if not outputs:
            return None
        results = _features_of(outputs)
        steps = _needed(self._others, results)
        used = {*results, *(step.of for step in steps)}
        return FeatureGraph(tuple(node for node in self._graph.inputs if node.name in used), tuple(steps), outputs)

    def trainer(self) -> FeatureGraph | None:
        if not self._outputs:
            return None
        keys = self._keys
        inputs = tuple(Input(key, self._graph.types[name]) for name, key in keys.items())
        steps = tuple(replace(step, of=keys.get(step.of, step.of)) for step in self._own)
        outputs = (replace(output, of=tuple(keys.get(name, name) for name in output.of)) for output in self._outputs)
        return FeatureGraph(inputs, steps, tuple(outputs))


def _features_of(outputs: Collection[Output]) -> list[str]:
    return [name for output in outputs for name in output.of]


def _needed(steps: Collection[Step], features: Collection[str]) -> list[Step]:
    """Those of some steps, each after the one that it needs, that these features need."""
    wanted = set(features)
    for step in reversed([*steps]):
        if step.name in wanted:
            wanted.add(step.of)
    return [step for step in steps if step.name in wanted]


def _free(name: str, taken: Collection[str]) -> str:
    """The name, or a longer one that nothing else has."""
    while name in taken:
        name += "'"
    return name


# Run the two parts of a cut feature graph: one is a batch stage in data workers, the other finishes in the trainer.

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
