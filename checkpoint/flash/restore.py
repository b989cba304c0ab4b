"""From a record back into the program's own objects: everything is compared first, then everything is written.

Called by the checkpointer. A state that does not fit is refused with all its differences, and nothing of the program
is touched. Nothing that is given to the program lies in shared memory, unless it asks for that.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.utils import _pytree

from checkpoint.errors import DamagedCheckpoint, StateMismatch
from checkpoint.flash.tensors import make_foreign, view_of
from checkpoint.layout import Entry
from checkpoint.structure import Record, TensorRef

# More of them would hide the cause.
_MAX_DIFFERENCES_TOLD = 40

Fill = Callable[[], Any]


@dataclass(frozen=True)
class Stored:
    """A tensor of a record, where it lies.

    Attributes:
        ref: what the record says of it.
        view: its values, row-major or strided; they may lie in shared memory.
    """

    ref: TensorRef
    view: torch.Tensor

    def __str__(self) -> str:
        return f"a tensor of shape {tuple(self.view.shape)} and {self.view.dtype}"


class Stock:
    """The tensors of one payload, and copies of them.

    Args:
        entries: what the payload holds.
        views: their values, one for each entry; they may lie in shared memory.
        is_private: nobody else will change the views: they can be given away as they are.
    """

    def __init__(self, entries: Sequence[Entry], views: Sequence[torch.Tensor], *, is_private: bool = False) -> None:
        self._entries = entries
        self._views = views
        self._is_private = is_private
        self._own: dict[int, torch.Tensor] = {}
        self._made: dict[TensorRef, Any] = {}

    def stored(self, ref: TensorRef) -> Any:
        """The tensor of a reference, uncopied; byte strings as such.

        Raises:
            DamagedCheckpoint: the reference points outside.
        """
        if ref.kind in ("bytes", "pickle"):
            return self.own(ref)
        return Stored(ref, self._view_of(ref, self._views))

    def own(self, ref: TensorRef) -> Any:
        """What the program saved, in memory of its own; tensors that shared memory share it again."""
        made = self._made.get(ref)
        if made is None:
            made = self._made[ref] = self._make(ref)
        return made

    def _view_of(self, ref: TensorRef, views: Sequence[torch.Tensor] | Mapping[int, torch.Tensor]) -> torch.Tensor:
        if not 0 <= ref.entry < len(self._views):
            raise DamagedCheckpoint(f"the structure refers to entry {ref.entry} of {len(self._views)}")
        return view_of(ref, self._entries[ref.entry], views[ref.entry])

    def _make(self, ref: TensorRef) -> Any:
        if not self._is_private and ref.entry not in self._own and 0 <= ref.entry < len(self._views):
            self._own[ref.entry] = self._views[ref.entry].clone()
        tensor = self._view_of(ref, self._views if self._is_private else self._own)
        if ref.is_permuted and ref.strides is not None:
            tensor = torch.empty_strided(tensor.shape, ref.strides, dtype=tensor.dtype).copy_(tensor)
        if ref.kind in ("parameter", "frozen_parameter"):
            return torch.nn.Parameter(tensor, requires_grad=ref.kind == "parameter")
        if ref.kind == "numpy":
            return tensor.numpy()
        if ref.kind in ("bytes", "pickle"):
            return tensor.numpy().tobytes()
        return tensor.requires_grad_() if ref.kind == "grad" else tensor


def load_tree(record: Record, stock: Stock, *, allow_pickle: bool = False) -> dict[str, Any]:
    """The state as plain values and tensors of the program's own.

    Raises:
        DamagedCheckpoint: the structure breaks its form.
        StateMismatch: it needs pickle, or a type that the program has not registered.
    """
    return record.decode(stock.own, make_foreign(allow_pickle=allow_pickle))


def restore_tree(
    state: MutableMapping[str, Any], record: Record, stock: Stock, *, allow_pickle: bool = False, strict: bool = True
) -> list[str]:
    """Write a record into the program's state, in place.

    Args:
        state: as it is given to `save`. Its tensors keep their identity; objects get `load_state_dict`.
        strict: every key and tensor must be on both sides; else what fits is restored.

    Returns:
        What did not fit, with `strict=False`.

    Raises:
        StateMismatch: the layout has changed; the message names every difference. Nothing is changed.
        DamagedCheckpoint: the structure breaks its form. Nothing is changed.
    """
    saved = record.decode(stock.stored, _keep_stored(stock, allow_pickle=allow_pickle))
    task = _Task(stock)
    fill = task.match_mapping("", state, saved)
    if task.differences and strict:
        raise StateMismatch(_told(task.differences))
    task.run(fill)
    return task.differences


def _told(differences: Sequence[str]) -> str:
    shown = differences[:_MAX_DIFFERENCES_TOLD]
    more = [f"and {len(differences) - len(shown)} more"] if len(differences) > len(shown) else []
    return (
        f"the checkpoint does not fit this program's state, {len(differences)} difference(s): "
        + "; ".join([*shown, *more])
        + ". Nothing was restored. Restore with strict=False to take what fits, or load() it and convert it"
    )


def _keep_stored(stock: Stock, *, allow_pickle: bool) -> Any:
    """Foreign values are made of the program's own tensors; the rest of the tree keeps references."""
    make = make_foreign(allow_pickle=allow_pickle)
    return lambda tag, body, again: make(tag, body, lambda node: _owned(again(node), stock))


def _owned(value: Any, stock: Stock) -> Any:
    """A decoded value with tensors of the program's own."""
    if isinstance(value, Stored):
        return stock.own(value.ref)
    if isinstance(value, Mapping):
        return _like_mapping(value, {key: _owned(one, stock) for key, one in value.items()})
    if isinstance(value, list):
        return [_owned(one, stock) for one in value]
    if isinstance(value, tuple):
        return _like_tuple(value, [_owned(one, stock) for one in value])
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _like_dataclass(
            value, {one.name: _owned(getattr(value, one.name), stock) for one in dataclasses.fields(value)}
        )
    if hasattr(value, "__dict__") and type(value).__name__ == "SimpleNamespace":
        return type(value)(**{key: _owned(one, stock) for key, one in vars(value).items()})
    if type(value).__name__ == "deque":
        return type(value)((_owned(one, stock) for one in value), value.maxlen)
    return value


def _like_mapping(like: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    made = copy.copy(like)
    made.update(items)  # type: ignore[attr-defined]
    return made


def _like_tuple(like: tuple[Any, ...], items: list[Any]) -> Any:
    return tuple.__new__(type(like), items) if hasattr(type(like), "_fields") else type(like)(items)


def _like_dataclass(like: Any, fields: dict[str, Any]) -> Any:
    made = object.__new__(type(like))
    for name, value in fields.items():
        object.__setattr__(made, name, value)
    return made


def _has_tensor(value: Any) -> bool:
    if isinstance(value, Stored | torch.Tensor):
        return True
    if isinstance(value, Mapping):
        return any(_has_tensor(one) for one in value.values())
    if isinstance(value, list | tuple | set | frozenset):
        return any(_has_tensor(one) for one in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return any(_has_tensor(getattr(value, one.name)) for one in dataclasses.fields(value))
    return _is_stateful(value)


def _is_stateful(value: Any) -> bool:
    kind = type(value)
    return callable(getattr(kind, "state_dict", None)) and callable(getattr(kind, "load_state_dict", None))


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, Mapping | list | tuple) and not value)


@dataclass
class _Task:
    """One restore: what differs, and what is to be done when nothing does."""

    stock: Stock
    differences: list[str] = field(default_factory=list)
    copies: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    objects: list[tuple[str, Any, Any]] = field(default_factory=list)

    # Comparing

    def match(self, path: str, here: Any, saved: Any) -> Fill:
        """Compare one place; gives what its value will be when it is filled."""
        if isinstance(here, torch.Tensor):
            return self._match_tensor(path, here, saved)
        if _is_stateful(here):
            return self._match_object(path, here, saved)
        if isinstance(saved, Stored) and isinstance(here, np.ndarray):
            return self._match_array(path, here, saved)
        if _is_empty(here):
            return lambda: _owned(saved, self.stock)
        if isinstance(here, MutableMapping) and isinstance(saved, Mapping):
            return self.match_mapping(path, here, saved)
        if isinstance(here, list | tuple) and isinstance(saved, list | tuple):
            return self._match_sequence(path, here, saved)
        if dataclasses.is_dataclass(here) and not isinstance(here, type):
            return self._match_dataclass(path, here, saved)
        if type(here) in _pytree.SUPPORTED_NODES and type(here) is type(saved):
            return self._match_node(path, here, saved)
        if _has_tensor(here) or (_has_tensor(saved) and not isinstance(here, np.ndarray)):
            self.differences.append(f"{path}: {_kind(saved)} in the checkpoint, {_kind(here)} here")
        return lambda: _owned(saved, self.stock)

    def match_mapping(self, path: str, here: MutableMapping[Any, Any], saved: Mapping[Any, Any]) -> Fill:
        """Compare two mappings key by key. Those without any tensor are plain data: what was saved replaces them."""
        prefix = f"{path}." if path else ""
        missing = [key for key in here if key not in saved]
        unexpected = [key for key in saved if key not in here]
        is_plain = (missing or unexpected) and path and not _has_tensor(here) and not _has_tensor(saved)
        if not is_plain:
            self.differences += [f"{prefix}{key}: missing in the checkpoint" for key in missing]
            self.differences += [f"{prefix}{key}: unexpected, only in the checkpoint" for key in unexpected]
        fills = {key: self.match(f"{prefix}{key}", here[key], saved[key]) for key in here if key in saved}

        def fill() -> Any:
            filled = {key: one() for key, one in fills.items()}
            if is_plain:
                filled = {key: filled[key] if key in filled else _owned(saved[key], self.stock) for key in saved}
                here.clear()
            here.update(filled)
            return here

        return fill

    def _match_sequence(self, path: str, here: Sequence[Any], saved: Sequence[Any]) -> Fill:
        if len(here) != len(saved):
            if _has_tensor(here) or _has_tensor(saved):
                self.differences.append(f"{path}: {len(saved)} item(s) in the checkpoint, {len(here)} here")
            return lambda: _owned(saved, self.stock)
        fills = [self.match(f"{path}.{index}", *pair) for index, pair in enumerate(zip(here, saved, strict=True))]

        def fill() -> Any:
            filled = [one() for one in fills]
            if isinstance(here, list):
                here[:] = filled
                return here
            is_same = all(new is old for new, old in zip(filled, here, strict=True))
            return here if is_same else _like_tuple(here, filled)  # type: ignore[arg-type]

        return fill

    def _match_dataclass(self, path: str, here: Any, saved: Any) -> Fill:
        names = [one.name for one in dataclasses.fields(here)]
        lacking = [name for name in names if not hasattr(saved, name)]
        if lacking:
            self.differences.append(f"{path}: {_kind(saved)} in the checkpoint has no {', '.join(lacking)}")
            return lambda: here
        fills = {name: self.match(f"{path}.{name}", getattr(here, name), getattr(saved, name)) for name in names}

        def fill() -> Any:
            filled = {name: one() for name, one in fills.items()}
            if all(filled[name] is getattr(here, name) for name in names):
                return here
            if here.__dataclass_params__.frozen:
                return _like_dataclass(here, filled)
            for name, value in filled.items():
                setattr(here, name, value)
            return here

        return fill

    def _match_node(self, path: str, here: Any, saved: Any) -> Fill:
        definition = _pytree.SUPPORTED_NODES[type(here)]
        children, context = definition.flatten_fn(here)
        old, _ = definition.flatten_fn(saved)
        fill = self._match_sequence(path, list(children), list(old))
        return lambda: definition.unflatten_fn(fill(), context)

    def _match_tensor(self, path: str, here: torch.Tensor, saved: Any) -> Fill:
        if isinstance(saved, torch.Tensor):  # made of parts, such as a sparse one
            self._compare(path, here, saved.shape, saved.dtype)
            self.copies.append((here, saved))
            return lambda: here
        if not isinstance(saved, Stored):
            self.differences.append(f"{path}: {_kind(saved)} in the checkpoint, {_kind(here)} here")
            return lambda: here
        target = here
        if hasattr(here, "to_local"):
            target = here.to_local()
            shard = saved.ref.shard
            if shard is not None and tuple(shard.global_shape) != tuple(here.shape):
                self._compare(path, here, torch.Size(shard.global_shape), saved.view.dtype)
                return lambda: here
        self._compare(path, target, saved.view.shape, saved.view.dtype)
        self.copies.append((target, saved.view))
        return lambda: here

    def _compare(self, path: str, here: torch.Tensor, shape: torch.Size, dtype: torch.dtype) -> None:
        if here.shape != shape:
            self.differences.append(f"{path}: shape {tuple(shape)} in the checkpoint, {tuple(here.shape)} here")
        if here.dtype != dtype:
            self.differences.append(f"{path}: dtype {dtype} in the checkpoint, {here.dtype} here")

    def _match_array(self, path: str, here: np.ndarray[Any, Any], saved: Stored) -> Fill:
        values = saved.view.numpy()
        if here.shape != values.shape or here.dtype != values.dtype:
            self.differences.append(
                f"{path}: array of shape {values.shape} and {values.dtype} in the checkpoint, {here.shape} and "
                f"{here.dtype} here"
            )
        if not here.flags.writeable:
            return lambda: self.stock.own(saved.ref)

        def fill() -> Any:
            np.copyto(here, values)
            return here

        return fill

    def _match_object(self, path: str, here: Any, saved: Any) -> Fill:
        if isinstance(here, torch.nn.Module):
            self._compare_module(path, here, saved)
        elif isinstance(here, torch.optim.Optimizer):
            self._compare_optimizer(path, here, saved)
        if isinstance(here, torch.nn.Module) and isinstance(saved, Mapping) and _is_pristine(here):
            for key, tensor in here.state_dict().items():
                if isinstance(saved.get(key), Stored):
                    self.copies.append((tensor, saved[key].view))
        else:
            self.objects.append((path, here, saved))
        return lambda: here

    def _compare_module(self, path: str, here: torch.nn.Module, saved: Any) -> None:
        if not isinstance(saved, Mapping):
            self.differences.append(f"{path}: {_kind(saved)} in the checkpoint, a module here")
            return
        now = here.state_dict()
        self.differences += [f"{path}.{key}: missing in the checkpoint" for key in now if key not in saved]
        self.differences += [f"{path}.{key}: unexpected, only in the checkpoint" for key in saved if key not in now]
        for key, tensor in now.items():
            stored = saved.get(key)
            is_lazy = isinstance(tensor, UninitializedParameter | UninitializedBuffer)
            if isinstance(tensor, torch.Tensor) and isinstance(stored, Stored) and not is_lazy:
                if stored.ref.shard is not None:
                    self._compare(f"{path}.{key}", tensor, torch.Size(stored.ref.shard.global_shape), stored.view.dtype)
                else:
                    self._compare(f"{path}.{key}", tensor, stored.view.shape, stored.view.dtype)

    def _compare_optimizer(self, path: str, here: torch.optim.Optimizer, saved: Any) -> None:
        groups = saved.get("param_groups") if isinstance(saved, Mapping) else None
        if not isinstance(groups, list):
            self.differences.append(f"{path}: {_kind(saved)} in the checkpoint, an optimizer here")
            return
        sizes = [len(group["params"]) for group in groups]
        own = [len(group["params"]) for group in here.param_groups]
        if sizes != own:
            self.differences.append(f"{path}.param_groups: of {sizes} parameters in the checkpoint, of {own} here")

    # Writing

    def run(self, fill: Fill) -> None:
        """Write everything. Objects come first, as they may still refuse; then they are given back what they had."""
        backups: list[tuple[Any, Any]] = []
        for path, here, saved in sorted(self.objects, key=lambda one: _rank_of(one[1])):
            backups.append((here, _backup(here)))
            try:
                here.load_state_dict(_for_object(here, saved, self.stock))
            except Exception as error:  # the object's own code
                for one, before in reversed(backups):
                    one.load_state_dict(before)
                raise StateMismatch(f"{path} refused its state: {error}. Nothing was restored") from error
        with torch.no_grad():
            _copy_all(self.copies)
        fill()


def _rank_of(here: Any) -> int:
    """Objects whose fit could not be checked before come first, modules last."""
    return 2 if isinstance(here, torch.nn.Module) else 1 if isinstance(here, torch.optim.Optimizer) else 0


def _backup(here: Any) -> Any:
    state = here.state_dict()
    # An optimizer's load_state_dict replaces its tensors and does not write into them.
    return state if isinstance(here, torch.optim.Optimizer) else copy.deepcopy(state)


def _for_object(here: Any, saved: Any, stock: Stock) -> Any:
    """What an object's load_state_dict gets."""
    owned = _owned(saved, stock)
    if isinstance(here, torch.nn.Module):
        return _with_shards(here.state_dict(), owned)
    return owned


def _with_shards(now: Mapping[str, Any], saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """A module's state whose sharded tensors are DTensors again, as the module's are."""
    sharded = {key: one for key, one in now.items() if hasattr(one, "to_local") and key in saved}
    if not sharded:
        return saved
    from torch.distributed.tensor import DTensor

    made = {
        key: DTensor.from_local(
            saved[key], one.device_mesh, one.placements, run_check=False, shape=one.shape, stride=one.stride()
        )
        for key, one in sharded.items()
    }
    return _like_mapping(saved, made)  # type: ignore[no-any-return]


def _is_pristine(module: torch.nn.Module) -> bool:
    """Whether loading a state into the module is nothing but copying its tensors: then it is done all at once."""
    if type(module).load_state_dict is not torch.nn.Module.load_state_dict:
        return False
    return all(_is_plain_loader(one) for one in module.modules()) and all(
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


def _hooks_of(module: torch.nn.Module) -> Iterator[Any]:
    for name in (
        "_load_state_dict_pre_hooks",
        "_load_state_dict_post_hooks",
        "_state_dict_hooks",
        "_state_dict_pre_hooks",
    ):
        yield getattr(module, name, None)


def _copy_all(copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    alike = []
    for here, saved in copies:
        if here.numel() and any(
            stride == 0 and size > 1 for stride, size in zip(here.stride(), here.shape, strict=True)
        ):
            # An expanded tensor cannot be written to as it is; its memory can.
            index = tuple(0 if stride == 0 else slice(None) for stride in here.stride())
            here[index].copy_(saved[index])
        elif here.is_conj() or here.is_neg():
            here.copy_(saved)
        else:
            alike.append((here.detach(), saved))
    if alike:
        torch._foreach_copy_([here for here, _ in alike], [saved for _, saved in alike])


def _kind(value: Any) -> str:
    if isinstance(value, Stored):
        return str(value)
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
    return f"a {type(value).__name__}"
