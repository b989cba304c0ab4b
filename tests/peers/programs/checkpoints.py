"""A plugin of pytest: hetstream saves and restores what peers' own tests save and restore.

Each peer has one place where it writes a state and one where it reads it. There a checkpoint becomes a directory of
`FlashCheckpointer`, at the path that the peer gave. All else is the peer's: what is in a state, when it is saved, how
its directories are called and which of them are removed. Each save and each restore is counted, a line each in the file
that `COUNTS` names.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from hetstream import CheckpointReader, FlashCheckpointer

COUNTS = "PEERS_COUNTS"


def save(directory: str | os.PathLike[str], state: dict[str, Any], step: int = 0) -> None:
    """Save a state, and bring it to disk."""
    with FlashCheckpointer(directory) as checkpointer:
        if not checkpointer.save(step, state):
            raise RuntimeError("there was no room for the state")
    _count("save")


def restore(directory: str | os.PathLike[str], state: dict[str, Any], *, strict: bool = True) -> None:
    """Bring what was saved into a state, in place."""
    with FlashCheckpointer(directory) as checkpointer:
        if checkpointer.restore(state, strict=strict) is None:
            raise FileNotFoundError(f"there is no checkpoint in {directory}")
    _count("restore")


def load(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """What was saved, as plain values; without the random numbers that hetstream adds."""
    loaded = CheckpointReader(directory).load()
    if loaded is None:
        raise FileNotFoundError(f"there is no checkpoint in {directory}")
    _count("restore")
    return dict(loaded.state)


def restored(state: Any) -> Any:
    """What comes back of a state."""
    with tempfile.TemporaryDirectory() as directory:
        save(Path(directory, "saved"), {"state": state})
        return load(Path(directory, "saved"))["state"]


def restore_into(item: Any, state: Any) -> None:
    """Save a state, and restore it into the object that is to have it."""
    with tempfile.TemporaryDirectory() as directory:
        save(Path(directory, "saved"), {"state": state})
        restore(Path(directory, "saved"), {"state": item})


def _count(what: str) -> None:
    with open(os.environ[COUNTS], "a", encoding="ascii") as counts:
        counts.write(f"{what}\n")


# --- accelerate: Accelerator.save_state and load_state ---------------------------------------------------------------


def _replace_in_accelerate() -> None:
    module: Any = import_module("accelerate.accelerator")

    def save_state(
        output_dir: str,
        model_states: list[Any],
        optimizers: list[Any],
        schedulers: list[Any],
        dataloaders: list[Any],
        process_index: int,
        step: int,
        scaler: Any = None,
        **_: Any,
    ) -> Path:
        state = {"models": model_states, "optimizers": optimizers, "schedulers": schedulers, "scaler": scaler}
        save(Path(output_dir, "flash"), {**state, "loaders": _stateful(dataloaders), "step": step})
        return Path(output_dir)

    def load_state(
        input_dir: str,
        models: list[Any],
        optimizers: list[Any],
        schedulers: list[Any],
        dataloaders: list[Any],
        process_index: int,
        scaler: Any = None,
        map_location: Any = None,
        load_kwargs: Any = None,
        strict: bool = True,
    ) -> dict[str, Any]:
        state = {"models": models, "optimizers": optimizers, "schedulers": schedulers, "scaler": scaler}
        state |= {"loaders": _stateful(dataloaders), "step": None}
        restore(Path(input_dir, "flash"), state, strict=strict)
        return {"step": state["step"]}

    def _stateful(loaders: list[Any]) -> list[Any]:
        return [loader for loader in loaders if getattr(loader, "use_stateful_dataloader", False)]

    def save_custom(item: Any, path: str, index: int = 0, **_: Any) -> None:
        save(Path(path, f"custom_checkpoint_{index}"), {"item": item})

    def load_custom(item: Any, path: str, index: int = 0) -> None:
        restore(Path(path, f"custom_checkpoint_{index}"), {"item": item})

    module.save_accelerator_state, module.load_accelerator_state = save_state, load_state
    module.save_custom_state, module.load_custom_state = save_custom, load_custom


# --- Lightning: CheckpointIO, and what is loaded without one ----------------------------------------------------------

# As hetstream's callback for Lightning names them.
_PARTS = {"model": "state_dict", "optimizers": "optimizer_states", "schedulers": "lr_schedulers"}


def save_lightnings(checkpoint: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Save Lightning's checkpoint, in our parts."""
    parts = {ours: checkpoint[theirs] for ours, theirs in _PARTS.items() if theirs in checkpoint}
    rest = {key: value for key, value in checkpoint.items() if key not in _PARTS.values()}
    save(path, {**parts, "trainer": rest}, checkpoint.get("global_step", 0))


def _replace_in_lightning() -> None:
    torch_io: Any = import_module("lightning.fabric.plugins.io.torch_io")
    saving: Any = import_module("lightning.pytorch.core.saving")

    def load_checkpoint(path: str | os.PathLike[str], *arguments: Any, **named: Any) -> Any:
        return _lightnings(load(path)) if _is_ours(path) else load_before(path, *arguments, **named)

    load_before = torch_io.pl_load
    torch_io._atomic_save = save_lightnings
    torch_io.pl_load = saving.pl_load = load_checkpoint

    _replace_load(_lightnings)
    save_before = torch.save

    def save_file(value: Any, path: Any, *arguments: Any, **named: Any) -> None:
        """A test changes a checkpoint, and writes it where it was."""
        if _is_ours(path):
            save_lightnings(value, path)
        else:
            save_before(value, path, *arguments, **named)

    torch.save = save_file  # type: ignore[assignment]


def _lightnings(state: dict[str, Any]) -> dict[str, Any]:
    rest = state.pop("trainer")
    return {**{_PARTS[ours]: value for ours, value in state.items()}, **rest}


def _is_ours(path: Any) -> bool:
    return isinstance(path, str | os.PathLike) and os.path.exists(os.path.join(path, ".lineage.json"))


# --- torchtitan: the functions that its tests have in the place of torch's save and load ------------------------------


def _replace_in_torchtitan() -> None:
    # They read the file that their own function wrote.
    _replace_load(lambda state: state)


# ----------------------------------------------------------------------------------------------------------------------


def _replace_load(converted: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Have `torch.load` read checkpoints of ours, too: tests look into what was saved."""
    load_before = torch.load

    def load_file(path: Any, *arguments: Any, **named: Any) -> Any:
        for directory in (path, os.path.dirname(path)) if isinstance(path, str | os.PathLike) else ():
            if _is_ours(directory):
                return converted(load(directory))
        return load_before(path, *arguments, **named)

    torch.load = load_file  # type: ignore[assignment]


_PEERS: dict[str, Callable[[], None]] = {
    "accelerate": _replace_in_accelerate,
    "pytorch-lightning": _replace_in_lightning,
    "torchtitan": _replace_in_torchtitan,
}


def pytest_configure() -> None:
    """Take the place of what the peer has that `PEERS_CHECKPOINTS` names."""
    _PEERS[os.environ["PEERS_CHECKPOINTS"]]()
