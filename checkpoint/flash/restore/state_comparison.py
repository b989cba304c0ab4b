"""From a record back into the program's own objects: everything is compared first, then everything is written.

Called by the checkpointer. A state that does not fit is refused with all its differences, and nothing of the program
is touched. Nothing that is given to the program lies in shared memory, unless it asks for that.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections import deque
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy
from torch.utils import _pytree

from hetstream.checkpoint.errors import StateMismatch
from hetstream.checkpoint.flash.restore.copies import Copies, copies_alike
from hetstream.checkpoint.flash.restore.objects import has_torchs_form, is_below, is_pristine, load_objects, own_loaders
from hetstream.checkpoint.flash.restore.stored import (
    StoredPart,
    StoredTensor,
    Values,
    children_of,
    fields_of,
    like_dataclass,
    like_mapping,
    like_tuple,
    owned,
    owned_items,
)
from hetstream.checkpoint.flash.restore.wrappers import advice
from hetstream.checkpoint.tensors.leaves import Leaves

_log = logging.getLogger(__name__)

_MISSING, _UNEXPECTED = ": missing in the checkpoint", ": unexpected, only in the checkpoint"
# More of them would hide the cause.
_MAX_DIFFERENCES_SHOWN = 40

Fill = Callable[[], Any]


def _mismatch_text(differences: Sequence[str]) -> str:
    shown = differences[:_MAX_DIFFERENCES_SHOWN]
    more = [f"and {len(differences) - len(shown)} more"] if len(differences) > len(shown) else []
    return (
        f"the checkpoint does not fit this program's state, {len(differences)} difference(s): "
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
        """The differences as an error, or None if there are none."""
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
                self.differences.append(f"{path}: {len(saved)} item(s) in the checkpoint, {len(here)} here")
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
