"""What a pickled pipeline carries of the program around it, and how a data worker process takes it over."""

from __future__ import annotations

import csv
import decimal
import gc
import importlib
import logging
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch

from hetstream.mpi_dataworkers.ops import settings as process_settings
from hetstream.mpi_dataworkers.ops.code_globals import Reached, is_own
from hetstream.mpi_dataworkers.ops.pickled_pipeline import pickle_pipeline
from hetstream.mpi_dataworkers.ops.pipeline import Pipeline
from hetstream.mpi_dataworkers.ops.program import (
    INSTALLATION,
    SettingsInForce,
    changed_since,
    enter_program,
    program_of,
    settings_of,
)
from hetstream.mpi_dataworkers.process.config import travelling_environment
from hetstream.mpi_dataworkers.wire.messages import Program

USER = """
import settings_of_user as settings
from settings_of_user import options

hidden = 1
counter = 0

def load(path): return path
def load_fast(path): return "fast " + path

class Base:
    scale = 2

class Data(Base):
    def __len__(self): return 3
    def __getitem__(self, index):
        return load(settings.NAME), options["size"], self.scale, index
"""
SETTINGS = """
NAME = "a"
OTHER = "not read"
options = {"size": 1}
"""


def mode_of_a_file() -> int:
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory, "file")
        place.write_text("")
        return place.stat().st_mode & 0o777


def outcome(ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except Exception as error:  # noqa: BLE001, whatever it is
        return type(error)


def shown_warnings() -> list[bool]:
    shown = []
    for category in (UserWarning, RuntimeWarning):
        for text in ("of mine", "of others"):
            try:
                warnings.warn(text, category, stacklevel=1)
            except Warning:  # pytest has them raised
                shown.append(True)
            else:
                shown.append(False)
    return shown


# What a program sets, and how a sample sees it: neither asks `program.py`.
CHANGES: list[tuple[str, Callable[[], Any], Callable[[], Any]]] = [
    ("default dtype", lambda: torch.set_default_dtype(torch.float64), lambda: torch.tensor(1.0).dtype),
    ("precision", lambda: torch.set_float32_matmul_precision("medium"), torch.get_float32_matmul_precision),
    ("deterministic", lambda: torch.use_deterministic_algorithms(True), torch.are_deterministic_algorithms_enabled),
    (
        "only warned of",
        lambda: torch.use_deterministic_algorithms(True, warn_only=True),
        torch.is_deterministic_algorithms_warn_only_enabled,
    ),
    (
        "gradients",
        lambda: torch._C._set_grad_enabled(False),
        lambda: torch.ones(1, requires_grad=True).mul(2).requires_grad,
    ),
    ("autocast", lambda: torch.set_autocast_enabled("cpu", True), lambda: (torch.ones(2, 2) @ torch.ones(2, 2)).dtype),
    (
        "dtype of autocast",
        lambda: (torch.set_autocast_enabled("cpu", True), torch.set_autocast_dtype("cpu", torch.float16)),
        lambda: (torch.ones(2, 2) @ torch.ones(2, 2)).dtype,
    ),
    ("denormals", lambda: torch.set_flush_denormal(True), lambda: (torch.tensor([1e-40]) / 2).tolist()),
    ("mkldnn", lambda: setattr(torch.backends.mkldnn, "enabled", False), lambda: torch.backends.mkldnn.enabled),
    ("decimals", lambda: setattr(decimal.getcontext(), "prec", 50), lambda: str(decimal.Decimal(1) / 3)),
    (
        "decimal traps",
        lambda: decimal.getcontext().traps.__setitem__(decimal.Inexact, True),
        lambda: decimal.getcontext().traps[decimal.Inexact],
    ),
    ("errors of arrays", lambda: np.seterr(all="raise"), np.geterr),
    ("umask", lambda: os.umask(0o077), mode_of_a_file),
    ("garbage", lambda: gc.set_threshold(900, 9, 9), gc.get_threshold),
    ("no garbage", gc.disable, gc.isenabled),
    ("recursion", lambda: sys.setrecursionlimit(1500), sys.getrecursionlimit),
    ("switching", lambda: sys.setswitchinterval(0.25), sys.getswitchinterval),
    ("long numbers", lambda: sys.set_int_max_str_digits(0), lambda: outcome(lambda: len(str(10**5000)))),
    (
        "csv",
        lambda: csv.field_size_limit(1 << 20),
        lambda: outcome(lambda: len(next(csv.reader(["x" * 200_000])))),
    ),
    ("printed arrays", lambda: np.set_printoptions(precision=2), lambda: str(np.array([1 / 3]))),
    ("printed tensors", lambda: torch.set_printoptions(precision=2), lambda: str(torch.tensor([1 / 3]))),
    ("warnings", lambda: warnings.filterwarnings("ignore", "of mine"), shown_warnings),
    ("class of warnings", lambda: warnings.simplefilter("ignore", RuntimeWarning), shown_warnings),
]


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A module of the user's and one that it imports."""
    (tmp_path / "user_data.py").write_text(USER)
    (tmp_path / "settings_of_user.py").write_text(SETTINGS)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("user_data")
    for name in ("user_data", "settings_of_user"):
        sys.modules.pop(name, None)


@pytest.fixture
def settings_kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What `SettingsInForce` changes is as it was after the test."""
    argv, environment, in_force = list(sys.argv), dict(os.environ), process_settings.settings_in_force()
    yield
    sys.argv[:] = argv
    os.environ.clear()
    os.environ.update(environment)
    process_settings.put_in_force(in_force)


def reached_from(*roots: Any) -> Reached:
    return Reached(roots, is_own)


def test_what_code_names_is_reached_through_modules_functions_and_classes(user: Any) -> None:
    reached = reached_from(user.Data)
    assert reached.modules == {"user_data", "settings_of_user"}
    assert reached.values == {
        ("user_data", "options"): {"size": 1},
        ("settings_of_user", "NAME"): "a",
        ("settings_of_user", "options"): {"size": 1},
        ("user_data", "Base.scale"): 2,
    }


def test_what_the_program_has_put_in_the_place_of_something_is_reached(user: Any) -> None:
    def patched(path: str) -> str:
        return path + "!"

    patched.__module__ = "__main__"
    user.load = user.load_fast
    user.Data.__getitem__ = patched
    values = reached_from(user.Data).values
    assert values["user_data", "Data.__getitem__"] is patched
    assert ("user_data", "load") not in values, "the code that named it is gone"
    assert reached_from(user.Base).values == {("user_data", "Base.scale"): 2}


def test_what_belongs_to_the_process_or_is_large_is_not_sent() -> None:
    left_out = [torch.zeros(3), torch.Generator(), torch.nn.Linear(1, 1), open, bytes(1 << 20), {"a": torch.zeros(1)}]
    assert [Reached.digest(value) is None for value in left_out] == [True, True, True, False, True, True]
    assert Reached.digest(sys.stderr) is None
    assert Reached.digest({"a": [1, 2.0, "b"]}) == Reached.digest({"a": [1, 2.0, "b"]})


@pytest.mark.usefixtures("settings_kept")
def test_settings_are_applied_when_the_trainer_changed_them_and_in_place(
    user: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = sys.modules["settings_of_user"]
    options = user.options
    before = settings_of(reached_from(user.Data))
    settings.NAME, options["size"], user.Base.scale = "b", 7, 5  # type: ignore[attr-defined]
    user.load = user.load_fast
    monkeypatch.setenv("USERS_OWN", "x")
    sys.argv.append("more")
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True, warn_only=True)
    after = settings_of(reached_from(user.Data))
    assert before != after
    in_force = SettingsInForce()

    def seen() -> tuple[Any, ...]:
        return user.Data()[0], sys.argv[-1] == "more", torch.get_default_dtype(), os.environ.get("USERS_OWN")

    in_force.apply(before)
    assert seen()[0][1:] == (1, 2, 0)
    assert seen()[1:3] == (False, torch.float32)
    in_force.apply(after)
    assert seen() == (("fast b", 7, 5, 0), True, torch.float64, "x")
    assert torch.is_deterministic_algorithms_warn_only_enabled()
    assert user.options is options is settings.options, "other modules have it under their own names"  # type: ignore[attr-defined]
    options["size"] = 8  # by code of a data worker: it stays where the trainer changed nothing
    in_force.apply(after)
    assert user.options["size"] == 8


@pytest.mark.usefixtures("settings_kept")
def test_the_time_zone_travels_with_its_variable(user: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    reached = reached_from(user.Data)
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    before = settings_of(reached)
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    after = settings_of(reached)
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    in_force = SettingsInForce()
    for settings, hour in ((after, 9), (before, 0), (after, 9)):
        in_force.apply(settings)
        assert time.localtime(0).tm_hour == hour


@pytest.mark.usefixtures("settings_kept")
@pytest.mark.parametrize("change", CHANGES, ids=[change[0] for change in CHANGES])
def test_what_is_in_force_in_the_process_travels(
    user: Any, change: tuple[str, Callable[[], Any], Callable[[], Any]]
) -> None:
    _, set_up, look = change
    reached, in_force = reached_from(user.Data), SettingsInForce()
    plain, before = look(), settings_of(reached)
    assert settings_of(reached) == before, "what has not changed is not sent again"
    set_up()
    changed, after = look(), settings_of(reached)
    assert changed != plain
    in_force.apply(before)
    assert look() == plain
    in_force.apply(after)
    assert look() == changed
    in_force.apply(before)
    assert (look(), settings_of(reached)) == (plain, before)


@pytest.mark.usefixtures("settings_kept")
def test_loggers_are_as_the_program_has_them(user: Any, capsys: pytest.CaptureFixture[str]) -> None:
    logger, reached, in_force = logging.getLogger("mine.own"), reached_from(user.Data), SettingsInForce()
    before = settings_of(reached)
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("{levelname} of {name}: {message}", style="{"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    after = settings_of(reached)
    in_force.apply(before)
    logger.removeHandler(handler)
    logger.setLevel(logging.CRITICAL)
    in_force.apply(after)
    logger.info("shown")
    logger.debug("not shown")
    assert capsys.readouterr().out == "INFO of mine.own: shown\n"
    assert settings_of(reached) == after
    in_force.apply(before)
    assert (logger.level, logger.propagate, logger.handlers) == (logging.NOTSET, True, [])


def test_what_user_code_of_one_pipeline_sets_is_not_seen_by_another(user: Any, settings_kept: None) -> None:
    settings = settings_of(reached_from(user.Data))
    in_force = SettingsInForce()
    in_force.enter("training", settings)
    torch.set_default_dtype(torch.float64)  # by its dataset, once
    in_force.enter("validation", settings)
    assert torch.get_default_dtype() == torch.float32
    in_force.enter("training", settings)
    assert torch.get_default_dtype() == torch.float64
    in_force.forget("training")
    in_force.enter("training", settings)
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.usefixtures("settings_kept")
def test_settings_that_cannot_be_applied_do_not_stay(user: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = settings_of(reached_from(user.Data))
    user.options["size"] = 7
    sys.argv.append("more")
    after = settings_of(reached_from(user.Data))
    in_force = SettingsInForce()
    in_force.enter("training", before)
    with monkeypatch.context() as without_module:
        without_module.setitem(sys.modules, "settings_of_user", None)  # as where it cannot be imported
        with pytest.raises(ImportError):
            in_force.enter("validation", after)
    in_force.enter("training", before)
    assert sys.argv[-1] != "more"


@pytest.mark.usefixtures("settings_kept")
def test_what_the_program_puts_in_a_place_and_takes_away_again_is_gone(user: Any) -> None:
    original = user.load
    before = settings_of(reached_from(user.Data))
    user.load = user.load_fast
    user.Data.scale = staticmethod(user.load_fast)
    patched = settings_of(reached_from(user.Data))
    user.load = original
    del user.Data.scale
    in_force = SettingsInForce()
    for _ in range(2):
        in_force.apply(patched)
        assert user.Data()[0][0] == "fast a"
        assert user.Data.scale("x") == "fast x"
        in_force.apply(before)
        assert user.Data()[0][:3] == ("a", 1, 2)
        assert user.load is original


def test_a_program_is_where_it_runs_and_what_its_pipeline_imports(user: Any, tmp_path: Path) -> None:
    program = program_of(reached_from(user.Data))
    assert program.working_dir == os.getcwd()
    assert program.sys_path[0] == str(tmp_path) or str(tmp_path) in program.sys_path
    assert program.sys_path.count(INSTALLATION) == 1
    assert program.modules.keys() == {"user_data", "settings_of_user"}
    assert changed_since(program) == []


def test_a_module_has_the_source_that_was_loaded_until_it_is_reloaded(user: Any, tmp_path: Path) -> None:
    first = program_of(reached_from(user.Data))
    source = tmp_path / "settings_of_user.py"
    source.write_text(SETTINGS.replace('"a"', '"c"'))
    assert program_of(reached_from(user.Data)) == first, "the program goes on with what it has loaded"
    importlib.reload(sys.modules["settings_of_user"])
    second = program_of(reached_from(user.Data))
    assert second.modules["user_data"] == first.modules["user_data"]
    assert second.modules["settings_of_user"] != first.modules["settings_of_user"]
    assert changed_since(first) == ["settings_of_user"]


def test_a_process_imports_in_the_trainers_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = list(sys.path)
    monkeypatch.setattr(sys, "path", own)
    monkeypatch.chdir(tmp_path)
    front, back = (str(tmp_path / name) for name in ("front", "back"))
    os.mkdir(front)
    os.mkdir(back)
    enter_program(Program("/", [front, INSTALLATION, "/not/there", back]))
    assert os.getcwd() == "/"
    assert sys.path[0] == front
    assert sys.path[-1] == back
    assert "/not/there" not in sys.path, "somebody else could make it"
    assert len(sys.path) == len(set(sys.path))


def test_the_environment_travels_without_what_a_process_is() -> None:
    at_start = {"PATH": "/bin", "HOME": "/home/u", "GONE": "1", "SLURM_GONE": "1", "MINE": "1"}
    now = {"PATH": "/bin:/more", "HOME": "/home/u", "MINE": "1", "SET": "2", "SLURM_PROCID": "3", "RANK": "1"}
    now |= {"RANKING": "yes", "OMP_NUM_THREADS": "4", "_": "/bin/python", "_MINE": "5", "PYTHONHASHSEED": "0"}
    sent, removed = travelling_environment(now, at_start)
    assert sent == {"PATH": "/bin:/more", "MINE": "1", "SET": "2", "RANKING": "yes", "_MINE": "5"}
    assert removed == ["GONE"]


def test_pickling_a_pipeline_leaves_cloudpickle_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    script = ModuleType("__mp_main__")
    exec("class Data:\n    def __len__(self): return 3", vars(script))  # as multiprocessing runs it
    monkeypatch.setitem(sys.modules, "__mp_main__", script)
    pickled = pickle_pipeline(Pipeline(script.Data(), list, 3))
    monkeypatch.delitem(sys.modules, "__mp_main__")
    assert len(cloudpickle.loads(pickled.blob).dataset) == 3
    assert "__mp_main__" not in cloudpickle.list_registry_pickle_by_value()
