"""Run a feature graph on whole batches: what a loader is given as its `batch_stage`, or a program calls itself.

Chains of operators run in native code (`native.py`) or with torch (`kernels.py`). It never writes into the batch
that it is given.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal

import torch

from hetstream.mpi_dataworkers.errors import FeatureError
from hetstream.mpi_dataworkers.features import native as native_code
from hetstream.mpi_dataworkers.features.batches import Columns, Jagged, JaggedBatch, Reader, Values
from hetstream.mpi_dataworkers.features.graph import FeatureGraph, Output, groups_of
from hetstream.mpi_dataworkers.features.kernels import TorchGroup
from hetstream.mpi_dataworkers.features.native import NativeChoice, NativeGroup, is_exact, native_choice
from hetstream.mpi_dataworkers.features.native import are_lists as native_lists
from hetstream.mpi_dataworkers.features.operators import MapId, Ngram


class FeatureTransform:
    """A feature graph as a function of batches: a dict of its inputs in, a dict of its outputs out.

        loader = DataLoader(dataset, batch_size=4096, collate_fn=collate_rows, batch_stage=FeatureTransform(graph))

    Keys of the batch that are no inputs are left out of the result. Inputs are tensors or NumPy arrays of the graph's
    dtypes, `Nullable` and `Jagged`. Outputs are tensors, `Jagged` or `JaggedBatch`. The numbers are those of
    the operators' definitions: the same bits for integers, and 1e-6 of the value for floating point.

    It can be pickled; several threads may call it.

    Args:
        graph: What to compute.
        native: Run code in C++ that the host's compiler makes of `native.cpp` when the first batch comes, in one to
            three seconds: one loop of each operator over all features that have it. Integers have the same bits;
            floating point, too, on all hosts that run this code, and differs from torch's within 1e-6. Where there is
            no C++ compiler the graph runs with torch, and a line in the log says so. "exact": only chains that have
            torch's bits, all but those with Logit or BoxCox, and only once torch has taken as long for this graph as
            compiling does: results are then the same bytes on hosts with and without a compiler.
        torchrec: Give torchrec's KeyedJaggedTensor in the place of JaggedBatch.
        outside: A key of the result, for how many ids of this batch had no place in the table of each MapId: an int64
            tensor (negative ones, those beyond the end) by the name of the step.

    Raises:
        FeatureError: when it is made, options that do not go together; when it is called, the batch does not fit the
            graph, and the message names each feature.
    """

    def __init__(
        self,
        graph: FeatureGraph,
        *,
        native: bool | Literal["exact"] = False,
        torchrec: bool = False,
        outside: str = "",
    ) -> None:
        if not isinstance(graph, FeatureGraph):
            raise FeatureError(f"graph is a {type(graph).__name__}; give a FeatureGraph, such as a part of a CutGraph")
        if native not in (False, True, "exact"):
            raise FeatureError(f'native={native!r}: True, False or "exact"')
        if outside in {output.name for output in graph.outputs}:
            raise FeatureError(f"outside={outside!r} is the name of an output, too: take another")
        self.graph = graph
        self.native = native
        self.torchrec = torchrec
        self.outside = outside
        # Of each MapId: its name, the feature that it takes, and places in its table.
        self._maps = [
            (step.name, step.of, len(step.operator.table))
            for step in graph.order
            if outside and isinstance(step.operator, MapId)
        ]
        # Of each output that is one dense feature: the feature.
        self._plain = {
            output.name: output.of[0]
            for output in graph.outputs
            if not output.keys and not graph.types[output.of[0]].is_jagged
        }
        # Likewise of each output that is one jagged feature.
        self._lists = {
            output.name: output.of[0]
            for output in graph.outputs
            if not output.keys and graph.types[output.of[0]].is_jagged
        }
        # Of several outputs, so that none may have another's memory: a program may change one of them in place.
        uses = Counter(name for output in graph.outputs for name in output.of)
        self._shared = frozenset(name for name, num in uses.items() if num > 1)
        self._has_own_lengths, self._copied = _copied(graph, self._shared)
        self._read = Reader(graph.inputs)
        self._groups: Sequence[TorchGroup | NativeGroup] | None = None
        self._choice = NativeChoice("undecided" if native else "torch", "")
        self._spent_s = 0.0

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def __repr__(self) -> str:
        options = ((name, getattr(self, name)) for name in ("native", "torchrec"))
        chosen = "".join(f", {name}={value!r}" for name, value in options if value)
        return f"FeatureTransform({self.graph}{chosen})"

    @property
    def fingerprint(self) -> str:
        """Of the graph: two transforms that share it make the same of a batch."""
        return f"{self.graph.digest}{'-torchrec' if self.torchrec else ''}{self.outside and f'-{self.outside}'}"

    @property
    def code(self) -> str:
        """What runs the graph in this process, and why."""
        return self._choice.reason or self._choice.runs

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        with in_host_memory():
            return self.of_columns(*self._read(batch))

    def of_columns(self, num_rows: int, features: Columns) -> dict[str, Any]:
        """Return the outputs for inputs that a `Reader` has read; these get the features that are made of them."""
        began = time.perf_counter()
        with torch.no_grad(), in_host_memory():
            # Until then there is nothing to decide, and finding the chains of many features takes longer than a batch.
            is_due = self._choice.runs == "undecided" and self._spent_s >= native_code.WORTH_S
            if self._groups is None or is_due:
                self._choose()
            assert self._groups is not None
            for group in self._groups:
                try:
                    features.add(group.run(features, num_rows))
                except (RuntimeError, MemoryError) as error:
                    # What torch raises in host memory has no type of its own.
                    if not isinstance(error, MemoryError) and "allocate memory" not in str(error):
                        raise
                    names = ", ".join(repr(chain.result) for chain in group.chains)
                    raise FeatureError(f"{names}: there is no memory for what it makes of {num_rows} rows") from error
            made: dict[str, Any] = dict(
                zip(self._plain, map(features.values.__getitem__, self._plain.values()), strict=True)
            )
            if len(made) < len(self.graph.outputs):
                lists = (map(of.__getitem__, self._lists.values()) for of in (features.values, features.lengths))
                made |= zip(self._lists, map(Jagged._make, zip(*lists, strict=True)), strict=True)
                made = {
                    output.name: made[output.name] if output.name in made else self._output(output, features, num_rows)
                    for output in self.graph.outputs
                }
            for name, has_values, has_lengths in self._copied:
                made[name] = _copy_of(made[name], has_values, has_lengths)
            if self.outside:
                made[self.outside] = {name: _outside(features[of], size) for name, of, size in self._maps}
        self._spent_s += time.perf_counter() - began
        return made

    def _choose(self) -> None:
        """Decide what runs the graph, and make its groups where that is another than before."""
        chains = groups_of(self.graph, [of for _, of, _ in self._maps])
        choice = self._choice
        if self.native:
            exact = [is_exact(some) for some in chains]
            each = list(zip(exact, map(len, chains), strict=True))
            choice = native_choice(
                is_asked_for=self.native is True,
                num_exact=sum(count for is_so, count in each if is_so),
                num_chains=sum(count for _, count in each),
                spent_s=self._spent_s,
                compiler=native_code.compiler(),
            )
            if choice.runs == "native" and (library := native_code.library()) is not None:
                self._read = Reader(self.graph.inputs, partial(native_lists, library))
                self._groups = [
                    NativeGroup(some, self.graph, library)
                    if is_so or self.native is True
                    else TorchGroup(some, self.graph)
                    for some, is_so in zip(chains, exact, strict=True)
                ]
            elif choice.runs == "native":
                choice = NativeChoice("torch", "torch, because native code could not be compiled here")
        if self._groups is None:
            self._groups = [TorchGroup(some, self.graph) for some in chains]
        self._choice = choice

    def _output(self, output: Output, features: Columns, num_rows: int) -> Any:
        types = [self.graph.types[name] for name in output.of]
        found = [features[name] for name in output.of]
        join = _joined if self._shared.isdisjoint(output.of) else torch.cat
        if not any(kind.is_jagged for kind in types):
            if all(kind.width == 1 for kind in types):
                # As the rows of a matrix they may lie together already: one pass instead of one for each feature.
                return join([part.values for part in found]).view(len(found), num_rows).t().contiguous().data
            each = zip(found, types, strict=True)
            return torch.cat([part.values.reshape(num_rows, kind.width) for part, kind in each], dim=1)
        lengths = [
            torch.full((num_rows,), kind.width) if part.lengths is None else part.lengths
            for part, kind in zip(found, types, strict=True)
        ]
        values = join([part.values.reshape(-1) for part in found])
        join = _joined if self._has_own_lengths.issuperset(output.of) else torch.cat
        batch = JaggedBatch(output.keys, values, join(lengths))
        return batch.to_torchrec() if self.torchrec else batch


def _outside(found: Values, num_places: int) -> torch.Tensor:
    return torch.stack([(found.values < 0).sum(), (found.values >= num_places).sum()])


def _copied(graph: FeatureGraph, shared: Set[str]) -> tuple[frozenset[str], list[tuple[str, bool, bool]]]:
    """Which features have lengths that no other output has, and which outputs are to be copies of what others have.

    An operator that leaves the lists as long as they are leaves the lengths where they are.

    Args:
        graph: the graph.
        shared: features of several outputs.

    Returns: The features; and outputs of one feature, with whether their values and their lengths are to be copied.
    """
    made_by = {node.name: node.name for node in graph.inputs}  # of each feature: that with which its lengths came
    for step in graph.order:
        # FirstX leaves lists alone where all are short.
        made_by[step.name] = step.name if isinstance(step.operator, Ngram) else made_by[step.of]
    uses = Counter(made_by[name] for output in graph.outputs for name in output.of if graph.types[name].is_jagged)
    own = frozenset(name for name, came in made_by.items() if uses[came] <= 1)
    copied = []
    seen: set[str] = set()
    for output in graph.outputs:
        if output.keys or len(output.of) > 1:
            continue  # where it shares something, it is put together by a copy
        name = output.of[0]
        has_values, has_lengths = name in shared and name in seen, graph.types[name].is_jagged and name not in own
        if has_values or has_lengths:
            copied.append((output.name, has_values, has_lengths))
        seen.add(name)
    return own, copied


def _copy_of(found: torch.Tensor | Jagged, has_values: bool, has_lengths: bool) -> torch.Tensor | Jagged:
    if isinstance(found, torch.Tensor):
        return found.clone()
    values, lengths = found
    return Jagged(values.clone() if has_values else values, lengths.clone() if has_lengths else lengths)


def _joined(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """One behind the other; without a copy where they lie so."""
    first = pieces[0]
    end = first.storage_offset()
    storage = first.untyped_storage().data_ptr()
    for piece in pieces:
        if piece.storage_offset() != end or piece.untyped_storage().data_ptr() != storage or not piece.is_contiguous():
            return torch.cat(list(pieces))
        end += piece.numel()
    return first.as_strided((end - first.storage_offset(),), (1,)).data


def in_host_memory() -> AbstractContextManager[Any]:
    """Return the program's default device for new tensors; a data worker has set none."""
    return nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")
