"""Slurm: `slurm.py` is the client, `fake.py` its stand-in, `model.py` what both say of a cluster.

`run.py` runs commands and judges failures, `read.py` takes snapshots with the parsers beside it.
"""
