"""The data side of hetstream: order, dispatcher, data workers, transports, loader.

The name is historical: batches travel over ZeroMQ, and `transports/` is the seam where others fit in. Importing this
package imports neither torch nor zmq; `DataLoader` brings them when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpi_dataworkers.loader import DataLoader

__all__ = ["DataLoader"]


def __getattr__(name: str) -> Any:
    if name == "DataLoader":
        from mpi_dataworkers.loader import DataLoader

        return DataLoader
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
