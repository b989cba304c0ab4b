"""On which nodes: whole jobs, gangs and data workers. Pure functions over NumPy arrays; nothing here knows Slurm.

nodes.py          what nodes have free, as arrays; what a job asks of one node
fragments.py      how much of a node's free GPUs typical jobs could not use
choices.py        the placements of whole jobs by name
fgd.py, best_fit.py, dot_product.py, random_fit.py
                  one each
gang.py           a job of several GPUs: one node if any fits, else the fewest
data_workers.py   data workers: the trainer's node first, then where least other traffic is, within a network budget
moves.py          whether a remote data worker should move
"""
