"""`hetstream internal gpu-emulate`: an emulated GPU."""

from __future__ import annotations

import argparse
import contextlib
import os
from pathlib import Path

from hetstream.base.errors import UsageError
from hetstream.hetjob.gpu.emulated_file import PREFIX, EmulatedGpuFile, resolved

_MIB = 2**20
# Numbers of bytes have 64 bits.
_MOST = 2**40


def add_gpu_emulate_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the action."""
    parser.description = (
        "Make a file that stands for a GPU. Programs that share it compute on one core, and count tensors "
        "against its memory. Speeds on it say nothing about a real GPU."
    )
    parser.add_argument("file", metavar="FILE", help="to be made; the GPU's name is emulation:FILE")
    parser.add_argument("--memory-mib", type=int, default=1024, metavar="N", help="its memory (default 1024)")
    parser.add_argument(
        "--segment-kib", type=int, default=2048, metavar="N", help="what memory comes in (default 2048)"
    )
    parser.add_argument(
        "--core", type=int, metavar="N", help="where its kernels run (default: the last of this process)"
    )
    parser.add_argument(
        "--bus-mib-per-s", type=int, default=1024, metavar="N", help="speed of memory of the host (default 1024)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Make it."""
    sizes = (args.memory_mib, args.segment_kib, args.bus_mib_per_s)
    if min(sizes) <= 0 or max(sizes) > _MOST:
        raise UsageError(f"--memory-mib, --segment-kib and --bus-mib-per-s are from 1 to {_MOST}")
    cores = os.sched_getaffinity(0)
    core = max(cores) if args.core is None else args.core
    if core not in cores:
        raise UsageError(f"--core {core}: this process may run on {sorted(cores)}")
    try:
        EmulatedGpuFile.create(
            Path(args.file),
            capacity_bytes=args.memory_mib * _MIB,
            core=core,
            segment_bytes=args.segment_kib * 1024,
            bus_bytes_per_s=args.bus_mib_per_s * _MIB,
        )
    except FileExistsError:
        raise UsageError(f"{args.file} is there, and is not overwritten. {_what_is_there(args.file)}") from None
    except OSError as error:
        raise UsageError(
            f"{args.file} cannot be made: {error.strerror}. Name a file in a directory of yours"
        ) from error
    print(f"emulated GPU: {resolved(PREFIX + args.file)}")
    return 0


def _what_is_there(path: str) -> str:
    """What a file is that stands where an emulated GPU was to be made, and what to do."""
    try:
        with contextlib.closing(EmulatedGpuFile(path)) as gpu:
            users = ", ".join(map(str, gpu.held()))
            used = f"processes {users} use" if users else "nobody uses now"
            return f"It is an emulated GPU of {gpu.capacity_bytes // _MIB} MiB that {used}: take it, or remove it first"
    except (OSError, ValueError):
        return "It is no emulated GPU: give another name"
