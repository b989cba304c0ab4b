"""The cluster side of hetstream: Slurm commands, the throw-away cluster, and the command line.

This package is the only one that runs Slurm's programs. It imports `hetjob` and `mpi_dataworkers`; nothing imports it.
"""
