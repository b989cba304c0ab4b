"""The recommendation model of RAP's Table 2, trained by whole steps that fit into a CUDA graph, too."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hetstream.mpi_dataworkers.features import operators as ops
from hetstream.mpi_dataworkers.features.batches import JaggedBatch
from hetstream.mpi_dataworkers.features.graph import FeatureGraph
from hetstream.mpi_dataworkers.gpu_features.arena import program_of

_RATE = 0.01


@dataclass(frozen=True)
class ModelSize:
    """How large the model is; the defaults are the paper's.

    Attributes:
        dim: of an embedding, and of what the bottom layers make of dense features.
        bottom, top: widths of the layers.
        most_rows: of all tables together; where the graph's are more, all are smaller alike, and ids are taken modulo.
    """

    dim: int = 128
    bottom: tuple[int, ...] = (512, 256)
    top: tuple[int, ...] = (1024, 1024, 512)
    most_rows: int = 40_000_000


class _Lookup(torch.autograd.Function):
    """Sums of a table's rows; its backward changes the table at once, as fused optimizers do."""

    @staticmethod
    def forward(ctx: Any, _: torch.Tensor, weight: torch.Tensor, index: torch.Tensor, lengths: torch.Tensor) -> Any:
        ctx.save_for_backward(index, lengths)
        ctx.weight = weight
        offsets = lengths.cumsum(0) - lengths
        return torch.nn.functional.embedding_bag(index, weight, offsets, mode="sum")

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        index, lengths = ctx.saved_tensors
        of_ids = grads[0].repeat_interleave(lengths, 0, output_size=len(index))
        ctx.weight.index_add_(0, index, of_ids, alpha=-_RATE)
        return torch.zeros(1, device=index.device), None, None, None


class Tables(torch.nn.Module):
    """The embedding tables of all sparse features, as one."""

    weight: torch.Tensor
    rows: torch.Tensor
    firsts: torch.Tensor

    def __init__(self, rows: Sequence[int], dim: int) -> None:
        super().__init__()
        self.anchor = torch.nn.Parameter(torch.zeros(1))  # without one there would be no backward
        of_tables = torch.tensor(rows)
        self.register_buffer("weight", torch.empty(int(of_tables.sum()), dim).uniform_(-0.05, 0.05))
        self.register_buffer("rows", of_tables)
        self.register_buffer("firsts", of_tables.cumsum(0) - of_tables)

    def forward(self, batch: JaggedBatch) -> torch.Tensor:
        """Of each key and row the sum of its list's embeddings: (keys, rows, dim)."""
        num_keys, num_ids = len(batch.keys), len(batch.values)
        of_keys = batch.lengths.view(num_keys, -1).sum(1)
        rows = self.rows.repeat_interleave(of_keys, output_size=num_ids)
        firsts = self.firsts.repeat_interleave(of_keys, output_size=num_ids)
        made: torch.Tensor = _Lookup.apply(self.anchor, self.weight, batch.values % rows + firsts, batch.lengths)
        return made.view(num_keys, -1, made.shape[-1])


class Interaction(torch.nn.Module):
    """The products of all pairs of features."""

    pairs: torch.Tensor

    def __init__(self, num_features: int) -> None:
        super().__init__()
        first, second = torch.triu_indices(num_features, num_features, 1)
        self.register_buffer("pairs", first * num_features + second)

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        """Of dense (rows, dim) and sparse features (keys, rows, dim): (rows, dim + pairs)."""
        together = torch.cat([dense[None], sparse]).transpose(0, 1)
        products = together @ together.transpose(1, 2)
        return torch.cat([dense, products.flatten(1).index_select(1, self.pairs)], 1)


class Model(torch.nn.Module):
    """The model. Its children are its layers: bottom, tables, interaction, top."""

    def __init__(self, num_dense: int, table_rows: Sequence[int], size: ModelSize) -> None:
        super().__init__()
        num_sparse = len(table_rows)
        self.bottom = _layers((num_dense, *size.bottom, size.dim))
        self.tables = Tables(table_rows, size.dim)
        self.interaction = Interaction(num_sparse + 1)
        self.top = _layers((size.dim + num_sparse * (num_sparse + 1) // 2, *size.top, 1))

    def forward(self, features: dict[str, Any]) -> torch.Tensor:
        """Of a plan's features: a number for each row."""
        dense = self.bottom(features["dense"].float().nan_to_num(0, 0, 0).clamp(-10, 10))
        made: torch.Tensor = self.top(self.interaction(dense, self.tables(features["sparse"])))
        return made.squeeze(1)


def _layers(widths: Sequence[int]) -> torch.nn.Sequential:
    made: list[torch.nn.Module] = []
    for given, width in itertools.pairwise(widths):
        made += [torch.nn.Linear(given, width), torch.nn.ReLU()]
    return torch.nn.Sequential(*made[:-1])


class Training:
    """A model that is trained on a plan's features.

    Args:
        graph: of the plan, with the outputs `dense` and `sparse`.
        rows: of a batch.
        device: where.
        size: of the model.
        tf32: whether matrix products may round to TF32; the paper's do not.

    Attributes:
        model, optimizer: what is trained.
        table_part: of the rows that the paper's tables have.
    """

    def __init__(
        self, graph: FeatureGraph, rows: int, device: torch.device, size: ModelSize, *, tf32: bool = False
    ) -> None:
        torch.backends.cuda.matmul.allow_tf32 = tf32
        wanted = _table_rows(graph)
        self.table_part = min(1.0, size.most_rows / sum(wanted))
        table_rows = [max(1, math.ceil(count * self.table_part)) for count in wanted]
        num_dense = sum(
            graph.types[name].width for output in graph.outputs if output.name == "dense" for name in output.of
        )
        with device:
            self.model = Model(num_dense, table_rows, size)
            self._labels = (torch.arange(rows) % 2).float()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=_RATE)

    def step(self, features: dict[str, Any]) -> torch.Tensor:
        """A whole step; its loss."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(self.model(features), self._labels)
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def _table_rows(graph: FeatureGraph) -> list[int]:
    """Of each sparse feature, how many ids its last SigridHash gives."""
    [sparse] = [at for at, output in enumerate(graph.outputs) if output.name == "sparse"]
    chains = [chain for chain in program_of(graph).chains if chain.output[0] == sparse]
    hashes = [[each for each in chain.operators if isinstance(each, ops.SigridHash)][-1] for chain in chains]
    return [each.max_value for each in hashes]
