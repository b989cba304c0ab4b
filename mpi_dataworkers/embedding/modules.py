"""`torch.nn.EmbeddingBag`, `torch.nn.Embedding` and torchrec's collection of bags over tables on embedding servers.

What a step computes with is a small table of the step's own rows, by torch's own operators, so that outputs and
gradients are those of torch's modules. Where `backward` ends, the rows are updated.
"""

from __future__ import annotations

import functools
import json
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.nn import functional

from hetstream.base.errors import ConfigError
from hetstream.mpi_dataworkers.embedding import connection
from hetstream.mpi_dataworkers.embedding.optimizers import RowOptimizer
from hetstream.mpi_dataworkers.embedding.ranks import ranks_of_program
from hetstream.mpi_dataworkers.embedding.table import Initial, Table, TableConfig, TableStats
from hetstream.mpi_dataworkers.errors import EmbeddingError

DEFAULT_CACHE_BYTES = 1 << 30
# What is saved of a table has this size, or a multiple: a state is compared with the program's by its shapes.
_STATE_BYTES = 1 << 10


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


class TableModule(nn.Module):
    """What all modules over one table have in common.

    Attributes:
        table: see `Table`.
        flat: from the first argument of `forward` to flat ids.
    """

    looks_up_embeddings = True  # for `loader/step_times.py`
    flat: Callable[[Any], torch.Tensor] = staticmethod(flat_ids)

    def __init__(self, config: TableConfig, optimizer: RowOptimizer, cache_bytes: int) -> None:
        super().__init__()
        if not isinstance(optimizer, RowOptimizer):
            raise ConfigError(
                f"optimizer={optimizer!r}: rows are updated by hetstream.RowSGD, RowWiseAdagrad or RowAdam, such as "
                "optimizer=hetstream.RowSGD(lr=0.1)"
            )
        for what, value in (("num_embeddings", config.num_rows), ("embedding_dim", config.dim)):
            if not (isinstance(value, int) and 0 < value < 1 << 40):
                raise ConfigError(f"{what}={value!r}: a whole number from 1 on")
        if config.dtype not in (torch.float32, torch.bfloat16):
            raise ConfigError(f"dtype={config.dtype}: rows are torch.float32 or torch.bfloat16")
        ranks = ranks_of_program()
        self.table = Table(config, optimizer, ranks, connection.connect(ranks), cache_bytes)
        self._lookup: Lookup | None = None  # of the current step
        self._loop: object | None = None  # that announces steps
        self._is_due = self._is_exported = False
        connection.tables.add(self.table)

    @property
    def stats(self) -> TableStats:
        """What the table has done."""
        return replace(self.table.stats)

    def ids_of(self, given: Callable[[Any], Any]) -> IdsOf:
        """Return what makes lookups of batches, for `with_lookups`.

        Args:
            given: from a batch to what `forward` gets of it.
        """
        return IdsOf(given, self.flat)

    def begin_steps(self, loop: object, lookups: Sequence[Lookup]) -> None:
        """Let a loop announce steps, from these on that it has announced, if another one has announced some since."""
        if self._loop is not loop:
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
        if self._loop is loop is not None:
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
        if cast(Any, torch._C)._current_graph_task_id() >= 0:
            # A checkpoint computes again, and may have a backward of its own: the whole one ends later.
            self._queue_update()
        elif self._is_due:
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
            grads = grads.coalesce().to_dense()
        self.table.give(step, rows, grads)
        self._queue_update()

    def _queue_update(self) -> None:
        """Update where this backward ends, in the thread that called it, as DistributedDataParallel does."""
        if not self._is_due:
            self._is_due = True
            cast(Any, torch.autograd.Variable)._execution_engine.queue_callback(self._update)

    def _update(self) -> None:
        self._is_due = False
        connection.restore_wanted()
        self.table.update()

    # --- state -----------------------------------------------------------------------------------------------------

    def _weights(self) -> dict[str, int]:
        """Names of the weights in a `state_dict`, in the order of ids, each with its number of rows."""
        return {"weight": self.table.num_rows}

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        connection.restore_wanted()
        state = self.table.state()
        if self._is_exported or self.table.client is None:
            weights, optimizer_state = self.table.all_rows()
            for name, part in zip(self._weights(), torch.split(weights, [*self._weights().values()]), strict=True):
                destination[prefix + name] = part
            if self._is_exported:
                return
            destination[f"{prefix}optimizer_state"] = optimizer_state
        else:
            state |= connection.mark_generation()
        text = json.dumps(state).encode()
        text += b" " * (-len(text) % _STATE_BYTES)
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
        names = [prefix + name for name in self._weights()]
        found = [state_dict[name] for name in names if name in state_dict]
        optimizer_state, text = (state_dict.get(f"{prefix}{name}") for name in ("optimizer_state", "table"))
        state = json.loads(bytes(text.tolist())) if text is not None else {}
        shapes = [(num_rows, self.table.dim) for num_rows in self._weights().values()]
        state_shape = (self.table.num_rows, self.table.optimizer.state_width(self.table.dim))
        has_weights = len(found) == len(names)
        wrong = [
            f"{name} has shape {tuple(weight.shape)}, and the table {shape}"
            for name, weight, shape in zip(names, found, shapes, strict=False)
            if has_weights and tuple(weight.shape) != shape
        ]
        if optimizer_state is not None and tuple(optimizer_state.shape) != state_shape:
            wrong.append(
                f"{prefix}optimizer_state has shape {tuple(optimizer_state.shape)}, and that of this table's optimizer "
                f"{state_shape}: give the table the optimizer that it was saved with, or leave optimizer_state out"
            )
        if wrong:
            error_msgs += wrong
        elif not has_weights and "generation" not in state:
            missing_keys += [name for name in names if name not in state_dict]
        elif optimizer_state is not None and not state:
            missing_keys.append(f"{prefix}table")
        else:
            try:
                if state:
                    self.table.set_state(state)
                if has_weights:
                    connection.forget_wanted(self.table)
                    self.table.set_all_rows(torch.cat(found), optimizer_state)
                else:
                    connection.restore_generation(self.table, state)
            except EmbeddingError as error:
                error_msgs.append(str(error))
        own = {*names, f"{prefix}optimizer_state", f"{prefix}table"}
        unexpected_keys.extend(key for key in state_dict if key.startswith(prefix) and key not in own)


# torch.compile leaves it, and what it calls, to Python. torch.compiler.disable says the same, and imports the compiler.
TableModule._rows_for._torchdynamo_disable = True  # type: ignore[attr-defined]
_eval_frame = torch._C._dynamo.eval_frame
if hasattr(_eval_frame, "set_code_exec_strategy"):
    _skip = _eval_frame._FrameAction.SKIP
    _eval_frame.set_code_exec_strategy(TableModule._rows_for.__code__, _eval_frame._FrameExecStrategy(_skip, _skip))


def torch_state_dict(model: nn.Module) -> dict[str, Any]:
    """Return the state of a model with all rows of its tables, as torch's own modules in their place have and load it.

    On all ranks at once; each gets all rows.

    Args:
        model: with `EmbeddingBag`, `Embedding` or `EmbeddingBagCollection` in it, or one of them.

    Raises:
        EmbeddingError: the servers do not give the rows.
    """
    modules = [module for module in model.modules() if isinstance(module, TableModule)]
    for module in modules:
        module._is_exported = True
    try:
        state = model.state_dict()
    finally:
        for module in modules:
            module._is_exported = False
    return {name: value.contiguous() if isinstance(value, torch.Tensor) else value for name, value in state.items()}


class _OneTable(TableModule):
    """What torch's two modules have in common."""

    def __init__(
        self, config: TableConfig, optimizer: RowOptimizer, cache_bytes: int, refused: tuple[object, object, object]
    ) -> None:
        if refused != (None, False, None):
            raise ConfigError(
                f"max_norm, scale_grad_by_freq and _weight: rows on servers have none of these. Use torch.nn's "
                f"{type(self).__name__}, or load weights with load_state_dict"
            )
        row, num_rows = config.zero_row, config.num_rows
        if row is not None and not -num_rows <= row < num_rows:
            raise ConfigError(f"padding_idx={row}: a row from {-num_rows} to {num_rows - 1}")
        self.padding_idx = None if row is None else row % num_rows
        super().__init__(replace(config, zero_row=self.padding_idx), optimizer, cache_bytes)
        self.num_embeddings, self.embedding_dim = num_rows, config.dim

    def _padding_in(self, ids: torch.Tensor, inverse: torch.Tensor) -> int | None:
        """Where the padded row is among the rows of a step; None where no id names it."""
        where = [] if self.padding_idx is None else inverse[ids == self.padding_idx][:1].tolist()
        return where[0] if where else None


class EmbeddingBag(_OneTable):
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
        name, dtype = connection.table_name(name), dtype or torch.get_default_dtype()
        fills = [(num_embeddings, initial)]
        config = TableConfig(name, num_embeddings, embedding_dim, dtype, new_rows, fills, padding_idx)
        super().__init__(config, optimizer, cache_bytes, (max_norm, scale_grad_by_freq, _weight))
        self.mode, self.include_last_offset = mode, include_last_offset

    def forward(
        self, input: torch.Tensor, offsets: torch.Tensor | None = None, per_sample_weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return [bags, embedding_dim]; see `torch.nn.EmbeddingBag.forward`."""
        ids = flat_ids(input)
        weights, inverse = self._rows_for(ids)
        padding = self._padding_in(ids, inverse)
        is_plain = self.mode != "max" and offsets is None and padding is None and per_sample_weights is None
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


class Embedding(_OneTable):
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
        name, dtype = connection.table_name(name), dtype or torch.get_default_dtype()
        fills = [(num_embeddings, initial)]
        config = TableConfig(name, num_embeddings, embedding_dim, dtype, new_rows, fills, padding_idx)
        super().__init__(config, optimizer, cache_bytes, (max_norm, scale_grad_by_freq, _weight))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return [..., embedding_dim]."""
        ids = flat_ids(input)
        weights, inverse = self._rows_for(ids)
        sparse, padding = self.table.optimizer.sparse_grads, self._padding_in(ids, inverse)
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
        if unknown := [key for key in keys if key not in self.rows]:
            raise EmbeddingError(
                f"feature {unknown[0]!r} is of no table; those of this collection: {', '.join(self.rows)}"
            )
        samples = (len(offsets) - 1) // len(keys)
        num_ids = offsets[torch.arange(len(keys) + 1, device=offsets.device) * samples].diff()
        first, num_rows = (
            torch.tensor(numbers, device=values.device).repeat_interleave(num_ids.to(values.device))
            for numbers in zip(*[(self.rows[key].start, len(self.rows[key])) for key in keys], strict=True)
        )
        wrong = ((values < 0) | (values >= num_rows)).nonzero()
        if len(wrong):
            at = int(wrong[0, 0])
            key = keys[int((num_ids.cumsum(0) <= at).sum())]
            raise IndexError(
                f"feature {key}: there is no row {int(values[at])}, its ids are 0 to {len(self.rows[key]) - 1}"
            )
        return values.to(torch.int64) + first


def _jagged(given: Any) -> tuple[list[str], torch.Tensor, torch.Tensor]:
    """Return keys, values and offsets of a KeyedJaggedTensor, or of a dict of ids [samples] or [samples, ids]."""
    if is_keyed := not isinstance(given, Mapping):
        nums_samples = dict(zip(given.keys(), given.stride_per_key(), strict=True))
    else:
        nums_samples = {name: len(ids) for name, ids in given.items()}
    if len(set(nums_samples.values())) > 1:
        raise EmbeddingError(f"features of different numbers of samples: {nums_samples}. Each has ids for every sample")
    if is_keyed:
        return list(given.keys()), given.values(), given.offsets()
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


class EmbeddingBagCollection(TableModule):
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
        kinds = {getattr(getattr(table, "data_type", None), "value", "FP32") for table in tables}
        if dtype is None and kinds != {"FP32"}:
            raise ConfigError(
                f"tables of data_type {', '.join(sorted(kinds))}: rows of a collection are of one dtype. Say which, "
                "such as dtype=torch.bfloat16"
            )
        self.mode = modes.pop()
        self._sizes = {table.name: int(table.num_embeddings) for table in tables}
        features = [feature for table in tables for feature in table.feature_names]
        for what, names in (("table", [table.name for table in tables]), ("feature", features)):
            if len({*names}) < len(names):
                raise ConfigError(f"{what}s {', '.join(names)}: each {what} of a collection has a name of its own")
        rows: dict[str, range] = {}
        fills: list[tuple[int, Initial]] = []
        num_rows = 0
        for table in tables:
            size = self._sizes[table.name]
            rows |= dict.fromkeys(table.feature_names, range(num_rows, num_rows + size))
            num_rows += size
            bound = max(1, size) ** -0.5  # as torchrec, where a table names nothing
            uniform = functools.partial(nn.init.uniform_, a=-bound, b=bound)
            fills.append((size, getattr(table, "init_fn", None) or uniform))
        name, dtype = connection.table_name(name), dtype or torch.get_default_dtype()
        super().__init__(TableConfig(name, num_rows, dims.pop(), dtype, new_rows, fills), optimizer, cache_bytes)
        self.flat = self._features = _Features(rows)

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

    def _weights(self) -> dict[str, int]:
        return {f"embedding_bags.{name}.weight": size for name, size in self._sizes.items()}


def _alone(inverse: torch.Tensor, weights: torch.Tensor, sparse: bool) -> torch.Tensor:
    """Return bags of one id each, of float32 rows, as `embedding_bag` does, whose backward takes longer.

    It sorts the ids first; in this order both add the gradients of a row. Of bfloat16 it rounds sums less often.
    """
    return functional.embedding(inverse, weights, sparse=sparse)


def _check_dtype(ids: torch.Tensor) -> None:
    if ids.dtype not in (torch.int64, torch.int32):
        raise EmbeddingError(f"ids of dtype {ids.dtype}: ids are int64 or int32")
