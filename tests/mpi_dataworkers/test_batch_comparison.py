"""What `compare` calls the same: what a program cannot tell apart. The oracles are copies, and one change of each."""

from __future__ import annotations

import collections
import copy
import dataclasses
import datetime
import decimal
import enum
import functools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from hetstream.mpi_dataworkers.ops.batch_comparison import compare

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, of kinds of tensors that it will give up
# Quantised ones have no storage that could be set.
DTYPES = [kind for kind in vars(torch).values() if isinstance(kind, torch.dtype) and "torch.q" not in str(kind)]


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


@dataclasses.dataclass
class Sample:
    x: Any
    label: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    x: Any


class Tagged(torch.Tensor):
    pass


class Named(collections.UserDict[str, Any]):
    pass


Pair = collections.namedtuple("Pair", "image label")


def tagged(values: list[float], tag: str) -> Tagged:
    made = torch.tensor(values).as_subclass(Tagged)
    made.tag = tag  # type: ignore[attr-defined]
    return made


def shared(together: bool) -> list[torch.Tensor]:
    base = torch.arange(6.0)
    return [base[:4], base[2:]] if together else [base[:4].clone(), base[2:].clone()]


def same_list(twice: bool) -> list[list[int]]:
    inner = [1]
    return [inner, inner if twice else [1]]


def cyclic(value: int) -> list[Any]:
    made: list[Any] = [value]
    made.append(made)
    return made


def image(value: int) -> Image.Image:
    return Image.new("RGB", (4, 3), (value, 0, 0))


# Each: what makes a batch, the same with one thing changed, and where and what the difference is.
CASES: list[tuple[Callable[[Any], Any], Any, Any, str]] = [
    (lambda v: torch.tensor([1.0, v]), 2.0, 3.0, "batch.flatten()[1]: 2.0 in place of 3.0 (1 of 2 elements differ)"),
    (lambda v: {"a": [torch.tensor(v)]}, float("nan"), 1.0, "batch['a'][0]: nan in place of 1.0"),
    (lambda v: torch.zeros(2, dtype=v), torch.int64, torch.int32, "batch: dtype torch.int64 in place of dtype"),
    (lambda v: torch.zeros(v), (2, 3), (3, 2), "batch: shape torch.Size([2, 3])"),
    (lambda v: torch.zeros(3, requires_grad=v), False, True, "batch: requires_grad False in place of"),
    (lambda v: torch.zeros(2, 3).T if v else torch.zeros(3, 2), True, False, "batch: strides"),
    (lambda v: torch.full((), v, dtype=torch.bfloat16), 0.0, -0.0, "batch: 0.0 in place of -0.0"),
    (lambda v: torch.tensor([v], dtype=torch.complex64), 1j, 2j, "batch: 1j in place of 2j"),
    (shared, True, False, "batch[1]: in one memory with batch[0] in place of in one memory with batch[1]"),
    (same_list, True, False, "batch[1]: an object that is there before in place of an object of its own"),
    (cyclic, 1, 2, "batch[0]: 1 in place of 2"),
    (lambda v: tagged([1.0], v), "a", "b", "batch['tag']: 'a' in place of 'b'"),
    (lambda v: np.array([1, v]), 2, 3, "batch.flatten()[1]: np.int64(2) in place of np.int64(3)"),
    (lambda v: np.array(["a", v], object), "b", "c", "'b' in place of 'c'"),
    (lambda v: np.zeros((2, 3), order=v), "C", "F", "batch: strides"),
    (lambda v: np.array(["2020-01-01", v], "datetime64[D]"), "NaT", "2021-01-01", "batch.flatten()[1]"),
    (lambda v: np.ma.masked_array([1, 2], [False, v]), True, False, "batch.flatten()[1]: masked in place of"),
    (lambda v: (1, v), 2, 2.0, "batch[1]: int in place of float"),
    (lambda v: [0.0, v], 0.0, -0.0, "batch[1]: 0.0 in place of -0.0"),
    (lambda v: {v: 1, "b": 2}, "a", "c", "batch.keys()[0]: 'a' in place of 'c'"),
    (lambda v: dict.fromkeys(v), "ab", "ba", "batch.keys()[0]"),
    (lambda v: {1, v}, 2, 3, "batch: {1, 2} in place of {1, 3}"),
    (lambda v: Sample([torch.tensor(v)]), 1, 2, "batch.x[0]: 1 in place of 2"),
    (lambda v: Slotted(v), 1, 2, "1 in place of 2"),
    (lambda v: Pair(torch.ones(2), v), 1, 2, "1 in place of 2"),
    (lambda v: Named(a=v), 1, 2, "batch.data['a']: 1 in place of 2"),
    (lambda v: collections.OrderedDict(a=v), 1, 2, "1 in place of 2"),
    (lambda v: collections.Counter(v), "aab", "abb", "2 in place of 1"),
    (lambda v: Colour(v), 1, 2, "in place of"),
    (lambda v: decimal.Decimal(v), "0.1", "0.10", "'0.1' in place of '0.10'"),
    (lambda v: datetime.datetime(2020, 1, v), 1, 2, "in place of"),
    (lambda v: functools.partial(int, base=v), 2, 3, "2 in place of 3"),
    (image, 1, 2, "in place of"),
    (lambda v: torch.sparse_coo_tensor([[0]], [v], (3,)), 1.0, 2.0, "1.0 in place of 2.0"),
    (lambda v: torch.quantize_per_tensor(torch.tensor([1.0, v]), 0.5, 0, torch.qint8), 2.0, 3.0, "batch"),
    (lambda v: [len, v], len, print, "batch[1]: len in place of print"),
    (lambda v: "x" * 500 + v, "a", "b", "..."),
    (lambda v: b"x" + v, b"a", b"b", "b'xa' in place of b'xb'"),
    (lambda v: [1] * v, 2, 3, "batch: length 2 in place of length 3"),
]  # fmt: skip


@pytest.mark.shows("the first steps of an unmodified program are compared with torch's; a difference keeps it local")
@pytest.mark.parametrize(("make", "value", "other", "said"), CASES, ids=range(len(CASES)))
def test_copies_are_alike_and_one_change_is_found(
    make: Callable[[Any], Any], value: Any, other: Any, said: str
) -> None:
    for same in (value, other):
        assert compare(make(same), make(same)).differences == []
    found = compare(make(value), make(other))
    assert said in str(found.differences[0])
    assert found.not_compared == []
    assert len(str(found.differences[0])) < 400


@pytest.mark.parametrize(("make", "value"), [(case[0], case[1]) for case in CASES if case[0] is not shared])
def test_what_travels_by_pickle_is_alike(make: Callable[[Any], Any], value: Any) -> None:
    batch = make(value)
    if isinstance(batch, np.ma.MaskedArray):  # of which each pickle chooses the fill value
        batch = pickle.loads(pickle.dumps(batch))
    assert compare(pickle.loads(pickle.dumps(batch)), batch).differences == []
    if not isinstance(batch, Tagged):  # torch copies no such thing
        assert compare(copy.deepcopy(batch), batch).differences == []


def test_what_cannot_be_written_down_is_named_and_the_others_are_compared() -> None:
    generators = [iter(lambda: 1, 2), iter(lambda: 1, 2)]
    found = compare([(x for x in generators), 1], [(x for x in generators), 2])
    assert (len(found.not_compared), str(found.differences[0])) == (1, "batch[1]: 1 in place of 2")
    assert "batch[0] of generator" in found.not_compared[0]


def test_a_deep_batch_is_not_compared_to_its_end() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert compare(deep, copy.copy(deep)).differences == []


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_dtype_of_torch_is_compared_by_its_bytes(dtype: torch.dtype) -> None:
    storages = [torch.UntypedStorage(64) for _ in range(2)]
    for storage in storages:
        storage.fill_(1)
    made = [torch.tensor([], dtype=dtype).set_(storage) for storage in storages]  # type: ignore[call-overload]
    assert compare(*made).differences == []
    rows = [tensor[: len(tensor) // 2 * 2].reshape(2, -1)[:, 0] for tensor in made]
    assert compare(*rows).not_compared == [], "nor does it matter how it lies in memory"
    storages[0][0] = 0
    assert "in place of" in str(compare(*made).differences[0])
    assert "in place of" in str(compare(*rows).differences[0])


def test_tensors_without_values_are_compared_by_their_form() -> None:
    found = compare([torch.empty(2, 3, device="meta")] * 2, [torch.empty(2, 3, device="meta")] * 2)
    assert (found.differences, found.not_compared) == ([], [])
    assert "shape" in str(compare(torch.empty(2, device="meta"), torch.empty(3, device="meta")).differences[0])


def test_many_views_of_one_memory_take_linear_time() -> None:
    base = torch.zeros(200_000)
    views = [base[number : number + 3] for number in range(20_000)]
    assert compare(views, views).differences == []


@pytest.mark.parametrize("value", [(1, 2), Path("a"), np.float64(2.5), None, frozenset([1]), Colour.RED, Slotted(3)])
def test_one_object_or_two_of_what_cannot_change_are_alike(value: Any) -> None:
    assert compare([value, value], [value, pickle.loads(pickle.dumps(value))]).differences == []


@pytest.mark.parametrize("value", [[1], {"a": 1}, Sample(1), collections.deque([1]), torch.ones(2), np.ones(2)])
def test_one_object_or_two_of_what_can_change_differ(value: Any) -> None:
    assert compare([value, value], [value, copy.deepcopy(value)]).differences


@pytest.mark.parametrize(
    ("found", "expected"),
    [({True}, {1.0}), ({0.0}, {-0.0}), ({float("nan")}, {1.0}), ({"a", "\ud800"}, {"a", "\ud801"})],
)
def test_sets_are_alike_by_their_elements(found: set[Any], expected: set[Any]) -> None:
    assert "in place of" in str(compare(found, expected).differences[0])
    assert compare(found, pickle.loads(pickle.dumps(found))).differences == []


def test_bytes_that_belong_to_no_value_are_not_compared() -> None:
    padded = np.dtype({"names": ["a", "b"], "formats": ["i1", "f8"], "offsets": [0, 8], "itemsize": 24})
    for dtype in (padded, np.dtype([("inner", padded, (2,))]), np.dtype(np.longdouble), np.dtype(np.clongdouble)):
        memory = [np.frombuffer(bytes([filler]) * dtype.itemsize * 3, dtype).copy() for filler in (0x11, 0x77)]
        for array in memory:
            if dtype.names:
                for name in ("a", "b") if "a" in dtype.names else ("inner",):
                    array[name] = np.zeros((), array.dtype[name])
            else:
                array[:] = 3
        assert compare(*memory).differences == []
        assert compare(memory[0][1], memory[1][1]).differences == []
    memory[0][1] = 4
    assert "in place of" in str(compare(*memory).differences[0])
    assert "in place of" in str(compare(memory[0][1], memory[1][1]).differences[0])


def test_strides_count_where_they_lead_to_elements() -> None:
    one, other = torch.zeros(3, 4)[:, :1].T, torch.zeros(1, 3)
    assert compare(torch.zeros(2, 5)[:1], torch.zeros(1, 5)).differences == []
    assert compare(np.zeros((2, 5))[:1], np.zeros((1, 5))).differences == []
    assert "strides" in str(compare(one, other).differences[0])


def test_a_field_is_a_value_and_not_an_element_of_it() -> None:
    found = compare([torch.zeros(3), {"at": 1}], [torch.ones(3), {"at": 2}])
    assert [difference.field for difference in found.differences] == ["batch[0]", "batch[1]['at']"]


def test_a_value_that_refuses_costs_its_own_comparison_alone() -> None:
    class Strict(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function: Any, *arguments: Any, **keywords: Any) -> Any:
            raise TypeError("nothing is allowed")

    found = compare([torch.zeros(2).as_subclass(Strict), 1], [torch.zeros(2).as_subclass(Strict), 2])
    assert [str(each) for each in found.differences] == ["batch[1]: 1 in place of 2"]
    assert len(found.not_compared) == 1


def test_one_element_has_any_stride() -> None:
    assert compare(torch.arange(2.0)[::2], torch.arange(2.0)[::2]).differences == []
    assert compare(torch.arange(2.0)[::2], torch.arange(1.0, 3.0)[::2]).differences


def test_what_differs_behind_much_that_differs_is_found() -> None:
    found = compare([*range(2000), "a"], [*range(1, 2001), "b"])
    assert [each.field for each in found.differences[-1:]] == ["batch[2000]"]
