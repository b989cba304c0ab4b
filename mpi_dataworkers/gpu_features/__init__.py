"""Feature graphs of recommendation models in what a trainer's GPU has left over, after RAP (Wang et al., ASPLOS 2024).

`plans.py` makes the paper's plans. `operations.py` says what the operators of a graph cost, `schedule.py` which of them
run beside which layer of the model and what that exposes; `search.py` is the paper's way to such a schedule and
`search.py` ours. `launches.py` says which GPU of several computes which feature. `predictor.py` learns what a kernel
takes from measurements. `fused.py` computes a graph on a GPU with one kernel, which `kernel.py` has. `corun.py` does so
beside the layers of a model, as a plan of `launches.py` says, and `capacity.py` measures what the layers leave.
"""
