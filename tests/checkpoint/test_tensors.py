"""Tensors of every kind go into a payload and come back bit by bit, shared memory is shared again, plans are kept."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils import _pytree

from hetstream.checkpoint.errors import DamagedCheckpoint, StateMismatch, UnsupportedState
from hetstream.checkpoint.flash.sources import Payload, StoredPart, TensorStore
from hetstream.checkpoint.flash.state_comparison import StateComparison
from hetstream.checkpoint.record.layout import Entry
from hetstream.checkpoint.record.structure import Record, TensorRef
from hetstream.checkpoint.tensors.copy_plan import Plan, copy_in_memory, make_plan
from hetstream.checkpoint.tensors.leaves import DTYPES, Flattener, Signature, bytes_as_tensor, view_of

# torch warns that complex32 is young.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def pack(state: Mapping[str, Any], *, allow_pickle: bool = False) -> tuple[Plan, StoredPart]:
    """What a save would leave of a state."""
    leaves = Flattener(allow_pickle=allow_pickle).flatten(state)
    plan = make_plan(leaves)
    payload = memoryview(bytearray(plan.layout.payload_bytes))
    copied = plan.tensors_to_copy(leaves.tensors)
    memory = bytes_as_tensor(payload)
    others = np.flatnonzero(~plan.are_plain).tolist()
    moves = plan.moves(leaves.signature.addresses, memory.data_ptr(), np.flatnonzero(plan.are_plain))
    with torch.no_grad():
        copy_in_memory([plan.destination(one, memory) for one in others], [copied[one] for one in others], moves)
    structure = Record.write_with(plan.encoded_refs, tree=leaves.tree)
    return plan, StoredPart(Record.read(structure), TensorStore(Payload(plan.layout.entries, payload)))


def through(value: Any) -> Any:
    return pack({"state": value})[1].load()["state"]


def bits(tensor: torch.Tensor) -> bytes:
    """The elements of a tensor in row-major order."""
    plain = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def random_bits(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    if dtype == torch.bool:
        return torch.randint(0, 2, shape).bool()
    count = int(np.prod(shape)) * dtype.itemsize
    return torch.randint(0, 256, (count,), dtype=torch.uint8).view(dtype).view(shape)


def test_every_dtype_of_torch_is_known_or_refused_with_a_way_out() -> None:
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    for dtype in dtypes - set(DTYPES.values()):
        # Sub-byte, quantized and bits types: torch cannot do anything with most of them.
        assert any(word in str(dtype) for word in ("int1", "int2", "int3", "int4", "int5", "int6", "int7", "q", "bits"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # quantization in torch is deprecated
        quantized = torch.quantize_per_tensor(torch.rand(3), 0.1, 0, torch.qint8)
    with pytest.raises(UnsupportedState, match=r"state has dtype torch\.qint8.*int_repr"):
        pack({"state": quantized})


@pytest.mark.shows("every tensor lies at a multiple of 64 bytes, and none overlaps; a foreign layout is refused")
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (7,), (4, 16)], ids=str)
def test_every_dtype_and_shape_comes_back_bit_by_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = random_bits(dtype, *shape)
    back = through(tensor)
    assert (back.dtype, back.shape, bits(back)) == (tensor.dtype, tensor.shape, bits(tensor))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.rand(3, 5).t(),
        torch.rand(4, 6)[:, ::2],
        torch.rand(20)[3:17:4],
        torch.rand(1).expand(7),
        torch.rand(3, 1).expand(3, 5),
        torch.rand(6, dtype=torch.complex64).conj(),
        torch.rand(6, dtype=torch.complex64).conj().imag,
        torch.rand(3, 4).unfold(1, 2, 1),
        torch.rand(2, 1, 3).transpose(0, 1),
    ],
    ids=["channels_last", "t", "columns", "stepped", "expanded", "broadcast", "conj", "neg", "unfold", "size one"],
)
def test_strides_of_all_kinds_come_back(tensor: torch.Tensor) -> None:
    back = through(tensor)
    assert back.shape == tensor.shape
    assert bits(back) == bits(tensor)


def test_a_conjugate_beside_its_tensor_keeps_its_values() -> None:
    tensor = torch.rand(6, dtype=torch.complex64)
    back = through([tensor, tensor.conj(), tensor.imag, tensor.conj().imag])
    for one, other in zip([tensor, tensor.conj(), tensor.imag, tensor.conj().imag], back, strict=True):
        assert bits(one) == bits(other)


def test_an_empty_view_does_not_part_what_overlaps() -> None:
    base = torch.arange(100.0)
    plan, _ = pack({"a": base[:60], "none": base[50:50], "c": base[55:]})
    assert len(plan.layout.entries) == 2


def test_memory_formats_and_expansions_are_kept() -> None:
    image = torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert through(image).is_contiguous(memory_format=torch.channels_last)
    plan, part = pack({"big": torch.rand(1).expand(10**9)})
    assert plan.layout.payload_bytes == 64
    assert part.load()["big"].stride() == (0,)


@pytest.mark.shows("every tensor lies at a multiple of 64 bytes, and none overlaps; a foreign layout is refused")
def test_a_tied_tensor_is_stored_once_and_tied_again() -> None:
    weight = torch.nn.Parameter(torch.rand(4, 16))
    plan, part = pack({"model": {"embed": weight, "head": weight, "detached": weight.detach()}})
    assert len(plan.layout.entries) == 1
    back = part.load()["model"]
    assert back["embed"] is back["head"]
    with torch.no_grad():
        back["embed"].zero_()
    assert back["detached"].sum() == 0


def test_overlapping_views_share_memory_again() -> None:
    base = torch.arange(12.0)
    plan, part = pack({"a": base[:8], "b": base[4:], "c": base.view(3, 4)[1], "bytes": base.view(torch.uint8)})
    assert plan.layout.payload_bytes == 64
    back = part.load()
    back["a"][5] = 77
    assert back["b"][1] == 77
    assert back["c"][1] == 77
    assert back["bytes"].view(torch.float32)[5] == 77


def test_the_whole_of_overlapping_tensors_keeps_its_name_and_shape() -> None:
    base = torch.rand(3, 4)
    plan, _ = pack({"row": base[1], "whole": base})
    assert [(entry.name, entry.shape) for entry in plan.layout.entries] == [("whole", (3, 4))]


def test_disjoint_parts_of_one_memory_are_entries_of_their_own() -> None:
    base = torch.rand(32)
    plan, part = pack({"a": base[:16], "b": base[16:]})
    assert [entry.name for entry in plan.layout.entries] == ["a", "b"]
    assert bits(part.load()["b"]) == bits(base[16:])


def test_two_columns_of_a_wide_matrix_do_not_bring_the_matrix_along() -> None:
    base = torch.rand(1000, 100)
    plan, part = pack({"a": base[:, 0], "b": base[:, 50]})
    assert plan.layout.payload_bytes <= 2 * 4096
    assert bits(part.load()["b"]) == bits(base[:, 50])


def test_parameters_and_gradients_are_what_they_were() -> None:
    back = through(
        {
            "parameter": torch.nn.Parameter(torch.rand(2)),
            "frozen": torch.nn.Parameter(torch.rand(2), requires_grad=False),
            "leaf": torch.rand(2, requires_grad=True),
            "plain": torch.rand(2),
        }
    )
    assert type(back["parameter"]) is torch.nn.Parameter
    assert type(back["frozen"]) is torch.nn.Parameter
    assert [one.requires_grad for one in back.values()] == [True, False, True, False]


def test_arrays_bytes_and_torch_words_come_back() -> None:
    state = {
        "large": np.arange(5000, dtype=np.uint16).reshape(50, 100),
        "backwards": np.arange(5000.0)[::-1],
        "fixed": np.frombuffer(bytes(8192), np.int32),
        "swapped": np.arange(3000, dtype=">f8"),
        "long": bytes(range(256)) * 40,
        "words": (torch.float32, torch.channels_last, torch.strided, torch.device("cpu"), torch.Size([2, 3])),
    }
    back = through(state)
    for name in ("large", "backwards", "fixed", "swapped"):
        np.testing.assert_array_equal(back[name], state[name])
        assert back[name].dtype == state[name].dtype
    assert back["long"] == state["long"]
    assert back["words"] == state["words"]
    assert type(back["words"][4]) is torch.Size


def test_sparse_tensors_come_back() -> None:
    dense = torch.eye(4) * torch.rand(4)
    back = through(dense.to_sparse())
    assert torch.equal(back.to_dense(), dense)
    with pytest.raises(UnsupportedState, match="to_dense"):
        pack({"state": _csr()})


def _csr() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # in beta, says torch
        return torch.eye(3).to_sparse_csr()


class Moments(NamedTuple):
    mean: torch.Tensor
    count: int


class Interval:
    def __init__(self, low: torch.Tensor, high: torch.Tensor, closed: bool) -> None:
        self.low, self.high, self.closed = low, high, closed


def test_types_registered_with_pytree_come_back() -> None:
    _pytree.register_pytree_node(
        Interval, lambda one: ([one.low, one.high], one.closed), lambda items, closed: Interval(*items, closed)
    )
    try:
        state = {"interval": Interval(torch.zeros(2), torch.ones(2), True), "moments": Moments(torch.rand(3), 4)}
        part = pack(state)[1]
        back = part.load()
        assert (back["interval"].type, back["interval"].context) == (f"{__name__}:Interval", True)
        assert torch.equal(back["interval"].children[1], torch.ones(2))
        assert (type(back["moments"]).__name__, back["moments"].count) == ("Moments", 4)
        here = {"interval": Interval(torch.rand(2), torch.rand(2), True), "moments": Moments(torch.rand(3), 0)}
        low = here["interval"].low
        comparison = StateComparison()
        comparison.compare(here, part.saved())
        comparison.write()
        assert comparison.differences == []
        assert here["interval"].low is low
        assert torch.equal(low, torch.zeros(2))
        assert type(here["moments"]) is Moments
        assert here["moments"].count == 4
    finally:
        del _pytree.SUPPORTED_NODES[Interval]


class Odd:
    def __init__(self) -> None:
        self.tensor = torch.arange(3)


def test_other_objects_need_pickle_on_both_sides() -> None:
    with pytest.raises(UnsupportedState, match=r"state\.odd is a .*Odd.*allow_pickle=True"):
        pack({"state": {"odd": Odd()}})
    _, part = pack({"state": {"odd": Odd()}}, allow_pickle=True)
    with pytest.raises(StateMismatch, match="allow_pickle=True"):
        part.load()
    assert torch.equal(part.load(allow_pickle=True)["state"]["odd"].tensor, torch.arange(3))


def test_tensors_without_values_are_refused() -> None:
    with pytest.raises(UnsupportedState, match="meta device"):
        pack({"state": torch.empty(3, device="meta")})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested tensors are young
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    with pytest.raises(UnsupportedState, match="state is a nested tensor"):
        pack({"state": nested})


def test_names_are_places_and_unique() -> None:
    plan, part = pack(
        {
            "a.b": torch.zeros(1),
            "a": {"b": torch.ones(1), 1: torch.ones(2), "1": torch.ones(3)},
            "__metadata__": torch.ones(4),
        }
    )
    assert sorted(entry.name for entry in plan.layout.entries) == ["__metadata__~", "a.1", "a.1~2", "a.b", "a.b~2"]
    back = part.load()
    assert (len(back["a"][1]), len(back["a"]["1"]), back["a.b"].item()) == (2, 3, 0)


def test_entries_come_as_they_lie_and_a_ranks_own_come_first() -> None:
    state = {
        "model": {"w": torch.rand(64), "s": torch.tensor(1.0)},
        "own": {"h": torch.rand(3).half(), "w": torch.rand(16)},
    }
    plan = make_plan(Flattener().flatten(state), ["model"])
    offsets = [entry.offset for entry in plan.layout.entries]
    assert offsets == sorted(offsets)
    assert all(offset % 64 == 0 for offset in offsets)
    assert [entry.name for entry in plan.layout.entries] == ["own.w", "model.w", "model.s", "own.h"]


def test_a_plan_holds_as_long_as_nothing_that_matters_changes() -> None:
    flattener = Flattener()
    weight, step = torch.rand(3, 4), torch.tensor(1.0)

    def signature(**state: Any) -> Signature:
        return flattener.flatten(state).signature

    first = signature(w=weight, step=step, epoch=1)
    assert signature(w=weight.zero_(), step=step, epoch=2) == first
    assert signature(w=weight.t(), step=step) != first
    assert signature(w=weight.double(), step=step) != first
    assert signature(w=weight[:2], step=step) != first
    assert signature(v=weight, step=step) != first
    assert signature(w=weight) != first
    assert signature(w=torch.nn.Parameter(weight), step=step) != first
    plan = make_plan(flattener.flatten({"w": weight, "step": step}))
    assert plan.fits(first.addresses)
    assert plan.fits(signature(w=weight.clone(), step=step.clone()).addresses)
    assert not plan.fits(signature(w=weight, step=weight[0, 0]).addresses)
    elsewhere = make_plan(flattener.flatten({"w": weight.clone(), "step": step.clone()}))
    assert elsewhere.is_like(make_plan(flattener.flatten({"w": weight, "step": step})))
    assert not elsewhere.is_like(make_plan(flattener.flatten({"w": weight, "step": weight[0, 0]})))


@pytest.mark.parametrize(
    "ref",
    [
        TensorRef(0, offset_bytes=4),
        TensorRef(0, shape=(5,), dtype="F32"),
        TensorRef(0, shape=(2,), strides=(4,)),
        TensorRef(0, shape=(2,), strides=(-1,)),
        TensorRef(0, shape=(2,), strides=(1, 1)),
        TensorRef(0, shape=(-1,)),
        TensorRef(0, shape=(1,), offset_bytes=2),
        TensorRef(0, dtype="F63"),
        TensorRef(0, dtype="F64", shape=(2**62,), strides=(2**62,)),
    ],
)
def test_views_outside_of_their_entry_are_refused(ref: TensorRef) -> None:
    with pytest.raises(DamagedCheckpoint):
        view_of(ref, Entry("w", "F32", (4,), 0, 16), torch.zeros(4))
    with pytest.raises(DamagedCheckpoint):
        TensorStore(Payload([], memoryview(b""))).own(ref)


@st.composite
def _views(draw: st.DrawFn) -> list[torch.Tensor]:
    """Views of one memory, which may overlap in any way."""
    base = torch.arange(64).to(draw(st.sampled_from([torch.float32, torch.int16, torch.complex64])))
    views = []
    for _ in range(draw(st.integers(1, 5))):
        begin, length = draw(st.integers(0, 63)), draw(st.integers(0, 64))
        view = base[begin : begin + length : draw(st.integers(1, 5))]
        if draw(st.booleans()) and view.numel() % 2 == 0:
            view = view.view(2, -1).t() if view.is_contiguous() else view
        views.append(view)
    return views


@pytest.mark.shows("every tensor lies at a multiple of 64 bytes, and none overlaps; a foreign layout is refused")
@settings(max_examples=200, deadline=None)
@given(_views())
def test_any_views_of_one_memory_come_back(views: list[torch.Tensor]) -> None:
    back = through(views)
    for one, other in zip(views, back, strict=True):
        assert one.shape == other.shape
        assert bits(one) == bits(other)


@settings(max_examples=200, deadline=None)
@given(_views(), st.booleans())
def test_a_plan_fits_where_the_same_is_shared(views: list[torch.Tensor], separates: bool) -> None:
    leaves = Flattener().flatten({"views": views})
    plan = make_plan(leaves)
    moved = torch.arange(64).to(views[0].dtype)
    same = [moved.as_strided(one.shape, one.stride(), one.storage_offset()) for one in views]
    signature = Flattener().flatten({"views": [one.clone() if separates else one for one in same]}).signature
    remade = make_plan(Flattener().flatten({"views": [one.clone() if separates else one for one in same]}))
    if signature == leaves.signature and plan.fits(signature.addresses):
        assert plan.is_like(remade)


def test_refs_as_json_are_the_refs() -> None:
    plan, part = pack({"a": torch.rand(3), "b": torch.rand(2, 3).t()})
    assert msgspec.json.decode(plan.encoded_refs, type=list[TensorRef]) == plan.refs == part.record.tensors


class Scaled(torch.nn.Parameter):
    """A parameter of a program's own class."""

    scale = 2.0


class Wrapped(torch.Tensor):
    """A tensor without values of its own."""

    @classmethod
    def __torch_dispatch__(cls, *_: Any, **__: Any) -> Any:
        raise AssertionError("its values are asked for")


def test_parameters_of_a_programs_class_stay_what_they_are(make: Any) -> None:
    model = torch.nn.Linear(3, 3)
    model.weight = Scaled(torch.ones(3, 3))
    alone = Scaled(torch.ones(2), requires_grad=False)
    state = {"model": model, "more": {"alone": alone}, "optimizer": torch.optim.Adam(model.parameters())}
    with make() as checkpointer:
        checkpointer.save(1, state)
        with torch.no_grad():
            for one in (model.weight, alone):
                one.zero_()
        assert checkpointer.restore(state) == 1
        loaded = checkpointer.load().state["more"]["alone"]
    assert state["more"]["alone"] is alone
    assert (type(model.weight), type(alone)) == (Scaled, Scaled)
    assert (model.weight.sum(), alone.sum(), alone.requires_grad) == (9, 2, False)
    assert (type(loaded), loaded.requires_grad) == (torch.nn.Parameter, False)
    wrapped = torch.Tensor._make_wrapper_subclass(Wrapped, (2,))  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedState, match="Wrapped, which a checkpoint cannot hold"):
        Flattener().flatten({"w": wrapped})
