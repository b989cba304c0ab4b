"""Feature graphs of recommendation models in what a trainer's GPU has left over, after RAP (Wang et al., ASPLOS 2024).

`operations.py` says what the operators of a graph cost, `schedule.py` which of them run beside which layer of a model
and what that exposes; `search.py` finds such a schedule, in the paper's way and in ours. `launches.py` says which GPU
computes which feature. `fused.py` computes a graph on a GPU with one kernel, which `kernel.py` has. `corun.py`
does so beside the layers of a model, as a plan of `launches.py` says, and `capacity.py` measures what the layers leave.
"""
