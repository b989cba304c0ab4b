"""Who gets the data workers: pure functions over arrays, one policy a file, the same in the daemon and the simulator.

`table.py` is what a policy is told and what it answers, `policies.py` has the policies by name. `filling.py`
is what policies are made of. The other files are rules that hold under any policy: each makes a policy of
a policy. Nothing here knows Slurm, a clock or a file.
"""
