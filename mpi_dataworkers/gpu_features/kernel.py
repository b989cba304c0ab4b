"""The kernel that computes all features of a batch, in Triton: vertical and horizontal fusion in one launch.

Its programs, as many as the grid has, go through the tiles of all features. For each tile a program finds the values
that it needs, carries out the feature's operators in registers, one opcode after the other, and stores the results
where the trainer wants them. The grid is thus the cap on the multiprocessors that preprocessing takes.

Registers hold every value twice: as an int64, and as a float64, of which the operator at hand says which one counts.
What the operators mean is said in `operators.py`; a float32 is rounded where it would be there, so that the results are
those of NumPy's float32. The layout is that of `arena.py`.

What differs from batch to batch stands in the arena and not in the call, so a CUDA graph that has captured a launch can
be replayed on another batch. Loops are `while` and not `range`: Triton's interpreter cannot count to a tensor with
NumPy 2.4.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

# The places of the operators in `OPERATORS`, and of the dtypes in `DTYPES`.
LOGIT = tl.constexpr(0)
BOX_COX = tl.constexpr(1)
ONEHOT = tl.constexpr(2)
SIGRID_HASH = tl.constexpr(3)
FIRST_X = tl.constexpr(4)
CLAMP = tl.constexpr(5)
BUCKETIZE = tl.constexpr(6)
NGRAM = tl.constexpr(7)
MAP_ID = tl.constexpr(8)
FILL_NULL = tl.constexpr(9)
CAST = tl.constexpr(10)
FLOAT32 = tl.constexpr(0)
FLOAT64 = tl.constexpr(1)
INT32 = tl.constexpr(2)
INT64 = tl.constexpr(3)
LAUNCHES_AT = tl.constexpr(4)
FEATURE_WORDS = tl.constexpr(16)
OPERATOR_WORDS = tl.constexpr(8)


@triton.jit(do_not_specialize=["number"])
def features_kernel(batch, made, constants, number, TILE: tl.constexpr):
    """Compute the tiles of a launch.

    Args:
        batch: the arena of the batch: its header, features, tiles, and what they point to.
        made: the arena of the results.
        constants: operators and their tables.
        number: of the launch, whose tiles the header has.
        TILE: values in a tile, a power of two.
    """
    num_rows = tl.load(batch)
    features = batch + tl.load(batch + 1)
    tiles = batch + tl.load(batch + 2)
    tile = tl.load(batch + LAUNCHES_AT + 2 * number) + tl.program_id(0)
    end = tl.load(batch + LAUNCHES_AT + 2 * number + 1)
    while tile < end:
        feature = features + tl.load(tiles + 2 * tile) * FEATURE_WORDS
        at = tl.load(tiles + 2 * tile + 1) + tl.arange(0, TILE)
        num_values = tl.load(feature + 13)
        mask = at < num_values
        source, goal, is_there, place = _places(batch, feature, constants, at, mask, num_rows)
        readable = mask & is_there
        whole, real = _read(batch, tl.load(feature), tl.load(feature + 4) + source, readable)
        valid = readable
        if tl.load(feature + 5) >= 0:
            mask_bytes = batch.to(tl.pointer_type(tl.int8)) + tl.load(feature + 5)
            valid = tl.load(mask_bytes + source, mask=readable, other=0) != 0
        else:
            valid = mask
        operator = constants + tl.load(feature + 1) * OPERATOR_WORDS
        left = tl.load(feature + 2)
        while left > 0:
            code = tl.load(operator)
            if code == ONEHOT:
                real = _class(operator, whole, real, is_there, place)
                is_there = mask  # from here on a row has values, whatever its list had
            elif code == FILL_NULL:
                whole, real = _filled(operator, whole, real, valid)
                valid = mask
            else:
                whole, real = _applied(operator, constants, code, whole, real)
            operator += OPERATOR_WORDS
            left -= 1
        _write(made, tl.load(feature + 3), tl.load(feature + 11) + goal, mask, whole, real)
        tile += tl.num_programs(0)


@triton.jit
def _places(batch, feature, constants, at, mask, num_rows):
    """Of each value of the result: where it comes from, where it goes, whether there is one, its place in the row."""
    width = tl.load(feature + 8)
    stride = tl.load(feature + 12)
    source = at
    goal = at
    place = at * 0
    is_there = mask
    row = at * 0
    if width > 0:
        row = at // width
        place = at - row * width
        goal = row * stride + place
    if tl.load(feature + 6) != 0:
        if width == 0:
            starts = batch + tl.load(feature + 10)
            row = _row_of(starts, at, mask, num_rows)
            place = at - tl.load(starts + row, mask=mask, other=0)
        given_width = tl.load(feature + 7)
        start = row * given_width
        length = at * 0 + given_width
        if given_width == 0:
            given_starts = batch + tl.load(feature + 9)
            start = tl.load(given_starts + row, mask=mask, other=0)
            length = tl.load(given_starts + row + 1, mask=mask, other=0) - start
        operators = constants + tl.load(feature + 1) * OPERATOR_WORDS
        num_operators = tl.load(feature + 2)
        within = place
        if tl.load(feature + 14) != 0:  # Onehot takes the first of what is left of a list
            within = place * 0
        is_there = mask & (_length_after(operators, num_operators, length) > 0)
        number = num_operators
        while number > 0:
            number -= 1
            operator = operators + number * OPERATOR_WORDS
            if tl.load(operator) == NGRAM:
                size = tl.minimum(_length_after(operators, number, length), tl.load(operator + 3))
                size = tl.maximum(size, 1)
                window = within // size
                within = window + (within - window * size)
        source = start + within
    return source, goal, is_there, place


@triton.jit
def _row_of(starts, at, mask, num_rows):
    """The row with starts[row] <= at < starts[row + 1]."""
    low = at * 0
    high = low + num_rows - 1
    left = num_rows
    while left > 0:
        middle = (low + high) // 2
        is_behind = tl.load(starts + middle + 1, mask=mask, other=0) <= at
        is_open = low < high
        low = tl.where(is_open & is_behind, middle + 1, low)
        high = tl.where(is_open & (is_behind == 0), middle, high)
        left = left // 2
    return low


@triton.jit
def _length_after(operators, num_operators, length):
    """What the first operators of a feature make of the lengths of its lists."""
    operator = operators
    left = num_operators
    while left > 0:
        code = tl.load(operator)
        if code == FIRST_X:
            length = tl.minimum(length, tl.load(operator + 3))
        elif code == NGRAM:
            size = tl.minimum(length, tl.load(operator + 3))
            length = tl.where(length > 0, (length - size + 1) * size, 0)
        operator += OPERATOR_WORDS
        left -= 1
    return length


@triton.jit
def _read(batch, dtype, offset, mask):
    """Values of the batch, as an int64 and a float64 of which one counts."""
    whole = offset * 0
    real = whole.to(tl.float64)
    if dtype == FLOAT32:
        real = tl.load(batch.to(tl.pointer_type(tl.float32)) + offset, mask=mask, other=0.0).to(tl.float64)
    elif dtype == FLOAT64:
        real = tl.load(batch.to(tl.pointer_type(tl.float64)) + offset, mask=mask, other=0.0)
    elif dtype == INT32:
        whole = tl.load(batch.to(tl.pointer_type(tl.int32)) + offset, mask=mask, other=0).to(tl.int64)
    else:
        whole = tl.load(batch + offset, mask=mask, other=0)
    return whole, real


@triton.jit
def _write(made, dtype, offset, mask, whole, real):
    if dtype == FLOAT32:
        tl.store(made.to(tl.pointer_type(tl.float32)) + offset, real.to(tl.float32), mask=mask)
    elif dtype == FLOAT64:
        tl.store(made.to(tl.pointer_type(tl.float64)) + offset, real, mask=mask)
    elif dtype == INT32:
        tl.store(made.to(tl.pointer_type(tl.int32)) + offset, whole.to(tl.int32), mask=mask)
    else:
        tl.store(made + offset, whole, mask=mask)


@triton.jit
def _number(operator, place):
    """A real number of an operator."""
    return tl.load(operator + place).to(tl.float64, bitcast=True)


@triton.jit
def _single(real):
    """Rounded to a float32."""
    return real.to(tl.float32).to(tl.float64)


@triton.jit
def _applied(operator, constants, code, whole, real):
    """An operator that makes one value of each; FirstX and Ngram are done when the values are found."""
    if code == LOGIT:
        real = _logit(operator, real)
    elif code == BOX_COX:
        real = _box_cox(operator, real)
    elif code == SIGRID_HASH:
        whole = _hashed(operator, whole)
    elif code == CLAMP:
        whole, real = _clamped(operator, whole, real)
    elif code == BUCKETIZE:
        whole = _bucket(operator, constants, whole, real)
    elif code == MAP_ID:
        size = tl.load(operator + 4)
        is_inside = (whole >= 0) & (whole < size)
        whole = tl.load(constants + tl.load(operator + 3) + whole, mask=is_inside, other=0)
    elif code == CAST:
        whole, real = _cast(tl.load(operator + 1), tl.load(operator + 2), whole, real)
    return whole, real


@triton.jit
def _logit(operator, real):
    low = _number(operator, 3)
    high = _number(operator, 4)
    x = _single(real)
    x = tl.where(x < low, low, x)
    x = tl.where(x > high, high, x)
    return _single(tl.log(_single(x / _single(1.0 - x))))


@triton.jit
def _box_cox(operator, real):
    exponent = _number(operator, 3)
    is_positive = real > 0
    logarithm = tl.log(tl.where(is_positive, real, 1.0))
    power = logarithm * exponent
    # exp(x) - 1 loses its digits near 0.
    is_small = tl.abs(power) < 1e-3
    small = tl.where(is_small, power, 0.0)
    series = small * (1.0 + small * (0.5 + small * (0.16666666666666666 + small * 0.041666666666666664)))
    raised = tl.where(is_small, series, tl.exp(power) - 1.0)
    is_logarithm = exponent == 0.0
    raised = raised / tl.where(is_logarithm, 1.0, exponent)
    found = tl.where(is_logarithm, logarithm, raised)
    return _single(tl.where(is_positive, found, real))


@triton.jit
def _hashed(operator, whole):
    factor = tl.full([], 0x9DDFEA08EB382D69, tl.uint64)
    salt = tl.load(operator + 3).to(tl.uint64, bitcast=True)
    divisor = tl.load(operator + 4)
    x = whole.to(tl.uint64, bitcast=True)
    x = (x ^ 0xFFFFFFFFFFFFFFFF) + (x << 21)
    x = x ^ (x >> 24)
    x = x + (x << 3) + (x << 8)
    x = x ^ (x >> 14)
    x = x + (x << 2) + (x << 4)
    x = x ^ (x >> 28)
    x = x + (x << 31)
    a = (x ^ salt) * factor
    a = a ^ (a >> 47)
    b = (a ^ salt) * factor
    b = b ^ (b >> 47)
    remainder = (b * factor).to(tl.int64, bitcast=True) % divisor
    return tl.where(remainder < 0, remainder + divisor, remainder)


@triton.jit
def _clamped(operator, whole, real):
    if tl.load(operator + 1) < INT32:
        low = _number(operator, 3)
        high = _number(operator, 4)
        real = tl.where(real < low, low, real)
        real = tl.where(real > high, high, real)
    else:
        whole = tl.maximum(whole, tl.load(operator + 3))
        whole = tl.minimum(whole, tl.load(operator + 4))
    return whole, real


@triton.jit
def _bucket(operator, constants, whole, real):
    """How many borders are below; of NaN, what the operator says."""
    borders = (constants + tl.load(operator + 3)).to(tl.pointer_type(tl.float64))
    low = whole * 0
    high = low + tl.load(operator + 4)
    left = tl.load(operator + 4)
    while left > 0:
        middle = (low + high) // 2
        is_open = low < high
        is_below = tl.load(borders + middle, mask=is_open, other=0.0) < real
        low = tl.where(is_open & is_below, middle + 1, low)
        high = tl.where(is_open & (is_below == 0), middle, high)
        left = left // 2
    return tl.where(real == real, low, tl.load(operator + 5))


@triton.jit
def _filled(operator, whole, real, valid):
    if tl.load(operator + 1) < INT32:
        is_number = (real == real) | (tl.load(operator + 4) == 0)
        real = tl.where(valid & is_number, real, _number(operator, 3))
    else:
        whole = tl.where(valid, whole, tl.load(operator + 3))
    return whole, real


@triton.jit
def _class(operator, whole, real, is_there, place):
    """Of each value of a row of classes: whether it is the one; only the last Onehot of a feature has such a row."""
    x = _single(real)
    if tl.load(operator + 1) >= INT32:
        x = whole.to(tl.float32).to(tl.float64)
    found = _single(_single(x - _number(operator, 3)) / _number(operator, 4))
    count = tl.load(operator + 5).to(tl.float32).to(tl.float64)
    is_inside = is_there & (found >= 0.0) & (found < count)
    chosen = tl.where(is_inside, found, 0.0).to(tl.int64)
    own = tl.where(tl.load(operator + 6) != 0, place, 0)
    return tl.where(chosen == own, 1.0, 0.0).to(tl.float64)


@triton.jit
def _cast(given, made, whole, real):
    if given < INT32:
        if made == FLOAT32:
            real = _single(real)
        elif made == INT32:
            inside = tl.where(real == real, real, 0.0)
            inside = tl.where(inside < -2147483648.0, -2147483648.0, inside)
            whole = tl.where(inside > 2147483647.0, 2147483647.0, inside).to(tl.int64)
        elif made == INT64:
            is_above = real >= 9223372036854775808.0
            inside = tl.where((real == real) & (is_above == 0), real, 0.0)
            inside = tl.where(inside < -9223372036854775808.0, -9223372036854775808.0, inside)
            whole = tl.where(is_above, 9223372036854775807, inside.to(tl.int64))
    elif made == FLOAT32:
        real = whole.to(tl.float32).to(tl.float64)
    elif made == FLOAT64:
        real = whole.to(tl.float64)
    elif made == INT32:
        whole = tl.minimum(tl.maximum(whole, -2147483648), 2147483647)
    return whole, real


def launch(arenas: tuple[Any, Any, Any], number: int, num_programs: int, tile: int) -> None:
    """Run the kernel on the device that the arenas are on.

    Args:
        arenas: batch, results, constants.
        number: of the launch in the batch's header.
        num_programs: of the grid.
        tile: values in a tile.
    """
    features_kernel[(num_programs,)](*arenas, number, TILE=tile, **options_of(tile))


def options_of(tile: int) -> dict[str, Any]:
    """With which the kernel is compiled for a tile."""
    # A thread has two values. A product and a sum are rounded one by one, as NumPy does.
    return {"num_warps": max(1, min(8, tile // 64)), "enable_fp_fusion": False}
