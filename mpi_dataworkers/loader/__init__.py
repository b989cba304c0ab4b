"""The loader: what the training program iterates. See `data_loader.py`; `unmodified.py` serves torch's own class."""

from hetstream.mpi_dataworkers.loader.data_loader import DataLoader
from hetstream.mpi_dataworkers.loader.mixing import mix

__all__ = ["DataLoader", "mix"]
