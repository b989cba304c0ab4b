"""On which nodes: whole jobs, gangs and data workers. Pure functions over NumPy arrays; nothing here knows Slurm.

`placement.py` says what nodes have free and where a whole job goes, by several placements with names; of a job with
several GPUs one node if any fits, else the fewest. `data_workers.py` has data workers: the trainer's node first, then
where least other traffic is, within a network budget.
"""
