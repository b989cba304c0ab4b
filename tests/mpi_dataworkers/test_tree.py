"""Batches of every shape and type make the way through frames bit for bit."""

from __future__ import annotations

import pickle
import weakref
from collections import namedtuple
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch

from hetstream.mpi_dataworkers.errors import ProtocolError
from hetstream.mpi_dataworkers.ops import structure, tree
from hetstream.mpi_dataworkers.ops.tree import flatten, unflatten
from hetstream.mpi_dataworkers.wire.codec import fuse, in_one_piece, size_of, split

Pair = namedtuple("Pair", "left right")


class Square(Pair):
    """Is made of one value."""

    def __new__(cls, side: Any) -> Square:
        return super().__new__(cls, side, side)


class Tagged(Pair):
    """May have attributes beside its fields."""

    name: str


@dataclass
class Record:
    """A class of the user's own."""

    name: str
    value: float


def travel(batch: Any) -> Any:
    spec, buffers = flatten(batch)
    frames, places = fuse(buffers)
    return unflatten(spec, split([bytearray(frame) for frame in frames], places))


DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64, torch.complex128, torch.float8_e4m3fn,
]  # fmt: skip


@pytest.mark.shows("a batch of any structure and type arrives bit for bit on every transport")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (2, 3, 4), (70_000,)], ids=str)
def test_tensors_of_every_type_and_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.rand(shape) * 100).to(dtype)
    came = travel(tensor)
    assert (came.dtype, came.shape) == (dtype, tensor.shape)
    assert came.reshape(-1).view(torch.uint8).tolist() == tensor.reshape(-1).view(torch.uint8).tolist()


@pytest.mark.parametrize(
    "array",
    [np.array(3.5), np.zeros((0, 4), np.int16), np.arange(6, dtype=">i4").reshape(2, 3), np.array([True, False])],
    ids=lambda array: f"{array.dtype.str}{array.shape}",
)
def test_arrays(array: Any) -> None:
    came, torchs = travel(array), pickle.loads(bytes(ForkingPickler.dumps(array)))
    assert (came.dtype, came.shape) == (torchs.dtype, array.shape)
    assert came.tobytes() == torchs.tobytes()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "shapes",
    [[(60_001,)] * 9, [(50_003 + number,) for number in range(9)], [(3, 20_003), (), *[(60_001,)] * 9]],
    ids=str,
)
def test_many_large_tensors_whose_ends_are_on_no_boundary(dtype: torch.dtype, shapes: list[tuple[int, ...]]) -> None:
    batch = {str(number): (torch.rand(shape) * 100).to(dtype) for number, shape in enumerate(shapes)}
    if batch["0"].dim() == 2:
        batch["0"].t_().requires_grad_(dtype.is_floating_point)
    came = travel(batch)
    assert list(came) == list(batch)
    for name, tensor in batch.items():
        assert (came[name].dtype, came[name].shape) == (dtype, tensor.shape)
        assert torch.equal(came[name], tensor)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_bytes", [0, 47, 49, 96])
def test_a_tensor_takes_the_bytes_of_its_shape_and_no_others(dtype: torch.dtype, num_bytes: int) -> None:
    spec, _ = flatten(torch.zeros(48 // dtype.itemsize, dtype=dtype).reshape(2, -1))
    with pytest.raises(ProtocolError, match="48 bytes"):
        unflatten(spec, [memoryview(bytearray(num_bytes))])


@pytest.mark.parametrize("shape", [(1, 100_000), (100_000,), (5, 20_000, 1)], ids=str)
@pytest.mark.parametrize("kind", ["tensor", "list", "array"])
def test_memory_is_not_free_while_a_batch_lies_in_it(shape: tuple[int, ...], kind: str) -> None:
    tensor = torch.arange(100_000, dtype=torch.int32).reshape(shape)
    spec, buffers = flatten({"tensor": tensor, "list": [tensor], "array": tensor.numpy()}[kind])
    # As transports lend memory: a part of a larger piece, which is free when nobody sees the part any more.
    pool = np.zeros(1 << 20, np.uint8)
    part = pool[4096 : 4096 + tensor.nbytes]
    part[:] = np.frombuffer(in_one_piece(buffers[0]), np.uint8)
    freed: list[bool] = []
    weakref.finalize(part, freed.append, True)
    batch: Any = unflatten(spec, [part.data, *map(memoryview, buffers[1:])])
    del part
    assert not freed, "it would be written to while the program reads it"
    assert torch.equal(torch.as_tensor(batch[0] if kind == "list" else batch), tensor)
    del batch
    assert freed


def test_views_come_as_what_they_show() -> None:
    base = torch.arange(24).reshape(4, 6)
    for view in (base.t(), base[:, ::2], base[1:3, 2], base.expand(2, 4, 6), torch.rand(3, dtype=torch.cfloat).conj()):
        assert torch.equal(travel(view), view)
    parameter = torch.nn.Parameter(torch.rand(3))
    assert torch.equal(travel(parameter.detach()), parameter)


TURNED = {
    "channels last": torch.rand(4, 3, 5, 6).contiguous(memory_format=torch.channels_last),
    "images of rows": torch.rand(4, 5, 6, 3).permute(0, 3, 1, 2),
    "channels last, 3-d": torch.rand(2, 3, 4, 5, 6).contiguous(memory_format=torch.channels_last_3d),
    "transposed": torch.rand(6, 5).t(),
    "of one": torch.rand(1, 5, 3).transpose(1, 2),
}


@pytest.mark.parametrize("turned", TURNED.values(), ids=TURNED.keys())
def test_the_order_of_dimensions_in_memory_stays(turned: torch.Tensor) -> None:
    (in_list,), in_dict = travel([turned]), travel({"images": turned, "labels": torch.ones(2)})
    for came in (travel(turned), in_list, in_dict["images"]):
        assert torch.equal(came, turned)
        assert came.stride() == turned.stride()


def test_a_fortran_array_stays_one_and_what_is_in_gaps_does_not_travel() -> None:
    array = travel(np.asfortranarray(np.arange(6.0).reshape(2, 3)))
    assert array.flags.f_contiguous
    assert array.tolist() == [[0, 1, 2], [3, 4, 5]]
    with_gaps = torch.rand(4, 6)[:, ::2].t()
    assert torch.equal(travel(with_gaps), with_gaps)
    assert travel(with_gaps).stride() == with_gaps.stride()
    assert sum(map(size_of, flatten(with_gaps)[1])) == with_gaps.nbytes


def test_many_turned_tensors_share_a_buffer() -> None:
    batch = {str(number): torch.rand(3, number).t() for number in range(2, 22)}
    spec, buffers = flatten(batch)
    assert len(buffers) == 1
    assert tree.holds_objects(spec) is False
    came = travel(batch)
    for name, tensor in batch.items():
        assert torch.equal(came[name], tensor)
        assert came[name].stride() == tensor.stride()


@pytest.mark.shows("a batch of any structure and type arrives bit for bit on every transport")
def test_nested_structures_keep_their_types() -> None:
    batch = {
        "tuple": (torch.ones(2), [torch.zeros(1), "text", None]),
        "named": Pair(torch.arange(3), {"deep": 1.5}),
        3: True,
        "large": 2**80,
        "bytes": b"\0\1",
        "record": Record("a", 1.0),
        "text array": np.array(["a", "b"]),
    }
    came = travel(batch)
    assert list(came) == list(batch)
    assert isinstance(came["named"], Pair)
    assert came["tuple"][1][1:] == ["text", None]
    assert (came[3], came["large"], came["bytes"], came["record"]) == (True, 2**80, b"\0\1", Record("a", 1.0))
    assert came["text array"].tolist() == ["a", "b"]


@pytest.mark.parametrize(
    "odd",
    [
        torch.eye(3).to_sparse(),
        torch.nn.Parameter(torch.ones(3)),
        torch.rand(3, dtype=torch.cfloat).conj(),
        torch.empty(0, 3),
        torch.tensor(2.5),
    ],
    ids=["sparse", "parameter", "conjugate", "empty", "0-d"],
)
def test_a_dict_of_tensors_is_read_once_and_odd_ones_stay_what_they_are(odd: torch.Tensor) -> None:
    plain = {f"feature{number}": torch.full((3, 3), float(number)) for number in range(20)}
    for features in (plain, plain | {"feature3": odd}, plain):
        came = travel(features)
        assert list(came) == list(features)
        assert torch.equal(came["feature19"], features["feature19"])
        assert type(came["feature3"]) is type(features["feature3"])
        assert came["feature3"].layout is features["feature3"].layout
        assert came["feature3"].dtype is features["feature3"].dtype
        assert torch.equal(came["feature3"].to_dense(), features["feature3"].to_dense())
    numbered = {key: torch.ones(2) for key in (True, 2, "3")}
    assert list(map(type, travel(numbered))) == [bool, int, str]


def test_many_small_tensors_share_buffers_and_keep_what_they_are() -> None:
    batch = {f"{dtype}{number}": (torch.rand(number, 3) * 9).to(dtype) for dtype in DTYPES for number in range(12)}
    batch["turned"] = torch.arange(6.0).reshape(2, 3).t()
    batch["learned"] = torch.rand(3, requires_grad=True)
    batch["part"] = torch.rand(3, dtype=torch.cfloat).conj().imag
    batch["large"] = torch.arange(100_000.0)
    spec, buffers = flatten(batch)
    came = travel(batch)
    assert len(buffers) < len(batch) / 3
    assert flatten(batch)[0] == spec, "a spec of equal structure is read once"
    assert list(came) == list(batch)
    for name, tensor in batch.items():
        assert (came[name].dtype, came[name].shape) == (tensor.dtype, tensor.shape), name
        assert came[name].reshape(-1).tolist() == tensor.reshape(-1).tolist(), name


def test_sparse_tensors() -> None:
    sparse = torch.eye(3).to_sparse()
    assert torch.equal(travel(sparse).to_dense(), torch.eye(3))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors() -> None:
    rows = [torch.ones(2), torch.arange(3.0)]
    for layout in (torch.strided, torch.jagged):
        nested = torch.nested.nested_tensor(rows, layout=layout)
        (in_list,), in_dict = travel([nested]), travel({"rows": nested, "labels": torch.ones(2)})
        for came in (travel(nested), in_list, in_dict["rows"]):
            assert came.layout is layout
            assert [row.tolist() for row in came.unbind()] == [row.tolist() for row in rows]


def test_a_named_tuple_of_a_class_that_is_made_otherwise_or_has_attributes() -> None:
    square = travel(Square(torch.ones(2)))
    assert type(square) is Square
    assert torch.equal(square.right, torch.ones(2))
    tagged = Tagged(1, torch.ones(2))
    tagged.name = "mine"
    came = travel([tagged])[0]
    assert (type(came), came.left, came.name) == (Tagged, 1, "mine")
    assert torch.equal(came.right, torch.ones(2))


def test_what_arrives_may_be_changed_in_place() -> None:
    came = travel(torch.zeros(5))
    came += 1
    assert came.sum() == 5


@pytest.mark.shows("every setting is checked at construction, all problems at once")
def test_a_spec_that_does_not_fit_is_refused() -> None:
    spec, buffers = flatten([torch.ones(4), torch.ones(2)])
    views = [memoryview(buffer) for buffer in buffers]
    quantized = spec.replace(b"\xa7float32", b"\xa6qint32")  # to which torch gives no shape
    assert quantized != spec
    for bad_spec, bad_views in (
        *((spec, views[:1]), (spec[:-3], views), (b"", views), (b"\x91\xa1z", views)),
        (quantized, views),
    ):
        with pytest.raises(ProtocolError):
            unflatten(bad_spec, bad_views)


@pytest.mark.parametrize(
    "shapes",
    [[(7,)] * 20, [(length,) for length in range(1, 20)], [(rows, 3, 2) for rows in range(1, 20)], [()] * 20,
     [(2, size) for size in range(1, 20)], [(), *[(3,)] * 19]],
    ids=["equal", "ragged", "rows", "scalars", "columns", "mixed"],
)  # fmt: skip
def test_packed_tensors_of_any_shapes_are_tensors_of_their_own(shapes: list[tuple[int, ...]]) -> None:
    batch = [torch.randn(shape) for shape in shapes]

    came = travel(batch)

    for sent, received in zip(batch, came, strict=True):
        assert torch.equal(received, sent)
    # In place, and with a gradient: what autograd forbids for the views that torch.split gives.
    weight = torch.ones((), requires_grad=True)
    came[0].mul_(weight * 2)
    came[0].sum().backward()
    assert torch.equal(came[0], batch[0] * 2)
    assert torch.equal(came[1], batch[1])


MANY = {f"feature {number}": torch.full((600, 4), float(number)) for number in range(50)}
IMAGES = torch.rand(8, 3, 200, 200)


@pytest.mark.parametrize(
    ("batch", "of"),
    [
        ([IMAGES, torch.arange(8)], lambda batch: batch[1]),
        ((IMAGES, np.arange(8)), lambda batch: batch[1]),
        ({"image": IMAGES, "target": [{"box": torch.rand(number, 4)} for number in range(1, 12)]},
         lambda batch: batch["target"][9]["box"]),
        (MANY, lambda batch: batch["feature 31"]),
        ({**MANY, "label": torch.arange(600.0)}, lambda batch: batch["label"]),
    ],
    ids=["label", "array", "boxes", "feature of many", "feature of another shape"],
)  # fmt: skip
def test_who_keeps_a_small_tensor_keeps_no_message(batch: Any, of: Any) -> None:
    spec, buffers = flatten(batch)
    frames, places = fuse(buffers)
    messages = [np.frombuffer(bytearray(frame), np.uint8) for frame in frames]
    alive = [weakref.ref(message) for message in messages]
    came = unflatten(spec, split([message.data for message in messages], places))
    del messages
    kept = of(came)
    assert bytes(kept) == bytes(of(batch)) if isinstance(kept, np.ndarray) else torch.equal(kept, of(batch))
    assert any(message() is not None for message in alive) == (len(batch) < 50), "what is large is not copied"
    del came
    assert [message() for message in alive] == [None] * len(alive)


def test_each_of_many_tensors_is_itself_however_they_are_copied() -> None:
    for sizes in ([9000] * 30, [1, 40_000, 3] * 20, [0, 5, 20_000] * 9, [100_000] * 9):
        batch = {f"{number}": torch.arange(size) + number for number, size in enumerate(sizes)}
        came = travel(batch)
        assert all(torch.equal(came[name], tensor) for name, tensor in batch.items())
        came["1"] += 1  # in place, as of a batch of one's own
        assert torch.equal(came["2"], batch["2"])


def test_text_that_is_no_text_travels() -> None:
    """As `os.listdir` gives the name of a file whose bytes are no UTF-8."""
    name = b"caf\xe9.jpg".decode("utf-8", "surrogateescape")
    batch = {"names": [name, "café.jpg", "cafe.jpg"], name: torch.ones(3)}
    came = travel(batch)
    assert came["names"] == batch["names"]
    assert torch.equal(came[name], torch.ones(3))
    assert list(travel({name: torch.ones(3)})) == [name]


class Wrapping(torch.Tensor):
    """A subclass that wraps another tensor, as those of torchao do: it has a storage without memory."""

    wrapped: torch.Tensor

    @staticmethod
    def __new__(cls, wrapped: torch.Tensor, offset: int = 0) -> Wrapping:
        made: Any = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, wrapped.size(), wrapped.stride(), offset, dtype=wrapped.dtype
        )
        made.wrapped = wrapped
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError


def test_a_subclass_that_wraps_a_tensor_and_tensors_without_memory() -> None:
    table = torch.arange(100_000.0).reshape(100, 1000)
    batch = [Wrapping(table[3]), table[3:5]]
    assert sum(map(size_of, flatten(batch)[1])) < 9000
    wrapping, rows = travel(batch)
    assert type(wrapping) is Wrapping
    rows[0, 0] = -1
    assert wrapping.wrapped[0] == -1
    # torch's own pickled form names the storage, which is not there: its worker process ends of that.
    for without in (
        Wrapping(table[3], offset=5),
        [torch._efficientzerotensor(3).t()],
        torch._efficientzerotensor(2, 3).t(),
    ):
        with pytest.raises(RuntimeError, match=r"invalid python storage|ZeroTensor"):
            travel(without)


def local_class(number: int) -> type:
    class Local:
        which = number

    return Local


def test_a_class_that_is_local_to_a_function_is_found_by_its_id_or_when_there_is_no_other_like_it() -> None:
    first = local_class(1)
    cloudpickle.dumps(first)
    assert type(travel(first())) is first
    names = first.__module__, first.__qualname__
    assert structure.find_class("of another process", *names) is first
    second = local_class(2)
    cloudpickle.dumps(second)
    assert [type(travel(one())) for one in (first, second)] == [first, second]
    with pytest.raises(LookupError, match=r"there are 2 classes local_class\.<locals>\.Local of .*test_tree"):
        structure.find_class("of another process", *names)
