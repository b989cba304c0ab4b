"""For a copy, what the code of a pipeline calls `id` gives the id of the program's object, and for no other."""

from __future__ import annotations

import builtins
import gc
from typing import Any

from hetstream.mpi_dataworkers.ops import pickling
from hetstream.mpi_dataworkers.ops.pickling import pickle_apart, unpickle


class Step:
    """One object of a dataset's."""


class Slotted:
    __slots__ = ("step",)


class Notes:
    def __init__(self, number: int = 2) -> None:
        self.steps: list[Any] = [Step() for _ in range(number)]

    def note(self, step: Any) -> int:
        return id(step)


class Silent:
    """Its code has the word, but for an attribute: else no two processes would send the same pickle."""

    def __init__(self) -> None:
        self.steps, self.id = [Step()], 3

    def part(self) -> int:
        return self.id


def test_a_copy_has_the_id_of_what_it_was_made_from() -> None:
    notes = Notes()
    notes.steps.append(notes)
    copy = unpickle(pickle_apart(notes).blob)[0]
    assert [copy.note(step) for step in copy.steps] == [*map(builtins.id, notes.steps)]
    assert [notes.note(step) for step in notes.steps] == [*map(builtins.id, notes.steps)], (
        "the program's own are as they are"
    )
    again = unpickle(pickle_apart(copy).blob)[0]
    assert [again.note(step) for step in again.steps] == [*map(builtins.id, notes.steps)], "a copy of a copy, too"


def test_an_object_at_the_place_of_a_copy_that_is_gone_has_its_own_id() -> None:
    notes = Notes()
    copy = unpickle(pickle_apart(notes).blob)[0]
    reference, original = pickling._originals[builtins.id(copy.steps[0])]
    known = len(pickling._originals)
    del copy
    gc.collect()
    assert len(pickling._originals) < known
    assert reference() is None
    other = Step()
    pickling._originals[builtins.id(other)] = reference, original  # as before its end is noted
    assert notes.note(other) == builtins.id(other)
    del pickling._originals[builtins.id(other)]


def test_what_cannot_be_referred_to_weakly_keeps_its_own_id() -> None:
    notes = Notes()
    notes.steps = [Slotted()]
    copy = unpickle(pickle_apart(notes).blob)[0]
    assert copy.note(copy.steps[0]) == builtins.id(copy.steps[0])


def test_pickles_of_code_that_asks_for_no_id_and_of_many_objects_have_none() -> None:
    silent = pickle_apart(Silent())
    assert silent.blob.endswith(b"."), "the end of the one pickle"
    assert silent.blob.count(b"\x80\x05") == 1
    assert pickle_apart(Notes(pickling._MOST_IDS)).blob.count(b"\x80\x05") == 1
    assert pickle_apart(Notes()).blob.count(b"\x80") > 1
