"""How messages and batches travel. `base.py` is the seam, `zmq.py` the implementation over TCP."""
