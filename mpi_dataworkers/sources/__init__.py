"""Datasets over files: `sources.hdf5`, `sources.images` (folders), `sources.parquet` and `sources.csv` (rows).

`sources.transforms` augments images. Most modules need a library of their own (an extra of the distribution), so this
package imports none of them: write `from hetstream.mpi_dataworkers.sources.hdf5 import Hdf5Dataset`. The classes are
map-style datasets by protocol (`__len__`, `__getitem__`, `__getitems__`), return numpy arrays and Python scalars (those
of rows a mapping of them), and never import torch: torch's own DataLoader takes them as they are, and a data worker
that serves them need not load torch for their sake.
"""
