"""Datasets over files: `sources.hdf5` (HDF5), `sources.images` (image folders); `sources.transforms` augments images.

Each module needs a library of its own (an extra of the distribution), so this package imports none of them: write
`from hetstream.mpi_dataworkers.sources.hdf5 import Hdf5Dataset`. The classes are map-style datasets by protocol
(`__len__`, `__getitem__`, `__getitems__`), return numpy arrays and Python scalars, and never import torch: torch's own
DataLoader takes them as they are, and a data worker that serves them need not load torch for their sake.
"""
