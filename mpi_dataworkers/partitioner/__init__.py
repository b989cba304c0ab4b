"""Finds the part of a training program's forward that depends on no state, and moves it to the data workers.

`partition.py` is what a program calls. `capture.py` gets the graph of a forward, and `first_graph.py` that of its
beginning where there is none of the whole. `describe.py` says in plain words what each operator does, `classify.py`
which of them may move and `cut.py` which of them do; `split.py` makes the two sides. `provenance.py` proves for each
batch that the forward got the loader's own tensors.
"""
