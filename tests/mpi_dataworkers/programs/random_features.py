"""Random chains of operators, and rows for them with everything that a number can be: for tests of feature graphs."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import torch

from hetstream.mpi_dataworkers.features import operators as ops
from hetstream.mpi_dataworkers.features.batches import Jagged, Nullable
from hetstream.mpi_dataworkers.features.graph import Feature, FeatureGraph, dense, jagged
from hetstream.mpi_dataworkers.features.operators import DTYPES, FeatureType

NAN, INF, LARGE = math.nan, math.inf, 2**63 - 1
REALS = (0.0, -0.0, 1.0, -1.0, 0.25, 0.5, 2.0, 7.5, -3.25, 1e-30, 1e30, 3e9, NAN, INF, -INF)
WHOLE = (0, 1, 2, 3, -1, -2, 17, 255, 2**31 - 1, -(2**31))
BORDERS = (-2.0, -1.0, 0.0, 0.0, 0.5, 1.0, 4.0, 4.0)


def random_operator(draw: random.Random) -> ops.Operator:
    """Any of the eleven, with any numbers."""
    low = draw.uniform(-3, 3)
    salt, most = draw.randint(-(2**63), LARGE), draw.choice([1, 2, 97, 10**6, 2**62 + 3, LARGE])
    return draw.choice(
        [
            ops.Logit(draw.uniform(1e-6, 0.4)),
            ops.BoxCox(draw.choice([0.0, 1e-9, 0.5, -0.7, 2.0])),
            ops.Onehot(low, low + draw.uniform(0.5, 6), draw.randint(1, 5)),
            ops.SigridHash(salt, most),
            ops.FirstX(draw.randint(0, 6)),
            ops.Clamp(draw.choice([None, low]), low + 4),
            ops.Clamp(draw.randint(-9, 0), draw.randint(0, 300)),
            ops.Bucketize(tuple(BORDERS[: draw.randint(1, 8)])),
            ops.Ngram(draw.choice([1, 2, 3, 5, 2**62])),
            ops.MapId(tuple(draw.randint(-(2**63), LARGE) for _ in range(draw.randint(1, 9)))),
            ops.FillNull(draw.choice([0, 7, 0.5]), draw.random() < 0.5),
            ops.Cast(draw.choice(DTYPES)),
        ]
    )


def random_chain(name: str, draw: random.Random) -> Feature:
    """An input of any type with up to seven operators."""
    dtype = draw.choice(DTYPES)
    if draw.random() < 0.5:
        feature, kind = jagged(name, dtype), FeatureType(dtype, is_jagged=True)
    else:
        width, is_nullable = draw.choice([1, 1, 3]), draw.random() < 0.4
        feature = dense(name, dtype, width=width, is_nullable=is_nullable)
        kind = feature.input.type
        if is_nullable:
            feature = feature >> ops.FillNull(draw.randint(0, 5))
            kind = feature.operators[0].result(kind)
    for _ in range(draw.randint(0, 14)):
        operator = random_operator(draw)
        if not operator.refusal(kind) and kind.width * getattr(operator, "num_classes", 1) < 30:
            feature, kind = feature >> operator, operator.result(kind)
    return feature


def random_rows(chain: Feature, num_rows: int, draw: random.Random) -> list[list[Any]]:
    """What the reference is given; None is a value that is missing."""
    kind = chain.input.type
    number = np.dtype(kind.dtype).type
    wild = REALS if kind.is_float else WHOLE if kind.dtype == "int32" else (*WHOLE, LARGE, -(2**63))

    def value() -> Any:
        if kind.is_nullable and draw.random() < 0.3:
            return None
        return number(draw.choice(wild) if draw.random() < 0.6 else draw.uniform(-4, 4))

    return [[value() for _ in range(draw.randint(0, 6) if kind.is_jagged else kind.width)] for _ in range(num_rows)]


def as_input(chain: Feature, rows: list[list[Any]]) -> Any:
    """The same as a batch has it."""
    kind = chain.input.type
    flat = [value for row in rows for value in row]
    values = torch.from_numpy(np.array([0 if value is None else value for value in flat], dtype=kind.dtype))
    if kind.is_jagged:
        return Jagged(values, torch.tensor([len(row) for row in rows], dtype=torch.int64))
    shape = (len(rows),) if kind.width == 1 else (len(rows), kind.width)
    valid = torch.tensor([value is not None for value in flat], dtype=torch.bool).reshape(shape)
    return Nullable(values.reshape(shape), valid) if kind.is_nullable else values.reshape(shape)


def random_graph(draw: random.Random) -> tuple[FeatureGraph, dict[str, Feature]]:
    """A graph whose chains have common beginnings, with outputs of all forms, and a chain of each input."""
    chains = {f"x{at}": random_chain(f"x{at}", draw) for at in range(draw.randint(1, 4))}
    outputs: dict[str, Any] = {}
    features: list[Feature] = []
    for name, chain in chains.items():
        lengths = {len(chain.operators), *(draw.randint(1, 9) for _ in range(draw.randint(0, 2)))}
        for length in sorted(lengths):
            part = Feature(chain.input, chain.operators[:length])
            if not type_of(part).is_nullable:
                features.append(part)
        if draw.random() < 0.5 and not chain.input.type.is_nullable:
            outputs[name] = Feature(chain.input)  # called as the input
    for at, feature in enumerate(features):
        if draw.random() < 0.6:
            outputs[f"y{at}"] = feature
    for dtype in DTYPES:
        for is_jagged in (False, True):
            alike = [each for each in features if type_of(each) == FeatureType(dtype, is_jagged)]
            if alike:
                outputs[f"all {dtype} {is_jagged}"] = [each.named(f"k{at}") for at, each in enumerate(alike)]
    return FeatureGraph.of(outputs or {"x": features[0]}), chains


def random_batch(chains: dict[str, Feature], num_rows: int, draw: random.Random) -> dict[str, Any]:
    """A batch for such a graph."""
    return {name: as_input(chain, random_rows(chain, num_rows, draw)) for name, chain in chains.items()}


def type_of(feature: Feature) -> FeatureType:
    """Of what a chain makes."""
    kind = feature.input.type
    for operator in feature.operators:
        kind = operator.result(kind)
    return kind


def as_bytes(value: Any) -> Any:
    """An output of a graph, for comparisons that tell NaNs and zeros apart."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.contiguous().numpy().tobytes()
    if isinstance(value, dict):
        return {name: as_bytes(each) for name, each in value.items()}
    return (type(value).__name__, *map(as_bytes, value)) if isinstance(value, tuple) else value
