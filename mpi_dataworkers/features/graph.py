"""A feature graph: named inputs, operators, named outputs. Immutable, and checked when it is made. Pure, without torch.

    graph = FeatureGraph.of({
        "dense": [dense("age", is_nullable=True) >> FillNull(0.0) >> Clamp(0.0, 100.0), dense("price") >> BoxCox(0.5)],
        "sparse": [jagged("clicked") >> FirstX(20) >> SigridHash(max_value=100_000)],
        "label": dense("label"),
    })

Users write chains like these; programs that make graphs or change them (a partitioner, a plan for GPUs) use the flat
form that `FeatureGraph` itself has, or its JSON.

Which chains of a feature graph run together: the same operators, but for numbers, on features of one type.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

import msgspec

from hetstream.base import typed_json
from hetstream.mpi_dataworkers.errors import FeatureError
from hetstream.mpi_dataworkers.features.operators import DTYPES, OPERATORS, FeatureType, Onehot, Operator

_LONGEST_SHOWN = 200


@dataclass(frozen=True)
class Input:
    """A feature of the batch that a graph is given, by its key there."""

    name: str
    type: FeatureType


@dataclass(frozen=True)
class Step:
    """One operator at work.

    Attributes:
        name: the feature that it makes.
        of: the feature that it makes it of.
        operator: what it does.
        line: file and line where a program has added it to a chain, for errors; no part of what the step is.
    """

    name: str
    of: str
    operator: Operator
    line: str = field(default="", compare=False, repr=False)

    def __reduce__(self) -> tuple[object, ...]:
        return Step, (self.name, self.of, self.operator)

    def __str__(self) -> str:
        return f"step {self.name} ({self.line})" if self.line else f"step {self.name}"


@dataclass(frozen=True)
class Output:
    """A key of the batch that a graph gives.

    Attributes:
        name: the key.
        of: the features in it, in order.
        keys: empty where the output is one feature as it is. Else there are as many as features, and those are put
            together: dense ones as the columns of a matrix, jagged ones as a `JaggedBatch` with these keys.
    """

    name: str
    of: tuple[str, ...]
    keys: tuple[str, ...] = ()


@dataclass(frozen=True)
class Feature:
    """A chain: an input and the operators that are applied to it. `feature >> operator` is the longer chain."""

    input: Input
    operators: tuple[Operator, ...] = ()
    key: str = ""
    lines: tuple[str, ...] = field(default=(), compare=False, repr=False)  # where each operator was added

    def __rshift__(self, operator: Operator) -> Feature:
        if not isinstance(operator, Operator):
            raise FeatureError(f"{self.input.name} >> {operator!r}: it is no operator, such as FillNull(0.0)")
        caller = sys._getframe(1)
        line = f"{os.path.basename(caller.f_code.co_filename)}:{caller.f_lineno}"
        return replace(self, operators=(*self.operators, operator), lines=(*self.lines, line))

    def named(self, key: str) -> Feature:
        """Return the same with another key than its input's, for a JaggedBatch in which two chains of one input
        stand.
        """
        return replace(self, key=key)


def dense(name: str, dtype: str = "float32", *, width: int = 1, is_nullable: bool = False) -> Feature:
    """Return a feature with `width` values in each row: a tensor of shape (rows,), or (rows, width) where that is not
    1.

    Args:
        name: Its key in the batch.
        dtype: `float32`, `float64`, `int32` or `int64`.
        width: Values in a row.
        is_nullable: Whether values may be missing; it is a `Nullable` in the batch then, or a tensor where none is.
    """
    return Feature(Input(name, FeatureType(dtype, False, width, is_nullable)))


def jagged(name: str, dtype: str = "int64") -> Feature:
    """Return a feature with a list of its own length in each row, `Jagged` in the batch.

    Args:
        name: Its key in the batch.
        dtype: As for `dense`.
    """
    return Feature(Input(name, FeatureType(dtype, is_jagged=True)))


@dataclass(frozen=True)
class FeatureGraph:
    """Inputs, steps in any order, outputs.

    Attributes:
        types: the type of every feature, inputs and steps, by name.
        order: the steps so that each comes after the one it needs; those that no output needs are in it, too.

    Raises:
        FeatureError: The graph cannot work; the message has every problem.
    """

    inputs: tuple[Input, ...]
    steps: tuple[Step, ...]
    outputs: tuple[Output, ...]
    types: Mapping[str, FeatureType] = field(init=False, repr=False, compare=False)
    order: tuple[Step, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if problems := list(_problems_of_form(self)):
            raise FeatureError("this is no feature graph: " + "; ".join(problems))
        check = _Check(self)
        if check.problems:
            raise FeatureError("this feature graph cannot work: " + "; ".join(check.problems))
        object.__setattr__(self, "types", check.types)
        object.__setattr__(self, "order", tuple(check.order))

    @classmethod
    def of(cls, outputs: Mapping[str, Feature | Sequence[Feature]]) -> FeatureGraph:
        """Return the graph of some chains. What several chains begin with alike is computed once.

        Args:
            outputs: A chain, or a list of chains that are put together as `Output` says, by the key in the batch.

        Raises:
            FeatureError: As the class.
        """
        if problems := list(_problems_of_chains(outputs)):
            raise FeatureError("this feature graph cannot work: " + "; ".join(problems))
        inputs: dict[Input, None] = {}
        steps: dict[tuple[str, Operator], str] = {}
        lines: dict[str, str] = {}
        names: Counter[str] = Counter()

        def place(chain: Feature) -> str:
            inputs.setdefault(chain.input)
            at = chain.input.name
            for operator, line in zip(chain.operators, (*chain.lines, *[""] * len(chain.operators)), strict=False):
                if (at, operator) not in steps:
                    name = f"{at}.{operator.name}"
                    names[name] += 1
                    steps[at, operator] = f"{name}#{names[name]}" if names[name] > 1 else name
                at = steps[at, operator]
                lines.setdefault(at, line)
            return at

        made = [
            Output(name, (place(chains),))
            if isinstance(chains, Feature)
            else Output(name, tuple(map(place, chains)), tuple(chain.key or chain.input.name for chain in chains))
            for name, chains in outputs.items()
        ]
        flat = tuple(Step(name, of, operator, lines[name]) for (of, operator), name in steps.items())
        return cls(tuple(inputs), flat, tuple(made))

    def __reduce__(self) -> tuple[object, ...]:
        # Without what is computed: the same graph is the same bytes, whatever was asked of it before.
        return FeatureGraph, (self.inputs, self.steps, self.outputs)

    @cached_property
    def digest(self) -> str:
        """64 hexadecimal digits that two graphs share if they are the same, on every machine."""
        steps = [(step.name, step.of, step.operator.name, _exact(vars(step.operator))) for step in self.steps]
        text = repr((self.inputs, steps, self.outputs))
        return hashlib.blake2b(text.encode(), digest_size=32).hexdigest()

    def __str__(self) -> str:
        count = Counter(step.operator.name for step in self.steps)
        used = ", ".join(f"{name} {count[name]}" for name in sorted(count)) or "no operator"
        outputs = ", ".join(output.name for output in self.outputs)
        return f"FeatureGraph({len(self.inputs)} inputs, {used}, outputs {outputs})"


def _exact(parameters: object) -> object:
    """Parameters of which equal ones have one text: 1 and 1.0 are equal."""
    if isinstance(parameters, dict):
        return {name: _exact(value) for name, value in parameters.items()}
    if isinstance(parameters, tuple):
        return [_exact(value) for value in parameters]
    return int(parameters) if isinstance(parameters, float) and parameters.is_integer() else parameters


def _is_text(name: object) -> bool:
    """Whether JSON can have it: not half of a surrogate pair, as an undecodable file name has."""
    return isinstance(name, str) and not any("\ud800" <= character <= "\udfff" for character in name)


def _problems_of_form(graph: FeatureGraph) -> Iterator[str]:
    """What in the flat form is something else than it has to be, so that nobody can ask it for more."""
    for what, kind in (("inputs", Input), ("steps", Step), ("outputs", Output)):
        parts = getattr(graph, what)
        if not isinstance(parts, tuple | list):
            yield f"{what} is a {type(parts).__name__}; give a tuple of {kind.__name__}, or chains to FeatureGraph.of"
            continue
        for at, part in enumerate(parts):
            if not isinstance(part, kind):
                yield f"{what}[{at}] is {_shown(part)}, and no {kind.__name__}"
            elif isinstance(part, Input) and not isinstance(part.type, FeatureType):
                yield f"{what}[{at}]: type is {_shown(part.type)}, and no FeatureType"
            elif isinstance(part, Output) and not (isinstance(part.of, tuple) and isinstance(part.keys, tuple)):
                yield f"{what}[{at}]: of={_shown(part.of)}, keys={_shown(part.keys)}: tuples of names"
            elif not all(map(_is_hashable, (part.name, getattr(part, "of", ""), getattr(part, "keys", ())))):
                yield f"{what}[{at}]: {_shown(part)}: names are texts"


def _problems_of_chains(outputs: object) -> Iterator[str]:
    """Why no flat form can be made of what a program has written."""
    if not isinstance(outputs, Mapping):
        yield f"it is a {type(outputs).__name__}; give a dict of chains, or lists of chains, by output"
        return
    for name, chains in outputs.items():
        for chain in (chains,) if isinstance(chains, Feature | str) or not isinstance(chains, Iterable) else chains:
            if not isinstance(chain, Feature):
                yield f"output {name}: {_shown(chain)} is no chain, such as dense('age') >> Clamp(0.0, 1.0)"
                continue
            for part in (chain.input, *chain.operators):
                if not _is_hashable(part):
                    yield f"output {name}: {_shown(part)}: parameters are numbers and texts, or tuples of these"


def _is_hashable(part: object) -> bool:
    try:
        hash(part)
    except TypeError:
        return False
    return True


def _shown(part: object) -> str:
    """For a message: a table may have a million places."""
    text = repr(part)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


class _Check:
    """Everything that is wrong with a graph, and its types and order if nothing is."""

    def __init__(self, graph: FeatureGraph) -> None:
        self.types: dict[str, FeatureType] = {}
        self.order: list[Step] = []
        self._graph = graph
        self._names = Counter([*(node.name for node in graph.inputs), *(step.name for step in graph.steps)])
        self.problems = [*self._inputs(), *self._names_twice(), *self._steps(), *self._outputs()]

    def _inputs(self) -> Iterator[str]:
        for node in self._graph.inputs:
            if type(node.type.width) is not int or type(node.type.dtype) is not str:
                found = f"dtype={node.type.dtype!r}, width={node.type.width!r}"
                yield f"input {node.name}: {found}: a text and a whole number"
                continue
            if node.type.dtype not in DTYPES:
                yield f"input {node.name}: dtype {node.type.dtype!r} is none of {', '.join(DTYPES)}"
            if node.type.width < 1 or (node.type.is_jagged and node.type.width != 1):
                yield f"input {node.name}: width {node.type.width}: at least 1, and 1 for a jagged feature"
            if node.type.is_jagged and node.type.is_nullable:
                yield f"input {node.name}: a jagged feature is not nullable; a list that is missing is an empty one"
            self.types[node.name] = node.type

    def _names_twice(self) -> Iterator[str]:
        outputs = Counter(output.name for output in self._graph.outputs)
        for what, counted in (("feature", self._names), ("output", outputs)):
            yield from (f"{what} {name!r} stands there {times} times" for name, times in counted.items() if times > 1)
            yield from (f"{what} {name!r}: a name is a text that UTF-8 has" for name in counted if not _is_text(name))
            if "" in counted:
                yield f"{what} '' has no name"

    def _steps(self) -> Iterator[str]:
        followers: dict[str, list[Step]] = {}
        for step in self._graph.steps:
            wrong = [*_problems(step.operator)]
            if step.of not in self._names:
                wrong.append(f"there is no feature {step.of!r}")
            yield from (f"{step}: {problem}" for problem in wrong)
            if not wrong:
                followers.setdefault(step.of, []).append(step)
        reached = list(self.types)
        for name in reached:  # it grows meanwhile
            for step in followers.get(name, ()):
                given = self.types[name]
                refusal = step.operator.refusal(given) if given.dtype in DTYPES else ""
                if refusal:
                    yield f"{step}: {step.operator.name} of {name} ({given}): {refusal}"
                elif step.name not in self.types and given.dtype in DTYPES:
                    self.types[step.name] = step.operator.result(given)
                    self.order.append(step)
                    reached.append(step.name)
        yield from self._cycles()

    def _cycles(self) -> Iterator[str]:
        before = {step.name: step.of for step in self._graph.steps}
        reported: set[str] = set()
        for start in before:
            path: list[str] = []
            at = start
            while at in before and at not in path and at not in reported:
                path.append(at)
                at = before[at]
            if at in path:
                circle = path[path.index(at) :]
                yield f"steps {' <- '.join([*circle, at])}: each needs the next one, in a circle"
            reported.update(path)

    def _outputs(self) -> Iterator[str]:
        if not self._graph.outputs:
            yield "it has no output"
        for output in self._graph.outputs:
            missing = [name for name in output.of if name not in self._names]
            yield from (f"output {output.name}: there is no feature {name!r}" for name in missing)
            if not output.of or (len(output.of) > 1 and not output.keys):
                yield f"output {output.name}: one feature, or a list of features with a key for each"
            elif not missing and all(name in self.types for name in output.of):
                yield from self._output(output, [self.types[name] for name in output.of])

    def _output(self, output: Output, types: list[FeatureType]) -> Iterator[str]:
        for name, kind in zip(output.of, types, strict=True):
            if kind.is_nullable:
                yield f"output {output.name}: values of {name} may be missing: put FillNull behind it"
        if not output.keys:
            return
        if len(output.keys) != len(output.of):
            yield f"output {output.name}: {len(output.of)} features and {len(output.keys)} keys"
        dtypes = sorted({kind.dtype for kind in types})
        if len(dtypes) > 1:
            yield f"output {output.name}: its features are {' and '.join(dtypes)}; put Cast behind some of them"
        if any(kind.is_jagged for kind in types):
            twice = [key for key, times in Counter(output.keys).items() if times > 1]
            yield from (f"output {output.name}: key {key!r} stands there twice: give one .named(...)" for key in twice)


def _problems(operator: Operator) -> Iterator[str]:
    """What is wrong with an operator by itself; its rules are asked only where its parameters have the right types."""
    if type(operator) not in OPERATORS:
        yield f"{_shown(operator)} is no operator"
        return
    try:
        msgspec.convert(vars(operator), type(operator))
    except msgspec.ValidationError as error:
        yield f"{_shown(operator)}: {error}"
        return
    yield from (f"{operator.name}: {problem}" for problem in operator.problems())


# A feature graph as JSON, for plans that are made elsewhere and for files. Pure; torch is not needed.
#
#     {"version": 1,
#      "inputs": [{"name": "age", "dtype": "float32", "is_nullable": true}, {"name": "clicked", "dtype": "int64",
#                  "is_jagged": true}],
#      "steps": [{"name": "age.FillNull", "of": "age", "operator": "FillNull", "parameters": {"value": 0.0}}],
#      "outputs": [{"name": "dense", "of": ["age.FillNull"], "keys": ["age"]}]}
#
# What is not given has its default. Unknown names and wrong types are errors.

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
    """Return the JSON text of a graph; `from_json` makes an equal graph of it.

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


@dataclass(frozen=True)
class Chain:
    """Steps of which each has the one before it as its only user, or the feature that it begins with."""

    source: str
    steps: tuple[Step, ...]

    @property
    def result(self) -> str:
        """The feature that it makes."""
        return self.steps[-1].name


def groups_of(graph: FeatureGraph, kept: Iterable[str] = ()) -> list[list[Chain]]:
    """Return the chains of a graph by what can run together; each group comes after those whose results it needs.

    Args:
        graph: the graph.
        kept: features that are needed although they are no output: a chain ends with them.
    """
    users = Counter(step.of for step in graph.order)
    for names in (*(output.of for output in graph.outputs), kept):
        users.update(dict.fromkeys(names, 2))  # a chain ends where its feature is an output
    next_of = {step.of: step for step in graph.order}
    inputs = {node.name for node in graph.inputs}
    depth = dict.fromkeys(inputs, 0)
    groups: dict[Hashable, list[Chain]] = {}
    for step in graph.order:
        if step.of not in inputs and users[step.of] == 1:
            continue  # within a chain
        steps = [step]
        while users[steps[-1].name] == 1 and steps[-1].name in next_of:
            steps.append(next_of[steps[-1].name])
        chain = Chain(step.of, tuple(steps))
        depth[chain.result] = depth[chain.source] + 1
        given = replace(graph.types[chain.source], is_nullable=False)
        kinds = tuple((type(step.operator), graph.types[step.name].dtype) for step in steps)
        if not any(isinstance(step.operator, Onehot) for step in steps):
            given = FeatureType(given.dtype, given.is_jagged)  # the width is nothing to the others
        groups.setdefault((depth[chain.result], given, kinds), []).append(chain)
    place = {name: at for at, name in enumerate(name for output in graph.outputs for name in output.of)}
    ordered = [sorted(chains, key=lambda chain: place.get(chain.result, len(place))) for chains in groups.values()]
    return sorted(ordered, key=lambda chains: depth[chains[0].result])
