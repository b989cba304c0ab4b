"""Compile the kernels for GPUs that are not here: what tests do, and what a packager may do in advance.

print(compile_for(90))
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

from hetstream.base.files import temporary_place
from hetstream.mpi_dataworkers.gpu_features import probes
from hetstream.mpi_dataworkers.gpu_features.kernel import features_kernel, options_of
from hetstream.mpi_dataworkers.gpu_features.schedule import check_tile, check_whole

_WARP_THREADS = 32
_FIRST_ARCHITECTURE = 75  # of those that Triton compiles for: Turing
_ARGUMENTS = {
    **dict.fromkeys(("batch", "made", "constants"), "*i64"),
    "number": "i32",
    "TILE": "constexpr",
}


@dataclass(frozen=True)
class Compiled:
    """A kernel for a GPU.

    Attributes:
        architecture: 80 for the A100, 90 for the H100 and H200.
        tile: values in a tile.
        num_bytes: of the program.
        spilled_bytes: of each thread, that registers have no room for.
    """

    architecture: int
    tile: int
    num_bytes: int
    spilled_bytes: int


def compile_for(architecture: int, tile: int = 256) -> Compiled:
    """Compile for a compute capability, without a GPU.

    Raises:
        FeatureError: there is no such architecture that Triton knows, or the tile cannot be.
    """
    check_whole("architecture", architecture, _FIRST_ARCHITECTURE)
    check_tile(tile)
    kernel = _compiled(features_kernel, _ARGUMENTS, {"TILE": tile}, architecture, options_of(tile))
    program = kernel.asm["cubin"]
    return Compiled(architecture, tile, len(program), _stack_bytes(program))


@dataclass(frozen=True)
class CompiledProbe:
    """A probe for a GPU.

    Attributes:
        ptx: its text.
        spilled_bytes: of each thread.
    """

    ptx: str
    spilled_bytes: int


def compile_probes(architecture: int) -> tuple[CompiledProbe, ...]:
    """The probes of memory traffic and of arithmetic, for a compute capability, without a GPU.

    Raises:
        FeatureError: there is no such architecture that Triton knows.
    """
    check_whole("architecture", architecture, _FIRST_ARCHITECTURE)
    pointers, numbers = dict.fromkeys(("source", "made"), "*fp32"), dict.fromkeys(("num_rounds", "num_blocks"), "i32")
    memory = _compiled(
        probes.memory_probe,
        {**pointers, **numbers, "BLOCK": "constexpr"},
        {"BLOCK": probes.MEMORY_BLOCK},
        architecture,
        probes.MEMORY_OPTIONS,
    )
    arithmetic = _compiled(
        probes.arithmetic_probe,
        {"made": "*fp32", "num_rounds": "i32", "BLOCK": "constexpr", "STEPS": "constexpr"},
        {"BLOCK": probes.ARITHMETIC_BLOCK, "STEPS": probes.STEPS_OF_A_ROUND},
        architecture,
        probes.ARITHMETIC_OPTIONS,
    )
    return tuple(CompiledProbe(each.asm["ptx"], _stack_bytes(each.asm["cubin"])) for each in (memory, arithmetic))


def _compiled(
    kernel: Any, arguments: dict[str, str], constants: dict[str, int], architecture: int, options: dict[str, Any]
) -> Any:
    # Memory of PyTorch begins where 16 bytes can be read at once.
    pointers = {(at,): [["tt.divisibility", 16]] for at, kind in enumerate(arguments.values()) if kind[0] == "*"}
    source = triton.compiler.ASTSource(kernel, arguments, constants, pointers)
    return triton.compile(source, target=GPUTarget("cuda", architecture, _WARP_THREADS), options=options)


def _stack_bytes(program: bytes) -> int:
    """What the assembler says of a kernel: what registers have no room for is on a stack of each thread."""
    tool = Path(triton.backends.__file__).parent / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin", dir=temporary_place()) as file:
        file.write(program)
        file.flush()
        listed = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    return max(int(number) for number in re.findall(r"(?:STACK|LOCAL):(\d+)", listed.stdout))
