"""Which programs one data worker process can serve, one after the other or at once. Pure.

Used by the dispatcher, which leases a process steps of one program only, and by the data worker, which refuses others.
"""

from __future__ import annotations

import msgspec

from mpi_dataworkers.messages import Program


def serves(loaded: Program, wanted: Program) -> bool:
    """Whether a process that works for one program can work for another: they are alike but for modules to load."""
    return (
        loaded.working_dir == wanted.working_dir
        and loaded.sys_path == wanted.sys_path
        and all(loaded.modules.get(name, digest) == digest for name, digest in wanted.modules.items())
    )


def joined(loaded: Program, wanted: Program) -> Program:
    """The program of a process that has loaded the modules of both."""
    return msgspec.structs.replace(loaded, modules={**loaded.modules, **wanted.modules})
