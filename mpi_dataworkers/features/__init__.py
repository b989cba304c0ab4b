"""Feature graphs of recommendation models: what becomes of raw columns before they reach the model, batch by batch.

`graph.py` is what a user writes, `operators.py` what the eleven operators mean; neither needs torch. `transform.py`
runs a graph on batches and is given to a loader.
"""
