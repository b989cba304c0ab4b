"""A forward as the program calls it, with plain tensors in place of the marked ones. Called by `forward.py`.

The tensors are in lists and dictionaries, which are made anew for that. What the forward changes in them, as a key that
it adds to its batch, the program finds in its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any


class OwnCall:
    """A call of a function with arguments that stand for those of the program.

    Args:
        function: the function.
        theirs: the program's arguments and keyword arguments.
        own: the same, of the same structure, as the function is to get them.

    Attributes:
        has_changed: the function has changed a list or dictionary that it was given.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        theirs: tuple[tuple[Any, ...], Mapping[str, Any]],
        own: tuple[tuple[Any, ...], Mapping[str, Any]],
    ) -> None:
        self.has_changed = False
        self._function = function
        self._own = own
        values = zip((*theirs[0], *theirs[1].values()), (*own[0], *own[1].values()), strict=True)
        self._containers = [pair for value in values for pair in _containers(*value)]

    def __call__(self) -> Any:
        """Call it, and have the program find what it changes."""
        given = [mine.copy() for _, mine in self._containers]
        result = self._function(*self._own[0], **self._own[1])
        for (theirs, mine), before in zip(self._containers, given, strict=True):
            self.has_changed |= _change(theirs, before, mine)
        return result


def _containers(theirs: Any, own: Any) -> Iterator[tuple[Any, Any]]:
    """The lists and dictionaries in a value, with those that stand for them."""
    if theirs is own:
        return
    if isinstance(theirs, dict):
        yield theirs, own
        for name, value in theirs.items():
            yield from _containers(value, own[name])
    elif type(theirs) in (list, tuple):
        if type(theirs) is list:
            yield theirs, own
        for value, mine in zip(theirs, own, strict=True):
            yield from _containers(value, mine)


def _change(theirs: Any, before: Any, after: Any) -> bool:
    """Change a container as another one was changed; whether it was."""
    if len(before) == len(after) and all(was is now for was, now in zip(_parts(before), _parts(after), strict=True)):
        return False
    if isinstance(theirs, dict):
        for name in before:
            if name not in after:
                del theirs[name]
        theirs.update({name: value for name, value in after.items() if before.get(name, theirs) is not value})
    else:
        kept = {id(value): own for value, own in zip(before, theirs, strict=True)}
        theirs[:] = [kept.get(id(value), value) for value in after]
    return True


def _parts(container: Any) -> Iterator[Any]:
    if isinstance(container, dict):
        yield from container
        yield from container.values()
    else:
        yield from container
