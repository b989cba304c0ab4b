"""A feature graph as JSON, for plans that are made elsewhere and for files. Pure; torch is not needed.

    {"version": 1,
     "inputs": [{"name": "age", "dtype": "float32", "is_nullable": true}, {"name": "clicked", "dtype": "int64",
                 "is_jagged": true}],
     "steps": [{"name": "age.FillNull", "of": "age", "operator": "FillNull", "parameters": {"value": 0.0}}],
     "outputs": [{"name": "dense", "of": ["age.FillNull"], "keys": ["age"]}]}

What is not given has its default. Unknown names and wrong types are errors.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import msgspec

from hetstream.base import typed_json
from hetstream.mpi_dataworkers.errors import FeatureError
from hetstream.mpi_dataworkers.features.graph import FeatureGraph, Input, Output, Step
from hetstream.mpi_dataworkers.features.operators import OPERATORS, Operator
from hetstream.mpi_dataworkers.features.types import FeatureType

VERSION = 1
_BY_NAME = {operator.__name__: operator for operator in OPERATORS}


class _Input(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    name: str
    dtype: str
    is_jagged: bool = False
    width: int = 1
    is_nullable: bool = False


class _Step(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    name: str
    of: str
    operator: str
    parameters: dict[str, Any] = {}


class _Output(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    name: str
    of: tuple[str, ...]
    keys: tuple[str, ...] = ()


class _Graph(msgspec.Struct, forbid_unknown_fields=True):
    version: int
    inputs: list[_Input]
    steps: list[_Step]
    outputs: list[_Output]


def to_json(graph: FeatureGraph) -> str:
    """The JSON text of a graph; `from_json` makes an equal graph of it.

    Raises:
        FeatureError: It is no graph.
    """
    if not isinstance(graph, FeatureGraph):
        raise FeatureError(f"graph is a {type(graph).__name__}; give a FeatureGraph, such as a part of a CutGraph")
    form = _Graph(
        VERSION,
        [_Input(node.name, **asdict(node.type)) for node in graph.inputs],
        [_Step(step.name, step.of, step.operator.name, asdict(step.operator)) for step in graph.steps],
        [_Output(output.name, output.of, output.keys) for output in graph.outputs],
    )
    return typed_json.encode(form).decode()


def from_json(text: str | bytes) -> FeatureGraph:
    """Make a graph of its JSON text.

    Raises:
        FeatureError: The text is no such JSON, or the graph cannot work; the message has every problem of the steps.
    """
    if not isinstance(text, str | bytes):
        raise FeatureError(
            f"this is no feature graph in JSON: it is a {type(text).__name__}; give what to_json returns"
        )
    try:
        form = typed_json.decode(text, _Graph)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise FeatureError(f"this is no feature graph in JSON: {error}") from error
    if form.version != VERSION:
        raise FeatureError(f"this feature graph has version {form.version} of its form; this hetstream reads {VERSION}")
    problems: list[str] = []
    steps = []
    for step in form.steps:
        try:
            steps.append(Step(step.name, step.of, _operator(step)))
        except (msgspec.MsgspecError, TypeError, ValueError) as error:
            problems.append(f"step {step.name}: {error}")
    if problems:
        raise FeatureError("this feature graph cannot be read: " + "; ".join(problems))
    inputs = [
        Input(node.name, FeatureType(node.dtype, node.is_jagged, node.width, node.is_nullable)) for node in form.inputs
    ]
    outputs = [Output(output.name, output.of, output.keys) for output in form.outputs]
    return FeatureGraph(tuple(inputs), tuple(steps), tuple(outputs))


def _operator(step: _Step) -> Operator:
    if step.operator not in _BY_NAME:
        raise ValueError(f"there is no operator {step.operator!r}; there are {', '.join(sorted(_BY_NAME))}")
    kind = _BY_NAME[step.operator]
    unknown = step.parameters.keys() - kind.__dataclass_fields__.keys()
    if unknown:
        raise ValueError(f"{step.operator} has no parameter {', '.join(sorted(unknown))}")
    return msgspec.convert(step.parameters, kind)
