"""How many steps a loader lets come."""

from __future__ import annotations

from hetstream.mpi_dataworkers.order.reorder import MAX_STEPS, StepSize, Window

MIB = 1 << 20


def test_a_first_pass_begins_with_the_minimum_and_opens_as_batches_show_their_size() -> None:
    size = StepSize()
    window = Window(100 * MIB, 2, MAX_STEPS, size)
    assert window.steps == 2
    opened = []
    for step in range(1, 40):
        window.note(MIB, step, step * MIB)
        opened.append(window.steps)
    assert all(steps <= max(2, 2 * step) for step, steps in enumerate(opened, start=1)), opened
    assert opened == sorted(opened)
    assert 60 < opened[-1] <= 100
    assert Window(100 * MIB, 2, MAX_STEPS, size).steps == 100, "the next pass knows"


def test_what_waits_and_what_may_come_fits_the_buffer_or_is_the_minimum() -> None:
    for num_bytes in (1, 1000, MIB, 30 * MIB, 200 * MIB):
        size = StepSize()
        size.note(num_bytes)
        window = Window(100 * MIB, 3, MAX_STEPS, size)
        assert window.steps in (3, MAX_STEPS) or window.steps * num_bytes <= 100 * MIB
        assert 3 <= window.steps <= MAX_STEPS


def test_batches_that_turn_out_large_close_the_window_at_once_and_small_ones_open_it_slowly() -> None:
    size = StepSize()
    size.note(MIB)
    window = Window(100 * MIB, 2, MAX_STEPS, size)
    assert window.steps == 100
    window.note(40 * MIB, 11, 50 * MIB)
    assert window.steps == 12, "one more has room beside the eleven that are there"
    for _ in range(5):
        window.note(MIB, 1, MIB)
    assert window.steps < 4, "one in five may be large"
    for _ in range(200):
        window.note(MIB, 1, MIB)
    assert window.steps > 80


def test_a_batch_of_no_bytes_is_no_division_by_zero() -> None:
    window = Window(MIB, 1, 8, StepSize())
    window.note(0, 1, 0)
    window.note(0, 2, 0)
    assert window.steps == 4


def test_a_limit_holds_whatever_there_is_room_for_until_it_is_taken_away() -> None:
    size = StepSize()
    size.note(1)
    window = Window(MIB, 2, MAX_STEPS, size)
    window.most = 4
    for _ in range(5):
        window.note(1, 1, 1)
        assert window.steps == 4
    window.most = MAX_STEPS
    assert window.steps == MAX_STEPS
