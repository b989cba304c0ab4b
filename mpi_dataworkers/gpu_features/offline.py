"""Compile the kernel for GPUs that are not here: what tests do, and what a packager may do in advance.

print(compile_for(90))
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget

from hetstream.mpi_dataworkers.gpu_features.kernel import features_kernel, options_of

_WARP_THREADS = 32
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
    """Compile for a compute capability, without a GPU."""
    source = triton.compiler.ASTSource(features_kernel, _ARGUMENTS, {"TILE": tile})
    target = GPUTarget("cuda", architecture, _WARP_THREADS)
    kernel = triton.compile(source, target=target, options=options_of(tile))
    program = kernel.asm["cubin"]
    return Compiled(architecture, tile, len(program), _stack_bytes(program))


def _stack_bytes(program: bytes) -> int:
    """What the assembler says of a kernel: what registers have no room for is on a stack of each thread."""
    tool = Path(triton.backends.__file__).parent / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(program)
        file.flush()
        listed = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    return max(int(number) for number in re.findall(r"(?:STACK|LOCAL):(\d+)", listed.stdout))
