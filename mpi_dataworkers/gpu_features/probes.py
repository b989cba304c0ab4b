"""Kernels that take one resource of a GPU and nothing of the other, in Triton: traffic to memory, or arithmetic.

Launched beside a layer of the model they show what it leaves (`capacity.py`). Both go on for as many rounds, in as many
programs, as they are told to.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

# Values that a program works on at once; four such blocks in a round.
MEMORY_BLOCK, ARITHMETIC_BLOCK = 2048, 1024
BLOCKS_OF_A_ROUND = 4
# Products and sums of a round, for each value.
STEPS_OF_A_ROUND = 64
MEMORY_OPTIONS, ARITHMETIC_OPTIONS = {"num_warps": 8}, {"num_warps": 4}


@triton.jit(do_not_specialize=["num_rounds", "num_blocks"])
def memory_probe(source, made, num_rounds, num_blocks, BLOCK: tl.constexpr):
    """Read blocks of float32, four in each round, and add them up.

    Args:
        source: `num_blocks` blocks, more than caches hold.
        made: the sums, a block for each program: without them nothing would have to be read.
        num_rounds: of each program.
        num_blocks: a multiple of four.
        BLOCK: values in a block, a power of two.
    """
    program = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    total = tl.full([BLOCK], 0.0, tl.float32)
    group = program
    left = num_rounds
    while left > 0:
        block = source + (group * 4 % num_blocks) * BLOCK + place
        first = tl.load(block) + tl.load(block + BLOCK)
        total += first + (tl.load(block + 2 * BLOCK) + tl.load(block + 3 * BLOCK))
        group += tl.num_programs(0)
        left -= 1
    tl.store(made + program * BLOCK + place, total)


@triton.jit(do_not_specialize=["num_rounds"])
def arithmetic_probe(made, num_rounds, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    """Multiply and add float32 in registers, 64 times in each round.

    Args:
        made: what comes out, a block for each program: without it nothing would have to be computed.
        num_rounds: of each program.
        BLOCK: values of a program, a power of two.
        STEPS: products and sums of a round.
    """
    program = tl.program_id(0)
    place = tl.arange(0, BLOCK)
    value = place.to(tl.float32) / BLOCK
    left = num_rounds
    while left > 0:
        for _ in tl.static_range(STEPS):
            value = value * 0.5 + 0.25
        left -= 1
    tl.store(made + program * BLOCK + place, value)


def launch_memory(source: Any, made: Any, num_programs: int, num_rounds: int, block: int = MEMORY_BLOCK) -> None:
    """Run the probe of memory traffic on the current stream; `source` has a multiple of four blocks."""
    num_blocks = source.numel() // block
    memory_probe[(num_programs,)](source, made, num_rounds, num_blocks, BLOCK=block, **MEMORY_OPTIONS)


def launch_arithmetic(made: Any, num_programs: int, num_rounds: int, block: int = ARITHMETIC_BLOCK) -> None:
    """Run the probe of arithmetic on the current stream."""
    arithmetic_probe[(num_programs,)](made, num_rounds, BLOCK=block, STEPS=STEPS_OF_A_ROUND, **ARITHMETIC_OPTIONS)
