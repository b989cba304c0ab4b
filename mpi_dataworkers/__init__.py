"""The data side of hetstream: order, dispatcher, data workers, transports, loader.

The name is historical: MPI is one of several rails on which batches travel (`transports/`). Importing this package
imports neither torch nor zmq; `DataLoader` brings them when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hetstream.mpi_dataworkers.visitation import ShardingPolicy, Visitation

if TYPE_CHECKING:
    from hetstream.mpi_dataworkers.data_state import merge_states
    from hetstream.mpi_dataworkers.generators import numpy_sample_generator, sample_generator
    from hetstream.mpi_dataworkers.loader import DataLoader, mix

__all__ = [
    "DataLoader",
    "ShardingPolicy",
    "Visitation",
    "merge_states",
    "mix",
    "numpy_sample_generator",
    "sample_generator",
]


def __getattr__(name: str) -> Any:
    if name == "DataLoader":
        from hetstream.mpi_dataworkers.loader import DataLoader

        return DataLoader
    if name == "mix":
        from hetstream.mpi_dataworkers.loader import mix

        return mix
    if name == "merge_states":
        from hetstream.mpi_dataworkers.data_state import merge_states

        return merge_states
    if name in ("numpy_sample_generator", "sample_generator"):
        from hetstream.mpi_dataworkers import generators

        return getattr(generators, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
