"""The data side of hetstream: order, dispatcher, data workers, transports, loader.

The name is historical: MPI is one of several transports on which batches travel (`transports/`).
"""

from __future__ import annotations

if __name__ != "hetstream.mpi_dataworkers":
    # From the root of a checkout it would be a second copy, whose classes are not those of hetstream.
    raise ImportError(f"no module of this name is hetstream's: import hetstream.mpi_dataworkers instead of {__name__}")
