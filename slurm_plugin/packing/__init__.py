"""The packer: puts opportunistic jobs onto GPUs that are in use, through Slurm alone.

`decide.py` is pure: `state.py` and the time in, placements, evictions and everybody's reason out. The simulator calls
it, too. `observe.py` makes the state of what Slurm and the nodes say, and `packer.py` carries decisions out.
"""
