"""The node's coordinator of shared GPUs: which of a GPU's jobs may launch, and how much of its memory each may hold.

`decide.py` is pure: state, measurements and the time in, orders with reasons out. `server.py` carries it out: it admits
jobs (`admission.py`), reads their statistics and writes their orders. It runs as an ordinary user, ends no process and
changes no GPU: a job that does not keep to its orders is reported, to be taken away by Slurm.
"""
