"""What of a batch is pickled: objects that are neither tensors nor plain values, and the classes that they name."""

from __future__ import annotations

import contextlib
import io
import pickle
import sys
from typing import Any

import cloudpickle

from hetstream.mpi_dataworkers.errors import RemoteError

# What cloudpickle knows of the classes that it has written or read by value.
_CloudPickler: Any = cloudpickle.Pickler
_id_of_class: Any = cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS
_class_by_id: Any = cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID


def load_leaf(leaf: bytes) -> Any:
    """Unpickle it.

    Raises:
        RemoteError: user code raised.
    """
    try:
        return pickle.loads(leaf)
    except Exception as error:  # unpickling runs user code: any exception may come, and it would come again
        raise RemoteError(f"an object in the batch cannot be unpickled: {error!r}") from error


def resolve_class(module: str, qualified_name: str) -> Any:
    """Find a class by name; `__main__` means the trainer's program."""
    found: Any = sys.modules[module]
    for part in qualified_name.split("."):
        found = getattr(found, part)
    return found


def find_class(class_id: str, module: str, qualified_name: str) -> Any:
    """Find the class whose copy a data worker has: by its name, or among those that this process has sent by value.

    Args:
        class_id: the one that cloudpickle gave it in the process whose definition the data worker has, which may be
            another one with the same definition.
        module, qualified_name: where it was defined.

    Raises:
        LookupError: it is not here.
    """
    if "<locals>" not in qualified_name:
        with contextlib.suppress(KeyError, AttributeError):
            return resolve_class(module, qualified_name)
    if class_id in _class_by_id:
        return _class_by_id[class_id]
    alike = [kind for kind in list(_id_of_class) if (kind.__module__, kind.__qualname__) == (module, qualified_name)]
    if len(alike) != 1:
        raise LookupError(
            f"there are {len(alike)} classes {qualified_name} of {module} in the training process. Define the class of "
            "the batch at the top of a module"
        )
    return alike[0]


def _set_attributes(value: object, state: Any) -> None:
    for part in state if isinstance(state, tuple) else (state,):
        for name, attribute in (part or {}).items():
            object.__setattr__(value, name, attribute)


def _reduce_for_trainer(value: Any) -> Any:
    """Write a class that came from the trainer as its name: the copy in the data worker is not the trainer's class."""
    if isinstance(value, type):
        if value in _id_of_class:
            return find_class, (_id_of_class[value], value.__module__, value.__qualname__)
        if value.__module__ in ("__main__", "__mp_main__") and "<locals>" not in value.__qualname__:
            return resolve_class, (value.__module__, value.__qualname__)
        return NotImplemented
    kind = type(value)
    if kind in _id_of_class and hasattr(kind, "__slots__") and not hasattr(kind, "__setstate__"):
        # The copy has no slots (cloudpickle leaves them out) but a `__dict__`, which the trainer's class may not have.
        reduced = value.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        if isinstance(reduced, tuple) and len(reduced) > 2 and reduced[2] is not None:
            return (*(*reduced, None, None)[:5], _set_attributes)
    return NotImplemented


class _LeafPickler(pickle.Pickler):
    """Writes what both processes can find by name."""

    def reducer_override(self, value: Any) -> Any:
        return _reduce_for_trainer(value)


class _ByValuePickler(_CloudPickler):  # type: ignore[misc]
    """Writes also functions and classes that only this process has, made by user code: several times slower."""

    def reducer_override(self, value: Any) -> Any:
        reduced = _reduce_for_trainer(value)
        if reduced is NotImplemented and isinstance(value, type) and (place := _place_in_module(value)) is not None:
            return getattr, place
        return super().reducer_override(value) if reduced is NotImplemented else reduced


def _place_in_module(kind: type) -> tuple[object, str] | None:
    """Where a module has a class that does not say so itself: a named tuple in the body of a class, say.

    Returns:
        What has it, and under which name; None where its own name leads to it, or nothing does.
    """
    module = sys.modules.get(kind.__module__)
    if module is None or "<locals>" in kind.__qualname__:
        return None
    with contextlib.suppress(AttributeError):
        if resolve_class(kind.__module__, kind.__qualname__) is kind:
            return None
    members = list(vars(module).values())
    classes = [found for found in members if isinstance(found, type) and found.__module__ == kind.__module__]
    for owner in (module, *classes):
        for name, attribute in list(vars(owner).items()):
            if attribute is kind:
                return owner, name
    return None


def pickle_leaf(value: object) -> bytes:
    """Pickle what is no tensor, array, container or plain value."""
    try:
        return _dump(_LeafPickler, value)
    except (pickle.PicklingError, AttributeError, TypeError):
        return _dump(_ByValuePickler, value)


def _dump(kind: Any, value: object) -> bytes:
    stream = io.BytesIO()
    kind(stream, protocol=5).dump(value)
    return stream.getvalue()
