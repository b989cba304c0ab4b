"""`torch.nn.EmbeddingBag`, `torch.nn.Embedding` and torchrec's collection of bags over tables on embedding servers.

What a step computes with is a small table of the step's own rows, by torch's own operators, so that outputs and
gradients are those of torch's modules. Where `backward` ends, the rows are updated.
"""

from __future__ import annotations

import functools
import json
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.nn import functional

from hetstream.base.errors import ConfigError
from hetstream.mpi_dataworkers.embedding import connection
from hetstream.mpi_dataworkers.embedding.optimizers import RowOptimizer
from hetstream.mpi_dataworkers.embedding.ranks import ranks_of_program
from hetstream.mpi_dataworkers.embedding.table import FirstRows, Initial, Table, TableShape, TableStats
from hetstream.mpi_dataworkers.errors import EmbeddingError

DEFAULT_CACHE_BYTES = 1 << 30


class Lookup(NamedTuple):
    """What a batch looks up in a module.

    Attributes:
        unique: int64, its ids, each once, ascending.
        inverse: where each of the batch's ids is among them.
    """

    unique: torch.Tensor
    inverse: torch.Tensor

    @classmethod
    def of(cls, ids: torch.Tensor) -> Lookup:
        """Return that of flat ids."""
        unique, inverse = torch.unique(ids.detach().to("cpu", torch.int64), return_inverse=True)
        return cls(unique, inverse)

    def is_of(self, ids: torch.Tensor) -> bool:
        """Return whether flat int64 ids are those that this was made of."""
        return ids.shape == self.inverse.shape and torch.equal(self.unique[self.inverse], ids)


def flat_ids(given: torch.Tensor) -> torch.Tensor:
    """Return what an `EmbeddingBag` or an `Embedding` looks up for its first argument."""
    return given.reshape(-1)


@dataclass(frozen=True)
class IdsOf:
    """From a batch to the flat ids that a module looks up for it; travels to data workers.

    Attributes:
        given: from the batch to the module's argument.
        flat: from that to ids.
    """

    given: Callable[[Any], Any]
    flat: Callable[[Any], torch.Tensor]

    def __call__(self, batch: Any) -> Lookup:
        return Lookup.of(self.flat(self.given(batch)))


class _Rows(nn.Module):
    """What all modules over one table have in common.

    Attributes:
        table: see `Table`.
    """

    table: Table
    looks_up_embeddings = True  # for `loader/step_times.py`

    def __init__(self, shape: TableShape, optimizer: RowOptimizer, cache_bytes: int, first: FirstRows) -> None:
        super().__init__()
        if not isinstance(optimizer, RowOptimizer):
            raise ConfigError(
                f"optimizer={optimizer!r}: rows are updated by hetstream.RowSGD, RowWiseAdagrad or RowAdam, such as "
                "optimizer=hetstream.RowSGD(lr=0.1)"
            )
        for what, value in (("num_embeddings", shape.num_rows), ("embedding_dim", shape.dim)):
            if not (isinstance(value, int) and 0 < value < 1 << 40):
                raise ConfigError(f"{what}={value!r}: a whole number from 1 on")
        if shape.dtype not in (torch.float32, torch.bfloat16):
            raise ConfigError(f"dtype={shape.dtype}: rows are torch.float32 or torch.bfloat16")
        ranks = ranks_of_program()
        client = connection.connect(ranks)
        row_bytes = 4 * (-(-shape.dim * shape.dtype.itemsize // 4) + optimizer.state_width(shape.dim))
        self.table = Table(shape, optimizer, ranks, client, max(1, cache_bytes // row_bytes), first)
        self._lookup: Lookup | None = None  # of the current step
        self._loop: object | None = None  # that announces steps
        self._is_due = self._is_exported = False
        connection.tables.add(self.table)

    @property
    def stats(self) -> TableStats:
        """What the table has done."""
        return self.table.stats

    def ids_of(self, given: Callable[[Any], Any]) -> IdsOf:
        """Return what makes lookups of batches, for `with_lookups`.

        Args:
            given: from a batch to what `forward` gets of it.
        """
        return IdsOf(given, self.flat)

    @property
    def flat(self) -> Callable[[Any], torch.Tensor]:
        """From the first argument of `forward` to flat ids."""
        return flat_ids

    def is_in(self, loop: object) -> bool:
        """Return whether the steps that are announced are those of a loop."""
        return self._loop is loop

    def begin_steps(self, loop: object, lookups: Sequence[Lookup]) -> None:
        """Announce what the coming steps of a loop look up, and forget what another one has announced."""
        if self._loop is not None:
            self.end_steps(self._loop)
        self._loop = loop
        for lookup in lookups:
            self.announce(lookup)

    def announce(self, lookup: Lookup) -> None:
        """See `Table.announce`."""
        self._check(lookup.unique)
        connection.restore_wanted()
        self.table.announce(lookup.unique)

    def begin_step(self, lookup: Lookup) -> None:
        """See `Table.begin_step`."""
        self._lookup = lookup
        self.table.begin_step()

    def end_steps(self, loop: object) -> None:
        """Forget what a loop has announced; nothing where another one announces. See `Table.end_steps`."""
        if self._loop is loop:
            self._loop = self._lookup = None
            self.table.end_steps()

    def _check(self, unique: torch.Tensor) -> None:
        if len(unique) and not 0 <= int(unique[0]) <= int(unique[-1]) < self.table.num_rows:
            wrong = int(unique[0]) if int(unique[0]) < 0 else int(unique[-1])
            raise IndexError(
                f"table {self.table.spec.name}: there is no row {wrong}, its ids are 0 to {self.table.num_rows - 1}"
            )

    def _rows_for(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a table of the rows that flat ids name, and where each is in it."""
        _check_dtype(ids)
        if self._is_due and cast(Any, torch._C)._current_graph_task_id() < 0:
            # The backward before has failed, so nothing was updated where it should have ended.
            self._is_due = False
            self.table.drop_grads()
        on_cpu = ids.detach().to("cpu", torch.int64)
        lookup = self._lookup
        if lookup is None or not lookup.is_of(on_cpu):
            lookup = Lookup.of(on_cpu)
            self._check(lookup.unique)
        connection.restore_wanted()
        step, weights = self.table.take(lookup.unique)
        weights = weights.to(ids.device)
        if torch.is_grad_enabled():
            weights.requires_grad_()
            self.table.wait_for_grads(step, weights)
            module = weakref.proxy(self)

            def gave(rows: torch.Tensor) -> None:
                module._give(step, rows)

            cast(Any, weights).register_post_accumulate_grad_hook(gave)
        return weights, lookup.inverse.to(ids.device)

    def _give(self, step: Any, rows: torch.Tensor) -> None:
        grads, rows.grad = rows.grad, None
        assert grads is not None
        grads = grads.detach()  # backward(create_graph=True)
        if grads.is_sparse:
            grads = grads.coalesce()
            whole = torch.zeros(rows.shape, dtype=grads.dtype, device=grads.device)
            grads = whole.index_copy_(0, grads.indices()[0], grads.values())
        self.table.give(step, rows, grads)
        if not self._is_due:
            self._is_due = True
            # Where this backward ends, in the thread that called it, as DistributedDataParallel does.
            engine = cast(Any, torch.autograd.Variable)._execution_engine
            engine.queue_callback(self._update)

    def _update(self) -> None:
        self._is_due = False
        connection.restore_wanted()
        self.table.update()

    # --- state -----------------------------------------------------------------------------------------------------

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        connection.restore_wanted()
        state = self.table.state()
        if self._is_exported or self.table.client is None:
            weights, optimizer_state = self.table.all_rows()
            destination.update(zip(self._weight_keys(prefix), torch.split(weights, self._nums_rows()), strict=True))
            if self._is_exported:
                return
            destination[f"{prefix}optimizer_state"] = optimizer_state
        else:
            state |= connection.mark_generation()
        text = json.dumps(state).encode()
        destination[f"{prefix}table"] = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        del local_metadata, strict
        weights = self._weights_in(state_dict, prefix)
        text = state_dict.get(f"{prefix}table")
        state = json.loads(bytes(text.tolist())) if text is not None else {}
        shape = (self.table.num_rows, self.table.dim)
        optimizer_state = state_dict.get(f"{prefix}optimizer_state")
        state_shape = (self.table.num_rows, self.table.optimizer.state_width(self.table.dim))
        if weights is not None and tuple(weights.shape) != shape:
            error_msgs.append(f"{prefix}weight has shape {tuple(weights.shape)}, and the table {shape}")
        elif optimizer_state is not None and tuple(optimizer_state.shape) != state_shape:
            error_msgs.append(
                f"{prefix}optimizer_state has shape {tuple(optimizer_state.shape)}, and that of this table's optimizer "
                f"{state_shape}: give the table the optimizer that it was saved with, or leave optimizer_state out"
            )
        elif weights is None and "generation" not in state:
            missing_keys += self._weight_keys(prefix)
        elif optimizer_state is not None and not state:
            missing_keys.append(f"{prefix}table")
        else:
            try:
                if state:
                    self.table.set_state(state)
                if weights is not None:
                    connection.forget_wanted(self.table)
                    self.table.set_all_rows(weights, optimizer_state)
                else:
                    connection.restore_generation(self.table, state)
            except EmbeddingError as error:
                error_msgs.append(str(error))
        own = {*self._weight_keys(prefix), f"{prefix}optimizer_state", f"{prefix}table"}
        unexpected_keys.extend(key for key in state_dict if key.startswith(prefix) and key not in own)

    def _weight_keys(self, prefix: str) -> list[str]:
        """Names of the weights in a `state_dict`, in the order of ids; those of `_nums_rows` rows each."""
        return [f"{prefix}weight"]

    def _nums_rows(self) -> list[int]:
        return [self.table.num_rows]

    def _weights_in(self, state_dict: dict[str, Any], prefix: str) -> torch.Tensor | None:
        found = [state_dict[key] for key in self._weight_keys(prefix) if key in state_dict]
        return torch.cat(found) if len(found) == len(self._nums_rows()) else None


def torch_state_dict(model: nn.Module) -> dict[str, Any]:
    """Return the state of a model with all rows of its tables, as torch's own modules in their place have and load it.

    On all ranks at once; each gets all rows.

    Args:
        model: with `EmbeddingBag`, `Embedding` or `EmbeddingBagCollection` in it, or one of them.

    Raises:
        EmbeddingError: the servers do not give the rows.
    """
    modules = [module for module in model.modules() if isinstance(module, _Rows)]
    for module in modules:
        module._is_exported = True
    try:
        state = model.state_dict()
    finally:
        for module in modules:
            module._is_exported = False
    return {name: value.contiguous() if isinstance(value, torch.Tensor) else value for name, value in state.items()}


# torch.compile leaves it, and what it calls, to Python. torch.compiler.disable says the same, and imports the compiler.
_Rows._rows_for._torchdynamo_disable = True  # type: ignore[attr-defined]
_eval_frame = torch._C._dynamo.eval_frame
if hasattr(_eval_frame, "set_code_exec_strategy"):
    _skip = _eval_frame._FrameAction.SKIP
    _eval_frame.set_code_exec_strategy(_Rows._rows_for.__code__, _eval_frame._FrameExecStrategy(_skip, _skip))


class EmbeddingBag(_Rows):
    """Looks up bags of ids, as `torch.nn.EmbeddingBag` does: the same arguments, outputs and gradients.

    Args:
        num_embeddings, embedding_dim, mode, include_last_offset, padding_idx, dtype: as torch's.
        max_norm, norm_type, scale_grad_by_freq, sparse: accepted at torch's defaults; `sparse` changes nothing.
        device: of nothing: rows go to the device of the ids.
        optimizer: updates the rows of a step where its `backward` ends: `RowSGD`, `RowWiseAdagrad` or `RowAdam`. They
            are no parameters of the module.
        name: of the table, the same on all ranks and after a restart; without one, tables are numbered as they are
            made.
        cache_bytes: memory for rows that this process may have at once, where there are embedding servers.
        new_rows: rows come into being when they are first used, uniform between plus and minus this; without it all
            are drawn at once, as torch does.
        initial: fills a tensor of weights, for pieces of the table in their order.

    Raises:
        ConfigError: an argument is not possible.
        EmbeddingError: embedding servers were promised and did not come.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        max_norm: None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: str = "mean",
        sparse: bool = False,
        _weight: torch.Tensor | None = None,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        optimizer: RowOptimizer,
        name: str | None = None,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
        new_rows: float | None = None,
        initial: Initial = nn.init.normal_,
    ) -> None:
        del norm_type, sparse, device
        if mode not in ("sum", "mean", "max"):
            raise ConfigError(f"mode={mode!r}: sum, mean or max")
        if max_norm is not None or scale_grad_by_freq or _weight is not None:
            raise ConfigError(
                "max_norm, scale_grad_by_freq and _weight: rows on servers have none of these. Use "
                "torch.nn.EmbeddingBag, or load weights with load_state_dict"
            )
        self.padding_idx = _padded_row(padding_idx, num_embeddings)
        shape = _shape(name, num_embeddings, embedding_dim, dtype)
        super().__init__(
            shape, optimizer, cache_bytes, FirstRows(new_rows, [(num_embeddings, initial)], self.padding_idx)
        )
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.mode, self.include_last_offset = mode, include_last_offset

    def forward(
        self, input: torch.Tensor, offsets: torch.Tensor | None = None, per_sample_weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return [bags, embedding_dim]; see `torch.nn.EmbeddingBag.forward`."""
        weights, inverse = self._rows_for(input.reshape(-1))
        padding = None
        if self.padding_idx is not None:
            padding = _place_of(self.padding_idx, input.reshape(-1), inverse)
        is_plain = self.mode != "max" and offsets is padding is per_sample_weights is None
        if is_plain and input.dim() == 2 and input.shape[1] == 1 and weights.dtype is torch.float32:
            return _alone(inverse, weights, self.table.optimizer.sparse_grads)
        return functional.embedding_bag(
            inverse.reshape(input.shape),
            weights,
            None if offsets is None else offsets.to(torch.int64),
            mode=self.mode,
            sparse=self.table.optimizer.sparse_grads and self.mode != "max",
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset and offsets is not None,
            padding_idx=padding,
        )

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, mode={self.mode!r}, table={self.table.spec.name!r}"


class Embedding(_Rows):
    """Looks up ids, as `torch.nn.Embedding` does; arguments as `EmbeddingBag`.

    Raises:
        ConfigError, EmbeddingError: as `EmbeddingBag`.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        _weight: torch.Tensor | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        optimizer: RowOptimizer,
        name: str | None = None,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
        new_rows: float | None = None,
        initial: Initial = nn.init.normal_,
    ) -> None:
        del norm_type, sparse, device
        if max_norm is not None or scale_grad_by_freq or _weight is not None:
            raise ConfigError(
                "max_norm, scale_grad_by_freq and _weight: rows on servers have none of these. Use torch.nn.Embedding, "
                "or load weights with load_state_dict"
            )
        self.padding_idx = _padded_row(padding_idx, num_embeddings)
        shape = _shape(name, num_embeddings, embedding_dim, dtype)
        super().__init__(
            shape, optimizer, cache_bytes, FirstRows(new_rows, [(num_embeddings, initial)], self.padding_idx)
        )
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return [..., embedding_dim]."""
        flat = input.reshape(-1)
        weights, inverse = self._rows_for(flat)
        padding = _place_of(self.padding_idx, flat, inverse) if self.padding_idx is not None else None
        sparse = self.table.optimizer.sparse_grads
        return functional.embedding(inverse.reshape(input.shape), weights, padding_idx=padding, sparse=sparse)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, table={self.table.spec.name!r}"


@dataclass(frozen=True)
class _Features:
    """Which rows of one table the features of a collection's argument are.

    Attributes:
        rows: of each feature's table.
    """

    rows: dict[str, range]

    def __call__(self, given: Any) -> torch.Tensor:
        keys, values, offsets = _jagged(given)
        _check_dtype(values)
        samples = (len(offsets) - 1) // len(keys)
        num_ids = offsets[torch.arange(len(keys) + 1, device=offsets.device) * samples].diff()
        first, num_rows = (
            torch.tensor(numbers, device=values.device).repeat_interleave(num_ids.to(values.device))
            for numbers in zip(*[(self._rows(key).start, len(self._rows(key))) for key in keys], strict=True)
        )
        wrong = ((values < 0) | (values >= num_rows)).nonzero()
        if len(wrong):
            at = int(wrong[0, 0])
            key = keys[int((num_ids.cumsum(0) <= at).sum())]
            raise IndexError(
                f"feature {key}: there is no row {int(values[at])}, its ids are 0 to {len(self._rows(key)) - 1}"
            )
        return values.to(torch.int64) + first

    def _rows(self, key: str) -> range:
        if key not in self.rows:
            raise EmbeddingError(f"feature {key!r} is of no table; those of this collection: {', '.join(self.rows)}")
        return self.rows[key]


def _jagged(given: Any) -> tuple[list[str], torch.Tensor, torch.Tensor]:
    """Return keys, values and offsets of a KeyedJaggedTensor, or of a dict of ids [samples] or [samples, ids]."""
    if not isinstance(given, Mapping):
        keys, offsets = list(given.keys()), given.offsets()
        if keys and (len(offsets) - 1) % len(keys):
            raise EmbeddingError(
                f"{len(offsets) - 1} bags of {len(keys)} features: each feature has as many bags as there are samples"
            )
        return keys, given.values(), offsets
    nums_samples = {name: len(ids) for name, ids in given.items()}
    if len(set(nums_samples.values())) > 1:
        raise EmbeddingError(f"features of different numbers of samples: {nums_samples}. Each has ids for every sample")
    tensors = [ids[:, None] if ids.dim() == 1 else ids for ids in given.values()]
    lengths = [torch.full((len(ids),), ids.shape[1], device=ids.device) for ids in tensors]
    ends = torch.cat(lengths).cumsum(0)
    offsets = torch.cat([ends.new_zeros(1), ends])
    return list(given), torch.cat([ids.reshape(-1) for ids in tensors]), offsets


@dataclass(frozen=True)
class EmbeddingBagConfig:
    """A table of a collection; what torchrec's class of this name says of one.

    Attributes:
        num_embeddings, embedding_dim: rows, and weights of each.
        name: of the table.
        feature_names: features whose ids are rows of it.
    """

    num_embeddings: int
    embedding_dim: int
    name: str
    feature_names: Sequence[str]


class EmbeddingBagCollection(_Rows):
    """Looks up bags of several features at once, as torchrec's `EmbeddingBagCollection` does.

    Its tables lie in one, so that a step reads and updates the rows of all features together.

    Args:
        tables: `EmbeddingBagConfig`, or torchrec's, which may also have `pooling` and `init_fn`. All of one dimension
            and one pooling.
        optimizer, name, cache_bytes, new_rows, dtype: as `EmbeddingBag`.

    Raises:
        ConfigError, EmbeddingError: as `EmbeddingBag`.
    """

    def __init__(
        self,
        tables: Sequence[Any],
        *,
        optimizer: RowOptimizer,
        name: str | None = None,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
        new_rows: float | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        dims = {table.embedding_dim for table in tables}
        modes = {getattr(getattr(table, "pooling", None), "value", "SUM").lower() for table in tables}
        if len(dims) != 1 or len(modes) != 1 or not modes <= {"sum", "mean"}:
            raise ConfigError(
                f"tables of embedding_dim {sorted(dims)} and pooling {sorted(modes)}: a collection has one of each. "
                "Make one collection for each"
            )
        self._table_names = [table.name for table in tables]
        features = [feature for table in tables for feature in table.feature_names]
        for what, names in (("table", self._table_names), ("feature", features)):
            if len({*names}) < len(names):
                raise ConfigError(f"{what}s {', '.join(names)}: each {what} of a collection has a name of its own")
        self._sizes = [int(table.num_embeddings) for table in tables]
        self.mode = modes.pop()
        firsts = [sum(self._sizes[:index]) for index in range(len(tables))]
        self._features = _Features(
            {
                feature: range(first, first + size)
                for table, first, size in zip(tables, firsts, self._sizes, strict=True)
                for feature in table.feature_names
            }
        )
        fills = [
            getattr(table, "init_fn", None) or _uniform(size) for table, size in zip(tables, self._sizes, strict=True)
        ]
        initial = list(zip(self._sizes, fills, strict=True))
        shape = _shape(name, sum(self._sizes), dims.pop(), dtype)
        super().__init__(shape, optimizer, cache_bytes, FirstRows(new_rows, initial))

    @property
    def flat(self) -> Callable[[Any], torch.Tensor]:
        return self._features

    def forward(self, features: Any) -> Any:
        """Return the pooled rows of each feature.

        Args:
            features: a `KeyedJaggedTensor`, or a dict of ids [samples] or [samples, ids].

        Returns:
            torchrec's `KeyedTensor` for the first, with the features in the order of the tables; for the second a dict
            of [samples, embedding_dim] in its own order.
        """
        keys, values, offsets = _jagged(features)
        weights, inverse = self._rows_for(self._features(features))
        sparse, num_bags = self.table.optimizer.sparse_grads, len(offsets) - 1
        if (
            len(inverse) == num_bags
            and weights.dtype is torch.float32
            and torch.equal(offsets, torch.arange(num_bags + 1).to(offsets))
        ):
            bags = _alone(inverse, weights, sparse)
        else:
            bags = functional.embedding_bag(
                inverse,
                weights,
                offsets.to(values.device, torch.int64),
                mode=self.mode,
                sparse=sparse,
                include_last_offset=True,
            )
        pooled = bags.reshape(len(keys), len(bags) // len(keys), self.table.dim)
        if isinstance(features, Mapping):
            return dict(zip(keys, pooled, strict=True))
        from torchrec.sparse.jagged_tensor import KeyedTensor

        ordered = sorted(keys, key=list(self._features.rows).index)
        pooled = pooled[[keys.index(key) for key in ordered]]
        return KeyedTensor(ordered, [self.table.dim] * len(keys), pooled.transpose(0, 1).flatten(1))

    def _weight_keys(self, prefix: str) -> list[str]:
        return [f"{prefix}embedding_bags.{name}.weight" for name in self._table_names]

    def _nums_rows(self) -> list[int]:
        return self._sizes


def _shape(name: str | None, num_rows: int, dim: int, dtype: torch.dtype | None) -> TableShape:
    return TableShape(connection.table_name(name), num_rows, dim, dtype or torch.get_default_dtype())


def _uniform(num_rows: int) -> Initial:
    """As torchrec, where a table names nothing."""
    bound = num_rows**-0.5
    return functools.partial(nn.init.uniform_, a=-bound, b=bound)


def _padded_row(padding_idx: int | None, num_rows: int) -> int | None:
    if padding_idx is None:
        return None
    if not -num_rows <= padding_idx < num_rows:
        raise ConfigError(f"padding_idx={padding_idx}: a row from {-num_rows} to {num_rows - 1}")
    return padding_idx % num_rows


def _alone(inverse: torch.Tensor, weights: torch.Tensor, sparse: bool) -> torch.Tensor:
    """Return bags of one id each, of float32 rows, as `embedding_bag` does, whose backward takes longer.

    It sorts the ids first; in this order both add the gradients of a row. Of bfloat16 it rounds sums less often.
    """
    return functional.embedding(inverse, weights, sparse=sparse)


def _check_dtype(ids: torch.Tensor) -> None:
    if ids.dtype not in (torch.int64, torch.int32):
        raise EmbeddingError(f"ids of dtype {ids.dtype}: ids are int64 or int32")


def _place_of(row: int, ids: torch.Tensor, inverse: torch.Tensor) -> int | None:
    """Where a row is among the rows of a step; None where no id names it."""
    where = (ids == row).nonzero()
    return int(inverse[where[0, 0]]) if len(where) else None
