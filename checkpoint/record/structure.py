"""What a state's checkpoint says beside its tensors: the tree, what each tensor of it is, and whose it is.

The flash side writes a `Record` when it saves and decodes it when it loads; the checkpoint writer and the formats read
it and never decode it. A record is one JSON object: the tree (see `tree.py`), in which a tensor is a number; a table
that says for each number which entry of the layout it is a view of; and the top-level keys that are equal on every
rank. Entries come in the order in which they lie in the payload, so that they have the same numbers in memory and in a
file that holds all of them. Pure: no torch, no files.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from hetstream.base import typed_json
from hetstream.checkpoint.errors import DamagedCheckpoint, OtherRelease
from hetstream.checkpoint.record.tree import Foreign, MakeForeign, Node, decode, numbers_in, renumbered

VERSION = 1
# Where a state has its random number generators: a top-level key, which no program may use itself.
RNG = "_rng"

WrittenMetrics = dict[str, float | Literal["nan", "inf", "-inf"]]
"""Metrics as JSON: it has no number for some of them."""


def written_metrics(metrics: Mapping[str, float]) -> WrittenMetrics:
    """Metrics as a record has them: a diverged loss must not make the state unreadable."""
    return {name: value if math.isfinite(value) else repr(value) for name, value in metrics.items()}  # type: ignore[misc]


class Shard(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Where a rank's part of a sharded tensor belongs.

    Attributes:
        global_shape: of the whole tensor.
        offsets: of this part in it, one for each dimension.
        mesh_shape: of the device mesh.
        placements: one for each mesh dimension, in torch's words: "S(0)", "R".
    """

    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    mesh_shape: tuple[int, ...] = ()
    placements: tuple[str, ...] = ()

    @property
    def is_sharded(self) -> bool:
        """Whether ranks have different parts. The same on all of them, as this follows from the placements."""
        return any(placement != "R" for placement in self.placements)


class TensorRef(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One tensor of the tree: an entry of the layout, or a view of one.

    Attributes:
        entry: index into the layout's entries.
        kind: what it is in the program: tensor, grad (a tensor that requires it), parameter, frozen_parameter, numpy,
            bytes or pickle.
        dtype: of the view, in safetensors' words; None: the entry's.
        shape: of the view; None: the entry's.
        strides: of the view in elements; None: row-major.
        offset_bytes: where the view begins in the entry.
        is_permuted: the strides are how the program laid it out; the entry holds it in row-major order.
        shard: given for a part of a sharded tensor.
    """

    entry: int
    kind: str = "tensor"
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    strides: tuple[int, ...] | None = None
    offset_bytes: int = 0
    is_permuted: bool = False
    shard: Shard | None = None


class Record(msgspec.Struct, frozen=True):
    """The whole structure of one rank's state.

    Attributes:
        tree: top-level key to encoded value.
        tensors: one for each number in the tree.
        shared: top-level keys that every rank has equal: on disk the file of rank 0 alone has them.
        rank: whose state this is.
        world_size: how many ranks saved.
        metrics: what `save` was given, as `written_metrics` gives it.
        version: of this form.
        shared_elsewhere: the tree is without the keys that are equal on every rank: in memory another rank of the host
            has them for this one.
    """

    tree: dict[str, Node]
    tensors: list[TensorRef]
    shared: list[str] = []
    rank: int = 0
    world_size: int = 1
    metrics: WrittenMetrics = {}
    version: int = VERSION
    shared_elsewhere: bool = False

    @staticmethod
    def read(data: bytes | memoryview) -> Record:
        """Read and check what `write` gave.

        Raises:
            DamagedCheckpoint: it is no record, or one of another version.
        """
        try:
            record = typed_json.decode(data, Record)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise DamagedCheckpoint(f"the structure of the state cannot be read: {error}") from error
        if record.version != VERSION:
            raise OtherRelease.of("the structure of the state", record.version, VERSION)
        if any(ref.entry < 0 or ref.offset_bytes < 0 for ref in record.tensors):
            raise DamagedCheckpoint("the structure of the state refers to an entry or offset below 0")
        if not 0 <= record.rank < record.world_size:
            raise DamagedCheckpoint(f"the structure is that of rank {record.rank} of {record.world_size}")
        return record

    def write(self) -> bytes:
        """Return the record as JSON."""
        return msgspec.json.encode(self)

    @staticmethod
    def write_with(tensors: msgspec.Raw, **fields: Any) -> bytes:
        """As `write`, with tensors that are JSON already: the same in every save, and by far the most."""
        return msgspec.json.encode({**fields, "tensors": tensors})

    @property
    def metric_values(self) -> dict[str, float]:
        """What `save` was given as metrics."""
        return {name: float(value) for name, value in self.metrics.items()}

    @property
    def own(self) -> list[str]:
        """The top-level keys that are this rank's alone."""
        return [key for key in self.tree if key not in self.shared]

    def only(self, keys: Iterable[str]) -> tuple[Record, list[int]]:
        """Return the part of the record under some top-level keys, and which of the entries it needs, ascending.

        Entries and tensors are numbered anew: entry i of the part is entry `indices[i]` of the whole. What a rank's
        file holds is `record.only(record.own)`, for rank 0 the whole record.
        """
        tree = {key: self.tree[key] for key in keys}
        numbers = list(dict.fromkeys(number for node in tree.values() for number in numbers_in(node)))
        indices = sorted({self._tensor(number).entry for number in numbers})
        place = {entry: index for index, entry in enumerate(indices)}
        tensors = [msgspec.structs.replace(self.tensors[n], entry=place[self.tensors[n].entry]) for n in numbers]
        renumber = {number: index for index, number in enumerate(numbers)}
        part = {key: renumbered(node, renumber) for key, node in tree.items()}
        shared = [key for key in self.shared if key in tree]
        return msgspec.structs.replace(self, tree=part, tensors=tensors, shared=shared), indices

    def decode(
        self,
        tensor: Callable[[TensorRef], Any] | None = None,
        foreign: MakeForeign = lambda tag, body, _again: Foreign(tag, body),
        without: Collection[str] = (),
    ) -> dict[str, Any]:
        """Return the tree as Python values.

        Args:
            tensor: makes a tensor from its reference; without it the tree holds the references.
            foreign: makes a value of a tag that is not known here, from its body; its third argument decodes nodes.
            without: top-level keys to leave out.

        Raises:
            DamagedCheckpoint: the tree breaks the form.
        """
        tree = {key: node for key, node in self.tree.items() if key not in without}
        made: Sequence[Any] = self.tensors
        if tensor and len(tree) < len(self.tree):
            made = [None] * len(self.tensors)
            for number in {*itertools.chain.from_iterable(map(numbers_in, tree.values()))}:
                made[number] = tensor(self._tensor(number))
        elif tensor:
            made = [tensor(ref) for ref in self.tensors]
        return {key: decode(node, made, foreign) for key, node in tree.items()}

    def _tensor(self, number: int) -> TensorRef:
        if not 0 <= number < len(self.tensors):
            raise DamagedCheckpoint(f"the structure refers to tensor {number} of {len(self.tensors)}")
        return self.tensors[number]


class Origin(msgspec.Struct, frozen=True):
    """Whose a record is; fields as in `Record`."""

    rank: int = 0
    world_size: int = 1
    shared_elsewhere: bool = False


def read_origin(data: bytes | memoryview) -> Origin:
    """Return the origin of a record alone, without the time that it takes to read the rest.

    Raises:
        DamagedCheckpoint: it is no record.
    """
    try:
        return typed_json.decode(data, Origin)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DamagedCheckpoint(f"the structure of the state cannot be read: {error}") from error
