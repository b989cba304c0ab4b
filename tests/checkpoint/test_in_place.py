"""A restore gives a program its own objects back, with what was saved in them: the names that it holds them by stay
true, and an object that knows its own state is asked."""

from __future__ import annotations

import collections
import copy
import dataclasses
import io
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.ao.quantization import PerChannelMinMaxObserver

from hetstream import FlashCheckpointer
from hetstream.errors import DirectoryNotWritable, OptionsError, StateMismatch, UnsupportedState

Make = Callable[..., FlashCheckpointer]


def saved_and_restored(make: Make, saved: dict[str, Any], fresh: dict[str, Any]) -> dict[str, Any]:
    """What a program has after a restart that makes `fresh`."""
    with make() as checkpointer:
        step = max(checkpointer.all_steps(), default=0) + 1
        assert checkpointer.save(step, saved)
    with make() as checkpointer:
        assert checkpointer.restore(fresh) == step
    return fresh


CONTAINERS: dict[str, tuple[Any, Any]] = {
    "list": ([], [1, {"a": 2}]),
    "longer list": ([0, 0, 0], [1, 2]),
    "list of lists": ([[]], [[1], [2]]),
    "list that was a tuple": ([], (1, 2)),
    "dict": ({}, {"b": 1, "a": [2]}),
    "dict of tensors": ({}, {"ema": torch.ones(2)}),
    "other keys": ({"x": 1}, {"a": 1}),
    "other order": ({"a": 0, "b": 0}, {"b": 1, "a": 2}),
    "ordered": (collections.OrderedDict(a=0, b=0), collections.OrderedDict(b=1, a=2)),
    "counts": (collections.Counter(), collections.Counter(a=3)),
    "default": (collections.defaultdict(list), collections.defaultdict(list, a=[1])),
    "set": (set(), {1, 2}),
    "fuller set": ({3}, {1}),
    "deque": (collections.deque(maxlen=3), collections.deque([1, 2], maxlen=3)),
    "bytes": (bytearray(b"x"), bytearray(b"abc")),
}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_a_container_that_the_program_holds_by_a_name_is_filled(kind: str, make: Make) -> None:
    held, saved = CONTAINERS[kind]
    state = saved_and_restored(make, {"w": torch.ones(1), "held": saved}, {"w": torch.zeros(1), "held": held})
    assert state["held"] is held
    if isinstance(saved, dict):
        assert [*held] == [*saved]
    wanted = list(saved) if kind == "list that was a tuple" else saved
    assert repr(held) == repr(wanted)
    assert state["w"] == 1


def test_containers_within_tuples_and_dataclasses_are_filled_too(make: Make) -> None:
    @dataclasses.dataclass
    class Log:
        losses: list[float]

    losses: list[float] = []
    seen: set[int] = set()
    fresh = {"log": Log(losses), "pair": (seen, 0)}
    state = saved_and_restored(make, {"log": Log([0.5]), "pair": ({1}, 7)}, fresh)
    assert state["log"].losses is losses
    assert losses == [0.5]
    assert state["pair"][0] is seen
    assert state["pair"] == ({1}, 7)


def test_what_is_in_a_deque_is_filled_too(make: Make) -> None:
    """Objects and tensors; where there are as many as there were."""
    weight, layer = torch.zeros(2), nn.Linear(1, 1)
    former = nn.Linear(1, 1)
    saved = {"recent": collections.deque([torch.ones(2), former], maxlen=3), "n": [1]}
    fresh: dict[str, Any] = {"recent": collections.deque([weight, layer], maxlen=3), "n": []}
    state = saved_and_restored(make, saved, fresh)
    assert state["recent"][0] is weight
    assert state["recent"][1] is layer
    assert weight.tolist() == [1, 1]
    assert torch.equal(layer.weight, former.weight)
    with pytest.raises(StateMismatch, match="recent: 2 item"):
        saved_and_restored(make, saved, {"recent": collections.deque([layer]), "n": []})
    more = saved_and_restored(
        make, {"recent": collections.deque([weight] * 2)}, {"recent": collections.deque([torch.zeros(2)])}
    )
    assert len(more["recent"]) == 2


def test_a_sparse_tensor_gets_as_many_values_as_were_saved(make: Make) -> None:
    for wants_gradient in (False, True):
        held = torch.zeros(2, 2).to_sparse().requires_grad_(wants_gradient)
        saved_and_restored(make, {"it": torch.eye(2).to_sparse()}, {"it": held})
        assert torch.equal(held.detach().to_dense(), torch.eye(2))


class Losses(list[float]):
    best = 0.0


class Table(dict[str, float]):
    best = 0.0


def test_what_a_container_of_the_programs_own_has_beside_its_items_comes_back(make: Make) -> None:
    pairs: list[tuple[Any, Any]] = [(Losses([1.0]), Losses()), (Table(a=1.0), Table())]
    for saved, fresh in pairs:
        saved.best = 3.0
        with make(allow_pickle=True) as checkpointer:
            step = max(checkpointer.all_steps(), default=0) + 1
            assert checkpointer.save(step, {"it": saved, "w": torch.ones(1)})
        with make(allow_pickle=True) as checkpointer:
            assert checkpointer.restore({"it": fresh, "w": torch.zeros(1)}) == step
        assert (fresh, fresh.best) == (saved, 3.0)


def test_a_container_of_another_kind_is_refused(make: Make) -> None:
    held: list[int] = []
    with pytest.raises(StateMismatch, match="held: a dict in the checkpoint, a list here"):
        saved_and_restored(make, {"w": torch.ones(1), "held": {"a": 1}}, {"w": torch.zeros(1), "held": held})
    assert held == []


def test_what_a_program_has_set_on_a_dataclass_comes_back(make: Make) -> None:
    @dataclasses.dataclass
    class Config:
        rate: float = 1.0

    saved, fresh = Config(2.0), Config()
    saved.extra = [7]  # type: ignore[attr-defined]
    state = saved_and_restored(make, {"config": saved}, {"config": fresh})
    assert state["config"] is fresh
    assert vars(fresh) == {"rate": 2.0, "extra": [7]}


class Masters(torch.optim.Optimizer):
    """The usual recipe for bfloat16: weights and moments in float32, a count in int64, nested."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state.update(master=parameter.float().clone(), more={"m": torch.zeros_like(parameter).float()})
                    state.update(large=torch.full((), 2**53 + 1), small=torch.zeros_like(parameter, dtype=torch.int8))
                state["more"]["m"].mul_(0.9).add_(parameter.grad.float(), alpha=0.1)
                state["master"].sub_(state["more"]["m"], alpha=group["lr"])
                state["large"] += 1
                parameter.copy_(state["master"])


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "masters": Masters,
    "NAdam": lambda parameters: torch.optim.NAdam(parameters, lr=0.01),
    "ASGD": lambda parameters: torch.optim.ASGD(parameters, lr=0.05, t0=1),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("has_state", [False, True])
def test_an_optimizers_state_keeps_its_dtypes(name: str, dtype: torch.dtype, has_state: bool, make: Make) -> None:
    """A run that is resumed after three of six steps is the run that was not."""

    def begin() -> dict[str, Any]:
        torch.manual_seed(0)
        model = nn.Linear(4, 2).to(dtype)
        return {"model": model, "optimizer": OPTIMIZERS[name](model.parameters())}

    def train(state: dict[str, Any], steps: range) -> None:
        for step in steps:
            batch = torch.randn(3, 4, generator=torch.Generator().manual_seed(step)).to(dtype)
            state["optimizer"].zero_grad()
            state["model"](batch).square().sum().backward()
            state["optimizer"].step()

    def content(state: dict[str, Any]) -> list[Any]:
        values = torch.utils._pytree.tree_leaves([each.state_dict() for each in state.values()])
        return [
            (value.dtype, value.reshape(-1).view(torch.uint8).tolist()) if torch.is_tensor(value) else value
            for value in values
        ]

    whole, half, resumed = begin(), begin(), begin()
    train(whole, range(6))
    train(half, range(3))
    if has_state:
        train(resumed, range(10, 11))
    saved_and_restored(make, half, resumed)
    assert content(resumed) == content(half)
    train(resumed, range(3, 6))
    assert content(resumed) == content(whole)


class Keeps(torch.optim.Optimizer):
    """One that keeps what it is given for each parameter."""

    def __init__(self, value: Any = None) -> None:
        super().__init__([nn.Parameter(torch.zeros(2, dtype=torch.bfloat16)) for _ in range(2)], {"lr": 0.1})
        for number, parameter in enumerate(self.param_groups[0]["params"]):
            if value is not None:
                self.state[parameter]["it"] = value(number)


THIRD = torch.tensor([1 / 3, 2 / 3])
KEPT: dict[str, Callable[[int], Any]] = {
    "text": lambda number: f"phase {number}",
    "bytes": lambda _: b"abc",
    "deque": lambda number: collections.deque([THIRD + number], maxlen=4),
    "ordered": lambda number: collections.OrderedDict(b=THIRD, a=number),
    "counts": lambda number: collections.Counter(a=number),
    "default": lambda _: collections.defaultdict(float, a=1.0),
    "range": range,
    "array": lambda number: np.arange(3.0) + number,
    "set": lambda number: {number},
    "size": lambda number: torch.Size([number]),
    "nested": lambda number: [(THIRD, {"text": "a"}), {"x": THIRD + number}],
}


@pytest.mark.parametrize("name", KEPT)
def test_an_optimizers_state_keeps_its_types(name: str, make: Make) -> None:
    """torch's `load_state_dict` calls the type of whatever it can iterate over."""
    saved, fresh = Keeps(KEPT[name]), Keeps()
    saved_and_restored(make, {"it": saved}, {"it": fresh})
    assert repr([*fresh.state.values()]) == repr([*saved.state.values()])


def test_an_optimizer_that_has_renamed_its_parameters_is_not_put_back(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    saved, fresh = Keeps(lambda number: THIRD + number), Keeps()
    fresh.register_load_state_dict_pre_hook(
        lambda _, state: {**state, "state": {0: state["state"][1], 1: state["state"][0]}}
    )
    with caplog.at_level(logging.WARNING):
        saved_and_restored(make, {"it": saved}, {"it": fresh})
    assert [values["it"].tolist() for values in fresh.state.values()] == [
        (THIRD + number).bfloat16().tolist() for number in (1, 0)
    ]
    assert "it.state.0.it was saved as torch.float32, and its object has made torch.bfloat16 of it" in caplog.text


@pytest.mark.parametrize("has_groups", [False, True])
def test_an_optimizer_around_another_has_a_state_of_its_own_form(has_groups: bool, make: Make) -> None:
    class Around(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self.inner, self.scale = inner, 1.0
            self.defaults, self.param_groups = inner.defaults, inner.param_groups

        def state_dict(self) -> dict[str, Any]:
            groups = {"param_groups": self.inner.state_dict()["param_groups"]} if has_groups else {}
            return {"inner": self.inner.state_dict(), "scale": self.scale, **groups}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.inner.load_state_dict(state["inner"])
            self.scale = state["scale"]

    saved, fresh = Around(Keeps(lambda _: THIRD)), Around(Keeps())
    saved.scale = 4.0
    saved_and_restored(make, {"it": saved}, {"it": fresh})
    assert fresh.scale == 4
    assert [values["it"].tolist() for values in fresh.inner.state.values()] == [THIRD.tolist()] * 2


def test_an_object_with_an_optimizer_within_keeps_its_dtypes_too(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    class Container:
        def __init__(self, is_copied: bool) -> None:
            self.optimizer = Masters(nn.Linear(2, 2).bfloat16().parameters())
            self.is_copied = is_copied

        def state_dict(self) -> dict[str, Any]:
            state = self.optimizer.state_dict()
            return copy.deepcopy(state) if self.is_copied else state

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.optimizer.load_state_dict(state)

    for is_copied in (False, True):
        saved, fresh = Container(is_copied), Container(is_copied)
        for parameter in saved.optimizer.param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter)
        saved.optimizer.step()
        with caplog.at_level(logging.WARNING):
            saved_and_restored(make, {"it": saved}, {"it": fresh})
        dtypes = [value["master"].dtype for value in fresh.optimizer.state.values()]
        assert dtypes == [torch.bfloat16 if is_copied else torch.float32] * 2
    assert "it.state.0.master was saved as torch.float32, and its object has made torch.bfloat16 of it" in caplog.text


def test_parameters_in_another_order_get_their_own_moments(make: Make) -> None:
    def state(names: list[str]) -> dict[str, Any]:
        model = nn.ParameterDict({"a": nn.Parameter(torch.ones(2)), "b": nn.Parameter(torch.ones(2))})
        optimizer = torch.optim.SGD([(name, model[name]) for name in names], lr=0.1, momentum=0.9)
        (model["a"].sum() * 10 + model["b"].sum()).backward()
        optimizer.step()
        return {"model": model, "optimizer": optimizer}

    fresh = state(["b", "a"])
    for parameter in fresh["optimizer"].state.values():
        parameter["momentum_buffer"].zero_()
    restored = saved_and_restored(make, state(["a", "b"]), fresh)
    moments = {name: restored["optimizer"].state[one]["momentum_buffer"][0] for name, one in fresh["model"].items()}
    assert moments == {"a": 10, "b": 1}


def tied(value: float, *, is_tied: bool) -> dict[str, Any]:
    embedding, head = nn.Embedding(4, 2), nn.Linear(2, 4, bias=False)
    nn.init.constant_(embedding.weight, value)
    nn.init.constant_(head.weight, 2 * value)
    if is_tied:
        head.weight = embedding.weight
    return {"model": nn.Sequential(embedding, head)}


def test_two_tensors_do_not_come_into_one_memory(make: Make) -> None:
    fresh = tied(5.0, is_tied=True)
    with pytest.raises(StateMismatch, match="shares its memory here, and was another tensor in the checkpoint"):
        saved_and_restored(make, tied(1.0, is_tied=False), fresh)
    assert fresh["model"][0].weight.unique().tolist() == [5]


def test_one_memory_comes_into_two_tensors(make: Make) -> None:
    state = saved_and_restored(make, tied(1.0, is_tied=True), tied(5.0, is_tied=False))
    assert [part.weight.unique().tolist() for part in state["model"]] == [[1], [1]]


class Scaled(nn.Module):
    """As libraries for eight bits do: extra state that grows, as bytes in a tensor, in a file or in a dict."""

    def __init__(self, how: str, num_scales: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), float(num_scales)))
        self._how, self.scales = how, {f"amax{number}": float(number) for number in range(num_scales)}

    def get_extra_state(self) -> Any:
        if self._how == "dict":
            return self.scales
        file = io.BytesIO()
        torch.save(self.scales, file)
        return file if self._how == "file" else torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        if self._how != "dict":
            file = state if self._how == "file" else io.BytesIO(bytes(state.tolist()))
            file.seek(0)
            state = torch.load(file)
        self.scales = state


@pytest.mark.parametrize("how", ["tensor", "file", "dict"])
def test_extra_state_of_another_size_is_the_modules_own_matter(how: str, make: Make) -> None:
    state = saved_and_restored(
        make, {"model": nn.Sequential(Scaled(how, 50))}, {"model": nn.Sequential(Scaled(how, 0))}
    )
    assert len(state["model"][0].scales) == 50
    assert state["model"][0].weight.tolist() == [50, 50]


def test_an_observer_takes_the_size_that_it_had(make: Make) -> None:
    saved, fresh = PerChannelMinMaxObserver(), PerChannelMinMaxObserver()
    saved(torch.randn(4, 8))
    saved_and_restored(make, {"observer": saved, "net": nn.Linear(2, 2)}, {"observer": fresh, "net": nn.Linear(2, 2)})
    assert torch.equal(fresh.min_val, saved.min_val)


class Late(nn.Module):
    """Makes a buffer in its first forward pass, and where it loads one."""

    offset: torch.Tensor | None

    def __init__(self, offset: torch.Tensor | None = None) -> None:
        super().__init__()
        self.register_buffer("offset", offset)

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        if self.offset is None and f"{prefix}offset" in state:
            self.offset = torch.zeros_like(state[f"{prefix}offset"])
        super()._load_from_state_dict(state, prefix, *rest)


def renaming(model: nn.Module) -> nn.Module:
    def rename(_: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
        for key in [key for key in state if key.startswith(f"{prefix}old.")]:
            state[key.replace("old.", "new.", 1)] = state.pop(key)

    model.register_load_state_dict_pre_hook(rename)  # type: ignore[no-untyped-call]
    return model


def test_a_module_that_makes_or_renames_what_it_loads_is_asked(make: Make) -> None:
    late = Late()
    saved_and_restored(make, {"model": nn.Sequential(Late(torch.ones(3)))}, {"model": nn.Sequential(late)})
    assert late.offset is not None
    assert late.offset.tolist() == [1, 1, 1]
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    old, new = nn.ModuleDict({"old": one}), nn.ModuleDict({"new": other})
    before = copy.deepcopy(new)
    with pytest.raises(StateMismatch, match=r"model\.new\.weight: missing"):
        saved_and_restored(make, {"model": old}, {"model": new})
    saved_and_restored(make, {"model": old}, {"model": renaming(new)})
    assert torch.equal(other.weight, one.weight)
    with pytest.raises(StateMismatch, match="model refused its state"):
        saved_and_restored(make, {"model": nn.ModuleDict({"other": nn.Linear(2, 2)})}, {"model": renaming(before)})
    with make() as checkpointer:
        checkpointer.restore({"model": before}, strict=False)


def test_a_module_whose_own_loading_takes_a_state_alone_is_restored(make: Make) -> None:
    class Average(nn.Module):
        def __init__(self, value: float) -> None:
            super().__init__()
            self.weight, self.count = nn.Parameter(torch.full((2,), value)), int(value)

        def state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:  # type: ignore[override]
            return {"weight": self.weight.detach(), "count": self.count}

        def load_state_dict(self, state: dict[str, Any]) -> None:  # type: ignore[override]
            self.weight.data.copy_(state["weight"])
            self.count = state["count"]

    fresh = Average(0.0)
    saved_and_restored(make, {"model": Average(3.0)}, {"model": fresh})
    assert (fresh.count, fresh.weight.tolist()) == (3, [3, 3])


def test_a_plain_module_beside_one_that_loads_itself_is_compared_as_ever(make: Make) -> None:
    saved = nn.Sequential(Scaled("tensor", 3), nn.Linear(2, 2))
    fresh = nn.Sequential(Scaled("tensor", 0), nn.Linear(2, 3))
    with pytest.raises(StateMismatch, match=r"model\.1\.weight: shape \(2, 2\) in the checkpoint, \(3, 2\) here"):
        saved_and_restored(make, {"model": saved}, {"model": fresh})
    assert fresh[0].scales == {}


def test_a_scaler_that_was_disabled_leaves_the_one_that_is_not(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    saved, fresh = torch.amp.GradScaler("cpu", enabled=False), torch.amp.GradScaler("cpu", init_scale=8.0)
    with caplog.at_level(logging.WARNING):
        state = saved_and_restored(make, {"scaler": saved, "w": torch.ones(1)}, {"scaler": fresh, "w": torch.zeros(1)})
    assert fresh.get_scale() == 8
    assert state["w"] == 1
    assert "scaler keeps its own state: it was disabled when the checkpoint was saved" in caplog.text


def test_a_group_that_training_has_added_says_what_to_do(make: Make) -> None:
    def state(num_groups: int) -> dict[str, Any]:
        parts = [nn.Linear(1, 1) for _ in range(2)]
        optimizer = torch.optim.SGD([{"params": part.parameters()} for part in parts[:num_groups]], lr=0.1)
        return {"optimizer": optimizer}

    with pytest.raises(StateMismatch, match="groups that the program adds while it trains have to be added before"):
        saved_and_restored(make, state(2), state(1))


def test_values_without_a_form_say_what_to_store_instead(make: Make) -> None:
    import random

    class ZeroRedundancyOptimizer(torch.optim.SGD):
        """Named as torch's, which needs a process group."""

    zero = ZeroRedundancyOptimizer(nn.Linear(1, 1).parameters())
    cases: dict[str, Any] = {
        r"get_state\(\)": torch.Generator(),
        r"bit_generator\.state": np.random.default_rng(0),
        r"getstate\(\)": random.Random(0),
        r"optimizer\.optim": zero,
    }
    with make() as checkpointer:
        for advice, value in cases.items():
            with pytest.raises(UnsupportedState, match=rf"it is a .*{advice}"):
                checkpointer.save(1, {"it": value})


def test_a_url_is_no_directory_and_a_home_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for url in ("s3://bucket/run", "file:///tmp/run", Path("gs://bucket")):
        with pytest.raises(OptionsError, match="not at a URL"):
            FlashCheckpointer(url)
    with pytest.raises(OptionsError, match="no such home directory"):
        FlashCheckpointer("~nobody-has-this-name/run")
    with FlashCheckpointer("~/run") as checkpointer:
        checkpointer.save(1, {"w": torch.ones(1)})
    assert (tmp_path / "home" / "run" / "latest").is_symlink()
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


def test_a_link_to_nowhere_and_a_file_are_called_so(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "purged")
    (tmp_path / "file").touch()
    with pytest.raises(DirectoryNotWritable, match=r"it is a link to .*purged, which is not there"):
        FlashCheckpointer(tmp_path / "link")
    with pytest.raises(DirectoryNotWritable, match="it is a file"):
        FlashCheckpointer(tmp_path / "file")


def test_to_ask_an_object_for_its_state_may_change_it_so_a_first_start_does_not(make: Make) -> None:
    """torch's `get_state_dict` lets an optimizer without a state make a step."""

    class App:
        def __init__(self) -> None:
            self.times = 0

        def state_dict(self) -> dict[str, Any]:
            self.times += 1
            return {"times": torch.tensor(self.times)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.times = int(state["times"])

    app = App()
    with make() as checkpointer:
        assert checkpointer.restore({"app": app, "w": torch.ones(1)}) is None
        assert app.times == 0
        checkpointer.save(1, {"app": app, "w": torch.ones(1)})
    assert app.times == 1
