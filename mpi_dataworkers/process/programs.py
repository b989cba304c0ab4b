"""Which programs a data worker process can serve: one after the other, at once, or not at all. Pure.

Used by the dispatcher, which leases a process steps of one program only, and by the data worker, which refuses others.
"""

from __future__ import annotations

import functools

import msgspec

from hetstream.mpi_dataworkers.wire.messages import Interpreter, Program

# On a loader class that was patched. Of torch's it has, by class, what torch's iterators were before: programs and
# libraries change them for their own loaders, and those of hetstream (`PlainLoader`) are to be torch's.
MARK = "_hetstream_stands_in"


def serves(loaded: Program, wanted: Program) -> bool:
    """Return whether a process that works for one program can work for another: they are alike but for modules
    to load.
    """
    return (
        loaded.working_dir == wanted.working_dir
        and loaded.sys_path == wanted.sys_path
        and all(loaded.modules.get(name, digest) == digest for name, digest in wanted.modules.items())
    )


def joined(loaded: Program, wanted: Program) -> Program:
    """Return the program of a process that has loaded the modules of both."""
    return msgspec.structs.replace(loaded, modules={**loaded.modules, **wanted.modules})


@functools.lru_cache(maxsize=1024)  # asked for each lease
def why_unfit(worker: Interpreter, trainer: Interpreter) -> str:
    """Return why a data worker of one Python cannot make the batches of a program of another; "" if it can.

    Pickled code is for one minor version of Python, and random numbers are those of one release of torch.
    """
    pairs = (
        ("Python", _minor(worker.python), _minor(trainer.python)),
        ("torch", _release(worker.torch), _release(trainer.torch)),
        ("hetstream", worker.hetstream, trainer.hetstream),
    )
    different = [name for name, here, there in pairs if here and there and here != there]
    return f"another {' and '.join(different)}" if different else ""


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _release(version: str) -> str:
    """Without the build, which is another where there is no GPU (`2.13.0+cpu`)."""
    return version.partition("+")[0]
