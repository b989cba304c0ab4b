"""What objects of the program take by `load_state_dict`: their own code, which may refuse it."""

from __future__ import annotations

import copy
import inspect
import logging
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from hetstream.checkpoint.errors import StateMismatch
from hetstream.checkpoint.flash.restore.stored import like_mapping, like_tuple, owned

_log = logging.getLogger(__name__)


def _rank_of(here: Any) -> int:
    """Objects whose fit could not be checked before come first, modules last."""
    return 2 if isinstance(here, torch.nn.Module) else 1 if isinstance(here, torch.optim.Optimizer) else 0


def _backup(here: Any) -> Any:
    state = here.state_dict()
    # An optimizer's load_state_dict replaces its tensors and does not write into them.
    if isinstance(here, torch.optim.Optimizer):
        return state
    if isinstance(here, torch.nn.Module):
        # What has no shape yet has no values, and torch copies no such buffers.
        shaped = {key: value for key, value in state.items() if not is_lazy(value)}
        state = like_mapping(state, shaped, only=shaped)
    return copy.deepcopy(state)


def _state_of(optimizer: torch.optim.Optimizer) -> Mapping[Any, Any]:
    """By parameter; one around another may have none of its own."""
    return getattr(optimizer, "state", {})


def _places_of(optimizer: torch.optim.Optimizer) -> Iterator[tuple[tuple[Any, str], dict[str, Any]]]:
    """Where an optimizer has tensors: the place, and the dict that holds it."""
    for index, group in enumerate(optimizer.param_groups):
        yield from (((index, key), group) for key in group)
    for parameter, state in _state_of(optimizer).items():
        if isinstance(state, dict):
            yield from (((parameter, key), state) for key in state)


def _tensors_of(optimizer: torch.optim.Optimizer) -> dict[tuple[Any, str], torch.Tensor]:
    return {
        place: holder[place[1]] for place, holder in _places_of(optimizer) if isinstance(holder[place[1]], torch.Tensor)
    }


@torch.no_grad()
def _keep_tensors(optimizer: torch.optim.Optimizer, before: Mapping[tuple[Any, str], torch.Tensor]) -> None:
    """Bring what an optimizer has loaded into the tensors that it had: a CUDA graph of its step works on these, and not
    on those that `load_state_dict` puts in their place."""
    taken: dict[int, torch.Tensor] = {}
    for place, holder in _places_of(optimizer):
        old, new = before.get(place), holder[place[1]]
        if old is None or not isinstance(new, torch.Tensor) or old is new:
            continue
        is_alike = (old.shape, old.dtype, old.device, type(old)) == (new.shape, new.dtype, new.device, type(new))
        # Memory that several had holds what all of them have now, or what the first has.
        first = (
            taken.setdefault(old.untyped_storage().data_ptr(), new) if is_alike and type(old) is torch.Tensor else None
        )
        if first is not None and first.data_ptr() == new.data_ptr():
            old.copy_(new)
            holder[place[1]] = old


def has_torchs_form(state: Any) -> bool:
    """Whether this is what torch's `Optimizer.state_dict` gives. Those that wrap another may give what they like."""
    return isinstance(state, Mapping) and {"state", "param_groups"} <= {*state}


@dataclass(frozen=True)
class _Closed:
    """A value that torch's `Optimizer.load_state_dict` shall not look into."""

    value: Any


def _load_optimizer(optimizer: torch.optim.Optimizer, loaded: Any) -> None:
    """Give an optimizer its state. torch casts what can be iterated by calling its type, and so makes of a string the
    name of a generator, of a deque one without a length, and of a Counter a dict; it shall not."""
    is_torchs = type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict
    state = loaded["state"] if has_torchs_form(loaded) else None
    if not is_torchs or not isinstance(state, Mapping):
        optimizer.load_state_dict(loaded)
        if isinstance(state, Mapping):
            _keep_dtypes(optimizer, loaded)
        return
    closed = {
        name: {key: value if _is_castable(value) else _Closed(value) for key, value in values.items()}
        if type(values) is dict
        else values
        for name, values in state.items()
    }
    optimizer.load_state_dict({**loaded, "state": closed})
    for parameter, values in _state_of(optimizer).items():
        device = parameter.device if isinstance(parameter, torch.Tensor) else None
        for key, value in values.items() if isinstance(values, dict) else ():
            if isinstance(value, _Closed):
                values[key] = _placed(value.value, device)
    _keep_dtypes(optimizer, loaded)


def _is_castable(value: Any) -> bool:
    """Whether torch leaves of a value of an optimizer's state what it is, but for dtypes."""
    if type(value) is dict:
        return all(map(_is_castable, value.values()))
    if type(value) in (list, tuple):
        return all(map(_is_castable, value))
    return value is None or isinstance(value, torch.Tensor | int | float | complex)


def _placed(value: Any, device: torch.device | None) -> Any:
    """The same value, with its tensors on a device."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return like_mapping(value, {key: _placed(item, device) for key, item in value.items()})
    if isinstance(value, deque):
        return deque((_placed(item, device) for item in value), value.maxlen)
    if isinstance(value, list):
        return [_placed(item, device) for item in value]
    if isinstance(value, tuple):
        return like_tuple(value, [_placed(item, device) for item in value])
    return value


def _keep_dtypes(optimizer: torch.optim.Optimizer, loaded: Mapping[str, Any]) -> None:
    """Give an optimizer's state the dtypes that were saved: torch's `load_state_dict` casts it to those of the
    parameters, and so takes the float32 of a bfloat16 model's moments and master weights away.

    Args:
        optimizer: that has loaded its state.
        loaded: what it was given.
    """
    now, saved = optimizer.state_dict()["state"], loaded["state"]
    names = [name for group in loaded["param_groups"] for name in group["params"]]
    params = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, (name, parameter) in enumerate(zip(names, params, strict=True)):
        held = _state_of(optimizer).get(parameter)
        for key, value in saved.get(name, {}).items():
            if isinstance(held, dict) and key in held and held[key] is now.get(number, {}).get(key):
                held[key] = _as_saved(held[key], value)


def _keep_dtypes_within(path: str, here: Any, loaded: Mapping[str, Any]) -> None:
    """The same for an object that may have an optimizer within, and whose `state_dict` gives the tensors themselves."""
    for _, now, saved in _of_other_dtypes(path, here.state_dict(), loaded):
        if type(now) is torch.Tensor and type(saved) is torch.Tensor and _is_same(saved.to(now.device, now.dtype), now):
            now.data = saved.to(now.device)  # as torch.nn.Module.to does
    for place, now, saved in _of_other_dtypes(path, here.state_dict(), loaded):
        _log.warning("%s was saved as %s, and its object has made %s of it", place, saved.dtype, now.dtype)


def _of_other_dtypes(path: str, now: Any, saved: Any) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Tensors in the same places of two trees that differ in nothing but their dtypes."""
    if isinstance(now, torch.Tensor) and isinstance(saved, torch.Tensor):
        if now.dtype != saved.dtype and now.shape == saved.shape:
            yield path, now, saved
    elif isinstance(now, Mapping) and isinstance(saved, Mapping):
        for key in now:
            yield from _of_other_dtypes(f"{path}.{key}", now[key], saved.get(key))
    elif isinstance(now, list | tuple) and isinstance(saved, list | tuple):
        for index, pair in enumerate(zip(now, saved, strict=False)):
            yield from _of_other_dtypes(f"{path}.{index}", *pair)


def _is_same(*tensors: torch.Tensor) -> bool:
    return torch.equal(*(each.detach().contiguous().reshape(-1).view(torch.uint8) for each in tensors))


def _as_saved(now: Any, saved: Any) -> Any:
    """What an optimizer has made of a value, with the dtypes that it had when it was saved."""
    if isinstance(now, torch.Tensor) and isinstance(saved, torch.Tensor):
        if now.dtype == saved.dtype or now.shape != saved.shape:
            return now
        # What is no cast of it, the optimizer has made by code of its own, as hooks that rename parameters.
        return saved.to(now.device) if _is_same(saved.to(now.device, now.dtype), now) else now
    if isinstance(now, dict) and isinstance(saved, Mapping):
        for key, value in now.items():
            now[key] = _as_saved(value, saved.get(key))
    elif isinstance(now, list) and isinstance(saved, list) and len(now) == len(saved):
        now[:] = [_as_saved(*pair) for pair in zip(now, saved, strict=True)]
    elif type(now) is tuple and isinstance(saved, tuple) and len(now) == len(saved):
        return tuple(_as_saved(*pair) for pair in zip(now, saved, strict=True))
    return now


def _load_module(path: str, here: torch.nn.Module, state: Any, *, strict: bool) -> None:
    parameters = inspect.signature(here.load_state_dict).parameters
    if "strict" in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        result = here.load_state_dict(state, strict=strict)
    else:  # a module's own, which knows what it needs
        result = here.load_state_dict(state)
    own = own_loaders(here)
    for what in () if strict or not path else ("missing", "unexpected"):  # of other keys it was told before
        for key in getattr(result, f"{what}_keys", ()):
            if is_below(key, own):
                _log.warning("%s.%s: %s, says the module, which loads itself", path, key, what)


def _put_back(here: Any, before: Any) -> bool:
    """Whether an object has taken what `_backup` gave of it."""
    try:
        if isinstance(here, torch.nn.Module):
            _load_module("", here, before, strict=False)  # what had no shape keeps the one that it has got
        else:
            here.load_state_dict(before)
    except Exception as error:  # noqa: BLE001, the object's own code; it is told beside the error before
        _log.warning("%s does not take back what it had: %s", type(here).__name__, error)
        return False
    return True


def is_pristine(module: torch.nn.Module) -> bool:
    """Whether loading a state into the module is nothing but copying its tensors: then it is done all at once."""
    if type(module).load_state_dict is not torch.nn.Module.load_state_dict:
        return False
    return all(_is_plain_loader(child) for child in module.modules()) and all(
        type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
        for tensor in (*module.parameters(), *module.buffers())
    )


def _is_plain_loader(module: torch.nn.Module) -> bool:
    kind = type(module)
    load = kind._load_from_state_dict
    base = torch.nn.Module
    return (
        (load is base._load_from_state_dict or load is _NormBase._load_from_state_dict)
        and kind.state_dict is base.state_dict
        and kind._save_to_state_dict is base._save_to_state_dict
        and kind.get_extra_state is base.get_extra_state
        and not any(_hooks_of(module))
    )


def own_loaders(module: torch.nn.Module) -> Collection[str]:
    """Names of the modules within that load their tensors by code of their own: what fits these, they alone know."""
    return {name for name, child in module.named_modules() if not _is_plain_loader(child)}


def is_below(key: str, modules: Collection[str]) -> bool:
    """Whether a key of a state_dict belongs to one of these modules, or to one within: it may rename or make it."""
    parts = key.split(".")
    return any(".".join(parts[:depth]) in modules for depth in range(len(parts)))


def _hooks_of(module: torch.nn.Module) -> Iterator[Any]:
    for name in (
        "_load_state_dict_pre_hooks",
        "_load_state_dict_post_hooks",
        "_state_dict_hooks",
        "_state_dict_pre_hooks",
    ):
        yield getattr(module, name, None)


def load_objects(objects: Sequence[tuple[str, Any, Any]], *, strict: bool) -> None:
    """Give objects their states; if one refuses, all get back what they had.

    Args:
        objects: place in the state, object, and what was saved of it.
        strict: a module has to find all its keys.

    Raises:
        StateMismatch: an object refused its state. Nothing is changed, unless an object refuses what it had, too.
    """
    backups: list[tuple[str, Any, Any]] = []
    optimizers = [here for _, here, _ in objects if isinstance(here, torch.optim.Optimizer)]
    held = [_tensors_of(optimizer) for optimizer in optimizers]
    for path, here, saved in sorted(objects, key=lambda item: _rank_of(item[1])):
        before = _backup(here)
        backups.append((path, here, before))
        try:
            if isinstance(here, torch.nn.Module):
                _load_module(path, here, owned(saved, before), strict=strict)
            else:
                loaded = owned(saved, before)
                if isinstance(here, torch.optim.Optimizer):
                    _load_optimizer(here, loaded)
                else:
                    here.load_state_dict(loaded)
                if isinstance(loaded, Mapping):
                    _keep_dtypes_within(path, here, loaded)
        except Exception as error:  # the object's own code
            changed = [place for place, *backup in reversed(backups) if not _put_back(*backup)]
            result = f"{', '.join(changed)} may be half restored" if changed else "Nothing was restored"
            raise StateMismatch(f"{path} refused its state: {error}. {result}") from error
    for optimizer, tensors in zip(optimizers, held, strict=True):
        _keep_tensors(optimizer, tensors)
