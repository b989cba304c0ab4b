"""From a record back into the program's own objects: everything is compared first, then everything is written.

Called by the checkpointer. A state that does not fit is refused with all its differences, and nothing of the program
is touched. Nothing that is given to the program lies in shared memory, unless it asks for that.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import logging
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy
from torch.utils import _pytree

from hetstream.base.text import count_words
from hetstream.checkpoint.errors import StateMismatch
from hetstream.checkpoint.flash.sources import (
    Copies,
    StoredPart,
    StoredTensor,
    Values,
    children_of,
    copies_alike,
    fields_of,
    like_dataclass,
    like_mapping,
    like_tuple,
    owned,
    owned_items,
)
from hetstream.checkpoint.tensors.leaves import Leaves

# What objects of the program take by `load_state_dict`: their own code, which may refuse it.

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
    """Return whether this is what torch's `Optimizer.state_dict` gives. Those that wrap another may give what they
    like.
    """
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
    """Return whether loading a state into the module is nothing but copying its tensors: then it is done all at
    once.
    """
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
    """Return names of the modules within that load their tensors by code of their own: what fits these, they alone
    know.
    """
    return {name for name, child in module.named_modules() if not _is_plain_loader(child)}


def is_below(key: str, modules: Collection[str]) -> bool:
    """Return whether a key of a state_dict belongs to one of these modules, or to one within: it may rename or
    make it.
    """
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


# What to do where a model was saved wrapped and is restored plain, or the other way round. Pure.
#
# DistributedDataParallel and torch.compile put a model into a module of their own, and its name into all names: an
# evaluation program that has only the model then finds nothing where it looks.

# What the attribute is called by which a wrapper has its model.
_WRAPPERS = {"module": "DistributedDataParallel", "_orig_mod": "torch.compile"}


def advice(missing: Collection[str], unexpected: Collection[str]) -> str:
    """Return what to do about names that differ by a wrapper's alone; "" if they do not.

    Args:
        missing: names of the program's state that the checkpoint lacks.
        unexpected: names of the checkpoint that the program's state lacks.
    """
    for word, wrapper in _WRAPPERS.items():
        if _unwrapped(unexpected, word) & {*missing}:
            return (
                f". The model was saved within {wrapper}: wrap it here too before it is restored, or save what is "
                f"within (model.{word})"
            )
        if _unwrapped(missing, word) & {*unexpected}:
            return f". The model is within {wrapper} here, and was saved without: restore what is within (model.{word})"
    return ""


def _unwrapped(names: Collection[str], word: str) -> set[str]:
    return {name.replace(f".{word}.", ".", 1) for name in names if f".{word}." in name}


_MISSING, _UNEXPECTED = ": missing in the checkpoint", ": unexpected, only in the checkpoint"
# More of them would hide the cause.
_MAX_DIFFERENCES_SHOWN = 40

Fill = Callable[[], Any]


def _mismatch_text(differences: Sequence[str]) -> str:
    shown = differences[:_MAX_DIFFERENCES_SHOWN]
    more = [f"and {len(differences) - len(shown)} more"] if len(differences) > len(shown) else []
    return (
        f"the checkpoint does not fit this program's state, {count_words(len(differences), 'difference')}: "
        + "; ".join([*shown, *more])
        + ". Nothing was restored. Call restore() with strict=False to take what fits, or load() it and convert it"
        + advice(_with_suffix(_MISSING, differences), _with_suffix(_UNEXPECTED, differences))
    )


def _with_suffix(suffix: str, differences: Sequence[str]) -> set[str]:
    """The places of such differences."""
    return {difference.removesuffix(suffix) for difference in differences if difference.endswith(suffix)}


def _has_tensor(value: Any) -> bool:
    if isinstance(value, StoredTensor | torch.Tensor):
        return True
    if isinstance(value, Mapping):
        return any(_has_tensor(item) for item in value.values())
    if isinstance(value, list | tuple | deque | set | frozenset):
        return any(_has_tensor(item) for item in value)
    fields = fields_of(value)
    if fields:
        return any(_has_tensor(item) for item in fields.values())
    return _is_stateful(value)


def _is_stateful(value: Any) -> bool:
    kind = type(value)
    return callable(getattr(kind, "state_dict", None)) and callable(getattr(kind, "load_state_dict", None))


# What a program may also hold by a name of its own, and so is filled and never replaced.
_HELD = (MutableMapping, list, set, deque, bytearray)


class StateComparison:
    """A program's state beside what was saved of one: where they differ, and what is to be written into the state.

    `compare` comes first; then `write`, if nothing differs, or if the rest shall be restored nevertheless.

    Args:
        states: what objects have given when the state was taken apart, as `Leaves.states` has it. They are not asked
            once more: others may have to be asked at the same time, and a rank that fails before would leave them
            waiting.

    Attributes:
        differences: in words, one for each place.
    """

    def __init__(self, states: Mapping[tuple[str, int], Any] = MappingProxyType({})) -> None:
        self._states = states
        self.differences: list[str] = []
        self._copies = Copies()
        self._objects: list[tuple[str, Any, Any]] = []
        self._fill: Fill = lambda: None
        self._copied: dict[tuple[int, int], StoredTensor] = {}  # by address and size of the program's tensor

    def take_alike(self, state: Mapping[str, Any], leaves: Leaves, part: StoredPart) -> set[str]:
        """Compare all that is equal but for the values of its tensors, by text and not value by value.

        Args:
            state: as it is given to `save`.
            leaves: the same taken apart.
            part: of what was saved.

        Returns:
            The top-level keys that `compare` may leave out.
        """
        keys = [key for key in state if key in leaves.plain and key in part.record.tree]
        return self._take_alike(keys, leaves, part)

    def _take_alike(self, keys: list[str], leaves: Leaves, part: StoredPart) -> set[str]:
        if not keys:
            return set()
        copies = copies_alike(keys, leaves, part)
        if copies is not None:
            self._copies.take(copies)
            return {*keys}
        if len(keys) == 1:
            return set()
        half = len(keys) // 2
        return self._take_alike(keys[:half], leaves, part) | self._take_alike(keys[half:], leaves, part)

    def compare(self, state: MutableMapping[str, Any], saved: Mapping[str, Any], alike: Collection[str] = ()) -> None:
        """Look where a state and what was saved of it differ. Changes nothing.

        Args:
            state: as it is given to `save`. Its tensors will keep their identity; objects get `load_state_dict`.
            saved: of `StoredPart.saved`.
            alike: keys of the state that `take_alike` has compared.
        """
        self._fill = self.match_mapping("", state, saved, alike)

    def mismatch(self) -> StateMismatch | None:
        """Return the differences as an error, or None if there are none."""
        return StateMismatch(_mismatch_text(self.differences)) if self.differences else None

    # Comparing

    def match(self, path: str, here: Any, saved: Any) -> Fill:
        """Compare one place; gives what its value will be when it is filled."""
        if isinstance(here, torch.Tensor):
            return self._match_tensor(path, here, saved)
        if _is_stateful(here):
            return self._match_object(path, here, saved)
        if isinstance(saved, StoredTensor | np.ndarray) and isinstance(here, np.ndarray):
            return self._match_array(path, here, saved)
        if here is None:
            return lambda: owned(saved)
        if isinstance(here, _HELD) and type(saved) is type(here) and getattr(saved, "__dict__", None):
            return self._with_attributes(here, saved, self._match_held(path, here, saved))
        return self._match_held(path, here, saved)

    @staticmethod
    def _with_attributes(here: Any, saved: Any, fill: Fill) -> Fill:
        """The filling of a container of the program's own class, which was pickled, with what else it has."""

        def filled() -> Any:
            result = fill()
            vars(here).update(vars(saved))
            return result

        return filled

    def _match_held(self, path: str, here: Any, saved: Any) -> Fill:
        """The same for what is neither a tensor nor an array nor an object that loads itself."""
        if isinstance(here, MutableMapping) and isinstance(saved, Mapping):
            return self.match_mapping(path, here, saved)
        if isinstance(here, list | tuple) and isinstance(saved, list | tuple):
            return self._match_sequence(path, here, saved)
        if isinstance(here, deque) and isinstance(saved, type(here)):
            return self._match_sequence(path, here, saved)
        if isinstance(here, set | bytearray) and isinstance(saved, type(here)):
            return functools.partial(_filled, here, saved)
        old = children_of(saved, here)
        if old is not None:
            return self._match_node(path, here, old)
        if dataclasses.is_dataclass(here) and not isinstance(here, type):
            return self._match_dataclass(path, here, saved)
        if isinstance(here, _HELD) or _has_tensor(here) or (_has_tensor(saved) and not isinstance(here, np.ndarray)):
            self.differences.append(f"{path}: {_kind(saved)} in the checkpoint, {_kind(here)} here")
            return lambda: here
        return lambda: owned(saved, here)

    def match_mapping(
        self, path: str, here: MutableMapping[Any, Any], saved: Mapping[Any, Any], alike: Collection[Any] = ()
    ) -> Fill:
        """Compare two mappings key by key. Those without any tensor, and empty ones, are plain data: they get the keys
        that were saved."""
        prefix = f"{path}." if path else ""
        missing = [key for key in here if key not in saved and key not in alike]
        unexpected = [key for key in saved if key not in here]
        is_plain = (missing or unexpected) and path and not (here and (_has_tensor(here) or _has_tensor(saved)))
        if not is_plain:
            self.differences += [f"{prefix}{key}{_MISSING}" for key in missing]
            self.differences += [f"{prefix}{key}{_UNEXPECTED}" for key in unexpected]
        fills = {key: self.match(f"{prefix}{key}", here[key], saved[key]) for key in here if key in saved}

        def fill() -> Any:
            filled = {key: inner() for key, inner in fills.items()}
            if is_plain or (path and filled.keys() == saved.keys() and [*here] != [*saved]):
                filled = {key: filled[key] if key in filled else owned(saved[key]) for key in saved}
                keys = owned_items(filled, here)
                if keys is not None:
                    filled = dict(zip(keys, filled.values(), strict=True))
                here.clear()
            for key, value in filled.items():
                here[key] = value
            return here

        return fill

    def _match_sequence(self, path: str, here: Any, saved: Any) -> Fill:
        if len(here) != len(saved):
            has_tensor = any(map(_is_stateful, here)) if isinstance(here, deque) else _has_tensor([here, saved])
            if here and has_tensor:  # what goes through a deque changes all the time
                self.differences.append(
                    f"{path}: {count_words(len(saved), 'item')} in the checkpoint, {len(here)} here"
                )
                return lambda: here
            return functools.partial(_filled, here, saved) if isinstance(here, _HELD) else lambda: owned(saved, here)
        fills = [self.match(f"{path}.{index}", *pair) for index, pair in enumerate(zip(here, saved, strict=True))]

        def fill() -> Any:
            filled = [inner() for inner in fills]
            if isinstance(here, list):
                here[:] = filled
                return here
            if isinstance(here, deque):
                here.clear()
                here.extend(filled)
                return here
            is_same = all(new is old for new, old in zip(filled, here, strict=True))
            return here if is_same else like_tuple(here, filled)

        return fill

    def _match_dataclass(self, path: str, here: Any, saved: Any) -> Fill:
        names = [member.name for member in dataclasses.fields(here)]
        fields, own = fields_of(saved), fields_of(here)
        lacking = [name for name in names if name not in fields]
        if lacking:
            self.differences.append(f"{path}: {_kind(saved)} in the checkpoint has no {', '.join(lacking)}")
            return lambda: here
        if not hasattr(here, "__dict__"):
            fields = {name: fields[name] for name in names}
        fills = {name: self.match(f"{path}.{name}", own.get(name), saved) for name, saved in fields.items()}

        def fill() -> Any:
            filled = {name: inner() for name, inner in fills.items()}
            if all(name in own and value is own[name] for name, value in filled.items()):
                return here
            if here.__dataclass_params__.frozen:
                return like_dataclass(here, filled)
            for name, value in filled.items():
                setattr(here, name, value)
            return here

        return fill

    def _match_node(self, path: str, here: Any, old: list[Any]) -> Fill:
        node_type = _pytree.SUPPORTED_NODES[type(here)]
        children, context = node_type.flatten_fn(here)
        fill = self._match_sequence(path, list(children), old)
        return lambda: node_type.unflatten_fn(fill(), context)

    def _match_tensor(self, path: str, here: torch.Tensor, saved: Any) -> Fill:
        if isinstance(saved, torch.Tensor):  # made of parts, such as a sparse one
            if self._compare(path, here, saved.shape, saved.dtype):
                self._copies.add(here, saved)
            return lambda: here
        if not isinstance(saved, StoredTensor):
            self.differences.append(f"{path}: {_kind(saved)} in the checkpoint, {_kind(here)} here")
            return lambda: here
        if self._compare(path, here, saved.shape, saved.dtype):
            self._copy(path, here, saved)
        return lambda: here

    def _copy(self, path: str, here: torch.Tensor, saved: StoredTensor) -> None:
        """Note that a tensor is to be copied."""
        is_part = hasattr(here, "to_local")
        if not is_part and here.is_cpu and here.nbytes and here.is_contiguous():
            other = self._copied.setdefault((here.data_ptr(), here.nbytes), saved)
            if other is not saved and not torch.equal(_bytes_of(other.view), _bytes_of(saved.view)):
                self.differences.append(f"{path}: shares its memory here, and was another tensor in the checkpoint")
                return
        if saved.address is not None and not is_part:
            self._copies.add(here, saved)
            return
        values = self._read(path, here, saved)
        if values is not None:
            self._copies.add(here.to_local() if is_part else here, values)  # type: ignore[attr-defined]

    def _read(self, path: str, here: torch.Tensor, saved: StoredTensor) -> torch.Tensor | None:
        try:
            return saved.read(here)
        except StateMismatch as error:
            self.differences.append(f"{path}: {error}")
            return None

    def _for_parts(self, path: str, here: Any, saved: Any) -> Any:
        """What an object's `load_state_dict` gets for a tree of its own: sharded tensors as they are sharded now."""
        if isinstance(here, Mapping) and isinstance(saved, Mapping):
            made = {
                key: self._for_parts(f"{path}.{key}", here[key], value) for key, value in saved.items() if key in here
            }
            return like_mapping(saved, {key: value for key, value in made.items() if value is not saved[key]})
        if isinstance(here, list) and isinstance(saved, list) and len(here) == len(saved):
            pairs = zip(here, saved, strict=True)
            return [self._for_parts(f"{path}.{index}", *pair) for index, pair in enumerate(pairs)]
        return self._for_object(path, here, saved)

    def _for_object(self, path: str, here: Any, saved: Any) -> Any:
        """What an object's `load_state_dict` gets for a tensor of its own."""
        if not isinstance(here, torch.Tensor) or not isinstance(saved, StoredTensor):
            return saved
        is_part = hasattr(here, "to_local")
        if not (is_part or saved.ref.shard) or saved.shape != here.shape:
            return saved
        values = self._read(path, here, saved)
        return saved if values is None else Values(values, here if is_part else None)

    def _compare(self, path: str, here: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
        if here.shape != shape:
            self.differences.append(f"{path}: shape {tuple(shape)} in the checkpoint, {tuple(here.shape)} here")
        if here.dtype != dtype:
            self.differences.append(f"{path}: dtype {dtype} in the checkpoint, {here.dtype} here")
        return here.shape == shape and here.dtype == dtype

    def _match_array(self, path: str, here: np.ndarray[Any, Any], saved: StoredTensor | np.ndarray[Any, Any]) -> Fill:
        values = saved.view.numpy() if isinstance(saved, StoredTensor) else saved
        if here.shape != values.shape or here.dtype != values.dtype:
            self.differences.append(
                f"{path}: array of shape {values.shape} and {values.dtype} in the checkpoint, {here.shape} and "
                f"{here.dtype} here"
            )
            return lambda: here
        if not here.flags.writeable:
            return lambda: owned(saved)

        def fill() -> Any:
            np.copyto(here, values)
            return here

        return fill

    def _match_object(self, path: str, here: Any, saved: Any) -> Fill:
        if isinstance(here, torch.nn.Module) and isinstance(saved, Mapping):
            now = self._state_of(path, here)
            fitting = self._compare_module(path, here, now, saved)
            if is_pristine(here):
                for key in fitting:
                    if isinstance(saved[key], StoredTensor):
                        self._copy(f"{path}.{key}", now[key], saved[key])
            else:
                parts = {key: self._for_object(f"{path}.{key}", now.get(key), saved[key]) for key in fitting}
                self._objects.append((path, here, like_mapping(saved, parts, only=fitting)))
        elif isinstance(here, torch.amp.GradScaler) and not saved:
            _log.warning("%s keeps its own state: it was disabled when the checkpoint was saved", path)
        elif not isinstance(here, torch.optim.Optimizer) or not has_torchs_form(self._state_of(path, here)):
            self._objects.append((path, here, self._for_parts(path, self._state_of(path, here), saved)))
        elif self._compare_optimizer(path, here, saved):
            self._objects.append((path, here, self._for_optimizer(path, here, saved)))
        return lambda: here

    def _state_of(self, path: str, here: Any) -> Any:
        key = path, id(here)
        return self._states[key] if key in self._states else here.state_dict()

    def _for_optimizer(self, path: str, here: torch.optim.Optimizer, saved: Any) -> Any:
        """Its state, sharded as its parameters are now; its own state may be empty yet."""
        ordered = [_in_order_of(*pair) for pair in zip(here.param_groups, saved["param_groups"], strict=True)]
        names = [name for group in ordered for name in group["params"]]
        params = dict(
            zip(names, (parameter for group in here.param_groups for parameter in group["params"]), strict=True)
        )
        state = saved.get("state")
        if not isinstance(state, Mapping):
            return saved
        made = {
            name: like_mapping(
                values,
                {
                    key: self._for_object(f"{path}.state.{name}.{key}", params[name], value)
                    for key, value in values.items()
                },
            )
            for name, values in state.items()
            if name in params and isinstance(values, Mapping)
        }
        return like_mapping(saved, {"state": like_mapping(state, made), "param_groups": ordered})

    def _compare_module(
        self, path: str, here: torch.nn.Module, now: Mapping[str, Any], saved: Mapping[str, Any]
    ) -> set[str]:
        """Which keys fit."""
        asked, modules = own_loaders(here), {name for name, _ in here.named_modules()}
        self.differences += [f"{path}.{key}{_MISSING}" for key in now if key not in saved and not is_below(key, asked)]
        theirs = {key for key in saved if key not in now and is_below(key, asked)}
        self.differences += [f"{path}.{key}{_UNEXPECTED}" for key in saved if key not in now and key not in theirs]
        return theirs | {
            key
            for key, tensor in now.items()
            if key in saved and (_owner_of(key, modules) in asked or self._fits(f"{path}.{key}", tensor, saved[key]))
        }

    def _fits(self, path: str, here: Any, saved: Any) -> bool:
        if not isinstance(here, torch.Tensor) or is_lazy(here):
            return True
        if not isinstance(saved, StoredTensor):
            self.differences.append(f"{path}: {_kind(saved)} in the checkpoint, {_kind(here)} here")
            return False
        return self._compare(path, here, saved.shape, saved.dtype)

    def _compare_optimizer(self, path: str, here: torch.optim.Optimizer, saved: Any) -> bool:
        groups = saved.get("param_groups") if isinstance(saved, Mapping) else None
        if not isinstance(groups, list):
            self.differences.append(f"{path}: {_kind(saved)} in the checkpoint, an optimizer here")
            return False
        sizes = [len(group["params"]) for group in groups]
        own = [len(group["params"]) for group in here.param_groups]
        if sizes != own:
            self.differences.append(
                f"{path}.param_groups: of {sizes} parameters in the checkpoint, of {own} here (groups that the program "
                "adds while it trains have to be added before it restores)"
            )
        return sizes == own

    # Writing

    def write(self, *, strict: bool = True) -> None:
        """Write everything that fits. Objects come first, as they may still refuse; then all get back what they had.

        Args:
            strict: a module that loads itself has to find all its keys, where nothing differs.

        Raises:
            StateMismatch: an object refused its state. Nothing is changed, unless an object refuses what it had, too.
        """
        load_objects(self._objects, strict=strict and not self.differences)
        self._copies.run()
        self._fill()


def _filled(here: Any, saved: Any) -> Any:
    """A container of the program, with what was saved of it."""
    items = owned(saved, here)
    if isinstance(here, set):
        here.clear()
        here.update(items)
    elif isinstance(here, deque):
        here.clear()
        here.extend(items)
    else:
        here[:] = items
    return here


def _in_order_of(here: Mapping[str, Any], saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """What was saved of a group of parameters, in the order that they have now: torch knows them by their places."""
    names, now = saved.get("param_names"), here.get("param_names")
    if not names or not now or names == now or sorted(names) != sorted(now) or len({*names}) < len(names):
        return saved
    places = dict(zip(names, saved["params"], strict=True))
    return {**saved, "param_names": [*now], "params": [places[name] for name in now]}


def _owner_of(key: str, modules: Collection[str]) -> str:
    """Which module within has a key of a state_dict, or had it."""
    owner = key.rpartition(".")[0]
    while owner not in modules:
        owner = owner.rpartition(".")[0]
    return owner


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _kind(value: Any) -> str:
    if isinstance(value, StoredTensor):
        return str(value)
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
    return f"a {type(value).__name__}"
