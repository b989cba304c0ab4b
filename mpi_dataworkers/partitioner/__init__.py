"""Finds the part of a training program's forward that depends on no state, and moves it to the data workers.

`partition.py` is what a program calls. `capture.py` has torch.compile trace a forward and says what each operator does;
`unguarded_constants.py` looks at what that takes for constant. `analysis.py` says which operators may move, `cut.py`
which of them do; `split.py` makes the two sides. In each step `forward.py` takes what data workers have computed if the
forward gets the very bytes that they computed from, which `leaves.py` keeps.
"""
