"""What was saved goes back into the program's own objects; what does not fit is named, and then nothing is changed."""

from __future__ import annotations

import copy
import gc
import random
import warnings
from collections import OrderedDict, namedtuple
from collections.abc import Iterator
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from hetstream import CheckpointReader, FlashCheckpointer
from hetstream.checkpoint.errors import StateMismatch, UnsupportedState
from hetstream.checkpoint.flash import rng
from hetstream.checkpoint.flash.state_comparison import StateComparison
from hetstream.checkpoint.record.tree import PlainObject
from hetstream.checkpoint.tensors.leaves import Flattener
from tests.checkpoint.test_tensors import pack


def restore(state: dict[str, Any], saved: dict[str, Any], *, strict: bool = True) -> list[str]:
    """Save one state, restore it into the other."""
    _, part = pack(saved)
    comparison = StateComparison()
    alike = comparison.take_alike(state, Flattener(allow_pickle=True).flatten(state), part)
    comparison.compare(state, part.saved(without=alike), alike)
    mismatch = comparison.mismatch()
    if mismatch and strict:
        raise mismatch
    comparison.write()
    return comparison.differences


def differences(state: dict[str, Any], saved: dict[str, Any]) -> str:
    before = copy.deepcopy(state)
    with pytest.raises(StateMismatch) as caught:
        restore(state, saved)
    assert _equal(_states(state), _states(before)), "something was changed"
    return str(caught.value)


def _states(value: Any) -> Any:
    if callable(getattr(value, "state_dict", None)):
        return _states(value.state_dict())
    if isinstance(value, dict):
        return {key: _states(one) for key, one in value.items()}
    return [_states(one) for one in value] if isinstance(value, list | tuple) else value


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other)


def network() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.LazyLinear(2))


def trained(make: Any, scheduler: Any = None, num_steps: int = 3) -> dict[str, Any]:
    """A small training after some steps."""
    torch.manual_seed(random.randrange(10**6))
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    optimizer = make(model.parameters())
    plan = scheduler(optimizer) if scheduler else None
    state = {"model": model, "optimizer": optimizer, **({"scheduler": plan} if plan else {})}
    for _ in range(num_steps):
        train(state)
    return state


def train(state: dict[str, Any]) -> None:
    optimizer = state["optimizer"]

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = state["model"](torch.linspace(-1, 1, 32).view(8, 4)).pow(2).mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    if "scheduler" in state:
        plan = state["scheduler"]
        plan.step(*[1.0] * isinstance(plan, torch.optim.lr_scheduler.ReduceLROnPlateau))


OPTIMIZERS = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and name not in ("Optimizer", "SparseAdam")
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_of_torch_goes_on_as_it_would_have(name: str) -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        # Muon is for matrices alone.
        chosen = [one for one in parameters if one.ndim == 2] if name == "Muon" else parameters
        return OPTIMIZERS[name](chosen, lr=0.01)

    saved = trained(make)
    fresh = trained(make, num_steps=0)
    assert restore(fresh, saved) == []
    for _ in range(3):
        train(saved)
        train(fresh)
    assert _equal(_states(fresh), _states(saved))


def _schedulers() -> dict[str, Any]:
    kinds = torch.optim.lr_scheduler
    return {
        "Lambda": lambda o: kinds.LambdaLR(o, lambda epoch: 0.9**epoch),
        "Step": lambda o: kinds.StepLR(o, 2),
        "MultiStep": lambda o: kinds.MultiStepLR(o, [1, 2, 2, 4]),
        "Constant": kinds.ConstantLR,
        "Linear": kinds.LinearLR,
        "Exponential": lambda o: kinds.ExponentialLR(o, 0.9),
        "Polynomial": kinds.PolynomialLR,
        "Cosine": lambda o: kinds.CosineAnnealingLR(o, 10),
        "WarmRestarts": lambda o: kinds.CosineAnnealingWarmRestarts(o, 2),
        "Cyclic": lambda o: kinds.CyclicLR(o, 0.01, 0.1),
        "OneCycle": lambda o: kinds.OneCycleLR(o, 0.1, 20),
        "Plateau": lambda o: kinds.ReduceLROnPlateau(o, patience=1),
        "Sequential": lambda o: kinds.SequentialLR(o, [kinds.ConstantLR(o), kinds.StepLR(o, 1)], [2]),
        "Chained": lambda o: kinds.ChainedScheduler([kinds.ConstantLR(o), kinds.StepLR(o, 1)]),
    }


@pytest.mark.filterwarnings("ignore:The epoch parameter")  # of SequentialLR in older releases of torch
@pytest.mark.parametrize("name", _schedulers())
def test_every_scheduler_of_torch_goes_on_as_it_would_have(name: str) -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    saved = trained(make, _schedulers()[name])
    fresh = trained(make, _schedulers()[name], num_steps=0)
    assert restore(fresh, saved) == []
    for _ in range(3):
        train(saved)
        train(fresh)
    assert _equal(_states(fresh), _states(saved))


@pytest.mark.shows("what is restored or loaded is copied out of shared memory; there is no zero-copy")
def test_tensors_keep_their_identity_and_never_alias_what_was_saved() -> None:
    saved = trained(torch.optim.Adam)
    _, part = pack(saved)
    fresh = trained(torch.optim.Adam, num_steps=0)
    addresses = [one.data_ptr() for one in fresh["model"].state_dict().values()]
    comparison = StateComparison()
    stored = part.saved()
    comparison.compare(fresh, stored)
    comparison.write()
    assert [one.data_ptr() for one in fresh["model"].state_dict().values()] == addresses
    moments = [one for state in fresh["optimizer"].state.values() for one in state.values()]
    shared = {one.view.untyped_storage().data_ptr() for one in _stored(stored)}
    assert len(moments) == 3 * 6
    assert not shared & {one.untyped_storage().data_ptr() for one in moments}
    assert not shared & {one.untyped_storage().data_ptr() for one in _tensors(part.load())}


def _stored(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [one for item in value.values() for one in _stored(item)]
    if isinstance(value, list | tuple):
        return [one for item in value for one in _stored(item)]
    return [value] if hasattr(value, "view") and hasattr(value, "ref") else []


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, dict):
        return [one for item in value.values() for one in _tensors(item)]
    if isinstance(value, list | tuple):
        return [one for item in value for one in _tensors(item)]
    return [value] if isinstance(value, torch.Tensor) else []


@dataclass
class Progress:
    epoch: int
    best: torch.Tensor
    history: list[float] = field(default_factory=list)


def test_plain_trees_are_filled_in_place() -> None:
    here = {
        "epoch": 0,
        "ema": {"w": torch.zeros(3), "b": None},
        "list": [torch.zeros(2), 1],
        "pair": (torch.zeros(1), "a"),
        "notes": {},
        "seen": [],
        "progress": Progress(0, torch.zeros(1)),
        "array": np.zeros(3),
        "plain": {"old": 1, "same": 2},
    }
    saved = {
        "epoch": 4,
        "ema": {"w": torch.rand(3), "b": torch.rand(1)},
        "list": [torch.rand(2), 2],
        "pair": (torch.rand(1), "b"),
        "notes": {"loss": 0.5},
        "seen": [1, 2, torch.rand(1)],
        "progress": Progress(4, torch.rand(1), [0.1, 0.2]),
        "array": np.arange(3.0),
        "plain": {"same": 3, "new": 4},
    }

    def objects() -> list[Any]:
        names = ("ema", "list", "progress", "array", "plain")
        return [*map(here.get, names), here["ema"]["w"], here["list"][0], here["pair"][0]]

    kept = objects()
    restore(here, saved)
    assert all(one is other for one, other in zip(kept, objects(), strict=True))
    assert here["progress"].history == [0.1, 0.2]
    assert torch.equal(here["progress"].best, saved["progress"].best)
    assert here["pair"][1] == "b"
    del here["progress"], saved["progress"]
    assert _equal(_states(here), _states(saved))


def test_what_is_equal_but_for_values_is_compared_at_once() -> None:
    def state(value: float, **others: Any) -> dict[str, Any]:
        return {"a": torch.full((3,), value), "tree": {"b": [torch.full((2, 2), value)], "rate": 0.5}, **others}

    def alike(mine: dict[str, Any], saved: dict[str, Any]) -> set[str]:
        return StateComparison().take_alike(mine, Flattener().flatten(mine), pack(saved)[1])

    mine, saved = state(0.0, step=1), state(7.0, step=2)
    assert alike(mine, saved) == {"a", "tree"}
    tensors = mine["a"], mine["tree"]["b"][0]
    restore(mine, saved)
    assert mine["step"] == 2
    assert mine["a"] is tensors[0]
    assert mine["tree"]["b"][0] is tensors[1]
    assert all(bool((tensor == 7).all()) for tensor in tensors)
    # Numbers that are equal to Python and not the same, other forms, and what only looks alike.
    assert alike({"x": 1}, {"x": 1.0}) == alike({"x": 0.0}, {"x": -0.0}) == set()
    assert alike({"w": torch.zeros(3)}, {"w": torch.zeros(4)}) == set()
    assert alike({"w": torch.zeros(3)}, {"w": torch.zeros(3, dtype=torch.int32)}) == set()
    assert alike({"w": torch.zeros(2, 3)}, {"w": torch.zeros(3, 2).t()}) == set()
    assert alike({"w": np.zeros(9999)}, {"w": np.zeros(9999)}) == set()
    assert alike({"w": np.zeros(9999)}, {"w": torch.zeros(9999, dtype=torch.float64)}) == set()
    assert alike({"model": nn.Linear(2, 2)}, {"model": nn.Linear(2, 2)}) == set()


def test_every_difference_is_named_and_nothing_is_changed() -> None:
    saved = {
        "model": nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)),
        "ema": {"a": torch.rand(2), "b": torch.rand(2), "c": torch.rand(2)},
        "epoch": 3,
        "gone": torch.rand(1),
    }
    here = {
        "model": nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2, bias=False), nn.BatchNorm1d(2)),
        "ema": {"a": torch.rand(2, 2), "b": torch.rand(2).double(), "d": torch.rand(2)},
        "epoch": torch.tensor(3),
        "new": {"x": 1},
    }
    text = differences(here, saved)
    for part in (
        "model.2.weight: missing in the checkpoint",
        "model.1.bias: unexpected, only in the checkpoint",
        "model.0.weight: shape (4, 3) in the checkpoint, (5, 3) here",
        "ema.a: shape (2,) in the checkpoint, (2, 2) here",
        "ema.b: dtype torch.float32 in the checkpoint, torch.float64 here",
        "ema.c: unexpected",
        "ema.d: missing",
        "gone: unexpected",
        "new: missing",
        "epoch: a int in the checkpoint, a tensor",
        "Nothing was restored",
    ):
        assert part in text


def test_an_optimizer_for_other_parameters_is_refused() -> None:
    saved = trained(torch.optim.Adam)
    here = {"model": saved["model"], "optimizer": torch.optim.Adam(saved["model"][0].parameters())}
    assert "optimizer.param_groups: of [6] parameters in the checkpoint, of [2] here" in differences(here, saved)


class Stubborn:
    """A state of its own that refuses what it is given."""

    def __init__(self, value: int, refuses: bool = False) -> None:
        self.value, self.refuses = value, refuses

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if self.refuses and state["value"] != self.value:
            raise ValueError("not mine")
        self.value = state["value"]


def test_an_object_that_refuses_its_state_leaves_all_others_as_they_were() -> None:
    saved = {"a": Stubborn(1), "b": Stubborn(2), **trained(torch.optim.Adam)}
    here = {"a": Stubborn(3), "b": Stubborn(4, refuses=True), **trained(torch.optim.Adam)}
    assert "b refused its state: not mine" in differences(here, saved)


def test_what_fits_is_restored_without_strict() -> None:
    saved = {"w": torch.ones(2), "old": torch.ones(1), "epoch": 3}
    here = {"w": torch.zeros(2), "new": torch.zeros(1), "epoch": 0}
    assert len(restore(here, saved, strict=False)) == 2
    assert here["w"].sum() == 2
    assert here["epoch"] == 3
    assert here["new"].sum() == 0
    narrow = {"w": torch.zeros(3), "epoch": 0}
    assert len(restore(narrow, {"w": torch.ones(2), "epoch": 3}, strict=False)) == 1
    assert (narrow["w"].sum(), narrow["epoch"]) == (0, 3)


class Scaled(nn.Module):
    """A module with a state besides its tensors, and with hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.scale = 1.0
        self.loaded = 0
        self.register_load_state_dict_post_hook(lambda module, keys: setattr(module, "loaded", module.loaded + 1))

    def get_extra_state(self) -> dict[str, float]:
        return {"scale": self.scale}

    def set_extra_state(self, state: dict[str, float]) -> None:
        self.scale = state["scale"]


def test_modules_with_hooks_and_extra_state_are_loaded_by_their_own_method() -> None:
    saved, here = Scaled(), Scaled()
    saved.scale = 3.0
    restore({"model": here}, {"model": saved})
    assert (here.scale, here.loaded) == (3.0, 1)
    assert torch.equal(here.linear.weight, saved.linear.weight)


def test_lazy_modules_are_filled() -> None:
    saved, here = network(), network()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # lazy modules are new, says torch
        saved(torch.rand(2, 3, 8, 8))
    restore({"model": here}, {"model": saved})
    assert torch.equal(here[3].weight, saved[3].weight)


def test_expanded_and_overlapping_tensors_are_written_to_where_they_lie() -> None:
    base = torch.zeros(6)
    here = {
        "row": torch.zeros(1, 3).expand(4, 3),
        "a": base[:4],
        "b": base[2:],
        "conj": torch.zeros(2, dtype=torch.complex64).conj(),
    }
    source = torch.arange(6.0)
    saved = {
        "row": torch.rand(1, 3).expand(4, 3),
        "a": source[:4],
        "b": source[2:],
        "conj": torch.rand(2, dtype=torch.complex64),
    }
    restore(here, saved)
    assert torch.equal(base, source)
    assert torch.equal(here["row"], saved["row"])
    assert torch.equal(here["conj"], saved["conj"])


def test_generators_go_on_as_they_would_have() -> None:
    def draw() -> list[Any]:
        numbers = [random.random(), random.gauss(0, 1), np.random.rand(), np.random.normal(), torch.rand(2).tolist()]
        return [*numbers, torch.randn(17).tolist()]

    random.gauss(0, 1)
    np.random.normal()
    before = rng.Generators().capture()
    _, part = pack({"rng": before})
    expected = draw()
    draw()
    assert rng.restore(part.load()["rng"]) == []
    assert draw() == expected


@pytest.mark.parametrize("key", ["python", "numpy", "torch"])
def test_damaged_generators_are_refused_and_none_is_set(key: str) -> None:
    state = rng.Generators().capture()
    torch.rand(1)
    random.random()
    now = (random.getstate(), torch.get_rng_state())
    state[key] = {"keys": 3} if key != "torch" else torch.zeros(3, dtype=torch.uint8)
    with pytest.raises(StateMismatch):
        rng.restore(state)
    assert random.getstate() == now[0]
    assert torch.equal(torch.get_rng_state(), now[1])


class Wrapped(nn.Module):
    """As DistributedDataParallel and torch.compile wrap."""

    def __init__(self, word: str) -> None:
        super().__init__()
        self.add_module(word, nn.Sequential(nn.Linear(2, 2)))

    @property
    def within(self) -> nn.Module:
        return next(self.children())


@pytest.mark.parametrize(("word", "wrapper"), [("module", "DistributedDataParallel"), ("_orig_mod", "torch.compile")])
def test_a_model_that_was_wrapped_on_one_side_alone_is_told_so(word: str, wrapper: str) -> None:
    wrapped = Wrapped(word)
    for here, saved, match in (
        (wrapped.within, wrapped, rf"saved within {wrapper}: wrap it here too .*\(model\.{word}\)"),
        (wrapped, wrapped.within, rf"within {wrapper} here, and was saved without: .*\(model\.{word}\)"),
    ):
        comparison = StateComparison()
        comparison.compare({"model": here}, pack({"model": saved})[1].saved())
        with pytest.raises(StateMismatch, match=match):
            raise comparison.mismatch() or AssertionError("it fits")
    comparison = StateComparison()
    comparison.compare({"model": nn.Linear(2, 2)}, pack({"model": nn.Linear(2, 2, bias=False)})[1].saved())
    assert "within" not in str(comparison.mismatch())


Point = namedtuple("Point", "x y")


@dataclass
class Place:
    """Where a program has read."""

    row: int


@dataclass
class Counted:
    """With a field that is called as a method of text is."""

    count: int


@dataclass
class Opens:
    """Has in its state what no checkpoint can hold, once it has got one."""

    opened: Any

    def state_dict(self) -> dict[str, Any]:
        return {"opened": self.opened and random.Random(1)}

    def load_state_dict(self, state: PlainObject) -> None:
        self.opened = state


def test_a_restore_whose_result_cannot_be_saved_is_a_restore_and_the_save_says_so(
    make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with make() as checkpointer:
        checkpointer.save(1, {"weight": torch.ones(3), "place": Place(7)})
    state: dict[str, Any] = {"weight": torch.zeros(3), "place": Opens(None)}
    with make() as checkpointer:
        assert checkpointer.restore(state) == 1
        assert (state["weight"].tolist(), state["place"].opened.row) == ([1, 1, 1], 7)
        assert "what was restored cannot be saved: place.opened is a random.Random" in caplog.text
        with pytest.raises(UnsupportedState, match=r"place\.opened is a"):
            checkpointer.save(2, state)


@dataclass
class Command:
    """A program's own callback."""

    words: list[str]
    ran: ClassVar[list[Any]] = []

    def __call__(self, *_: Any) -> str:
        self.ran.append(self.words)
        return "x"

    def __del__(self) -> None:
        self.ran.append(self.words)


class Holder:
    """An object whose state has an object of the program's class in one place, and copies all that it gets."""

    def __init__(self, **state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = copy.deepcopy(state)


@pytest.mark.shows("nothing that another user's checkpoint holds is called")
def test_a_checkpoint_makes_objects_only_of_the_classes_that_the_state_has_in_their_place(tmp_path: Path) -> None:
    kept, strange = Place(1), [Place(2), Point(3, 4), {"deep": Place(5)}]
    saved = {"top": Place(6), "rows": [Place(7), Place(8)], "object": Holder(own=kept, other=strange, more=[Place(9)])}
    with FlashCheckpointer(tmp_path / "ck") as checkpointer:
        checkpointer.save(1, saved)
    state: dict[str, Any] = {
        "top": Place(0),
        "rows": [Place(0)],
        "object": Holder(own=Place(0), other=[0, Point(0, 0), {}], more=[]),
    }
    assert CheckpointReader(tmp_path / "ck").restore(state) == 1
    assert (state["top"], state["rows"]) == (Place(6), [Place(7), Place(8)])
    found = state["object"].state
    assert (type(found["own"]), found["own"].row) == (Place, 1)
    assert [type(item) for item in found["other"]] == [PlainObject, Point, dict]
    assert [type(item) for item in (found["other"][2]["deep"], found["more"][0])] == [PlainObject, PlainObject]
    assert found["other"] == strange


@pytest.mark.shows("nothing that another user's checkpoint holds is called")
@pytest.mark.parametrize("field", ["deepcopy", "get_lr", "index"])
@pytest.mark.parametrize("as_pair", [False, True])
def test_nothing_of_a_checkpoint_is_called(tmp_path: Path, field: str, as_pair: bool) -> None:
    kind = namedtuple("Trap", [field]) if as_pair else make_dataclass("Trap", [field])
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    planted = optimizer.state_dict()
    planted["param_groups"][0]["foreach"] = kind(Command(["id"]))
    planted["param_groups"][0]["maximize"] = Command(["ls"])
    state = {"model": model, "optimizer": Holder(**planted), "plain": {"x": [kind(Command(["ps"]))]}}
    with FlashCheckpointer(tmp_path / "ck") as checkpointer:
        checkpointer.save(1, state)
    del planted, state
    gc.collect()
    Command.ran.clear()
    reader = CheckpointReader(tmp_path / "ck")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    here: dict[str, Any] = {"model": model, "optimizer": optimizer, "plain": {"x": [Point(1, 2)]}}
    assert reader.restore(here) == 1
    loaded = reader.load()
    copy.deepcopy((here["plain"], loaded.state, optimizer.state_dict()))
    for found in _all_in((here["plain"], loaded.state, optimizer.state_dict())):
        assert type(found) is not Command
        assert not callable(found)
    del here, loaded, optimizer
    gc.collect()
    assert Command.ran == []


def _all_in(value: Any) -> Iterator[Any]:
    yield value
    inner = (
        vars(value).values() if isinstance(value, PlainObject) else value.values() if isinstance(value, dict) else ()
    )
    for item in value if isinstance(value, list | tuple) else inner:
        yield from _all_in(item)


def test_what_a_value_can_do_is_no_field_of_a_dataclass(tmp_path: Path) -> None:
    with FlashCheckpointer(tmp_path / "ck") as checkpointer:
        checkpointer.save(1, {"counted": "text"})
    state = {"counted": Counted(3)}
    with pytest.raises(StateMismatch, match="counted: a str in the checkpoint has no count"):
        CheckpointReader(tmp_path / "ck").restore(state)
    assert state["counted"].count == 3


@dataclass(frozen=True)
class Cell:
    shard: int
    row: int


@dataclass(frozen=True)
class OtherCell:
    shard: int
    row: int


class Span(NamedTuple):
    begin: int
    end: int


def test_items_of_sets_and_keys_of_mappings_are_of_the_programs_classes() -> None:
    def state(last: int) -> dict[str, Any]:
        return {
            "set": {Cell(0, last), Cell(1, 2)},
            "spans": {Span(0, last), (3, last)},
            "within": [frozenset({(Cell(0, 1), last), (Cell(0, 2), last)})],
            "keys": {Cell(0, last): 1, Cell(5, 6): 2},
            "below": {"keys": OrderedDict({Span(0, last): 1})},
        }

    mine, wanted = state(0), state(9)
    held = mine["set"]
    restore(mine, state(9))
    assert mine == wanted
    assert mine["set"] is held
    assert {type(item) for item in mine["set"]} == {Cell}
    assert {type(item) for item in mine["spans"]} == {Span, tuple}
    assert {type(item) for pair in mine["within"][0] for item in pair} == {Cell, int}
    assert {type(key) for key in mine["keys"]} == {Cell}
    assert {type(key) for key in mine["below"]["keys"]} == {Span}


def test_an_item_that_could_be_of_two_classes_is_plain_data() -> None:
    mine: dict[str, Any] = {"set": {Cell(0, 1), OtherCell(0, 2)}}
    restore(mine, {"set": {Cell(0, 3)}})
    assert {type(item) for item in mine["set"]} == {PlainObject}
    assert mine["set"] == {Cell(0, 3)}
